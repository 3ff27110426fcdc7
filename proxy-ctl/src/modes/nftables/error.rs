//! The errors of mode nftables.

use std::{fmt, io};

use crate::{
    model::desired::ServicePortName,
    modes::{self, ErrorKind, mode_lock::LockError},
    sys::CallError,
};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("the kernel has no netfilter netlink (CONFIG_NETFILTER_NETLINK)")]
    NoNetlink,
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error("the kernel refused what every Service needs of the table {table}: {source}")]
    Table { table: String, source: io::Error },
    #[error("the kernel refused {0}; everything else is written")]
    Ports(RefusedPorts),
    #[error("the kernel refused to delete what is no longer used: {0}")]
    Deletion(#[source] io::Error),
}

/// Service ports that could not be written, with the kernel's error numbers.
#[derive(Debug, Default)]
pub struct RefusedPorts(pub Vec<(ServicePortName, i32)>);

impl fmt::Display for RefusedPorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MOST_NAMED: usize = 3;
        for (index, (name, errno)) in self.0.iter().take(MOST_NAMED).enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(f, "{separator}{name} ({})", io::Error::from_raw_os_error(*errno))?;
        }
        match self.0.len().saturating_sub(MOST_NAMED) {
            0 => Ok(()),
            more => write!(f, " and {more} more service ports"),
        }
    }
}

impl From<Error> for modes::Error {
    fn from(error: Error) -> Self {
        let kind = if let Error::Lock(error) = &error { error.kind() } else { ErrorKind::Other };
        Self::new(kind, error)
    }
}
