//! Events of events.k8s.io/v1, as kube-proxy records them: about the Node or a Service, repeated ones counted in
//! a series.
//!
//! [`Recorder::record`] never waits and never fails. What it is given goes through a bounded queue to a task that
//! writes one event after the other, and tries again while the API server is away.

mod object;
mod series;
mod writer;

use std::sync::Arc;

use jiff::Timestamp;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use tokio::sync::{mpsc, oneshot};

use crate::{model::objects::ObjectName, source::kubernetes::Api};

/// Events that wait for the API server; as many as client-go keeps.
const QUEUE: usize = 1000;

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Type {
    Normal,
    Warning,
}

/// What an event is about.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum Regarding {
    /// The own Node. The event is in namespace `default`, as Nodes are in none.
    Node,
    Service(ObjectName),
}

/// Something that people should find with `kubectl get events`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Event {
    pub event_type: Type,
    pub regarding: Regarding,
    /// Why it happened, in one word in camel case, such as `Starting`.
    pub reason: &'static str,
    /// What was being done, such as `StartKubeProxy`.
    pub action: &'static str,
    /// For people; cut after 1024 bytes.
    pub note: String,
}

impl Event {
    /// About the own Node.
    pub fn node(
        event_type: Type,
        reason: &'static str,
        action: &'static str,
        note: impl Into<String>,
    ) -> Self {
        Self { event_type, regarding: Regarding::Node, reason, action, note: note.into() }
    }
}

/// What has become of an event: the label of the counter.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Outcome {
    Written,
    /// Counted in the series of an earlier one, which is written from time to time.
    Aggregated,
    /// The queue was full.
    Dropped,
    /// The API server does not want it.
    Refused,
    /// The API server was away for too long.
    GivenUp,
}

impl Outcome {
    const ALL: [Self; 5] = [Self::Written, Self::Aggregated, Self::Dropped, Self::Refused, Self::GivenUp];

    /// Label value of the metric.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Written => "written",
            Self::Aggregated => "aggregated",
            Self::Dropped => "dropped",
            Self::Refused => "refused",
            Self::GivenUp => "given_up",
        }
    }
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, EncodeLabelSet)]
struct ByOutcome {
    outcome: &'static str,
}

/// Clones count together.
#[derive(Clone, Debug, Default)]
struct Counts(Family<ByOutcome, Counter>);

impl Counts {
    fn add(&self, outcome: Outcome) {
        self.0.get_or_create(&ByOutcome { outcome: outcome.name() }).inc();
    }
}

/// Takes events from anywhere; clones share one queue. When the last one is gone, what waits is still written, as
/// long as the runtime lives.
#[derive(Clone, Debug)]
pub struct Recorder {
    /// None: there is no API server to tell.
    queue: Option<mpsc::Sender<Job>>,
    counts: Counts,
}

/// What the writer gets to do.
#[derive(Debug)]
enum Job {
    Record(Event, Timestamp),
    /// Answered when everything before it is done.
    Flush(oneshot::Sender<()>),
}

impl Recorder {
    /// Starts the writer on the current tokio runtime. `node_name` names the Node that events are about, `host`
    /// this machine.
    pub fn new(api: Api, node_name: impl Into<Arc<str>>, host: &str) -> Self {
        let (queue, jobs) = mpsc::channel(QUEUE);
        let counts = Counts::default();
        let writer = writer::Writer::new(api, node_name.into(), host, counts.clone());
        tokio::spawn(writer.run(jobs));
        Self { queue: Some(queue), counts }
    }

    /// For those who have no API server: events are only logged.
    pub fn silent() -> Self {
        Self { queue: None, counts: Counts::default() }
    }

    /// Registers `events{outcome}` below whatever prefix `registry` has.
    pub fn register(&self, registry: &mut Registry) {
        for outcome in Outcome::ALL {
            self.counts.0.get_or_create(&ByOutcome { outcome: outcome.name() }).inc_by(0);
        }
        registry.register("events", "Kubernetes events, by what has become of them", self.counts.0.clone());
    }

    /// How many events have come to this end.
    pub fn count(&self, outcome: Outcome) -> u64 {
        self.counts.0.get_or_create(&ByOutcome { outcome: outcome.name() }).get()
    }

    /// Never blocks: if too many wait already, this one is dropped and counted.
    pub fn record(&self, event: Event) {
        let Event { event_type, regarding, reason, action, note } = &event;
        tracing::debug!(?event_type, ?regarding, reason, action, note, "event");
        let Some(queue) = &self.queue else { return };
        if queue.try_send(Job::Record(event, Timestamp::now())).is_err() {
            self.counts.add(Outcome::Dropped);
        }
    }

    /// Returns when everything recorded so far has been written or given up. For the last words of a process:
    /// within a timeout, as the API server may be away.
    pub async fn flush(&self) {
        let Some(queue) = &self.queue else { return };
        let (done, flushed) = oneshot::channel();
        if queue.send(Job::Flush(done)).await.is_ok() {
            // The writer ends with the runtime only.
            let _ = flushed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_drops_and_counts() {
        let (queue, mut jobs) = mpsc::channel(2);
        let recorder = Recorder { queue: Some(queue), counts: Counts::default() };
        for number in 0..5 {
            recorder.record(Event::node(Type::Normal, "Starting", "StartKubeProxy", number.to_string()));
        }
        assert_eq!(recorder.count(Outcome::Dropped), 3);
        let Some(Job::Record(first, _)) = jobs.blocking_recv() else { panic!("nothing waits") };
        assert_eq!(first.note, "0");
    }

    #[tokio::test]
    async fn without_an_api_server_nothing_waits() {
        let recorder = Recorder::silent();
        recorder.record(Event::node(Type::Warning, "Starting", "StartKubeProxy", ""));
        recorder.flush().await;
        assert_eq!(recorder.count(Outcome::Dropped), 0);
    }

    #[test]
    fn the_metric_has_every_outcome() {
        let mut registry = Registry::default();
        Recorder::silent().register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for outcome in ["written", "aggregated", "dropped", "refused", "given_up"] {
            assert!(text.contains(&format!("events_total{{outcome=\"{outcome}\"}} 0")), "{text}");
        }
    }
}
