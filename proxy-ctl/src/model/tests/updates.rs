//! Tests of what each update changes, and what it costs.

use rstest::rstest;

use crate::model::{
    Model, Update,
    desired::{Changes, Frontend, FrontendKind},
    objects::{Endpoint, IpFamily::Ipv4, Protocol, Service, ServiceCidr},
    test_support::*,
};

fn after(updates: Vec<Update>) -> Model {
    let mut model = Model::new(HERE);
    for update in updates {
        model.update(update);
    }
    model.take_changes();
    model
}

fn shop() -> Vec<Update> {
    vec![
        Update::ApplyService(service("shop/web", &["10.96.0.1"])),
        Update::ApplySlice(slice("shop/web-1", "web", vec![remote("10.0.0.1"), local("10.0.0.2")])),
        Update::ApplyService(service("shop/cart", &["10.96.0.2", "fd00::2"])),
        Update::ApplySlice(slice("shop/cart-1", "cart", vec![remote("10.0.0.3")])),
        Update::ApplySlice(slice("shop/cart-2", "cart", vec![remote("fd00::3")])),
    ]
}

fn names(changes: &Changes) -> Vec<String> {
    let of = |port: &crate::model::desired::ServicePortName| format!("{port} {:?}", port.family);
    let changed = changes.changed.iter().map(|port| of(&port.name));
    changed.chain(changes.removed.iter().map(|port| format!("-{}", of(port)))).collect()
}

/// Returns `address:port` of the endpoints of scope cluster, in the order of the model.
fn cluster(model: &Model, service: &str) -> Vec<String> {
    let service = name(service);
    let desired = model.desired();
    let ports = desired.iter().filter(|port| port.name.service == service);
    ports.flat_map(|port| shown(port, &port.endpoints.cluster)).collect()
}

#[rstest]
#[case::nothing(vec![], &[])]
#[case::same_service(vec![Update::ApplyService(service("shop/web", &["10.96.0.1"]))], &[])]
#[case::same_slice(
    vec![Update::ApplySlice(slice("shop/web-1", "web", vec![remote("10.0.0.1"), local("10.0.0.2")]))],
    &[]
)]
#[case::same_endpoints_in_another_order(
    vec![Update::ApplySlice(slice("shop/web-1", "web", vec![local("10.0.0.2"), remote("10.0.0.1")]))],
    &[]
)]
#[case::unknown_names_deleted(
    vec![Update::DeleteService(name("shop/nobody")), Update::DeleteSlice(name("shop/nobody-1"))],
    &[]
)]
#[case::endpoint_added(
    vec![Update::ApplySlice(slice("shop/web-2", "web", vec![remote("10.0.0.9")]))],
    &["shop/web Ipv4"]
)]
#[case::endpoint_of_one_family(
    vec![Update::ApplySlice(slice("shop/cart-2", "cart", vec![remote("fd00::9")]))],
    &["shop/cart Ipv6"]
)]
#[case::last_slice_deleted(vec![Update::DeleteSlice(name("shop/web-1"))], &["shop/web Ipv4"])]
#[case::service_deleted(vec![Update::DeleteService(name("shop/web"))], &["-shop/web Ipv4"])]
#[case::deleted_and_back(
    vec![
        Update::DeleteService(name("shop/web")),
        Update::ApplyService(service("shop/web", &["10.96.0.1"])),
    ],
    &[]
)]
#[case::recreated_with_another_address(
    vec![
        Update::DeleteService(name("shop/web")),
        Update::ApplyService(service("shop/web", &["10.96.0.77"])),
    ],
    &["shop/web Ipv4"]
)]
#[case::cluster_ip_reused_by_another_service(
    vec![
        Update::DeleteService(name("shop/web")),
        Update::ApplyService(service("shop/new", &["10.96.0.1"])),
    ],
    &["shop/new Ipv4", "-shop/web Ipv4"]
)]
#[case::family_removed(
    vec![Update::ApplyService(service("shop/cart", &["fd00::2"]))],
    &["-shop/cart Ipv4"]
)]
#[case::family_added(
    vec![Update::ApplyService(service("shop/web", &["10.96.0.1", "fd00::1"]))],
    &["shop/web Ipv6"]
)]
#[case::many_updates_of_one_service(
    vec![
        Update::ApplySlice(slice("shop/web-1", "web", vec![remote("10.0.0.7")])),
        Update::ApplySlice(slice("shop/web-1", "web", vec![remote("10.0.0.8")])),
        Update::ApplyService(service("shop/web", &["10.96.0.1"]).node_port(30080)),
    ],
    &["shop/web Ipv4"]
)]
#[case::relist_of_services_without_one(
    vec![Update::ReplaceServices(vec![service("shop/web", &["10.96.0.1"])])],
    &["-shop/cart Ipv4", "-shop/cart Ipv6"]
)]
#[case::relist_of_slices_without_two(
    vec![Update::ReplaceSlices(vec![
        slice("shop/web-1", "web", vec![remote("10.0.0.1"), local("10.0.0.2")]),
    ])],
    &["shop/cart Ipv4", "shop/cart Ipv6"]
)]
#[case::everything_gone(
    vec![Update::ReplaceSlices(vec![]), Update::ReplaceServices(vec![])],
    &["-shop/cart Ipv4", "-shop/cart Ipv6", "-shop/web Ipv4"]
)]
#[case::node_without_zone(vec![Update::Node(Some(node(None))), Update::Node(None)], &[])]
fn updates_change(#[case] updates: Vec<Update>, #[case] expected: &[&str]) {
    let mut model = after(shop());
    for update in updates {
        model.update(update);
    }
    assert_eq!(names(&model.take_changes()), expected);
    assert!(model.take_changes().is_empty(), "taken once");
}

#[test]
fn slice_before_service_and_service_before_slice_are_the_same() {
    let service = || Update::ApplyService(service("shop/web", &["10.96.0.1"]));
    let slice = || Update::ApplySlice(slice("shop/web-1", "web", vec![remote("10.0.0.1")]));
    assert_eq!(after(vec![service(), slice()]).desired(), after(vec![slice(), service()]).desired());
    assert!(after(vec![slice()]).desired().is_empty());
}

#[test]
fn service_without_endpoints_is_served_with_empty_sets() {
    let desired = after(vec![Update::ApplyService(service("shop/web", &["10.96.0.1"]))]).desired();
    assert_eq!(desired.len(), 1);
    assert_eq!(desired[0].frontends.len(), 1);
    assert_eq!(desired[0].endpoints, Default::default());
}

#[test]
fn family_without_cluster_ip_is_not_served() {
    let service =
        service("shop/web", &["10.96.0.1"]).external_ip("2001:db8::1").load_balancer_ip("2001:db8::2");
    let desired = after(vec![Update::ApplyService(service.node_port(30080))]).desired();
    let families: Vec<_> = desired.iter().map(|port| port.name.family).collect();
    assert_eq!(families, [Ipv4]);
    let addresses: Vec<_> = desired[0].frontends.iter().map(|frontend| frontend.address).collect();
    assert_eq!(addresses, [ip("10.96.0.1"), ip("0.0.0.0")]);
}

#[test]
fn each_family_has_its_own_frontends_ranges_and_endpoints() {
    let mut service = service("shop/web", &["10.96.0.1", "fd00::1"])
        .node_port(30080)
        .external_ip("192.0.2.1")
        .load_balancer_ip("2001:db8::1");
    service.source_ranges = vec!["203.0.113.0/25".parse().unwrap()];
    let desired = after(vec![
        Update::ApplyService(service),
        Update::ApplySlice(slice("shop/web-1", "web", vec![remote("10.0.0.1")])),
        Update::ApplySlice(slice("shop/web-2", "web", vec![remote("fd00:10::1")])),
    ])
    .desired();
    let [v4, v6] = desired.as_slice() else { panic!("{desired:?}") };
    let addresses = |port: &crate::model::desired::DesiredPort| {
        port.frontends.iter().map(|frontend| frontend.address.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(addresses(v4), ["10.96.0.1", "0.0.0.0", "192.0.2.1"]);
    assert_eq!(addresses(v6), ["fd00::1", "::", "2001:db8::1"]);
    assert_eq!(shown(v4, &v4.endpoints.cluster), ["10.0.0.1:8080"]);
    assert_eq!(shown(v6, &v6.endpoints.cluster), ["[fd00:10::1]:8080"]);
    assert_eq!(v4.source_ranges.len(), 1);
    assert!(v6.source_ranges.is_empty());
}

/// loadBalancerSourceRanges restrict the frontends of kind [`FrontendKind::LoadBalancer`] alone, so
/// the kind decides who gets in.
#[rstest]
#[case::external_ip_only(&["192.0.2.1"], &[], FrontendKind::ExternalIp)]
#[case::load_balancer_address_only(&[], &["192.0.2.1"], FrontendKind::LoadBalancer)]
#[case::both(&["192.0.2.1"], &["192.0.2.1"], FrontendKind::LoadBalancer)]
fn an_address_of_two_kinds_is_served_as_the_one_with_source_ranges(
    #[case] external_ips: &[&str],
    #[case] load_balancer_ips: &[&str],
    #[case] kind: FrontendKind,
) {
    let mut service = service("shop/web", &["10.96.0.1"]);
    service.external_ips = external_ips.iter().map(|address| ip(address)).collect();
    service.load_balancer_ips = load_balancer_ips.iter().map(|address| ip(address)).collect();
    let desired = after(vec![Update::ApplyService(service)]).desired();
    let external: Vec<_> = desired[0].frontends[1..].iter().map(|one| (one.kind, one.address)).collect();
    assert_eq!(external, [(kind, ip("192.0.2.1"))]);
}

#[test]
fn slices_of_one_service_have_their_own_port_numbers() {
    let model = after(vec![
        Update::ApplyService(
            service("shop/web", &["10.96.0.1"])
                .ports(vec![port("http", 80), port("dns", 53).protocol(Protocol::Udp)]),
        ),
        Update::ApplySlice(
            slice("shop/web-1", "web", vec![remote("10.0.0.1")])
                .ports(vec![target("http", 8080), target("other", 9)]),
        ),
        Update::ApplySlice(
            slice("shop/web-2", "web", vec![remote("10.0.0.2")]).ports(vec![target("http", 9090)]),
        ),
        // The port has the name of the UDP port, but it is TCP.
        Update::ApplySlice(
            slice("shop/web-3", "web", vec![remote("10.0.0.3")]).ports(vec![target("dns", 5353)]),
        ),
    ]);
    assert_eq!(cluster(&model, "shop/web"), ["10.0.0.1:8080", "10.0.0.2:9090"]);
}

/// A set has the endpoints of all slices of a Service, because no slice has more than 1,000.
#[test]
fn thousands_of_endpoints_in_several_slices_are_one_set() {
    let of_slice = |number: u8| (0..=249).map(|last| remote(&format!("10.0.{number}.{last}"))).collect();
    let slices = (0..12)
        .map(|number| Update::ApplySlice(slice(&format!("shop/web-{number}"), "web", of_slice(number))));
    let service = Update::ApplyService(service("shop/web", &["10.96.0.1"]));
    let mut model = after(std::iter::once(service).chain(slices).collect());
    assert_eq!(cluster(&model, "shop/web").len(), 3_000);
    model.delete_slice(&name("shop/web-7"));
    model.take_changes();
    let left = cluster(&model, "shop/web");
    assert_eq!(left.len(), 2_750);
    assert!(left.iter().all(|endpoint| !endpoint.starts_with("10.0.7.")), "{left:?}");
}

#[test]
fn slice_that_moves_to_another_service_leaves_the_first() {
    let mut model = after(shop());
    model.apply_slice(slice("shop/web-1", "cart", vec![remote("10.0.0.1")]));
    assert_eq!(names(&model.take_changes()), ["shop/cart Ipv4", "shop/web Ipv4"]);
    assert_eq!(cluster(&model, "shop/web"), [""; 0]);
    assert_eq!(cluster(&model, "shop/cart"), ["10.0.0.1:8080", "10.0.0.3:8080", "[fd00::3]:8080"]);
}

#[test]
fn slice_of_another_namespace_is_not_mixed_up() {
    let mut model = after(shop());
    model.apply_slice(slice("other/web-1", "web", vec![remote("10.0.0.9")]));
    assert!(model.take_changes().is_empty());
    model.delete_slice(&name("other/web-1"));
    assert_eq!(cluster(&model, "shop/web"), ["10.0.0.2:8080", "10.0.0.1:8080"]);
}

#[rstest]
#[case::ready_before_terminating(remote("10.0.0.1"), remote("10.0.0.1").draining(), true)]
#[case::ready_before_unready(remote("10.0.0.1"), remote("10.0.0.1").unready(), true)]
#[case::running_before_terminating_even_if_unready(
    remote("10.0.0.1").unready(), remote("10.0.0.1").draining(), false
)]
fn of_a_duplicate_endpoint_the_better_counts(
    #[case] better: Endpoint,
    #[case] worse: Endpoint,
    #[case] used: bool,
) {
    for (first, second) in [(better.clone(), worse.clone()), (worse, better)] {
        let model = after(vec![
            Update::ApplyService(service("shop/web", &["10.96.0.1"])),
            Update::ApplySlice(slice("shop/web-1", "web", vec![first])),
            Update::ApplySlice(slice("shop/web-2", "web", vec![second])),
        ]);
        let expected: &[&str] = if used { &["10.0.0.1:8080"] } else { &[] };
        assert_eq!(cluster(&model, "shop/web"), expected);
    }
}

#[test]
fn a_duplicate_counts_as_soon_as_the_better_one_is_gone() {
    let mut model = after(vec![
        Update::ApplyService(service("shop/web", &["10.96.0.1"])),
        Update::ApplySlice(slice("shop/web-1", "web", vec![remote("10.0.0.1")])),
        Update::ApplySlice(slice("shop/web-2", "web", vec![remote("10.0.0.1").draining()])),
    ]);
    let is_terminating = |model: &Model| model.desired()[0].endpoints.all.iter().all(|one| one.terminating);
    assert!(!is_terminating(&model));
    model.delete_slice(&name("shop/web-1"));
    model.take_changes();
    assert_eq!(cluster(&model, "shop/web"), ["10.0.0.1:8080"]);
    assert!(is_terminating(&model));
}

fn frontends(model: &Model) -> Vec<String> {
    let ports = model.desired();
    let shown = |port: &crate::model::desired::DesiredPort| {
        let of = |frontend: &Frontend| format!("{}:{} {:?}", frontend.address, frontend.port, frontend.kind);
        let name = if port.name.port.is_empty() { port.name.protocol.name() } else { &port.name.port };
        port.frontends.iter().map(|frontend| format!("{name} {}", of(frontend))).collect::<Vec<_>>()
    };
    ports.iter().flat_map(|port| shown(port)).collect()
}

/// The type of a Service shows in its fields, because the API server gives and takes node ports and
/// addresses.
#[test]
fn frontends_follow_the_type_and_the_status_of_a_service() {
    let plain = || service("shop/web", &["10.96.0.1"]);
    let proxied = |address| {
        let mut service = plain().node_port(30080);
        service.proxied_load_balancer_ips.push(ip(address));
        service
    };
    let (cluster_ip, node_port) = ("TCP 10.96.0.1:80 ClusterIp", "TCP 0.0.0.0:30080 NodePort");
    let (first, second) = ("TCP 192.0.2.1:80 LoadBalancer", "TCP 192.0.2.2:80 LoadBalancer");
    let steps: [(Service, &[&str]); 8] = [
        (plain(), &[cluster_ip]),
        (plain().node_port(30080), &[cluster_ip, node_port]),
        (plain().node_port(30080).load_balancer_ip("192.0.2.1"), &[cluster_ip, node_port, first]),
        (plain().node_port(30080).load_balancer_ip("192.0.2.2"), &[cluster_ip, node_port, second]),
        (proxied("192.0.2.2"), &[cluster_ip, node_port]),
        // The Service has `allocateLoadBalancerNodePorts: false`.
        (plain().load_balancer_ip("192.0.2.1"), &[cluster_ip, first]),
        (plain().external_ip("192.0.2.3"), &[cluster_ip, "TCP 192.0.2.3:80 ExternalIp"]),
        (plain(), &[cluster_ip]),
    ];
    let mut model = Model::new(HERE);
    for (service, expected) in steps {
        model.apply_service(service);
        assert_eq!(names(&model.take_changes()), ["shop/web Ipv4"]);
        assert_eq!(frontends(&model), expected);
    }
    // The Service becomes ExternalName, and comes back with another address.
    model.delete_service(&name("shop/web"));
    assert_eq!(names(&model.take_changes()), ["-shop/web Ipv4"]);
    model.apply_service(service("shop/web", &["10.96.0.9"]));
    model.take_changes();
    assert_eq!(frontends(&model), ["TCP 10.96.0.9:80 ClusterIp"]);
}

#[test]
fn ports_that_swap_their_numbers_swap_their_frontends() {
    let with_numbers = |a: u16, b: u16| {
        let ports = vec![port("a", a).node_port(30000 + a), port("b", b).node_port(30000 + b)];
        service("shop/web", &["10.96.0.1"]).ports(ports)
    };
    let mut model = after(vec![Update::ApplyService(with_numbers(80, 81))]);
    model.apply_service(with_numbers(81, 80));
    assert_eq!(names(&model.take_changes()), ["shop/web:a Ipv4", "shop/web:b Ipv4"]);
    assert_eq!(
        frontends(&model),
        [
            "a 10.96.0.1:81 ClusterIp",
            "a 0.0.0.0:30081 NodePort",
            "b 10.96.0.1:80 ClusterIp",
            "b 0.0.0.0:30080 NodePort",
        ]
    );
    assert!(model.desired().iter().all(|port| port.unserved.is_empty()) && model.conflicts().is_empty());
}

#[test]
fn of_one_number_for_two_protocols_one_can_go() {
    let of = |protocols: &[Protocol]| {
        let ports = protocols.iter().map(|protocol| port("", 80).protocol(*protocol).node_port(30080));
        service("shop/web", &["10.96.0.1"]).ports(ports.collect())
    };
    let mut model = after(vec![Update::ApplyService(of(&[Protocol::Tcp, Protocol::Udp]))]);
    assert_eq!(frontends(&model).len(), 4, "no conflict");
    for (left, gone) in [(Protocol::Tcp, Protocol::Udp), (Protocol::Udp, Protocol::Tcp)] {
        model.apply_service(of(&[Protocol::Tcp, Protocol::Udp]));
        model.take_changes();
        model.apply_service(of(&[left]));
        let changes = model.take_changes();
        let removed: Vec<Protocol> = changes.removed.iter().map(|name| name.protocol).collect();
        assert_eq!((changes.changed.len(), removed), (0, vec![gone]));
        assert_eq!(frontends(&model).len(), 2);
    }
}

#[test]
fn local_endpoints_come_first_then_address_then_port() {
    let model = after(vec![
        Update::ApplyService(service("shop/web", &["10.96.0.1"])),
        Update::ApplySlice(
            slice("shop/web-1", "web", vec![remote("10.0.0.2"), remote("10.0.0.10"), local("10.0.0.9")])
                .ports(vec![target("", 9090), target("", 8080)]),
        ),
    ]);
    assert_eq!(
        cluster(&model, "shop/web"),
        [
            "10.0.0.9:8080",
            "10.0.0.9:9090",
            "10.0.0.2:8080",
            "10.0.0.2:9090",
            "10.0.0.10:8080",
            "10.0.0.10:9090"
        ]
    );
}

#[test]
fn one_endpoint_costs_one_port() {
    let mut updates = Vec::new();
    for number in 0..100 {
        let name = format!("shop/web-{number}");
        updates.push(Update::ApplyService(service(
            &name,
            &[&format!("10.96.0.{number}"), &format!("fd00::{number}")],
        )));
    }
    let mut model = after(updates);
    let before = model.ports_computed();
    model.apply_slice(slice("shop/web-7-a", "web-7", vec![remote("10.0.0.1")]));
    assert_eq!(names(&model.take_changes()), ["shop/web-7 Ipv4"]);
    assert_eq!(model.ports_computed() - before, 1);
}

#[test]
fn a_batch_computes_each_port_once() {
    let mut model = after(shop());
    let before = model.ports_computed();
    for number in 0..50 {
        model.apply_slice(slice("shop/web-1", "web", vec![remote(&format!("10.0.1.{number}"))]));
    }
    model.take_changes();
    assert_eq!(model.ports_computed() - before, 1);
}

#[test]
fn relist_without_changes_computes_nothing() {
    let mut model = after(shop());
    let before = model.ports_computed();
    let (mut services, mut slices) = (vec![], vec![]);
    for update in shop() {
        if let Update::ApplyService(service) = update {
            services.push(service);
        } else if let Update::ApplySlice(slice) = update {
            slices.push(slice);
        }
    }
    model.replace_services(services);
    model.replace_slices(slices);
    assert!(model.take_changes().is_empty());
    assert_eq!(model.ports_computed(), before);
}

#[test]
fn zone_change_computes_only_ports_with_hints_for_it() {
    let hinted = |zone| vec![remote("10.0.0.1").zones(&[zone]), remote("10.0.0.2").zones(&["elsewhere"])];
    let mut updates = shop();
    updates.extend([
        Update::Node(Some(node(Some("old")))),
        Update::ApplyService(service("zone/old", &["10.96.1.1", "fd00::1:1"])),
        Update::ApplySlice(slice("zone/old-1", "old", hinted("old"))),
        Update::ApplyService(service("zone/new", &["10.96.1.2"])),
        Update::ApplySlice(slice("zone/new-1", "new", hinted("new"))),
        Update::ApplyService(service("zone/third", &["10.96.1.3"])),
        Update::ApplySlice(slice("zone/third-1", "third", hinted("third"))),
    ]);
    let mut model = after(updates);
    let before = model.ports_computed();
    model.set_node(Some(node(Some("new"))));
    assert_eq!(names(&model.take_changes()), ["zone/new Ipv4", "zone/old Ipv4"]);
    assert_eq!(model.ports_computed() - before, 2);
    model.set_node(None);
    assert_eq!(names(&model.take_changes()), ["zone/new Ipv4"]);
    assert_eq!(model.ports_computed() - before, 3);
    assert!(model.node().is_none());
}

#[test]
fn ranges_of_service_addresses_are_known_and_change_no_port() {
    let cidr = |name: &str, ranges: &[&str]| ServiceCidr {
        name: name.into(),
        ranges: ranges.iter().map(|range| range.parse().unwrap()).collect(),
    };
    let shown =
        |model: &Model| model.service_cidrs().iter().flatten().map(ToString::to_string).collect::<Vec<_>>();
    let mut model = after(shop());
    assert_eq!(model.service_cidrs(), None);
    model
        .update(Update::ReplaceServiceCidrs(vec![cidr("kubernetes", &["10.96.0.0/12", "fd00:10:96::/112"])]));
    model.update(Update::ApplyServiceCidr(cidr("more", &["10.0.0.0/16", "10.96.0.0/12"])));
    assert_eq!(shown(&model), ["10.0.0.0/16", "10.96.0.0/12", "fd00:10:96::/112"]);
    model.update(Update::DeleteServiceCidr("kubernetes".into()));
    assert_eq!(shown(&model), ["10.0.0.0/16", "10.96.0.0/12"]);
    model.update(Update::ReplaceServiceCidrs(vec![]));
    assert_eq!(model.service_cidrs(), Some(Vec::new()));
    assert!(model.take_changes().is_empty());
}

/// Pods have an address of each family, and count once.
#[test]
fn health_checks_count_ready_endpoints_of_this_node() {
    let checked = |health_check_node_port| Service {
        health_check_node_port,
        ..service("shop/cart", &["10.96.0.2", "fd00::2"])
    };
    let changed = |model: &mut Model| -> Vec<Option<(u16, usize)>> {
        model.take_changes();
        let changed = model.take_health_checks().into_iter();
        changed.map(|(_, check)| check.map(|check| (check.port, check.local_ready))).collect()
    };
    let mut model = after(shop());
    assert_eq!(changed(&mut model), []);
    model.update(Update::ApplyService(checked(Some(32_000))));
    assert_eq!(changed(&mut model), [Some((32_000, 0))]);
    let not_ready = Endpoint { ready: false, serving: true, terminating: true, ..local("10.0.0.7") };
    let slices = [
        slice(
            "shop/cart-1",
            "cart",
            vec![local("10.0.0.3"), local("10.0.0.4"), not_ready, remote("10.0.0.9")],
        ),
        slice("shop/cart-2", "cart", vec![local("fd00::3"), local("fd00::4")]),
        slice("shop/cart-3", "cart", vec![local("10.0.0.3")]),
    ];
    for slice in slices {
        model.update(Update::ApplySlice(slice));
    }
    assert_eq!(changed(&mut model), [Some((32_000, 2))]);
    model.update(Update::ApplySlice(slice("shop/cart-4", "cart", vec![remote("10.0.0.8")])));
    assert_eq!(changed(&mut model), [], "an endpoint elsewhere changes no answer");
    model.update(Update::ApplyService(checked(Some(32_001))));
    assert_eq!(changed(&mut model), [Some((32_001, 2))]);
    model.update(Update::ApplyService(checked(None)));
    assert_eq!(changed(&mut model), [None]);
    model.update(Update::ApplyService(checked(Some(32_002))));
    model.update(Update::DeleteService(name("shop/cart")));
    assert_eq!(changed(&mut model), [], "nothing was reported of it meanwhile");
    model.update(Update::ApplyService(checked(Some(32_002))));
    assert_eq!(changed(&mut model), [Some((32_002, 2))]);
    model.update(Update::DeleteService(name("shop/cart")));
    assert_eq!(changed(&mut model), [None]);
}

/// Returns a model of a node whose process dials the API server at this address. The API server's
/// Service has an endpoint.
fn with_server(server: &str) -> Model {
    let mut model = Model::new(HERE).keeping_endpoints_of(Some(server.parse().unwrap()));
    model.apply_service(service("default/kubernetes", &["10.96.0.1"]).load_balancer_ip("192.0.2.100"));
    model.apply_slice(slice("default/kubernetes", "kubernetes", vec![remote("192.0.2.1")]));
    model.take_changes();
    model
}

#[rstest]
#[case::slice_without_endpoints(Update::ApplySlice(slice("default/kubernetes", "kubernetes", vec![])))]
#[case::slice_deleted(Update::DeleteSlice(name("default/kubernetes")))]
#[case::relist_without_the_slice(Update::ReplaceSlices(vec![]))]
#[case::endpoint_that_is_not_ready(
    Update::ApplySlice(slice("default/kubernetes", "kubernetes", vec![remote("192.0.2.1").dead()]))
)]
fn the_service_that_the_api_server_is_dialled_through_keeps_its_last_endpoints(#[case] gone: Update) {
    for (server, expected) in [
        ("10.96.0.1:80", &["192.0.2.1:8080"][..]),
        ("192.0.2.100:80", &["192.0.2.1:8080"]),
        // Nobody needs this Service to reach the API server.
        ("192.0.2.1:80", &[]),
        // A load balancer of the API server may lead other ports to other Services.
        ("192.0.2.100:6443", &[]),
    ] {
        let mut model = with_server(server);
        model.update(gone.clone());
        assert_eq!(model.take_changes().is_empty(), !expected.is_empty(), "{server}");
        assert_eq!(cluster(&model, "default/kubernetes"), expected, "{server}");

        model.apply_slice(slice("default/kubernetes", "kubernetes", vec![remote("192.0.2.2")]));
        model.take_changes();
        assert_eq!(cluster(&model, "default/kubernetes"), ["192.0.2.2:8080"], "{server}");
        model.delete_service(&name("default/kubernetes"));
        model.take_changes();
        assert_eq!(cluster(&model, "default/kubernetes"), [""; 0], "{server}");
    }
}
