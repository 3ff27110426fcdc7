//! The modes, which program the node. Each mode is a folder behind one trait. Modes are opened,
//! read and cleaned up by name in one place (`registry`).
//!
//! A dataplane is used from one thread. Its calls block on system calls and are short.

use std::{collections::BTreeMap, sync::Arc};

mod conntrack;
pub mod ebpf;
mod entry;
mod error;
pub mod iptables;
mod ipvs;
mod metrics;
mod mode_lock;
pub mod netfilter;
pub mod nftables;
mod port_set;
mod registry;
mod secondary;
mod snapshot;
mod source_ports;
mod traffic;
mod unserved;
mod userspace;

pub use entry::Removed;
pub use error::{Error, ErrorKind};
pub use metrics::{Labels, MetricFamily, ServiceUsage};
pub use registry::{
    Modes, cleanup, controller, load, masquerade_ports, min_interval, open, open_to_drain, prepare, probe,
    read, read_mode, reads_service_cidrs, remove_drained, to_drain, translates_in_connect, unused_fields,
};
pub use snapshot::{
    BackendSnapshot, EndpointSnapshot, FrontendSnapshot, Hook, NodeSnapshot, OtherProgram, ServiceSnapshot,
    Snapshot,
};
pub use traffic::{EventQuery, EventSnapshot, EventStream, FlowQuery, FlowSnapshot, FlowState};
pub use unserved::{Effect, UnservedField, refused, servable};

use serde::Serialize;

use crate::model::{
    desired::{Changes, DesiredPort, ServicePortName},
    node::Host,
};

/// Reads what is programmed on the node, by a controller that runs or has ended.
pub trait Programmed {
    fn snapshot(&self) -> Result<Snapshot, Error>;

    /// Returns how full and how large the maps are, and the counters by reason.
    fn usage(&self) -> Result<Usage, Error>;

    /// Returns the connections that the mode itself keeps. `None` means that the kernel or the
    /// mode's process keeps them.
    fn flows(&self, _query: &FlowQuery<'_>) -> Result<Option<Vec<FlowSnapshot>>, Error> {
        Ok(None)
    }

    /// Begins to report what becomes of new connections. Returns `None` if the mode does not see
    /// them.
    fn watch(&self, _query: EventQuery) -> Result<Option<Box<dyn EventStream>>, Error> {
        Ok(None)
    }

    /// Returns the metric families of this mode, each with its samples as they are now. They count
    /// from the controller's start, so that there are none without a controller.
    fn metrics(&self) -> Result<Vec<MetricFamily>, Error> {
        Ok(Vec::new())
    }
}

/// Writes what is programmed. These are the methods that every mode has. Whoever wraps a dataplane
/// forwards all of them.
pub trait Dataplane: Programmed + Send {
    /// Writes what has changed. After an error the dataplane serves the old or the new state of
    /// each service port, and the caller tries again with [`Dataplane::resync`].
    fn apply(&mut self, changes: &Changes) -> Result<Applied, Error>;

    /// Makes the node serve exactly `desired`: writes what differs from what is programmed, and
    /// removes the rest.
    fn resync(&mut self, desired: &[Arc<DesiredPort>]) -> Result<Applied, Error>;

    /// Takes over the node's own addresses and interfaces. It is called before the first `resync`,
    /// and when they change.
    fn set_host(&mut self, host: &Host) -> Result<Applied, Error>;

    /// Removes what is no longer used, such as expired flows and interfaces that are gone, and
    /// serves what this makes room for. It is called about once a second after the first `resync`.
    fn collect_garbage(&mut self) -> Result<(), Error>;

    /// Drains, because another mode is active: serves no new connections, and goes on with those
    /// that it has. From then on it is called about once a second, and nothing else is called.
    /// Returns true if no connection would end with this dataplane.
    fn drain(&mut self) -> Result<bool, Error> {
        Ok(true)
    }

    /// Invalidates what is known of the kernel's state. The next [`Dataplane::resync`] compares it
    /// with the kernel.
    fn invalidate(&mut self, _known: Known) {}

    /// Returns the fields of the service port that this mode does not serve as asked. If there are
    /// none, the port is served as its Service asks.
    fn unserved_fields(&self, port: &DesiredPort) -> Vec<UnservedField>;

    /// Returns all service ports that cannot be served yet, whole or in part, with the fields that
    /// ask for it. There is no room for them, nothing can listen on them, or the kernel refuses
    /// them. They are served as soon as that is over. `None` means that nothing has changed since
    /// the last call.
    fn take_waiting(&mut self) -> Option<BTreeMap<ServicePortName, Vec<UnservedField>>> {
        None
    }

    /// Returns the mode's packet programs. `None` means that netfilter or the process serves.
    fn packet_mode(&mut self) -> Option<&mut dyn PacketMode> {
        None
    }
}

/// The methods that a mode with packet programs has beyond the others. A secondary mode may serve
/// what the programs cannot.
pub trait PacketMode {
    /// Attaches programs to interfaces, if the last `set_host` has left that for later. A kernel
    /// needs 20 ms for a hook, and nobody has to wait for hundreds of them. It is called after each
    /// `set_host`, and the first time after the first `resync`.
    fn attach(&mut self) -> Result<(), Error>;

    /// Says that a controller runs. It is called about once a second before the first `resync`.
    /// Later, [`Dataplane::collect_garbage`] does the same.
    fn renew_lease(&mut self) -> Result<(), Error>;

    /// Tells this mode whether another mode serves all of its frontends too, for pods without
    /// packet programs. The caller passes true before the other mode begins, and false after it has
    /// ended.
    fn share_frontends(&mut self, are_shared: bool) -> Result<(), Error>;

    /// Returns the state of the packet programs of interfaces. [`Self::hook_problems`] has the
    /// details.
    fn packet_programs(&mut self) -> PacketPrograms;

    /// Returns what keeps programs from interfaces. It is no failure of a call, because everything
    /// else is programmed.
    fn hook_problems(&mut self) -> HookProblems;

    /// Returns the shortest pause between two inspections, as a multiple of the time that an
    /// inspection takes. At 0 only the sync period counts. During the pause, changes by other
    /// programs are not found.
    fn inspection_share(&mut self) -> u32;
}

/// A part of what a dataplane knows of the kernel's state.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Known {
    /// Everything, as another mode may have changed what is there.
    Everything,
    /// The rules of the secondary mode. Another dataplane adopts them, so the mode is released too.
    /// The next write opens it again.
    OfSecondaryMode,
}

/// Problems that are reported to operators while the dataplane serves: interfaces that lack
/// programs, and maps that are nearly full.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct HookProblems {
    /// Reasons why uplinks have no XDP program, by interface index. It is empty if all have one, or
    /// none is to have one.
    pub without_xdp: BTreeMap<u32, String>,
    /// Reasons why packet programs cannot be attached to workload interfaces, by interface index.
    pub unattached: BTreeMap<u32, String>,
    /// Flow maps that are three quarters full, each with its capacity.
    pub filling: BTreeMap<&'static str, u64>,
}

/// State of the packet programs of interfaces.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct PacketPrograms {
    /// True if some pods have none, for good or for some seconds, and perhaps no socket hooks
    /// either. The secondary mode should serve them.
    pub are_lacking: bool,
    /// True if no interface has any before the next [`PacketMode::attach`].
    pub come_later: bool,
    /// The reason why no workload interface takes any. `None` means that some interface has them,
    /// or that there are too few interfaces to judge by.
    pub fit_nowhere: Option<String>,
}

/// Numbers of things that a call has written and removed: map entries, rules or the like.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Applied {
    pub written: u64,
    pub removed: u64,
}

impl std::ops::AddAssign for Applied {
    fn add_assign(&mut self, other: Self) {
        self.written += other.written;
        self.removed += other.removed;
    }
}

/// State of a dataplane in numbers.
#[derive(Clone, Debug, Default)]
pub struct Usage {
    /// The maps of mode ebpf. A netfilter mode has its tables here, or the lists in them.
    pub maps: Vec<MapUsage>,
    /// Counts of decisions since the maps were created.
    pub reasons: Vec<ReasonUsage>,
}

/// Number of packets or calls that met one decision.
#[derive(Clone, Debug, Serialize)]
pub struct ReasonUsage {
    #[serde(rename = "reason")]
    pub name: &'static str,
    /// Verdict on them: `pass`, `refuse` or `drop`.
    #[serde(skip)]
    pub verdict: &'static str,
    pub count: u64,
}

/// How full a map is, or how much a netfilter mode has written.
#[derive(Clone, Debug, Serialize)]
pub struct MapUsage {
    pub name: &'static str,
    pub used: u64,
    /// Largest number of entries, or 0 if there is none.
    pub capacity: u64,
    /// True if new entries are refused or evict others when all of `capacity` is used.
    #[serde(skip)]
    pub can_fill_up: bool,
    pub bytes: u64,
}

/// Returns a sample of each metric family of each mode.
#[cfg(test)]
pub(crate) fn sample_metrics() -> Vec<MetricFamily> {
    [
        ebpf::sample_metrics(),
        iptables::sample_metrics(),
        nftables::sample_metrics(),
        userspace::sample_metrics(),
        conntrack::sample_metrics(),
    ]
    .concat()
}
