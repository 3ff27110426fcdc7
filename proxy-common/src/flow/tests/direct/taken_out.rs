//! The backend's node: what it takes out of a packet, and which flow that opens.

use super::*;

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
    host.maps.frontends.insert(served, Frontend { service: 1, flags: 0 });
    host.maps.frontends.insert(FrontendKey::of_cluster_ip(CLUSTER_IP), Frontend::NONE);
    // Whose backend listens at the port.
    host.maps.slots.values_mut().for_each(|slot| slot.port = geneve().destination_port.number());
    host.arriving(&datagram(CLIENT, FRONTEND), Origin::Outside).unwrap();
    let mut scratch = Scratch { packet, ..Scratch::default() };
    assert_eq!(may_carry_another(&host, &mut scratch), expected);
}

const CLUSTER_IP: A = [10, 96, 0, 99];

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
    host.maps.slots.get_mut(&1).unwrap().flags = if is_local { BACKEND_LOCAL } else { 0 };
    let tunnel = Ends { destination: BACKENDS[index], ..from_other_node() };
    assert_eq!(unpacked(&host, &syn(), tunnel).map(|_| ()), expected);
    if expected.is_ok() {
        assert_eq!(host.flow_of(Stage::Opening, &syn()).backend, BACKENDS[index]);
    }
}

/// This node knows that it terminates, and chooses it no more: the set's lookup table has the other one alone.
#[test]
fn what_is_sent_to_an_endpoint_that_terminates_is_taken_out() {
    let mut host = node(true);
    host.maps.slots.get_mut(&0).unwrap().flags |= BACKEND_DRAINING;
    for index in 2..4 {
        let other = host.maps.slots[&1];
        host.maps.slots.insert(index, other);
    }
    host.maps.services.get_mut(&1).unwrap().external = EndpointSet::new(0, 2).with_table(1);
    assert_eq!(unpacked(&host, &syn(), from_other_node()).unwrap().destination, BACKEND);
    for port in 40_001..40_010 {
        let dialled_here = packet((CLIENT.0, Port::new(port)), FRONTEND, TCP_SYN);
        assert_eq!(host.arriving(&dialled_here, Origin::Outside).unwrap().destination, BACKENDS[1]);
    }
}

#[test]
fn a_service_without_the_flag_takes_nothing_out() {
    let mut host = node(true);
    host.maps.frontends.values_mut().for_each(|frontend| frontend.flags = FRONTEND_EXTERNAL);
    assert_eq!(unpacked(&host, &syn(), from_other_node()), Err(Reason::NotAService));
}

#[rstest]
#[case::in_a_range([203, 0, 113, 0], Ok(()))]
#[case::in_none([198, 51, 100, 0], Err(Reason::SourceNotAllowed))]
fn source_ranges_count_where_it_is_taken_out(#[case] range: A, #[case] expected: Result<(), Reason>) {
    let mut host = node(true);
    host.maps.frontends.values_mut().for_each(|frontend| frontend.flags |= FRONTEND_SOURCE_RANGES);
    host.maps.source_ranges.insert(1, vec![(range, 24)]);
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
    host.maps.frontends.values_mut().for_each(|frontend| frontend.flags |= flags);
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
    packet(NOT_ALLOWED, FRONTEND, TCP_ACK),
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
        host.maps.frontends.values_mut().for_each(|frontend| frontend.flags |= FRONTEND_SOURCE_RANGES);
        host.maps.source_ranges.insert(1, vec![(CLIENT.0, 32)]);
    }
    assert_eq!(unpacked(&host, &segment, tunnel), Err(expected));
    assert_eq!(host.entries(Stage::Opening), 0);
}

const NOT_ALLOWED: (A, Port) = ([198, 51, 100, 1], CLIENT.1);

#[test]
fn segments_of_no_flow_count_for_the_flood_limit() {
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
