//! The node: its capabilities, and its addresses and interfaces, which are followed by netlink.

pub mod facts;
mod interfaces;
pub mod modprobe;
mod netlink;
mod own_node;
mod primary;
mod state;

pub use self::{
    interfaces::{Ignored, LinkFacts, LinkKind, Master, role},
    netlink::{Error, network, watch},
    own_node::OwnNode,
    primary::{NodeIps, host_addresses},
};
