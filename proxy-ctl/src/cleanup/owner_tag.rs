//! Finds out by owner tags whether this proxy was the last to write under kube-proxy's names. The
//! tags are those of [`names::owner_tag`] and [`names::owner_tag_of_own_chains`].

use super::{Error, PendingRemoval};
use crate::{
    model::mode::Mode,
    names::{self, OwnerTag},
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
pub(super) struct OwnerTags {
    /// The tables in which the chain has the tag.
    pub(super) tagged: Vec<NatTable>,
    /// The tables in which the chain lacks the tag: a kube-proxy has created the chain, or has
    /// written it after this proxy.
    pub(super) untagged: Vec<NatTable>,
}

impl OwnerTags {
    /// Looks for an owner tag in every table `nat`. Needs CAP_NET_ADMIN.
    pub(super) fn read(tag: Option<OwnerTag>) -> Result<Self, Error> {
        let mut tags = Self::default();
        let Some(OwnerTag { table, chain, comment }) = tag else { return Ok(tags) };
        let nftables = NfTables::open()?;
        for family in TableFamily::ALL {
            if let Some(nftables) = &nftables
                && nftables.has_chain(family, table, chain)?
            {
                let rules = nftables.rules(family, table, chain)?;
                let is_tagged = rules.iter().any(|rule| rule.comment.as_deref() == Some(comment));
                tags.add(NatTable::Nft(family), is_tagged);
            }
            // Asking for a table that does not exist would create it.
            if xtables::tables(family)?.iter().any(|name| name == table)
                && let Some(is_tagged) = xtables::has_comment(family, table, chain, comment)?
            {
                tags.add(NatTable::Legacy(family), is_tagged);
            }
        }
        Ok(tags)
    }

    fn add(&mut self, table: NatTable, is_tagged: bool) {
        if is_tagged { self.tagged.push(table) } else { self.untagged.push(table) }
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
    /// Compares owner tags. `common` are the mode's tags of [`names::owner_tag`], and `own` are
    /// its tags of [`names::owner_tag_of_own_chains`]. `other` are the tags of the other mode's own
    /// chains.
    pub(super) fn new(common: &OwnerTags, own: &OwnerTags, other: &OwnerTags) -> Self {
        let is_begun = |table: &NatTable| other.untagged.contains(table);
        let (begun, whole) = common.tagged.iter().copied().partition(is_begun);
        let partly = own.tagged.iter().copied().filter(|table| !common.tagged.contains(table)).collect();
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
pub fn has_owner_tag(mode: Mode) -> Result<bool, Error> {
    Ok(!OwnerTags::read(names::owner_tag(mode))?.tagged.is_empty())
}

/// Returns true if the mode's own chains exist, but those that two modes write belong to a
/// kube-proxy by now. Needs CAP_NET_ADMIN.
pub fn is_overwritten(mode: Mode) -> Result<bool, Error> {
    if names::shares_chains_with(mode).is_none() {
        return Ok(false);
    }
    let own = OwnerTags::read(names::owner_tag_of_own_chains(mode))?;
    if own.tagged.is_empty() {
        return Ok(false);
    }
    let common = OwnerTags::read(names::owner_tag(mode))?;
    Ok(!OwnNatTables::new(&common, &own, &OwnerTags::default()).partly.is_empty())
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
    #[case::of_a_build_without_the_second_tag(BOTH, &[], &[], BOTH, &[], &[])]
    #[case::taken_over_by_the_same_mode(&[], &[], &[], &[], &[], &[])]
    fn whose_chains_are_there(
        #[case] common: &[NatTable],
        #[case] own: &[NatTable],
        #[case] of_the_other_mode: &[NatTable],
        #[case] whole: &[NatTable],
        #[case] partly: &[NatTable],
        #[case] begun: &[NatTable],
    ) {
        let tagged = |tables: &[NatTable]| OwnerTags { tagged: tables.to_vec(), ..OwnerTags::default() };
        let other = OwnerTags { untagged: of_the_other_mode.to_vec(), ..OwnerTags::default() };
        let expected = OwnNatTables { whole: whole.to_vec(), partly: partly.to_vec(), begun: begun.to_vec() };
        assert_eq!(OwnNatTables::new(&tagged(common), &tagged(own), &other), expected);
    }
}
