//! System calls behind safe functions. No other module has `unsafe` code.

use std::{io, path::Path};

pub mod bpf;
pub mod net;
pub mod nftables;
pub mod proc;
pub mod xtables;

/// Returns true if the kernel has IPv6 and was not booted with IPv6 switched off.
pub fn has_ipv6() -> bool {
    Path::new("/proc/thread-self/net/if_inet6").exists()
}

/// A system call that failed.
#[derive(Debug, thiserror::Error)]
#[error("{call} failed: {source}")]
pub struct CallError {
    /// The call and its command, such as `bpf(BPF_LINK_CREATE)`.
    pub call: &'static str,
    pub source: io::Error,
}

impl CallError {
    pub(crate) fn new(call: &'static str, source: io::Error) -> Self {
        Self { call, source }
    }

    /// Returns a function for `map_err`, which makes an error of the failed `call`.
    pub(crate) fn of(call: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::new(call, source)
    }

    pub(crate) fn last(call: &'static str) -> Self {
        Self { call, source: io::Error::last_os_error() }
    }

    /// Returns the kernel's error number, or 0 if the error does not come from the kernel.
    pub fn errno(&self) -> i32 {
        self.source.raw_os_error().unwrap_or(0)
    }
}
