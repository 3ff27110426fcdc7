//! Tests of flows whose answers are not seen: the state to which a client alone brings them, and how
//! long they are kept.

use super::*;

/// What the entries know of the flow, and in which map it is.
fn noted(host: &Host) -> (FlowState, Stage) {
    let is_established = host.flow(Stage::Established, &syn().key()).is_some();
    let stage = if is_established { Stage::Established } else { Stage::Opening };
    (host.flow_of(stage, &syn()).state, stage)
}

fn lifetime(host: &Host) -> u64 {
    FlowLifetimes::default().of(PROTOCOL_TCP, noted(host).0).as_secs()
}

/// The client's packets of a connection, with seconds before each, and what is known then: how long the flow is kept, and in which map.
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
    assert_eq!((lifetime(&host), noted(&host).1), (seconds, stage));
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

/// Clients whose answers nobody sees may be made up: they must not fill the map that does not evict.
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
