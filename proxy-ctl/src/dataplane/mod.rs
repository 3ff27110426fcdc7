//! A mode programs the node: one folder each behind one trait, opened, read and cleaned by name in one place.
//!
//! A dataplane is used from one thread; calls block on system calls and are short.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

mod conntrack;
pub mod ebpf;
mod entry;
mod error;
mod hand_over;
mod host;
pub mod iptables;
mod ipvs;
mod metrics;
mod mode_lock;
mod modes;
pub mod netfilter;
pub mod nftables;
mod own_rules;
mod port_set;
pub mod redirect;
mod snapshot;
mod source_ports;
mod supports;
mod traffic;
mod userspace;
pub mod xdp;

pub use entry::Removed;
pub use error::{Error, ErrorKind};
pub use host::{Device, Host, Interface, LocalTraffic, NodeNetwork, Role, RoleReason, Vlan};
pub use metrics::{Labels, MetricFamily, ServiceUsage};
pub use modes::{
    Modes, cleanup, controller, load, masquerade_ports, open, open_to_retire, prepare, probe, read,
    read_mode, reads_service_cidrs, remove_retired, to_retire, translates_in_connect, unused_fields,
};
pub use snapshot::{
    BackendSnapshot, EndpointSnapshot, FrontendSnapshot, Hook, NodeSnapshot, OtherProgram, ServiceSnapshot,
    Snapshot,
};
pub use supports::{Effect, Unsupported, refused, servable};
pub use traffic::{EventQuery, EventSnapshot, EventStream, FlowQuery, FlowSnapshot, FlowState};

use serde::Serialize;

use crate::model::desired::{Changes, DesiredPort, ServicePortName};

/// What is programmed on the node, by a controller that runs or has ended.
pub trait Programmed {
    fn snapshot(&self) -> Result<Snapshot, Error>;

    /// How full and how large the tables are, and the counters by reason.
    fn usage(&self) -> Result<Usage, Error>;

    /// Connections that the mode itself keeps; `None`: the kernel does, or its process.
    fn flows(&self, _query: &FlowQuery<'_>) -> Result<Option<Vec<FlowSnapshot>>, Error> {
        Ok(None)
    }

    /// Begins to tell what becomes of new connections; `None`: the mode does not see them.
    fn watch(&self, _query: EventQuery) -> Result<Option<Box<dyn EventStream>>, Error> {
        Ok(None)
    }
}

/// What every mode can do.
pub trait Dataplane: Programmed + Send {
    /// Returns the dataplane that this one wraps, which does what this one does not do by itself.
    fn inner(&self) -> Option<&dyn Dataplane> {
        None
    }

    /// Does what [`inner`](Self::inner) does.
    fn inner_mut(&mut self) -> Option<&mut dyn Dataplane> {
        None
    }

    /// Writes what changed. After an error the dataplane serves the old or the new state of each service
    /// port, and the caller tries again with [`Dataplane::resync`].
    fn apply(&mut self, changes: &Changes) -> Result<Applied, Error>;

    /// Makes the node serve exactly `desired`: writes what differs from what is programmed, removes the rest.
    fn resync(&mut self, desired: &[Arc<DesiredPort>]) -> Result<Applied, Error>;

    /// Takes over the node's own addresses and interfaces. Called before the first `resync`, and on change.
    fn set_host(&mut self, host: &Host) -> Result<Applied, Error>;

    /// Takes the packets of interfaces, where the last `set_host` has left that for later: a kernel needs 20 ms for a hook, and nobody has to
    /// wait for hundreds of them. Called after each `set_host`, and the first time after the first `resync`.
    fn attach(&mut self) -> Result<(), Error> {
        self.inner_mut().map_or(Ok(()), |inner| inner.attach())
    }

    /// Says that there is a controller, where the mode needs to know. Called about once a second before the first `resync`; later
    /// [`Dataplane::collect_garbage`] does so.
    fn renew_lease(&mut self) -> Result<(), Error> {
        self.inner_mut().map_or(Ok(()), |inner| inner.renew_lease())
    }

    /// Removes what is no longer used (expired flows, interfaces that are gone), and serves what this makes room for.
    /// Called about once a second.
    fn collect_garbage(&mut self) -> Result<(), Error>;

    /// Another mode is at work: serves no new connections, and goes on with those that it has. To be called about once a second
    /// from then on, and nothing else. True: it has none that would end with it.
    fn retire(&mut self) -> Result<bool, Error> {
        self.inner_mut().map_or(Ok(true), |inner| inner.retire())
    }

    /// Another mode may have changed what is there: the next [`Dataplane::resync`] compares with what the kernel has.
    fn doubt(&mut self) {
        if let Some(inner) = self.inner_mut() {
            inner.doubt();
        }
    }

    /// Says whether another mode serves all frontends of this one beside it, for pods without packet
    /// programs. It is said before the other mode begins, and after it has ended.
    fn share_frontends(&mut self, are_shared: bool) -> Result<(), Error> {
        self.inner_mut().map_or(Ok(()), |inner| inner.share_frontends(are_shared))
    }

    /// Lets go of the mode that serves beside this one, for another dataplane to adopt what it has written. The next write opens it
    /// again.
    fn release_beside(&mut self) {
        if let Some(inner) = self.inner_mut() {
            inner.release_beside();
        }
    }

    /// The families of this mode, each with its samples as they are now.
    fn metrics(&self) -> Result<Vec<MetricFamily>, Error>;

    /// Shortest interval between two calls of [`Dataplane::apply`]. `configured`: the mode's `minSyncPeriod`.
    fn min_interval(&self, configured: Duration) -> Duration;

    /// Between two inspections passes this many times the duration of the first at least; 0: the sync period alone counts. What other
    /// programs change is found so much later.
    fn inspection_share(&self) -> u32 {
        self.inner().map_or(0, |inner| inner.inspection_share())
    }

    /// What this mode does not honour of the service port; empty: it is served as its Service asks.
    fn supports(&self, port: &DesiredPort) -> Vec<Unsupported>;

    /// All service ports that there is no room for, whole or in part, that nothing can listen on, or that the kernel refuses, with the fields that
    /// ask for it; `None`: as at the last call. They are served as soon as that is over.
    fn take_without_room(&mut self) -> Option<BTreeMap<ServicePortName, Vec<Unsupported>>> {
        self.inner_mut()?.take_without_room()
    }

    /// Returns how far interfaces have packet programs. [`Self::hook_problems`] tells it at length.
    fn packet_programs(&self) -> PacketPrograms {
        self.inner().map(|inner| inner.packet_programs()).unwrap_or_default()
    }

    /// Returns what keeps programs from interfaces. It is no failure of a call: everything else is
    /// programmed.
    fn hook_problems(&self) -> HookProblems {
        self.inner().map(|inner| inner.hook_problems()).unwrap_or_default()
    }
}

/// Names what operators are told of while the dataplane serves: why interfaces lack programs, by
/// their index, and tables that are nearly full.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct HookProblems {
    /// Uplinks that have no XDP program. Empty: all have one, or none is to have one.
    pub without_xdp: BTreeMap<u32, String>,
    /// Interfaces of workloads that packet programs cannot be attached to.
    pub unattached: BTreeMap<u32, String>,
    /// Tables of flows that are three quarters full, each with its rows.
    pub filling: BTreeMap<&'static str, u64>,
}

/// Says how far interfaces have packet programs.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct PacketPrograms {
    /// Some pods have none, for good or for some seconds, and perhaps no socket hooks either:
    /// another mode should serve them beside this one.
    pub are_lacking: bool,
    /// No interface has any before the next [`Dataplane::attach`].
    pub come_later: bool,
    /// The reason why no interface of a workload takes any. `None`: some interface has them, or too
    /// few interfaces are there to tell.
    pub fit_nowhere: Option<String>,
}

/// What a call has written: table entries, rules or the like.
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
    pub tables: Vec<TableUsage>,
    /// Decisions since the tables were created.
    pub reasons: Vec<ReasonUsage>,
}

/// How often packets or calls met one decision.
#[derive(Clone, Debug, Serialize)]
pub struct ReasonUsage {
    #[serde(rename = "reason")]
    pub name: &'static str,
    /// What becomes of them: `pass`, `refuse` or `drop`.
    #[serde(skip)]
    pub verdict: &'static str,
    pub count: u64,
}

#[derive(Clone, Debug, Serialize)]
pub struct TableUsage {
    pub name: &'static str,
    pub used: u64,
    /// 0: it has no size of its own.
    pub capacity: u64,
    /// New entries are refused or evict others when all of `capacity` is used.
    #[serde(skip)]
    pub can_fill_up: bool,
    pub bytes: u64,
}

/// A sample of each family of each mode.
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
