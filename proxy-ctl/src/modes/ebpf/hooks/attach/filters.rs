//! BPF filters on the clsact qdisc, for kernels without tcx (before 6.6): finds, puts and removes
//! ours.

use std::collections::BTreeMap;

use super::Hooks;
use crate::{
    modes::ebpf::{
        Error,
        maps::{
            paths::{Paths, is_there, make_folder, remove_folder},
            pins::Ensured,
        },
        services::writer::Failures,
    },
    sys::{
        CallError, bpf,
        net::tc::{self, Direction},
    },
};

/// Handle of our filters.
const HANDLE: u32 = 0x7063;

/// Name of a folder in the interface's folder that says that we have made the clsact qdisc.
const MADE_QDISC: &str = "qdisc";

/// Priorities that our filters may have, the best first; see [`order`](super::order). A priority
/// belongs to one kind of filter for one protocol, so another program's filter may have taken it.
const PRIORITIES: [u16; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

/// Tries priorities until one is accepted. EINVAL means that filters of another kind, or for
/// another protocol, have the priority.
fn first_accepted(priorities: [u16; 8], put: impl Fn(u16) -> Result<(), CallError>) -> Result<(), CallError> {
    let [best, others @ ..] = priorities;
    others.into_iter().fold(put(best), |outcome, priority| match outcome {
        Err(e) if e.errno() == libc::EINVAL => put(priority),
        outcome => outcome,
    })
}

/// Returns an error if the interface has an ingress qdisc other than clsact. The kernel would put
/// filters of both directions into it. A filter of ours that is in it is removed, so that the qdisc
/// is as its owner has made it.
fn check_ingress_qdisc(paths: &Paths, qdiscs: &BTreeMap<u32, String>, index: u32) -> Result<(), Error> {
    match qdiscs.get(&index) {
        Some(kind) if kind != tc::CLSACT => {
            remove_filters(paths, index)?;
            Err(Error::IngressQdiscTaken(kind.clone()))
        }
        Some(_) | None => Ok(()),
    }
}

/// Returns true if the filter is ours. The handle alone does not show it, because each priority has
/// handles of its own: a filter of another program may have our handle with a priority that we
/// never take.
pub(crate) fn is_ours(filter: &tc::Filter) -> bool {
    filter.handle == HANDLE && PRIORITIES.contains(&filter.priority)
}

fn our_filter(index: u32, direction: Direction) -> Result<Option<tc::Filter>, CallError> {
    Ok(tc::filters(index, direction)?.into_iter().find(is_ours))
}

pub(super) fn has_filter(index: u32, direction: Direction) -> Result<bool, Error> {
    let failed = |source| Error::Detach { target: format!("interface {index}"), source };
    Ok(our_filter(index, direction).map_err(failed)?.is_some())
}

/// Removes our filter of this direction, and returns true if there was one.
pub(super) fn remove_filter(index: u32, direction: Direction) -> Result<bool, Error> {
    let failed = |source| Error::Detach { target: format!("interface {index}"), source };
    let Some(filter) = our_filter(index, direction).map_err(failed)? else { return Ok(false) };
    tc::remove_filter(index, direction, filter.priority, HANDLE).map_err(failed)
}

/// Returns true if there is an interface with this index in our network namespace.
pub(super) fn exists(index: u32) -> bool {
    // nix 0.31 returns an empty name if there is none.
    nix::net::if_::if_indextoname(index).is_ok_and(|name| !name.is_empty())
}

/// Removes our filters from an interface, and the qdisc if we have made it and it has no other
/// filters. Returns how many filters were removed.
pub(crate) fn remove_filters(paths: &Paths, index: u32) -> Result<usize, Error> {
    let folder = paths.clsact().join(index.to_string());
    if !is_there(&folder)? {
        return Ok(0);
    }
    let failed = |source| Error::Detach { target: format!("interface {index}"), source };
    let mut removed = 0;
    let mut others = false;
    for direction in Direction::ALL {
        removed += usize::from(remove_filter(index, direction)?);
        others |= tc::has_filters(index, direction).map_err(failed)?;
    }
    let marker = folder.join(MADE_QDISC);
    if is_there(&marker)? {
        if !others && removed > 0 {
            tc::remove_clsact(index).map_err(failed)?;
        }
        remove_folder(&marker)?;
    }
    remove_folder(&folder)?;
    Ok(removed)
}

impl Hooks {
    /// Lists the ingress qdiscs. If they cannot be listed, what is known of them stays.
    pub(super) fn list_qdiscs(&mut self, failures: &mut Failures) {
        if self.tcx == Some(true) {
            return;
        }
        match tc::ingress_qdiscs() {
            Ok(qdiscs) => self.qdiscs = qdiscs,
            Err(error) => failures.add("queueing disciplines", Error::Qdiscs(error)),
        }
    }

    pub(super) fn attach_filter(
        &mut self,
        index: u32,
        direction: Direction,
        name: &'static str,
    ) -> Result<Result<Ensured, CallError>, Error> {
        let Self { programs, paths, qdiscs, .. } = self;
        check_ingress_qdisc(paths, qdiscs, index)?;
        let program = programs.get(name)?;
        let folder = paths.clsact().join(index.to_string());
        make_folder(&folder)?;
        let ours = match our_filter(index, direction) {
            Ok(ours) => ours,
            Err(e) => return Ok(Err(e)),
        };
        match bpf::program_id(program) {
            Ok(id) if ours.as_ref().is_some_and(|filter| filter.program == id) => {
                return Ok(Ok(Ensured::Unchanged));
            }
            Ok(_) => {}
            Err(e) => return Ok(Err(e)),
        }
        match tc::add_clsact(index) {
            Ok(true) => make_folder(&folder.join(MADE_QDISC))?,
            Ok(false) if qdiscs.contains_key(&index) => {}
            // Another program has added a qdisc since they were listed.
            Ok(false) => {
                *qdiscs = tc::ingress_qdiscs().map_err(Error::Qdiscs)?;
                check_ingress_qdisc(paths, qdiscs, index)?;
            }
            Err(e) => return Ok(Err(e)),
        }
        let add =
            |priority| tc::put_filter(tc::ADD_FILTER, index, direction, priority, HANDLE, program, name);
        Ok(match ours {
            Some(filter) => {
                tc::put_filter(tc::REPLACE_FILTER, index, direction, filter.priority, HANDLE, program, name)
                    .map(|()| Ensured::Repaired)
            }
            None => first_accepted(PRIORITIES, add).map(|()| Ensured::Attached),
        })
    }
}
