//! Modes whose rules have kube-proxy's own names: a mark tells them from a running kube-proxy's.

use ipnet::IpNet;

use super::{Error, ErrorKind, Removed};
use crate::{
    leftovers::{self, names::Mark},
    mode::Mode,
};

/// The rule of [`leftovers::names::mark`], as iptables-save prints it.
pub(super) fn mark(mode: Mode) -> Option<String> {
    leftovers::names::mark(mode).map(rule)
}

/// The rule of [`leftovers::names::mark_of_own_chains`].
pub(super) fn mark_of_own_chains(mode: Mode) -> Option<String> {
    leftovers::names::mark_of_own_chains(mode).map(rule)
}

fn rule(mark: Mark) -> String {
    format!("-m comment --comment \"{}\"", mark.comment)
}

/// `keeps`: `ipvs.excludeCIDRs`. An error if a controller is in this mode.
pub(super) fn remove_own(mode: Mode, keeps: &[IpNet]) -> Result<Removed, Error> {
    let removal = leftovers::remove_own(mode, keeps).map_err(|error| {
        let is_taken = matches!(error, leftovers::Error::AtWork { .. });
        Error::new(if is_taken { ErrorKind::TakenOver } else { ErrorKind::Other }, error)
    })?;
    if let Some(problem) = removal.problems.into_iter().next() {
        return Err(Error::new(ErrorKind::Other, problem));
    }
    let mut tables: Vec<_> = removal.parts.into_iter().map(|part| part.place).collect();
    tables.dedup();
    Ok(Removed { tables, ..Removed::default() })
}
