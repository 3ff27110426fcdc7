//! Tests of algorithms and weights: what the maps hold, and which endpoint is reached.

use std::sync::Arc;

use proxy_common::layout::{
    BACKEND_DRAINING, FRONTEND_MAGLEV, Frontend, FrontendKey, PROTOCOL_TCP, Service, Slot4,
};
use proxy_ctl::{
    model::{
        desired::{DesiredPort, Endpoint},
        node::{Encapsulation, Host},
        objects::{Algorithm, Forwarding, NodeForwarding},
    },
    modes::{Applied, Dataplane as _, Effect},
    sys::bpf::map::Map,
};

use crate::{
    desired::{change, endpoint, endpoints, port, shared, with_node_port},
    sandbox::{Sandbox, serve},
};

const CLUSTER_IP: &str = "10.96.0.1";

fn web(algorithm: Option<Algorithm>, endpoints: Vec<Endpoint>) -> DesiredPort {
    DesiredPort { algorithm, ..port("web", CLUSTER_IP, endpoints) }
}

fn many(count: u8) -> Vec<Endpoint> {
    (1..=count).map(|last| endpoint(&format!("10.0.0.{last}"), 80)).collect()
}

/// Returns the algorithm of the Service with this cluster IP: as it is shown, and whether the
/// frontend's flag for Maglev is set.
fn algorithm(sandbox: &Sandbox, cluster_ip: [u8; 4]) -> (Algorithm, bool) {
    let key = FrontendKey::of_address(cluster_ip, proxy_common::port::Port::new(80), PROTOCOL_TCP);
    let frontends: Map<FrontendKey<[u8; 4]>, Frontend> = sandbox.map("frontends4");
    let frontend = frontends.get(&key).unwrap().unwrap();
    let services = sandbox.snapshot().services;
    let service = services.iter().find(|service| service.id == frontend.service).unwrap();
    (service.algorithm, frontend.flags & FRONTEND_MAGLEV != 0)
}

/// Returns the number of slots in use.
fn slots(sandbox: &Sandbox) -> usize {
    let slots: Map<u32, Slot4> = sandbox.map("slots4");
    slots.read_all().unwrap().iter().filter(|(_, slot)| slot.backend != 0).count()
}

#[test]
fn a_restart_finds_the_lookup_tables_as_they_are_to_be() {
    let Some(sandbox) = Sandbox::new() else { return };
    let mut weighted = many(3);
    weighted[1].weight = 4;
    let mut local = web(Some(Algorithm::Maglev), many(5));
    local.endpoints.external = [0, 1].into();
    let desired = [shared([local]), shared([port("canary", "10.96.0.2", weighted)])].concat();
    let mut dataplane = sandbox.open();
    dataplane.resync(&desired).unwrap();
    assert_eq!(slots(&sandbox), 5 + 512 + 2 + 512 + 3 + 1_024);
    assert_eq!(algorithm(&sandbox, [10, 96, 0, 1]), (Algorithm::Maglev, true));
    assert_eq!(algorithm(&sandbox, [10, 96, 0, 2]), (Algorithm::Random, false));
    drop(dataplane);
    let mut dataplane = sandbox.open();
    assert_eq!(dataplane.resync(&desired).unwrap(), Applied::default());
    // One weight is changed: the slots of the Service and its lookup table are written anew.
    let mut changed = DesiredPort::clone(&desired[1]);
    changed.endpoints.all[1].weight = 5;
    assert!(dataplane.apply(&change(vec![Arc::new(changed)])).unwrap().written > 1_024);
}

#[test]
fn the_nodes_algorithm_is_for_services_that_name_none() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    let named = DesiredPort { algorithm: Some(Algorithm::Random), ..port("named", "10.96.0.2", many(2)) };
    let desired = shared([web(None, many(2)), named]);
    dataplane.set_host(&Host::default()).unwrap();
    dataplane.resync(&desired).unwrap();
    for now in [Algorithm::Maglev, Algorithm::Random] {
        let host = Host { algorithm: now, ..Host::default() };
        assert_ne!(dataplane.set_host(&host).unwrap(), Applied::default());
        assert_eq!(dataplane.set_host(&host).unwrap(), Applied::default());
        assert_eq!(algorithm(&sandbox, [10, 96, 0, 1]), (now, now == Algorithm::Maglev));
        assert_eq!(algorithm(&sandbox, [10, 96, 0, 2]), (Algorithm::Random, false));
        assert_eq!(dataplane.resync(&desired).unwrap(), Applied::default());
    }
}

#[test]
fn the_nodes_forwarding_is_for_services_that_name_none_and_the_most_they_get() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    let named = DesiredPort { forwarding: Some(Forwarding::Dsr), ..port("named", "10.96.0.2", many(2)) };
    let desired = shared([named, web(None, many(2))]);
    dataplane.set_host(&Host::default()).unwrap();
    dataplane.resync(&desired).unwrap();
    for (by_default, allows_more, expected) in [
        (Forwarding::Hybrid, false, [Forwarding::Dsr, Forwarding::Dsr]),
        (Forwarding::Snat, false, [Forwarding::Snat, Forwarding::Snat]),
        (Forwarding::Snat, true, [Forwarding::Dsr, Forwarding::Snat]),
    ] {
        let host = Host { forwarding: NodeForwarding { by_default, allows_more }, ..Host::default() };
        assert_ne!(dataplane.set_host(&host).unwrap(), Applied::default());
        assert_eq!(dataplane.set_host(&host).unwrap(), Applied::default());
        let services = sandbox.snapshot().services;
        let forwarding: Vec<_> = services.iter().map(|service| service.forwarding).collect();
        assert_eq!(forwarding, expected);
        assert_eq!(dataplane.resync(&desired).unwrap(), Applied::default());
    }
}

#[test]
fn the_encapsulation_is_followed() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    for encapsulation in [Encapsulation::Geneve, Encapsulation::Ip] {
        let host = Host { encapsulation, ..Host::default() };
        dataplane.set_host(&host).unwrap();
        assert_eq!(sandbox.snapshot().node.encapsulation, encapsulation);
        assert_eq!(dataplane.set_host(&host).unwrap(), Applied::default());
    }
}

/// The set for clients outside keeps a terminating endpoint, for connections that another node
/// sends here. The lookup table does not have it.
#[test]
fn what_terminates_on_this_node_is_found_by_what_another_node_sends() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    let mut all = many(3);
    all[0].local = true;
    let web = port("web", CLUSTER_IP, all.clone());
    let before = with_node_port(DesiredPort { forwarding: Some(Forwarding::Dsr), ..web }, 30_080);
    dataplane.resync(&shared([before.clone()])).unwrap();
    let draining = Endpoint { terminating: true, ..all.remove(0) };
    let mut now = DesiredPort { endpoints: endpoints(all), ..before };
    now.endpoints.unused = Box::new([draining]);
    dataplane.apply(&change(vec![Arc::new(now.clone())])).unwrap();
    let id = sandbox.snapshot().services[0].id;
    let services: Map<u32, Service> = sandbox.map("services");
    let slots: Map<u32, Slot4> = sandbox.map("slots4");
    let Service { cluster, internal, external, .. } = services.get(&id).unwrap().unwrap();
    assert_eq!((cluster.count(), internal.count(), external.count()), (2, 2, 3));
    let drain = |indexes: std::ops::Range<u32>| -> Vec<bool> {
        let flags = indexes.map(|index| slots.get(&index).unwrap().unwrap().flags);
        flags.map(|flags| flags & BACKEND_DRAINING != 0).collect()
    };
    let end = external.first + external.count();
    assert_eq!(drain(external.first..end), [true, false, false]);
    assert_eq!(drain(end..end + 256), [false; 256]);
    drop(dataplane);
    let mut dataplane = sandbox.open();
    assert_eq!(dataplane.resync(&shared([now.clone()])).unwrap(), Applied::default());
    // The endpoint does not serve any more.
    now.endpoints.unused = Box::default();
    dataplane.apply(&change(vec![Arc::new(now)])).unwrap();
    assert_eq!(services.get(&id).unwrap().unwrap().external.count(), 2);
}

#[test]
fn sockets_go_by_weight() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    let server = |text, weight| Endpoint { weight, ..endpoint("127.0.0.1", serve("127.0.0.1", text)) };
    let mut servers = vec![server("a", 0), server("b", 1), server("c", 0)];
    servers.sort_unstable_by_key(|one| one.port);
    for algorithm in [Some(Algorithm::Maglev), None] {
        dataplane.resync(&shared([web(algorithm, servers.clone())])).unwrap();
        (0..20).for_each(|_| assert_eq!(sandbox.dial(CLUSTER_IP, 80).unwrap(), "b"));
    }
}

#[test]
fn without_room_for_a_lookup_table_endpoints_are_drawn_alike() {
    let Some(mut sandbox) = Sandbox::new() else { return };
    sandbox.config.limits.slots = 1_100;
    let mut dataplane = sandbox.open();
    let small = DesiredPort { algorithm: Some(Algorithm::Maglev), ..port("small", "10.96.0.2", many(3)) };
    // The lookup table of this Service has 2,048 slots.
    let large = web(Some(Algorithm::Maglev), many(20));
    dataplane.resync(&shared([small.clone(), large.clone()])).unwrap();
    assert_eq!(algorithm(&sandbox, [10, 96, 0, 1]), (Algorithm::Random, false));
    assert_eq!(algorithm(&sandbox, [10, 96, 0, 2]), (Algorithm::Maglev, true));
    let told = dataplane.take_waiting().unwrap();
    let [(name, fields)] = told.iter().collect::<Vec<_>>()[..] else { panic!("{told:?}") };
    assert_eq!((&*name.service.name, fields[0].effect), ("web", Effect::ServedDifferently));
    dataplane.collect_garbage().unwrap();
    assert_eq!(dataplane.take_waiting(), None);
    // The Service follows its endpoints meanwhile, and gets its lookup table as soon as there is
    // room.
    let fewer = DesiredPort { endpoints: endpoints(many(19)), ..large };
    dataplane.apply(&change(vec![Arc::new(fewer)])).unwrap();
    assert_eq!(algorithm(&sandbox, [10, 96, 0, 1]), (Algorithm::Random, false));
    assert_eq!(sandbox.snapshot().services.iter().map(|one| one.cluster.len()).max(), Some(19));
    dataplane.resync(&shared([web(Some(Algorithm::Maglev), many(4))])).unwrap();
    dataplane.collect_garbage().unwrap();
    assert_eq!(algorithm(&sandbox, [10, 96, 0, 1]), (Algorithm::Maglev, true));
}
