//! Direct server return: a client's packet leaves for a backend of another node in a packet of this one, and is taken out there.

use aya_ebpf::{
    bindings::{
        __sk_buff, BPF_F_ADJ_ROOM_ENCAP_L3_IPV4, BPF_F_ADJ_ROOM_ENCAP_L3_IPV6, BPF_F_ADJ_ROOM_ENCAP_L4_UDP,
        BPF_F_ADJ_ROOM_FIXED_GSO, TC_ACT_SHOT, bpf_adj_room_mode::BPF_ADJ_ROOM_MAC,
    },
    helpers::bpf_skb_adjust_room,
    programs::TcContext,
};
use proxy_common::{
    family::{V4, V6},
    flow::Scratch,
    layout::Address,
    packet::{Bytes as _, Packet, Part, Tunnel, inner, outer_length, parse, write_outer},
    port::Port,
};

use crate::{
    bytes::skb::Skb,
    maps,
    route::Route,
    tc::{
        host,
        refuse::{self, Refuse},
    },
};

pub(crate) trait Encapsulate: Tunnel + Refuse + Route {
    /// Of bpf_skb_adjust_room.
    const ROOM: u64;
}

impl Encapsulate for V4 {
    const ROOM: u64 = BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 as u64;
}

impl Encapsulate for V6 {
    const ROOM: u64 = BPF_F_ADJ_ROOM_ENCAP_L3_IPV6 as u64;
}

/// Has the packet another in it that can be parsed? Then that one is `scratch.packet`, and the answer how many bytes are before it; else 0.
// Not inlined, for its stack.
#[inline(never)]
pub(crate) fn parse_inner<F: Encapsulate>(
    skb: *mut __sk_buff,
    network: u32,
    scratch: &mut Scratch<F::Address>,
) -> u32 {
    let bytes = Skb::of(&TcContext::new(skb));
    match inner::<F, _>(bytes, network, &mut scratch.tunnel) {
        Ok(inside) if parse::<F, _>(bytes, inside, &mut scratch.packet).is_ok() => inside - network,
        Ok(_) | Err(_) => 0,
    }
}

#[inline(always)]
fn adjust_room(ctx: &TcContext, change: i32, flags: u64) -> i64 {
    // SAFETY: the context of this program.
    unsafe { bpf_skb_adjust_room(ctx.skb.skb, change, BPF_ADJ_ROOM_MAC, flags) }
}

/// Takes the outer headers off, which have this many bytes. False: the kernel would not.
#[inline(always)]
pub(crate) fn unpack(ctx: &TcContext, length: u32) -> bool {
    adjust_room(ctx, -(length as i32), u64::from(BPF_F_ADJ_ROOM_FIXED_GSO)) == 0
}

/// Answered by [`encapsulate`].
pub(crate) const ENCAPSULATED: u32 = 0;
/// As [`ENCAPSULATED`]: it would be longer than the interface takes.
pub(crate) const TOO_BIG: u32 = 1;
const FAILED: u32 = 2;

/// Does the packet's interface take none of this length? Without a link header. By the map `interfaces`: bpf_check_mtu came with Linux 5.12 only, and
/// bpf_skb_adjust_room makes packets longer than an interface takes.
#[inline(always)]
fn is_too_long(ctx: &TcContext, length: u32) -> bool {
    // SAFETY: a field of the context.
    let interface = unsafe { (*ctx.skb.skb).ifindex };
    // SAFETY: a map element, copied at once. One that is removed meanwhile becomes no other interface's before the next change.
    let mtu = unsafe { maps::interfaces.get(interface) }.map_or(0, |settings| settings.mtu.into());
    mtu != 0 && length > mtu
}

/// Of each segment that is merged in the packet; 0: it is one itself.
#[inline(always)]
fn segment_size(ctx: &TcContext) -> u32 {
    // SAFETY: a field of the context.
    unsafe { (*ctx.skb.skb).gso_size }
}

/// Bytes of the packet, which begins at `network`, or of each of the packets that are merged in it.
#[inline(always)]
pub(crate) fn length_of_each<A: Address>(ctx: &TcContext, network: u32, packet: &Packet<A>) -> u32 {
    match segment_size(ctx) {
        0 => ctx.len() - network,
        size => packet.headers.transport - network + transport_header(ctx, packet) + size,
    }
}

/// Bytes of the transport header.
#[inline(always)]
fn transport_header<A: Address>(ctx: &TcContext, packet: &Packet<A>) -> u32 {
    const OF_UDP: u32 = 8;
    /// Of a TCP header, the one whose upper half tells its length, in words.
    const LENGTH: u32 = 12;
    match Skb::of(ctx).read(packet.headers.transport + LENGTH) {
        Ok([length]) if packet.is_tcp() => u32::from(length >> 4) * 4,
        Ok(_) | Err(_) => OF_UDP,
    }
}

/// Puts the packet into one with the ends `scratch.tunnel`.
// Not inlined, for its stack.
#[inline(never)]
pub(crate) fn encapsulate<F: Encapsulate>(
    skb: *mut __sk_buff,
    network: u32,
    scratch: &Scratch<F::Address>,
) -> u32 {
    let ctx = &TcContext::new(skb);
    let bytes = Skb::of(ctx);
    let Ok(begin) = bytes.read::<4>(network) else { return FAILED };
    let length = bytes.length() - network;
    let Scratch { packet, tunnel, .. } = scratch;
    let header = outer_length::<F>(tunnel);
    let size = segment_size(ctx);
    // Segments of a stream get shorter by the header, so that they fit, unless nothing would be left of them. Datagrams must stay as they are.
    let is_cut_anew = packet.is_tcp() && size > header;
    if !is_cut_anew && is_too_long(ctx, length_of_each(ctx, network, packet) + header) {
        return TOO_BIG;
    }
    let fixed = if is_cut_anew || size == 0 { 0 } else { u64::from(BPF_F_ADJ_ROOM_FIXED_GSO) };
    let transport = if tunnel.source_port == Port::NONE { 0 } else { u64::from(BPF_F_ADJ_ROOM_ENCAP_L4_UDP) };
    if adjust_room(ctx, header as i32, F::ROOM | transport | fixed) != 0 {
        return FAILED;
    }
    match write_outer::<F, _>(bytes, network, (begin, length), tunnel) {
        Ok(()) => ENCAPSULATED,
        Err(_) => FAILED,
    }
}

/// Sends the client, whose packet `scratch.action` has restored, the ICMP error by which it learns the length that fits.
// Not inlined, for its stack.
#[inline(never)]
pub(crate) fn tell_client<F: Encapsulate>(skb: *mut __sk_buff, scratch: &mut Scratch<F::Address>) -> i32 {
    let ctx = &TcContext::new(skb);
    let Scratch { packet, action, tunnel, .. } = scratch;
    if packet.is_error() || packet.fragment.part == Part::Later {
        return TC_ACT_SHOT as i32;
    }
    (packet.source, packet.destination) = (action.rewrite.source, action.rewrite.destination);
    // It fits into the interface, and not with the other header: so does what is shorter by that.
    let length = length_of_each(ctx, packet.headers.network, packet) - outer_length::<F>(tunnel);
    if !refuse::turn_into_too_big::<F>(skb, packet, length) {
        return TC_ACT_SHOT as i32;
    }
    core::mem::swap(&mut action.rewrite.source, &mut action.rewrite.destination);
    host::reroute::<F>(ctx, &action.rewrite).unwrap_or(TC_ACT_SHOT as i32)
}
