//! The scenarios, and their order.

mod affinity;
mod balance;
mod change;
mod cluster_ip;
mod datagrams;
mod direct;
mod flood;
mod fragments;
mod health_check;
mod moves;
mod networks;
mod node_listener;
mod node_port;
mod plugin;
mod policy;
mod restart;
mod sctp;
mod sockets;
mod source_ranges;
mod start;
mod surface;
mod unserved;

use anyhow::{Result, bail};
use lab::Protocol;
use scenario::Skip;

use crate::{
    case::{Case, Variant},
    setting::Datapath,
    world::World,
};

/// Returns every scenario, the quick and read-only ones first.
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
        .chain(moves::CASES)
        .chain(source_ranges::CASES)
        .chain(unserved::CASES)
        .chain(node_listener::CASES)
        .chain(plugin::CASES)
        .chain(networks::CASES)
        .chain(restart::CASES)
        .chain(start::CASES)
}

/// Skips scenarios with thousands of UDP flows to one endpoint by two addresses in mode ipvs. See
/// docs/differences.md.
fn skip_confused_flows(world: &World, variant: Variant) -> Result<()> {
    if world.setting.datapath() == Datapath::Ipvs && variant.protocol == Protocol::Udp {
        bail!(Skip("of thousands of UDP flows, IPVS takes answers of some for those of others".into()));
    }
    Ok(())
}
