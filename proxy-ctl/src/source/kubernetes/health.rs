//! Says in the log when a resource stops and starts being watched: once per change, not per attempt, and what
//! all resources have in common only once.

use std::time::{Duration, Instant};

use tracing::{debug, error, info, warn};

use super::{
    failure::{Failure, FailureReason},
    kind::{ResourceKind, Verb},
    outage::Outage,
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
    reason: FailureReason,
    since: Instant,
    attempts: u32,
    /// Whether anything of it has been told at more than debug level.
    told: bool,
}

impl Health {
    pub(super) fn new(kind: ResourceKind) -> Self {
        Self { kind, failing: None, ever: false }
    }

    /// Returns true if it had been failing.
    pub(super) fn good(&mut self, outage: &Outage) -> bool {
        let kind = self.kind;
        let first = !std::mem::replace(&mut self.ever, true);
        let Some(failing) = self.failing.take() else {
            if first {
                info!(resource = %kind, "watching {kind}");
            }
            return false;
        };
        outage.ends(kind);
        let seconds = failing.since.elapsed().as_secs_f64();
        let failed_attempts = failing.attempts;
        if failing.told {
            info!(resource = %kind, failed_attempts, "watching {kind} again after {seconds:.1} s");
        } else if first {
            info!(resource = %kind, failed_attempts, "watching {kind}");
        } else {
            debug!(resource = %kind, failed_attempts, "watching {kind} again after {seconds:.1} s");
        }
        true
    }

    /// `denied`: which verbs RBAC does not allow, if it is that.
    pub(super) fn bad(&mut self, outage: &Outage, failure: &Failure, denied: &[Verb], retry_in: Duration) {
        let kind = self.kind;
        let reason = failure.reason.name();
        let retry = retry_in.as_secs_f64();
        let failing = self.failing.get_or_insert_with(|| Failing {
            reason: failure.reason,
            since: Instant::now(),
            attempts: 0,
            told: false,
        });
        failing.attempts += 1;
        let same = failing.attempts > 1 && failing.reason == failure.reason;
        failing.reason = failure.reason;
        if same || !outage.begins(kind, failure.reason) {
            debug!(resource = %kind, reason, "{failure}; next attempt in {retry:.1} s");
            return;
        }
        failing.told = true;
        match failure.reason {
            FailureReason::Forbidden => {
                let group = kind.group();
                let verbs: Vec<&str> = denied.iter().map(|verb| verb.name()).collect();
                let verbs = if verbs.is_empty() { "list and watch".to_owned() } else { verbs.join(" and ") };
                let outcome = kind.without();
                let text = format!(
                    "the API server does not allow {verbs} of {kind} in API group {group:?}: {failure}; {outcome}; \
                     ClusterRole system:node-proxier grants it; next attempt in {retry:.1} s"
                );
                if kind.is_optional() {
                    warn!(resource = %kind, verbs, reason, "{text}");
                } else {
                    error!(resource = %kind, verbs, reason, "{text}");
                }
            }
            FailureReason::Unauthorized | FailureReason::Credentials | FailureReason::Tls => {
                error!(resource = %kind, reason, "{failure}; next attempt in {retry:.1} s");
            }
            FailureReason::NotServed
            | FailureReason::Expired
            | FailureReason::Throttled
            | FailureReason::Refused
            | FailureReason::Unreachable
            | FailureReason::Disconnected
            | FailureReason::Timeout
            | FailureReason::Malformed => {
                warn!(resource = %kind, reason, "{failure}; what is programmed stays; next attempt in {retry:.1} s");
            }
        }
    }
}
#[cfg(test)]
mod tests {
    use tracing::level_filters::LevelFilter;
    use tracing_subscriber::fmt::format;

    use super::*;
    use crate::log::capture;

    fn logged(work: impl FnOnce()) -> Vec<String> {
        capture::logged(format().without_time(), LevelFilter::INFO, work)
    }

    #[test]
    fn a_change_is_told_once_however_often_it_is_tried() {
        let lines = logged(|| {
            let outage = Outage::default();
            let mut health = Health::new(ResourceKind::EndpointSlices);
            for reason in [FailureReason::Unreachable, FailureReason::Forbidden] {
                for _ in 0..50 {
                    let failure = Failure::new(reason, "it says why");
                    health.bad(&outage, &failure, &[Verb::Watch, Verb::List], Duration::from_secs(1));
                }
            }
            for _ in 0..50 {
                health.good(&outage);
            }
        });
        assert_eq!(lines.len(), 3, "{lines:#?}");
        assert!(lines[0].contains(" WARN ") && lines[0].contains("it says why"), "{}", lines[0]);
        let denied = "ERROR";
        let names = "watch and list of endpointslices in API group \"discovery.k8s.io\"";
        assert!(lines[1].contains(denied) && lines[1].contains(names), "{}", lines[1]);
        assert!(lines[2].contains("watching endpointslices again"), "{}", lines[2]);
        assert!(lines[2].contains("failed_attempts=100"), "{}", lines[2]);
    }
    #[test]
    fn an_api_server_that_is_away_is_one_line_whatever_is_watched() {
        let lines = logged(|| {
            let outage = Outage::default();
            let kinds = [ResourceKind::Services, ResourceKind::EndpointSlices, ResourceKind::Nodes];
            let mut all = kinds.map(Health::new);
            for health in &mut all {
                health.good(&outage);
            }
            for health in &mut all {
                let failure = Failure::new(FailureReason::Unreachable, "connection refused");
                health.bad(&outage, &failure, &[], Duration::from_secs(1));
            }
            for health in &mut all {
                assert!(health.good(&outage));
            }
        });
        assert_eq!(lines.len(), 5, "{lines:#?}");
        assert!(lines[3].contains(" WARN ") && lines[3].contains("connection refused"), "{lines:#?}");
        assert!(lines[4].contains("watching services again"), "{lines:#?}");
    }

    #[test]
    fn what_is_not_needed_is_no_error() {
        let lines = logged(|| {
            let failure = Failure::new(FailureReason::Forbidden, "403");
            let mut health = Health::new(ResourceKind::ServiceCidrs);
            health.bad(&Outage::default(), &failure, &[], Duration::from_secs(1));
        });
        assert_eq!(lines.len(), 1, "{lines:#?}");
        assert!(lines[0].contains(" WARN ") && lines[0].contains("everything else works"), "{lines:#?}");
    }
}
