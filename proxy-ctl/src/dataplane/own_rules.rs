//! Modes whose rules have kube-proxy's own names: a mark tells them from a running kube-proxy's.

use ipnet::IpNet;

use super::{Error, ErrorKind, Removed};
use crate::{leftovers, mode::Mode};

/// The rule of [`leftovers::names::mark`], as iptables-save prints it.
pub(super) fn mark(mode: Mode) -> Option<String> {
    leftovers::names::mark(mode).map(|mark| format!("-m comment --comment \"{}\"", mark.comment))
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
