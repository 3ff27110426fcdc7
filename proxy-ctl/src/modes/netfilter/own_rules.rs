//! Cleanup of modes whose rules have kube-proxy's own names. Owner tags distinguish their rules
//! from those of a running kube-proxy.

use ipnet::IpNet;

use crate::{
    cleanup,
    model::mode::Mode,
    modes::{Error, ErrorKind, Removed},
    names::{self, OwnerTag},
};

/// Returns the rule of the owner tag [`crate::names::owner_tag`], as iptables-save prints it.
pub(crate) fn owner_tag(mode: Mode) -> Option<String> {
    names::owner_tag(mode).map(rule)
}

/// Returns the rule of the owner tag [`crate::names::owner_tag_of_own_chains`], as iptables-save
/// prints it.
pub(crate) fn owner_tag_of_own_chains(mode: Mode) -> Option<String> {
    names::owner_tag_of_own_chains(mode).map(rule)
}

fn rule(tag: OwnerTag) -> String {
    format!("-m comment --comment \"{}\"", tag.comment)
}

/// Removes what proxy-ctl has written in this mode. Fails if a controller is active in it. `keeps`
/// is `ipvs.excludeCIDRs`.
pub(crate) fn remove_own(mode: Mode, keeps: &[IpNet]) -> Result<Removed, Error> {
    let removal = cleanup::remove_own(mode, keeps).map_err(|error| {
        let is_taken = matches!(error, cleanup::Error::InUse { .. });
        Error::new(if is_taken { ErrorKind::TakenOver } else { ErrorKind::Other }, error)
    })?;
    if let Some(problem) = removal.problems.into_iter().next() {
        return Err(Error::new(ErrorKind::Other, problem));
    }
    let mut objects: Vec<_> = removal.parts.into_iter().map(|part| part.location).collect();
    objects.dedup();
    Ok(Removed { objects, ..Removed::default() })
}
