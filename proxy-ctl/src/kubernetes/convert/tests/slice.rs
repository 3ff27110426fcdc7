use rstest::rstest;
use serde_json::{Value, json};

use super::{super::*, ips, merged, read};
use crate::{
    kubernetes::schema::discovery,
    model::objects::{Endpoint, EndpointPort, EndpointSlice, Hints, IpFamily},
};

fn slice_with(changes: Value) -> (Option<EndpointSlice>, Vec<InvalidField>) {
    let object = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "namespace": "shop", "name": "web-1", "labels": {"kubernetes.io/service-name": "web"},
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
        "endpoints": [{"addresses": ["10.0.0.1"]}],
    });
    let object = read::<discovery::EndpointSlice>(merged(object, changes));
    endpoint_slice(&object)
}

fn good_slice(changes: Value) -> EndpointSlice {
    let (slice, invalid) = slice_with(changes);
    assert_eq!(invalid, []);
    slice.unwrap()
}

#[test]
fn every_field_of_a_slice() {
    let slice = good_slice(json!({
        "ports": [{"name": "http", "protocol": "TCP", "port": 8080}, {"name": "dns", "protocol": "UDP", "port": 53}],
        "endpoints": [
            {
                "addresses": ["10.0.0.1", "10.0.0.2"],
                "conditions": {"ready": false, "serving": true, "terminating": true},
                "nodeName": "node-1",
                "hints": {"forZones": [{"name": "z1"}], "forNodes": [{"name": "node-1"}]},
            },
            {"addresses": ["10.0.0.3"], "hints": {}},
        ],
    }));
    let port = |name: &str, protocol, port| EndpointPort { name: name.into(), protocol, port };
    let first = Endpoint {
        address: "10.0.0.1".parse().unwrap(),
        ready: false,
        serving: true,
        terminating: true,
        weight: 1,
        node: Some("node-1".into()),
        hints: Some(Arc::new(Hints { zones: vec!["z1".into()], nodes: vec!["node-1".into()] })),
    };
    let second = Endpoint {
        address: "10.0.0.3".parse().unwrap(),
        ready: true,
        serving: true,
        terminating: false,
        weight: 1,
        node: None,
        hints: None,
    };
    assert_eq!(
        slice,
        EndpointSlice {
            name: ObjectName::new("shop", "web-1"),
            service: "web".into(),
            family: IpFamily::Ipv4,
            ports: vec![port("http", Protocol::Tcp, 8080), port("dns", Protocol::Udp, 53)],
            endpoints: vec![first, second],
            triggered: None,
        }
    );
}

#[rstest]
#[case::as_the_cluster_writes_it("2026-01-01T00:00:00.000000002Z", Some(1_767_225_600_000_000_002))]
#[case::another_zone("2026-01-01T01:00:00+01:00", Some(1_767_225_600_000_000_000))]
#[case::not_a_time("yesterday", None)]
fn when_a_slice_was_triggered(#[case] time: &str, #[case] triggered: Option<i64>) {
    let annotations = json!({"endpoints.kubernetes.io/last-change-trigger-time": time});
    let slice = good_slice(json!({"metadata": {"annotations": annotations}}));
    assert_eq!(slice.triggered.map(i64::from), triggered);
}

#[rstest]
#[case::none(None, [1, 1])]
#[case::of_all(Some("7"), [7, 7])]
#[case::of_one(Some("10.0.0.2=255"), [1, 255])]
#[case::of_one_and_of_the_others(Some(" 3 , 10.0.0.1 = 0 "), [0, 3])]
#[case::of_one_that_is_not_there(Some("10.0.0.9=5"), [1, 1])]
fn weights(#[case] text: Option<&str>, #[case] expected: [u8; 2]) {
    let endpoints = json!([{"addresses": ["10.0.0.1"]}, {"addresses": ["10.0.0.2"]}]);
    let annotations = text.map_or(json!({}), |text| json!({"proxy-ctl.dev/weights": text}));
    let slice = good_slice(json!({"metadata": {"annotations": annotations}, "endpoints": endpoints}));
    assert_eq!(slice.endpoints.iter().map(|endpoint| endpoint.weight).collect::<Vec<_>>(), expected);
}

#[rstest]
#[case::no_number(
    "much",
    "found \"much\", must be a weight or an address and its weight, such as 10.0.0.1=5; weights are 0 to 255"
)]
#[case::too_large("10.0.0.1=256", "found \"10.0.0.1=256\"")]
#[case::negative("-1", "found \"-1\"")]
#[case::empty("", "found \"\"")]
#[case::no_address("web-0=5", "found \"web-0=5\"")]
#[case::several(" much ,more,10.0.0.2=1", "found \"much\"")]
fn an_invalid_weight_is_left_out(#[case] text: &str, #[case] problem: &str) {
    let annotations = json!({"proxy-ctl.dev/weights": format!("10.0.0.1=5,{text}")});
    let (slice, invalid) = slice_with(json!({"metadata": {"annotations": annotations}}));
    assert_eq!(invalid.len(), 1, "{invalid:?}");
    assert_eq!(invalid[0].field, "metadata.annotations[proxy-ctl.dev/weights]");
    assert!(invalid[0].problem.contains(problem), "{invalid:?}");
    assert_eq!(slice.unwrap().endpoints[0].weight, 5);
}

#[test]
fn neighbours_share_their_node_and_hints() {
    let endpoint = |address: &str| {
        json!({
            "addresses": [address], "nodeName": "node-1", "hints": {"forZones": [{"name": "z1"}]},
        })
    };
    let slice = good_slice(json!({"endpoints": [endpoint("10.0.0.1"), endpoint("10.0.0.2")]}));
    let [first, second] = slice.endpoints.as_slice() else { panic!("{slice:?}") };
    assert!(Arc::ptr_eq(first.node.as_ref().unwrap(), second.node.as_ref().unwrap()));
    assert!(Arc::ptr_eq(first.hints.as_ref().unwrap(), second.hints.as_ref().unwrap()));
}

#[rstest]
#[case::host_names(json!({"addressType": "FQDN", "endpoints": [{"addresses": ["a.example"]}]}))]
#[case::headless(json!({"metadata": {"labels": {"service.kubernetes.io/headless": ""}}}))]
#[case::other_proxy(json!({"metadata": {"labels": {"service.kubernetes.io/service-proxy-name": "x"}}}))]
fn slices_of_others_are_skipped_without_a_word(#[case] changes: Value) {
    assert_eq!(slice_with(changes), (None, vec![]));
}

#[rstest]
#[case::no_service(
    json!({"metadata": {"labels": {"kubernetes.io/service-name": ""}}}),
    "metadata.labels[kubernetes.io/service-name]", "is missing"
)]
#[case::address_type(json!({"addressType": "ipv4"}), "addressType", "found \"ipv4\", must be IPv4, IPv6 or FQDN")]
fn a_slice_that_cannot_be_used_is_named(#[case] changes: Value, #[case] field: &str, #[case] problem: &str) {
    let (slice, invalid) = slice_with(changes);
    assert_eq!(slice, None);
    assert_eq!(invalid.len(), 1);
    assert_eq!((invalid[0].object.as_str(), invalid[0].field.as_str()), ("EndpointSlice shop/web-1", field));
    assert!(invalid[0].problem.contains(problem), "{invalid:?}");
}

#[rstest]
#[case::port_0(
    json!({"ports": [{"name": "http", "port": 8080}, {"name": "b", "port": 0}]}), "ports[1].port", "found 0"
)]
#[case::no_port(
    json!({"ports": [{"name": "http", "port": 8080}, {"name": "b"}]}), "ports[1].port", "is missing"
)]
#[case::port_too_large(
    json!({"ports": [{"name": "http", "port": 8080}, {"name": "b", "port": 70000}]}), "ports[1].port", "found 70000"
)]
#[case::protocol(
    json!({"ports": [{"name": "http", "port": 8080}, {"name": "b", "port": 1, "protocol": "ICMP"}]}),
    "ports[1].protocol", "found \"ICMP\""
)]
#[case::port_twice(
    json!({"ports": [{"name": "http", "port": 8080}, {"name": "http", "port": 8080}]}), "ports[1]", "second time"
)]
#[case::address(
    json!({"endpoints": [{"addresses": ["10.0.0.1"]}, {"addresses": ["10.0.0"]}]}),
    "endpoints[1].addresses[0]", "found \"10.0.0\""
)]
#[case::other_family(
    json!({"endpoints": [{"addresses": ["10.0.0.1"]}, {"addresses": ["fd00::1"]}]}),
    "endpoints[1].addresses[0]", "found \"fd00::1\", must be an IPv4 address: addressType is IPv4"
)]
#[case::no_address(
    json!({"endpoints": [{"addresses": ["10.0.0.1"]}, {"addresses": []}]}), "endpoints[1].addresses[0]", "is missing"
)]
#[case::unspecified(
    json!({"endpoints": [{"addresses": ["10.0.0.1"]}, {"addresses": ["0.0.0.0"]}]}),
    "endpoints[1].addresses[0]", "must be the address of one host"
)]
#[case::multicast(
    json!({"endpoints": [{"addresses": ["10.0.0.1"]}, {"addresses": ["224.0.0.1"]}]}),
    "endpoints[1].addresses[0]", "must be the address of one host"
)]
fn an_invalid_part_of_a_slice_is_left_out(
    #[case] changes: Value,
    #[case] field: &str,
    #[case] problem: &str,
) {
    let (slice, invalid) = slice_with(changes);
    assert_eq!(invalid.len(), 1, "{invalid:?}");
    assert_eq!(invalid[0].field, field);
    assert!(invalid[0].problem.contains(problem), "{invalid:?}");
    let slice = slice.unwrap();
    assert_eq!(slice.ports.iter().map(|port| port.port).collect::<Vec<_>>(), [8080]);
    assert_eq!(
        slice.endpoints.iter().map(|endpoint| endpoint.address).collect::<Vec<_>>(),
        ips(&["10.0.0.1"])
    );
}

#[rstest]
#[case::loopback("127.0.0.1", "IPv4")]
#[case::link_local("169.254.1.1", "IPv4")]
#[case::leading_zeros("010.000.000.001", "IPv4")]
#[case::v6("fd00::1", "IPv6")]
fn addresses_that_can_work_are_used(#[case] address: &str, #[case] address_type: &str) {
    let slice = good_slice(json!({"addressType": address_type, "endpoints": [{"addresses": [address]}]}));
    assert_eq!(slice.endpoints.len(), 1);
}
