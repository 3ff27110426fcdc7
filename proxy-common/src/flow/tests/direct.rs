//! Direct server return: at the node that the client dials, and at the backend's.

use super::*;

const NODE_PORT: (A, Port) = (NODE, Port::new(30_080));
/// Of the node that the client dials, as the backend's node sees it.
const OTHER_NODE: A = [192, 0, 2, 2];
const OTHERS_NODE_PORT: (A, Port) = (OTHER_NODE, Port::new(30_080));
const BACKEND: A = BACKENDS[0];

/// Both frontends and a node port have the flag. `local`: the backends are this node's.
fn node(local: bool) -> Host {
    let mut host = Host::new();
    for slot in host.tables.slots.values_mut() {
        slot.flags = if local { BACKEND_LOCAL } else { 0 };
    }
    for protocol in [PROTOCOL_TCP, PROTOCOL_UDP] {
        let key = FrontendKey::of_node_port(NODE_PORT.1, protocol);
        host.tables.frontends.insert(key, Frontend { service: 1, flags: 0 });
    }
    for frontend in host.tables.frontends.values_mut() {
        frontend.flags = FRONTEND_EXTERNAL | FRONTEND_DSR;
    }
    host.tables.node_addresses.insert(NODE, NodeAddress::default());
    host
}

/// What becomes of a packet that leaves.
fn left(host: &Host, packet: &Packet<A>) -> Result<(Packet<A>, Ends<A>), Reason> {
    let mut scratch = Scratch { packet: *packet, interface: 1, ..Scratch::default() };
    decide_leaving(host, &mut scratch, false)?;
    assert_eq!(scratch.action.then, Then::Encapsulate);
    encapsulating(host, &mut scratch)?;
    Ok((rewritten(packet, scratch.action.rewrite), scratch.tunnel))
}

/// A client's packet goes through both hooks of the node that it dials.
fn sent_on(host: &Host, packet: &Packet<A>) -> Result<(Packet<A>, Ends<A>), Reason> {
    let inside = rewritten(packet, host.arriving(packet, Origin::Outside)?);
    left(host, &inside)
}

/// It comes in another packet.
fn unpacked(host: &Host, packet: &Packet<A>, tunnel: Ends<A>) -> Result<Packet<A>, Reason> {
    let mut scratch = Scratch { packet: *packet, outer_length: 20, tunnel, ..Scratch::default() };
    arriving(host, &mut scratch, Origin::Outside, &UnknownSockets)?;
    Ok(rewritten(packet, scratch.action.rewrite))
}

fn from_other_node() -> Ends<A> {
    Ends { source: OTHER_NODE, destination: BACKEND, source_port: Port::NONE }
}

fn of_protocol(protocol: u8, packet: Packet<A>) -> Packet<A> {
    if protocol == PROTOCOL_UDP { Packet { protocol, segment: Segment::default(), ..packet } } else { packet }
}

/// The client's packet leaves as it came, in one from the address that it has dialled, or else from the node's.
#[rstest]
#[case::frontend(FRONTEND, [192, 0, 2, 9])]
#[case::node_port(NODE_PORT, NODE)]
fn packets_are_sent_on_as_they_are(
    #[case] frontend: (A, Port),
    #[case] from: A,
    #[values(PROTOCOL_TCP, PROTOCOL_UDP)] protocol: u8,
) {
    let host = node(false);
    host.masquerade.set([192, 0, 2, 9]);
    for flags in [TCP_SYN, TCP_ACK] {
        let packet = of_protocol(protocol, packet(CLIENT, frontend, flags));
        let ends = Ends { source: from, destination: BACKEND, source_port: Port::NONE };
        assert_eq!(sent_on(&host, &packet), Ok((packet, ends)));
    }
    assert_eq!(host.entries(Stage::Opening), 2);
    host.assert_whole();
}

/// A SYN that is not answered is followed by another connection's, and that one is established.
#[test]
fn a_second_syn_opens_a_connection() {
    const NEXT_ISN: u32 = 0x4000_0000;
    let host = node(false);
    let says = |segment| sent_on(&host, &numbered(CLIENT, FRONTEND, segment)).unwrap();
    sent_on(&host, &syn()).unwrap();
    host.wait(2 * REFRESH_AFTER);
    says(Segment::new(TCP_SYN, NEXT_ISN, 0, 0));
    for _ in 0..2 {
        says(Segment::new(TCP_ACK, NEXT_ISN + 1, 7, 0));
        host.wait(2 * REFRESH_AFTER);
    }
    assert_eq!(host.entries(Stage::Established), 2);
}

/// With Geneve a flow keeps to one port, which is none that flows have for sources of their own; flows differ in it, so that they are spread.
#[rstest]
fn ports_of_geneve(#[values(PROTOCOL_TCP, PROTOCOL_UDP)] protocol: u8) {
    const CLIENTS: u16 = 64;
    let host = Host { encapsulation: ENCAPSULATION_GENEVE, ..node(false) };
    let port_of = |packet: Packet<A>| sent_on(&host, &packet).unwrap().1.source_port.number();
    let mut ports = HashSet::new();
    for number in 0..CLIENTS {
        let of_flow = |flags| {
            let client = (CLIENT.0, Port::new(CLIENT.1.number() + number));
            of_protocol(protocol, packet(client, FRONTEND, flags))
        };
        let port = port_of(of_flow(TCP_SYN));
        assert!((32_768..49_152).contains(&port), "{port}");
        assert_eq!(port_of(of_flow(TCP_ACK)), port);
        let error = Headers { icmp: 20, ..Headers::default() };
        assert_eq!(port_of(Packet { headers: error, ..of_flow(TCP_ACK) }), port);
        ports.insert(port);
    }
    assert!(ports.len() > 60, "{} ports of {CLIENTS} flows", ports.len());
}

/// From outside, to port 6081 of a backend.
fn geneve() -> Packet<A> {
    datagram((OTHER_NODE, Port::new(40_000)), (BACKEND, Port::new(6081)))
}

/// Whatever it carries, who dials somebody by its own ends is not looked into.
#[rstest]
#[case::to_nobody(geneve(), true)]
#[case::another_port(Packet { destination_port: Port::new(6082), ..geneve() }, false)]
#[case::tcp(Packet { protocol: PROTOCOL_TCP, ..geneve() }, false)]
#[case::first_fragment(Packet { fragment: Fragment { part: Part::First, id: 7 }, ..geneve() }, false)]
#[case::error(Packet { headers: Headers { icmp: 20, ..Headers::default() }, ..geneve() }, false)]
#[case::to_a_frontend(Packet { destination: FRONTEND.0, ..geneve() }, false)]
#[case::to_an_address_for_cluster_ips(Packet { destination: CLUSTER_IP, ..geneve() }, false)]
#[case::of_a_flow(Packet { source: CLIENT.0, source_port: CLIENT.1, ..geneve() }, false)]
fn what_may_carry_a_packet(#[case] packet: Packet<A>, #[case] expected: bool) {
    let mut host = node(true);
    let served = FrontendKey::of_address(FRONTEND.0, geneve().destination_port, PROTOCOL_UDP);
    host.tables.frontends.insert(served, Frontend { service: 1, flags: 0 });
    host.tables.frontends.insert(FrontendKey::of_cluster_ip(CLUSTER_IP), Frontend::NONE);
    // Whose backend listens at the port.
    host.tables.slots.values_mut().for_each(|slot| slot.port = geneve().destination_port.number());
    host.arriving(&datagram(CLIENT, FRONTEND), Origin::Outside).unwrap();
    let mut scratch = Scratch { packet, ..Scratch::default() };
    assert_eq!(may_carry_another(&host, &mut scratch), expected);
}

const CLUSTER_IP: A = [10, 96, 0, 99];

#[rstest]
#[case::to_a_backend_of_this_node(true, CLIENT.0, Ok(Then::Pass))]
#[case::of_a_pod(false, [10, 244, 9, 9], Ok(Then::Pass))]
#[case::of_a_client_outside(false, CLIENT.0, Ok(Then::Encapsulate))]
fn whose_packets_are_sent_on(#[case] local: bool, #[case] client: A, #[case] expected: Result<Then, Reason>) {
    let mut host = node(local);
    host.tables.pods_told_by = PODS_BY_SOURCE;
    host.tables.pod_range = ([10, 244, 0, 0], 16);
    let first = packet((client, CLIENT.1), FRONTEND, TCP_SYN);
    let inside = rewritten(&first, host.arriving(&first, Origin::Outside).unwrap());
    let mut scratch = Scratch { packet: inside, ..Scratch::default() };
    let left = decide_leaving(&host, &mut scratch, false).map(|()| scratch.action.then);
    let left = if left == Err(Reason::NotAService) { Ok(Then::Pass) } else { left };
    assert_eq!(left, expected);
    let flags = host.flow_of(Stage::Opening, &first).flags;
    assert_eq!(flags & FLOW_DSR != 0, expected == Ok(Then::Encapsulate));
}

#[test]
fn without_an_address_nothing_is_sent_on() {
    let host = node(false);
    host.masquerade.set(A::UNSPECIFIED);
    assert_eq!(sent_on(&host, &syn()), Err(Reason::NoMasqueradeAddress));
}

/// One connection through both nodes.
#[test]
fn the_other_node_answers_from_what_was_dialled() {
    let (entry, other) = (node(false), node(true));
    for frontend in [FRONTEND, NODE_PORT] {
        let first = packet(CLIENT, frontend, TCP_SYN);
        let (carried, tunnel) = sent_on(&entry, &first).unwrap();
        assert_eq!(carried, first);
        let inside = unpacked(&other, &carried, tunnel).unwrap();
        assert_eq!((inside.source, inside.destination, inside.destination_port), (CLIENT.0, BACKEND, PORT));
        let answer = answer((BACKEND, PORT), (inside.source, inside.source_port), TCP_SYN | TCP_ACK);
        let to_client = rewritten(&answer, other.leaving(&answer).unwrap());
        assert_eq!((to_client.source, to_client.source_port), frontend);
        assert_eq!((to_client.destination, to_client.destination_port), CLIENT);
        let ack = packet(CLIENT, frontend, TCP_ACK);
        unpacked(&other, &sent_on(&entry, &ack).unwrap().0, tunnel).unwrap();
        assert_eq!(other.flow_of(Stage::Established, &ack).flags, 0);
        other.assert_whole();
    }
}

#[rstest]
#[case::frontend_that_this_node_has_too(FRONTEND, from_other_node(), Ok(()))]
#[case::node_port_of_who_sends_it(OTHERS_NODE_PORT, from_other_node(), Ok(()))]
#[case::node_port_of_another((BACKENDS[1], NODE_PORT.1), from_other_node(), Err(Reason::NotAService))]
#[case::node_port_of_this_node(NODE_PORT, from_other_node(), Err(Reason::NotAService))]
#[case::another_port((OTHER_NODE, Port::new(80)), from_other_node(), Err(Reason::NotAService))]
#[case::to_nobody(FRONTEND, Ends { destination: [10, 244, 1, 9], ..from_other_node() }, Err(Reason::NotAService))]
fn what_is_taken_out(
    #[case] dialled: (A, Port),
    #[case] tunnel: Ends<A>,
    #[case] expected: Result<(), Reason>,
    #[values(PROTOCOL_TCP, PROTOCOL_UDP)] protocol: u8,
) {
    let host = node(true);
    let first = of_protocol(protocol, packet(CLIENT, dialled, TCP_SYN));
    assert_eq!(unpacked(&host, &first, tunnel).map(|_| ()), expected);
    assert_eq!(host.entries(Stage::Opening), if expected.is_ok() { 2 } else { 0 });
}

/// Each of the set's backends is found by its address, and none that is another node's.
#[rstest]
#[case::first(0, true, Ok(()))]
#[case::last(1, true, Ok(()))]
#[case::of_another_node(1, false, Err(Reason::NotAService))]
fn the_backend_is_the_one_that_was_chosen(
    #[case] index: usize,
    #[case] is_local: bool,
    #[case] expected: Result<(), Reason>,
) {
    let mut host = node(true);
    host.tables.slots.get_mut(&1).unwrap().flags = if is_local { BACKEND_LOCAL } else { 0 };
    let tunnel = Ends { destination: BACKENDS[index], ..from_other_node() };
    assert_eq!(unpacked(&host, &syn(), tunnel).map(|_| ()), expected);
    if expected.is_ok() {
        assert_eq!(host.flow_of(Stage::Opening, &syn()).backend, BACKENDS[index]);
    }
}

/// This node knows that it terminates, and chooses it no more: the set's table has the other one alone.
#[test]
fn what_is_sent_to_an_endpoint_that_terminates_is_taken_out() {
    let mut host = node(true);
    host.tables.slots.get_mut(&0).unwrap().flags |= BACKEND_DRAINING;
    for place in 2..4 {
        let other = host.tables.slots[&1];
        host.tables.slots.insert(place, other);
    }
    host.tables.services.get_mut(&1).unwrap().external = EndpointSet::new(0, 2).with_table(1);
    assert_eq!(unpacked(&host, &syn(), from_other_node()).unwrap().destination, BACKEND);
    for port in 40_001..40_010 {
        let dialled_here = packet((CLIENT.0, Port::new(port)), FRONTEND, TCP_SYN);
        assert_eq!(host.arriving(&dialled_here, Origin::Outside).unwrap().destination, BACKENDS[1]);
    }
}

#[test]
fn a_service_without_the_flag_takes_nothing_out() {
    let mut host = node(true);
    host.tables.frontends.values_mut().for_each(|frontend| frontend.flags = FRONTEND_EXTERNAL);
    assert_eq!(unpacked(&host, &syn(), from_other_node()), Err(Reason::NotAService));
}

#[rstest]
#[case::in_a_range([203, 0, 113, 0], Ok(()))]
#[case::in_none([198, 51, 100, 0], Err(Reason::SourceNotAllowed))]
fn source_ranges_count_where_it_is_taken_out(#[case] range: A, #[case] expected: Result<(), Reason>) {
    let mut host = node(true);
    host.tables.frontends.values_mut().for_each(|frontend| frontend.flags |= FRONTEND_SOURCE_RANGES);
    host.tables.source_ranges.insert(1, vec![(range, 24)]);
    assert_eq!(unpacked(&host, &syn(), from_other_node()).map(|_| ()), expected);
}

#[test]
fn segments_of_no_flow_are_not_taken_out() {
    let host = node(true);
    let ack = packet(CLIENT, FRONTEND, TCP_ACK);
    assert_eq!(unpacked(&host, &ack, from_other_node()), Err(Reason::NotAService));
    // Nor the backend's own answers, in whatever they come.
    unpacked(&host, &syn(), from_other_node()).unwrap();
    let answer = answer((BACKEND, PORT), CLIENT, TCP_ACK);
    assert_eq!(unpacked(&host, &answer, from_other_node()), Err(Reason::NotAService));
}

/// The client's packets have come by another node before, or this node has lost its flow. Whether
/// the endpoint knows the connection, is the endpoint's to say.
#[rstest]
fn segments_of_no_flow_reach_their_endpoint_and_prove_no_client(
    #[values(0, FRONTEND_MAGLEV)] flags: u32,
    #[values(FRONTEND, OTHERS_NODE_PORT)] dialled: (A, Port),
) {
    let mut host = Host { answers_unknown: true, ..node(true) };
    host.tables.frontends.values_mut().for_each(|frontend| frontend.flags |= flags);
    let segment = |sent| {
        let numbers = Segment::new(TCP_ACK, CLIENT_ISN + 1 + sent, BACKENDS_NEXT, 9);
        numbered(CLIENT, dialled, numbers)
    };
    for round in 0..4 {
        let sent = segment(9 * round);
        let inside = unpacked(&host, &sent, from_other_node()).unwrap();
        assert_eq!((inside.source, inside.destination, inside.destination_port), (CLIENT.0, BACKEND, PORT));
        let numbers = Segment::new(TCP_ACK, BACKENDS_NEXT, sent.segment.sequence + 9, 0);
        assert_eq!(host.leaving(&numbered((BACKEND, PORT), CLIENT, numbers)).map(source), Ok(dialled));
        assert_eq!(host.flow_of(Stage::Opening, &sent).flags, FLOW_RESUMED);
        host.wait(2 * REFRESH_AFTER);
    }
    assert_eq!((host.entries(Stage::Opening), host.entries(Stage::Established)), (2, 0));
    assert_eq!(host.counted(Reason::FlowOpened), 1);
    let reset = numbered((BACKEND, PORT), CLIENT, Segment::new(TCP_RST, BACKENDS_NEXT, 0, 0));
    assert_eq!(host.leaving(&reset).map(source), Ok(dialled));
    assert!(host.flow_of(Stage::Opening, &segment(0)).state.has_ended());
    host.assert_whole();
}

#[rstest]
#[case::reset(packet(CLIENT, FRONTEND, TCP_RST | TCP_ACK), from_other_node(), Reason::NotAService)]
#[case::second_of_a_connection(packet(CLIENT, FRONTEND, TCP_SYN | TCP_ACK), from_other_node(), Reason::NotAService)]
#[case::to_nobody(
    packet(CLIENT, FRONTEND, TCP_ACK),
    Ends { destination: [10, 244, 1, 9], ..from_other_node() },
    Reason::NotAService
)]
#[case::node_port_of_this_node(packet(CLIENT, NODE_PORT, TCP_ACK), from_other_node(), Reason::NotAService)]
#[case::of_the_endpoint_itself(
    packet((BACKEND, CLIENT.1), FRONTEND, TCP_ACK),
    from_other_node(),
    Reason::NotAService
)]
#[case::in_no_source_range(
    packet(NOT_ADMITTED, FRONTEND, TCP_ACK),
    from_other_node(),
    Reason::SourceNotAllowed
)]
fn other_segments_of_no_flow_open_none(
    #[case] segment: Packet<A>,
    #[case] tunnel: Ends<A>,
    #[case] expected: Reason,
) {
    let mut host = Host { answers_unknown: true, ..node(true) };
    if expected == Reason::SourceNotAllowed {
        host.tables.frontends.values_mut().for_each(|frontend| frontend.flags |= FRONTEND_SOURCE_RANGES);
        host.tables.source_ranges.insert(1, vec![(CLIENT.0, 32)]);
    }
    assert_eq!(unpacked(&host, &segment, tunnel), Err(expected));
    assert_eq!(host.entries(Stage::Opening), 0);
}

const NOT_ADMITTED: (A, Port) = ([198, 51, 100, 1], CLIENT.1);

#[test]
fn segments_of_no_flow_count_for_the_guard() {
    let host = Host { answers_unknown: true, openings_per_window: 2, ..node(true) };
    let mut scratch = Scratch { outer_length: 20, tunnel: from_other_node(), ..Scratch::default() };
    let mut outcome = |port| {
        scratch.packet = packet((CLIENT.0, Port::new(port)), FRONTEND, TCP_ACK);
        arriving(&host, &mut scratch, Origin::Outside, &UnknownSockets)
    };
    assert_eq!(outcome(1), Ok(()));
    assert_eq!((2..200).map(outcome).last(), Some(Err(Reason::ConnectionsLimited)));
}

/// A SYN begins anew, also where it is sent to another endpoint.
#[rstest]
#[case::to_the_same_endpoint(BACKENDS[0])]
#[case::to_another_endpoint(BACKENDS[1])]
fn a_syn_replaces_a_flow_that_a_segment_has_opened(#[case] endpoint: A) {
    let host = Host { answers_unknown: true, ..node(true) };
    unpacked(&host, &packet(CLIENT, FRONTEND, TCP_ACK), from_other_node()).unwrap();
    let tunnel = Ends { destination: endpoint, ..from_other_node() };
    assert_eq!(unpacked(&host, &syn(), tunnel).map(|packet| packet.destination), Ok(endpoint));
    assert_eq!(host.flow_of(Stage::Opening, &syn()).flags & FLOW_RESUMED, 0);
    assert_eq!(host.counted(Reason::FlowReplaced), 1);
}

/// The other node has forgotten its flow, and has chosen anew.
#[rstest]
fn another_choice_is_followed_by_what_opens_a_flow(#[values(false, true)] answers_unknown: bool) {
    let host = Host { answers_unknown, ..node(true) };
    let other = Ends { destination: BACKENDS[1], ..from_other_node() };
    unpacked(&host, &syn(), from_other_node()).unwrap();
    let ack = packet(CLIENT, FRONTEND, TCP_ACK);
    assert_eq!(unpacked(&host, &ack, other), Err(Reason::NotAService));
    assert_eq!(unpacked(&host, &syn(), other).map(|packet| packet.destination), Ok(BACKENDS[1]));
    assert_eq!(host.counted(Reason::FlowReplaced), 1);
    host.assert_whole();
}

/// Whoever can send packets in others could else move connections of others.
#[test]
fn another_choice_does_not_move_a_connection_that_is_confirmed() {
    let host = node(true);
    unpacked(&host, &syn(), from_other_node()).unwrap();
    let answer = Segment::new(TCP_SYN | TCP_ACK, BACKEND_ISN, CLIENT_ISN + 1, 0);
    host.leaving(&numbered((BACKEND, PORT), CLIENT, answer)).unwrap();
    unpacked(&host, &client(TCP_ACK, 0, 0), from_other_node()).unwrap();
    let other = Ends { destination: BACKENDS[1], ..from_other_node() };
    assert_eq!(unpacked(&host, &syn(), other), Err(Reason::NotAService));
    assert_eq!(host.counted(Reason::FlowReplaced), 0);
    unpacked(&host, &client(TCP_ACK, 0, 10), from_other_node()).unwrap();
    host.assert_whole();
}

/// Whose frontend is still the service's, though no address of this node.
#[test]
fn datagrams_to_another_nodes_port_stay_with_their_flow() {
    let host = node(true);
    let datagram = datagram(CLIENT, OTHERS_NODE_PORT);
    unpacked(&host, &datagram, from_other_node()).unwrap();
    host.epoch.set(1);
    unpacked(&host, &datagram, from_other_node()).unwrap();
    assert_eq!((host.counted(Reason::FlowReplaced), host.counted(Reason::FlowOpened)), (0, 1));
}

/// A segment of the client after its SYN; offset of its sequence number.
fn client(flags: u8, offset: u32, payload: u32) -> Packet<A> {
    let acknowledgement = BACKEND_ISN.wrapping_add(1);
    numbered(CLIENT, FRONTEND, Segment::new(flags, CLIENT_ISN + 1 + offset, acknowledgement, payload))
}

/// Returns a segment as [`client`] does, which acknowledges so many bytes of the backend.
fn acknowledges(flags: u8, offset: u32, received: u32) -> Packet<A> {
    let acknowledgement = BACKENDS_NEXT.wrapping_add(received);
    numbered(CLIENT, FRONTEND, Segment::new(flags, CLIENT_ISN + 1 + offset, acknowledgement, 0))
}

/// What the entries know of the flow, and in which table it is.
fn known(host: &Host) -> (FlowState, Stage) {
    let is_established = host.flow(Stage::Established, &syn().key()).is_some();
    let stage = if is_established { Stage::Established } else { Stage::Opening };
    (host.flow_of(stage, &syn()).state, stage)
}

fn lifetime(host: &Host) -> u64 {
    FlowLifetimes::default().of(PROTOCOL_TCP, known(host).0).as_secs()
}

/// The client's packets of a connection, with seconds before each, and what is known then: how long the flow is kept, and in which table.
#[rstest]
#[case::forged(&[(0, syn())], 60, Stage::Opening)]
#[case::forged_again_and_again(&[(0, syn()), (2, syn()), (2, syn())], 60, Stage::Opening)]
#[case::acknowledgement_of_another(&[(0, syn()), (0, client(TCP_ACK, REACH, 0))], 60, Stage::Opening)]
#[case::short(&[(0, syn()), (0, client(TCP_ACK, 0, 0))], 86_400, Stage::Opening)]
#[case::goes_on(&[(0, syn()), (0, client(TCP_ACK, 0, 9)), (2, client(TCP_ACK, 9, 9))], 86_400, Stage::Established)]
#[case::closed(
    &[(0, syn()), (0, client(TCP_ACK, 0, 9)), (2, client(TCP_ACK, 9, 9)), (0, client(TCP_FIN | TCP_ACK, 18, 0))],
    3_600,
    Stage::Opening
)]
#[case::closed_after_a_loss_with_megabytes_under_way(
    &[(0, syn()), (0, client(TCP_ACK, 0, 9)), (2, acknowledges(TCP_ACK, 9, 0)),
      (0, acknowledges(TCP_ACK, 9, 6 << 20)), (0, acknowledges(TCP_FIN | TCP_ACK, 9, 6 << 20))],
    3_600,
    Stage::Opening
)]
#[case::closed_and_goes_on_receiving(
    &[(0, syn()), (2, client(TCP_ACK, 0, 9)), (0, client(TCP_FIN | TCP_ACK, 9, 0)), (9, client(TCP_ACK, 10, 0))],
    3_600,
    Stage::Opening
)]
#[case::fin_with_guessed_numbers(
    &[(0, syn()), (2, client(TCP_ACK, 0, 9)), (0, client(TCP_FIN | TCP_ACK, REACH + 9, 0))],
    86_400,
    Stage::Established
)]
#[case::reset(&[(0, syn()), (2, client(TCP_ACK, 0, 9)), (0, client(TCP_RST, 9, 0))], 10, Stage::Opening)]
#[case::reset_that_has_overtaken_an_acknowledgement(
    &[(0, syn()), (2, client(TCP_ACK, 0, 9)), (0, client(TCP_RST, 9, 0)), (0, client(TCP_ACK, 9, 0))],
    10,
    Stage::Opening
)]
#[case::reset_before_it_is_established_that_has_overtaken_an_acknowledgement(
    &[(0, syn()), (0, client(TCP_ACK, 0, 9)), (2, client(TCP_RST, 9, 0)), (0, client(TCP_ACK, 9, 0))],
    10,
    Stage::Opening
)]
#[case::reset_that_may_be_forged(
    &[(0, syn()), (2, client(TCP_ACK, 0, 9)), (0, client(TCP_RST, 10, 0))],
    10_800,
    Stage::Established
)]
#[case::goes_on_after_a_forged_reset(
    &[(0, syn()), (2, client(TCP_ACK, 0, 9)), (0, client(TCP_RST, 10, 0)), (0, client(TCP_ACK, 9, 9))],
    86_400,
    Stage::Established
)]
#[case::refused(&[(0, syn()), (0, client(TCP_RST, 0, 0))], 10, Stage::Opening)]
fn what_a_client_alone_tells_of_a_connection(
    #[case] segments: &[(u64, Packet<A>)],
    #[case] seconds: u64,
    #[case] stage: Stage,
) {
    let host = node(false);
    for (wait, packet) in segments {
        host.wait(wait * SECOND);
        assert_eq!(sent_on(&host, packet).map(|(sent, _)| sent), Ok(*packet));
        host.assert_whole();
    }
    assert_eq!((lifetime(&host), known(&host).1), (seconds, stage));
}

/// The dialled node sees no acknowledgement of what the client sends.
#[test]
fn a_silent_connection_is_kept_for_a_day() {
    let host = node(false);
    for (wait, packet) in [(0, syn()), (0, client(TCP_ACK, 0, 9)), (2, client(TCP_ACK, 9, 9))] {
        host.wait(wait * SECOND);
        sent_on(&host, &packet).unwrap();
    }
    host.wait(86_000 * SECOND);
    let met = collect::Entry {
        stage: Stage::Established,
        key: syn().key(),
        flow: host.flow_of(Stage::Established, &syn()),
    };
    let now = host.clock.get();
    assert_eq!(collect::remove_expired(&host, &met, &FlowLifetimes::default(), now), Ok(0));
    assert_eq!(host.entries(Stage::Established), 2);
}

/// Its entries stay stamped, so that the controller does not take them.
#[test]
fn a_connection_that_is_closed_on_one_side_is_kept_while_the_client_receives() {
    let host = node(false);
    for (offset, flags) in [(0, TCP_SYN), (1, TCP_ACK), (1, TCP_FIN | TCP_ACK)] {
        let packet = if offset == 0 { syn() } else { client(flags, 0, 0) };
        sent_on(&host, &packet).unwrap();
    }
    for _ in 0..3 {
        host.wait(2 * SECOND);
        sent_on(&host, &client(TCP_ACK, 1, 0)).unwrap();
        assert!(host.clock.get() - host.flow_of(Stage::Opening, &syn()).last_seen < SECOND);
        assert_eq!(host.entries(Stage::Established), 0);
    }
}

#[test]
fn a_new_connection_from_the_same_port_chooses_anew_once_the_client_has_closed() {
    let host = node(false);
    sent_on(&host, &syn()).unwrap();
    sent_on(&host, &client(TCP_ACK, 0, 0)).unwrap();
    host.dice.borrow_mut().push_back(LAST);
    assert_eq!(sent_on(&host, &syn()).unwrap().1.destination, BACKENDS[0], "it goes on");
    sent_on(&host, &client(TCP_FIN | TCP_ACK, 0, 0)).unwrap();
    assert_eq!(sent_on(&host, &syn()).unwrap().1.destination, BACKENDS[1]);
    assert_eq!(host.counted(Reason::FlowReplaced), 1);
    host.assert_whole();
}

/// Clients whose answers nobody sees may be made up: they must not fill the table that does not evict.
#[rstest]
#[case::once_one_has_closed(true)]
#[case::once_one_has_expired(false)]
fn only_so_many_are_established(#[case] closes: bool) {
    const CLIENTS: u16 = 3;
    let host = Host { most_unproven_entries: 4, ..node(false) };
    let of_client = |packet: Packet<A>, port: u16| Packet { source_port: Port::new(port), ..packet };
    let send = |packet, port| {
        let packet = of_client(packet, port);
        assert_eq!(sent_on(&host, &packet).map(|(sent, _)| sent), Ok(packet));
        host.flow(Stage::Established, &packet.key()).is_some()
    };
    let goes_on = |port| {
        host.wait(2 * SECOND);
        send(client(TCP_ACK, 0, 0), port)
    };
    for port in 0..CLIENTS {
        send(syn(), port);
        send(client(TCP_ACK, 0, 0), port);
    }
    assert_eq!([goes_on(0), goes_on(1), goes_on(2)], [true, true, false]);
    assert_eq!(host.established_and_counted()[&unproven_entries::<A>()], (4, 4));
    assert_eq!(host.counted(Reason::FlowsFull), 1);
    if closes {
        assert!(!send(client(TCP_FIN | TCP_ACK, 0, 0), 0));
    } else {
        let flow = host.flow_of(Stage::Established, &of_client(syn(), 0));
        collect::remove_if(&host, &flow, |_| true).unwrap();
    }
    assert_eq!(host.established_and_counted()[&unproven_entries::<A>()], (2, 2));
    assert!(goes_on(2));
    assert_eq!(host.established_and_counted()[&unproven_entries::<A>()], (4, 4));
    host.assert_whole();
}

#[rstest]
#[case::one(&[0], 30, Stage::Opening)]
#[case::many_at_once(&[0, 0, 1], 30, Stage::Opening)]
#[case::goes_on(&[0, 1, 2], 120, Stage::Established)]
fn what_a_client_alone_tells_of_datagrams(#[case] waits: &[u64], #[case] seconds: u64, #[case] stage: Stage) {
    let host = node(false);
    let datagram = datagram(CLIENT, FRONTEND);
    for wait in waits {
        host.wait(wait * SECOND);
        sent_on(&host, &datagram).unwrap();
    }
    let is_established = host.flow(Stage::Established, &datagram.key()).is_some();
    assert_eq!(is_established, stage == Stage::Established);
    let state = host.flow_of(stage, &datagram).state;
    assert_eq!(FlowLifetimes::default().of(PROTOCOL_UDP, state).as_secs(), seconds);
    host.assert_whole();
}

/// What the first fragment became becomes of the others: in packets to the same backend, and out of them.
#[test]
fn fragments_go_the_way_of_the_first() {
    let (entry, other) = (Host { encapsulation: ENCAPSULATION_GENEVE, ..node(false) }, node(true));
    let mut ports = HashSet::new();
    let part = |part, packet: Packet<A>| Packet { fragment: Fragment { part, id: 7 }, ..packet };
    let first = part(Part::First, datagram(CLIENT, FRONTEND));
    let no_ports = ((CLIENT.0, Port::NONE), (FRONTEND.0, Port::NONE));
    let later = part(Part::Later, datagram(no_ports.0, no_ports.1));
    for fragment in [first, later] {
        let (sent, tunnel) = sent_on(&entry, &fragment).unwrap();
        assert_eq!((sent, tunnel.destination), (fragment, BACKEND));
        ports.insert(tunnel.source_port);
        assert_eq!(unpacked(&other, &sent, tunnel).map(|packet| packet.destination), Ok(BACKEND));
    }
    assert_eq!(ports.len(), 1);
}

/// Of a later fragment nothing but its id and addresses is known: it must come as the first one has.
#[rstest]
#[case::to_another_endpoint(true, BACKENDS[1])]
#[case::without_a_tunnel(false, BACKEND)]
fn later_fragments_that_come_another_way_are_left_alone(
    #[case] in_tunnel: bool,
    #[case] destination: [u8; 4],
) {
    let other = node(true);
    let part = |part, packet: Packet<A>| Packet { fragment: Fragment { part, id: 7 }, ..packet };
    let first = part(Part::First, datagram(CLIENT, FRONTEND));
    let later = part(Part::Later, datagram((CLIENT.0, Port::NONE), (FRONTEND.0, Port::NONE)));
    unpacked(&other, &first, from_other_node()).unwrap();
    assert!(unpacked(&other, &later, from_other_node()).is_ok());
    let tunnel = Ends { destination, ..from_other_node() };
    let mut scratch =
        Scratch { packet: later, outer_length: if in_tunnel { 20 } else { 0 }, tunnel, ..Scratch::default() };
    assert!(arriving(&other, &mut scratch, Origin::Outside, &UnknownSockets).is_err());
}

/// As those of other flows: the client's router tells of answers that it cannot send on.
#[test]
fn errors_about_answers_go_to_the_backend() {
    let (entry, other) = (node(false), node(true));
    let (_, tunnel) = sent_on(&entry, &syn()).unwrap();
    unpacked(&other, &syn(), tunnel).unwrap();
    let headers = Headers { icmp: 20, ..Headers::default() };
    let error = Packet { headers, segment: Segment::default(), ..syn() };
    assert_eq!(sent_on(&entry, &error), Ok((error, tunnel)));
    assert_eq!(unpacked(&other, &error, tunnel).map(|packet| packet.destination), Ok(BACKEND));
}
