//! The eBPF mode, which writes the desired state into maps that kernel programs read.
//!
//! [`EbpfDataplane`] ties these modules together:
//!
//! - [`maps`] opens the maps and restores their pins.
//! - [`services`] computes what the maps must hold, and writes it in an order that leaves no hole.
//! - [`hooks`] puts the programs where packets and system calls pass.
//! - [`connections`] ends what has expired, and whatever refers to backends that are gone.
//!
//! [`view`] and [`cleanup`] work on the pins alone, with the controller down. The files beside them
//! have what the mode does as a whole: it opens, follows the node, grows, repairs and drains.

use std::{collections::BTreeMap, sync::Arc};

use self::{
    connections::{netfilter::NetfilterConnections, tend::Connections},
    flow_maps::FlowMapResize,
    hooks::{attach::Hooks, lease::LeaseRenewal},
    left_to_node::LeftToNode,
    maps::pinned::PinnedMaps,
    node::NodeState,
    open::provide_cgroup2,
    services::sync::Services,
    view::status::{Pinned, Reader},
};
use super::{
    Applied, Dataplane, HookProblems, MetricFamily, PacketMode, PacketPrograms, Programmed, Snapshot,
    UnservedField, Usage,
    entry::{Entry, TrackedFlows},
};
use crate::{
    config::Ebpf,
    model::{
        desired::{Changes, DesiredPort, ServicePortName},
        node::Host,
    },
    sys::proc::machine::Machine,
};

pub mod cleanup;
mod connections;
mod drain;
mod enlarge;
mod error;
mod flow_maps;
mod growth;
pub mod hooks;
mod left_to_node;
mod maps;
mod node;
mod open;
pub(super) mod probe;
mod repair;
mod services;
mod unserved;
mod upkeep;
pub mod view;

#[cfg(test)]
pub(crate) use self::view::metrics::sample_metrics;
pub use self::{
    error::{Difference, Error},
    hooks::load::{OBJECT, OBJECT_BUILT_WITH},
};

/// The maps and hooks of this node. Dropping it leaves all of them in place.
#[derive(Debug)]
pub struct EbpfDataplane {
    services: Services,
    hooks: Hooks,
    connections: Connections,
    netfilter: NetfilterConnections,
    node: NodeState,
    config: Ebpf,
    /// These have the lock, so they are dropped after what uses the maps.
    maps: PinnedMaps,
    flow_maps: FlowMapResize,
    lease: LeaseRenewal,
    /// The number of calls of [`Dataplane::collect_garbage`] so far. Some work is done only once in
    /// several calls.
    collections: u32,
    /// True while the mode drains.
    is_draining: bool,
}

pub(super) const ENTRY: Entry = Entry {
    tracked_flows: TrackedFlows::Former,
    drains: true,
    keeps_min_sync_period: false,
    reads_service_cidrs: |config| services::addresses::service_cidrs::are_read(&config.ebpf),
    delegates: true,
    can_be_secondary: false,
    probe: |config, host| probe::probe(&config.ebpf, host),
    prepare: |config| {
        maps::paths::provide_bpffs(&config.ebpf.bpffs)?;
        provide_cgroup2()?;
        Ok(())
    },
    open: |config| {
        let ebpf = maps::sizes::sized(config, machine());
        Ok(Box::new(LeftToNode::new(Box::new(EbpfDataplane::open(&ebpf)?))))
    },
    read: |bpffs| match Pinned::open(bpffs) {
        Ok(pinned) => Ok(Some(Box::new(pinned))),
        Err(error) if error.is_not_there() => Ok(None),
        Err(error) if error.is_missing_maps() && view::status::controller(bpffs).is_some() => Ok(None),
        Err(error) => Err(error.into()),
    },
    controller: view::status::controller,
    cleanup: |bpffs, _| Ok(cleanup::cleanup(bpffs)?),
};

/// Label of the failures to copy what former flow maps have.
const FORMER_FLOWS: &str = "former flow maps";

impl EbpfDataplane {
    /// Attaches to interfaces by clsact filters, as before Linux 6.6, even if this kernel has tcx.
    #[must_use]
    pub fn without_tcx(mut self) -> Self {
        self.hooks.without_tcx();
        self
    }

    /// Lets maps that could not grow try it again at once, without the rest of a minute.
    pub fn stop_growth_rest(&mut self) {
        self.maps.end_rest();
    }
}

impl Programmed for EbpfDataplane {
    fn snapshot(&self) -> Result<Snapshot, super::Error> {
        let (v4, v6) = (&self.services.v4.maps, &self.services.v6.maps);
        Ok(Reader { common: &self.services.shared.maps, v4, v6, paths: &self.maps.paths }.snapshot()?)
    }

    fn usage(&self) -> Result<Usage, super::Error> {
        self.read_usage()
    }

    fn metrics(&self) -> Result<Vec<MetricFamily>, super::Error> {
        self.read_metrics()
    }
}

impl Dataplane for EbpfDataplane {
    fn apply(&mut self, changes: &Changes) -> Result<Applied, super::Error> {
        self.write_changes(changes)
    }

    fn resync(&mut self, desired: &[Arc<DesiredPort>]) -> Result<Applied, super::Error> {
        self.write_desired(desired)
    }

    fn set_host(&mut self, host: &Host) -> Result<Applied, super::Error> {
        self.follow_node(host)
    }

    fn collect_garbage(&mut self) -> Result<(), super::Error> {
        self.keep_up()
    }

    fn drain(&mut self) -> Result<bool, super::Error> {
        self.continue_draining()
    }

    fn unserved_fields(&self, port: &DesiredPort) -> Vec<UnservedField> {
        unserved::unserved_fields(port, self.config.sockets(), self.services.shared.forwarding)
    }

    fn take_waiting(&mut self) -> Option<BTreeMap<ServicePortName, Vec<UnservedField>>> {
        let v4 = std::mem::take(&mut self.services.v4.entries.without_room.changed);
        let v6 = std::mem::take(&mut self.services.v6.entries.without_room.changed);
        (v4 || v6).then(|| {
            self.services.v4.without_room().into_iter().chain(self.services.v6.without_room()).collect()
        })
    }

    fn packet_mode(&mut self) -> Option<&mut dyn PacketMode> {
        Some(self)
    }
}

impl PacketMode for EbpfDataplane {
    fn attach(&mut self) -> Result<(), super::Error> {
        if !std::mem::take(&mut self.node.attaches_later) {
            return Ok(());
        }
        Ok(self.take_packets().into_result()?)
    }

    fn renew_lease(&mut self) -> Result<(), super::Error> {
        Ok(self.keep_lease()?)
    }

    fn share_frontends(&mut self, are_shared: bool) -> Result<(), super::Error> {
        Ok(self.follow_sharing(are_shared)?)
    }

    fn packet_programs(&mut self) -> PacketPrograms {
        PacketPrograms {
            are_lacking: self.hooks.lacks_programs(),
            come_later: self.node.attaches_later,
            fit_nowhere: self.hooks.attached_nowhere(),
        }
    }

    fn hook_problems(&mut self) -> HookProblems {
        HookProblems {
            without_xdp: self.hooks.refusals().clone(),
            unattached: self.hooks.unattached(),
            filling: self.connections.filling.maps().clone(),
        }
    }

    /// Limits inspections to half a percent of a core. Repairs may come late, because nobody else
    /// writes these maps.
    fn inspection_share(&mut self) -> u32 {
        200
    }
}

/// Returns the size of the machine, or `None` if the kernel does not report it.
fn machine() -> Option<Machine> {
    Machine::read()
        .inspect_err(|error| tracing::warn!(%error, "the size of the machine is not known, so flow maps have the sizes for a small one"))
        .ok()
}
