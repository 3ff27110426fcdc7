use rstest::rstest;
use serde_json::{Value, json};

use super::{super::*, ips, merged, read, shown};
use crate::model::objects::{Algorithm, Forwarding, Service, ServicePort, TrafficPolicy};

fn service_with(changes: Value) -> (Option<Service>, Vec<InvalidField>) {
    let object = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"namespace": "shop", "name": "web", "creationTimestamp": "1970-01-02T00:00:00Z"},
        "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]},
    });
    let object = read::<core::Service>(merged(object, changes));
    service(&object)
}

/// Returns the Service as it is served, and checks that every field is valid.
fn good_service(changes: Value) -> Service {
    let (service, invalid) = service_with(changes);
    assert_eq!(invalid, []);
    service.unwrap()
}

#[test]
fn every_field_of_a_service() {
    let service = good_service(json!({
        "metadata": {"annotations": {"proxy-ctl.dev/algorithm": "maglev", "proxy-ctl.dev/forwarding": "hybrid"}},
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
    let port =
        |name: &str, protocol, port, node_port| ServicePort { name: name.into(), protocol, port, node_port };
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
            proxied_load_balancer_ips: ips(&["198.51.100.3"]),
            internal_policy: TrafficPolicy::Cluster,
            external_policy: TrafficPolicy::Local,
            affinity_seconds: Some(60),
            source_ranges: vec!["203.0.113.0/25".parse().unwrap(), "2001:db8::/32".parse().unwrap()],
            health_check_node_port: Some(32000),
            algorithm: Some(Algorithm::Maglev),
            forwarding: Some(Forwarding::Hybrid),
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
fn unusual_looking_addresses_are_what_kube_proxy_takes_them_for(
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
#[case::unspecified_cluster_ip(
    json!({"spec": {"clusterIPs": ["10.96.0.1", "::"]}}),
    &["spec.clusterIPs[1]"], "must be the address of one destination"
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
#[case::algorithm(
    json!({"metadata": {"annotations": {"proxy-ctl.dev/algorithm": "Maglev"}}}),
    &["metadata.annotations[proxy-ctl.dev/algorithm]"], "found \"Maglev\", must be random, maglev or leastConnection; the node's is used"
)]
#[case::forwarding(
    json!({"metadata": {"annotations": {"proxy-ctl.dev/forwarding": "ipip"}}}),
    &["metadata.annotations[proxy-ctl.dev/forwarding]"], "found \"ipip\", must be snat, dsr or hybrid; the node's is used"
)]
#[case::long_algorithm(
    json!({"metadata": {"annotations": {"proxy-ctl.dev/algorithm": "x".repeat(1_000)}}}),
    &["metadata.annotations[proxy-ctl.dev/algorithm]"], "xxx\", must be random, maglev or leastConnection"
)]
fn an_invalid_part_of_a_service_is_left_out(
    #[case] changes: Value,
    #[case] fields: &[&str],
    #[case] problem: &str,
) {
    let (service, invalid) = service_with(changes);
    let found = shown(&invalid);
    assert_eq!(found.iter().map(|(field, _)| *field).collect::<Vec<_>>(), fields, "{found:?}");
    assert!(found[0].1.contains(problem), "{found:?}");
    assert!(invalid.iter().all(|field| field.object == "Service shop/web"));
    // The valid fields are served.
    let service = service.unwrap();
    assert_eq!(service.cluster_ips, ips(&["10.96.0.1"]));
    assert_eq!(
        service.ports.iter().map(|port| (port.port, port.node_port)).collect::<Vec<_>>(),
        [(80, None)]
    );
    assert!(service.external_ips.iter().all(|address| ips(&["192.0.2.1"]).contains(address)));
    assert!(service.load_balancer_ips.is_empty(), "{service:?}");
    assert_eq!(service.affinity_seconds, fields[0].contains("timeoutSeconds").then_some(10_800));
    assert_eq!((service.health_check_node_port, service.algorithm), (None, None));
}

#[test]
fn of_two_equal_node_ports_the_first_is_served() {
    let (service, invalid) = service_with(json!({"spec": {"ports": [
        {"name": "a", "port": 80, "nodePort": 30080},
        {"name": "b", "port": 81, "nodePort": 30080},
        {"name": "c", "port": 80, "nodePort": 30080, "protocol": "UDP"},
    ]}}));
    assert_eq!(
        shown(&invalid),
        [("spec.ports[1].nodePort", "found 30080 a second time, must be unique within the protocol")]
    );
    let node_ports: Vec<_> = service.unwrap().ports.iter().map(|port| port.node_port).collect();
    assert_eq!(node_ports, [Some(30080), None, Some(30080)]);
}

#[test]
fn without_any_valid_cluster_ip_a_service_is_not_served() {
    let (service, invalid) = service_with(json!({"spec": {"clusterIP": "10.96.0"}}));
    assert_eq!(service, None);
    assert_eq!(shown(&invalid), [("spec.clusterIP", "found \"10.96.0\", must be an IPv4 or IPv6 address")]);
}

#[test]
fn without_any_valid_source_range_load_balancer_addresses_are_not_open_to_everyone() {
    let (service, invalid) = service_with(json!({
        "spec": {"loadBalancerSourceRanges": ["everyone"], "externalIPs": ["192.0.2.1"]},
        "status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.1"}]}},
    }));
    let fields: Vec<_> = invalid.iter().map(|field| field.field.as_str()).collect();
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
