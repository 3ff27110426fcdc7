//! Tests of ports that tell the answers of flows apart, and of ports that netfilter, a pod or the
//! node has taken.

use super::*;

#[test]
fn netfilter_keeps_the_ports_of_its_connections() {
    let host = Host::new();
    let (backend, first) = ((BACKENDS[0], PORT), Port::new(20_000));
    let other = (CLIENT.0, Port::new(50_000));
    // The frontends are those of a service that is gone, and of one that netfilter alone serves.
    let of_netfilter = [(other, (NODE, first)), (CLIENT, CLIENT)].map(|(client, answers_to)| {
        let frontend = ([10, 96, 0, 9], Port::new(80));
        NetfilterConnection { client, frontend, backend, answers_to }
    });
    let of_netfilter = of_netfilter.map(|connection| reserve(&host, &connection));
    let sent = through(&host, &syn(), Origin::Outside).unwrap();
    assert_eq!((sent.source, sent.source_port), (NODE, Port::new(20_001)));
    assert_ne!(host.flow_of(Stage::Opening, &syn()).alias_port(), CLIENT.1);
    // Packets of them are netfilter's, and they live on.
    host.wait(REFRESH_AFTER);
    assert_eq!(
        host.arriving(&answer(backend, (NODE, first), TCP_ACK), Origin::Outside),
        Err(Reason::NotAService)
    );
    assert_eq!(host.leaving(&answer(backend, CLIENT, TCP_ACK)), Err(Reason::NotAService));
    assert_eq!(host.arriving(&packet(CLIENT, backend, TCP_SYN), Origin::Workload), Err(Reason::NotAService));
    for flow in of_netfilter {
        let [_, answers] = flow.netfilter_keys();
        let mut entry = host.flow(Stage::Established, &answers).unwrap().read();
        assert!(entry.last_seen > flow.last_seen);
        (entry.last_seen, entry.state.reset) = (flow.last_seen, 0);
        assert_eq!(entry, flow);
    }
}

/// Reserves both pairs of ends as the controller does.
fn reserve(host: &Host, connection: &NetfilterConnection<A>) -> Flow<A> {
    let flow = Flow::of_netfilter(connection, host.now());
    for key in flow.netfilter_keys() {
        host.insert(Stage::Established, &key, &flow).unwrap();
    }
    flow
}

#[rstest]
fn no_forged_packet_takes_a_connection_from_netfilter(
    #[values(Origin::Workload, Origin::Outside)] origin: Origin,
    #[values(CLIENT, (NODE, Port::new(20_000)), (NODE, Port::new(60_000)))] answers_to: (A, Port),
) {
    let host = Host::new();
    let backend = (BACKENDS[0], PORT);
    let connection = NetfilterConnection { client: CLIENT, frontend: FRONTEND, backend, answers_to };
    let flow = reserve(&host, &connection);
    for flags in [TCP_SYN, TCP_ACK, TCP_RST, TCP_FIN | TCP_ACK, TCP_SYN, TCP_ACK] {
        host.wait(REFRESH_AFTER);
        for (from, to) in [(CLIENT, FRONTEND), (backend, answers_to)] {
            assert_eq!(host.arriving(&packet(from, to, flags), origin), Err(Reason::NotAService));
        }
        assert_eq!(host.leaving(&packet(FRONTEND, CLIENT, flags)), Err(Reason::NotAService));
    }
    assert_eq!((host.entries(Stage::Opening), host.entries(Stage::Established)), (0, 2));
    // Once it has ended, both are free.
    assert_eq!(collect::remove_if(&host, &flow, |_| true), Ok(2));
    assert!(host.arriving(&syn(), origin).is_ok());
}

/// The client may dial again after its connection has ended: the controller is to ask.
#[rstest]
#[case::client_goes_on(TCP_ACK, 0)]
#[case::client_closes(TCP_FIN | TCP_ACK, 0)]
#[case::client_dials(TCP_SYN, RESET_PLAUSIBLE)]
fn a_syn_marks_a_connection_of_netfilters(#[case] flags: u8, #[case] expected: u8) {
    let host = Host::new();
    let backend = (BACKENDS[0], PORT);
    let connection = NetfilterConnection { client: CLIENT, frontend: FRONTEND, backend, answers_to: CLIENT };
    reserve(&host, &connection);
    let passes = host.arriving(&packet(CLIENT, FRONTEND, flags), Origin::Workload);
    assert_eq!(passes, Err(Reason::NotAService));
    let kept = host.flow_of(Stage::Established, &syn());
    assert_eq!((kept.state.reset, kept.state.has_ended()), (expected, false));
    assert_eq!(host.entries(Stage::Opening), 0);
}

/// The client's port is in use towards the backend.
#[rstest]
fn a_new_flow_keeps_away_from_a_connection_of_the_client_to_the_backend(
    #[values(PROTOCOL_TCP, PROTOCOL_UDP)] protocol: u8,
    #[values(true, false)] is_same_backend: bool,
) {
    let host = Host::new();
    let backend = BACKENDS[usize::from(!is_same_backend)];
    let sockets = ConnectedTo(vec![(backend, PORT)]);
    let first = if protocol == PROTOCOL_TCP { syn() } else { datagram(CLIENT, FRONTEND) };
    let mut scratch = Scratch { packet: first, ..Scratch::default() };
    decide_arriving_from(&host, &mut scratch, Origin::Workload, &sockets).unwrap();
    let inside = rewritten(&first, scratch.action.rewrite);
    assert_eq!((inside.destination, inside.source), (BACKENDS[0], CLIENT.0));
    assert_eq!(inside.source_port == CLIENT.1, !is_same_backend);
    // The backend's segments on the client's own connection pass.
    let own = Packet { protocol, ..answer((backend, PORT), CLIENT, TCP_ACK) };
    assert_eq!(host.leaving(&own), Err(Reason::NotAService));
    // The next packets do not ask.
    assert_eq!(host.arriving(&first, Origin::Workload).map(source), Ok((CLIENT.0, inside.source_port)));
    let flags = TCP_SYN | TCP_ACK;
    let reply = Packet { protocol, ..answer((BACKENDS[0], PORT), (CLIENT.0, inside.source_port), flags) };
    let left = host.leaving(&reply).unwrap();
    assert_eq!((source(left), destination(left)), (FRONTEND, CLIENT));
}

/// The pool of aliases has the client's own port, and the dice choose it.
#[test]
fn an_alias_is_never_the_port_that_is_taken() {
    let pool = || Host { ports: CLIENT.1.number()..CLIENT.1.number() + 100, ..Host::new() };
    let host = pool();
    let sockets = ConnectedTo(vec![(BACKENDS[0], PORT)]);
    let mut scratch = Scratch { packet: syn(), ..Scratch::default() };
    decide_arriving_from(&host, &mut scratch, Origin::Workload, &sockets).unwrap();
    assert_ne!(scratch.action.rewrite.source_port, CLIENT.1, "a pod's");
    assert_ne!(pool().sent(&syn()).unwrap().source_port, CLIENT.1, "a process of the node's");
}

#[test]
fn a_client_port_at_one_backend_through_many_frontends_runs_out_of_aliases() {
    let mut host = Host { ports: 20_000..20_007, ..Host::new() };
    let set = EndpointSet::new(0, 1);
    host.maps
        .services
        .insert(1, Service { cluster: set, internal: set, external: set, flags: 1, ..Service::default() });
    let frontends = (1..=20u8).map(|n| ([10, 96, 1, n], Port::new(80)));
    for (address, port) in frontends.clone() {
        let key = FrontendKey::of_address(address, port, PROTOCOL_TCP);
        host.maps.frontends.insert(key, Frontend { service: 1, flags: 0 });
    }
    let opened: Vec<_> =
        frontends.map(|to| host.arriving(&packet(CLIENT, to, TCP_SYN), Origin::Workload)).collect();
    // Its own port and all aliases.
    let good = opened.iter().filter(|result| result.is_ok()).count();
    assert_eq!(good, 8);
    assert_eq!(opened.last(), Some(&Err(Reason::AliasPortsExhausted)));
    let mut ports: Vec<Port> = opened.iter().flatten().map(|rewrite| rewrite.source_port).collect();
    ports.dedup();
    assert_eq!(ports.len(), good);
    host.assert_whole();
}

#[test]
fn the_nodes_own_flows_are_told_apart() {
    let host = Host::new();
    let sent = host.sent(&syn()).unwrap();
    let endpoint = (BACKENDS[0], PORT);
    let answered = |host: &Host, port: Port| {
        let packet = answer(endpoint, (CLIENT.0, port), TCP_SYN | TCP_ACK);
        host.arrived(&packet, Origin::Outside)
            .map(|(rewrite, then)| (source(rewrite), destination(rewrite), then))
    };
    assert_eq!(answered(&host, sent.source_port), Ok((FRONTEND, CLIENT, Then::IntoNode)));
    host.assert_whole();
    // What the node sends to a backend itself is not seen: its answers look like this.
    assert_eq!(answered(&host, CLIENT.1), Err(Reason::NotAService));
    // A pod's flow is none of them.
    let host = Host::new();
    let sent = host.arriving(&syn(), Origin::Workload).unwrap();
    assert_eq!(answered(&host, sent.source_port), Err(Reason::NotAService));
}

#[test]
fn the_nodes_own_flows_are_established_as_any() {
    let host = Host::new();
    let sent = host.sent(&syn()).unwrap();
    let back = answer((BACKENDS[0], PORT), (CLIENT.0, sent.source_port), TCP_SYN | TCP_ACK);
    host.arriving(&back, Origin::Outside).unwrap();
    assert_eq!(host.sent(&packet(CLIENT, FRONTEND, TCP_ACK)), Ok(sent));
    assert_eq!(host.entries(Stage::Established), 2);
}

#[test]
fn the_nodes_own_flows_and_masqueraded_ones_share_one_pool_of_ports() {
    let host = Host::new();
    let own = host.sent(&packet((NODE, CLIENT.1), FRONTEND, TCP_SYN)).unwrap();
    let outside = through(&host, &packet(CLIENT, FRONTEND, TCP_SYN), Origin::Outside).unwrap();
    assert_eq!(destination(own), (outside.destination, outside.destination_port));
    assert_eq!(outside.source, NODE);
    assert_ne!(outside.source_port, own.source_port);
    host.assert_whole();
}

#[test]
fn the_nodes_own_flow_keeps_its_port_where_there_is_no_other() {
    let host = Host { ports: 0..0, ..Host::new() };
    assert_eq!(host.sent(&syn()).unwrap().source_port, CLIENT.1);
}

/// Whose answers must come back through this node, and whose port must be another one.
#[rstest]
#[case::from_outside_to_another_node(CLIENT, Origin::Outside, 0, true, false)]
#[case::from_outside_to_this_node(CLIENT, Origin::Outside, BACKEND_LOCAL, false, false)]
#[case::from_a_pod(CLIENT, Origin::Workload, 0, false, false)]
#[case::from_the_backends_own_port_elsewhere((CLIENT.0, PORT), Origin::Workload, 0, false, false)]
#[case::from_the_backend_itself((BACKENDS[0], CLIENT.1), Origin::Workload, BACKEND_LOCAL, true, false)]
#[case::from_the_backends_own_port((BACKENDS[0], PORT), Origin::Workload, BACKEND_LOCAL, true, true)]
fn clients_and_how_their_flows_are_told_apart(
    #[case] client: (A, Port),
    #[case] origin: Origin,
    #[case] slot_flags: u32,
    #[case] masqueraded: bool,
    #[case] alias: bool,
    #[values(0, FRONTEND_EXTERNAL)] frontend_flags: u32,
) {
    let mut host = Host::new();
    host.maps.slots.insert(0, Slot4::new(BACKENDS[0], PORT, 1, slot_flags));
    let key = FrontendKey::of_address(FRONTEND.0, FRONTEND.1, PROTOCOL_TCP);
    host.maps.frontends.insert(key, Frontend { service: 1, flags: frontend_flags });
    let first = packet(client, FRONTEND, TCP_SYN);
    let sent = through(&host, &first, origin).unwrap();
    assert_eq!(sent.destination, BACKENDS[0]);
    let flow = host.flow_of(Stage::Opening, &first);
    assert_eq!((flow.is_masqueraded(), flow.alias_port() != client.1), (masqueraded, alias));
    assert_eq!(sent.source, if masqueraded { NODE } else { client.0 });
    assert_eq!(host.entries(Stage::Opening), if masqueraded { 3 } else { 2 });
    host.assert_whole();
}

#[test]
fn a_backend_in_the_nodes_namespace_that_dials_itself_gets_an_alias() {
    let host = Host::new();
    let client = (BACKENDS[0], CLIENT.1);
    assert_ne!(host.sent(&packet(client, FRONTEND, TCP_SYN)).map(source), Ok(client));
    assert_eq!(host.entries(Stage::Opening), 2);
}

/// An external IP that is an endpoint's own address.
#[test]
fn a_frontend_that_is_its_own_backend() {
    let mut host = Host::new();
    let endpoint = (BACKENDS[0], PORT);
    let key = FrontendKey::of_address(endpoint.0, endpoint.1, PROTOCOL_TCP);
    host.maps
        .frontends
        .insert(key, Frontend { service: 1, flags: FRONTEND_EXTERNAL | FRONTEND_LEAST_CONNECTION });
    let sent = host.arriving(&packet(CLIENT, endpoint, TCP_SYN), Origin::Workload).unwrap();
    assert_eq!(destination(sent), endpoint);
    let back = host.leaving(&answer(endpoint, source(sent), TCP_SYN | TCP_ACK)).unwrap();
    assert_eq!((source(back), destination(back)), (endpoint, CLIENT));
    host.assert_whole();
}
