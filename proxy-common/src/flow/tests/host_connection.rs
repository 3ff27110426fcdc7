//! Host connections beside flows that are masqueraded to the same address.

use rstest::rstest;

use super::*;

const BACKEND: (A, Port) = (BACKENDS[0], PORT);
/// What flows get first.
const FIRST_PORT: (A, Port) = (NODE, Port::new(20_000));
/// And then, as [`source_of_flow`] throws the dice.
const LAST_PORT: (A, Port) = (NODE, Port::new(20_099));

/// A packet of a socket of the node, or of a pod that netfilter masquerades.
fn of_host_connection(protocol: u8, flags: u8) -> Packet<A> {
    of(protocol, FIRST_PORT, BACKEND, flags)
}

fn of(protocol: u8, source: (A, Port), destination: (A, Port), flags: u8) -> Packet<A> {
    if protocol == PROTOCOL_TCP { packet(source, destination, flags) } else { datagram(source, destination) }
}

fn answer_to(protocol: u8, destination: (A, Port)) -> Packet<A> {
    if protocol == PROTOCOL_TCP {
        answer(BACKEND, destination, TCP_SYN | TCP_ACK)
    } else {
        datagram(BACKEND, destination)
    }
}

/// With which source a new flow leaves.
fn source_of_flow(host: &Host, protocol: u8) -> Result<(A, Port), Reason> {
    // For the backend, for the alias, and for ports.
    *host.dice.borrow_mut() = [FIRST, FIRST, FIRST, LAST].into();
    let sent = through(host, &of(protocol, CLIENT, FRONTEND, TCP_SYN), Origin::Outside)?;
    host.dice.borrow_mut().clear();
    Ok((sent.source, sent.source_port))
}

fn passes(host: &Host, packet: &Packet<A>) {
    assert_eq!(host.leaving(packet), Err(Reason::NotAService));
}

#[rstest]
#[case::connection(PROTOCOL_TCP, vec![TCP_SYN], 0, LAST_PORT)]
#[case::lasting_connection(PROTOCOL_TCP, vec![TCP_SYN, TCP_ACK], 100_000, LAST_PORT)]
#[case::closed_connection(PROTOCOL_TCP, vec![TCP_SYN, TCP_ACK, TCP_FIN | TCP_ACK, TCP_ACK], 0, FIRST_PORT)]
#[case::reset_connection(PROTOCOL_TCP, vec![TCP_SYN, TCP_RST], 0, FIRST_PORT)]
#[case::closed_and_opened_anew(PROTOCOL_TCP, vec![TCP_SYN, TCP_FIN | TCP_ACK, TCP_SYN], 0, LAST_PORT)]
#[case::answers_of_the_node(PROTOCOL_TCP, vec![TCP_SYN | TCP_ACK, TCP_ACK], 0, FIRST_PORT)]
#[case::datagrams(PROTOCOL_UDP, vec![0], 119, LAST_PORT)]
#[case::silent_datagrams(PROTOCOL_UDP, vec![0], 120, FIRST_PORT)]
fn a_flow_leaves_the_ends_to_who_has_them(
    #[case] protocol: u8,
    #[case] sent: Vec<u8>,
    #[case] seconds_later: u64,
    #[case] expected: (A, Port),
) {
    let host = Host::new();
    for flags in sent {
        passes(&host, &of_host_connection(protocol, flags));
    }
    host.wait(seconds_later * SECOND);
    assert_eq!(source_of_flow(&host, protocol), Ok(expected));
}

#[test]
fn datagrams_that_go_on_keep_their_ends() {
    let host = Host::new();
    for _ in 0..3 {
        passes(&host, &of_host_connection(PROTOCOL_UDP, 0));
        host.wait(100 * SECOND);
    }
    assert_eq!(source_of_flow(&host, PROTOCOL_UDP), Ok(LAST_PORT));
}

/// Its connection may have ended without a segment from here: nobody would answer its SYN, or with a RST.
#[test]
fn where_there_is_no_other_port_an_old_connection_holds_none() {
    let host = Host { ports: 20_000..20_001, ..Host::new() };
    passes(&host, &of_host_connection(PROTOCOL_TCP, TCP_SYN));
    assert_eq!(source_of_flow(&host, PROTOCOL_TCP), Err(Reason::MasqueradePortsExhausted));
    host.wait(120 * SECOND);
    assert_eq!(source_of_flow(&host, PROTOCOL_TCP), Ok(FIRST_PORT));
}

/// Packets of an overlay, or of a socket, at a port that flows are given last.
#[rstest]
#[case::datagrams(PROTOCOL_UDP, false)]
#[case::connection(PROTOCOL_TCP, true)]
fn at_a_port_of_sockets(#[case] protocol: u8, #[case] is_noted: bool) {
    let host = Host::new();
    let sent = of(protocol, (NODE, Port::new(40_000)), BACKEND, TCP_SYN);
    passes(&host, &sent);
    assert_eq!(host.host_connection(&sent.key()).is_some(), is_noted);
}

#[rstest]
#[case::connection(PROTOCOL_TCP)]
#[case::datagrams(PROTOCOL_UDP)]
fn who_meets_a_masqueraded_flow_gets_another_port(#[case] protocol: u8) {
    let host = Host::new();
    assert_eq!(source_of_flow(&host, protocol), Ok(FIRST_PORT));
    let first = host.leaving(&of_host_connection(protocol, TCP_SYN)).unwrap();
    let other_port = source(first);
    assert_eq!((other_port.0, destination(first)), (NODE, BACKEND));
    assert_ne!(other_port, FIRST_PORT);
    assert_eq!(source(host.leaving(&of_host_connection(protocol, TCP_ACK)).unwrap()), other_port);
    // A third has the port that the second has got.
    let third = host.leaving(&of(protocol, other_port, BACKEND, TCP_SYN)).unwrap();
    assert!(![FIRST_PORT, other_port].contains(&source(third)), "{:?}", source(third));
    let of_third = host.arriving(&answer_to(protocol, source(third)), Origin::Outside).unwrap();
    assert_eq!(destination(of_third), other_port);
    let answered = host.arriving(&answer_to(protocol, other_port), Origin::Outside).unwrap();
    assert_eq!((source(answered), destination(answered)), (BACKEND, FIRST_PORT));
    let of_flow = host.arriving(&answer_to(protocol, FIRST_PORT), Origin::Outside).unwrap();
    assert_eq!((source(of_flow), destination(of_flow)), (BACKEND, CLIENT));
    // The second keeps its port when the flow is gone, and when another has the flow's.
    let of_client = |key: &(Stage, FlowKey<A>)| {
        let flow = host.flow(key.0, &key.1).unwrap().read();
        flow.client == CLIENT.0
    };
    let gone: Vec<_> = host.flows.borrow().keys().copied().collect();
    for key in gone.into_iter().filter(of_client) {
        host.remove(key.0, &key.1);
    }
    assert_eq!(source(host.leaving(&of_host_connection(protocol, TCP_ACK)).unwrap()), other_port);
    assert_eq!(source_of_flow(&host, protocol), Ok(FIRST_PORT));
    assert_eq!(source(host.leaving(&of_host_connection(protocol, TCP_ACK)).unwrap()), other_port);
}

/// Also where one had met a flow at the same port before.
#[test]
fn who_meets_none_keeps_its_port() {
    let host = Host::new();
    host.set_remapped(FIRST_PORT.1);
    passes(&host, &of_host_connection(PROTOCOL_TCP, TCP_SYN));
    assert_eq!(source_of_flow(&host, PROTOCOL_TCP), Ok(LAST_PORT));
}

#[test]
fn after_its_end_one_with_the_same_ends_gets_a_port_of_its_own() {
    let host = Host::new();
    assert_eq!(source_of_flow(&host, PROTOCOL_TCP), Ok(FIRST_PORT));
    let other_port = source(host.leaving(&of_host_connection(PROTOCOL_TCP, TCP_SYN)).unwrap());
    host.arriving(&answer_to(PROTOCOL_TCP, other_port), Origin::Outside).unwrap();
    for flags in [TCP_ACK, TCP_RST] {
        host.leaving(&of_host_connection(PROTOCOL_TCP, flags)).unwrap();
    }
    host.leaving(&of_host_connection(PROTOCOL_TCP, TCP_SYN)).unwrap();
    assert_eq!(host.counted(Reason::FlowReplaced), 1);
}

#[test]
fn a_segment_in_the_middle_of_a_connection_gets_no_other_port() {
    let host = Host::new();
    assert_eq!(source_of_flow(&host, PROTOCOL_TCP), Ok(FIRST_PORT));
    passes(&host, &of_host_connection(PROTOCOL_TCP, TCP_ACK));
}

#[test]
fn other_sources_are_no_concern() {
    let host = Host::new();
    let direct = packet(CLIENT, BACKEND, TCP_SYN);
    passes(&host, &direct);
    assert_eq!(host.host_connection(&direct.key()), None);
}

#[test]
fn without_another_port_it_is_refused_with_a_reason() {
    let host = Host { ports: 20_000..20_001, ..Host::new() };
    assert_eq!(source_of_flow(&host, PROTOCOL_TCP), Ok(FIRST_PORT));
    assert_eq!(host.leaving(&of_host_connection(PROTOCOL_TCP, TCP_SYN)), Err(Reason::AliasPortsExhausted));
}

/// Netfilter masquerades to any port from 1024 on.
#[rstest]
#[case::reserved(20_000)]
#[case::of_sockets(30_080)]
fn answers_to_a_port_that_is_a_node_port_open_no_flow(#[case] number: u16) {
    let node_port = (NODE, Port::new(number));
    let mut host = Host::new();
    let key = FrontendKey::of_node_port(node_port.1, PROTOCOL_UDP);
    host.maps.frontends.insert(key, Frontend { service: 1, flags: FRONTEND_EXTERNAL });
    host.maps.node_addresses.insert(NODE, NodeAddress { flags: 0 });
    passes(&host, &of(PROTOCOL_UDP, node_port, BACKEND, 0));
    let answer = answer_to(PROTOCOL_UDP, node_port);
    assert_eq!(host.arriving(&answer, Origin::Outside), Err(Reason::NotAService));
    // Later it may be a client.
    host.wait(120 * SECOND);
    assert!(host.arriving(&answer, Origin::Outside).is_ok());
}

/// Also before the maps have it as one.
#[test]
fn what_others_masquerade_to_a_later_node_port_is_theirs() {
    let node_port = (NODE, Port::new(30_080));
    let mut host = Host { ports: 20_000..40_000, ..Host::new() };
    host.maps.node_addresses.insert(NODE, NodeAddress { flags: 0 });
    passes(&host, &of(PROTOCOL_UDP, node_port, BACKEND, 0));
    let key = FrontendKey::of_node_port(node_port.1, PROTOCOL_UDP);
    host.maps.frontends.insert(key, Frontend { service: 1, flags: FRONTEND_EXTERNAL });
    let answer = answer_to(PROTOCOL_UDP, node_port);
    assert_eq!(host.arriving(&answer, Origin::Outside), Err(Reason::NotAService));
}

/// Rules of netfilter serve the node port while packets are held.
#[test]
fn clients_of_former_rules_get_flows() {
    let node_port = (NODE, Port::new(30_080));
    let mut host = Host { ports: 20_000..40_000, holds_packets: true, ..Host::new() };
    host.maps.node_addresses.insert(NODE, NodeAddress { flags: 0 });
    let key = FrontendKey::of_node_port(node_port.1, PROTOCOL_UDP);
    host.maps.frontends.insert(key, Frontend { service: 1, flags: FRONTEND_EXTERNAL });
    passes(&host, &datagram(node_port, CLIENT));
    host.holds_packets = false;
    assert!(host.arriving(&datagram(CLIENT, node_port), Origin::Outside).is_ok());
}

/// The programs are attached before the maps have all frontends.
#[rstest]
#[case::the_frontend_is_there(true)]
#[case::the_frontend_comes_later(false)]
fn clients_of_a_former_proxys_socket_get_flows(#[case] is_known_before: bool) {
    let node_port = (NODE, Port::new(30_080));
    let mut host = Host { ports: 20_000..40_000, ..Host::new() };
    host.maps.node_addresses.insert(NODE, NodeAddress { flags: 0 });
    let answer = datagram(node_port, CLIENT);
    let publish = |host: &mut Host| {
        let key = FrontendKey::of_node_port(node_port.1, PROTOCOL_UDP);
        host.maps.frontends.insert(key, Frontend { service: 1, flags: FRONTEND_EXTERNAL });
    };
    if is_known_before {
        publish(&mut host);
    }
    let mut scratch = Scratch { packet: answer, is_made_here: true, ..Scratch::default() };
    assert_eq!(leaving(&host, &mut scratch, false), Err(Reason::NotAService));
    publish(&mut host);
    assert!(host.arriving(&datagram(CLIENT, node_port), Origin::Outside).is_ok());
}

/// The map `remapped_ports` forgets a port two generations after its last flow.
#[rstest]
#[case::never_set(0, 1, false)]
#[case::set_now(7, 7, true)]
#[case::set_in_the_generation_before(6, 7, true)]
#[case::two_generations_ago(5, 7, false)]
#[case::the_generation_is_just_raised(8, 7, true)]
#[case::by_a_former_version(1, 1, true)]
fn ports_that_count_as_remapped(#[case] set_in: u32, #[case] generation: u32, #[case] expected: bool) {
    assert_eq!(is_remapped(set_in, generation), expected);
}
