//! Cleanup of a former kube-proxy: finds and removes what it has left in the kernel, in all its
//! modes.
//!
//! When this proxy replaces kube-proxy, kube-proxy's rules stay. They translate to endpoints that
//! may be gone, and whose addresses other pods may get.
//!
//! [`names`](crate::names) lists what is kube-proxy's, and [`plan`] decides what is removed.
//! [`nft`] reads and writes nf_tables, which has the rules of all modes on most nodes. [`legacy`]
//! does the same for iptables-legacy, and [`ipvs`] for the virtual servers, sets and the device of
//! mode ipvs.
//!
//! Everything is done in the network namespace of the calling thread.

mod counters;
mod from_ipvs;
mod health_checks;
mod in_use;
mod ipvs;
mod legacy;
mod let_go;
mod nft;
mod owner_tag;
pub mod plan;
mod remains;

use ipnet::IpNet;
use serde::Serialize;

use self::{
    in_use::InUse,
    owner_tag::{OwnNatTables, OwnerTags},
    plan::{Plan, RetainReason},
};
use crate::{
    model::mode::Mode,
    names::{self, Scope},
    sys::{CallError, nftables::TableFamily, proc::lock::Holder, xtables::ToolError},
};

pub use self::{
    from_ipvs::own_sockets::deprecate_addresses,
    health_checks::{FilterTable, accepted_by_kube_proxy, accepted_by_proxy_ctl, is_any_mode_in_use},
    owner_tag::{has_owner_tag, is_overwritten},
    remains::Remains,
};

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Purpose {
    /// This proxy serves instead of kube-proxy. Established connections that kube-proxy's rules
    /// translate go on.
    TakeOver,
    /// Removes everything, as `kube-proxy --cleanup` does.
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
    #[error("the search for kube-proxy's rules did not finish; the log has the error")]
    NotLooked,
    #[error("{holder} runs in mode {mode}: its rules stay; end it first")]
    InUse { mode: Mode, holder: Holder },
    #[error(
        "a kube-proxy in mode {other} has made its chains but not written them yet, so proxy-ctl's rules of \
         mode {mode} stay; call cleanup again once it has, or, if no kube-proxy runs, cleanup --kube-proxy"
    )]
    Begun { mode: Mode, other: Mode },
    #[error("locking mode {mode}: {source}")]
    Lock { mode: Mode, source: std::io::Error },
    #[error(transparent)]
    Tool(#[from] ToolError),
}

impl Error {
    fn refused(errno: i32) -> Self {
        Self::Call(CallError::new("netlink batch of nf_tables", std::io::Error::from_raw_os_error(errno)))
    }
}

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum PartKind {
    /// Rules that jump to kube-proxy's chains from chains that are not kube-proxy's.
    Jumps,
    Chains,
    /// Whole tables.
    Tables,
    VirtualServers,
    IpSets,
    Devices,
    PacketCounters,
}

impl PartKind {
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
            Self::PacketCounters => ("packet counter", "packet counters"),
        }
    }
}

/// A number of objects of one kind at one location: in a table, in IPVS or in ipset.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Part {
    /// The location, such as `nftables ip nat`.
    pub location: String,
    pub what: PartKind,
    pub count: usize,
}

impl Part {
    fn new(location: String, what: PartKind, count: usize) -> Self {
        Self { location, what, count }
    }
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (one, several) = self.what.names();
        write!(f, "{} {} in {}", self.count, if self.count == 1 { one } else { several }, self.location)
    }
}

/// An object of kube-proxy's that is not removed, because another program uses it.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Retained {
    pub location: String,
    pub name: String,
    pub reason: String,
}

impl Retained {
    fn new(location: String, name: String, reason: String) -> Self {
        Self { location, name, reason }
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

/// The objects that are still to be removed: everything at first, later what failed and what still
/// has connections. Empty by default.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct PendingRemoval {
    /// True as long as sockets and answers still have to be prepared for a mode that translates in
    /// `connect`. See [`from_ipvs::own_sockets`] and [`from_ipvs::answers`].
    by_connect: bool,
    servers: Selection<ipvs::PendingServer>,
    nft: Vec<TableFamily>,
    legacy: Vec<legacy::LegacyTable>,
    sets: Selection<String>,
    device: bool,
}

impl PendingRemoval {
    /// Returns everything as pending. `by_connect` is true if the mode that takes over translates
    /// in `connect` what the node sends. Then connected sockets have to be ended too.
    pub fn before(by_connect: bool) -> Self {
        Self { by_connect, ..Self::everything() }
    }

    pub fn everything() -> Self {
        Self {
            by_connect: false,
            servers: Selection::All,
            nft: TableFamily::ALL.into(),
            legacy: legacy::tables().collect(),
            sets: Selection::All,
            device: true,
        }
    }

    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn has_rules(&self) -> bool {
        !self.nft.is_empty() || !self.legacy.is_empty()
    }
}

#[derive(Debug, Default)]
pub struct Removal {
    pub parts: Vec<Part>,
    pub retained: Vec<Retained>,
    /// The tables in which no holder could be made. Connections that the removed rules translated
    /// break in their IP family, unless other rules translate too.
    pub without_holder: Vec<String>,
    /// The number of virtual servers that still have connections and take no new ones. They are
    /// removed later.
    pub waiting: usize,
    pub problems: Vec<Error>,
    /// The objects that the next attempt has to remove.
    pub pending: PendingRemoval,
    /// Modes whose rules stay, because they are in use or another process holds their locks.
    pub in_use: Vec<Mode>,
}

impl Removal {
    fn part(&mut self, location: String, what: PartKind, count: usize) {
        if count > 0 {
            self.parts.push(Part::new(location, what, count));
        }
    }

    fn plan<R>(&mut self, location: &str, plan: Plan<R>) {
        self.part(location.to_owned(), PartKind::Jumps, plan.rules.len());
        self.part(location.to_owned(), PartKind::Chains, plan.deleted.len());
        let stays =
            |(chain, why): (String, RetainReason)| Retained::new(location.to_owned(), chain, why.to_string());
        self.retained.extend(plan.retained.into_iter().map(stays));
    }

    fn note(&mut self, done: Result<(), Error>) {
        done.unwrap_or_else(|error| add_once(&mut self.problems, error));
    }
}

/// Adds an error unless it is listed already. The same error may occur in several tables.
fn add_once(problems: &mut Vec<Error>, error: Error) {
    let text = error.to_string();
    if problems.iter().all(|known| known.to_string() != text) {
        problems.push(error);
    }
}

/// The objects of a former kube-proxy that are on the node.
#[derive(Debug, Default)]
pub struct Found {
    pub parts: Vec<Part>,
    pub problems: Vec<Error>,
}

impl Found {
    /// Returns the result of a search that failed.
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

/// Searches and removals, between which the chain counts of iptables-legacy are kept, because
/// reading them takes long.
#[derive(Debug, Default)]
pub struct FormerRules {
    legacy: legacy::ChainCounts,
}

impl FormerRules {
    /// Finds what is left. `keeps` are networks whose virtual servers are not kube-proxy's
    /// (`ipvs.excludeCIDRs`). `draining` are former modes of this proxy, which the controller
    /// drains and removes.
    pub fn find(&mut self, keeps: &[IpNet], draining: &[Mode]) -> Found {
        let mut found = Found::default();
        let in_use = [in_use::modes(), draining.to_vec()].concat();
        let scope = Scope::but(&in_use);
        found.note(nft::find(scope));
        self.legacy.find(scope, &mut found);
        if !in_use.contains(&Mode::Ipvs) {
            ipvs::find(keeps, &mut found);
        }
        if scope.has(&[Mode::Iptables]) {
            counters::find(&mut found);
        }
        found
    }

    /// Removes what it can of `pending`. An error in one table does not stop the removal elsewhere.
    /// `keeps` is the same as for [`Self::find`]. Meanwhile no mode that these rules belong to can
    /// start.
    pub fn remove(&mut self, purpose: Purpose, keeps: &[IpNet], pending: &PendingRemoval) -> Removal {
        let mut removed = Removal::default();
        // The virtual servers of mode ipvs may take long to go. They must not hinder other modes
        // from starting.
        let writers = if pending.has_rules() { &in_use::MODES[..] } else { &[Mode::Ipvs] };
        let InUse { modes: in_use, locks: _locks, problems } = InUse::lock_others(writers);
        if purpose == Purpose::Cleanup {
            problems.into_iter().for_each(|problem| add_once(&mut removed.problems, problem));
        }
        self.remove_in(Scope::but(&in_use), purpose, keeps, pending, &mut removed);
        removed.in_use = in_use;
        removed
    }

    fn remove_in(
        &mut self,
        scope: Scope<'_>,
        purpose: Purpose,
        keeps: &[IpNet],
        pending: &PendingRemoval,
        removed: &mut Removal,
    ) {
        let ipvs_stays = scope.in_use.contains(&Mode::Ipvs);
        if !ipvs_stays {
            if pending.by_connect {
                from_ipvs::own_sockets::end(removed);
            }
            ipvs::remove_servers(purpose, keeps, pending.by_connect, &pending.servers, removed);
            let done = match removed.pending.servers.is_empty() {
                true => from_ipvs::answers::leave_sources(),
                false if pending.by_connect => from_ipvs::answers::restore_sources(),
                false => Ok(()),
            };
            removed.pending.by_connect |= pending.by_connect && done.is_err();
            removed.note(done);
        }
        if !pending.nft.is_empty() {
            let rules = nft::remove(purpose, scope, &pending.nft, removed);
            removed.pending.nft = if rules.is_err() { pending.nft.clone() } else { Vec::new() };
            removed.note(rules);
        }
        self.legacy.remove(purpose, scope, &pending.legacy, removed);
        if pending.has_rules() && scope.has(&[Mode::Iptables]) {
            counters::remove(removed);
        }
        if !ipvs_stays {
            ipvs::remove_sets(&pending.sets, removed);
            if pending.device {
                ipvs::remove_device(keeps, removed);
            }
        }
    }
}

/// Removes what this proxy has written in a mode that uses kube-proxy's names. `keeps` is the same
/// as for [`FormerRules::find`]. Returns [`Error::InUse`] if the mode is in use.
///
/// Removes nothing if a kube-proxy in the same mode has written since. Modes iptables and ipvs
/// share chains: these stay if a kube-proxy in the other of the two has written after this proxy.
pub fn remove_own(mode: Mode, keeps: &[IpNet]) -> Result<Removal, Error> {
    let other = names::shares_chains_with(mode);
    let own = OwnerTags::read(names::owner_tag_of_own_chains(mode))?;
    let common = OwnerTags::read(names::owner_tag(mode))?;
    if own.tagged.is_empty() && common.tagged.is_empty() {
        return Ok(Removal::default());
    }
    let others = OwnerTags::read(other.and_then(names::owner_tag_of_own_chains))?;
    let nat_tables = OwnNatTables::new(&common, &own, &others);
    let InUse { modes: in_use, locks: _locks, problems } = InUse::lock_others(&in_use::MODES);
    let of_mode = in_use.iter().zip(problems).find(|(in_use, _)| **in_use == mode);
    if let Some((_, problem)) = of_mode {
        return Err(problem);
    }
    let mut whole = owner_tag::rules_in(&nat_tables.whole);
    // A kube-proxy in mode ipvs that has written in one family has virtual servers and uses the
    // device.
    if mode == Mode::Ipvs && nat_tables.begun.is_empty() && own.untagged.is_empty() {
        let PendingRemoval { sets, device, .. } = PendingRemoval::everything();
        whole = PendingRemoval { servers: ipvs::known_servers(keeps)?, sets, device, ..whole };
    }
    let with_other = Vec::from_iter(in_use.iter().copied().chain(other));
    let mut removed = Removal::default();
    let mut remove = |in_use: &[Mode], pending: &PendingRemoval| {
        let scope = Scope { in_use, only: Some(mode) };
        FormerRules::default().remove_in(scope, Purpose::Cleanup, keeps, pending, &mut removed);
    };
    remove(&with_other, &owner_tag::rules_in(&nat_tables.partly));
    remove(&in_use, &whole);
    if let (Some(other), false) = (other, nat_tables.begun.is_empty()) {
        removed.problems.push(Error::Begun { mode, other });
    }
    Ok(removed)
}

/// Removes the tables that only make the kernel keep translating connections, if a mode in use does
/// that anyway. Also removes the tables of [`from_ipvs::answers`].
pub fn remove_holders() -> Result<(), Error> {
    from_ipvs::answers::leave_sources()?;
    let in_use = in_use::modes();
    if names::translates(&in_use) { nft::remove_holders(Scope::but(&in_use)) } else { Ok(()) }
}

/// Finds what is left, as [`FormerRules::find`] does, and keeps nothing for a later call.
pub fn find(keeps: &[IpNet]) -> Found {
    FormerRules::default().find(keeps, &[])
}

/// Removes what is left, as [`FormerRules::remove`] does, and keeps nothing for a later call.
pub fn remove(purpose: Purpose, keeps: &[IpNet], pending: &PendingRemoval) -> Removal {
    FormerRules::default().remove(purpose, keeps, pending)
}
