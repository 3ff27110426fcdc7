//! Finds and removes what a former kube-proxy has left in the kernel, in all its modes.
//!
//! When kube-proxy's image is swapped for ours, its rules stay: they go on leading to the endpoints of that time,
//! and to whoever gets their addresses next. [`names`] knows what is kube-proxy's, [`plan`] decides; [`nft`] reads and
//! writes nf_tables, where the rules of all modes are on most nodes, [`legacy`] has those of iptables-legacy, and [`ipvs`]
//! what mode ipvs has beside rules.
//!
//! Everything is done in the network namespace of the calling thread.

mod ipvs;
mod legacy;
pub mod names;
mod nft;
pub mod plan;

use ipnet::IpNet;
use serde::Serialize;

use self::plan::{Plan, RetainReason};
use crate::sys::CallError;

/// Decides how much is removed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Purpose {
    /// Another proxy serves now. What kube-proxy's rules do for established connections stays.
    TakeOver,
    /// Everything goes, as with `kube-proxy --cleanup`.
    Cleanup,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(
        "{program}-legacy has rules of kube-proxy, and the tools that can remove them, {program}-legacy-save and \
         -restore, are not on PATH: call `kube-proxy --cleanup` of kube-proxy's own image on the node"
    )]
    NoLegacyTools { program: &'static str },
    #[error("looking for it has failed")]
    NotLooked,
    #[error("{program}: {problem}")]
    Tool { program: String, problem: String },
}

impl Error {
    fn refused(errno: i32) -> Self {
        Self::Call(CallError::new("netlink batch of nf_tables", std::io::Error::from_raw_os_error(errno)))
    }
}

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum PartKind {
    /// Rules in chains of others.
    Jumps,
    Chains,
    /// With everything in them.
    Tables,
    VirtualServers,
    IpSets,
    Devices,
}

impl PartKind {
    /// Of several.
    pub fn name(self) -> &'static str {
        self.names().1
    }

    const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Jumps => ("jump", "jumps"),
            Self::Chains => ("chain", "chains"),
            Self::Tables => ("table", "tables"),
            Self::VirtualServers => ("virtual server", "virtual servers"),
            Self::IpSets => ("set", "sets"),
            Self::Devices => ("device", "devices"),
        }
    }
}

/// Things of one kind in one place.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Part {
    /// `nftables ip nat`
    pub place: String,
    pub what: PartKind,
    pub count: usize,
}

impl Part {
    fn new(place: String, what: PartKind, count: usize) -> Self {
        Self { place, what, count }
    }
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (one, several) = self.what.names();
        write!(f, "{} {} in {}", self.count, if self.count == 1 { one } else { several }, self.place)
    }
}

/// Something of kube-proxy that stays, because somebody else relies on it.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Retained {
    pub place: String,
    pub name: String,
    pub why: String,
}

impl Retained {
    fn new(place: String, name: String, why: String) -> Self {
        Self { place, name, why }
    }
}

#[derive(Clone, Debug, Eq, PartialEq)]
enum Selection<T> {
    All,
    Only(Vec<T>),
}

impl<T> Selection<T> {
    fn is_empty(&self) -> bool {
        matches!(self, Self::Only(these) if these.is_empty())
    }
}

impl<T> Default for Selection<T> {
    fn default() -> Self {
        Self::Only(Vec::new())
    }
}

/// What is to be removed: everything at first, then what failed or waits. Nothing by default.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct PendingRemoval {
    servers: Selection<ipvs::PendingServer>,
    nft: bool,
    legacy: Vec<legacy::LegacyTable>,
    sets: Selection<String>,
    device: bool,
}

impl PendingRemoval {
    pub fn everything() -> Self {
        Self {
            servers: Selection::All,
            nft: true,
            legacy: legacy::tables().collect(),
            sets: Selection::All,
            device: true,
        }
    }

    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn has_rules(&self) -> bool {
        self.nft || !self.legacy.is_empty()
    }
}

/// What was done.
#[derive(Debug, Default)]
pub struct Removal {
    pub parts: Vec<Part>,
    pub retained: Vec<Retained>,
    /// Places where no holder could be made: connections that the rules there have translated end, unless somebody else's
    /// rules translate too.
    pub without_holder: Vec<String>,
    /// Virtual servers that have connections still, and take no new ones: to be removed later.
    pub waiting: usize,
    pub problems: Vec<Error>,
    /// What is to be tried again.
    pub pending: PendingRemoval,
}

impl Removal {
    fn part(&mut self, place: String, what: PartKind, count: usize) {
        if count > 0 {
            self.parts.push(Part::new(place, what, count));
        }
    }

    /// Adds what a plan has done.
    fn plan<R>(&mut self, place: &str, plan: Plan<R>) {
        self.part(place.to_owned(), PartKind::Jumps, plan.rules.len());
        self.part(place.to_owned(), PartKind::Chains, plan.deleted.len());
        let stays =
            |(chain, why): (String, RetainReason)| Retained::new(place.to_owned(), chain, why.to_string());
        self.retained.extend(plan.retained.into_iter().map(stays));
    }

    fn note(&mut self, done: Result<(), Error>) {
        done.unwrap_or_else(|error| add_once(&mut self.problems, error));
    }
}

/// The same reason may hold in several places.
fn add_once(problems: &mut Vec<Error>, error: Error) {
    let text = error.to_string();
    if problems.iter().all(|known| known.to_string() != text) {
        problems.push(error);
    }
}

/// What is there; nothing is changed.
#[derive(Debug, Default)]
pub struct Found {
    pub parts: Vec<Part>,
    pub problems: Vec<Error>,
}

impl Found {
    /// Nobody has looked.
    pub fn unknown() -> Self {
        Self { parts: Vec::new(), problems: vec![Error::NotLooked] }
    }

    pub fn count(&self) -> usize {
        self.parts.iter().map(|part| part.count).sum()
    }

    fn note(&mut self, found: Result<Vec<Part>, Error>) {
        match found {
            Ok(parts) => self.parts.extend(parts),
            Err(error) => add_once(&mut self.problems, error),
        }
    }
}

/// Remembers between two calls what takes long to read.
#[derive(Debug, Default)]
pub struct Leftovers {
    legacy: legacy::ChainCounts,
}

impl Leftovers {
    /// `keeps`: networks whose virtual servers are not kube-proxy's (`ipvs.excludeCIDRs`).
    pub fn find(&mut self, keeps: &[IpNet]) -> Found {
        let mut found = Found::default();
        found.note(nft::find());
        self.legacy.find(&mut found);
        ipvs::find(keeps, &mut found);
        found
    }

    /// Removes what can be removed of `pending`: a problem in one place keeps nothing elsewhere. `keeps`: as for
    /// [`Self::find`].
    pub fn remove(&mut self, purpose: Purpose, keeps: &[IpNet], pending: &PendingRemoval) -> Removal {
        let mut removed = Removal::default();
        ipvs::remove_servers(purpose, keeps, &pending.servers, &mut removed);
        if pending.nft {
            let rules = nft::remove(purpose, &mut removed);
            removed.pending.nft = rules.is_err();
            removed.note(rules);
        }
        self.legacy.remove(purpose, &pending.legacy, &mut removed);
        ipvs::remove_sets(&pending.sets, &mut removed);
        if pending.device {
            ipvs::remove_device(keeps, &mut removed);
        }
        removed
    }
}

/// Once; as [`Leftovers::find`].
pub fn find(keeps: &[IpNet]) -> Found {
    Leftovers::default().find(keeps)
}

/// Once; as [`Leftovers::remove`].
pub fn remove(purpose: Purpose, keeps: &[IpNet], pending: &PendingRemoval) -> Removal {
    Leftovers::default().remove(purpose, keeps, pending)
}
