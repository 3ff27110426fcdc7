//! Removes what a mode of this proxy leaves when another mode has replaced it.

use ipnet::IpNet;

use super::{Error, FormerRules, PendingRemoval, Purpose, Retained};
use crate::model::mode::Mode;

/// The state between attempts. Each attempt continues with what the one before has left.
#[derive(Debug)]
pub struct Remains {
    former_rules: FormerRules,
    pending: PendingRemoval,
    is_ready_for_connect: bool,
    /// The number of virtual servers that wait, as last logged.
    waiting: usize,
    /// The objects that stay because others use them, as logged.
    retained: Vec<Retained>,
}

impl Default for Remains {
    /// Returns the state before the first attempt, when nothing is removed yet.
    fn default() -> Self {
        Self {
            former_rules: FormerRules::default(),
            pending: PendingRemoval::everything(),
            is_ready_for_connect: false,
            waiting: 0,
            retained: Vec::new(),
        }
    }
}

impl Remains {
    /// Removes what the mode has left, except what connections still need. Returns false if virtual
    /// servers with connections stay for a later attempt. Also returns false, with everything left,
    /// while another removal holds the mode's lock.
    ///
    /// `keeps` is the same as for [`FormerRules::find`], and `by_connect` as for
    /// [`PendingRemoval::before`].
    pub fn remove(&mut self, mode: Mode, keeps: &[IpNet], by_connect: bool) -> Result<bool, Error> {
        self.pending.by_connect = by_connect && !self.is_ready_for_connect;
        let removal = self.former_rules.remove(Purpose::TakeOver, keeps, &self.pending);
        if removal.in_use.contains(&mode) {
            return Ok(false);
        }
        self.pending = removal.pending;
        self.is_ready_for_connect |= by_connect && !self.pending.by_connect;
        if removal.waiting > 0 && removal.waiting != self.waiting {
            let servers = removal.waiting;
            tracing::info!(
                servers,
                "virtual servers of the former mode stay until their connections have ended"
            );
        }
        self.waiting = removal.waiting;
        for retained in removal.retained {
            if !self.retained.contains(&retained) {
                let Retained { location, name, reason } = &retained;
                tracing::warn!(location, name, "of the former mode, {reason}");
                self.retained.push(retained);
            }
        }
        removal.problems.into_iter().next().map_or(Ok(self.pending.is_empty()), Err)
    }
}

#[cfg(test)]
mod tests {
    use nix::sched::{CloneFlags, unshare};

    use super::*;
    use crate::sys::net::namespace_lock::{NamespaceAttempt, NamespaceLock};

    #[test]
    #[ignore = "needs root"]
    fn as_root_what_another_removal_is_at_is_not_taken_for_removed() {
        // The thread ends with the test, and its network namespace with it.
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let NamespaceAttempt::Held(other) = NamespaceLock::acquire(Mode::Iptables.name()).unwrap() else {
            panic!("free")
        };
        let mut remains = Remains::default();
        assert!(!remains.remove(Mode::Iptables, &[], false).unwrap());
        drop(other);
        assert!(remains.remove(Mode::Iptables, &[], false).unwrap());
    }
}
