//! Whether it was this proxy that wrote last under kube-proxy's names: by the rules [`names::mark`] and [`names::mark_of_own_chains`].

use super::{
    Error, PendingRemoval,
    legacy::LegacyTable,
    names::{self, Mark},
};
use crate::{
    mode::Mode,
    sys::{
        nftables::{NfTables, TableFamily},
        xtables,
    },
};

/// Where a mark is.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Marks {
    nft: Vec<TableFamily>,
    legacy: Vec<TableFamily>,
}

impl Marks {
    /// Needs CAP_NET_ADMIN.
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
                marks.nft.extend(is_marked.then_some(family));
            }
            // To ask for another table would make it.
            let is_there = xtables::tables(family)?.iter().any(|name| name == table);
            if is_there && xtables::has_comment(family, table, comment)? {
                marks.legacy.push(family);
            }
        }
        Ok(marks)
    }

    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The rules beside the marks.
    pub(super) fn rules(&self) -> PendingRemoval {
        let of = |family: &TableFamily| names::IPTABLES.map(|table| (*family, table));
        let legacy: Vec<LegacyTable> = self.legacy.iter().flat_map(of).collect();
        PendingRemoval { nft: self.nft.clone(), legacy, ..PendingRemoval::default() }
    }
}

/// Whether the mode's rules are there, and this proxy's. Without privileges nothing is seen.
pub fn is_marked(mode: Mode) -> Result<bool, Error> {
    match Marks::read(names::mark(mode)) {
        Ok(marks) => Ok(!marks.is_empty()),
        Err(Error::Call(error)) if matches!(error.errno(), libc::EPERM | libc::EACCES) => Ok(false),
        Err(error) => Err(error),
    }
}
