//! Carries out what `plan` has decided, for one family, and finds the service port whose rule the
//! tools refuse.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use rustc_hash::{FxHashMap, FxHashSet};

use super::{
    Parameters,
    base::{Abilities, BaseRules},
    error::Error,
    names::{self, Table},
    plan::{self, PortDifference, Script, SharedDigests, Stale, Wanted},
    rules::{PortRules, PortSettings, port_rules},
    state::State,
};
use crate::{
    model::{
        desired::{Changes, DesiredPort, ServicePortName},
        node::Host,
        objects::IpFamily,
    },
    modes::Applied,
    sys::{
        nftables::{NfTables, TableFamily},
        xtables::{self, Backend, ToolError, Tools},
    },
};

/// Above this number of endpoints, rules of single endpoints have no comments, as in kube-proxy.
const MANY_ENDPOINTS: usize = 1000;
/// Below this number of endpoints, the rules get their comments back. It is lower than
/// [`MANY_ENDPOINTS`] so that a node near the limit does not flap.
const FEW_ENDPOINTS: usize = 900;
/// The most lines of a transaction for iptables-nft, whose time grows with the square of that
/// number.
const LINES_OF_NFT: usize = 2000;
/// The most lines of a transaction for iptables-legacy. All lines are in one transaction, because
/// each transaction copies the whole table.
const LINES_OF_LEGACY: usize = usize::MAX;
/// The most lines of one run of the tool, to bound the memory for its input.
const LINES_AT_ONCE: usize = 100_000;
/// Everything is read again after this many times the duration of the last reading, but at the
/// latest after [`LONGEST_TRUST`].
const READ_SHARE: u32 = 100;
const LONGEST_TRUST: Duration = Duration::from_secs(3600);

/// Returns true if rules of single endpoints have comments when there are `endpoints` of them.
/// `had` is true if the rules have comments now.
const fn has_endpoint_comments(had: bool, endpoints: usize) -> bool {
    if had { endpoints <= MANY_ENDPOINTS } else { endpoints < FEW_ENDPOINTS }
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Failures {
    pub(super) all: u64,
    pub(super) partial: u64,
}

/// A service port whose rules are in the kernel.
#[derive(Clone, Debug)]
struct Written {
    port: Arc<DesiredPort>,
    /// The number of its rules in each table.
    rules: [u32; 3],
}

impl Written {
    fn endpoints(&self) -> usize {
        self.port.endpoints.all.len()
    }
}

/// A service port, with its state in the kernel and the state that it should get.
struct PortChange {
    name: ServicePortName,
    before: Option<Written>,
    after: Option<Written>,
}

impl PortChange {
    fn new(name: &ServicePortName, before: Option<Written>, after: Option<&Arc<DesiredPort>>) -> Self {
        let after = after.map(|port| Written { port: Arc::clone(port), rules: [0; 3] });
        Self { name: name.clone(), before, after }
    }
}

struct Refusal {
    name: ServicePortName,
    rule: String,
    error: ToolError,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    Full,
    Partial,
}

#[derive(Debug)]
pub(super) struct Writer {
    pub(super) family: IpFamily,
    pub(super) tools: Tools,
    abilities: Abilities,
    host: Host,
    settings: PortSettings,
    /// The base rules that are in the kernel.
    base: Option<BaseRules>,
    /// The service ports whose rules are in the kernel.
    written: FxHashMap<ServicePortName, Written>,
    endpoints: usize,
    pub(super) failures: Failures,
    /// The number of rules that the last write has written, by table.
    pub(super) last: [u64; 3],
    /// The time at which everything was last compared, and how long that took.
    compared: Option<(Instant, Duration)>,
    /// True if the kernel's state is not known, or does not have everything that is desired.
    is_invalid: bool,
    /// True if the canary was missing at the last check.
    flushed: bool,
    outlines: [Option<xtables::Outline>; 3],
}

impl Writer {
    pub(super) fn new(family: IpFamily, tools: Tools, abilities: Abilities) -> Self {
        Self {
            family,
            tools,
            abilities,
            host: Host::default(),
            // Comments are written at first, because kube-proxy writes them up to `MANY_ENDPOINTS`.
            settings: PortSettings::new(family, &Host::default(), abilities, true),
            base: None,
            written: FxHashMap::default(),
            endpoints: 0,
            failures: Failures::default(),
            last: [0; 3],
            compared: None,
            is_invalid: true,
            flushed: false,
            outlines: Default::default(),
        }
    }

    /// Takes over the node's parameters. Rules that depend on other values are written again by the
    /// next [`Self::resync`] or [`Self::set_host`].
    pub(super) fn prepare(&mut self, parameters: Parameters, has_counters: bool) {
        let Parameters { is_liberal, routes_localnet } = parameters;
        if self.abilities.drop_invalid == is_liberal {
            self.abilities.drop_invalid = !is_liberal;
            self.abilities.counts_packets = !is_liberal && has_counters;
            self.is_invalid = true;
        }
        if self.abilities.routes_localnet != routes_localnet {
            self.abilities.routes_localnet = routes_localnet;
            self.is_invalid = true;
        }
    }

    pub(super) fn counts_packets(&self) -> bool {
        self.abilities.counts_packets
    }

    /// Takes over the host. Nothing is written before the first [`Self::resync`].
    pub(super) fn set_host(&mut self, host: &Host) -> Result<Applied, Error> {
        self.host = host.clone();
        let settings = PortSettings::new(self.family, host, self.abilities, self.settings.endpoint_comments);
        let Some(before) = self.base.clone() else { return Ok(Applied::default()) };
        let base = BaseRules::new(self.family, host, self.abilities);
        let rests_on_state = before.jumps != base.jumps || before.martians != base.martians;
        // A write that failed is tried again, even if the settings are those with which it failed.
        if settings != self.settings || rests_on_state || self.is_invalid {
            return self.rewrite();
        }
        if before == base {
            return Ok(Applied::default());
        }
        let mut script = Script::default();
        plan::base_change(&before, &base, &mut script);
        if self.run(&script, Kind::Partial).is_err() {
            return self.rewrite();
        }
        self.base = Some(base);
        Ok(Applied { written: 1, removed: 0 })
    }

    pub(super) fn apply(&mut self, changes: &Changes) -> Result<Applied, Error> {
        let changed = changes.changed.iter().map(|port| (&port.name, Some(port)));
        let removed = changes.removed.iter().map(|name| (name, None));
        let own = changed.chain(removed).filter(|(name, _)| name.family == self.family);
        let ports: Vec<PortChange> =
            own.map(|(name, after)| PortChange::new(name, self.written.get(name).cloned(), after)).collect();
        if ports.is_empty() {
            return Ok(Applied::default());
        }
        self.last = [0; 3];
        let mut refusals = Vec::new();
        let applied = self.write(ports, None, &mut refusals);
        self.remember_outlines();
        let mut applied = applied?;
        let had_comments = self.settings.endpoint_comments;
        if has_endpoint_comments(had_comments, self.endpoints) != had_comments {
            applied += self.rewrite()?;
        }
        without_refusals(applied, refusals)
    }

    /// Writes what differs between `desired` and the kernel's state, and removes what is not
    /// desired. Reading the kernel's state takes long if there are many rules. So what this mode
    /// has written is trusted for a while, if nothing has failed and the canary is there.
    pub(super) fn resync(&mut self, desired: &[Arc<DesiredPort>]) -> Result<Applied, Error> {
        let own: Vec<_> = desired.iter().filter(|port| port.name.family == self.family).cloned().collect();
        let is_trusted = !self.is_invalid
            && self.compared.is_some_and(|(at, took)| at.elapsed() < (took * READ_SHARE).min(LONGEST_TRUST));
        let is_written = || {
            own.len() == self.written.len()
                && own.iter().all(|port| {
                    self.written
                        .get(&port.name)
                        .is_some_and(|of| Arc::ptr_eq(&of.port, port) || of.port == *port)
                })
        };
        if is_trusted && is_written() && self.canary_is_there()? {
            return Ok(Applied::default());
        }
        self.compare(&own)
    }

    /// Invalidates what has been written: the next [`Self::resync`] compares it with the kernel.
    pub(super) fn invalidate(&mut self) {
        self.is_invalid = true;
    }

    /// Writes everything again as it was last desired.
    fn rewrite(&mut self) -> Result<Applied, Error> {
        let desired: Vec<_> = self.written.values().map(|written| Arc::clone(&written.port)).collect();
        self.compare(&desired)
    }

    fn compare(&mut self, desired: &[Arc<DesiredPort>]) -> Result<Applied, Error> {
        self.is_invalid = true;
        let started = Instant::now();
        let state = self.read()?;
        let endpoints: usize = desired.iter().map(|port| port.endpoints.all.len()).sum();
        let comments = has_endpoint_comments(self.settings.endpoint_comments, endpoints);
        self.settings = PortSettings::new(self.family, &self.host, self.abilities, comments);
        self.last = [0; 3];

        let base = BaseRules::new(self.family, &self.host, self.abilities);
        let mut script = Script::default();
        plan::base(&state, &base, &mut script);
        let mut applied = Applied { written: u64::from(!script.is_empty()), removed: 0 };
        if !script.is_empty()
            && let Err(error) = self.run(&script, Kind::Full)
        {
            if !self.abilities.counts_packets || !matches!(error, ToolError::Failed { .. }) {
                return Err(error.into());
            }
            tracing::warn!(%error, family = self.family.name(), "packets are not counted (nfacct)");
            self.abilities.counts_packets = false;
            return self.compare(desired);
        }

        let mut wanted = Wanted::default();
        let mut ports = Vec::with_capacity(desired.len());
        for port in desired {
            let rules = port_rules(port, &self.settings);
            wanted.add(&rules);
            let before = self.written.get(&port.name).cloned();
            ports.push(PortChange::new(&port.name, before, Some(port)));
        }
        // Rules of service ports that are no longer desired are stale.
        let names: FxHashSet<&ServicePortName> = desired.iter().map(|port| &port.name).collect();
        self.written.retain(|name, _| names.contains(name));
        self.endpoints = self.written.values().map(Written::endpoints).sum();
        let mut refusals = Vec::new();
        let written = self.write(ports, Some(&state), &mut refusals)?;
        // The kernel's state has changed if rules were removed, and may have changed if some were
        // refused.
        let state = if written.removed > 0 || !refusals.is_empty() { self.read()? } else { state };
        applied += written;
        // A port that was refused is served as before.
        for refusal in &refusals {
            if let Some(before) = self.written.get(&refusal.name) {
                wanted.add(&port_rules(&before.port, &self.settings));
            }
        }
        let stale = Stale::new(&state, &base, &wanted);
        drop((state, wanted));
        let removed = self.remove(stale);
        self.base = Some(base);
        self.flushed = false;
        self.remember_outlines();
        applied.removed += removed?;
        self.compared = Some((Instant::now(), started.elapsed()));
        self.is_invalid = !refusals.is_empty();
        without_refusals(applied, refusals)
    }

    fn read(&self) -> Result<State, ToolError> {
        read(&self.tools)
    }

    const fn lines_of_part(&self) -> usize {
        match self.tools.backend {
            Backend::Nft => LINES_OF_NFT,
            Backend::Legacy => LINES_OF_LEGACY,
        }
    }

    fn rules_of(&self, port: Option<&Written>) -> PortRules {
        port.map(|written| port_rules(&written.port, &self.settings)).unwrap_or_default()
    }

    /// Writes the ports in a few runs of the tool. `state` is the kernel's state. `None`: the
    /// kernel has what this mode has written. Service ports that the tool refuses stay as they
    /// were.
    fn write(
        &mut self,
        ports: Vec<PortChange>,
        state: Option<&State>,
        refusals: &mut Vec<Refusal>,
    ) -> Result<Applied, Error> {
        let shared = state.map(SharedDigests::new);
        let mut applied = Applied::default();
        let mut waiting: Vec<(PortChange, PortDifference)> = Vec::new();
        let mut lines = 0;
        for mut port in ports {
            let (before, after) = (self.rules_of(port.before.as_ref()), self.rules_of(port.after.as_ref()));
            if let Some(written) = &mut port.after {
                written.rules = Table::ALL.map(|table| after.count(table) as u32);
            }
            let difference = match (state, &shared) {
                (Some(state), Some(shared)) => PortDifference::from_state(state, shared, &before, after),
                _ => PortDifference::between(&before, after),
            };
            if difference.is_empty() {
                self.wrote(port);
                continue;
            }
            lines += difference.lines();
            waiting.push((port, difference));
            if lines >= LINES_AT_ONCE && self.tools.backend == Backend::Nft {
                applied += self.write_differences(std::mem::take(&mut waiting), state, refusals)?;
                lines = 0;
            }
        }
        applied += self.write_differences(waiting, state, refusals)?;
        Ok(applied)
    }

    fn write_differences(
        &mut self,
        waiting: Vec<(PortChange, PortDifference)>,
        state: Option<&State>,
        refusals: &mut Vec<Refusal>,
    ) -> Result<Applied, Error> {
        if waiting.is_empty() {
            return Ok(Applied::default());
        }
        let (mut ports, differences): (Vec<_>, Vec<_>) = waiting.into_iter().unzip();
        let mut script = Script::default();
        plan::ports(&differences, self.lines_of_part(), &mut script);
        let Err(error) = self.run(&script, Kind::Partial) else {
            let applied =
                differences.iter().map(PortDifference::applied).fold(Applied::default(), |mut all, one| {
                    all += one;
                    all
                });
            self.count_last(&differences);
            ports.into_iter().for_each(|port| self.wrote(port));
            return Ok(applied);
        };
        if matches!(error, ToolError::Busy { .. } | ToolError::Run { .. }) {
            self.is_invalid = true;
            self.keep(ports);
            return Err(error.into());
        }
        // The transactions before the refused one were carried out.
        let line = error.line();
        let rule = line
            .and_then(|line| script.text.lines().nth(line.saturating_sub(1)))
            .unwrap_or_default()
            .to_owned();
        let owner = line.and_then(|line| script.owner(line)).or_else(|| (ports.len() == 1).then_some(0));
        let has_written = line.is_none_or(|line| script.commits_before(line));
        drop((script, differences));
        if let (Some(owner), false) = (owner, has_written) {
            // Nothing was written, so what is known of the tables still holds. Reading them takes
            // long.
            self.refused(ports.swap_remove(owner), rule, error, refusals);
            return self.write(ports, state, refusals);
        }
        let state = match self.read() {
            Ok(state) => state,
            Err(error) => {
                self.is_invalid = true;
                self.keep(ports);
                return Err(error.into());
            }
        };
        if let Some(owner) = owner {
            self.refused(ports.swap_remove(owner), rule, error, refusals);
            return self.write(ports, Some(&state), refusals);
        }
        // iptables-legacy does not say which rule it was that the kernel refused.
        let rest = ports.split_off(ports.len() / 2);
        let mut applied = self.write(ports, Some(&state), refusals)?;
        let state = if rest.is_empty() { state } else { self.read()? };
        applied += self.write(rest, Some(&state), refusals)?;
        Ok(applied)
    }

    /// Notes that the tool refuses this rule of the port.
    fn refused(&mut self, port: PortChange, rule: String, error: ToolError, refusals: &mut Vec<Refusal>) {
        tracing::warn!(port = %port.name, rule, %error, "a rule of the service port was refused; it is served as before");
        refusals.push(Refusal { name: port.name.clone(), rule, error });
        self.keep(vec![port]);
    }

    fn wrote(&mut self, port: PortChange) {
        self.know(port.name, port.after);
    }

    /// Notes that ports could not be written. As far as is known, their former rules are still in
    /// the kernel.
    fn keep(&mut self, ports: Vec<PortChange>) {
        ports.into_iter().for_each(|port| self.know(port.name, port.before));
    }

    fn know(&mut self, name: ServicePortName, written: Option<Written>) {
        self.endpoints += written.as_ref().map_or(0, Written::endpoints);
        let before = match written {
            Some(written) => self.written.insert(name, written),
            None => self.written.remove(&name),
        };
        self.endpoints -= before.as_ref().map_or(0, Written::endpoints);
    }

    fn remove(&mut self, mut stale: Stale) -> Result<u64, Error> {
        loop {
            let mut script = Script::default();
            plan::stale(&stale, self.lines_of_part(), &mut script);
            if script.is_empty() {
                return Ok(0);
            }
            let removed = stale.chains.len() + stale.rules.len();
            let Err(error) = self.run(&script, Kind::Full) else { return Ok(removed as u64) };
            let Some(at) = error.line().and_then(|line| script.owner(line)) else {
                return Err(Error::Stale(Box::new(error)));
            };
            let (table, chain) = stale.chains.swap_remove(at);
            tracing::debug!(
                table = table.name(),
                chain,
                "a chain that is not used stays, emptied: a rule of others leads to it"
            );
            // The transactions before the refused one were carried out. The tables are read, so
            // that no rule is deleted twice.
            let state = self.read()?;
            stale.chains.retain(|(table, chain)| state.of(*table).digest(chain).is_some());
            stale.rules.retain(|(chain, rule)| {
                state.of(chain.table()).rules(chain.name()).iter().any(|present| present.rule == *rule)
            });
        }
    }

    fn run(&mut self, script: &Script, kind: Kind) -> Result<(), ToolError> {
        if script.is_empty() {
            return Ok(());
        }
        self.tools.restore(&script.text).inspect_err(|_| {
            self.failures.all += 1;
            self.failures.partial += u64::from(kind == Kind::Partial);
        })
    }

    /// Returns true if the canary chains are there, which show that nobody has flushed the tables.
    pub(super) fn canary_is_there(&mut self) -> Result<bool, Error> {
        let family = TableFamily::from(self.family);
        for table in Table::ALL {
            let is_there = match self.tools.backend {
                Backend::Nft => match NfTables::open()? {
                    Some(kernel) => kernel.has_chain(family, table.name(), names::CANARY)?,
                    None => false,
                },
                Backend::Legacy => {
                    // The kernel returns only whole tables, so the chains are read only if the
                    // outline differs.
                    let known = self.outlines[table as usize].as_ref();
                    let outline = xtables::outline(family, table.name())?;
                    if outline.is_some() && outline.as_ref() == known {
                        continue;
                    }
                    let Some((outline, chains)) = xtables::chains(family, table.name())? else {
                        return Ok(false);
                    };
                    self.outlines[table as usize] = Some(outline);
                    chains.iter().any(|chain| chain == names::CANARY)
                }
            };
            if !is_there {
                self.outlines = Default::default();
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn remember_outlines(&mut self) {
        if self.tools.backend == Backend::Legacy {
            let family = TableFamily::from(self.family);
            // A table whose outline cannot be read has its chains read at the next check.
            self.outlines = Table::ALL.map(|table| xtables::outline(family, table.name()).ok().flatten());
        }
    }

    /// Writes everything again if another program has flushed the tables. It waits for a second
    /// check that finds the canary missing, because a flush and its repair may take a moment.
    pub(super) fn watch(&mut self) -> Result<(), Error> {
        if self.base.is_none() || self.canary_is_there()? {
            self.flushed = false;
            return Ok(());
        }
        if !self.flushed {
            self.flushed = true;
            return Ok(());
        }
        let written = self.rewrite()?.written;
        tracing::warn!(
            family = self.family.name(),
            written,
            "another program had removed rules of iptables; they are written again"
        );
        Ok(())
    }

    /// Returns the number of rules by table.
    pub(super) fn rules(&self) -> [u64; 3] {
        let base = |table| self.base.as_ref().map_or(0, |base| base.count(table) as u64);
        Table::ALL.map(|table| {
            let of_ports = self.written.values().map(|written| u64::from(written.rules[table as usize]));
            base(table) + of_ports.sum::<u64>()
        })
    }

    fn count_last(&mut self, differences: &[PortDifference]) {
        for difference in differences {
            let own: usize = difference.written.iter().map(|chain| chain.rules.len()).sum();
            self.last[Table::Nat as usize] += own as u64;
            for (chain, _) in &difference.added {
                self.last[chain.table() as usize] += 1;
            }
        }
    }
}

fn without_refusals(applied: Applied, refusals: Vec<Refusal>) -> Result<Applied, Error> {
    let refused = refusals.len();
    match refusals.into_iter().next() {
        None => Ok(applied),
        Some(Refusal { name, rule, error }) => {
            Err(Error::Refused { refused, port: name, rule, source: Box::new(error) })
        }
    }
}

/// Reads the state of this mode.
pub(super) fn read(tools: &Tools) -> Result<State, ToolError> {
    let mut state = State::default();
    for table in Table::ALL {
        tools.save(table.name(), |line| state.take(table, line))?;
    }
    Ok(state)
}
