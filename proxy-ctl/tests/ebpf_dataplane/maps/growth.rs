//! Tests that maps grow with what is desired, up to their limits.

use std::{
    fs,
    net::SocketAddr,
    os::fd::AsFd as _,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use proxy_common::inventory::{Limit, map_name};
use proxy_ctl::{
    config::Limits,
    model::desired::{DesiredPort, Frontend, FrontendKind},
    modes::{Applied, Dataplane as _, Programmed as _, ebpf::EbpfDataplane},
    sys::bpf,
};

use crate::{
    desired::{change, endpoint, endpoints, port, shared},
    sandbox::{Sandbox, serve},
};

const ENDPOINTS: u32 = 2_000;
const EXTERNAL_IPS: u32 = 500;
/// The number of Services whose endpoints need more slots, and whose external addresses need more
/// frontends, than there is room for at first.
const SERVICES: u32 = 300;
const DIALLED: &str = "10.96.0.1";

fn first(limit: Limit) -> u32 {
    limit.first_entries(limit.default_entries())
}

fn open(sandbox: &mut Sandbox, limits: Limits) -> EbpfDataplane {
    sandbox.config.limits = limits;
    sandbox.open()
}

fn large(number: u32) -> DesiredPort {
    let [.., high, low] = number.to_be_bytes();
    let address = |n: u32, network: [u8; 2]| {
        let [.., high, low] = n.to_be_bytes();
        [network[0], network[1], high, low]
    };
    let endpoints = (1..=ENDPOINTS).map(|n| {
        let [a, b, c, d] = address(n, [10, 1]);
        endpoint(&format!("{a}.{b}.{c}.{d}"), 80)
    });
    let mut port = port(&format!("large{number}"), &format!("10.97.{high}.{low}"), endpoints.collect());
    port.frontends.extend((0..EXTERNAL_IPS).map(|n| Frontend {
        kind: FrontendKind::ExternalIp,
        address: (number * EXTERNAL_IPS + n + 0x1400_0000).to_be_bytes().into(),
        port: 80,
    }));
    port
}

/// Returns a Service with one endpoint.
fn slim(number: u32) -> DesiredPort {
    DesiredPort { endpoints: endpoints(vec![endpoint("10.1.0.1", 80)]), ..large(number) }
}

fn cluster_ips(sandbox: &Sandbox) -> usize {
    let services = sandbox.snapshot().services;
    services.into_iter().flat_map(|service| service.frontends).filter(|frontend| !frontend.external).count()
}

fn dialled(backend: u16) -> DesiredPort {
    port("dialled", DIALLED, vec![endpoint("127.0.0.1", backend)])
}

fn sizes(sandbox: &Sandbox) -> [u32; 4] {
    [map_name::frontends4, map_name::frontends6, map_name::slots4, map_name::slots6]
        .map(|name| sandbox.room(name))
}

/// Returns the number of slots, and of frontends, of the service ports that are served.
fn served(sandbox: &Sandbox) -> (usize, usize) {
    let services = sandbox.snapshot().services;
    let endpoints = services.iter().map(|service| service.cluster.len()).sum();
    (endpoints, services.iter().map(|service| service.frontends.len()).sum())
}

fn backends(sandbox: &Sandbox) -> Vec<(u32, SocketAddr)> {
    sandbox.snapshot().backends.iter().map(|backend| (backend.id, backend.address)).collect()
}

#[test]
fn what_is_desired_has_room_and_is_dialled_all_the_time() {
    let Some(mut sandbox) = Sandbox::new() else { return };
    let (former, later) = (serve("127.0.0.1", "former"), serve("127.0.0.1", "later"));
    let mut dataplane = open(&mut sandbox, Limits::default());
    let at_first = [Limit::Frontends, Limit::Frontends, Limit::Slots, Limit::Slots].map(first);
    assert_eq!(sizes(&sandbox), at_first);
    let few = shared([dialled(former), large(0)]);
    dataplane.resync(&few).unwrap();
    let backends = backends(&sandbox);

    let all = shared((0..SERVICES).map(large));
    let done = AtomicBool::new(false);
    let failed = thread::scope(|scope| {
        let dialling = scope.spawn(|| {
            // The dials are made in the network namespace of the scope's thread.
            let mut answers = Vec::new();
            while !done.load(Ordering::Acquire) {
                answers.push(sandbox.dial(DIALLED, 80));
            }
            answers
        });
        dataplane.apply(&change(all.clone())).unwrap();
        done.store(true, Ordering::Release);
        let answers = dialling.join().unwrap();
        assert!(!answers.is_empty());
        answers.into_iter().find(|answer| answer.as_deref() != Ok("former"))
    });
    assert_eq!(failed, None);
    assert_eq!(dataplane.take_waiting().unwrap_or_default(), Default::default());
    assert_eq!(sizes(&sandbox), at_first.map(|entries| 2 * entries));
    let all_endpoints = SERVICES * ENDPOINTS + 1;
    let all_frontends = SERVICES * (EXTERNAL_IPS + 1) + 1;
    assert_eq!(served(&sandbox), (all_endpoints as usize, all_frontends as usize));
    assert_eq!(self::backends(&sandbox), backends);
    let usage = dataplane.usage().unwrap();
    let slots = usage.maps.iter().find(|usage| usage.name == map_name::slots4).unwrap();
    assert_eq!(slots.capacity, u64::from(Limit::Slots.default_entries()));

    // The programs read what is written from now on.
    dataplane.apply(&change(shared([dialled(later)]))).unwrap();
    assert_eq!(sandbox.dial(DIALLED, 80).unwrap(), "later");

    // Another controller finds all of it, and writes nothing.
    drop(dataplane);
    let mut dataplane = open(&mut sandbox, Limits::default());
    let desired: Vec<_> = shared([dialled(later)]).into_iter().chain(all).collect();
    assert_eq!(dataplane.resync(&desired).unwrap(), Applied::default());
    assert_eq!(sizes(&sandbox), at_first.map(|entries| 2 * entries));

    // Room that is not needed any more is given back at the next start.
    dataplane.resync(&few).unwrap();
    drop(dataplane);
    let mut dataplane = open(&mut sandbox, Limits::default());
    // Slots stay where they are, so their maps may still need the larger size.
    assert_eq!(sizes(&sandbox)[..2], at_first[..2]);
    dataplane.resync(&few).unwrap();
    assert_eq!(sandbox.dial(DIALLED, 80).unwrap(), "former");
}

#[test]
fn the_first_sync_leaves_room_to_spare() {
    let Some(mut sandbox) = Sandbox::new() else { return };
    let mut dataplane = open(&mut sandbox, Limits::default());
    // With cluster-IP entries, the Services take more than three quarters of the room for
    // frontends.
    let all = shared((0..200).map(slim));
    dataplane.resync(&all).unwrap();
    let [frontends, slots] = [Limit::Frontends, Limit::Slots].map(first);
    let grown = [2 * frontends, 2 * frontends, slots, slots];
    assert_eq!(sizes(&sandbox), grown);
    drop(dataplane);
    let mut dataplane = open(&mut sandbox, Limits::default());
    assert_eq!(sizes(&sandbox), grown);
    assert_eq!(dataplane.resync(&all).unwrap(), Applied::default());
}

#[test]
fn the_limit_is_the_most_and_external_addresses_give_way_there() {
    let Some(mut sandbox) = Sandbox::new() else { return };
    let frontends = first(Limit::Frontends) + 100;
    let mut dataplane = open(&mut sandbox, Limits { frontends, ..Limits::default() });
    let all: Vec<_> = (0..SERVICES).map(slim).collect();
    dataplane.resync(&shared(all.clone())).unwrap();
    assert_eq!(sandbox.room(map_name::frontends4), frontends);
    assert_eq!(served(&sandbox).1, frontends as usize);
    assert_eq!(cluster_ips(&sandbox), SERVICES as usize);
    assert_eq!(dataplane.take_waiting().unwrap().len(), SERVICES as usize);
    dataplane.apply(&change(shared([dialled(80)]))).unwrap();
    assert_eq!(cluster_ips(&sandbox), SERVICES as usize + 1);
}

/// The folder `larger` cannot be used as long as there is a folder in it with the name of the map.
#[test]
fn what_waits_where_a_map_cannot_grow_is_served_once_it_can() {
    let Some(mut sandbox) = Sandbox::new() else { return };
    let mut dataplane = open(&mut sandbox, Limits::default());
    let obstacle = sandbox.pins("larger").join(map_name::frontends4);
    fs::create_dir(&obstacle).unwrap();
    let all: Vec<_> = (0..SERVICES).map(slim).collect();
    dataplane.resync(&shared(all)).unwrap();
    let at_first = first(Limit::Frontends);
    assert_eq!((sandbox.room(map_name::frontends4), served(&sandbox).1), (at_first, at_first as usize));
    assert_eq!(cluster_ips(&sandbox), SERVICES as usize);
    assert_eq!(dataplane.take_waiting().unwrap().len(), SERVICES as usize);
    let capacity = |dataplane: &EbpfDataplane| {
        let usage = dataplane.usage().unwrap();
        usage.maps.iter().find(|usage| usage.name == map_name::frontends4).unwrap().capacity
    };
    assert_eq!(capacity(&dataplane), u64::from(at_first));
    fs::remove_dir(&obstacle).unwrap();
    dataplane.stop_growth_rest();
    dataplane.collect_garbage().unwrap();
    assert_eq!(sandbox.room(map_name::frontends4), 2 * at_first);
    assert_eq!(served(&sandbox).1, (SERVICES * (EXTERNAL_IPS + 1)) as usize);
    assert_eq!(dataplane.take_waiting().unwrap(), Default::default());
}

/// A controller was killed when it had made some larger maps, and when some of these had replaced
/// the former maps.
#[test]
fn growth_that_was_interrupted_is_made_anew() {
    let Some(mut other) = Sandbox::new() else { return };
    drop(open(&mut other, Limits::default()));
    let Some(mut sandbox) = Sandbox::new() else { return };
    let mut dataplane = open(&mut sandbox, Limits::default());
    let all = shared((0..SERVICES).map(large));
    dataplane.resync(&all).unwrap();
    let (before, served_before) = (sizes(&sandbox), served(&sandbox));
    drop(dataplane);
    let at_first = |name| bpf::pinned(&other.map_pin(name)).unwrap();
    for name in [map_name::frontends6, map_name::slots6] {
        fs::remove_file(sandbox.map_pin(name)).unwrap();
        bpf::pin(at_first(name).as_fd(), &sandbox.map_pin(name)).unwrap();
        bpf::pin(at_first(name).as_fd(), &sandbox.pins("larger").join(name)).unwrap();
    }
    assert_ne!(sizes(&sandbox), before);
    let mut dataplane = open(&mut sandbox, Limits::default());
    assert_eq!(fs::read_dir(sandbox.pins("larger")).unwrap().count(), 0);
    assert_eq!(dataplane.resync(&all).unwrap(), Applied::default());
    assert_eq!((sizes(&sandbox), served(&sandbox)), (before, served_before));
}
