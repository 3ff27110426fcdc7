//! Tests of the mode with real sockets on loopback, as an ordinary user.

mod rules;

use std::{
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, Shutdown, TcpListener, TcpStream, UdpSocket},
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
};

use rstest::rstest;

use self::rules::wait_until;
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
    let told = dataplane.take_waiting().unwrap();
    let texts: Vec<_> = told[&port.name].iter().map(|one| (one.field, &*one.instead)).collect();
    assert_eq!(texts.len(), 2, "{texts:?}");
    assert_eq!(
        texts[0],
        ("spec.clusterIPs", &*format!("not served: 127.0.0.1:{number}; another program listens there"))
    );
    assert!(texts[1].1.contains("it is no address of this node"), "{texts:?}");
    assert_eq!(dataplane.take_waiting(), None, "nothing has changed");
    drop(taken);
    // A child that another test starts at this moment holds the listener until it runs its program.
    wait_until("one address is served", || {
        dataplane.resync(&[Arc::clone(&port)]).unwrap();
        dataplane.take_waiting().is_some_and(|told| told[&port.name].len() == 1)
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
fn dataplane_errors(dataplane: &mut UserspaceDataplane, number: u16) -> Vec<UnservedField> {
    let port = desired(loopback(Protocol::Tcp, number), &["127.0.0.1:1"]);
    let mut other = DesiredPort::clone(&port);
    other.name.port = "other".into();
    let name = other.name.clone();
    dataplane.apply(&Changes { changed: vec![Arc::new(other)], removed: Vec::new() }).unwrap();
    dataplane.take_waiting().unwrap().remove(&name).unwrap()
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
