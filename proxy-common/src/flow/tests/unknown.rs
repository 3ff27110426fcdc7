//! Segments of connections that no map knows.

use super::*;

/// Serves both frontends with these flags beside. `local`: the backends are this node's.
fn node(flags: u32, local: bool) -> Host {
    let mut host = Host { answers_unknown: true, ..Host::new() };
    for slot in host.maps.slots.values_mut() {
        slot.flags = if local { BACKEND_LOCAL } else { 0 };
    }
    for frontend in host.maps.frontends.values_mut() {
        frontend.flags = FRONTEND_EXTERNAL | flags;
    }
    host
}

const SEQUENCE: u32 = 5_000;
const ACKNOWLEDGEMENT: u32 = 9_000;

/// A segment in the middle of a connection, from a port of the client.
fn segment(port: u16, flags: u8) -> Packet<A> {
    let numbers = Segment::new(flags, SEQUENCE, ACKNOWLEDGEMENT, 0);
    numbered((CLIENT.0, Port::new(port)), FRONTEND, numbers)
}

#[rstest]
#[case::acknowledgement(TCP_ACK, Reason::UnknownConnection)]
#[case::end(TCP_ACK | TCP_FIN, Reason::UnknownConnection)]
#[case::second_of_a_connection(TCP_ACK | TCP_SYN, Reason::NotAService)]
#[case::reset(TCP_ACK | TCP_RST, Reason::NotAService)]
#[case::no_acknowledgement(TCP_FIN, Reason::NotAService)]
fn a_segment_is_answered_that_only_a_connection_has(
    #[case] flags: u8,
    #[case] expected: Reason,
    #[values(Origin::Workload, Origin::Outside)] origin: Origin,
) {
    let host = node(0, true);
    assert_eq!(host.arriving(&segment(1, flags), origin).map(drop), Err(expected));
    assert_eq!(host.entries(Stage::Opening), 0);
}

/// Changes something about the node or about the packet.
type Difference = fn(&mut Host, &mut Packet<A>);

#[rstest]
#[case::switched_off((|host, _| host.answers_unknown = false) as Difference, Reason::NotAService)]
#[case::packets_are_held((|host, _| host.holds_packets = true) as Difference, Reason::NotAService)]
#[case::another_port((|_, packet| packet.destination_port = Port::new(81)) as Difference, Reason::NotAService)]
#[case::another_address(
    (|_, packet| packet.destination = [10, 96, 0, 77]) as Difference,
    Reason::NotAService
)]
#[case::first_fragment(
    (|_, packet| packet.fragment.part = Part::First) as Difference,
    Reason::NotAService
)]
#[case::icmp_error((|_, packet| packet.headers.icmp = 34) as Difference, Reason::NotAService)]
#[case::datagram((|_, packet| packet.protocol = PROTOCOL_UDP) as Difference, Reason::NoEndpoints)]
#[case::source_ranges(
    (|host, _| host.maps.frontends.values_mut().for_each(|one| one.flags |= FRONTEND_SOURCE_RANGES))
        as Difference,
    Reason::SourceNotAllowed
)]
#[case::no_endpoints(
    (|host, _| *host.maps.services.get_mut(&1).unwrap() = Service::default()) as Difference,
    Reason::NoEndpoints
)]
#[case::no_local_endpoints(
    (|host, _| host.maps.services.get_mut(&1).unwrap().external = EndpointSet::default()) as Difference,
    Reason::NoLocalEndpoints
)]
fn what_else_becomes_of_it(#[case] difference: Difference, #[case] expected: Reason) {
    let (mut host, mut packet) = (node(0, true), segment(1, TCP_ACK));
    difference(&mut host, &mut packet);
    if packet.protocol == PROTOCOL_UDP {
        host.maps.services.insert(1, Service::default());
    }
    assert_eq!(host.arriving(&packet, Origin::Outside).map(drop), Err(expected));
}

/// A node port is found at the node's own addresses only, which are the stack's.
#[test]
fn a_node_port_is_the_stacks() {
    let mut host = node(0, true);
    let key = FrontendKey::of_node_port(FRONTEND.1, PROTOCOL_TCP);
    host.maps.frontends.retain(|key, _| key.address != FRONTEND.0);
    host.maps.frontends.insert(key, Frontend { service: 1, flags: FRONTEND_EXTERNAL });
    host.maps.node_addresses.insert(FRONTEND.0, NodeAddress::default());
    assert_eq!(host.arriving(&segment(1, TCP_ACK), Origin::Outside).map(drop), Err(Reason::NotAService));
}

struct OfNode;

impl PodSockets<A> for OfNode {
    fn is_connected(&self, _: &Scratch<A>) -> bool {
        false
    }

    fn stays_here(&self, _: &Scratch<A>) -> bool {
        true
    }
}

#[rstest]
#[case::at_random(0)]
#[case::by_hash(FRONTEND_MAGLEV)]
fn an_address_of_the_node_is_the_stacks(#[case] flags: u32) {
    let host = node(flags, true);
    let mut scratch = Scratch { packet: segment(1, TCP_ACK), ..Scratch::default() };
    let outcome = decide_arriving_from(&host, &mut scratch, Origin::Outside, &OfNode);
    assert_eq!(outcome, Err(Reason::NotAService));
}

/// The other node has chosen by the same hash.
#[rstest]
#[case::backend_here(true, FRONTEND_MAGLEV)]
#[case::direct_server_return(false, FRONTEND_MAGLEV | FRONTEND_DSR)]
fn a_connection_goes_on_where_each_node_chooses_alike(#[case] local: bool, #[case] flags: u32) {
    let mut met = HashSet::new();
    for port in 40_000..40_020 {
        let before = node(flags, local);
        let first = Packet { source_port: Port::new(port), ..syn() };
        let chosen = before.arriving(&first, Origin::Outside).unwrap().destination;
        let host = node(flags, local);
        let rewrite = host.arriving(&segment(port, TCP_ACK), Origin::Outside).unwrap();
        assert_eq!(rewrite.destination, chosen, "{port}");
        met.insert(chosen);
    }
    assert_eq!(met.len(), 2);
}

#[test]
fn affinity_is_neither_asked_nor_told() {
    let mut host = node(FRONTEND_MAGLEV | FRONTEND_AFFINITY, true);
    host.maps.services.get_mut(&1).unwrap().affinity_seconds = 60;
    host.arriving(&segment(1, TCP_ACK), Origin::Outside).unwrap();
    assert!(host.maps.affinity.borrow().is_empty());
}

#[rstest]
#[case::masqueraded(false, FRONTEND_MAGLEV)]
#[case::at_random(true, 0)]
#[case::least_connection(true, FRONTEND_LEAST_CONNECTION)]
fn what_another_node_has_chosen_is_not_known(#[case] local: bool, #[case] flags: u32) {
    let outcome = node(flags, local).arriving(&segment(1, TCP_ACK), Origin::Outside);
    assert_eq!(outcome.map(drop), Err(Reason::UnknownConnection));
}

/// A client is proved neither by many segments nor by answers to them.
#[rstest]
#[case::backend_here(true, FRONTEND_MAGLEV)]
#[case::direct_server_return(false, FRONTEND_MAGLEV | FRONTEND_DSR)]
fn the_flow_stays_among_those_that_evict(#[case] local: bool, #[case] flags: u32) {
    let host = node(flags, local);
    for round in 0..5 {
        let mut next = segment(1, TCP_ACK);
        next.segment.acknowledgement += round;
        host.arriving(&next, Origin::Outside).unwrap();
        let flow = host.flow_of(Stage::Opening, &next);
        if local {
            let mut answer = answer((flow.backend, PORT), (CLIENT.0, Port::new(1)), TCP_ACK);
            (answer.segment.sequence, answer.segment.acknowledgement) = (ACKNOWLEDGEMENT + round, SEQUENCE);
            assert_eq!(host.leaving(&answer).map(source), Ok(FRONTEND));
        }
        host.wait(2 * REFRESH_AFTER);
        assert_eq!((host.entries(Stage::Opening), host.entries(Stage::Established)), (2, 0));
        assert!(flow.state.progress < PROGRESS_CONFIRMED, "{flow:?}");
    }
    host.assert_whole();
}

/// A forged segment and a forged SYN with the same numbers are no more than the SYN alone.
#[test]
fn a_syn_begins_anew() {
    let host = node(FRONTEND_MAGLEV, true);
    host.arriving(&segment(1, TCP_ACK), Origin::Outside).unwrap();
    let first = segment(1, TCP_SYN);
    host.arriving(&first, Origin::Outside).unwrap();
    assert_eq!(host.flow_of(Stage::Opening, &first).flags & FLOW_RESUMED, 0);
    assert_eq!(host.counted(Reason::FlowReplaced), 1);
}

/// The backend does not know the connection: the number of its RST is what the client acknowledges.
#[test]
fn a_reset_ends_the_flow() {
    let host = node(FRONTEND_MAGLEV, true);
    let client = segment(1, TCP_ACK);
    host.arriving(&client, Origin::Outside).unwrap();
    let backend = (host.flow_of(Stage::Opening, &client).backend, PORT);
    let mut reset = answer(backend, (CLIENT.0, Port::new(1)), TCP_RST);
    reset.segment.sequence = client.segment.acknowledgement + 1;
    assert_eq!(host.leaving(&reset).map(source), Ok(FRONTEND));
    assert!(!host.flow_of(Stage::Opening, &client).state.has_ended(), "the number is another");
    reset.segment.sequence = client.segment.acknowledgement;
    assert_eq!(host.leaving(&reset).map(source), Ok(FRONTEND));
    assert!(host.flow_of(Stage::Opening, &client).state.has_ended());
}

#[test]
fn flows_count_for_the_flood_limit() {
    let host = Host { openings_per_window: 2, ..node(FRONTEND_MAGLEV, true) };
    let mut scratch = Scratch::default();
    let mut outcome = |port| {
        scratch.packet = segment(port, TCP_ACK);
        decide_arriving(&host, &mut scratch, Origin::Outside)
    };
    assert_eq!(outcome(1), Ok(()));
    assert_eq!((2..200).map(outcome).last(), Some(Err(Reason::ConnectionsLimited)));
}

#[rstest]
fn bits_lie_in_the_map_and_apart(#[values(false, true)] last_byte: bool) {
    let address = |number: u16| {
        let [high, low] = number.to_be_bytes();
        if last_byte { [10, 96, high, low] } else { [high, low, 0, 1] }
    };
    let bits: HashSet<_> = (0..1_000).map(|number| frontend_address_bit(&address(number))).collect();
    assert!(bits.len() > 990, "{}", bits.len());
    assert!(bits.iter().all(|(word, bit)| *word < FRONTEND_ADDRESS_WORDS && bit.is_power_of_two()));
    let address6 = |number: u16| {
        let [a, b, c, d] = address(number);
        [0x20, 1, 0xd, 0xb8, a, b, c, d, 0, 0, 0, 0, d, c, b, a]
    };
    let bits: HashSet<_> = (0..1_000).map(|number| frontend_address_bit(&address6(number))).collect();
    assert!(bits.len() > 990, "{}", bits.len());
}
