//! What each mode gives to [`modes`](super::modes).

use std::path::Path;

use ipnet::IpNet;

use super::{Dataplane, Error, Programmed};
use crate::{
    config::Config,
    mode::{HostFacts, Probe},
};

pub(super) type BoxedProgrammed = Box<dyn Programmed>;

/// UDP flows that the kernel's connection tracking translates for a mode.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum TrackedFlows {
    /// None that others do not take care of.
    None,
    /// Those that rules of a former proxy have opened, as long as there are any.
    Former,
    All,
}

/// What is done with a mode where there is no dataplane of it.
pub(super) struct Entry {
    /// Which UDP flows of its Services connection tracking translates.
    pub(super) tracked_flows: TrackedFlows,
    /// Its connections would end with it: it is removed only when it has none. What others have programmed has kube-proxy's names.
    pub(super) retires: bool,
    /// It drops what is sent to addresses of these ranges that no Service has.
    pub(super) reads_service_cidrs: fn(&Config) -> bool,
    /// Another mode serves beside it what it cannot.
    pub(super) hands_over: bool,
    /// It may serve beside another mode.
    pub(super) serves_beside: bool,
    /// Changes nothing.
    pub(super) probe: fn(&Config, &HostFacts) -> Probe,
    /// Does what needs all privileges, for [`Entry::open`] in another process.
    pub(super) prepare: fn(&Config) -> Result<(), Error>,
    pub(super) open: fn(&Config) -> Result<Box<dyn Dataplane>, Error>,
    /// `None`: nothing is programmed, or not all tables are there yet.
    pub(super) read: fn(bpffs: &Path) -> Result<Option<BoxedProgrammed>, Error>,
    pub(super) controller: fn(bpffs: &Path) -> Option<u32>,
    /// Only what this proxy has made. `keeps`: `ipvs.excludeCIDRs`.
    pub(super) cleanup: fn(bpffs: &Path, keeps: &[IpNet]) -> Result<Removed, Error>,
}

/// What was removed, in the order in which it was.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Removed {
    /// Names of links: `cgroup_connect4`, `3_ingress`.
    pub links: Vec<String>,
    /// Number of filters on clsact qdiscs.
    pub filters: usize,
    /// Names of tables.
    pub tables: Vec<String>,
}

impl Removed {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}
