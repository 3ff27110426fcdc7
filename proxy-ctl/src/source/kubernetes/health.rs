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

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{Arc, Mutex},
    };

    use super::*;

    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(work: impl FnOnce()) -> Vec<String> {
        let log = Log::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::INFO)
            .without_time()
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, work);
        let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_change_is_told_once_however_often_it_is_tried() {
        let lines = logged(|| {
            let mut health = Health::new(ResourceKind::EndpointSlices);
            for reason in [Reason::Unreachable, Reason::Forbidden] {
                for _ in 0..50 {
                    health.bad(&Failure::new(reason, "it says why"), Duration::from_secs(1));
                }
            }
            for _ in 0..50 {
                health.good();
            }
        });
        assert_eq!(lines.len(), 3, "{lines:#?}");
        assert!(lines[0].contains(" WARN ") && lines[0].contains("it says why"), "{}", lines[0]);
        let denied = "ERROR";
        let names = "list and watch of endpointslices in API group \"discovery.k8s.io\"";
        assert!(lines[1].contains(denied) && lines[1].contains(names), "{}", lines[1]);
        assert!(lines[2].contains("watching endpointslices again"), "{}", lines[2]);
        assert!(lines[2].contains("failed_attempts=100"), "{}", lines[2]);
    }
}
