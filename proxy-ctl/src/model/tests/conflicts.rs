//! Tests of frontends that several service ports claim.

use rstest::rstest;

use crate::model::{
    Model,
    desired::{Changes, DesiredPort, Frontend, FrontendKind, UnservedFrontend, UnservedReason},
    objects::{IpFamily::Ipv4, Protocol, Service},
    test_support::*,
};

fn model(services: Vec<Service>) -> Model {
    let mut model = Model::new(HERE);
    model.replace_services(services);
    model
}

fn frontends(ports: &[std::sync::Arc<DesiredPort>], service: &str) -> Vec<(FrontendKind, String, u16)> {
    let service = name(service);
    let ports = ports.iter().filter(|port| port.name.service == service);
    let shown = |frontend: &Frontend| (frontend.kind, frontend.address.to_string(), frontend.port);
    ports.flat_map(|port| &port.frontends).map(shown).collect()
}

const CLUSTER_IP: FrontendKind = FrontendKind::ClusterIp;
const NODE_PORT: FrontendKind = FrontendKind::NodePort;
const EXTERNAL_IP: FrontendKind = FrontendKind::ExternalIp;

#[test]
fn without_external_ips_nobody_claims_them() {
    let mut model = Model::new(HERE).without_external_ips();
    let external = service("a/old", &["10.96.0.1"]).created(1).external_ip("192.0.2.1");
    model.apply_service(external.load_balancer_ip("192.0.2.2").external_ip("192.0.2.2"));
    model.apply_service(service("b/young", &["10.96.0.2"]).created(2).load_balancer_ip("192.0.2.1"));
    model.take_changes();
    let of = |service| frontends(&model.desired(), service).split_off(1);
    assert_eq!(of("a/old"), [(FrontendKind::LoadBalancer, "192.0.2.2".to_owned(), 80)]);
    assert_eq!(of("b/young"), [(FrontendKind::LoadBalancer, "192.0.2.1".to_owned(), 80)]);
    assert!(model.conflicts().is_empty());
}

#[rstest]
#[case::older_wins(
    service("a/young", &["10.96.0.1"]).created(2).node_port(30080),
    service("b/old", &["10.96.0.2"]).created(1).node_port(30080),
    "b/old"
)]
#[case::of_the_same_age_the_first_namespace_wins(
    service("b/a", &["10.96.0.1"]).node_port(30080),
    service("a/b", &["10.96.0.2"]).node_port(30080),
    "a/b"
)]
#[case::in_the_same_namespace_the_first_name_wins(
    service("a/b", &["10.96.0.1"]).node_port(30080),
    service("a/a", &["10.96.0.2"]).node_port(30080),
    "a/a"
)]
fn one_of_two_gets_the_node_port(#[case] first: Service, #[case] second: Service, #[case] winner: &str) {
    let loser = if first.name == name(winner) { second.name.clone() } else { first.name.clone() };
    for services in [vec![first.clone(), second.clone()], vec![second, first]] {
        let mut model = Model::new(HERE);
        for service in services {
            model.apply_service(service);
            model.take_changes();
        }
        let kinds = |service: &str| {
            let frontends = frontends(&model.desired(), service);
            frontends.into_iter().map(|(kind, ..)| kind).collect::<Vec<_>>()
        };
        assert_eq!(kinds(winner), [CLUSTER_IP, NODE_PORT]);
        assert_eq!(kinds(&loser.to_string()), [CLUSTER_IP]);
        let conflicts = model.conflicts();
        assert_eq!(conflicts.len(), 1);
        assert_eq!(conflicts[0].address, ip("0.0.0.0"));
        assert_eq!(conflicts[0].port, 30080);
        assert_eq!(conflicts[0].winner, port_name(winner, "", Ipv4));
        assert_eq!(conflicts[0].losers, [port_name(&loser.to_string(), "", Ipv4)]);
    }
}

const LOAD_BALANCER: FrontendKind = FrontendKind::LoadBalancer;

fn reasons(ports: &[std::sync::Arc<DesiredPort>], service: &str) -> Vec<(FrontendKind, UnservedReason)> {
    let service = name(service);
    let ports = ports.iter().filter(|port| port.name.service == service);
    ports.flat_map(|port| &port.unserved).map(|one| (one.frontend.kind, one.reason.clone())).collect()
}

#[rstest]
#[case::external_ip(service("a/thief", &["10.96.0.1"]).external_ip("10.96.0.2"), EXTERNAL_IP)]
#[case::load_balancer_ip(service("a/thief", &["10.96.0.1"]).load_balancer_ip("10.96.0.2"), LOAD_BALANCER)]
#[case::on_another_port(
    service("a/thief", &["10.96.0.1"]).ports(vec![port("", 81)]).external_ip("10.96.0.2"), EXTERNAL_IP
)]
fn nobody_takes_the_cluster_ip_of_another(#[case] thief: Service, #[case] kind: FrontendKind) {
    let victim = service("b/victim", &["10.96.0.2"]).created(9);
    for services in [vec![thief.clone(), victim.clone()], vec![victim.clone(), thief.clone()]] {
        let mut model = Model::new(HERE);
        for service in services {
            model.apply_service(service);
            model.take_changes();
        }
        let desired = model.desired();
        assert_eq!(frontends(&desired, "b/victim"), [(CLUSTER_IP, "10.96.0.2".into(), 80)]);
        assert_eq!(frontends(&desired, "a/thief").len(), 1, "only its own ClusterIP");
        let reason = UnservedReason::ClusterIpOf(name("b/victim"));
        assert_eq!(reasons(&desired, "a/thief"), [(kind, reason)]);

        model.delete_service(&name("b/victim"));
        assert_eq!(changed(&model.take_changes()), ["a/thief"]);
        assert_eq!(reasons(&model.desired(), "a/thief"), []);
    }
}

#[test]
fn between_external_addresses_the_older_service_wins_whatever_their_kind() {
    let mut model = model(vec![
        service("a/young", &["10.96.0.1"]).created(2).external_ip("192.0.2.1"),
        service("b/old", &["10.96.0.2"]).created(1).load_balancer_ip("192.0.2.1"),
    ]);
    model.take_changes();
    let owner = UnservedReason::OwnedBy(port_name("b/old", "", Ipv4));
    assert_eq!(reasons(&model.desired(), "a/young"), [(EXTERNAL_IP, owner)]);
}

#[rstest]
fn special_addresses_are_not_served(
    #[values(
        "127.0.0.1",
        "127.8.9.1",
        "169.254.169.254",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "febf::1",
        "ff02::1"
    )]
    address: &str,
) {
    let service = service("a/a", &["10.96.0.1", "fd00::1"]);
    let mut model = model(vec![service.external_ip(address).load_balancer_ip(address)]);
    model.take_changes();
    let desired = model.desired();
    assert!(frontends(&desired, "a/a").iter().all(|(kind, ..)| *kind == CLUSTER_IP), "{desired:?}");
    let special = UnservedReason::SpecialAddress;
    assert_eq!(reasons(&desired, "a/a"), [(EXTERNAL_IP, special.clone()), (LOAD_BALANCER, special)]);
}

fn changed(changes: &Changes) -> Vec<String> {
    changes.changed.iter().map(|port| port.name.to_string()).collect()
}

#[test]
fn when_the_winner_goes_the_loser_gets_the_frontend() {
    let winner = service("a/a", &["10.96.0.1"]).external_ip("192.0.2.1");
    let loser = service("b/b", &["10.96.0.2"]).external_ip("192.0.2.1");
    let mut model = model(vec![winner.clone(), loser]);
    model.take_changes();
    assert_eq!(frontends(&model.desired(), "b/b"), [(CLUSTER_IP, "10.96.0.2".into(), 80)]);

    model.delete_service(&winner.name);
    let changes = model.take_changes();
    assert_eq!(changes.removed, [port_name("a/a", "", Ipv4)]);
    assert_eq!(changed(&changes), ["b/b"]);
    assert_eq!(
        frontends(&changes.changed, "b/b"),
        [(CLUSTER_IP, "10.96.0.2".into(), 80), (EXTERNAL_IP, "192.0.2.1".into(), 80)]
    );
    assert_eq!(model.conflicts(), []);
}

#[test]
fn when_an_older_claimant_comes_both_change() {
    let mut model = model(vec![service("a/a", &["10.96.0.1"]).created(5).node_port(30080)]);
    model.take_changes();
    model.apply_service(service("b/b", &["10.96.0.2"]).created(4).node_port(30080));
    let changes = model.take_changes();
    assert_eq!(changed(&changes), ["a/a", "b/b"]);
    assert_eq!(frontends(&changes.changed, "a/a"), [(CLUSTER_IP, "10.96.0.1".into(), 80)]);
}

#[test]
fn a_node_port_that_moves_to_another_service_changes_both_in_one_step() {
    let (a, b) = (service("a/a", &["10.96.0.1"]), service("b/b", &["10.96.0.2"]));
    let mut model = model(vec![a.clone().node_port(30080), b.clone()]);
    model.take_changes();
    // The new owner of the node port is reported before the former one has given it up, and it has
    // the lower precedence.
    model.apply_service(b.node_port(30080));
    model.apply_service(a);
    let changes = model.take_changes();
    assert_eq!(changed(&changes), ["a/a", "b/b"]);
    assert_eq!(frontends(&changes.changed, "a/a"), [(CLUSTER_IP, "10.96.0.1".into(), 80)]);
    assert_eq!(
        frontends(&changes.changed, "b/b"),
        [(CLUSTER_IP, "10.96.0.2".into(), 80), (NODE_PORT, "0.0.0.0".into(), 30080)]
    );
}

#[test]
fn three_claimants_inherit_in_order() {
    let claimant = |text, created, address| service(text, &[address]).created(created).node_port(30080);
    let mut model = model(vec![
        claimant("c/c", 1, "10.96.0.3"),
        claimant("a/a", 3, "10.96.0.1"),
        claimant("b/b", 2, "10.96.0.2"),
    ]);
    model.take_changes();
    let losers = |model: &Model| -> Vec<String> {
        model.conflicts().iter().flat_map(|conflict| &conflict.losers).map(ToString::to_string).collect()
    };
    assert_eq!(losers(&model), ["b/b", "a/a"]);
    // A loser that goes changes nothing for the others.
    model.delete_service(&name("b/b"));
    assert_eq!(changed(&model.take_changes()), [""; 0]);
    assert_eq!(losers(&model), ["a/a"]);
    model.delete_service(&name("c/c"));
    assert_eq!(changed(&model.take_changes()), ["a/a"]);
    assert_eq!(losers(&model), [""; 0]);
}

#[rstest]
#[case::other_protocol(Protocol::Udp, 30080)]
#[case::other_number(Protocol::Tcp, 30081)]
fn what_differs_is_no_conflict(#[case] protocol: Protocol, #[case] number: u16) {
    let mut model = model(vec![
        service("a/a", &["10.96.0.1"]).node_port(30080),
        service("b/b", &["10.96.0.2"]).ports(vec![port("", 80).protocol(protocol).node_port(number)]),
    ]);
    model.take_changes();
    assert_eq!(model.conflicts(), []);
}

#[test]
fn an_address_listed_twice_is_one_frontend() {
    let mut model =
        model(vec![service("a/a", &["10.96.0.1"]).load_balancer_ip("192.0.2.1").external_ip("192.0.2.1")]);
    let changes = model.take_changes();
    assert_eq!(
        frontends(&changes.changed, "a/a"),
        [(CLUSTER_IP, "10.96.0.1".into(), 80), (LOAD_BALANCER, "192.0.2.1".into(), 80)]
    );
    assert_eq!(model.conflicts(), []);
}

#[test]
fn a_port_names_who_owns_its_frontend_until_it_owns_it() {
    let node_port = |text, ip: &str, created| service(text, &[ip]).created(created).node_port(30080);
    let [old, middle, young] =
        [("a/old", "10.96.0.1", 1), ("a/middle", "10.96.0.2", 2), ("a/young", "10.96.0.3", 3)]
            .map(|(text, ip, created)| node_port(text, ip, created));
    let mut model = model(vec![old, middle, young]);
    let owners = |model: &mut Model| -> Vec<(String, String)> {
        model.take_changes();
        let ports = model.desired();
        let unserved = ports.iter().flat_map(|port| port.unserved.iter().map(move |one| (port, one)));
        let owner = |(port, unserved): (&std::sync::Arc<DesiredPort>, &UnservedFrontend)| {
            assert_eq!((unserved.frontend.kind, unserved.frontend.port), (NODE_PORT, 30080));
            let UnservedReason::OwnedBy(owner) = &unserved.reason else { panic!("{unserved:?}") };
            (port.name.to_string(), owner.to_string())
        };
        unserved.map(owner).collect()
    };
    let pair = |port: &str, owner: &str| (port.to_owned(), owner.to_owned());
    assert_eq!(owners(&mut model), [pair("a/middle", "a/old"), pair("a/young", "a/old")]);
    model.delete_service(&name("a/old"));
    assert_eq!(owners(&mut model), [pair("a/young", "a/middle")]);
    model.delete_service(&name("a/middle"));
    assert_eq!(owners(&mut model), []);
}

#[test]
fn a_load_balancer_address_that_is_not_virtual_is_named_and_not_served() {
    let proxied = vec![ip("203.0.113.7"), ip("2001:db8::7")];
    let mut model =
        model(vec![Service { proxied_load_balancer_ips: proxied, ..service("a/web", &["10.96.0.1"]) }]);
    let port = model.take_changes().changed.remove(0);
    assert_eq!(port.frontends.len(), 1);
    let frontend = Frontend { kind: FrontendKind::LoadBalancer, address: ip("203.0.113.7"), port: 80 };
    assert_eq!(*port.unserved, [UnservedFrontend { frontend, reason: UnservedReason::NotVirtual }]);
}
