//! Answers for a service without endpoints: RST for TCP, ICMP port unreachable for UDP, so that the client fails at once,
//! as with a socket hook.

use core::ptr::{addr_of, addr_of_mut, read_volatile, write_volatile};

use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_INGRESS, BPF_F_PSEUDO_HDR, BPF_F_RECOMPUTE_CSUM, TC_ACT_REDIRECT},
    helpers::{bpf_ktime_get_boot_ns, bpf_redirect, bpf_skb_change_tail},
    programs::TcContext,
};
use proxy_common::{
    family::{V4, V6},
    layout::{Address, IcmpBudget},
    packet::{Network, Packet, Part, Sum, TCP_ACK, TCP_RST},
};

use crate::{bytes::frame::ETHERNET, maps};

const HOP_LIMIT: u8 = 64;

/// What differs between the families in an answer.
pub(crate) trait Refuse: Network {
    /// Makes the network header say that `length` bytes of transport follow it, and returns how
    /// many there were before.
    fn set_transport_length(ctx: &TcContext, packet: &Packet<Self::Address>, length: u16)
    -> Result<u32, i64>;
    /// The sum of what a checksum covers besides the transport's `length` bytes.
    fn pseudo_header(packet: &Packet<Self::Address>, protocol: u8, length: u32) -> Sum;
    /// Swaps the addresses and resets the lifetime. The transport's checksum stays valid.
    fn turn_around(ctx: &TcContext, packet: &Packet<Self::Address>) -> Result<(), i64>;
    /// Begin of the ICMP error: port unreachable.
    const PORT_UNREACHABLE: IcmpHeader;
    /// Begin of the ICMP error: the packet is longer than `length`, which would have gone further.
    fn too_big(length: u32) -> IcmpHeader;
    /// Replaces the packet by an ICMP error that quotes it.
    fn make_error(ctx: &TcContext, packet: &Packet<Self::Address>, header: IcmpHeader) -> Result<(), i64>;
}

/// Type, code, checksum, which is 0, and four bytes that depend on the type.
type IcmpHeader = [u8; ICMP_HEADER as usize];

/// Which way an answer leaves the packet's interface, to reach the client.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(crate) enum AnswerPath {
    /// The client is beyond it.
    OutOfInterface,
    /// The client is on this node.
    IntoNode,
}

/// Turns the packet into its refusal and sends it back. Answers with what is to become of it, or with a negative error.
// Not inlined: it would need stack on the way of each packet.
#[inline(never)]
pub(crate) fn refuse<F: Refuse>(skb: *mut __sk_buff, packet: &Packet<F::Address>, path: AnswerPath) -> i64 {
    let budget = if is_answered_by_reset(packet) { IcmpBudget::Resets } else { IcmpBudget::Refusals };
    if !is_due(budget) {
        return LIMITED;
    }
    match turn_into_refusal::<F>(&TcContext::new(skb), packet, path) {
        Ok(action) => action,
        Err(error) => -error.abs(),
    }
}

/// A RST is made of the whole packet; a fragment of one would be a fragment too.
#[inline(always)]
fn is_answered_by_reset<A: Address>(packet: &Packet<A>) -> bool {
    packet.is_tcp() && packet.fragment.part == Part::Whole
}

/// What [`refuse`] returns if no more such answers are sent in this second. It is no error number
/// of a helper.
pub(crate) const LIMITED: i64 = i64::MIN;

/// Returns true if the budget has room for an answer in this second.
#[inline(always)]
fn is_due(budget: IcmpBudget) -> bool {
    let Some(count) = maps::icmp_errors.get_ptr_mut(budget as u32) else { return false };
    // SAFETY: no arguments; since 5.8.
    let second = unsafe { bpf_ktime_get_boot_ns() } / 1_000_000_000;
    // SAFETY: a value of this CPU, in bounds. Programs of TC run with softirqs off.
    let count = unsafe { &mut *count };
    if count.second != second {
        (count.second, count.errors) = (second, 0);
    }
    count.errors += 1;
    count.errors <= budget.per_second()
}

#[inline(always)]
fn turn_into_refusal<F: Refuse>(
    ctx: &TcContext,
    packet: &Packet<F::Address>,
    path: AnswerPath,
) -> Result<i64, i64> {
    if is_answered_by_reset(packet) {
        reset::<F>(ctx, packet)?;
    } else {
        F::make_error(ctx, packet, F::PORT_UNREACHABLE)?;
    }
    send_back(ctx, packet.headers.network, path)
}

/// Turns the packet into an ICMP error: it is longer than `length`, which would have gone further. False also where none is due.
// Not inlined: what it needs of the stack would be added to what sending it needs.
#[inline(never)]
pub(crate) fn turn_into_too_big<F: Refuse>(
    skb: *mut __sk_buff,
    packet: &Packet<F::Address>,
    length: u32,
) -> bool {
    is_due(IcmpBudget::TooBig) && F::make_error(&TcContext::new(skb), packet, F::too_big(length)).is_ok()
}

/// Sends a packet that is turned around by the interface that it has come by.
#[inline(always)]
pub(crate) fn send_back(ctx: &TcContext, network: u32, path: AnswerPath) -> Result<i64, i64> {
    if network == ETHERNET {
        let addresses: [u8; 12] = ctx.load(0)?;
        ctx.store(
            0,
            &[addresses[6], addresses[7], addresses[8], addresses[9], addresses[10], addresses[11]],
            0,
        )?;
        ctx.store(
            6,
            &[addresses[0], addresses[1], addresses[2], addresses[3], addresses[4], addresses[5]],
            0,
        )?;
    }
    // SAFETY: a field of the context.
    let interface = unsafe { (*ctx.skb.skb).ifindex };
    let flags = if path == AnswerPath::IntoNode { u64::from(BPF_F_INGRESS) } else { 0 };
    // SAFETY: no pointers.
    let action = unsafe { bpf_redirect(interface, flags) };
    if action == i64::from(TC_ACT_REDIRECT) { Ok(action) } else { Err(action) }
}

/// The segment becomes the answer in place: a header without options and payload. Its checksum is
/// changed and not computed, so that it is right also where it was still to be filled in.
#[inline(always)]
fn reset<F: Refuse>(ctx: &TcContext, packet: &Packet<F::Address>) -> Result<(), i64> {
    const TCP: u8 = 6;
    const LENGTH: u16 = 20;
    const CHECKSUM: u32 = 16;
    /// Header length in words, in the upper half of a byte.
    const HEADER_WORDS: u8 = (LENGTH as u8 / 4) << 4;
    let transport = packet.headers.transport;
    let checksum = (transport + CHECKSUM) as usize;
    let old: [u8; LENGTH as usize] = ctx.load(transport as usize)?;
    let old_length = F::set_transport_length(ctx, packet, LENGTH)?;
    // SAFETY: the context of this program.
    let resized = unsafe { bpf_skb_change_tail(ctx.skb.skb, transport + u32::from(LENGTH), 0) };
    if resized != 0 {
        return Err(resized);
    }
    F::turn_around(ctx, packet)?;
    let segment = &packet.segment;
    // As RFC 9293, section 3.10.7.1, has it. The payload of a SYN is not taken, as by a server that does not know TCP Fast Open.
    let ([s0, s1, s2, s3], [a0, a1, a2, a3], flags) = if segment.has(TCP_ACK) {
        (segment.acknowledgement.to_be_bytes(), [0; 4], TCP_RST)
    } else {
        ([0; 4], segment.sequence.wrapping_add(1).to_be_bytes(), TCP_RST | TCP_ACK)
    };
    // Ports swapped, sequence, acknowledgement, header length, flags, no window, nothing urgent.
    let mut new = old;
    (new[0], new[1], new[2], new[3]) = (old[2], old[3], old[0], old[1]);
    (new[4], new[5], new[6], new[7]) = (s0, s1, s2, s3);
    (new[8], new[9], new[10], new[11]) = (a0, a1, a2, a3);
    (new[12], new[13], new[14], new[15]) = (HEADER_WORDS, flags, 0, 0);
    (new[18], new[19]) = (0, 0);
    ctx.store(transport as usize, &new, 0)?;
    // All that a checksum covers adds up to zero. So what was cut off is missing with the sum of
    // all that was before it: the pseudo header and the old header.
    let change = Sum::of_change(&old, &new) + Sum::of(&old) + F::pseudo_header(packet, TCP, old_length);
    ctx.l4_csum_replace(checksum, 0, change.folded().into(), 0)?;
    let word = |length: u32| u64::from(u32::from_ne_bytes(length.to_be_bytes()));
    let of_pseudo_header = u64::from(BPF_F_PSEUDO_HDR) | size_of::<u32>() as u64;
    ctx.l4_csum_replace(checksum, word(old_length), word(LENGTH.into()), of_pseudo_header)
}

/// Returns the bytes of transport of a packet whose network header says 0: it is longer than the
/// field can say. The kernel makes such packets of many segments (BIG TCP, Linux 5.19).
#[inline(always)]
fn untold_length<A>(ctx: &TcContext, packet: &Packet<A>) -> u32 {
    ctx.len().wrapping_sub(packet.headers.transport)
}

/// Bytes of an [`IcmpHeader`].
const ICMP_HEADER: u32 = 8;
/// As much of the transport as ICMP must quote: all of UDP's header.
const QUOTED_TRANSPORT: u32 = 8;
const WORD: u32 = 4;
/// Headers that are quoted at most, in words: IPv4 with options needs 17.
const QUOTED_WORDS: u32 = 32;

/// Moves the headers up to make room for `before` bytes, drops what follows them, and answers with their length
/// and ones' complement sum.
#[inline(always)]
fn quote<A>(ctx: &TcContext, packet: &Packet<A>, before: u32) -> Result<(u32, Sum), i64> {
    let length = packet.headers.transport - packet.headers.network + QUOTED_TRANSPORT;
    let words = length / WORD;
    if words > QUOTED_WORDS {
        return Err(-1);
    }
    // SAFETY: the context of this program.
    let resized = unsafe { bpf_skb_change_tail(ctx.skb.skb, packet.headers.network + before + length, 0) };
    if resized != 0 {
        return Err(resized);
    }
    let mut sum = Sum::ZERO;
    // The verifier must see the loop's end: a counter in memory is one that the compiler does not replace by the
    // offset. 8 bytes wide, or 5.10 would not follow it.
    let mut counter = 0u64;
    // From the end, because the old and the new bytes overlap.
    loop {
        // SAFETY: a local.
        let done = unsafe { read_volatile(addr_of!(counter)) } as u32;
        if done >= QUOTED_WORDS || done >= words {
            break;
        }
        // SAFETY: as above.
        unsafe { write_volatile(addr_of_mut!(counter), u64::from(done) + 1) };
        let offset = packet.headers.network + (words - 1 - done) * WORD;
        let word: [u8; WORD as usize] = ctx.load(offset as usize)?;
        store(ctx, offset + before, &word)?;
        sum += Sum::of(&word);
    }
    Ok((length, sum))
}

#[inline(always)]
fn store<T>(ctx: &TcContext, offset: u32, bytes: &T) -> Result<(), i64> {
    ctx.store(offset as usize, bytes, u64::from(BPF_F_RECOMPUTE_CSUM))
}

#[inline(always)]
fn with_checksum([kind, code, _, _, a, b, c, d]: IcmpHeader, sum: Sum) -> IcmpHeader {
    let [high, low] = sum.checksum();
    [kind, code, high, low, a, b, c, d]
}

impl Refuse for V4 {
    #[inline(always)]
    fn set_transport_length(ctx: &TcContext, packet: &Packet<[u8; 4]>, length: u16) -> Result<u32, i64> {
        const LENGTH: u32 = 2;
        const CHECKSUM: u32 = 10;
        let header = (packet.headers.transport - packet.headers.network) as u16;
        let old: [u8; 2] = ctx.load((packet.headers.network + LENGTH) as usize)?;
        let new = header.wrapping_add(length).to_be_bytes();
        let (from, to) = (u16::from_ne_bytes(old), u16::from_ne_bytes(new));
        ctx.l3_csum_replace((packet.headers.network + CHECKSUM) as usize, from.into(), to.into(), 2)?;
        ctx.store((packet.headers.network + LENGTH) as usize, &new, 0)?;
        Ok(match u16::from_be_bytes(old) {
            0 => untold_length(ctx, packet),
            told => told.wrapping_sub(header).into(),
        })
    }

    #[inline(always)]
    fn pseudo_header(packet: &Packet<[u8; 4]>, protocol: u8, length: u32) -> Sum {
        Sum::of(&packet.source)
            + Sum::of(&packet.destination)
            + Sum::of(&[0, 0, 0, protocol])
            + Sum::of(&length.to_be_bytes())
    }

    #[inline(always)]
    fn turn_around(ctx: &TcContext, packet: &Packet<[u8; 4]>) -> Result<(), i64> {
        const LIFETIME: u32 = 8;
        const CHECKSUM: u32 = 10;
        let old: [u8; 2] = ctx.load((packet.headers.network + LIFETIME) as usize)?;
        let new = [HOP_LIMIT, old[1]];
        let (from, to) = (u16::from_ne_bytes(old), u16::from_ne_bytes(new));
        ctx.l3_csum_replace((packet.headers.network + CHECKSUM) as usize, from.into(), to.into(), 2)?;
        ctx.store((packet.headers.network + LIFETIME) as usize, &new, 0)?;
        ctx.store((packet.headers.network + Self::SOURCE) as usize, &packet.destination, 0)?;
        ctx.store((packet.headers.network + Self::DESTINATION) as usize, &packet.source, 0)
    }

    const PORT_UNREACHABLE: IcmpHeader = [3, 3, 0, 0, 0, 0, 0, 0];

    #[inline(always)]
    fn too_big(length: u32) -> IcmpHeader {
        let [_, _, high, low] = length.to_be_bytes();
        [3, 4, 0, 0, 0, 0, high, low]
    }

    #[inline(always)]
    fn make_error(ctx: &TcContext, packet: &Packet<[u8; 4]>, icmp: IcmpHeader) -> Result<(), i64> {
        const HEADER: u32 = 20;
        const PROTOCOL_ICMP: u8 = 1;
        /// Network control, as in ICMP errors of Linux.
        const PRECEDENCE: u8 = 0xc0;
        let (quoted, sum) = quote(ctx, packet, HEADER + ICMP_HEADER)?;
        let [length_high, length_low] = ((HEADER + ICMP_HEADER + quoted) as u16).to_be_bytes();
        let first = [0x45, PRECEDENCE, length_high, length_low];
        let lifetime = [HOP_LIMIT, PROTOCOL_ICMP, 0, 0];
        let (from, to) = (packet.destination, packet.source);
        let header = Sum::of(&first) + Sum::of(&lifetime) + Sum::of(&from) + Sum::of(&to);
        let checksum = header.checksum();
        store(ctx, packet.headers.network, &first)?;
        store(ctx, packet.headers.network + 4, &[0u8; 4])?;
        store(ctx, packet.headers.network + 8, &[HOP_LIMIT, PROTOCOL_ICMP, checksum[0], checksum[1]])?;
        store(ctx, packet.headers.network + Self::SOURCE, &from)?;
        store(ctx, packet.headers.network + Self::DESTINATION, &to)?;
        store(ctx, packet.headers.network + HEADER, &with_checksum(icmp, sum + Sum::of(&icmp)))
    }
}

impl Refuse for V6 {
    #[inline(always)]
    fn set_transport_length(ctx: &TcContext, packet: &Packet<[u8; 16]>, length: u16) -> Result<u32, i64> {
        const LENGTH: u32 = 4;
        const FIXED_HEADER: u32 = 40;
        /// The options before the transport begin two bytes after the fixed header.
        const OPTION: u32 = FIXED_HEADER + 2;
        /// RFC 2675: a packet with this option has the length 0.
        const JUMBO_PAYLOAD: u8 = 0xc2;
        /// An option of the same length that says nothing.
        const PADDING: [u8; 6] = [1, 4, 0, 0, 0, 0];
        let extensions = (packet.headers.transport - packet.headers.network - FIXED_HEADER) as u16;
        let old: [u8; 2] = ctx.load((packet.headers.network + LENGTH) as usize)?;
        let new = extensions.wrapping_add(length).to_be_bytes();
        ctx.store((packet.headers.network + LENGTH) as usize, &new, 0)?;
        let told = u16::from_be_bytes(old);
        if told != 0 {
            return Ok(told.wrapping_sub(extensions).into());
        }
        if extensions != 0 {
            let [option]: [u8; 1] = ctx.load((packet.headers.network + OPTION) as usize)?;
            if option == JUMBO_PAYLOAD {
                ctx.store((packet.headers.network + OPTION) as usize, &PADDING, 0)?;
            }
        }
        Ok(untold_length(ctx, packet))
    }

    #[inline(always)]
    fn pseudo_header(packet: &Packet<[u8; 16]>, protocol: u8, length: u32) -> Sum {
        Sum::of(&packet.source)
            + Sum::of(&packet.destination)
            + Sum::of(&length.to_be_bytes())
            + Sum::of(&[0, 0, 0, protocol])
    }

    #[inline(always)]
    fn turn_around(ctx: &TcContext, packet: &Packet<[u8; 16]>) -> Result<(), i64> {
        const LIFETIME: u32 = 7;
        store(ctx, packet.headers.network + LIFETIME, &HOP_LIMIT)?;
        ctx.store((packet.headers.network + Self::SOURCE) as usize, &packet.destination, 0)?;
        ctx.store((packet.headers.network + Self::DESTINATION) as usize, &packet.source, 0)
    }

    const PORT_UNREACHABLE: IcmpHeader = [1, 4, 0, 0, 0, 0, 0, 0];

    #[inline(always)]
    fn too_big(length: u32) -> IcmpHeader {
        let [a, b, c, d] = length.to_be_bytes();
        [2, 0, 0, 0, a, b, c, d]
    }

    #[inline(always)]
    fn make_error(ctx: &TcContext, packet: &Packet<[u8; 16]>, icmp: IcmpHeader) -> Result<(), i64> {
        const HEADER: u32 = 40;
        const PROTOCOL_ICMP: u8 = 58;
        let (quoted, sum) = quote(ctx, packet, HEADER + ICMP_HEADER)?;
        let length = (ICMP_HEADER + quoted) as u16;
        let [length_high, length_low] = length.to_be_bytes();
        let (from, to) = (packet.destination, packet.source);
        store(
            ctx,
            packet.headers.network,
            &[0x60u8, 0, 0, 0, length_high, length_low, PROTOCOL_ICMP, HOP_LIMIT],
        )?;
        store(ctx, packet.headers.network + Self::SOURCE, &from)?;
        store(ctx, packet.headers.network + Self::DESTINATION, &to)?;
        store(
            ctx,
            packet.headers.network + HEADER,
            &with_checksum(
                icmp,
                sum + Self::pseudo_header(packet, PROTOCOL_ICMP, length.into()) + Sum::of(&icmp),
            ),
        )
    }
}
