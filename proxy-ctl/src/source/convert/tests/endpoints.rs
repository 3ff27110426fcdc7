use rstest::rstest;
use serde_json::{Value, json};

use super::{super::*, merged, read};
use crate::model::objects::{EndpointSlice, IpFamily, ServiceSlices};

fn endpoints_with(changes: Value) -> (Option<ServiceSlices>, Vec<InvalidField>) {
    let object = json!({
        "apiVersion": "v1", "kind": "Endpoints",
        "metadata": {"namespace": "shop", "name": "web"},
        "subsets": [{
            "addresses": [{"ip": "10.0.0.1", "nodeName": "node-1"}],
            "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
        }],
    });
    let object = read::<core::Endpoints>(merged(object, changes));
    endpoints(&object)
}

fn slices(changes: Value) -> Vec<EndpointSlice> {
    let (found, invalid) = endpoints_with(changes);
    assert_eq!(invalid, []);
    let found = found.unwrap();
    assert_eq!(found.service, ObjectName::new("shop", "web"));
    found.slices
}

/// The same endpoints as the EndpointSlice controller writes them lead to the same.
#[test]
fn a_subset_is_the_slice_of_the_same_endpoints() {
    let from_endpoints = slices(json!({"subsets": [{
        "addresses": [
            {"ip": "10.0.0.1", "nodeName": "node-1", "targetRef": {"kind": "Pod", "name": "web-a"}},
            {"ip": "10.0.0.2"},
        ],
        "notReadyAddresses": [{"ip": "10.0.0.3", "nodeName": "node-1"}],
        "ports": [{"name": "http", "protocol": "TCP", "port": 8080}, {"name": "dns", "protocol": "UDP", "port": 53}],
    }]}));
    let slice = serde_json::from_value(json!({
        "metadata": {"namespace": "shop", "name": "web/0/IPv4", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4",
        "endpoints": [
            {"addresses": ["10.0.0.1"], "nodeName": "node-1", "conditions": {"ready": true, "serving": true}},
            {"addresses": ["10.0.0.2"], "conditions": {"ready": true, "serving": true}},
            {"addresses": ["10.0.0.3"], "nodeName": "node-1", "conditions": {"ready": false, "serving": false}},
        ],
        "ports": [{"name": "http", "protocol": "TCP", "port": 8080}, {"name": "dns", "protocol": "UDP", "port": 53}],
    }))
    .unwrap();
    assert_eq!(from_endpoints, [endpoint_slice(&slice).0.unwrap()]);
}

#[test]
fn subsets_and_families_are_slices_of_their_own() {
    let found = slices(json!({"subsets": [
        {"addresses": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}], "ports": [{"port": 80}]},
        {"addresses": [{"ip": "10.0.0.2"}], "ports": [{"port": 81}]},
        {"notReadyAddresses": null, "addresses": null, "ports": [{"port": 82}]},
    ]}));
    let shown: Vec<_> = found
        .iter()
        .map(|slice| (&*slice.name.name, slice.family, slice.ports[0].port, slice.endpoints.len()))
        .collect();
    assert_eq!(
        shown,
        [
            ("web/0/IPv4", IpFamily::Ipv4, 80, 1),
            ("web/0/IPv6", IpFamily::Ipv6, 80, 1),
            ("web/1/IPv4", IpFamily::Ipv4, 81, 1),
        ]
    );
}

#[test]
fn a_service_without_endpoints_has_no_slices() {
    assert_eq!(slices(json!({"subsets": null})), []);
}

#[rstest]
#[case::headless(json!({"metadata": {"labels": {"service.kubernetes.io/headless": ""}}}))]
#[case::other_proxy(json!({"metadata": {"labels": {"service.kubernetes.io/service-proxy-name": "x"}}}))]
fn endpoints_of_others_are_skipped_without_a_word(#[case] changes: Value) {
    assert_eq!(endpoints_with(changes), (None, vec![]));
}

#[rstest]
#[case::address(
    json!([{"addresses": [{"ip": "10.0.0.1"}, {"ip": "10.0.0"}], "ports": [{"port": 80}]}]),
    "subsets[0].addresses[1].ip", "found \"10.0.0\""
)]
#[case::multicast(
    json!([{"addresses": [{"ip": "10.0.0.1"}], "notReadyAddresses": [{"ip": "224.0.0.1"}], "ports": [{"port": 80}]}]),
    "subsets[0].notReadyAddresses[0].ip", "must be the address of one host"
)]
#[case::port_twice(
    json!([{"addresses": [{"ip": "10.0.0.1"}], "ports": [{"port": 80}, {"port": 80}]}]),
    "subsets[0].ports[1]", "second time"
)]
fn an_invalid_part_is_named_and_left_out(#[case] subsets: Value, #[case] field: &str, #[case] problem: &str) {
    let (found, invalid) = endpoints_with(json!({"subsets": subsets}));
    let [found_field] = invalid.as_slice() else { panic!("{invalid:?}") };
    assert_eq!((found_field.object.as_str(), found_field.field.as_str()), ("Endpoints shop/web", field));
    assert!(found_field.problem.contains(problem), "{invalid:?}");
    let slices = found.unwrap().slices;
    assert_eq!((slices.len(), slices[0].endpoints.len(), slices[0].ports.len()), (1, 1, 1));
}

#[test]
fn ranges_of_a_service_cidr() {
    let metadata = serde_json::from_value(json!({"name": "kubernetes"})).unwrap();
    let ranges = ["10.96.0.0/12", "10.0.0.0/33", "fd00::/112"].map(str::to_owned);
    let (found, invalid) = service_cidr(&metadata, &ranges);
    let found = found.unwrap();
    assert_eq!((&*found.name, found.ranges.len()), ("kubernetes", 2));
    assert_eq!(
        (invalid[0].object.as_str(), invalid[0].field.as_str()),
        ("ServiceCIDR kubernetes", "spec.cidrs[1]")
    );
}
