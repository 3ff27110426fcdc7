//! Which watchers have which trouble, so that what all of them have is told once and not by each.

use std::sync::{Mutex, PoisonError};

use super::{failure::FailureReason, kind::ResourceKind};

/// Shared by all watchers of one API server.
#[derive(Debug, Default)]
pub(super) struct Outage(Mutex<Vec<(ResourceKind, FailureReason)>>);

impl Outage {
    /// Notes that `kind` fails for `reason` from now on. True if that is worth telling: no other kind has the same
    /// trouble with the server as a whole.
    pub(super) fn begins(&self, kind: ResourceKind, reason: FailureReason) -> bool {
        let mut failing = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        failing.retain(|(other, _)| *other != kind);
        let told = reason.is_about_the_server() && failing.iter().any(|(_, other)| *other == reason);
        failing.push((kind, reason));
        !told
    }

    pub(super) fn ends(&self, kind: ResourceKind) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|(other, _)| *other != kind);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_concerns_the_whole_server_is_told_by_the_first() {
        let outage = Outage::default();
        assert!(outage.begins(ResourceKind::Services, FailureReason::Unreachable));
        assert!(!outage.begins(ResourceKind::Nodes, FailureReason::Unreachable));
        assert!(outage.begins(ResourceKind::Nodes, FailureReason::Unauthorized), "another trouble");
        outage.ends(ResourceKind::Services);
        assert!(outage.begins(ResourceKind::Services, FailureReason::Unreachable), "a new outage");
    }

    #[test]
    fn what_concerns_one_resource_is_told_for_each() {
        let outage = Outage::default();
        for kind in [ResourceKind::Services, ResourceKind::Nodes] {
            assert!(outage.begins(kind, FailureReason::Forbidden));
        }
    }
}
