//! These tests count the entries of established flows that the segments of a connection leave.

use super::{collect::Entry, *};

/// The bytes that a segment carries if it fills a packet of 1,500 bytes.
const PAYLOAD: u32 = 1_460;

fn data(sender: Side, sequence: u32, acknowledgement: u32) -> (Side, Segment) {
    (sender, Segment::new(TCP_ACK, sequence, acknowledgement, PAYLOAD))
}

/// The backend's next `count` full segments, none of which the client has acknowledged.
fn answers(count: u32) -> Vec<(Side, Segment)> {
    (0..count).map(|n| data(Side::Backend, BACKENDS_NEXT + n * PAYLOAD, CLIENTS)).collect()
}

fn followed_by(mut said: Vec<(Side, Segment)>, last: &[(Side, Segment)]) -> Vec<(Side, Segment)> {
    said.extend_from_slice(last);
    said
}

/// Lets both sides speak on an established connection, and returns how many entries are left of it.
fn entries_after(host: &Host, said: &[(Side, Segment)]) -> usize {
    let flow = establish_one(host, Origin::Workload);
    for (sender, segment) in said {
        says(*sender, host, &flow, *segment).unwrap();
    }
    host.entries(Stage::Established)
}

/// Servers close with unread input, and health probes close without waiting. Their RST follows
/// data that nobody acknowledges any more.
#[rstest]
#[case::backend_behind_its_answer(
    followed_by(answers(1), &[of_backend(TCP_RST, BACKENDS_NEXT + PAYLOAD, 0)]), 0)]
#[case::backend_behind_its_answer_with_an_acknowledgement(
    followed_by(answers(1), &[of_backend(TCP_RST | TCP_ACK, BACKENDS_NEXT + PAYLOAD, CLIENTS)]), 0)]
#[case::backend_behind_two_mebibytes(
    followed_by(answers(1_500), &[of_backend(TCP_RST, BACKENDS_NEXT + 1_500 * PAYLOAD, 0)]), 0)]
#[case::backend_behind_data_that_was_sent_again(
    followed_by(answers(3), &[answers(1)[0], of_backend(TCP_RST, BACKENDS_NEXT + 3 * PAYLOAD, 0)]), 0)]
#[case::client_behind_its_request(vec![
    data(Side::Client, CLIENTS, BACKENDS_NEXT),
    of_client(TCP_RST | TCP_ACK, CLIENTS + PAYLOAD, BACKENDS_NEXT),
], 0)]
#[case::client_in_the_midst_of_an_answer(
    followed_by(answers(3), &[of_client(TCP_RST, CLIENTS, 0), answers(4)[3]]), 0)]
#[case::with_a_number_beyond_its_data(
    followed_by(answers(1), &[of_backend(TCP_RST, BACKENDS_NEXT + PAYLOAD + 1, 0)]), 2)]
#[case::with_a_number_within_its_data(
    followed_by(answers(2), &[of_backend(TCP_RST, BACKENDS_NEXT + PAYLOAD, 0)]), 2)]
#[case::behind_data_with_guessed_numbers(vec![
    data(Side::Backend, FORGED, FORGED),
    of_backend(TCP_RST, FORGED + PAYLOAD, 0),
], 2)]
#[case::behind_data_whose_acknowledgement_is_guessed(vec![
    data(Side::Backend, BACKENDS_NEXT + 1_000, FORGED),
    of_backend(TCP_RST, BACKENDS_NEXT + 1_000 + PAYLOAD, 0),
], 2)]
fn entries_after_a_reset_behind_data(#[case] said: Vec<(Side, Segment)>, #[case] entries: usize) {
    assert_eq!(entries_after(&Host::new(), &said), entries);
}

/// A segment comes twice to a connection that has ended more than a second before. Only a backend
/// that still serves the connection shows that it goes on.
#[rstest]
#[case::forged_data(Side::Client, Segment::new(TCP_ACK, FORGED, FORGED, 100), 0)]
#[case::forged_data_of_the_backend(Side::Backend, Segment::new(TCP_ACK, FORGED, FORGED, 100), 0)]
#[case::forged_acknowledgement(Side::Backend, Segment::new(TCP_ACK, FORGED, FORGED, 0), 0)]
#[case::one_number_is_guessed(Side::Backend, Segment::new(TCP_ACK, BACKENDS_NEXT, FORGED, 100), 0)]
#[case::data_without_acknowledgement(Side::Backend, Segment::new(0, BACKENDS_NEXT, 0, 100), 0)]
#[case::syn_of_the_backend(Side::Backend, Segment::new(TCP_SYN | TCP_ACK, FORGED, FORGED, 0), 0)]
#[case::late_data_of_the_client(Side::Client, Segment::new(TCP_ACK, CLIENTS, BACKENDS_NEXT, 100), 0)]
#[case::late_acknowledgement(Side::Client, Segment::new(TCP_ACK, CLIENTS, BACKENDS_NEXT, 0), 0)]
#[case::backend_goes_on(Side::Backend, Segment::new(TCP_ACK, BACKENDS_NEXT, CLIENTS, 100), 2)]
fn entries_after_a_segment_that_follows_the_end(
    #[case] sender: Side,
    #[case] segment: Segment,
    #[case] entries: usize,
    #[values(vec![of_client(TCP_RST, CLIENTS, 0)], vec![of_backend(TCP_RST, BACKENDS_NEXT, 0)], close())]
    end: Vec<(Side, Segment)>,
) {
    let host = Host::new();
    assert_eq!(entries_after(&host, &end), 0);
    let flow = host.flow_of(Stage::Opening, &syn());
    for _ in 0..2 {
        host.wait(2 * REFRESH_AFTER);
        says(sender, &host, &flow, segment).unwrap();
    }
    assert_eq!(host.entries(Stage::Established), entries);
}

const MEBIBYTE: u32 = 1 << 20;
/// The bytes that one packet carries if the kernel has put segments together.
const BUNCH: u32 = 1 << 16;

/// The backend's data from one offset to another.
fn bunches(from: u32, to: u32) -> Vec<(Side, Segment)> {
    let bunch =
        |offset| (Side::Backend, Segment::new(TCP_ACK, BACKENDS_NEXT.wrapping_add(offset), CLIENTS, BUNCH));
    (from..to).step_by(BUNCH as usize).map(bunch).collect()
}

fn acknowledged(offset: u32) -> (Side, Segment) {
    of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT.wrapping_add(offset))
}

/// Returns a transfer with one loss. Six mebibytes are under way, as at 1 Gbit/s and 50 ms. The
/// copy of the lost segment fills the gap while six more are under way.
fn one_loss() -> Vec<(Side, Segment)> {
    let mut said = bunches(0, 6 * MEBIBYTE);
    said.extend([acknowledged(0); 3]);
    said.extend(bunches(0, BUNCH));
    said.extend(bunches(6 * MEBIBYTE, 12 * MEBIBYTE));
    said.push(acknowledged(6 * MEBIBYTE));
    said
}

/// The ends that follow a loss count, although megabytes are under way.
#[rstest]
#[case::goes_on(vec![], 2)]
#[case::client_resets(vec![of_client(TCP_RST, CLIENTS, 0)], 0)]
#[case::backend_resets_behind_its_data(
    vec![of_backend(TCP_RST, BACKENDS_NEXT + 12 * MEBIBYTE, 0)], 0)]
#[case::backend_resets_where_the_client_waits(
    vec![of_backend(TCP_RST, BACKENDS_NEXT + 6 * MEBIBYTE, 0)], 0)]
#[case::backend_resets_elsewhere(vec![of_backend(TCP_RST, BACKENDS_NEXT + 40 * MEBIBYTE, 0)], 2)]
#[case::both_close(vec![
    of_client(TCP_FIN | TCP_ACK, CLIENTS, BACKENDS_NEXT + 6 * MEBIBYTE),
    of_backend(TCP_FIN | TCP_ACK, BACKENDS_NEXT + 12 * MEBIBYTE, CLIENTS + 1),
    of_client(TCP_ACK, CLIENTS + 1, BACKENDS_NEXT + 12 * MEBIBYTE + 1),
], 0)]
#[case::forged_reset_where_the_client_has_waited(vec![of_backend(TCP_RST, BACKENDS_NEXT, 0)], 2)]
#[case::forged_acknowledgement_before_its_reset(vec![
    of_client(TCP_ACK, CLIENTS, FORGED),
    of_backend(TCP_RST, FORGED, 0),
], 2)]
fn entries_after_a_loss_on_a_long_path(#[case] said: Vec<(Side, Segment)>, #[case] entries: usize) {
    assert_eq!(entries_after(&Host::new(), &followed_by(one_loss(), &said)), entries);
}

/// Each acknowledgement after the loss moves the stream on at once.
#[test]
fn acknowledgements_after_a_loss_are_believed_while_the_path_is_full() {
    let host = Host::new();
    entries_after(&host, &one_loss());
    let flow = host.flow_of(Stage::Established, &syn());
    for offset in (12..40).map(|n| n * MEBIBYTE / 2) {
        for (sender, segment) in bunches(offset + 6 * MEBIBYTE, offset + 6 * MEBIBYTE + MEBIBYTE / 2) {
            says(sender, &host, &flow, segment).unwrap();
        }
        let (sender, segment) = acknowledged(offset);
        says(sender, &host, &flow, segment).unwrap();
        let reached = host.flow_of(Stage::Established, &syn()).client_numbers.reached;
        assert_eq!(reached, BACKENDS_NEXT.wrapping_add(offset));
    }
}

/// A client uploads data, and nine mebibytes in a row are lost before they reach this node.
#[rstest]
#[case::client_resets(of_client(TCP_RST, CLIENTS + 9 * MEBIBYTE + PAYLOAD, 0), 0)]
#[case::backend_resets(of_backend(TCP_RST, BACKENDS_NEXT, 0), 0)]
#[case::client_resets_elsewhere(of_client(TCP_RST, CLIENTS + 20 * MEBIBYTE, 0), 2)]
fn entries_after_a_gap_before_this_node(#[case] end: (Side, Segment), #[case] entries: usize) {
    let said = [
        data(Side::Client, CLIENTS, BACKENDS_NEXT),
        data(Side::Client, CLIENTS + 9 * MEBIBYTE, BACKENDS_NEXT),
        end,
    ];
    assert_eq!(entries_after(&Host::new(), &said), entries);
}

/// Lets the controller look at each entry after so many seconds of silence, and returns how many
/// entries are left.
fn entries_after_silence(host: &Host, seconds: u64) -> usize {
    host.wait(seconds * SECOND);
    let met: Vec<_> =
        host.flows.borrow().iter().map(|((stage, key), flow)| (*stage, *key, flow.get())).collect();
    for (stage, key, flow) in met {
        let met = Entry { stage, key, flow };
        collect::remove_expired(host, &met, &FlowLifetimes::default(), host.clock.get()).unwrap();
    }
    host.entries(Stage::Established)
}

const SOON: u64 = 290;
const AFTER_MINUTES: u64 = 310;
const DAY: u64 = 86_400;

/// A side vanishes, and the other gives up in silence. Such a connection is kept for five minutes,
/// and one that is only silent for a day.
#[rstest]
#[case::silent(vec![], DAY - 1)]
#[case::silent_after_an_answer(
    followed_by(answers(3), &[of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT + 3 * PAYLOAD)]), DAY - 1)]
#[case::silent_after_a_request(vec![
    data(Side::Client, CLIENTS, BACKENDS_NEXT),
    of_backend(TCP_ACK, BACKENDS_NEXT, CLIENTS + PAYLOAD),
], DAY - 1)]
#[case::silent_after_segments_in_another_order(vec![
    answers(2)[1], answers(1)[0], of_client(TCP_ACK, CLIENTS, BACKENDS_NEXT + 2 * PAYLOAD), acknowledged(0),
], DAY - 1)]
#[case::silent_after_a_loss_on_a_long_path(
    followed_by(one_loss(), &[acknowledged(12 * MEBIBYTE)]), DAY - 1)]
#[case::asked_whether_it_lives(vec![
    of_backend(TCP_ACK, BACKENDS_NEXT.wrapping_sub(1), CLIENTS),
    of_client(TCP_ACK, CLIENTS - 1, BACKENDS_NEXT),
], DAY - 1)]
#[case::client_vanishes_in_an_answer(answers(3), SOON)]
#[case::client_has_had_half_of_it(followed_by(answers(2), &[acknowledged(PAYLOAD)]), SOON)]
#[case::client_vanishes_on_a_long_path(one_loss(), SOON)]
#[case::backend_vanishes(vec![data(Side::Client, CLIENTS, BACKENDS_NEXT)], SOON)]
#[case::client_vanishes_before_the_fin(vec![of_backend(TCP_FIN | TCP_ACK, BACKENDS_NEXT, CLIENTS)], SOON)]
#[case::reset_that_may_be_forged_within_data(
    followed_by(answers(2), &[of_backend(TCP_RST, BACKENDS_NEXT + PAYLOAD, 0)]), SOON)]
fn entries_after_silence_of(#[case] said: Vec<(Side, Segment)>, #[case] kept_for: u64) {
    let host = Host::new();
    assert_eq!(entries_after(&host, &said), 2);
    assert_eq!(entries_after_silence(&host, kept_for), 2);
    assert_eq!(entries_after_silence(&host, AFTER_MINUTES - SOON), 0);
}

/// Each copy of the data keeps the connection for as long again.
#[test]
fn entries_while_a_backend_sends_again() {
    let host = Host::new();
    entries_after(&host, &answers(1));
    let flow = host.flow_of(Stage::Established, &syn());
    for _ in 0..8 {
        assert_eq!(entries_after_silence(&host, 120), 2);
        let (sender, segment) = answers(1)[0];
        says(sender, &host, &flow, segment).unwrap();
    }
    assert_eq!(entries_after_silence(&host, AFTER_MINUTES), 0);
}

/// A masqueraded flow has a third entry, which learns nothing.
#[rstest]
#[case::silent(0, 3)]
#[case::client_has_vanished(PAYLOAD, 0)]
fn entries_of_a_masqueraded_connection_after_silence(#[case] payload: u32, #[case] entries: usize) {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Outside);
    let segment = Segment::new(TCP_ACK, BACKENDS_NEXT, CLIENTS, payload);
    host.leaving(&numbered((flow.backend, PORT), CLIENT, segment)).unwrap();
    assert_eq!(entries_after_silence(&host, AFTER_MINUTES), entries);
}

/// The first number of a client's second connection from the same port. It is far from all numbers
/// of the first one.
const NEXT_ISN: u32 = 0x4000_0000;
const NEXT_BACKEND_ISN: u32 = 0x9000_0000;

/// Opens a connection and speaks on it, with each segment acknowledged.
fn second_connection() -> Vec<(Side, Segment)> {
    let (client, backend) = (NEXT_ISN + 1, NEXT_BACKEND_ISN + 1);
    vec![
        of_client(TCP_SYN, NEXT_ISN, 0),
        of_backend(TCP_SYN | TCP_ACK, NEXT_BACKEND_ISN, client),
        of_client(TCP_ACK, client, backend),
        data(Side::Client, client, backend),
        of_backend(TCP_ACK, backend, client + PAYLOAD),
        data(Side::Backend, backend, client + PAYLOAD),
        of_client(TCP_ACK, client + PAYLOAD, backend + PAYLOAD),
    ]
}

/// A connection vanishes with data under way, and a minute later its client dials again from the
/// same port. The second connection has the first one's entry. It is judged by none of its numbers.
#[rstest]
#[case::the_clients_data(vec![data(Side::Client, CLIENTS, BACKENDS_NEXT)])]
#[case::the_backends_data(answers(3))]
#[case::the_backends_fin(vec![of_backend(TCP_FIN | TCP_ACK, BACKENDS_NEXT, CLIENTS)])]
fn entries_of_a_second_connection_after_silence(#[case] first: Vec<(Side, Segment)>) {
    let host = Host::new();
    let flow = establish_one(&host, Origin::Workload);
    let say = |said: &[(Side, Segment)]| {
        said.iter().for_each(|(sender, segment)| _ = says(*sender, &host, &flow, *segment).unwrap());
    };
    say(&first);
    host.wait(61 * SECOND);
    say(&second_connection());
    assert_eq!(entries_after_silence(&host, AFTER_MINUTES), 2);
}

/// A SYN that is not answered is followed by another connection's, and that one is established.
#[rstest]
#[case::nobody_answers(vec![])]
#[case::the_client_does_not_go_on(vec![of_backend(TCP_SYN | TCP_ACK, BACKEND_ISN, CLIENTS)])]
fn a_second_syn_opens_a_connection(#[case] first: Vec<(Side, Segment)>) {
    let host = Host::new();
    host.arriving(&syn(), Origin::Workload).unwrap();
    let flow = host.flow_of(Stage::Opening, &syn());
    for (sender, segment) in first {
        says(sender, &host, &flow, segment).unwrap();
    }
    host.wait(2 * REFRESH_AFTER);
    for (sender, segment) in second_connection() {
        says(sender, &host, &flow, segment).unwrap();
    }
    assert_eq!(host.entries(Stage::Established), 2);
    host.assert_whole();
}

/// A forged SYN on a connection that is up changes nothing while the connection is not silent.
#[test]
fn a_forged_syn_takes_no_number_back() {
    let host = Host::new();
    entries_after(&host, &one_loss());
    let flow = host.flow_of(Stage::Established, &syn());
    let (sender, forged) = of_client(TCP_SYN, FORGED, 0);
    says(sender, &host, &flow, forged).unwrap();
    assert_eq!(host.flow_of(Stage::Established, &syn()), flow);
    says(Side::Backend, &host, &flow, of_backend(TCP_RST, BACKENDS_NEXT + 12 * MEBIBYTE, 0).1).unwrap();
    assert_eq!(host.entries(Stage::Established), 0);
}
