//! Tests who is served if a map has no room for all.

use std::collections::BTreeMap;

use proxy_ctl::{
    config::Limits,
    model::desired::{Changes, DesiredPort, Frontend, FrontendKind},
    modes::{Applied, Dataplane, Effect, ebpf::EbpfDataplane},
};

use proptest::{prelude::*, test_runner::TestRunner};
use rstest::rstest;

use crate::{
    desired::{change, endpoint, port, shared, with_node_port},
    sandbox::Sandbox,
};

const ROOM: usize = 8;

fn open(sandbox: &Sandbox) -> EbpfDataplane {
    sandbox.open_with(Limits { frontends: ROOM as u32, ..sandbox.config.limits })
}

fn with_external_ips(mut port: DesiredPort, network: u8, count: u8) -> DesiredPort {
    port.frontends.extend((0..count).map(|last| Frontend {
        kind: FrontendKind::ExternalIp,
        address: [192, 0, network, last].into(),
        port: 80,
    }));
    port
}

fn hog() -> DesiredPort {
    with_external_ips(port("hog", "10.96.0.1", vec![endpoint("10.0.0.1", 80)]), 1, 20)
}

fn plain(name: &str, last: u8) -> DesiredPort {
    port(name, &format!("10.96.0.{last}"), vec![endpoint("10.0.0.2", 80)])
}

/// Returns the number of frontends of each service port.
fn served(sandbox: &Sandbox) -> BTreeMap<String, usize> {
    let services = sandbox.snapshot().services.into_iter();
    services.map(|service| (service.name.service.name.to_string(), service.frontends.len())).collect()
}

fn is(all: &[(&str, usize)]) -> BTreeMap<String, usize> {
    all.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
}

/// Returns the names of service ports, and the fields that there is no room for.
fn without_room(dataplane: &mut EbpfDataplane) -> Option<Vec<(String, &'static str)>> {
    let all = dataplane.take_waiting()?;
    let fields = all.into_iter().flat_map(|(name, all)| {
        all.into_iter().map(move |one| {
            assert!(one.instead.contains("frontends4") && one.instead.contains("limits.frontends"));
            (name.service.name.to_string(), one.field)
        })
    });
    Some(fields.collect())
}

#[test]
fn external_addresses_give_way_to_later_cluster_ips_and_node_ports_and_come_back() {
    let Some(sandbox) = Sandbox::new() else { return };
    let mut dataplane = open(&sandbox);
    dataplane.resync(&shared([hog()])).unwrap();
    assert_eq!(served(&sandbox), is(&[("hog", ROOM)]));
    let hog_lacks = || Some(vec![("hog".to_owned(), "spec.externalIPs")]);
    assert_eq!(without_room(&mut dataplane), hog_lacks());
    assert_eq!(without_room(&mut dataplane), None);

    let later = with_node_port(plain("later", 2), 30080);
    dataplane.apply(&change(shared([later.clone()]))).unwrap();
    assert_eq!(served(&sandbox), is(&[("hog", ROOM - 2), ("later", 2)]));
    // Another restart writes nothing, and a change of what is served already moves nobody.
    drop(dataplane);
    let mut dataplane = open(&sandbox);
    let all = shared([hog(), later.clone()]);
    assert_eq!(dataplane.resync(&all).unwrap(), Applied::default());
    assert_eq!(dataplane.resync(&all).unwrap(), Applied::default());
    assert_eq!(without_room(&mut dataplane), hog_lacks());

    let removed = vec![later.name.clone()];
    dataplane.apply(&Changes { changed: Vec::new(), removed }).unwrap();
    assert_eq!(served(&sandbox), is(&[("hog", ROOM)]));
    let few = with_external_ips(port("hog", "10.96.0.1", vec![endpoint("10.0.0.1", 80)]), 1, 3);
    dataplane.apply(&change(shared([few]))).unwrap();
    assert_eq!(served(&sandbox), is(&[("hog", 4)]));
    assert_eq!(without_room(&mut dataplane), Some(Vec::new()));
}

#[test]
fn a_service_with_many_addresses_does_not_take_those_of_its_neighbours() {
    let Some(sandbox) = Sandbox::new() else { return };
    let mut dataplane = open(&sandbox);
    let small = with_external_ips(plain("small", 2), 2, 2);
    dataplane.resync(&shared([small])).unwrap();
    dataplane.apply(&change(shared([hog()]))).unwrap();
    assert_eq!(served(&sandbox), is(&[("hog", ROOM - 3), ("small", 3)]));
    // A ClusterIP replaces an address of the Service that has most.
    dataplane.apply(&change(shared([plain("later", 3)]))).unwrap();
    assert_eq!(served(&sandbox), is(&[("hog", ROOM - 4), ("later", 1), ("small", 3)]));
    let lacking = without_room(&mut dataplane).unwrap();
    assert_eq!(lacking, [("hog".to_owned(), "spec.externalIPs")]);
}

#[test]
fn external_addresses_that_come_to_a_full_map_are_named_and_served_when_others_go() {
    let Some(sandbox) = Sandbox::new() else { return };
    let mut dataplane = open(&sandbox);
    dataplane.resync(&shared([hog()])).unwrap();
    let small = with_external_ips(plain("small", 2), 2, 2);
    dataplane.apply(&change(shared([small]))).unwrap();
    assert_eq!(served(&sandbox), is(&[("hog", ROOM - 1), ("small", 1)]));
    let lacking = without_room(&mut dataplane).unwrap();
    assert_eq!(lacking, ["hog", "small"].map(|name| (name.to_owned(), "spec.externalIPs")));
    dataplane.apply(&Changes { changed: Vec::new(), removed: vec![hog().name] }).unwrap();
    assert_eq!(served(&sandbox), is(&[("small", 3)]));
    assert_eq!(without_room(&mut dataplane), Some(Vec::new()));
}

#[test]
fn cluster_ips_beyond_the_map_are_named_and_served_when_others_go() {
    let Some(sandbox) = Sandbox::new() else { return };
    let mut dataplane = open(&sandbox);
    let all: Vec<_> = (0..=ROOM as u8).map(|n| plain(&format!("s{n}"), n + 1)).collect();
    dataplane.resync(&shared(all.clone())).unwrap();
    let lacking = without_room(&mut dataplane).unwrap();
    let [(name, "spec.clusterIPs")] = lacking.as_slice() else { panic!("{lacking:?}") };
    assert_eq!(served(&sandbox)[name], 0);
    let other = all.iter().find(|port| *port.name.service.name != **name).unwrap();
    dataplane.apply(&Changes { changed: Vec::new(), removed: vec![other.name.clone()] }).unwrap();
    assert_eq!(served(&sandbox)[name], 1);
    assert_eq!(without_room(&mut dataplane), Some(Vec::new()));
}

fn with_endpoints(name: &str, last: u8, count: u8) -> DesiredPort {
    let endpoints = (1..=count).map(|n| endpoint(&format!("10.0.{last}.{n}"), 80)).collect();
    port(name, &format!("10.96.0.{last}"), endpoints)
}

/// The maps have room for `small` with two endpoints and for `late`, but not for `large` as well.
#[rstest]
#[case::slots(|limits| Limits { slots: 6, ..limits }, "slots4 has room for 6 entries", "endpoints")]
#[case::backends(|limits| Limits { backends: 6, ..limits }, "backends4 has room for 6 entries", "endpoints")]
// The first entry belongs to no service.
#[case::services(|limits| Limits { services: 3, ..limits }, "services has room for 3 entries", "spec.ports")]
#[case::all_three(
    |limits| Limits { slots: 6, backends: 6, services: 3, ..limits },
    "services has room for 3 entries",
    "spec.ports"
)]
fn a_service_that_a_full_map_keeps_out_is_named_and_served_when_there_is_room(
    #[case] limit: fn(Limits) -> Limits,
    #[case] full: &str,
    #[case] field: &str,
) {
    let Some(sandbox) = Sandbox::new() else { return };
    let mut dataplane = sandbox.open_with(limit(sandbox.config.limits));
    let [small, late, large] = [("small", 1, 2), ("late", 2, 1), ("large", 3, 4)]
        .map(|(name, last, count)| with_endpoints(name, last, count));
    // Slots are contiguous, and those of `small` are next to the free ones.
    dataplane.resync(&shared([late.clone(), small.clone()])).unwrap();
    let before = sandbox.snapshot();
    // Nothing of `large` is written, not even for a moment.
    assert_eq!(dataplane.apply(&change(shared([large.clone()]))).unwrap(), Applied::default());
    let told = dataplane.take_waiting().unwrap();
    let [one] = told[&large.name].as_slice() else { panic!("{told:?}") };
    assert_eq!((one.field, one.effect, told.len()), (field, Effect::NotServed, 1));
    assert!(one.instead.starts_with(&format!("not served: map {full}")), "{}", one.instead);
    // A later resync counts it neither as a failure nor as a difference.
    let all = shared([small.clone(), late.clone(), large.clone()]);
    for _ in 0..2 {
        assert_eq!(dataplane.resync(&all).unwrap(), Applied::default());
    }
    drop(dataplane);
    let mut dataplane = sandbox.open_with(limit(sandbox.config.limits));
    assert_eq!(dataplane.resync(&all).unwrap(), Applied::default());
    dataplane.collect_garbage().unwrap();
    let after = sandbox.snapshot();
    assert_eq!((&after.services, &after.backends), (&before.services, &before.backends));
    assert_eq!(dataplane.take_waiting(), Some(told));

    dataplane.apply(&Changes { changed: Vec::new(), removed: vec![small.name] }).unwrap();
    assert_eq!(served(&sandbox), is(&[("large", 1), ("late", 1)]));
    assert_eq!(dataplane.take_waiting(), Some(BTreeMap::new()));
    assert_eq!(dataplane.resync(&shared([late, large])).unwrap(), Applied::default());
}

/// Returns the addresses of a Service's endpoints, with the ids of their backends.
fn backends_of(sandbox: &Sandbox, name: &str) -> BTreeMap<String, u32> {
    let services = sandbox.snapshot().services;
    let service = services.iter().find(|one| &*one.name.service.name == name).unwrap();
    service.cluster.iter().map(|one| (one.address.ip().to_string(), one.backend)).collect()
}

fn endpoints_of(sandbox: &Sandbox, name: &str) -> Vec<String> {
    backends_of(sandbox, name).into_keys().collect()
}

fn web(numbers: &[u8]) -> DesiredPort {
    port("web", "10.96.0.1", numbers.iter().map(|n| endpoint(&format!("10.0.1.{n}"), 80)).collect())
}

/// The Service `web` has endpoints 1 and 2, and the maps have no room for more.
#[rstest]
#[case::more_than_there_is_room_for_keeps_the_old(&[1, 2, 3, 4, 5], &[1, 2], Some(Effect::PartlyServed))]
#[case::those_that_are_gone_are_not_dialled(&[2, 3, 4, 5, 6], &[2], Some(Effect::PartlyServed))]
#[case::none_is_left(&[3, 4, 5, 6, 7], &[], Some(Effect::PartlyServed))]
#[case::others_replace_those_that_are_gone(&[3, 4], &[3, 4], None)]
#[case::one_of_two_is_another(&[2, 3], &[2, 3], None)]
fn a_service_whose_new_endpoints_have_no_room_is_served_with_those_that_it_has(
    #[case] wanted: &[u8],
    #[case] expected: &[u8],
    #[case] effect: Option<Effect>,
    #[values(
        |limits| Limits { slots: 3, ..limits },
        |limits| Limits { backends: 3, ..limits },
        |limits| Limits { slots: 3, backends: 3, ..limits },
    )]
    limit: fn(Limits) -> Limits,
    #[values(false, true)] restart: bool,
) {
    let Some(sandbox) = Sandbox::new() else { return };
    let limits = limit(sandbox.config.limits);
    let mut dataplane = sandbox.open_with(limits);
    let other = with_endpoints("other", 2, 1);
    dataplane.resync(&shared([web(&[1, 2]), other.clone()])).unwrap();
    let before = backends_of(&sandbox, "web");
    let all = shared([web(wanted), other.clone()]);
    if restart {
        drop(dataplane);
        dataplane = sandbox.open_with(limits);
        dataplane.resync(&all).unwrap();
    } else {
        dataplane.apply(&change(shared([web(wanted)]))).unwrap();
    }
    let told = dataplane.take_waiting().unwrap_or_default();
    let told_of_web =
        told.get(&web(&[]).name).map(|all| all.iter().map(|one| one.effect).collect::<Vec<_>>());
    assert_eq!(told_of_web, effect.map(|effect| vec![effect]));
    let expected: Vec<_> = expected.iter().map(|n| format!("10.0.1.{n}")).collect();
    assert_eq!(endpoints_of(&sandbox, "web"), expected);
    assert_eq!(endpoints_of(&sandbox, "other"), ["10.0.2.1"]);
    // Sockets and flows stay with a backend by its id.
    for (address, id) in backends_of(&sandbox, "web") {
        assert_eq!(id, *before.get(&address).unwrap_or(&id), "backend {address}");
    }
    for _ in 0..2 {
        assert_eq!(dataplane.resync(&all).unwrap(), Applied::default());
    }
    assert_eq!(endpoints_of(&sandbox, "web"), expected);
}

#[test]
fn slots_that_are_free_but_not_side_by_side_are_no_room() {
    let Some(sandbox) = Sandbox::new() else { return };
    let mut dataplane = sandbox.open_with(Limits { slots: 6, ..sandbox.config.limits });
    let ports = [1, 2, 3].map(|n| with_endpoints(&format!("s{n}"), n, 2));
    for port in &ports {
        dataplane.apply(&change(shared([port.clone()]))).unwrap();
    }
    let [first, second, third] = ports;
    let large = with_endpoints("large", 9, 4);
    let removed = |port: DesiredPort| Changes { changed: Vec::new(), removed: vec![port.name] };
    dataplane.apply(&change(shared([large.clone()]))).unwrap();
    dataplane.apply(&removed(first)).unwrap();
    dataplane.apply(&removed(third)).unwrap();
    let told = dataplane.take_waiting().unwrap();
    assert_eq!(told.keys().collect::<Vec<_>>(), [&large.name]);
    assert_eq!(served(&sandbox), is(&[("s2", 1)]));
    assert_eq!(dataplane.resync(&shared([second.clone(), large])).unwrap(), Applied::default());
    dataplane.apply(&removed(second)).unwrap();
    assert_eq!(served(&sandbox), is(&[("large", 1)]));
}

/// Draws steps: a Service, the number of its endpoints (with 0 it goes), and whether the controller
/// starts anew, which takes seconds.
fn churn() -> impl Strategy<Value = Vec<(u8, u8, bool)>> {
    prop::collection::vec((0..8_u8, 0..7_u8, prop::bool::weighted(0.03)), 20..80)
}

/// Compares what is served and what waits by the number of endpoints. There are as many backends as
/// endpoints.
#[test]
fn whatever_fits_is_served_and_nobody_is_thrown_out() {
    const ENDPOINTS: usize = 12;
    const SERVICES: usize = 5;
    let Some(sandbox) = Sandbox::new() else { return };
    // There are plenty of slots, because this test is not about their fragmentation.
    let limits =
        Limits { backends: ENDPOINTS as u32, services: SERVICES as u32 + 1, ..sandbox.config.limits };
    let config = ProptestConfig { cases: 3, failure_persistence: None, ..ProptestConfig::default() };
    let run = |steps: Vec<(u8, u8, bool)>| {
        let mut dataplane = sandbox.open_with(limits);
        dataplane.resync(&[]).unwrap();
        let mut all: BTreeMap<String, DesiredPort> = BTreeMap::new();
        let mut before = BTreeMap::new();
        for (n, count, restart) in steps {
            let port = with_endpoints(&format!("s{n}"), n, count);
            let name = format!("s{n}");
            if count == 0 {
                all.remove(&name);
                dataplane.apply(&Changes { changed: Vec::new(), removed: vec![port.name] }).unwrap();
            } else {
                all.insert(name.clone(), port.clone());
                dataplane.apply(&change(shared([port]))).unwrap();
            }
            if restart {
                drop(dataplane);
                dataplane = sandbox.open_with(limits);
            }
            let desired = shared(all.values().cloned());
            prop_assert_eq!(dataplane.resync(&desired).unwrap(), Applied::default());
            let snapshot = sandbox.snapshot();
            let served: BTreeMap<String, usize> = snapshot
                .services
                .iter()
                .map(|one| (one.name.service.name.to_string(), one.cluster.len()))
                .collect();
            let used: usize = served.values().sum();
            prop_assert_eq!(snapshot.backends.len(), used, "what waits holds nothing");
            for (name, port) in &all {
                let wanted = port.endpoints.all.len();
                match served.get(name) {
                    Some(found) if *found == wanted => {}
                    Some(found) => prop_assert!(used - found + wanted > ENDPOINTS, "{name} would fit"),
                    None => prop_assert!(
                        served.len() == SERVICES || used + wanted > ENDPOINTS,
                        "{name} would fit"
                    ),
                }
            }
            for other in served_still(&before, &all) {
                prop_assert!(served.contains_key(other), "{other} was served");
            }
            before = served;
        }
        Ok(())
    };
    TestRunner::new(config).run(&churn(), run).unwrap();
}

/// Returns what was served and is still desired.
fn served_still<'a>(
    before: &'a BTreeMap<String, usize>,
    all: &'a BTreeMap<String, DesiredPort>,
) -> impl Iterator<Item = &'a String> {
    before.keys().filter(|name| all.contains_key(*name))
}
