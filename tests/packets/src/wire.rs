//! Packets as the cases describe them, and their bytes. All checksums are computed here from
//! scratch. If bytes are equal, the programs' incremental checksums are right too.

use etherparse::{
    IcmpEchoHeader, Icmpv4Header, Icmpv4Type, Icmpv6Header, Icmpv6Type, IpFragOffset, IpNumber, Ipv4Header,
    Ipv4Options, Ipv6Header, TcpHeader, UdpHeader, icmpv4, icmpv6,
};
use proxy_common::{
    family::{Family, V4, V6},
    layout::{PROTOCOL_TCP, PROTOCOL_UDP},
    packet::{TCP_ACK, TCP_FIN, TCP_RST, TCP_SYN},
};

/// Hosts that the cases talk about. Each has the same number in both families; see
/// [`Wire::address`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum KnownAddress {
    Client = 1,
    ClusterIp = 3,
    OtherClusterIp = 4,
    Node = 5,
    OtherNode = 6,
    LocalBackend = 7,
    RemoteBackend = 8,
    Stranger = 9,
    External = 10,
}

pub(crate) type Endpoint = (KnownAddress, u16);

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Link {
    Ethernet,
    Bare,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Extra {
    None,
    /// IPv4 options, or an IPv6 hop-by-hop header.
    Options,
    /// The most IPv6 extension headers that the programs follow, or the most IPv4 options that fit
    /// into a header.
    ManyOptions,
    /// IPv6 extension headers, each with its number. The first byte of each is set to the number of
    /// the next header.
    Chain(&'static [(u8, &'static [u8])]),
}

/// Rule by which a packet is cut into fragments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    pub(crate) id: u16,
    /// Number of bytes after the network header in each fragment but the last. It is a multiple of
    /// 8.
    pub(crate) piece: usize,
}

/// Outer ends of a packet that carries another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tunnel {
    pub(crate) source: KnownAddress,
    pub(crate) destination: KnownAddress,
    /// Source port of the outer UDP header, with Geneve. If it is `None`, the packet is carried in
    /// IP alone.
    pub(crate) port: Option<u16>,
}

impl Tunnel {
    /// Returns the protocol of the outer IP header, and what follows that header. The two numbers
    /// are the type of `packet` in IP alone and in Geneve.
    fn carry(&self, packet: &[u8], (protocol, ethertype): (IpNumber, u16)) -> (IpNumber, Vec<u8>) {
        const GENEVE: u16 = 6081;
        let Some(source_port) = self.port else { return (protocol, packet.to_vec()) };
        let length = (UdpHeader::LEN + 8 + packet.len()) as u16;
        let udp = UdpHeader { source_port, destination_port: GENEVE, length, checksum: 0 };
        let [high, low] = ethertype.to_be_bytes();
        (IpNumber::UDP, [&udp.to_bytes()[..], &[0, 0, high, low, 0, 0, 0, 0], packet].concat())
    }
}

pub(crate) const HOP_BY_HOP: u8 = 0;
pub(crate) const DESTINATION_OPTIONS: u8 = 60;

/// A TCP segment or a UDP datagram, with the headers before it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Segment {
    pub(crate) link: Link,
    pub(crate) source: Endpoint,
    pub(crate) destination: Endpoint,
    pub(crate) protocol: u8,
    pub(crate) tcp_flags: u8,
    pub(crate) sequence: u32,
    pub(crate) acknowledgement: u32,
    pub(crate) window: u16,
    pub(crate) hop_limit: u8,
    pub(crate) extra: Extra,
    /// Leaves the checksum at zero. Only UDP allows that.
    pub(crate) without_checksum: bool,
    pub(crate) payload: Vec<u8>,
    /// Exchanges the Ethernet addresses, as an answer has them.
    pub(crate) back: bool,
}

/// Sequence numbers of the SYNs of client and backend.
const CLIENT_ISN: u32 = 0x0102_0303;
const BACKEND_ISN: u32 = 0x0506_0707;

/// Returns sequence and acknowledgement number of a segment at the beginning of a connection.
fn numbers(own: u32, other: u32, tcp_flags: u8) -> (u32, u32) {
    (own + u32::from(tcp_flags & TCP_SYN == 0), if tcp_flags & TCP_ACK == 0 { 0 } else { other + 1 })
}

/// Makes a TCP segment of a client.
pub(crate) fn tcp(source: Endpoint, destination: Endpoint, tcp_flags: u8) -> Segment {
    let (sequence, acknowledgement) = numbers(CLIENT_ISN, BACKEND_ISN, tcp_flags);
    Segment {
        link: Link::Ethernet,
        source,
        destination,
        protocol: PROTOCOL_TCP,
        tcp_flags,
        sequence,
        acknowledgement,
        window: 64_240,
        hop_limit: 63,
        extra: Extra::None,
        without_checksum: false,
        payload: Vec::new(),
        back: false,
    }
}

pub(crate) fn udp(source: Endpoint, destination: Endpoint) -> Segment {
    Segment {
        protocol: PROTOCOL_UDP,
        window: 0,
        payload: b"question".to_vec(),
        ..tcp(source, destination, 0)
    }
}

impl Segment {
    pub(crate) fn from(&self, source: Endpoint) -> Self {
        Self { source, ..self.clone() }
    }

    pub(crate) fn to(&self, destination: Endpoint) -> Self {
        Self { destination, ..self.clone() }
    }

    /// Makes the segment that the peer sends back.
    pub(crate) fn answer(&self, tcp_flags: u8) -> Self {
        let tcp_flags = if self.protocol == PROTOCOL_TCP { tcp_flags } else { 0 };
        let (sequence, acknowledgement) = numbers(BACKEND_ISN, CLIENT_ISN, tcp_flags);
        let (source, destination) = (self.destination, self.source);
        Self { source, destination, tcp_flags, sequence, acknowledgement, ..self.clone() }
    }

    /// Makes another segment of the client, with these flags.
    pub(crate) fn flags(&self, tcp_flags: u8) -> Self {
        let tcp_flags = if self.protocol == PROTOCOL_TCP { tcp_flags } else { 0 };
        let (sequence, acknowledgement) = numbers(CLIENT_ISN, BACKEND_ISN, tcp_flags);
        Self { tcp_flags, sequence, acknowledgement, ..self.clone() }
    }

    /// Makes the packet as a router sends it back by the interface that it has come by.
    pub(crate) fn sent_back(&self) -> Self {
        Self { back: true, hop_limit: self.hop_limit - 1, ..self.clone() }
    }

    pub(crate) fn bytes<W: Wire>(&self) -> Vec<u8> {
        let ends = [W::address(self.source.0), W::address(self.destination.0)];
        let header = if self.protocol == PROTOCOL_TCP {
            let mut header = self.tcp_header();
            header.checksum = W::tcp_checksum(&header, ends, &self.payload);
            header.to_bytes().to_vec()
        } else {
            let mut header = self.udp_header();
            if !self.without_checksum {
                header.checksum = W::udp_checksum(&header, ends, &self.payload);
            }
            header.to_bytes().to_vec()
        };
        W::packet(self, self.protocol, &[&header[..], &self.payload].concat())
    }

    /// Returns the packet's bytes inside another packet.
    pub(crate) fn in_tunnel<W: Wire>(&self, tunnel: Tunnel) -> Vec<u8> {
        W::in_tunnel(&self.bytes::<W>(), tunnel)
    }

    /// Returns the fragments in order. If the packet fits into one fragment, IPv6 still has a
    /// fragment header.
    pub(crate) fn fragments<W: Wire>(&self, cut: Cut) -> Vec<Vec<u8>> {
        let whole = self.bytes::<W>();
        let (headers, payload) = whole.split_at(self.link_header(0).len() + W::header_length(self));
        let count = payload.len().div_ceil(cut.piece);
        let fragment = |(index, piece): (usize, &[u8])| {
            let position = ((index * cut.piece) as u16, index + 1 < count);
            W::fragment(self, headers, piece, cut.id, position)
        };
        payload.chunks(cut.piece).enumerate().map(fragment).collect()
    }

    /// Returns the Ethernet header, or nothing for a device without one.
    fn link_header(&self, ethertype: u16) -> Vec<u8> {
        const HERE: [u8; 6] = [2, 0, 0, 0, 0, 1];
        const THERE: [u8; 6] = [2, 0, 0, 0, 0, 2];
        match self.link {
            Link::Bare => Vec::new(),
            Link::Ethernet => {
                let (destination, source) = if self.back { (THERE, HERE) } else { (HERE, THERE) };
                [&destination[..], &source[..], &ethertype.to_be_bytes()[..]].concat()
            }
        }
    }

    fn tcp_header(&self) -> TcpHeader {
        TcpHeader {
            sequence_number: self.sequence,
            acknowledgment_number: self.acknowledgement,
            fin: self.tcp_flags & TCP_FIN != 0,
            syn: self.tcp_flags & TCP_SYN != 0,
            rst: self.tcp_flags & TCP_RST != 0,
            ack: self.tcp_flags & TCP_ACK != 0,
            window_size: self.window,
            ..TcpHeader::new(self.source.1, self.destination.1, self.sequence, self.window)
        }
    }

    fn udp_header(&self) -> UdpHeader {
        UdpHeader {
            source_port: self.source.1,
            destination_port: self.destination.1,
            length: (UdpHeader::LEN + self.payload.len()) as u16,
            checksum: 0,
        }
    }
}

const ECHO: IcmpEchoHeader = IcmpEchoHeader { id: 0x1234, seq: 7 };

/// Bytes of the packets of one IP family.
pub(crate) trait Wire: Family<Address: AsRef<[u8]> + std::fmt::Debug> {
    const NAME: &'static str;
    const ANSWER_HOP_LIMIT: u8 = 64;

    /// Returns a host's address. A packet without Ethernet header has the family's ethertype at
    /// bytes 12 and 13, inside its source address, because BPF_PROG_TEST_RUN reads the protocol
    /// there.
    fn address(of: KnownAddress) -> Self::Address;
    fn tcp_checksum(header: &TcpHeader, ends: [Self::Address; 2], payload: &[u8]) -> u16;
    fn udp_checksum(header: &UdpHeader, ends: [Self::Address; 2], payload: &[u8]) -> u16;
    fn packet(segment: &Segment, protocol: u8, transport: &[u8]) -> Vec<u8>;
    /// Returns the length of the network header, with all that each fragment repeats.
    fn header_length(segment: &Segment) -> usize;
    /// Returns a fragment that begins with these headers, link and network. `position` is its
    /// offset in bytes, and true if more fragments follow.
    fn fragment(segment: &Segment, headers: &[u8], piece: &[u8], id: u16, position: (u16, bool)) -> Vec<u8>;
    /// Returns the ICMP error from `source` to `destination` that says that nobody listens where
    /// `quoted` was sent.
    fn error(source: KnownAddress, destination: KnownAddress, quoted: &Segment) -> Vec<u8>;

    /// Returns a packet, which has an Ethernet header, inside another one.
    fn in_tunnel(packet: &[u8], tunnel: Tunnel) -> Vec<u8>;

    /// Returns the ICMP error that tells the sender of `segment` that only `length` bytes would
    /// have been forwarded. It has the Ethernet addresses of the segment.
    fn too_big(segment: &Segment, length: usize) -> Vec<u8>;

    /// Returns an ICMP echo request with the segment's ends and payload, or the reply with them.
    fn echo(segment: &Segment, is_reply: bool) -> Vec<u8>;

    /// Returns the ICMP error that tells the sender of `segment` that nobody listens.
    fn unreachable(segment: &Segment) -> Vec<u8> {
        let back = Segment { back: true, ..segment.clone() };
        Self::error(segment.destination.0, segment.source.0, &back)
    }
}

impl Wire for V4 {
    const NAME: &'static str = "ipv4";

    fn address(of: KnownAddress) -> [u8; 4] {
        [8, 0, 77, of as u8]
    }

    fn tcp_checksum(header: &TcpHeader, ends: [Self::Address; 2], payload: &[u8]) -> u16 {
        header.calc_checksum_ipv4_raw(ends[0], ends[1], payload).unwrap()
    }

    fn udp_checksum(header: &UdpHeader, ends: [Self::Address; 2], payload: &[u8]) -> u16 {
        header.calc_checksum_ipv4_raw(ends[0], ends[1], payload).unwrap()
    }

    fn packet(segment: &Segment, protocol: u8, transport: &[u8]) -> Vec<u8> {
        const ROUTER_ALERT: [u8; 4] = [148, 4, 0, 0];
        let mut header = Ipv4Header::new(
            transport.len() as u16,
            segment.hop_limit,
            IpNumber(protocol),
            Self::address(segment.source.0),
            Self::address(segment.destination.0),
        )
        .unwrap();
        header.identification = 0x1234;
        match segment.extra {
            Extra::None => {}
            Extra::Options => header.options = Ipv4Options::from(ROUTER_ALERT),
            Extra::ManyOptions => header.options = Ipv4Options::from([1; 40]),
            Extra::Chain(_) => panic!("IPv4 has no extension headers"),
        }
        header.set_payload_len(transport.len()).unwrap();
        header.header_checksum = header.calc_header_checksum();
        [segment.link_header(0x0800), header.to_bytes().to_vec(), transport.to_vec()].concat()
    }

    fn header_length(segment: &Segment) -> usize {
        match segment.extra {
            Extra::None | Extra::Chain(_) => 20,
            Extra::Options => 24,
            Extra::ManyOptions => 60,
        }
    }

    fn fragment(
        segment: &Segment,
        headers: &[u8],
        piece: &[u8],
        id: u16,
        (offset, more): (u16, bool),
    ) -> Vec<u8> {
        let (link, network) = headers.split_at(headers.len() - Self::header_length(segment));
        let mut header = Ipv4Header::from_slice(network).unwrap().0;
        header.identification = id;
        header.dont_fragment = false;
        header.more_fragments = more;
        header.fragment_offset = IpFragOffset::try_new(offset / 8).unwrap();
        header.set_payload_len(piece.len()).unwrap();
        header.header_checksum = header.calc_header_checksum();
        [link, &header.to_bytes(), piece].concat()
    }

    fn error(source: KnownAddress, destination: KnownAddress, segment: &Segment) -> Vec<u8> {
        icmpv4_error(source, destination, segment, icmpv4::DestUnreachableHeader::Port)
    }

    fn in_tunnel(packet: &[u8], tunnel: Tunnel) -> Vec<u8> {
        let (link, inner) = packet.split_at(14);
        let (source, destination) = (Self::address(tunnel.source), Self::address(tunnel.destination));
        let (protocol, carried) = tunnel.carry(inner, (IpNumber::IPV4, 0x0800));
        let mut header = Ipv4Header::new(carried.len() as u16, 64, protocol, source, destination).unwrap();
        header.dscp = (inner[1] >> 2).try_into().unwrap();
        header.header_checksum = header.calc_header_checksum();
        [link, &header.to_bytes(), &carried].concat()
    }

    fn too_big(segment: &Segment, length: usize) -> Vec<u8> {
        let kind = icmpv4::DestUnreachableHeader::FragmentationNeeded { next_hop_mtu: length as u16 };
        icmpv4_error(segment.destination.0, segment.source.0, segment, kind)
    }

    fn echo(segment: &Segment, is_reply: bool) -> Vec<u8> {
        let kind = if is_reply { Icmpv4Type::EchoReply(ECHO) } else { Icmpv4Type::EchoRequest(ECHO) };
        let icmp = Icmpv4Header::with_checksum(kind, &segment.payload);
        Self::packet(segment, IpNumber::ICMP.0, &[&icmp.to_bytes()[..], &segment.payload].concat())
    }
}

fn icmpv4_error(
    source: KnownAddress,
    destination: KnownAddress,
    segment: &Segment,
    kind: icmpv4::DestUnreachableHeader,
) -> Vec<u8> {
    let whole = Segment { link: Link::Bare, ..segment.clone() }.bytes::<V4>();
    let quoted = &whole[..usize::from(whole[0] & 0xf) * 4 + 8];
    let icmp = Icmpv4Header::with_checksum(Icmpv4Type::DestinationUnreachable(kind), quoted);
    let message = [&icmp.to_bytes()[..], quoted].concat();
    let (from, to) = (V4::address(source), V4::address(destination));
    let mut header =
        Ipv4Header::new(message.len() as u16, V4::ANSWER_HOP_LIMIT, IpNumber::ICMP, from, to).unwrap();
    header.dscp = 0x30.try_into().unwrap();
    header.dont_fragment = false;
    header.fragment_offset = IpFragOffset::ZERO;
    header.header_checksum = header.calc_header_checksum();
    [segment.link_header(0x0800), header.to_bytes().to_vec(), message].concat()
}

/// Returns the number of the first extension header, and the bytes of all of them. `last` is the
/// protocol that follows them.
fn chain(extra: Extra, last: u8) -> (u8, Vec<u8>) {
    // The bytes are: next header, length in units of 8 bytes beyond the first 8, and PadN.
    const OPTIONS: &[u8] = &[0, 0, 1, 4, 0, 0, 0, 0];
    const LONG_OPTIONS: &[u8] = &[0, 1, 1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let headers: &[(u8, &[u8])] = match extra {
        Extra::None => &[],
        Extra::Options => &[(HOP_BY_HOP, OPTIONS)],
        Extra::ManyOptions => &[
            (HOP_BY_HOP, OPTIONS),
            (DESTINATION_OPTIONS, LONG_OPTIONS),
            (DESTINATION_OPTIONS, OPTIONS),
            (DESTINATION_OPTIONS, OPTIONS),
        ],
        Extra::Chain(headers) => headers,
    };
    headers.iter().rev().fold((last, Vec::new()), |(next, rest), (number, bytes)| {
        (*number, [&[next], &bytes[1..], &rest].concat())
    })
}

impl Wire for V6 {
    const NAME: &'static str = "ipv6";

    fn address(of: KnownAddress) -> [u8; 16] {
        [0xfd, 0, 0, 0, 0x86, 0xdd, 0, 0, 0, 0, 0, 0, 0, 0, 0x77, of as u8]
    }

    fn tcp_checksum(header: &TcpHeader, ends: [Self::Address; 2], payload: &[u8]) -> u16 {
        header.calc_checksum_ipv6_raw(ends[0], ends[1], payload).unwrap()
    }

    fn udp_checksum(header: &UdpHeader, ends: [Self::Address; 2], payload: &[u8]) -> u16 {
        header.calc_checksum_ipv6_raw(ends[0], ends[1], payload).unwrap()
    }

    fn packet(segment: &Segment, protocol: u8, transport: &[u8]) -> Vec<u8> {
        let (first, extensions) = chain(segment.extra, protocol);
        let header = Ipv6Header {
            payload_length: (extensions.len() + transport.len()) as u16,
            next_header: IpNumber(first),
            hop_limit: segment.hop_limit,
            source: Self::address(segment.source.0),
            destination: Self::address(segment.destination.0),
            ..Ipv6Header::default()
        };
        [segment.link_header(0x86dd), header.to_bytes().to_vec(), extensions, transport.to_vec()].concat()
    }

    fn header_length(segment: &Segment) -> usize {
        40 + chain(segment.extra, 0).1.len()
    }

    fn fragment(
        segment: &Segment,
        headers: &[u8],
        piece: &[u8],
        id: u16,
        (offset, more): (u16, bool),
    ) -> Vec<u8> {
        const FRAGMENT: u8 = 44;
        let (link, network) = headers.split_at(headers.len() - Self::header_length(segment));
        let mut header = Ipv6Header::from_slice(network).unwrap().0;
        let (first, extensions) = chain(segment.extra, FRAGMENT);
        let [offset_high, offset_low] = (offset | u16::from(more)).to_be_bytes();
        let [id_high, id_low] = id.to_be_bytes();
        let own = [segment.protocol, 0, offset_high, offset_low, 0xab, 0xcd, id_high, id_low];
        header.next_header = IpNumber(first);
        header.payload_length = (extensions.len() + own.len() + piece.len()) as u16;
        [link, &header.to_bytes(), &extensions, &own, piece].concat()
    }

    fn error(source: KnownAddress, destination: KnownAddress, segment: &Segment) -> Vec<u8> {
        let whole = Segment { link: Link::Bare, ..segment.clone() }.bytes::<Self>();
        let quoted = &whole[..whole.len() - segment.payload.len()];
        let kind = Icmpv6Type::DestinationUnreachable(icmpv6::DestUnreachableCode::Port);
        icmpv6_error(source, destination, segment, (kind, quoted))
    }

    fn in_tunnel(packet: &[u8], tunnel: Tunnel) -> Vec<u8> {
        let (link, inner) = packet.split_at(14);
        let (next_header, carried) = tunnel.carry(inner, (IpNumber::IPV6, 0x86dd));
        let header = Ipv6Header {
            payload_length: carried.len() as u16,
            next_header,
            hop_limit: 64,
            source: Self::address(tunnel.source),
            destination: Self::address(tunnel.destination),
            ..Ipv6Header::default()
        };
        [link, &header.to_bytes(), &carried].concat()
    }

    fn too_big(segment: &Segment, length: usize) -> Vec<u8> {
        let whole = Segment { link: Link::Bare, ..segment.clone() }.bytes::<Self>();
        let quoted = &whole[..Self::header_length(segment) + 8];
        let kind = Icmpv6Type::PacketTooBig { mtu: length as u32 };
        icmpv6_error(segment.destination.0, segment.source.0, segment, (kind, quoted))
    }

    fn echo(segment: &Segment, is_reply: bool) -> Vec<u8> {
        let kind = if is_reply { Icmpv6Type::EchoReply(ECHO) } else { Icmpv6Type::EchoRequest(ECHO) };
        let [source, destination] = [segment.source, segment.destination].map(|end| Self::address(end.0));
        let icmp = Icmpv6Header::with_checksum(kind, source, destination, &segment.payload).unwrap();
        Self::packet(segment, IpNumber::IPV6_ICMP.0, &[&icmp.to_bytes()[..], &segment.payload].concat())
    }
}

fn icmpv6_error(
    source: KnownAddress,
    destination: KnownAddress,
    segment: &Segment,
    (kind, quoted): (Icmpv6Type, &[u8]),
) -> Vec<u8> {
    let (source, destination) = (V6::address(source), V6::address(destination));
    let icmp = Icmpv6Header::with_checksum(kind, source, destination, quoted).unwrap();
    let message = [&icmp.to_bytes()[..], quoted].concat();
    let header = Ipv6Header {
        payload_length: message.len() as u16,
        next_header: IpNumber::IPV6_ICMP,
        hop_limit: V6::ANSWER_HOP_LIMIT,
        source,
        destination,
        ..Ipv6Header::default()
    };
    [segment.link_header(0x86dd), header.to_bytes().to_vec(), message].concat()
}
