//! Rules of modes iptables and ipvs in iptables-legacy. The kernel can only replace a whole table
//! there, which would undo what others change at the same time. So the rules are removed by
//! iptables-legacy-save and -restore, which share a lock with other tools. If these tools are
//! missing, the removal fails with an error that says what to call.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Error, Found, Part, PartKind, Purpose, Removal, nft,
    plan::{self, Chain, Plan, Rule},
};
use crate::{
    model::mode::Mode,
    names::{self, Scope},
    sys::{
        nftables::TableFamily,
        xtables::{
            self, Backend, Tools, program,
            saved::{SavedLine, after, words},
        },
    },
};

fn location(family: TableFamily, table: &str) -> String {
    format!("{}-legacy {table}", program(family))
}

pub(super) type LegacyTable = (TableFamily, &'static str);

pub(super) fn tables() -> impl Iterator<Item = LegacyTable> {
    let of = |family| names::IPTABLES.into_iter().map(move |table| (family, table));
    TableFamily::ALL.into_iter().flat_map(of)
}

/// For each table, its outline when it was last read and its number of chains that only a
/// kube-proxy makes. The kernel only returns whole tables, so a table is read again only if its
/// outline has changed.
#[derive(Debug, Default)]
pub(super) struct ChainCounts {
    counts: BTreeMap<LegacyTable, (xtables::Outline, usize)>,
    /// The modes in use, whose chains were not counted.
    in_use: Vec<Mode>,
    /// The only mode whose chains were counted.
    only: Option<Mode>,
}

impl ChainCounts {
    /// Returns the number of chains in this table that only a kube-proxy makes.
    fn own_chains(&mut self, (family, table): LegacyTable, scope: Scope<'_>) -> Result<usize, Error> {
        if (self.in_use.as_slice(), self.only) != (scope.in_use, scope.only) {
            self.counts.clear();
            (self.in_use, self.only) = (scope.in_use.to_vec(), scope.only);
        }
        if !xtables::tables(family)?.iter().any(|name| name == table) {
            return Ok(0);
        }
        if let Some((outline, count)) = self.counts.get(&(family, table))
            && xtables::outline(family, table)?.as_ref() == Some(outline)
        {
            return Ok(*count);
        }
        let Some((outline, chains)) = xtables::chains(family, table)? else { return Ok(0) };
        let count = plan::count(table, chains.iter().map(String::as_str), scope);
        self.counts.insert((family, table), (outline, count));
        Ok(count)
    }

    pub(super) fn find(&mut self, scope: Scope<'_>, found: &mut Found) {
        for (family, table) in tables() {
            let part =
                |count| (count > 0).then(|| Part::new(location(family, table), PartKind::Chains, count));
            let parts =
                self.own_chains((family, table), scope).map(|count| part(count).into_iter().collect());
            found.note(parts);
        }
    }

    pub(super) fn remove(
        &mut self,
        purpose: Purpose,
        scope: Scope<'_>,
        tables: &[LegacyTable],
        removed: &mut Removal,
    ) {
        for table in tables {
            let there = self.own_chains(*table, scope);
            let done = there.and_then(|count| match count {
                0 => Ok(()),
                _ => remove_from(purpose, scope, *table, removed),
            });
            if let Err(error) = done {
                removed.pending.legacy.push(*table);
                removed.note(Err(error));
            }
        }
    }
}

fn remove_from(
    purpose: Purpose,
    scope: Scope<'_>,
    (family, table): LegacyTable,
    removed: &mut Removal,
) -> Result<(), Error> {
    let tools = Tools::find(family, Backend::Legacy)
        .ok_or_else(|| Error::NoLegacyTools { program: program(family) })?;
    let mut text = String::new();
    tools.save(table, |line| text.extend([line, "\n"]))?;
    let (chains, rules) = parse(&text, scope);
    let is_filled = |chain: &str| Ok(text.contains(&format!("\n-A {chain} ")));
    let plan = plan::plan(table, &chains, &rules, &BTreeSet::new(), purpose, scope)
        .without_done::<Error>(is_filled)?;
    if !plan.is_empty() {
        if purpose == Purpose::TakeOver && table == "nat" && !names::translates(scope.in_use) {
            nft::hold(family, removed)?;
        }
        tools.restore(&restoration(table, &plan))?;
    }
    removed.plan(&location(family, table), plan);
    Ok(())
}

/// Returns the input of iptables-restore. A line `:CHAIN` empties the chain, or makes it.
fn restoration(table: &str, plan: &Plan<String>) -> String {
    let mut text = format!("*{table}\n");
    for chain in &plan.emptied {
        text.push_str(&format!(":{chain} - [0:0]\n"));
    }
    for (chain, rule) in &plan.rules {
        text.push_str(&format!("-D {chain} {rule}\n"));
    }
    for chain in &plan.deleted {
        text.push_str(&format!("-X {chain}\n"));
    }
    text + "COMMIT\n"
}

/// Parses the output of iptables-save: every chain, and the rules of chains that are not
/// kube-proxy's.
fn parse(text: &str, scope: Scope<'_>) -> (Vec<Chain>, Vec<Rule<String>>) {
    let (mut chains, mut rules) = (Vec::new(), Vec::new());
    let mut table = "";
    for line in text.lines() {
        match SavedLine::parse(line) {
            SavedLine::Table(name) => table = name,
            SavedLine::Chain { name, policy } => {
                chains.push(Chain { name: name.to_owned(), base: policy != "-", drops: policy == "DROP" });
            }
            SavedLine::Rule { chain, rule } if !names::is_chain(table, chain, scope) => {
                let words = words(rule);
                let targets: Vec<String> = after(&words, &["-j", "-g"]).into_iter().collect();
                rules.push(Rule {
                    chain: chain.to_owned(),
                    name: rule.to_owned(),
                    comment: after(&words, &["--comment"]),
                    drops: targets.iter().any(|target| matches!(target.as_str(), "DROP" | "REJECT")),
                    targets,
                });
            }
            SavedLine::Rule { .. } | SavedLine::Other => {}
        }
    }
    (chains, rules)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use nix::sched::{CloneFlags, unshare};

    use super::*;

    #[test]
    #[ignore = "needs root"]
    fn as_root_a_table_is_read_only_when_it_has_changed() {
        // The thread ends with the test, and its network namespace with it.
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let run = |arguments: &str| {
            let output = Command::new("iptables-legacy").args(arguments.split(' ')).output();
            output.is_ok_and(|output| output.status.success())
        };
        if !run("-t nat -N KUBE-SERVICES") {
            println!("skipped: iptables-legacy is not installed, or the kernel has none");
            return;
        }
        let nat = (TableFamily::Ipv4, "nat");
        let mut seen = ChainCounts::default();
        assert_eq!(seen.own_chains(nat, Scope::default()).unwrap(), 1);
        // The count is made wrong, to show that the second call does not read the table.
        seen.counts.get_mut(&nat).unwrap().1 = 7;
        assert_eq!(seen.own_chains(nat, Scope::default()).unwrap(), 7);
        // This changes another table.
        assert!(run("-t filter -N KUBE-FORWARD"));
        assert_eq!(
            (
                seen.own_chains(nat, Scope::default()).unwrap(),
                seen.own_chains((nat.0, "filter"), Scope::default()).unwrap()
            ),
            (7, 1)
        );
        for (change, expected) in [
            ("-t nat -A KUBE-SERVICES -p tcp -j RETURN", 1),
            ("-t nat -N KUBE-NODEPORTS", 2),
            ("-t nat -X KUBE-NODEPORTS", 1),
            ("-t nat -N MINE", 1),
        ] {
            seen.counts.get_mut(&nat).unwrap().1 = 7;
            assert!(run(change), "{change}");
            assert_eq!(seen.own_chains(nat, Scope::default()).unwrap(), expected, "{change}");
        }
    }

    const SAVED: &str = r#"# Generated by iptables-save v1.8.9
*nat
:PREROUTING ACCEPT [10:600]
:POSTROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-A - [0:0]
:MINE - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A PREROUTING -m comment --comment "they said \"-j KUBE-SERVICES\"" -j MINE
-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m comment --comment "default/web" -m tcp --dport 80 -j KUBE-SVC-A
-A MINE -m comment --comment plain -g KUBE-SVC-A
COMMIT
"#;

    #[test]
    fn what_is_saved_becomes_what_is_restored() {
        let (chains, rules) = parse(SAVED, Scope::default());
        assert_eq!(chains.len(), 5);
        assert!(chains[0].base && !chains[0].drops && !chains[2].base);
        assert_eq!(rules.len(), 3);
        assert_eq!(rules[1].comment.as_deref(), Some("they said \"-j KUBE-SERVICES\""));
        assert_eq!(
            (rules[1].targets.as_slice(), rules[2].targets.as_slice()),
            (&["MINE".to_owned()][..], &["KUBE-SVC-A".to_owned()][..])
        );
        assert_eq!(rules[2].comment.as_deref(), Some("plain"));
        let plan = plan::plan("nat", &chains, &rules, &BTreeSet::new(), Purpose::Cleanup, Scope::default());
        assert_eq!(
            restoration("nat", &plan),
            "*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-SVC-A - [0:0]\n\
             -D PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n\
             -X KUBE-SERVICES\nCOMMIT\n"
        );
    }
}
