//! Tests that what is not served as asked is named.

use super::*;

pub(super) fn unserved_fields(fixture: &Fixture) -> Vec<(String, Vec<UnservedField>)> {
    let coverage = fixture.reports.coverage.borrow();
    coverage.unserved_fields.iter().map(|(name, all)| (name.to_string(), all.clone())).collect()
}

#[test]
fn a_port_that_the_mode_does_not_support_is_left_out_and_named() {
    let mut fixture = Fixture::serving(Vec::new());
    let mut both = service("a", "10.0.0.1");
    both.ports.push(ServicePort { name: "s".into(), protocol: Protocol::Sctp, port: 81, node_port: None });
    fixture.take(Update::ApplyService(both.clone()));
    assert_eq!(fixture.write(), [Call::Apply(vec!["default/a".into()], vec![])]);
    assert_eq!(unserved_fields(&fixture), [("default/a:s".into(), vec![SCTP])]);
    assert!(fixture.metric("proxy_service_ports 1"));
    assert!(fixture.metric("proxy_unserved_fields{field=\"protocol\"} 1"));
    fixture.take(Update::DeleteService(both.name));
    assert_eq!(fixture.write(), [Call::Apply(vec![], vec!["default/a".into()])]);
    assert_eq!(unserved_fields(&fixture), []);
    assert!(fixture.metric("proxy_unserved_fields{field=\"protocol\"} 0"));
}

/// A service port without room must not be reported as served, because others rely on the report.
#[test]
fn what_has_no_room_is_named_until_it_has_and_nothing_is_tried_again() {
    let mut fixture = Fixture::serving(vec![service("a", "10.0.0.1")]);
    let full = UnservedField {
        field: "spec.externalIPs",
        effect: Effect::PartlyServed,
        instead: Cow::Borrowed("map frontends4 is full"),
    };
    let name = fixture.recorder.lock().ports[0].name.clone();
    fixture.recorder.lock().waiting = Some([(name.clone(), vec![full.clone()])].into());
    fixture.take(Update::ApplyService(service("b", "10.0.0.2")));
    assert_eq!(fixture.write().len(), 1);
    let named = |fixture: &Fixture| -> Vec<_> {
        let coverage = fixture.reports.coverage.borrow();
        coverage.unserved().map(|(name, one)| (name.clone(), one.clone())).collect()
    };
    assert_eq!(named(&fixture), [(name, full)]);
    assert!(fixture.metric("proxy_unserved_fields{field=\"spec.externalIPs\"} 1"));
    // The next change has nothing to do with the port without room.
    fixture.take(Update::ApplyService(service("c", "10.0.0.3")));
    fixture.write();
    assert_eq!(named(&fixture).len(), 1);
    fixture.recorder.lock().waiting = Some(BTreeMap::new());
    fixture.take(Update::DeleteService(ObjectName::new("default", "b")));
    fixture.write();
    assert_eq!(named(&fixture), []);
    assert!(fixture.metric("proxy_unserved_fields{field=\"spec.externalIPs\"} 0"));
}

#[test]
fn a_frontend_that_another_service_has_is_named() {
    let on_one_node_port = |name: &str, ip: &str| {
        let mut service = service(name, ip);
        service.ports[0].node_port = Some(30080);
        service
    };
    let mut fixture =
        Fixture::serving(vec![on_one_node_port("a", "10.0.0.1"), on_one_node_port("b", "10.0.0.2")]);
    let told = unserved_fields(&fixture);
    let [(name, reasons)] = told.as_slice() else { panic!("{told:?}") };
    assert_eq!((name.as_str(), reasons[0].field), ("default/b", "spec.ports[].nodePort"));
    assert!(reasons[0].instead.contains("30080 (default/a)"), "{reasons:?}");
    assert!(fixture.metric("proxy_frontend_conflicts_total 1"));
    fixture.take(Update::DeleteService(ObjectName::new("default", "a")));
    fixture.write();
    assert_eq!(unserved_fields(&fixture), []);
}

#[test]
fn a_port_has_unserved_fields_until_its_new_state_is_written() {
    let sticky = Service { affinity_seconds: Some(10_800), ..service("a", "10.0.0.1") };
    let mut fixture = Fixture::serving(vec![sticky]);
    assert_eq!(unserved_fields(&fixture).len(), 1);
    fixture.recorder.fail(1);
    fixture.take(Update::ApplyService(service("a", "10.0.0.1")));
    fixture.write();
    assert_eq!(unserved_fields(&fixture).len(), 1);
    fixture.later(Duration::from_secs(1));
    fixture.write();
    assert_eq!(unserved_fields(&fixture), []);
}

#[test]
fn a_port_that_lacks_affinity_alone_is_served() {
    let sticky = Service { affinity_seconds: Some(10_800), ..service("a", "10.0.0.1") };
    let fixture = Fixture::serving(vec![sticky]);
    assert_eq!(unserved_fields(&fixture), [("default/a".into(), vec![AFFINITY])]);
    assert_eq!(fixture.reports.coverage.borrow().unserved().count(), 0);
    assert!(fixture.recorder.lock().programmed.contains_key("default/a"));
}

#[rstest::rstest]
#[case::internal(TrafficPolicy::Local, TrafficPolicy::Cluster, true, [1, 0])]
#[case::external(TrafficPolicy::Cluster, TrafficPolicy::Local, true, [0, 1])]
#[case::both(TrafficPolicy::Local, TrafficPolicy::Local, true, [1, 1])]
#[case::neither(TrafficPolicy::Cluster, TrafficPolicy::Cluster, true, [0, 0])]
#[case::nobody_outside_reaches_it(TrafficPolicy::Cluster, TrafficPolicy::Local, false, [0, 0])]
fn policies_without_a_local_endpoint_are_counted(
    #[case] internal: TrafficPolicy,
    #[case] external: TrafficPolicy,
    #[case] has_node_port: bool,
    #[case] expected: [i64; 2],
    #[values(("10.0.0.1", "10.1.0.1", "IPv4"), ("fd00::1", "fd01::1", "IPv6"))] of_family: (&str, &str, &str),
) {
    let (cluster_ip, endpoint, family) = of_family;
    let mut service = service("a", cluster_ip).policies(internal, external);
    service.ports[0].node_port = has_node_port.then_some(30080);
    let mut fixture = Fixture::serving(Vec::new());
    let steps = [
        (Update::ApplyService(service.clone()), [0, 0]),
        (Update::ApplySlice(slice("a", endpoint)), expected),
        (Update::DeleteService(service.name), [0, 0]),
    ];
    for (update, expected) in steps {
        fixture.take(update);
        fixture.write();
        for (policy, number) in ["internal", "external"].into_iter().zip(expected) {
            let labels = format!(r#"traffic_policy="{policy}",ip_family="{family}""#);
            let line = format!("kubeproxy_sync_proxy_rules_no_local_endpoints_total{{{labels}}} {number}");
            assert!(fixture.metric(&line), "{line}");
        }
    }
}
