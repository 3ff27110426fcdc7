//! Tests of the mode with real sockets on loopback, as an ordinary user.

use std::{
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, Shutdown, TcpListener, TcpStream, UdpSocket},
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
};

use rstest::rstest;

use super::{
    redirect::noted::Notes,
    test_support::{changed_web, desired, host, web},
    *,
};
use crate::{
    free_port::free_port,
    model::{
        objects::{Protocol, Service, TrafficPolicy},
        test_support::{port, service},
    },
    sys::xtables::Backend,
};

/// A limit that is long enough for a busy machine. Nothing waits that long unless it fails.
const PATIENCE: Duration = Duration::from_secs(60);

fn dataplane_with(idle: Duration) -> UserspaceDataplane {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let name = format!("test-userspace-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    let NamespaceAttempt::Held(lock) = NamespaceLock::acquire(&name).unwrap() else { panic!("free") };
    let mut dataplane = UserspaceDataplane::with_lock(lock, None, None, idle).unwrap();
    dataplane.set_host(&host()).unwrap();
    dataplane
}

fn dataplane() -> UserspaceDataplane {
    dataplane_with(Duration::from_millis(250))
}

/// Returns a Service with the ClusterIP 127.0.0.1, on which tests can listen.
fn loopback(protocol: Protocol, number: u16) -> Service {
    let mut port = port("", number);
    port.protocol = protocol;
    service("default/web", &["127.0.0.1"]).ports(vec![port])
}

fn serve(dataplane: &mut UserspaceDataplane, port: &Arc<DesiredPort>) {
    let changes = Changes { changed: vec![Arc::clone(port)], removed: Vec::new() };
    dataplane.apply(&changes).unwrap();
    assert_eq!(dataplane.unlistened, BTreeMap::new());
}

/// An endpoint that answers each connection with its name, repeats what it gets until its end, and
/// then says goodbye.
struct Endpoint {
    address: String,
}

impl Endpoint {
    fn tcp(name: &'static str) -> Self {
        Self::tcp_at("127.0.0.1:0", name)
    }

    fn tcp_at(at: &str, name: &'static str) -> Self {
        let listener = TcpListener::bind(at).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                thread::spawn(move || {
                    stream.write_all(name.as_bytes())?;
                    let mut buffer = [0; 4096];
                    loop {
                        match stream.read(&mut buffer)? {
                            0 => return stream.write_all(b"bye"),
                            length => stream.write_all(&buffer[..length])?,
                        }
                    }
                });
            }
        });
        Self { address }
    }

    fn udp(name: &'static str) -> Self {
        Self::udp_at("127.0.0.1:0", name)
    }

    fn udp_at(at: &str, name: &'static str) -> Self {
        let socket = UdpSocket::bind(at).unwrap();
        let address = socket.local_addr().unwrap().to_string();
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok((_, peer)) = socket.recv_from(&mut buffer) {
                let _ = socket.send_to(format!("{name} {}", peer.port()).as_bytes(), peer);
            }
        });
        Self { address }
    }
}

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn read(stream: &mut TcpStream, length: usize) -> io::Result<String> {
    let mut text = vec![0; length];
    stream.read_exact(&mut text)?;
    Ok(String::from_utf8(text).unwrap())
}

/// Waits until nobody listens on a port whose listener was closed. A child that another test starts
/// at that moment holds the listener until it runs its program.
fn is_refused_soon(port: u16) {
    wait_until("connections are refused", || match TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
        Ok(_) => false,
        Err(error) => {
            assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
            true
        }
    });
}

/// Returns the name of the endpoint that answers a new connection.
fn answering(port: u16) -> String {
    read(&mut connect(port), 1).unwrap()
}

#[test]
fn connections_reach_endpoints_in_turn() {
    let (mut dataplane, number) = (dataplane(), free_port());
    let (a, b) = (Endpoint::tcp("a"), Endpoint::tcp("b"));
    serve(&mut dataplane, &desired(loopback(Protocol::Tcp, number), &[&a.address, &b.address]));
    let answers: Vec<String> = (0..4).map(|_| answering(number)).collect();
    assert_eq!((&answers[0], &answers[1]), (&answers[2], &answers[3]), "{answers:?}");
    assert_ne!(answers[0], answers[1]);
    assert_eq!(dataplane.shared.counters.connections.load(Ordering::Relaxed), 4);
}

#[test]
fn a_dead_endpoint_is_passed_over() {
    let (mut dataplane, number) = (dataplane(), free_port());
    let alive = Endpoint::tcp("a");
    let dead = format!("127.0.0.1:{}", free_port());
    serve(&mut dataplane, &desired(loopback(Protocol::Tcp, number), &[&alive.address, &dead]));
    assert!((0..4).all(|_| answering(number) == "a"));
    assert_ne!(dataplane.shared.counters.failed_dials.load(Ordering::Relaxed), 0, "it was never tried");
}

#[test]
fn a_client_is_reset_when_no_endpoint_answers() {
    let (mut dataplane, number) = (dataplane(), free_port());
    let dead = format!("127.0.0.1:{}", free_port());
    serve(&mut dataplane, &desired(loopback(Protocol::Tcp, number), &[&dead]));
    let error = read(&mut connect(number), 1).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    let tries = tcp::DIAL_TIMEOUTS.len() as u64;
    assert_eq!(dataplane.shared.counters.failed_dials.load(Ordering::Relaxed), tries);
}

#[test]
fn who_has_no_more_to_say_still_hears_the_answer() {
    let (mut dataplane, number) = (dataplane(), free_port());
    let a = Endpoint::tcp("a");
    serve(&mut dataplane, &desired(loopback(Protocol::Tcp, number), &[&a.address]));
    let mut client = connect(number);
    client.write_all(b"hello").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "ahellobye");
}

#[test]
fn a_slow_reader_slows_the_sender() {
    let (mut dataplane, number) = (dataplane(), free_port());
    let endpoint = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = endpoint.local_addr().unwrap().to_string();
    serve(&mut dataplane, &desired(loopback(Protocol::Tcp, number), &[&address]));
    let mut client = connect(number);
    let (mut silent, _) = endpoint.accept().unwrap();
    client.set_nonblocking(true).unwrap();
    // The client writes as much as the kernel holds on the way.
    let chunk = [7; 65_536];
    let (mut sent, mut stalled_at) = (0, Instant::now());
    while stalled_at.elapsed() < Duration::from_millis(300) {
        match client.write(&chunk) {
            Ok(length) => (sent, stalled_at) = (sent + length, Instant::now()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
        assert!(sent < 1 << 30, "somebody keeps what nobody reads");
    }
    client.shutdown(Shutdown::Write).unwrap();
    let mut received = Vec::new();
    silent.read_to_end(&mut received).unwrap();
    assert_eq!(received.len(), sent);
}

#[test]
fn an_endpoint_that_breaks_off_is_not_taken_for_one_that_has_ended() {
    let (mut dataplane, number) = (dataplane(), free_port());
    let endpoint = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = endpoint.local_addr().unwrap().to_string();
    serve(&mut dataplane, &desired(loopback(Protocol::Tcp, number), &[&address]));
    let mut client = connect(number);
    let (mut broken, _) = endpoint.accept().unwrap();
    // A connection that breaks off before the process sees it connected is dialled again. So a byte
    // goes first.
    broken.write_all(b"x").unwrap();
    assert_eq!(read(&mut client, 1).unwrap(), "x");
    socket2::SockRef::from(&broken).set_linger(Some(Duration::ZERO)).unwrap();
    drop(broken);
    assert_eq!(read(&mut client, 1).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
}

#[test]
fn a_listener_goes_with_its_port_and_connections_go_on() {
    let (mut dataplane, number) = (dataplane(), free_port());
    let a = Endpoint::tcp("a");
    let port = desired(loopback(Protocol::Tcp, number), &[&a.address]);
    serve(&mut dataplane, &port);
    let mut client = connect(number);
    assert_eq!(read(&mut client, 1).unwrap(), "a");
    dataplane.apply(&Changes { changed: Vec::new(), removed: vec![port.name.clone()] }).unwrap();
    is_refused_soon(number);
    let still_works = |client: &mut TcpStream| {
        client.write_all(b"x").unwrap();
        assert_eq!(read(client, 1).unwrap(), "x");
    };
    still_works(&mut client);
    drop(dataplane);
    still_works(&mut client);
}

#[test]
fn without_endpoints_clients_are_refused_and_later_served() {
    let (mut dataplane, number) = (dataplane(), free_port());
    serve(&mut dataplane, &desired(loopback(Protocol::Tcp, number), &[]));
    let refused = TcpStream::connect((Ipv4Addr::LOCALHOST, number)).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    let a = Endpoint::tcp("a");
    serve(&mut dataplane, &desired(loopback(Protocol::Tcp, number), &[&a.address]));
    assert_eq!(answering(number), "a");
}

#[test]
fn no_connection_fails_while_endpoints_change() {
    let (mut dataplane, number) = (dataplane(), free_port());
    let (a, b) = (Endpoint::tcp("a"), Endpoint::tcp("b"));
    let states: Vec<_> = [vec![&a], vec![&a, &b], vec![&b]]
        .into_iter()
        .map(|endpoints| {
            let addresses: Vec<&str> = endpoints.iter().map(|one| one.address.as_str()).collect();
            desired(loopback(Protocol::Tcp, number), &addresses)
        })
        .collect();
    serve(&mut dataplane, &states[0]);
    let (answers, is_enough) = (Mutex::new(String::new()), AtomicBool::new(false));
    // The clients end by this deadline, because a wait that has failed does not tell them.
    let deadline = Instant::now() + 2 * PATIENCE;
    let client = || {
        while !is_enough.load(Ordering::Relaxed) && Instant::now() < deadline {
            let answer = answering(number);
            lock(&answers).push_str(&answer);
        }
    };
    thread::scope(|scope| {
        let clients: Vec<_> = (0..4).map(|_| scope.spawn(client)).collect();
        let mut changes = 0;
        wait_until("many are answered, by both endpoints, while these change", || {
            serve(&mut dataplane, &states[changes % states.len()]);
            changes += 1;
            let answers = lock(&answers);
            let is_met =
                answers.len() >= 800 && answers.contains('a') && answers.contains('b') && changes > 3;
            // A client that has failed ends the wait, and its panic fails the test.
            is_met || clients.iter().any(thread::ScopedJoinHandle::is_finished)
        });
        is_enough.store(true, Ordering::Relaxed);
    });
}

fn udp_client(port: u16) -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket.connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    socket
}

/// Returns the name of the endpoint, and the port by which it sees the client.
fn ask(client: &UdpSocket) -> String {
    client.send(b"?").unwrap();
    let mut buffer = [0; 64];
    let length = client.recv(&mut buffer).unwrap();
    String::from_utf8(buffer[..length].to_vec()).unwrap()
}

#[test]
fn datagrams_of_a_client_stay_with_an_endpoint_until_it_is_silent() {
    let idle = Duration::from_millis(200);
    let (mut dataplane, number) = (dataplane_with(idle), free_port());
    let (a, b) = (Endpoint::udp("a"), Endpoint::udp("b"));
    serve(&mut dataplane, &desired(loopback(Protocol::Udp, number), &[&a.address, &b.address]));
    let free = dataplane.shared.descriptors.free();
    let client = udp_client(number);
    let begun = Instant::now();
    let first = ask(&client);
    let silent_since = Instant::now();
    let second = ask(&client);
    assert!(first == second || begun.elapsed() >= idle, "{first}, then {second}");
    let sessions =
        |dataplane: &UserspaceDataplane| dataplane.shared.counters.sessions.load(Ordering::Relaxed);
    let before = sessions(&dataplane);
    // A session that has ended gives back what it has taken.
    wait_until("the session ends", || dataplane.shared.descriptors.free() == free);
    assert!(silent_since.elapsed() >= idle, "it ends once the client is silent");
    assert_ne!(ask(&client), second, "the session has not ended");
    assert_eq!(sessions(&dataplane), before + 1);
}

#[test]
fn datagrams_leave_an_endpoint_that_is_gone_at_once() {
    let (mut dataplane, number) = (dataplane_with(PATIENCE), free_port());
    let (a, b) = (Endpoint::udp("a"), Endpoint::udp("b"));
    serve(&mut dataplane, &desired(loopback(Protocol::Udp, number), &[&a.address]));
    let client = udp_client(number);
    let first = ask(&client);
    assert!(first.starts_with('a') && ask(&client) == first);
    serve(&mut dataplane, &desired(loopback(Protocol::Udp, number), &[&b.address]));
    assert!(ask(&client).starts_with('b'));
}

#[test]
fn an_answer_comes_from_the_address_that_was_asked() {
    let (mut dataplane, number) = (dataplane(), free_port());
    let a = Endpoint::udp("a");
    let mut web = loopback(Protocol::Udp, 80);
    web.cluster_ips = vec!["10.96.0.1".parse().unwrap()];
    web.ports[0].node_port = Some(number);
    let changes = Changes { changed: vec![desired(web, &[&a.address])], removed: Vec::new() };
    dataplane.apply(&changes).unwrap();
    let client = UdpSocket::bind("0.0.0.0:0").unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client.send_to(b"?", ("127.0.0.7", number)).unwrap();
    let (_, from) = client.recv_from(&mut [0; 64]).unwrap();
    assert_eq!(from.to_string(), format!("127.0.0.7:{number}"));
}

#[rstest]
#[case::a_range_that_the_client_is_in("127.0.0.0/8", true)]
#[case::another("192.0.2.0/24", false)]
fn source_ranges_are_enforced_by_the_listener(#[case] range: &str, #[case] served: bool) {
    let (mut dataplane, number) = (dataplane(), free_port());
    let a = Endpoint::tcp("a");
    let mut web = loopback(Protocol::Tcp, number);
    web.source_ranges = vec![range.parse().unwrap()];
    let port = desired(web, &[&a.address]);
    let mut port = DesiredPort::clone(&port);
    port.frontends[0].kind = crate::model::desired::FrontendKind::LoadBalancer;
    port.endpoints.external.clone_from(&port.endpoints.internal);
    serve(&mut dataplane, &Arc::new(port));
    assert_eq!(read(&mut connect(number), 1).is_ok(), served);
}

#[test]
fn addresses_of_others_are_named_and_tried_again() {
    let mut dataplane = dataplane();
    let number = free_port();
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, number)).unwrap();
    let a = Endpoint::tcp("a");
    let mut web = loopback(Protocol::Tcp, number);
    web.external_ips = vec!["198.51.100.1".parse().unwrap()];
    let port = desired(web, &[&a.address]);
    dataplane.apply(&Changes { changed: vec![Arc::clone(&port)], removed: Vec::new() }).unwrap();
    let told = dataplane.take_without_room().unwrap();
    let texts: Vec<_> = told[&port.name].iter().map(|one| (one.field, &*one.instead)).collect();
    assert_eq!(texts.len(), 2, "{texts:?}");
    assert_eq!(
        texts[0],
        ("spec.clusterIPs", &*format!("not served: 127.0.0.1:{number}; another program listens there"))
    );
    assert!(texts[1].1.contains("it is no address of this node"), "{texts:?}");
    assert_eq!(dataplane.take_without_room(), None, "nothing has changed");
    drop(taken);
    // A child that another test starts at this moment holds the listener until it runs its program.
    wait_until("one address is served", || {
        dataplane.resync(&[Arc::clone(&port)]).unwrap();
        dataplane.take_without_room().is_some_and(|told| told[&port.name].len() == 1)
    });
    assert_eq!(answering(number), "a");
}

#[test]
fn the_same_again_changes_nothing_and_what_is_not_desired_goes() {
    let (mut dataplane, number) = (dataplane(), free_port());
    let a = Endpoint::tcp("a");
    let port = desired(loopback(Protocol::Tcp, number), &[&a.address]);
    let written = |applied: Applied| (applied.written, applied.removed);
    assert_eq!(written(dataplane.resync(&[Arc::clone(&port)]).unwrap()), (2, 0), "a port and a listener");
    assert_eq!(written(dataplane.resync(&[Arc::clone(&port)]).unwrap()), (0, 0));
    assert_eq!(written(dataplane.set_host(&host()).unwrap()), (0, 0));
    assert_eq!(written(dataplane.resync(&[]).unwrap()), (0, 2));
    assert_eq!(
        dataplane.snapshot().unwrap(),
        Snapshot { node: dataplane.snapshot().unwrap().node, ..Snapshot::default() }
    );
    is_refused_soon(number);
}

#[test]
fn clients_wait_while_there_are_no_descriptors() {
    let (mut dataplane, number) = (dataplane(), free_port());
    // There are descriptors for a listener and one connection.
    dataplane.shared = Arc::new(Shared::new(256 + 4, Duration::from_secs(1)));
    let a = Endpoint::tcp("a");
    serve(&mut dataplane, &desired(loopback(Protocol::Tcp, number), &[&a.address]));
    let mut first = connect(number);
    assert_eq!(read(&mut first, 1).unwrap(), "a");
    let mut second = connect(number);
    second.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    assert_eq!(read(&mut second, 1).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    second.set_read_timeout(Some(PATIENCE)).unwrap();
    drop(first);
    assert_eq!(read(&mut second, 1).unwrap(), "a");
    let [other] = dataplane_errors(&mut dataplane, free_port()).try_into().unwrap();
    assert!(
        other.instead.contains("all of the 260 open files that RLIMIT_NOFILE allows"),
        "{}",
        other.instead
    );
}

/// Returns what is reported of one more Service.
fn dataplane_errors(dataplane: &mut UserspaceDataplane, number: u16) -> Vec<Unsupported> {
    let port = desired(loopback(Protocol::Tcp, number), &["127.0.0.1:1"]);
    let mut other = DesiredPort::clone(&port);
    other.name.port = "other".into();
    let name = other.name.clone();
    dataplane.apply(&Changes { changed: vec![Arc::new(other)], removed: Vec::new() }).unwrap();
    dataplane.take_without_room().unwrap().remove(&name).unwrap()
}

#[test]
fn an_external_policy_is_kept_by_the_listener() {
    let (mut dataplane, number) = (dataplane(), free_port());
    let a = Endpoint::tcp("a");
    let mut web = loopback(Protocol::Tcp, 80).policies(TrafficPolicy::Cluster, TrafficPolicy::Local);
    web.cluster_ips = vec!["10.96.0.1".parse().unwrap()];
    web.ports[0].node_port = Some(number);
    dataplane.apply(&Changes { changed: vec![desired(web, &[&a.address])], removed: Vec::new() }).unwrap();
    // The endpoint is on another node, so only the node's own processes reach it. This client is
    // one.
    assert_eq!(answering(number), "a");
}

/// Moves the thread into a network namespace of its own, with the route of a pod network. It ends
/// with the test, as its thread does.
fn in_own_namespace() {
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
        || crate::cleanup::is_marked(Mode::Userspace).unwrap()
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
enum By {
    NfTables,
    Iptables(Backend),
}

impl By {
    fn redirect(self) -> Redirect {
        let redirect = match self {
            Self::NfTables => Redirect::by_nf_tables(),
            Self::Iptables(backend) => Redirect::by_iptables(backend),
        };
        redirect.expect("the kernel has nf_tables and both backends of iptables")
    }
}

fn wait_until(what: &str, mut met: impl FnMut() -> bool) {
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
fn redirected(service: Service, endpoints: &[&str]) -> Arc<DesiredPort> {
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
