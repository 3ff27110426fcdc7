//! From bytes to a `Packet`. Headers are read by helper, which also reads what lies in a packet's fragments.

use aya_ebpf::{bindings::__sk_buff, helpers::bpf_skb_load_bytes, programs::TcContext};
use proxy_common::{
    family::{V4, V6},
    layout::{Address, PROTOCOL_TCP, PROTOCOL_UDP},
    packet::{Fragment, Headers, Packet, Part, Segment, TCP_FIN},
    port::Port,
    reason::Reason,
};

use crate::{icmp::Icmp, nat::Addresses};

/// Offset of the network header on a device with Ethernet headers. A VLAN tag is in the metadata by then.
pub(crate) const ETHERNET: u32 = 14;
/// Offset of the network header on a device without Ethernet headers.
pub(crate) const BARE: u32 = 0;

/// A family's network header.
pub(crate) trait Network: Icmp {
    /// Fails with `NotAService` where the packet is not TCP or UDP.
    fn parse(ctx: &TcContext, network: u32, packet: &mut Packet<Self::Address>) -> Result<(), Reason>;
}

// Not inlined: what it needs of the stack would be added to what opening a flow needs.
#[inline(never)]
pub(crate) fn parse<F: Network>(
    skb: *mut __sk_buff,
    network: u32,
    packet: &mut Packet<F::Address>,
) -> Result<(), Reason> {
    F::parse(&TcContext::new(skb), network, packet)
}

#[inline(always)]
pub(crate) fn read<const N: usize>(ctx: &TcContext, offset: u32) -> Result<[u8; N], Reason> {
    ctx.load::<[u8; N]>(offset as usize).map_err(|_| Reason::Malformed)
}

#[inline(always)]
pub(crate) fn read_into<const N: usize>(
    ctx: &TcContext,
    offset: u32,
    into: &mut [u8; N],
) -> Result<(), Reason> {
    // SAFETY: the context of this program, and memory of this length.
    let read = unsafe { bpf_skb_load_bytes(ctx.skb.skb.cast(), offset, into.as_mut_ptr().cast(), N as u32) };
    if read == 0 { Ok(()) } else { Err(Reason::Malformed) }
}

const TCP_HEADER: usize = 20;
const TCP_LENGTH: usize = 12;
const TCP_FLAGS: usize = 13;
const UDP_HEADER: usize = 8;
const ICMPV4: u8 = 1;
const ICMPV6: u8 = 58;
const IPV4_HEADER: u32 = 20;
const IPV6_HEADER: u32 = 40;

impl Network for V4 {
    #[inline(always)]
    fn parse(ctx: &TcContext, network: u32, packet: &mut Packet<[u8; 4]>) -> Result<(), Reason> {
        let header: [u8; IPV4_HEADER as usize] = read(ctx, network)?;
        let protocol = header[9];
        if protocol != PROTOCOL_TCP && protocol != PROTOCOL_UDP && protocol != ICMPV4 {
            return Err(Reason::NotAService);
        }
        let header_length = u32::from(header[0] & 0x0f) * 4;
        if header[0] >> 4 != 4 || header_length < IPV4_HEADER {
            return Err(Reason::Malformed);
        }
        const MORE_FRAGMENTS: u16 = 0x2000;
        const OFFSET: u16 = 0x1fff;
        let place = u16::from_be_bytes([header[6], header[7]]);
        let id = u16::from_be_bytes([header[4], header[5]]);
        let fragment = Fragment::new(id.into(), place & OFFSET, place & MORE_FRAGMENTS != 0);
        if protocol == ICMPV4 {
            if fragment.part != Part::Whole {
                return Err(Reason::NotAService);
            }
            return Self::parse_error(ctx, network, network + header_length, packet);
        }
        packet.source = [header[12], header[13], header[14], header[15]];
        packet.destination = [header[16], header[17], header[18], header[19]];
        packet.protocol = protocol;
        packet.fragment = fragment;
        let end = end(ctx, network, [header[2], header[3]]);
        let transport = network + header_length;
        packet.headers = Headers { network, transport, ..Headers::default() };
        parse_transport(ctx.skb.skb, end, packet)
    }
}

/// How many extension headers are followed.
const EXTENSION_HEADERS: usize = 4;
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;

impl Network for V6 {
    #[inline(always)]
    fn parse(ctx: &TcContext, network: u32, packet: &mut Packet<[u8; 16]>) -> Result<(), Reason> {
        let header: [u8; 8] = read(ctx, network)?;
        if header[0] >> 4 != 6 {
            return Err(Reason::Malformed);
        }
        // Past the stack, on which the compiler would keep each byte in a place of its own.
        read_into(ctx, network + Self::SOURCE, &mut packet.source)?;
        read_into(ctx, network + Self::DESTINATION, &mut packet.destination)?;
        let end = end(ctx, network + IPV6_HEADER, [header[4], header[5]]);
        let mut next = header[6];
        let mut transport = network + IPV6_HEADER;
        packet.fragment = Fragment::default();
        for _ in 0..EXTENSION_HEADERS {
            if next == PROTOCOL_TCP || next == PROTOCOL_UDP || next == ICMPV6 {
                break;
            }
            if next == FRAGMENT {
                if packet.fragment.id != 0 || packet.fragment.part != Part::Whole {
                    return Err(Reason::ExtensionHeaders);
                }
                next = match read_fragment_header(ctx.skb.skb, transport, packet) {
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
            let extension: [u8; 4] = read(ctx, transport)?;
            // With segments left, the destination is not the final one.
            if next == ROUTING && extension[3] != 0 {
                return Err(Reason::NotAService);
            }
            next = extension[0];
            transport += (u32::from(extension[1]) + 1) * 8;
        }
        if next == ICMPV6 {
            if packet.fragment.part != Part::Whole {
                return Err(Reason::NotAService);
            }
            return Self::parse_error(ctx, network, transport, packet);
        }
        // What follows a later fragment's header is none.
        if next != PROTOCOL_TCP && next != PROTOCOL_UDP && !packet.is_later_fragment() {
            return Err(Reason::ExtensionHeaders);
        }
        packet.protocol = next;
        packet.headers = Headers { network, transport, ..Headers::default() };
        parse_transport(ctx.skb.skb, end, packet)
    }
}

const FRAGMENT_HEADER: u32 = 8;
/// Answered by [`read_fragment_header`]; no number of a header.
const TRUNCATED: u32 = u32::MAX;

/// Answers with the number of the header that follows.
// Not inlined: the loop would have its bytes on the stack several times.
#[inline(never)]
fn read_fragment_header(skb: *mut __sk_buff, offset: u32, packet: &mut Packet<[u8; 16]>) -> u32 {
    let Ok(header) = read::<{ FRAGMENT_HEADER as usize }>(&TcContext::new(skb), offset) else {
        return TRUNCATED;
    };
    let place = u16::from_be_bytes([header[2], header[3]]);
    let id = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
    packet.fragment = Fragment::new(id, place >> 3, place & 1 != 0);
    u32::from(header[0])
}

/// Where the payload ends: `length` as the header has it, from `start` on. 0: the packet is longer than the field can say, or a jumbogram.
#[inline(always)]
fn end(ctx: &TcContext, start: u32, length: [u8; 2]) -> u32 {
    let length = u32::from(u16::from_be_bytes(length));
    if length == 0 { ctx.len() } else { start + length }
}

/// `end` of the payload. The headers' places are known.
// Not inlined: its bytes would lie on the stack beside the network header.
#[inline(never)]
fn parse_transport<A: Address>(skb: *mut __sk_buff, end: u32, packet: &mut Packet<A>) -> Result<(), Reason> {
    let ctx = &TcContext::new(skb);
    packet.segment = Segment::default();
    packet.source_port = Port::NONE;
    packet.destination_port = Port::NONE;
    // The stack drops what ends before its header says so.
    if end > ctx.len() {
        return Err(Reason::Malformed);
    }
    if packet.is_later_fragment() {
        return Ok(());
    }
    let transport = packet.headers.transport;
    let ports = if packet.protocol == PROTOCOL_TCP {
        let header: [u8; TCP_HEADER] = read(ctx, transport)?;
        let header_length = u32::from(header[TCP_LENGTH] >> 4) * 4;
        if header_length < TCP_HEADER as u32 || transport + header_length > end {
            return Err(Reason::Malformed);
        }
        let payload = end - (transport + header_length);
        let sequence = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
        let acknowledgement = u32::from_be_bytes([header[8], header[9], header[10], header[11]]);
        // The FIN is after the bytes of all fragments, and nobody knows here how many these are.
        let flags = if packet.fragment.part == Part::First {
            header[TCP_FLAGS] & !TCP_FIN
        } else {
            header[TCP_FLAGS]
        };
        packet.segment = Segment::new(flags, sequence, acknowledgement, payload);
        [header[0], header[1], header[2], header[3]]
    } else {
        let header: [u8; UDP_HEADER] = read(ctx, transport)?;
        if transport + UDP_HEADER as u32 > end {
            return Err(Reason::Malformed);
        }
        [header[0], header[1], header[2], header[3]]
    };
    packet.source_port = Port::from_network([ports[0], ports[1]]);
    packet.destination_port = Port::from_network([ports[2], ports[3]]);
    Ok(())
}
