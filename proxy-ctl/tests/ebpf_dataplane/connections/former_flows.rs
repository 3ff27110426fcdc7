//! Tests of flows and connections that netfilter goes on translating, by rules that a former proxy
//! had made.

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    process::Command,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use nix::sys::socket::AddressFamily;
use proxy_common::{
    flow::NetfilterConnection,
    layout::{FLOW_OF_NETFILTER, Flow, FlowKey, RESET_PLAUSIBLE, Settings},
    port::Port,
};
use proxy_ctl::{
    config::Config,
    model::{mode::Mode, node::Host},
    modes::{self, Dataplane as _, Modes, PacketMode as _, ebpf::EbpfDataplane},
    sys::{net::conntrack::Conntrack, proc::clock},
};

use crate::{
    connections::sockets::{A, B, PORT, SERVICE, dns, serve},
    desired::change,
    sandbox::{Sandbox, run},
};

/// Returns the number of flows to the Service that A answers.
fn led_to_a() -> usize {
    let flows = Conntrack::open().unwrap().udp_flows(AddressFamily::Inet).unwrap();
    let (dialled, replier) =
        (SocketAddr::new(SERVICE.parse().unwrap(), 80), SocketAddr::new(A.parse().unwrap(), PORT));
    flows.iter().filter(|flow| flow.destination == dialled && flow.replier == replier).count()
}

#[test]
fn a_flow_that_a_former_proxy_has_opened_ends_with_its_endpoint() {
    let Some(sandbox) = Sandbox::new() else { return };
    if Command::new("nft").arg("--version").output().is_err() {
        println!("skipped: nft is not installed");
        return;
    }
    serve(None);
    run("ip", &format!("route add {SERVICE}/32 dev lo src {A}"));
    run("nft", "add table ip former");
    run("nft", "add chain ip former output { type nat hook output priority -100 ; }");
    run("nft", &format!("add rule ip former output ip daddr {SERVICE} udp dport 80 dnat to {A}:{PORT}"));
    // The client is a process outside the cgroup, like one that has connected before the hooks were
    // there.
    let client = UdpSocket::bind((A, 0)).unwrap();
    client.connect((SERVICE, 80)).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    client.send(b"x").unwrap();
    client.recv(&mut [0; 8]).unwrap();
    assert_eq!(led_to_a(), 1);

    let config = Arc::new(Config { ebpf: sandbox.config.clone(), ..Config::default() });
    let modes = Modes { active: Mode::Ebpf, secondary: None };
    let mut dataplane = modes::open(modes, &config).unwrap();
    dataplane.resync(&[dns(&[A], &[])]).unwrap();
    dataplane.apply(&change(vec![dns(&[A, B], &[])])).unwrap();
    dataplane.apply(&change(vec![dns(&[B], &[A])])).unwrap();
    assert_eq!(led_to_a(), 1, "its endpoint serves");
    dataplane.apply(&change(vec![dns(&[B], &[])])).unwrap();
    assert_eq!(led_to_a(), 0);
}

type Entries = Vec<(FlowKey<[u8; 4]>, Flow<[u8; 4]>)>;

/// Returns the entries that are kept for connections which netfilter translates.
fn kept(sandbox: &Sandbox) -> Entries {
    let mut entries: Entries = sandbox.map("flows4").read_all().unwrap();
    entries.retain(|(_, flow)| flow.flags & FLOW_OF_NETFILTER != 0);
    entries
}

#[test]
fn both_pairs_of_ends_of_a_connection_are_kept_from_flows_until_it_ends() {
    const NOBODY: &str = "10.1.0.9";
    let Some(sandbox) = Sandbox::new() else { return };
    if Command::new("nft").arg("--version").output().is_err() {
        println!("skipped: nft is not installed");
        return;
    }
    run("ip", &format!("addr add {A}/32 dev lo"));
    run("ip", &format!("route add {SERVICE}/32 dev lo src {A}"));
    run("ip", "link add former type veth peer name formerp");
    run("ip", "link set former up");
    run("ip", &format!("route add {NOBODY}/32 dev former"));
    run("ip", &format!("neigh add {NOBODY} dev former lladdr 02:00:00:00:00:09"));
    run("nft", "add table ip former");
    run("nft", "add chain ip former output { type nat hook output priority -100 ; }");
    for (port, to) in [(80, A), (81, NOBODY)] {
        let rule = format!("ip daddr {SERVICE} tcp dport {port} dnat to {to}:{PORT}");
        run("nft", &format!("add rule ip former output {rule}"));
    }
    let listener = TcpListener::bind((A, PORT)).unwrap();
    let mut client = TcpStream::connect((SERVICE, 80)).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    client.write_all(b"x").unwrap();
    server.read_exact(&mut [0]).unwrap();
    // Nobody answers this SYN, as with those of a flood.
    let unanswered = SocketAddr::new(SERVICE.parse().unwrap(), 81);
    TcpStream::connect_timeout(&unanswered, Duration::from_millis(100)).unwrap_err();

    let mut dataplane = sandbox.open();
    dataplane.resync(&[]).unwrap();
    dataplane.set_host(&Host::default()).unwrap();
    dataplane.attach().unwrap();
    let entries = kept(&sandbox);
    let flow = entries[0].1;
    assert_eq!((flow.client_port(), flow.frontend_port()), {
        let port = |address: std::io::Result<SocketAddr>| Port::new(address.unwrap().port());
        (port(client.local_addr()), port(client.peer_addr()))
    });
    let mut keys: Vec<_> = entries.iter().map(|(key, _)| *key).collect();
    let mut expected = flow.netfilter_keys().to_vec();
    keys.sort();
    expected.sort();
    assert_eq!(keys, expected, "{entries:?}");

    // The first call reserves the ends of the secondary mode's connections, and also clears what
    // entries have noted.
    dataplane.collect_garbage().unwrap();
    // Somebody forges a SYN: the connection goes on, and the note is cleared.
    note_syn(&sandbox);
    collect_until(&mut dataplane, || kept(&sandbox).iter().all(|(_, flow)| flow.state.reset == 0));
    assert_eq!(kept(&sandbox).len(), 2);

    drop(client);
    drop(server);
    while !Conntrack::open().unwrap().translated_connections(AddressFamily::Inet).unwrap().is_empty() {
        thread::sleep(Duration::from_millis(10));
    }
    // The client dials again.
    note_syn(&sandbox);
    collect_until(&mut dataplane, || kept(&sandbox).is_empty());
}

fn collect_until(dataplane: &mut EbpfDataplane, is_done: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_done() {
        assert!(Instant::now() < deadline);
        dataplane.collect_garbage().unwrap();
        thread::sleep(Duration::from_millis(10));
    }
}

/// Does what a program does when it meets a SYN.
fn note_syn(sandbox: &Sandbox) {
    let map = sandbox.map("flows4");
    for (key, mut flow) in kept(sandbox) {
        flow.state.reset = RESET_PLAUSIBLE;
        map.set(&key, &flow).unwrap();
    }
}

/// The entry of a connection that has ended is removed also if nobody dials.
#[test]
fn what_is_kept_from_flows_ends_with_its_connection() {
    let Some(sandbox) = Sandbox::new() else { return };
    let mut dataplane = sandbox.open();
    let end = |address: &str, port| (address.parse::<Ipv4Addr>().unwrap().octets(), Port::new(port));
    let client = end(A, 4_000);
    let connection =
        NetfilterConnection { client, frontend: end(SERVICE, 80), backend: end(B, PORT), answers_to: client };
    let flow = Flow::of_netfilter(&connection, clock::since_boot());
    let map = sandbox.map("flows4");
    for key in flow.netfilter_keys() {
        map.set(&key, &flow).unwrap();
    }
    collect_until(&mut dataplane, || kept(&sandbox).is_empty());
}

/// Makes a rule that redirects TCP connections to the Service to a listener. Returns `None`, and
/// says why, if that is not possible here.
fn listener_of_former_proxy() -> Option<TcpListener> {
    if Command::new("nft").arg("--version").output().is_err() {
        println!("skipped: nft is not installed");
        return None;
    }
    run("ip", &format!("addr add {A}/32 dev lo"));
    run("ip", &format!("route add {SERVICE}/32 dev lo src {A}"));
    run("nft", "add table ip former");
    run("nft", "add chain ip former output { type nat hook output priority -100 ; }");
    run("nft", &format!("add rule ip former output ip daddr {SERVICE} tcp dport 80 dnat to {A}:{PORT}"));
    Some(TcpListener::bind((A, PORT)).unwrap())
}

/// A mode that drains ends when its maps are empty, and connections of the mode that serves now
/// may last for days.
#[test]
fn a_mode_that_drains_keeps_no_connection_of_netfilter() {
    let Some(sandbox) = Sandbox::new() else { return };
    let Some(listener) = listener_of_former_proxy() else { return };
    let _open = (TcpStream::connect((SERVICE, 80)).unwrap(), listener.accept().unwrap());
    let mut dataplane = sandbox.open();
    // Connections are listed after every sixtieth call.
    for _ in 0..61 {
        dataplane.drain().unwrap();
        assert_eq!(kept(&sandbox), []);
    }
}

/// The map of flows has room for TCP connections too, however many netfilter translates.
#[test]
fn connections_of_netfilter_take_a_quarter_of_the_entries() {
    const ENTRIES: u32 = 16;
    let Some(mut sandbox) = Sandbox::new() else { return };
    sandbox.config.limits.flows = ENTRIES;
    let Some(listener) = listener_of_former_proxy() else { return };
    let connect = || (TcpStream::connect((SERVICE, 80)).unwrap(), listener.accept().unwrap());
    let mut open: Vec<_> = (0..2).map(|_| connect()).collect();

    let mut dataplane = sandbox.open();
    dataplane.resync(&[]).unwrap();
    dataplane.set_host(&Host::default()).unwrap();
    dataplane.attach().unwrap();
    assert_eq!(kept(&sandbox).len(), 4);
    let settings: Vec<(u32, Settings)> = sandbox.map("settings").read_all().unwrap();
    assert_eq!(settings[0].1.most_unproven_entries, ENTRIES / 2);
    // Two have ended meanwhile, and two are new.
    open.clear();
    let _new: Vec<_> = (0..2).map(|_| connect()).collect();
    dataplane.collect_garbage().unwrap();
    assert!(kept(&sandbox).len() <= 4, "{:?}", kept(&sandbox));
}
