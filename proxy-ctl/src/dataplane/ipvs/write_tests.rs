//! What is written in which order, and what becomes of writes that fail.

use rstest::rstest;

use super::{
    fake_kernel::{FakeKernel, OF_MODE_IPTABLES, dataplane},
    *,
};
use crate::{
    dataplane::ipvs::state::ProgrammedServer,
    model::{
        Model,
        objects::Service,
        test_support::{HERE, remote, service, slice},
    },
};

const CLUSTER_IP: &str = "10.96.0.1";
const ENDPOINT: &str = "10.244.1.1";

fn model(service: Service, endpoints: &[&str]) -> Model {
    let mut model = Model::new(HERE);
    model.apply_service(service);
    model.apply_slice(slice("default/web-1", "web", endpoints.iter().map(|one| remote(one)).collect()));
    model
}

/// A cluster IP with one endpoint.
fn web() -> Vec<Arc<DesiredPort>> {
    model(service("default/web", &[CLUSTER_IP]), &[ENDPOINT]).desired()
}

const SETS: [&str; 1] = ["into KUBE-CLUSTER-IP"];
const SERVERS: [&str; 4] =
    ["create 10.96.0.1:80/TCP", "add 10.244.1.1:8080", "bind 10.96.0.1", "into KUBE-IPVS-IPS"];

/// An answer of a virtual server without its rules is lost; and rules of another mode that are gone before there are virtual servers leave
/// clients refused.
#[rstest]
#[case::nobody_serves("", &[&SETS, &["all rules"], &SERVERS])]
#[case::this_mode_serves("-A KUBE-SERVICES -j KUBE-NODE-PORT\n", &[&SETS, &["all rules"], &SERVERS])]
#[case::mode_iptables_serves(OF_MODE_IPTABLES, &[&SETS, &["own rules"], &SERVERS, &["all rules"]])]
fn rules_come_before_virtual_servers_but_for_those_that_end_another_modes_service(
    #[case] nat: &str,
    #[case] expected: &[&[&str]],
) {
    let kernel = FakeKernel::default();
    kernel.lock().nat = nat.to_owned();
    let mut dataplane = dataplane(&kernel, &[]);
    dataplane.resync(&web()).unwrap();
    assert_eq!(kernel.take_journal(), expected.concat());
    // What is there is read again with every resync.
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
    kernel.lock().nat = OF_MODE_IPTABLES.to_owned();
    kernel.lock().fails = Some(fails);
    let mut dataplane = dataplane(&kernel, &[]);
    dataplane.resync(&web()).unwrap_err();
    assert_eq!(kernel.lock().nat, OF_MODE_IPTABLES);
    kernel.lock().fails = None;
    dataplane.resync(&web()).unwrap();
    assert_eq!(kernel.lock().nat, "");
}

#[test]
fn another_mode_serves_on_if_iptables_fails_and_everything_is_tried_again() {
    let kernel = FakeKernel::default();
    kernel.lock().nat = OF_MODE_IPTABLES.to_owned();
    kernel.lock().restore_fails = true;
    let mut dataplane = dataplane(&kernel, &[]);
    dataplane.resync(&web()).unwrap_err();
    assert_eq!(kernel.take_journal(), [&SETS[..], &SERVERS].concat());
    kernel.lock().restore_fails = false;
    dataplane.resync(&web()).unwrap();
    assert_eq!(kernel.take_journal(), ["own rules", "all rules"]);
}

fn socket(address: &str) -> VirtualSocket {
    VirtualSocket { protocol: 6, address: address.parse().unwrap() }
}

/// Another program drains one of its real servers.
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
    let desired = model(service("default/web", &["198.51.100.2"]), &[ENDPOINT]).desired();
    dataplane.resync(&desired).unwrap();
    dataplane.collect_garbage().unwrap();
    let servers = kernel.lock().objects.servers.clone();
    assert_eq!(servers.keys().collect::<Vec<_>>(), [&excluded.0, &of_service.0]);
    assert_eq!(servers[&excluded.0], excluded.1);
    let of_model = [(format!("{ENDPOINT}:8080").parse().unwrap(), true)].into();
    assert_eq!(servers[&of_service.0].destinations, of_model);

    let shown = dataplane.snapshot().unwrap();
    assert_eq!(shown.services.iter().map(|one| &one.name).collect::<Vec<_>>(), [&desired[0].name]);
    assert_eq!(dataplane.usage().unwrap().tables[0].used, 1);
    let without_controller = kernel.lock().objects.clone().without_others();
    assert_eq!(without_controller.servers.keys().collect::<Vec<_>>(), [&of_service.0]);
}
