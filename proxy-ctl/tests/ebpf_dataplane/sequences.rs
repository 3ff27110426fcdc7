//! Any sequence of changes leaves what a resync from scratch would.

use std::{collections::BTreeMap, sync::Arc};

use proptest::{prelude::*, test_runner::TestRunner};
use proxy_ctl::{
    dataplane::{
        Applied, Dataplane,
        ebpf::{EbpfDataplane, status::Pinned},
    },
    model::{
        desired::{Changes, DesiredPort, Endpoint},
        objects::IpFamily,
    },
};

use super::{
    desired::{name, port, with_node_port},
    place::Place,
};

#[derive(Clone, Debug)]
struct Step {
    service: u8,
    /// `None`: the service is removed.
    state: Option<(Vec<Endpoint>, Vec<prop::sample::Index>, bool)>,
    restart: bool,
    collect: bool,
}

fn endpoint() -> impl Strategy<Value = Endpoint> {
    (1..12_u8, any::<bool>(), any::<bool>()).prop_map(|(n, local, terminating)| Endpoint {
        address: [10, 0, 0, n].into(),
        port: 80,
        local,
        terminating,
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
        .prop_map(|(service, state, restart, collect)| Step { service, state, restart, collect })
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
        port.endpoints.internal = internal;
    }
    // Of all services one has the node port: whichever came last.
    Some(if node_port { with_node_port(port, 30_000 + u16::from(n)) } else { port })
}

/// Contents of the tables by service, backend ids left out.
fn shown(place: &Place) -> BTreeMap<String, String> {
    let pinned = Pinned::open(&place.config.bpffs).unwrap();
    let mut shown = BTreeMap::new();
    for service in pinned.services().unwrap() {
        let set = |set: &[proxy_ctl::dataplane::ebpf::status::EndpointState]| -> Vec<_> {
            set.iter().map(|endpoint| (endpoint.address, endpoint.local)).collect()
        };
        let sets = [set(&service.cluster), set(&service.internal), set(&service.external)];
        shown.insert(
            service.name.to_string(),
            format!("{:?} {sets:?} {}", service.frontends, service.any_endpoints),
        );
    }
    for backend in pinned.backends().unwrap() {
        let text = format!("{} {} {}", backend.uses, backend.local, backend.terminating);
        shown.insert(backend.address.to_string(), text);
    }
    shown
}

#[test]
fn changes_leave_what_a_resync_would() {
    let Some(place) = Place::new() else { return };
    let config = ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() };
    let sequence = prop::collection::vec(step(), 1..25);
    TestRunner::new(config)
        .run(&sequence, |steps| {
            let mut dataplane = EbpfDataplane::open(&place.config).unwrap();
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
                if step.collect {
                    dataplane.collect_garbage().unwrap();
                }
                if step.restart {
                    drop(dataplane);
                    dataplane = EbpfDataplane::open(&place.config).unwrap();
                    let all: Vec<_> = now.values().cloned().collect();
                    prop_assert_eq!(dataplane.resync(&all).unwrap(), Applied::default());
                }
            }
            let all: Vec<_> = now.values().cloned().collect();
            let by_changes = shown(&place);
            prop_assert_eq!(dataplane.resync(&all).unwrap(), Applied::default(), "nothing is left to do");
            dataplane.resync(&[]).unwrap();
            prop_assert!(shown(&place).is_empty());
            dataplane.resync(&all).unwrap();
            prop_assert_eq!(shown(&place), by_changes);
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_thousand_changes_leak_neither_slots_nor_ids() {
    let Some(place) = Place::new() else { return };
    let mut dataplane = EbpfDataplane::open(&place.config).unwrap();
    for round in 0..1_000_u32 {
        let n = round % 7;
        let all =
            (0..=round % 5).map(|e| super::desired::endpoint(&format!("10.0.{n}.{}", e + 1), 80)).collect();
        let port = port(&format!("s{n}"), &format!("10.96.0.{n}"), all);
        let removed = if round % 3 == 0 { vec![port.name.clone()] } else { Vec::new() };
        let changed = if removed.is_empty() { vec![Arc::new(port)] } else { Vec::new() };
        dataplane.apply(&Changes { changed, removed }).unwrap();
    }
    let removed = (0..7).map(|n| name(&format!("s{n}"), IpFamily::Ipv4)).collect();
    dataplane.apply(&Changes { changed: Vec::new(), removed }).unwrap();
    dataplane.collect_garbage().unwrap();
    let usage = dataplane.usage().unwrap();
    for table in ["frontends4", "services", "service_names", "slots4", "backends4"] {
        assert_eq!(usage.tables.iter().find(|found| found.name == table).unwrap().used, 0, "{table}");
    }
}
