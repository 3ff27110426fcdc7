//! Datagrams that netfilter goes on translating, by rules that a former proxy had made.

use std::{
    net::{SocketAddr, UdpSocket},
    process::Command,
    sync::Arc,
    time::Duration,
};

use nix::sys::socket::AddressFamily;
use proxy_ctl::{
    config::Config,
    dataplane::{self, Modes},
    mode::Mode,
    sys::conntrack::Conntrack,
};

use super::{
    desired::change,
    sandbox::{Sandbox, run},
    sockets::{A, B, PORT, SERVICE, dns, serve},
};

/// Flows to the service that A answers.
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
    // Of a process that is not in the cgroup: as one that has connected before the hooks were there.
    let client = UdpSocket::bind((A, 0)).unwrap();
    client.connect((SERVICE, 80)).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    client.send(b"x").unwrap();
    client.recv(&mut [0; 8]).unwrap();
    assert_eq!(led_to_a(), 1);

    let config = Arc::new(Config { ebpf: sandbox.config.clone(), ..Config::default() });
    let modes = Modes { mode: Mode::Ebpf, beside: None };
    let mut dataplane = dataplane::open(modes, &config).unwrap();
    dataplane.resync(&[dns(&[A], &[])]).unwrap();
    dataplane.apply(&change(vec![dns(&[A, B], &[])])).unwrap();
    dataplane.apply(&change(vec![dns(&[B], &[A])])).unwrap();
    assert_eq!(led_to_a(), 1, "its endpoint serves");
    dataplane.apply(&change(vec![dns(&[B], &[])])).unwrap();
    assert_eq!(led_to_a(), 0);
}
