//! Tests that maps get another size with everything that is in them, whatever is interrupted.

use std::{fs, os::fd::AsFd as _, sync::Arc};

use aya::programs::{SchedClassifier, TcAttachType};
use aya_obj::generated::bpf_attach_type;
use proxy_common::{
    inventory::map_name,
    layout::{
        Affinity, AffinityKey, CLIENT_OUTSIDE, Client, Flow, FlowKey, HostConnection, PROGRESS_CONFIRMED,
        PROTOCOL_TCP,
    },
    port::Port,
};
use proxy_ctl::{
    config::Limits,
    model::{desired::DesiredPort, node::Role},
    modes::{Applied, Dataplane as _, Programmed as _, ebpf::EbpfDataplane},
    sys::{
        bpf::{self, MapInfo, map::Map},
        net::tc,
        proc::clock,
    },
};
use rstest::rstest;

use crate::{
    desired::{endpoint, port, shared},
    hooks::{fill, host, veth},
    sandbox::{Sandbox, TakeHost as _},
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

/// Opens the mode, takes the node over, and does what is then due once.
fn settled(sandbox: &mut Sandbox, factor: u32, desired: &[Arc<DesiredPort>]) -> EbpfDataplane {
    let mut dataplane = open(sandbox, factor);
    settle(&mut dataplane, desired);
    dataplane
}

fn settle(dataplane: &mut EbpfDataplane, desired: &[Arc<DesiredPort>]) {
    dataplane.take_host(&host(&[])).unwrap();
    assert_eq!(dataplane.resync(desired).unwrap(), Applied::default());
    dataplane.collect_garbage().unwrap();
}

fn map<K: aya::Pod + Default, V: aya::Pod + Default>(sandbox: &Sandbox, path: &str) -> Map<K, V> {
    Map::new(bpf::pinned(&sandbox.pins(path)).unwrap()).unwrap().unwrap()
}

/// Returns an established flow.
fn flow(number: u16) -> Flow<[u8; 4]> {
    let mut flow = Flow::default();
    (flow.client, flow.backend, flow.protocol) = ([192, 0, 2, 7], [10, 0, 0, 1], PROTOCOL_TCP);
    flow.set_client_port(Port::new(number));
    (flow.opened, flow.last_seen) = (number.into(), clock::since_boot());
    flow.state.progress = PROGRESS_CONFIRMED;
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
    let map: Map<AffinityKey<[u8; 4]>, Affinity> = map(sandbox, "maps/affinity4");
    for number in 0..count {
        let client = Client { address: [192, 0, 2, number], origin: CLIENT_OUTSIDE };
        let affinity = Affinity { last_used: 1, backend: number.into(), flags: 0 };
        map.set(&AffinityKey { service: 1, client }, &affinity).unwrap();
    }
    affinity(sandbox)
}

fn add_flows(sandbox: &Sandbox, path: &str, count: u16) {
    let flows: Flows = map(sandbox, path);
    for number in 1..=count {
        flows.set(&flow(number).client_key(), &flow(number)).unwrap();
    }
}

fn numbers(sandbox: &Sandbox, path: &str) -> Vec<u16> {
    let flows: Flows = map(sandbox, path);
    let mut numbers: Vec<_> =
        flows.read_all().unwrap().iter().map(|(_, flow)| flow.client_port().number()).collect();
    numbers.sort_unstable();
    numbers
}

/// Returns a desired state of which more than half fits into maps of factor 1.
fn desired() -> Vec<Arc<DesiredPort>> {
    numbered(1..=40)
}

/// Asserts that no map is being replaced.
fn assert_finished(sandbox: &Sandbox) {
    for folder in ["before", "larger"] {
        assert_eq!(fs::read_dir(sandbox.pins(folder)).unwrap().count(), 0, "{folder}");
    }
}

#[rstest]
#[case::up(1, 4)]
#[case::down(4, 1)]
fn every_map_keeps_what_it_holds(#[case] first: u32, #[case] second: u32) {
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
    assert_eq!(sandbox.room("flows4"), 512 * first, "programs that run may be writing it");
    settle(&mut dataplane, &desired());
    assert_eq!(numbers(&sandbox, "maps/flows4"), (1..=300).collect::<Vec<_>>());
    assert_eq!(numbers(&sandbox, "maps/opening_flows4"), (1..=50).collect::<Vec<_>>());
    let usage = dataplane.usage().unwrap();
    let capacity = |name| usage.maps.iter().find(|map| map.name == name).unwrap().capacity;
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
        ("host_connections4", limits.opening_flows),
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
fn a_map_that_holds_more_keeps_its_size_until_it_does_not() {
    let Some(mut sandbox) = Sandbox::new() else { return };
    let mut dataplane = open(&mut sandbox, 4);
    dataplane.resync(&desired()).unwrap();
    drop(dataplane);
    add_flows(&sandbox, "maps/flows4", 600);

    sandbox.config.limits = Limits { frontends: 10, ..limits(1) };
    let mut dataplane = sandbox.open();
    settle(&mut dataplane, &desired());
    let sizes = ["flows4", "frontends4", "flows6", "frontends6", "backends4"];
    assert_eq!(sizes.map(|name| sandbox.room(name)), [2_048, 512, 2_048, 512, 256]);
    assert_eq!(numbers(&sandbox, "maps/flows4").len(), 600);
    dataplane.resync(&shared([])).unwrap();
    drop(dataplane);

    settle(&mut sandbox.open(), &[]);
    assert_eq!(["flows4", "frontends4"].map(|name| sandbox.room(name)), [2_048, 10]);
    let flows: Flows = map(&sandbox, "maps/flows4");
    (200..=600).for_each(|number| assert!(flows.remove(&flow(number).client_key()).unwrap()));
    settle(&mut sandbox.open(), &[]);
    assert_eq!((sandbox.room("flows4"), numbers(&sandbox, "maps/flows4").len()), (512, 199));
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
    assert_eq!(["slots4", "services", "backends4"].map(|name| sandbox.room(name)), [512, 64, 256]);
}

#[test]
fn maps_of_one_limit_keep_their_size_together() {
    let Some(mut sandbox) = Sandbox::new() else { return };
    let mut dataplane = open(&mut sandbox, 4);
    dataplane.resync(&numbered(1..=100)).unwrap();
    dataplane.resync(&numbered(61..=100)).unwrap();
    drop(dataplane);
    drop(open(&mut sandbox, 1));
    let sizes = ["services", "service_names"].map(|name| sandbox.room(name));
    assert_eq!(sizes, [256, 256], "40 names would fit into 64 entries, and ids up to 100 do not");
}

/// Returns the maps that a sandbox of this factor has got from the loader.
fn donor(factor: u32) -> Option<Sandbox> {
    let mut donor = Sandbox::new()?;
    drop(open(&mut donor, factor));
    Some(donor)
}

fn pin_of(donor: &Sandbox, name: &str, path: &std::path::Path) {
    bpf::pin(bpf::pinned(&donor.map_pin(name)).unwrap().as_fd(), path).unwrap();
}

/// A controller was killed while it swapped programs: some have written the former maps since, and
/// others the new ones.
#[test]
fn what_programs_have_written_to_either_map_is_kept() {
    let Some(donor) = donor(4) else { return };
    let Some(mut sandbox) = Sandbox::new() else { return };
    drop(open(&mut sandbox, 1));
    add_flows(&sandbox, "maps/flows4", 3);
    let former: Flows = map(&sandbox, "maps/flows4");
    let former_others: Map<FlowKey<[u8; 4]>, HostConnection> = map(&sandbox, "maps/host_connections4");
    for name in ["flows4", "host_connections4"] {
        fs::rename(sandbox.map_pin(name), sandbox.pins("before").join(name)).unwrap();
        pin_of(&donor, name, &sandbox.map_pin(name));
    }
    add_flows(&sandbox, "maps/flows4", 2);
    let new: Flows = map(&sandbox, "maps/flows4");
    let written = |number: u16, change: fn(&mut Flow<[u8; 4]>), to: &Flows| {
        let mut flow = flow(number);
        change(&mut flow);
        to.set(&flow.client_key(), &flow).unwrap();
        flow
    };
    let later = |flow: &mut Flow<[u8; 4]>| flow.last_seen += 1_000_000_000;
    let expected = [
        written(1, later, &former),
        written(2, later, &new),
        former.get(&flow(3).client_key()).unwrap().unwrap(),
        // The client has used its port once more.
        written(4, |flow| (flow.opened, flow.backend) = (5_000, [10, 0, 0, 2]), &new),
    ];
    former.set(&flow(4).client_key(), &flow(4)).unwrap();
    let (key, others) = (flow(9).client_key(), HostConnection { last_seen: clock::since_boot() });
    former_others.set(&key, &others).unwrap();

    drop(settled(&mut sandbox, 4, &[]));
    let mut flows = new.read_all().unwrap();
    flows.sort_unstable_by_key(|(_, flow)| flow.client_port());
    assert_eq!(flows, expected.map(|flow| (flow.client_key(), flow)));
    assert_eq!(map(&sandbox, "maps/host_connections4").get(&key).unwrap(), Some(others));
    assert_finished(&sandbox);
}

/// A controller was killed while it swapped programs, and an uplink takes no program at all.
/// Nothing runs the former programs there, so the copy is finished, and flows can expire again.
#[test]
fn an_uplink_that_takes_no_programs_hinders_no_copy() {
    let Some(donor) = donor(4) else { return };
    let Some(mut sandbox) = Sandbox::new() else { return };
    drop(open(&mut sandbox, 1));
    add_flows(&sandbox, "maps/flows4", 10);
    fs::rename(sandbox.map_pin("flows4"), sandbox.pins("before/flows4")).unwrap();
    pin_of(&donor, "flows4", &sandbox.map_pin("flows4"));
    let Some(_theirs) = fill(veth("dpb"), bpf_attach_type::BPF_TCX_INGRESS) else { return };
    let mut dataplane = open(&mut sandbox, 4);
    dataplane.take_host(&host(&[("dpb", Role::Uplink)])).unwrap_err();
    // Both go on failing as long as the uplink takes no program.
    let _failed = dataplane.resync(&[]);
    let _failed = dataplane.collect_garbage();
    assert_finished(&sandbox);
    assert_eq!(numbers(&sandbox, "maps/flows4").len(), 10);
}

/// A controller was killed during the first copy, before any program used the new map.
#[test]
fn a_half_made_copy_is_made_anew() {
    let Some(donor) = donor(4) else { return };
    let Some(mut sandbox) = Sandbox::new() else { return };
    drop(open(&mut sandbox, 1));
    add_flows(&sandbox, "maps/flows4", 100);
    pin_of(&donor, "flows4", &sandbox.pins("larger/flows4"));
    add_flows(&sandbox, "larger/flows4", 20);
    // This flow has ended since.
    let ended = flow(7).client_key();
    assert!(map::<_, Flow<[u8; 4]>>(&sandbox, "maps/flows4").remove(&ended).unwrap());

    drop(settled(&mut sandbox, 4, &[]));
    let expected: Vec<_> = (1..=100).filter(|number| *number != 7).collect();
    assert_eq!((sandbox.room("flows4"), numbers(&sandbox, "maps/flows4")), (2_048, expected));
    assert_finished(&sandbox);
}

/// A controller was killed between two pins of the same map.
#[test]
fn a_map_that_is_pinned_twice_is_in_use() {
    let Some(mut sandbox) = Sandbox::new() else { return };
    drop(open(&mut sandbox, 1));
    add_flows(&sandbox, "maps/flows4", 10);
    pin_of(&sandbox, "flows4", &sandbox.pins("before/flows4"));
    drop(open(&mut sandbox, 1));
    assert_finished(&sandbox);
    assert_eq!(numbers(&sandbox, "maps/flows4").len(), 10);
}

/// Programs of former versions found the maps of flows in arrays of maps.
#[test]
fn flows_of_a_version_with_arrays_of_maps_are_adopted() {
    let Some(mut sandbox) = Sandbox::new() else { return };
    drop(open(&mut sandbox, 1));
    add_flows(&sandbox, "maps/flows4", 10);
    let in_use = bpf::pinned(&sandbox.map_pin("flows4")).unwrap();
    const ARRAY_OF_MAPS: u32 = 12;
    let shape =
        MapInfo { kind: ARRAY_OF_MAPS, key_size: 4, value_size: 4, max_entries: 2, ..MapInfo::default() };
    let array = bpf::create_map(&shape, Some(in_use.as_fd())).unwrap();
    bpf::pin(array.as_fd(), &sandbox.map_pin("flows4_maps")).unwrap();
    Map::<u32, u32>::new(array).unwrap().unwrap().put_map(0, in_use.as_fd()).unwrap();
    let id = bpf::map_info(in_use.as_fd()).unwrap().id;

    drop(settled(&mut sandbox, 1, &[]));
    let adopted = bpf::pinned(&sandbox.map_pin("flows4")).unwrap();
    assert_eq!(bpf::map_info(adopted.as_fd()).unwrap().id, id);
    assert_eq!(numbers(&sandbox, "maps/flows4").len(), 10);
    let former = map_name::FORMER.map(|name| sandbox.map_pin(name).exists());
    assert_eq!(former, [false; 6]);
}

/// A former version has pinned a map under another name. If it was started once more after this
/// version, it has made a second map, and its programs use that one.
#[test]
fn maps_that_had_another_name_are_adopted() {
    let Some(mut sandbox) = Sandbox::new() else { return };
    drop(open(&mut sandbox, 1));
    let ids = |sandbox: &Sandbox| {
        map_name::RENAMED.map(|(_, name)| {
            let map = bpf::pinned(&sandbox.map_pin(name)).unwrap();
            bpf::map_info(map.as_fd()).unwrap().id
        })
    };
    let expected = ids(&sandbox);
    for (former, name) in map_name::RENAMED {
        fs::rename(sandbox.map_pin(name), sandbox.map_pin(former)).unwrap();
    }
    drop(open(&mut sandbox, 1));
    assert_eq!(ids(&sandbox), expected);
    let Some(donor) = donor(1) else { return };
    let expected = ids(&donor);
    for (former, name) in map_name::RENAMED {
        pin_of(&donor, name, &sandbox.map_pin(former));
    }
    drop(open(&mut sandbox, 1));
    assert_eq!(ids(&sandbox), expected);
    assert!(map_name::RENAMED.iter().all(|(former, _)| !sandbox.map_pin(former).exists()));
}

/// The programs that are attached use the maps of the new size, and the former maps are gone.
#[test]
fn attached_programs_are_swapped_for_a_new_size() {
    let Some(mut sandbox) = Sandbox::new() else { return };
    let interface = veth("dpa");
    let host = host(&[("dpa", Role::Workload)]);
    let mut dataplane = open(&mut sandbox, 1);
    dataplane.take_host(&host).unwrap();
    drop(dataplane);
    add_flows(&sandbox, "maps/flows4", 10);
    let former = bpf::map_info(bpf::pinned(&sandbox.map_pin("flows4")).unwrap().as_fd()).unwrap().id;
    let mut dataplane = open(&mut sandbox, 4);
    dataplane.take_host(&host).unwrap();
    dataplane.resync(&[]).unwrap();
    if !tc::has_tcx(interface) {
        return println!("skipped: the kernel does not list the programs at an interface");
    }
    let used = |id| {
        let (_, programs) = SchedClassifier::query_tcx("dpa", TcAttachType::Ingress).unwrap();
        programs.iter().any(|program| program.map_ids().unwrap().unwrap().contains(&id))
    };
    assert!(used(former));
    dataplane.collect_garbage().unwrap();
    let new = bpf::map_info(bpf::pinned(&sandbox.map_pin("flows4")).unwrap().as_fd()).unwrap().id;
    assert!(used(new) && !used(former));
    assert_eq!(numbers(&sandbox, "maps/flows4").len(), 10);
    assert_finished(&sandbox);
}

/// A killed controller may leave the former map set aside, and no new map, an empty one, or one
/// with some of the entries.
#[rstest]
#[case::no_new_map(None)]
#[case::empty(Some(0))]
#[case::a_part(Some(20))]
fn what_was_interrupted_goes_on(#[case] done: Option<u16>, #[values("flows4", "backends4")] name: &str) {
    // This sandbox has new maps as the loader makes them.
    let Some(donor) = donor(4) else { return };
    let Some(mut sandbox) = Sandbox::new() else { return };
    let mut dataplane = open(&mut sandbox, 1);
    dataplane.resync(&desired()).unwrap();
    let whole = sandbox.snapshot();
    drop(dataplane);
    add_flows(&sandbox, "maps/flows4", 100);

    fs::rename(sandbox.map_pin(name), sandbox.pins("before").join(name)).unwrap();
    if let Some(done) = done {
        pin_of(&donor, name, &sandbox.map_pin(name));
        if name == "flows4" {
            add_flows(&sandbox, "maps/flows4", done);
        }
    }
    let mut dataplane = open(&mut sandbox, 4);
    assert_eq!(sandbox.snapshot(), whole);
    settle(&mut dataplane, &desired());
    assert_eq!(numbers(&sandbox, "maps/flows4"), (1..=100).collect::<Vec<_>>());
    assert_finished(&sandbox);
}
