//! Tests probes of the health ports while another machine opens connections to them as fast as it
//! can.
//!
//! The test needs root. It has a network namespace of its own, with an address for the node and one
//! for each client.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::{
    collections::VecDeque,
    fs,
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sched::{CloneFlags, unshare},
    unistd::Uid,
};
use socket2::{Domain, SockAddr, Socket, Type};
use tempfile::TempDir;

const NODE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const FLOODING: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
const PROBING: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 3);
const HEALTHZ: u16 = 10_256;
const HEALTH_CHECK_NODE_PORT: u16 = 31_100;
/// The connects a second that the flood aims at. It reaches them on two cores that nobody else
/// uses.
const AIM: f64 = 12_000.0;
/// The least ratio of the flood's connects to those of a flood to a plain server. Below it, nothing
/// is shown.
const LEAST: f64 = 0.4;
/// The length of the flood to the plain server.
const COMPARED: Duration = Duration::from_secs(1);
const FLOOD: Duration = Duration::from_secs(3);
const HELD: usize = 400;
/// The time from the connection to the request, as over a network with this round trip.
const ROUND_TRIP: Duration = Duration::from_millis(20);
const PROBE_PERIOD: Duration = Duration::from_millis(100);
const ANSWER_WITHIN: Duration = Duration::from_secs(1);
const STARTS_WITHIN: Duration = Duration::from_secs(120);

const MANIFEST: &str = "apiVersion: v1
kind: Node
metadata: {name: node-a}
status: {addresses: [{type: InternalIP, address: 192.0.2.1}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec:
  type: LoadBalancer
  externalTrafficPolicy: Local
  healthCheckNodePort: 31100
  clusterIP: 10.96.0.1
  clusterIPs: [10.96.0.1]
  ports: [{name: http, port: 80, nodePort: 30080}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints: [{addresses: [192.0.2.1], nodeName: node-a}]
";

struct Proxy {
    child: Child,
    _manifests: TempDir,
}

impl Proxy {
    fn start() -> Self {
        let manifests = TempDir::new().unwrap();
        fs::write(manifests.path().join("all.yaml"), MANIFEST).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_proxy-ctl"))
            .args(["run", "--proxy-mode=userspace", "--hostname-override=node-a"])
            // The namespace may not set this parameter.
            .args(["--conntrack-max-per-core=0", "--manifests"])
            .arg(manifests.path())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Self { child, _manifests: manifests }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ip(args: &[&str]) {
    assert!(Command::new("ip").args(args).status().unwrap().success(), "ip {args:?}");
}

fn socket(source: Ipv4Addr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    // The socket ends with RST. It leaves no TIME_WAIT, which would use up the ports of its
    // address.
    socket.set_linger(Some(Duration::ZERO))?;
    socket.bind(&SocketAddr::from((source, 0)).into())?;
    Ok(socket)
}

/// Opens connections until `stop`, and keeps the last of them open. Packets on lo arrive within the
/// call that sends them. A connection that is not established after the call has met a full queue.
fn flood(to: &SockAddr, stop: &AtomicBool, established: &AtomicUsize) {
    let (mut held, start) = (VecDeque::new(), Instant::now());
    for number in 0_u32.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let due = Duration::from_secs_f64(f64::from(number) / AIM);
        thread::sleep(due.saturating_sub(start.elapsed()));
        let Ok(socket) = socket(FLOODING) else { continue };
        if socket.set_nonblocking(true).is_ok() {
            let _in_progress = socket.connect(to);
            established.fetch_add(usize::from(socket.peer_addr().is_ok()), Ordering::Relaxed);
        }
        held.push_back(socket);
        if held.len() > HELD {
            held.pop_front();
        }
    }
}

/// Floods `to` while `work` is done. Returns the connects a second, and what `work` returns.
fn flooded<T>(to: SocketAddr, work: impl FnOnce() -> T) -> (f64, T) {
    let (stop, established, target) = (AtomicBool::new(false), AtomicUsize::new(0), to.into());
    thread::scope(|scope| {
        scope.spawn(|| flood(&target, &stop, &established));
        let start = Instant::now();
        let outcome = work();
        let count = u32::try_from(established.load(Ordering::Relaxed)).unwrap();
        let rate = f64::from(count) / start.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        (rate, outcome)
    })
}

/// Returns the connects a second of a flood to a server that resets what it accepts, on this
/// machine as it is now.
fn rate_of_plain_server() -> f64 {
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    listener.bind(&SocketAddr::from((NODE, 0)).into()).unwrap();
    listener.listen(4_096).unwrap();
    let to = listener.local_addr().unwrap().as_socket().unwrap();
    // The thread serves until the test's process ends.
    thread::spawn(move || {
        while let Ok((accepted, _)) = listener.accept() {
            let _ends_anyway = accepted.set_linger(Some(Duration::ZERO));
        }
    });
    flooded(to, || thread::sleep(COMPARED)).0
}

/// Gives this thread, and what it starts from now on, priority over all other processes. The test
/// measures how fast a process answers, and other processes must not slow it down.
fn go_first() {
    let thread = nix::unistd::gettid().to_string();
    let told = Command::new("renice").args(["-n", "-20", "-p", &thread]).stdout(Stdio::null()).status();
    if !told.as_ref().is_ok_and(std::process::ExitStatus::success) {
        println!("the test measures beside other processes: renice: {told:?}");
    }
}

/// Returns the status of the answer, and how long the probe took without the round trip.
fn probe(to: SocketAddr) -> io::Result<(String, Duration)> {
    let start = Instant::now();
    let socket = socket(PROBING)?;
    socket.connect_timeout(&to.into(), ANSWER_WITHIN)?;
    let mut stream = TcpStream::from(socket);
    thread::sleep(ROUND_TRIP);
    stream.set_read_timeout(Some(ANSWER_WITHIN))?;
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let status = answer.split(' ').nth(1).unwrap_or_default().to_owned();
    Ok((status, start.elapsed().saturating_sub(ROUND_TRIP)))
}

#[test]
fn probes_are_answered_while_another_source_opens_ten_thousand_connections_a_second() {
    if !Uid::effective().is_root() {
        println!("skipped: needs root");
        return;
    }
    unshare(CloneFlags::CLONE_NEWNET).unwrap();
    ip(&["link", "set", "lo", "up"]);
    for address in [NODE, FLOODING, PROBING] {
        ip(&["address", "add", &format!("{address}/24"), "dev", "lo"]);
    }
    go_first();
    let plain = rate_of_plain_server();
    println!("{plain:.0} connects a second to a server that resets them");
    let _proxy = Proxy::start();
    for port in [HEALTHZ, HEALTH_CHECK_NODE_PORT] {
        let to = SocketAddr::from((NODE, port));
        let deadline = Instant::now() + STARTS_WITHIN;
        while !probe(to).is_ok_and(|(status, _)| status == "200") {
            assert!(Instant::now() < deadline, "{to} does not answer");
        }
        let (rate, answers) = flooded(to, || {
            let (start, mut answers) = (Instant::now(), Vec::new());
            while start.elapsed() < FLOOD {
                let next = Instant::now() + PROBE_PERIOD;
                answers.push(probe(to));
                thread::sleep(next.saturating_duration_since(Instant::now()));
            }
            answers
        });
        let is_good = |answer: &io::Result<(String, Duration)>| {
            answer.as_ref().is_ok_and(|(status, took)| status == "200" && *took < ANSWER_WITHIN)
        };
        let slowest = answers.iter().flatten().map(|(_, took)| *took).max().unwrap_or_default();
        let good = answers.iter().filter(|answer| is_good(answer)).count();
        println!(
            "{to}: {rate:.0} connects a second, {good} of {} probes, slowest {slowest:?}",
            answers.len()
        );
        let bad = answers.iter().find(|answer| !is_good(answer));
        assert!(bad.is_none(), "{to}: {} of {} probes, as {bad:?}", answers.len() - good, answers.len());
        assert!(
            rate >= LEAST * plain,
            "{to}: the flood reached {rate:.0} of {plain:.0} connects a second: nothing is shown"
        );
    }
}
