use std::net::IpAddr;

use k8s_openapi::api::{core::v1, discovery::v1 as discovery};
use rstest::rstest;
use serde_json::{Value, json};

use super::*;
use crate::model::objects::{Endpoint, EndpointSlice, Family, Service, TrafficPolicy};

/// `{metadata: {namespace: shop, name: web}, …}` with `changes` merged into it.
fn merged(mut object: Value, changes: Value) -> Value {
    fn merge(into: &mut Value, changes: Value) {
        match (into, changes) {
            (Value::Object(into), Value::Object(changes)) => {
                for (key, change) in changes {
                    merge(into.entry(key).or_insert(Value::Null), change);
                }
            }
            (into, change) => *into = change,
        }
    }
    merge(&mut object, changes);
    object
}

fn service_with(changes: Value) -> (Option<Service>, Vec<Oddity>) {
    let object = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"namespace": "shop", "name": "web", "creationTimestamp": "1970-01-02T00:00:00Z"},
        "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]},
    });
    let object: v1::Service = serde_json::from_value(merged(object, changes)).unwrap();
    service(&object)
}

/// What is served, where nothing is odd.
fn good_service(changes: Value) -> Service {
    let (service, oddities) = service_with(changes);
    assert_eq!(oddities, []);
    service.unwrap()
}

fn slice_with(changes: Value) -> (Option<EndpointSlice>, Vec<Oddity>) {
    let object = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "namespace": "shop", "name": "web-1", "labels": {"kubernetes.io/service-name": "web"},
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
        "endpoints": [{"addresses": ["10.0.0.1"]}],
    });
    let object: discovery::EndpointSlice = serde_json::from_value(merged(object, changes)).unwrap();
    endpoint_slice(&object)
}

fn good_slice(changes: Value) -> EndpointSlice {
    let (slice, oddities) = slice_with(changes);
    assert_eq!(oddities, []);
    slice.unwrap()
}

fn shown(oddities: &[Oddity]) -> Vec<(&str, &str)> {
    oddities.iter().map(|oddity| (oddity.field.as_str(), oddity.problem.as_str())).collect()
}

fn ips(addresses: &[&str]) -> Vec<IpAddr> {
    addresses.iter().map(|address| address.parse().unwrap()).collect()
}

#[test]
fn every_field_of_a_service() {
    let service = good_service(json!({
        "spec": {
            "type": "LoadBalancer",
            "clusterIP": "10.96.0.1",
            "clusterIPs": ["10.96.0.1", "fd00::1"],
            "externalIPs": ["192.0.2.1", "2001:db8::1"],
            "ports": [
                {"name": "http", "protocol": "TCP", "port": 80, "nodePort": 30080, "targetPort": "web"},
                {"name": "dns", "protocol": "UDP", "port": 53, "nodePort": 0},
                {"name": "dns", "protocol": "TCP", "port": 53},
                {"name": "sctp", "protocol": "SCTP", "port": 80, "nodePort": 30080},
            ],
            "internalTrafficPolicy": "Cluster",
            "externalTrafficPolicy": "Local",
            "healthCheckNodePort": 32000,
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}},
            "loadBalancerSourceRanges": [" 203.0.113.77/25", "2001:db8::/32 "],
        },
        "status": {"loadBalancer": {"ingress": [
            {"ip": "198.51.100.1"},
            {"ip": "198.51.100.2", "ipMode": "VIP"},
            {"ip": "198.51.100.3", "ipMode": "Proxy"},
            {"hostname": "lb.example"},
        ]}},
    }));
    let port = |name: &str, protocol, port, node_port| crate::model::objects::ServicePort {
        name: name.into(),
        protocol,
        port,
        node_port,
    };
    assert_eq!(
        service,
        Service {
            name: ObjectName::new("shop", "web"),
            created: 86_400,
            ports: vec![
                port("http", Protocol::Tcp, 80, Some(30080)),
                port("dns", Protocol::Udp, 53, None),
                port("dns", Protocol::Tcp, 53, None),
                port("sctp", Protocol::Sctp, 80, Some(30080)),
            ],
            cluster_ips: ips(&["10.96.0.1", "fd00::1"]),
            external_ips: ips(&["192.0.2.1", "2001:db8::1"]),
            load_balancer_ips: ips(&["198.51.100.1", "198.51.100.2"]),
            internal_policy: TrafficPolicy::Cluster,
            external_policy: TrafficPolicy::Local,
            affinity_seconds: Some(60),
            source_ranges: vec!["203.0.113.0/25".parse().unwrap(), "2001:db8::/32".parse().unwrap()],
            health_check_node_port: Some(32000),
        }
    );
}

#[test]
fn what_a_service_leaves_out_has_defaults() {
    let service = good_service(json!({
        "metadata": {"namespace": null, "creationTimestamp": null},
        "spec": {"sessionAffinity": "ClientIP"},
    }));
    assert_eq!(service.name, ObjectName::new("default", "web"));
    assert_eq!(service.created, 0);
    assert_eq!((&*service.ports[0].name, service.ports[0].protocol), ("", Protocol::Tcp));
    assert_eq!(service.cluster_ips, ips(&["10.96.0.1"]));
    assert_eq!(service.internal_policy, TrafficPolicy::Cluster);
    assert_eq!(service.external_policy, TrafficPolicy::Cluster);
    assert_eq!(service.affinity_seconds, Some(10_800));
    assert_eq!(service.health_check_node_port, None);
}

#[rstest]
#[case::headless(json!({"spec": {"clusterIP": "None"}}))]
#[case::headless_list(json!({"spec": {"clusterIP": "None", "clusterIPs": ["None"]}}))]
#[case::without_cluster_ip(json!({"spec": {"clusterIP": ""}}))]
#[case::not_yet_given_a_cluster_ip(json!({"spec": {"clusterIP": null}}))]
#[case::external_name(json!({"spec": {"type": "ExternalName", "externalName": "example.com"}}))]
#[case::external_name_with_address(json!({"spec": {"type": "ExternalName", "clusterIP": "10.96.0.1"}}))]
#[case::other_proxy(json!({"metadata": {"labels": {"service.kubernetes.io/service-proxy-name": "cilium"}}}))]
#[case::other_proxy_without_name(json!({"metadata": {"labels": {"service.kubernetes.io/service-proxy-name": ""}}}))]
#[case::headless_label(json!({"metadata": {"labels": {"service.kubernetes.io/headless": ""}}}))]
#[case::nothing(json!({"spec": null}))]
fn services_of_others_are_skipped_without_a_word(#[case] changes: Value) {
    assert_eq!(service_with(changes), (None, vec![]));
}

#[rstest]
#[case::leading_zeros(json!({"spec": {"externalIPs": ["010.001.000.008"]}}), &["10.1.0.8"])]
#[case::not_octal(json!({"spec": {"externalIPs": ["192.168.099.010"]}}), &["192.168.99.10"])]
#[case::mapped(json!({"spec": {"externalIPs": ["::ffff:192.0.2.1"]}}), &["192.0.2.1"])]
fn odd_looking_addresses_are_what_kube_proxy_takes_them_for(
    #[case] changes: Value,
    #[case] expected: &[&str],
) {
    assert_eq!(good_service(changes).external_ips, ips(expected));
}

#[test]
fn leading_zeros_of_load_balancer_addresses_and_ranges_are_decimal() {
    let service = good_service(json!({
        "spec": {"loadBalancerSourceRanges": ["010.000.000.000/8"]},
        "status": {"loadBalancer": {"ingress": [{"ip": "198.051.100.001"}]}},
    }));
    assert_eq!(service.load_balancer_ips, ips(&["198.51.100.1"]));
    assert_eq!(service.source_ranges, ["10.0.0.0/8".parse::<ipnet::IpNet>().unwrap()]);
}

#[rstest]
#[case::external_ip(
    json!({"spec": {"externalIPs": ["192.0.2.1", "192.0.2.300", "192.0.2"]}}),
    &["spec.externalIPs[1]", "spec.externalIPs[2]"], "found \"192.0.2.300\", must be an IPv4 or IPv6 address"
)]
#[case::unspecified_external_ip(
    json!({"spec": {"externalIPs": ["0.0.0.0", "::"]}}),
    &["spec.externalIPs[0]", "spec.externalIPs[1]"], "must be the address of one destination"
)]
#[case::load_balancer_ip(
    json!({"status": {"loadBalancer": {"ingress": [{"ip": "lb.example"}]}}}),
    &["status.loadBalancer.ingress[0].ip"], "found \"lb.example\""
)]
#[case::ip_mode(
    json!({"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1", "ipMode": "Vip"}]}}}),
    &["status.loadBalancer.ingress[0].ipMode"], "found \"Vip\", must be VIP or Proxy"
)]
#[case::second_cluster_ip_of_a_family(
    json!({"spec": {"clusterIPs": ["10.96.0.1", "10.96.0.2"]}}),
    &["spec.clusterIPs[1]"], "must be at most one address of each family"
)]
#[case::one_of_two_cluster_ips(
    json!({"spec": {"clusterIPs": ["10.96.0.1", "fd00::x"]}}), &["spec.clusterIPs[1]"], "found \"fd00::x\""
)]
#[case::source_range(
    json!({"spec": {"loadBalancerSourceRanges": ["10.0.0.0", "10.0.0.0/33", "10.0.0.0/+8", "10.0.0.0/8"]}}),
    &["spec.loadBalancerSourceRanges[0]", "spec.loadBalancerSourceRanges[1]", "spec.loadBalancerSourceRanges[2]"],
    "found \"10.0.0.0\", must be an address range such as 192.0.2.0/24"
)]
#[case::port_0(
    json!({"spec": {"ports": [{"port": 80}, {"name": "b", "port": 0}]}}),
    &["spec.ports[1].port"], "found 0, must be 1 to 65535"
)]
#[case::port_too_large(
    json!({"spec": {"ports": [{"port": 80}, {"name": "b", "port": 65616}]}}),
    &["spec.ports[1].port"], "found 65616, must be 1 to 65535"
)]
#[case::protocol(
    json!({"spec": {"ports": [{"port": 80}, {"name": "b", "port": 81, "protocol": "tcp"}]}}),
    &["spec.ports[1].protocol"], "found \"tcp\", must be TCP, UDP or SCTP"
)]
#[case::port_name_twice(
    json!({"spec": {"ports": [{"port": 80}, {"port": 81}]}}),
    &["spec.ports[1].name"], "found \"\" a second time, must be unique within the Service"
)]
#[case::port_twice(
    json!({"spec": {"ports": [{"port": 80}, {"name": "b", "port": 80}]}}),
    &["spec.ports[1].port"], "found 80 a second time"
)]
#[case::node_port_too_large(
    json!({"spec": {"ports": [{"port": 80, "nodePort": 65536}]}}),
    &["spec.ports[0].nodePort"], "found 65536, must be 1 to 65535"
)]
#[case::internal_policy(
    json!({"spec": {"internalTrafficPolicy": "Node"}}),
    &["spec.internalTrafficPolicy"], "found \"Node\", must be Cluster or Local; Cluster is assumed"
)]
#[case::external_policy(
    json!({"spec": {"externalTrafficPolicy": "local"}}), &["spec.externalTrafficPolicy"], "found \"local\""
)]
#[case::affinity(
    json!({"spec": {"sessionAffinity": "Cookie"}}),
    &["spec.sessionAffinity"], "found \"Cookie\", must be ClientIP or None; None is assumed"
)]
#[case::affinity_timeout(
    json!({"spec": {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 0}}}}),
    &["spec.sessionAffinityConfig.clientIP.timeoutSeconds"], "found 0, must be 1 to 86400; 10800 is assumed"
)]
#[case::health_check_node_port(
    json!({"spec": {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": -1}}),
    &["spec.healthCheckNodePort"], "found -1, must be 1 to 65535"
)]
fn an_odd_part_of_a_service_is_left_out(
    #[case] changes: Value,
    #[case] fields: &[&str],
    #[case] problem: &str,
) {
    let (service, oddities) = service_with(changes);
    let found = shown(&oddities);
    assert_eq!(found.iter().map(|(field, _)| *field).collect::<Vec<_>>(), fields, "{found:?}");
    assert!(found[0].1.contains(problem), "{found:?}");
    assert!(oddities.iter().all(|oddity| oddity.object == "Service shop/web"));
    // What is not odd is served.
    let service = service.unwrap();
    assert_eq!(service.cluster_ips, ips(&["10.96.0.1"]));
    assert_eq!(
        service.ports.iter().map(|port| (port.port, port.node_port)).collect::<Vec<_>>(),
        [(80, None)]
    );
    assert!(service.external_ips.iter().all(|address| ips(&["192.0.2.1"]).contains(address)));
    assert!(service.load_balancer_ips.is_empty(), "{service:?}");
    assert_eq!(service.affinity_seconds, fields[0].contains("timeoutSeconds").then_some(10_800));
    assert_eq!(service.health_check_node_port, None);
}

#[test]
fn of_two_equal_node_ports_the_first_is_served() {
    let (service, oddities) = service_with(json!({"spec": {"ports": [
        {"name": "a", "port": 80, "nodePort": 30080},
        {"name": "b", "port": 81, "nodePort": 30080},
        {"name": "c", "port": 80, "nodePort": 30080, "protocol": "UDP"},
    ]}}));
    assert_eq!(
        shown(&oddities),
        [("spec.ports[1].nodePort", "found 30080 a second time, must be unique within the protocol")]
    );
    let node_ports: Vec<_> = service.unwrap().ports.iter().map(|port| port.node_port).collect();
    assert_eq!(node_ports, [Some(30080), None, Some(30080)]);
}

#[test]
fn without_any_valid_cluster_ip_a_service_is_not_served() {
    let (service, oddities) = service_with(json!({"spec": {"clusterIP": "10.96.0"}}));
    assert_eq!(service, None);
    assert_eq!(shown(&oddities), [("spec.clusterIP", "found \"10.96.0\", must be an IPv4 or IPv6 address")]);
}

#[test]
fn without_any_valid_source_range_load_balancer_addresses_are_not_open_to_everyone() {
    let (service, oddities) = service_with(json!({
        "spec": {"loadBalancerSourceRanges": ["everyone"], "externalIPs": ["192.0.2.1"]},
        "status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.1"}]}},
    }));
    let fields: Vec<_> = oddities.iter().map(|oddity| oddity.field.as_str()).collect();
    assert_eq!(fields, ["spec.loadBalancerSourceRanges[0]", "spec.loadBalancerSourceRanges"]);
    let service = service.unwrap();
    assert!(service.load_balancer_ips.is_empty(), "{service:?}");
    assert_eq!(service.external_ips, ips(&["192.0.2.1"]));
}

#[rstest]
#[case::not_a_load_balancer(json!({"type": "NodePort", "externalTrafficPolicy": "Local"}))]
#[case::policy_cluster(json!({"type": "LoadBalancer", "externalTrafficPolicy": "Cluster"}))]
fn health_check_node_port_is_for_load_balancers_with_policy_local(#[case] spec: Value) {
    let changes = merged(json!({"spec": {"healthCheckNodePort": 32000}}), json!({"spec": spec}));
    assert_eq!(good_service(changes).health_check_node_port, None);
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
    let port = |name: &str, protocol, port| crate::model::objects::EndpointPort {
        name: name.into(),
        protocol,
        port,
    };
    let first = Endpoint {
        address: "10.0.0.1".parse().unwrap(),
        ready: false,
        serving: true,
        terminating: true,
        node: Some("node-1".into()),
        hints: Some(Arc::new(crate::model::objects::Hints {
            zones: vec!["z1".into()],
            nodes: vec!["node-1".into()],
        })),
    };
    let second = Endpoint {
        address: "10.0.0.3".parse().unwrap(),
        ready: true,
        serving: true,
        terminating: false,
        node: None,
        hints: None,
    };
    assert_eq!(
        slice,
        EndpointSlice {
            name: ObjectName::new("shop", "web-1"),
            service: "web".into(),
            family: Family::Ipv4,
            ports: vec![port("http", Protocol::Tcp, 8080), port("dns", Protocol::Udp, 53)],
            endpoints: vec![first, second],
        }
    );
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
    let (slice, oddities) = slice_with(changes);
    assert_eq!(slice, None);
    assert_eq!(oddities.len(), 1);
    assert_eq!(
        (oddities[0].object.as_str(), oddities[0].field.as_str()),
        ("EndpointSlice shop/web-1", field)
    );
    assert!(oddities[0].problem.contains(problem), "{oddities:?}");
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
fn an_odd_part_of_a_slice_is_left_out(#[case] changes: Value, #[case] field: &str, #[case] problem: &str) {
    let (slice, oddities) = slice_with(changes);
    assert_eq!(oddities.len(), 1, "{oddities:?}");
    assert_eq!(oddities[0].field, field);
    assert!(oddities[0].problem.contains(problem), "{oddities:?}");
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

fn node_with(changes: Value) -> (Node, Vec<Oddity>) {
    let object = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "here"}});
    let object: v1::Node = serde_json::from_value(merged(object, changes)).unwrap();
    node(&object)
}

#[test]
fn every_field_of_a_node() {
    let (node, oddities) = node_with(json!({
        "metadata": {
            "labels": {"topology.kubernetes.io/zone": "z1"}, "deletionTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {
            "podCIDR": "10.0.0.0/24", "podCIDRs": ["10.0.0.0/24", "fd00:10::/64"],
            "taints": [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}],
        },
        "status": {"addresses": [
            {"type": "Hostname", "address": "here"},
            {"type": "ExternalIP", "address": "198.51.100.1"},
            {"type": "InternalIP", "address": "192.168.0.2"},
            {"type": "InternalIP", "address": "2001:db8::1"},
        ]},
    }));
    assert_eq!(oddities, []);
    assert_eq!(
        node,
        Node {
            name: "here".into(),
            zone: Some("z1".into()),
            addresses: ips(&["192.168.0.2", "2001:db8::1", "198.51.100.1"]),
            pod_cidrs: vec!["10.0.0.0/24".parse().unwrap(), "fd00:10::/64".parse().unwrap()],
            being_deleted: true,
            taints: vec!["ToBeDeletedByClusterAutoscaler".into()],
        }
    );
}

#[test]
fn what_a_node_leaves_out_is_empty() {
    let (node, oddities) = node_with(json!({"metadata": {"labels": {"topology.kubernetes.io/zone": ""}}}));
    assert_eq!(oddities, []);
    assert_eq!(node, Node { name: "here".into(), ..Node::default() });
}

#[test]
fn odd_parts_of_a_node_are_left_out() {
    let (node, oddities) = node_with(json!({
        "spec": {"podCIDR": "10.0.0.0"},
        "status": {"addresses": [
            {"type": "InternalIP", "address": "here.example"}, {"type": "InternalIP", "address": "192.168.0.2"},
        ]},
    }));
    let fields: Vec<_> =
        oddities.iter().map(|oddity| (oddity.object.as_str(), oddity.field.as_str())).collect();
    assert_eq!(fields, [("Node here", "status.addresses[0].address"), ("Node here", "spec.podCIDR")]);
    assert_eq!(node.addresses, ips(&["192.168.0.2"]));
    assert!(node.pod_cidrs.is_empty());
}
