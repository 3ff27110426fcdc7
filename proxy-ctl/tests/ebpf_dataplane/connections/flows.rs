//! Tests that an expired flow leaves the maps with all of its entries, and that other flows stay
//! whole.

use std::time::Duration;

use proxy_common::{
    flow::{self, FlowLifetimes},
    layout::{
        FIN_ACKNOWLEDGED, FLOW_HOST_CONNECTION, FLOW_KEYED_BY_ORIGIN, FLOW_MASQUERADE, FLOW_OVERLAPPING,
        Flow, FlowKey, PROGRESS_CONFIRMED, PROTOCOL_TCP, RESET_CONFIRMED,
    },
    port::Port,
};
use proxy_ctl::{
    model::node::Host,
    modes::{Dataplane, Programmed as _},
    sys::{bpf::map::Map, proc::clock},
};
use rstest::rstest;

use crate::sandbox::{Sandbox, TakeHost as _};

type Flows = Map<FlowKey<[u8; 4]>, Flow<[u8; 4]>>;

/// Returns a masqueraded flow that was reset, which is kept for ten seconds.
fn reset(client_port: Port, last_seen: u64) -> Flow<[u8; 4]> {
    let mut flow = Flow::default();
    (flow.client, flow.frontend) = ([192, 0, 2, 7], [10, 96, 0, 1]);
    (flow.backend, flow.masquerade) = ([10, 0, 0, 1], [192, 0, 2, 1]);
    flow.set_client_port(client_port);
    flow.set_alias_port(client_port);
    flow.set_frontend_port(Port::new(80));
    flow.set_backend_port(Port::new(8080));
    flow.set_masquerade_port(client_port);
    flow.flags = FLOW_MASQUERADE;
    (flow.state.progress, flow.state.reset) = (PROGRESS_CONFIRMED, RESET_CONFIRMED);
    flow.protocol = PROTOCOL_TCP;
    flow.last_seen = last_seen;
    flow
}

fn keys(flow: &Flow<[u8; 4]>) -> [FlowKey<[u8; 4]>; 3] {
    [flow.client_key(), flow.backend_key(), flow.masquerade_key()]
}

#[test]
fn all_entries_of_a_flow_expire_together() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    let (opening, established): (Flows, Flows) = (sandbox.map("opening_flows4"), sandbox.map("flows4"));
    let now = clock::since_boot();
    let (kept, long_ago) = (Port::new(2_000), now - 15_000_000_000);
    let (expired, alive) = (reset(Port::new(1_000), long_ago), reset(kept, long_ago));
    for key in keys(&expired) {
        established.set(&key, &expired).unwrap();
    }
    // A race has left this entry in the other map.
    opening.set(&expired.client_key(), &expired).unwrap();
    for key in keys(&alive) {
        established.set(&key, &alive).unwrap();
    }
    // One entry of this flow was seen just now.
    established.set(&alive.backend_key(), &reset(kept, now)).unwrap();

    dataplane.collect_garbage().unwrap();
    let mut left: Vec<_> =
        established.read_all().unwrap().into_iter().map(|(_, flow)| flow.client_port()).collect();
    left.sort_unstable();
    assert_eq!(left, [kept; 3]);
    assert!(opening.read_all().unwrap().is_empty());
    // The usage that is reported is what the next walk finds.
    dataplane.collect_garbage().unwrap();
    let usage = dataplane.usage().unwrap();
    assert_eq!(usage.maps.iter().find(|map| map.name == "flows4").unwrap().used, 3);
}

#[test]
fn flows_expire_as_the_configuration_says() {
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    let established: Flows = sandbox.map("flows4");
    let mut half_closed = reset(Port::new(1_000), clock::since_boot() - 15_000_000_000);
    (half_closed.state.reset, half_closed.state.client_fin) = (0, FIN_ACKNOWLEDGED);
    for key in keys(&half_closed) {
        established.set(&key, &half_closed).unwrap();
    }
    for (tcp_close_wait, left) in [(60, 3), (10, 0)] {
        let tcp_close_wait = Duration::from_secs(tcp_close_wait);
        let flow_lifetimes = FlowLifetimes { tcp_close_wait, ..FlowLifetimes::default() };
        dataplane.take_host(&Host { flow_lifetimes, ..Host::default() }).unwrap();
        dataplane.collect_garbage().unwrap();
        assert_eq!(established.read_all().unwrap().len(), left, "{tcp_close_wait:?}");
    }
}

/// A port is forgotten after its last flow, and not before.
#[rstest]
#[case::keyed_by_origin(FLOW_KEYED_BY_ORIGIN)]
#[case::overlapping(FLOW_OVERLAPPING)]
#[case::host_connection(FLOW_HOST_CONNECTION | FLOW_OVERLAPPING)]
fn a_port_is_remapped_as_long_as_a_flow_needs_it(#[case] flags: u32) {
    const GENERATION: u32 = 0;
    let Some((sandbox, mut dataplane)) = Sandbox::opened() else { return };
    let remapped: Map<u32, u32> = sandbox.map("remapped_ports");
    let opening: Flows = sandbox.map("opening_flows4");
    let mut flow = reset(Port::new(1_000), clock::since_boot());
    (flow.flags, flow.state.reset) = (flags, 0);
    opening.set(&flow.client_key(), &flow).unwrap();
    // A former version has set both to 1.
    for port in [1_000, 2_000] {
        remapped.set(&port, &1).unwrap();
    }
    let is_remapped = |port: u32| {
        let generation = remapped.get(&GENERATION).unwrap().unwrap().max(1);
        flow::is_remapped(remapped.get(&port).unwrap().unwrap(), generation)
    };
    assert!(is_remapped(1_000) && is_remapped(2_000));
    // Empty maps are looked at in every tenth call.
    for _ in 0..100 {
        dataplane.collect_garbage().unwrap();
        assert!(is_remapped(1_000));
    }
    assert!(!is_remapped(2_000));
    opening.remove(&flow.client_key()).unwrap();
    (0..100).for_each(|_| dataplane.collect_garbage().unwrap());
    assert!(!is_remapped(1_000));
}
