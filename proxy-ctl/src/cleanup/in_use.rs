//! The modes in use: those that this proxy is in, here or in another process of this network
//! namespace. Cleanup leaves their rules alone.
//!
//! A mode whose rules have kube-proxy's names holds a [`NamespaceLock`] with the mode's name while
//! it is in use.

use super::Error;
use crate::{
    model::mode::Mode,
    sys::net::namespace_lock::{NamespaceAttempt, NamespaceLock},
};

pub(super) const MODES: [Mode; 4] = [Mode::Nftables, Mode::Iptables, Mode::Ipvs, Mode::Userspace];

pub(super) fn modes() -> Vec<Mode> {
    MODES.into_iter().filter(|mode| NamespaceLock::is_held(mode.name())).collect()
}

#[derive(Default)]
pub(super) struct InUse {
    pub(super) modes: Vec<Mode>,
    /// The locks that were taken, of modes that are not in use.
    pub(super) locks: Vec<NamespaceLock>,
    /// The reason why each of `modes` counts as in use.
    pub(super) problems: Vec<Error>,
}

impl InUse {
    /// Takes the locks of those `modes` that are not in use. While the locks are held, none of
    /// these can start.
    pub(super) fn lock_others(modes: &[Mode]) -> Self {
        let mut all = Self::default();
        for mode in modes.iter().copied() {
            let problem = match NamespaceLock::try_acquire(mode.name()) {
                Ok(NamespaceAttempt::Held(lock)) => {
                    all.locks.push(lock);
                    continue;
                }
                Ok(NamespaceAttempt::Taken(holder)) => Error::InUse { mode, holder },
                Err(source) => Error::Lock { mode, source },
            };
            all.modes.push(mode);
            all.problems.push(problem);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use nix::sched::{CloneFlags, unshare};

    use super::{super::let_go::LettingGo, *};

    #[test]
    #[ignore = "needs root"]
    fn as_root_the_mode_whose_lock_is_held_is_in_use() {
        // The thread ends with the test, and its network namespace with it.
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        assert_eq!(modes(), []);
        let NamespaceAttempt::Held(held) = NamespaceLock::acquire("iptables").unwrap() else {
            panic!("free")
        };
        assert_eq!(modes(), [Mode::Iptables]);
        let in_use = InUse::lock_others(&MODES);
        assert_eq!((in_use.modes.as_slice(), in_use.locks.len()), (&[Mode::Iptables][..], 3));
        let own = std::process::id().to_string();
        assert!(in_use.problems[0].to_string().contains(&own), "{}", in_use.problems[0]);
        drop(held);
        drop(in_use);
        // A process that another test is starting has copies of the locks until exec.
        let is_free = LettingGo::begin().wait(false, || Ok(InUse::lock_others(&MODES).modes.is_empty()));
        assert!(is_free.unwrap());
    }
}
