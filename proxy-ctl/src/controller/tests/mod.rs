//! Tests of the controller with a dataplane that records its calls.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use prometheus_client::metrics::MetricType;
use tokio::sync::watch;

use self::{
    recorder::{Call, Recorder},
    repair::PERIOD,
};
use super::*;
use crate::{
    cleanup::Remains,
    config::{NamePattern, NodePortAddress},
    http::report::{Health, HealthCheckAddresses, ModeFamilies as _},
    kubernetes::convert::invalid::InvalidObjects,
    model::{
        desired::{Changes, DesiredPort, FrontendKind, ServicePortName},
        mode::Mode,
        node::{Device, Host, Interface},
        objects::{
            EndpointSlice, Node, ObjectName, Protocol, Service, ServiceCidr, ServicePort, TrafficPolicy,
        },
        test_support::{self, ip, remote},
    },
    modes::{
        Applied, Effect, ErrorKind, HookProblems, Known, Modes, PacketMode, PacketPrograms, Programmed,
        Snapshot, UnservedField, Usage,
    },
    node::OwnNode,
};

mod coverage;
mod log;
mod recorder;
mod repair;
mod switch;
mod thread;

const AFFINITY: UnservedField = UnservedField::new("affinity", Effect::ServedDifferently, "any endpoint");
const DELEGATED: UnservedField = UnservedField::new("all", Effect::Delegated, "served by another mode");
const SCTP: UnservedField = UnservedField::new("protocol", Effect::NotServed, "not served");

fn full() -> Error {
    Error::new(ErrorKind::Other, "map frontends4 is full")
}

fn service(name: &str, cluster_ip: &str) -> Service {
    test_support::service(&format!("default/{name}"), &[cluster_ip])
}

fn slice(service: &str, endpoint: &str) -> EndpointSlice {
    test_support::slice(&format!("default/{service}-1"), service, vec![remote(endpoint)])
}

fn network(addresses: &[&str]) -> NodeNetwork {
    let interface = |name: &str| Interface { name: name.into(), ..Interface::uplink(Device::Other) };
    NodeNetwork {
        addresses: addresses.iter().map(|text| ip(text)).collect(),
        masquerade_addresses: Vec::new(),
        interfaces: vec![interface("eth0"), interface("docker0")],
        limits_bandwidth: false,
    }
}

struct Fixture {
    controller: Controller,
    recorder: Recorder,
    reports: Reports,
    now: Instant,
}

fn reports() -> Reports {
    Reports {
        health: Arc::new(SharedHealth::new(Health::new(Duration::from_secs(30)))),
        metrics: Arc::new(Metrics::new(None, InvalidObjects::default(), |_| {})),
        own_node: watch::Sender::default(),
        heartbeats: Heartbeats::default(),
        health_checks: watch::Sender::default(),
        coverage: watch::Sender::default(),
        mode: watch::Sender::new(ModeInForce::new(Modes { active: Mode::Ebpf, secondary: None })),
        draining: watch::Sender::default(),
        hook_problems: watch::Sender::default(),
    }
}

impl Fixture {
    /// Returns a fixture in which nothing has been listed yet.
    fn new(config: Config) -> Self {
        let reports = reports();
        let controller = Controller::new(Arc::new(config), "node", reports.clone());
        Self { controller, recorder: Recorder::default(), reports, now: Instant::now() }
    }

    /// Returns a fixture in which everything has been listed and the node is set up with these
    /// addresses. Nothing is written yet.
    fn started(config: Config, services: Vec<Service>, addresses: &[&str]) -> Self {
        let mut fixture = Self::new(config);
        fixture.take(Update::ReplaceServices(services));
        fixture.take(Update::ReplaceSlices(Vec::new()));
        fixture.take(Update::Node(None));
        fixture.controller.set_network(network(addresses));
        fixture.start();
        fixture
    }

    /// Returns a fixture in which Services have been listed and written.
    fn serving(services: Vec<Service>) -> Self {
        Self::with(Config::default(), services)
    }

    fn with(config: Config, services: Vec<Service>) -> Self {
        let mut fixture = Self::started(config, services, &[]);
        fixture.write();
        fixture.recorder.calls();
        fixture
    }

    fn take(&mut self, update: Update) {
        self.controller.take(update);
    }

    fn start(&mut self) {
        self.controller.start(Box::new(self.recorder.clone()), self.now);
    }

    fn write(&mut self) -> Vec<Call> {
        self.controller.write(self.now);
        self.recorder.calls()
    }

    fn later(&mut self, wait: Duration) {
        self.now += wait;
    }

    fn is_healthy_after(&self, wait: Duration) -> bool {
        let moment = Moment { instant: self.now + wait, time: jiff::Timestamp::now() };
        self.reports.health.lock().report(moment).healthy
    }

    fn unprogrammed(&self) -> Option<String> {
        self.reports.health.lock().unprogrammed()
    }

    fn metric(&self, line: &str) -> bool {
        self.reports.metrics.encode().unwrap().lines().any(|found| found == line)
    }
}

#[test]
fn it_is_ready_when_all_have_listed_and_the_node_is_known() {
    let mut fixture = Fixture::new(Config::default());
    fixture.take(Update::ReplaceServices(Vec::new()));
    fixture.take(Update::ReplaceSlices(Vec::new()));
    assert_eq!(fixture.controller.waits_for(), ["the own Node", "the node to be set up"]);
    assert!(!fixture.controller.is_ready());
    fixture.take(Update::Node(None));
    assert!(!fixture.controller.is_ready());
    fixture.controller.set_network(network(&[]));
    assert!(fixture.controller.is_ready());
}

#[test]
fn the_node_is_set_up_first_then_everything_is_written_at_once() {
    let mut fixture = Fixture::new(Config::default());
    fixture.take(Update::ReplaceServices(vec![service("a", "10.0.0.1"), service("b", "10.0.0.2")]));
    fixture.take(Update::ReplaceSlices(Vec::new()));
    fixture.take(Update::Node(None));
    fixture.controller.set_network(network(&["192.0.2.1"]));
    assert_eq!(fixture.write(), []);
    fixture.start();
    let calls = fixture.write();
    let [Call::SetHost(_), Call::Resync(ports)] = calls.as_slice() else { panic!("{calls:?}") };
    assert_eq!(*ports, ["default/a", "default/b"]);
    assert_eq!(fixture.write(), []);
    assert_eq!(fixture.recorder.lock().attached_after, [2], "hooks take packets once all is written");
}

#[test]
fn services_are_served_without_room_for_all_addresses_but_not_without_hooks() {
    let mut fixture = Fixture::started(Config::default(), vec![service("a", "10.0.0.1")], &["192.0.2.1"]);
    let waiting = fixture.reports.coverage.subscribe();
    fixture.recorder.fail(1);
    fixture.write();
    assert!(!fixture.reports.coverage.borrow().programmed);
    fixture.recorder.lock().addresses_fail = true;
    fixture.later(Duration::from_secs(1));
    fixture.write();
    assert!(fixture.reports.coverage.borrow().programmed && waiting.has_changed().unwrap());
}

#[test]
fn hooks_that_the_kernel_refuses_are_tried_again_and_services_are_written_meanwhile() {
    let mut fixture = Fixture::started(Config::default(), vec![service("a", "10.0.0.1")], &[]);
    fixture.recorder.lock().attach_fails = true;
    assert!(matches!(fixture.write().as_slice(), [Call::SetHost(_), Call::Resync(_)]));
    assert!(fixture.metric("proxy_sync_errors_total 1"));
    fixture.take(Update::ApplyService(service("b", "10.0.0.2")));
    assert_eq!(fixture.write(), [Call::Apply(vec!["default/b".into()], vec![])]);
    let is_programmed = |fixture: &Fixture| fixture.reports.coverage.borrow().programmed;
    assert!(!is_programmed(&fixture) && !fixture.is_healthy_after(Duration::from_secs(61)));
    fixture.recorder.lock().attach_fails = false;
    fixture.later(Duration::from_secs(1));
    assert!(matches!(fixture.write().as_slice(), [Call::SetHost(_)]));
    assert_eq!(fixture.recorder.lock().attached_after.len(), 2);
    assert!(is_programmed(&fixture) && fixture.is_healthy_after(Duration::from_secs(61)));
}

/// The node stays healthy: a restart would not cure the interface, and everything else is served.
#[test]
fn an_interface_that_refuses_programs_is_told_of_and_is_no_pending_change() {
    let mut fixture = Fixture::started(Config::default(), vec![service("a", "10.0.0.1")], &[]);
    let problems = HookProblems { unattached: [(7, "veth7 is full".into())].into(), ..Default::default() };
    fixture.recorder.lock().hook_problems = problems.clone();
    fixture.write();
    assert_eq!(fixture.recorder.lock().problems_asked, 0, "a write does not need their texts");
    fixture.controller.collect_garbage();
    assert_eq!(*fixture.reports.hook_problems.borrow(), problems);
    assert!(fixture.reports.coverage.borrow().programmed && fixture.is_healthy_after(PERIOD * 100));
    assert_eq!(fixture.unprogrammed(), None);
}

/// A rollout of a version whose programs can be attached nowhere must stop, so the node is not
/// ready. It stays live.
#[test]
fn a_node_whose_interfaces_all_refuse_programs_is_not_ready_and_is_healthy() {
    let mut fixture = Fixture::started(Config::default(), vec![service("a", "10.0.0.1")], &[]);
    let refused = PacketPrograms { fit_nowhere: Some("denied".into()), ..Default::default() };
    fixture.recorder.lock().packet_programs = refused;
    fixture.write();
    let expected = "no interface of a workload takes packet programs: denied";
    assert_eq!(fixture.unprogrammed().as_deref(), Some(expected));
    assert!(fixture.is_healthy_after(PERIOD * 100));
    fixture.recorder.lock().packet_programs = PacketPrograms::default();
    fixture.controller.collect_garbage();
    fixture.write();
    assert_eq!(fixture.unprogrammed(), None);
}

#[test]
fn everything_listed_is_programmed_once_it_is_written_and_while_writes_succeed() {
    let mut fixture = Fixture::new(Config::default());
    fixture.take(Update::ReplaceServices(vec![service("a", "10.0.0.1")]));
    fixture.write();
    let missing = "waiting for EndpointSlices, the own Node, the node to be set up";
    assert_eq!(fixture.unprogrammed().as_deref(), Some(missing));
    fixture.take(Update::ReplaceSlices(Vec::new()));
    fixture.take(Update::Node(None));
    fixture.controller.set_network(network(&[]));
    fixture.start();
    // The call for the node fails, then the one for the Services.
    fixture.recorder.fail(2);
    fixture.write();
    assert_eq!(fixture.unprogrammed().as_deref(), Some("Services are not written"));
    fixture.recorder.lock().attach_fails = true;
    fixture.later(Duration::from_secs(1));
    fixture.write();
    let refused = "the node's addresses and interfaces are not programmed";
    assert_eq!(fixture.unprogrammed().as_deref(), Some(refused));
    fixture.recorder.lock().attach_fails = false;
    fixture.later(Duration::from_secs(2));
    fixture.write();
    assert_eq!(fixture.unprogrammed(), None);

    fixture.recorder.fail(1);
    fixture.take(Update::ApplySlice(slice("a", "10.1.0.1")));
    fixture.write();
    assert_eq!(fixture.unprogrammed().as_deref(), Some("Services are not written"));
    fixture.later(Duration::from_secs(1));
    fixture.write();
    assert_eq!(fixture.unprogrammed(), None);
}

#[test]
fn load_balancers_are_told_what_is_written_and_not_before() {
    let checked = Service { health_check_node_port: Some(32_000), ..service("a", "10.0.0.1") };
    let everywhere = Fixture::serving(vec![checked.clone()]);
    let told = everywhere.reports.health_checks.borrow().clone();
    assert_eq!((told.addresses, told.services.len()), (HealthCheckAddresses::All, 1));

    let networks =
        ["192.0.2.0/24", "2001:db8::/32"].map(|text| NodePortAddress::Network(text.parse().unwrap()));
    let config = Config { node_port_addresses: networks.into(), ..Config::default() };
    let mut fixture = Fixture::started(config, vec![checked], &["192.0.2.1", "198.51.100.1"]);
    assert_eq!(*fixture.reports.health_checks.borrow(), HealthChecks::default());
    fixture.write();
    let told = fixture.reports.health_checks.borrow().clone();
    assert_eq!(told.addresses, HealthCheckAddresses::Only(["192.0.2.1".parse().unwrap()].into()));
    assert_eq!(
        told.services.values().map(|check| (check.port, check.local_ready)).collect::<Vec<_>>(),
        [(32_000, 0)]
    );

    let mut waiting = fixture.reports.health_checks.subscribe();
    let mut is_told = |fixture: &mut Fixture| {
        fixture.write();
        let told = waiting.has_changed().unwrap();
        waiting.mark_unchanged();
        told
    };
    fixture.later(PERIOD);
    assert!(!is_told(&mut fixture), "they know");
    fixture.controller.set_network(network(&["192.0.2.2"]));
    assert!(is_told(&mut fixture));
    fixture.take(Update::DeleteService(ObjectName::new("default", "a")));
    assert!(is_told(&mut fixture));
}

#[test]
fn all_waiting_updates_become_one_call() {
    let mut fixture = Fixture::serving(vec![service("a", "10.0.0.1"), service("b", "10.0.0.2")]);
    for endpoint in ["10.1.0.1", "10.1.0.2", "10.1.0.3"] {
        fixture.take(Update::ApplySlice(slice("a", endpoint)));
    }
    fixture.take(Update::DeleteService(ObjectName::new("default", "b")));
    assert_eq!(fixture.write(), [Call::Apply(vec!["default/a".into()], vec!["default/b".into()])]);
    assert_eq!(fixture.recorder.lock().ports[0].endpoints.all[0].address, ip("10.1.0.3"));
    assert!(fixture.metric("kubeproxy_sync_proxy_rules_endpoint_changes_total 3"));
    assert!(fixture.metric("kubeproxy_sync_proxy_rules_endpoint_changes_pending 0"));
    assert_eq!(fixture.write(), []);
}

#[test]
fn a_relist_is_one_step() {
    let mut fixture = Fixture::serving(vec![service("a", "10.0.0.1"), service("b", "10.0.0.2")]);
    fixture.take(Update::ReplaceServices(vec![service("b", "10.0.0.2"), service("c", "10.0.0.3")]));
    assert_eq!(fixture.write(), [Call::Apply(vec!["default/c".into()], vec!["default/a".into()])]);
}

#[test]
fn the_configuration_chooses_interfaces_and_node_port_addresses() {
    let mut config = Config { node_port_addresses: vec![NodePortAddress::Primary], ..Config::default() };
    config.ebpf.interfaces.exclude.extend(NamePattern::parse("docker*"));
    let mut fixture = Fixture::new(config);
    let node = Node { addresses: vec![ip("192.0.2.1")], ..Node::default() };
    let own_node = fixture.reports.own_node.subscribe();
    assert_eq!(*own_node.borrow(), OwnNode::NotListed);
    fixture.take(Update::Node(Some(node.clone())));
    assert_eq!(*own_node.borrow(), OwnNode::Present(node.clone()));
    fixture.controller.set_network(network(&["192.0.2.1", "192.0.2.2"]));
    fixture.start();
    let set = |calls: Vec<Call>| match calls.into_iter().next() {
        Some(Call::SetHost(host)) => host,
        other => panic!("{other:?}"),
    };
    let written = set(fixture.write());
    assert_eq!(written.node_port_addresses, BTreeSet::from([ip("192.0.2.1")]));
    assert_eq!(written.interfaces.iter().map(|one| one.name.as_str()).collect::<Vec<_>>(), ["eth0"]);

    fixture.take(Update::Node(Some(Node { addresses: vec![ip("192.0.2.2")], ..node })));
    assert_eq!(set(fixture.write()).node_port_addresses, BTreeSet::from([ip("192.0.2.2")]));
}

#[test]
fn of_loopback_addresses_only_those_of_ipv4_serve_node_ports_and_only_if_they_are_to() {
    let network = NodePortAddress::Network("192.0.2.0/24".parse().unwrap());
    let cases: [(bool, &[NodePortAddress], &[&str]); 5] = [
        (true, &[], &["127.0.0.1", "192.0.2.1", "2001:db8::1"]),
        (true, &[NodePortAddress::All], &["127.0.0.1", "192.0.2.1", "2001:db8::1"]),
        (true, &[NodePortAddress::Localhost], &["127.0.0.1"]),
        (true, &[network], &["192.0.2.1", "2001:db8::1"]),
        (false, &[], &["192.0.2.1", "2001:db8::1"]),
    ];
    for (localhost_node_ports, wanted, served) in cases {
        let mut config = Config { node_port_addresses: wanted.into(), ..Config::default() };
        config.iptables.localhost_node_ports = localhost_node_ports;
        let mut fixture = Fixture::new(config);
        fixture.controller.set_network(self::network(&["127.0.0.1", "192.0.2.1", "::1", "2001:db8::1"]));
        fixture.start();
        let written = fixture.write();
        let [Call::SetHost(written), ..] = written.as_slice() else { panic!("{written:?}") };
        assert_eq!(written.node_port_addresses, served.iter().map(|address| ip(address)).collect());
    }
}

#[rstest::rstest]
#[case::by_default(&[], &[FrontendKind::ClusterIp, FrontendKind::ExternalIp])]
#[case::switched_off(&[("AllowServiceExternalIPs", false)], &[FrontendKind::ClusterIp])]
fn external_ips_are_served_unless_the_feature_gate_says_otherwise(
    #[case] gates: &[(&str, bool)],
    #[case] expected: &[FrontendKind],
) {
    let feature_gates = gates.iter().map(|(name, on)| ((*name).to_owned(), *on)).collect();
    let mut fixture = Fixture::with(Config { feature_gates, ..Config::default() }, Vec::new());
    let external_ips = vec![ip("192.0.2.1")];
    fixture.take(Update::ApplyService(Service { external_ips, ..service("a", "10.0.0.1") }));
    fixture.write();
    let ports = fixture.recorder.lock().ports.clone();
    let kinds: Vec<_> = ports[0].frontends.iter().map(|frontend| frontend.kind).collect();
    assert_eq!(kinds, expected);
}

#[test]
fn a_new_configuration_is_taken_over_as_it_goes() {
    let mut fixture = Fixture::serving(vec![service("a", "10.0.0.1")]);
    let mut config = Config::default();
    config.periods.sync = Duration::from_secs(5);
    config.ebpf.interfaces.exclude.extend(NamePattern::parse("docker*"));
    fixture.controller.configure(Arc::new(config), fixture.now);
    let calls = fixture.write();
    let [Call::SetHost(host)] = calls.as_slice() else { panic!("{calls:?}") };
    assert_eq!(host.interfaces.iter().map(|one| one.name.as_str()).collect::<Vec<_>>(), ["eth0"]);
    assert_eq!(fixture.controller.wants_call_at(), Some(fixture.now + Duration::from_secs(5)));

    // The node is unhealthy after two of the new periods.
    fixture.recorder.fail(usize::MAX);
    fixture.take(Update::ApplySlice(slice("a", "10.1.0.1")));
    fixture.write();
    assert!(!fixture.is_healthy_after(Duration::from_secs(10)));
}

#[test]
fn a_mode_that_keeps_the_shortest_interval_gets_changes_together() {
    let mut fixture = Fixture::new(Config::default());
    let modes = Modes { active: Mode::Iptables, secondary: None };
    fixture.reports.mode.send_replace(ModeInForce::new(modes));
    for update in [Update::ReplaceServices(Vec::new()), Update::ReplaceSlices(Vec::new()), Update::Node(None)]
    {
        fixture.take(update);
    }
    fixture.controller.set_network(network(&[]));
    fixture.start();
    fixture.write();
    let mut writes = Vec::new();
    for name in ["a", "b", "c"] {
        fixture.take(Update::ApplyService(service(name, "10.0.0.1")));
        writes.push(fixture.write().len());
    }
    assert_eq!(writes, [1, 0, 0], "a burst of two, with what was written first");
    assert_eq!(fixture.controller.wants_call_at(), Some(fixture.now + Duration::from_secs(1)));
    fixture.later(Duration::from_secs(1));
    assert_eq!(fixture.write(), [Call::Apply(vec!["default/b".into(), "default/c".into()], vec![])]);
}

#[test]
fn the_host_is_written_anew_when_the_ranges_of_services_change() {
    let mut fixture = Fixture::serving(Vec::new());
    let range: ipnet::IpNet = "10.96.0.0/12".parse().unwrap();
    let cidr = ServiceCidr { name: "kubernetes".into(), ranges: vec![range] };
    fixture.take(Update::ApplyServiceCidr(cidr));
    let calls = fixture.write();
    let [Call::SetHost(host)] = calls.as_slice() else { panic!("{calls:?}") };
    assert_eq!(host.service_cidrs, Some(vec![range]));
    let cidr = ServiceCidr { name: "kubernetes".into(), ranges: vec![range] };
    fixture.take(Update::ReplaceServiceCidrs(vec![cidr]));
    assert_eq!(fixture.write(), [], "they are the same");
}

#[test]
fn nothing_is_written_once_somebody_else_programs_the_node() {
    let finds_out: [fn(&mut Fixture); 2] = [
        |fixture| fixture.controller.set_network(network(&["192.0.2.1"])),
        |fixture| fixture.controller.collect_garbage(),
    ];
    for finds_out in finds_out {
        let mut fixture = Fixture::serving(vec![service("a", "10.0.0.1")]);
        fixture.recorder.lock().taken_over = true;
        finds_out(&mut fixture);
        fixture.recorder.calls();
        fixture.take(Update::ApplyService(service("b", "10.0.0.2")));
        assert_eq!(fixture.write(), []);
        assert!(fixture.controller.taken_over.is_some());
    }
}
