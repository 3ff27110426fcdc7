//! The table.

mod affinity;
mod balance;
mod change;
mod cluster_ip;
mod datagrams;
mod direct;
mod flood;
mod fragments;
mod health_check;
mod networks;
mod node_port;
mod plugin;
mod policy;
mod restart;
mod sctp;
mod sockets;
mod source_ranges;
mod surface;
mod unserved;

use crate::case::Case;

/// Every scenario, the quick and read-only ones first.
pub fn all() -> impl Iterator<Item = &'static Case> {
    cluster_ip::CASES
        .iter()
        .chain(node_port::CASES)
        .chain(fragments::CASES)
        .chain(policy::CASES)
        .chain(sockets::CASES)
        .chain(surface::CASES)
        .chain(health_check::CASES)
        .chain(change::CASES)
        .chain(datagrams::CASES)
        .chain(affinity::CASES)
        .chain(balance::CASES)
        .chain(direct::CASES)
        .chain(flood::CASES)
        .chain(sctp::CASES)
        .chain(source_ranges::CASES)
        .chain(unserved::CASES)
        .chain(plugin::CASES)
        .chain(networks::CASES)
        .chain(restart::CASES)
}
