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

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use proxy_common::{
    family::{V4, V6},
    flow::FlowLifetimes,
};

use self::{
    connections::{
        affinity::AffinityCollector,
        counting::ConnectionCount,
        expire::Collector,
        moved_ports::MovedPorts,
        netfilter_ports::{KeepPorts, ListRest},
        stale_sockets::StaleSockets,
    },
    flow_maps::{FlowMaps, HELD_FOR},
    growth::{Growth, Larger, load_beside},
    hooks::{attach::Hooks, lease::LeaseRenewal, program_log::KernelLog},
    left_to_node::LeftToNode,
    maps::{
        filling::Filling,
        paths::Paths,
        pins::TablePins,
        tables::{CommonTables, FamilyTables, Shape},
    },
    open::provide_cgroup2,
    services::{
        addresses::service_cidrs::ServiceCidrs,
        writer::{Common, Failures, FamilyWriter},
    },
    view::status::{Pinned, Reader},
};
use super::{
    Applied, Dataplane, HookProblems, MetricFamily, PacketMode, PacketPrograms, Programmed, Snapshot,
    Unsupported, Usage,
    entry::{Entry, TrackedFlows},
};
use crate::{
    config::Ebpf,
    model::{
        desired::{Changes, DesiredPort, ServicePortName},
        node::{Host, Interface},
    },
    sys::proc::{clock, machine::Machine},
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
mod supports;
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
    shared: Common,
    v4: FamilyWriter<V4>,
    v6: FamilyWriter<V6>,
    flows4: Collector<V4>,
    flows6: Collector<V6>,
    moved_ports: MovedPorts,
    affinity: AffinityCollector,
    flow_lifetimes: FlowLifetimes,
    /// The node's interfaces as of the last `set_host`.
    interfaces: Vec<Interface>,
    /// True if CNI's bandwidth plugin was seen on the node.
    is_beside_plugin: bool,
    /// True if [`PacketMode::attach`] attaches to interfaces, because nothing is attached there yet.
    ///
    /// Programs of a predecessor are replaced in `set_host` instead, because they must not meet
    /// what this version writes.
    attaches_later: bool,
    hooks: Hooks,
    host_namespace: u64,
    shapes: Vec<Shape>,
    config: Ebpf,
    bpffs: PathBuf,
    paths: Paths,
    pins: TablePins,
    log: KernelLog,
    lease: LeaseRenewal,
    /// The number of calls of [`Dataplane::collect_garbage`] so far. Some work is done only once in
    /// several calls.
    collections: u32,
    /// True while the mode drains.
    retiring: bool,
    flow_maps: FlowMaps,
    growth: Growth,
    /// True if all hooks run programs of the maps in use.
    is_swapped: bool,
    keep_ports: KeepPorts,
    /// The pause after the last list of
    /// [`keep_netfilter_ports`](EbpfDataplane::keep_netfilter_ports).
    list_rest: ListRest,
    /// True if the ends of all connections that netfilter translates are reserved, and the
    /// connections were listed after the last moment at which it may have taken one.
    are_netfilters_kept: bool,
    /// The number of garbage collections since that moment.
    since_netfilter: u32,
    /// True if another mode serves all frontends too, for pods without packet programs.
    are_frontends_shared: bool,
    stale_sockets: StaleSockets,
    service_cidrs: ServiceCidrs,
    /// The counts of connections. `None` if no service port uses least connection.
    connections: Option<ConnectionCount>,
    /// The maps of flows that are nearly full.
    filling: Filling,
    /// True if the desired state is known. Before, a predecessor's service ports are served.
    is_synced: bool,
}

pub(super) const ENTRY: Entry = Entry {
    tracked_flows: TrackedFlows::Former,
    retires: true,
    keeps_min_sync_period: false,
    reads_service_cidrs: |config| services::addresses::service_cidrs::are_read(&config.ebpf),
    hands_over: true,
    serves_beside: false,
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
        Err(error) if error.is_missing_tables() && view::status::controller(bpffs).is_some() => Ok(None),
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
        self.growth = Growth::default();
    }

    /// Returns half of the entries that the maps of established flows have room for. These may have
    /// another size than the configuration says.
    fn most_unproven_entries(&self) -> u32 {
        self.v4.tables.flows.map().capacity().min(self.v6.tables.flows.map().capacity()) / 2
    }

    /// Renews the lease if it is time for that. If it has ended before, packets have passed, and
    /// rules of others may have opened connections.
    fn keep_lease(&mut self) -> Result<(), Error> {
        if self.lease.has_lapsed(&self.shared.tables.lease)? {
            tracing::warn!(
                "the lease of ebpf.withdrawAfter had ended, so that nothing was served; it is renewed now"
            );
            self.keep_netfilter_ports();
        }
        self.lease.renew(&self.shared.tables.lease)
    }

    /// Uses the maps that are pinned now, and the programs that were loaded with them.
    fn use_maps(&mut self, made: Larger, failures: &mut Failures) -> Result<(), Error> {
        let Larger { shapes, programs, log } = made;
        let maps = self.paths.maps();
        let (common, v4, v6) = (
            CommonTables::open(&maps, true)?,
            FamilyTables::open(&maps, true)?,
            FamilyTables::open(&maps, true)?,
        );
        self.pins.hold_again(&self.paths, &shapes)?;
        self.shared.ids.grow(common.services.len() as u32);
        self.v4.entries.slots.grow(v4.slots.len() as u32);
        self.v6.entries.slots.grow(v6.slots.len() as u32);
        (self.shared.tables, self.v4.tables, self.v6.tables) = (common, v4, v6);
        (self.shapes, self.log) = (shapes, log);
        self.stale_sockets.tables_have_grown();
        let unswapped = self.hooks.mend(programs, &[]);
        self.is_swapped = unswapped.is_empty() || !self.hooks.may_run_former();
        failures.merge(unswapped);
        Ok(())
    }

    /// Gives the flow maps the size of the configuration, once everything is served, and finishes
    /// what this process or its predecessor has begun of that.
    fn follow_flow_limits(&mut self, failures: &mut Failures) {
        let is_taken_over = self.keep_ports == KeepPorts::Done && !self.attaches_later;
        // A hook where the last attempt has failed may run programs that cannot be held.
        let is_held = self.is_swapped && !self.hooks.have_failed();
        let is_due = self.is_synced && is_taken_over && is_held && self.flow_maps.are_finished();
        if self.flow_maps.is_change_wanted() && is_due && !self.retiring {
            if let Err(error) = self.resize_flow_maps(failures) {
                tracing::warn!(%error, "the flow maps keep their size until the next start");
            }
            if let Err(error) = self.hooks.let_open() {
                failures.add("flows that may open again", error);
            }
        }
        failures.see(FORMER_FLOWS, self.finish_flow_maps());
    }

    fn resize_flow_maps(&mut self, failures: &mut Failures) -> Result<(), Error> {
        let shapes = self.flow_maps.take_wanted(&self.paths, &self.shapes)?;
        if shapes == self.shapes {
            return Ok(());
        }
        self.restore_pins()?;
        maps::resize::remove_larger(&self.paths)?;
        let replaced = load_beside(&self.paths, &self.shapes, &shapes, &self.config, &self.hooks)
            .and_then(|(programs, log)| self.replace_flow_maps(Larger { shapes, programs, log }, failures));
        if replaced.is_err() {
            // The former maps stay in use, so they are pinned again.
            self.pins.restore(&self.bpffs, &self.paths)?;
            self.flow_maps.give_up(&self.paths)?;
        }
        replaced
    }

    /// Copies the flow maps, and swaps all programs. No flow of TCP opens until the caller lets it.
    fn replace_flow_maps(&mut self, made: Larger, failures: &mut Failures) -> Result<(), Error> {
        self.write_settings(|settings| settings.answers_unknown = 0)?;
        let held_from = clock::since_boot();
        self.hooks.hold_openings(HELD_FOR)?;
        // A program may have begun to open a flow before.
        self.shared.grace.wait().map_err(Error::Grace)?;
        FlowMaps::copy_to_larger(&self.paths, &self.shapes, &made.shapes)?;
        failures.see("lease", self.keep_lease());
        // The swap has the same time again, if no flow was opened since the copy began.
        self.hooks.hold_openings(HELD_FOR)?;
        made.programs.hold_openings(HELD_FOR)?;
        let took = Duration::from_nanos(clock::since_boot().saturating_sub(held_from));
        if took >= HELD_FOR {
            return Err(Error::SlowCopy { took, most: HELD_FOR });
        }
        self.flow_maps.replace(&self.paths, &self.shapes, &made.shapes)?;
        self.use_maps(made, failures)?;
        let most_unproven_entries = self.most_unproven_entries();
        let written = self.write_settings(|settings| settings.most_unproven_entries = most_unproven_entries);
        failures.see("settings", written.map(drop));
        Ok(())
    }

    /// Copies what is left in the former flow maps, if no program uses them any more.
    fn finish_flow_maps(&mut self) -> Result<(), Error> {
        if self.flow_maps.are_finished() || !self.is_swapped {
            return Ok(());
        }
        self.shared.grace.wait().map_err(Error::Grace)?;
        self.flow_maps.finish(&self.paths)?;
        // Former programs may have compared flows of this epoch with former maps.
        self.shared.is_epoch_over = true;
        // Walks through the former maps do not go on in the new ones.
        (self.flows4, self.flows6) = Default::default();
        let ([first, second], [third, fourth]) = (self.flows4.walks(), self.flows6.walks());
        self.moved_ports.begin([first, second, third, fourth]);
        Ok(())
    }
}

impl Programmed for EbpfDataplane {
    fn snapshot(&self) -> Result<Snapshot, super::Error> {
        let (v4, v6) = (&self.v4.tables, &self.v6.tables);
        Ok(Reader { common: &self.shared.tables, v4, v6, paths: &self.paths }.snapshot()?)
    }

    fn usage(&self) -> Result<Usage, super::Error> {
        self.read_usage()
    }

    fn metrics(&self) -> Result<Vec<MetricFamily>, super::Error> {
        let v4 = self.v4.entries.services.iter().map(|(name, published)| (published.id, name));
        let v6 = self.v6.entries.services.iter().map(|(name, published)| (published.id, name));
        let (services, uncounted) = view::status::service_usage(&self.shared.tables, v4.chain(v6))?;
        let ended = self.stale_sockets.ended();
        let mut families =
            view::metrics::families(&self.usage()?, &services, uncounted, ended, self.affinity.evicted());
        families.push(view::metrics::unattached_interfaces(self.hooks.unattached_count()));
        Ok(families)
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

    fn retire(&mut self) -> Result<bool, super::Error> {
        self.drain()
    }

    fn supports(&self, port: &DesiredPort) -> Vec<Unsupported> {
        supports::supports(port, self.config.sockets(), self.shared.forwarding)
    }

    fn take_without_room(&mut self) -> Option<BTreeMap<ServicePortName, Vec<Unsupported>>> {
        let v4 = std::mem::take(&mut self.v4.entries.without_room.changed);
        let v6 = std::mem::take(&mut self.v6.entries.without_room.changed);
        (v4 || v6).then(|| self.v4.without_room().into_iter().chain(self.v6.without_room()).collect())
    }

    fn packet_mode(&mut self) -> Option<&mut dyn PacketMode> {
        Some(self)
    }
}

impl PacketMode for EbpfDataplane {
    fn attach(&mut self) -> Result<(), super::Error> {
        if !std::mem::take(&mut self.attaches_later) {
            return Ok(());
        }
        Ok(self.take_packets().into_result()?)
    }

    fn renew_lease(&mut self) -> Result<(), super::Error> {
        Ok(self.keep_lease()?)
    }

    fn share_frontends(&mut self, are_shared: bool) -> Result<(), super::Error> {
        if std::mem::replace(&mut self.are_frontends_shared, are_shared) == are_shared {
            return Ok(());
        }
        if !are_shared {
            // The other mode may have opened connections up to the last moment.
            self.keep_netfilter_ports();
        }
        Ok(self.follow_circumstances()?)
    }

    fn packet_programs(&mut self) -> PacketPrograms {
        PacketPrograms {
            are_lacking: self.lacks_programs(),
            come_later: self.attaches_later,
            fit_nowhere: self.hooks.attached_nowhere(),
        }
    }

    fn hook_problems(&mut self) -> HookProblems {
        HookProblems {
            without_xdp: self.hooks.refusals().clone(),
            unattached: self.hooks.unattached(),
            filling: self.filling.tables().clone(),
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
