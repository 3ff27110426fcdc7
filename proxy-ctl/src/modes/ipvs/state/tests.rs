use std::sync::Arc;

use rstest::rstest;

use super::*;
use crate::model::{
    objects::{IpFamily, Protocol},
    test_support::{ip, port_name},
};

fn socket(address: &str, protocol: Protocol) -> VirtualSocket {
    VirtualSocket { protocol: protocol.number().into(), address: address.parse().unwrap() }
}

fn round_robin() -> Balancing {
    Balancing { scheduler: "rr".into(), affinity_seconds: None, by_source_port: false }
}

fn server(destinations: &[&str]) -> Server {
    let destinations = destinations.iter().map(|address| address.parse().unwrap()).collect();
    Server { balancing: round_robin(), destinations }
}

fn name(service: &str) -> ServicePortName {
    port_name(service, "", IpFamily::Ipv4)
}

const WEB: &str = "10.96.0.1:80";

fn web(destinations: &[&str]) -> PortObjects {
    let at = socket(WEB, Protocol::Tcp);
    let set = |role| Set { role, family: IpFamily::Ipv4 };
    PortObjects {
        servers: [(at, (Rank::Address, server(destinations)))].into(),
        addresses: [at.address.ip()].into(),
        members: [
            (set(SetRole::ClusterIp), Member::Socket(at)),
            (set(SetRole::DeviceAddresses), Member::Address(at.address.ip())),
        ]
        .into(),
        ..PortObjects::default()
    }
}

fn wanted(ports: &[(&str, PortObjects)]) -> Wanted {
    let mut wanted = Wanted::default();
    for (service, objects) in ports {
        wanted.set(&name(service), Some(objects.clone()), &mut BTreeSet::new());
    }
    wanted
}

/// Returns what the kernel has after everything is written.
fn written(wanted: &Wanted) -> KernelObjects {
    let mut objects = KernelObjects::default();
    for change in differences(wanted, &objects.clone(), wanted.keys()) {
        objects.record(change);
    }
    objects
}

pub(in crate::modes::ipvs) fn shown(changes: &[Change]) -> Vec<String> {
    let shown = |change: &Change| match change {
        Change::Server(ServerChange::Create(socket, _)) => format!("create {socket}"),
        Change::Server(ServerChange::Set(socket, _)) => format!("set {socket}"),
        Change::Server(ServerChange::Remove(socket)) => format!("remove {socket}"),
        Change::Server(ServerChange::AddDestination(_, to)) => format!("add {to}"),
        Change::Server(ServerChange::UseDestination(_, to, true)) => format!("use {to}"),
        Change::Server(ServerChange::UseDestination(_, to, false)) => format!("drain {to}"),
        Change::Server(ServerChange::RemoveDestination(_, to)) => format!("remove {to}"),
        Change::Address(AddressChange::Add(address)) => format!("bind {address}"),
        Change::Address(AddressChange::Remove(address)) => format!("unbind {address}"),
        Change::Member(set, MemberChange::Add(_)) => format!("into {}", set.name()),
        Change::Member(set, MemberChange::Remove(_)) => format!("out of {}", set.name()),
    };
    changes.iter().map(shown).collect()
}

const ONE: &str = "10.244.0.1:8080";
const OTHER: &str = "10.244.1.1:8080";

#[test]
fn a_virtual_server_is_reached_when_all_of_it_is_there_and_no_longer_when_it_goes() {
    let wanted = wanted(&[("default/web", web(&[ONE]))]);
    let changes = differences(&wanted, &KernelObjects::default(), wanted.keys());
    assert_eq!(
        shown(&changes),
        [
            "into KUBE-CLUSTER-IP",
            "create 10.96.0.1:80/TCP",
            "add 10.244.0.1:8080",
            "bind 10.96.0.1",
            "into KUBE-IPVS-IPS",
        ]
    );
    let objects = written(&wanted);
    let nothing = Wanted::default();
    assert_eq!(
        shown(&differences(&nothing, &objects, objects.keys())),
        ["out of KUBE-IPVS-IPS", "unbind 10.96.0.1", "remove 10.96.0.1:80/TCP", "out of KUBE-CLUSTER-IP"]
    );
}

#[test]
fn what_is_written_is_not_written_again() {
    let wanted = wanted(&[("default/web", web(&[ONE, OTHER]))]);
    let objects = written(&wanted);
    let keys: BTreeSet<Key> = wanted.keys().chain(objects.keys()).collect();
    assert_eq!(differences(&wanted, &objects, keys), []);
}

#[test]
fn an_address_that_kube_proxy_has_added_becomes_as_ours() {
    let wanted = wanted(&[("default/web", web(&[ONE]))]);
    let mut objects = written(&wanted);
    objects.addresses.values_mut().for_each(|is_ours| *is_ours = false);
    let changes = differences(&wanted, &objects, wanted.keys());
    assert_eq!(shown(&changes), ["bind 10.96.0.1"]);
    changes.into_iter().for_each(|change| objects.record(change));
    assert_eq!(objects, written(&wanted));
}

#[rstest]
#[case::tcp_goes_on(Protocol::Tcp, true, Some("drain 10.244.1.1:8080"))]
#[case::tcp_that_goes_on_is_left(Protocol::Tcp, false, None)]
#[case::udp_ends(Protocol::Udp, true, Some("remove 10.244.1.1:8080"))]
#[case::udp_that_others_have_quiesced_ends(Protocol::Udp, false, Some("remove 10.244.1.1:8080"))]
#[case::sctp_ends(Protocol::Sctp, true, Some("remove 10.244.1.1:8080"))]
fn connections_to_an_endpoint_that_is_gone(
    #[case] protocol: Protocol,
    #[case] is_used: bool,
    #[case] expected: Option<&str>,
) {
    let destinations = [(ONE.parse().unwrap(), true), (OTHER.parse().unwrap(), is_used)].into();
    let programmed = ProgrammedServer { balancing: round_robin(), destinations };
    let mut changes = Vec::new();
    server_changes(socket(WEB, protocol), Some(&server(&[ONE])), Some(&programmed), &mut changes);
    assert_eq!(shown(&changes), Vec::from_iter(expected));
}

#[test]
fn an_endpoint_that_comes_back_is_used_again() {
    let destinations = [(ONE.parse().unwrap(), false)].into();
    let programmed = ProgrammedServer { balancing: round_robin(), destinations };
    let mut changes = Vec::new();
    server_changes(socket(WEB, Protocol::Tcp), Some(&server(&[ONE])), Some(&programmed), &mut changes);
    assert_eq!(shown(&changes), ["use 10.244.0.1:8080"]);
}

#[test]
fn another_way_to_balance_leaves_destinations_alone() {
    let destinations = [(ONE.parse().unwrap(), true)].into();
    let balancing = Balancing { scheduler: Arc::from("wlc"), ..round_robin() };
    let programmed = ProgrammedServer { balancing, destinations };
    let mut changes = Vec::new();
    server_changes(socket(WEB, Protocol::Tcp), Some(&server(&[ONE])), Some(&programmed), &mut changes);
    assert_eq!(shown(&changes), ["set 10.96.0.1:80/TCP"]);
}

#[test]
fn only_what_a_change_touches_is_compared() {
    let mut wanted = wanted(&[("default/web", web(&[ONE]))]);
    let objects = KernelObjects::default();
    let mut touched = BTreeSet::new();
    wanted.set(&name("default/web"), Some(web(&[ONE])), &mut touched);
    assert!(touched.is_empty(), "{touched:?}");
    wanted.set(&name("default/web"), Some(web(&[OTHER])), &mut touched);
    assert!(touched.contains(&Key::Server(socket(WEB, Protocol::Tcp))));
    assert!(!differences(&wanted, &objects, touched).is_empty());
}

#[test]
fn what_two_service_ports_share_stays_until_both_are_gone() {
    let mut wanted = wanted(&[("default/one", web(&[ONE])), ("default/two", web(&[ONE]))]);
    let objects = written(&wanted);
    let mut touched = BTreeSet::new();
    wanted.set(&name("default/one"), None, &mut touched);
    assert_eq!(differences(&wanted, &objects, touched.clone()), []);
    wanted.set(&name("default/two"), None, &mut touched);
    assert_eq!(differences(&wanted, &objects, touched).len(), 4);
    assert_eq!(wanted.keys().count(), 0);
}

#[test]
fn a_node_port_precedes_an_external_address_of_another_service() {
    let at = socket("192.0.2.10:30080", Protocol::Tcp);
    let of = |rank, destination| PortObjects {
        servers: [(at, (rank, server(&[destination])))].into(),
        ..PortObjects::default()
    };
    let wanted =
        wanted(&[("a/external", of(Rank::Address, ONE)), ("b/node-port", of(Rank::NodePort, OTHER))]);
    let (name, server) = wanted.server(at).unwrap();
    assert_eq!(name.service.to_string(), "b/node-port");
    assert_eq!(server.destinations, [OTHER.parse().unwrap()].into());
}

#[test]
fn destinations_that_are_drained_are_known() {
    let mut objects = written(&wanted(&[("default/web", web(&[ONE, OTHER]))]));
    assert_eq!(objects.draining().count(), 0);
    let at = socket(WEB, Protocol::Tcp);
    objects.record(Change::Server(ServerChange::UseDestination(at, OTHER.parse().unwrap(), false)));
    assert_eq!(objects.draining().collect::<Vec<_>>(), [at]);
    objects.record(Change::Server(ServerChange::RemoveDestination(at, OTHER.parse().unwrap())));
    assert_eq!(objects.draining().count(), 0);
    assert_eq!(objects.addresses, [(ip("10.96.0.1"), true)].into());
}

#[test]
fn source_ranges_of_a_served_address_restrict_it_once_all_of_them_are_there() {
    let load_balancer = socket("203.0.113.80:80", Protocol::Tcp);
    let from = |network: &str| Member::SocketAndNetwork(load_balancer, network.parse().unwrap());
    let restriction = [
        (SetRole::LoadBalancerRestricted, Member::Socket(load_balancer)),
        (SetRole::LoadBalancerFromItself, from("203.0.113.80/32")),
        (SetRole::LoadBalancerSources, from("198.51.100.0/24")),
    ];
    let restriction = restriction.map(|(role, member)| (Set { role, family: IpFamily::Ipv4 }, member));
    let mut restricted = web(&[ONE]);
    restricted.members.extend(restriction);
    let (open, restricted) = (wanted(&[("a/web", web(&[ONE]))]), wanted(&[("a/web", restricted)]));
    let [sources, itself, restricting] =
        ["KUBE-LOAD-BALANCER-SOURCE-CIDR", "KUBE-LOAD-BALANCER-SOURCE-IP", "KUBE-LOAD-BALANCER-FW"];
    assert_eq!(
        shown(&differences(&restricted, &written(&open), restricted.keys())),
        [itself, sources, restricting].map(|set| format!("into {set}"))
    );
    assert_eq!(
        shown(&differences(&open, &written(&restricted), restricted.keys())),
        [restricting, itself, sources].map(|set| format!("out of {set}"))
    );
}
