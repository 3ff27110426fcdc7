//! Errors of mode ipvs.

use std::{collections::BTreeSet, io, path::PathBuf};

use crate::{
    cleanup,
    model::objects::IpFamily,
    modes::{self, ErrorKind, mode_lock::LockError},
    sys::{
        CallError,
        xtables::{BackendError, ToolError},
    },
};

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    Rules(#[from] cleanup::Error),
    #[error("the kernel has no {0}")]
    Missing(&'static str),
    #[error("ipvs.scheduler: the kernel does not know {scheduler} (module ip_vs_{scheduler}): {source}")]
    Scheduler { scheduler: String, source: CallError },
    #[error("set {name}: {source}")]
    Set { name: String, source: CallError },
    #[error(transparent)]
    Tool(#[from] ToolError),
    #[error("mode ipvs masquerades by iptables: {0}")]
    Backend(#[from] BackendError),
    #[error("setting /{path} to {value} for mode ipvs: {source}")]
    Parameter { path: PathBuf, value: u32, source: io::Error },
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error("{failed} writes failed; the first, {what}: {source}")]
    Incomplete { failed: usize, what: String, source: Box<Error> },
}

impl From<Error> for modes::Error {
    fn from(error: Error) -> Self {
        let kind = if let Error::Lock(error) = &error { error.kind() } else { ErrorKind::Other };
        Self::new(kind, error)
    }
}

/// The failures of one call, which goes on with everything else.
#[derive(Default)]
pub(super) struct Failures {
    count: usize,
    first: Option<(String, Error)>,
    families: BTreeSet<IpFamily>,
}

impl Failures {
    pub(super) fn add(&mut self, family: IpFamily, what: impl FnOnce() -> String, error: Error) {
        self.count += 1;
        self.families.insert(family);
        self.first.get_or_insert_with(|| (what(), error));
    }

    pub(super) fn concern(&self, family: IpFamily) -> bool {
        self.families.contains(&family)
    }

    pub(super) fn into_result(self) -> Result<(), Error> {
        match self.first {
            None => Ok(()),
            Some((what, source)) => {
                Err(Error::Incomplete { failed: self.count, what, source: Box::new(source) })
            }
        }
    }
}
