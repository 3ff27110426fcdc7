//! Packets to what nobody serves, or nobody serves any more, and times at which no flow opens.

use super::*;

#[rstest]
#[case::segment(PROTOCOL_TCP, TCP_SYN, Err(Reason::UnknownPort))]
#[case::datagram(PROTOCOL_UDP, 0, Err(Reason::UnknownPort))]
#[case::of_a_connection_that_netfilter_translates(PROTOCOL_TCP, TCP_ACK, Err(Reason::NotAService))]
#[case::answer(PROTOCOL_TCP, TCP_SYN | TCP_ACK, Err(Reason::NotAService))]
fn what_opens_something_at_another_port_of_a_cluster_ip_is_refused(
    #[case] protocol: u8,
    #[case] flags: u8,
    #[case] expected: Result<(), Reason>,
) {
    let mut host = Host::new();
    host.maps.frontends.insert(FrontendKey::of_cluster_ip(FRONTEND.0), Frontend::NONE);
    let other = Packet { protocol, ..packet(CLIENT, (FRONTEND.0, Port::new(81)), flags) };
    for origin in [Origin::Workload, Origin::Outside] {
        assert_eq!(host.arriving(&other, origin).map(drop), expected);
    }
    assert_eq!(host.sent(&other).map(drop), expected);
    assert_eq!(host.leaving(&other), Err(Reason::NotAService), "the node only forwards it");
    let mut scratch = Scratch { packet: other, is_made_here: true, ..Scratch::default() };
    let is_datagram = protocol == PROTOCOL_UDP;
    let of_a_socket_that_a_hook_has_seen = if is_datagram { expected } else { Err(Reason::NotAService) };
    assert_eq!(leaving(&host, &mut scratch, false), of_a_socket_that_a_hook_has_seen);
    assert!(host.arriving(&syn(), Origin::Workload).is_ok());
}

#[test]
fn datagrams_of_a_flow_whose_port_is_gone_are_refused() {
    let mut host = Host::new();
    let datagram = datagram(CLIENT, FRONTEND);
    assert!(host.arriving(&datagram, Origin::Workload).is_ok());
    host.maps.frontends.remove(&FrontendKey::of_address(FRONTEND.0, FRONTEND.1, PROTOCOL_UDP));
    host.maps.frontends.insert(FrontendKey::of_cluster_ip(FRONTEND.0), Frontend::NONE);
    host.epoch.set(1);
    assert_eq!(host.arriving(&datagram, Origin::Workload), Err(Reason::UnknownPort));
}

#[rstest]
#[case::connection(PROTOCOL_TCP, TCP_SYN)]
#[case::datagrams(PROTOCOL_UDP, 0)]
fn what_was_never_answered_chooses_anew_when_its_backend_is_gone(
    #[case] protocol: u8,
    #[case] flags: u8,
    #[values(false, true)] gone: bool,
) {
    let mut host = Host::new();
    let first = Packet { protocol, ..packet(CLIENT, FRONTEND, flags) };
    assert_eq!(host.arriving(&first, Origin::Workload).map(|r| r.destination), Ok(BACKENDS[0]));
    if gone {
        host.maps.backends.remove(&1);
    }
    host.epoch.set(1);
    host.dice.borrow_mut().push_back(LAST);
    let again = host.arriving(&first, Origin::Workload).unwrap().destination;
    assert_eq!(again, if gone { BACKENDS[1] } else { BACKENDS[0] });
}

#[rstest]
#[case::data(Segment::new(TCP_ACK, CLIENTS, BACKENDS_NEXT, 10), true)]
#[case::end(Segment::new(TCP_FIN | TCP_ACK, CLIENTS, BACKENDS_NEXT, 0), true)]
#[case::reset(Segment::new(TCP_RST, CLIENTS, 0, 0), false)]
#[case::opening(Segment::new(TCP_SYN, CLIENT_ISN, 0, 0), false)]
#[case::acknowledges_nothing(Segment::new(0, CLIENTS, 0, 10), false)]
fn connections_to_a_gone_backend_are_reset_where_that_is_wanted(
    #[case] segment: Segment,
    #[case] is_answered: bool,
    #[values(false, true)] wanted: bool,
    #[values(false, true)] gone: bool,
) {
    let mut host = Host { resets_gone: wanted, ..Host::new() };
    let flow = establish_one(&host, Origin::Workload);
    if gone {
        host.maps.backends.remove(&flow.backend_id);
    }
    host.epoch.set(1);
    let is_reset = is_answered && wanted && gone;
    for _ in 0..2 {
        let outcome = says(Side::Client, &host, &flow, segment);
        assert_eq!(outcome.err(), is_reset.then_some(Reason::BackendGone));
    }
    if is_reset {
        assert_eq!((host.entries(Stage::Opening), host.entries(Stage::Established)), (2, 0));
    }
}

#[test]
fn packets_that_are_held_open_nothing_and_go_on_with_their_flow() {
    let mut host = Host::new();
    let (of_flow, new) = (datagram(CLIENT, FRONTEND), datagram((CLIENT.0, Port::new(41_000)), FRONTEND));
    let expected = host.arriving(&of_flow, Origin::Workload).map(|rewrite| rewrite.destination);
    host.holds_packets = true;
    assert_eq!(host.arriving(&of_flow, Origin::Workload).map(|rewrite| rewrite.destination), expected);
    assert_eq!(host.arriving(&new, Origin::Workload).err(), Some(Reason::NotAService));
    host.holds_packets = false;
    assert!(host.arriving(&new, Origin::Workload).is_ok());
}

/// While flows are copied, a connection that goes on is translated, and what dials no frontend is
/// none of ours.
#[test]
fn no_tcp_flow_opens_while_openings_are_held() {
    let mut host = Host::new();
    let (of_flow, new) = (syn(), packet((CLIENT.0, Port::new(41_000)), FRONTEND, TCP_SYN));
    let expected = host.arriving(&of_flow, Origin::Workload).map(|rewrite| rewrite.destination);
    host.holds_openings = true;
    assert_eq!(host.arriving(&of_flow, Origin::Workload).map(|rewrite| rewrite.destination), expected);
    assert_eq!(host.arriving(&new, Origin::Workload).err(), Some(Reason::OpeningsHeld));
    assert!(host.arriving(&datagram(CLIENT, FRONTEND), Origin::Workload).is_ok());
    let dialled = host.arriving(&packet(CLIENT, ([192, 0, 2, 200], PORT), TCP_SYN), Origin::Workload);
    assert_eq!(dialled.err(), Some(Reason::NotAService));
    host.holds_openings = false;
    assert!(host.arriving(&new, Origin::Workload).is_ok());
}

/// The port of a frontend has passed to another Service while the old backend lives.
#[rstest]
#[case::before_the_controller_is_done(0, 0)]
#[case::after(1, 1)]
fn datagrams_follow_their_frontend_to_another_service(#[case] epoch: u32, #[case] backend: usize) {
    let mut host = Host::new();
    let first = datagram(CLIENT, FRONTEND);
    host.arriving(&first, Origin::Workload).unwrap();
    let set = EndpointSet::new(1, 1);
    host.maps
        .services
        .insert(2, Service { cluster: set, internal: set, external: set, flags: 1, ..Service::default() });
    let key = FrontendKey::of_address(FRONTEND.0, FRONTEND.1, PROTOCOL_UDP);
    host.maps.frontends.insert(key, Frontend { service: 2, flags: 0 });
    host.epoch.set(epoch);
    assert_eq!(host.arriving(&first, Origin::Workload).map(|r| r.destination), Ok(BACKENDS[backend]));
}

/// The backend has died, and the client opens a new connection from the same port.
#[rstest]
#[case::soon(30, 0)]
#[case::after_a_minute(61, 1)]
fn a_silent_connection_to_a_backend_that_is_gone_is_given_up(#[case] seconds: u64, #[case] backend: usize) {
    let mut host = Host::new();
    establish_one(&host, Origin::Workload);
    host.maps.backends.remove(&1);
    host.dice.borrow_mut().push_back(LAST);
    // A SYN keeps nothing alive.
    for _ in 0..2 {
        host.wait(seconds * SECOND / 2);
        host.arriving(&syn(), Origin::Workload).unwrap();
    }
    assert_eq!(host.arriving(&syn(), Origin::Workload).map(|r| r.destination), Ok(BACKENDS[backend]));
}
