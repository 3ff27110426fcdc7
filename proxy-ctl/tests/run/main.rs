//! Tests of `proxy-ctl run` as a process that starts, is killed, starts again, follows a change,
//! and is removed.
//!
//! The tests need root and a bpffs, except those of `ordinary_user`. Each test has a network
//! namespace, a pin folder and a cgroup of its own.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod controller;
#[path = "../../src/free_port.rs"]
mod free_port;
mod ordinary_user;

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::LazyLock,
    time::{Duration, Instant},
};

use aya::Pod;
use nix::{
    sched::{CloneFlags, unshare},
    sys::signal::Signal,
    unistd::Uid,
};
use proxy_common::layout::{Backend, Frontend, FrontendKey, LAYOUT_VERSION, NodeAddress};
use proxy_ctl::sys::{
    bpf::{self, map::Map},
    net::link,
    proc::filesystem,
};
use serde_json::Value;
use tempfile::TempDir;

use controller::{Controller, PATIENCE, once_started, replace, shown};

const BPFFS: &str = "/sys/fs/bpf";
const METRICS: &str = "127.0.0.1:10249";

/// The namespace, folders and cgroup of one test. They are removed on drop.
struct Node {
    folder: TempDir,
    pins: PathBuf,
    cgroup: PathBuf,
}

impl Node {
    /// Makes a node, and moves the calling thread to a network namespace. Returns `None` if this
    /// machine cannot run the test, and says why on stderr.
    fn new(name: &str) -> Option<Self> {
        if !Uid::effective().is_root() {
            eprintln!("skipped: needs root");
            return None;
        }
        let Some(cgroups) = filesystem::cgroup_root().unwrap() else {
            eprintln!("skipped: cgroup v2 is not mounted");
            return None;
        };
        // The first test mounts it. A second mount would hide what the first test has made there.
        static MOUNTED: LazyLock<Result<(), String>> =
            LazyLock::new(|| filesystem::provide_bpffs(Path::new(BPFFS)).map_err(|error| error.to_string()));
        if let Err(error) = &*MOUNTED {
            eprintln!("skipped: no bpffs: {error}");
            return None;
        }
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let up = Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap();
        assert!(up.success());
        let own = format!("proxy-ctl-test-{name}-{}", std::process::id());
        let node = Self {
            folder: TempDir::new().unwrap(),
            pins: Path::new(BPFFS).join(&own),
            cgroup: cgroups.join(&own),
        };
        fs::create_dir(&node.pins).unwrap();
        fs::create_dir(&node.cgroup).unwrap();
        fs::create_dir(node.manifests()).unwrap();
        let config = format!(
            "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n\
             conntrack: {{maxPerCore: 0}}\nebpf:\n  bpffs: {}\n  cgroup: {}\n  limits: {{services: 100, slots: 1000, frontends: 100, backends: 100}}\n",
            node.pins.display(),
            node.cgroup.display()
        );
        fs::write(node.folder.path().join("config.yaml"), config).unwrap();
        Some(node)
    }

    fn manifests(&self) -> PathBuf {
        self.folder.path().join("manifests")
    }

    fn write_manifest(&self, text: &str) {
        replace(self.folder.path(), "manifests/all.yaml", text);
    }

    /// Adds or replaces a field of the configuration.
    fn configure(&self, more: &str) {
        let text = fs::read_to_string(self.folder.path().join("config.yaml")).unwrap();
        replace(self.folder.path(), "config.yaml", &(text + more));
    }

    /// Opens a pinned map, to change it behind the controller.
    fn map<K: Pod + Default, V: Pod + Default>(&self, name: &str) -> Map<K, V> {
        let path = self.pins.join(format!("proxy-ctl/v{LAYOUT_VERSION}/maps")).join(name);
        Map::new(bpf::pinned(&path).unwrap()).unwrap().unwrap()
    }

    fn start(&self, source: &[&str]) -> Controller {
        Controller::start(
            Command::new(env!("CARGO_BIN_EXE_proxy-ctl"))
                .args(["run", "--hostname-override", "node-a", "-v", "4", "--config"])
                .arg(self.folder.path().join("config.yaml"))
                .args(source),
        )
    }

    fn serve_manifests(&self) -> Controller {
        self.start(&["--manifests", self.manifests().to_str().unwrap()])
    }

    fn command(&self, args: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_proxy-ctl"))
            .args(args)
            .arg("--bpffs")
            .arg(&self.pins)
            .output()
            .unwrap()
    }

    fn show(&self, command: &str) -> Value {
        shown(&self.command(&[command, "--output", "json"]))
    }

    fn has_pins(&self) -> bool {
        fs::read_dir(&self.pins).unwrap().next().is_some()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.command(&["cleanup"]);
        let _ = fs::remove_dir(&self.pins);
        let _ = fs::remove_dir(&self.cgroup);
    }
}

fn get(address: &str, path: &str) -> String {
    let deadline = Instant::now() + PATIENCE;
    let mut stream = loop {
        match TcpStream::connect(address) {
            Ok(stream) => break stream,
            // The server may start after the awaited log line.
            Err(error) => assert!(Instant::now() < deadline, "{address}: {error}"),
        }
        std::thread::yield_now();
    };
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn metric(name: &str) -> String {
    let answer = get(METRICS, "/metrics");
    let value = answer.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("{name} is not in\n{answer}")).to_owned()
}

fn manifest(endpoint: &str) -> String {
    format!(
        "apiVersion: v1
kind: Node
metadata: {{name: node-a}}
status: {{addresses: [{{type: InternalIP, address: 192.0.2.1}}]}}
---
apiVersion: v1
kind: Service
metadata: {{name: web, namespace: default}}
spec: {{type: NodePort, clusterIP: 10.96.0.1, clusterIPs: [10.96.0.1], ports: [{{name: http, port: 80, nodePort: 30080}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: web-1, namespace: default, labels: {{kubernetes.io/service-name: web}}}}
addressType: IPv4
ports: [{{name: http, port: 8080}}]
endpoints: [{{addresses: [{endpoint}], nodeName: node-a}}]
"
    )
}

#[test]
fn a_controller_is_killed_replaced_and_removed() {
    let Some(node) = Node::new("life") else { return };
    node.write_manifest(&manifest("10.244.0.2"));

    let mut first = node.serve_manifests();
    first.wait_for("everything compared and written");
    assert!(metric("proxy_writes_total").parse::<u64>().unwrap() > 0);
    assert!(get(METRICS, "/proxyMode").ends_with("\r\n\r\nebpf"));
    assert!(get("127.0.0.1:10256", "/healthz").starts_with("HTTP/1.1 200"));
    let services = node.show("services");
    assert_eq!(services[0]["name"], "web");
    assert_eq!(services[0]["endpoints"][0]["address"], "10.244.0.2");
    assert_eq!(services[0]["endpoints"][0]["local"], true);
    let status = node.show("status");
    assert_eq!(status["controller"]["pid"], first.child.id());
    assert!(status["hooks"].as_array().unwrap().iter().any(|hook| hook["name"] == "connect4"), "{status}");

    let second = node.command(&[
        "run",
        "--config",
        node.folder.path().join("config.yaml").to_str().unwrap(),
        "--manifests",
        node.manifests().to_str().unwrap(),
        "--hostname-override",
        "node-a",
    ]);
    assert_eq!(second.status.code(), Some(1));
    let told = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(told.contains(&format!("another controller, process {}", first.child.id())), "{told}");
    assert_eq!(
        node.show("status")["controller"]["pid"],
        first.child.id(),
        "the one that was turned away speaks"
    );

    first.end_by(Signal::SIGKILL);
    let status = node.show("status");
    assert_eq!((&status["mode"], &status["controller"]["running"]), (&"ebpf".into(), &false.into()));
    assert_eq!(node.show("services"), services);

    let mut third = node.serve_manifests();
    third.wait_for("everything compared and written");
    assert_eq!((metric("proxy_writes_total"), metric("proxy_removals_total")), ("0".into(), "0".into()));
    node.write_manifest(&manifest("10.244.0.3"));
    third.wait_for("changes written");
    assert_eq!(node.show("backends")[0]["address"], "10.244.0.3");

    assert_eq!(third.end_by(Signal::SIGTERM).code(), Some(0));
    assert_eq!(node.show("services")[0]["endpoints"][0]["address"], "10.244.0.3");
    assert!(node.command(&["cleanup"]).status.success());
    assert!(!node.has_pins());
}

#[test]
fn without_an_api_server_nothing_is_served() {
    let Some(node) = Node::new("alone") else { return };
    let kubeconfig = node.folder.path().join("kubeconfig");
    let text = "apiVersion: v1\nkind: Config\ncurrent-context: x\n\
        contexts: [{name: x, context: {cluster: x, user: x}}]\n\
        clusters: [{name: x, cluster: {server: \"http://127.0.0.1:1\"}}]\n\
        users: [{name: x, user: {token: secret}}]\n";
    fs::write(&kubeconfig, text).unwrap();
    node.configure(&format!("clientConnection: {{kubeconfig: {}}}\n", kubeconfig.display()));
    let mut controller = node.start(&[]);
    controller.wait_for("dataplane opened");
    assert!(get("127.0.0.1:10256", "/healthz").starts_with("HTTP/1.1 503"));
    assert!(get("127.0.0.1:10256", "/livez").starts_with("HTTP/1.1 200"));
    assert_eq!(metric("proxy_sources_listed"), "0");
    assert_eq!(node.show("status")["mode"], "ebpf");
    assert_eq!(controller.end_by(Signal::SIGTERM).code(), Some(0));
    assert_eq!(node.show("services"), Value::Array(Vec::new()));
}

#[test]
fn changes_of_other_programs_are_repaired() {
    let Some(node) = Node::new("drift") else { return };
    node.configure("iptables: {syncPeriod: 1s}\n");
    node.write_manifest(&manifest("10.244.0.2"));
    let mut controller = node.serve_manifests();
    controller.wait_for("everything compared and written");
    let (services, backends) = (node.show("services"), node.show("backends"));

    // Nothing was changed, so the resync writes nothing.
    let written = metric("proxy_writes_total");
    controller.wait_for("everything compared and written");
    assert_eq!((metric("proxy_writes_total"), metric("proxy_drift_total")), (written, "0".into()));

    let frontends = node.map::<FrontendKey<[u8; 4]>, Frontend>("frontends4");
    for (key, _) in frontends.read_all().unwrap() {
        assert!(frontends.remove(&key).unwrap());
    }
    let map = node.map::<u32, Backend<[u8; 4]>>("backends4");
    for (id, backend) in map.read_all().unwrap() {
        map.set(&id, &Backend { uses: 77, ..backend }).unwrap();
    }
    let addresses = node.map::<[u8; 4], NodeAddress>("node_addresses4");
    addresses.set(&[203, 0, 113, 9], &NodeAddress::default()).unwrap();
    controller.wait_for("another program had changed what is programmed");
    // A comparison that came in the middle of these changes has found a part of them, and the next
    // one the rest. The changes are two frontends, a cluster-IP entry, a backend and an
    // address.
    let deadline = Instant::now() + PATIENCE;
    while metric("proxy_drift_total") != "5" {
        assert!(Instant::now() < deadline, "{} changes were found", metric("proxy_drift_total"));
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!((node.show("services"), node.show("backends")), (services, backends));
    assert_eq!(addresses.get(&[203, 0, 113, 9]).unwrap(), None);
    controller.wait_for("everything compared and written");
    assert_eq!(metric("proxy_drift_total"), "5", "no change is found twice");
}

/// Returns manifests of a Service with this many endpoints, and of another with one.
fn greedy(endpoints: u8) -> String {
    let all: Vec<_> = (1..=endpoints).map(|n| format!("{{addresses: [10.1.0.{n}]}}")).collect();
    let service = manifest("10.244.0.2");
    format!(
        "{service}---
apiVersion: v1
kind: Service
metadata: {{name: greedy, namespace: tenant}}
spec: {{clusterIP: 10.96.0.2, clusterIPs: [10.96.0.2], ports: [{{name: http, port: 80}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: greedy-1, namespace: tenant, labels: {{kubernetes.io/service-name: greedy}}}}
addressType: IPv4
ports: [{{name: http, port: 8080}}]
endpoints: [{}]
",
        all.join(", ")
    )
}

#[test]
fn a_service_without_room_leaves_the_node_healthy_and_its_neighbours_served() {
    let Some(node) = Node::new("room") else { return };
    node.configure("iptables: {syncPeriod: 1s}\n");
    node.write_manifest(&greedy(200));
    let mut controller = node.serve_manifests();
    let names = || -> Vec<_> {
        let services = node.show("services");
        let services = services.as_array().unwrap().iter();
        services.map(|service| service["name"].as_str().unwrap().to_owned()).collect()
    };
    // Four inspections take longer than a change may wait before the node is unhealthy.
    for _ in 0..4 {
        controller.wait_for("everything compared and written");
    }
    assert!(get("127.0.0.1:10256", "/healthz").starts_with("HTTP/1.1 200"));
    assert_eq!(names(), ["web"]);
    assert_eq!((metric("proxy_drift_total"), metric("proxy_sync_errors_total")), ("0".into(), "0".into()));
    let status = node.show("status").to_string();
    assert!(
        status.contains("greedy") && status.contains("map backends4 has room for 100 entries"),
        "{status}"
    );

    node.write_manifest(&greedy(50));
    controller.wait_for("changes written");
    assert_eq!(names(), ["web", "greedy"]);
    assert_eq!(metric("proxy_drift_total"), "0");
}

#[test]
fn status_works_from_the_start_on() {
    let Some(node) = Node::new("first") else { return };
    node.write_manifest(&manifest("10.244.0.2"));
    let controller = node.serve_manifests();
    let deadline = Instant::now() + PATIENCE;
    let mut starting = false;
    while node.show("services") == Value::Array(Vec::new()) {
        starting |= node.show("status")["controller"]["starting"] == true;
        node.show("backends");
        assert!(Instant::now() < deadline, "nothing is served");
    }
    let status = once_started(|| node.show("status"));
    assert_eq!(status["controller"]["pid"], controller.child.id());
    assert!(starting, "it was never seen starting");
}

#[test]
fn a_changed_file_and_a_changed_node_are_followed_without_a_new_process() {
    let Some(node) = Node::new("followed") else { return };
    for address in ["192.0.2.1/32", "192.0.2.2/32"] {
        let added = Command::new("ip").args(["address", "add", address, "dev", "lo"]).status().unwrap();
        assert!(added.success());
    }
    node.write_manifest(&manifest("10.244.0.2"));
    let mut controller = node.serve_manifests();
    controller.wait_for("everything compared and written");
    let addresses = node.map::<[u8; 4], NodeAddress>("node_addresses4");
    let served_on = |expected: &[[u8; 4]]| {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut found: Vec<_> =
                addresses.read_all().unwrap().into_iter().map(|(address, _)| address).collect();
            found.sort_unstable();
            if found == expected {
                return;
            }
            assert!(Instant::now() < deadline, "node ports are served on {found:?}, not on {expected:?}");
            std::thread::yield_now();
        }
    };
    let (first, second) = ([192, 0, 2, 1], [192, 0, 2, 2]);
    served_on(&[[127, 0, 0, 1], first, second]);

    node.configure("nodePortAddresses: [primary]\n");
    controller.wait_for("it is applied");
    served_on(&[first]);
    node.write_manifest(&manifest("10.244.0.2").replace("address: 192.0.2.1", "address: 192.0.2.2"));
    served_on(&[second]);
    assert_eq!(node.show("status")["controller"]["pid"], controller.child.id());
}

/// The node has an uplink that can have XDP, one with another's program, and one whose driver has
/// none.
#[test]
fn status_and_probe_say_how_xdp_runs_on_each_uplink_and_why() {
    /// The instructions are: r0 = XDP_PASS; exit.
    const PASS: [u64; 2] = [0x0000_0002_0000_00b7, 0x95];
    const XDP: u32 = 6;
    const BPF_XDP: u32 = 37;
    let Some(node) = Node::new("xdp") else { return };
    let ip = |script: &str| {
        let added = Command::new("ip").args(script.split(' ')).status().unwrap();
        assert!(added.success(), "ip {script}");
    };
    ip("link add up1 type veth peer name up1p");
    ip("link add up2 type veth peer name up2p");
    for peer in ["up1p", "up2p"] {
        let set = Command::new("ethtool").args(["-K", peer, "tx", "off"]).status().unwrap();
        assert!(set.success(), "ethtool -K {peer} tx off");
    }
    ip("link add up3 type vxlan id 5 dstport 4789 remote 198.51.0.9");
    for (number, uplink) in ["up1", "up2", "up3"].iter().enumerate() {
        ip(&format!("link set {uplink} up"));
        ip(&format!("address add 198.51.{number}.1/24 dev {uplink}"));
    }
    let other = bpf::load_program(XDP, BPF_XDP, &PASS).unwrap();
    let up2 = link::index("up2").unwrap().unwrap();
    let _others_link = bpf::link_xdp(other.as_fd(), up2, bpf::XdpMode::Native).unwrap();
    node.configure("  xdp: native\n  interfaces: {uplinks: [up1, up2, up3]}\n");
    node.write_manifest(&manifest("10.244.0.2"));
    let mut controller = node.serve_manifests();
    controller.wait_for("everything compared and written");
    let config = node.folder.path().join("config.yaml");
    let config = config.to_str().unwrap();
    let of_status = || node.show("status")["xdp"].clone();
    let of_probe = || {
        let told = shown(&node.command(&["probe", "--config", config, "--output", "json"]));
        told["xdp"]["uplinks"].clone()
    };
    let expected = [
        ("up1", "native", "its driver veth has XDP, MTU 1500, queues 1"),
        (
            "up2",
            "no",
            "the kernel refuses it, driver veth: Can't replace active BPF XDP link: Device or resource busy (os error 16)",
        ),
        ("up3", "no", "its driver vxlan has no XDP, or not with its settings"),
    ];
    let asks: [(&str, &dyn Fn() -> Value); 2] = [("status", &of_status), ("probe", &of_probe)];
    for (command, ask) in asks {
        let deadline = Instant::now() + PATIENCE;
        let is_told = |told: &Value| {
            let told = told.as_array().unwrap();
            let text = |of: &Value, key: &str| of[key].as_str().unwrap().to_owned();
            let rows = told.iter().map(|of| (text(of, "interface"), text(of, "xdp"), text(of, "reason")));
            rows.eq(expected.map(|(name, xdp, why)| (name.into(), xdp.into(), why.into())))
        };
        while !is_told(&ask()) {
            assert!(Instant::now() < deadline, "{command}: {:#}", ask());
            std::thread::sleep(Duration::from_millis(100));
        }
        let table = node.command(&[command, "--config", config][..if command == "probe" { 3 } else { 1 }]);
        let table = String::from_utf8_lossy(&table.stdout).into_owned();
        let header = ["UPLINK", "XDP", "BECAUSE", "FORWARDS FRAMES OF OTHERS"];
        let row = |words: &[&str]| {
            table.lines().any(|line| {
                words.iter().try_fold(line, |rest, word| Some(rest.split_once(word)?.1)).is_some()
            })
        };
        assert!(row(&header), "{table}");
        for (interface, xdp, reason) in expected {
            assert!(row(&[interface, xdp, reason]), "{interface}: {table}");
        }
    }
}
