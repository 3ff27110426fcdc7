//! The rules that redirect clients to the listeners, in the kernel.

use super::*;

/// Moves the thread into a network namespace of its own, with the route of a pod network. It ends
/// with the test, as its thread does.
pub(super) fn in_own_namespace() {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    for command in [
        "link set lo up",
        "address add 192.0.2.1/32 dev lo",
        "address add fd00::1/128 dev lo nodad",
        "route add 10.96.0.0/16 dev lo",
        "-6 route add fd00:96::/64 dev lo",
    ] {
        let done = std::process::Command::new("ip").args(command.split(' ')).status().unwrap();
        assert!(done.success(), "ip {command}");
    }
}

fn has_rules_of_ours() -> bool {
    let kernel = crate::sys::nftables::NfTables::load().unwrap().unwrap();
    let tables = |family| kernel.tables(family).unwrap();
    let mut all = crate::sys::nftables::TableFamily::ALL.into_iter().flat_map(tables);
    all.any(|table| table == crate::names::USERSPACE_TABLE)
        || crate::cleanup::has_owner_tag(Mode::Userspace).unwrap()
}

/// Removes the rules as another program does it.
fn remove_rules_of_ours(by: By) {
    match by {
        By::NfTables => assert_ne!(redirect::remove_tables().unwrap(), [""; 0]),
        By::Iptables(backend) => {
            for family in ["", "6"] {
                let program = format!("ip{family}tables-{backend}");
                for arguments in ["-t nat -F", "-t nat -X"] {
                    let status = std::process::Command::new(&program).args(arguments.split(' ')).status();
                    assert!(status.unwrap().success(), "{program} {arguments}");
                }
            }
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) enum By {
    NfTables,
    Iptables(Backend),
}

impl By {
    pub(super) fn redirect(self) -> Redirect {
        let redirect = match self {
            Self::NfTables => Redirect::by_nf_tables(),
            Self::Iptables(backend) => Redirect::by_iptables(backend),
        };
        redirect.expect("the kernel has nf_tables and both backends of iptables")
    }
}

pub(super) fn wait_until(what: &str, mut met: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !met() {
        assert!(Instant::now() < deadline, "{what}");
        thread::yield_now();
    }
}

#[rstest]
#[case::ipv4("10.96.0.1", "127.0.0.1", "192.0.2.1")]
#[case::ipv6("fd00:96::1", "::1", "fd00::1")]
#[ignore = "needs root"]
fn as_root_rules_lead_clients_to_listeners(
    #[values(By::NfTables, By::Iptables(Backend::Nft), By::Iptables(Backend::Legacy))] by: By,
    #[case] cluster_ip: &str,
    #[case] loopback_address: &str,
    #[case] node_address: &str,
) {
    in_own_namespace();
    let NamespaceAttempt::Held(lock) = NamespaceLock::acquire(NAME).unwrap() else { panic!("free") };
    let redirect = by.redirect();
    let range = PortRange { first: 36_000, last: 36_099 };
    let idle = Duration::from_millis(250);
    let mut dataplane = UserspaceDataplane::with_lock(lock, Some(redirect), Some(range), idle).unwrap();
    let addresses = [loopback_address, node_address].map(|address| address.parse().unwrap());
    dataplane.set_host(&Host { node_port_addresses: addresses.into(), ..host() }).unwrap();

    let (tcp, udp) = (Endpoint::tcp("a"), Endpoint::udp("u"));
    let web = |endpoints: &[&str]| {
        let web = service("default/web", &[cluster_ip]).ports(vec![port("", 80).node_port(30080)]);
        redirected(web, endpoints)
    };
    let name = if cluster_ip.contains(':') { "default/dns6" } else { "default/dns" };
    let dns = |endpoints: &[&str]| {
        let dns = service(name, &[cluster_ip]).ports(vec![port("", 53).protocol(Protocol::Udp)]);
        redirected(dns, endpoints)
    };
    serve(&mut dataplane, &web(&[&tcp.address]));
    serve(&mut dataplane, &dns(&[&udp.address]));
    let ports: Vec<u16> = dataplane.listeners.values().map(|listener| listener.port).collect();
    assert!(
        ports.len() == 3 && ports.iter().all(|port| (range.first..=range.last).contains(port)),
        "{ports:?}"
    );
    let dial = |address: &str, number: u16| {
        let stream = TcpStream::connect((address, number))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok::<_, io::Error>(stream)
    };
    let mut held = dial(cluster_ip, 80).unwrap();
    assert_eq!(read(&mut held, 1).unwrap(), "a");
    assert_eq!(read(&mut dial(node_address, 30080).unwrap(), 1).unwrap(), "a");
    let client = UdpSocket::bind((node_address, 0)).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client.connect((cluster_ip, 53)).unwrap();
    assert!(ask(&client).starts_with('u'));

    serve(&mut dataplane, &web(&[]));
    serve(&mut dataplane, &dns(&[]));
    for (address, number) in [(cluster_ip, 80), (node_address, 30080)] {
        assert_eq!(dial(address, number).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }
    serve(&mut dataplane, &web(&[&tcp.address]));

    // Another program has removed the rules.
    remove_rules_of_ours(by);
    let desired: Vec<_> = lock_ports(&dataplane);
    assert_eq!(dataplane.resync(&desired).unwrap(), Applied { written: 1, removed: 0 });
    assert_eq!(dataplane.resync(&desired).unwrap(), Applied::default());
    assert_eq!(read(&mut dial(cluster_ip, 80).unwrap(), 1).unwrap(), "a");

    drop(dataplane);
    assert!(has_rules_of_ours(), "a connection is still translated");
    held.write_all(b"x").unwrap();
    assert_eq!(read(&mut held, 1).unwrap(), "x");
    drop(held);
    wait_until("the rules go with the last connection", || !has_rules_of_ours());
    assert_eq!(cleanup().unwrap(), [""; 0]);
}

/// A pod with hostNetwork is behind an external IP that is the node's own address. One connection,
/// or datagram, must not become many.
#[rstest]
#[ignore = "needs root"]
fn as_root_what_this_process_dials_is_not_led_to_itself(
    #[values(By::NfTables, By::Iptables(Backend::Nft), By::Iptables(Backend::Legacy))] by: By,
) {
    in_own_namespace();
    let NamespaceAttempt::Held(lock) = NamespaceLock::acquire(NAME).unwrap() else { panic!("free") };
    let redirect = by.redirect();
    let idle = Duration::from_secs(1);
    let mut dataplane = UserspaceDataplane::with_lock(lock, Some(redirect), None, idle).unwrap();
    // This limit ends a loop before it takes the machine's memory.
    dataplane.shared = Arc::new(Shared::new(256 + 64, idle));
    dataplane.set_host(&host()).unwrap();

    let (tcp, udp) = (Endpoint::tcp_at("192.0.2.1:80", "a"), Endpoint::udp_at("192.0.2.1:53", "u"));
    let own = |name: &str, number: u16, protocol| {
        service(name, &["10.96.0.1"])
            .ports(vec![port("", number).protocol(protocol)])
            .external_ip("192.0.2.1")
    };
    serve(&mut dataplane, &redirected(own("default/web", 80, Protocol::Tcp), &[&tcp.address]));
    serve(&mut dataplane, &redirected(own("default/dns", 53, Protocol::Udp), &[&udp.address]));

    let mut stream = TcpStream::connect("192.0.2.1:80").unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(read(&mut stream, 1).unwrap(), "a");
    let client = UdpSocket::bind("192.0.2.1:0").unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client.connect("192.0.2.1:53").unwrap();
    assert!(ask(&client).starts_with('u'));
    let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    let counters = &dataplane.shared.counters;
    assert_eq!((count(&counters.connections), count(&counters.sessions)), (1, 1));
}

/// The test has a namespace of its own, because the end of a dataplane removes the rules of this
/// mode.
#[rstest]
#[case::of_a_service_port(false)]
#[case::of_the_node(true)]
#[ignore = "needs root"]
fn as_root_what_could_not_be_written_is_written_by_the_next_attempt(#[case] of_the_node: bool) {
    in_own_namespace();
    let NamespaceAttempt::Held(lock) = NamespaceLock::acquire(NAME).unwrap() else { panic!("free") };
    let notes = Notes::default();
    let idle = Duration::from_millis(250);
    let mut dataplane = UserspaceDataplane::with_lock(lock, Some(notes.redirect()), None, idle).unwrap();
    dataplane.set_host(&host()).unwrap();
    let before = changed_web(&["10.0.0.1:80"], |service| service.external_ips.clear());
    let after = web(&["10.0.0.1:80"], TrafficPolicy::Cluster);
    serve(&mut dataplane, &before);
    assert_eq!(notes.look().frontends, 3);
    let node_port_addresses = ["192.0.2.2".parse().unwrap()].into();
    let moved = Host { node_port_addresses, ..host() };
    let changes = Changes { changed: vec![Arc::clone(&after)], removed: Vec::new() };
    notes.look().refuses = true;
    if of_the_node {
        dataplane.set_host(&moved).unwrap_err();
        notes.look().refuses = false;
        assert_ne!(dataplane.set_host(&moved).unwrap(), Applied::default());
        assert_eq!(notes.look().node_addresses, moved.node_port_addresses);
        assert_eq!(dataplane.set_host(&moved).unwrap(), Applied::default());
    } else {
        dataplane.apply(&changes).unwrap_err();
        notes.look().refuses = false;
        assert_ne!(dataplane.resync(&[Arc::clone(&after)]).unwrap(), Applied::default());
        assert_eq!(notes.look().frontends, 4);
        assert_eq!(dataplane.resync(&[after]).unwrap(), Applied::default());
    }
}

fn lock_ports(dataplane: &UserspaceDataplane) -> Vec<Arc<DesiredPort>> {
    lock(&dataplane.served).ports.values().map(|served| Arc::clone(&served.desired)).collect()
}

/// Returns a service port with endpoints of IPv4 for a Service of either family. This mode can
/// carry that, though no cluster asks for it.
pub(super) fn redirected(service: Service, endpoints: &[&str]) -> Arc<DesiredPort> {
    let mut port = DesiredPort::clone(&desired(service, &[]));
    let endpoint = |text: &&str| {
        let address: std::net::SocketAddr = text.parse().unwrap();
        let (address, port) = (address.ip(), address.port());
        crate::model::desired::Endpoint { address, port, local: false, terminating: false, weight: 1 }
    };
    let all: Vec<_> = endpoints.iter().map(endpoint).collect();
    let set: Arc<[u32]> = (0..all.len() as u32).collect();
    port.endpoints = crate::model::desired::Endpoints {
        any: !all.is_empty(),
        need_snat: false,
        cluster: Arc::clone(&set),
        internal: Arc::clone(&set),
        external: set,
        all,
        unused: Box::default(),
    };
    Arc::new(port)
}
