//! Tests that maps get another size with everything that is in them, whatever is interrupted.

use std::{fs, os::fd::AsFd as _, sync::Arc};

use proxy_common::{
    inventory::table,
    layout::{
        Affinity, AffinityKey, CLIENT_OUTSIDE, Client, Flow, FlowKey, MAP_BEFORE, MAP_IN_USE, PROTOCOL_TCP,
    },
    port::Port,
};
use proxy_ctl::{
    config::Limits,
    dataplane::{Applied, Dataplane as _, Programmed as _, ebpf::EbpfDataplane},
    model::desired::DesiredPort,
    sys::{bpf, map::Map},
};
use rstest::rstest;

use super::{
    desired::{endpoint, port, shared},
    sandbox::Sandbox,
};

type Flows = Map<FlowKey<[u8; 4]>, Flow<[u8; 4]>>;

fn limits(factor: u32) -> Limits {
    Limits {
        frontends: 128 * factor,
        services: 64 * factor,
        slots: 512 * factor,
        backends: 256 * factor,
        flows: 512 * factor,
        opening_flows: 128 * factor,
        affinity: 128 * factor,
        fragments: 128 * factor,
        source_ranges: 16 * factor,
        node_addresses: 8 * factor,
        service_counters: 4,
    }
}

fn open(sandbox: &mut Sandbox, factor: u32) -> EbpfDataplane {
    sandbox.config.limits = limits(factor);
    sandbox.open()
}

fn map<K: aya::Pod + Default, V: aya::Pod + Default>(sandbox: &Sandbox, path: &str) -> Map<K, V> {
    Map::new(bpf::pinned(&sandbox.pins(path)).unwrap()).unwrap().unwrap()
}

fn flow(number: u16) -> Flow<[u8; 4]> {
    let mut flow = Flow::default();
    (flow.client, flow.backend, flow.protocol) = ([192, 0, 2, 7], [10, 0, 0, 1], PROTOCOL_TCP);
    flow.set_client_port(Port::new(number));
    flow
}

fn affinity(sandbox: &Sandbox) -> Vec<(AffinityKey<[u8; 4]>, Affinity)> {
    let mut all = map(sandbox, "maps/affinity4").read_all().unwrap();
    all.sort_unstable_by_key(|(key, _): &(AffinityKey<[u8; 4]>, Affinity)| key.client.address);
    all
}

/// Adds clients of a service port that has no affinity, so that nothing reads them before the next
/// collection.
fn add_clients(sandbox: &Sandbox, count: u8) -> Vec<(AffinityKey<[u8; 4]>, Affinity)> {
    let table: Map<AffinityKey<[u8; 4]>, Affinity> = map(sandbox, "maps/affinity4");
    for number in 0..count {
        let client = Client { address: [192, 0, 2, number], origin: CLIENT_OUTSIDE };
        let affinity = Affinity { last_used: 1, backend: number.into(), flags: 0 };
        table.set(&AffinityKey { service: 1, client }, &affinity).unwrap();
    }
    affinity(sandbox)
}

fn add_flows(sandbox: &Sandbox, table: &str, count: u16) {
    let flows: Flows = map(sandbox, table);
    for number in 1..=count {
        flows.set(&flow(number).client_key(), &flow(number)).unwrap();
    }
}

fn numbers(sandbox: &Sandbox, table: &str) -> Vec<u16> {
    let flows: Flows = map(sandbox, table);
    let mut numbers: Vec<_> =
        flows.read_all().unwrap().iter().map(|(_, flow)| flow.client_port().number()).collect();
    numbers.sort_unstable();
    numbers
}

/// Returns a desired state of which more than half fits into maps of factor 1.
fn desired() -> Vec<Arc<DesiredPort>> {
    numbered(1..=40)
}

/// Asserts that no map is being replaced, and that programs use one map of each name.
fn assert_finished(sandbox: &Sandbox) {
    assert_eq!(fs::read_dir(sandbox.pins("before")).unwrap().count(), 0);
    for (_, maps) in table::RESIZABLE {
        assert_eq!(
            map::<u32, u32>(sandbox, &format!("maps/{maps}")).get(&MAP_BEFORE).unwrap(),
            None,
            "{maps}"
        );
    }
}

#[rstest]
#[case::up(1, 4)]
#[case::down(4, 1)]
fn every_table_keeps_what_it_holds(#[case] first: u32, #[case] second: u32) {
    let Some(mut sandbox) = Sandbox::new() else { return };
    let mut dataplane = open(&mut sandbox, first);
    dataplane.resync(&desired()).unwrap();
    let whole = sandbox.snapshot();
    drop(dataplane);
    add_flows(&sandbox, "maps/flows4", 300);
    add_flows(&sandbox, "maps/opening_flows4", 50);
    let clients = add_clients(&sandbox, 20);

    let mut dataplane = open(&mut sandbox, second);
    assert_eq!(sandbox.snapshot(), whole);
    assert_eq!(affinity(&sandbox), clients);
    assert_eq!(dataplane.resync(&desired()).unwrap(), Applied::default());
    assert_eq!(numbers(&sandbox, "maps/flows4"), (1..=300).collect::<Vec<_>>());
    assert_eq!(numbers(&sandbox, "maps/opening_flows4"), (1..=50).collect::<Vec<_>>());
    let usage = dataplane.usage().unwrap();
    let capacity = |name| usage.tables.iter().find(|table| table.name == name).unwrap().capacity;
    let limits = limits(second);
    let expected = [
        ("frontends4", limits.frontends),
        ("services", limits.services),
        ("service_names", limits.services),
        ("slots6", limits.slots),
        ("backends4", limits.backends),
        ("connections", limits.backends),
        ("collected", limits.backends),
        ("flows4", limits.flows),
        ("opening_flows6", limits.opening_flows),
        ("foreign_flows4", limits.opening_flows),
        ("affinity4", limits.affinity),
        ("fragments4", limits.fragments),
        ("source_ranges6", limits.source_ranges),
        ("node_addresses4", limits.node_addresses),
    ];
    for (name, entries) in expected {
        assert_eq!(capacity(name), u64::from(entries), "{name}");
    }
    assert_finished(&sandbox);
}

#[test]
fn a_table_that_holds_more_keeps_its_size_until_it_does_not() {
    let Some(mut sandbox) = Sandbox::new() else { return };
    let mut dataplane = open(&mut sandbox, 4);
    dataplane.resync(&desired()).unwrap();
    drop(dataplane);
    add_flows(&sandbox, "maps/flows4", 600);

    sandbox.config.limits = Limits { frontends: 10, ..limits(1) };
    let mut dataplane = sandbox.open();
    let sizes = ["flows4", "frontends4", "flows6", "frontends6", "backends4"];
    assert_eq!(sizes.map(|table| sandbox.room(table)), [2_048, 512, 2_048, 512, 256]);
    assert_eq!(numbers(&sandbox, "maps/flows4").len(), 600);
    dataplane.resync(&shared([])).unwrap();
    drop(dataplane);

    drop(sandbox.open());
    assert_eq!(["flows4", "frontends4"].map(|table| sandbox.room(table)), [2_048, 10]);
}

/// Returns service ports by their numbers, with three endpoints each.
fn numbered(numbers: std::ops::RangeInclusive<u8>) -> Vec<Arc<DesiredPort>> {
    shared(numbers.map(|number| {
        let endpoints = (1..=3).map(|n| endpoint(&format!("10.0.{number}.{n}"), 8080)).collect();
        port(&format!("web-{number}"), &format!("10.96.0.{number}"), endpoints)
    }))
}

#[test]
fn slots_that_are_free_again_take_no_room() {
    let Some(mut sandbox) = Sandbox::new() else { return };
    let mut dataplane = open(&mut sandbox, 4);
    dataplane.resync(&numbered(1..=200)).unwrap();
    dataplane.resync(&[]).unwrap();
    drop(dataplane);
    drop(open(&mut sandbox, 1));
    assert_eq!(["slots4", "services", "backends4"].map(|table| sandbox.room(table)), [512, 64, 256]);
}

#[test]
fn tables_of_one_limit_keep_their_size_together() {
    let Some(mut sandbox) = Sandbox::new() else { return };
    let mut dataplane = open(&mut sandbox, 4);
    dataplane.resync(&numbered(1..=100)).unwrap();
    dataplane.resync(&numbered(61..=100)).unwrap();
    drop(dataplane);
    drop(open(&mut sandbox, 1));
    let sizes = ["services", "service_names"].map(|table| sandbox.room(table));
    assert_eq!(sizes, [256, 256], "40 names would fit into 64 entries, and ids up to 100 do not");
}

/// The programs have gone on writing the former map, which they search first.
#[test]
fn an_entry_that_was_copied_and_not_taken_is_as_it_was_written_last() {
    let Some(mut donor) = Sandbox::new() else { return };
    drop(open(&mut donor, 4));
    let Some(mut sandbox) = Sandbox::new() else { return };
    drop(open(&mut sandbox, 1));
    add_flows(&sandbox, "maps/flows4", 1);
    let before: Flows = map(&sandbox, "maps/flows4");
    fs::rename(sandbox.table("flows4"), sandbox.pins("before/flows4")).unwrap();
    bpf::pin(bpf::pinned(&donor.table("flows4")).unwrap().as_fd(), &sandbox.table("flows4")).unwrap();
    add_flows(&sandbox, "maps/flows4", 1);
    let maps: Map<u32, u32> = map(&sandbox, "maps/flows4_maps");
    maps.put_map(MAP_BEFORE, before.fd()).unwrap();
    maps.put_map(MAP_IN_USE, map::<FlowKey<[u8; 4]>, Flow<[u8; 4]>>(&sandbox, "maps/flows4").fd()).unwrap();
    let mut later = flow(1);
    later.last_seen = 77;
    before.set(&later.client_key(), &later).unwrap();

    drop(open(&mut sandbox, 4));
    let flows: Flows = map(&sandbox, "maps/flows4");
    assert_eq!(flows.read_all().unwrap(), [(later.client_key(), later)]);
    assert_finished(&sandbox);
}

/// A killed controller may leave the former map set aside, and no new map, an empty one, or one
/// with some of the entries.
#[rstest]
#[case::no_new_map(None)]
#[case::empty(Some(0))]
#[case::a_part(Some(20))]
fn what_was_interrupted_goes_on(#[case] done: Option<u16>, #[values("flows4", "backends4")] table: &str) {
    // This sandbox has new maps as the loader makes them. From 5.15 to 6.1, a map without BTF may
    // not replace one that has it.
    let Some(mut donor) = Sandbox::new() else { return };
    drop(open(&mut donor, 4));
    let Some(mut sandbox) = Sandbox::new() else { return };
    let mut dataplane = open(&mut sandbox, 1);
    dataplane.resync(&desired()).unwrap();
    let whole = sandbox.snapshot();
    drop(dataplane);
    add_flows(&sandbox, "maps/flows4", 100);

    fs::rename(sandbox.table(table), sandbox.pins("before").join(table)).unwrap();
    if let Some(done) = done {
        let new = bpf::pinned(&donor.table(table)).unwrap();
        bpf::pin(new.as_fd(), &sandbox.table(table)).unwrap();
        if table == "flows4" {
            add_flows(&sandbox, "maps/flows4", done);
        }
    }
    let mut dataplane = open(&mut sandbox, 4);
    assert_eq!(sandbox.snapshot(), whole);
    assert_eq!(dataplane.resync(&desired()).unwrap(), Applied::default());
    assert_eq!(numbers(&sandbox, "maps/flows4"), (1..=100).collect::<Vec<_>>());
    assert_finished(&sandbox);
}
