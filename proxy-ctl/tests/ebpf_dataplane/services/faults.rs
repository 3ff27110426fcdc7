//! Tests of a controller that was killed between two writes, of maps that others have changed, and
//! of maps that are full.

use std::{fs, os::fd::AsFd, sync::Arc};

use proxy_common::{
    layout::{
        Address, Backend, Connections, EndpointSet, Flow, FlowKey, Frontend, FrontendKey, PROGRESS_CONFIRMED,
        PROTOCOL_TCP, PROTOCOL_UDP, PrefixKey, RESET_CONFIRMED, Service, ServiceName, Slot4, SourceRange,
    },
    port::Port,
};
use proxy_ctl::{
    model::desired::DesiredPort,
    modes::{
        Applied, Dataplane, EndpointSnapshot,
        ebpf::{self, EbpfDataplane},
    },
    sys::{
        bpf::{self, map::kind::ARRAY},
        proc::clock,
    },
};
use rstest::rstest;

use crate::{
    desired::{endpoint, port, shared, with_node_port},
    sandbox::Sandbox,
};

fn desired() -> Vec<Arc<DesiredPort>> {
    let all = || vec![endpoint("10.0.0.1", 8080), endpoint("10.0.0.2", 8080)];
    let mut gap = port("gap", "10.96.0.3", [all(), vec![endpoint("10.0.0.3", 8080)]].concat());
    gap.endpoints.internal = [0, 2].into();
    shared([with_node_port(port("web", "10.96.0.1", all()), 30080), port("other", "10.96.0.2", all()), gap])
}

/// Returns names and contents, without the ids, which a repair may change.
fn shown(sandbox: &Sandbox) -> String {
    let snapshot = sandbox.snapshot();
    let services = snapshot.services.into_iter().map(|service| {
        let set = |set: &[EndpointSnapshot]| -> Vec<_> { set.iter().map(|e| (e.address, e.local)).collect() };
        let sets = [set(&service.cluster), set(&service.internal), set(&service.external)];
        format!("{} {:?} {sets:?} {}\n", service.name, service.frontends, service.any_endpoints)
    });
    let backends = snapshot.backends.into_iter();
    services.chain(backends.map(|b| format!("{} {}\n", b.address, b.uses))).collect()
}

type Fault = fn(&Sandbox);

fn id_of(sandbox: &Sandbox, service: &str) -> u32 {
    let services = sandbox.snapshot().services;
    services.iter().find(|found| &*found.name.service.name == service).unwrap().id
}

fn change_service(sandbox: &Sandbox, service: &str, change: impl FnOnce(&mut Service)) {
    let services = sandbox.map::<u32, Service>("services");
    let id = id_of(sandbox, service);
    let mut value = services.get(&id).unwrap().unwrap();
    change(&mut value);
    services.set(&id, &value).unwrap();
}

fn backend_removed(sandbox: &Sandbox) {
    let backends = sandbox.map::<u32, Backend<[u8; 4]>>("backends4");
    let (id, _) = backends.read_all().unwrap()[0];
    assert!(backends.remove(&id).unwrap());
}

fn backend_without_uses(sandbox: &Sandbox) {
    let backend =
        Backend { address: [10, 0, 0, 99], port: 1, protocol: 6, state: 1, uses: 1, flags: 0, owner: 0 };
    sandbox.map::<u32, Backend<[u8; 4]>>("backends4").set(&1_000_000, &backend).unwrap();
}

fn backend_twice(sandbox: &Sandbox) {
    let backends = sandbox.map::<u32, Backend<[u8; 4]>>("backends4");
    let (id, backend) = backends.read_all().unwrap()[0];
    backends.set(&(id + 5_000), &backend).unwrap();
}

fn wrong_use_count(sandbox: &Sandbox) {
    let backends = sandbox.map::<u32, Backend<[u8; 4]>>("backends4");
    let (id, backend) = backends.read_all().unwrap()[0];
    backends.set(&id, &Backend { uses: 77, ..backend }).unwrap();
}

fn name_missing(sandbox: &Sandbox) {
    assert!(sandbox.map::<u32, ServiceName>("service_names").remove(&id_of(sandbox, "web")).unwrap());
}

fn name_without_service(sandbox: &Sandbox) {
    let names = sandbox.map::<u32, ServiceName>("service_names");
    let (_, mut name) = names.read_all().unwrap()[0];
    name.name[0] = b'z';
    names.set(&400, &name).unwrap();
}

fn two_ids_of_one_name(sandbox: &Sandbox) {
    let names = sandbox.map::<u32, ServiceName>("service_names");
    let (_, name) = names.read_all().unwrap()[0];
    names.set(&400, &name).unwrap();
}

fn unreadable_name(sandbox: &Sandbox) {
    let name = ServiceName { family: 9, ..ServiceName::default() };
    sandbox.map::<u32, ServiceName>("service_names").set(&400, &name).unwrap();
}

fn service_empty(sandbox: &Sandbox) {
    change_service(sandbox, "web", |service| *service = Service::default());
}

fn service_without_name(sandbox: &Sandbox) {
    let value = Service { flags: 1, ..Service::default() };
    sandbox.map::<u32, Service>("services").set(&300, &value).unwrap();
}

fn slots_out_of_bounds(sandbox: &Sandbox) {
    change_service(sandbox, "web", |service| service.cluster = EndpointSet::new(4_095, 2));
}

fn slots_of_another(sandbox: &Sandbox) {
    let other = sandbox.map::<u32, Service>("services").get(&id_of(sandbox, "other")).unwrap().unwrap();
    change_service(sandbox, "web", |service| {
        service.cluster = other.cluster;
        service.internal = other.internal;
        service.external = other.external;
    });
}

fn flags_lost(sandbox: &Sandbox) {
    change_service(sandbox, "web", |service| service.flags = 0);
}

fn affinity_changed(sandbox: &Sandbox) {
    change_service(sandbox, "web", |service| service.affinity_seconds = 5);
}

fn slot_empty(sandbox: &Sandbox) {
    let service = sandbox.map::<u32, Service>("services").get(&id_of(sandbox, "gap")).unwrap().unwrap();
    sandbox.map::<u32, Slot4>("slots4").set(&(service.internal.first + 1), &Slot4::default()).unwrap();
}

fn cluster_ip_entry_missing(sandbox: &Sandbox) {
    let frontends = sandbox.map::<FrontendKey<[u8; 4]>, Frontend>("frontends4");
    assert!(frontends.remove(&FrontendKey::of_cluster_ip([10, 96, 0, 1])).unwrap());
}

fn source_range_of_nobody(sandbox: &Sandbox) {
    let ranges = sandbox.map::<PrefixKey<SourceRange<[u8; 4]>>, u32>("source_ranges4");
    ranges.set(&SourceRange::of_prefix(300, [10, 0, 0, 0], 8), &0).unwrap();
}

fn frontend_missing(sandbox: &Sandbox) {
    let frontends = sandbox.map::<FrontendKey<[u8; 4]>, Frontend>("frontends4");
    let (key, _) = frontends.read_all().unwrap()[0];
    assert!(frontends.remove(&key).unwrap());
}

fn frontend_of_nobody(sandbox: &Sandbox) {
    let key = FrontendKey::of_address([10, 96, 9, 9], Port::new(80), 6);
    let frontends = sandbox.map::<FrontendKey<[u8; 4]>, Frontend>("frontends4");
    frontends.set(&key, &Frontend { service: 200, flags: 0 }).unwrap();
}

fn frontend_of_another(sandbox: &Sandbox) {
    let frontends = sandbox.map::<FrontendKey<[u8; 4]>, Frontend>("frontends4");
    let (key, frontend) = frontends.read_all().unwrap()[0];
    frontends.set(&key, &Frontend { service: frontend.service ^ 1, ..frontend }).unwrap();
}

#[rstest]
#[case::backend_removed(backend_removed)]
#[case::backend_without_uses(backend_without_uses)]
#[case::backend_twice(backend_twice)]
#[case::wrong_use_count(wrong_use_count)]
#[case::name_missing(name_missing)]
#[case::name_without_service(name_without_service)]
#[case::two_ids_of_one_name(two_ids_of_one_name)]
#[case::unreadable_name(unreadable_name)]
#[case::service_empty(service_empty)]
#[case::service_without_name(service_without_name)]
#[case::slots_out_of_bounds(slots_out_of_bounds)]
#[case::slots_of_another(slots_of_another)]
#[case::flags_lost(flags_lost)]
#[case::affinity_changed(affinity_changed)]
#[case::slot_empty(slot_empty)]
#[case::cluster_ip_entry_missing(cluster_ip_entry_missing)]
#[case::source_range_of_nobody(source_range_of_nobody)]
#[case::frontend_missing(frontend_missing)]
#[case::frontend_of_nobody(frontend_of_nobody)]
#[case::frontend_of_another(frontend_of_another)]
fn the_next_resync_repairs(#[case] fault: Fault, #[values(false, true)] restart: bool) {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    dataplane.resync(&desired()).unwrap();
    let whole = shown(&sandbox);
    fault(&sandbox);
    if restart {
        drop(dataplane);
        dataplane = sandbox.open();
    }
    assert_ne!(dataplane.resync(&desired()).unwrap(), Applied::default(), "the fault must be noticed");
    assert_eq!(shown(&sandbox), whole);
    assert_eq!(dataplane.resync(&desired()).unwrap(), Applied::default());
}

#[test]
fn names_that_no_map_holds_are_refused_alone() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    let long = port(&"x".repeat(65), "10.96.0.1", vec![endpoint("10.0.0.1", 80)]);
    let error = dataplane.resync(&shared([long, port("web", "10.96.0.2", Vec::new())])).unwrap_err();
    assert!(error.to_string().contains("at most 64 bytes"), "{error}");
    assert_eq!(sandbox.snapshot().services.len(), 1);
    assert!(sandbox.snapshot().backends.is_empty());
}

#[test]
fn a_pin_that_is_no_map_of_ours_is_refused() {
    let Some(sandbox) = Sandbox::new() else { return };
    drop(sandbox.open());
    fs::remove_file(sandbox.map_pin("flows4")).unwrap();
    let shape =
        bpf::MapInfo { kind: ARRAY, key_size: 4, value_size: 4, max_entries: 1, ..bpf::MapInfo::default() };
    bpf::pin(bpf::create_map(&shape, None).unwrap().as_fd(), &sandbox.map_pin("flows4")).unwrap();
    let error = EbpfDataplane::open(&sandbox.config).unwrap_err();
    assert!(matches!(error, ebpf::Error::Shape { name: "flows4", .. }), "{error}");
}

/// A map that is full keeps connections from being counted, and nothing else from being done.
#[test]
fn flows_expire_while_they_cannot_be_counted() {
    const BACKENDS: u32 = 2;
    let Some(mut sandbox) = Sandbox::new() else { return };
    sandbox.config.limits.backends = BACKENDS;
    let mut dataplane = sandbox.open();
    let connections = sandbox.map::<u32, Connections>("connections");
    for id in 1..=BACKENDS {
        connections.set(&id, &Connections::default()).unwrap();
    }
    // No program has counted it, so that the walk corrects the count.
    let datagrams = flow([10, 0, 0, 1], PROTOCOL_UDP, clock::since_boot());
    let flows4 = sandbox.map::<FlowKey<[u8; 4]>, Flow<[u8; 4]>>("flows4");
    flows4.set(&datagrams.client_key(), &datagrams).unwrap();
    // The other family comes after it.
    let mut expired = flow([1; 16], PROTOCOL_TCP, 0);
    expired.state.reset = RESET_CONFIRMED;
    let flows6 = sandbox.map::<FlowKey<[u8; 16]>, Flow<[u8; 16]>>("flows6");
    flows6.set(&expired.client_key(), &expired).unwrap();

    let failed = dataplane.collect_garbage().unwrap_err().to_string();
    assert!(failed.contains("connections"), "{failed}");
    assert_eq!(flows4.read_all().unwrap().len(), 1);
    assert_eq!(flows6.read_all().unwrap().len(), 0, "{failed}");
}

fn flow<A: Address>(client: A, protocol: u8, last_seen: u64) -> Flow<A> {
    let mut flow = Flow::default();
    (flow.client, flow.protocol, flow.last_seen) = (client, protocol, last_seen);
    flow.state.progress = PROGRESS_CONFIRMED;
    flow
}
