use super::*;

#[test]
fn messages_hold_their_lengths_and_offsets() {
    let mut messages = Messages::default();
    messages.begin(7, NLM_F_ACK, &[1, 0, 0, 0]).text(1, "filter");
    messages.begin(8, 0, &[]).nested(4, |inner| {
        inner.text(1, "a").attribute(2, &7_u32.to_be_bytes());
    });
    let bytes = messages.bytes();
    assert_eq!((word(bytes, 0), half(bytes, 4), word(bytes, 8)), (Some(16 + 4 + 12), Some(7), Some(0)));
    let second = &bytes[32..];
    assert_eq!((word(second, 0), half(second, 4), word(second, 8)), (Some(16 + 4 + 8 + 8), Some(8), Some(1)));
    let inner = Attributes(&second[16..]).nested(4).unwrap();
    assert_eq!((inner.text(1), inner.get(2)), (Some("a"), Some(&[0, 0, 0, 7][..])));
    assert_eq!(inner.get(3), None);
}

#[test]
fn messages_that_are_appended_have_the_offsets_after_those_before() {
    let of = |texts: &[&str]| {
        let mut messages = Messages::default();
        for text in texts {
            messages.begin(7, 0, &[]).text(1, text);
        }
        messages
    };
    let mut both = of(&["a", "bcdef"]);
    both.append(of(&["g"]));
    let mut all = of(&[]);
    all.append(both);
    all.begin(7, 0, &[]).text(1, "h");
    all.append(of(&[]));
    let expected = of(&["a", "bcdef", "g", "h"]);
    assert_eq!(Vec::from_iter(all.parts()).concat(), expected.bytes());
    assert_eq!((all.count(), all.length()), (4, expected.length()));
}

#[test]
fn answers_that_are_cut_off_end_the_list() {
    let mut messages = Messages::default();
    messages.begin(7, 0, &[]).text(1, "filter");
    let bytes = messages.bytes();
    let count = |bytes: &[u8]| {
        let mut count = 0;
        each_answer(bytes, |_, _| count += 1);
        count
    };
    assert_eq!(count(bytes), 1);
    assert_eq!(count(&bytes[..bytes.len() - 1]), 0);
    assert_eq!(Attributes(&bytes[16..20]).next(), None);
    // A length of zero must not make the loop endless.
    assert_eq!(count(&[0; 64]), 0);
    assert_eq!(Attributes(&[0; 8]).count(), 0);
}

#[test]
fn a_verdict_names_its_message() {
    let mut bytes = Vec::new();
    for part in [20_u32, 2, 9, 0] {
        bytes.extend(part.to_ne_bytes());
    }
    bytes.extend((-libc::EBUSY).to_ne_bytes());
    let mut answers = Vec::new();
    each_answer(&bytes, |answer, message| {
        if let NetlinkAnswer::Verdict(errno) = answer {
            answers.push((errno, message));
        }
    });
    assert_eq!(answers, [(libc::EBUSY, 9)]);
}

#[test]
fn the_words_of_a_verdict_are_behind_the_header_of_the_request() {
    let with = |flags: u16| {
        let mut words = Messages::default();
        words.begin(0, 0, &[]).text(NLMSGERR_ATTR_MSG, "MTU too large");
        let attribute = &words.bytes()[MESSAGE_HEADER..];
        let mut verdict = (36 + attribute.len() as u32).to_ne_bytes().to_vec();
        verdict.extend([NLMSG_ERROR, flags].map(u16::to_ne_bytes).as_flattened());
        verdict.extend([0; 8 + 4 + MESSAGE_HEADER]);
        verdict.extend(attribute);
        verdict
    };
    assert_eq!(words(&with(NLM_F_CAPPED | NLM_F_ACK_TLVS)), Some("MTU too large"));
    assert_eq!(words(&with(NLM_F_CAPPED)), None, "attributes are announced");
    assert_eq!(words(&with(NLM_F_ACK_TLVS)), None, "the request comes before them");
    assert_eq!(words(&with(NLM_F_CAPPED | NLM_F_ACK_TLVS)[..30]), None, "cut off");
}

/// Opens a connection to rtnetlink, which answers at once. Its buffer has room for fewer than
/// 4,000 answers, whatever net.core.rmem_default is.
fn routes() -> NetlinkSocket {
    let kernel = NetlinkSocket::open(libc::NETLINK_ROUTE as isize).unwrap();
    kernel.socket.set_rx_buf_sz(64 << 10).unwrap();
    kernel
}

/// Returns messages of a type that rtnetlink does not know. It refuses each with an answer of
/// its own.
fn unknown(count: u32) -> Messages {
    let mut messages = Messages::default();
    for _ in 0..count {
        messages.begin(1_000, 0, &[0; 4]);
    }
    messages
}

/// Returns requests for the loopback interface, which are never refused.
fn accepted(count: u32) -> Messages {
    let mut index = [0; 16];
    index[4..8].copy_from_slice(&1_u32.to_ne_bytes());
    let mut messages = Messages::default();
    for _ in 0..count {
        messages.begin(libc::RTM_GETLINK, 0, &index);
    }
    messages
}

#[test]
fn a_batch_with_more_refusals_than_there_is_room_for_names_some() {
    let refused = routes().send_at_once(unknown(4_000), |_| Ok(())).unwrap();
    assert!(!refused.is_empty() && refused.len() < 4_000, "{}", refused.len());
    assert_eq!(refused[0], Refused { message: 0, errno: libc::EOPNOTSUPP });
}

#[test]
fn refusals_that_are_left_of_one_batch_are_not_of_the_next() {
    let kernel = routes();
    drop(kernel.send_at_once(unknown(4_000), |_| Ok(())));
    assert_eq!(kernel.send_at_once(accepted(3), |_| Ok(())).unwrap(), []);
}

#[test]
fn answers_that_were_not_read_are_not_of_the_next_batch() {
    let kernel = routes();
    for _ in 0..4_000 {
        kernel.socket.send(unknown(1).bytes(), 0).unwrap();
    }
    assert_eq!(kernel.send_at_once(accepted(3), |_| Ok(())).unwrap(), []);
}

fn answer(kind: u16, flags: u16, sequence: u32, body: i32) -> Vec<u8> {
    let mut bytes = 20_u32.to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    bytes.extend([0; 4]);
    bytes.extend(body.to_ne_bytes());
    bytes
}

#[test]
fn the_end_of_a_list_tells_whether_it_is_whole() {
    let read = |answers: &[Vec<u8>]| {
        let (mut reading, mut messages) = (Reading::new(0), 0);
        reading.go_on(&answers.concat(), &mut |_, _| messages += 1);
        (reading.end, reading.flags & NLM_F_DUMP_INTR != 0, messages)
    };
    let message = || answer(32, 2, 0, 0);
    assert_eq!(read(&[message()]), (None, false, 1));
    assert_eq!(read(&[message(), answer(NLMSG_DONE, 2, 0, 0)]), (Some(0), false, 1));
    assert_eq!(read(&[answer(NLMSG_DONE, 2, 0, -libc::EINTR)]), (Some(libc::EINTR), false, 0));
    assert_eq!(read(&[answer(NLMSG_DONE, 2 | NLM_F_DUMP_INTR, 0, 0)]), (Some(0), true, 0));
    assert_eq!(read(&[answer(32, NLM_F_DUMP_INTR, 0, 0), answer(NLMSG_DONE, 2, 0, 0)]), (Some(0), true, 1));
    // These answers belong to another request.
    assert_eq!(read(&[answer(32, 2, 5, 0), answer(NLMSG_DONE, 2, 5, 0)]), (None, false, 0));
}
