//! Tests of flows as people are shown them, read from the pins.

use proxy_common::{
    layout::{Flow, FlowKey, PROGRESS_ANSWERED, PROGRESS_CONFIRMED, PROTOCOL_TCP},
    port::Port,
};
use proxy_ctl::{
    modes::{
        Dataplane as _, FlowQuery, FlowSnapshot, FlowState, Programmed as _, ebpf::view::status::Pinned,
    },
    sys::{bpf::map::Map, proc::clock},
};

use crate::{
    desired::{endpoint, port, shared, with_node_port},
    sandbox::Sandbox,
};

type Flows = Map<FlowKey<[u8; 4]>, Flow<[u8; 4]>>;

const SECOND: u64 = 1_000_000_000;

/// Returns a flow from this port to a frontend, opened `age` seconds ago, for the service port with
/// this id.
fn flow(client_port: u16, frontend: ([u8; 4], u16), age: u64, service: u32) -> Flow<[u8; 4]> {
    let mut flow = Flow::default();
    (flow.client, flow.frontend, flow.backend) = ([192, 0, 2, 7], frontend.0, [10, 0, 0, 1]);
    flow.set_client_port(Port::new(client_port));
    flow.set_alias_port(Port::new(client_port));
    flow.set_frontend_port(Port::new(frontend.1));
    flow.set_backend_port(Port::new(8080));
    (flow.protocol, flow.service) = (PROTOCOL_TCP, service);
    flow.opened = clock::since_boot() - age * SECOND;
    flow.last_seen = flow.opened;
    flow
}

fn put(map: &Flows, flow: &Flow<[u8; 4]>) {
    for key in [flow.client_key(), flow.backend_key()] {
        map.set(&key, flow).unwrap();
    }
}

fn listed(sandbox: &Sandbox, limit: usize, wanted: &dyn Fn(&FlowSnapshot) -> bool) -> Vec<FlowSnapshot> {
    let pinned = Pinned::open(&sandbox.config.bpffs).unwrap();
    pinned.flows(&FlowQuery { wanted, limit }).unwrap().unwrap()
}

/// Returns the port of the client, the name of the service port, and the state of each flow.
fn shown(flows: &[FlowSnapshot]) -> Vec<(u16, String, FlowState)> {
    let service = |flow: &FlowSnapshot| flow.service.as_ref().map_or("-".into(), |name| name.to_string());
    flows.iter().map(|flow| (flow.client.unwrap().port(), service(flow), flow.state)).collect()
}

const WEB: ([u8; 4], u16) = ([10, 96, 0, 1], 80);

#[test]
fn each_flow_is_listed_once_with_its_service_port() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    dataplane
        .resync(&shared([
            port("web", "10.96.0.1", vec![endpoint("10.0.0.1", 8080)]),
            with_node_port(port("other", "10.96.0.2", vec![endpoint("10.0.0.1", 8080)]), 30_080),
        ]))
        .unwrap();
    let id = |name: &str| {
        sandbox.snapshot().services.iter().find(|one| one.name.service.name.as_ref() == name).unwrap().id
    };
    let (web, other) = (id("web"), id("other"));
    let (opening, established): (Flows, Flows) = (sandbox.map("opening_flows4"), sandbox.map("flows4"));

    let mut open_one = flow(1, WEB, 40, web);
    // This entry is as it was when the flow was established.
    put(&opening, &open_one);
    open_one.state.progress = PROGRESS_CONFIRMED;
    put(&established, &open_one);
    let mut answered = flow(2, ([10, 96, 0, 2], 80), 20, other);
    answered.state.progress = PROGRESS_ANSWERED;
    put(&opening, &answered);
    // The service port of this flow has left the frontend, and the id may be another's.
    put(&opening, &flow(3, ([10, 96, 0, 9], 80), 30, web));
    put(&opening, &flow(4, WEB, 10, web));

    let expected = [
        (4, "test/web:http".to_owned(), FlowState::Opening),
        (2, "test/other:http".to_owned(), FlowState::Answered),
        (3, "-".to_owned(), FlowState::Opening),
        (1, "test/web:http".to_owned(), FlowState::Established),
    ];
    let flows = listed(&sandbox, usize::MAX, &|_| true);
    assert_eq!(shown(&flows), expected);
    let age = flows[3].age.as_secs();
    assert!((40..70).contains(&age), "{age}");
    drop(dataplane);
    assert_eq!(shown(&listed(&sandbox, 2, &|_| true)), expected[..2], "without a controller");
    let of_web = |flow: &FlowSnapshot| flow.service.as_ref().is_some_and(|name| &*name.service.name == "web");
    assert_eq!(shown(&listed(&sandbox, 9, &of_web)), [expected[0].clone(), expected[3].clone()]);
}
