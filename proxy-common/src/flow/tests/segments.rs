//! Tests of segments and datagrams that prove a client, end a connection, or are forged.

use super::*;

#[rstest]
#[case::nobody_ended_it(vec![of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT)], false)]
#[case::backend_goes_on(vec![of_backend(TCP_ACK, BACKENDS_NEXT, CLIENTS)], false)]
#[case::both_closed(close(), true)]
#[case::backend_closed_first(vec![
    of_backend(TCP_FIN | TCP_ACK, BACKENDS_NEXT, CLIENTS),
    of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT + 1),
    of_client(TCP_FIN | TCP_ACK, CLIENTS, BACKENDS_NEXT + 1),
    of_backend(TCP_ACK, BACKENDS_NEXT + 1, CLIENTS + 1),
], true)]
#[case::only_the_client_closed(close()[..2].to_vec(), false)]
#[case::client_reset(vec![of_client(TCP_RST, CLIENTS, 0)], true)]
#[case::backend_reset(vec![of_backend(TCP_RST, BACKENDS_NEXT, 0)], true)]
#[case::client_reset_while_data_is_on_its_way(vec![of_client(TCP_RST, CLIENTS + 1_000, 0)], false)]
#[case::forged_reset(vec![of_client(TCP_RST, FORGED, 0)], false)]
#[case::forged_reset_of_the_backend(vec![of_backend(TCP_RST, FORGED, 0)], false)]
#[case::forged_fin(vec![of_client(TCP_FIN | TCP_ACK, FORGED, FORGED)], false)]
#[case::forged_fins_of_both(vec![
    of_client(TCP_FIN | TCP_ACK, FORGED, FORGED),
    of_backend(TCP_FIN | TCP_ACK, FORGED, FORGED),
], false)]
#[case::data_then_a_reset_that_follows_it(vec![
    of_client(TCP_ACK, FORGED, FORGED),
    of_client(TCP_RST, FORGED, 0),
], false)]
#[case::a_reset_of_what_a_forged_client_acknowledged(vec![
    of_client(TCP_ACK, FORGED, FORGED),
    of_backend(TCP_RST, FORGED, 0),
], false)]
#[case::the_same_of_a_client_who_guesses_one_number(vec![
    of_client(TCP_ACK, CLIENTS, FORGED),
    of_backend(TCP_RST, FORGED, 0),
], false)]
fn a_syn_goes_to_another_backend_only_after_a_connection_that_ended(
    #[case] said: Vec<(Side, Segment)>,
    #[case] ended: bool,
    #[values(false, true)] backend_is_gone: bool,
) {
    let mut host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    for (sender, segment) in said {
        says(sender, &host, &flow, segment).unwrap();
    }
    let stage = if ended { Stage::Opening } else { Stage::Established };
    assert_eq!(host.entries(Stage::Established), if ended { 0 } else { 2 }, "what has ended leaves at once");
    assert_eq!(host.flow_of(stage, &syn()).state.has_ended(), ended);
    if backend_is_gone {
        host.maps.backends.remove(&flow.backend_id);
    }
    host.dice.borrow_mut().push_back(LAST);
    let backend = host.arriving(&syn(), Origin::Workload).unwrap().destination;
    assert_eq!(backend, if ended { BACKENDS[1] } else { BACKENDS[0] }, "a connection that is up stays");
    assert_eq!(host.counted(Reason::FlowReplaced), u32::from(ended));
}

/// The last segments may be lost and sent again.
#[test]
fn copies_of_the_last_segments_are_translated() {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    for (sender, segment) in close() {
        says(sender, &host, &flow, segment).unwrap();
    }
    host.wait(2 * REFRESH_AFTER);
    for (sender, segment) in close() {
        assert!(says(sender, &host, &flow, segment).is_ok());
    }
    assert_eq!((host.entries(Stage::Opening), host.entries(Stage::Established)), (2, 0));
}

/// Else what its lifetime is counted from would be the last packet before the silence.
#[test]
fn what_ends_after_a_silence_is_kept_from_its_end_on() {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    host.wait(60 * REFRESH_AFTER);
    let (sender, reset) = of_client(TCP_RST, CLIENTS, 0);
    let ended = host.clock.get();
    says(sender, &host, &flow, reset).unwrap();
    assert!(host.flow_of(Stage::Opening, &syn()).last_seen >= ended);
}

/// Which comes to a masquerade, whose entry learns nothing of what goes on.
#[test]
fn a_connection_that_goes_on_after_a_reset_is_not_ended_by_its_next_answer() {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Outside);
    let (sender, reset) = of_client(TCP_RST, CLIENTS, 0);
    says(sender, &host, &flow, reset).unwrap();
    assert_eq!(host.entries(Stage::Established), 0);
    host.wait(2 * REFRESH_AFTER);
    host.arriving(&packet(CLIENT, FRONTEND, TCP_ACK), Origin::Outside).unwrap();
    assert_eq!(host.entries(Stage::Established), 0, "the client may be one that keeps entries for nothing");
    let endpoint = (flow.backend, PORT);
    for _ in 0..2 {
        host.arriving(&answer(endpoint, (NODE, flow.masquerade_port()), TCP_ACK), Origin::Outside).unwrap();
        host.leaving(&answer(endpoint, CLIENT, TCP_ACK)).unwrap();
        assert_eq!(host.entries(Stage::Established), 3);
    }
}

/// Two CPUs of the client send an acknowledgement and its RST, which comes first. The backend answers the other with nothing, or with a
/// RST that counts no more.
#[rstest]
#[case::of_the_answer(BACKENDS_NEXT + 100, None)]
#[case::of_the_handshake(BACKENDS_NEXT, Some(of_backend(TCP_RST, BACKENDS_NEXT, 0)))]
fn an_acknowledgement_that_a_reset_has_overtaken_opens_nothing_again(
    #[case] acknowledgement: u32,
    #[case] answer: Option<(Side, Segment)>,
) {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    says(Side::Backend, &host, &flow, Segment::new(TCP_ACK, BACKENDS_NEXT, CLIENTS, 100)).unwrap();
    let last = [
        of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT + 100),
        of_client(TCP_RST | TCP_ACK, CLIENTS, BACKENDS_NEXT + 100),
        of_client(TCP_ACK, CLIENTS, acknowledgement),
    ];
    for (sender, segment) in last.into_iter().chain(answer) {
        says(sender, &host, &flow, segment).unwrap();
    }
    assert_eq!(host.entries(Stage::Established), 0);
    assert!(host.flow_of(Stage::Opening, &syn()).state.has_ended());
}

#[rstest]
#[case::before_the_answer(0)]
#[case::after_it(1)]
fn a_forged_refusal_keeps_no_connection_from_being_established(#[case] answers_before: usize) {
    let host = Host::new();
    host.arriving(&syn(), Origin::Workload).unwrap();
    let flow = host.flow_of(Stage::Opening, &syn());
    let answer = of_backend(TCP_SYN | TCP_ACK, BACKEND_ISN, CLIENTS);
    let mut said = vec![answer, of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT)];
    said.insert(answers_before, of_backend(TCP_RST | TCP_ACK, 0, CLIENTS));
    for (sender, segment) in said {
        says(sender, &host, &flow, segment).unwrap();
    }
    assert!(!host.flow_of(Stage::Established, &syn()).state.has_ended());
}

#[rstest]
#[case::far_off(FORGED, 86_400)]
#[case::near(CLIENTS + 1_000, 10_800)]
fn a_forged_reset_cuts_no_silent_connection_short(#[case] sequence: u32, #[case] seconds: u64) {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    let (sender, reset) = of_client(TCP_RST, sequence, 0);
    says(sender, &host, &flow, reset).unwrap();
    let lifetime = |host: &Host| {
        FlowLifetimes::default().of(PROTOCOL_TCP, host.flow_of(Stage::Established, &syn()).state).as_secs()
    };
    assert_eq!(lifetime(&host), seconds);
    // Its next segment shows that it lives.
    says(Side::Backend, &host, &flow, Segment::new(TCP_ACK, BACKENDS_NEXT, CLIENTS, 0)).unwrap();
    assert_eq!(lifetime(&host), 86_400);
}

/// A client with a forged address can send all of these.
#[rstest]
#[case::acknowledges_what_was_not_answered(None, vec![Segment::new(TCP_ACK, CLIENTS, BACKENDS_NEXT, 0)])]
#[case::was_refused(Some(Segment::new(TCP_RST | TCP_ACK, 0, CLIENTS, 0)), vec![
    Segment::new(TCP_ACK, CLIENTS, 1, 0),
])]
#[case::guesses(Some(Segment::new(TCP_SYN | TCP_ACK, BACKEND_ISN, CLIENTS, 0)), vec![
    Segment::new(TCP_ACK, CLIENTS, FORGED, 0),
    Segment::new(TCP_ACK, CLIENTS, BACKEND_ISN, 0),
])]
#[case::sends_data_without_acknowledging(Some(Segment::new(TCP_SYN | TCP_ACK, BACKEND_ISN, CLIENTS, 0)), vec![
    Segment::new(0, CLIENTS, BACKENDS_NEXT, 100),
])]
#[case::resets(Some(Segment::new(TCP_SYN | TCP_ACK, BACKEND_ISN, CLIENTS, 0)), vec![
    Segment::new(TCP_RST, CLIENTS, 0, 0),
    Segment::new(TCP_RST | TCP_ACK, CLIENTS, BACKENDS_NEXT, 0),
])]
#[case::ends(Some(Segment::new(TCP_SYN | TCP_ACK, BACKEND_ISN, CLIENTS, 0)), vec![
    Segment::new(TCP_FIN | TCP_ACK, CLIENTS, FORGED, 0),
])]
fn a_forged_client_establishes_no_connection(#[case] answered: Option<Segment>, #[case] said: Vec<Segment>) {
    let host = Host::new();
    host.arriving(&syn(), Origin::Workload).unwrap();
    if let Some(segment) = answered {
        host.leaving(&numbered((BACKENDS[0], PORT), CLIENT, segment)).unwrap();
    }
    for segment in said {
        let _verdict = host.arriving(&numbered(CLIENT, FRONTEND, segment), Origin::Workload);
        host.wait(2 * REFRESH_AFTER);
    }
    assert_eq!((host.entries(Stage::Opening), host.entries(Stage::Established)), (2, 0));
}

/// The map of opening flows evicts the client's entry after the answer, and it is restored by one or the other side.
#[rstest]
fn a_restored_client_is_confirmed_as_any(#[values(false, true)] by_backend: bool) {
    let host = Host::new();
    let answered = answer((BACKENDS[0], PORT), CLIENT, TCP_SYN | TCP_ACK);
    host.arriving(&syn(), Origin::Workload).unwrap();
    let key = host.flow_of(Stage::Opening, &syn()).client_key();
    host.leaving(&answered).unwrap();
    host.remove(Stage::Opening, &key);
    host.wait(REFRESH_AFTER);
    if by_backend {
        host.leaving(&answered).unwrap();
    } else {
        host.arriving(&syn(), Origin::Workload).unwrap();
    }
    for (acknowledgement, entries) in [(1, 0), (BACKENDS_NEXT, 2)] {
        let segment = Segment::new(TCP_ACK, CLIENTS, acknowledgement, 0);
        host.arriving(&numbered(CLIENT, FRONTEND, segment), Origin::Workload).unwrap();
        assert_eq!(host.entries(Stage::Established), entries);
    }
    host.assert_whole();
}

/// All segments that seemed to end it were forged. It goes on, as the backend answers its client.
#[rstest]
#[case::resets_of_both(vec![
    of_client(TCP_ACK, CLIENTS, GUESSED),
    of_backend(TCP_RST, GUESSED, 0),
])]
#[case::fins_of_both(vec![
    of_client(TCP_FIN | TCP_ACK, CLIENTS + 10, GUESSED),
    of_backend(TCP_ACK, GUESSED, CLIENTS + 11),
    of_backend(TCP_FIN | TCP_ACK, GUESSED + 10, CLIENTS + 11),
    of_client(TCP_ACK, CLIENTS + 11, GUESSED + 11),
])]
fn a_connection_that_only_seemed_to_end_goes_on(#[case] said: Vec<(Side, Segment)>) {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    for (sender, segment) in said {
        says(sender, &host, &flow, segment).unwrap();
    }
    assert_eq!(host.entries(Stage::Established), 0);
    for _ in 0..2 {
        says(Side::Client, &host, &flow, Segment::new(TCP_ACK, CLIENTS, BACKENDS_NEXT, 100)).unwrap();
        says(Side::Backend, &host, &flow, Segment::new(TCP_ACK, BACKENDS_NEXT, CLIENTS + 100, 0)).unwrap();
        host.wait(2 * REFRESH_AFTER);
    }
    assert_eq!(host.entries(Stage::Established), 2);
    let state = host.flow_of(Stage::Established, &syn()).state;
    assert_eq!(FlowLifetimes::default().of(PROTOCOL_TCP, state).as_secs(), 86_400);
}

/// Who forges the client can forge a backend on another node too, but not the way that its answers take.
#[test]
fn an_answer_that_has_not_come_to_the_masquerade_is_forged() {
    let host = Host::new();
    through(&host, &syn(), Origin::Outside).unwrap();
    let forged = answer((BACKENDS[0], PORT), CLIENT, TCP_SYN | TCP_ACK);
    assert_eq!(host.arriving(&forged, Origin::Outside), Err(Reason::ForgedAnswer));
}

#[rstest]
#[case::refuses(CLIENTS, true)]
#[case::forged(FORGED, false)]
fn a_refusal_counts_if_it_acknowledges_the_syn(#[case] acknowledgement: u32, #[case] ended: bool) {
    let host = Host::new();
    host.arriving(&syn(), Origin::Workload).unwrap();
    let refusal = Segment::new(TCP_RST | TCP_ACK, 0, acknowledgement, 0);
    host.leaving(&numbered((BACKENDS[0], PORT), CLIENT, refusal)).unwrap();
    assert_eq!(host.flow_of(Stage::Opening, &syn()).state.has_ended(), ended);
}

/// The real FIN is followed by a forged one.
#[test]
fn a_forged_fin_does_not_hide_the_real_one() {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    let mut said = close();
    said.insert(1, of_client(TCP_FIN | TCP_ACK, FORGED, BACKENDS_NEXT));
    for (sender, segment) in said {
        says(sender, &host, &flow, segment).unwrap();
    }
    assert_eq!(host.entries(Stage::Established), 0);
}

/// Seconds at which client (true) and backend send.
#[rstest]
#[case::one_question(&[(0, true), (0, false)], 0)]
#[case::two_questions_at_once(&[(0, true), (0, false), (0, true), (0, false), (0, true)], 0)]
#[case::never_answered(&[(0, true), (1, true), (5, true)], 0)]
#[case::answered_for_seconds(&[(0, true), (0, false), (3, false), (4, false)], 0)]
#[case::both_for_seconds(&[(0, true), (0, false), (3, false), (3, true)], 2)]
fn datagrams_are_established_by_traffic_of_both_for_seconds(
    #[case] sent: &[(u64, bool)],
    #[case] entries: usize,
) {
    let host = Host::new();
    let start = host.clock.get();
    for (second, by_client) in sent {
        host.clock.set(start + second * SECOND);
        if *by_client {
            host.arriving(&datagram(CLIENT, FRONTEND), Origin::Workload).unwrap();
        } else {
            host.leaving(&datagram((BACKENDS[0], PORT), CLIENT)).unwrap();
        }
    }
    assert_eq!(host.entries(Stage::Established), entries);
    host.assert_whole();
}
