//! Which packets the flood limit lets open flows.

use super::*;

/// For each window.
const LIMIT: u32 = 10;
/// More than one CPU opens at once, after a pause of any length.
const FLOOD: u16 = 1_000;

/// A node with a service of its own behind each frontend, and one CPU.
struct Node {
    host: Host,
    scratch: Scratch<A>,
}

impl Node {
    fn new() -> Self {
        let mut host = Host { openings_per_window: LIMIT, ..Host::new() };
        host.maps.services.insert(2, host.maps.services[&1]);
        for protocol in [PROTOCOL_TCP, PROTOCOL_UDP] {
            let other = FrontendKey::of_address(OTHER_FRONTEND.0, OTHER_FRONTEND.1, protocol);
            host.maps.frontends.get_mut(&other).unwrap().service = 2;
        }
        Self { host, scratch: Scratch::default() }
    }

    fn arriving(&mut self, packet: &Packet<A>, origin: Origin) -> Result<(), Reason> {
        self.scratch.packet = *packet;
        decide_arriving(&self.host, &mut self.scratch, origin)
    }

    /// How many of the first packets of so many clients open flows; the limit must drop all others.
    fn flood(&mut self, protocol: u8, origin: Origin) -> u16 {
        let mut opened = 0;
        for port in 0..FLOOD {
            let client = ([203, 0, 113, 9], Port::new(1_024 + port));
            match self.arriving(&first(protocol, client, FRONTEND), origin) {
                Ok(()) => opened += 1,
                Err(reason) => assert_eq!(reason, Reason::ConnectionsLimited),
            }
        }
        opened
    }
}

fn first(protocol: u8, client: (A, Port), frontend: (A, Port)) -> Packet<A> {
    if protocol == PROTOCOL_UDP { datagram(client, frontend) } else { packet(client, frontend, TCP_SYN) }
}

#[rstest]
#[case::from_outside(Origin::Outside)]
#[case::from_a_pod(Origin::Workload)]
fn a_flood_opens_few_flows_and_leaves_room(
    #[case] origin: Origin,
    #[values(PROTOCOL_TCP, PROTOCOL_UDP)] protocol: u8,
) {
    let mut node = Node::new();
    let opened = node.flood(protocol, origin);
    assert!(opened < FLOOD / 2, "{opened}");
    let of_flow = first(protocol, ([203, 0, 113, 9], Port::new(1_024)), FRONTEND);
    assert_eq!(node.arriving(&of_flow, origin), Ok(()), "a flow that is there");
    assert_eq!(node.arriving(&first(protocol, CLIENT, OTHER_FRONTEND), origin), Ok(()), "another service");
    assert_eq!(node.host.entries(Stage::Opening), 2 * usize::from(opened + 1));
    node.host.wait(SECOND);
    assert_eq!(node.arriving(&first(protocol, CLIENT, FRONTEND), origin), Ok(()), "a second later");
}

#[test]
fn no_limit() {
    let mut node = Node::new();
    node.host.openings_per_window = 0;
    assert_eq!(node.flood(PROTOCOL_TCP, Origin::Outside), FLOOD);
}

/// What would not open a flow in any case is not counted.
#[rstest]
#[case::to_no_service(([10, 96, 0, 9], Port::new(80)), Reason::NotAService)]
#[case::from_a_source_that_is_not_allowed(OTHER_FRONTEND, Reason::SourceNotAllowed)]
fn what_opens_no_flow_takes_no_room(#[case] dialled: (A, Port), #[case] expected: Reason) {
    let mut node = Node::new();
    for frontend in node.host.maps.frontends.values_mut().filter(|frontend| frontend.service == 2) {
        frontend.flags |= FRONTEND_SOURCE_RANGES;
    }
    let alone = node.flood(PROTOCOL_TCP, Origin::Outside);
    let mut node = Node { host: node.host, scratch: Scratch::default() };
    node.host.flows.borrow_mut().clear();
    node.host.openings.borrow_mut().clear();
    for port in 0..FLOOD {
        let stray = packet(([203, 0, 113, 8], Port::new(1_024 + port)), dialled, TCP_SYN);
        assert_eq!(node.arriving(&stray, Origin::Outside), Err(expected));
    }
    assert_eq!(node.flood(PROTOCOL_TCP, Origin::Outside), alone);
}

/// Another node has chosen this one's backend, and sends it what it is flooded with.
#[test]
fn packets_in_others_are_counted_too() {
    let mut node = Node::new();
    node.host.maps.slots.values_mut().for_each(|slot| slot.flags = BACKEND_LOCAL);
    for frontend in node.host.maps.frontends.values_mut() {
        frontend.flags |= FRONTEND_DSR;
    }
    let mut outcomes = HashSet::new();
    for port in 0..FLOOD {
        node.scratch.packet = packet(([203, 0, 113, 9], Port::new(1_024 + port)), FRONTEND, TCP_SYN);
        node.scratch.outer_length = 20;
        node.scratch.tunnel = Ends { source: [192, 0, 2, 2], destination: BACKENDS[0], ..Ends::default() };
        outcomes.insert(arriving(&node.host, &mut node.scratch, Origin::Outside, &UnknownSockets));
    }
    assert_eq!(outcomes, HashSet::from([Ok(()), Err(Reason::ConnectionsLimited)]));
}

/// A process of the node floods nobody but itself.
#[test]
fn the_node_is_not_limited() {
    let mut node = Node::new();
    for port in 0..FLOOD {
        node.scratch.packet = packet((NODE, Port::new(1_024 + port)), FRONTEND, TCP_SYN);
        assert_eq!(decide_leaving(&node.host, &mut node.scratch, true), Ok(()));
    }
}

/// A backend answers forged datagrams too, so that each forged client could have a flow that goes
/// on for seconds.
#[test]
fn datagrams_of_forged_clients_leave_room_for_connections() {
    const MOST: u32 = 100;
    const CLIENTS: u16 = 200;
    let host = Host { most_unproven_entries: MOST, ..Host::new() };
    let clients = || (1..=CLIENTS).map(|port| (CLIENT.0, Port::new(port)));
    for client in clients() {
        host.arriving(&datagram(client, FRONTEND), Origin::Workload).unwrap();
    }
    host.wait(SUSTAINED_AFTER);
    for client in clients() {
        let backend = (host.flow_of(Stage::Opening, &datagram(client, FRONTEND)).backend, PORT);
        host.leaving(&datagram(backend, client)).unwrap();
        for _ in 0..2 {
            host.arriving(&datagram(client, FRONTEND), Origin::Workload).unwrap();
        }
    }
    assert_eq!(host.entries(Stage::Established), MOST as usize);
    // Each of them is tried once.
    assert_eq!(host.counted(Reason::FlowsFull), u32::from(CLIENTS) - MOST / 2);
    establish_one(&host, Origin::Workload);
    assert_eq!(host.entries(Stage::Established), MOST as usize + 2);
    // The first ones are silent for so long that they are collected.
    let first = datagram((CLIENT.0, Port::new(1)), FRONTEND);
    let flow = host.flow_of(Stage::Established, &first);
    collect::remove_if(&host, &flow, |_| true).unwrap();
    host.wait(REFRESH_AFTER);
    host.arriving(&datagram((CLIENT.0, Port::new(CLIENTS)), FRONTEND), Origin::Workload).unwrap();
    assert_eq!(host.entries(Stage::Established), MOST as usize + 2);
    let counted = host.established_and_counted()[&unproven_entries::<A>()];
    assert_eq!(counted, (i64::from(MOST), i64::from(MOST)));
}
