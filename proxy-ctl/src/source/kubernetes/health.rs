//! Says in the log when a resource stops and starts being watched: once per change, not per attempt.

use std::time::{Duration, Instant};

use tracing::{debug, error, info, warn};

use super::{
    failure::{Failure, Reason},
    state::ResourceKind,
};

#[derive(Debug)]
pub(super) struct Health {
    kind: ResourceKind,
    failing: Option<Failing>,
    /// Whether the resource was ever watched.
    ever: bool,
}

#[derive(Debug)]
struct Failing {
    reason: Reason,
    since: Instant,
    attempts: u32,
}

impl Health {
    pub(super) fn new(kind: ResourceKind) -> Self {
        Self { kind, failing: None, ever: false }
    }

    /// Returns true if it had been failing.
    pub(super) fn good(&mut self) -> bool {
        let kind = self.kind;
        let first = !std::mem::replace(&mut self.ever, true);
        match self.failing.take() {
            Some(failing) => {
                let seconds = failing.since.elapsed().as_secs_f64();
                info!(resource = %kind, failed_attempts = failing.attempts, "watching {kind} again after {seconds:.1} s");
                true
            }
            None if first => {
                info!(resource = %kind, "watching {kind}");
                false
            }
            None => false,
        }
    }

    pub(super) fn bad(&mut self, failure: &Failure, retry_in: Duration) {
        let kind = self.kind;
        let reason = failure.reason.name();
        let retry = retry_in.as_secs_f64();
        match &mut self.failing {
            Some(failing) if failing.reason == failure.reason => {
                failing.attempts += 1;
                debug!(resource = %kind, reason, "{failure}; next attempt in {retry:.1} s");
                return;
            }
            Some(failing) => {
                failing.reason = failure.reason;
                failing.attempts += 1;
            }
            None => {
                self.failing = Some(Failing { reason: failure.reason, since: Instant::now(), attempts: 1 });
            }
        }
        match failure.reason {
            Reason::Forbidden => {
                let group = kind.group();
                error!(
                    resource = %kind, reason,
                    "the API server does not allow list and watch of {kind} in API group {group:?}: {failure}; \
                     ClusterRole system:node-proxier grants it; next attempt in {retry:.1} s"
                );
            }
            Reason::Unauthorized | Reason::Credentials | Reason::Tls => {
                error!(resource = %kind, reason, "{failure}; next attempt in {retry:.1} s");
            }
            Reason::Expired
            | Reason::Throttled
            | Reason::Refused
            | Reason::Unreachable
            | Reason::Disconnected
            | Reason::Timeout
            | Reason::Malformed => {
                warn!(resource = %kind, reason, "{failure}; what is programmed stays; next attempt in {retry:.1} s");
            }
        }
    }
}
