mod made;

use core::cell::Cell;

use proptest::prelude::*;
use rstest::rstest;

use self::made::{Ends, Made, Shape, ends, shape};
use super::{properties::with_ends, *};
use crate::{
    family::{V4, V6},
    layout::PROTOCOL_UDP,
};

#[rstest]
#[case::syn(PROTOCOL_TCP, TCP_SYN, true)]
#[case::answered_syn(PROTOCOL_TCP, TCP_SYN | TCP_ACK, false)]
#[case::reset_syn(PROTOCOL_TCP, TCP_SYN | TCP_RST, false)]
#[case::syn_that_also_ends(PROTOCOL_TCP, TCP_SYN | TCP_FIN, true)]
#[case::ack(PROTOCOL_TCP, TCP_ACK, false)]
#[case::datagram(PROTOCOL_UDP, 0, true)]
fn what_opens_a_flow(#[case] protocol: u8, #[case] tcp_flags: u8, #[case] opens: bool) {
    let (source, destination) = ([192, 0, 2, 1], [10, 96, 0, 1]);
    let (source_port, destination_port) = (Port::new(40_000), Port::new(80));
    let segment = Segment::new(tcp_flags, 0, 0, 0);
    let headers = Headers::default();
    let packet = Packet {
        source,
        destination,
        source_port,
        destination_port,
        protocol,
        segment,
        fragment: Fragment::default(),
        headers,
    };
    assert_eq!(packet.opens(), opens);
}

#[rstest]
#[case::whole(0, false, Part::Whole)]
#[case::first(0, true, Part::First)]
#[case::middle(1, true, Part::Later)]
#[case::last(1, false, Part::Later)]
fn parts_of_a_packet(#[case] offset: u16, #[case] has_more: bool, #[case] part: Part) {
    assert_eq!(Fragment::new(7, offset, has_more), Fragment { part, id: 7 });
}

#[rstest]
#[case::data(TCP_ACK, 100, 110)]
#[case::syn(TCP_SYN, 0, 11)]
#[case::last_data(TCP_FIN | TCP_ACK, 100, 111)]
#[case::beyond_the_end(TCP_ACK, u32::MAX, 9)]
fn what_follows_a_segment(#[case] flags: u8, #[case] payload: u32, #[case] next: u32) {
    assert_eq!(Segment::new(flags, 10, 0, payload).next, next);
}

/// Parses the packet, rewrites it, and checks that it is `expected` then. Reversing must lead back
/// to where it came from.
fn check<F: Made<Address: std::fmt::Debug>>(
    shape: &Shape,
    (made, expected): (&[u8], &[u8]),
    (from, to): (&Ends<F::Address>, &Ends<F::Address>),
) {
    let mut bytes = made.to_vec();
    let mut packet = Packet::default();
    let cells = Cell::from_mut(&mut bytes[..]).as_slice_of_cells();
    assert_eq!(parse::<F, _>(cells, shape.link as u32, &mut packet), Ok(()));
    let port = |port: Port| if packet.is_later_fragment() { Port::NONE } else { port };
    let rewrite_to = |(source, destination): &Ends<F::Address>| Rewrite {
        source: source.0,
        destination: destination.0,
        source_port: port(source.1),
        destination_port: port(destination.1),
        ..Rewrite::default()
    };
    assert_eq!(packet, with_ends(packet, &rewrite_to(from)), "it has the ends it was made with");
    let to = rewrite_to(to);
    assert_eq!(rewrite::<F, _>(cells, &packet, &to), Ok(()));
    assert_eq!(bytes, expected, "as if it had been made so");

    let cells = Cell::from_mut(&mut bytes[..]).as_slice_of_cells();
    assert_eq!(rewrite::<F, _>(cells, &with_ends(packet, &to), &rewrite_to(from)), Ok(()));
    assert_eq!(bytes, made, "as it was");
}

fn rewritten_and_reversed<F: Made<Address: std::fmt::Debug>>(
    shape: &Shape,
    from: &Ends<F::Address>,
    to: &Ends<F::Address>,
) {
    for (made, expected) in shape.packets::<F>(from).iter().zip(shape.packets::<F>(to)) {
        check::<F>(shape, (made, &expected), (from, to));
    }
}

/// Checks an error of the quoted packet's receiver. It travels as an answer, so its ends are the
/// quoted ones in reverse order.
fn error_rewritten_and_reversed<F: Made<Address: std::fmt::Debug>>(
    shape: &Shape,
    quoted: &Ends<F::Address>,
    becomes: &Ends<F::Address>,
    length: usize,
) {
    let made = shape.error::<F>(quoted, quoted.1.0, length);
    let expected = shape.error::<F>(becomes, becomes.1.0, length);
    check::<F>(shape, (&made, &expected), (&(quoted.1, quoted.0), &(becomes.1, becomes.0)));
}

/// Generates how many bytes of the transport are quoted. The number is even, because half a
/// checksum cannot be changed, and Linux cuts no word in halves.
fn quoted() -> impl Strategy<Value = usize> {
    (2..32usize).prop_map(|words| words * 2)
}

/// Generates ends and new ends, of which some are the same as before.
fn some_ends<A: Address + Arbitrary>() -> impl Strategy<Value = (Ends<A>, Ends<A>)> {
    (ends::<A>(), ends::<A>(), any::<[bool; 4]>()).prop_map(|(from, to, changes)| {
        let mut becomes = from;
        let (source, destination) = (&mut becomes.0, &mut becomes.1);
        if changes[0] {
            source.0 = to.0.0;
        }
        if changes[1] {
            source.1 = to.0.1;
        }
        if changes[2] {
            destination.0 = to.1.0;
        }
        if changes[3] {
            destination.1 = to.1.1;
        }
        (from, becomes)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn an_ipv4_packet_is_rewritten_and_reversed(shape in shape(), (from, to) in some_ends()) {
        rewritten_and_reversed::<V4>(&shape, &from, &to);
    }

    #[test]
    fn an_ipv6_packet_is_rewritten_and_reversed(shape in shape(), (from, to) in some_ends()) {
        rewritten_and_reversed::<V6>(&shape, &from, &to);
    }

    #[test]
    fn an_icmpv4_error_is_rewritten_and_reversed(shape in shape(), (from, to) in some_ends(), length in quoted()) {
        error_rewritten_and_reversed::<V4>(&shape, &from, &to, length);
    }

    #[test]
    fn an_icmpv6_error_is_rewritten_and_reversed(shape in shape(), (from, to) in some_ends(), length in quoted()) {
        error_rewritten_and_reversed::<V6>(&shape, &from, &to, length);
    }

    #[test]
    fn any_bytes_are_parsed(input in prop::collection::vec(any::<u8>(), 0..200)) {
        properties::parses(&input);
    }

    /// The packets are correct ones that were changed in a few bytes, cut, or made longer than
    /// their headers say.
    #[test]
    fn spoilt_packets_are_parsed_rewritten_and_reversed(
        (kind, packet) in spoilt(),
        to in any::<[u8; 36]>(),
    ) {
        properties::parses(&[&[kind], &packet[..]].concat());
        let ends = &to[..if kind & 1 == 0 { 12 } else { 36 }];
        properties::rewrites_and_reverses(&[&[kind], ends, &packet].concat());
    }
}

/// Generates a packet with its kind, which is the first byte of the input of `properties`.
fn spoilt() -> impl Strategy<Value = (u8, Vec<u8>)> {
    let packet = (shape(), ends::<[u8; 4]>(), ends::<[u8; 16]>(), any::<[bool; 2]>(), 0..64usize).prop_map(
        |(shape, v4, v6, [is_v6, is_error], length)| {
            let packets = match (is_v6, is_error) {
                (false, false) => shape.packets::<V4>(&v4),
                (false, true) => vec![shape.error::<V4>(&v4, v6.0.0[..4].try_into().unwrap(), length)],
                (true, false) => shape.packets::<V6>(&v6),
                (true, true) => vec![shape.error::<V6>(&v6, v6.1.0, length)],
            };
            (u8::from(is_v6) | if shape.link == 0 { 0 } else { 2 }, packets)
        },
    );
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    (packet, any::<prop::sample::Index>(), changes, -4..8isize).prop_map(
        |((kind, packets), which, changes, longer)| {
            let mut packet = packets[which.index(packets.len())].clone();
            for (at, byte) in changes {
                let at = at.index(packet.len());
                packet[at] = byte;
            }
            let length = packet.len().saturating_add_signed(longer);
            packet.resize(length, 0x77);
            (kind, packet)
        },
    )
}

/// These are inputs that the fuzzer has found: family and link, new ends, and the packet.
#[rstest]
#[case::later_fragment_that_ends_within_its_header(&[
    0x00, 0x0a, 0x09, 0x11, 0x11, 0x11, 0x11, 0x21, 0x11, 0x11, 0xd0, 0x01, 0x11, //
    0x49, 0x11, 0x00, 0x11, 0x11, 0x5f, 0x65, 0x11, 0x11, 0x11, 0x21, 0x11, 0x11, 0xd0, 0x01, 0x00, 0x00, 0x00,
    0xd0, 0x00, 0xd0, 0x11, 0x5b, 0x00,
])]
fn found_by_the_fuzzer(#[case] input: &[u8]) {
    properties::rewrites_and_reverses(input);
}
