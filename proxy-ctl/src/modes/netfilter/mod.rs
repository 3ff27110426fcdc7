//! The modules that the modes on netfilter share: nftables, iptables, ipvs, and the rules of
//! userspace. They are pure, but for `chains`, `health_checks` and `own_rules`.

pub(super) mod chains;
mod hash;
pub(super) mod health_checks;
pub(super) mod metrics;
pub(super) mod own_rules;
mod policy;
pub(super) mod requirements;
pub(super) mod rule_text;

use crate::{model::objects::IpFamily, sys::nftables::TableFamily};

pub use hash::hash;
pub use health_checks::{AcceptedHealthChecks, HealthCheckError};
pub use policy::{ClientPolicy, EndpointSet, Masquerade, Outcome, PortPolicy};

impl From<IpFamily> for TableFamily {
    fn from(family: IpFamily) -> Self {
        match family {
            IpFamily::Ipv4 => Self::Ipv4,
            IpFamily::Ipv6 => Self::Ipv6,
        }
    }
}
