//! What a former kube-proxy has left in the kernel, found and removed, in all its modes.
//!
//! Whoever swaps kube-proxy's image for ours leaves its rules behind: they go on leading to the endpoints of that time,
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

use self::plan::{Plan, Why};
use crate::sys::CallError;

/// How much is removed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Extent {
    /// What somebody else serves now. What else kube-proxy's rules do for connections that are under way stays.
    Served,
    /// Everything, as `kube-proxy --cleanup` does.
    Everything,
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
    #[error("the look for it has failed")]
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
pub enum What {
    /// Rules in chains of others.
    Jumps,
    Chains,
    /// With everything in them.
    Tables,
    VirtualServers,
    IpSets,
    Devices,
}

impl What {
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
    pub what: What,
    pub count: usize,
}

impl Part {
    fn new(place: String, what: What, count: usize) -> Self {
        Self { place, what, count }
    }
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (one, several) = self.what.names();
        write!(f, "{} {} in {}", self.count, if self.count == 1 { one } else { several }, self.place)
    }
}

/// Something of kube-proxy that somebody else relies on.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Kept {
    pub place: String,
    pub name: String,
    pub why: String,
}

impl Kept {
    fn new(place: String, name: String, why: String) -> Self {
        Self { place, name, why }
    }
}

#[derive(Clone, Debug, Eq, PartialEq)]
enum Scope<T> {
    All,
    Only(Vec<T>),
}

impl<T> Scope<T> {
    fn is_empty(&self) -> bool {
        matches!(self, Self::Only(these) if these.is_empty())
    }
}

impl<T> Default for Scope<T> {
    fn default() -> Self {
        Self::Only(Vec::new())
    }
}

/// What is to be removed: everything at first, then what failed or waits. Nothing by default.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Owed {
    servers: Scope<ipvs::Remaining>,
    nft: bool,
    legacy: Vec<legacy::Place>,
    sets: Scope<String>,
    device: bool,
}

impl Owed {
    pub fn everything() -> Self {
        Self {
            servers: Scope::All,
            nft: true,
            legacy: legacy::places().collect(),
            sets: Scope::All,
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
pub struct Removed {
    pub parts: Vec<Part>,
    pub kept: Vec<Kept>,
    /// Places where nothing could be left that has the kernel go on translating: connections that the rules there have
    /// translated end, unless somebody else's rules translate too.
    pub not_held: Vec<String>,
    /// Virtual servers that have connections still, and take no new ones: to be removed later.
    pub waiting: usize,
    pub problems: Vec<Error>,
    /// What is to be tried again.
    pub owed: Owed,
}

impl Removed {
    fn part(&mut self, place: String, what: What, count: usize) {
        if count > 0 {
            self.parts.push(Part::new(place, what, count));
        }
    }

    /// What a plan, once it was carried out, has done.
    fn plan<R>(&mut self, place: &str, plan: Plan<R>) {
        self.part(place.to_owned(), What::Jumps, plan.rules.len());
        self.part(place.to_owned(), What::Chains, plan.deleted.len());
        let stays = |(chain, why): (String, Why)| Kept::new(place.to_owned(), chain, why.to_string());
        self.kept.extend(plan.kept.into_iter().map(stays));
    }

    fn note(&mut self, done: Result<(), Error>) {
        done.unwrap_or_else(|error| tell_once(&mut self.problems, error));
    }
}

/// The same reason may hold in several places.
fn tell_once(problems: &mut Vec<Error>, error: Error) {
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
            Err(error) => tell_once(&mut self.problems, error),
        }
    }
}

/// For whoever finds and removes again and again: remembers what takes long to look at.
#[derive(Debug, Default)]
pub struct Leftovers {
    legacy: legacy::Seen,
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

    /// Removes what can be removed of `owed`: a problem in one place keeps nothing elsewhere. `keeps`: as for
    /// [`Self::find`].
    pub fn remove(&mut self, extent: Extent, keeps: &[IpNet], owed: &Owed) -> Removed {
        let mut removed = Removed::default();
        ipvs::remove_servers(extent, keeps, &owed.servers, &mut removed);
        if owed.nft {
            let rules = nft::remove(extent, &mut removed);
            removed.owed.nft = rules.is_err();
            removed.note(rules);
        }
        self.legacy.remove(extent, &owed.legacy, &mut removed);
        ipvs::remove_sets(&owed.sets, &mut removed);
        if owed.device {
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
pub fn remove(extent: Extent, keeps: &[IpNet], owed: &Owed) -> Removed {
    Leftovers::default().remove(extent, keeps, owed)
}
