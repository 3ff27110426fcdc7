//! XDP decides about a packet as the two hooks do that it passes on its way through the stack,
//! whichever way other packets of its flow take.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// A forwarder that sends packets where its routes lead.
#[derive(Default)]
struct Routes {
    leaves: bool,
    hop: NextHop,
    length: u32,
    lookups: Cell<u32>,
}

impl Forwarder<V4> for Routes {
    fn packet_length(&self, _: &Scratch<A>) -> u32 {
        self.length
    }

    fn look_up(&self, scratch: &mut Scratch<A>) -> bool {
        self.lookups.set(self.lookups.get() + 1);
        scratch.next_hop = self.hop;
        true
    }

    fn can_send(&self, _: &Scratch<A>) -> bool {
        self.leaves
    }
}

/// What happens to one packet, or to none.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// Of the client with this port; offset of its sequence number.
    Client(u16, u8, u32),
    /// Of the backend, to the source that the node gave the client of this port.
    Backend(u16, u8, u32),
    Seconds(u64),
    /// An endpoint goes, and new flows go to the other.
    EndpointGone,
}

fn event() -> impl Strategy<Value = Event> {
    let flags = prop::sample::select(vec![
        TCP_SYN,
        TCP_SYN | TCP_ACK,
        TCP_ACK,
        TCP_ACK,
        TCP_FIN | TCP_ACK,
        TCP_RST,
        TCP_RST | TCP_ACK,
    ]);
    let port = 40_000u16..40_002;
    prop_oneof![
        5 => (port.clone(), flags.clone(), 0u32..3).prop_map(|(p, f, n)| Event::Client(p, f, n)),
        5 => (port, flags, 0u32..3).prop_map(|(p, f, n)| Event::Backend(p, f, n)),
        1 => prop::sample::select(vec![2u64, 70]).prop_map(Event::Seconds),
        1 => Just(Event::EndpointGone),
    ]
}

const POD_INTERFACE: u32 = 7;
const TO_POD: NextHop =
    NextHop { destination: [1; 6], source: [2; 6], interface: POD_INTERFACE, longest: 1_500 };

/// A node, and the sources that it has given to clients.
struct Node {
    host: Host,
    sources: BTreeMap<u16, ((A, Port), A)>,
    has_backends: bool,
}

/// What leaves the node: a packet's ends, and those of the packet that it is in, if any.
type Left = (Rewrite<A>, Option<Ends<A>>);

impl Node {
    fn new() -> Self {
        Self { host: Host::new(), sources: BTreeMap::new(), has_backends: false }
    }

    /// Backends answer clients themselves.
    fn with_direct_return(encapsulation: u16) -> Self {
        let mut node = Self::new();
        node.host.encapsulation = encapsulation;
        for frontend in node.host.maps.frontends.values_mut() {
            frontend.flags |= FRONTEND_DSR;
        }
        node
    }

    /// All backends are here.
    fn with_local_backends() -> Self {
        let mut node = Self { has_backends: true, ..Self::new() };
        for slot in node.host.maps.slots.values_mut() {
            *slot = Slot4::new(slot.address(), slot.port(), slot.backend(), BACKEND_LOCAL);
        }
        node
    }

    fn packet(&self, protocol: u8, event: Event) -> Option<Packet<A>> {
        let (mut packet, offset) = match event {
            Event::Client(port, flags, offset) => {
                (packet((CLIENT.0, Port::new(port)), FRONTEND, flags), offset)
            }
            Event::Backend(port, flags, offset) => {
                let (source, backend) = *self.sources.get(&port)?;
                (answer((backend, PORT), source, flags), offset)
            }
            Event::Seconds(_) | Event::EndpointGone => return None,
        };
        packet.protocol = protocol;
        if protocol == PROTOCOL_UDP {
            packet.segment = Segment::default();
        } else {
            packet.segment.sequence = packet.segment.sequence.wrapping_add(offset);
            packet.segment.next = packet.segment.next.wrapping_add(offset);
        }
        Some(packet)
    }

    fn origin(&self, packet: &Packet<A>) -> Origin {
        if self.has_backends && BACKENDS.contains(&packet.source) {
            Origin::Workload
        } else {
            Origin::Outside
        }
    }

    /// By the stack.
    fn through_the_stack(&self, packet: &Packet<A>) -> Result<Left, Reason> {
        let mut scratch = Scratch { packet: *packet, interface: POD_INTERFACE, ..Scratch::default() };
        let entered = decide_arriving(&self.host, &mut scratch, self.origin(packet));
        let entered = if scratch.action.then == Then::SkipStack { Err(Reason::NotAService) } else { entered };
        let entered = entered.map(|()| scratch.action.rewrite);
        let inside = entered.map_or(*packet, |entered| rewritten(packet, entered));
        let mut scratch = Scratch { packet: inside, ..Scratch::default() };
        match (entered, decide_leaving(&self.host, &mut scratch, false)) {
            (Ok(entered), Err(Reason::NotAService)) => return Ok((entered, None)),
            (Err(Reason::NotAService), Ok(())) => return Ok(left(&scratch)),
            (entered, leaving) => (entered?, leaving?),
        };
        let entered = entered?;
        if scratch.action.then == Then::Encapsulate {
            encapsulating(&self.host, &mut scratch)?;
        }
        let (left, tunnel) = left(&scratch);
        Ok((Rewrite { service: entered.service.min(left.service), ..left }, tunnel))
    }

    /// `leaves`: XDP can send it where the stack would; otherwise the stack sends it.
    fn forward(&self, packet: &Packet<A>, leaves: bool) -> Result<Left, Reason> {
        let mut scratch = Scratch { packet: *packet, ..Scratch::default() };
        let routes = Routes { leaves, hop: TO_POD, length: 60, ..Routes::default() };
        let decided = forward(&self.host, &mut scratch, &routes);
        assert_eq!(scratch.packet, *packet, "it is not changed");
        match decided {
            Ok(()) => Ok(left(&scratch)),
            Err(_) => self.through_the_stack(packet),
        }
    }

    fn learn(&mut self, event: Event, outcome: &Result<Left, Reason>) {
        if let (Event::Client(port, ..), Ok((left, None))) = (event, outcome) {
            self.sources.insert(port, ((left.source, left.source_port), left.destination));
        }
    }

    fn pass(&mut self, event: Event) {
        match event {
            Event::Seconds(seconds) => self.host.wait(seconds * SECOND),
            Event::EndpointGone => {
                self.host.maps.backends.remove(&1);
                self.host.maps.slots.insert(0, Slot4::new(BACKENDS[1], PORT, 2, 0));
                self.host.epoch.set(self.host.epoch.get() + 1);
            }
            Event::Client(..) | Event::Backend(..) => {}
        }
    }

    /// All but times, of which each look at the clock is another.
    fn entries(&self) -> BTreeMap<String, String> {
        let flows = self.host.flows.borrow();
        let entries = flows.iter().map(|(key, flow)| {
            let mut flow = flow.get();
            // A flow to a pod that the stack has had a packet of is left to it.
            flow.forward_token = (flow.is_forwardable() && !self.has_backends).into();
            (flow.opened, flow.last_seen, flow.next_hop) = (0, 0, CachedHop::default());
            (format!("{key:?}"), format!("{flow:?}"))
        });
        entries.collect()
    }
}

fn left(scratch: &Scratch<A>) -> Left {
    let Scratch { action, tunnel, .. } = scratch;
    (action.rewrite, (action.then == Then::Encapsulate).then_some(*tunnel))
}

fn node() -> impl Strategy<Value = fn() -> Node> {
    prop::sample::select(vec![
        Node::new as fn() -> Node,
        || Node::with_direct_return(ENCAPSULATION_IP),
        || Node::with_direct_return(ENCAPSULATION_GENEVE),
        Node::with_local_backends,
    ])
}

proptest! {
    #[test]
    fn both_ways_are_one(
        node in node(),
        is_tcp: bool,
        resets_gone: bool,
        events in prop::collection::vec((event(), any::<bool>()), 1..24),
    ) {
        let protocol = if is_tcp { PROTOCOL_TCP } else { PROTOCOL_UDP };
        let (mut stack, mut xdp) = (node(), node());
        (stack.host.resets_gone, xdp.host.resets_gone) = (resets_gone, resets_gone);
        for (event, leaves) in events {
            stack.pass(event);
            xdp.pass(event);
            let Some(packet) = stack.packet(protocol, event) else { continue };
            let by_stack = stack.through_the_stack(&packet);
            let by_xdp = xdp.forward(&packet, leaves);
            prop_assert_eq!(&by_stack, &by_xdp, "{:?}, leaves: {}", event, leaves);
            stack.learn(event, &by_stack);
            xdp.learn(event, &by_xdp);
            prop_assert_eq!(stack.entries(), xdp.entries(), "after {:?}, leaves: {}", event, leaves);
            prop_assert_eq!(&*stack.host.connections.borrow(), &*xdp.host.connections.borrow());
        }
    }
}

/// One established flow, of which packets come.
#[rstest]
#[case::of_the_client(Event::Client(40_000, TCP_ACK, 0))]
#[case::of_the_backend(Event::Backend(40_000, TCP_ACK, 0))]
fn routes_are_asked_once_for_each_direction(#[case] event: Event) {
    let mut node = Node::new();
    let open = [
        Event::Client(40_000, TCP_SYN, 0),
        Event::Backend(40_000, TCP_SYN | TCP_ACK, 0),
        Event::Client(40_000, TCP_ACK, 0),
    ];
    for event in open {
        let packet = node.packet(PROTOCOL_TCP, event).unwrap();
        let outcome = node.through_the_stack(&packet);
        node.learn(event, &outcome);
    }
    let hop = |number| NextHop { destination: [number; 6], source: [9; 6], interface: 2, longest: 1_500 };
    let mut routes = Routes { leaves: true, hop: hop(1), length: 60, ..Routes::default() };
    let sends = |node: &Node, routes: &Routes, event| {
        let packet = node.packet(PROTOCOL_TCP, event).unwrap();
        let mut scratch = Scratch { packet, ..Scratch::default() };
        assert_eq!(forward(&node.host, &mut scratch, routes), Ok(()));
        (scratch.next_hop.destination[0], routes.lookups.get())
    };
    assert_eq!(sends(&node, &routes, event), (1, 1));
    // The other direction goes elsewhere.
    let is_clients = matches!(event, Event::Client(..));
    let opposite =
        if is_clients { Event::Backend(40_000, TCP_ACK, 0) } else { Event::Client(40_000, TCP_ACK, 0) };
    assert_eq!(sends(&node, &Routes { leaves: true, hop: hop(5), ..Routes::default() }, opposite), (5, 1));
    routes.hop = hop(2);
    assert_eq!(sends(&node, &routes, event), (1, 1), "known");
    routes.length = 1_501;
    assert_eq!(sends(&node, &routes, event), (2, 2), "longer than what goes there");
    (routes.length, routes.hop) = (60, hop(3));
    assert_eq!(sends(&node, &routes, event), (2, 2), "known");
    node.host.route_epoch.set(1);
    assert_eq!(sends(&node, &routes, event), (3, 3), "another epoch");
    routes.hop = hop(4);
    node.host.wait(2 * SECOND);
    assert_eq!(sends(&node, &routes, event), (4, 4), "two seconds later");
    routes.leaves = false;
    let packet = node.packet(PROTOCOL_TCP, event).unwrap();
    let mut scratch = Scratch { packet, ..Scratch::default() };
    assert_eq!(forward(&node.host, &mut scratch, &routes), Err(Reason::NotAService), "it cannot be sent");
}

/// Another flow with the same ends does not go where the last one went.
#[test]
fn a_flow_begins_without_a_next_hop() {
    let node = Node::new();
    let mut scratch = Scratch::default();
    scratch.flow.next_hop = CachedHop { words: [7; 3] };
    scratch.packet = node.packet(PROTOCOL_TCP, Event::Client(40_000, TCP_SYN, 0)).unwrap();
    arriving(&node.host, &mut scratch, Origin::Outside, &UnknownSockets).unwrap();
    assert!(node.host.flows.borrow().values().all(|flow| flow.get().next_hop == CachedHop::default()));
}

/// A first packet that the stack has dropped between the hooks, as one that came by the wrong interface, opens no way around the stack.
#[rstest]
#[case::to_backends_that_return_directly(Node::with_direct_return(ENCAPSULATION_IP))]
#[case::to_backends_that_return_directly_by_geneve(Node::with_direct_return(ENCAPSULATION_GENEVE))]
#[case::to_backends_of_this_node(Node::with_local_backends())]
fn the_stack_sees_a_flow_first(#[case] mut node: Node) {
    let packet = |node: &Node, flags| node.packet(PROTOCOL_TCP, client(flags)).unwrap();
    let decides = |node: &Node, flags| {
        let mut scratch = Scratch { packet: packet(node, flags), ..Scratch::default() };
        forward(&node.host, &mut scratch, &Routes { leaves: true, ..Routes::default() })
            .map(|()| left(&scratch))
    };
    node.host.arriving(&packet(&node, TCP_SYN), Origin::Outside).unwrap();
    assert_eq!(decides(&node, TCP_ACK), Err(Reason::NotAService), "nothing has left");
    let outcome = node.through_the_stack(&packet(&node, TCP_SYN));
    node.learn(client(TCP_SYN), &outcome);
    if let Some(answer) = node.packet(PROTOCOL_TCP, backend(TCP_SYN | TCP_ACK)) {
        assert_eq!(decides(&node, TCP_ACK), Err(Reason::NotAService), "no answer has left");
        node.through_the_stack(&answer).unwrap();
    }
    let by_xdp = decides(&node, TCP_ACK);
    assert_eq!(by_xdp, node.through_the_stack(&packet(&node, TCP_ACK)));
    assert!(by_xdp.is_ok(), "{by_xdp:?}");
    assert_eq!(decides(&node, TCP_SYN), Err(Reason::NotAService), "it may begin another flow");
}

const fn client(flags: u8) -> Event {
    Event::Client(40_000, flags, 0)
}

const fn backend(flags: u8) -> Event {
    Event::Backend(40_000, flags, 0)
}

/// Where XDP has not sent them on.
#[rstest]
#[case::of_the_client(Node::new(), client(TCP_ACK), Origin::Outside, Then::SkipStack)]
#[case::of_the_backend(Node::new(), backend(TCP_ACK), Origin::Outside, Then::SkipStack)]
#[case::that_answer_the_first(Node::new(), backend(TCP_SYN | TCP_ACK), Origin::Outside, Then::SkipStack)]
#[case::that_end_it(Node::new(), client(TCP_FIN | TCP_ACK), Origin::Outside, Then::SkipStack)]
#[case::that_may_open_another(Node::new(), client(TCP_SYN), Origin::Outside, Then::Pass)]
#[case::of_a_pod(Node::new(), client(TCP_ACK), Origin::Workload, Then::Pass)]
#[case::to_endpoints_of_the_node(Node::with_local_backends(), client(TCP_ACK), Origin::Outside, Then::Pass)]
#[case::to_backends_that_return_directly(
    Node::with_direct_return(ENCAPSULATION_IP),
    client(TCP_ACK),
    Origin::Outside,
    Then::Pass
)]
fn packets_of_a_flow_that_the_stack_has_let_out_skip_it(
    #[case] mut node: Node,
    #[case] event: Event,
    #[case] origin: Origin,
    #[case] expected: Then,
    #[values(false, true)] is_established: bool,
) {
    let decides = |node: &Node| {
        let packet = node.packet(PROTOCOL_TCP, event).unwrap();
        let mut scratch = Scratch { packet, ..Scratch::default() };
        let _outcome = decide_arriving(&node.host, &mut scratch, origin);
        scratch.action.then
    };
    node.host.may_skip_stack = true;
    let opening = [client(TCP_SYN), backend(TCP_SYN | TCP_ACK), client(TCP_ACK)];
    for event in opening.into_iter().take(if is_established { 3 } else { 1 }) {
        let Some(packet) = node.packet(PROTOCOL_TCP, event) else { continue };
        let outcome = node.through_the_stack(&packet);
        node.learn(event, &outcome);
    }
    assert_eq!(decides(&node), expected);
    node.host.may_skip_stack = false;
    assert_eq!(decides(&node), Then::Pass, "the stack has all packets");
}

#[test]
fn the_stack_has_all_packets_until_it_has_let_one_out() {
    let mut node = Node::new();
    node.host.may_skip_stack = true;
    let packet = |flags| node.packet(PROTOCOL_TCP, client(flags)).unwrap();
    node.host.arriving(&packet(TCP_SYN), Origin::Outside).unwrap();
    let mut scratch = Scratch { packet: packet(TCP_ACK), ..Scratch::default() };
    assert_eq!(decide_arriving(&node.host, &mut scratch, Origin::Outside), Ok(()));
    assert_eq!(scratch.action.then, Then::Pass);
}

/// A pod of this node that has answered through the stack.
fn node_that_has_answered(protocol: u8) -> Node {
    let mut node = Node::with_local_backends();
    for event in [client(TCP_SYN), backend(TCP_SYN | TCP_ACK)] {
        let outcome = node.through_the_stack(&node.packet(protocol, event).unwrap());
        node.learn(event, &outcome);
    }
    node
}

/// By XDP, to the pod's interface.
fn sends(node: &Node, protocol: u8) -> Result<(), Reason> {
    let packet = node.packet(protocol, client(TCP_ACK)).unwrap();
    let mut scratch = Scratch { packet, ..Scratch::default() };
    forward(&node.host, &mut scratch, &Routes { leaves: true, hop: TO_POD, ..Routes::default() })
}

fn answers(node: &Node, protocol: u8, origin: Origin, interface: u32) -> Then {
    let packet = node.packet(protocol, backend(TCP_ACK)).unwrap();
    let mut scratch = Scratch { packet, interface, ..Scratch::default() };
    let _what_the_stack_gets = decide_arriving(&node.host, &mut scratch, origin);
    scratch.action.then
}

/// Connection tracking sees both directions or none.
#[rstest]
fn a_pods_answers_take_the_way_of_its_clients_packets(#[values(PROTOCOL_TCP, PROTOCOL_UDP)] protocol: u8) {
    let node = node_that_has_answered(protocol);
    let answer = |origin, interface| answers(&node, protocol, origin, interface);
    assert_eq!(answer(Origin::Workload, POD_INTERFACE), Then::Pass);
    assert_eq!(sends(&node, protocol), Ok(()));
    assert_eq!(answer(Origin::Workload, POD_INTERFACE), Then::SkipStack);
    assert_eq!(answer(Origin::Outside, POD_INTERFACE), Then::Pass, "anybody can have sent it");
    assert_eq!(answer(Origin::Workload, POD_INTERFACE + 1), Then::Pass, "another pod has sent it");
    // Connection tracking makes none for an error, and would take the SYN for a new connection.
    let mut error = node.packet(protocol, client(TCP_ACK)).unwrap();
    error.headers.icmp = 1;
    node.through_the_stack(&error).unwrap();
    if protocol == PROTOCOL_TCP {
        node.through_the_stack(&node.packet(protocol, client(TCP_SYN)).unwrap()).unwrap();
    }
    assert_eq!(answer(Origin::Workload, POD_INTERFACE), Then::SkipStack);
    node.through_the_stack(&node.packet(protocol, client(TCP_ACK)).unwrap()).unwrap();
    assert_eq!(answer(Origin::Workload, POD_INTERFACE), Then::Pass);
    assert_eq!(sends(&node, protocol), Err(Reason::NotAService), "the stack has had one");
}

/// XDP does not look for the way of each of its packets.
#[test]
fn a_flow_without_way_to_its_pod_is_left_to_the_stack() {
    let node = node_that_has_answered(PROTOCOL_TCP);
    let packet = node.packet(PROTOCOL_TCP, client(TCP_ACK)).unwrap();
    let routes = Routes { leaves: false, hop: TO_POD, ..Routes::default() };
    for _ in 0..2 {
        let mut scratch = Scratch { packet, ..Scratch::default() };
        assert_eq!(forward(&node.host, &mut scratch, &routes), Err(Reason::NotAService));
        node.through_the_stack(&packet).unwrap();
    }
    assert_eq!(routes.lookups.get(), 1);
}

/// Another CPU has copied the entry to the other map before it was stamped.
#[rstest]
fn a_lost_stamp_comes_back(#[values(PROTOCOL_TCP, PROTOCOL_UDP)] protocol: u8) {
    let node = node_that_has_answered(protocol);
    assert_eq!(sends(&node, protocol), Ok(()));
    let key = node.packet(protocol, backend(TCP_ACK)).unwrap().key();
    for ((_, of), flow) in node.host.flows.borrow().iter() {
        if *of == key {
            let mut unstamped = flow.get();
            unstamped.next_hop = CachedHop::default();
            flow.set(unstamped);
        }
    }
    assert_eq!(answers(&node, protocol, Origin::Workload, POD_INTERFACE), Then::Pass);
    node.host.wait(2 * SECOND);
    assert_eq!(sends(&node, protocol), Ok(()));
    assert_eq!(answers(&node, protocol, Origin::Workload, POD_INTERFACE), Then::SkipStack);
}

/// Its route does not lead to an uplink with XDP any more.
#[rstest]
fn an_answer_that_cannot_skip_the_stack_takes_its_flow_back(
    #[values(PROTOCOL_TCP, PROTOCOL_UDP)] protocol: u8,
) {
    let node = node_that_has_answered(protocol);
    assert_eq!(sends(&node, protocol), Ok(()));
    let mut scratch = Scratch {
        packet: node.packet(protocol, backend(TCP_ACK)).unwrap(),
        interface: POD_INTERFACE,
        ..Scratch::default()
    };
    assert_eq!(decide_arriving(&node.host, &mut scratch, Origin::Workload), Ok(()));
    assert_eq!(scratch.action.then, Then::SkipStack);
    cannot_skip_stack(&node.host, &mut scratch, true);
    assert_eq!(sends(&node, protocol), Ok(()), "only this one had no way");
    cannot_skip_stack(&node.host, &mut scratch, false);
    assert_eq!(sends(&node, protocol), Err(Reason::NotAService));
    assert_eq!(answers(&node, protocol, Origin::Workload, POD_INTERFACE), Then::Pass);
}

/// A pod's flow that is masqueraded, as the pod dials itself. The stack would drop what comes from outside with the pod's address.
#[test]
fn packets_from_outside_are_of_no_pods_flow() {
    let node = Node::new();
    let pod = (BACKENDS[0], Port::new(40_000));
    let syn = packet(pod, FRONTEND, TCP_SYN);
    let entered = node.host.arriving(&syn, Origin::Workload).unwrap();
    let mut leaves = Scratch { packet: rewritten(&syn, entered), ..Scratch::default() };
    assert_eq!(decide_leaving(&node.host, &mut leaves, false), Ok(()));
    assert_ne!(leaves.action.rewrite.source, pod.0, "it is masqueraded");
    let mut forged = Scratch { packet: packet(pod, FRONTEND, TCP_ACK), ..Scratch::default() };
    let outcome = forward(&node.host, &mut forged, &Routes { leaves: true, ..Routes::default() });
    assert_eq!(outcome, Err(Reason::NotAService));
}
