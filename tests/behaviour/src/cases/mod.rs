//! The scenarios, and their order.

mod affinity;
mod balance;
mod changes;
mod datagrams;
mod direct;
mod flood;
mod fragments;
mod frontends;
mod networks;
mod node_listener;
mod plugin;
mod sctp;
mod sockets;
mod surface;

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
    frontends::cluster_ip::CASES
        .iter()
        .chain(frontends::node_port::CASES)
        .chain(fragments::CASES)
        .chain(frontends::policy::CASES)
        .chain(sockets::CASES)
        .chain(surface::CASES)
        .chain(frontends::health_check::CASES)
        .chain(changes::change::CASES)
        .chain(datagrams::CASES)
        .chain(affinity::CASES)
        .chain(balance::CASES)
        .chain(direct::CASES)
        .chain(flood::CASES)
        .chain(sctp::CASES)
        .chain(changes::moves::CASES)
        .chain(frontends::source_ranges::CASES)
        .chain(frontends::unserved::CASES)
        .chain(node_listener::CASES)
        .chain(plugin::CASES)
        .chain(networks::CASES)
        .chain(changes::restart::CASES)
        .chain(changes::start::CASES)
}

/// Skips scenarios with thousands of UDP flows to one endpoint by two addresses in mode ipvs. See
/// docs/differences.md.
fn skip_confused_flows(world: &World, variant: Variant) -> Result<()> {
    if world.setting.datapath() == Datapath::Ipvs && variant.protocol == Protocol::Udp {
        bail!(Skip("of thousands of UDP flows, IPVS takes answers of some for those of others".into()));
    }
    Ok(())
}
