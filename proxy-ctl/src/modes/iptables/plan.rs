//! Plans the input of iptables-restore that turns the kernel's state into the desired state. This
//! module has no side effects.
//!
//! A packet finds the old or the new rules of a service port, and nothing less. Rules that refuse
//! clients enter table filter before translation ends in table nat, and leave it after translation
//! has begun.

use rustc_hash::FxHashSet;

use super::{
    base::{BaseRules, Jump},
    names::{self, SharedChain, Table},
    rules::{OwnChain, PortRules},
    state::{State, TableState, chain_digest},
};
use crate::{
    modes::{Applied, netfilter::chains::other_firewall_jumps},
    sys::xtables::saved::digest,
};

/// The steps that change the rules of one service port.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct PortDifference {
    /// Chains that are made, or emptied and filled.
    pub(super) written: Vec<OwnChain>,
    pub(super) deleted: Vec<String>,
    pub(super) added: Vec<(SharedChain, String)>,
    pub(super) removed: Vec<(SharedChain, String)>,
}

impl PortDifference {
    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns what must change in the kernel when the rules `before` are replaced by `after`. This
    /// mode has written `before`, and they are still there.
    pub(super) fn between(before: &PortRules, after: PortRules) -> Self {
        let has = |rules: &PortRules, rule: &(SharedChain, String)| rules.shared.contains(rule);
        let stays = |chain: &&OwnChain| after.chains.iter().all(|other| other.name != chain.name);
        Self {
            deleted: before.chains.iter().rev().filter(stays).map(|chain| chain.name.clone()).collect(),
            removed: before.shared.iter().filter(|rule| !has(&after, rule)).cloned().collect(),
            added: after.shared.iter().filter(|rule| !has(before, rule)).cloned().collect(),
            written: after.chains.into_iter().filter(|chain| !before.chains.contains(chain)).collect(),
        }
    }

    /// Returns what must change in the kernel, whose `state` was just read, so that it has the
    /// rules `after`. `before` are the rules that this mode may have written for the port.
    pub(super) fn from_state(
        state: &State,
        shared: &SharedDigests,
        before: &PortRules,
        after: PortRules,
    ) -> Self {
        let nat = state.of(Table::Nat);
        let PortRules { mut chains, shared: mut added } = after;
        let is_gone = |chain: &&OwnChain| {
            nat.digest(&chain.name).is_some() && chains.iter().all(|other| other.name != chain.name)
        };
        let deleted = before.chains.iter().rev().filter(is_gone).map(|chain| chain.name.clone()).collect();
        let is_undesired =
            |rule: &&(SharedChain, String)| !added.contains(rule) && shared.has(rule.0, &rule.1);
        let removed = before.shared.iter().filter(is_undesired).cloned().collect();
        added.retain(|(chain, rule)| !shared.has(*chain, rule));
        chains.retain(|chain| nat.digest(&chain.name) != Some(chain.digest()));
        Self { written: chains, deleted, added, removed }
    }

    /// Returns about how many lines of input the difference takes.
    pub(super) fn lines(&self) -> usize {
        let own: usize = self.written.iter().map(|chain| chain.rules.len() + 1).sum();
        own + self.added.len() + self.removed.len() + self.deleted.len()
    }

    pub(super) fn applied(&self) -> Applied {
        Applied {
            written: (self.written.len() + self.added.len()) as u64,
            removed: (self.deleted.len() + self.removed.len()) as u64,
        }
    }
}

/// The digests of all rules that are in shared chains.
#[derive(Debug, Default)]
pub(super) struct SharedDigests(FxHashSet<(SharedChain, u64)>);

impl SharedDigests {
    pub(super) fn new(state: &State) -> Self {
        let rules = |chain: SharedChain| state.of(chain.table()).rules(chain.name()).iter();
        let of = |chain| rules(chain).map(move |rule| (chain, rule.digest));
        Self(SharedChain::ALL.into_iter().flat_map(of).collect())
    }

    fn has(&self, chain: SharedChain, rule: &str) -> bool {
        self.0.contains(&(chain, digest(rule)))
    }
}

/// The names of all desired chains, and the digests of all desired rules in shared chains.
/// Everything else of this mode that is in the kernel is stale.
#[derive(Debug, Default)]
pub(super) struct Wanted {
    chains: FxHashSet<String>,
    shared: FxHashSet<(SharedChain, u64)>,
}

impl Wanted {
    pub(super) fn add(&mut self, rules: &PortRules) {
        self.chains.extend(rules.chains.iter().map(|chain| chain.name.clone()));
        self.shared.extend(rules.shared.iter().map(|(chain, rule)| (*chain, digest(rule))));
    }
}

/// The chains and rules of this mode that are in the kernel and not desired.
#[derive(Debug, Default)]
pub(super) struct Stale {
    pub(super) chains: Vec<(Table, String)>,
    pub(super) rules: Vec<(SharedChain, String)>,
}

impl Stale {
    pub(super) fn new(state: &State, base: &BaseRules, wanted: &Wanted) -> Self {
        let mut stale = Self::default();
        for table in Table::ALL {
            let is_base =
                |name: &str| base.chains.iter().any(|chain| chain.table == table && chain.name == name);
            let is_wanted = |name: &str| is_base(name) || table == Table::Nat && wanted.chains.contains(name);
            let chains = state.of(table).own_chains().filter(|name| !is_wanted(name));
            stale.chains.extend(chains.map(|name| (table, name.to_owned())));
        }
        stale.chains.sort_unstable();
        let leads_to_node_ports = |rule: &str| rule.ends_with(&format!("-j {}", names::NODE_PORTS));
        let owner_tags: FxHashSet<(SharedChain, u64)> =
            base.owner_tags.iter().map(|(chain, rule)| (*chain, digest(rule))).collect();
        for chain in SharedChain::ALL {
            let mut seen = FxHashSet::default();
            for present in state.of(chain.table()).rules(chain.name()) {
                let is_base = chain == SharedChain::Services && leads_to_node_ports(&present.rule);
                let is_first = seen.insert(present.digest);
                let rule = (chain, present.digest);
                let is_wanted = owner_tags.contains(&rule) || wanted.shared.contains(&rule);
                let stays = is_base || is_first && is_wanted;
                if !stays {
                    stale.rules.push((chain, present.rule.clone()));
                }
            }
        }
        stale
    }
}

/// Input of iptables-restore. The lines from a table's name to COMMIT are one transaction: all of
/// them are carried out, or none.
#[derive(Debug, Default)]
pub(super) struct Script {
    pub(super) text: String,
    lines: usize,
    /// The number of the first line of each range of lines, counted from 1, and the owner of the
    /// range. An owner is the index of a service port's [`PortDifference`] or of a stale chain.
    /// `None` stands for lines that belong to neither.
    owners: Vec<(usize, Option<usize>)>,
    open: Option<(Table, usize)>,
}

impl Script {
    pub(super) fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// Returns the owner of a line.
    pub(super) fn owner(&self, line: usize) -> Option<usize> {
        let after = self.owners.partition_point(|(first, _)| *first <= line);
        self.owners[..after].last().and_then(|(_, owner)| *owner)
    }

    /// Returns true if a transaction ends before this line. It is carried out even if the line is
    /// refused.
    pub(super) fn commits_before(&self, line: usize) -> bool {
        self.text.lines().take(line.saturating_sub(1)).any(|line| line == "COMMIT")
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        use std::fmt::Write as _;
        // Writing to a String does not fail.
        let _ = writeln!(self.text, "{line}");
        self.lines += 1;
    }

    fn owned_by(&mut self, owner: Option<usize>) {
        self.owners.push((self.lines + 1, owner));
    }

    /// Continues in this table. If the current transaction has `most` lines, a new one begins.
    fn table(&mut self, table: Table, most: usize) {
        if self.open.is_some_and(|(open, since)| open == table && self.lines - since < most) {
            return;
        }
        self.close();
        self.line(format_args!("*{}", table.name()));
        self.open = Some((table, self.lines));
    }

    pub(super) fn close(&mut self) {
        if self.open.take().is_some() {
            self.owned_by(None);
            self.line(format_args!("COMMIT"));
        }
    }

    fn fill(&mut self, chain: &str, rules: &[String]) {
        self.line(format_args!(":{chain} - [0:0]"));
        rules.iter().for_each(|rule| self.line(format_args!("-A {chain} {rule}")));
    }
}

/// Writes what differs between `base` and `state`.
pub(super) fn base(state: &State, base: &BaseRules, script: &mut Script) {
    script.owned_by(None);
    for table in Table::ALL {
        let there = state.of(table);
        let mut table_script = Script::default();
        let shared =
            SharedChain::ALL.into_iter().filter(|chain| chain.table() == table).map(SharedChain::name);
        for chain in shared.filter(|chain| !there.has(chain)) {
            table_script.fill(chain, &[]);
        }
        for chain in base.chains.iter().filter(|chain| chain.table == table) {
            if there.digest(chain.name) != Some(chain_digest(&chain.rules)) {
                table_script.fill(chain.name, &chain.rules);
            }
        }
        match table {
            Table::Filter => {
                martians(state, base, &mut table_script);
                firewall_jumps(state, base, &mut table_script);
            }
            Table::Nat => {
                write_owner_tags(state, base, &mut table_script);
                node_ports(state, base, &mut table_script);
            }
            Table::Mangle => {}
        }
        jumps(there, base.jumps.iter().filter(|jump| jump.table == table), &mut table_script);
        if !table_script.is_empty() {
            script.table(table, usize::MAX);
            script.text.push_str(&table_script.text);
            script.lines += table_script.lines;
            script.close();
        }
    }
}

/// Inserts the jumps that are missing. An older version may have left the jumps in another order.
/// Then all jumps of the chain are moved to its front.
fn jumps<'a>(
    there: &TableState,
    wanted: impl DoubleEndedIterator<Item = &'a Jump> + Clone,
    script: &mut Script,
) {
    let position =
        |jump: &Jump| there.rules(jump.chain).iter().position(|present| present.digest == digest(&jump.rule));
    // A jump that is missing is inserted at the front. `None`, the position of a missing jump, is
    // less than any other position. So the jumps are in order if the missing ones come first.
    let in_order = |chain: &str| wanted.clone().filter(|jump| jump.chain == chain).map(position).is_sorted();
    for jump in wanted.clone().rev() {
        if position(jump).is_some() {
            if in_order(jump.chain) {
                continue;
            }
            script.line(format_args!("-D {} {}", jump.chain, jump.rule));
        }
        script.line(format_args!("-I {} {}", jump.chain, jump.rule));
    }
}

fn martians(state: &State, base: &BaseRules, script: &mut Script) {
    let there = state.of(Table::Filter);
    let Some(rule) = &base.martians else { return };
    if !there.has(names::FIREWALL) {
        script.fill(names::FIREWALL, std::slice::from_ref(rule));
    } else if there.rules(names::FIREWALL).iter().all(|present| present.digest != digest(rule)) {
        // The kubelet uses the chain too, so the rule is appended.
        script.line(format_args!("-A {} {rule}", names::FIREWALL));
    }
}

/// Removes jumps of other modes to the firewall chain. Mode ipvs sends all packets there. This
/// mode's rules in the chain would drop packets of connections that IPVS still translates.
fn firewall_jumps(state: &State, base: &BaseRules, script: &mut Script) {
    let is_wanted = |chain: &str, rule: &str| {
        base.jumps.iter().any(|jump| jump.chain == chain && digest(&jump.rule) == digest(rule))
    };
    let there = state.of(Table::Filter);
    let rules_of = |chain| there.rules(chain).iter().map(|present| present.rule.as_str());
    for (chain, rule) in other_firewall_jumps(rules_of, is_wanted) {
        script.line(format_args!("-D {chain} {rule}"));
    }
}

fn write_owner_tags(state: &State, base: &BaseRules, script: &mut Script) {
    for (chain, rule) in &base.owner_tags {
        let chain = chain.name();
        if state.of(Table::Nat).rules(chain).iter().all(|present| present.digest != digest(rule)) {
            script.line(format_args!("-I {chain} {rule}"));
        }
    }
}

/// Writes the jumps to the chain of node ports. They must be the last rules of their chain.
fn node_ports(state: &State, base: &BaseRules, script: &mut Script) {
    let chain = SharedChain::Services.name();
    let present = state.of(Table::Nat).rules(chain);
    let wanted: Vec<u64> = base.node_ports.iter().map(|rule| digest(rule)).collect();
    let leads_there = |rule: &str| rule.ends_with(&format!("-j {}", names::NODE_PORTS));
    let there: Vec<usize> = (0..present.len()).filter(|at| leads_there(&present[*at].rule)).collect();
    let is_last = there.first().is_none_or(|first| present.len() - first == there.len());
    if is_last && there.iter().map(|at| present[*at].digest).eq(wanted) {
        return;
    }
    for rule in &base.node_ports {
        script.line(format_args!("-A {chain} {rule}"));
    }
    for at in there {
        // The tools delete the first of two equal rules, which is the old one.
        script.line(format_args!("-D {chain} {}", present[at].rule));
    }
}

/// Writes the change from the base rules that were written to others.
pub(super) fn base_change(before: &BaseRules, after: &BaseRules, script: &mut Script) {
    script.owned_by(None);
    for chain in after.chains.iter().filter(|chain| !before.chains.contains(chain)) {
        script.table(chain.table, usize::MAX);
        script.fill(chain.name, &chain.rules);
    }
    if before.node_ports != after.node_ports {
        let chain = SharedChain::Services.name();
        script.table(Table::Nat, usize::MAX);
        for rule in &after.node_ports {
            script.line(format_args!("-A {chain} {rule}"));
        }
        for rule in &before.node_ports {
            script.line(format_args!("-D {chain} {rule}"));
        }
    }
    script.close();
}

/// Writes the differences of service ports. A new transaction begins after `most` lines.
pub(super) fn ports(differences: &[PortDifference], most: usize, script: &mut Script) {
    let in_filter = |rules: &[(SharedChain, String)]| -> Vec<(SharedChain, String)> {
        rules.iter().filter(|(chain, _)| chain.table() == Table::Filter).cloned().collect()
    };
    for (owner, difference) in differences.iter().enumerate() {
        let added = in_filter(&difference.added);
        if !added.is_empty() {
            script.table(Table::Filter, most);
            script.owned_by(Some(owner));
            insert(&added, script);
        }
    }
    for (owner, difference) in differences.iter().enumerate() {
        let of_nat = |rules: &[(SharedChain, String)]| -> Vec<(SharedChain, String)> {
            rules.iter().filter(|(chain, _)| chain.table() == Table::Nat).cloned().collect()
        };
        let (added, removed) = (of_nat(&difference.added), of_nat(&difference.removed));
        let PortDifference { written, deleted, .. } = difference;
        if written.is_empty() && deleted.is_empty() && added.is_empty() && removed.is_empty() {
            continue;
        }
        script.table(Table::Nat, most);
        script.owned_by(Some(owner));
        // A chain must exist before a rule jumps to it.
        for chain in written {
            script.line(format_args!(":{} - [0:0]", chain.name));
        }
        for chain in written {
            chain.rules.iter().for_each(|rule| script.line(format_args!("-A {} {rule}", chain.name)));
        }
        insert(&added, script);
        remove(&removed, script);
        delete(deleted.iter().map(String::as_str), script);
    }
    for (owner, difference) in differences.iter().enumerate() {
        let removed = in_filter(&difference.removed);
        if !removed.is_empty() {
            script.table(Table::Filter, most);
            script.owned_by(Some(owner));
            remove(&removed, script);
        }
    }
    script.close();
}

/// Inserts rules at the front of their chains. Service ports share no addresses, so their order in
/// a shared chain does not matter. Rules that must be last stay last.
fn insert(rules: &[(SharedChain, String)], script: &mut Script) {
    for (chain, rule) in rules {
        script.line(format_args!("-I {} {rule}", chain.name()));
    }
}

fn remove(rules: &[(SharedChain, String)], script: &mut Script) {
    for (chain, rule) in rules {
        script.line(format_args!("-D {} {rule}", chain.name()));
    }
}

fn delete<'a>(chains: impl Iterator<Item = &'a str> + Clone, script: &mut Script) {
    chains.clone().for_each(|chain| script.line(format_args!(":{chain} - [0:0]")));
    chains.for_each(|chain| script.line(format_args!("-X {chain}")));
}

/// Writes the removal of stale rules and chains.
pub(super) fn stale(stale: &Stale, most: usize, script: &mut Script) {
    script.owned_by(None);
    for table in [Table::Nat, Table::Filter, Table::Mangle] {
        for rule in stale.rules.iter().filter(|(chain, _)| chain.table() == table) {
            script.table(table, most);
            remove(std::slice::from_ref(rule), script);
        }
        let chains = || stale.chains.iter().filter(|(of, _)| *of == table).map(|(_, chain)| chain);
        for chain in chains() {
            script.table(table, most);
            script.line(format_args!(":{chain} - [0:0]"));
        }
        // The chains jump to each other. So all are emptied before the first is deleted.
        for (index, chain) in stale.chains.iter().enumerate().filter(|(_, (of, _))| *of == table) {
            script.table(table, most);
            script.owned_by(Some(index));
            script.line(format_args!("-X {}", chain.1));
        }
    }
    script.close();
}
