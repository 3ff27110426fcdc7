use std::net::IpAddr;

use proptest::prelude::*;
use proxy_common::family::{Slot, V4, V6};
use rstest::rstest;

use super::*;
use crate::model::{
    Model,
    desired::Frontend,
    objects::Forwarding::{Dsr, Hybrid, Snat},
    test_support::{HERE, THERE, remote, service, slice, target},
};

fn endpoints(count: u8, cluster: &[u32], internal: &[u32], external: &[u32]) -> Endpoints {
    let endpoint = |n| Endpoint {
        address: std::net::Ipv4Addr::new(10, 0, 0, n).into(),
        port: 80,
        local: false,
        terminating: false,
        weight: 1,
    };
    Endpoints {
        all: (0..count).map(endpoint).collect(),
        cluster: cluster.into(),
        internal: internal.into(),
        external: external.into(),
        any: count > 0,
        need_snat: false,
        unused: Box::default(),
    }
}

#[rstest]
#[case::all_the_same(&[0, 1, 2], &[0, 1, 2], &[0, 1, 2], 3)]
#[case::local_ones_come_first(&[0, 1, 2], &[0, 1, 2], &[0], 3)]
#[case::remote_run(&[0, 1, 2], &[1, 2], &[], 3)]
#[case::a_gap_needs_slots_of_its_own(&[0, 1, 2], &[0, 2], &[0], 5)]
#[case::two_equal_gaps_share_them(&[0, 1, 2], &[0, 2], &[0, 2], 5)]
#[case::none(&[], &[], &[], 3)]
fn slots_are_shared(
    #[case] cluster: &[u32],
    #[case] internal: &[u32],
    #[case] external: &[u32],
    #[case] slots: u32,
) {
    let arrangement = Arrangement::of(&endpoints(3, cluster, internal, external), Algorithm::Random);
    assert_eq!(arrangement.slot_count(), slots);
    assert_eq!(arrangement.runs[0].slots, [0, 1, 2]);
    assert!(!arrangement.has_tables());
}

#[rstest]
#[case::all_the_same(&[0, 1, 2], &[0, 1, 2], &[0, 1, 2], 3 + 512)]
#[case::one_endpoint_needs_none(&[0, 1, 2], &[0, 1, 2], &[0], 3 + 512)]
#[case::each_set_has_its_own(&[0, 1, 2], &[0, 1, 2], &[0, 1], 3 + 512 + 2 + 512)]
#[case::three_tables(&[0, 1, 2], &[1, 2], &[0, 1], 3 + 512 + 2 * (2 + 512))]
fn tables_follow_their_sets(
    #[case] cluster: &[u32],
    #[case] internal: &[u32],
    #[case] external: &[u32],
    #[case] slot_count: u32,
) {
    let arrangement = Arrangement::of(&endpoints(3, cluster, internal, external), Algorithm::Maglev);
    assert_eq!((arrangement.slot_count(), arrangement.has_tables()), (slot_count, true));
}

proptest! {
    #[test]
    fn each_set_is_where_its_range_says(
        cluster in prop::collection::vec(0..6_u32, 0..6),
        internal in prop::collection::vec(0..6_u32, 0..6),
        external in prop::collection::vec(0..6_u32, 0..6),
        weights in prop::array::uniform6(prop_oneof![Just(1_u8), Just(0), any::<u8>()]),
        algorithm in prop_oneof![Just(Algorithm::Random), Just(Algorithm::Maglev), Just(Algorithm::LeastConnection)],
    ) {
        let mut endpoints = endpoints(6, &cluster, &internal, &external);
        endpoints.all.iter_mut().zip(weights).for_each(|(endpoint, weight)| endpoint.weight = weight);
        let port = DesiredPort { endpoints, ..port(Vec::new()) };
        let arrangement = Arrangement::of(&port.endpoints, algorithm);
        let all: Vec<u32> = arrangement.runs.iter().flat_map(|run| run.contents::<V4>(&port)).collect();
        prop_assert_eq!(all.len() as u32, arrangement.slot_count());
        let sets = [(arrangement.cluster, cluster), (arrangement.internal, internal), (arrangement.external, external)];
        prop_assert_eq!(span(sets.each_ref().map(|(set, _)| *set)).count <= arrangement.slot_count(), true);
        for (set, members) in sets {
            let (first, count) = (set.first as usize, set.count() as usize);
            prop_assert_eq!(&all[first..first + count], members.as_slice());
            let table = &all[first + count..first + set.slot_count() as usize];
            let has_weight = |index: &u32| weights[*index as usize] > 0;
            let has_any = members.iter().any(has_weight);
            prop_assert!(table.iter().all(|index| members.contains(index) && (has_weight(index) || !has_any)));
        }
    }
}

/// Returns the slots of each set that the model makes of endpoints with these addresses, some
/// of them on this node.
fn chosen<F: MapFamily>(endpoints: &[(IpAddr, bool)], ports: &[u16]) -> [Vec<F::Slot>; 3] {
    let mut model = Model::new(HERE);
    let mut service = service(
        "default/web",
        &[match F::FAMILY {
            objects::IpFamily::Ipv4 => "10.96.0.1",
            objects::IpFamily::Ipv6 => "fd00::1",
        }],
    );
    service.ports[0].node_port = Some(30_080);
    service.external_policy = TrafficPolicy::Local;
    model.apply_service(service);
    for (number, port) in ports.iter().enumerate() {
        let of_port = endpoints.iter().skip(number).step_by(ports.len());
        let ready = |(address, is_local): &(IpAddr, bool)| {
            let node = if *is_local { HERE } else { THERE };
            objects::Endpoint { node: Some(node.into()), ..remote(&address.to_string()) }
        };
        let slice = slice(&format!("default/web-{number}"), "web", of_port.map(ready).collect());
        model.apply_slice(
            objects::EndpointSlice { family: F::FAMILY, ..slice }.ports(vec![target("", *port)]),
        );
    }
    let desired = Arc::clone(&model.take_changes().changed[0]);
    let Endpoints { all, cluster, internal, external, .. } = &desired.endpoints;
    let slot = |index: &u32| {
        let one = &all[*index as usize];
        let address = F::address(one.address).unwrap();
        F::Slot::new(address, Port::new(one.port), 1, backend_flags(one))
    };
    [cluster, internal, external].map(|set| set.iter().map(slot).collect())
}

fn assert_sorted<S: Slot>(sets: [Vec<S>; 3]) {
    for set in sets {
        assert!(set.windows(2).all(|two| two[0].precedes(&two[1])));
    }
}

proptest! {
    /// Programs search the sorted sets for the backend of a client with affinity.
    #[test]
    fn sets_are_sorted(
        hosts in prop::collection::vec((any::<[u8; 3]>(), any::<bool>()), 1..40),
        ports in prop::collection::vec(1..4_u16, 1..4),
    ) {
        let v4 = |&([a, b, c], is_local): &([u8; 3], bool)| (IpAddr::from([10, a, b, c]), is_local);
        let v6 = |&([a, b, c], is_local): &([u8; 3], bool)| {
            (IpAddr::from([0xfd, a, 0, 0, 0, 0, 0, b, 0, 0, 0, 0, 0, 0, 0, c]), is_local)
        };
        assert_sorted(chosen::<V4>(&hosts.iter().map(v4).collect::<Vec<_>>(), &ports));
        assert_sorted(chosen::<V6>(&hosts.iter().map(v6).collect::<Vec<_>>(), &ports));
    }
}

fn port(frontends: Vec<Frontend>) -> DesiredPort {
    DesiredPort {
        name: ServicePortName {
            service: ObjectName::new("default", "web"),
            port: "http".into(),
            protocol: Protocol::Tcp,
            family: objects::IpFamily::Ipv4,
        },
        frontends,
        unserved: Box::default(),
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Cluster,
        health_check_node_port: None,
        endpoints: Endpoints::default(),
        affinity_seconds: None,
        source_ranges: Vec::new(),
        algorithm: None,
        forwarding: None,
    }
}

#[test]
fn frontends_have_scope_and_flags_of_their_kind() {
    let frontend = |kind, address: &str, port| Frontend { kind, address: address.parse().unwrap(), port };
    let port = port(vec![
        frontend(FrontendKind::NodePort, "0.0.0.0", 30080),
        frontend(FrontendKind::ClusterIp, "10.96.0.1", 80),
        frontend(FrontendKind::ExternalIp, "192.0.2.1", 80),
    ]);
    let http = |address| FrontendKey::of_address(address, Port::new(80), 6);
    assert_eq!(
        frontends::<V4>(&port, Algorithm::Random, Snat),
        [
            (http([10, 96, 0, 1]), 0),
            (http([192, 0, 2, 1]), FRONTEND_EXTERNAL),
            (FrontendKey::of_node_port(Port::new(30080), 6), FRONTEND_EXTERNAL),
        ]
    );
}

#[test]
fn addresses_of_the_other_family_are_no_frontends() {
    let address = "10.96.0.1".parse().unwrap();
    let port = port(vec![Frontend { kind: FrontendKind::ClusterIp, address, port: 80 }]);
    assert!(frontends::<V6>(&port, Algorithm::Random, Snat).is_empty());
}

#[rstest]
#[case::plain(None, TrafficPolicy::Cluster, [0, FRONTEND_EXTERNAL])]
#[case::affinity(Some(60), TrafficPolicy::Cluster, [FRONTEND_AFFINITY, FRONTEND_EXTERNAL | FRONTEND_AFFINITY])]
#[case::policy_local(None, TrafficPolicy::Local, [0, FRONTEND_EXTERNAL | FRONTEND_LOCAL_POLICY])]
fn flags_of_frontends(
    #[case] affinity_seconds: Option<u32>,
    #[case] external_policy: TrafficPolicy,
    #[case] expected: [u32; 2],
) {
    let frontend = |kind, address: &str| Frontend { kind, address: address.parse().unwrap(), port: 80 };
    let of_both =
        vec![frontend(FrontendKind::ClusterIp, "10.96.0.1"), frontend(FrontendKind::ExternalIp, "192.0.2.2")];
    let port = DesiredPort { affinity_seconds, external_policy, ..port(of_both) };
    let flags: Vec<u32> =
        frontends::<V4>(&port, Algorithm::Random, Snat).into_iter().map(|(_, flags)| flags).collect();
    assert_eq!(flags, expected);
    for (algorithm, flag) in
        [(Algorithm::Maglev, FRONTEND_MAGLEV), (Algorithm::LeastConnection, FRONTEND_LEAST_CONNECTION)]
    {
        let flags = frontends::<V4>(&port, algorithm, Snat).into_iter().map(|(_, flags)| flags);
        assert!(flags.zip(expected).all(|(flags, expected)| flags == expected | flag));
    }
}

const ANY: NodeForwarding = NodeForwarding { by_default: Snat, allows_more: true };

const fn up_to(by_default: Forwarding) -> NodeForwarding {
    NodeForwarding { by_default, allows_more: false }
}

#[rstest]
#[case::by_default(None, up_to(Snat), Protocol::Tcp, Snat)]
#[case::as_the_node(None, up_to(Dsr), Protocol::Udp, Dsr)]
#[case::not_as_the_node(Some(Snat), up_to(Dsr), Protocol::Tcp, Snat)]
#[case::hybrid_tcp(Some(Hybrid), up_to(Dsr), Protocol::Tcp, Dsr)]
#[case::hybrid_udp(Some(Hybrid), up_to(Dsr), Protocol::Udp, Snat)]
#[case::more_than_the_node(Some(Dsr), up_to(Snat), Protocol::Tcp, Snat)]
#[case::hybrid_is_more_than_the_node(Some(Hybrid), up_to(Snat), Protocol::Tcp, Snat)]
#[case::as_much_as_a_hybrid_node(Some(Dsr), up_to(Hybrid), Protocol::Tcp, Dsr)]
#[case::more_than_a_hybrid_node(Some(Dsr), up_to(Hybrid), Protocol::Udp, Snat)]
#[case::more_where_that_is_allowed(Some(Dsr), ANY, Protocol::Udp, Dsr)]
#[case::nothing_where_more_is_allowed(None, ANY, Protocol::Tcp, Snat)]
fn forwarding_of_a_service_port(
    #[case] forwarding: Option<Forwarding>,
    #[case] of_node: NodeForwarding,
    #[case] protocol: Protocol,
    #[case] expected: Forwarding,
) {
    let frontend = |kind, address: &str| Frontend { kind, address: address.parse().unwrap(), port: 80 };
    let of_both =
        vec![frontend(FrontendKind::ClusterIp, "10.96.0.1"), frontend(FrontendKind::ExternalIp, "192.0.2.2")];
    let mut port = DesiredPort { forwarding, ..port(of_both) };
    port.name.protocol = protocol;
    let found = forwarding_of(&port, of_node);
    assert_eq!(found, expected);
    let flags = frontends::<V4>(&port, Algorithm::Random, found).into_iter().map(|(_, flags)| flags);
    let flag = if expected == Dsr { FRONTEND_DSR } else { 0 };
    assert_eq!(flags.collect::<Vec<_>>(), [0, FRONTEND_EXTERNAL | flag]);
    assert_eq!(super::forwarding(service_flags(&port, Algorithm::Maglev, found)), expected);
}

#[rstest]
#[case::known_on_their_nodes(false, Dsr)]
#[case::not_known_there(true, Snat)]
fn endpoints_that_need_snat(#[case] need_snat: bool, #[case] expected: Forwarding) {
    let endpoints = Endpoints { need_snat, ..Endpoints::default() };
    let port = DesiredPort { forwarding: Some(Dsr), endpoints, ..port(Vec::new()) };
    assert_eq!(forwarding_of(&port, ANY), expected);
    assert_eq!(forwarding_of(&port, up_to(Dsr)), expected);
}

#[test]
fn source_ranges_close_load_balancer_addresses() {
    let frontend = |kind, address: &str| Frontend { kind, address: address.parse().unwrap(), port: 80 };
    let mut port = port(vec![
        frontend(FrontendKind::LoadBalancer, "192.0.2.1"),
        frontend(FrontendKind::ExternalIp, "192.0.2.2"),
    ]);
    let flags = |port: &DesiredPort| {
        frontends::<V4>(port, Algorithm::Random, Snat).into_iter().map(|(_, flags)| flags).collect::<Vec<_>>()
    };
    assert_eq!(flags(&port), [FRONTEND_EXTERNAL; 2]);
    assert!(source_ranges::<V4>(&port, 7).is_empty());
    port.source_ranges =
        ["198.51.100.9/24", "198.51.100.0/24", "0.0.0.0/0"].map(|range| range.parse().unwrap()).into();
    assert_eq!(flags(&port), [FRONTEND_EXTERNAL | FRONTEND_SOURCE_RANGES, FRONTEND_EXTERNAL]);
    let of_prefix = |address, bits| SourceRange::of_prefix(7, address, bits);
    assert_eq!(*source_ranges::<V4>(&port, 7), [of_prefix([0; 4], 0), of_prefix([198, 51, 100, 0], 24)]);
    port.frontends.remove(0);
    assert!(source_ranges::<V4>(&port, 7).is_empty());
}

#[rstest]
#[case("default", "kubernetes", "https")]
#[case("n", "s", "")]
#[case(&"n".repeat(63), &"s".repeat(64), &"p".repeat(15))]
fn names_come_back(#[case] namespace: &str, #[case] service: &str, #[case] port: &str) {
    let original = ServicePortName {
        service: ObjectName::new(namespace, service),
        port: port.into(),
        protocol: Protocol::Udp,
        family: objects::IpFamily::Ipv6,
    };
    assert_eq!(port_name(&name(&original).unwrap()), Some(original));
}

#[test]
fn a_name_that_is_too_long_has_no_layout() {
    let mut original = port(Vec::new()).name;
    original.service.name = "s".repeat(NAME_BYTES + 1).into();
    assert_eq!(name(&original), None);
}

#[test]
fn the_span_of_sets_ignores_empty_ones() {
    let set = EndpointSet::new;
    assert_eq!(span([set(0, 0), set(7, 2), set(4, 1)]), Range { first: 4, count: 5 });
    assert_eq!(span([set(9, 0); 3]), Range::default());
}
