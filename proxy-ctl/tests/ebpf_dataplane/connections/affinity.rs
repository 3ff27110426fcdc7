//! Tests which clients of session affinity are kept, forgotten, and evicted.

use std::sync::Arc;

use proxy_common::layout::{
    Affinity, AffinityKey, CLIENT_OUTSIDE, Client, Frontend, FrontendKey, PROTOCOL_TCP,
};
use proxy_ctl::{
    model::desired::{Changes, DesiredPort, Endpoint},
    modes::{Dataplane as _, Programmed as _, ebpf::EbpfDataplane},
    sys::{bpf::map::Map, proc::clock},
};

use crate::{
    desired::{endpoint, port},
    sandbox::{Sandbox, serve},
};

const SECONDS: u32 = 60;
const NANOSECONDS: u64 = 1_000_000_000;
const CLUSTER_IP: &str = "10.96.0.1";
const TEXTS: [&str; 6] = ["a", "b", "c", "d", "e", "f"];

fn affine(endpoints: Vec<Endpoint>) -> Arc<DesiredPort> {
    Arc::new(DesiredPort { affinity_seconds: Some(SECONDS), ..port("web", CLUSTER_IP, endpoints) })
}

/// Returns servers of this namespace and what they answer, in the order of the maps.
fn served() -> Vec<(Endpoint, &'static str)> {
    let server = |text| (endpoint("127.0.0.1", serve("127.0.0.1", text)), text);
    let mut all: Vec<_> = TEXTS.into_iter().map(server).collect();
    all.sort_unstable_by_key(|(one, _)| one.port);
    all
}

fn endpoints(servers: &[(Endpoint, &str)]) -> Vec<Endpoint> {
    servers.iter().map(|(endpoint, _)| *endpoint).collect()
}

fn map(sandbox: &Sandbox) -> Map<AffinityKey<[u8; 4]>, Affinity> {
    sandbox.map("affinity4")
}

fn service(sandbox: &Sandbox) -> u32 {
    let frontends: Map<FrontendKey<[u8; 4]>, Frontend> = sandbox.map("frontends4");
    let key = FrontendKey::of_address([10, 96, 0, 1], proxy_common::port::Port::new(80), PROTOCOL_TCP);
    frontends.get(&key).unwrap().unwrap().service
}

fn remember(sandbox: &Sandbox, service: u32, number: u8, last_used: u64) {
    let client = Client { address: [192, 0, 2, number], origin: CLIENT_OUTSIDE };
    map(sandbox)
        .set(&AffinityKey { service, client }, &Affinity { last_used, backend: 1, flags: 0 })
        .unwrap();
}

fn evicted(dataplane: &EbpfDataplane) -> u64 {
    let families = dataplane.metrics().unwrap();
    families.iter().find(|family| family.name == "proxy_affinity_evictions").unwrap().samples[0].1
}

/// Collects garbage as many times as it takes to walk through both maps, after a rest.
fn collect(dataplane: &mut EbpfDataplane) {
    for _ in 0..12 {
        dataplane.collect_garbage().unwrap();
    }
}

#[test]
fn a_client_stays_through_restarts_and_changes() {
    let Some(sandbox) = Sandbox::new() else { return };
    let servers = served();
    let mut dataplane = sandbox.open();
    dataplane.resync(&[affine(endpoints(&servers))]).unwrap();
    let first = sandbox.dial(CLUSTER_IP, 80).unwrap();
    let all_go_to = |sandbox: &Sandbox, server: &str| {
        (0..10).for_each(|_| assert_eq!(sandbox.dial(CLUSTER_IP, 80).unwrap(), server));
    };
    all_go_to(&sandbox, &first);

    drop(dataplane);
    all_go_to(&sandbox, &first);
    let mut dataplane = sandbox.open();
    dataplane.resync(&[affine(endpoints(&servers))]).unwrap();
    all_go_to(&sandbox, &first);

    // The client's server stays, whatever its slot is, as long as it is an endpoint of the Service.
    let (mut left, mut current) = (servers, first);
    while left.len() > 1 {
        let (_, gone) = left.remove(0);
        let changes = Changes { changed: vec![affine(endpoints(&left))], ..Changes::default() };
        dataplane.apply(&changes).unwrap();
        let now = sandbox.dial(CLUSTER_IP, 80).unwrap();
        assert!(now == current || gone == current, "went from {current} to {now} when {gone} went");
        assert!(left.iter().any(|(_, text)| *text == now), "{now} is gone");
        all_go_to(&sandbox, &now);
        current = now;
    }
    assert_eq!(map(&sandbox).read_all().unwrap().len(), 1);
}

#[test]
fn expired_clients_are_forgotten() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    dataplane.resync(&[affine(vec![endpoint("10.0.0.1", 8080)])]).unwrap();
    let (web, now) = (service(&sandbox), clock::since_boot());
    let other = web + 1;
    let length = u64::from(SECONDS) * NANOSECONDS;
    remember(&sandbox, web, 1, now);
    remember(&sandbox, web, 2, now - length + 30 * NANOSECONDS);
    remember(&sandbox, web, 3, now - length);
    remember(&sandbox, other, 4, now);
    collect(&mut dataplane);
    let mut left: Vec<u8> =
        map(&sandbox).read_all().unwrap().iter().map(|(key, _)| key.client.address[3]).collect();
    left.sort_unstable();
    assert_eq!(left, [1, 2], "and nobody of a service without affinity");
    assert_eq!(evicted(&dataplane), 0);

    dataplane.resync(&[]).unwrap();
    collect(&mut dataplane);
    assert_eq!(map(&sandbox).read_all().unwrap(), []);
    assert_eq!(evicted(&dataplane), 0);
}

#[test]
fn a_full_map_evicts_and_counts() {
    const CLIENTS: u64 = 200;
    let Some(mut sandbox) = Sandbox::new() else { return };
    sandbox.config.limits.affinity = 64;
    let mut dataplane = sandbox.open();
    // The node is one client of each Service.
    let of_service = |number: u64| {
        let service =
            port(&format!("web-{number}"), &format!("10.96.1.{number}"), vec![endpoint("10.0.0.1", 8080)]);
        Arc::new(DesiredPort { affinity_seconds: Some(SECONDS), ..service })
    };
    dataplane.resync(&(1..=CLIENTS).map(of_service).collect::<Vec<_>>()).unwrap();
    collect(&mut dataplane);
    let script =
        format!("for n in $(seq {CLIENTS}); do (exec 3<>/dev/tcp/10.96.1.$n/80) 2>/dev/null; done; true");
    assert!(sandbox.in_cgroup(&script).status.success());
    let present = map(&sandbox).read_all().unwrap().len() as u64;
    assert!((1..=64).contains(&present), "{present}");
    collect(&mut dataplane);
    assert_eq!(evicted(&dataplane), CLIENTS - present);
}
