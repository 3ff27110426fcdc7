//! Tests of programs on the cgroup and on interfaces, which are swapped, follow interfaces, are
//! cleaned up, and run beside programs of others.

mod addresses;
mod bandwidth;
mod filters;
mod lease;
mod pins;
mod redirects;
mod route_watch;
mod xdp;

use std::{
    collections::BTreeSet,
    fs,
    io::ErrorKind,
    net::{IpAddr, TcpStream},
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use aya::programs::{SchedClassifier, TcAttachType};
use aya_obj::generated::bpf_attach_type;
use nix::{
    sched::{CloneFlags, unshare},
    unistd::gettid,
};
use proxy_common::layout::{INTERFACE_OF_UPLINK, InterfaceSettings, Settings, TAG_CUSTOMER, VlanTag};
use proxy_ctl::{
    config::{Config, Ebpf, NamePattern, SocketLoadBalancing, Xdp},
    model::{
        node::{Device, Host, Interface, NodeNetwork, Role, RoleReason, Vlan},
        objects::Node,
    },
    modes::{
        Applied, Dataplane, Hook, PacketMode as _, Programmed as _,
        ebpf::{EbpfDataplane, Error, cleanup::cleanup, view::status::Pinned},
    },
    node::{self, OwnNode},
    sys::{
        bpf::{self, LinkTarget, XdpMode, map::Map},
        net::tc::{self, Direction},
    },
};
use rstest::rstest;
use tokio_util::sync::CancellationToken;

use self::pins::{COLLECTIONS_BETWEEN_INSPECTIONS, until_inspected};
use super::{
    desired::{endpoint, port, shared},
    sandbox::{Sandbox, TakeHost as _, index, run, serve},
};

/// Returns the instructions: r0 = `value`; exit.
pub fn returns(value: i32) -> [u64; 2] {
    [0xb7 | u64::from(value.cast_unsigned()) << 32, 0x95]
}

fn packet_program(verdict: i32) -> OwnedFd {
    const SCHED_CLS: u32 = 3;
    bpf::load_program(SCHED_CLS, 0, &returns(verdict)).unwrap()
}

fn connect_program(verdict: i32) -> OwnedFd {
    const CGROUP_SOCK_ADDR: u32 = 18;
    let hook = bpf_attach_type::BPF_CGROUP_INET4_CONNECT;
    bpf::load_program(CGROUP_SOCK_ADDR, hook as u32, &returns(verdict)).unwrap()
}

pub fn veth(name: &str) -> u32 {
    run("ip", &format!("link add {name} type veth peer name {name}p"));
    run("ip", &format!("link set {name} up"));
    run("ip", &format!("link set {name}p up"));
    index(name)
}

/// Makes a veth whose packets have whole checksums when XDP programs see them.
pub fn card(name: &str) -> u32 {
    let index = veth(name);
    run("ethtool", &format!("-K {name}p tx off"));
    index
}

pub fn host(interfaces: &[(&str, Role)]) -> Host {
    let interfaces = interfaces.iter().map(|(name, role)| Interface {
        index: index(name),
        name: (*name).to_owned(),
        role: *role,
        reason: RoleReason::Configured,
        ethernet: true,
        device: Device::Other,
        mtu: 1_500,
        link_address: None,
        is_up: true,
        has_vlans: false,
        bridge: None,
        namespace: None,
        masquerade_addresses: Vec::new(),
    });
    Host { interfaces: interfaces.collect(), ..Host::default() }
}

fn links(sandbox: &Sandbox) -> BTreeSet<String> {
    let of_interfaces = |hook: Hook| Some((hook.interface?, hook));
    let names =
        sandbox.snapshot().hooks.into_iter().filter_map(of_interfaces).map(|(index, hook)| match hook.kind {
            "clsact" => format!("{index}_clsact"),
            _ => format!("{index}_{}", hook.name),
        });
    names.collect()
}

fn named(index: u32) -> BTreeSet<String> {
    [format!("{index}_egress"), format!("{index}_ingress")].into()
}

fn program_of(sandbox: &Sandbox, link: &str) -> u32 {
    let link = bpf::pinned(&sandbox.links().join(link)).unwrap();
    bpf::link_info(link.as_fd()).unwrap().program
}

#[test]
fn interfaces_are_followed() {
    let Some(sandbox) = Sandbox::new() else { return };
    let (first, second) = (veth("dpa"), veth("dpb"));
    let mut dataplane = sandbox.open();
    dataplane.take_host(&host(&[("dpa", Role::Workload), ("dpb", Role::Uplink)])).unwrap();
    assert_eq!(links(&sandbox), &named(first) | &named(second));

    // Another role means another program in the same link.
    let ingress = format!("{first}_ingress");
    let workload = program_of(&sandbox, &ingress);
    dataplane.take_host(&host(&[("dpa", Role::Uplink), ("dpb", Role::Uplink)])).unwrap();
    assert_ne!(program_of(&sandbox, &ingress), workload);
    assert_eq!(program_of(&sandbox, &ingress), program_of(&sandbox, &format!("{second}_ingress")));

    dataplane.take_host(&host(&[("dpa", Role::Workload)])).unwrap();
    assert_eq!(links(&sandbox), named(first));
    run("ip", "link del dpa");
    dataplane.collect_garbage().unwrap();
    assert_eq!(links(&sandbox), BTreeSet::new());
}

#[test]
fn where_nothing_is_attached_packets_are_held_until_all_is() {
    let Some(sandbox) = Sandbox::new() else { return };
    let first = veth("dpa");
    let host = host(&[("dpa", Role::Workload)]);
    let mut dataplane = sandbox.open();
    let settings: Map<u32, Settings> =
        Map::new(bpf::pinned(&sandbox.map_pin("settings")).unwrap()).unwrap().unwrap();
    let held = || settings.get(&0).unwrap().unwrap().packets_held;
    dataplane.set_host(&host).unwrap();
    assert_eq!((held(), links(&sandbox)), (1, BTreeSet::new()));
    dataplane.resync(&[]).unwrap();
    dataplane.attach().unwrap();
    assert_eq!((held(), links(&sandbox)), (0, named(first)));

    // Programs of a predecessor serve, so nothing is held.
    drop(dataplane);
    let mut dataplane = sandbox.open();
    dataplane.set_host(&host).unwrap();
    assert_eq!((held(), links(&sandbox)), (0, named(first)));
}

#[test]
fn a_restart_swaps_the_programs_and_keeps_the_links() {
    let Some(sandbox) = Sandbox::new() else { return };
    let first = veth("dpa");
    let gone = veth("dpb");
    let both = host(&[("dpa", Role::Workload), ("dpb", Role::Workload)]);
    let mut dataplane = sandbox.open();
    dataplane.take_host(&both).unwrap();
    let before = program_of(&sandbox, &format!("{first}_ingress"));
    let socket_before = program_of(&sandbox, "cgroup_connect4");
    // The test's own descriptor shows that the link stays the same.
    let link = bpf::pinned(&sandbox.links().join(format!("{first}_ingress"))).unwrap();
    drop(dataplane);
    run("ip", "link del dpb");
    assert_eq!(links(&sandbox), &named(first) | &named(gone));
    let mut dataplane = sandbox.open();
    dataplane.take_host(&host(&[("dpa", Role::Workload)])).unwrap();
    assert_eq!(links(&sandbox), named(first), "what vanished meanwhile is noticed");
    assert_ne!(program_of(&sandbox, &format!("{first}_ingress")), before);
    assert_ne!(program_of(&sandbox, "cgroup_connect4"), socket_before);
    let info = bpf::link_info(link.as_fd()).unwrap();
    assert_eq!(info.target, LinkTarget::Tcx(first));
    assert_eq!(info.program, program_of(&sandbox, &format!("{first}_ingress")));
}

#[test]
fn devices_without_an_ethernet_header_get_programs_of_their_own() {
    let Some(sandbox) = Sandbox::new() else { return };
    run("ip", "tuntap add dpt mode tun");
    run("ip", "tuntap add dpu mode tun");
    let (tun, other, ethernet) = (index("dpt"), index("dpu"), veth("dpa"));
    let mut host = host(&[("dpa", Role::Uplink), ("dpt", Role::Uplink), ("dpu", Role::Workload)]);
    for interface in &mut host.interfaces {
        interface.ethernet = interface.name == "dpa";
    }
    let programs = || [tun, other, ethernet].map(|index| program_of(&sandbox, &format!("{index}_ingress")));
    let mut before = [0; 3];
    for _ in 0..2 {
        let mut dataplane = sandbox.open();
        dataplane.take_host(&host).unwrap();
        let now = programs();
        assert!(now[0] != now[1] && now[0] != now[2], "by role and by header: {now:?}");
        assert!(now.iter().all(|program| !before.contains(program)), "{before:?} run on: {now:?}");
        dataplane.take_host(&host).unwrap();
        assert_eq!(programs(), now, "nothing is loaded twice");
        before = now;
    }
}

/// Attaches programs of others until the hook takes no more, which Linux 6.18 refuses with ERANGE
/// after 63. Returns `None`, and says that the test is skipped, if the kernel has no tcx.
pub fn fill(interface: u32, hook: bpf_attach_type) -> Option<Vec<OwnedFd>> {
    let mut links = Vec::new();
    loop {
        match bpf::link_tcx(packet_program(0).as_fd(), interface, hook) {
            Ok(link) => links.push(link),
            Err(error) if links.is_empty() && error.errno() == libc::EINVAL => {
                println!("skipped: the kernel has no tcx");
                return None;
            }
            Err(error) => {
                assert_eq!(error.errno(), libc::ERANGE, "{error}");
                return Some(links);
            }
        }
    }
}

#[test]
fn a_workloads_interface_that_takes_no_program_is_named_and_keeps_nothing_else_from_being_served() {
    let Some(sandbox) = Sandbox::new() else { return };
    let (refuses, other) = (veth("dpa"), veth("dpb"));
    let Some(theirs) = fill(refuses, bpf_attach_type::BPF_TCX_EGRESS) else { return };
    let mut dataplane = sandbox.open();
    dataplane.take_host(&host(&[("dpa", Role::Workload), ("dpb", Role::Workload)])).unwrap();
    assert_eq!(links(&sandbox), named(other), "no direction is translated alone");
    let unattached = dataplane.hook_problems().unattached;
    let reason = unattached.get(&refuses).expect("it is named");
    assert!(unattached.len() == 1 && reason.contains("dpa (egress)"), "{unattached:?}");
    let counted = |dataplane: &EbpfDataplane| {
        let families = dataplane.metrics().unwrap();
        let family =
            families.into_iter().find(|family| family.name == "proxy_unattached_interfaces").unwrap();
        family.samples[0].1
    };
    assert_eq!(counted(&dataplane), 1);

    drop(theirs);
    until_inspected(&mut dataplane, |dataplane| dataplane.hook_problems().unattached.is_empty());
    assert_eq!(links(&sandbox), &named(refuses) | &named(other));
    assert_eq!(counted(&dataplane), 0);
}

/// An ingress program alone would translate packets of a pod, and leave their answers as they are.
/// Another mode could serve this pod.
#[test]
fn an_interface_that_refuses_one_direction_later_keeps_no_program_in_the_other() {
    let Some(sandbox) = Sandbox::new() else { return };
    let interface = veth("dpa");
    if !tc::has_tcx(interface) {
        println!("skipped: the kernel has no tcx");
        return;
    }
    let mut dataplane = sandbox.open();
    dataplane.take_host(&host(&[("dpa", Role::Workload)])).unwrap();
    let egress = bpf::pinned(&sandbox.links().join(format!("{interface}_egress"))).unwrap();
    bpf::link_detach(egress.as_fd()).unwrap();
    let theirs = fill(interface, bpf_attach_type::BPF_TCX_EGRESS).unwrap();
    until_inspected(&mut dataplane, |dataplane| !dataplane.hook_problems().unattached.is_empty());
    assert_eq!(links(&sandbox), [].into());
    drop(theirs);
    until_inspected(&mut dataplane, |dataplane| dataplane.hook_problems().unattached.is_empty());
    assert_eq!(links(&sandbox), named(interface));
}

#[test]
fn interfaces_that_all_refuse_programs_are_told_from_a_single_one() {
    let Some(sandbox) = Sandbox::new() else { return };
    let (first, second) = (veth("dpa"), veth("dpb"));
    let Some(of_first) = fill(first, bpf_attach_type::BPF_TCX_EGRESS) else { return };
    let mut dataplane = sandbox.open();
    dataplane.take_host(&host(&[("dpa", Role::Workload)])).unwrap();
    assert_eq!(dataplane.packet_programs().fit_nowhere, None, "one alone tells nothing");
    let Some(of_second) = fill(second, bpf_attach_type::BPF_TCX_EGRESS) else { return };
    dataplane.take_host(&host(&[("dpa", Role::Workload), ("dpb", Role::Workload)])).unwrap();
    let reason = dataplane.packet_programs().fit_nowhere.expect("both refuse");
    assert!(reason.contains("(egress)"), "{reason}");
    drop(of_second);
    until_inspected(&mut dataplane, |dataplane| dataplane.packet_programs().fit_nowhere.is_none());
    assert!(dataplane.hook_problems().unattached.contains_key(&first));
    drop(of_first);
}

/// A folder that cannot be written until this is dropped.
struct ReadOnly(PathBuf);

impl ReadOnly {
    fn begin(folder: &Path) -> Self {
        run("mount", &format!("--bind {0} {0}", folder.display()));
        let read_only = Self(folder.to_owned());
        run("mount", &format!("-o remount,bind,ro {}", folder.display()));
        read_only
    }
}

impl Drop for ReadOnly {
    fn drop(&mut self) {
        run("umount", &self.0.display().to_string());
    }
}

/// Returns the ids of the programs on both hooks of an interface.
fn running(interface: u32) -> [Vec<u32>; 2] {
    [TcAttachType::Ingress, TcAttachType::Egress].map(|hook| tcx_programs(interface, hook))
}

/// Takes the host until it succeeds. The kernel detaches a link whose pin could not be made in the
/// background, and refuses its program until then (EEXIST).
fn until_attached(dataplane: &mut EbpfDataplane, host: &Host) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while let Err(error) = dataplane.take_host(host) {
        assert!(Instant::now() < deadline, "{error}");
    }
}

/// The kernel runs no program twice at a hook, so that a link cannot run the program of another
/// link.
#[rstest]
#[case::ingress(bpf_attach_type::BPF_TCX_INGRESS, TcAttachType::Ingress, "ingress")]
#[case::egress(bpf_attach_type::BPF_TCX_EGRESS, TcAttachType::Egress, "egress")]
fn a_link_that_cannot_run_the_new_program_runs_the_old_one(
    #[case] hook: bpf_attach_type,
    #[case] same_hook: TcAttachType,
    #[case] direction: &str,
) {
    let Some(sandbox) = Sandbox::new() else { return };
    let (changes, model) = (veth("dpa"), veth("dpb"));
    let mut dataplane = sandbox.open();
    dataplane.take_host(&host(&[("dpa", Role::Uplink), ("dpb", Role::Workload)])).unwrap();
    let ours = |interface, direction| program_of(&sandbox, &format!("{interface}_{direction}"));
    let before = ours(changes, direction);
    let (_, of_workloads) = SchedClassifier::query_tcx("dpb", same_hook).unwrap();
    let theirs = bpf::link_tcx(of_workloads[0].fd().unwrap().as_fd(), changes, hook).unwrap();

    let host = host(&[("dpa", Role::Workload), ("dpb", Role::Workload)]);
    let error = dataplane.take_host(&host).unwrap_err();
    assert!(error.to_string().contains("BPF_LINK_UPDATE"), "{error}");
    assert_eq!(links(&sandbox), &named(changes) | &named(model));
    assert_eq!(ours(changes, direction), before);
    let other = if direction == "ingress" { "egress" } else { "ingress" };
    assert_eq!(ours(changes, other), ours(model, other), "the other direction is swapped");
    bpf::link_detach(theirs.as_fd()).unwrap();
    dataplane.take_host(&host).unwrap();
    assert_eq!(ours(changes, direction), ours(model, direction));
}

/// An uplink without programs leaves all clients outside unserved, so that the node is not healthy.
#[test]
fn an_uplink_that_takes_no_program_fails_the_call() {
    let Some(sandbox) = Sandbox::new() else { return };
    let uplink = veth("dpa");
    let Some(_theirs) = fill(uplink, bpf_attach_type::BPF_TCX_INGRESS) else { return };
    let error = sandbox.open().take_host(&host(&[("dpa", Role::Uplink)])).unwrap_err();
    assert!(error.to_string().contains("dpa (ingress)"), "{error}");
}

#[test]
fn interfaces_that_vanish_while_they_are_attached_are_no_error() {
    let Some(sandbox) = Sandbox::new() else { return };
    let names: Vec<String> = (0..32).map(|n| format!("dp{n}")).collect();
    let indexes: Vec<u32> = names.iter().map(|name| veth(name)).collect();
    let of_names: Vec<_> = names.iter().map(|name| (name.as_str(), Role::Workload)).collect();
    let host = host(&of_names);
    let mut dataplane = sandbox.open();
    dataplane.take_host(&host).unwrap();
    assert_eq!(links(&sandbox), indexes.into_iter().flat_map(named).collect());
    thread::scope(|scope| {
        let deleted =
            scope.spawn(|| names.iter().for_each(|name| drop(run("ip", &format!("link del {name}")))));
        while !deleted.is_finished() {
            // All links that are left are attached anew by this.
            dataplane.take_host(&Host::default()).unwrap();
            dataplane.take_host(&host).unwrap();
        }
    });
    dataplane.take_host(&host).unwrap();
    dataplane.take_host(&Host::default()).unwrap();
    assert_eq!(links(&sandbox), BTreeSet::new());
}

#[test]
fn others_programs_stay_and_go_on_working() {
    const TCX_NEXT: i32 = -1;
    let Some(sandbox) = Sandbox::new() else { return };
    let interface = veth("dpa");
    let listening = serve("127.0.0.1", "backend");
    let their_packets =
        bpf::link_tcx(packet_program(TCX_NEXT).as_fd(), interface, bpf_attach_type::BPF_TCX_INGRESS).unwrap();
    let cgroup = sandbox.cgroup();
    let connect4 = bpf_attach_type::BPF_CGROUP_INET4_CONNECT;
    let allows = bpf::link_cgroup(connect_program(1).as_fd(), cgroup.as_fd(), connect4).unwrap();

    let mut dataplane = sandbox.open();
    dataplane.take_host(&host(&[("dpa", Role::Workload)])).unwrap();
    dataplane.resync(&shared([port("web", "10.96.0.1", vec![endpoint("127.0.0.1", listening)])])).unwrap();
    assert_eq!(sandbox.dial("10.96.0.1", 80), Ok("backend".into()));
    assert_eq!(first_on_ingress(interface), program_of(&sandbox, &format!("{interface}_ingress")));

    // The verdict of the other program counts beside ours.
    let denies = bpf::link_cgroup(connect_program(0).as_fd(), cgroup.as_fd(), connect4).unwrap();
    let error = sandbox.dial("10.96.0.1", 80).unwrap_err();
    assert!(error.contains("not permitted"), "{error}");
    drop(denies);

    drop(dataplane);
    let removed = cleanup(&sandbox.config.bpffs).unwrap();
    assert_eq!(removed.links.len(), 10);
    assert_eq!(bpf::link_info(their_packets.as_fd()).unwrap().target, LinkTarget::Tcx(interface));
    let LinkTarget::Cgroup(inode) = bpf::link_info(allows.as_fd()).unwrap().target else { panic!("cgroup") };
    assert_ne!(inode, 0, "the other's program is still attached");
    let theirs = bpf::link_info(their_packets.as_fd()).unwrap().program;
    assert_eq!(first_on_ingress(interface), theirs);
    sandbox.dial("10.96.0.1", 80).unwrap_err();
}

/// Programs of others come before ours. How many times that is corrected is tested by `order.rs`.
#[test]
fn a_program_that_was_put_before_ours_gets_behind_it() {
    const TC_ACT_OK: i32 = 0;
    let Some(sandbox) = Sandbox::new() else { return };
    let (interface, other) = (veth("dpa"), veth("dpb"));
    let mut dataplane = sandbox.open();
    dataplane.take_host(&host(&[("dpa", Role::Workload), ("dpb", Role::Workload)])).unwrap();
    let is_first = |interface: u32| {
        [("ingress", TcAttachType::Ingress), ("egress", TcAttachType::Egress)].into_iter().all(
            |(hook, kind)| {
                let ours = program_of(&sandbox, &format!("{interface}_{hook}"));
                tcx_programs(interface, kind).first() == Some(&ours)
            },
        )
    };
    let mut inspect = || {
        for _ in 0..COLLECTIONS_BETWEEN_INSPECTIONS {
            dataplane.collect_garbage().unwrap();
        }
    };
    let theirs = packet_program(TC_ACT_OK);
    let come = || {
        [bpf_attach_type::BPF_TCX_INGRESS, bpf_attach_type::BPF_TCX_EGRESS]
            .map(|hook| bpf::link_tcx(theirs.as_fd(), interface, hook).unwrap())
    };
    let links = come();
    assert!(!is_first(interface));
    inspect();
    assert!(is_first(interface));
    assert_eq!(tcx_programs(interface, TcAttachType::Ingress).len(), 2, "both are there");
    let others = |is_before| {
        let hooks = sandbox.snapshot().hooks;
        let others: Vec<_> = hooks.iter().flat_map(|hook| &hook.others).collect();
        assert_eq!(others.len(), 2, "{others:?}");
        others.iter().all(|other| other.is_before == is_before)
    };
    assert!(others(false), "status tells where they are");
    let before = program_of(&sandbox, &format!("{interface}_ingress"));
    inspect();
    assert_eq!(program_of(&sandbox, &format!("{interface}_ingress")), before, "nothing is to be repaired");
    for link in links {
        bpf::link_detach(link.as_fd()).unwrap();
    }
    let _links = come();
    inspect();
    assert!(!is_first(interface), "it is left first for a minute");
    assert!(others(true), "status tells that ours may not run");
    assert!(is_first(other));
}

/// Returns the ids of the tcx programs in their order, as bpftool lists them.
fn tcx_programs(interface: u32, hook: TcAttachType) -> Vec<u32> {
    let name = nix::net::if_::if_indextoname(interface).unwrap().into_string().unwrap();
    let (_, programs) = SchedClassifier::query_tcx(&name, hook).unwrap();
    programs.iter().map(|program| program.id()).collect()
}

fn first_on_ingress(interface: u32) -> u32 {
    tcx_programs(interface, TcAttachType::Ingress)[0]
}

#[test]
fn cleanup_leaves_nothing_of_ours() {
    let Some(sandbox) = Sandbox::new() else { return };
    veth("dpa");
    let mut dataplane = sandbox.open();
    dataplane.take_host(&host(&[("dpa", Role::Workload)])).unwrap();
    dataplane.resync(&shared([port("web", "10.96.0.1", vec![endpoint("10.0.0.1", 80)])])).unwrap();
    drop(dataplane);
    // The pin of another program is beside our folder.
    let theirs = sandbox.config.bpffs.join("theirs");
    bpf::pin(packet_program(0).as_fd(), &theirs).unwrap();
    let [links, maps] =
        [sandbox.links(), sandbox.pins("maps")].map(|folder| fs::read_dir(folder).unwrap().count());
    let removed = cleanup(&sandbox.config.bpffs).unwrap();
    assert_eq!((removed.links.len(), removed.objects.len()), (links, maps));
    assert!(!sandbox.config.bpffs.join("proxy-ctl").exists());
    assert!(theirs.exists());
    assert!(cleanup(&sandbox.config.bpffs).unwrap().is_empty());
    assert!(matches!(Pinned::open(&sandbox.config.bpffs), Err(Error::NotThere(_))));
    fs::remove_file(theirs).unwrap();
}

#[test]
fn socket_hooks_are_detached_when_they_are_switched_off() {
    let Some(sandbox) = Sandbox::new() else { return };
    let listening = serve("127.0.0.1", "backend");
    let desired = shared([port("web", "10.96.0.1", vec![endpoint("127.0.0.1", listening)])]);
    let mut dataplane = sandbox.open();
    dataplane.resync(&desired).unwrap();
    assert_eq!(sandbox.dial("10.96.0.1", 80), Ok("backend".into()));
    drop(dataplane);
    let off = Ebpf { socket_load_balancing: SocketLoadBalancing::Off, ..sandbox.config.clone() };
    let mut dataplane = EbpfDataplane::open(&off).unwrap();
    assert_eq!(sandbox.dial("10.96.0.1", 80), Ok("backend".into()), "the packet programs are not there yet");
    dataplane.take_host(&Host::default()).unwrap();
    sandbox.dial("10.96.0.1", 80).unwrap_err();
    assert_eq!(sandbox.snapshot().hooks, []);
}

#[test]
fn host_balancing_is_for_the_nodes_own_namespace() {
    let Some(sandbox) = Sandbox::new() else { return };
    let listening = serve("127.0.0.1", "backend");
    let dial_both = |balancing| {
        let config = Ebpf { socket_load_balancing: balancing, ..sandbox.config.clone() };
        let mut dataplane = EbpfDataplane::open(&config).unwrap();
        let of_pod = thread::scope(|scope| {
            let in_pod = || {
                unshare(CloneFlags::CLONE_NEWNET).unwrap();
                run("ip", "link set lo up");
                // This address answers a connection that is not translated, too.
                run("ip", "address add 10.96.0.1/32 dev lo");
                let own = serve("10.96.0.1", "left alone");
                let mut web = port("web", "10.96.0.1", vec![endpoint("127.0.0.1", listening)]);
                web.frontends[0].port = own;
                dataplane.resync(&shared([web])).unwrap();
                (own, sandbox.dial("10.96.0.1", own))
            };
            scope.spawn(in_pod).join().unwrap()
        });
        (sandbox.dial("10.96.0.1", of_pod.0), of_pod.1)
    };
    let backend = Ok("backend".to_owned());
    assert_eq!(dial_both(SocketLoadBalancing::Host), (backend.clone(), Ok("left alone".into())));
    let (of_node, of_pod) = dial_both(SocketLoadBalancing::All);
    assert_eq!(of_node, backend);
    let refused = of_pod.unwrap_err();
    assert!(refused.contains("refused"), "the backend listens in the other namespace: {refused}");
}
