use rstest::rstest;

use super::*;

fn dns() -> ServiceView {
    let endpoint = |last: u8, local| EndpointView {
        address: IpAddr::from([10, 244, 0, last]),
        port: 5353,
        local,
        state: "active",
    };
    ServiceView {
        namespace: "kube-system".into(),
        name: "kube-dns".into(),
        port: "dns".into(),
        protocol: "UDP",
        family: "IPv4",
        id: 3,
        policy: Policy::of(false, true),
        algorithm: Algorithm::Random,
        forwarding: Forwarding::Snat,
        encapsulation: None,
        frontends: vec![
            FrontendView {
                kind: FrontendKind::ClusterIp,
                address: Some(IpAddr::from([10, 96, 0, 10])),
                port: 53,
            },
            FrontendView { kind: FrontendKind::NodePort, address: None, port: 30053 },
        ],
        endpoints: vec![endpoint(2, true), endpoint(3, false), endpoint(4, false)],
        internal_endpoints: 3,
        external_endpoints: 1,
        delegated_to: None,
    }
}

#[test]
fn a_service_for_people() {
    let text = services(&[dns()]);
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["SERVICE", "PROTOCOL", "FRONTENDS", "LOCAL/ALL", "ENDPOINTS", "POLICY"]);
    assert_eq!(lines[1], ["kube-system/kube-dns:dns", "UDP", "10.96.0.10:53", "1/3", "external", "Local"]);
    assert_eq!(lines[2], ["node", "port", "30053"]);
}

#[test]
fn choices_that_are_not_the_default_are_shown() {
    let view = ServiceView {
        algorithm: Algorithm::Maglev,
        forwarding: Forwarding::Dsr,
        encapsulation: Some(Encapsulation::Geneve),
        delegated_to: Some("nftables"),
        ..dns()
    };
    let json = serde_json::to_value(&view).unwrap();
    assert_eq!((&json["algorithm"], &json["forwarding"]), (&"maglev".into(), &"dsr".into()));
    assert_eq!((&json["encapsulation"], &json["delegatedTo"]), (&"geneve".into(), &"nftables".into()));
    let text = services(&[view]);
    assert!(text.contains("external Local, maglev, dsr, geneve, by mode nftables"), "{text}");
}

#[test]
fn connections_are_shown_where_they_are_counted() {
    let backend = |connections| BackendView {
        id: 7,
        address: IpAddr::from([10, 244, 0, 2]),
        port: 80,
        protocol: "TCP",
        state: "active",
        local: true,
        services: 1,
        connections,
    };
    let text = backends(&[backend(None), backend(Some(0)), backend(Some(12))]);
    let last: Vec<_> = text.lines().filter_map(|line| line.split_whitespace().last()).collect();
    assert_eq!(last, ["CONNECTIONS", "-", "0", "12"]);
    assert_eq!(serde_json::to_value(backend(None)).unwrap()["connections"], serde_json::Value::Null);
}

#[test]
fn a_service_without_a_name() {
    let unnamed =
        ServiceView { namespace: String::new(), name: "10.96.0.10:53".into(), port: String::new(), ..dns() };
    let text = services(&[unnamed]);
    assert!(text.contains("\n10.96.0.10:53 ") && text.ends_with(UNNAMED), "{text}");
    assert!(!services(&[dns()]).contains(UNNAMED));
}

#[test]
fn a_service_for_programs() {
    let json = serde_json::to_value(dns()).unwrap();
    assert_eq!(json["policy"], "externalLocal");
    assert_eq!(json["frontends"][1], serde_json::json!({"kind": "nodePort", "address": null, "port": 30053}));
    assert_eq!(
        json["endpoints"][0],
        serde_json::json!({"address": "10.244.0.2", "port": 5353, "local": true, "state": "active"})
    );
    assert_eq!(json["externalEndpoints"], 1);
}

#[test]
fn an_empty_state_says_what_to_do_next() {
    assert!(services(&[]).contains("proxy-ctl run"));
    assert!(backends(&[]).contains("proxy-ctl services"));
    let status = StatusView::new(None, None, None);
    assert!(status.text().contains("start it with `proxy-ctl run`"), "{}", status.text());
    assert_eq!(serde_json::to_value(&status).unwrap()["mode"], serde_json::Value::Null);
}

#[test]
fn what_may_not_be_read_is_not_told_as_absent() {
    let mut status = StatusView::new(None, None, None);
    status.unreadable("maps: Permission denied".into());
    let text = status.text();
    for line in ["mode        not known", "controller  not known", "not read    maps: Permission denied"] {
        assert!(text.contains(line), "{text}");
    }
    assert!(!text.contains("none") && !text.contains("proxy-ctl run"), "{text}");
    let json = serde_json::to_value(&status).unwrap();
    assert_eq!(json["controller"]["running"], serde_json::Value::Null);
    assert_eq!(json["unreadable"], serde_json::json!(["maps: Permission denied"]));
}

#[test]
fn a_controller_that_runs_is_told_also_where_the_maps_may_not_be_read() {
    let mut status = StatusView::new(None, None, Some(4711));
    status.unreadable("maps: Permission denied".into());
    assert!(status.text().contains("controller  starting, pid 4711"), "{}", status.text());
}

#[test]
fn a_controller_that_starts_is_told() {
    let status = StatusView::new(None, None, Some(4711));
    assert!(status.text().contains("controller  starting, pid 4711"), "{}", status.text());
    let json = serde_json::to_value(&status).unwrap();
    assert_eq!(json["controller"], serde_json::json!({"running": true, "starting": true, "pid": 4711}));
}

#[rstest]
#[case::no_end(None, None)]
#[case::goes_on(Some(3_133), Some("translation ends in 52m13s"))]
#[case::has_ended(Some(0), Some("has ended: nothing is translated"))]
fn the_end_of_a_lease_is_told(#[case] withdraws_in: Option<u64>, #[case] expected: Option<&str>) {
    let status = StatusView { withdraws_in, ..StatusView::new(None, Some(Mode::Ebpf), None) };
    let text = status.text();
    let line = text.lines().find(|line| line.starts_with("lease"));
    assert_eq!(line.is_some(), expected.is_some(), "{text}");
    assert!(line.unwrap_or_default().contains(expected.unwrap_or_default()), "{text}");
    assert_eq!(serde_json::to_value(&status).unwrap()["withdrawsIn"], serde_json::json!(withdraws_in));
}

#[test]
fn service_ports_that_are_not_served_as_asked_are_listed_once_for_both_families() {
    let field = |family: &str| UnservedFieldRecord {
        namespace: "shop".into(),
        name: "web".into(),
        port: "http".into(),
        protocol: "TCP".into(),
        family: family.into(),
        field: "spec.loadBalancerSourceRanges".into(),
        effect: "partlyServed".into(),
        instead: "not built yet".into(),
    };
    let record = Record { unserved_fields: vec![field("IPv4"), field("IPv6")], ..Record::default() };
    let status = StatusView::new(Some(record), Some(Mode::Ebpf), None);
    let text = status.text();
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("shop/web:http")).collect();
    let [line] = lines.as_slice() else { panic!("{text}") };
    for part in ["spec.loadBalancerSourceRanges", "partly served", "not built yet"] {
        assert!(line.contains(part), "{line}");
    }
    let json = serde_json::to_value(&status).unwrap();
    assert_eq!(json["unservedFields"][1]["family"], "IPv6");
    assert_eq!(json["unservedFields"][0]["effect"], "partlyServed");
}

#[test]
fn service_ports_that_are_delegated_are_listed_or_counted() {
    let delegated = |name: String, field: &str| UnservedFieldRecord {
        namespace: "shop".into(),
        name,
        field: field.into(),
        effect: "delegated".into(),
        instead: "served by the secondary mode nftables".into(),
        ..UnservedFieldRecord::default()
    };
    let mut unserved_fields = vec![delegated("sctp".into(), "spec.ports[].protocol")];
    unserved_fields.extend((0..11).map(|n| delegated(format!("web-{n}"), "spec.ports[].nodePort")));
    let record = Record { unserved_fields, ..Record::default() };
    let text = StatusView::new(Some(record), Some(Mode::Ebpf), None).text();
    let rows: Vec<Vec<&str>> = text
        .lines()
        .skip_while(|line| !line.starts_with("DELEGATED"))
        .map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect())
        .collect();
    let how = "served by the secondary mode nftables";
    let expected = [
        ["DELEGATED", "FIELD", "HOW"],
        ["11 service ports", "spec.ports[].nodePort", how],
        ["shop/sctp", "spec.ports[].protocol", how],
    ];
    assert_eq!(rows, expected, "{text}");
    assert!(!text.contains("NOT SERVED AS ASKED"), "{text}");
}

#[test]
fn a_dead_controller_leaves_its_mode_and_reasons() {
    let record = Record {
        pid: std::process::id(),
        began: 1,
        node: "node-a".into(),
        mode: "ebpf".into(),
        reasons: vec!["ebpf was asked for".into(), "the kernel is 6.12".into()],
        sources: vec![SourceRecord { name: "services".into(), connected: true, objects: 3, problem: None }],
        ..Record::default()
    };
    let mut status = StatusView::new(Some(record), Some(Mode::Ebpf), None);
    let name = "frontends4";
    status.maps.push(MapUsage { name, used: 50, capacity: 1000, can_fill_up: true, bytes: 4096 });
    let counter = |name, count| ReasonUsage { name, verdict: "refuse", count };
    status.counters = vec![counter("no_endpoints", 2), counter("slot_gone", 0)];
    let text = status.text();
    assert!(text.contains("mode        ebpf\n"), "{text}");
    assert!(text.contains("not running; what is programmed goes on working"), "{text}");
    assert!(text.contains("5.0 %") && text.contains("4.0 KiB"), "{text}");
    assert!(text.contains("no_endpoints") && !text.contains("slot_gone"), "{text}");
    assert!(status.sources.is_none(), "the sources of a dead controller say nothing");
}
