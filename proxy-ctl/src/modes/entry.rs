//! The entry that each mode gives to the [`registry`](super::registry).

use std::path::Path;

use ipnet::IpNet;

use super::{Dataplane, Error, Programmed};
use crate::{
    config::Config,
    model::mode::{HostFacts, Probe},
};

pub(super) type BoxedProgrammed = Box<dyn Programmed>;

/// UDP flows that the kernel's connection tracking translates for a mode.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum TrackedFlows {
    /// No flows, or only flows that other code takes care of.
    None,
    /// Flows that the rules of a former proxy have opened. They are followed until netfilter
    /// translates none.
    Former,
    All,
}

/// The operations of a mode that work while no dataplane of it is open.
pub(super) struct Entry {
    /// The UDP flows of its Services that connection tracking translates.
    pub(super) tracked_flows: TrackedFlows,
    /// True if connections of the mode would end with it. It is then removed only when it has none.
    /// False for modes that the cleanup removes by the names of their rules.
    pub(super) drains: bool,
    /// True if changes are written no more often than the mode's `minSyncPeriod` says. It is false
    /// where a change costs only what it writes.
    pub(super) keeps_min_sync_period: bool,
    /// Returns true if the mode drops what is sent to addresses of the service CIDRs that no
    /// Service has.
    pub(super) reads_service_cidrs: fn(&Config) -> bool,
    /// True if a secondary mode serves what this mode cannot.
    pub(super) delegates: bool,
    /// True if the mode may be the secondary mode.
    pub(super) can_be_secondary: bool,
    /// Returns what the mode needs and what is missing. It changes nothing.
    pub(super) probe: fn(&Config, &HostFacts) -> Probe,
    /// Does the part of [`Entry::open`] that needs all privileges. Another process may call `open`
    /// later.
    pub(super) prepare: fn(&Config) -> Result<(), Error>,
    pub(super) open: fn(&Config) -> Result<Box<dyn Dataplane>, Error>,
    /// Reads what is programmed. `None`: nothing is programmed, or a part of it is not there yet.
    pub(super) read: fn(bpffs: &Path) -> Result<Option<BoxedProgrammed>, Error>,
    pub(super) controller: fn(bpffs: &Path) -> Option<u32>,
    /// Removes what proxy-ctl has made, and nothing else. `keeps` is `ipvs.excludeCIDRs`.
    pub(super) cleanup: fn(bpffs: &Path, keeps: &[IpNet]) -> Result<Removed, Error>,
}

/// The things that a cleanup has removed, in the order of their removal.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Removed {
    /// Names of links: `cgroup_connect4`, `3_ingress`.
    pub links: Vec<String>,
    /// Number of filters on clsact qdiscs.
    pub filters: usize,
    /// Names of BPF maps, of tables, and of other objects that hold rules.
    pub objects: Vec<String>,
}

impl Removed {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}
