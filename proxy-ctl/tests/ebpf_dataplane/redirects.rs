//! Tests of the uplinks by which XDP may send frames that have come by others. The maps follow the
//! devices.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
};

use aya::{
    TestRun as _, TestRunOptions,
    programs::{TestRunAttrs, Xdp},
};
use aya_obj::{generated::bpf_attach_type, programs::xdp::XdpAttachType};
use proxy_common::layout::{IN_FRAGMENTS, LinkAddress, RedirectTarget};
use proxy_ctl::{
    config::{self, Ebpf},
    dataplane::{
        Dataplane as _, Host, Programmed as _, Role,
        ebpf::{EbpfDataplane, status::Pinned},
    },
    sys::{
        bpf::{self, XdpMode},
        device,
        map::Map,
    },
};

use super::{
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
    let table: Map<u32, LinkAddress> = sandbox.map("redirect_sources");
    table.read_all().unwrap().into_iter().map(|(interface, own)| (interface, own.bytes)).collect()
}

/// Returns the targets with their keys.
fn targets(sandbox: &Sandbox) -> BTreeSet<(u32, u32)> {
    let table: Map<u32, RedirectTarget> = sandbox.map("redirect_targets");
    table.read_all().unwrap().into_iter().map(|(key, target)| (key, target.interface)).collect()
}

/// Returns the targets for whole frames and for frames in fragments.
fn all_frames(interface: u32) -> BTreeSet<(u32, u32)> {
    [(interface, interface), (interface | IN_FRAGMENTS, interface)].into()
}

/// Loads a program that has each frame leave by an uplink: r0 =
/// bpf_redirect_map(`redirect_targets`, `uplink`, 0); exit.
fn redirecting(sandbox: &Sandbox, uplink: u32) -> Xdp {
    const XDP: u32 = 6;
    const LOAD_MAP: u64 = 0x1118;
    const SET: u64 = 0xb7;
    const CALL: u64 = 0x85;
    const REDIRECT_MAP: u64 = 51;
    const EXIT: u64 = 0x95;
    let map = bpf::pinned(&sandbox.table("redirect_targets")).unwrap();
    let (map_fd, key) = (u64::from(map.as_raw_fd().cast_unsigned()), u64::from(uplink));
    let instructions =
        [LOAD_MAP | map_fd << 32, 0, SET | 2 << 8 | key << 32, SET | 3 << 8, CALL | REDIRECT_MAP << 32, EXIT];
    let program = bpf::load_program(XDP, bpf_attach_type::BPF_XDP as u32, &instructions).unwrap();
    // aya makes programs of object files and of pins.
    let at = sandbox.config.bpffs.join("redirecting");
    bpf::pin(program.as_fd(), &at).unwrap();
    let opened = Xdp::from_pin(&at, XdpAttachType::Interface);
    fs::remove_file(at).unwrap();
    opened.unwrap()
}

/// Sends `frames` frames of this length, as if they came by the uplink.
fn send(program: &Xdp, uplink: u32, length: usize, frames: u32) {
    let frame = vec![0; length];
    // The fields are those of `xdp_md`: data, data_end, data_meta, ingress_ifindex, rx_queue_index,
    // egress_ifindex.
    let context = [0, length as u32, 0, uplink, 0, 0].map(u32::to_ne_bytes).concat();
    let options = TestRunOptions {
        data_in: Some(&frame),
        ctx_in: Some(&context),
        repeat: frames,
        attrs: TestRunAttrs::new().xdp_live_frames(frames),
        ..TestRunOptions::default()
    };
    program.test_run(options).unwrap();
}

fn not_taken(sandbox: &Sandbox) -> u64 {
    let reasons = Pinned::open(&sandbox.config.bpffs).unwrap().usage().unwrap().reasons;
    reasons.iter().find(|reason| reason.name == "redirect_failed").unwrap().count
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

#[test]
fn frames_that_no_device_takes_are_counted() {
    const FRAMES: u32 = 10;
    let Some((sandbox, dpa, dpb)) = two_uplinks() else { return };
    run("ip", "link set dpb mtu 3000");
    let [_of_dpa, of_dpb] = ["dpap", "dpbp"].map(make_card);
    let mut dataplane = opened(&sandbox, config::Xdp::Native);
    dataplane.take_host(&uplinks(OWN)).unwrap();
    let program = redirecting(&sandbox, dpb);
    send(&program, dpa, 1_500, FRAMES);
    assert_eq!(not_taken(&sandbox), 0);
    // The device is given these frames, and its other end takes no such length.
    send(&program, dpa, 2_500, FRAMES);
    assert_eq!(not_taken(&sandbox), u64::from(FRAMES));
    // The device is not given frames any more, which the controller does not know yet.
    bpf::link_detach(of_dpb.as_fd()).unwrap();
    send(&program, dpa, 1_500, FRAMES);
    assert_eq!(not_taken(&sandbox), u64::from(2 * FRAMES));
    // Frames that have come by uplinks of others are not counted.
    let dpc = veth("dpc");
    let _card = make_card("dpc");
    send(&program, dpc, 1_500, FRAMES);
    assert_eq!(not_taken(&sandbox), u64::from(2 * FRAMES));
}
