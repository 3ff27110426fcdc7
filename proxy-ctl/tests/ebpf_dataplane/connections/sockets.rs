//! Tests that connected datagram sockets are ended when their endpoint goes, and no other sockets.

use std::{
    fs::File,
    io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::{AsFd as _, AsRawFd},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use aya::maps::{Map, MapData, SkStorage};
use nix::sched::{CloneFlags, setns, unshare};
use proxy_common::layout::SocketOrigin;
use proxy_ctl::{
    model::{
        desired::{Changes, DesiredPort},
        objects::Protocol,
    },
    modes::{Dataplane, Programmed as _, ebpf::EbpfDataplane},
    sys::{
        bpf::{
            self,
            kernel_types::KernelTypes,
            socket_storage::{SocketIterators, StorageReader, StoredSocket},
        },
        net::{namespace::socket_cookie, network_namespaces::NetworkNamespace, socket_diag::Transport},
    },
};

use crate::{
    desired::{change, endpoint, endpoints, port},
    sandbox::{Sandbox, run},
};

pub const SERVICE: &str = "10.96.0.1";
const CANARY: &str = "10.96.0.2";
/// The backends with their answers.
const BACKENDS: [(&str, &str); 2] = [(A, "a"), (B, "b")];
pub const A: &str = "10.1.0.1";
pub const B: &str = "10.1.0.2";
pub const PORT: u16 = 53;

/// A mounted network namespace, as container runtimes make them.
pub struct Pod(String);

impl Pod {
    fn new() -> Self {
        let name = format!("proxy-ctl-test-{}-pod", std::process::id());
        run("ip", &format!("netns add {name}"));
        let pod = Self(name);
        run("ip", &format!("-n {} link set lo up", pod.0));
        pod
    }

    fn path(&self) -> String {
        format!("/run/netns/{}", self.0)
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        run("ip", &format!("netns del {}", self.0));
    }
}

/// Starts the backends in this thread's namespace, or in a pod's. They serve as long as the test's
/// process lives.
pub fn serve(pod: Option<&Pod>) {
    let of_pod = pod.map_or_else(String::new, |pod| format!("-n {} ", pod.0));
    for (address, name) in BACKENDS {
        run("ip", &format!("{of_pod}address add {address}/32 dev lo"));
        let namespace = pod.map(|pod| File::open(pod.path()).unwrap());
        let socket = thread::spawn(move || {
            namespace.into_iter().for_each(|namespace| setns(namespace, CloneFlags::CLONE_NEWNET).unwrap());
            UdpSocket::bind((address, PORT)).unwrap()
        });
        let socket = socket.join().unwrap();
        thread::spawn(move || {
            while let Ok((_, client)) = socket.recv_from(&mut [0; 64]) {
                let _ = socket.send_to(name.as_bytes(), client);
            }
        });
    }
}

/// A shell in the cgroup, because sockets belong to the cgroup of the process that makes them.
struct Client {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Client {
    fn start(sandbox: &Sandbox, pod: Option<&Pod>) -> Self {
        let mut command = match pod {
            Some(pod) => {
                let mut command = Command::new("nsenter");
                command.arg(format!("--net={}", pod.path())).arg("bash");
                command
            }
            None => Command::new("bash"),
        };
        let command = command.env("LC_ALL", "C").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (requests, answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut client = Self { child, requests, answers: BufReader::new(answers) };
        client.carry_out(&format!("echo $$ > {}/cgroup.procs", sandbox.cgroup_path().display()));
        client
    }

    /// Returns what the commands print, in one line.
    fn carry_out(&mut self, commands: &str) -> String {
        writeln!(self.requests, "echo $({{ {commands}; }} 2>&1)").unwrap();
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// Connects descriptor `fd`. This is not done in a subshell, because only the subshell would
    /// have the descriptor.
    fn connect(&mut self, fd: u32, address: &str, port: u16) {
        writeln!(self.requests, "exec {fd}<>/dev/udp/{address}/{port}").unwrap();
        self.carry_out("true");
    }

    fn close(&mut self, fd: u32) {
        writeln!(self.requests, "exec {fd}>&-").unwrap();
        self.carry_out("true");
    }

    /// Returns the name of who answers, or why nobody does.
    fn ping(&mut self, fd: u32) -> String {
        // A shell reads byte by byte, and so it gets the first byte of a datagram.
        self.carry_out(&format!(
            "printf x >&{fd} && read -r -N 1 -t 60 -u {fd} by && printf %s $by || echo none"
        ))
    }

    fn has_ended(&mut self, fd: u32) -> bool {
        let answer = self.ping(fd);
        let has_ended =
            ["connection abort", "Destination address required"].iter().any(|why| answer.contains(why));
        assert!(answer.len() == 1 || has_ended, "{answer}");
        answer.len() > 1
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _killed = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// The endpoints that are used, and those that are not used and still serve. `None` if the Service
/// is not there.
type State = Option<(&'static [&'static str], &'static [&'static str])>;

fn datagrams(service: &str, address: &str, used: &[&str], unused: &[&str]) -> Arc<DesiredPort> {
    let all = |addresses: &[&str]| -> Vec<_> { addresses.iter().map(|one| endpoint(one, PORT)).collect() };
    let mut port = port(service, address, Vec::new());
    port.name.protocol = Protocol::Udp;
    port.endpoints = endpoints(all(used));
    port.endpoints.unused = all(unused).into();
    Arc::new(port)
}

pub fn dns(used: &[&str], unused: &[&str]) -> Arc<DesiredPort> {
    datagrams("dns", SERVICE, used, unused)
}

/// Returns a Service that loses its endpoint whenever the other has changed. The pass that ends its
/// sockets looks at those of the other too.
fn canary(used: &[&str]) -> Arc<DesiredPort> {
    datagrams("canary", CANARY, used, &[])
}

fn write(dataplane: &mut EbpfDataplane, state: State) {
    let changes = match state {
        Some((used, unused)) => change(vec![dns(used, unused)]),
        None => Changes { changed: Vec::new(), removed: vec![dns(&[], &[]).name.clone()] },
    };
    dataplane.apply(&changes).unwrap();
}

/// A time far longer than anything takes that is waited for. Only a failing test waits so long.
const SOON: Duration = Duration::from_secs(60);

/// Returns how long it takes until the condition holds.
fn until(what: &str, mut condition: impl FnMut() -> bool) -> Duration {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < SOON, "{what}");
    }
    began.elapsed()
}

fn ended(dataplane: &EbpfDataplane) -> u64 {
    let families = dataplane.metrics().unwrap();
    let of_sockets = families.iter().find(|family| family.name == "proxy_sockets_ended").unwrap();
    of_sockets.samples.iter().map(|(_, count)| count).sum()
}

/// The client's descriptor that is connected to the Service.
const DIALLED: u32 = 10;
/// The client's descriptor that is connected to the endpoint itself.
const DIRECT: u32 = 11;
/// The client's descriptor that is connected to the canary.
const DIALLED_CANARY: u32 = 12;

/// Changes of the Service whose only endpoint was A. If they end sockets, the last field names who
/// answers these from then on.
const CASES: &[(&str, &[State], Option<&str>)] = &[
    ("its endpoint is replaced", &[Some((&[B], &[]))], Some("b")),
    ("scaled to zero and back", &[Some((&[], &[])), Some((&[B], &[]))], Some("b")),
    ("deleted and recreated", &[None, Some((&[B], &[]))], Some("b")),
    ("recreated with the same endpoint", &[None, Some((&[A], &[]))], Some("a")),
    ("another endpoint comes", &[Some((&[A, B], &[]))], None),
    ("its endpoint terminates and serves", &[Some((&[B], &[A]))], None),
    ("another policy prefers others", &[Some((&[], &[A])), Some((&[B], &[A]))], None),
];

#[test]
fn sockets_follow_where_their_endpoint_goes_and_stay_where_it_serves() {
    let Some(sandbox) = Sandbox::new() else { return };
    let pod = Pod::new();
    serve(None);
    serve(Some(&pod));
    let mut dataplane = sandbox.open();
    let mut clients = [Client::start(&sandbox, None), Client::start(&sandbox, Some(&pod))];
    let mut ended_before = ended(&dataplane);
    for (name, states, after) in CASES {
        dataplane.resync(&[dns(&[A], &[]), canary(&[A])]).unwrap();
        for client in &mut clients {
            client.connect(DIALLED, SERVICE, 80);
            client.connect(DIRECT, A, PORT);
            client.connect(DIALLED_CANARY, CANARY, 80);
            for fd in [DIALLED, DIRECT, DIALLED_CANARY] {
                assert_eq!(client.ping(fd), "a", "{name}");
            }
        }
        let began = Instant::now();
        for state in *states {
            write(&mut dataplane, *state);
        }
        dataplane.apply(&change(vec![canary(&[])])).unwrap();
        for (client, side) in clients.iter_mut().zip(["the node", "a pod"]) {
            until(&format!("{name}, {side}"), || client.has_ended(DIALLED_CANARY));
            println!("{name}, {side}: sockets were ended {:?} after the first change", began.elapsed());
            // One pass ends both sockets, one after the other.
            if after.is_some() {
                until(&format!("{name}, {side}, too"), || client.has_ended(DIALLED));
                client.connect(DIALLED, SERVICE, 80);
            } else {
                assert!(!client.has_ended(DIALLED), "{name}, {side}");
            }
            assert_eq!(client.ping(DIALLED), after.unwrap_or("a"), "{name}, {side}");
            assert_eq!(client.ping(DIRECT), "a", "{name}, {side}: it dialled the endpoint itself");
            client.close(DIALLED);
        }
        ended_before += clients.len() as u64 * if after.is_some() { 2 } else { 1 };
        // A socket has ended a moment before it is counted.
        until(&format!("{name}: {ended_before} are counted"), || ended(&dataplane) >= ended_before);
        assert_eq!(ended(&dataplane), ended_before, "{name}");
    }
}

/// If the kernel lets all namespaces be read at once, that way gives the same answer.
#[test]
fn what_is_stored_with_sockets_is_read_in_their_network_namespace() {
    let Some((sandbox, _dataplane)) = Sandbox::opened() else { return };
    let map = bpf::pinned(&sandbox.map_pin("socket_origin4")).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let [udp, without_value] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
    let own = NetworkNamespace::own().unwrap().inode().unwrap() as u32;
    let pin = MapData::from_pin(sandbox.map_pin("socket_origin4")).unwrap();
    let mut values: SkStorage<_, SocketOrigin<[u8; 4]>> = SkStorage::try_from(Map::SkStorage(pin)).unwrap();
    let mut stored = |socket: &dyn AsRawFd, cookie: u64, protocol: u32, backend_id: u32| {
        let mut value = SocketOrigin::<[u8; 4]>::default();
        value.backend_id = backend_id;
        values.insert(&socket.as_raw_fd(), value, 0).unwrap();
        StoredSocket { cookie, namespace: own, protocol, value }
    };
    let expected =
        [stored(&tcp, socket_cookie(&tcp).unwrap(), 6, 1), stored(&udp, socket_cookie(&udp).unwrap(), 17, 2)];
    let types = KernelTypes::read().unwrap();
    let iterators = SocketIterators::open(&types).unwrap();
    let read = |transports: &[Transport]| {
        let storage = iterators.storage(map.as_fd(), transports).unwrap();
        storage.read().flat_map(Result::unwrap).collect::<Vec<_>>()
    };
    assert_eq!(read(&[Transport::Tcp, Transport::Udp]), expected);
    assert_eq!(read(&[Transport::Udp]), expected[1..]);
    let elsewhere = thread::scope(|scope| {
        let there = || unshare(CloneFlags::CLONE_NEWNET).map(|()| read(&[Transport::Udp]));
        scope.spawn(there).join().unwrap().unwrap()
    });
    assert_eq!(elsewhere, []);
    match StorageReader::<SocketOrigin<[u8; 4]>>::load(&types) {
        Ok(reader) => {
            let mut all = reader.read(map.as_fd()).unwrap();
            all.sort_by_key(|socket| socket.value.backend_id);
            assert_eq!(all, expected);
        }
        Err(error) => assert_eq!(error.errno(), libc::EPERM, "{error}"),
    }
    drop(without_value);
}

/// Returns sockets of a process outside the cgroup, which nothing has translated.
fn strangers(count: usize) -> Vec<UdpSocket> {
    let connected = || {
        let socket = UdpSocket::bind("10.1.0.1:0").unwrap();
        socket.connect((A, PORT)).unwrap();
        socket.set_read_timeout(Some(SOON)).unwrap();
        socket
    };
    (0..count).map(|_| connected()).collect()
}

fn is_answered(socket: &UdpSocket) -> bool {
    let mut answer = [0; 8];
    socket.send(b"x").is_ok() && socket.recv(&mut answer).is_ok_and(|length| &answer[..length] == b"a")
}

#[test]
fn ten_thousand_changes_end_no_other_socket() {
    const CHANGES: u32 = 10_000;
    let Some(sandbox) = Sandbox::new() else { return };
    serve(None);
    let mut dataplane = sandbox.open();
    // The Service has the same endpoint all the time.
    dataplane.resync(&[dns(&[A], &[]), canary(&[A])]).unwrap();
    let mut client = Client::start(&sandbox, None);
    client.connect(DIRECT, A, PORT);
    client.connect(DIALLED_CANARY, CANARY, 80);
    let strangers = strangers(100);
    let (mut connected, mut seen_ended) = (false, 0);
    let mut look = |client: &mut Client| {
        let has_ended = connected && client.has_ended(DIALLED);
        seen_ended += u64::from(has_ended);
        if has_ended || !connected {
            client.connect(DIALLED, SERVICE, 80);
        }
        connected = true;
        seen_ended
    };
    for n in 0..CHANGES {
        match n % 3 {
            0 => write(&mut dataplane, Some((&[B], &[]))),
            1 => write(&mut dataplane, None),
            _ => write(&mut dataplane, Some((&[A], &[]))),
        }
        // Other sockets get the numbers and the ends of those that were there before.
        if n % 102 == 2 {
            look(&mut client);
            assert!(strangers_come_and_go(), "after {n} changes");
        }
    }
    until("as many were ended as the client has seen", || look(&mut client) == ended(&dataplane));
    println!("{} sockets were ended", ended(&dataplane));
    assert!(ended(&dataplane) > 1);
    assert!(strangers.iter().all(is_answered));
    assert_eq!((client.ping(DIRECT), client.ping(DIALLED_CANARY)), ("a".into(), "a".into()));
}

fn strangers_come_and_go() -> bool {
    strangers(10).iter().all(is_answered)
}

#[test]
fn connections_to_endpoints_that_are_gone_are_reset_where_that_is_wanted() {
    let Some(mut sandbox) = Sandbox::new() else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let web = |used: &[SocketAddr], unused: &[SocketAddr]| {
        let all = |some: &[SocketAddr]| {
            some.iter().map(|one| endpoint("127.0.0.1", one.port())).collect::<Vec<_>>()
        };
        let mut web = port("web", SERVICE, all(used));
        web.endpoints.unused = all(unused).into();
        change(vec![Arc::new(web)])
    };
    for is_wanted in [false, true] {
        sandbox.config.reset_connections_to_gone_endpoints = is_wanted;
        let mut dataplane = sandbox.open();
        dataplane.resync(&web(&[address], &[]).changed).unwrap();
        let mut client = Client::start(&sandbox, None);
        writeln!(client.requests, "exec {DIALLED}<>/dev/tcp/{SERVICE}/80").unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let mut outcome_within = |patience| {
            server.set_read_timeout(Some(patience)).unwrap();
            server.read(&mut [0]).unwrap_err().kind()
        };
        let a_while = Duration::from_millis(500);
        dataplane.apply(&web(&[], &[address])).unwrap();
        assert_eq!(outcome_within(a_while), ErrorKind::WouldBlock, "it terminates and serves");
        dataplane.apply(&web(&[], &[])).unwrap();
        let (patience, expected) =
            if is_wanted { (SOON, ErrorKind::ConnectionReset) } else { (a_while, ErrorKind::WouldBlock) };
        assert_eq!(outcome_within(patience), expected);
    }
}

/// A command with a datagram socket that connects to the Service, disconnects, and sends to the
/// endpoint itself. It prints who has answered, as the kernel says. No shell can do this.
const DISCONNECTS: &str = r#"perl -MSocket -e '
    alarm 60;
    socket(S, PF_INET, SOCK_DGRAM, 0) or die "socket: $!";
    connect(S, sockaddr_in(80, inet_aton("10.96.0.1"))) or die "connect: $!";
    connect(S, pack("S x14", AF_UNSPEC)) or die "disconnect: $!";
    send(S, "x", 0, sockaddr_in(53, inet_aton("10.1.0.1"))) or die "send: $!";
    my ($port, $address) = sockaddr_in(recv(S, my $answer, 64, 0));
    print inet_ntoa($address), ":$port";
'"#;

#[test]
fn a_socket_that_was_disconnected_is_told_who_answers() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    serve(None);
    dataplane.resync(&[dns(&[A], &[])]).unwrap();
    let output = sandbox.in_cgroup(DISCONNECTS);
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(printed, format!("{A}:{PORT}"), "{}", String::from_utf8_lossy(&output.stderr));
}
