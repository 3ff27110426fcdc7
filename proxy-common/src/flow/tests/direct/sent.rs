//! The node that the client dials: what it sends on, and in what.

use super::*;

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

#[rstest]
#[case::to_a_backend_of_this_node(true, CLIENT.0, Ok(Then::Pass))]
#[case::of_a_pod(false, [10, 244, 9, 9], Ok(Then::Pass))]
#[case::of_a_client_outside(false, CLIENT.0, Ok(Then::Encapsulate))]
fn whose_packets_are_sent_on(#[case] local: bool, #[case] client: A, #[case] expected: Result<Then, Reason>) {
    let mut host = node(local);
    host.maps.pods_told_by = PODS_BY_SOURCE;
    host.maps.pod_range = ([10, 244, 0, 0], 16);
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
