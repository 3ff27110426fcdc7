//! Tests of the uplinks by which XDP may send frames that have come by others. The maps follow the
//! devices.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::{AsFd as _, OwnedFd},
};

use aya_obj::generated::bpf_attach_type;
use proxy_common::layout::{IN_FRAGMENTS, LinkAddress, RedirectTarget};
use proxy_ctl::{
    config::{self, Ebpf},
    model::node::{Host, Role},
    modes::{Dataplane as _, ebpf::EbpfDataplane},
    sys::{
        bpf::{self, XdpMode, map::Map},
        net::device,
    },
};

use crate::{
    hooks::{card, host, returns, veth},
    sandbox::{Sandbox, TakeHost as _, index, run},
};

const COLLECTIONS_BETWEEN_INSPECTIONS: u32 = 10;
const OWN: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];

/// Returns a host with two uplinks that have these link addresses.
fn uplinks(addresses: [[u8; 6]; 2]) -> Host {
    let mut host = host(&[("dpa", Role::Uplink), ("dpb", Role::Uplink)]);
    for (interface, address) in host.interfaces.iter_mut().zip(addresses) {
        interface.link_address = Some(address);
    }
    host
}

fn opened(sandbox: &Sandbox, xdp: config::Xdp) -> EbpfDataplane {
    EbpfDataplane::open(&Ebpf { xdp, ..sandbox.config.clone() }).unwrap()
}

/// Attaches a program to the other end of a veth, which then takes frames of XDP.
fn make_card(port: &str) -> OwnedFd {
    const XDP: u32 = 6;
    const PASS: i32 = 2;
    let program = bpf::load_program(XDP, bpf_attach_type::BPF_XDP as u32, &returns(PASS)).unwrap();
    bpf::link_xdp(program.as_fd(), index(port), XdpMode::Native).unwrap()
}

fn sources(sandbox: &Sandbox) -> BTreeMap<u32, [u8; 6]> {
    let map: Map<u32, LinkAddress> = sandbox.map("redirect_sources");
    map.read_all().unwrap().into_iter().map(|(interface, own)| (interface, own.bytes)).collect()
}

/// Returns the targets with their keys.
fn targets(sandbox: &Sandbox) -> BTreeSet<(u32, u32)> {
    let map: Map<u32, RedirectTarget> = sandbox.map("redirect_targets");
    map.read_all().unwrap().into_iter().map(|(key, target)| (key, target.interface)).collect()
}

/// Returns the targets for whole frames and for frames in fragments.
fn all_frames(interface: u32) -> BTreeSet<(u32, u32)> {
    [(interface, interface), (interface | IN_FRAGMENTS, interface)].into()
}

fn inspect(dataplane: &mut EbpfDataplane) {
    for _ in 0..COLLECTIONS_BETWEEN_INSPECTIONS {
        dataplane.collect_garbage().unwrap();
    }
}

/// Makes the uplinks `dpa` and `dpb`. Says that the test is skipped if the kernel does not report
/// what drivers do, as before Linux 6.3.
fn two_uplinks() -> Option<(Sandbox, u32, u32)> {
    let sandbox = Sandbox::new()?;
    let (dpa, dpb) = (card("dpa"), card("dpb"));
    if device::facts(dpa, "dpa").xdp.is_none() {
        println!("skipped: the kernel does not tell what drivers do with frames of XDP (6.3)");
        return None;
    }
    Some((sandbox, dpa, dpb))
}

#[test]
fn uplinks_for_redirects_follow_their_devices() {
    let Some((sandbox, dpa, dpb)) = two_uplinks() else { return };
    let mut dataplane = opened(&sandbox, config::Xdp::Native);
    dataplane.take_host(&uplinks(OWN)).unwrap();
    assert_eq!((sources(&sandbox), targets(&sandbox)), Default::default(), "nothing is at their other ends");

    let cards = ["dpap", "dpbp"].map(make_card);
    inspect(&mut dataplane);
    assert_eq!(sources(&sandbox), [(dpa, OWN[0]), (dpb, OWN[1])].into());
    assert_eq!(targets(&sandbox), &all_frames(dpa) | &all_frames(dpb));
    assert_eq!(sandbox.snapshot().node.redirect_targets, [dpa, dpb].into());
    inspect(&mut dataplane);
    assert_eq!(targets(&sandbox), &all_frames(dpa) | &all_frames(dpb));

    let [card, _other] = cards;
    bpf::link_detach(card.as_fd()).unwrap();
    inspect(&mut dataplane);
    assert_eq!(targets(&sandbox), all_frames(dpb));

    let others = [[2, 0, 0, 0, 0, 3], OWN[1]];
    dataplane.take_host(&uplinks(others)).unwrap();
    assert_eq!(sources(&sandbox), [(dpa, others[0]), (dpb, OWN[1])].into());

    let mut host = uplinks(OWN);
    host.interfaces[0].role = Role::Workload;
    dataplane.take_host(&host).unwrap();
    assert_eq!((sources(&sandbox), targets(&sandbox)), Default::default(), "no other uplink is left");
}

#[test]
fn an_index_that_another_device_gets_is_no_uplink_for_redirects() {
    let Some((sandbox, dpa, dpb)) = two_uplinks() else { return };
    let _cards = ["dpap", "dpbp"].map(make_card);
    let mut dataplane = opened(&sandbox, config::Xdp::Native);
    dataplane.take_host(&uplinks(OWN)).unwrap();
    assert_eq!(targets(&sandbox), &all_frames(dpa) | &all_frames(dpb));
    run("ip", "link del dpb");
    run("ip", &format!("link add dpb index {dpb} type veth peer name dpbp"));
    run("ethtool", "-K dpbp tx off");
    assert_eq!(targets(&sandbox), all_frames(dpa), "before the controller knows of it");
    dataplane.take_host(&uplinks(OWN)).unwrap();
    assert_eq!(targets(&sandbox), all_frames(dpa), "the new one takes none");
    drop(dataplane);
    let mut dataplane = opened(&sandbox, config::Xdp::Off);
    dataplane.take_host(&uplinks(OWN)).unwrap();
    assert_eq!((sources(&sandbox), targets(&sandbox)), Default::default());
}

#[test]
fn the_stack_sends_by_any_uplink_that_a_program_of_its_own_runs_on() {
    let Some(sandbox) = Sandbox::new() else { return };
    let (dpa, dpb) = (veth("dpa"), veth("dpb"));
    let mut dataplane = opened(&sandbox, config::Xdp::Generic);
    dataplane.take_host(&uplinks(OWN)).unwrap();
    assert_eq!(sources(&sandbox), [(dpa, OWN[0]), (dpb, OWN[1])].into());
    assert_eq!(targets(&sandbox), [(dpa, dpa), (dpb, dpb)].into());
}
