//! Rules in nf_tables: those of mode nftables, and those of modes iptables and ipvs by
//! iptables-nft. One transaction removes them.
//!
//! The kernel translates established connections only while a chain of type nat is registered, and
//! conntrack sees packets only while a rule uses it. If the removal took the last of either, every
//! translated connection would break.
//!
//! So [`Purpose::TakeOver`] leaves a holder in each family: the table `kube-proxy` with one chain
//! of type nat, whose rule uses conntrack and does nothing else. A kube-proxy that starts later
//! replaces it like its own table.

use std::{collections::BTreeSet, ops::Range};

use super::{
    Error, Part, PartKind, Purpose, Removal, Retained,
    plan::{self, Chain, Plan, Rule},
};
use crate::{
    model::mode::Mode,
    names::{self, Scope},
    sys::{
        CallError,
        net::netlink::Refused,
        nftables::{Batch, NfTables, TableFamily},
    },
};

/// The number of attempts. Other programs may change the rules at the same time, and chains may
/// turn out to be in use.
const TRIES: usize = 8;

type ChainId = (TableFamily, &'static str, String);
type TableId = (TableFamily, &'static str);

/// Tables and chains, without rules.
#[derive(Debug, Default)]
struct Inventory {
    /// Tables of [`names::OWN_TABLES`] that are more than a holder.
    tables: Vec<TableId>,
    /// Families whose table `kube-proxy` is only a holder.
    holders: Vec<TableFamily>,
    /// Tables of iptables that have chains of kube-proxy's, with all their chains.
    chains: Vec<(TableFamily, &'static str, Vec<Chain>)>,
}

impl Inventory {
    fn take(nftables: &NfTables, families: &[TableFamily], scope: Scope<'_>) -> Result<Self, CallError> {
        let mut inventory = Self::default();
        for family in families.iter().copied() {
            let tables = nftables.tables(family)?;
            let has = |name: &str| tables.iter().any(|table| table == name);
            let is_left = |(table, mode): &(&str, Mode)| has(table) && scope.has(&[*mode]);
            let own_tables: Vec<_> = names::OWN_TABLES.into_iter().filter(is_left).collect();
            if own_tables.is_empty() && !names::IPTABLES.into_iter().any(has) {
                continue;
            }
            let all = nftables.chains(family)?;
            for (table, _) in own_tables {
                let mut chains = all.iter().filter(|chain| chain.table == table);
                let is_holder = matches!((chains.next(), chains.next()), (Some(only), None) if only.name == names::HOLDER);
                if is_holder {
                    inventory.holders.push(family);
                } else {
                    inventory.tables.push((family, table));
                }
            }
            for table in names::IPTABLES {
                let chains: Vec<Chain> = all
                    .iter()
                    .filter(|chain| chain.table == table)
                    .map(|chain| Chain { name: chain.name.clone(), base: chain.base, drops: chain.drops })
                    .collect();
                if !own(table, &chains, scope).is_empty() {
                    inventory.chains.push((family, table, chains));
                }
            }
        }
        Ok(inventory)
    }
}

fn own<'a>(table: &str, chains: &'a [Chain], scope: Scope<'_>) -> Vec<&'a str> {
    plan::own_chains(table, chains.iter().map(|chain| chain.name.as_str()), scope)
}

fn location(family: TableFamily, table: &str) -> String {
    format!("nftables {} {table}", family.name())
}

fn own_table((family, table): TableId) -> Part {
    Part::new(location(family, table), PartKind::Tables, 1)
}

pub(super) fn find(scope: Scope<'_>) -> Result<Vec<Part>, Error> {
    let Some(nftables) = NfTables::open()? else { return Ok(Vec::new()) };
    let inventory = Inventory::take(&nftables, &TableFamily::ALL, scope)?;
    let tables = inventory.tables.iter().map(|table| own_table(*table));
    let chains = inventory.chains.iter().map(|(family, table, chains)| {
        let names = chains.iter().map(|chain| chain.name.as_str());
        Part::new(location(*family, table), PartKind::Chains, plan::count(table, names, scope))
    });
    Ok(tables.chain(chains).collect())
}

/// Makes the holder of a family, before rules of iptables-legacy are removed.
pub(super) fn hold(family: TableFamily, removed: &mut Removal) -> Result<(), Error> {
    let Some(nftables) = NfTables::load()? else {
        removed.without_holder.push(location(family, names::NFTABLES_TABLE));
        return Ok(());
    };
    if nftables.tables(family)?.iter().any(|table| table == names::NFTABLES_TABLE) {
        return Ok(());
    }
    let mut batch = Batch::default();
    // The range begins with the first message of the batch, which a kernel without nf_tables
    // refuses.
    let holders = [(family, 0..add_holder_messages(&mut batch, family).end)];
    let refused = nftables.commit(batch)?;
    if !cannot_be_held(&refused, &holders).is_empty() {
        removed.without_holder.push(location(family, names::NFTABLES_TABLE));
        return Ok(());
    }
    match refused.first() {
        // EEXIST means that another program has made the table meanwhile.
        None | Some(Refused { errno: libc::EEXIST, .. }) => {
            removed.retained.push(holder(family));
            Ok(())
        }
        Some(refused) => Err(Error::refused(refused.errno)),
    }
}

/// Removes holders, which are not needed when a mode in use translates.
pub(super) fn remove_holders(scope: Scope<'_>) -> Result<(), Error> {
    let Some(nftables) = NfTables::open()? else { return Ok(()) };
    for family in Inventory::take(&nftables, &TableFamily::ALL, scope)?.holders {
        let mut batch = Batch::default();
        batch.delete_table(family, names::NFTABLES_TABLE);
        match nftables.commit(batch)?.first() {
            // ENOENT means that another program has removed it.
            None | Some(Refused { errno: libc::ENOENT, .. }) => {}
            Some(refused) => return Err(Error::refused(refused.errno)),
        }
    }
    Ok(())
}

/// A family, and the indices of its holder's messages in a transaction.
type Holder = (TableFamily, Range<u32>);

fn add_holder_messages(batch: &mut Batch, family: TableFamily) -> Range<u32> {
    batch.make_holder(family, names::NFTABLES_TABLE, names::HOLDER, "keeps connections translated")
}

/// Returns the families for which this kernel cannot make a holder, because it lacks nf_tables or a
/// module. The first refusal of a holder's messages has the cause, and later ones follow from it.
fn cannot_be_held(refused: &[Refused], holders: &[Holder]) -> Vec<TableFamily> {
    let first = |messages: &Range<u32>| {
        let of_holder = refused.iter().filter(|refused| messages.contains(&refused.message));
        of_holder.min_by_key(|refused| refused.message).map(|refused| refused.errno)
    };
    let cannot = |errno| matches!(errno, libc::ENOENT | libc::EINVAL | libc::EOPNOTSUPP | libc::EAFNOSUPPORT);
    holders
        .iter()
        .filter(|(_, messages)| first(messages).is_some_and(cannot))
        .map(|(family, _)| *family)
        .collect()
}

fn holder(family: TableFamily) -> Retained {
    Retained::new(
        location(family, names::NFTABLES_TABLE),
        names::HOLDER.to_owned(),
        "made by this proxy, without effect on new connections: the kernel translates established connections while it is there".to_owned(),
    )
}

struct TablePlan {
    family: TableFamily,
    table: &'static str,
    plan: Plan<u64>,
}

/// The changes to the tables of [`names::OWN_TABLES`].
struct OwnTables {
    deleted: Vec<TableId>,
    /// Families that get a holder.
    held: Vec<TableFamily>,
    /// Families that need a holder, but for which the kernel cannot make one.
    without_holder: Vec<TableFamily>,
}

impl OwnTables {
    /// Decides on these tables. A netfilter mode in use translates by itself, so that it needs no
    /// holder.
    fn new(
        inventory: &Inventory,
        plans: &[TablePlan],
        unable: &[TableFamily],
        purpose: Purpose,
        scope: Scope<'_>,
    ) -> Self {
        let mut deleted = inventory.tables.clone();
        if purpose == Purpose::Cleanup || names::translates(scope.in_use) {
            deleted.extend(inventory.holders.iter().map(|family| (*family, names::NFTABLES_TABLE)));
            return Self { deleted, held: Vec::new(), without_holder: Vec::new() };
        }
        let translates = |family: TableFamily| {
            let in_iptables = |table_plan: &TablePlan| {
                (table_plan.family, table_plan.table) == (family, "nat") && !table_plan.plan.is_empty()
            };
            let translated = deleted.iter().any(|table| table.0 == family) || plans.iter().any(in_iptables);
            translated && !inventory.holders.contains(&family)
        };
        let wanted = TableFamily::ALL.into_iter().filter(|family| translates(*family));
        let (without_holder, held) = wanted.partition(|family| unable.contains(family));
        Self { deleted, held, without_holder }
    }

    fn is_empty(&self) -> bool {
        self.deleted.is_empty() && self.held.is_empty()
    }
}

/// Removes everything in one transaction, and reports what stays.
pub(super) fn remove(
    purpose: Purpose,
    scope: Scope<'_>,
    families: &[TableFamily],
    removed: &mut Removal,
) -> Result<(), Error> {
    let Some(nftables) = NfTables::open()? else { return Ok(()) };
    let mut busy: BTreeSet<ChainId> = BTreeSet::new();
    let mut unable = Vec::new();
    let mut last = None;
    for _ in 0..TRIES {
        let inventory = Inventory::take(&nftables, families, scope)?;
        let plans = plans(&nftables, &inventory, &busy, purpose, scope)?;
        let tables = OwnTables::new(&inventory, &plans, &unable, purpose, scope);
        let Transaction { batch, deletions, holders } = transaction(&tables, &plans);
        let nothing_to_do = tables.is_empty() && plans.iter().all(|table_plan| table_plan.plan.is_empty());
        let refused = if nothing_to_do { Vec::new() } else { nftables.commit(batch)? };
        if refused.is_empty() {
            report(&tables, plans, removed);
            return Ok(());
        }
        let without_holder = cannot_be_held(&refused, &holders);
        let is_of_holder = |refusal: &Refused| {
            let mut of_these = holders.iter().filter(|(family, _)| without_holder.contains(family));
            of_these.any(|(_, messages)| messages.contains(&refusal.message))
        };
        for refusal in refused {
            last = Some(refusal.errno);
            if is_of_holder(&refusal) {
                continue;
            }
            let deleted = deletions.iter().find(|(message, _)| *message == refusal.message);
            match (refusal.errno, deleted) {
                (libc::EBUSY, Some((_, chain))) => {
                    busy.insert(chain.clone());
                }
                // Another program has changed the rules. The next attempt reads them again.
                (libc::ENOENT | libc::EEXIST | libc::EAGAIN | libc::ERESTART, _) => {}
                (errno, _) => return Err(Error::refused(errno)),
            }
        }
        unable.extend(without_holder);
    }
    Err(Error::refused(last.unwrap_or(libc::EAGAIN)))
}

fn plans(
    nftables: &NfTables,
    inventory: &Inventory,
    busy: &BTreeSet<ChainId>,
    purpose: Purpose,
    scope: Scope<'_>,
) -> Result<Vec<TablePlan>, CallError> {
    let table_plan = |(family, table, chains): &(TableFamily, &'static str, Vec<Chain>)| {
        let mut rules = Vec::new();
        for chain in chains.iter().filter(|chain| !names::is_chain(table, &chain.name, scope)) {
            let found = nftables.rules(*family, table, &chain.name)?;
            rules.extend(found.into_iter().map(|rule| Rule {
                chain: chain.name.clone(),
                name: rule.handle,
                comment: rule.comment,
                targets: rule.targets,
                drops: rule.drops,
            }));
        }
        let here = |address: &&ChainId| address.0 == *family && address.1 == *table;
        let busy = busy.iter().filter(here).map(|(_, _, chain)| chain.clone()).collect();
        let is_filled = |chain: &str| Ok(!nftables.rules(*family, table, chain)?.is_empty());
        let plan = plan::plan(table, chains, &rules, &busy, purpose, scope).without_done(is_filled)?;
        Ok(TablePlan { family: *family, table, plan })
    };
    inventory.chains.iter().map(table_plan).collect()
}

struct Transaction {
    batch: Batch,
    /// The chains to delete, each with the index of the message that deletes it.
    deletions: Vec<(u32, ChainId)>,
    holders: Vec<Holder>,
}

/// Builds the transaction. All chains are emptied before any is deleted, because they jump to each
/// other.
fn transaction(tables: &OwnTables, plans: &[TablePlan]) -> Transaction {
    let (mut batch, mut deletions) = (Batch::default(), Vec::new());
    for TablePlan { family, table, plan } in plans.iter().filter(|table_plan| !table_plan.plan.is_empty()) {
        for (chain, handle) in &plan.rules {
            batch.delete_rule(*family, table, chain, *handle);
        }
        for chain in &plan.emptied {
            batch.flush_chain(*family, table, chain);
        }
        for chain in &plan.deleted {
            deletions.push((batch.next(), (*family, *table, chain.clone())));
            batch.delete_chain(*family, table, chain);
        }
    }
    for (family, table) in &tables.deleted {
        batch.delete_table(*family, table);
    }
    let holders =
        tables.held.iter().map(|family| (*family, add_holder_messages(&mut batch, *family))).collect();
    Transaction { batch, deletions, holders }
}

fn report(tables: &OwnTables, plans: Vec<TablePlan>, removed: &mut Removal) {
    for TablePlan { family, table, plan } in plans {
        removed.plan(&location(family, table), plan);
    }
    removed.parts.extend(tables.deleted.iter().map(|table| own_table(*table)));
    removed.retained.extend(tables.held.iter().map(|family| holder(*family)));
    let without_holder = tables.without_holder.iter().map(|family| location(*family, names::NFTABLES_TABLE));
    removed.without_holder.extend(without_holder);
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const HELD: [TableFamily; 2] = TableFamily::ALL;

    #[rstest]
    #[case::all_is_well(&[], &[])]
    #[case::no_chain_of_type_nat(&[(8, libc::ENOENT), (9, libc::ENOENT)], &[HELD[0]])]
    #[case::no_expression_in_either(&[(9, libc::ENOENT), (12, libc::ENOENT)], &HELD)]
    #[case::no_nf_tables(&[(7, libc::EOPNOTSUPP)], &[HELD[0]])]
    #[case::another_program_has_made_it(&[(7, libc::EEXIST), (8, libc::ENOENT)], &[])]
    #[case::whatever_the_order(&[(8, libc::ENOENT), (7, libc::EPERM)], &[])]
    #[case::something_else_is_gone(&[(6, libc::ENOENT), (3, libc::EBUSY)], &[])]
    fn what_cannot_be_held_shows_in_the_refusals(
        #[case] refused: &[(u32, i32)],
        #[case] expected: &[TableFamily],
    ) {
        let refused: Vec<_> =
            refused.iter().map(|(message, errno)| Refused { message: *message, errno: *errno }).collect();
        assert_eq!(cannot_be_held(&refused, &[(HELD[0], 7..10), (HELD[1], 10..13)]), expected);
    }

    #[test]
    fn what_cannot_be_held_goes_all_the_same() {
        let own = HELD.map(|family| (family, names::NFTABLES_TABLE));
        let inventory = Inventory { tables: own.to_vec(), ..Inventory::default() };
        let tables = |unable: &[TableFamily]| {
            OwnTables::new(&inventory, &[], unable, Purpose::TakeOver, Scope::default())
        };
        let (whole, partly) = (tables(&[]), tables(&[HELD[0]]));
        assert_eq!((whole.deleted.as_slice(), whole.held.as_slice()), (&own[..], &HELD[..]));
        assert!(whole.without_holder.is_empty());
        assert_eq!(partly.deleted, own);
        assert_eq!((partly.held, partly.without_holder), (vec![HELD[1]], vec![HELD[0]]));
        let holders: Vec<_> = transaction(&whole, &[]).holders;
        assert_eq!(holders, [(HELD[0], 3..6), (HELD[1], 6..9)]);
    }

    #[rstest]
    #[case::nobody_else_translates(&[], &[], &[HELD[0]], &[])]
    #[case::a_mode_in_use_translates(&[], &[Mode::Nftables], &[], &[])]
    #[case::there_is_a_holder(&[HELD[0]], &[Mode::Ebpf], &[], &[])]
    #[case::the_holder_is_of_no_use_any_more(&[HELD[0]], &[Mode::Iptables], &[], &[HELD[0]])]
    fn connections_that_mode_userspace_carries_stay_translated(
        #[case] holders: &[TableFamily],
        #[case] in_use: &[Mode],
        #[case] held: &[TableFamily],
        #[case] released: &[TableFamily],
    ) {
        let mut own = vec![(HELD[0], names::USERSPACE_TABLE)];
        let inventory = Inventory { tables: own.clone(), holders: holders.to_vec(), ..Inventory::default() };
        let tables = OwnTables::new(&inventory, &[], &[], Purpose::TakeOver, Scope::but(in_use));
        own.extend(released.iter().map(|family| (*family, names::NFTABLES_TABLE)));
        assert_eq!((tables.deleted, tables.held.as_slice()), (own, held));
    }
}
