//! Tests in the kernel, as root, with both backends. Each runs in a network namespace of its own.

mod removal;

use std::{
    ffi::OsStr,
    fs::{self, File},
    os::unix::ffi::OsStrExt as _,
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use rstest::rstest;

use super::*;
use crate::{
    cleanup,
    config::{Config, NodePortAddress},
    model::{desired::Changes, mode::Mode},
    modes::{
        self, Applied, Dataplane, Known, Programmed, Removed,
        iptables::{BE_LIBERAL, ENTRY, IptablesDataplane, ROUTE_LOCALNET},
        netfilter::own_rules,
    },
    sys::{
        nftables::TableFamily,
        xtables::{Backend, Tools},
    },
};

const NOTHING: Applied = Applied { written: 0, removed: 0 };

/// Moves the thread into its own network namespace, which ends with it. Returns false, and prints
/// why, if the kernel lacks the backend.
fn enter(backend: Backend) -> bool {
    unshare(CloneFlags::CLONE_NEWNET).unwrap();
    let is_there = tool(backend, "", "-t nat -S").is_some();
    if !is_there {
        println!("skipped: iptables-{backend} is not installed, or the kernel has none");
    }
    is_there
}

/// Returns the output of `iptables-<backend>`. `None`: it failed.
fn tool(backend: Backend, six: &str, arguments: &str) -> Option<String> {
    let output = Command::new(format!("ip{six}tables-{backend}")).args(arguments.split(' ')).output().ok()?;
    output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
}

/// Returns all rules of both families, without counters.
fn saved(backend: Backend) -> Vec<String> {
    let family = |six: &str| {
        let output = Command::new(format!("ip{six}tables-{backend}-save")).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let is_rule = |line: &&str| line.starts_with("-A") || line.starts_with(":KUBE-");
        let lines: Vec<String> = text.lines().filter(is_rule).map(|line| format!("{six} {line}")).collect();
        lines
    };
    let mut all: Vec<String> = [family(""), family("6")].concat();
    all.iter_mut().for_each(|line| {
        if let Some(at) = line.find(" [") {
            line.truncate(at);
        }
    });
    all
}

/// The service ports of [`several`], written in a namespace of its own.
struct Node {
    ports: Vec<Arc<DesiredPort>>,
    dataplane: IptablesDataplane,
}

impl Node {
    /// Writes the service ports. `None`: the kernel lacks the backend.
    fn serving(backend: Backend) -> Option<Self> {
        if !enter(backend) {
            return None;
        }
        let (services, slices) = several();
        let ports = desired(services, slices);
        let mut dataplane = open(backend);
        dataplane.resync(&ports).unwrap();
        Some(Self { ports, dataplane })
    }
}

fn open(backend: Backend) -> IptablesDataplane {
    let mut dataplane = IptablesDataplane::open(backend).unwrap();
    dataplane.set_host(&host()).unwrap();
    dataplane
}

fn changes(ports: &[Arc<DesiredPort>]) -> Changes {
    Changes { changed: ports.to_vec(), removed: Vec::new() }
}

#[rstest]
#[ignore = "needs root"]
fn as_root_a_restart_writes_nothing_and_what_is_not_desired_goes(
    #[values(Backend::Legacy, Backend::Nft)] backend: Backend,
) {
    if !enter(backend) {
        return;
    }
    assert!(tool(backend, "", "-N MINE").is_some() && tool(backend, "", "-A FORWARD -j MINE").is_some());
    let (services, slices) = several();
    let ports = desired(services, slices);
    let mut dataplane = open(backend);
    assert!(dataplane.resync(&ports).unwrap().written > 20);
    let written = saved(backend);
    assert!(written.iter().any(|line| line == " -A FORWARD -j MINE"), "{written:#?}");
    let last =
        written.iter().rfind(|line| line.starts_with(" -A KUBE-SERVICES ") && line.contains("NODEPORTS"));
    assert!(last.is_some_and(|rule| rule.contains("must be the last rule")));
    let jumps =
        |chain: &str| written.iter().filter(|line| line.starts_with(&format!(" -A {chain} "))).count();
    assert_eq!((jumps("FORWARD"), jumps("INPUT")), (5, 4));
    drop(dataplane);

    let mut dataplane = open(backend);
    assert_eq!(dataplane.resync(&ports).unwrap(), NOTHING);
    assert_eq!(saved(backend), written);

    // A chain and a rule are stale, one chain is emptied, and two rules are removed.
    assert!(tool(backend, "", "-t nat -N KUBE-SVC-AAAAAAAAAAAAAAAA").is_some());
    assert!(
        tool(backend, "", "-t nat -I KUBE-SERVICES -d 172.30.9.9/32 -j KUBE-SVC-AAAAAAAAAAAAAAAA").is_some()
    );
    assert!(tool(backend, "", "-t nat -F KUBE-SEP-SXIVWICOYRO3J4NJ").is_some());
    assert!(tool(backend, "", "-t nat -D KUBE-SERVICES 2").is_some());
    assert!(tool(backend, "", "-t filter -D INPUT 1").is_some());
    drop(dataplane);
    let mut dataplane = open(backend);
    let repaired = dataplane.resync(&ports).unwrap();
    assert_eq!((repaired.written, repaired.removed), (3, 2));
    let sorted = |mut lines: Vec<String>| {
        lines.sort_unstable();
        lines
    };
    assert_eq!(sorted(saved(backend)), sorted(written));

    assert!(dataplane.resync(&[]).unwrap().removed > 10);
    let left = saved(backend);
    let tag = own_rules::owner_tag(Mode::Iptables).unwrap();
    assert!(
        !left
            .iter()
            .any(|line| line.contains("-A KUBE-S") && !line.contains("NODEPORTS") && !line.contains(&*tag)),
        "{left:#?}"
    );
    assert!(!left.iter().any(|line| line.contains(":KUBE-SEP-") || line.contains(":KUBE-SVC-")), "{left:#?}");
}

#[rstest]
#[ignore = "needs root"]
fn as_root_changes_leave_what_a_start_would_write(#[values(Backend::Legacy, Backend::Nft)] backend: Backend) {
    if !enter(backend) {
        return;
    }
    let (services, mut slices) = several();
    let before = desired(services.clone(), slices.clone());
    let mut dataplane = open(backend);
    dataplane.resync(&before).unwrap();
    // One Service gets one more endpoint, one loses all, and one gets its first. An external
    // address changes, and the last Service is deleted.
    slices[0] = endpoints("ns1/svc1", &["10.180.0.1", "10.180.0.9"]);
    slices.remove(2);
    slices.push(endpoints("ns4/svc4", &["10.180.0.7"]));
    let mut services = services;
    services[1].external_ips = vec![ip("192.168.99.23")];
    services.pop();
    let after = desired(services, slices);
    let removed = before
        .iter()
        .map(|port| port.name.clone())
        .filter(|name| after.iter().all(|port| port.name != *name));
    let changed = after.iter().filter(|port| !before.contains(port)).cloned().collect();
    dataplane.apply(&Changes { changed, removed: removed.collect() }).unwrap();
    assert_eq!(dataplane.resync(&after).unwrap(), NOTHING);
    drop(dataplane);
    // A new dataplane reads everything.
    let mut dataplane = open(backend);
    assert_eq!(dataplane.resync(&after).unwrap(), NOTHING);
    assert_eq!(dataplane.apply(&changes(&after)).unwrap(), NOTHING);
}

#[rstest]
#[ignore = "needs root"]
fn as_root_flushed_tables_are_written_again(#[values(Backend::Legacy, Backend::Nft)] backend: Backend) {
    let Some(Node { mut dataplane, .. }) = Node::serving(backend) else { return };
    let written = saved(backend);
    dataplane.collect_garbage().unwrap();
    for table in ["nat", "filter", "mangle"] {
        for step in ["-F", "-X"] {
            assert!(tool(backend, "", &format!("-t {table} {step}")).is_some());
        }
    }
    dataplane.collect_garbage().unwrap();
    assert!(!saved(backend).iter().any(|line| line.starts_with(" :KUBE-SERVICES")), "the flush may go on");
    dataplane.collect_garbage().unwrap();
    let sorted = |mut lines: Vec<String>| {
        lines.sort_unstable();
        lines
    };
    assert_eq!(sorted(saved(backend)), sorted(written));
}

/// Another mode has emptied a chain that it shares with this one, and then could not take over.
#[rstest]
#[ignore = "needs root"]
fn as_root_what_is_invalidated_is_compared_at_once(
    #[values(Backend::Legacy, Backend::Nft)] backend: Backend,
) {
    let Some(Node { ports, mut dataplane }) = Node::serving(backend) else { return };
    let rules = || {
        let mut rules = saved(backend);
        rules.sort_unstable();
        rules
    };
    let written = rules();
    assert!(tool(backend, "", "-t nat -F KUBE-SERVICES").is_some());
    dataplane.invalidate(Known::Everything);
    assert!(dataplane.resync(&ports).unwrap().written > 0);
    assert_eq!(rules(), written);
}

#[rstest]
#[ignore = "needs root"]
fn as_root_a_rule_that_is_refused_names_its_port_and_hurts_no_other(
    #[values(Backend::Legacy, Backend::Nft)] backend: Backend,
) {
    let Some(Node { ports, mut dataplane }) = Node::serving(backend) else { return };
    // The tools refuse an address of the other family.
    let broken = |port: &Arc<DesiredPort>| {
        let mut port = DesiredPort::clone(port);
        port.frontends[0].address = ip("fd00::1");
        Arc::new(port)
    };
    let of_ipv4 = |port: &&Arc<DesiredPort>| port.name.family == IpFamily::Ipv4;
    let mut wanted: Vec<Arc<DesiredPort>> = ports.iter().filter(of_ipv4).cloned().collect();
    wanted[1] = broken(&wanted[1]);
    let mut moved = DesiredPort::clone(&wanted[0]);
    moved.frontends[0].address = ip("172.30.0.99");
    wanted[0] = Arc::new(moved);
    let error = dataplane.apply(&changes(&wanted)).unwrap_err().to_string();
    assert!(error.contains("ns2/svc2:p80") && error.contains("fd00::1"), "{error}");
    let text = saved(backend).join("\n");
    assert!(text.contains("-A KUBE-SERVICES -d 172.30.0.99/32"), "{text}");
    assert!(text.contains("-A KUBE-SERVICES -d 172.30.0.42/32"), "the port is served as before: {text}");
    // It is tried again, with the same outcome. Nothing of the other ports is written.
    let wanted: Vec<_> =
        wanted.into_iter().chain(ports.iter().filter(|port| !of_ipv4(port)).cloned()).collect();
    let error = dataplane.resync(&wanted).unwrap_err().to_string();
    assert!(error.contains("ns2/svc2:p80"), "{error}");
    assert_eq!(saved(backend).join("\n"), text);
    assert!(dataplane.resync(&ports).is_ok());
    drop(dataplane);
    assert_eq!(open(backend).resync(&ports).unwrap(), NOTHING);
}

/// The lock of the tools is in the thread's own mount namespace, because other tests need that of
/// the machine.
#[test]
#[ignore = "needs root"]
fn as_root_a_change_of_the_node_that_failed_is_written_by_the_next_attempt() {
    let Some(Node { ports, mut dataplane }) = Node::serving(Backend::Legacy) else { return };
    dataplane.writers.truncate(1);
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
    mount(Some("tmpfs"), "/run", Some("tmpfs"), MsFlags::empty(), none).unwrap();
    let pods = LocalTraffic::FromCidrs(vec!["10.9.0.0/16".parse().unwrap()]);
    let changed = Host { local_traffic: pods, ..host() };
    let lock = File::create("/run/xtables.lock").unwrap();
    lock.lock().unwrap();
    let error = dataplane.set_host(&changed).unwrap_err().to_string();
    assert!(error.contains("did not get the lock"), "{error}");
    lock.unlock().unwrap();
    assert_ne!(dataplane.set_host(&changed).unwrap(), NOTHING);
    assert!(saved(Backend::Legacy).iter().any(|line| line.contains("10.9.0.0/16")));
    assert_eq!(dataplane.set_host(&changed).unwrap(), NOTHING);
    assert_eq!(dataplane.resync(&ports).unwrap(), NOTHING);
}

#[rstest]
#[ignore = "needs root"]
fn as_root_one_controller_at_a_time(#[values(Backend::Nft)] backend: Backend) {
    if !enter(backend) {
        return;
    }
    let _first = open(backend);
    let error = IptablesDataplane::open(backend).unwrap_err();
    assert!(modes::Error::from(error).is_taken_over());
}

#[rstest]
#[ignore = "needs root"]
fn as_root_the_snapshot_tells_what_is_there(#[values(Backend::Legacy, Backend::Nft)] backend: Backend) {
    if !enter(backend) {
        return;
    }
    let (services, slices) = several();
    let mut dataplane = open(backend);
    dataplane.resync(&desired(services, slices)).unwrap();
    let snapshot = dataplane.snapshot().unwrap();
    let names: Vec<_> = snapshot.services.iter().map(|service| service.name.to_string()).collect();
    assert_eq!(names, [1, 2, 3, 4, 5, 6].map(|number| format!("ns{number}/svc{number}:p80")));
    assert_eq!(snapshot.backends.len(), 6);
}

fn ip_tool(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status().unwrap();
    assert!(status.success(), "ip {arguments}");
}

/// Returns what the endpoint that answers says of itself.
fn dial(address: &str) -> std::io::Result<std::net::SocketAddr> {
    let patience = Duration::from_secs(60);
    let mut stream = std::net::TcpStream::connect_timeout(&address.parse().unwrap(), patience)?;
    let mut said = String::new();
    std::io::Read::read_to_string(&mut stream, &mut said)?;
    Ok(said.parse().unwrap())
}

/// Answers every connection with its own address, for as long as the test's process runs.
fn serve(address: &str) {
    let listener = std::net::TcpListener::bind(address).unwrap();
    let address = address.to_owned();
    thread::spawn(move || {
        for stream in listener.incoming() {
            // The client may have gone.
            let _ = std::io::Write::write_all(&mut stream.unwrap(), address.as_bytes());
        }
    });
}

#[rstest]
#[ignore = "needs root"]
fn as_root_connections_reach_endpoints_or_are_refused(
    #[values(Backend::Legacy, Backend::Nft)] backend: Backend,
    #[values(false, true)] sticky: bool,
) {
    if !enter(backend) {
        return;
    }
    for arguments in [
        "link set lo up",
        "link add eth0 type veth peer name other",
        "link set eth0 up",
        "link set other up",
        "address add 192.168.0.2/24 dev eth0",
        "address add 10.180.0.1/32 dev lo",
        "address add 10.180.0.2/32 dev lo",
        "route add 172.30.0.0/16 dev eth0",
        "-6 address add fd00:10::6/128 dev lo nodad",
        "-6 route add fd00:30::/64 dev lo",
    ] {
        ip_tool(arguments);
    }
    for address in ["10.180.0.1:80", "10.180.0.2:80", "[fd00:10::6]:80"] {
        serve(address);
    }
    let web = Service {
        affinity_seconds: sticky.then_some(600),
        ..named("ns1/svc1", "172.30.0.41").node_port(3001)
    };
    let ports = desired(
        vec![web, named("ns4/svc4", "172.30.0.44"), named("ns6/svc6", "fd00:30::46")],
        vec![
            endpoints("ns1/svc1", &["10.180.0.1", "10.180.0.2"]),
            endpoints("ns6/svc6", &["here:fd00:10::6"]),
        ],
    );
    let mut dataplane = open(backend);
    dataplane.resync(&ports).unwrap();

    let answers = |address: &str| -> std::collections::BTreeSet<_> {
        (0..40).map(|_| dial(address).unwrap()).collect()
    };
    let count = if sticky { 1 } else { 2 };
    assert_eq!(answers("172.30.0.41:80").len(), count);
    assert_eq!(answers("192.168.0.2:3001").len(), count);
    assert_eq!(dial("[fd00:30::46]:80").unwrap(), "[fd00:10::6]:80".parse().unwrap());
    let refused = dial("172.30.0.44:80").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);

    let ports = desired(vec![named("ns1/svc1", "172.30.0.41")], vec![endpoints("ns1/svc1", &["10.180.0.2"])]);
    dataplane.apply(&changes(&ports)).unwrap();
    assert_eq!(dial("172.30.0.41:80").unwrap(), "10.180.0.2:80".parse().unwrap());
}

#[rstest]
#[ignore = "needs root"]
fn as_root_rules_of_many_endpoints_have_no_comments(
    #[values(Backend::Legacy, Backend::Nft)] backend: Backend,
) {
    if !enter(backend) {
        return;
    }
    let addresses: Vec<String> = (0..1001).map(|n| format!("10.180.{}.{}", n / 250, n % 250 + 1)).collect();
    let ports = |count: usize| {
        let addresses: Vec<&str> = addresses[..count].iter().map(String::as_str).collect();
        desired(vec![named("ns1/svc1", "172.30.0.41")], vec![endpoints("ns1/svc1", &addresses)])
    };
    let has_comments = || {
        let saved = saved(backend);
        let rules: Vec<&String> = saved.iter().filter(|line| line.contains("-A KUBE-SEP-")).collect();
        let commented = rules.iter().filter(|line| line.contains("--comment")).count();
        assert!(commented == 0 || commented == rules.len(), "{commented} of {} rules", rules.len());
        commented > 0
    };
    let mut dataplane = open(backend);
    dataplane.resync(&ports(1000)).unwrap();
    assert!(has_comments());
    for (count, expected) in [(1001, false), (900, false), (899, true)] {
        dataplane.apply(&changes(&ports(count))).unwrap();
        assert_eq!(has_comments(), expected, "{count} endpoints");
        dataplane.invalidate(Known::Everything);
        dataplane.resync(&ports(count)).unwrap();
        assert_eq!(has_comments(), expected, "{count} endpoints, after a resync");
    }
}

/// CVE-2020-8558: with route_localnet, neighbours reach what listens on 127.0.0.1, unless a rule
/// forbids it.
#[rstest]
#[case::everywhere(&[], "1")]
#[case::on_loopback(&["127.0.0.0/8"], "1")]
#[case::not_on_loopback(&["192.0.2.0/24"], "0")]
#[ignore = "needs root"]
fn as_root_loopback_is_routed_only_where_it_serves_node_ports(
    #[case] addresses: &[&str],
    #[case] expected: &str,
) {
    if !enter(Backend::Nft) {
        return;
    }
    // A new namespace has the value of the machine's first one.
    fs::write(ROUTE_LOCALNET, "0").unwrap();
    let config = Config {
        node_port_addresses: addresses
            .iter()
            .map(|one| NodePortAddress::Network(one.parse().unwrap()))
            .collect(),
        ..Config::default()
    };
    let found = || fs::read_to_string(ROUTE_LOCALNET).unwrap().trim().to_owned();
    let mut dataplane = (ENTRY.open)(&config).unwrap();
    assert_eq!(found(), expected);
    // The configuration changes while the process runs. First node ports are served at another
    // address only, then also on 127.0.0.1, and that change sets the parameter.
    let elsewhere = Host { node_port_addresses: [ip("192.168.0.2")].into(), ..host() };
    dataplane.set_host(&elsewhere).unwrap();
    dataplane.resync(&[]).unwrap();
    assert_eq!(found(), expected);
    dataplane.set_host(&host()).unwrap();
    assert_eq!(found(), "1");
    // The parameter stays set when node ports are no longer served on 127.0.0.1. So a flush of the
    // tables must not open the node.
    dataplane.set_host(&elsewhere).unwrap();
    for table in ["nat", "filter", "mangle"] {
        for step in ["-F", "-X"] {
            assert!(tool(Backend::Nft, "", &format!("-t {table} {step}")).is_some());
        }
    }
    dataplane.resync(&[]).unwrap();
    let rules = saved(Backend::Nft);
    for rule in ["-A INPUT -j KUBE-FIREWALL", "-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8"] {
        assert!(rules.iter().any(|line| line.contains(rule)), "{rule}: {rules:?}");
    }
}

/// The node is set up after the mode is opened, and before anything is written.
#[rstest]
#[case::liberal("1", false)]
#[case::strict("0", true)]
#[ignore = "needs root"]
fn as_root_packets_outside_of_the_window_are_dropped_unless_conntrack_is_liberal_when_rules_are_written(
    #[values(Backend::Legacy, Backend::Nft)] backend: Backend,
    #[case] liberal: &str,
    #[case] drops: bool,
) {
    if !enter(backend) {
        return;
    }
    let mut dataplane = open(backend);
    fs::write(BE_LIBERAL, liberal).unwrap();
    dataplane.resync(&[]).unwrap();
    let are_dropped = || saved(backend).iter().any(|rule| rule.contains("--ctstate INVALID"));
    assert_eq!(are_dropped(), drops);
    // `conntrack.tcpBeLiberal` is changed while the proxy runs.
    fs::write(BE_LIBERAL, if drops { "1" } else { "0" }).unwrap();
    dataplane.resync(&[]).unwrap();
    assert_eq!(are_dropped(), !drops, "at a comparison");
    fs::write(BE_LIBERAL, liberal).unwrap();
    dataplane.set_host(&host()).unwrap();
    assert_eq!(are_dropped(), drops, "at a change of the node");
    assert_eq!(dataplane.resync(&[]).unwrap(), NOTHING);
}

/// A comment is cut after 255 bytes, which may be in the middle of a character.
#[rstest]
#[ignore = "needs root"]
fn as_root_comments_of_others_may_hold_any_bytes(#[values(Backend::Legacy, Backend::Nft)] backend: Backend) {
    if !enter(backend) {
        return;
    }
    let comment = OsStr::from_bytes(b"caf\xe9");
    let add = |chain: &str| {
        let mut command = Command::new(format!("iptables-{backend}"));
        command.args(["-t", "nat", "-A", chain, "-m", "comment", "--comment"]).arg(comment);
        assert!(command.args(["-j", "ACCEPT"]).status().unwrap().success());
    };
    let chains = || -> Vec<String> {
        let output = Command::new(format!("iptables-{backend}-save")).args(["-t", "nat"]).output().unwrap();
        let lines = output.stdout.split(|byte| *byte == b'\n');
        let has = |line: &&[u8]| line.windows(comment.len()).any(|bytes| bytes == comment.as_bytes());
        lines
            .filter(has)
            .map(|line| String::from_utf8_lossy(line).split(' ').nth(1).unwrap().to_owned())
            .collect()
    };
    assert!(tool(backend, "", "-t nat -N KUBE-SERVICES").is_some());
    ["OUTPUT", "KUBE-SERVICES"].into_iter().for_each(add);
    assert_eq!(chains(), ["OUTPUT", "KUBE-SERVICES"]);
    let mut dataplane = open(backend);
    dataplane.resync(&[]).unwrap();
    assert_eq!(chains(), ["OUTPUT"], "the other one was in a chain of this proxy");
    assert_eq!(dataplane.resync(&[]).unwrap(), NOTHING);
}
