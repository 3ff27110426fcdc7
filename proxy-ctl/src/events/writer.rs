//! The task that writes events, one after the other.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep, sleep_until},
};
use tracing::{debug, warn};

use super::{
    Counts, Job, Outcome,
    series::{Aggregator, FINISHED_AFTER, Recorded, Reporter, Todo},
};
use crate::source::kubernetes::{
    Api,
    failure::{Failure, FailureReason},
};

/// Attempts for each event, with this pause in between: as client-go.
const ATTEMPTS: u32 = 12;
const PAUSE: Duration = Duration::from_secs(10);

pub(super) struct Writer {
    api: Api,
    reporter: Reporter,
    events: Aggregator,
    counts: Counts,
    refusal_told: bool,
    absence_told: bool,
}

impl Writer {
    pub(super) fn new(api: Api, node_name: Arc<str>, host: &str, counts: Counts) -> Self {
        Self {
            api,
            reporter: Reporter::new(node_name, host),
            events: Aggregator::default(),
            counts,
            refusal_told: false,
            absence_told: false,
        }
    }

    /// Ends when nobody can record any more.
    pub(super) async fn run(mut self, mut jobs: mpsc::Receiver<Job>) {
        let mut look = Instant::now() + FINISHED_AFTER;
        loop {
            tokio::select! {
                biased;
                job = jobs.recv() => match job {
                    Some(Job::Record(event, when)) => {
                        let todo = self.events.take(event, when, &self.reporter);
                        self.act(todo).await;
                    }
                    Some(Job::Flush(done)) => {
                        // Whoever waited may have given up.
                        let _ = done.send(());
                    }
                    None => return,
                },
                () = sleep_until(look) => {
                    look = Instant::now() + FINISHED_AFTER;
                    for recorded in self.events.due(Timestamp::now()) {
                        self.write(&recorded, true).await;
                    }
                }
            }
        }
    }

    async fn act(&mut self, todo: Todo) {
        match todo {
            Todo::Create(recorded) => self.write(&recorded, false).await,
            Todo::Patch(recorded) => self.write(&recorded, true).await,
            Todo::Nothing => self.counts.add(Outcome::Aggregated),
        }
    }

    async fn write(&mut self, recorded: &Recorded, series: bool) {
        for attempt in 1..=ATTEMPTS {
            let failure = match self.attempt(recorded, series).await {
                Ok(()) => {
                    self.absence_told = false;
                    self.counts.add(Outcome::Written);
                    return;
                }
                Err(failure) => failure,
            };
            if !is_worth_another_attempt(&failure, series) {
                self.refused(&failure);
                return;
            }
            if !std::mem::replace(&mut self.absence_told, true) {
                debug!("events wait for the API server: {failure}");
            }
            if attempt < ATTEMPTS {
                sleep(failure.retry_after.unwrap_or(PAUSE).max(PAUSE)).await;
            }
        }
        warn!(event = recorded.path(), "an event was not written: the API server is away");
        self.counts.add(Outcome::GivenUp);
    }

    async fn attempt(&self, recorded: &Recorded, series: bool) -> Result<(), Failure> {
        if series {
            let path = recorded.path();
            let patch = recorded.patch().to_string().into_bytes();
            match self.send("PATCH", &path, "application/merge-patch+json", patch).await {
                // It has expired, or was never written: the series is all that there is.
                Err(failure) if failure.code == Some(404) => {}
                other => return other,
            }
        }
        let encoding = self.api.encoding();
        let object = recorded.object(&self.reporter).encode(encoding);
        let object = object.map_err(|error| Failure::new(FailureReason::Malformed, error.to_string()))?;
        self.send("POST", &recorded.collection(), encoding.media_type(), object).await
    }

    async fn send(&self, method: &str, path: &str, content: &str, body: Vec<u8>) -> Result<(), Failure> {
        let request = || {
            http::Request::builder()
                .method(method)
                .uri(path)
                .header(http::header::ACCEPT, self.api.accept())
                .header(http::header::CONTENT_TYPE, content)
                .body(body.clone())
        };
        self.api.ask(request).await.map(drop)
    }

    /// Once at warning level: whatever is refused now will be next time.
    fn refused(&mut self, failure: &Failure) {
        self.counts.add(Outcome::Refused);
        if std::mem::replace(&mut self.refusal_told, true) {
            debug!("the API server does not take an event: {failure}");
        } else if failure.reason == FailureReason::Forbidden {
            warn!(
                "the API server does not allow create and patch of events in API group \"events.k8s.io\": {failure}; \
                 nobody sees this proxy's events, everything else works; ClusterRole system:node-proxier grants it"
            );
        } else {
            warn!("the API server does not take an event: {failure}");
        }
    }
}

/// Whether the API server may take the very same event later.
fn is_worth_another_attempt(failure: &Failure, series: bool) -> bool {
    match failure.code {
        // A series whose event is there after all.
        Some(409) => series,
        Some(401 | 429) | None => true,
        Some(code) => code >= 500,
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::no_connection(None, false, true)]
    #[case::expired_token(Some(401), false, true)]
    #[case::forbidden(Some(403), false, false)]
    #[case::no_such_api(Some(404), false, false)]
    #[case::there_already(Some(409), false, false)]
    #[case::series_of_one_that_came_back(Some(409), true, true)]
    #[case::invalid(Some(422), false, false)]
    #[case::throttled(Some(429), false, true)]
    #[case::starting(Some(503), false, true)]
    fn what_may_succeed_later_is_tried_again(
        #[case] code: Option<u16>,
        #[case] series: bool,
        #[case] again: bool,
    ) {
        let failure = Failure { code, ..Failure::new(FailureReason::Refused, "") };
        assert_eq!(is_worth_another_attempt(&failure, series), again);
    }
}
