//! Which rows of established flows are left after the segments of a connection.

use super::*;

/// How much a segment carries that fills a packet of 1,500 bytes.
const PAYLOAD: u32 = 1_460;

fn data(speaker: Speaker, sequence: u32, acknowledgement: u32) -> (Speaker, Segment) {
    (speaker, Segment::new(TCP_ACK, sequence, acknowledgement, PAYLOAD))
}

/// The backend's next `count` full segments, none of which the client has acknowledged.
fn answers(count: u32) -> Vec<(Speaker, Segment)> {
    (0..count).map(|n| data(Speaker::Backend, BACKENDS_NEXT + n * PAYLOAD, CLIENTS)).collect()
}

fn followed_by(mut said: Vec<(Speaker, Segment)>, last: &[(Speaker, Segment)]) -> Vec<(Speaker, Segment)> {
    said.extend_from_slice(last);
    said
}

/// Lets both sides speak on an established connection, and returns how many rows are left of it.
fn rows_after(host: &Host, said: &[(Speaker, Segment)]) -> usize {
    let flow = establish_one(host, Origin::Workload);
    for (speaker, segment) in said {
        says(*speaker, host, &flow, *segment).unwrap();
    }
    host.entries(Stage::Established)
}

/// Servers close with unread input, and probes of health close without waiting: the RST follows data that nobody
/// acknowledges any more.
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
    data(Speaker::Client, CLIENTS, BACKENDS_NEXT),
    of_client(TCP_RST | TCP_ACK, CLIENTS + PAYLOAD, BACKENDS_NEXT),
], 0)]
#[case::client_in_the_midst_of_an_answer(
    followed_by(answers(3), &[of_client(TCP_RST, CLIENTS, 0), answers(4)[3]]), 0)]
#[case::with_a_number_beyond_its_data(
    followed_by(answers(1), &[of_backend(TCP_RST, BACKENDS_NEXT + PAYLOAD + 1, 0)]), 2)]
#[case::with_a_number_within_its_data(
    followed_by(answers(2), &[of_backend(TCP_RST, BACKENDS_NEXT + PAYLOAD, 0)]), 2)]
#[case::behind_data_with_guessed_numbers(vec![
    data(Speaker::Backend, FORGED, FORGED),
    of_backend(TCP_RST, FORGED + PAYLOAD, 0),
], 2)]
#[case::behind_data_whose_acknowledgement_is_guessed(vec![
    data(Speaker::Backend, BACKENDS_NEXT + 1_000, FORGED),
    of_backend(TCP_RST, BACKENDS_NEXT + 1_000 + PAYLOAD, 0),
], 2)]
fn rows_after_a_reset_behind_data(#[case] said: Vec<(Speaker, Segment)>, #[case] rows: usize) {
    assert_eq!(rows_after(&Host::new(), &said), rows);
}
