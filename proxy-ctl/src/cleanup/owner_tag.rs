//! Finds out by owner tags whether this proxy was the last to write under kube-proxy's names. The
//! tags are those of [`names::mark`] and [`names::mark_of_own_chains`].

use super::{Error, PendingRemoval};
use crate::{
    model::mode::Mode,
    names::{self, Mark},
    sys::{
        nftables::{NfTables, TableFamily},
        xtables,
    },
};

/// A table `nat`, by backend and IP family.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum NatTable {
    Nft(TableFamily),
    Legacy(TableFamily),
}

/// The tables `nat` that have the chain of an owner tag.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Marks {
    /// The tables in which the chain has the tag.
    pub(super) marked: Vec<NatTable>,
    /// The tables in which the chain lacks the tag: a kube-proxy has created the chain, or has
    /// written it after this proxy.
    pub(super) unmarked: Vec<NatTable>,
}

impl Marks {
    /// Looks for an owner tag in every table `nat`. Needs CAP_NET_ADMIN.
    pub(super) fn read(mark: Option<Mark>) -> Result<Self, Error> {
        let mut marks = Self::default();
        let Some(Mark { table, chain, comment }) = mark else { return Ok(marks) };
        let nftables = NfTables::open()?;
        for family in TableFamily::ALL {
            if let Some(nftables) = &nftables
                && nftables.has_chain(family, table, chain)?
            {
                let rules = nftables.rules(family, table, chain)?;
                let is_marked = rules.iter().any(|rule| rule.comment.as_deref() == Some(comment));
                marks.add(NatTable::Nft(family), is_marked);
            }
            // Asking for a table that does not exist would create it.
            if xtables::tables(family)?.iter().any(|name| name == table)
                && let Some(is_marked) = xtables::has_comment(family, table, chain, comment)?
            {
                marks.add(NatTable::Legacy(family), is_marked);
            }
        }
        Ok(marks)
    }

    fn add(&mut self, table: NatTable, is_marked: bool) {
        if is_marked { self.marked.push(table) } else { self.unmarked.push(table) }
    }
}

/// The owners of the chains in the tables `nat` that a mode of this proxy has written.
///
/// Modes iptables and ipvs write some chains of the same names. For each of them, "the other mode"
/// is the other of these two.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct OwnNatTables {
    /// The tables in which all chains are this proxy's.
    pub(super) whole: Vec<NatTable>,
    /// The tables in which a kube-proxy in the other mode owns the chains that both modes write.
    pub(super) partly: Vec<NatTable>,
    /// The tables in which a kube-proxy in the other mode has created chains of that mode alone,
    /// but has not yet written the chains that both modes write.
    pub(super) begun: Vec<NatTable>,
}

impl OwnNatTables {
    /// Compares owner tags. `common` are the mode's tags of [`names::mark`], and `own` are its tags
    /// of [`names::mark_of_own_chains`]. `other` are the tags of [`names::mark_of_own_chains`] of
    /// the other mode.
    pub(super) fn new(common: &Marks, own: &Marks, other: &Marks) -> Self {
        let is_begun = |table: &NatTable| other.unmarked.contains(table);
        let (begun, whole) = common.marked.iter().copied().partition(is_begun);
        let partly = own.marked.iter().copied().filter(|table| !common.marked.contains(table)).collect();
        Self { whole, partly, begun }
    }
}

/// Returns the rules of modes iptables, ipvs and userspace in the backends and IP families of these
/// tables.
pub(super) fn rules_in(tables: &[NatTable]) -> PendingRemoval {
    let mut pending = PendingRemoval::default();
    for table in tables {
        match *table {
            NatTable::Nft(family) => pending.nft.push(family),
            NatTable::Legacy(family) => pending.legacy.extend(names::IPTABLES.map(|table| (family, table))),
        }
    }
    pending
}

/// Returns true if the mode's rules exist and are this proxy's. Needs CAP_NET_ADMIN.
pub fn is_marked(mode: Mode) -> Result<bool, Error> {
    Ok(!Marks::read(names::mark(mode))?.marked.is_empty())
}

/// Returns true if the mode's own chains exist, but those that two modes write belong to a
/// kube-proxy by now. Needs CAP_NET_ADMIN.
pub fn is_overwritten(mode: Mode) -> Result<bool, Error> {
    if names::shares_chains_with(mode).is_none() {
        return Ok(false);
    }
    let own = Marks::read(names::mark_of_own_chains(mode))?;
    if own.marked.is_empty() {
        return Ok(false);
    }
    let common = Marks::read(names::mark(mode))?;
    Ok(!OwnNatTables::new(&common, &own, &Marks::default()).partly.is_empty())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const IPV4: NatTable = NatTable::Nft(TableFamily::Ipv4);
    const IPV6: NatTable = NatTable::Nft(TableFamily::Ipv6);
    const BOTH: &[NatTable] = &[IPV4, IPV6];

    #[rstest]
    #[case::nobody_else(BOTH, BOTH, &[], BOTH, &[], &[])]
    #[case::taken_over_by_the_other_mode(&[], BOTH, BOTH, &[], BOTH, &[])]
    #[case::in_one_family_so_far(&[IPV6], BOTH, BOTH, &[], &[IPV4], &[IPV6])]
    #[case::in_the_only_family_that_it_serves(&[IPV6], BOTH, &[IPV4], &[IPV6], &[IPV4], &[])]
    #[case::chains_made_and_not_written(BOTH, BOTH, BOTH, &[], &[], BOTH)]
    #[case::of_a_build_without_the_second_mark(BOTH, &[], &[], BOTH, &[], &[])]
    #[case::taken_over_by_the_same_mode(&[], &[], &[], &[], &[], &[])]
    fn whose_chains_are_there(
        #[case] common: &[NatTable],
        #[case] own: &[NatTable],
        #[case] of_the_other_mode: &[NatTable],
        #[case] whole: &[NatTable],
        #[case] partly: &[NatTable],
        #[case] begun: &[NatTable],
    ) {
        let marked = |tables: &[NatTable]| Marks { marked: tables.to_vec(), ..Marks::default() };
        let other = Marks { unmarked: of_the_other_mode.to_vec(), ..Marks::default() };
        let expected = OwnNatTables { whole: whole.to_vec(), partly: partly.to_vec(), begun: begun.to_vec() };
        assert_eq!(OwnNatTables::new(&marked(common), &marked(own), &other), expected);
    }
}
