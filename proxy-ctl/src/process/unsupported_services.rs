//! Tells the cluster of Services that are not served as they ask: one event for each Service and change.

use std::collections::BTreeMap;

use tokio::sync::watch;

use super::{event, record::UnsupportedField};
use crate::{
    controller::Coverage,
    events::{Event, Recorder},
    model::objects::ObjectName,
};

/// What was told of each Service.
type Told = BTreeMap<ObjectName, Event>;

/// Ends when nothing will ever be served. `told_before`: what a predecessor has told.
pub(super) async fn follow(
    mut coverage: watch::Receiver<Coverage>,
    told_before: &[UnsupportedField],
    events: Recorder,
) {
    let mut told = events_of(told_before);
    // Before that, what is not listed yet would seem to be gone.
    if coverage.wait_for(|coverage| coverage.programmed).await.is_err() {
        return;
    }
    loop {
        let now = events_of(&UnsupportedField::all(&coverage.borrow_and_update()));
        for event in news(&told, &now) {
            events.record(event.clone());
        }
        told = now;
        if coverage.changed().await.is_err() {
            return;
        }
    }
}

fn news<'a>(told: &Told, now: &'a Told) -> Vec<&'a Event> {
    now.iter().filter(|(service, event)| told.get(*service) != Some(*event)).map(|(_, event)| event).collect()
}

fn events_of(fields: &[UnsupportedField]) -> Told {
    let mut by_service: BTreeMap<ObjectName, Vec<&UnsupportedField>> = BTreeMap::new();
    for field in fields.iter().filter(|field| !field.is_handed_over()) {
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

/// What is the same for several ports, or in both families, is said once.
fn note(fields: &[&UnsupportedField]) -> String {
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
    use crate::events::Regarding;

    fn field(name: &str, port: &str, family: &str, field: &str, effect: &str) -> UnsupportedField {
        UnsupportedField {
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
        assert_eq!(told_at.map(|(before, now)| news(before, now).len()), [1, 0, 1, 1, 0]);
    }
}
