//! What the modes that stand on netfilter (nftables, iptables, ipvs) share. Pure.

mod policy;

pub use policy::{ClientPolicy, EndpointSet, Masquerade, Outcome, PortPolicy};
