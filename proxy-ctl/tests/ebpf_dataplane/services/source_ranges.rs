//! Tests of load-balancer addresses that only some clients may reach: what the maps have of them,
//! and what the node's sockets reach.

use std::{collections::BTreeMap, sync::Arc};

use proxy_common::layout::{PrefixKey, SourceRange};
use proxy_ctl::{
    model::{
        desired::{DesiredPort, Endpoint, Frontend, FrontendKind},
        node::Host,
        objects::Algorithm,
    },
    modes::{Applied, Dataplane as _, Programmed as _},
    sys::bpf::map::Map,
};

use crate::{
    desired::{endpoint, endpoints, port, shared},
    sandbox::{Sandbox, TakeHost as _, serve},
};

const CLUSTER_IP: &str = "10.96.0.1";
const LOAD_BALANCER: &str = "203.0.113.1";
const NODE: &str = "192.0.2.11";
const OF_NODE: &str = "192.0.2.8/29";
const OF_OTHERS: &str = "192.0.2.0/29";

type Ranges = Map<PrefixKey<SourceRange<[u8; 4]>>, u32>;

fn restricted(name: &str, endpoint: Endpoint, ranges: &[&str]) -> DesiredPort {
    let mut port = port(name, CLUSTER_IP, vec![endpoint]);
    let address = LOAD_BALANCER.parse().unwrap();
    port.frontends.push(Frontend { kind: FrontendKind::LoadBalancer, address, port: 80 });
    port.source_ranges = ranges.iter().map(|range| range.parse().unwrap()).collect();
    port
}

fn desired(ranges: &[&str]) -> Vec<Arc<DesiredPort>> {
    shared([restricted("web", endpoint("10.0.0.1", 80), ranges)])
}

fn map(sandbox: &Sandbox) -> Ranges {
    sandbox.map("source_ranges4")
}

/// Returns ranges such as `192.0.2.0/29`, of whatever service.
fn written(sandbox: &Sandbox) -> Vec<String> {
    let all = map(sandbox).read_all().unwrap().into_iter();
    let named = |(PrefixKey { bits, data }, _): (PrefixKey<SourceRange<[u8; 4]>>, u32)| {
        format!("{}/{}", std::net::Ipv4Addr::from(data.address), bits - 32)
    };
    let mut named: Vec<_> = all.map(named).collect();
    named.sort();
    named
}

/// Returns the number of frontends of all services.
fn frontends(sandbox: &Sandbox) -> usize {
    sandbox.snapshot().services.iter().map(|service| service.frontends.len()).sum()
}

#[test]
fn ranges_are_written_changed_and_removed_with_their_service() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    dataplane.resync(&desired(&[OF_NODE, OF_OTHERS])).unwrap();
    assert_eq!(written(&sandbox), [OF_OTHERS, OF_NODE]);
    dataplane.resync(&desired(&[OF_OTHERS])).unwrap();
    assert_eq!(written(&sandbox), [OF_OTHERS]);
    drop(dataplane);

    let mut next = sandbox.open();
    assert_eq!(next.resync(&desired(&[OF_OTHERS])).unwrap(), Applied::default());
    let usage = next.usage().unwrap();
    let map = usage.maps.iter().find(|map| map.name == "source_ranges4").unwrap();
    assert_eq!(map.used, 1);
    next.resync(&desired(&[])).unwrap();
    assert_eq!((written(&sandbox), frontends(&sandbox)), (Vec::new(), 2));
    next.resync(&desired(&[OF_NODE])).unwrap();
    next.resync(&[]).unwrap();
    assert_eq!(written(&sandbox), [""; 0]);
}

/// The id of the service is given to another service, which these ranges would open.
#[test]
fn what_a_killed_controller_has_left_of_a_service_opens_no_other() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    let ids = 0..8;
    for id in ids {
        map(&sandbox).set(&SourceRange::of_prefix(id, [0; 4], 0), &0).unwrap();
    }
    dataplane.resync(&desired(&[OF_OTHERS])).unwrap();
    assert_eq!(written(&sandbox), [OF_OTHERS]);
}

/// Returns one range more than there is room for.
fn too_many(sandbox: &Sandbox) -> Vec<String> {
    (0..=sandbox.config.limits.source_ranges).map(|n| format!("10.0.{n}.0/24")).collect()
}

#[test]
fn what_waits_for_ranges_alone_is_not_written_again() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    let many = too_many(&sandbox);
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let restricted = restricted("web", endpoint("10.0.0.1", 80), &many);
    let two = endpoints(vec![endpoint("10.0.0.1", 80), endpoint("10.0.0.2", 80)]);
    let port = DesiredPort { algorithm: Some(Algorithm::Maglev), endpoints: two, ..restricted };
    let desired = shared([port]);
    dataplane.resync(&desired).unwrap();
    assert_eq!(sandbox.snapshot().services[0].algorithm, Algorithm::Maglev);
    assert_eq!(dataplane.resync(&desired).unwrap(), Applied::default());
}

#[test]
fn where_ranges_have_no_room_those_of_before_count_or_the_address_is_closed() {
    let Some(sandbox) = Sandbox::new() else { return };
    let many = too_many(&sandbox);
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let mut dataplane = sandbox.open();
    dataplane.resync(&desired(&[OF_OTHERS])).unwrap();
    assert_eq!(frontends(&sandbox), 2);
    dataplane.resync(&desired(&many)).unwrap();
    assert_eq!((written(&sandbox), frontends(&sandbox)), (vec![OF_OTHERS.to_owned()], 2));
    let told = dataplane.take_waiting().unwrap();
    let [reason] = told.into_values().next().unwrap().try_into().unwrap();
    assert_eq!(reason.field, "spec.loadBalancerSourceRanges");
    assert!(reason.instead.contains("ebpf.limits.sourceRanges"), "{reason:?}");
    dataplane.resync(&[]).unwrap();

    dataplane.resync(&desired(&many)).unwrap();
    assert_eq!((written(&sandbox).len(), frontends(&sandbox)), (0, 1));
    dataplane.resync(&desired(&many[1..])).unwrap();
    assert_eq!((written(&sandbox).len(), frontends(&sandbox)), (many.len() - 1, 2));
    assert_eq!(dataplane.take_waiting(), Some(BTreeMap::new()));
}

#[test]
fn a_socket_of_the_node_is_judged_by_the_nodes_address() {
    let Some(sandbox) = Sandbox::new() else { return };
    let server = endpoint("127.0.0.1", serve("127.0.0.1", "served"));
    let mut dataplane = sandbox.open();
    let host = Host { masquerade_addresses: vec![NODE.parse().unwrap()], ..Host::default() };
    dataplane.take_host(&host).unwrap();
    let mut dial = |ranges: &[&str]| {
        dataplane.resync(&shared([restricted("web", server, ranges)])).unwrap();
        assert_eq!(sandbox.dial(CLUSTER_IP, 80).unwrap(), "served");
        sandbox.dial(LOAD_BALANCER, 80)
    };
    assert_eq!(dial(&[]).unwrap(), "served");
    let error = dial(&[OF_OTHERS]).unwrap_err();
    assert!(error.contains("refused") || error.contains("not permitted"), "{error}");
    assert_eq!(dial(&[OF_OTHERS, OF_NODE]).unwrap(), "served");
    dial(&[OF_OTHERS]).unwrap_err();
}
