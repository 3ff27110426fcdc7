//! The node's own addresses and interfaces, followed by netlink.

mod interfaces;
mod netlink;
mod primary;
mod state;

pub use self::{
    interfaces::{Ignored, Kind, LinkFacts, Master, role},
    netlink::{Error, watch},
    primary::{NodeIps, host_addresses},
};
