//! kube-proxy's behaviour by who opens a connection to what (`TestInternalExternalMasquerade` and others of its tests).

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use rstest::rstest;

use super::{
    super::names::PortChain,
    host, ports,
    trace::{Connection, Fate, Rules},
};
use crate::{
    config::PortRange,
    dataplane::{Host, LocalTraffic},
    model::{
        objects::{Endpoint, IpFamily, Protocol, Service, TrafficPolicy},
        test_support::{ip, local, remote, service},
    },
};

const POD: &str = "10.1.0.9";
const NODE: &str = "192.168.0.2";
const OUTSIDE: &str = "203.0.113.2";
const CLUSTER_IP: &str = "172.30.0.41:80";
const NODE_PORT: &str = "192.168.0.2:30080";
const LOAD_BALANCER: &str = "1.2.3.4:80";
const EXTERNAL_IP: &str = "192.168.99.11:80";

const HERE: &str = "10.180.0.1:8080";
const THERE: &str = "10.180.1.1:8080";

fn web() -> Service {
    service("default/web", &["172.30.0.41"])
        .node_port(30080)
        .load_balancer_ip("1.2.3.4")
        .external_ip("192.168.99.11")
}

fn here() -> Endpoint {
    local("10.180.0.1")
}

fn there() -> Endpoint {
    remote("10.180.1.1")
}

fn tcp(from: &str, to: &str) -> Connection {
    Connection { from: ip(from), to: to.parse().unwrap(), protocol: Protocol::Tcp, interface: "eth0" }
}

fn rules(host: &Host, service: Service, endpoints: Vec<Endpoint>) -> Rules {
    let ports = ports(service, endpoints);
    let ports: Vec<_> = ports.iter().map(AsRef::as_ref).collect();
    let family = ports.first().map_or(IpFamily::Ipv4, |port| port.name.family);
    Rules::new(family, host, &ports)
}

fn answered(endpoints: &[&str], masqueraded: bool) -> BTreeSet<Fate> {
    endpoints.iter().map(|text| Fate::Answered(text.parse().unwrap(), masqueraded)).collect()
}

const EXTERNAL: [&str; 3] = [NODE_PORT, LOAD_BALANCER, EXTERNAL_IP];

#[derive(Clone, Copy)]
enum Policies {
    Cluster,
    ExternalLocal,
    InternalLocal,
}

impl Policies {
    fn of(self, service: Service) -> Service {
        let (internal, external) = match self {
            Self::Cluster => (TrafficPolicy::Cluster, TrafficPolicy::Cluster),
            Self::ExternalLocal => (TrafficPolicy::Cluster, TrafficPolicy::Local),
            Self::InternalLocal => (TrafficPolicy::Local, TrafficPolicy::Cluster),
        };
        service.policies(internal, external)
    }
}

use Policies::{Cluster, ExternalLocal, InternalLocal};

const ALL: &[&str] = &[HERE, THERE];
const LOCAL: &[&str] = &[HERE];

#[rstest]
#[case::pod_to_cluster_ip(POD, &[CLUSTER_IP], Cluster, ALL, false)]
#[case::pod_to_external(POD, &EXTERNAL, Cluster, ALL, true)]
#[case::node_to_cluster_ip(NODE, &[CLUSTER_IP], Cluster, ALL, true)]
#[case::node_to_external(NODE, &EXTERNAL, Cluster, ALL, true)]
#[case::outside_to_cluster_ip(OUTSIDE, &[CLUSTER_IP], Cluster, ALL, true)]
#[case::outside_to_external(OUTSIDE, &EXTERNAL, Cluster, ALL, true)]
#[case::pod_to_cluster_ip(POD, &[CLUSTER_IP], ExternalLocal, ALL, false)]
#[case::pod_to_external_is_short_circuited(POD, &EXTERNAL, ExternalLocal, ALL, false)]
#[case::node_to_cluster_ip(NODE, &[CLUSTER_IP], ExternalLocal, ALL, true)]
#[case::node_to_external_is_short_circuited(NODE, &EXTERNAL, ExternalLocal, ALL, true)]
#[case::outside_to_cluster_ip(OUTSIDE, &[CLUSTER_IP], ExternalLocal, ALL, true)]
#[case::outside_to_external(OUTSIDE, &EXTERNAL, ExternalLocal, LOCAL, false)]
#[case::pod_to_cluster_ip(POD, &[CLUSTER_IP], InternalLocal, LOCAL, false)]
#[case::pod_to_external(POD, &EXTERNAL, InternalLocal, ALL, true)]
#[case::node_to_cluster_ip(NODE, &[CLUSTER_IP], InternalLocal, LOCAL, true)]
#[case::node_to_external(NODE, &EXTERNAL, InternalLocal, ALL, true)]
#[case::outside_to_cluster_ip(OUTSIDE, &[CLUSTER_IP], InternalLocal, LOCAL, true)]
#[case::outside_to_external(OUTSIDE, &EXTERNAL, InternalLocal, ALL, true)]
fn who_answers_and_whom_it_sees(
    #[case] from: &str,
    #[case] to: &[&str],
    #[case] policies: Policies,
    #[case] endpoints: &[&str],
    #[case] masqueraded: bool,
) {
    let mut rules = rules(&host(), policies.of(web()), vec![here(), there()]);
    for to in to {
        assert_eq!(rules.fates(tcp(from, to)), answered(endpoints, masqueraded), "{from} to {to}");
    }
}

#[rstest]
#[case::cluster_ip(POD, CLUSTER_IP, Cluster, ALL, false)]
#[case::cluster_ip_from_outside(OUTSIDE, CLUSTER_IP, Cluster, ALL, false)]
#[case::pods_get_no_short_circuit(POD, LOAD_BALANCER, ExternalLocal, LOCAL, false)]
#[case::the_node_does(NODE, LOAD_BALANCER, ExternalLocal, ALL, true)]
fn without_a_way_to_tell_pods(
    #[case] from: &str,
    #[case] to: &str,
    #[case] policies: Policies,
    #[case] endpoints: &[&str],
    #[case] masqueraded: bool,
) {
    let host = Host { local_traffic: LocalTraffic::default(), ..host() };
    let mut rules = rules(&host, policies.of(web()), vec![here(), there()]);
    assert_eq!(rules.fates(tcp(from, to)), answered(endpoints, masqueraded));
}

#[rstest]
#[case::pod(POD, "eth0", true)]
#[case::bridge(POD, "cni0", false)]
#[case::other_bridge(POD, "cni01", true)]
fn pods_are_told_by_their_bridge(
    #[case] from: &str,
    #[case] interface: &'static str,
    #[case] masqueraded: bool,
) {
    let host = Host { local_traffic: LocalTraffic::FromBridge("cni0".into()), ..host() };
    let mut rules = rules(&host, web(), vec![there()]);
    let connection = Connection { interface, ..tcp(from, CLUSTER_IP) };
    assert_eq!(rules.fates(connection), answered(&[THERE], masqueraded));
}

#[rstest]
#[case::bridge("cni0", false)]
#[case::longer("cni01", false)]
#[case::other("eth0", true)]
fn pods_are_told_by_the_prefix_of_their_interface(
    #[case] interface: &'static str,
    #[case] masqueraded: bool,
) {
    let host = Host { local_traffic: LocalTraffic::FromInterfacePrefix("cni".into()), ..host() };
    let mut rules = rules(&host, web(), vec![there()]);
    let connection = Connection { interface, ..tcp(POD, CLUSTER_IP) };
    assert_eq!(rules.fates(connection), answered(&[THERE], masqueraded));
}

#[test]
fn masquerade_all_masquerades_pods_too() {
    let mut rules = rules(&Host { masquerade_all: true, ..host() }, web(), vec![there()]);
    assert_eq!(rules.fates(tcp(POD, CLUSTER_IP)), answered(&[THERE], true));
}

#[test]
fn a_pod_that_reaches_itself_is_masqueraded() {
    let mut rules = rules(&host(), web(), vec![here(), there()]);
    let expected = [answered(&[HERE], true), answered(&[THERE], false)].concat_sets();
    assert_eq!(rules.fates(tcp("10.180.0.1", CLUSTER_IP)), expected);
}

/// By its mark, and because it reaches itself.
#[rstest]
#[case::client_of_a_node_port(OUTSIDE, NODE_PORT)]
#[case::hairpin("10.180.0.1", CLUSTER_IP)]
fn masqueraded_sources_get_the_ports_of_the_node(#[case] from: &str, #[case] to: &str) {
    for (masquerade_ports, expected) in
        [(None, None), (Some(PortRange { first: 32_768, last: 60_999 }), Some([32_768, 60_999]))]
    {
        let mut rules = rules(&Host { masquerade_ports, ..host() }, web(), vec![here()]);
        assert_eq!(rules.fates(tcp(from, to)), answered(&[HERE], true));
        assert_eq!(rules.masquerade_ports, expected);
    }
}

trait ConcatSets {
    fn concat_sets(self) -> BTreeSet<Fate>;
}

impl ConcatSets for [BTreeSet<Fate>; 2] {
    fn concat_sets(self) -> BTreeSet<Fate> {
        self.into_iter().flatten().collect()
    }
}

#[rstest]
#[case::nothing_anywhere(Cluster, vec![], OUTSIDE, CLUSTER_IP, Fate::Rejected)]
#[case::nothing_anywhere_node_port(Cluster, vec![], OUTSIDE, NODE_PORT, Fate::Rejected)]
#[case::nothing_anywhere_load_balancer(Cluster, vec![], POD, LOAD_BALANCER, Fate::Rejected)]
#[case::nothing_anywhere_external_ip(Cluster, vec![], NODE, EXTERNAL_IP, Fate::Rejected)]
#[case::nothing_anywhere_own_node_port(Cluster, vec![], NODE, NODE_PORT, Fate::Rejected)]
#[case::not_serving(Cluster, vec![there().dead()], POD, CLUSTER_IP, Fate::Rejected)]
#[case::internal_local_without_local(InternalLocal, vec![there()], POD, CLUSTER_IP, Fate::Dropped)]
#[case::external_local_without_local(ExternalLocal, vec![there()], OUTSIDE, LOAD_BALANCER, Fate::Dropped)]
#[case::external_local_without_local_node_port(ExternalLocal, vec![there()], OUTSIDE, NODE_PORT, Fate::Dropped)]
#[case::another_port_of_a_cluster_ip(Cluster, vec![there()], POD, "172.30.0.41:81", Fate::Rejected)]
#[case::another_port_of_an_external_ip(Cluster, vec![there()], POD, "192.168.99.11:81", Fate::Untouched)]
#[case::node_port_of_another_address(Cluster, vec![there()], POD, "10.1.0.2:30080", Fate::Untouched)]
#[case::node_port_of_the_loopback(Cluster, vec![there()], NODE, "127.0.0.1:30080", Fate::Untouched)]
#[case::something_else(Cluster, vec![there()], POD, "203.0.113.9:80", Fate::Untouched)]
fn refused_dropped_or_left_alone(
    #[case] policies: Policies,
    #[case] endpoints: Vec<Endpoint>,
    #[case] from: &str,
    #[case] to: &str,
    #[case] fate: Fate,
) {
    let mut rules = rules(&host(), policies.of(web()), endpoints);
    assert_eq!(rules.fates(tcp(from, to)), BTreeSet::from([fate]));
}

#[test]
fn pods_and_the_node_reach_other_nodes_where_outsiders_are_dropped() {
    let mut rules = rules(&host(), ExternalLocal.of(web()), vec![there()]);
    assert_eq!(rules.fates(tcp(POD, NODE_PORT)), answered(&[THERE], false));
    assert_eq!(rules.fates(tcp(NODE, LOAD_BALANCER)), answered(&[THERE], true));
}

#[test]
fn another_protocol_is_another_port() {
    let mut rules = rules(&host(), web(), vec![there()]);
    let udp = |to| Connection { protocol: Protocol::Udp, ..tcp(POD, to) };
    assert_eq!(rules.fates(udp(CLUSTER_IP)), BTreeSet::from([Fate::Rejected]));
    assert_eq!(rules.fates(udp(NODE_PORT)), BTreeSet::from([Fate::Untouched]));
}

#[test]
fn ports_that_another_mode_may_serve_are_left_alone() {
    let mut rules = rules(&Host { shares_addresses: true, ..host() }, web(), vec![there()]);
    assert_eq!(rules.fates(tcp(POD, CLUSTER_IP)), answered(&[THERE], false));
    assert_eq!(rules.fates(tcp(POD, "172.30.0.41:81")), BTreeSet::from([Fate::Untouched]));
}

#[rstest]
#[case::served(CLUSTER_IP, false, answered(&[THERE], false))]
#[case::another_port_of_a_cluster_ip("172.30.0.41:81", false, BTreeSet::from([Fate::Rejected]))]
#[case::an_address_of_the_range("172.30.0.42:80", false, BTreeSet::from([Fate::Dropped]))]
#[case::an_address_of_the_further_range("172.31.0.1:80", false, BTreeSet::from([Fate::Dropped]))]
#[case::an_external_ip(EXTERNAL_IP, false, answered(&[THERE], true))]
#[case::beside_the_ranges("172.30.1.1:80", false, BTreeSet::from([Fate::Untouched]))]
#[case::beside_another_mode("172.30.0.42:80", true, BTreeSet::from([Fate::Untouched]))]
fn addresses_of_service_cidrs(
    #[case] to: &str,
    #[case] shares_addresses: bool,
    #[case] expected: BTreeSet<Fate>,
) {
    let service_cidrs =
        ["172.30.0.0/24", "172.31.0.0/28", "fd00:10:96::/112"].map(|cidr| cidr.parse().unwrap());
    let host = Host { service_cidrs: Some(service_cidrs.into()), shares_addresses, ..host() };
    assert_eq!(rules(&host, web(), vec![there()]).fates(tcp(POD, to)), expected);
}

#[rstest]
#[case::all_of_its_addresses("10.1.0.2:30080", answered(&[THERE], true))]
#[case::not_the_loopback("127.0.0.1:30080", BTreeSet::from([Fate::Untouched]))]
fn node_ports_everywhere(#[case] to: &str, #[case] expected: BTreeSet<Fate>) {
    let host = Host {
        node_ports_everywhere: true,
        node_port_addresses: [ip(NODE), ip("10.1.0.2"), ip("127.0.0.1")].into(),
        ..host()
    };
    assert_eq!(rules(&host, web(), vec![there()]).fates(tcp(NODE, to)), expected);
}

#[rstest]
#[case::in_the_range(OUTSIDE, LOAD_BALANCER, false)]
#[case::not_in_it("203.0.113.130", LOAD_BALANCER, true)]
#[case::pods_are_not_in_it(POD, LOAD_BALANCER, true)]
#[case::the_node_is_not_in_it(NODE, LOAD_BALANCER, true)]
#[case::external_ips_are_for_everybody("203.0.113.130", EXTERNAL_IP, false)]
#[case::node_ports_are_for_everybody("203.0.113.130", NODE_PORT, false)]
#[case::cluster_ips_are_for_everybody(POD, CLUSTER_IP, false)]
fn source_ranges(#[case] from: &str, #[case] to: &str, #[case] dropped: bool) {
    let service = Service { source_ranges: vec!["203.0.113.0/25".parse().unwrap()], ..web() };
    let fates = rules(&host(), service, vec![there()]).fates(tcp(from, to));
    assert_eq!(fates == BTreeSet::from([Fate::Dropped]), dropped, "{fates:?}");
}

#[rstest]
#[case::with_the_node("192.168.0.0/24", false)]
#[case::without_the_node("203.0.113.0/25", true)]
fn a_node_in_a_source_range_may_use_the_address_as_its_own(#[case] range: &str, #[case] dropped: bool) {
    let service = Service { source_ranges: vec![range.parse().unwrap()], ..web() };
    let fates = rules(&host(), service, vec![there()]).fates(tcp("1.2.3.4", LOAD_BALANCER));
    assert_eq!(fates == BTreeSet::from([Fate::Dropped]), dropped);
}

fn sticky() -> Service {
    Service { affinity_seconds: Some(10), ..web() }
}

#[test]
fn clients_come_back_to_their_endpoint_by_whatever_address() {
    let mut rules = rules(&host(), sticky(), vec![here(), there()]);
    for draw in [0, 1] {
        let client = format!("203.0.113.{draw}");
        let first = rules.fate(tcp(&client, CLUSTER_IP), draw);
        for to in [CLUSTER_IP, NODE_PORT, LOAD_BALANCER] {
            assert_eq!(rules.fates(tcp(&client, to)), BTreeSet::from([first.clone()]), "{to}");
        }
    }
}

#[test]
fn a_client_whose_endpoint_is_not_in_the_set_gets_another_that_it_keeps() {
    let mut rules = rules(&host(), ExternalLocal.of(sticky()), vec![here(), there()]);
    let remembered = (0..).find(|draw| {
        matches!(rules.fate(tcp(&format!("203.0.113.{draw}"), CLUSTER_IP), *draw), Fate::Answered(to, _) if to == THERE.parse().unwrap())
    });
    let client = format!("203.0.113.{}", remembered.unwrap());
    let to = |fate: Fate| match fate {
        Fate::Answered(to, _) => to,
        Fate::Rejected | Fate::Dropped | Fate::Untouched => panic!("{fate:?}"),
    };
    assert_eq!(to(rules.fate(tcp(&client, LOAD_BALANCER), 1)), HERE.parse::<SocketAddr>().unwrap());
    for draw in 0..4 {
        assert_eq!(to(rules.fate(tcp(&client, CLUSTER_IP), draw)), HERE.parse::<SocketAddr>().unwrap());
    }
}

#[rstest]
#[case::pod("fd00:10::9", "[fd00:96::41]:80", false)]
#[case::outside("2001:db8:9::1", "[fd00:96::41]:80", true)]
#[case::node_port("2001:db8:9::1", "[2001:db8::2]:30080", true)]
fn ipv6(#[case] from: &str, #[case] to: &str, #[case] masqueraded: bool) {
    let service = service("default/web", &["fd00:96::41"]).node_port(30080);
    let service = Service { affinity_seconds: Some(10), ..service };
    let mut rules = rules(&host(), service, vec![remote("fd00:10:1::1")]);
    assert_eq!(rules.fates(tcp(from, to)), answered(&["[fd00:10:1::1]:8080"], masqueraded));
}

#[test]
fn a_port_without_external_frontends_has_no_external_chain() {
    let with_chain = |service: Service| {
        let ports = ports(service, vec![there()]);
        let names = super::super::names::PortNames::new(&ports[0].name);
        let rules = Rules::new(IpFamily::Ipv4, &host(), &[&ports[0]]);
        rules.chain(&names.chain(PortChain::External)).is_some()
    };
    assert!(with_chain(web()));
    assert!(!with_chain(service("default/web", &["172.30.0.41"])));
}

#[test]
fn rules_of_the_frame_are_about_one_family() {
    let other: IpAddr = ip("2001:db8::2");
    let context = super::super::frame::Context::new(IpFamily::Ipv4, &host());
    assert!(!context.host.node_port_addresses.contains(&other));
    assert_eq!(context.conditions_of_pods().len(), 1);
}
