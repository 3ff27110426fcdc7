//! The cases of kube-proxy's TestCategorizeEndpoints.

use rstest::rstest;

use crate::model::{
    Model,
    objects::{
        Endpoint, Node, TrafficPolicy,
        TrafficPolicy::{Cluster, Local},
    },
    test_support::*,
};

struct Input {
    internal: TrafficPolicy,
    external: TrafficPolicy,
    node_port: bool,
    node: Option<Node>,
    endpoints: Vec<Endpoint>,
}

fn input(endpoints: Vec<Endpoint>) -> Input {
    Input { internal: Cluster, external: Cluster, node_port: false, node: Some(node(None)), endpoints }
}

impl Input {
    fn internal_local(self) -> Self {
        Self { internal: Local, ..self }
    }

    fn external_local(self) -> Self {
        Self { external: Local, ..self }
    }

    fn node_port(self) -> Self {
        Self { node_port: true, ..self }
    }

    fn zone(self, zone: &str) -> Self {
        Self { node: Some(node(Some(zone))), ..self }
    }
}

/// The expected sets, by the last numbers of the endpoints' addresses. `None` means that this
/// service port has no such set.
struct Expected {
    cluster: Option<&'static [u8]>,
    local: Option<&'static [u8]>,
    all: &'static [u8],
    any: bool,
}

fn cluster(set: &'static [u8]) -> Expected {
    Expected { cluster: Some(set), local: None, all: set, any: !set.is_empty() }
}

fn local_only(set: &'static [u8], any: bool) -> Expected {
    Expected { cluster: None, local: Some(set), all: set, any }
}

fn both(cluster: &'static [u8], local: &'static [u8], all: &'static [u8]) -> Expected {
    Expected { cluster: Some(cluster), local: Some(local), all, any: !all.is_empty() }
}

fn zone_hints() -> Vec<Endpoint> {
    vec![
        remote("10.0.0.3").zones(&["zone-a"]),
        remote("10.0.0.4").zones(&["zone-b"]),
        remote("10.0.0.5").zones(&["zone-c"]),
        remote("10.0.0.6").zones(&["zone-a"]),
    ]
}

fn zone_hints_two_local() -> Vec<Endpoint> {
    vec![
        local("10.0.0.3").zones(&["zone-a"]),
        local("10.0.0.4").zones(&["zone-b"]),
        remote("10.0.0.5").zones(&["zone-c"]),
        remote("10.0.0.6").zones(&["zone-a"]),
    ]
}

fn node_hints(first: &str) -> Vec<Endpoint> {
    vec![
        remote("10.0.0.3").hints(&["zone-a"], &[first]),
        remote("10.0.0.4").hints(&["zone-b"], &["node-2"]),
        remote("10.0.0.5").hints(&["zone-c"], &["node-3"]),
        remote("10.0.0.6").hints(&["zone-a"], &["node-4"]),
    ]
}

fn two_remote() -> Vec<Endpoint> {
    vec![remote("10.0.0.0"), remote("10.0.0.1")]
}

fn two_local() -> Vec<Endpoint> {
    vec![local("10.0.0.0"), local("10.0.0.1")]
}

fn local_and_remote() -> Vec<Endpoint> {
    vec![local("10.0.0.0"), remote("10.0.0.1")]
}

fn draining(endpoints: Vec<Endpoint>) -> Vec<Endpoint> {
    endpoints.into_iter().map(Endpoint::draining).collect()
}

#[rstest]
#[case::all_hints_and_zone_match(input(zone_hints()).zone("zone-a"), cluster(&[3, 6]))]
#[case::a_local_endpoint_that_is_for_another_zone(
    input(zone_hints_two_local()).zone("zone-a"), cluster(&[3, 6]))]
#[case::external_local_of_a_service_that_nobody_outside_reaches(
    input(zone_hints_two_local()).zone("zone-a").external_local(), cluster(&[3, 6]))]
#[case::external_local_ignores_topology_for_local(
    input(zone_hints_two_local()).zone("zone-a").node_port().external_local(),
    both(&[3, 6], &[3, 4], &[3, 4, 6])
)]
#[case::internal_local_ignores_topology_for_local(
    input(zone_hints_two_local()).zone("zone-a").node_port().internal_local(),
    both(&[3, 6], &[3, 4], &[3, 4, 6])
)]
#[case::no_node(Input { node: None, ..input(vec![remote("10.0.0.3").zones(&["zone-a"])]) }, cluster(&[3]))]
#[case::node_without_zone(input(vec![remote("10.0.0.3").zones(&["zone-a"])]), cluster(&[3]))]
#[case::empty_zone_label(input(vec![remote("10.0.0.3").zones(&["zone-a"])]).zone(""), cluster(&[3]))]
#[case::node_in_different_zone(
    input(vec![remote("10.0.0.3").zones(&["zone-a"]), remote("10.0.0.5").zones(&["zone-c"])]).zone("zone-b"),
    cluster(&[3, 5])
)]
#[case::unready_endpoint(
    input(vec![
        remote("10.0.0.3").zones(&["zone-a"]),
        remote("10.0.0.4").zones(&["zone-b"]),
        remote("10.0.0.5").zones(&["zone-c"]),
        remote("10.0.0.6").zones(&["zone-a"]).unready(),
    ]).zone("zone-a"),
    cluster(&[3])
)]
#[case::unready_endpoint_without_hint_does_not_switch_hints_off(
    input(vec![
        remote("10.0.0.3").zones(&["zone-a"]),
        remote("10.0.0.4").zones(&["zone-b"]),
        remote("10.0.0.5").unready(),
    ]).zone("zone-a"),
    cluster(&[3])
)]
#[case::only_unready_in_same_zone(
    input(vec![
        remote("10.0.0.3").zones(&["zone-a"]).unready(),
        remote("10.0.0.4").zones(&["zone-b"]),
        remote("10.0.0.5").zones(&["zone-c"]),
        remote("10.0.0.6").zones(&["zone-a"]).unready(),
    ]).zone("zone-a"),
    cluster(&[4, 5])
)]
#[case::missing_hints(
    input(vec![
        remote("10.0.0.3").zones(&["zone-a"]),
        remote("10.0.0.4").zones(&["zone-b"]),
        remote("10.0.0.5"),
        remote("10.0.0.6").zones(&["zone-a"]),
    ]).zone("zone-a"),
    cluster(&[3, 4, 5, 6])
)]
#[case::multiple_hints_per_endpoint(
    input(vec![
        remote("10.0.0.3").zones(&["zone-a", "zone-b", "zone-c"]),
        remote("10.0.0.4").zones(&["zone-b", "zone-c"]),
        remote("10.0.0.5").zones(&["zone-b", "zone-d"]),
        remote("10.0.0.6").zones(&["zone-c"]),
    ]).zone("zone-c"),
    cluster(&[3, 4, 6])
)]
#[case::prefer_same_node(input(node_hints(HERE)).zone("zone-a"), cluster(&[3]))]
#[case::prefer_same_node_without_zone(input(node_hints(HERE)), cluster(&[3]))]
#[case::prefer_same_node_with_an_unhinted_endpoint(
    input(vec![
        remote("10.0.0.3").hints(&["zone-a"], &[HERE]),
        remote("10.0.0.4"),
        remote("10.0.0.5").hints(&["zone-c"], &["node-3"]),
    ]).zone("zone-a"),
    cluster(&[3, 4, 5])
)]
#[case::prefer_same_node_without_endpoint_for_node_falls_back_to_zone(
    input(node_hints("node-1")).zone("zone-a"),
    cluster(&[3, 6])
)]
#[case::conflicting_topology_and_localness_merges_all(
    input(vec![
        local("10.0.0.0").zones(&["zone-a"]),
        local("10.0.0.1").zones(&["zone-b"]),
        remote("10.0.0.2").zones(&["zone-a"]),
        remote("10.0.0.3").zones(&["zone-b"]),
    ]).zone("zone-a").node_port().internal_local(),
    both(&[0, 2], &[0, 1], &[0, 1, 2])
)]
#[case::internal_local_empty(input(vec![]).internal_local(), local_only(&[], false))]
#[case::internal_local_all_remote(input(two_remote()).internal_local(), local_only(&[], true))]
#[case::internal_local_all_local(input(two_local()).internal_local(), local_only(&[0, 1], true))]
#[case::internal_local_some_local(input(local_and_remote()).internal_local(), local_only(&[0], true))]
#[case::internal_local_all_remote_and_dead(
    input(vec![remote("10.0.0.0").dead(), remote("10.0.0.1").unready()]).internal_local(),
    local_only(&[], false)
)]
#[case::cluster_all_not_ready(
    input(vec![remote("10.0.0.0").unready(), remote("10.0.0.1").unready()]),
    cluster(&[])
)]
#[case::cluster_some_ready(input(vec![remote("10.0.0.0").unready(), remote("10.0.0.1")]), cluster(&[1]))]
#[case::cluster_all_terminating(input(draining(two_remote())), cluster(&[0, 1]))]
#[case::cluster_all_terminating_ignores_hints(
    input(draining(zone_hints())).zone("zone-a"),
    cluster(&[3, 4, 5, 6])
)]
#[case::cluster_terminating_not_serving(
    input(vec![remote("10.0.0.0").draining().dead(), remote("10.0.0.1").draining()]),
    cluster(&[1])
)]
// The cluster writes such an endpoint with publishNotReadyAddresses.
#[case::published_though_it_neither_serves_nor_stays(
    input(vec![
        Endpoint { terminating: true, serving: false, ..remote("10.0.0.0") },
        Endpoint { serving: false, ..local("10.0.0.1") },
        remote("10.0.0.2"),
    ]).node_port().external_local(),
    both(&[1, 0, 2], &[1], &[1, 0, 2])
)]
#[case::internal_local_external_cluster(
    input(local_and_remote()).node_port().internal_local(),
    both(&[0, 1], &[0], &[0, 1])
)]
#[case::internal_cluster_external_local(
    input(local_and_remote()).node_port().external_local(),
    both(&[0, 1], &[0], &[0, 1])
)]
#[case::both_local(
    input(local_and_remote()).node_port().internal_local().external_local(),
    both(&[0, 1], &[0], &[0, 1])
)]
#[case::both_local_all_remote(
    input(two_remote()).node_port().internal_local().external_local(),
    both(&[0, 1], &[], &[0, 1])
)]
#[case::both_local_all_remote_and_terminating(
    input(draining(two_remote())).node_port().internal_local().external_local(),
    both(&[0, 1], &[], &[0, 1])
)]
#[case::external_local_with_terminating(
    input(vec![
        remote("10.0.0.0"),
        local("10.0.0.1").dead(),
        local("10.0.0.2").draining(),
        remote("10.0.0.3").draining(),
    ]).node_port().external_local(),
    both(&[0], &[2], &[2, 0])
)]
#[case::external_local_not_externally_accessible(
    input(vec![remote("10.0.0.0"), local("10.0.0.1")]).external_local(),
    Expected { cluster: Some(&[1, 0]), local: None, all: &[1, 0], any: true }
)]
#[case::no_cluster_endpoints_for_internal_local_only(
    input(vec![remote("10.0.0.0"), local("10.0.0.1")]).internal_local(),
    local_only(&[1], true)
)]
#[case::external_local_empty(input(vec![]).node_port().external_local(), both(&[], &[], &[]))]
#[case::external_local_all_remote(
    input(two_remote()).node_port().external_local(),
    both(&[0, 1], &[], &[0, 1])
)]
#[case::external_local_all_local(
    input(two_local()).node_port().external_local(),
    both(&[0, 1], &[0, 1], &[0, 1])
)]
fn categorizes_endpoints(#[case] input: Input, #[case] expected: Expected) {
    let mut model = Model::new(HERE);
    let mut service = service("shop/web", &["10.96.0.1"]).policies(input.internal, input.external);
    if input.node_port {
        service = service.node_port(30080);
    }
    model.apply_service(service);
    let serves = |endpoint: &&Endpoint| endpoint.ready || endpoint.serving;
    let mut serving: Vec<_> = input.endpoints.iter().filter(serves).collect();
    serving.sort_by_key(|endpoint| (endpoint.node.as_deref() != Some(HERE), endpoint.address));
    let mut serving: Vec<String> = serving.iter().map(|endpoint| endpoint.address.to_string()).collect();
    model.apply_slice(slice("shop/web-1", "web", input.endpoints));
    model.set_node(input.node);
    let changes = model.take_changes();
    let [port] = changes.changed.as_slice() else { panic!("{changes:?}") };

    let of = |set: Option<&[u8]>| -> Vec<String> {
        set.unwrap_or_default().iter().map(|number| format!("10.0.0.{number}:8080")).collect()
    };
    let by_policy = |policy| match policy {
        Cluster => of(expected.cluster),
        Local => of(expected.local),
    };
    let endpoints = &port.endpoints;
    let all: Vec<u32> = (0..endpoints.all.len() as u32).collect();
    assert_eq!(shown(port, &all), of(Some(expected.all)), "all");
    assert_eq!(shown(port, &endpoints.cluster), of(expected.cluster), "cluster");
    assert_eq!(shown(port, &endpoints.internal), by_policy(input.internal), "internal");
    let external = if input.node_port { by_policy(input.external) } else { vec![] };
    assert_eq!(shown(port, &endpoints.external), external, "external");
    assert_eq!(endpoints.any, expected.any, "any");
    let unused: Vec<String> = endpoints.unused.iter().map(|one| one.address.to_string()).collect();
    let is_unused = |address: &String| !endpoints.all.iter().any(|one| one.address.to_string() == *address);
    serving.retain(is_unused);
    assert_eq!(unused, serving, "unused");
}

/// A service port for clients outside has the same `need_snat` on this node, on that of the remote
/// endpoints, and on one in another zone.
#[rstest]
#[case::plain(vec![local("10.0.0.1"), remote("10.0.0.2")], false)]
#[case::none(vec![], false)]
#[case::hints_that_only_some_nodes_follow(zone_hints(), true)]
#[case::hints_that_no_node_follows(vec![remote("10.0.0.1").zones(&["zone-a"]), remote("10.0.0.2")], true)]
#[case::hints_of_one_that_serves_nobody(vec![remote("10.0.0.1").zones(&["zone-a"]).dead(), local("10.0.0.2")], false)]
#[case::one_on_no_node(vec![local("10.0.0.1"), nowhere("10.0.0.2")], true)]
#[case::one_on_no_node_that_serves_nobody(vec![local("10.0.0.1"), nowhere("10.0.0.2").dead()], false)]
#[case::listed_twice(vec![local("10.0.0.1"), remote("10.0.0.1").zones(&["zone-a"])], true)]
fn all_nodes_agree_on_what_needs_snat(#[case] endpoints: Vec<Endpoint>, #[case] expected: bool) {
    for (name, zone) in [(HERE, Some("zone-a")), (THERE, Some("zone-b")), ("elsewhere", None)] {
        let mut model = Model::new(name);
        model.apply_service(service("shop/web", &["10.96.0.1"]).node_port(30080));
        model.apply_slice(slice("shop/web-1", "web", endpoints.clone()));
        model.set_node(Some(Node { name: name.into(), ..node(zone) }));
        let port = &model.take_changes().changed[0];
        assert_eq!(port.endpoints.need_snat, expected, "{name}");
    }
}

fn nowhere(address: &str) -> Endpoint {
    Endpoint { node: None, ..remote(address) }
}
