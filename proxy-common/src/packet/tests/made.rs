//! Packets of every kind, which another library (etherparse) makes.

use etherparse::{
    Icmpv4Header, Icmpv4Type, Icmpv6Header, Icmpv6Type, IpFragOffset, IpNumber, Ipv4Header, Ipv4Options,
    Ipv6Header, TcpHeader, UdpHeader, icmpv4::DestUnreachableHeader, icmpv6::DestUnreachableCode,
};
use proptest::prelude::*;

use super::super::*;
use crate::family::{V4, V6};

/// The properties of a packet, except for its ends.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    /// The number of bytes before the network header.
    pub(super) link: usize,
    is_tcp: bool,
    /// True if a UDP packet has a checksum.
    has_checksum: bool,
    /// The number of words of IPv4 options, or of IPv6 extension headers.
    options: u8,
    payload: Vec<u8>,
    fragment_id: u16,
    /// The number of bytes after the network header in each fragment but the last. 0: the packet is
    /// whole.
    piece: usize,
}

pub(super) fn shape() -> impl Strategy<Value = Shape> {
    let link = prop_oneof![Just(0), Just(14)];
    let piece = prop_oneof![3 => Just(0), 1 => (4..20usize).prop_map(|words| words * 8)];
    let payload = prop::collection::vec(any::<u8>(), 0..200);
    let flags = (any::<bool>(), prop::bool::weighted(0.8));
    (link, flags, 0..4u8, payload, 1..u16::MAX, piece).prop_map(
        |(link, (is_tcp, has_checksum), options, payload, fragment_id, piece)| Shape {
            link,
            is_tcp,
            has_checksum,
            options,
            payload,
            fragment_id,
            piece,
        },
    )
}

pub(super) type Ends<A> = (End<A>, End<A>);

/// Generates a source and a destination.
pub(super) fn ends<A: Address + Arbitrary>() -> impl Strategy<Value = Ends<A>> {
    let end = || (any::<A>(), any::<u16>().prop_map(Port::new));
    (end(), end())
}

/// An IP family whose test packets are built with etherparse.
pub(super) trait Made: Network<Address: Arbitrary> {
    fn network_header(shape: &Shape, protocol: u8, ends: &Ends<Self::Address>, payload: &[u8]) -> Vec<u8>;
    /// Returns the header of a fragment with the bytes `piece`. `position` is the offset of these
    /// bytes, and true if more fragments follow.
    fn fragment(shape: &Shape, ends: &Ends<Self::Address>, piece: &[u8], position: (usize, bool)) -> Vec<u8>;
    fn tcp_checksum(header: &TcpHeader, ends: &Ends<Self::Address>, payload: &[u8]) -> u16;
    fn udp_checksum(header: &UdpHeader, ends: &Ends<Self::Address>, payload: &[u8]) -> u16;
    /// Returns a whole ICMP message that says port unreachable.
    fn message(from: Self::Address, to: Self::Address, quoted: &[u8]) -> Vec<u8>;
    const ICMP: u8;
}

impl Shape {
    fn protocol(&self) -> u8 {
        if self.is_tcp { PROTOCOL_TCP } else { crate::layout::PROTOCOL_UDP }
    }

    fn transport<F: Made>(&self, ends: &Ends<F::Address>) -> Vec<u8> {
        let (source, destination) = (ends.0.1.number(), ends.1.1.number());
        let header = if self.is_tcp {
            let mut header = TcpHeader { ack: true, ..TcpHeader::new(source, destination, 7, 8) };
            header.checksum = F::tcp_checksum(&header, ends, &self.payload);
            header.to_bytes().to_vec()
        } else {
            let length = (UdpHeader::LEN + self.payload.len()) as u16;
            let mut header =
                UdpHeader { source_port: source, destination_port: destination, length, checksum: 0 };
            if self.has_checksum {
                header.checksum = F::udp_checksum(&header, ends, &self.payload);
            }
            header.to_bytes().to_vec()
        };
        [&header[..], &self.payload].concat()
    }

    /// Returns the packet, or its fragments.
    pub(super) fn packets<F: Made>(&self, ends: &Ends<F::Address>) -> Vec<Vec<u8>> {
        let transport = self.transport::<F>(ends);
        let link = vec![0xee; self.link];
        if self.piece == 0 {
            return vec![
                [link, F::network_header(self, self.protocol(), ends, &transport), transport].concat(),
            ];
        }
        let count = transport.len().div_ceil(self.piece);
        let fragment = |(index, piece)| {
            let position = (index * self.piece, index + 1 < count);
            [&link[..], &F::fragment(self, ends, piece, position), piece].concat()
        };
        transport.chunks(self.piece).enumerate().map(fragment).collect()
    }

    /// Returns an ICMP error of `teller` that quotes a packet without options: its network header,
    /// and `length` bytes of what follows.
    pub(super) fn error<F: Made>(
        &self,
        ends: &Ends<F::Address>,
        teller: F::Address,
        length: usize,
    ) -> Vec<u8> {
        let plain = Self { options: 0, ..self.clone() };
        let transport = self.transport::<F>(ends);
        let quoted = F::network_header(&plain, self.protocol(), ends, &transport);
        let quoted = [&quoted, &transport[..length.min(transport.len())]].concat();
        let to = (ends.0.0, Port::NONE);
        let message = F::message(teller, to.0, &quoted);
        let header = F::network_header(self, F::ICMP, &((teller, Port::NONE), to), &message);
        [vec![0xee; self.link], header, message].concat()
    }
}

fn ipv4_header(shape: &Shape, protocol: u8, ends: &Ends<[u8; 4]>, payload: usize) -> Ipv4Header {
    let mut header = Ipv4Header::new(0, 63, IpNumber(protocol), ends.0.0, ends.1.0).unwrap();
    const NO_OPERATION: u8 = 1;
    header.options = Ipv4Options::try_from(&vec![NO_OPERATION; usize::from(shape.options) * 4][..]).unwrap();
    header.set_payload_len(payload).unwrap();
    header.header_checksum = header.calc_header_checksum();
    header
}

impl Made for V4 {
    const ICMP: u8 = 1;

    fn network_header(shape: &Shape, protocol: u8, ends: &Ends<[u8; 4]>, payload: &[u8]) -> Vec<u8> {
        ipv4_header(shape, protocol, ends, payload.len()).to_bytes().to_vec()
    }

    fn fragment(shape: &Shape, ends: &Ends<[u8; 4]>, piece: &[u8], position: (usize, bool)) -> Vec<u8> {
        let mut header = ipv4_header(shape, shape.protocol(), ends, piece.len());
        header.identification = shape.fragment_id;
        header.dont_fragment = false;
        header.fragment_offset = IpFragOffset::try_new((position.0 / 8) as u16).unwrap();
        header.more_fragments = position.1;
        header.header_checksum = header.calc_header_checksum();
        header.to_bytes().to_vec()
    }

    fn tcp_checksum(header: &TcpHeader, ends: &Ends<[u8; 4]>, payload: &[u8]) -> u16 {
        header.calc_checksum_ipv4_raw(ends.0.0, ends.1.0, payload).unwrap()
    }

    fn udp_checksum(header: &UdpHeader, ends: &Ends<[u8; 4]>, payload: &[u8]) -> u16 {
        header.calc_checksum_ipv4_raw(ends.0.0, ends.1.0, payload).unwrap()
    }

    fn message(_from: [u8; 4], _to: [u8; 4], quoted: &[u8]) -> Vec<u8> {
        let kind = Icmpv4Type::DestinationUnreachable(DestUnreachableHeader::Port);
        [&Icmpv4Header::with_checksum(kind, quoted).to_bytes()[..], quoted].concat()
    }
}

const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;

/// Returns the headers before `next`: an IPv6 header and extension headers.
fn ipv6_headers(shape: &Shape, next: u8, ends: &Ends<[u8; 16]>, payload: usize) -> Vec<u8> {
    let count = usize::from(shape.options);
    let number = |index| if index < count { DESTINATION_OPTIONS } else { next };
    let header = Ipv6Header {
        payload_length: (count * 8 + payload) as u16,
        next_header: IpNumber(number(0)),
        hop_limit: 63,
        source: ends.0.0,
        destination: ends.1.0,
        ..Ipv6Header::default()
    };
    let extensions = (0..count).flat_map(|index| [number(index + 1), 0, 1, 4, 0, 0, 0, 0]);
    header.to_bytes().into_iter().chain(extensions).collect()
}

impl Made for V6 {
    const ICMP: u8 = 58;

    fn network_header(shape: &Shape, protocol: u8, ends: &Ends<[u8; 16]>, payload: &[u8]) -> Vec<u8> {
        ipv6_headers(shape, protocol, ends, payload.len())
    }

    fn fragment(shape: &Shape, ends: &Ends<[u8; 16]>, piece: &[u8], position: (usize, bool)) -> Vec<u8> {
        let [offset_high, offset_low] = (position.0 as u16 | u16::from(position.1)).to_be_bytes();
        let [id_high, id_low] = shape.fragment_id.to_be_bytes();
        let own = [shape.protocol(), 0, offset_high, offset_low, 0, 0, id_high, id_low];
        [&ipv6_headers(shape, FRAGMENT, ends, own.len() + piece.len())[..], &own].concat()
    }

    fn tcp_checksum(header: &TcpHeader, ends: &Ends<[u8; 16]>, payload: &[u8]) -> u16 {
        header.calc_checksum_ipv6_raw(ends.0.0, ends.1.0, payload).unwrap()
    }

    fn udp_checksum(header: &UdpHeader, ends: &Ends<[u8; 16]>, payload: &[u8]) -> u16 {
        header.calc_checksum_ipv6_raw(ends.0.0, ends.1.0, payload).unwrap()
    }

    fn message(from: [u8; 16], to: [u8; 16], quoted: &[u8]) -> Vec<u8> {
        let kind = Icmpv6Type::DestinationUnreachable(DestUnreachableCode::Port);
        [&Icmpv6Header::with_checksum(kind, from, to, quoted).unwrap().to_bytes()[..], quoted].concat()
    }
}
