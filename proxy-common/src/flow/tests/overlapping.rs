//! Connections to an endpoint itself beside a flow of the same client to the same endpoint.

use super::*;

/// The client port of a flow also dials the flow's backend itself: each answer goes to who asked.
#[test]
fn a_direct_connection_beside_a_flow_has_answers_of_its_own() {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    let endpoint = (flow.backend, PORT);

    let sent = host.arriving(&packet(CLIENT, endpoint, TCP_SYN), Origin::Workload).unwrap();
    assert_eq!(destination(sent), endpoint);
    let alias = sent.source_port;
    assert_ne!(alias, CLIENT.1);
    host.assert_whole();
    assert_eq!((flow.service, sent.service), (1, NO_SERVICE));
    assert_eq!(host.connections.borrow().get(&1), Some(&1), "the direct one is no connection of the service");
    let again = host.arriving(&packet(CLIENT, endpoint, TCP_ACK), Origin::Workload).unwrap();
    assert_eq!(again.source_port, alias);

    let direct = host.leaving(&answer(endpoint, (CLIENT.0, alias), TCP_SYN | TCP_ACK)).unwrap();
    assert_eq!((source(direct), destination(direct)), (endpoint, CLIENT));
    let of_flow = host.leaving(&answer(endpoint, CLIENT, TCP_ACK)).unwrap();
    assert_eq!((source(of_flow), destination(of_flow)), (FRONTEND, CLIENT));
}

/// As above, where the endpoint is a frontend too.
#[test]
fn a_connection_to_a_frontend_that_is_the_backend_of_another_flow() {
    let mut host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    let endpoint = (flow.backend, PORT);
    let set = EndpointSet::new(1, 1);
    host.maps
        .services
        .insert(2, Service { cluster: set, internal: set, external: set, flags: 1, ..Service::default() });
    let key = FrontendKey::of_address(endpoint.0, endpoint.1, PROTOCOL_TCP);
    host.maps.frontends.insert(key, Frontend { service: 2, flags: 0 });
    let sent = host.arriving(&packet(CLIENT, endpoint, TCP_SYN), Origin::Workload).unwrap();
    assert_eq!((sent.destination, sent.service), (BACKENDS[1], 2));
    let back = host.leaving(&answer((BACKENDS[1], PORT), CLIENT, TCP_SYN | TCP_ACK)).unwrap();
    assert_eq!((source(back), destination(back)), (endpoint, CLIENT));
    assert_eq!(host.arriving(&packet(CLIENT, endpoint, TCP_ACK), Origin::Workload), Ok(sent));
    assert_eq!(
        host.arriving(&packet(CLIENT, FRONTEND, TCP_ACK), Origin::Workload).map(|r| r.destination),
        Ok(endpoint.0)
    );
    host.assert_whole();
}

/// Removes all entries of a flow, as when its lifetime is over.
fn forget(host: &Host, flow: &Flow<A>) {
    for key in [flow.client_key(), flow.backend_key()] {
        for stage in [Stage::Opening, Stage::Established] {
            host.remove(stage, &key);
        }
    }
}

#[rstest]
fn a_direct_connection_goes_on_when_the_overlapping_flow_is_gone(
    #[values(Origin::Workload, Origin::Outside)] origin: Origin,
) {
    let mut host = Host::new();
    host.maps.slots.values_mut().for_each(|slot| slot.flags = BACKEND_LOCAL);
    let flow = establish_one(&host, origin);
    let endpoint = (flow.backend, PORT);
    let sent = host.arriving(&packet(CLIENT, endpoint, TCP_SYN), origin).unwrap();
    forget(&host, &flow);
    let next = packet(CLIENT, endpoint, TCP_ACK);
    assert_eq!(host.arriving(&next, origin), Ok(sent));
    // A new flow from the same port to the same endpoint changes nothing.
    host.arriving(&syn(), origin).unwrap();
    assert_eq!(host.arriving(&next, origin), Ok(sent));
    host.assert_whole();
}

/// A client elsewhere has forged the ends of the direct connection before it began.
#[test]
fn a_direct_connection_keyed_by_origin_goes_on_when_the_overlapping_flow_is_gone() {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    let endpoint = (flow.backend, PORT);
    let first = packet(CLIENT, endpoint, TCP_SYN);
    let forged = host.arriving(&first, Origin::Outside).unwrap();
    let sent = host.arriving(&first, Origin::Workload).unwrap();
    assert_ne!(source(sent), source(forged));
    forget(&host, &flow);
    let next = packet(CLIENT, endpoint, TCP_ACK);
    assert_eq!(host.arriving(&next, Origin::Workload), Ok(sent));
    assert_eq!(host.arriving(&next, Origin::Outside), Ok(forged));
    host.assert_whole();
}

/// Whoever dials an endpoint after both connections have ended reaches it as it is.
#[test]
fn a_direct_connection_is_not_translated_once_both_are_over() {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    let endpoint = (flow.backend, PORT);
    let first = packet(CLIENT, endpoint, TCP_SYN);
    let alias = host.arriving(&first, Origin::Workload).unwrap().source_port;
    forget(&host, &flow);
    let refusal = answer(endpoint, (CLIENT.0, alias), TCP_RST | TCP_ACK);
    assert_eq!(host.leaving(&refusal).map(destination), Ok(CLIENT));
    assert_eq!(host.arriving(&first, Origin::Workload), Err(Reason::NotAService));
    assert_eq!((host.entries(Stage::Opening), host.entries(Stage::Established)), (0, 0));
}

#[test]
fn a_direct_connection_after_a_flow_that_ended_is_no_flow() {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    for (sender, segment) in close() {
        says(sender, &host, &flow, segment).unwrap();
    }
    let endpoint = (flow.backend, PORT);
    let direct = packet(CLIENT, endpoint, TCP_SYN);
    assert_eq!(host.arriving(&direct, Origin::Workload), Err(Reason::NotAService));
    assert_eq!(host.leaving(&answer(endpoint, CLIENT, TCP_SYN | TCP_ACK)), Err(Reason::NotAService));
}

#[rstest]
#[case::another_client_port((CLIENT.0, Port::new(40_001)), TCP_SYN)]
#[case::in_the_middle_of_a_connection(CLIENT, TCP_ACK)]
fn a_direct_packet_without_an_overlapping_flow_passes(#[case] client: (A, Port), #[case] flags: u8) {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    let direct = packet(client, (flow.backend, PORT), flags);
    assert_eq!(host.arriving(&direct, Origin::Workload), Err(Reason::NotAService));
}

/// Many client ports have dialled a service, and now dial its backend itself: no alias is left for the last one.
#[test]
fn a_connection_to_a_backend_itself_takes_over_from_no_other() {
    let host = Host { ports: 0..0, ..Host::new() };
    let flow = establish_one(&host, Origin::Workload);
    let direct = packet(CLIENT, (flow.backend, PORT), TCP_SYN);
    assert_eq!(host.arriving(&direct, Origin::Workload), Err(Reason::AliasPortsExhausted));
    let of_flow = host.leaving(&answer((flow.backend, PORT), CLIENT, TCP_ACK)).unwrap();
    assert_eq!(source(of_flow), FRONTEND);
}

/// Two peers of UDP that send from the port at which they are dialled: an answer of one's flow is not an opening of the other's.
#[test]
fn symmetric_peers_keep_their_flows_apart() {
    let mut host = Host::new();
    let peers = [(CLIENT.0, PORT), (BACKENDS[0], PORT)];
    host.maps.slots.insert(2, Slot4::new(peers[0].0, PORT, 3, 0));
    host.maps.backends.insert(3, Backend::default());
    let set = EndpointSet::new(2, 1);
    host.maps
        .services
        .insert(2, Service { cluster: set, internal: set, external: set, flags: 1, ..Service::default() });
    let frontends = [FRONTEND, ([10, 96, 0, 9], PORT)];
    let key = FrontendKey::of_address(frontends[1].0, frontends[1].1, PROTOCOL_UDP);
    host.maps.frontends.insert(key, Frontend { service: 2, flags: 0 });

    let there = host.arriving(&datagram(peers[0], frontends[0]), Origin::Workload).unwrap();
    assert_eq!((source(there), destination(there)), (peers[0], peers[1]));
    let back = host.arriving(&datagram(peers[1], frontends[1]), Origin::Workload).unwrap();
    assert_eq!(destination(back), peers[0]);
    assert_ne!(source(back), peers[1], "these would be the ends of the first flow");
    // Answers to both, as the node sees them on both hooks.
    let first = datagram(peers[1], peers[0]);
    assert_eq!(host.arriving(&first, Origin::Workload), Err(Reason::NotAService));
    assert_eq!(host.leaving(&first).map(source), Ok(frontends[0]));
    let second = datagram(peers[0], source(back));
    assert_eq!(host.arriving(&second, Origin::Workload), Err(Reason::NotAService));
    let second = host.leaving(&second).unwrap();
    assert_eq!((source(second), destination(second)), (frontends[1], peers[1]));
    host.assert_whole();
    assert_eq!(host.entries(Stage::Opening), 4);
}

/// The map of opening flows evicts one entry of a flow, and another flow takes the key.
#[rstest]
#[case::connection(PROTOCOL_TCP)]
#[case::datagrams(PROTOCOL_UDP)]
fn a_flow_whose_answers_are_anothers_by_now_enters_no_connection(#[case] protocol: u8) {
    let host = Host::new();
    let of = |packet: Packet<A>| Packet { protocol, ..packet };
    let open = |client| {
        host.arriving(&of(packet(client, FRONTEND, TCP_SYN)), Origin::Workload).unwrap();
        // Its port is taken at this backend, so it gets an alias; the dice give both flows the same.
        let alias = host
            .arriving(&of(packet(client, OTHER_FRONTEND, TCP_SYN)), Origin::Workload)
            .unwrap()
            .source_port;
        let answer = of(answer((BACKENDS[0], PORT), (CLIENT.0, alias), TCP_SYN | TCP_ACK));
        assert_eq!(host.leaving(&answer).map(destination), Ok(client));
        answer
    };
    let answer = open(CLIENT);
    host.remove(Stage::Opening, &answer.key());
    let other = (CLIENT.0, Port::new(40_001));
    assert_eq!(open(other), answer);
    if protocol == PROTOCOL_TCP {
        host.arriving(&packet(other, OTHER_FRONTEND, TCP_ACK), Origin::Workload).unwrap();
    }
    host.wait(SUSTAINED_AFTER);
    if protocol == PROTOCOL_UDP {
        host.flow(Stage::Opening, &of(packet(CLIENT, OTHER_FRONTEND, 0)).key())
            .unwrap()
            .write(Change::Progress(PROGRESS_SUSTAINED));
    }
    let late = host.arriving(&of(packet(CLIENT, OTHER_FRONTEND, TCP_ACK)), Origin::Workload);
    assert_eq!(late, Err(Reason::FlowReplaced));
    assert_eq!(host.leaving(&answer).map(destination), Ok(other));
    host.assert_whole();
}
