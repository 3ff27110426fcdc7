//! Tests of CNI's bandwidth plugin on kernels without tcx. The plugin adds the queueing discipline
//! `ingress` to a pod's interface, which can have only one ingress qdisc: either that or `clsact`.
//! The pod starts in both orders.

use std::{
    collections::BTreeMap,
    io::Write as _,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use proxy_ctl::{
    config::{Ebpf, SocketLoadBalancing},
    model::node::{Host, Role},
    modes::{
        Dataplane, PacketMode as _,
        ebpf::{EbpfDataplane, view::status::Pinned},
    },
    sys::net::tc::{self, Direction},
};
use rstest::rstest;
use serde_json::json;

use crate::{
    hooks::{host, veth},
    sandbox::{Sandbox, TakeHost as _, index, run},
};

const PLUGIN: &str = "/usr/lib/cni/bandwidth";

/// The way in which an interface is limited.
#[derive(Clone, Copy, Debug)]
enum Limiter {
    /// Commands do what the plugin asks of the kernel.
    Commands,
    /// The plugin itself limits the interface.
    Plugin,
}

/// A network namespace that lives as long as its process.
struct Pod(Child);

impl Pod {
    /// Makes `interface`, whose other end is `eth0` of the pod.
    fn on(interface: &str) -> Self {
        let mut command = Command::new("unshare");
        command.args(["--net", "sh", "-c", "echo; exec sleep 3600"]).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = [0];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut line).unwrap();
        let pod = Self(child);
        veth(interface);
        run("ip", &format!("link set {interface}p netns {}", pod.0.id()));
        let inside = format!("-t {} -n ip link set {interface}p name eth0 up", pod.0.id());
        run("nsenter", &inside);
        pod
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        self.0.kill().and_then(|()| self.0.wait()).unwrap();
    }
}

impl Limiter {
    /// Returns true if the kernel or the machine lacks something, so that the test is skipped.
    fn is_missing(self) -> bool {
        let added = Command::new("ip").args(["link", "add", "ifb-tried", "type", "ifb"]).output().unwrap();
        if !added.status.success() {
            println!("skipped: the kernel has no ifb devices");
            return true;
        }
        run("ip", "link del ifb-tried");
        let is_missing = matches!(self, Self::Plugin) && !Path::new(PLUGIN).exists();
        if is_missing {
            println!("skipped: {PLUGIN} is not there (Debian: containernetworking-plugins)");
        }
        is_missing
    }

    /// Limits what the pod sends and gets.
    fn limit(self, interface: &str, pod: &Pod) -> Result<(), String> {
        match self {
            Self::Commands => limit_by_commands(interface),
            Self::Plugin => limit_by_plugin(interface, pod),
        }
    }
}

fn limit_by_commands(interface: &str) -> Result<(), String> {
    let commands = [
        format!("ip link add bwp-{interface} type ifb"),
        format!("ip link set bwp-{interface} up"),
        format!("tc qdisc add dev {interface} ingress"),
        format!(
            "tc filter add dev {interface} parent ffff: protocol all prio 1 u32 match u32 0 0 action mirred egress redirect dev bwp-{interface}"
        ),
    ];
    commands.iter().try_for_each(|command| {
        let output = Command::new("sh").args(["-c", command]).output().unwrap();
        let error = || format!("{command}: {}", String::from_utf8_lossy(&output.stderr));
        output.status.success().then_some(()).ok_or_else(error)
    })
}

fn limit_by_plugin(interface: &str, pod: &Pod) -> Result<(), String> {
    let namespace = format!("/proc/{}/ns/net", pod.0.id());
    let interfaces = json!([
        {"name": interface},
        {"name": "eth0", "sandbox": namespace},
    ]);
    let configuration = json!({
        "cniVersion": "0.4.0", "name": "pods", "type": "bandwidth",
        "ingressRate": 800_000_000, "ingressBurst": 8_000_000,
        "egressRate": 800_000_000, "egressBurst": 8_000_000,
        "prevResult": {"cniVersion": "0.4.0", "interfaces": interfaces, "ips": []},
    });
    let mut command = Command::new(PLUGIN);
    command.envs([
        ("CNI_COMMAND", "ADD"),
        ("CNI_CONTAINERID", interface),
        ("CNI_NETNS", &namespace),
        ("CNI_IFNAME", "eth0"),
        ("CNI_PATH", "/usr/lib/cni"),
    ]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut plugin = command.spawn().unwrap();
    plugin.stdin.take().unwrap().write_all(configuration.to_string().as_bytes()).unwrap();
    let output = plugin.wait_with_output().unwrap();
    output.status.success().then_some(()).ok_or_else(|| String::from_utf8(output.stdout).unwrap())
}

/// Returns what the plugin has put at an interface, as `tc` shows it without counters.
fn limits(interface: &str) -> [String; 2] {
    [format!("qdisc show dev {interface} ingress"), format!("filter show dev {interface} ingress")]
        .map(|command| run("tc", &command))
}

/// Collects garbage, as the controller does, until `is_done`.
#[track_caller]
fn until(dataplane: &mut EbpfDataplane, mut is_done: impl FnMut(&mut EbpfDataplane) -> bool) {
    let longest = Duration::from_secs(60);
    let begin = Instant::now();
    while !is_done(dataplane) {
        assert!(begin.elapsed() < longest, "not after {longest:?}");
        std::thread::sleep(Duration::from_millis(100));
        dataplane.collect_garbage().unwrap();
    }
}

fn is_attached(interface: &str) -> bool {
    let has = |direction| !tc::filters(index(interface), direction).unwrap().is_empty();
    has(Direction::Ingress) && has(Direction::Egress)
}

fn unattached(dataplane: &mut EbpfDataplane) -> BTreeMap<u32, String> {
    dataplane.hook_problems().unattached
}

/// Returns the interfaces that have a hook of ours, by the pins.
fn hooked(sandbox: &Sandbox) -> Vec<u32> {
    let hooks = Pinned::open(&sandbox.config.bpffs).unwrap();
    let hooks = proxy_ctl::modes::Programmed::snapshot(&hooks).unwrap().hooks;
    hooks.into_iter().filter_map(|hook| hook.interface).collect()
}

fn workloads(names: &[&str]) -> Host {
    host(&names.iter().map(|name| (*name, Role::Workload)).collect::<Vec<_>>())
}

#[rstest]
#[case::commands(Limiter::Commands)]
#[case::plugin(Limiter::Plugin)]
fn an_interface_that_the_bandwidth_plugin_has_limited_is_left_to_it(#[case] limiter: Limiter) {
    let Some(sandbox) = Sandbox::new() else { return };
    if limiter.is_missing() {
        return;
    }
    let pod = Pod::on("dpa");
    let (limited, other) = (index("dpa"), veth("dpb"));
    limiter.limit("dpa", &pod).unwrap();
    let before = limits("dpa");
    assert!(before[0].contains("qdisc ingress ffff:") && before[1].contains("mirred"), "{before:?}");
    let mut dataplane = sandbox.open().without_tcx();
    dataplane.take_host(&workloads(&["dpa", "dpb"])).unwrap();
    for _ in 0..30 {
        dataplane.collect_garbage().unwrap();
        assert_eq!(limits("dpa"), before);
    }
    let problems = unattached(&mut dataplane);
    let reason = problems.get(&limited).expect("it is named");
    assert!(problems.len() == 1 && reason.contains("a queueing discipline of another program (ingress)"));
    assert_eq!(hooked(&sandbox), [other]);

    run("tc", "qdisc del dev dpa ingress");
    until(&mut dataplane, |dataplane| unattached(dataplane).is_empty());
    assert!(is_attached("dpa"));
}

#[rstest]
#[case::commands(Limiter::Commands)]
#[case::plugin(Limiter::Plugin)]
fn the_bandwidth_plugin_finds_its_hook_at_a_new_interface(#[case] limiter: Limiter) {
    let Some(sandbox) = Sandbox::new() else { return };
    if limiter.is_missing() {
        return;
    }
    veth("dpb");
    let mut dataplane = sandbox.open().without_tcx();
    dataplane.take_host(&workloads(&["dpb"])).unwrap();
    assert!(is_attached("dpb"), "it was there before the process");
    let pod = Pod::on("dpa");
    dataplane.take_host(&workloads(&["dpa", "dpb"])).unwrap();
    dataplane.collect_garbage().unwrap();
    assert_eq!(unattached(&mut dataplane), [].into(), "to wait is no failure");
    limiter.limit("dpa", &pod).unwrap();
    let limited = limits("dpa");
    until(&mut dataplane, |dataplane| unattached(dataplane).contains_key(&index("dpa")));
    assert_eq!(limits("dpa"), limited);

    // The next interface keeps room for the plugin's qdisc too, and one without limits gets
    // programs.
    let second = Pod::on("dpc");
    veth("dpd");
    dataplane.take_host(&workloads(&["dpa", "dpb", "dpc", "dpd"])).unwrap();
    dataplane.collect_garbage().unwrap();
    limiter.limit("dpc", &second).unwrap();
    until(&mut dataplane, |dataplane| unattached(dataplane).len() == 2 && is_attached("dpd"));
    assert_eq!(limits("dpa"), limited);
}

#[rstest]
#[case::sockets_serve_the_pod(SocketLoadBalancing::All, true)]
#[case::packet_programs_alone_serve_the_pod(SocketLoadBalancing::Host, false)]
fn a_new_interface_waits_for_its_programs_while_sockets_serve_its_pod(
    #[case] sockets: SocketLoadBalancing,
    #[case] waits: bool,
) {
    let Some(sandbox) = Sandbox::new() else { return };
    let config = Ebpf { socket_load_balancing: sockets, ..sandbox.config.clone() };
    let mut dataplane = EbpfDataplane::open(&config).unwrap().without_tcx();
    dataplane.take_host(&Host::default()).unwrap();
    veth("dpa");
    dataplane.take_host(&workloads(&["dpa"])).unwrap();
    assert_ne!(is_attached("dpa"), waits);
    until(&mut dataplane, |_| is_attached("dpa"));
    assert_eq!(unattached(&mut dataplane), [].into());
}

#[test]
fn a_new_interface_that_has_a_clsact_qdisc_already_is_attached_to_at_once() {
    let Some(sandbox) = Sandbox::new() else { return };
    let mut dataplane = sandbox.open().without_tcx();
    dataplane.take_host(&Host::default()).unwrap();
    veth("dpa");
    run("tc", "qdisc add dev dpa clsact");
    dataplane.take_host(&workloads(&["dpa"])).unwrap();
    assert!(is_attached("dpa"));
}

/// The secondary mode serves their pods meanwhile. Its connections are listed each time that such
/// interfaces are attached to.
#[test]
fn while_a_pod_lacks_programs_interfaces_that_have_settled_are_attached_to_together() {
    let Some(sandbox) = Sandbox::new() else { return };
    let mut dataplane = sandbox.open().without_tcx();
    veth("dpa");
    run("tc", "qdisc add dev dpa ingress");
    dataplane.take_host(&workloads(&["dpa"])).unwrap();
    assert_eq!(unattached(&mut dataplane).len(), 1);
    veth("dpb");
    dataplane.take_host(&workloads(&["dpa", "dpb"])).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    veth("dpc");
    let all = workloads(&["dpa", "dpb", "dpc"]);
    dataplane.take_host(&all).unwrap();
    until(&mut dataplane, |_| is_attached("dpb"));
    let attached = Instant::now();
    assert!(!is_attached("dpc"));
    while !is_attached("dpc") {
        assert!(attached.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(100));
        dataplane.take_host(&all).unwrap();
        dataplane.collect_garbage().unwrap();
    }
    assert!(attached.elapsed() > Duration::from_millis(1_900), "{:?}", attached.elapsed());
}
