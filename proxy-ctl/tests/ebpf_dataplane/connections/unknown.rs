//! When the programs answer segments of connections that no map knows, and at which addresses.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use aya_obj::generated::bpf_attach_type;
use proxy_common::{
    flow::frontend_address_bit,
    layout::{FLOW_OF_NETFILTER, FRONTEND_ADDRESS_WORDS, Flow, FlowKey, Lease, Settings},
};
use proxy_ctl::{
    model::{
        desired::{Changes, DesiredPort},
        node::{Host, Role},
    },
    modes::{Dataplane, PacketMode as _, ebpf::EbpfDataplane},
    sys::proc::clock,
};
use rstest::rstest;

use crate::{
    desired::{change, endpoint, port, shared, with_node_port},
    hooks::{fill, host, veth},
    sandbox::{Sandbox, TakeHost as _},
};

fn web(address: &str) -> Vec<Arc<DesiredPort>> {
    let web = port("web", address, vec![endpoint("10.0.0.1", 8080)]);
    shared([with_node_port(web, 30080)])
}

/// The words of the map that are not 0.
fn bits(sandbox: &Sandbox) -> BTreeMap<u32, u64> {
    let all = sandbox.map::<u32, u64>("frontend_addresses4").read_all().unwrap();
    assert_eq!(all.len(), FRONTEND_ADDRESS_WORDS as usize);
    all.into_iter().filter(|(_, bits)| *bits != 0).collect()
}

fn bits_of(addresses: &[[u8; 4]]) -> BTreeMap<u32, u64> {
    let mut words = BTreeMap::new();
    for (word, bit) in addresses.iter().map(frontend_address_bit) {
        *words.entry(word).or_default() |= bit;
    }
    words
}

#[test]
fn addresses_have_a_bit_for_as_long_as_a_frontend_has_them() {
    const FIRST: [u8; 4] = [10, 96, 0, 1];
    const SECOND: [u8; 4] = [10, 96, 0, 2];
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    dataplane.resync(&web("10.96.0.1")).unwrap();
    assert_eq!(bits(&sandbox), bits_of(&[FIRST]), "a node port has none");
    let other = || shared([port("other", "10.96.0.1", Vec::new())]);
    dataplane.apply(&change(other())).unwrap();
    dataplane.apply(&change(web("10.96.0.2"))).unwrap();
    assert_eq!(bits(&sandbox), bits_of(&[FIRST, SECOND]));
    let removed = other().iter().map(|port| port.name.clone()).collect();
    dataplane.apply(&Changes { changed: Vec::new(), removed }).unwrap();
    assert_eq!(bits(&sandbox), bits_of(&[SECOND]));
    dataplane.drain().unwrap();
    assert_eq!(bits(&sandbox), bits_of(&[]));
}

#[test]
fn a_restart_writes_the_bits_as_they_should_be() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    dataplane.resync(&web("10.96.0.1")).unwrap();
    drop(dataplane);
    let expected = bits(&sandbox);
    let map = sandbox.map::<u32, u64>("frontend_addresses4");
    map.set(&7, &u64::MAX).unwrap();
    for word in expected.keys() {
        map.set(word, &0).unwrap();
    }
    let mut dataplane = sandbox.open();
    dataplane.resync(&web("10.96.0.1")).unwrap();
    assert_eq!(bits(&sandbox), expected);
}

fn answers(sandbox: &Sandbox) -> bool {
    let settings: Settings = sandbox.map("settings").get(&0).unwrap().unwrap();
    settings.answers_unknown != 0
}

/// One that has taken the node over.
fn serving(sandbox: &Sandbox) -> EbpfDataplane {
    let mut dataplane = sandbox.open();
    dataplane.resync(&web("10.96.0.1")).unwrap();
    dataplane.take_host(&Host::default()).unwrap();
    collect(&mut dataplane, 60);
    assert!(!answers(sandbox), "a connection of netfilter may be in its handshake");
    collect(&mut dataplane, UNTIL_ANSWERS - 60);
    dataplane
}

/// Collections until segments are answered: those of a minute in which netfilter's connections may
/// be in their handshake, and those of a walk through maps that were empty before.
const UNTIL_ANSWERS: u32 = 80;

fn collect(dataplane: &mut EbpfDataplane, times: u32) {
    for _ in 0..times {
        dataplane.collect_garbage().unwrap();
    }
}

#[rstest]
#[case::after_a_restart(|dataplane: EbpfDataplane, sandbox: &Sandbox| {
    drop(dataplane);
    sandbox.open()
})]
#[case::once_another_mode_serves_too(|mut dataplane: EbpfDataplane, _: &Sandbox| {
    dataplane.share_frontends(true).unwrap();
    dataplane
})]
#[case::once_another_mode_is_active(|mut dataplane: EbpfDataplane, _: &Sandbox| {
    dataplane.drain().unwrap();
    dataplane
})]
fn segments_are_answered_while_nobody_else_serves(
    #[case] change: fn(EbpfDataplane, &Sandbox) -> EbpfDataplane,
) {
    let Some(sandbox) = Sandbox::new() else { return };
    let dataplane = serving(&sandbox);
    assert!(answers(&sandbox));
    let _dataplane = change(dataplane, &sandbox);
    assert!(!answers(&sandbox));
}

#[test]
fn segments_are_answered_again_once_the_other_mode_has_ended() {
    let Some(sandbox) = Sandbox::new() else { return };
    let mut dataplane = serving(&sandbox);
    dataplane.share_frontends(true).unwrap();
    dataplane.collect_garbage().unwrap();
    assert!(!answers(&sandbox));
    dataplane.share_frontends(false).unwrap();
    assert!(!answers(&sandbox), "what it has left is not known");
    collect(&mut dataplane, UNTIL_ANSWERS);
    assert!(answers(&sandbox));
}

/// While there is no lease, the programs pass all packets, and rules of others may take them.
#[test]
fn segments_are_not_answered_after_a_lease_has_ended() {
    let Some(mut sandbox) = Sandbox::new() else { return };
    sandbox.config.withdraw_after = Duration::from_hours(1);
    let end = |sandbox: &Sandbox| sandbox.map::<u32, Lease>("lease").set(&0, &Lease { end: 1 }).unwrap();
    let has_ended = |sandbox: &Sandbox| sandbox.snapshot().lease == Some(Duration::ZERO);
    let mut dataplane = serving(&sandbox);
    for renew in [EbpfDataplane::renew_lease, EbpfDataplane::collect_garbage] {
        assert!(answers(&sandbox));
        end(&sandbox);
        renew(&mut dataplane).unwrap();
        assert!(!has_ended(&sandbox) && !answers(&sandbox));
        collect(&mut dataplane, UNTIL_ANSWERS);
    }
    // A predecessor's lease has ended, and it takes long until everything is listed.
    drop(dataplane);
    end(&sandbox);
    let mut dataplane = sandbox.open();
    dataplane.take_host(&Host::default()).unwrap();
    collect(&mut dataplane, UNTIL_ANSWERS);
    assert!(has_ended(&sandbox));
    dataplane.resync(&web("10.96.0.1")).unwrap();
    collect(&mut dataplane, 1);
    assert!(!has_ended(&sandbox) && !answers(&sandbox), "what others have opened is not listed");
    collect(&mut dataplane, UNTIL_ANSWERS);
    assert!(answers(&sandbox));
}

/// Rules of others may serve the clients that come by an uplink without programs.
#[test]
fn segments_are_not_answered_while_an_uplink_has_no_programs() {
    let Some(sandbox) = Sandbox::new() else { return };
    veth("dpa");
    let full = veth("dpb");
    let Some(theirs) = fill(full, bpf_attach_type::BPF_TCX_INGRESS) else { return };
    let mut dataplane = serving(&sandbox);
    dataplane.take_host(&host(&[("dpa", Role::Uplink)])).unwrap();
    dataplane.collect_garbage().unwrap();
    assert!(answers(&sandbox), "this uplink takes programs");
    dataplane.take_host(&host(&[("dpa", Role::Uplink), ("dpb", Role::Uplink)])).unwrap_err();
    for _ in 0..UNTIL_ANSWERS {
        // An inspection fails as long as the uplink takes no program.
        let _failed = dataplane.collect_garbage();
        assert!(!answers(&sandbox));
    }
    drop(theirs);
    // The kernel detaches links of others in the background.
    let deadline = Instant::now() + Duration::from_secs(60);
    while dataplane.take_host(&host(&[("dpa", Role::Uplink), ("dpb", Role::Uplink)])).is_err() {
        assert!(Instant::now() < deadline, "the uplink takes no programs");
    }
    collect(&mut dataplane, 60);
    assert!(!answers(&sandbox), "a connection of others may be in its handshake");
    collect(&mut dataplane, UNTIL_ANSWERS - 60);
    assert!(answers(&sandbox));
}

#[test]
fn segments_pass_while_netfilter_translates_connections() {
    let Some(sandbox) = Sandbox::new() else { return };
    let mut dataplane = sandbox.open();
    dataplane.resync(&web("10.96.0.1")).unwrap();
    let mut flow = Flow::default();
    (flow.flags, flow.protocol, flow.last_seen) = (FLOW_OF_NETFILTER, 6, clock::since_boot());
    let key: FlowKey<[u8; 4]> = flow.client_key();
    let flows = sandbox.map("flows4");
    flows.set(&key, &flow).unwrap();
    dataplane.take_host(&Host::default()).unwrap();
    dataplane.collect_garbage().unwrap();
    assert!(!answers(&sandbox));
    flows.remove(&key).unwrap();
    collect(&mut dataplane, UNTIL_ANSWERS);
    assert!(answers(&sandbox));
}
