//! What can go wrong in any mode.

use std::{error, fmt};

/// What the caller of a dataplane does about an error.
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

    /// The mode's own error.
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
