//! Tests that any sequence of changes leaves what a resync from scratch would.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc};

use proptest::{prelude::*, test_runner::TestRunner};
use proxy_common::layout::ServiceName;
use proxy_ctl::{
    model::{
        desired::{Changes, DesiredPort, Endpoint, Frontend, FrontendKind, ServicePortName},
        objects::{IpFamily, Protocol, TrafficPolicy},
    },
    modes::{
        Applied, BackendSnapshot, Dataplane, EndpointSnapshot, FrontendSnapshot, Programmed as _,
        ServiceSnapshot, Snapshot,
    },
};

use crate::{
    desired::{name, port, with_node_port},
    sandbox::Sandbox,
};

#[derive(Clone, Debug)]
struct Step {
    service: u8,
    /// `None` if the Service is removed.
    state: Option<(Vec<Endpoint>, Vec<prop::sample::Index>, bool)>,
    resync: bool,
    collect: bool,
}

fn endpoint() -> impl Strategy<Value = Endpoint> {
    (1..12_u8, any::<bool>(), any::<bool>()).prop_map(|(n, local, terminating)| Endpoint {
        address: [10, 0, 0, n].into(),
        port: 80,
        local,
        terminating,
        weight: 1,
    })
}

fn step() -> impl Strategy<Value = Step> {
    let all = prop::collection::vec(endpoint(), 0..6).prop_map(|mut all| {
        all.sort_by_key(|endpoint| (!endpoint.local, endpoint.address));
        all.dedup_by_key(|endpoint| endpoint.address);
        let mut seen = Vec::new();
        all.retain(|endpoint| {
            !seen.contains(&endpoint.address) && {
                seen.push(endpoint.address);
                true
            }
        });
        all
    });
    let subset = prop::collection::vec(any::<prop::sample::Index>(), 0..4);
    let state = prop::option::weighted(0.8, (all, subset, any::<bool>()));
    (0..5_u8, state, prop::bool::weighted(0.1), prop::bool::weighted(0.3))
        .prop_map(|(service, state, resync, collect)| Step { service, state, resync, collect })
}

fn desired(step: &Step) -> Option<DesiredPort> {
    let (all, subset, node_port) = step.state.clone()?;
    let n = step.service;
    let mut port = port(&format!("s{n}"), &format!("10.96.0.{n}"), all);
    if !port.endpoints.all.is_empty() {
        let count = port.endpoints.all.len();
        let mut internal: Vec<u32> = subset.iter().map(|index| index.index(count) as u32).collect();
        internal.sort_unstable();
        internal.dedup();
        port.internal_policy =
            if internal.is_empty() { TrafficPolicy::Local } else { TrafficPolicy::Cluster };
        port.endpoints.internal = internal.into();
    }
    // Only one of all Services has the node port, which is the one that came last.
    Some(if node_port { with_node_port(port, 30_000 + u16::from(n)) } else { port })
}

/// A snapshot without the numbers that the mode has given.
#[derive(Debug, Default, Eq, PartialEq)]
struct Contents {
    services: BTreeMap<ServicePortName, Service>,
    /// The backends by address, port and protocol: how many service ports use each, whether it is
    /// local, and terminating.
    backends: BTreeMap<(SocketAddr, Protocol), (u32, bool, bool)>,
}

#[derive(Debug, Eq, PartialEq)]
struct Service {
    frontends: Vec<FrontendSnapshot>,
    /// The sets for scope cluster, for internal and for external clients. Each endpoint has its
    /// address, and whether it is local.
    sets: [Vec<(SocketAddr, bool)>; 3],
    any_endpoints: bool,
    policies: [TrafficPolicy; 2],
    affinity_seconds: u32,
}

fn programmed(snapshot: Snapshot) -> Contents {
    let set = |set: Vec<EndpointSnapshot>| set.into_iter().map(|one| (one.address, one.local)).collect();
    let service = |one: ServiceSnapshot| {
        let service = Service {
            frontends: one.frontends,
            sets: [set(one.cluster), set(one.internal), set(one.external)],
            any_endpoints: one.any_endpoints,
            policies: [one.internal_policy, one.external_policy],
            affinity_seconds: one.affinity_seconds,
        };
        (one.name, service)
    };
    let backend =
        |one: BackendSnapshot| ((one.address, one.protocol.unwrap()), (one.uses, one.local, one.terminating));
    Contents {
        services: snapshot.services.into_iter().map(service).collect(),
        backends: snapshot.backends.into_iter().map(backend).collect(),
    }
}

fn wanted<'a>(desired: impl Iterator<Item = &'a Arc<DesiredPort>>) -> Contents {
    let mut contents = Contents::default();
    for port in desired {
        let DesiredPort { name, endpoints, .. } = &**port;
        let address = |one: &Endpoint| SocketAddr::new(one.address, one.port);
        let set = |indexes: &[u32]| {
            let all = indexes.iter().map(|index| &endpoints.all[*index as usize]);
            all.map(|one| (address(one), one.local)).collect()
        };
        let mut frontends: Vec<_> = port.frontends.iter().map(frontend).collect();
        frontends.sort_unstable();
        let service = Service {
            frontends,
            sets: [set(&endpoints.cluster), set(&endpoints.internal), set(&endpoints.external)],
            any_endpoints: endpoints.any,
            policies: [port.internal_policy, port.external_policy],
            affinity_seconds: port.affinity_seconds.unwrap_or(0),
        };
        contents.services.insert(name.clone(), service);
        for one in &endpoints.all {
            let unused = (0, false, true);
            let backend = contents.backends.entry((address(one), name.protocol)).or_insert(unused);
            *backend = (backend.0 + 1, backend.1 || one.local, backend.2 && one.terminating);
        }
    }
    contents
}

fn frontend(frontend: &Frontend) -> FrontendSnapshot {
    FrontendSnapshot {
        address: (frontend.kind != FrontendKind::NodePort).then_some(frontend.address),
        port: frontend.port,
        external: frontend.kind != FrontendKind::ClusterIp,
    }
}

#[test]
fn changes_leave_what_a_resync_would() {
    let Some(sandbox) = Sandbox::new() else { return };
    // There are few sequences and they are long, because loading the programs takes two seconds,
    // and a step a millisecond.
    let config = ProptestConfig { cases: 3, failure_persistence: None, ..ProptestConfig::default() };
    let sequence = prop::collection::vec(step(), 50..150);
    TestRunner::new(config)
        .run(&sequence, |steps| {
            let mut dataplane = sandbox.open();
            // One id is never given out. The other is one that the next stray finds waiting for a
            // grace period.
            let mut strays = [0, 511].iter().cycle();
            let names = sandbox.map::<u32, ServiceName>("service_names");
            let mut now: BTreeMap<u8, Arc<DesiredPort>> = BTreeMap::new();
            dataplane.resync(&[]).unwrap();
            for step in steps {
                let mut changes = Changes::default();
                match desired(&step) {
                    Some(port) => {
                        let port = Arc::new(port);
                        now.insert(step.service, Arc::clone(&port));
                        changes.changed.push(port);
                    }
                    None => {
                        now.remove(&step.service);
                        changes.removed.push(name(&format!("s{}", step.service), IpFamily::Ipv4));
                    }
                }
                dataplane.apply(&changes).unwrap();
                prop_assert_eq!(programmed(dataplane.snapshot().unwrap()), wanted(now.values()));
                if step.collect {
                    dataplane.collect_garbage().unwrap();
                }
                if step.resync {
                    let all: Vec<_> = now.values().cloned().collect();
                    prop_assert_eq!(dataplane.resync(&all).unwrap(), Applied::default());
                    // After a difference, the maps are read as a new controller does.
                    names.set(strays.next().unwrap(), &ServiceName::default()).unwrap();
                    prop_assert_eq!(dataplane.resync(&all).unwrap(), Applied { written: 0, removed: 1 });
                }
            }
            drop(dataplane);
            let mut dataplane = sandbox.open();
            let all: Vec<_> = now.values().cloned().collect();
            let by_changes = programmed(sandbox.snapshot());
            prop_assert_eq!(&by_changes, &wanted(now.values()), "the pins say the same");
            prop_assert_eq!(dataplane.resync(&all).unwrap(), Applied::default(), "nothing is left to do");
            dataplane.resync(&[]).unwrap();
            prop_assert_eq!(programmed(sandbox.snapshot()), Contents::default());
            dataplane.resync(&all).unwrap();
            prop_assert_eq!(programmed(sandbox.snapshot()), by_changes);
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_thousand_changes_leak_neither_slots_nor_ids() {
    let Some((_sandbox, mut dataplane)) = Sandbox::opened() else { return };
    for round in 0..1_000_u32 {
        let n = round % 7;
        let all =
            (0..=round % 5).map(|e| crate::desired::endpoint(&format!("10.0.{n}.{}", e + 1), 80)).collect();
        let port = port(&format!("s{n}"), &format!("10.96.0.{n}"), all);
        let removed = if round % 3 == 0 { vec![port.name.clone()] } else { Vec::new() };
        let changed = if removed.is_empty() { vec![Arc::new(port)] } else { Vec::new() };
        dataplane.apply(&Changes { changed, removed }).unwrap();
    }
    let removed = (0..7).map(|n| name(&format!("s{n}"), IpFamily::Ipv4)).collect();
    dataplane.apply(&Changes { changed: Vec::new(), removed }).unwrap();
    dataplane.collect_garbage().unwrap();
    let usage = dataplane.usage().unwrap();
    for name in ["frontends4", "services", "service_names", "slots4", "backends4"] {
        assert_eq!(usage.maps.iter().find(|found| found.name == name).unwrap().used, 0, "{name}");
    }
}
