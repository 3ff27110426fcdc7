//! The kernel's virtual servers, sets and addresses, without those of other programs.

use std::collections::BTreeMap;

use ipnet::IpNet;

use super::{
    Error,
    calls::Calls,
    state::{Change, KernelObjects},
};
use crate::{
    modes::Applied,
    sys::{
        CallError,
        net::ipvs::{Destination, VirtualSocket},
    },
};

pub(super) struct Kernel {
    calls: Box<dyn Calls>,
    /// Networks whose virtual servers belong to other programs, unless a service port asks for
    /// them.
    keeps: Vec<IpNet>,
}

/// The results of some writes.
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

    /// Makes the device and the sets that do not exist.
    pub(super) fn provide(&self) -> Result<(), Error> {
        self.calls.provide()
    }

    /// Reads the kernel's objects, without virtual servers that may belong to other programs and
    /// are not wanted.
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

    /// Writes in the order of `changes`, and records in `programmed` what the kernel has done.
    /// After an error nothing is known of the kernel's state.
    pub(super) fn write(
        &self,
        changes: Vec<Change>,
        programmed: &mut KernelObjects,
    ) -> Result<Written, CallError> {
        let mut written = Written::default();
        for portion in changes.chunk_by(same_call) {
            let mut refused: BTreeMap<usize, CallError> = self.calls.write(portion)?.into_iter().collect();
            for (index, change) in portion.iter().enumerate() {
                if let Some(error) = refused.remove(&index) {
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
