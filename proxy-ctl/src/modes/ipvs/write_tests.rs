//! Tests of the order of writes, and of writes that fail.

use rstest::rstest;

use super::{
    fake_kernel::{FakeKernel, FakeTools, OF_MODE_IPTABLES, dataplane, dataplane_of, in_both},
    *,
};
use crate::{
    model::{
        Model,
        objects::Service,
        test_support::{HERE, remote, service, slice},
    },
    modes::{
        Effect,
        ipvs::{sets::SetRole, state::ProgrammedServer},
    },
    sys::net::ipset::{Member, MemberChange},
};

const CLUSTER_IP: &str = "10.96.0.1";
const ENDPOINT: &str = "10.244.1.1";

fn model(service: Service, endpoints: &[&str]) -> Model {
    let mut model = Model::new(HERE);
    model.apply_service(service);
    model.apply_slice(slice("default/web-1", "web", endpoints.iter().map(|one| remote(one)).collect()));
    model
}

/// Returns a service port with a ClusterIP and one endpoint.
fn web() -> Vec<Arc<DesiredPort>> {
    model(service("default/web", &[CLUSTER_IP]), &[ENDPOINT]).take_changes().changed
}

const SETS: &[&str] = &["into KUBE-CLUSTER-IP"];
const SERVERS: &[&str] =
    &["create 10.96.0.1:80/TCP", "add 10.244.1.1:8080", "bind 10.96.0.1", "into KUBE-IPVS-IPS"];

/// An answer of a virtual server is lost if there are no rules. If rules of another mode are
/// removed before there are virtual servers, clients are refused.
#[rstest]
#[case::nobody_serves("", &[SETS, &["all rules"], SERVERS])]
#[case::this_mode_serves("-A KUBE-SERVICES -j KUBE-NODE-PORT\n", &[SETS, &["all rules"], SERVERS])]
#[case::mode_iptables_serves(OF_MODE_IPTABLES, &[SETS, &["own rules"], SERVERS, &["all rules"]])]
fn rules_come_before_virtual_servers_but_for_those_that_end_another_modes_service(
    #[case] nat: &str,
    #[case] expected: &[&[&str]],
) {
    let kernel = FakeKernel::default();
    kernel.lock().nat = in_both(nat);
    let mut dataplane = dataplane(&kernel, &[]);
    dataplane.resync(&web()).unwrap();
    assert_eq!(kernel.take_journal(), expected.concat());
    // The rules are read again with every resync.
    dataplane.resync(&web()).unwrap();
    assert_eq!(kernel.take_journal(), ["all rules"]);
    dataplane.apply(&Changes::default()).unwrap();
    assert_eq!(kernel.take_journal(), [""; 0]);
}

#[rstest]
#[case::sets(|change: &Change| matches!(change, Change::Member(..)))]
#[case::servers(|change: &Change| matches!(change, Change::Server(_)))]
#[case::addresses(|change: &Change| matches!(change, Change::Address(_)))]
fn another_mode_serves_on_if_a_call_fails(#[case] fails: fn(&Change) -> bool) {
    let kernel = FakeKernel::default();
    kernel.lock().nat = in_both(OF_MODE_IPTABLES);
    kernel.lock().fails = Some(fails);
    let mut dataplane = dataplane(&kernel, &[]);
    dataplane.resync(&web()).unwrap_err();
    assert_eq!(kernel.lock().nat(IpFamily::Ipv4), OF_MODE_IPTABLES);
    kernel.lock().fails = None;
    dataplane.resync(&web()).unwrap();
    assert_eq!(kernel.lock().nat(IpFamily::Ipv4), "");
}

/// The other family does not wait for the one that fails.
#[test]
fn another_mode_serves_a_family_on_if_its_iptables_fails_and_everything_is_tried_again() {
    let kernel = FakeKernel::default();
    kernel.lock().nat = in_both(OF_MODE_IPTABLES);
    kernel.lock().restore_fails = Some(IpFamily::Ipv4);
    let mut dataplane = dataplane_of(&IpFamily::ALL, &kernel, &[]);
    dataplane.resync(&web()).unwrap_err();
    assert_eq!(IpFamily::ALL.map(|family| kernel.lock().nat(family)), [OF_MODE_IPTABLES, ""]);
    kernel.lock().restore_fails = None;
    dataplane.resync(&web()).unwrap();
    assert_eq!(kernel.lock().nat(IpFamily::Ipv4), "");
}

fn socket(address: &str) -> VirtualSocket {
    VirtualSocket { protocol: 6, address: address.parse().unwrap() }
}

/// Returns a virtual server of another program, which drains one of its destinations.
fn of_another(address: &str) -> (VirtualSocket, ProgrammedServer) {
    let balancing = Balancing { scheduler: "wrr".into(), affinity_seconds: None, by_source_port: false };
    let destinations = ["192.0.2.1:80", "192.0.2.2:80"].map(|one| one.parse().unwrap());
    let destinations = [(destinations[0], true), (destinations[1], false)].into();
    (socket(address), ProgrammedServer { balancing, destinations })
}

#[test]
fn excluded_virtual_servers_are_neither_changed_nor_shown_unless_a_service_has_their_address() {
    let kernel = FakeKernel::default();
    let [excluded, of_service, other] =
        ["198.51.100.1:80", "198.51.100.2:80", "203.0.113.1:80"].map(of_another);
    kernel.lock().objects.servers = [excluded.clone(), of_service.clone(), other].into();
    let mut dataplane = dataplane(&kernel, &["198.51.100.0/24"]);
    let desired = model(service("default/web", &["198.51.100.2"]), &[ENDPOINT]).take_changes().changed;
    dataplane.resync(&desired).unwrap();
    dataplane.collect_garbage().unwrap();
    let servers = kernel.lock().objects.servers.clone();
    assert_eq!(servers.keys().collect::<Vec<_>>(), [&excluded.0, &of_service.0]);
    assert_eq!(servers[&excluded.0], excluded.1);
    let of_model = [(format!("{ENDPOINT}:8080").parse().unwrap(), true)].into();
    assert_eq!(servers[&of_service.0].destinations, of_model);

    let shown = dataplane.snapshot().unwrap();
    assert_eq!(shown.services.iter().map(|one| &one.name).collect::<Vec<_>>(), [&desired[0].name]);
    assert_eq!(dataplane.usage().unwrap().maps[0].used, 1);
    dataplane.resync(&[]).unwrap();
    let left = kernel.lock().objects.servers.keys().copied().collect::<Vec<_>>();
    assert_eq!(left, [excluded.0], "a Service that goes takes its virtual server with it");
    dataplane.resync(&desired).unwrap();
    let without_controller = kernel.lock().objects.clone().without_others();
    assert_eq!(without_controller.servers.keys().collect::<Vec<_>>(), [&of_service.0]);
}

const BROADCAST: &str = "10.244.1.255";

fn destination(change: &Change) -> Option<String> {
    let Change::Server(ServerChange::AddDestination(_, address)) = change else { return None };
    Some(address.ip().to_string())
}

const ODD: &str = "10.96.0.2:80";

fn is_into(change: &Change, role: SetRole) -> bool {
    let Change::Member(set, MemberChange::Add(Member::Socket(member))) = change else { return false };
    set.role == role && *member == socket(ODD)
}

/// Refuses a virtual server. It has no destinations, because it does not exist.
fn unknown_protocol(change: &Change) -> Option<i32> {
    let Change::Server(change) = change else { return None };
    let errno = if matches!(change, ServerChange::Create(..)) { libc::EPROTONOSUPPORT } else { libc::ESRCH };
    (change.socket() == socket(ODD)).then_some(errno)
}

#[rstest]
#[case::endpoint(
    |change: &Change| destination(change).is_some_and(|it| it == BROADCAST).then_some(libc::EINVAL),
    ("endpoints", Effect::ServedDifferently),
    "endpoint 10.244.1.255:8080 of virtual server 10.96.0.2:80/TCP: a call failed"
)]
#[case::virtual_server(
    unknown_protocol,
    ("spec.clusterIPs", Effect::PartlyServed),
    "virtual server 10.96.0.2:80/TCP: a call failed"
)]
#[case::address(
    |change: &Change| (change.key() == Key::Address(socket(ODD).address.ip())).then_some(libc::EINVAL),
    ("spec.clusterIPs", Effect::PartlyServed),
    "address 10.96.0.2 of kube-ipvs0: a call failed"
)]
#[case::member_of_a_full_set(
    |change: &Change| is_into(change, SetRole::ClusterIp).then_some(libc::ENOSPC),
    ("spec.clusterIPs", Effect::PartlyServed),
    "10.96.0.2:80/TCP in set KUBE-CLUSTER-IP: a call failed"
)]
fn what_the_kernel_refuses_is_told_and_tried_again_and_everything_else_is_written(
    #[case] refuses: fn(&Change) -> Option<i32>,
    #[case] lacks: (&'static str, Effect),
    #[case] why: &str,
) {
    let kernel = FakeKernel::default();
    kernel.lock().refuses = Some(refuses);
    let mut dataplane = dataplane(&kernel, &[]);
    let mut model = model(service("default/web", &[CLUSTER_IP]), &[ENDPOINT]);
    model.apply_service(service("default/odd", &["10.96.0.2"]));
    model.apply_slice(slice("default/odd-1", "odd", vec![remote(BROADCAST)]));
    let desired = model.take_changes().changed;
    for _ in 0..2 {
        dataplane.resync(&desired).unwrap();
        let told = dataplane.take_waiting().unwrap();
        let [(name, reasons)] = &Vec::from_iter(told)[..] else { panic!("one service port is refused") };
        assert_eq!(name.service.to_string(), "default/odd");
        let [reason] = &reasons[..] else { panic!("{reasons:?}") };
        assert_eq!((reason.field, reason.effect), lacks);
        assert!(reason.instead.starts_with(&format!("the kernel refuses {why}")), "{reason:?}");
    }
    assert_eq!(dataplane.take_waiting(), None, "nothing has been tried since");
    let endpoint = format!("{ENDPOINT}:8080").parse().unwrap();
    assert_eq!(
        kernel.lock().objects.servers[&socket("10.96.0.1:80")].destinations,
        [(endpoint, true)].into()
    );

    kernel.lock().refuses = None;
    dataplane.resync(&desired).unwrap();
    assert_eq!(dataplane.take_waiting(), Some(BTreeMap::new()));
    assert_eq!(kernel.lock().objects.servers[&socket(ODD)].destinations.len(), 1);
}

#[test]
fn what_is_refused_is_forgotten_with_its_service_port() {
    let kernel = FakeKernel::default();
    kernel.lock().refuses = Some(|change| destination(change).map(|_| libc::EINVAL));
    let mut dataplane = dataplane(&kernel, &[]);
    let desired = web();
    dataplane.apply(&Changes { changed: desired.clone(), removed: Vec::new() }).unwrap();
    assert_eq!(dataplane.take_waiting().unwrap().len(), 1);
    let removed = desired.iter().map(|port| port.name.clone()).collect();
    dataplane.apply(&Changes { changed: Vec::new(), removed }).unwrap();
    assert_eq!(dataplane.take_waiting(), Some(BTreeMap::new()));
}

/// After this error the controller calls `resync` again, which reads everything anew.
#[rstest]
#[case::what_is_there_is_not_known(
    |change: &Change| matches!(change, Change::Server(ServerChange::Create(..))).then_some(libc::EEXIST)
)]
#[case::privileges_are_gone(|_: &Change| Some(libc::EPERM))]
fn an_error_that_concerns_more_than_its_object_fails(#[case] refuses: fn(&Change) -> Option<i32>) {
    let kernel = FakeKernel::default();
    kernel.lock().refuses = Some(refuses);
    let mut dataplane = dataplane(&kernel, &[]);
    let error = dataplane.resync(&web()).unwrap_err().to_string();
    assert!(error.contains("default/web"), "{error}");
    assert_eq!(dataplane.take_waiting().unwrap_or_default(), BTreeMap::new());
}

#[test]
fn rules_are_written_with_the_first_external_ip_and_after_the_last() {
    let kernel = FakeKernel::default();
    let mut dataplane = dataplane(&kernel, &[]);
    let mut model = model(service("default/web", &[CLUSTER_IP]), &[ENDPOINT]);
    dataplane.resync(&model.take_changes().changed).unwrap();
    let with = |addresses: &[&str]| {
        let web = service("default/web", &[CLUSTER_IP]);
        addresses.iter().fold(web, |service, address| service.external_ip(address))
    };
    let steps: [(&[&str], bool); 3] =
        [(&["192.0.2.80"], true), (&["192.0.2.80", "192.0.2.81"], false), (&[], true)];
    for (addresses, rewrites) in steps {
        kernel.take_journal();
        model.apply_service(with(addresses));
        dataplane.apply(&model.take_changes()).unwrap();
        let journal = kernel.take_journal();
        assert_eq!(journal.iter().any(|one| one == "all rules"), rewrites, "{addresses:?}: {journal:?}");
    }
}

#[test]
fn addresses_of_the_node_that_could_not_be_written_are_written_at_the_next_attempt() {
    let kernel = FakeKernel::default();
    let mut dataplane = dataplane(&kernel, &[]);
    let desired =
        model(service("default/web", &[CLUSTER_IP]).node_port(30_080), &[ENDPOINT]).take_changes().changed;
    dataplane.resync(&desired).unwrap();
    let host = Host { node_port_addresses: ["192.0.2.10".parse().unwrap()].into(), ..Host::default() };
    kernel.lock().fails = Some(|change| matches!(change, Change::Server(_)));
    for _ in 0..2 {
        dataplane.set_host(&host).unwrap_err();
    }
    kernel.lock().fails = None;
    dataplane.set_host(&host).unwrap();
    assert!(kernel.lock().objects.servers.contains_key(&socket("192.0.2.10:30080")));
    assert_eq!(dataplane.set_host(&host).unwrap(), Applied::default());
}

/// A kernel may have no NAT for IPv6.
#[rstest]
#[case::ipv4(IpFamily::Ipv4, None, true)]
#[case::ipv6(IpFamily::Ipv6, None, true)]
#[case::ipv6_without_nat(IpFamily::Ipv6, Some(IpFamily::Ipv6), false)]
fn a_family_is_served_where_the_kernel_translates_it(
    #[case] family: IpFamily,
    #[case] save_fails: Option<IpFamily>,
    #[case] expected: bool,
) {
    let kernel = FakeKernel::default();
    kernel.lock().save_fails = save_fails;
    assert_eq!(family_rules::is_served(&FakeTools { family, kernel }), expected);
}
