//! The kernel's virtual servers, sets and addresses, but for those of others.

use std::collections::BTreeMap;

use ipnet::IpNet;

use super::{
    Error,
    calls::Calls,
    state::{Change, KernelObjects},
};
use crate::{
    dataplane::Applied,
    sys::{
        CallError,
        ipvs::{Destination, VirtualSocket},
    },
};

pub(super) struct Kernel {
    calls: Box<dyn Calls>,
    /// Virtual servers for these addresses that no service port asks for are somebody else's.
    keeps: Vec<IpNet>,
}

/// What became of some writes.
#[derive(Default)]
pub(super) struct Written {
    pub(super) applied: Applied,
    pub(super) refused: Vec<(Change, CallError)>,
}

impl std::ops::AddAssign for Written {
    fn add_assign(&mut self, other: Self) {
        self.applied += other.applied;
        self.refused.extend(other.refused);
    }
}

impl Kernel {
    pub(super) fn new(calls: impl Calls + 'static, keeps: Vec<IpNet>) -> Self {
        Self { calls: Box::new(calls), keeps }
    }

    /// Makes the device and the sets that are not there.
    pub(super) fn provide(&self) -> Result<(), Error> {
        self.calls.provide()
    }

    /// Without what may be somebody else's, unless it is wanted.
    pub(super) fn read(&self, is_wanted: impl Fn(VirtualSocket) -> bool) -> Result<KernelObjects, Error> {
        let mut programmed = self.calls.read()?;
        let is_kept =
            |socket: &VirtualSocket| self.keeps.iter().any(|network| network.contains(&socket.address.ip()));
        programmed.servers.retain(|socket, _| !is_kept(socket) || is_wanted(*socket));
        Ok(programmed)
    }

    pub(super) fn destinations(&self, socket: VirtualSocket) -> Result<Vec<Destination>, CallError> {
        self.calls.destinations(socket)
    }

    /// Writes in the order of `changes`, and takes what is done over into `programmed`. An error: nothing more is known of
    /// what is programmed.
    pub(super) fn write(
        &self,
        changes: Vec<Change>,
        programmed: &mut KernelObjects,
    ) -> Result<Written, CallError> {
        let mut written = Written::default();
        for portion in changes.chunk_by(same_call) {
            let mut refused: BTreeMap<usize, CallError> = self.calls.write(portion)?.into_iter().collect();
            for (place, change) in portion.iter().enumerate() {
                if let Some(error) = refused.remove(&place) {
                    written.refused.push((change.clone(), error));
                    continue;
                }
                let Applied { written, removed } = &mut written.applied;
                *(if change.removes() { removed } else { written }) += 1;
                programmed.record(change.clone());
            }
        }
        Ok(written)
    }
}

fn same_call(one: &Change, other: &Change) -> bool {
    match (one, other) {
        (Change::Server(_), Change::Server(_)) | (Change::Address(_), Change::Address(_)) => true,
        (Change::Member(one, _), Change::Member(other, _)) => one == other,
        _ => false,
    }
}
