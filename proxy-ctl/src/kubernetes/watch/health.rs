//! The health of each watched kind, and the log of its changes. The log says when a kind stops and
//! starts being watched, once for a change and not for each attempt. A failure that all kinds have
//! in common is logged once.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use tracing::{debug, error, info, warn};

use super::kind::{ResourceKind, Verb};
use crate::kubernetes::failure::{Failure, FailureReason, LONGEST_RETRY_AFTER};

/// The time after which a failing kind is stale. It is longer than any delay that an API server can
/// ask for, so that such a delay alone makes no kind stale.
const STALE_AFTER: Duration = LONGEST_RETRY_AFTER.saturating_add(Duration::from_secs(60));

/// The health of all kinds that are watched, or would be if the API server allowed it.
#[derive(Debug, Default)]
pub(crate) struct Health(pub(crate) BTreeMap<ResourceKind, KindHealth>);

#[derive(Debug, Default)]
pub(crate) struct KindHealth {
    /// The reason why the kind is not being watched now. None while it is watched.
    problem: Option<Problem>,
    /// True if the kind was listed once.
    was_listed: bool,
    failing: Option<Failing>,
    was_watched: bool,
}

#[derive(Debug)]
struct Problem {
    /// The last failure, for messages.
    message: String,
    since: Instant,
}

#[derive(Debug)]
struct Failing {
    reason: FailureReason,
    since: Instant,
    attempts: u32,
    /// True if the failure was logged above debug level.
    is_logged: bool,
}

impl KindHealth {
    pub(crate) fn problem(&self) -> Option<&str> {
        self.problem.as_ref().map(|problem| problem.message.as_str())
    }

    /// Notes that the API server was heard from. The first time is the end of a list.
    pub(super) fn heard_from(&mut self) {
        self.problem = None;
        self.was_listed = true;
    }

    pub(crate) fn failed(&mut self, message: String, now: Instant) {
        let since = self.problem.take().map_or(now, |problem| problem.since);
        self.problem = Some(Problem { message, since });
    }

    /// Returns true if the objects of this kind cannot be relied upon: it was never listed, it may
    /// not be listed, or it has failed for long. A recent failure changes nothing, because what was
    /// listed is served meanwhile.
    pub(crate) fn is_stale(&self, denied: &[Verb], now: Instant) -> bool {
        self.problem.as_ref().is_some_and(|problem| {
            !self.was_listed
                || denied.contains(&Verb::List)
                || now.saturating_duration_since(problem.since) >= STALE_AFTER
        })
    }
}

impl Health {
    /// Notes that a watch has begun. Returns true if the kind was failing.
    pub(super) fn works(&mut self, kind: ResourceKind) -> bool {
        let health = self.0.entry(kind).or_default();
        let is_first = !std::mem::replace(&mut health.was_watched, true);
        let Some(Failing { since, attempts, is_logged, .. }) = health.failing.take() else {
            if is_first {
                info!(resource = %kind, "watching {kind}");
            }
            return false;
        };
        let seconds = since.elapsed().as_secs_f64();
        if is_logged {
            info!(resource = %kind, failed_attempts = attempts, "watching {kind} again after {seconds:.1} s");
        } else if is_first {
            info!(resource = %kind, failed_attempts = attempts, "watching {kind}");
        } else {
            debug!(resource = %kind, failed_attempts = attempts, "watching {kind} again after {seconds:.1} s");
        }
        true
    }

    /// Notes a failure, and logs it unless the same one is known. `denied` are the verbs that RBAC
    /// does not allow.
    pub(crate) fn fails(
        &mut self,
        kind: ResourceKind,
        failure: &Failure,
        denied: &[Verb],
        retry_in: Duration,
    ) {
        let reason = failure.reason;
        let is_known_of_another = reason.is_about_the_server()
            && self.0.iter().any(|(other, health)| {
                *other != kind && health.failing.as_ref().is_some_and(|failing| failing.reason == reason)
            });
        // The failures of a kind that the API server does not have are logged at debug level only.
        let is_watched = self.0.contains_key(&kind);
        let mut unwatched = KindHealth::default();
        let health = self.0.get_mut(&kind).unwrap_or(&mut unwatched);
        let is_same = health.failing.as_ref().is_some_and(|failing| failing.reason == reason);
        let failing = health.failing.get_or_insert_with(|| Failing {
            reason,
            since: Instant::now(),
            attempts: 0,
            is_logged: false,
        });
        failing.attempts += 1;
        failing.reason = reason;
        if is_same || is_known_of_another || !is_watched {
            let (reason, retry) = (reason.name(), retry_in.as_secs_f64());
            debug!(resource = %kind, reason, "{failure}; next attempt in {retry:.1} s");
        } else {
            failing.is_logged = true;
            log(kind, failure, denied, retry_in);
        }
    }
}

fn log(kind: ResourceKind, failure: &Failure, denied: &[Verb], retry_in: Duration) {
    let (reason, retry) = (failure.reason.name(), retry_in.as_secs_f64());
    match failure.reason {
        FailureReason::Forbidden => {
            let (group, outcome) = (kind.group(), kind.without());
            let verbs: Vec<&str> = denied.iter().map(|verb| verb.name()).collect();
            let verbs = if verbs.is_empty() { "list and watch".to_owned() } else { verbs.join(" and ") };
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

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use tracing::level_filters::LevelFilter;
    use tracing_subscriber::fmt::format;

    use super::*;
    use crate::log::capture;

    const SECOND: Duration = Duration::from_secs(1);
    const KINDS: [ResourceKind; 3] =
        [ResourceKind::Services, ResourceKind::EndpointSlices, ResourceKind::Nodes];

    /// Returns what is logged above debug level while all kinds are watched.
    fn logged(work: impl FnOnce(&mut Health)) -> Vec<String> {
        let mut health = Health::default();
        for kind in KINDS.into_iter().chain([ResourceKind::ServiceCidrs]) {
            health.0.entry(kind).or_default();
        }
        capture::logged(format().without_time(), LevelFilter::INFO, || work(&mut health))
    }

    #[rstest]
    #[case::never_listed(false, &[], 0, true)]
    #[case::young_failure(true, &[], 0, false)]
    #[case::as_long_as_a_server_may_ask_to_wait(true, &[], 300, false)]
    #[case::old_failure(true, &[], 360, true)]
    #[case::list_denied(true, &[Verb::List], 0, true)]
    #[case::watch_denied(true, &[Verb::Watch], 0, false)]
    fn a_kind_that_fails_is_stale(
        #[case] was_listed: bool,
        #[case] denied: &[Verb],
        #[case] seconds: u64,
        #[case] expected: bool,
    ) {
        let mut health = KindHealth::default();
        if was_listed {
            health.heard_from();
        }
        let began = Instant::now();
        assert!(!health.is_stale(denied, began), "nothing has failed");
        let now = began + Duration::from_secs(seconds);
        health.failed("connection refused".to_owned(), began);
        health.failed("connection reset".to_owned(), now);
        assert_eq!(health.is_stale(denied, now), expected);
        health.heard_from();
        assert!(!health.is_stale(denied, now), "it was heard again");
    }

    #[test]
    fn a_change_is_logged_once_however_often_it_is_tried() {
        let lines = logged(|health| {
            for reason in [FailureReason::Unreachable, FailureReason::Forbidden] {
                for _ in 0..50 {
                    let failure = Failure::new(reason, "it says why");
                    health.fails(ResourceKind::EndpointSlices, &failure, &[Verb::Watch, Verb::List], SECOND);
                }
            }
            for _ in 0..50 {
                health.works(ResourceKind::EndpointSlices);
            }
        });
        assert_eq!(lines.len(), 3, "{lines:#?}");
        assert!(lines[0].contains(" WARN ") && lines[0].contains("it says why"), "{}", lines[0]);
        let names = "watch and list of endpointslices in API group \"discovery.k8s.io\"";
        assert!(lines[1].contains("ERROR") && lines[1].contains(names), "{}", lines[1]);
        assert!(lines[2].contains("watching endpointslices again"), "{}", lines[2]);
        assert!(lines[2].contains("failed_attempts=100"), "{}", lines[2]);
    }

    #[test]
    fn an_api_server_that_is_away_is_one_line_an_outage_whatever_is_watched() {
        let lines = logged(|health| {
            for kind in KINDS {
                health.works(kind);
            }
            for _ in 0..2 {
                for kind in KINDS {
                    let failure = Failure::new(FailureReason::Unreachable, "connection refused");
                    health.fails(kind, &failure, &[], SECOND);
                }
                for kind in KINDS {
                    assert!(health.works(kind));
                }
            }
        });
        assert_eq!(lines.len(), 7, "{lines:#?}");
        for outage in [&lines[3..5], &lines[5..7]] {
            assert!(outage[0].contains(" WARN ") && outage[0].contains("connection refused"), "{lines:#?}");
            assert!(outage[1].contains("watching services again"), "{lines:#?}");
        }
    }

    #[test]
    fn what_concerns_one_kind_is_logged_for_each_and_another_failure_too() {
        let lines = logged(|health| {
            for reason in [FailureReason::Forbidden, FailureReason::Unauthorized] {
                for kind in KINDS {
                    health.fails(kind, &Failure::new(reason, "it says why"), &[], SECOND);
                }
            }
        });
        assert_eq!(lines.len(), 4, "{lines:#?}");
    }

    #[test]
    fn what_is_not_needed_is_no_error() {
        let lines = logged(|health| {
            let failure = Failure::new(FailureReason::Forbidden, "403");
            health.fails(ResourceKind::ServiceCidrs, &failure, &[], SECOND);
            health.0.remove(&ResourceKind::Nodes);
            health.fails(ResourceKind::Nodes, &failure, &[], SECOND);
        });
        assert_eq!(lines.len(), 1, "{lines:#?}");
        assert!(lines[0].contains(" WARN ") && lines[0].contains("everything else works"), "{lines:#?}");
    }
}
