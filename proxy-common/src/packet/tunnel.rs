//! A packet in another of its family, as it goes to a backend of another node that answers the client itself: IPv4 in IPv4, IPv6 in IPv6.

use super::{Bytes, Network, Sum};
use crate::{
    family::{V4, V6},
    reason::Reason,
};

/// Addresses of the outer packet.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Ends<A> {
    /// The node that has encapsulated it.
    pub source: A,
    /// The backend.
    pub destination: A,
}

const HOP_LIMIT: u8 = 64;

pub trait Tunnel: Network {
    /// Bytes of the outer header.
    const OUTER: u32;
    /// The outer header without its addresses, which lie behind.
    type Begin: AsRef<[u8]>;

    /// Of a packet with this many bytes, whose own header begins with `inner`: a traffic class is kept, and in IPv6 the flow label.
    fn begin(inner: [u8; 4], length: u32, ends: &Ends<Self::Address>) -> Self::Begin;

    /// Is there at `network` a header like that, without options and of no fragment?
    fn is_outer<B: Bytes>(bytes: B, network: u32) -> Result<bool, Reason>;
}

/// Writes the outer header into the room that was made for it at `network`, before a packet of this length that begins with `inner`.
#[inline(always)]
pub fn write_outer<F: Tunnel, B: Bytes>(
    bytes: B,
    network: u32,
    (inner, length): ([u8; 4], u32),
    ends: &Ends<F::Address>,
) -> Result<(), Reason> {
    bytes.write(network, F::begin(inner, length, ends).as_ref())?;
    bytes.write(network + F::SOURCE, ends.source.as_ref())?;
    bytes.write(network + F::DESTINATION, ends.destination.as_ref())
}

/// Where the packet begins that the one at `network` carries, and its ends. Fails with `NotAService` where that carries none.
#[inline(always)]
pub fn inner<F: Tunnel, B: Bytes>(
    bytes: B,
    network: u32,
    ends: &mut Ends<F::Address>,
) -> Result<u32, Reason> {
    if !F::is_outer(bytes, network)? {
        return Err(Reason::NotAService);
    }
    // Past the stack, on which the compiler would keep each byte in a place of its own.
    bytes.read_into(network + F::SOURCE, ends.source.as_mut())?;
    bytes.read_into(network + F::DESTINATION, ends.destination.as_mut())?;
    Ok(network + F::OUTER)
}

impl Tunnel for V4 {
    const OUTER: u32 = 20;
    type Begin = [u8; 12];

    #[inline(always)]
    fn begin(inner: [u8; 4], length: u32, ends: &Ends<[u8; 4]>) -> [u8; 12] {
        const IPV4_IN_IPV4: u8 = 4;
        const DO_NOT_FRAGMENT: u8 = 0x40;
        let [high, low] = length_field(length + Self::OUTER);
        let mut begin = [0x45, inner[1], high, low, 0, 0, DO_NOT_FRAGMENT, 0, HOP_LIMIT, IPV4_IN_IPV4, 0, 0];
        let sum = Sum::of(&begin) + Sum::of(&ends.source) + Sum::of(&ends.destination);
        [begin[10], begin[11]] = sum.checksum();
        begin
    }

    #[inline(always)]
    fn is_outer<B: Bytes>(bytes: B, network: u32) -> Result<bool, Reason> {
        let header: [u8; 10] = bytes.read(network)?;
        let is_fragment = (header[6] & 0x3f) | header[7] != 0;
        Ok(header[0] == 0x45 && header[9] == 4 && !is_fragment)
    }
}

impl Tunnel for V6 {
    const OUTER: u32 = 40;
    type Begin = [u8; 8];

    #[inline(always)]
    fn begin(inner: [u8; 4], length: u32, _ends: &Ends<[u8; 16]>) -> [u8; 8] {
        const IPV6_IN_IPV6: u8 = 41;
        let [high, low] = length_field(length);
        [inner[0], inner[1], inner[2], inner[3], high, low, IPV6_IN_IPV6, HOP_LIMIT]
    }

    #[inline(always)]
    fn is_outer<B: Bytes>(bytes: B, network: u32) -> Result<bool, Reason> {
        let header: [u8; 8] = bytes.read(network)?;
        Ok(header[0] >> 4 == 6 && header[6] == 41)
    }
}

/// What several segments in one make longer than the field can say is written anew when they are cut.
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

    const ENDS4: Ends<[u8; 4]> = Ends { source: [192, 0, 2, 1], destination: [10, 244, 2, 7] };
    const ENDS6: Ends<[u8; 16]> = Ends {
        source: [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
        destination: [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7],
    };

    fn header4() -> Ipv4Header {
        let Ends { source, destination } = ENDS4;
        let mut header = Ipv4Header::new(1_480, 64, IpNumber(4), source, destination).unwrap();
        (header.dscp, header.ecn) = (0x2e.try_into().unwrap(), 1.try_into().unwrap());
        header.header_checksum = header.calc_header_checksum();
        header
    }

    fn header6() -> Ipv6Header {
        let Ends { source, destination } = ENDS6;
        Ipv6Header {
            traffic_class: 0xb9,
            flow_label: Ipv6FlowLabel::try_new(0x1_2345).unwrap(),
            payload_length: 1_440,
            next_header: IpNumber(41),
            hop_limit: 64,
            source,
            destination,
        }
    }

    fn written<F: Tunnel>(inner: [u8; 4], length: u32, ends: &Ends<F::Address>) -> Vec<u8> {
        let mut bytes = vec![0xee; 3 + F::OUTER as usize];
        let cells = Cell::from_mut(&mut bytes[..]).as_slice_of_cells();
        assert_eq!(write_outer::<F, _>(cells, 3, (inner, length), ends), Ok(()));
        bytes
    }

    #[test]
    fn outer_headers() {
        assert_eq!(written::<V4>([0x45, 0xb9, 5, 0xc8], 1_480, &ENDS4), with_link(&header4().to_bytes()));
        assert_eq!(written::<V6>([0x6b, 0x91, 0x23, 0x45], 1_440, &ENDS6), with_link(&header6().to_bytes()));
    }

    #[test]
    fn more_than_the_field_can_say() {
        assert_eq!(V4::begin([0x45, 0, 0, 0], 70_000, &ENDS4)[2..4], [0xff; 2]);
        assert_eq!(V6::begin([0x60, 0, 0, 0], 70_000, &ENDS6)[4..6], [0xff; 2]);
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
        let mut header = header4();
        change(&mut header);
        let expected = if carries { Ok((23, ENDS4)) } else { Err(Reason::NotAService) };
        assert_eq!(inner_of::<V4>(with_link(&header.to_bytes())), expected);
    }

    #[rstest]
    #[case::one_in_another(41, true)]
    #[case::ipv4_in_it(4, false)]
    #[case::behind_options(60, false)]
    #[case::fragment(44, false)]
    fn what_carries_ipv6(#[case] next: u8, #[case] carries: bool) {
        let header = Ipv6Header { next_header: IpNumber(next), ..header6() };
        let expected = if carries { Ok((43, ENDS6)) } else { Err(Reason::NotAService) };
        assert_eq!(inner_of::<V6>(with_link(&header.to_bytes())), expected);
    }

    #[test]
    fn a_header_that_is_cut_short_carries_nothing() {
        for length in 0..20 {
            let bytes = with_link(&header4().to_bytes()[..length]);
            assert_eq!(inner_of::<V4>(bytes), Err(Reason::Malformed), "{length}");
        }
        for length in 0..40 {
            let bytes = with_link(&header6().to_bytes()[..length]);
            assert_eq!(inner_of::<V6>(bytes), Err(Reason::Malformed), "{length}");
        }
    }
}
