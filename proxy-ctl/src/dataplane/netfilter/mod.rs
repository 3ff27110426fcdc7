//! What the modes that stand on netfilter (nftables, iptables, ipvs) share. Pure.

mod hash;
pub(super) mod metrics;
mod policy;
pub(super) mod requirements;

pub use hash::hash;
pub use policy::{ClientPolicy, EndpointSet, Masquerade, Outcome, PortPolicy};
