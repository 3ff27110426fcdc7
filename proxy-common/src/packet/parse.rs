//! Parsing of bytes into a [`Packet`].

use super::{Bytes, Fragment, Headers, Packet, Part, Segment, TCP_FIN, icmp};
use crate::{
    family::{Family, V4, V6},
    layout::{Address, PROTOCOL_TCP, PROTOCOL_UDP},
    port::Port,
    reason::Reason,
};

/// The network header of a family. Offsets are from its beginning.
pub trait Network: Family {
    const SOURCE: u32;
    const DESTINATION: u32;
    /// The offset of the header's checksum. `None`: the header has none, and the checksum of ICMP
    /// covers the addresses too.
    const CHECKSUM: Option<u32>;
    /// The offset of the lifetime (TTL, hop limit), which a router decrements.
    const LIFETIME: u32;
    /// The ICMP type of an echo request.
    const ECHO_REQUEST: u8;
    const ECHO_REPLY: u8;

    /// Returns the offset of the ICMP header.
    ///
    /// Fails with `NotAService` if the packet is not ICMP, is a fragment, or has extension headers.
    fn find_icmp<B: Bytes>(bytes: B, network: u32) -> Result<u32, Reason>;

    fn parse<B: Bytes>(bytes: B, network: u32, packet: &mut Packet<Self::Address>) -> Result<(), Reason>;

    fn read_address<B: Bytes>(bytes: B, offset: u32) -> Result<Self::Address, Reason>;

    /// Returns true if this ICMP type is an error.
    fn is_error(kind: u8) -> bool;

    /// Parses the network header that an ICMP error quotes at `network`, and reverses its ends.
    /// Returns the offset and the IANA number of the transport.
    ///
    /// Fails with `NotAService` if the quoted packet has no ports. It also fails if the quoted
    /// packet has another source than the address at the offset `told`, to which the error is sent.
    /// Other hosts must not learn what becomes of that packet.
    fn parse_quoted<B: Bytes>(
        bytes: B,
        network: u32,
        told: u32,
        packet: &mut Packet<Self::Address>,
    ) -> Result<(u32, u8), Reason>;
}

/// Parses a packet. Fails with `NotAService` if it is neither TCP nor UDP, nor an ICMP error that
/// quotes one.
#[inline(always)]
pub fn parse<F: Network, B: Bytes>(
    bytes: B,
    network: u32,
    packet: &mut Packet<F::Address>,
) -> Result<(), Reason> {
    F::parse(bytes, network, packet)
}

const TCP_HEADER: usize = 20;
const TCP_LENGTH: usize = 12;
const TCP_FLAGS: usize = 13;
const UDP_HEADER: usize = 8;
const ICMPV4: u8 = 1;
const ICMPV6: u8 = 58;
const IPV4_HEADER: u32 = 20;
const IPV6_HEADER: u32 = 40;

type Ipv4Header = [u8; IPV4_HEADER as usize];

/// Returns the length of an IPv4 header with its options, or `None` if it is no IPv4 header.
#[inline(always)]
fn header_length(header: &Ipv4Header) -> Option<u32> {
    let length = u32::from(header[0] & 0x0f) * 4;
    (header[0] >> 4 == 4 && length >= IPV4_HEADER).then_some(length)
}

#[inline(always)]
fn ipv4_fragment(header: &Ipv4Header) -> Fragment {
    const MORE_FRAGMENTS: u16 = 0x2000;
    const OFFSET: u16 = 0x1fff;
    let bits = u16::from_be_bytes([header[6], header[7]]);
    let id = u16::from_be_bytes([header[4], header[5]]);
    Fragment::new(id.into(), bits & OFFSET, bits & MORE_FRAGMENTS != 0)
}

impl Network for V4 {
    const SOURCE: u32 = 12;
    const DESTINATION: u32 = 16;
    const CHECKSUM: Option<u32> = Some(10);
    const LIFETIME: u32 = 8;
    const ECHO_REQUEST: u8 = 8;
    const ECHO_REPLY: u8 = 0;

    #[inline(always)]
    fn find_icmp<B: Bytes>(bytes: B, network: u32) -> Result<u32, Reason> {
        let header: Ipv4Header = bytes.read(network)?;
        match header_length(&header) {
            Some(length) if header[9] == ICMPV4 && ipv4_fragment(&header).part == Part::Whole => {
                Ok(network + length)
            }
            _ => Err(Reason::NotAService),
        }
    }

    #[inline(always)]
    fn parse<B: Bytes>(bytes: B, network: u32, packet: &mut Packet<[u8; 4]>) -> Result<(), Reason> {
        let header: Ipv4Header = bytes.read(network)?;
        let protocol = header[9];
        if protocol != PROTOCOL_TCP && protocol != PROTOCOL_UDP && protocol != ICMPV4 {
            return Err(Reason::NotAService);
        }
        let Some(length) = header_length(&header) else { return Err(Reason::Malformed) };
        let fragment = ipv4_fragment(&header);
        let is_plain = protocol != ICMPV4 && length == IPV4_HEADER && fragment.part == Part::Whole;
        if B::PLAIN_ONLY && !is_plain {
            return Err(Reason::NotAService);
        }
        let end = end(bytes, network, [header[2], header[3]]);
        let transport = network + length;
        if !B::PLAIN_ONLY && protocol == ICMPV4 {
            if fragment.part != Part::Whole {
                return Err(Reason::NotAService);
            }
            return icmp::parse::<Self, B>(bytes, Headers::of_error(network, transport, end), packet);
        }
        packet.source = [header[12], header[13], header[14], header[15]];
        packet.destination = [header[16], header[17], header[18], header[19]];
        packet.protocol = protocol;
        packet.fragment = fragment;
        packet.headers = Headers::of_packet(network, transport);
        parse_transport(bytes, end, packet)
    }

    #[inline(always)]
    fn read_address<B: Bytes>(bytes: B, offset: u32) -> Result<[u8; 4], Reason> {
        bytes.read(offset)
    }

    #[inline(always)]
    fn is_error(kind: u8) -> bool {
        const UNREACHABLE: u8 = 3;
        const TIME_EXCEEDED: u8 = 11;
        const PARAMETER_PROBLEM: u8 = 12;
        matches!(kind, UNREACHABLE | TIME_EXCEEDED | PARAMETER_PROBLEM)
    }

    #[inline(always)]
    fn parse_quoted<B: Bytes>(
        bytes: B,
        network: u32,
        told: u32,
        packet: &mut Packet<[u8; 4]>,
    ) -> Result<(u32, u8), Reason> {
        let header: Ipv4Header = bytes.read(network)?;
        let Some(length) = header_length(&header) else { return Err(Reason::NotAService) };
        if ipv4_fragment(&header).part == Part::Later {
            return Err(Reason::NotAService);
        }
        packet.destination = [header[12], header[13], header[14], header[15]];
        packet.source = [header[16], header[17], header[18], header[19]];
        if Self::read_address(bytes, told)? != packet.destination {
            return Err(Reason::NotAService);
        }
        Ok((network + length, header[9]))
    }
}

/// The number of extension headers that are followed.
const EXTENSION_HEADERS: usize = 4;
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;

impl Network for V6 {
    const SOURCE: u32 = 8;
    const DESTINATION: u32 = 24;
    const CHECKSUM: Option<u32> = None;
    const LIFETIME: u32 = 7;
    const ECHO_REQUEST: u8 = 128;
    const ECHO_REPLY: u8 = 129;

    #[inline(always)]
    fn find_icmp<B: Bytes>(bytes: B, network: u32) -> Result<u32, Reason> {
        let header: [u8; 8] = bytes.read(network)?;
        let is_icmp = header[0] >> 4 == 6 && header[6] == ICMPV6;
        if is_icmp { Ok(network + IPV6_HEADER) } else { Err(Reason::NotAService) }
    }

    #[inline(always)]
    fn parse<B: Bytes>(bytes: B, network: u32, packet: &mut Packet<[u8; 16]>) -> Result<(), Reason> {
        let header: [u8; 8] = bytes.read(network)?;
        if header[0] >> 4 != 6 {
            return Err(Reason::Malformed);
        }
        if B::PLAIN_ONLY && header[6] != PROTOCOL_TCP && header[6] != PROTOCOL_UDP {
            return Err(Reason::NotAService);
        }
        // The bytes are read right into the packet. On the stack, the compiler would keep each byte
        // in a slot of its own.
        bytes.read_into(network + Self::SOURCE, &mut packet.source)?;
        bytes.read_into(network + Self::DESTINATION, &mut packet.destination)?;
        let end = end(bytes, network + IPV6_HEADER, [header[4], header[5]]);
        let mut next = header[6];
        let mut transport = network + IPV6_HEADER;
        packet.fragment = Fragment::default();
        for _ in 0..if B::PLAIN_ONLY { 0 } else { EXTENSION_HEADERS } {
            if next == PROTOCOL_TCP || next == PROTOCOL_UDP || next == ICMPV6 {
                break;
            }
            if next == FRAGMENT {
                if packet.fragment.id != 0 || packet.fragment.part != Part::Whole {
                    return Err(Reason::ExtensionHeaders);
                }
                next = match read_fragment_header(bytes, transport, packet) {
                    TRUNCATED => return Err(Reason::Malformed),
                    next => next as u8,
                };
                transport += FRAGMENT_HEADER;
                if packet.is_later_fragment() {
                    break;
                }
                continue;
            }
            if next != HOP_BY_HOP && next != ROUTING && next != DESTINATION_OPTIONS {
                return Err(Reason::NotAService);
            }
            let extension: [u8; 4] = bytes.read(transport)?;
            // While segments are left, the destination in the header is not the final one.
            if next == ROUTING && extension[3] != 0 {
                return Err(Reason::NotAService);
            }
            next = extension[0];
            transport += (u32::from(extension[1]) + 1) * 8;
        }
        if !B::PLAIN_ONLY && next == ICMPV6 {
            if packet.fragment.part != Part::Whole {
                return Err(Reason::NotAService);
            }
            return icmp::parse::<Self, B>(bytes, Headers::of_error(network, transport, end), packet);
        }
        // A later fragment may name an extension header, which only the first one has.
        if next != PROTOCOL_TCP && next != PROTOCOL_UDP && !packet.is_later_fragment() {
            return Err(Reason::ExtensionHeaders);
        }
        packet.protocol = next;
        packet.headers = Headers::of_packet(network, transport);
        parse_transport(bytes, end, packet)
    }

    #[inline(always)]
    fn read_address<B: Bytes>(bytes: B, offset: u32) -> Result<[u8; 16], Reason> {
        bytes.read(offset)
    }

    #[inline(always)]
    fn is_error(kind: u8) -> bool {
        const UNREACHABLE: u8 = 1;
        const PARAMETER_PROBLEM: u8 = 4;
        // The types between these two are packet too big and time exceeded.
        (UNREACHABLE..=PARAMETER_PROBLEM).contains(&kind)
    }

    #[inline(always)]
    fn parse_quoted<B: Bytes>(
        bytes: B,
        network: u32,
        told: u32,
        packet: &mut Packet<[u8; 16]>,
    ) -> Result<(u32, u8), Reason> {
        let header: [u8; 8] = bytes.read(network)?;
        if header[0] >> 4 != 6 {
            return Err(Reason::NotAService);
        }
        // The bytes are read right into the packet, for the same reason as in `parse`.
        bytes.read_into(told, &mut packet.source)?;
        bytes.read_into(network + Self::SOURCE, &mut packet.destination)?;
        if packet.source != packet.destination {
            return Err(Reason::NotAService);
        }
        bytes.read_into(network + Self::DESTINATION, &mut packet.source)?;
        let transport = network + IPV6_HEADER;
        if header[6] != FRAGMENT {
            return Ok((transport, header[6]));
        }
        match read_fragment_header(bytes, transport, packet) {
            TRUNCATED => Err(Reason::Malformed),
            _ if packet.is_later_fragment() => Err(Reason::NotAService),
            next => Ok((transport + FRAGMENT_HEADER, next as u8)),
        }
    }
}

const FRAGMENT_HEADER: u32 = 8;
/// The result of [`read_fragment_header`] for a packet that ends before. No header has this number.
const TRUNCATED: u32 = u32::MAX;

/// Reads a fragment header into the packet, and returns the number of the header that follows.
// Not inlined: the loop would have its bytes on the stack several times.
#[inline(never)]
fn read_fragment_header<B: Bytes>(bytes: B, offset: u32, packet: &mut Packet<[u8; 16]>) -> u32 {
    let Ok(header) = bytes.read::<{ FRAGMENT_HEADER as usize }>(offset) else { return TRUNCATED };
    let bits = u16::from_be_bytes([header[2], header[3]]);
    let id = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
    packet.fragment = Fragment::new(id, bits >> 3, bits & 1 != 0);
    u32::from(header[0])
}

/// Returns where the payload ends. `length` is the field of the header, and counts from `start`.
///
/// If it is 0, the packet is longer than the field can say, or a jumbogram.
#[inline(always)]
fn end<B: Bytes>(bytes: B, start: u32, length: [u8; 2]) -> u32 {
    let length = u32::from(u16::from_be_bytes(length));
    if length == 0 { bytes.length() } else { start + length }
}

/// Parses the transport header. `end` is the end of the payload, and `packet.headers` is known.
#[inline(always)]
fn parse_transport<A: Address, B: Bytes>(bytes: B, end: u32, packet: &mut Packet<A>) -> Result<(), Reason> {
    let transport = packet.headers.transport;
    // The stack drops a packet that is shorter than its header says.
    if end > bytes.length() || transport > end {
        return Err(Reason::Malformed);
    }
    if packet.is_later_fragment() {
        packet.segment = Segment::none();
        packet.source_port = Port::NONE;
        packet.destination_port = Port::NONE;
        return Ok(());
    }
    let ports = if packet.protocol == PROTOCOL_TCP {
        let header: [u8; TCP_HEADER] = bytes.read(transport)?;
        let header_length = u32::from(header[TCP_LENGTH] >> 4) * 4;
        if header_length < TCP_HEADER as u32 || transport + header_length > end {
            return Err(Reason::Malformed);
        }
        let payload = end - (transport + header_length);
        let sequence = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
        let acknowledgement = u32::from_be_bytes([header[8], header[9], header[10], header[11]]);
        // The FIN comes after the bytes of all fragments, and how many these are is not known here.
        let flags = if packet.fragment.part == Part::First {
            header[TCP_FLAGS] & !TCP_FIN
        } else {
            header[TCP_FLAGS]
        };
        packet.segment = Segment::new(flags, sequence, acknowledgement, payload);
        [header[0], header[1], header[2], header[3]]
    } else {
        packet.segment = Segment::none();
        let header: [u8; UDP_HEADER] = bytes.read(transport)?;
        if transport + UDP_HEADER as u32 > end {
            return Err(Reason::Malformed);
        }
        [header[0], header[1], header[2], header[3]]
    };
    packet.source_port = Port::from_network([ports[0], ports[1]]);
    packet.destination_port = Port::from_network([ports[2], ports[3]]);
    Ok(())
}
