//! Events of events.k8s.io/v1, as kube-proxy records them. They are about the Node or a Service,
//! and repeated events become a series.
//!
//! [`Recorder::record`] never waits and never fails. Events go through a bounded queue to a task.
//! It writes one event after the other with kube's recorder, and tries again while the API server
//! is away.

use std::{
    hash::{DefaultHasher, Hash as _, Hasher as _},
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1::Event as EventObject},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use kube::{
    api::PostParams,
    runtime::events::{self as kube_events, Reporter},
};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use tokio::{
    sync::{mpsc, oneshot},
    time::sleep,
};
use tracing::{debug, warn};

use crate::{
    kubernetes::{
        Api,
        failure::{Failure, FailureReason},
    },
    model::objects::ObjectName,
};

/// The number of events that can wait for the API server. client-go keeps as many.
const QUEUE: usize = 1000;
/// The number of attempts for each event, with [`PAUSE`] in between, as in client-go.
const ATTEMPTS: u32 = 12;
const PAUSE: Duration = Duration::from_secs(10);
/// The length of the longest note that the API server accepts, in bytes.
const LONGEST_NOTE: usize = 1024;
const CONTROLLER: &str = "kube-proxy";

pub use kube::runtime::events::EventType as Type;

/// The object that an event is about.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum Regarding {
    /// The own Node. The event is in namespace `default`, because Nodes are in no namespace.
    Node,
    Service(ObjectName),
}

/// An event for people, who find it with `kubectl get events`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Event {
    pub event_type: Type,
    pub regarding: Regarding,
    /// The cause as one word in camel case, such as `Starting`.
    pub reason: &'static str,
    /// The action that was being done, such as `StartKubeProxy`.
    pub action: &'static str,
    /// The text for people. It is cut after 1024 bytes.
    pub note: String,
    /// True if every node would record the same event. The node that records it first does so for
    /// all nodes.
    pub of_all_nodes: bool,
}

impl Event {
    /// Returns an event about the own Node.
    pub fn node(
        event_type: Type,
        reason: &'static str,
        action: &'static str,
        note: impl Into<String>,
    ) -> Self {
        Self {
            event_type,
            regarding: Regarding::Node,
            reason,
            action,
            note: note.into(),
            of_all_nodes: false,
        }
    }
}

/// The outcome of an event, which is the label of the counter.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Outcome {
    Written,
    /// The event was dropped because the queue was full.
    Dropped,
    /// The API server refused the event.
    Refused,
    /// The API server was away for too long.
    GivenUp,
}

impl Outcome {
    const ALL: [Self; 4] = [Self::Written, Self::Dropped, Self::Refused, Self::GivenUp];

    /// Returns the value of the metric's label.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Written => "written",
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

/// The counter of events by outcome. Clones count together.
#[derive(Clone, Debug, Default)]
struct Counts(Family<ByOutcome, Counter>);

impl Counts {
    fn add(&self, outcome: Outcome) {
        self.0.get_or_create(&ByOutcome { outcome: outcome.name() }).inc();
    }
}

/// A handle that takes events from anywhere. Clones share one queue. When the last clone is gone,
/// waiting events are still written, as long as the runtime lives.
#[derive(Clone, Debug)]
pub struct Recorder {
    /// The queue to the writer. None if there is no API server.
    queue: Option<mpsc::Sender<Job>>,
    counts: Counts,
}

/// A job for the writer.
#[derive(Debug)]
enum Job {
    Record(Event),
    /// A request to answer when everything before it is done.
    Flush(oneshot::Sender<()>),
}

impl Recorder {
    /// Starts the writer on the current tokio runtime. `node_name` names the Node that events are
    /// about, and `host` names this machine.
    pub fn new(api: Api, node_name: impl Into<Arc<str>>, host: &str) -> Self {
        let (queue, jobs) = mpsc::channel(QUEUE);
        let counts = Counts::default();
        let instance = Some(format!("{CONTROLLER}-{host}"));
        let reporter = Reporter { controller: CONTROLLER.to_owned(), instance };
        let writer = Writer {
            client: api.client(),
            reporter: reporter.clone(),
            recorder: kube_events::Recorder::new(api.client(), reporter),
            node_name: node_name.into(),
            counts: counts.clone(),
            refusal_logged: false,
        };
        tokio::spawn(writer.run(jobs));
        Self { queue: Some(queue), counts }
    }

    /// Returns a recorder that only logs events, for processes without an API server.
    pub fn silent() -> Self {
        Self { queue: None, counts: Counts::default() }
    }

    /// Returns a recorder, and a function that returns the recorded events in their order.
    #[cfg(test)]
    pub fn kept() -> (Self, impl FnMut() -> Option<Event>) {
        let (queue, mut jobs) = mpsc::channel(QUEUE);
        let next = move || {
            std::iter::from_fn(|| jobs.try_recv().ok()).find_map(|job| match job {
                Job::Record(event) => Some(event),
                Job::Flush(_) => None,
            })
        };
        (Self { queue: Some(queue), counts: Counts::default() }, next)
    }

    /// Registers `events{outcome}` below the prefix of `registry`.
    pub fn register(&self, registry: &mut Registry) {
        for outcome in Outcome::ALL {
            self.counts.0.get_or_create(&ByOutcome { outcome: outcome.name() }).inc_by(0);
        }
        registry.register("events", "Kubernetes events, by outcome", self.counts.0.clone());
    }

    /// Returns the number of events with this outcome.
    pub fn count(&self, outcome: Outcome) -> u64 {
        self.counts.0.get_or_create(&ByOutcome { outcome: outcome.name() }).get()
    }

    /// Records an event. This never blocks: if too many events wait already, the event is dropped
    /// and counted.
    pub fn record(&self, event: Event) {
        let Event { event_type, regarding, reason, action, note, .. } = &event;
        tracing::debug!(?event_type, ?regarding, reason, action, note, "event");
        let Some(queue) = &self.queue else { return };
        if queue.try_send(Job::Record(event)).is_err() {
            self.counts.add(Outcome::Dropped);
        }
    }

    /// Returns when everything recorded so far has been written or given up. A process calls it
    /// before it ends, and should set a timeout because the API server may be away.
    pub async fn flush(&self) {
        let Some(queue) = &self.queue else { return };
        let (done, flushed) = oneshot::channel();
        if queue.send(Job::Flush(done)).await.is_ok() {
            // The writer ends only with the runtime, so an error can be ignored.
            let _ = flushed.await;
        }
    }
}

/// The task that writes events.
struct Writer {
    client: kube::Client,
    reporter: Reporter,
    recorder: kube_events::Recorder,
    node_name: Arc<str>,
    counts: Counts,
    refusal_logged: bool,
}

impl Writer {
    /// Writes events until every [`Recorder`] is dropped.
    async fn run(mut self, mut jobs: mpsc::Receiver<Job>) {
        while let Some(job) = jobs.recv().await {
            match job {
                Job::Record(event) => self.write(event).await,
                // The caller of `flush` may have given up.
                Job::Flush(done) => drop(done.send(())),
            }
        }
    }

    async fn write(&mut self, event: Event) {
        let of_all_nodes = event.of_all_nodes;
        let (event, regarding) = published(event, &self.node_name);
        for attempt in 1..=ATTEMPTS {
            let written = if of_all_nodes {
                self.create_unless_there(&event, &regarding).await
            } else {
                self.recorder.publish(&event, &regarding).await
            };
            let failure = match written {
                Ok(()) => return self.counts.add(Outcome::Written),
                Err(error) => Failure::from(error),
            };
            if !is_worth_another_attempt(&failure) {
                return self.refused(&failure);
            }
            debug!(attempt, "an event waits for the API server: {failure}");
            if attempt < ATTEMPTS {
                sleep(failure.retry_after.unwrap_or(PAUSE).max(PAUSE)).await;
            }
        }
        warn!(reason = event.reason, "an event was not written: the API server is away");
        self.counts.add(Outcome::GivenUp);
    }

    /// Creates an event unless it exists. Its name is a hash of its content, so that equal events
    /// of several nodes are one object.
    async fn create_unless_there(
        &self,
        event: &kube_events::Event,
        regarding: &ObjectReference,
    ) -> Result<(), kube::Error> {
        let object = event_of_all_nodes(event, regarding, &self.reporter);
        let namespace = regarding.namespace.as_deref().unwrap_or("default");
        let events = kube::Api::<EventObject>::namespaced(self.client.clone(), namespace);
        match events.create(&PostParams::default(), &object).await {
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
            done => done.map(drop),
        }
    }

    /// Counts a refusal, and warns about the first one only, because the next event will be refused
    /// too.
    fn refused(&mut self, failure: &Failure) {
        self.counts.add(Outcome::Refused);
        if std::mem::replace(&mut self.refusal_logged, true) {
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

/// Returns the event and its object in the types of kube's recorder.
fn published(event: Event, node_name: &str) -> (kube_events::Event, ObjectReference) {
    let (kind, namespace, name) = match &event.regarding {
        Regarding::Node => ("Node", None, node_name),
        Regarding::Service(service) => ("Service", Some(service.namespace.to_string()), &*service.name),
    };
    let regarding = ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some(kind.to_owned()),
        name: Some(name.to_owned()),
        namespace,
        ..ObjectReference::default()
    };
    let mut note = event.note;
    note.truncate(note.floor_char_boundary(LONGEST_NOTE));
    let event = kube_events::Event {
        type_: event.event_type,
        reason: event.reason.to_owned(),
        note: Some(note),
        action: event.action.to_owned(),
        secondary: None,
    };
    (event, regarding)
}

fn event_of_all_nodes(
    event: &kube_events::Event,
    regarding: &ObjectReference,
    reporter: &Reporter,
) -> EventObject {
    let mut told = DefaultHasher::new();
    (&event.reason, &event.note).hash(&mut told);
    let name = format!("{}.{:016x}", regarding.name.as_deref().unwrap_or(CONTROLLER), told.finish());
    EventObject {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: regarding.namespace.clone(),
            ..ObjectMeta::default()
        },
        event_time: Some(MicroTime(Timestamp::now())),
        type_: Some(format!("{:?}", event.type_)),
        reason: Some(event.reason.clone()),
        action: Some(event.action.clone()),
        note: event.note.clone(),
        regarding: Some(regarding.clone()),
        reporting_controller: Some(reporter.controller.clone()),
        reporting_instance: reporter.instance.clone(),
        ..EventObject::default()
    }
}

/// Returns true if the API server may accept the same event later.
fn is_worth_another_attempt(failure: &Failure) -> bool {
    match failure.code {
        Some(401 | 429) | None => true,
        Some(code) => code >= 500,
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[test]
    fn a_full_queue_drops_and_counts() {
        let (queue, mut jobs) = mpsc::channel(2);
        let recorder = Recorder { queue: Some(queue), counts: Counts::default() };
        for number in 0..5 {
            recorder.record(Event::node(Type::Normal, "Starting", "StartKubeProxy", number.to_string()));
        }
        assert_eq!(recorder.count(Outcome::Dropped), 3);
        let Some(Job::Record(first)) = jobs.blocking_recv() else { panic!("nothing waits") };
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
        for outcome in ["written", "dropped", "refused", "given_up"] {
            assert!(text.contains(&format!("events_total{{outcome=\"{outcome}\"}} 0")), "{text}");
        }
    }

    #[rstest]
    #[case::no_connection(None, true)]
    #[case::expired_token(Some(401), true)]
    #[case::forbidden(Some(403), false)]
    #[case::no_such_api(Some(404), false)]
    #[case::invalid(Some(422), false)]
    #[case::throttled(Some(429), true)]
    #[case::starting(Some(503), true)]
    fn what_may_succeed_later_is_tried_again(#[case] code: Option<u16>, #[case] again: bool) {
        let failure = Failure { code, ..Failure::new(FailureReason::Refused, "") };
        assert_eq!(is_worth_another_attempt(&failure), again);
    }

    #[test]
    fn an_event_about_a_service_is_in_its_namespace_and_one_about_the_node_in_none() {
        let event = Event::node(Type::Warning, "Starting", "StartKubeProxy", "ä".repeat(1000));
        let service =
            Event { regarding: Regarding::Service(ObjectName::new("shop", "web")), ..event.clone() };
        let named = |event| {
            let (event, of) = published(event, "node-1");
            assert_eq!(event.note.unwrap().len(), LONGEST_NOTE);
            [of.kind, of.namespace, of.name].map(Option::unwrap_or_default)
        };
        assert_eq!(named(event), ["Node", "", "node-1"]);
        assert_eq!(named(service), ["Service", "shop", "web"]);
    }

    #[test]
    fn what_all_nodes_tell_has_one_name_until_it_changes() {
        let named = |node: &str, note: &str| {
            let regarding = Regarding::Service(ObjectName::new("shop", "web"));
            let event =
                Event { regarding, ..Event::node(Type::Warning, "FieldNotHonoured", "ServeService", note) };
            let (event, regarding) = published(event, node);
            let reporter = Reporter { controller: CONTROLLER.to_owned(), instance: Some(node.to_owned()) };
            let object = event_of_all_nodes(&event, &regarding, &reporter);
            assert_eq!(object.type_.as_deref(), Some("Warning"));
            object.metadata.name.unwrap()
        };
        assert!(named("a", "x").starts_with("web."), "{}", named("a", "x"));
        assert_eq!(named("a", "x"), named("b", "x"));
        assert_ne!(named("a", "x"), named("a", "y"));
    }
}
