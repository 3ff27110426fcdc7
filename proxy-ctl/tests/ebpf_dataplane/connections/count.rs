//! Tests of the counts of connections by which new connections choose their backend.

use std::{
    io::{BufRead as _, BufReader, Read as _},
    process::{Child, Command, Stdio},
};

use proxy_common::{
    layout::{Connections, FLOW_COUNTED, Flow, FlowKey, PROTOCOL_TCP, RESET_CONFIRMED},
    port::Port,
};
use proxy_ctl::{
    model::{
        desired::{DesiredPort, Endpoint},
        node::Host,
        objects::Algorithm,
    },
    modes::Dataplane as _,
    sys::{bpf::map::Map, proc::clock},
};

use crate::{
    desired::{endpoint, port, shared},
    sandbox::{Sandbox, serve},
};

const CLUSTER_IP: &str = "10.96.0.1";

fn web(algorithm: Option<Algorithm>, endpoints: Vec<Endpoint>) -> DesiredPort {
    DesiredPort { algorithm, ..port("web", CLUSTER_IP, endpoints) }
}

/// Returns two servers, which answer with a letter each.
fn servers() -> Vec<Endpoint> {
    let mut servers = ["a", "b"].map(|text| endpoint("127.0.0.1", serve("127.0.0.1", text))).to_vec();
    servers.sort_unstable_by_key(|one| one.port);
    servers
}

/// Returns the connections of each backend, in the order of their ports.
fn connections(sandbox: &Sandbox) -> Vec<Option<u64>> {
    sandbox.snapshot().backends.iter().map(|backend| backend.connections).collect()
}

/// A process of the cgroup that holds connections to the Service until it is released.
struct Holder(Child);

impl Holder {
    /// Opens connections. The text has the letter that each was answered with.
    fn of(sandbox: &Sandbox, count: usize) -> (Self, String) {
        let dial = format!("exec {{fd}}<>/dev/tcp/{CLUSTER_IP}/80 && cat <&$fd");
        let script = format!(
            "echo $$ > {}/cgroup.procs && for _ in $(seq {count}); do {dial}; done && echo && read",
            sandbox.cgroup_path().display()
        );
        let mut command = Command::new("bash");
        command.arg("-c").arg(script).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut answers = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut answers).unwrap();
        (Self(child), answers.trim().to_owned())
    }

    fn let_go(mut self) {
        drop(self.0.stdin.take());
        self.0.stdout.as_mut().unwrap().read_to_end(&mut Vec::new()).unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn sockets_go_where_fewer_are_open() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    let servers = servers();
    dataplane.resync(&shared([web(None, servers.clone())])).unwrap();
    assert_eq!(connections(&sandbox), [None, None]);
    assert!(!sandbox.links().join("cgroup_sock_release").exists(), "a hook that nothing needs");
    // These connections are not counted. They are closed while others are counted.
    let (uncounted, _) = Holder::of(&sandbox, 6);
    dataplane.set_host(&Host { algorithm: Algorithm::LeastConnection, ..Host::default() }).unwrap();
    assert_eq!(connections(&sandbox), [Some(0), Some(0)]);
    // Before each pair of connections both servers have as many. The second connection of a pair
    // goes to the other server.
    let (first, answers) = Holder::of(&sandbox, 20);
    let pairs: Vec<_> = answers.as_bytes().chunks(2).collect();
    assert!(pairs.len() == 10 && pairs.iter().all(|pair| pair[0] != pair[1]), "{answers}");
    assert_eq!(connections(&sandbox), [Some(10), Some(10)]);
    uncounted.let_go();
    assert_eq!(connections(&sandbox), [Some(10), Some(10)]);
    // Another controller finds the open connections.
    drop(dataplane);
    let mut dataplane = sandbox.open();
    dataplane.resync(&shared([web(Some(Algorithm::LeastConnection), servers[..1].to_vec())])).unwrap();
    let (second, _) = Holder::of(&sandbox, 4);
    assert_eq!(connections(&sandbox), [Some(14)]);
    first.let_go();
    assert_eq!(connections(&sandbox), [Some(4)]);
    // An endpoint that comes back is a new backend, and begins with no connections.
    dataplane.resync(&shared([web(Some(Algorithm::LeastConnection), servers)])).unwrap();
    assert_eq!(connections(&sandbox), [Some(4), Some(0)]);
    let (third, answers) = Holder::of(&sandbox, 4);
    assert!(answers.bytes().all(|answer| answer == answers.as_bytes()[0]), "{answers}");
    assert_eq!(connections(&sandbox), [Some(4), Some(4)]);
    dataplane.set_host(&Host::default()).unwrap();
    // Connections are counted as long as they are open.
    dataplane.resync(&shared([web(Some(Algorithm::Random), Vec::new())])).unwrap();
    second.let_go();
    third.let_go();
    (0..20).for_each(|_| dataplane.collect_garbage().unwrap());
    let map: Map<u32, Connections> = sandbox.map("connections");
    assert_eq!(map.read_all().unwrap().len(), 0, "backends that are gone are counted");
}

/// The state is that after a start: nothing is counted yet, and the next connection is.
#[test]
fn a_restart_goes_on_counting_until_nothing_goes_by_it() {
    let Some(sandbox) = Sandbox::with_socket_storage() else { return };
    let mut dataplane = sandbox.open();
    let hook = sandbox.links().join("cgroup_sock_release");
    let servers = servers();
    let by = |algorithm| shared([web(Some(algorithm), servers.clone())]);
    dataplane.resync(&by(Algorithm::LeastConnection)).unwrap();
    drop(dataplane);
    let mut dataplane = sandbox.open();
    (0..20).for_each(|_| dataplane.collect_garbage().unwrap());
    let (first, _) = Holder::of(&sandbox, 4);
    first.let_go();
    assert_eq!(connections(&sandbox), [Some(0), Some(0)], "what ends before the first resync");
    dataplane.resync(&by(Algorithm::LeastConnection)).unwrap();
    (0..20).for_each(|_| dataplane.collect_garbage().unwrap());
    assert!(hook.exists());
    let (second, _) = Holder::of(&sandbox, 4);
    // From now on no Service chooses by connections, though some that were counted are open.
    dataplane.resync(&by(Algorithm::Random)).unwrap();
    (0..20).for_each(|_| dataplane.collect_garbage().unwrap());
    let map: Map<u32, Connections> = sandbox.map("connections");
    assert_eq!((hook.exists(), map.read_all().unwrap().len()), (false, 0));
    // Connections are counted again once a Service chooses by them again.
    dataplane.resync(&by(Algorithm::LeastConnection)).unwrap();
    assert!(hook.exists());
    let (third, _) = Holder::of(&sandbox, 2);
    (0..20).for_each(|_| dataplane.collect_garbage().unwrap());
    assert_eq!(connections(&sandbox), [Some(3), Some(3)]);
    second.let_go();
    third.let_go();
    assert_eq!(connections(&sandbox), [Some(0), Some(0)]);
}

fn flow(client_port: u16, backend: u32, last_seen: u64) -> Flow<[u8; 4]> {
    let mut flow = Flow::default();
    (flow.client, flow.frontend, flow.backend) = ([192, 0, 2, 7], [10, 96, 0, 1], [10, 0, 0, 1]);
    flow.set_client_port(Port::new(client_port));
    flow.set_alias_port(Port::new(client_port));
    flow.set_frontend_port(Port::new(80));
    flow.set_backend_port(Port::new(80));
    flow.protocol = PROTOCOL_TCP;
    flow.backend_id = backend;
    flow.flags = FLOW_COUNTED;
    flow.state.reset = RESET_CONFIRMED;
    flow.last_seen = last_seen;
    flow
}

#[test]
fn what_programs_do_not_see_end_is_counted_by_the_controller() {
    let Some(sandbox) = Sandbox::with_socket_storage() else { return };
    let mut dataplane = sandbox.open();
    let endpoints = vec![endpoint("10.0.0.1", 80), endpoint("10.0.0.2", 80)];
    dataplane.resync(&shared([web(Some(Algorithm::LeastConnection), endpoints)])).unwrap();
    let ids: Vec<u32> = sandbox.snapshot().backends.iter().map(|backend| backend.id).collect();
    let map: Map<u32, Connections> = sandbox.map("connections");
    let flows: Map<FlowKey<[u8; 4]>, Flow<[u8; 4]>> = sandbox.map("flows4");
    let now = clock::since_boot();
    for (port, last_seen) in [(1_000, now), (1_001, now), (1_002, now - 15_000_000_000)] {
        let flow = flow(port, ids[0], last_seen);
        flows.set(&flow.client_key(), &flow).unwrap();
        flows.set(&flow.backend_key(), &flow).unwrap();
    }
    map.set(&ids[0], &Connections { flows_opened: 8, flows_closed: 5, ..Connections::default() }).unwrap();
    assert_eq!(connections(&sandbox), [Some(3), Some(0)]);
    // One flow has expired.
    dataplane.collect_garbage().unwrap();
    assert_eq!(flows.read_all().unwrap().len(), 4);
    assert_eq!(connections(&sandbox), [Some(2), Some(0)]);
    // The counts are those after a crash between an event and its count: too high, and too low.
    let of_both = [
        Connections { flows_opened: 9, flows_closed: 8, sockets_opened: 7, sockets_closed: 3 },
        Connections { flows_opened: 5, flows_closed: 1, sockets_opened: 1, sockets_closed: 4 },
    ];
    for (id, counted) in ids.iter().zip(of_both) {
        map.set(id, &counted).unwrap();
    }
    // Flows are corrected at the next walk, sockets at every tenth call.
    (0..20).for_each(|_| dataplane.collect_garbage().unwrap());
    assert_eq!(connections(&sandbox), [Some(2), Some(0)]);
    // Nothing is counted twice: one more of each is one more.
    map.set(&ids[1], &Connections { flows_opened: 6, sockets_opened: 2, ..of_both[1] }).unwrap();
    assert_eq!(connections(&sandbox), [Some(2), Some(2)]);
}
