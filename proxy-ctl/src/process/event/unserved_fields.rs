//! Reports Services that are not served as they ask, by one event for each Service and change.
//!
//! Every node would record the same events, so that a thousand such Services on five thousand nodes
//! would be five million requests at once. Nodes therefore record events at different moments and
//! in different orders, and each reports a few Services in an hour. All of them together report
//! every Service. Metrics, log and `status` of each node name all of them.

use std::{
    collections::{BTreeMap, VecDeque},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    time::Duration,
};

use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use crate::{
    controller::Coverage,
    events::{Event, Recorder},
    model::objects::ObjectName,
    process::{event, record::UnservedFieldRecord},
};

/// The event that was sent about each Service.
type Told = BTreeMap<ObjectName, Event>;

/// The time over which nodes spread the moments at which they report the same Service.
const SPREAD: Duration = Duration::from_secs(30);
/// The most events that a node sends in an hour.
pub(in crate::process) const MOST_IN_AN_HOUR: usize = 20;
pub(in crate::process) const HOUR: Duration = Duration::from_secs(3_600);

/// The last events of this node, at most [`MOST_IN_AN_HOUR`].
#[derive(Debug, Default)]
pub(in crate::process) struct Allowance(VecDeque<Instant>);

impl Allowance {
    /// Returns when the next event may be sent, `now` or later.
    pub(in crate::process) fn next(&self, now: Instant) -> Instant {
        let is_spent = self.0.len() >= MOST_IN_AN_HOUR;
        self.0.front().filter(|_| is_spent).map_or(now, |oldest| now.max(*oldest + HOUR))
    }

    pub(in crate::process) fn spend(&mut self, now: Instant) {
        if self.0.len() >= MOST_IN_AN_HOUR {
            self.0.pop_front();
        }
        self.0.push_back(now);
    }
}

/// Sends the events. It ends when nothing will ever be served.
///
/// `told` has the fields that events have reported, at first those of a predecessor. `node` is the
/// own name. The allowance is not kept over a restart, which lets the node report
/// [`MOST_IN_AN_HOUR`] more.
pub(in crate::process) async fn follow(
    mut coverage: watch::Receiver<Coverage>,
    told: &watch::Sender<Vec<UnservedFieldRecord>>,
    node: &str,
    events: Recorder,
) {
    // Before everything is programmed, a Service that is not listed yet would seem to be gone.
    if coverage.wait_for(|coverage| coverage.programmed).await.is_err() {
        return;
    }
    let mut allowance = Allowance::default();
    loop {
        let now = events_of(&UnservedFieldRecord::all(&coverage.borrow_and_update()));
        told.send_modify(|told| told.retain(|field| now.contains_key(&field.service())));
        let told_so_far = events_of(&told.borrow());
        let Some(service) = next(&told_so_far, &now, node) else {
            if coverage.changed().await.is_err() {
                return;
            }
            continue;
        };
        let moment = allowance.next(Instant::now()) + spread(node, service);
        sleep_until(moment).await;
        // Meanwhile the event may have become another one, or the Service may be served.
        let mut still = UnservedFieldRecord::all(&coverage.borrow());
        still.retain(|field| field.service() == *service);
        let event = events_of(&still).remove(service);
        if let Some(event) = event.filter(|event| told_so_far.get(service) != Some(event)) {
            events.record(event);
            allowance.spend(moment);
            told.send_modify(|told| {
                told.retain(|field| field.service() != *service);
                told.append(&mut still);
            });
        }
    }
}

/// Returns the Service to report next. Each node has an order of its own.
fn next<'a>(told: &Told, now: &'a Told, node: &str) -> Option<&'a ObjectName> {
    let news = now.iter().filter(|(service, event)| told.get(*service) != Some(*event));
    news.map(|(service, _)| service).min_by_key(|service| number(node, service))
}

/// Returns how long the node waits before it reports the Service.
fn spread(node: &str, service: &ObjectName) -> Duration {
    // The result is less than SPREAD, because the factor is below 1.
    SPREAD.mul_f64((number(node, service) % 1_000) as f64 / 1_000.0)
}

/// Returns a number that is another one for each node and Service, and the same each time.
fn number(node: &str, service: &ObjectName) -> u64 {
    let mut hasher = DefaultHasher::new();
    (node, &service.namespace, &service.name).hash(&mut hasher);
    hasher.finish()
}

fn events_of(fields: &[UnservedFieldRecord]) -> Told {
    let mut by_service: BTreeMap<ObjectName, Vec<&UnservedFieldRecord>> = BTreeMap::new();
    for field in fields.iter().filter(|field| !field.is_delegated() && !field.is_left_to_node()) {
        by_service.entry(field.service()).or_default().push(field);
    }
    by_service
        .into_iter()
        .map(|(service, fields)| {
            let leaves_unserved = fields.iter().any(|field| field.leaves_unserved());
            let event = event::service_not_served_as_asked(service.clone(), leaves_unserved, note(&fields));
            (service, event)
        })
        .collect()
}

/// Returns the text of an event. What is the same for several ports, or in both families, is said
/// once.
fn note(fields: &[&UnservedFieldRecord]) -> String {
    let mut ports: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
    for field in fields {
        let ports = ports.entry((&field.field, &field.instead)).or_default();
        if !ports.contains(&field.port.as_str()) {
            ports.push(&field.port);
        }
    }
    let notes = ports.into_iter().map(|((field, instead), ports)| {
        let ports: Vec<&str> = ports.into_iter().filter(|port| !port.is_empty()).collect();
        let of = if ports.is_empty() { String::new() } else { format!(" (port {})", ports.join(", ")) };
        format!("{field}{of}: {instead}")
    });
    notes.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        events::Regarding,
        model::{
            desired::ServicePortName,
            objects::{IpFamily, Protocol},
        },
        modes::{Effect, UnservedField},
    };

    /// Returns a coverage in which `services` Services are not served.
    fn unserved(services: usize) -> Coverage {
        let port = |number: usize| {
            let unserved = UnservedField { field: "spec.x", effect: Effect::NotServed, instead: "no".into() };
            let name = ServicePortName {
                service: ObjectName::new("shop", format!("web-{number}")),
                port: "".into(),
                protocol: Protocol::Tcp,
                family: IpFamily::Ipv4,
            };
            (name, vec![unserved])
        };
        Coverage {
            programmed: true,
            unserved_fields: (0..services).map(port).collect(),
            ..Coverage::default()
        }
    }

    /// Returns what a node has reported after this time.
    async fn told_by(node: &'static str, services: usize, after: Duration) -> Vec<String> {
        told_after(&watch::Sender::default(), node, services, after).await
    }

    async fn told_after(
        told: &watch::Sender<Vec<UnservedFieldRecord>>,
        node: &'static str,
        services: usize,
        after: Duration,
    ) -> Vec<String> {
        let (_sender, coverage) = watch::channel(unserved(services));
        let (events, next) = Recorder::kept();
        let following = follow(coverage, told, node, events);
        assert!(tokio::time::timeout(after, following).await.is_err(), "it goes on");
        std::iter::from_fn(next).map(|event| format!("{:?}", event.regarding)).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_tells_of_few_services_in_an_hour_and_of_one_soon() {
        assert_eq!(told_by("a", 1, SPREAD).await.len(), 1);
        assert!(told_by("a", 1_000, SPREAD).await.len() <= MOST_IN_AN_HOUR);
        assert_eq!(told_by("a", 1_000, HOUR).await.len(), MOST_IN_AN_HOUR);
        let later = told_by("a", 1_000, HOUR * 10).await.len();
        assert!((9 * MOST_IN_AN_HOUR..=11 * MOST_IN_AN_HOUR).contains(&later), "{later}");
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_restart_a_node_tells_of_what_it_has_not_told() {
        let told = watch::Sender::default();
        let first = told_after(&told, "a", 30, HOUR).await;
        let second = told_after(&told, "a", 30, HOUR).await;
        assert_eq!((first.len(), second.len()), (MOST_IN_AN_HOUR, 30 - MOST_IN_AN_HOUR));
        assert!(first.iter().all(|service| !second.contains(service)), "{first:?} {second:?}");
        assert_eq!(told_after(&told, "a", 30, HOUR).await, Vec::<String>::new());
        assert_eq!(told.borrow().len(), 30);
    }

    #[tokio::test(start_paused = true)]
    async fn nodes_tell_of_different_services_first_and_at_different_moments() {
        let (a, b) = (told_by("a", 1_000, HOUR).await, told_by("b", 1_000, HOUR).await);
        assert!(a.iter().filter(|one| b.contains(one)).count() < MOST_IN_AN_HOUR / 2, "{a:?} {b:?}");
        let web = ObjectName::new("shop", "web");
        let moments: Vec<Duration> = (0..100).map(|node| spread(&format!("node-{node}"), &web)).collect();
        let early = moments.iter().filter(|moment| **moment < SPREAD / 2).count();
        assert!((30..=70).contains(&early) && moments.iter().all(|moment| *moment < SPREAD), "{moments:?}");
    }

    fn field(name: &str, port: &str, family: &str, field: &str, effect: &str) -> UnservedFieldRecord {
        UnservedFieldRecord {
            namespace: "shop".into(),
            name: name.into(),
            port: port.into(),
            protocol: "TCP".into(),
            family: family.into(),
            field: field.into(),
            effect: effect.into(),
            instead: format!("not {}", &field["spec.".len()..]),
        }
    }

    #[test]
    fn one_event_of_a_service_names_ports_fields_and_what_happens_instead() {
        let fields = [
            field("web", "http", "IPv4", "spec.a", "servedDifferently"),
            field("web", "http", "IPv6", "spec.a", "servedDifferently"),
            field("web", "https", "IPv4", "spec.a", "servedDifferently"),
            field("web", "https", "IPv4", "spec.b", "partlyServed"),
            field("unnamed", "", "IPv4", "spec.a", "servedDifferently"),
        ];
        let told: Vec<Event> = events_of(&fields).into_values().collect();
        let seen: Vec<_> = told.iter().map(|event| (event.reason, event.note.as_str())).collect();
        let both = "spec.a (port http, https): not a; spec.b (port https): not b";
        assert_eq!(seen, [("FieldNotHonoured", "spec.a: not a"), ("ServiceNotServed", both)]);
        assert_eq!(told[1].regarding, Regarding::Service(ObjectName::new("shop", "web")));
        assert!(told[1].of_all_nodes);
    }

    #[test]
    fn a_service_is_told_again_only_after_a_change() {
        let told = |fields: &[&str]| {
            let fields: Vec<_> =
                fields.iter().map(|name| field("web", "", "IPv4", name, "notServed")).collect();
            events_of(&fields)
        };
        let (nothing, a, both) = (told(&[]), told(&["spec.a"]), told(&["spec.a", "spec.b"]));
        let told_at = [(&nothing, &a), (&a, &a), (&a, &both), (&both, &a), (&a, &nothing)];
        assert_eq!(
            told_at.map(|(before, now)| next(before, now, "a").is_some()),
            [true, false, true, true, false]
        );
    }
}
