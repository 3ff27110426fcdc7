//! The errors of mode iptables.

use std::io;

use crate::{
    cleanup,
    model::{desired::ServicePortName, objects::IpFamily},
    modes::{self, ErrorKind, mode_lock::LockError},
    sys::{
        CallError,
        xtables::{BackendError, ToolError},
    },
};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error("{0}")]
    Tool(#[from] ToolError),
    #[error("{0}")]
    Call(#[from] CallError),
    #[error(transparent)]
    Removal(#[from] cleanup::Error),
    #[error(
        "{path}: {source}; without it node ports are not served on 127.0.0.1: set iptables.localhostNodePorts to false"
    )]
    RouteLocalnet { path: &'static str, source: io::Error },
    #[error("{path}: {source}")]
    File { path: &'static str, source: io::Error },
    #[error("{family}: {source}")]
    Family { family: &'static str, source: Box<Error> },
    #[error(
        "{refused} service ports were refused and the others are written; the first, {port}: {rule}: {source}"
    )]
    Refused { refused: usize, port: ServicePortName, rule: String, source: Box<ToolError> },
    #[error("the service ports are served, but what is no longer used could not be removed: {0}")]
    Stale(#[source] Box<ToolError>),
}

impl Error {
    pub(super) fn of(self, family: IpFamily) -> Self {
        Self::Family { family: family.name(), source: Box::new(self) }
    }
}

impl From<Error> for modes::Error {
    fn from(error: Error) -> Self {
        let kind = if let Error::Lock(error) = &error { error.kind() } else { ErrorKind::Other };
        Self::new(kind, error)
    }
}
