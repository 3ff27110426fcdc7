//! A lock of a mode's name in the network namespace, so that only one controller at a time uses the
//! mode.

use std::io;

use super::ErrorKind;
use crate::{
    model::mode::Mode,
    sys::{
        net::namespace_lock::{NamespaceAttempt, NamespaceLock},
        proc::lock::Holder,
    },
};

#[derive(Debug, thiserror::Error)]
pub enum LockError {
    #[error("another controller, {holder}, programs this network namespace in mode {mode}; stop it first")]
    Taken { mode: Mode, holder: Holder },
    #[error("the lock of mode {mode} in this network namespace: {source}")]
    Failed { mode: Mode, source: io::Error },
}

impl LockError {
    pub(super) const fn kind(&self) -> ErrorKind {
        match self {
            Self::Taken { .. } => ErrorKind::TakenOver,
            Self::Failed { .. } => ErrorKind::Other,
        }
    }
}

/// Acquires the lock of a mode. It is held until the result is dropped.
pub(super) fn lock(mode: Mode) -> Result<NamespaceLock, LockError> {
    match NamespaceLock::acquire(mode.name()) {
        Ok(NamespaceAttempt::Held(lock)) => Ok(lock),
        Ok(NamespaceAttempt::Taken(holder)) => Err(LockError::Taken { mode, holder }),
        Err(source) => Err(LockError::Failed { mode, source }),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{
        config::Config,
        modes::{Modes, open},
    };

    #[rstest]
    #[ignore = "needs root"]
    fn as_root_the_second_controller_of_a_mode_is_told_of_the_first(
        #[values(Mode::Nftables, Mode::Iptables, Mode::Ipvs, Mode::Userspace)] mode: Mode,
    ) {
        // The thread ends with the test, and its network namespace with it.
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        let _first = lock(mode).unwrap();
        let second = open(Modes { active: mode, secondary: None }, &Config::default().into());
        let error = second.err().expect("the first holds the lock");
        assert!(error.is_taken_over(), "{error}");
        let told = error.to_string();
        let process = format!("another controller, process {},", std::process::id());
        assert!(told.contains(&process) && told.contains(mode.name()), "{told}");
    }
}
