//! Chains of iptables that are written whole, for modes with few rules. What differs from the
//! output of iptables-save is written with the node's tools. Mode iptables, which has a chain for
//! each endpoint, writes single rules and has a writer of its own.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use crate::{
    model::objects::IpFamily,
    names::PROXY_FIREWALL,
    sys::{
        has_ipv6,
        xtables::{
            Backend, ToolError, Tools,
            saved::{SavedLine, digest},
        },
    },
};

/// The rules of each chain as iptables-save prints them. The keys are table and chain.
pub(in crate::modes) type Chains = BTreeMap<(&'static str, &'static str), Vec<String>>;

/// A rule at the beginning of one of the kernel's chains. It is found again by its comment.
#[derive(Clone, Copy, Debug)]
pub(in crate::modes) struct Jump {
    pub(in crate::modes) table: &'static str,
    pub(in crate::modes) from: &'static str,
    pub(in crate::modes) to: &'static str,
    pub(in crate::modes) comment: &'static str,
}

impl Jump {
    fn rule(&self) -> String {
        format!("-m comment --comment \"{}\" -j {}", self.comment, self.to)
    }
}

/// Returns the unwanted rules of table filter that jump from a chain of the kernel to
/// [`PROXY_FIREWALL`], each with its chain. They are rules of another mode: modes iptables and ipvs
/// both fill [`PROXY_FIREWALL`], but mode iptables sends only packets of new connections there.
pub(in crate::modes) fn other_firewall_jumps<'a, R: Iterator<Item = &'a str>>(
    rules_of: impl Fn(&'static str) -> R,
    is_wanted: impl Fn(&str, &str) -> bool,
) -> Vec<(&'static str, &'a str)> {
    let leads_there =
        |rule: &str| rule.strip_suffix(PROXY_FIREWALL).is_some_and(|before| before.ends_with("-j "));
    let chains = ["INPUT", "FORWARD", "OUTPUT"].into_iter();
    let rules = chains.flat_map(|chain| rules_of(chain).map(move |rule| (chain, rule)));
    rules.filter(|(chain, rule)| leads_there(rule) && !is_wanted(chain, rule)).collect()
}

/// Returns input of iptables-restore that gives one table the chains of `chains`, and those of
/// `jumps` that jump to them. Other modes' jumps to [`PROXY_FIREWALL`] are removed in the same
/// transaction. `saved` is the table as iptables-save prints it. `None`: the table is as desired.
pub(in crate::modes) fn restoration(
    table: &str,
    chains: &Chains,
    jumps: &[Jump],
    saved: &str,
) -> Option<String> {
    let mut there: BTreeSet<&str> = BTreeSet::new();
    let mut rules_there: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for line in saved.lines().map(SavedLine::parse) {
        match line {
            SavedLine::Chain { name, .. } => {
                there.insert(name);
            }
            SavedLine::Rule { chain, rule } => rules_there.entry(chain).or_default().push(rule),
            SavedLine::Table(_) | SavedLine::Other => {}
        }
    }
    let found = |chain: &str| rules_there.get(chain).map(Vec::as_slice).unwrap_or_default();
    let (mut declared, mut rules) = (String::new(), String::new());
    for ((_, chain), wanted) in chains.iter().filter(|((of, _), _)| *of == table) {
        let is_same = found(chain).iter().map(|rule| digest(rule)).eq(wanted.iter().map(|rule| digest(rule)));
        if there.contains(chain) && is_same {
            continue;
        }
        // This line makes the chain, or empties it, in the same transaction.
        writeln_to(&mut declared, format_args!(":{chain} - [0:0]"));
        wanted.iter().for_each(|rule| writeln_to(&mut rules, format_args!("-A {chain} {rule}")));
    }
    let leads_there = |jump: &&Jump| jump.table == table && chains.contains_key(&(jump.table, jump.to));
    let jumps: Vec<(&str, String)> =
        jumps.iter().filter(leads_there).map(|jump| (jump.from, jump.rule())).collect();
    if chains.contains_key(&(table, PROXY_FIREWALL)) {
        let is_wanted = |from: &str, rule: &str| jumps.iter().any(|(of, jump)| *of == from && jump == rule);
        for (from, rule) in other_firewall_jumps(|chain| found(chain).iter().copied(), is_wanted) {
            writeln_to(&mut rules, format_args!("-D {from} {rule}"));
        }
    }
    for (from, jump) in jumps {
        if !found(from).contains(&jump.as_str()) {
            writeln_to(&mut rules, format_args!("-I {from} {jump}"));
        }
    }
    let is_empty = declared.is_empty() && rules.is_empty();
    (!is_empty).then(|| format!("*{table}\n{declared}{rules}COMMIT\n"))
}

fn writeln_to(text: &mut String, line: std::fmt::Arguments<'_>) {
    // Writing to a String cannot fail.
    let _written = writeln!(text, "{line}");
}

/// Returns true if the kernel has NAT for the family. Kernels may be built without NAT for IPv6,
/// and iptables-legacy needs a module of its own for it. `read` reads the table nat.
pub(in crate::modes) fn can_translate<T>(
    family: IpFamily,
    read: impl FnOnce() -> Result<T, ToolError>,
) -> bool {
    let read = if family == IpFamily::Ipv4 { Ok(()) } else { read().map(drop) };
    if let Err(error) = &read {
        tracing::warn!(%error, "IPv6 is not served");
    }
    read.is_ok()
}

/// The chains of one family, read and written with the node's iptables-save and iptables-restore.
#[derive(Debug)]
pub(in crate::modes) struct FamilyChains {
    pub(in crate::modes) family: IpFamily,
    /// The number of runs of iptables-restore that failed.
    pub(in crate::modes) failures: u64,
    pub(in crate::modes) tools: Tools,
}

impl FamilyChains {
    /// Returns one value for each family that this node has and has tools for.
    pub(in crate::modes) fn open(backend: Backend) -> Vec<Self> {
        let is_there = |family: &IpFamily| *family == IpFamily::Ipv4 || has_ipv6();
        let open = |family: IpFamily| {
            Some(Self { family, failures: 0, tools: Tools::find(family.into(), backend)? })
        };
        IpFamily::ALL.into_iter().filter(is_there).filter_map(open).collect()
    }

    /// Gives the chains and jumps the rules of `chains` and `jumps`. Returns the number of tables
    /// that were written.
    pub(in crate::modes) fn write(&mut self, chains: &Chains, jumps: &[Jump]) -> Result<u64, ToolError> {
        let mut text = String::new();
        let mut count = 0;
        let tables: BTreeSet<&str> = chains.keys().map(|(table, _)| *table).collect();
        for table in tables {
            let saved = self.saved(table)?;
            if let Some(restoration) = restoration(table, chains, jumps, &saved) {
                text.push_str(&restoration);
                count += 1;
            }
        }
        if count > 0 {
            self.tools.restore(&text).inspect_err(|_| self.failures += 1)?;
        }
        Ok(count)
    }

    pub(in crate::modes) fn saved(&self, table: &str) -> Result<String, ToolError> {
        let mut saved = String::new();
        self.tools.save(table, |line| {
            saved.push_str(line);
            saved.push('\n');
        })?;
        Ok(saved)
    }
}
