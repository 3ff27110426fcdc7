//! Packets as bytes from their network header on: made, sent from any source address, and read.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use etherparse::{
    Icmpv4Type, Icmpv6Type, IpFragOffset, IpHeaders, IpNumber, Ipv4Extensions, Ipv4Header, Ipv6Extensions,
    Ipv6FragmentHeader, Ipv6Header, NetSlice, PacketBuilder, PacketBuilderStep, SlicedPacket, TcpHeader,
    TransportSlice, UdpHeader, err::packet::BuildVecWriteError, icmpv4, icmpv6,
};
use lab::address::Family;
use socket2::{Domain, Protocol, Socket, Type};

pub(super) const FIN: u8 = 1;
pub(super) const SYN: u8 = 2;
pub(super) const RST: u8 = 4;
pub(super) const ACK: u8 = 16;

/// The ends of a packet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Ends {
    pub(super) source: SocketAddr,
    pub(super) destination: SocketAddr,
}

impl Ends {
    pub(super) fn reversed(self) -> Self {
        Self { source: self.destination, destination: self.source }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Segment<'a> {
    pub(super) flags: u8,
    pub(super) sequence: u32,
    pub(super) acknowledgement: u32,
    pub(super) payload: &'a [u8],
}

impl Segment<'_> {
    /// Returns the sequence number that comes after this segment.
    pub(super) fn next(&self) -> u32 {
        let controls = self.flags & (SYN | FIN);
        self.sequence.wrapping_add(self.payload.len() as u32 + controls.count_ones())
    }
}

/// The part of a packet behind its network header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Carried<'a> {
    Segment(Segment<'a>),
    Datagram(&'a [u8]),
}

pub(super) fn segment(ends: Ends, segment: &Segment<'_>) -> Vec<u8> {
    const WINDOW: u16 = 64_240;
    let flags = segment.flags;
    let header = TcpHeader {
        fin: flags & FIN != 0,
        syn: flags & SYN != 0,
        rst: flags & RST != 0,
        ack: flags & ACK != 0,
        acknowledgment_number: segment.acknowledgement,
        ..TcpHeader::new(ends.source.port(), ends.destination.port(), segment.sequence, WINDOW)
    };
    written(|packet| network(ends, None).tcp_header(header).write_to_vec(packet, segment.payload))
}

pub(super) fn datagram(ends: Ends, payload: &[u8]) -> Vec<u8> {
    let (source, destination) = (ends.source.port(), ends.destination.port());
    written(|packet| network(ends, None).udp(source, destination).write_to_vec(packet, payload))
}

/// Returns an ICMP error from `by` to the source of the packet that it quotes: the port cannot be
/// reached, or the host.
pub(super) fn icmp_error(by: IpAddr, quoted: &[u8], quoted_ends: Ends, is_port: bool) -> Vec<u8> {
    let ends = Ends { source: SocketAddr::new(by, 0), destination: quoted_ends.source };
    if by.is_ipv4() {
        use icmpv4::DestUnreachableHeader::{Host, Port};
        let error = Icmpv4Type::DestinationUnreachable(if is_port { Port } else { Host });
        written(|packet| network(ends, None).icmpv4(error).write_to_vec(packet, quoted))
    } else {
        use icmpv6::DestUnreachableCode::{Address, Port};
        let error = Icmpv6Type::DestinationUnreachable(if is_port { Port } else { Address });
        written(|packet| network(ends, None).icmpv6(error).write_to_vec(packet, quoted))
    }
}

/// Returns the first fragment of a datagram, or the last one.
pub(super) fn fragment(ends: Ends, id: u32, is_first: bool) -> Vec<u8> {
    const LENGTH: usize = 64;
    // Offsets are counted in units of eight bytes.
    const LAST: IpFragOffset = match IpFragOffset::try_new(LENGTH as u16 / 8) {
        Ok(offset) => offset,
        Err(_) => IpFragOffset::ZERO,
    };
    let offset = if is_first { IpFragOffset::ZERO } else { LAST };
    let fragment = Ipv6FragmentHeader::new(IpNumber::UDP, offset, is_first, id);
    let whole = datagram(ends, &[b'x'; LENGTH - UdpHeader::LEN]);
    let body = if is_first { &whole[whole.len() - LENGTH..] } else { &[b'x'; LENGTH] };
    written(|packet| network(ends, Some(fragment)).write_to_vec(packet, IpNumber::UDP, body))
}

/// Begins a packet, which is a whole one without `fragment`.
fn network(ends: Ends, fragment: Option<Ipv6FragmentHeader>) -> PacketBuilderStep<IpHeaders> {
    const HOP_LIMIT: u8 = 64;
    PacketBuilder::ip(match (ends.source.ip(), ends.destination.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let mut header = Ipv4Header {
                dont_fragment: false,
                time_to_live: HOP_LIMIT,
                source: source.octets(),
                destination: destination.octets(),
                ..Ipv4Header::default()
            };
            if let Some(fragment) = fragment {
                header.identification = fragment.identification as u16;
                header.fragment_offset = fragment.fragment_offset;
                header.more_fragments = fragment.more_fragments;
            }
            IpHeaders::Ipv4(header, Ipv4Extensions::default())
        }
        (source, destination) => {
            let octets = |address| match address {
                IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
                IpAddr::V6(address) => address.octets(),
            };
            let header = Ipv6Header {
                hop_limit: HOP_LIMIT,
                source: octets(source),
                destination: octets(destination),
                ..Ipv6Header::default()
            };
            IpHeaders::Ipv6(header, Ipv6Extensions { fragment, ..Ipv6Extensions::default() })
        }
    })
}

/// Returns the bytes of a packet.
#[expect(clippy::expect_used, reason = "writing fails only if a packet has more than 64 KiB")]
fn written(write: impl FnOnce(&mut Vec<u8>) -> Result<(), BuildVecWriteError>) -> Vec<u8> {
    let mut packet = Vec::new();
    write(&mut packet).expect("the packet is too long");
    packet
}

/// Reads a whole packet of TCP or UDP.
pub(super) fn read(packet: &[u8]) -> Option<(Ends, Carried<'_>)> {
    let packet = SlicedPacket::from_ip(packet).ok()?;
    let (source, destination): (IpAddr, IpAddr) = match packet.net? {
        NetSlice::Ipv4(ip) => (ip.header().source_addr().into(), ip.header().destination_addr().into()),
        NetSlice::Ipv6(ip) => (ip.header().source_addr().into(), ip.header().destination_addr().into()),
        NetSlice::Arp(_) => return None,
    };
    let (source_port, destination_port, carried) = match packet.transport? {
        TransportSlice::Tcp(tcp) => {
            let flags = [(tcp.fin(), FIN), (tcp.syn(), SYN), (tcp.rst(), RST), (tcp.ack(), ACK)];
            let segment = Segment {
                flags: flags.into_iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| flag).sum(),
                sequence: tcp.sequence_number(),
                acknowledgement: tcp.acknowledgment_number(),
                payload: tcp.payload(),
            };
            (tcp.source_port(), tcp.destination_port(), Carried::Segment(segment))
        }
        TransportSlice::Udp(udp) => {
            (udp.source_port(), udp.destination_port(), Carried::Datagram(udp.payload()))
        }
        TransportSlice::Icmpv4(_) | TransportSlice::Icmpv6(_) | TransportSlice::Igmp(_) => return None,
    };
    let ends = Ends {
        source: SocketAddr::new(source, source_port),
        destination: SocketAddr::new(destination, destination_port),
    };
    Some((ends, carried))
}

/// Sends packets of both families whose network headers are ours, from the network namespace in
/// which it was made.
pub(super) struct Sender {
    v4: Socket,
    v6: Socket,
}

impl Sender {
    pub(super) fn new() -> io::Result<Self> {
        // IPPROTO_RAW: the network header is ours. The kernel sums that of IPv4.
        let raw = |domain| Socket::new(domain, Type::RAW, Some(Protocol::from(255)));
        Ok(Self { v4: raw(Domain::IPV4)?, v6: raw(Domain::IPV6)? })
    }

    /// A full queue of a device loses the packet, as a network may.
    pub(super) fn send(&self, to: IpAddr, packet: &[u8]) -> io::Result<()> {
        let socket = match Family::of(to) {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        };
        match socket.send_to(packet, &SocketAddr::new(to, 0).into()) {
            Err(error) if error.raw_os_error() == Some(nix::errno::Errno::ENOBUFS as i32) => Ok(()),
            sent => sent.map(drop),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(source: &str, destination: &str) -> Ends {
        Ends { source: source.parse().unwrap(), destination: destination.parse().unwrap() }
    }

    /// Pairs of ends of each family.
    fn both() -> [Ends; 2] {
        [ends("100.64.0.1:2000", "192.0.2.11:80"), ends("[2001:db8::1]:2000", "[2001:db8::2]:80")]
    }

    #[test]
    fn what_is_made_can_be_read() {
        for ends in both() {
            let made = Segment { flags: SYN | ACK, sequence: 7, acknowledgement: 9, payload: b"abc" };
            assert_eq!(read(&segment(ends, &made)), Some((ends, Carried::Segment(made))));
            assert_eq!(made.next(), 11);
            assert_eq!(read(&datagram(ends, b"abcd")), Some((ends, Carried::Datagram(b"abcd"))));
            assert_eq!(read(&icmp_error(ends.source.ip(), &[0; 40], ends, true)), None);
        }
    }
}
