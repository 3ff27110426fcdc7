//! The error type that all modes share.

use std::{error, fmt, io};

/// The reaction that an error asks of the dataplane's caller.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ErrorKind {
    /// Node ports are not served on all of the node's addresses. Everything else is served.
    NodeAddresses,
    /// Another controller programs this node: trying again would take it from that one.
    TakenOver,
    /// Something could not be written or read; the next attempt may succeed.
    Other,
}

/// An error of a mode.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    error: Box<dyn error::Error + Send + Sync>,
}

impl Error {
    pub fn new(kind: ErrorKind, error: impl Into<Box<dyn error::Error + Send + Sync>>) -> Self {
        Self { kind, error: error.into() }
    }

    pub fn is_of_node_addresses(&self) -> bool {
        self.kind == ErrorKind::NodeAddresses
    }

    pub fn is_taken_over(&self) -> bool {
        self.kind == ErrorKind::TakenOver
    }

    /// Returns true if the kernel has refused access to the caller. The object that was asked for
    /// may or may not exist.
    pub fn is_denied(&self) -> bool {
        let causes = std::iter::successors(Some(self.inner() as &(dyn error::Error + 'static)), |error| {
            error.source()
        });
        causes
            .filter_map(|cause| cause.downcast_ref::<io::Error>())
            .any(|cause| cause.kind() == io::ErrorKind::PermissionDenied)
    }

    /// Returns the mode's own error.
    pub fn inner(&self) -> &(dyn error::Error + Send + Sync + 'static) {
        self.error.as_ref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl error::Error for Error {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        self.error.source()
    }
}
