//! ICMP errors (unreachable, packet too big, time exceeded, parameter problem) that quote a packet of a flow. They travel as an answer to
//! the quoted packet would: parsed as that, with the quoted packet's ends turned round, they find the flow and get its translation.

use aya_ebpf::{bindings::__sk_buff, helpers::bpf_csum_diff, programs::TcContext};
use proxy_common::{
    family::{V4, V6},
    layout::{PROTOCOL_TCP, PROTOCOL_UDP},
    packet::{Fragment, Headers, Packet, Rewrite, Segment},
    port::Port,
    reason::Reason,
};

use crate::{
    nat::Addresses,
    parse::{read, read_into},
};

/// Type, code, checksum and four bytes that depend on the type.
const ICMP_HEADER: u32 = 8;
const CHECKSUM: u32 = 2;
const UDP_CHECKSUM_WORD: u32 = 4;
const TCP_CHECKSUM_WORD: u32 = 16;

/// What an ICMP error is to a family.
pub(crate) trait Icmp: Addresses {
    /// Parses the packet that the error at `icmp` quotes, and turns its ends round. Fails with `NotAService` where it is no error, quotes
    /// neither TCP nor UDP, or does not go to who sent what it quotes: anybody else must not learn what becomes of that.
    fn parse_error(
        ctx: &TcContext,
        outer: u32,
        icmp: u32,
        packet: &mut Packet<Self::Address>,
    ) -> Result<(), Reason>;

    /// Replaces an address of the quoted packet, and what its own header has as a sum. Answers with `sum`, to which the change is added.
    fn replace_quoted(
        ctx: &TcContext,
        headers: Headers,
        address: u32,
        old: &Self::Address,
        new: &Self::Address,
        sum: u32,
    ) -> Result<u32, i64>;

    /// Whatever the address is: a router that tells of the packet becomes what the packet was sent to, as with netfilter.
    fn replace_outer(ctx: &TcContext, headers: Headers, address: u32, new: &Self::Address)
    -> Result<(), i64>;
}

/// False: part of the packet may be rewritten, and it must go no further.
// Not inlined: what it needs of the stack would be added to what opening a flow needs.
#[inline(never)]
pub(crate) fn rewrite<F: Icmp>(
    skb: *mut __sk_buff,
    packet: &Packet<F::Address>,
    rewrite: &Rewrite<F::Address>,
) -> bool {
    write::<F>(&TcContext::new(skb), packet, rewrite).is_ok()
}

#[inline(always)]
fn write<F: Icmp>(
    ctx: &TcContext,
    packet: &Packet<F::Address>,
    rewrite: &Rewrite<F::Address>,
) -> Result<(), i64> {
    let headers = packet.headers;
    let mut sum = 0;
    if packet.destination != rewrite.destination {
        let (old, new) = (&packet.destination, &rewrite.destination);
        sum = F::replace_quoted(ctx, headers, F::SOURCE, old, new, sum)?;
        F::replace_outer(ctx, headers, F::DESTINATION, new)?;
    }
    if packet.source != rewrite.source {
        let (old, new) = (&packet.source, &rewrite.source);
        sum = F::replace_quoted(ctx, headers, F::DESTINATION, old, new, sum)?;
        F::replace_outer(ctx, headers, F::SOURCE, new)?;
    }
    let old = ports(packet.destination_port, packet.source_port);
    let new = ports(rewrite.destination_port, rewrite.source_port);
    if old != new {
        sum = replace(ctx, headers, headers.transport, old, new, sum)?;
    }
    replace_transport_checksum(ctx, headers, packet.is_tcp(), sum)
}

/// As the quoted packet has them: source, destination.
#[inline(always)]
fn ports(source: Port, destination: Port) -> [u8; 4] {
    let (source, destination) = (source.to_network(), destination.to_network());
    [source[0], source[1], destination[0], destination[1]]
}

/// Replaces bytes that the error's checksum covers. Answers with `sum`, to which the change is added.
#[inline(always)]
fn replace<const N: usize>(
    ctx: &TcContext,
    headers: Headers,
    offset: u32,
    mut old: [u8; N],
    mut new: [u8; N],
    sum: u32,
) -> Result<u32, i64> {
    let (from, to, length) = (old.as_mut_ptr().cast(), new.as_mut_ptr().cast(), N as u32);
    // SAFETY: both are of this length, a multiple of 4.
    let change = unsafe { bpf_csum_diff(from, length, to, length, 0) };
    ctx.l4_csum_replace((headers.icmp + CHECKSUM) as usize, 0, change as u64, 0)?;
    ctx.store(offset as usize, &new, 0)?;
    // SAFETY: as above.
    Ok(unsafe { bpf_csum_diff(from, length, to, length, sum) } as u32)
}

/// The checksum after a change of what it covers. Both in the order of the packet's bytes.
#[inline(always)]
fn changed(checksum: [u8; 2], sum: u32) -> [u8; 2] {
    let whole = u32::from(!u16::from_ne_bytes(checksum)) + (sum & 0xffff) + (sum >> 16);
    let folded = (whole & 0xffff) + (whole >> 16);
    let folded = (folded & 0xffff) + (folded >> 16);
    (!(folded as u16)).to_ne_bytes()
}

/// Of the quoted packet, where it is quoted that far.
#[inline(always)]
fn replace_transport_checksum(ctx: &TcContext, headers: Headers, is_tcp: bool, sum: u32) -> Result<(), i64> {
    let offset = headers.transport + if is_tcp { TCP_CHECKSUM_WORD } else { UDP_CHECKSUM_WORD };
    let Ok(old) = ctx.load::<[u8; 4]>(offset as usize) else { return Ok(()) };
    let new = if is_tcp {
        let checksum = changed([old[0], old[1]], sum);
        [checksum[0], checksum[1], old[2], old[3]]
    } else if old[2] == 0 && old[3] == 0 {
        // None, and it stays so.
        return Ok(());
    } else {
        let checksum = changed([old[2], old[3]], sum);
        let is_zero = checksum[0] == 0 && checksum[1] == 0;
        if is_zero { [old[0], old[1], 0xff, 0xff] } else { [old[0], old[1], checksum[0], checksum[1]] }
    };
    replace(ctx, headers, offset, old, new, 0).map(|_| ())
}

#[inline(always)]
fn finish<A>(ctx: &TcContext, headers: Headers, protocol: u8, packet: &mut Packet<A>) -> Result<(), Reason> {
    if protocol != PROTOCOL_TCP && protocol != PROTOCOL_UDP {
        return Err(Reason::NotAService);
    }
    let ports: [u8; 4] = read(ctx, headers.transport)?;
    packet.destination_port = Port::from_network([ports[0], ports[1]]);
    packet.source_port = Port::from_network([ports[2], ports[3]]);
    packet.protocol = protocol;
    packet.segment = Segment::default();
    packet.fragment = Fragment::default();
    packet.headers = headers;
    Ok(())
}

impl Icmp for V4 {
    #[inline(always)]
    fn parse_error(
        ctx: &TcContext,
        outer: u32,
        icmp: u32,
        packet: &mut Packet<[u8; 4]>,
    ) -> Result<(), Reason> {
        const UNREACHABLE: u8 = 3;
        const TIME_EXCEEDED: u8 = 11;
        const PARAMETER_PROBLEM: u8 = 12;
        let kind: [u8; 1] = read(ctx, icmp)?;
        if !matches!(kind[0], UNREACHABLE | TIME_EXCEEDED | PARAMETER_PROBLEM) {
            return Err(Reason::NotAService);
        }
        let network = icmp + ICMP_HEADER;
        let header: [u8; 20] = read(ctx, network)?;
        let length = u32::from(header[0] & 0x0f) * 4;
        // A later fragment has no ports.
        if header[0] >> 4 != 4 || length < 20 || (header[6] & 0x1f) | header[7] != 0 {
            return Err(Reason::NotAService);
        }
        packet.destination = [header[12], header[13], header[14], header[15]];
        packet.source = [header[16], header[17], header[18], header[19]];
        let told: [u8; 4] = read(ctx, outer + Self::DESTINATION)?;
        if told != packet.destination {
            return Err(Reason::NotAService);
        }
        finish(ctx, Headers { network, transport: network + length, outer, icmp }, header[9], packet)
    }

    #[inline(always)]
    fn replace_quoted(
        ctx: &TcContext,
        headers: Headers,
        address: u32,
        old: &[u8; 4],
        new: &[u8; 4],
        sum: u32,
    ) -> Result<u32, i64> {
        /// Lifetime, protocol and checksum.
        const CHECKSUM_WORD: u32 = 8;
        let change = replace(ctx, headers, headers.network + address, *old, *new, 0)?;
        let offset = headers.network + CHECKSUM_WORD;
        let before: [u8; 4] = ctx.load(offset as usize)?;
        let checksum = changed([before[2], before[3]], change);
        let after = [before[0], before[1], checksum[0], checksum[1]];
        replace(ctx, headers, offset, before, after, 0)?;
        let (mut old, mut new) = (*old, *new);
        // SAFETY: both are 4 bytes long.
        Ok(unsafe { bpf_csum_diff(old.as_mut_ptr().cast(), 4, new.as_mut_ptr().cast(), 4, sum) } as u32)
    }

    #[inline(always)]
    fn replace_outer(ctx: &TcContext, headers: Headers, address: u32, new: &[u8; 4]) -> Result<(), i64> {
        const HEADER_CHECKSUM: u32 = 10;
        let found: [u8; 4] = ctx.load((headers.outer + address) as usize)?;
        let (from, to) = (u64::from(u32::from_ne_bytes(found)), u64::from(u32::from_ne_bytes(*new)));
        ctx.l3_csum_replace((headers.outer + HEADER_CHECKSUM) as usize, from, to, 4)?;
        ctx.store((headers.outer + address) as usize, new, 0)
    }
}

impl Icmp for V6 {
    #[inline(always)]
    fn parse_error(
        ctx: &TcContext,
        outer: u32,
        icmp: u32,
        packet: &mut Packet<[u8; 16]>,
    ) -> Result<(), Reason> {
        const UNREACHABLE: u8 = 1;
        const PARAMETER_PROBLEM: u8 = 4;
        let kind: [u8; 1] = read(ctx, icmp)?;
        // Packet too big and time exceeded are between them.
        if !(UNREACHABLE..=PARAMETER_PROBLEM).contains(&kind[0]) {
            return Err(Reason::NotAService);
        }
        let network = icmp + ICMP_HEADER;
        let header: [u8; 8] = read(ctx, network)?;
        if header[0] >> 4 != 6 {
            return Err(Reason::NotAService);
        }
        // Into the packet, and past the stack.
        read_into(ctx, outer + Self::DESTINATION, &mut packet.source)?;
        read_into(ctx, network + Self::SOURCE, &mut packet.destination)?;
        if packet.source != packet.destination {
            return Err(Reason::NotAService);
        }
        read_into(ctx, network + Self::DESTINATION, &mut packet.source)?;
        const FRAGMENT: u8 = 44;
        let (mut next, mut transport) = (header[6], network + 40);
        if next == FRAGMENT {
            let extension: [u8; 8] = read(ctx, transport)?;
            // A later one has no ports.
            if u16::from_be_bytes([extension[2], extension[3]]) >> 3 != 0 {
                return Err(Reason::NotAService);
            }
            (next, transport) = (extension[0], transport + 8);
        }
        finish(ctx, Headers { network, transport, outer, icmp }, next, packet)
    }

    #[inline(always)]
    fn replace_quoted(
        ctx: &TcContext,
        headers: Headers,
        address: u32,
        old: &[u8; 16],
        new: &[u8; 16],
        sum: u32,
    ) -> Result<u32, i64> {
        replace(ctx, headers, headers.network + address, *old, *new, sum)
    }

    #[inline(always)]
    fn replace_outer(ctx: &TcContext, headers: Headers, address: u32, new: &[u8; 16]) -> Result<(), i64> {
        let found: [u8; 16] = ctx.load((headers.outer + address) as usize)?;
        let checksum = headers.icmp + CHECKSUM;
        Self::adjust_checksum(ctx, checksum, 0, &found, new)?;
        Self::replace_address(ctx, headers.outer, address, &found, new)
    }
}
