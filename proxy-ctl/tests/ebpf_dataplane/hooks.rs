//! Tests of programs on the cgroup and on interfaces, which are swapped, follow interfaces, are
//! cleaned up, and run beside programs of others.

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
        Applied, Dataplane, Hook,
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
        Map::new(bpf::pinned(&sandbox.table("settings")).unwrap()).unwrap().unwrap();
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
    let Some(foreign) = fill(refuses, bpf_attach_type::BPF_TCX_EGRESS) else { return };
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

    drop(foreign);
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
    let foreign = fill(interface, bpf_attach_type::BPF_TCX_EGRESS).unwrap();
    until_inspected(&mut dataplane, |dataplane| !dataplane.hook_problems().unattached.is_empty());
    assert_eq!(links(&sandbox), [].into());
    drop(foreign);
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

/// A pin that cannot be made says nothing about the interface, whose programs go on.
#[test]
fn links_that_cannot_be_pinned_again_stay_attached() {
    let Some(sandbox) = Sandbox::new() else { return };
    let (old, new) = (veth("dpa"), veth("dpb"));
    let mut dataplane = sandbox.open();
    dataplane.take_host(&host(&[("dpa", Role::Workload)])).unwrap();
    let before = running(old);
    fs::remove_file(sandbox.links().join(format!("{old}_egress"))).unwrap();

    let both = host(&[("dpa", Role::Workload), ("dpb", Role::Workload)]);
    let read_only = ReadOnly::begin(&sandbox.config.bpffs);
    for _ in 0..2 {
        let error = dataplane.take_host(&both).unwrap_err();
        assert_eq!(running(old), before, "{error}");
    }
    assert_eq!(dataplane.hook_problems().unattached, [].into(), "no interface has refused anything");
    drop(read_only);
    until_attached(&mut dataplane, &both);
    assert_eq!(links(&sandbox), &named(old) | &named(new));
    assert_eq!(running(old), before);
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
    let foreign = bpf::link_tcx(of_workloads[0].fd().unwrap().as_fd(), changes, hook).unwrap();

    let host = host(&[("dpa", Role::Workload), ("dpb", Role::Workload)]);
    let error = dataplane.take_host(&host).unwrap_err();
    assert!(error.to_string().contains("BPF_LINK_UPDATE"), "{error}");
    assert_eq!(links(&sandbox), &named(changes) | &named(model));
    assert_eq!(ours(changes, direction), before);
    let other = if direction == "ingress" { "egress" } else { "ingress" };
    assert_eq!(ours(changes, other), ours(model, other), "the other direction is swapped");
    bpf::link_detach(foreign.as_fd()).unwrap();
    dataplane.take_host(&host).unwrap();
    assert_eq!(ours(changes, direction), ours(model, direction));
}

/// An uplink without programs leaves all clients outside unserved, so that the node is not healthy.
#[test]
fn an_uplink_that_takes_no_program_fails_the_call() {
    let Some(sandbox) = Sandbox::new() else { return };
    let uplink = veth("dpa");
    let Some(_foreign) = fill(uplink, bpf_attach_type::BPF_TCX_INGRESS) else { return };
    let error = sandbox.open().take_host(&host(&[("dpa", Role::Uplink)])).unwrap_err();
    assert!(error.to_string().contains("dpa (ingress)"), "{error}");
}

/// Collects garbage until an inspection has made `done` true. The kernel detaches links of others
/// in the background.
fn until_inspected(dataplane: &mut EbpfDataplane, done: impl Fn(&EbpfDataplane) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done(dataplane) {
        assert!(Instant::now() < deadline, "no inspection has cured it");
        dataplane.collect_garbage().unwrap();
    }
}

#[test]
fn a_link_that_somebody_removed_comes_back() {
    let Some(sandbox) = Sandbox::new() else { return };
    let first = veth("dpa");
    let mut dataplane = sandbox.open();
    let host = host(&[("dpa", Role::Workload)]);
    dataplane.take_host(&host).unwrap();
    let remove = || {
        fs::remove_file(sandbox.links().join(format!("{first}_ingress"))).unwrap();
        fs::remove_file(sandbox.links().join("cgroup_connect4")).unwrap();
    };
    let all_there = || links(&sandbox) == named(first) && sandbox.links().join("cgroup_connect4").exists();
    // The kernel detaches in the background. Until it has, it refuses the same program a second
    // time (EEXIST).
    let repaired_by = |tend: &mut dyn FnMut()| {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !all_there() && Instant::now() < deadline {
            tend();
        }
        all_there()
    };
    remove();
    assert!(repaired_by(&mut || drop(dataplane.take_host(&host))), "when the host is set");
    remove();
    assert!(repaired_by(&mut || drop(dataplane.collect_garbage())), "by inspection now and then");
}

/// The number that the dataplane uses.
const COLLECTIONS_BETWEEN_INSPECTIONS: u32 = 10;

#[test]
fn an_emptied_bpffs_is_filled_again_and_nobody_notices() {
    let Some(sandbox) = Sandbox::new() else { return };
    let interface = veth("dpa");
    let listening = serve("127.0.0.1", "backend");
    let wanted = shared([port("web", "10.96.0.1", vec![endpoint("127.0.0.1", listening)])]);
    let host = host(&[("dpa", Role::Workload)]);
    let mut dataplane = sandbox.open();
    dataplane.take_host(&host).unwrap();
    dataplane.resync(&wanted).unwrap();
    let program = first_on_ingress(interface);

    let everything = sandbox.config.bpffs.join("proxy-ctl");
    fs::remove_dir_all(&everything).unwrap();
    for _ in 0..COLLECTIONS_BETWEEN_INSPECTIONS {
        assert_eq!(sandbox.dial("10.96.0.1", 80), Ok("backend".into()));
        dataplane.collect_garbage().unwrap();
    }
    assert!(sandbox.table("services").exists());
    assert_eq!(links(&sandbox), named(interface));
    assert_eq!(first_on_ingress(interface), program, "it was never detached");
    assert!(
        matches!(EbpfDataplane::open(&sandbox.config), Err(Error::Locked { .. })),
        "the new folder is locked"
    );
    drop(dataplane);
    assert_eq!(
        sandbox.dial("10.96.0.1", 80),
        Ok("backend".into()),
        "what was pinned again outlives the controller"
    );
    let mut next = sandbox.open();
    next.take_host(&host).unwrap();
    assert_eq!(next.resync(&wanted).unwrap(), Applied::default());
}

#[test]
fn the_pins_of_a_successor_are_its_own() {
    let Some(sandbox) = Sandbox::new() else { return };
    let interface = veth("dpa");
    let host = host(&[("dpa", Role::Workload)]);
    let mut former = sandbox.open();
    former.take_host(&host).unwrap();
    fs::remove_dir_all(sandbox.config.bpffs.join("proxy-ctl")).unwrap();
    let mut successor = sandbox.open();
    successor.take_host(&host).unwrap();
    let programs = || {
        ["cgroup_connect4".to_owned(), format!("{interface}_ingress")].map(|link| program_of(&sandbox, &link))
    };
    let theirs = programs();

    assert!(former.take_host(&host).unwrap_err().is_taken_over());
    let collections = (0..COLLECTIONS_BETWEEN_INSPECTIONS).map(|_| former.collect_garbage());
    let errors: Vec<_> = collections.filter_map(Result::err).collect();
    assert!(errors.iter().any(proxy_ctl::modes::Error::is_taken_over), "{errors:?}");
    drop(former);
    assert_eq!(programs(), theirs);
}

#[test]
fn pins_of_another_map_do_not_take_the_place_of_a_table() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    dataplane.resync(&shared([port("web", "10.96.0.1", vec![endpoint("10.0.0.1", 80)])])).unwrap();
    let id_of = |table: &str| bpf::map_info(bpf::pinned(&sandbox.table(table)).unwrap().as_fd()).unwrap().id;
    let services = id_of("services");
    fs::remove_file(sandbox.table("services")).unwrap();
    bpf::pin(bpf::pinned(&sandbox.table("settings")).unwrap().as_fd(), &sandbox.table("services")).unwrap();
    dataplane.take_host(&Host::default()).unwrap();
    assert_eq!(id_of("services"), services);
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
    let foreign_packets =
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
    assert_eq!(bpf::link_info(foreign_packets.as_fd()).unwrap().target, LinkTarget::Tcx(interface));
    let LinkTarget::Cgroup(inode) = bpf::link_info(allows.as_fd()).unwrap().target else { panic!("cgroup") };
    assert_ne!(inode, 0, "the other's program is still attached");
    let foreign = bpf::link_info(foreign_packets.as_fd()).unwrap().program;
    assert_eq!(first_on_ingress(interface), foreign);
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
    let foreign = packet_program(TC_ACT_OK);
    let come = || {
        [bpf_attach_type::BPF_TCX_INGRESS, bpf_attach_type::BPF_TCX_EGRESS]
            .map(|hook| bpf::link_tcx(foreign.as_fd(), interface, hook).unwrap())
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
    assert_eq!(program_of(&sandbox, &format!("{interface}_ingress")), before, "nothing is to be mended");
    for link in links {
        bpf::link_detach(link.as_fd()).unwrap();
    }
    let _links = come();
    inspect();
    assert!(!is_first(interface), "it is left its place for a minute");
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

/// Returns true, and says that the test is skipped, if the kernel cannot attach filters.
fn is_without_clsact(dataplane: &EbpfDataplane) -> bool {
    let unattached = dataplane.hook_problems().unattached;
    let is_missing = unattached.values().any(|reason| reason.contains("No such file"));
    if is_missing {
        println!("skipped: the kernel has no clsact qdisc or no cls_bpf");
    }
    is_missing
}

#[test]
fn clsact_filters_do_the_same_where_tcx_is_missing() {
    let Some(sandbox) = Sandbox::new() else { return };
    let interface = veth("dpa");
    let open = || sandbox.open().without_tcx();
    let host = host(&[("dpa", Role::Workload)]);
    let mut dataplane = open();
    dataplane.take_host(&host).unwrap();
    if is_without_clsact(&dataplane) {
        return;
    }
    let ours = |direction| tc::filters(interface, direction).unwrap();
    let (ingress, egress) = (ours(Direction::Ingress), ours(Direction::Egress));
    assert_eq!((ingress.len(), egress.len()), (1, 1));
    assert_eq!((ingress[0].priority, egress[0].priority), (1, 1));
    assert_eq!(links(&sandbox), [format!("{interface}_clsact")].into());

    drop(dataplane);
    let mut dataplane = open();
    dataplane.take_host(&host).unwrap();
    let swapped = ours(Direction::Ingress);
    assert_eq!(swapped.len(), 1);
    assert_ne!(swapped[0].program, ingress[0].program);

    run("tc", "qdisc del dev dpa clsact");
    for _ in 0..20 {
        dataplane.collect_garbage().unwrap();
    }
    assert_eq!(ours(Direction::Ingress), swapped, "removed programs are attached again");
    assert_eq!(ours(Direction::Egress).len(), 1);

    // Another's filter keeps the qdisc alive.
    let foreign = packet_program(-1);
    tc::put_filter(tc::REPLACE_FILTER, interface, Direction::Egress, 7, 1, foreign.as_fd(), "foreign")
        .unwrap();
    drop(dataplane);
    let removed = cleanup(&sandbox.config.bpffs).unwrap();
    assert_eq!(removed.filters, 2);
    assert_eq!(ours(Direction::Ingress), []);
    assert_eq!(ours(Direction::Egress).len(), 1);
    assert!(run("tc", "qdisc show dev dpa").contains("clsact"));
}

#[test]
fn a_clsact_qdisc_of_ours_goes_with_the_last_filter() {
    let Some(sandbox) = Sandbox::new() else { return };
    veth("dpa");
    let mut dataplane = sandbox.open().without_tcx();
    dataplane.take_host(&host(&[("dpa", Role::Workload)])).unwrap();
    if is_without_clsact(&dataplane) {
        return;
    }
    assert!(run("tc", "qdisc show dev dpa").contains("clsact"));
    dataplane.take_host(&Host::default()).unwrap();
    assert!(!run("tc", "qdisc show dev dpa").contains("clsact"));
    assert_eq!(links(&sandbox), BTreeSet::new());

    // Filters of other kinds than ours keep it alive, too.
    dataplane.take_host(&host(&[("dpa", Role::Workload)])).unwrap();
    until_inspected(&mut dataplane, |_| run("tc", "qdisc show dev dpa").contains("clsact"));
    run("tc", "filter add dev dpa ingress protocol ip prio 9 u32 match u32 0 0");
    dataplane.take_host(&Host::default()).unwrap();
    assert!(run("tc", "filter show dev dpa ingress").contains("u32"));
    run("tc", "qdisc del dev dpa clsact");

    // A qdisc that was there before us stays.
    run("tc", "qdisc add dev dpa clsact");
    dataplane.take_host(&host(&[("dpa", Role::Workload)])).unwrap();
    dataplane.take_host(&Host::default()).unwrap();
    assert!(run("tc", "qdisc show dev dpa").contains("clsact"));
}

#[test]
fn xdp_is_on_the_uplinks_that_can_have_it() {
    let Some(sandbox) = Sandbox::new() else { return };
    let (uplink, workload) = (card("dpa"), veth("dpb"));
    // The driver of this device has no XDP.
    run("ip", "link add dpc type bridge");
    let bridge = index("dpc");
    let host = host(&[("dpa", Role::Uplink), ("dpb", Role::Workload), ("dpc", Role::Uplink)]);
    let of_tc = || &(&named(uplink) | &named(workload)) | &named(bridge);
    let with = |hooks: &[String]| &of_tc() | &hooks.iter().cloned().collect();
    let open = |xdp| {
        let mut dataplane = EbpfDataplane::open(&Ebpf { xdp, ..sandbox.config.clone() }).unwrap();
        dataplane.take_host(&host).unwrap();
        dataplane
    };

    let dataplane = open(Xdp::Native);
    let native = format!("{uplink}_native");
    assert_eq!(links(&sandbox), with(std::slice::from_ref(&native)));
    let link = format!("{uplink}_xdp_native");
    let before = program_of(&sandbox, &link);
    drop(dataplane);
    let dataplane = open(Xdp::Native);
    assert_eq!(links(&sandbox), with(&[native]));
    assert_ne!(program_of(&sandbox, &link), before, "a restart swaps the program");
    drop(dataplane);

    let dataplane = open(Xdp::Generic);
    assert_eq!(links(&sandbox), with(&[format!("{uplink}_generic"), format!("{bridge}_generic")]));
    drop(dataplane);
    // None of these devices is a network card.
    for xdp in [Xdp::Auto, Xdp::Off] {
        drop(open(xdp));
        assert_eq!(links(&sandbox), of_tc(), "{xdp:?}");
        assert!(!run("ip", "link show dpa").contains("xdp"));
    }

    drop(open(Xdp::Native));
    let removed = cleanup(&sandbox.config.bpffs).unwrap();
    assert!(removed.links.contains(&link), "{removed:?}");
    assert!(!run("ip", "link show dpa").contains("xdp"));
}

#[test]
fn xdp_waits_for_another_program_to_go() {
    let Some(sandbox) = Sandbox::new() else { return };
    let uplink = card("dpa");
    const XDP: u32 = 6;
    let other = bpf::load_program(XDP, bpf_attach_type::BPF_XDP as u32, &returns(2)).unwrap();
    let others_link = bpf::link_xdp(other.as_fd(), uplink, XdpMode::Native).unwrap();
    let mut dataplane = EbpfDataplane::open(&Ebpf { xdp: Xdp::Native, ..sandbox.config.clone() }).unwrap();
    dataplane.take_host(&host(&[("dpa", Role::Uplink)])).unwrap();
    assert_eq!(links(&sandbox), named(uplink));
    bpf::link_detach(others_link.as_fd()).unwrap();
    for _ in 0..COLLECTIONS_BETWEEN_INSPECTIONS {
        dataplane.collect_garbage().unwrap();
    }
    assert_eq!(links(&sandbox), &named(uplink) | &[format!("{uplink}_native")].into());
}

#[rstest]
#[case::here(false)]
#[case::in_another_namespace(true)]
fn xdp_is_not_on_a_veth_that_gets_unfinished_checksums(#[case] is_elsewhere: bool) {
    let Some(sandbox) = Sandbox::new() else { return };
    let uplink = veth("dpa");
    let elsewhere = format!("px-peer-{}", std::process::id());
    if is_elsewhere {
        run("ip", &format!("netns add {elsewhere}"));
        run("ip", &format!("link set dpap netns {elsewhere}"));
        run("ip", &format!("-n {elsewhere} link set dpap up"));
    }
    let complete = || match is_elsewhere {
        true => run("ip", &format!("netns exec {elsewhere} ethtool -K dpap tx off")),
        false => run("ethtool", "-K dpap tx off"),
    };
    let mut dataplane = EbpfDataplane::open(&Ebpf { xdp: Xdp::Native, ..sandbox.config.clone() }).unwrap();
    dataplane.take_host(&host(&[("dpa", Role::Uplink)])).unwrap();
    let refusal = dataplane.hook_problems().without_xdp.remove(&uplink);
    let before = links(&sandbox);
    complete();
    for _ in 0..COLLECTIONS_BETWEEN_INSPECTIONS {
        dataplane.collect_garbage().unwrap();
    }
    let after = links(&sandbox);
    if is_elsewhere {
        run("ip", &format!("netns del {elsewhere}"));
    }
    let refusal = refusal.expect("it is refused");
    assert!(refusal.contains("ethtool -K dpap tx off"), "{refusal}");
    assert_eq!(before, named(uplink));
    assert_eq!(after, &named(uplink) | &[format!("{uplink}_native")].into());
}

/// Returns a program that drops what has come by the interface, and passes the rest.
fn dropping_what_comes_by(interface: u32) -> OwnedFd {
    const XDP: u32 = 6;
    let program = [
        // r0 = XDP_PASS
        0x0000_0002_0000_00b7,
        // r1 = r1.ingress_ifindex
        0x0000_0000_000c_1161,
        // if r1 != interface goto +1
        0x0000_0000_0001_0155 | u64::from(interface) << 32,
        // r0 = XDP_DROP
        0x0000_0001_0000_00b7,
        // exit
        0x95,
    ];
    bpf::load_program(XDP, bpf_attach_type::BPF_XDP as u32, &program).unwrap()
}

/// Bonds are left to TC, because of this: the kernel runs the program of a bond on its ports. Such
/// a program sees the port that a frame has come by, and not the bond.
#[rstest]
#[case::active_backup("active-backup", true)]
#[case::balance_rr("balance-rr", true)]
#[case::balance_xor("balance-xor", true)]
#[case::lacp("802.3ad", true)]
#[case::broadcast("broadcast", false)]
#[case::balance_tlb("balance-tlb", false)]
#[case::balance_alb("balance-alb", false)]
fn the_kernel_runs_the_program_of_a_bond_on_its_ports(#[case] mode: &str, #[case] takes_programs: bool) {
    let Some(_sandbox) = Sandbox::new() else { return };
    let made =
        Command::new("ip").args(["link", "add", "bond", "type", "bond", "mode", mode]).output().unwrap();
    if !made.status.success() {
        let error = String::from_utf8_lossy(&made.stderr).into_owned();
        println!("skipped: the kernel has no bonding (CONFIG_BONDING): {error}");
        return;
    }
    run("ip", "link add port type veth peer name beyond");
    run("ip", "link set port master bond");
    run("ip", "link set bond up");
    run("ip", "address add 192.0.2.1/24 dev bond");
    let attach = |program: OwnedFd| bpf::link_xdp(program.as_fd(), index("bond"), XdpMode::Native);
    if !takes_programs {
        assert_eq!(attach(dropping_what_comes_by(0)).unwrap_err().errno(), libc::EOPNOTSUPP);
        return;
    }
    let (asks, asked) = mpsc::channel::<()>();
    let (answers, answer) = mpsc::channel();
    thread::scope(move |scope| {
        scope.spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            answers.send(Err(gettid().to_string())).unwrap();
            asked.recv().unwrap();
            run("ip", "link set beyond up");
            run("ip", "address add 192.0.2.2/24 dev beyond");
            for () in asked {
                let dialled = TcpStream::connect_timeout(&([192, 0, 2, 1], 9).into(), Duration::from_secs(1));
                let refused = dialled.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused);
                answers.send(Ok(refused)).unwrap();
            }
        });
        let Err(thread) = answer.recv().unwrap() else { panic!("its namespace comes first") };
        run("ip", &format!("link set beyond netns {thread}"));
        asks.send(()).unwrap();
        let is_reached = || {
            asks.send(()).unwrap();
            answer.recv().unwrap() == Ok(true)
        };
        let link = attach(dropping_what_comes_by(index("bond"))).unwrap();
        // A bond takes a moment to choose its port.
        assert!((0..20).any(|_| is_reached()), "no frame comes by the bond");
        bpf::link_detach(link.as_fd()).unwrap();
        let _link = attach(dropping_what_comes_by(index("port"))).unwrap();
        assert!(!is_reached(), "every frame comes by the port");
    });
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
    let foreign = sandbox.config.bpffs.join("foreign");
    bpf::pin(packet_program(0).as_fd(), &foreign).unwrap();
    let [links, tables] =
        [sandbox.links(), sandbox.pins("maps")].map(|folder| fs::read_dir(folder).unwrap().count());
    let removed = cleanup(&sandbox.config.bpffs).unwrap();
    assert_eq!((removed.links.len(), removed.tables.len()), (links, tables));
    assert!(!sandbox.config.bpffs.join("proxy-ctl").exists());
    assert!(foreign.exists());
    assert!(cleanup(&sandbox.config.bpffs).unwrap().is_empty());
    assert!(matches!(Pinned::open(&sandbox.config.bpffs), Err(Error::NotThere(_))));
    fs::remove_file(foreign).unwrap();
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

/// Waits for a state of the host. It panics after a minute with the last one.
async fn until(
    hosts: &mut tokio::sync::watch::Receiver<Option<NodeNetwork>>,
    holds: impl Fn(&NodeNetwork) -> bool,
) {
    let waiting = hosts.wait_for(|host| host.as_ref().is_some_and(&holds));
    let result = tokio::time::timeout(Duration::from_secs(60), waiting).await.map(|found| found.is_ok());
    assert_eq!(result, Ok(true), "{:?}", hosts.borrow());
}

#[test]
fn the_node_is_followed_by_netlink() {
    let Some(_place) = Sandbox::new() else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (own_node, own_nodes) = tokio::sync::watch::channel(OwnNode::Absent);
        let (sender, mut hosts) = tokio::sync::watch::channel(None);
        let stop = CancellationToken::new();
        let (configs, followed) = tokio::sync::watch::channel(Arc::new(Config::default()));
        let watching = node::watch(own_nodes, followed, sender, stop.clone());
        let changing = async {
            until(&mut hosts, |host| host.interfaces.is_empty() && host.addresses.len() == 2).await;
            veth("dpa");
            let role = |host: &NodeNetwork, name| {
                host.interfaces
                    .iter()
                    .find(|interface| interface.name == name)
                    .map(|interface| interface.role)
            };
            until(&mut hosts, |host| role(host, "dpa") == Some(Role::Workload)).await;
            let own: IpAddr = "192.0.2.1".parse().unwrap();
            run("ip", "address add 192.0.2.1/24 dev dpa");
            until(&mut hosts, |host| {
                host.addresses.contains(&own) && role(host, "dpa") == Some(Role::Uplink)
            })
            .await;
            configs.send_modify(|config| {
                let config = Arc::make_mut(config);
                config.ebpf.interfaces.workloads.extend(NamePattern::parse("dpa"));
            });
            until(&mut hosts, |host| role(host, "dpa") == Some(Role::Workload)).await;
            configs.send_modify(|config| *config = Arc::default());
            own_node.send(OwnNode::Present(Node { addresses: vec![own], ..Node::default() })).unwrap();
            until(&mut hosts, |host| {
                role(host, "dpa") == Some(Role::Uplink) && host.masquerade_addresses == [own]
            })
            .await;
            run("ip", "route add default via 192.0.2.2");
            own_node.send(OwnNode::Absent).unwrap();
            until(&mut hosts, |host| host.masquerade_addresses == [own]).await;
            run("ip", "link set dpa down");
            until(&mut hosts, |host| host.masquerade_addresses.is_empty()).await;
            run("ip", "address del 192.0.2.1/24 dev dpa");
            until(&mut hosts, |host| role(host, "dpa") == Some(Role::Workload)).await;
            run("ip", "link del dpa");
            until(&mut hosts, |host| host.interfaces.is_empty()).await;
            stop.cancel();
        };
        let (watched, ()) = tokio::join!(watching, changing);
        watched.unwrap();
    });
}

#[test]
fn a_filter_gives_way_to_others_that_hold_its_priority() {
    let Some(sandbox) = Sandbox::new() else { return };
    let interface = veth("dpa");
    run("tc", "qdisc add dev dpa clsact");
    run("tc", "filter add dev dpa ingress protocol ip prio 1 u32 match u32 0 0");
    run("tc", "filter add dev dpa ingress protocol ip prio 2 u32 match u32 0 0");
    let host = host(&[("dpa", Role::Workload)]);
    let priorities = || -> Vec<u16> {
        tc::filters(interface, Direction::Ingress).unwrap().iter().map(|filter| filter.priority).collect()
    };
    for _ in 0..2 {
        let mut dataplane = sandbox.open().without_tcx();
        dataplane.take_host(&host).unwrap();
        assert_eq!(priorities(), [3], "and a restart finds it there");
    }
    run("tc", "filter del dev dpa ingress prio 1");
    let mut dataplane = sandbox.open().without_tcx();
    dataplane.take_host(&host).unwrap();
    assert_eq!(priorities(), [3], "it stays where it is");
    drop(dataplane);
    assert_eq!(cleanup(&sandbox.config.bpffs).unwrap().filters, 2);
    assert!(run("tc", "filter show dev dpa ingress").contains("u32"));
}

/// The kernel gives each priority its own handles, so that another's filter can have ours.
#[test]
fn a_filter_of_another_with_our_handle_is_told_as_anothers() {
    const OUR_HANDLE: u32 = 0x7063;
    let Some(sandbox) = Sandbox::new() else { return };
    let interface = veth("dpa");
    let mut dataplane = sandbox.open().without_tcx();
    dataplane.take_host(&host(&[("dpa", Role::Workload)])).unwrap();
    if is_without_clsact(&dataplane) {
        return;
    }
    let foreign = packet_program(-1);
    let put = |direction, priority| {
        tc::put_filter(tc::ADD_FILTER, interface, direction, priority, OUR_HANDLE, foreign.as_fd(), "foreign")
    };
    put(Direction::Egress, 9).unwrap();
    let others: Vec<_> = sandbox.snapshot().hooks.into_iter().flat_map(|hook| hook.others).collect();
    let told: Vec<_> =
        others.iter().map(|other| (other.name.as_str(), other.hook, other.is_before)).collect();
    assert_eq!(told, [("foreign", "egress", false)]);
}

#[test]
fn where_there_is_no_room_for_all_addresses_the_nodes_own_are_served() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    let own: IpAddr = "192.0.2.9".parse().unwrap();
    let mut host = host(&[]);
    host.masquerade_addresses = vec![own];
    host.node_port_addresses = (1..=70).map(|last| IpAddr::from([10, 9, 0, last])).chain([own]).collect();
    let error = dataplane.take_host(&host).unwrap_err();
    assert!(error.is_of_node_addresses(), "{error}");
    let served = sandbox.snapshot().node.node_port_addresses;
    assert!(served.len() == 64 && served.contains(&(own, false)), "{served:?}");
}

#[test]
fn settings_of_uplinks_follow_their_addresses_and_mtu() {
    let Some(sandbox) = Sandbox::new() else { return };
    let dpa = veth("dpa");
    let mut dataplane = sandbox.open();
    let table: Map<u32, InterfaceSettings> = sandbox.map("interfaces");
    let mut host = host(&[("dpa", Role::Uplink)]);
    let mut take = |addresses: &[IpAddr], mtu: u32| {
        host.interfaces[0].masquerade_addresses = addresses.to_vec();
        host.interfaces[0].mtu = mtu;
        let applied = dataplane.take_host(&host).unwrap();
        (table.read_all().unwrap(), applied.written + applied.removed)
    };
    let v4 = [203, 0, 113, 7];
    let v6 = "2001:db8::7".parse::<std::net::Ipv6Addr>().unwrap().octets();
    let none = InterfaceSettings { mtu: 1_500, flags: INTERFACE_OF_UPLINK, ..InterfaceSettings::default() };
    let both = vec![(dpa, InterfaceSettings { masquerade4: v4, masquerade6: v6, ..none })];
    assert_eq!(take(&[v4.into(), v6.into()], 1_500).0, both);
    assert_eq!(take(&[v4.into(), v6.into()], 1_500), (both, 0));
    let one = InterfaceSettings { masquerade4: v4, ..none };
    assert_eq!(take(&[v4.into()], 1_500), (vec![(dpa, one)], 1));
    assert_eq!(take(&[v4.into()], 9_000), (vec![(dpa, InterfaceSettings { mtu: 9_000, ..one })], 1));
    assert_eq!(take(&[], 1_500), (vec![(dpa, none)], 1));
    let of_any = InterfaceSettings { mtu: 0, ..none };
    assert_eq!(take(&[], 65_536), (vec![(dpa, of_any)], 1), "it takes packets of any length");
}

#[test]
fn tags_of_vlans_lead_to_their_devices() {
    let Some(sandbox) = Sandbox::new() else { return };
    // The second device stands for a VLAN device, which not every kernel has.
    let (dpa, dpb) = (veth("dpa"), veth("dpb"));
    let mut dataplane = sandbox.open();
    let table: Map<VlanTag, u32> = sandbox.map("vlan_devices");
    let mut host = host(&[("dpa", Role::Uplink), ("dpb", Role::Uplink)]);
    let mut devices = |id| {
        host.interfaces[1].device = Device::Vlan(Vlan { below: dpa, protocol: TAG_CUSTOMER, id });
        let applied = dataplane.take_host(&host).unwrap();
        (table.read_all().unwrap(), applied.written + applied.removed)
    };
    let tag = |id| VlanTag { interface: dpa, protocol: TAG_CUSTOMER, id };
    assert_eq!(devices(10).0, [(tag(10), dpb)]);
    assert_eq!(devices(10), (vec![(tag(10), dpb)], 0));
    assert_eq!(devices(20), (vec![(tag(20), dpb)], 2));
}
