use rstest::rstest;

use super::*;
use crate::model::{
    Model,
    node::LocalTraffic,
    objects::{Service, TrafficPolicy},
    test_support::{HERE, ip, local, remote, service, slice},
};

const CLUSTER_IP: &str = "10.96.0.1";
const EXTERNAL_IP: &str = "192.0.2.80";
const LOAD_BALANCER: &str = "203.0.113.80";

fn site() -> Site {
    let mut site = Site::new("");
    site.host = Host {
        node_port_addresses: ["127.0.0.1", "192.0.2.10", "2001:db8::10"].map(ip).into(),
        masquerade_addresses: ["192.0.2.10", "2001:db8::10"].map(ip).into(),
        local_traffic: LocalTraffic::FromCidrs(vec!["10.244.0.0/16".parse().unwrap()]),
        ..Host::default()
    };
    site.own_addresses = ["127.0.0.1", "192.0.2.10", "2001:db8::10"].map(ip).into();
    site
}

fn everything() -> Service {
    service("default/web", &[CLUSTER_IP])
        .node_port(30_080)
        .external_ip(EXTERNAL_IP)
        .load_balancer_ip(LOAD_BALANCER)
}

/// Returns the objects of a Service with one endpoint on this node and one on another.
fn objects(service: Service, site: &Site) -> PortObjects {
    objects_with(service, &["10.244.0.1"], &["10.244.1.1"], site)
}

fn objects_with(service: Service, here: &[&str], there: &[&str], site: &Site) -> PortObjects {
    let mut model = Model::new(HERE);
    let (protocol, name) = (service.ports[0].protocol, service.name.clone());
    model.apply_service(service);
    let endpoints =
        here.iter().map(|address| local(address)).chain(there.iter().map(|address| remote(address)));
    let mut endpoints = slice("default/web-1", &name.name, endpoints.collect());
    endpoints.ports[0].protocol = protocol;
    model.apply_slice(endpoints);
    plan(&model.take_changes().changed[0], site)
}

/// Formats members as `name: member`, and servers as `address:port/protocol -> destinations`.
fn shown(objects: &PortObjects) -> (Vec<String>, Vec<String>) {
    let members = objects.members.iter().map(|(set, member)| format!("{}: {member}", set.name())).collect();
    let servers = objects.servers.iter().map(|(socket, (_, server))| {
        let to: Vec<_> = server.destinations.iter().map(|to| to.ip().to_string()).collect();
        format!("{socket} -> {}", to.join(" "))
    });
    (members, servers.collect())
}

#[test]
fn every_frontend_has_a_virtual_server_and_says_who_is_masqueraded() {
    let objects = objects(everything(), &site());
    let (members, servers) = shown(&objects);
    assert_eq!(
        members,
        [
            "KUBE-LOOP-BACK: 10.244.0.1:8080/TCP from 10.244.0.1/32",
            "KUBE-CLUSTER-IP: 10.96.0.1:80/TCP",
            "KUBE-EXTERNAL-IP: 192.0.2.80:80/TCP",
            "KUBE-LOAD-BALANCER: 203.0.113.80:80/TCP",
            "KUBE-NODE-PORT-TCP: 30080",
            "KUBE-IPVS-IPS: 10.96.0.1",
            "KUBE-IPVS-IPS: 192.0.2.80",
            "KUBE-IPVS-IPS: 203.0.113.80",
        ]
    );
    let both = "10.244.0.1 10.244.1.1";
    let sockets = ["10.96.0.1:80", "192.0.2.10:30080", "192.0.2.80:80", "203.0.113.80:80"];
    assert_eq!(servers, sockets.map(|socket| format!("{socket}/TCP -> {both}")));
    assert_eq!(objects.addresses, [CLUSTER_IP, EXTERNAL_IP, LOAD_BALANCER].map(ip).into());
    assert!(objects.closed_to_node.is_empty());
}

#[test]
fn with_external_policy_local_nobody_is_masqueraded_on_the_way_to_local_endpoints() {
    let local = everything().policies(TrafficPolicy::Cluster, TrafficPolicy::Local);
    let (members, servers) = shown(&objects(local, &site()));
    assert_eq!(
        members[1..7],
        [
            "KUBE-CLUSTER-IP: 10.96.0.1:80/TCP",
            "KUBE-EXTERNAL-IP-LOCAL: 192.0.2.80:80/TCP",
            "KUBE-LOAD-BALANCER: 203.0.113.80:80/TCP",
            "KUBE-LOAD-BALANCER-LOCAL: 203.0.113.80:80/TCP",
            "KUBE-NODE-PORT-TCP: 30080",
            "KUBE-NODE-PORT-LOCAL-TCP: 30080",
        ]
    );
    assert_eq!(servers[0], "10.96.0.1:80/TCP -> 10.244.0.1 10.244.1.1");
    assert_eq!(servers[1], "192.0.2.10:30080/TCP -> 10.244.0.1");
}

#[rstest]
#[case::local_endpoint(&["10.244.0.1"], &["10.244.1.1"], "10.244.0.1")]
#[case::no_local_endpoint(&[], &["10.244.1.1"], "10.244.1.1")]
#[case::no_endpoint(&[], &[], "")]
fn policies_local(#[case] here: &[&str], #[case] there: &[&str], #[case] expected: &str) {
    let both = everything().policies(TrafficPolicy::Local, TrafficPolicy::Local);
    let (_, servers) = shown(&objects_with(both, here, there, &site()));
    assert_eq!(servers.len(), 4);
    for server in servers {
        assert!(server.ends_with(&format!("-> {expected}")), "{server}");
    }
}

#[rstest]
#[case::local_endpoint(&["10.244.0.1"], "10.244.0.1")]
#[case::no_local_endpoint(&[], "")]
fn internal_policy_local_of_a_cluster_ip_alone(#[case] here: &[&str], #[case] expected: &str) {
    let internal =
        service("default/web", &[CLUSTER_IP]).policies(TrafficPolicy::Local, TrafficPolicy::Cluster);
    let (_, servers) = shown(&objects_with(internal, here, &["10.244.1.1"], &site()));
    assert_eq!(servers, [format!("10.96.0.1:80/TCP -> {expected}")]);
}

#[rstest]
#[case::tcp(Protocol::Tcp, "KUBE-NODE-PORT-TCP: 30080")]
#[case::udp(Protocol::Udp, "KUBE-NODE-PORT-UDP: 30080")]
#[case::sctp(Protocol::Sctp, "KUBE-NODE-PORT-SCTP-HASH: 192.0.2.10:30080/SCTP")]
fn node_ports_by_protocol(#[case] protocol: Protocol, #[case] member: &str) {
    let mut service = service("default/web", &[CLUSTER_IP]).node_port(30_080);
    service.ports[0].protocol = protocol;
    let (members, servers) = shown(&objects(service, &site()));
    assert!(members.iter().any(|one| one == member), "{members:?}");
    assert_eq!(servers[1], format!("192.0.2.10:30080/{} -> 10.244.0.1 10.244.1.1", protocol.name()));
}

#[test]
fn an_address_that_another_interface_has_is_not_given_to_the_device() {
    let mut site = site();
    site.own_addresses.insert(ip(EXTERNAL_IP));
    let objects = objects(everything(), &site);
    assert_eq!(objects.addresses, [CLUSTER_IP, LOAD_BALANCER].map(ip).into());
    let (members, servers) = shown(&objects);
    assert!(!members.contains(&"KUBE-IPVS-IPS: 192.0.2.80".to_owned()));
    assert!(servers.iter().any(|server| server.starts_with("192.0.2.80:80/TCP")));
}

#[rstest]
#[case::without_the_node(&["198.51.100.0/24"], false)]
#[case::with_the_node(&["198.51.100.0/24", "192.0.2.0/28"], true)]
fn source_ranges(#[case] ranges: &[&str], #[case] open_to_node: bool) {
    let mut restricted = everything();
    restricted.source_ranges = ranges.iter().map(|range| range.parse().unwrap()).collect();
    let objects = objects(restricted, &site());
    let (members, _) = shown(&objects);
    let has = |member: &str| members.iter().any(|one| one == member);
    assert!(has("KUBE-LOAD-BALANCER-FW: 203.0.113.80:80/TCP"));
    for range in ranges {
        assert!(
            has(&format!("KUBE-LOAD-BALANCER-SOURCE-CIDR: 203.0.113.80:80/TCP from {range}")),
            "{members:?}"
        );
    }
    let itself = has("KUBE-LOAD-BALANCER-SOURCE-IP: 203.0.113.80:80/TCP from 203.0.113.80/32");
    assert_eq!((itself, objects.closed_to_node.is_empty()), (open_to_node, open_to_node));
}

#[rstest]
#[case("0.0.0.0/0", &["0.0.0.0/1", "128.0.0.0/1"])]
#[case("::/0", &["::/1", "8000::/1"])]
#[case("192.0.2.7/24", &["192.0.2.0/24"])]
fn ranges_as_a_set_takes_them(#[case] range: &str, #[case] expected: &[&str]) {
    let ranges: Vec<_> =
        without_zero_prefix(range.parse().unwrap()).iter().map(ToString::to_string).collect();
    assert_eq!(ranges, expected);
}

#[rstest]
#[case::default("", "rr", false)]
#[case::maglev("mh", "mh", true)]
#[case::source("sh", "sh", false)]
fn balancing(#[case] configured: &str, #[case] scheduler: &str, #[case] by_source_port: bool) {
    let mut with_affinity = service("default/web", &[CLUSTER_IP]);
    with_affinity.affinity_seconds = Some(10_800);
    let site = Site { scheduler: Site::new(configured).scheduler, ..site() };
    let objects = objects(with_affinity, &site);
    let (_, server) = objects.servers.values().next().unwrap();
    let expected = Balancing { scheduler: scheduler.into(), affinity_seconds: Some(10_800), by_source_port };
    assert_eq!(server.balancing, expected);
}

#[test]
fn the_port_of_health_checks_is_open() {
    let mut checked = everything().policies(TrafficPolicy::Cluster, TrafficPolicy::Local);
    checked.health_check_node_port = Some(31_000);
    let (members, _) = shown(&objects(checked, &site()));
    assert!(members.contains(&"KUBE-HEALTH-CHECK-NODE-PORT: 31000".to_owned()), "{members:?}");
}
