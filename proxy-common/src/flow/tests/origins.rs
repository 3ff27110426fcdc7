//! Clients of which one has forged the other's address, so that the packets of both have the same
//! ends: one in a pod, one outside, or a process of the node.

use super::*;

const BOTH: [u8; 2] = [PROTOCOL_TCP, PROTOCOL_UDP];

fn first(protocol: u8) -> Packet<A> {
    if protocol == PROTOCOL_TCP { syn() } else { datagram(CLIENT, FRONTEND) }
}

/// The client's next packets are those of a connection that the backend has answered.
fn next(protocol: u8) -> Packet<A> {
    if protocol == PROTOCOL_TCP { packet(CLIENT, FRONTEND, TCP_ACK) } else { first(protocol) }
}

fn other_origin(origin: Origin) -> Origin {
    if origin == Origin::Workload { Origin::Outside } else { Origin::Workload }
}

/// The packet is masqueraded exactly if its client is outside, as the backends are elsewhere.
fn reaches_a_backend(host: &Host, packet: &Packet<A>, origin: Origin) -> Packet<A> {
    let sent = through(host, packet, origin).unwrap();
    assert!(BACKENDS.contains(&sent.destination), "{sent:?}");
    assert_eq!(sent.source == NODE, origin == Origin::Outside, "{sent:?} of {origin:?}");
    sent
}

/// The backend's answer to what has left the node comes to the client from the frontend.
fn is_answered(host: &Host, sent: &Packet<A>) {
    let flags = TCP_SYN | TCP_ACK;
    let reply = answer(
        (sent.destination, sent.destination_port),
        (sent.source, sent.source_port),
        if sent.is_tcp() { flags } else { 0 },
    );
    let reply = Packet { protocol: sent.protocol, ..reply };
    let inside = match host.arriving(&reply, Origin::Outside) {
        Ok(rewrite) => rewritten(&reply, rewrite),
        Err(Reason::NotAService) => reply,
        Err(reason) => panic!("{reason:?}"),
    };
    let left = rewritten(&inside, host.leaving(&inside).unwrap());
    assert_eq!((left.source, left.source_port), FRONTEND);
    assert_eq!((left.destination, left.destination_port), CLIENT);
}

fn all_origins(test: impl Fn(u8, Origin)) {
    for protocol in BOTH {
        for origin in [Origin::Workload, Origin::Outside] {
            test(protocol, origin);
        }
    }
}

#[test]
fn a_forged_first_packet_decides_nothing_for_another_client() {
    all_origins(|protocol, origin| {
        let host = Host::new();
        reaches_a_backend(&host, &first(protocol), other_origin(origin));
        let sent = reaches_a_backend(&host, &first(protocol), origin);
        is_answered(&host, &sent);
        assert_eq!(reaches_a_backend(&host, &next(protocol), origin), with_flags_of(&sent, protocol));
    });
}

fn with_flags_of(sent: &Packet<A>, protocol: u8) -> Packet<A> {
    let next = next(protocol);
    Packet { segment: next.segment, ..*sent }
}

#[test]
fn forged_packets_move_no_client() {
    all_origins(|protocol, origin| {
        let host = Host::new();
        let sent = reaches_a_backend(&host, &first(protocol), origin);
        for _ in 0..3 {
            host.dice.borrow_mut().extend([LAST; 8]);
            reaches_a_backend(&host, &first(protocol), other_origin(origin));
            is_answered(&host, &sent);
            let next = reaches_a_backend(&host, &next(protocol), origin);
            assert_eq!(next, with_flags_of(&sent, protocol));
            host.wait(REFRESH_AFTER + SUSTAINED_AFTER);
        }
        host.assert_whole();
    });
}

/// The forged one came first, and is forgotten first.
#[test]
fn a_flow_goes_on_when_the_one_with_the_same_ends_is_gone() {
    all_origins(|protocol, origin| {
        let host = Host::new();
        reaches_a_backend(&host, &first(protocol), other_origin(origin));
        let forged = host.flow_of(Stage::Opening, &first(protocol));
        let sent = reaches_a_backend(&host, &first(protocol), origin);
        is_answered(&host, &sent);
        let keys = [forged.client_key(), forged.backend_key(), forged.masquerade_key()];
        assert!(keys.iter().any(|key| host.remove(Stage::Opening, key)));
        keys.iter().for_each(|key| _ = host.remove(Stage::Opening, key));
        for _ in 0..2 {
            let next = reaches_a_backend(&host, &next(protocol), origin);
            assert_eq!(next, with_flags_of(&sent, protocol));
            is_answered(&host, &sent);
            host.wait(REFRESH_AFTER + SUSTAINED_AFTER);
        }
    });
}

#[test]
fn segments_of_another_client_are_not_translated_before_the_client_is_confirmed() {
    for origin in [Origin::Workload, Origin::Outside] {
        let host = Host::new();
        reaches_a_backend(&host, &syn(), other_origin(origin));
        for flags in [TCP_ACK, TCP_RST, TCP_FIN | TCP_ACK, 0] {
            let forged = packet(CLIENT, FRONTEND, flags);
            assert_eq!(host.arriving(&forged, origin), Err(Reason::NotAService), "{flags}");
        }
    }
}

/// An interface may be given another role while it has connections.
#[test]
fn a_confirmed_connection_goes_on_by_an_interface_of_another_role() {
    for origin in [Origin::Workload, Origin::Outside] {
        let host = Host::new();
        let flow = establish_one(&host, origin);
        let moved = host.arriving(&packet(CLIENT, FRONTEND, TCP_ACK), other_origin(origin));
        assert_eq!(moved.map(destination), Ok((flow.backend, PORT)));
    }
}

/// Datagrams prove nothing of their client. So an interface that got another role looks like a
/// client that has forged the address. The datagrams there are another client's, and may reach
/// another backend. The first flow is as it was.
#[test]
fn datagrams_that_go_on_follow_no_interface_to_another_role() {
    for origin in [Origin::Workload, Origin::Outside] {
        let host = Host::new();
        let datagram = first(PROTOCOL_UDP);
        let sent = reaches_a_backend(&host, &datagram, origin);
        is_answered(&host, &sent);
        host.wait(SUSTAINED_AFTER);
        is_answered(&host, &sent);
        reaches_a_backend(&host, &datagram, origin);
        assert_ne!(host.entries(Stage::Established), 0);

        host.dice.borrow_mut().extend([LAST; 8]);
        let moved = reaches_a_backend(&host, &datagram, other_origin(origin));
        assert_ne!(moved.destination, sent.destination);
        is_answered(&host, &moved);
        is_answered(&host, &sent);
        assert_eq!(reaches_a_backend(&host, &datagram, origin), sent);
    }
}

#[test]
fn a_forged_address_of_the_node_decides_nothing_for_the_node() {
    for protocol in BOTH {
        for origin in [Origin::Workload, Origin::Outside] {
            let host = Host::new();
            host.arriving(&first(protocol), origin).unwrap();
            let sent = host.sent(&first(protocol)).unwrap();
            assert!(BACKENDS.contains(&sent.destination));
            assert_eq!(host.sent(&first(protocol)), Ok(sent));
        }
    }
}

#[test]
fn a_new_connection_replaces_one_that_has_ended() {
    for origin in [Origin::Workload, Origin::Outside] {
        let host = Host::new();
        reaches_a_backend(&host, &syn(), other_origin(origin));
        let sent = reaches_a_backend(&host, &syn(), origin);
        let backend = (sent.destination, sent.destination_port);
        let refusal = answer(backend, (sent.source, sent.source_port), TCP_RST | TCP_ACK);
        let inside = match host.arriving(&refusal, Origin::Outside) {
            Ok(rewrite) => rewritten(&refusal, rewrite),
            Err(_) => refusal,
        };
        host.leaving(&inside).unwrap();
        let again = reaches_a_backend(&host, &syn(), origin);
        is_answered(&host, &again);
        assert_eq!(host.counted(Reason::FlowReplaced), 1);
    }
}
