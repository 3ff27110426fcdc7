//! Which events are one: as client-go's recorder aggregates them. Plain data, told the time.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use super::{
    Event, Regarding, Type,
    object::{self, Metadata, Object, Reference},
};

/// A series that nothing was added to for this long is over.
pub(super) const FINISHED_AFTER: Duration = Duration::from_secs(6 * 60);
/// A series that goes on is written again after this time, lest the API server forget the event.
pub(super) const REFRESH_EVERY: Duration = Duration::from_secs(30 * 60);
/// Longest note that the API server takes, in bytes.
const LONGEST_NOTE: usize = 1024;
/// Longest `reportingInstance` that it takes, in bytes.
const LONGEST_INSTANCE: usize = 128;
/// Of what an event is about, in the event's own name: at most 253 with a dot and 16 digits.
const LONGEST_NAME: usize = 236;
pub(super) const CONTROLLER: &str = "kube-proxy";

/// Events with the same key are one series, whatever their notes say.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Key {
    event_type: Type,
    regarding: Regarding,
    reason: &'static str,
    action: &'static str,
}

/// An event as the API server has it.
#[derive(Clone, Debug)]
pub(super) struct Recorded {
    event: Event,
    name: String,
    first: Timestamp,
    series: Option<Series>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Series {
    /// Events in it, the first included.
    count: u64,
    last: Timestamp,
    /// When it was written last.
    written: Timestamp,
}

/// What is to be done about an event.
#[derive(Debug)]
pub(super) enum Todo {
    Create(Box<Recorded>),
    /// The series of an event that was written before has begun.
    Patch(Box<Recorded>),
    /// It has been counted.
    Nothing,
}

/// Who records.
#[derive(Clone, Debug)]
pub(super) struct Reporter {
    pub(super) node_name: std::sync::Arc<str>,
    pub(super) instance: String,
}

impl Reporter {
    pub(super) fn new(node_name: std::sync::Arc<str>, host: &str) -> Self {
        Self { node_name, instance: cut(format!("{CONTROLLER}-{host}"), LONGEST_INSTANCE) }
    }
}

#[derive(Debug, Default)]
pub(super) struct Aggregator(FxHashMap<Key, Recorded>);

impl Aggregator {
    pub(super) fn take(&mut self, event: Event, now: Timestamp, reporter: &Reporter) -> Todo {
        let Event { event_type, regarding, reason, action, .. } = &event;
        let key = Key { event_type: *event_type, regarding: regarding.clone(), reason, action };
        if let Some(known) = self.0.get_mut(&key) {
            return match &mut known.series {
                Some(series) => {
                    series.count += 1;
                    series.last = now;
                    Todo::Nothing
                }
                None => {
                    known.series = Some(Series { count: 2, last: now, written: now });
                    Todo::Patch(Box::new(known.clone()))
                }
            };
        }
        let name = event_name(event.regarding_name(&reporter.node_name), now);
        let recorded = Recorded { event, name, first: now, series: None };
        self.0.insert(key, recorded.clone());
        Todo::Create(Box::new(recorded))
    }

    /// What must be written now although nothing has happened: final counts of series that are over, and those
    /// that the API server would forget.
    pub(super) fn due(&mut self, now: Timestamp) -> Vec<Recorded> {
        let since = |then: Timestamp| now.duration_since(then);
        let (finished, refresh) = (signed(FINISHED_AFTER), signed(REFRESH_EVERY));
        let mut due = Vec::new();
        self.0.retain(|_, known| match &mut known.series {
            Some(series) if since(series.last) >= finished => {
                due.push(known.clone());
                false
            }
            Some(series) => {
                if since(series.written) >= refresh {
                    series.written = now;
                    due.push(known.clone());
                }
                true
            }
            None => since(known.first) < finished,
        });
        due
    }
}

fn signed(duration: Duration) -> SignedDuration {
    SignedDuration::try_from(duration).unwrap_or(SignedDuration::MAX)
}

impl Event {
    fn regarding_name<'a>(&'a self, node_name: &'a str) -> &'a str {
        match &self.regarding {
            Regarding::Node => node_name,
            Regarding::Service(service) => &service.name,
        }
    }

    fn namespace(&self) -> &str {
        match &self.regarding {
            Regarding::Node => "default",
            Regarding::Service(service) => &service.namespace,
        }
    }
}

impl Recorded {
    /// All events of this namespace.
    pub(super) fn collection(&self) -> String {
        format!("/apis/events.k8s.io/v1/namespaces/{}/events", self.event.namespace())
    }

    pub(super) fn path(&self) -> String {
        format!("{}/{}", self.collection(), self.name)
    }

    pub(super) fn object(&self, reporter: &Reporter) -> Object {
        let event = &self.event;
        let (kind, namespace) = match &event.regarding {
            Regarding::Node => ("Node", ""),
            Regarding::Service(service) => ("Service", &*service.namespace),
        };
        Object {
            metadata: Metadata { name: self.name.clone(), namespace: event.namespace().to_owned() },
            event_time: self.first.into(),
            series: self.series(),
            reporting_controller: CONTROLLER.to_owned(),
            reporting_instance: reporter.instance.clone(),
            action: event.action.to_owned(),
            reason: event.reason.to_owned(),
            regarding: Reference {
                kind: kind.to_owned(),
                namespace: namespace.to_owned(),
                name: event.regarding_name(&reporter.node_name).to_owned(),
                api_version: "v1".to_owned(),
            },
            note: cut(event.note.clone(), LONGEST_NOTE),
            event_type: match event.event_type {
                Type::Normal => "Normal".to_owned(),
                Type::Warning => "Warning".to_owned(),
            },
        }
    }

    /// The change that writes the series as it is now: JSON, whatever encoding objects have.
    pub(super) fn patch(&self) -> Value {
        json!({"series": self.series()})
    }

    fn series(&self) -> Option<object::Series> {
        self.series.map(|series| object::Series {
            count: i32::try_from(series.count).unwrap_or(i32::MAX),
            last_observed_time: series.last.into(),
        })
    }
}

/// Unlike any other, as long as the clock goes on.
fn event_name(regarding: &str, now: Timestamp) -> String {
    let regarding = cut(regarding.to_owned(), LONGEST_NAME);
    format!("{}.{:x}", regarding.trim_end_matches(['.', '-']), now.as_nanosecond())
}

/// At most `longest` bytes, whole characters.
fn cut(mut text: String, longest: usize) -> String {
    if text.len() > longest {
        text.truncate(text.floor_char_boundary(longest));
    }
    text
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::{config::Encoding, model::objects::ObjectName, source::schema::meta::Unknown};

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_700_000_000 + seconds).unwrap()
    }

    fn reporter() -> Reporter {
        Reporter::new("node-1".into(), "host-1")
    }

    fn about_a_service() -> Event {
        Event {
            event_type: Type::Warning,
            regarding: Regarding::Service(ObjectName::new("shop", "web")),
            reason: "FailedToStartServiceHealthcheck",
            action: "Listen",
            note: "address in use".into(),
        }
    }

    fn json_of(recorded: &Recorded) -> Value {
        let body = recorded.object(&reporter()).encode(Encoding::Json).unwrap();
        serde_json::from_slice(&body).unwrap()
    }

    fn starting(note: &str) -> Event {
        Event::node(Type::Normal, "Starting", "StartKubeProxy", note)
    }

    #[test]
    fn an_event_has_the_fields_of_kube_proxys() {
        let Todo::Create(recorded) = Aggregator::default().take(starting(""), at(0), &reporter()) else {
            panic!("not new");
        };
        assert_eq!(recorded.collection(), "/apis/events.k8s.io/v1/namespaces/default/events");
        assert_eq!(
            json_of(&recorded),
            json!({
                "apiVersion": "events.k8s.io/v1", "kind": "Event",
                "metadata": {"namespace": "default", "name": "node-1.17979cfe362a0000"},
                "eventTime": "2023-11-14T22:13:20.000000Z",
                "type": "Normal", "reason": "Starting", "action": "StartKubeProxy", "note": "",
                "regarding": {"apiVersion": "v1", "kind": "Node", "name": "node-1"},
                "reportingController": "kube-proxy", "reportingInstance": "kube-proxy-host-1",
            })
        );
    }

    #[test]
    fn an_event_about_a_service_is_in_its_namespace() {
        let event = about_a_service();
        let Todo::Create(recorded) = Aggregator::default().take(event, at(0), &reporter()) else {
            panic!("not new");
        };
        let object = json_of(&recorded);
        assert_eq!(object["metadata"]["namespace"], "shop");
        assert_eq!(object["regarding"]["kind"], "Service");
        assert_eq!(
            (&object["regarding"]["namespace"], &object["regarding"]["name"]),
            (&json!("shop"), &json!("web"))
        );
        assert_eq!(recorded.path(), "/apis/events.k8s.io/v1/namespaces/shop/events/web.17979cfe362a0000");
    }

    /// As Kubernetes' own serializers write the same: `tests/kubernetes/cmd/encodings`.
    #[test]
    fn both_encodings_are_those_of_kubernetes() {
        let event = about_a_service();
        let first = Timestamp::from_microsecond(1_700_000_000_123_456).unwrap();
        let mut events = Aggregator::default();
        events.take(event.clone(), first, &reporter());
        let again = first + Duration::from_secs(10);
        let Todo::Patch(recorded) = events.take(event, again, &reporter()) else { panic!("no series") };

        let json = include_bytes!("../source/kubernetes/recorded/event.json");
        let mut json: Value = serde_json::from_slice(json).unwrap();
        let fields = json.as_object_mut().unwrap();
        fields.retain(|name, _| !name.starts_with("deprecated"));
        assert_eq!(json_of(&recorded), json);

        let read = |envelope: &[u8]| {
            let envelope = Unknown::decode(envelope.strip_prefix(b"k8s\0").unwrap()).unwrap();
            (Object::decode(envelope.raw).unwrap(), envelope.type_meta)
        };
        let protobuf = include_bytes!("../source/kubernetes/recorded/event.protobuf");
        let own = recorded.object(&reporter()).encode(Encoding::Protobuf).unwrap();
        assert_eq!(read(&own), read(protobuf));
    }

    #[test]
    fn what_is_repeated_is_a_series_that_is_written_when_it_begins_and_when_it_ends() {
        let mut events = Aggregator::default();
        let Todo::Create(first) = events.take(starting("a"), at(0), &reporter()) else { panic!("not new") };
        let Todo::Patch(second) = events.take(starting("b"), at(10), &reporter()) else {
            panic!("no series")
        };
        assert_eq!(second.path(), first.path());
        assert_eq!(
            second.patch(),
            json!({"series": {"count": 2, "lastObservedTime": "2023-11-14T22:13:30.000000Z"}})
        );
        for seconds in [20, 30] {
            assert!(matches!(events.take(starting("c"), at(seconds), &reporter()), Todo::Nothing));
        }
        assert!(events.due(at(30 + 359)).is_empty());
        let due = events.due(at(30 + 360));
        assert_eq!(due.len(), 1);
        assert_eq!(due[0].patch()["series"]["count"], 4);
        assert!(matches!(events.take(starting("d"), at(400), &reporter()), Todo::Create(_)), "a new one");
    }

    #[test]
    fn other_reasons_objects_and_types_are_other_events() {
        let mut events = Aggregator::default();
        let all = [
            starting(""),
            Event { event_type: Type::Warning, ..starting("") },
            Event { reason: "Stopping", ..starting("") },
            Event { action: "StopKubeProxy", ..starting("") },
            Event { regarding: Regarding::Service(ObjectName::new("a", "b")), ..starting("") },
        ];
        for event in all {
            assert!(matches!(events.take(event, at(0), &reporter()), Todo::Create(_)));
        }
    }

    #[test]
    fn a_single_event_is_forgotten_and_a_long_series_is_refreshed() {
        let mut events = Aggregator::default();
        events.take(starting(""), at(0), &reporter());
        assert!(events.due(at(360)).is_empty());
        assert!(matches!(events.take(starting(""), at(361), &reporter()), Todo::Create(_)), "forgotten");
        for seconds in (400..2400).step_by(100) {
            events.take(starting(""), at(seconds), &reporter());
        }
        assert_eq!(events.due(at(2500)).len(), 1);
        assert!(events.due(at(2500)).is_empty(), "it has just been written");
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let event = starting(&"ä".repeat(1000));
        let Todo::Create(recorded) = Aggregator::default().take(event, at(0), &reporter()) else {
            panic!("not new");
        };
        assert_eq!(recorded.object(&reporter()).note.len(), 1024);
        assert_eq!(Reporter::new("n".into(), &"h".repeat(300)).instance.len(), 128);
    }
}
