//! The state of this mode in the kernel, read from the output of iptables-save. Rules of single
//! service ports are kept as digests, because there may be hundreds of thousands.

use rustc_hash::FxHashMap;

use super::{
    names::{self, SharedChain, Table},
    rules::OwnChain,
};
use crate::{
    model::mode::Mode,
    names::writes,
    sys::xtables::saved::{SavedLine, digest},
};

/// A rule of a chain that holds rules of several writers or service ports.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct PresentRule {
    pub(super) digest: u64,
    /// The rule as iptables-save prints it, without its chain.
    pub(super) rule: String,
}

#[derive(Debug, Default)]
pub(super) struct TableState {
    /// Digests of this mode's own chains, by name.
    own: FxHashMap<Box<str>, u64>,
    /// The rules, in their order, of the kernel's chains, of [`SharedChain`]s and of KUBE-FIREWALL.
    pub(super) listed: FxHashMap<Box<str>, Vec<PresentRule>>,
}

impl TableState {
    pub(super) fn has(&self, chain: &str) -> bool {
        self.own.contains_key(chain) || self.listed.contains_key(chain)
    }

    /// Returns the digest of a chain that only this mode uses. `None`: the chain does not exist.
    pub(super) fn digest(&self, chain: &str) -> Option<u64> {
        self.own.get(chain).copied()
    }

    pub(super) fn rules(&self, chain: &str) -> &[PresentRule] {
        self.listed.get(chain).map(Vec::as_slice).unwrap_or_default()
    }

    pub(super) fn own_chains(&self) -> impl Iterator<Item = &str> {
        self.own.keys().map(|name| &**name)
    }
}

/// The tables of one family.
#[derive(Debug, Default)]
pub(super) struct State {
    tables: [TableState; 3],
}

impl State {
    pub(super) fn of(&self, table: Table) -> &TableState {
        &self.tables[table as usize]
    }

    /// Adds a line of iptables-save to this table.
    pub(super) fn take(&mut self, table: Table, line: &str) {
        let state = &mut self.tables[table as usize];
        let is_listed = |chain: &str| {
            SharedChain::of(table.name(), chain).is_some()
                || table == Table::Filter && chain == names::FIREWALL
        };
        match SavedLine::parse(line) {
            SavedLine::Chain { name, policy } => {
                if policy != "-" || is_listed(name) {
                    state.listed.insert(name.into(), Vec::new());
                } else if writes(Mode::Iptables, table.name(), name) {
                    state.own.insert(name.into(), EMPTY);
                }
            }
            SavedLine::Rule { chain, rule } => {
                if let Some(known) = state.own.get_mut(chain) {
                    *known = with(*known, rule);
                } else if let Some(rules) = state.listed.get_mut(chain) {
                    rules.push(PresentRule { digest: digest(rule), rule: rule.to_owned() });
                }
            }
            SavedLine::Table(_) | SavedLine::Other => {}
        }
    }
}

const EMPTY: u64 = 0;

/// Returns the digest of a chain with one more rule.
fn with(chain: u64, rule: &str) -> u64 {
    (chain.rotate_left(7) ^ digest(rule)).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1)
}

pub(super) fn chain_digest(rules: &[String]) -> u64 {
    rules.iter().fold(EMPTY, |digest, rule| with(digest, rule))
}

impl OwnChain {
    pub(super) fn digest(&self) -> u64 {
        chain_digest(&self.rules)
    }
}
