//! What is written in which order, and what becomes of writes that fail.

use rstest::rstest;

use super::{
    fake_kernel::{FakeKernel, OF_MODE_IPTABLES, dataplane},
    *,
};
use crate::model::{
    Model,
    objects::Service,
    test_support::{HERE, remote, service, slice},
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
