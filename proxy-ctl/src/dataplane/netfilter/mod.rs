//! What the modes that stand on netfilter (nftables, iptables, ipvs, and the rules of userspace) share. Pure, but for `chains`.

pub(super) mod chains;
mod hash;
pub(super) mod metrics;
mod policy;
pub(super) mod requirements;

use crate::{model::objects::IpFamily, sys::nftables::TableFamily};

pub use hash::hash;
pub use policy::{ClientPolicy, EndpointSet, Masquerade, Outcome, PortPolicy};

impl From<IpFamily> for TableFamily {
    fn from(family: IpFamily) -> Self {
        match family {
            IpFamily::Ipv4 => Self::Ipv4,
            IpFamily::Ipv6 => Self::Ipv6,
        }
    }
}
