//! Packets inside an outer packet of their family. In this form they go to a backend on another
//! node that answers the client itself (direct server return).
//!
//! The outer packet is IP alone (IPv4 in IPv4, IPv6 in IPv6), or UDP with Geneve (RFC 8926) without
//! an inner Ethernet header.

use super::{Bytes, Network, Sum};
use crate::{
    family::{V4, V6},
    layout::PROTOCOL_UDP,
    port::Port,
    reason::Reason,
};

/// The source and the destination of the outer packet.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Ends<A> {
    /// The address of the node that has encapsulated the packet.
    pub source: A,
    /// The address of the backend.
    pub destination: A,
    /// The UDP source port, with Geneve. [`Port::NONE`]: the outer packet is IP alone.
    pub source_port: Port,
}

const HOP_LIMIT: u8 = 64;
/// The UDP port that Geneve goes to.
pub const GENEVE: Port = Port::new(6081);
const UDP_HEADER: u32 = 8;
/// The length of the headers of UDP and Geneve, without options.
const GENEVE_HEADERS: u32 = UDP_HEADER + 8;

pub trait Tunnel: Network {
    /// The length of the outer IP header.
    const OUTER: u32;
    /// The IP protocol number that says that a packet of this family follows.
    const PROTOCOL: u8;
    /// The Ethertype of this family, by which Geneve says what follows.
    const ETHERTYPE: u16;
    /// The outer header without its addresses, which come after it.
    type Begin: AsRef<[u8]>;

    /// Returns the header before `length` bytes of `protocol`, for a packet whose own header begins
    /// with `inner`.
    ///
    /// The DSCP of the inner header is kept, and in IPv6 its flow label. Its ECN is not: whoever
    /// takes the outer header off does not hand on what a switch says of congestion (RFC 6040,
    /// compatibility mode).
    fn begin(inner: [u8; 4], protocol: u8, length: u32, ends: &Ends<Self::Address>) -> Self::Begin;

    /// Returns the IP protocol number of what follows the header at `network`. Fails with
    /// `NotAService` if the header has options or is that of a fragment.
    fn carried<B: Bytes>(bytes: B, network: u32) -> Result<u8, Reason>;
}

/// Returns how many bytes [`write_outer`] writes.
#[inline(always)]
pub fn outer_length<F: Tunnel>(ends: &Ends<F::Address>) -> u32 {
    if ends.source_port == Port::NONE { F::OUTER } else { F::OUTER + GENEVE_HEADERS }
}

/// Writes the outer headers into the room that was made for them at `network`. A packet of `length`
/// bytes follows this room, and begins with `inner`.
#[inline(always)]
pub fn write_outer<F: Tunnel, B: Bytes>(
    bytes: B,
    network: u32,
    (inner, length): ([u8; 4], u32),
    ends: &Ends<F::Address>,
) -> Result<(), Reason> {
    let length = length + outer_length::<F>(ends) - F::OUTER;
    let protocol = if ends.source_port == Port::NONE {
        F::PROTOCOL
    } else {
        write_geneve::<F, B>(bytes, network + F::OUTER, ends.source_port, length)?;
        PROTOCOL_UDP
    };
    bytes.write(network, F::begin(inner, protocol, length, ends).as_ref())?;
    bytes.write(network + F::SOURCE, ends.source.as_ref())?;
    bytes.write(network + F::DESTINATION, ends.destination.as_ref())
}

/// Writes the headers of UDP and Geneve, for virtual network 0 and without options. `length` is
/// that of the UDP datagram.
///
/// There is no UDP checksum, which RFC 6935 allows for tunnels over IPv6. The inner packet has its
/// own, and no program can sum up the whole packet. The kernel sets none in the segments that it
/// makes of one packet, either. It merges no datagrams without checksum before they are unpacked.
#[inline(always)]
fn write_geneve<F: Tunnel, B: Bytes>(
    bytes: B,
    transport: u32,
    source_port: Port,
    length: u32,
) -> Result<(), Reason> {
    let [from, to] = [source_port, GENEVE].map(Port::to_network);
    let (length, kind) = (length_field(length), F::ETHERTYPE.to_be_bytes());
    bytes.write(transport, &[from[0], from[1], to[0], to[1], length[0], length[1], 0, 0])?;
    bytes.write(transport + UDP_HEADER, &[0, 0, kind[0], kind[1], 0, 0, 0, 0])
}

/// Returns the length of the headers of UDP and Geneve at `transport`. Options are skipped, unless
/// they are critical.
///
/// Fails with `NotAService` if there are other headers.
#[inline(always)]
fn geneve_length<F: Tunnel, B: Bytes>(bytes: B, transport: u32) -> Result<u32, Reason> {
    const OPTION_WORDS: u8 = 0x3f;
    /// Bits that must be 0: the version in the first byte; in the second one, those for control
    /// packets and for critical options.
    const OTHERS: u8 = 0xc0;
    let header: [u8; GENEVE_HEADERS as usize] = bytes.read(transport)?;
    let length = GENEVE_HEADERS + u32::from(header[8] & OPTION_WORDS) * 4;
    let datagram = u32::from(u16::from_be_bytes([header[4], header[5]]));
    let is_ours = Port::from_network([header[2], header[3]]) == GENEVE
        && datagram >= length
        && transport + datagram <= bytes.length()
        && (header[8] | header[9]) & OTHERS == 0
        && u16::from_be_bytes([header[10], header[11]]) == F::ETHERTYPE
        && header[12] | header[13] | header[14] == 0;
    if is_ours { Ok(length) } else { Err(Reason::NotAService) }
}

/// Returns the offset of the packet that the one at `network` carries, and sets `ends` to the
/// addresses of the outer packet.
///
/// Fails with `NotAService` if it carries none.
#[inline(always)]
pub fn inner<F: Tunnel, B: Bytes>(
    bytes: B,
    network: u32,
    ends: &mut Ends<F::Address>,
) -> Result<u32, Reason> {
    let carried = F::carried(bytes, network)?;
    let length = if carried == F::PROTOCOL {
        F::OUTER
    } else if carried == PROTOCOL_UDP {
        F::OUTER + geneve_length::<F, B>(bytes, network + F::OUTER)?
    } else {
        return Err(Reason::NotAService);
    };
    // The bytes are read right into `ends`. On the stack, the compiler would keep each byte in a
    // slot of its own.
    bytes.read_into(network + F::SOURCE, ends.source.as_mut())?;
    bytes.read_into(network + F::DESTINATION, ends.destination.as_mut())?;
    Ok(network + length)
}

impl Tunnel for V4 {
    const OUTER: u32 = 20;
    const PROTOCOL: u8 = 4;
    const ETHERTYPE: u16 = 0x0800;
    type Begin = [u8; 12];

    #[inline(always)]
    fn begin(inner: [u8; 4], protocol: u8, length: u32, ends: &Ends<[u8; 4]>) -> [u8; 12] {
        const DO_NOT_FRAGMENT: u8 = 0x40;
        let [high, low] = length_field(length + Self::OUTER);
        let mut begin =
            [0x45, inner[1] & 0xfc, high, low, 0, 0, DO_NOT_FRAGMENT, 0, HOP_LIMIT, protocol, 0, 0];
        let sum = Sum::of(&begin) + Sum::of(&ends.source) + Sum::of(&ends.destination);
        [begin[10], begin[11]] = sum.checksum();
        begin
    }

    #[inline(always)]
    fn carried<B: Bytes>(bytes: B, network: u32) -> Result<u8, Reason> {
        let header: [u8; 10] = bytes.read(network)?;
        let is_fragment = (header[6] & 0x3f) | header[7] != 0;
        if header[0] == 0x45 && !is_fragment { Ok(header[9]) } else { Err(Reason::NotAService) }
    }
}

impl Tunnel for V6 {
    const OUTER: u32 = 40;
    const PROTOCOL: u8 = 41;
    const ETHERTYPE: u16 = 0x86dd;
    type Begin = [u8; 8];

    #[inline(always)]
    fn begin(inner: [u8; 4], protocol: u8, length: u32, _ends: &Ends<[u8; 16]>) -> [u8; 8] {
        let [high, low] = length_field(length);
        [inner[0], inner[1] & 0xcf, inner[2], inner[3], high, low, protocol, HOP_LIMIT]
    }

    #[inline(always)]
    fn carried<B: Bytes>(bytes: B, network: u32) -> Result<u8, Reason> {
        let header: [u8; 8] = bytes.read(network)?;
        if header[0] >> 4 == 6 { Ok(header[6]) } else { Err(Reason::NotAService) }
    }
}

/// Returns the length field. A packet of several segments may be longer than the field can say. Its
/// segments get their lengths when they are cut.
#[inline(always)]
fn length_field(length: u32) -> [u8; 2] {
    (length.min(u16::MAX.into()) as u16).to_be_bytes()
}

#[cfg(test)]
mod tests {
    use core::cell::Cell;

    use etherparse::{IpNumber, Ipv4Header, Ipv6FlowLabel, Ipv6Header};
    use rstest::rstest;

    use super::*;

    const ENDS4: Ends<[u8; 4]> =
        Ends { source: [192, 0, 2, 1], destination: [10, 244, 2, 7], source_port: Port::NONE };
    const ENDS6: Ends<[u8; 16]> = Ends {
        source: [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
        destination: [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7],
        source_port: Port::NONE,
    };
    const SOURCE_PORT: Port = Port::new(0x9abc);

    fn header4(protocol: u8, length: u16) -> Ipv4Header {
        let Ends { source, destination, .. } = ENDS4;
        let mut header = Ipv4Header::new(length, 64, IpNumber(protocol), source, destination).unwrap();
        header.dscp = 0x2e.try_into().unwrap();
        header.header_checksum = header.calc_header_checksum();
        header
    }

    fn header6(protocol: u8, payload_length: u16) -> Ipv6Header {
        let Ends { source, destination, .. } = ENDS6;
        Ipv6Header {
            traffic_class: 0xb8,
            flow_label: Ipv6FlowLabel::try_new(0x1_2345).unwrap(),
            payload_length,
            next_header: IpNumber(protocol),
            hop_limit: 64,
            source,
            destination,
        }
    }

    /// Returns the headers of UDP and Geneve without options, before `length` bytes.
    fn geneve_headers(length: u16, ethertype: u16) -> [u8; 16] {
        let ([high, low], [type_high, type_low]) = ((length + 16).to_be_bytes(), ethertype.to_be_bytes());
        [0x9a, 0xbc, 0x17, 0xc1, high, low, 0, 0, 0, 0, type_high, type_low, 0, 0, 0, 0]
    }

    fn written<F: Tunnel>(inner: [u8; 4], length: u32, ends: &Ends<F::Address>) -> Vec<u8> {
        let mut bytes = vec![0xee; 3 + outer_length::<F>(ends) as usize];
        let cells = Cell::from_mut(&mut bytes[..]).as_slice_of_cells();
        assert_eq!(write_outer::<F, _>(cells, 3, (inner, length), ends), Ok(()));
        bytes
    }

    #[test]
    fn outer_headers() {
        let (inner4, inner6) = ([0x45, 0xb9, 5, 0xc8], [0x6b, 0x91, 0x23, 0x45]);
        assert_eq!(written::<V4>(inner4, 1_480, &ENDS4), with_link(&header4(4, 1_480).to_bytes()));
        assert_eq!(written::<V6>(inner6, 1_440, &ENDS6), with_link(&header6(41, 1_440).to_bytes()));
        let ends4 = Ends { source_port: SOURCE_PORT, ..ENDS4 };
        let geneve4 = [&header4(17, 1_496).to_bytes()[..], &geneve_headers(1_480, 0x0800)].concat();
        assert_eq!(written::<V4>(inner4, 1_480, &ends4), with_link(&geneve4));
        let ends6 = Ends { source_port: SOURCE_PORT, ..ENDS6 };
        let geneve6 = [&header6(17, 1_456).to_bytes()[..], &geneve_headers(1_440, 0x86dd)].concat();
        assert_eq!(written::<V6>(inner6, 1_440, &ends6), with_link(&geneve6));
    }

    #[test]
    fn more_than_the_field_can_say() {
        assert_eq!(V4::begin([0x45, 0, 0, 0], 4, 70_000, &ENDS4)[2..4], [0xff; 2]);
        assert_eq!(V6::begin([0x60, 0, 0, 0], 41, 70_000, &ENDS6)[4..6], [0xff; 2]);
        let ends = Ends { source_port: SOURCE_PORT, ..ENDS4 };
        assert_eq!(written::<V4>([0x45, 0, 0, 0], 70_000, &ends)[27..29], [0xff; 2]);
    }

    fn inner_of<F: Tunnel>(mut bytes: Vec<u8>) -> Result<(u32, Ends<F::Address>), Reason> {
        let mut ends = Ends::default();
        let cells = Cell::from_mut(&mut bytes[..]).as_slice_of_cells();
        Ok((inner::<F, _>(cells, 3, &mut ends)?, ends))
    }

    fn with_link(header: &[u8]) -> Vec<u8> {
        [&[0xee; 3], header].concat()
    }

    #[rstest]
    #[case::one_in_another(|_: &mut Ipv4Header| (), true)]
    #[case::ipv6_in_it(|header: &mut Ipv4Header| header.protocol = IpNumber(41), false)]
    #[case::tcp(|header: &mut Ipv4Header| header.protocol = IpNumber(6), false)]
    #[case::with_options(|header: &mut Ipv4Header| header.options = [1; 4].into(), false)]
    #[case::first_fragment(|header: &mut Ipv4Header| header.more_fragments = true, false)]
    #[case::later_fragment(|header: &mut Ipv4Header| header.fragment_offset = 8.try_into().unwrap(), false)]
    fn what_carries_ipv4(#[case] change: fn(&mut Ipv4Header), #[case] carries: bool) {
        let expected = |inside| if carries { Ok((inside, ENDS4)) } else { Err(Reason::NotAService) };
        let mut header = header4(4, 1_480);
        change(&mut header);
        assert_eq!(inner_of::<V4>(with_link(&header.to_bytes())), expected(23));
        let mut header = header4(17, 1_496);
        change(&mut header);
        let geneve = [&header.to_bytes()[..], &geneve_headers(1_480, 0x0800), &[0; 1_480]].concat();
        assert_eq!(inner_of::<V4>(with_link(&geneve)), expected(39));
    }

    #[rstest]
    #[case::one_in_another(41, true)]
    #[case::ipv4_in_it(4, false)]
    #[case::behind_options(60, false)]
    #[case::fragment(44, false)]
    fn what_carries_ipv6(#[case] next: u8, #[case] carries: bool) {
        let header = header6(next, 1_440);
        let expected = if carries { Ok((43, ENDS6)) } else { Err(Reason::NotAService) };
        assert_eq!(inner_of::<V6>(with_link(&header.to_bytes())), expected);
    }

    /// Some bytes of what follows the outer IP header are changed.
    #[rstest]
    #[case::as_it_is_written(&[], Some(16))]
    #[case::another_source_port(&[(0, 0x12)], Some(16))]
    #[case::another_port(&[(3, 0xc2)], None)]
    #[case::with_checksum(&[(6, 0x12)], Some(16))]
    #[case::with_options(&[(8, 2)], Some(24))]
    #[case::with_the_most_options(&[(4, 1), (8, 0x3f)], Some(268))]
    #[case::with_options_beyond_the_datagram(&[(4, 0), (5, 0x17), (8, 2)], None)]
    #[case::longer_than_the_packet(&[(4, 2)], None)]
    #[case::shorter_than_its_headers(&[(4, 0), (5, 15)], None)]
    #[case::of_another_version(&[(8, 0x40)], None)]
    #[case::to_control_the_tunnel(&[(9, 0x80)], None)]
    #[case::with_critical_options(&[(8, 2), (9, 0x40)], None)]
    #[case::with_bits_for_later(&[(9, 0x3f), (15, 0xff)], Some(16))]
    #[case::with_ethernet(&[(10, 0x65), (11, 0x58)], None)]
    #[case::with_the_other_family(&[(10, 0x99), (11, 0x99)], None)]
    #[case::of_a_virtual_network(&[(14, 1)], None)]
    #[case::of_a_high_virtual_network(&[(12, 1)], None)]
    fn what_geneve_carries(#[case] others: &[(usize, u8)], #[case] length: Option<u32>) {
        const CARRIED: [u8; 400] = [0; 400];
        let changed = |ethertype| {
            let mut headers = geneve_headers(100, ethertype);
            others.iter().for_each(|(index, byte)| headers[*index] = *byte);
            headers
        };
        let expected = |before: u32| length.map(|length| before + length).ok_or(Reason::NotAService);
        let four = [&header4(17, 116).to_bytes()[..], &changed(0x0800), &CARRIED].concat();
        assert_eq!(inner_of::<V4>(with_link(&four)), expected(23).map(|inside| (inside, ENDS4)));
        let six = [&header6(17, 116).to_bytes()[..], &changed(0x86dd), &CARRIED].concat();
        assert_eq!(inner_of::<V6>(with_link(&six)), expected(43).map(|inside| (inside, ENDS6)));
    }

    #[test]
    fn a_header_that_is_cut_short_carries_nothing() {
        let geneve4 = [&header4(17, 116).to_bytes()[..], &geneve_headers(100, 0x0800)].concat();
        for (whole, length) in [(&header4(4, 100).to_bytes()[..], 20), (&geneve4[..], 36)] {
            for shorter in 0..length {
                let bytes = with_link(&whole[..shorter]);
                assert_eq!(inner_of::<V4>(bytes), Err(Reason::Malformed), "{shorter}");
            }
        }
        let geneve6 = [&header6(17, 116).to_bytes()[..], &geneve_headers(100, 0x86dd)].concat();
        for (whole, length) in [(&header6(41, 100).to_bytes()[..], 40), (&geneve6[..], 56)] {
            for shorter in 0..length {
                let bytes = with_link(&whole[..shorter]);
                assert_eq!(inner_of::<V6>(bytes), Err(Reason::Malformed), "{shorter}");
            }
        }
    }
}
