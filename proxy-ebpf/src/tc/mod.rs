//! The way of a packet through the programs of TC: parse it (`bytes/`), decide (`proxy_common::flow`
//! over `maps/`), rewrite it.

mod awaited;
mod host;
mod ping;
mod pod_sockets;
mod refuse;
mod skip_stack;
mod tunnel;

use aya_ebpf::{
    bindings::{__sk_buff, TC_ACT_SHOT, TC_ACT_UNSPEC},
    programs::TcContext,
};
use proxy_common::{
    family::{V4, V6},
    flow::{self, FlowMaps, Scratch},
    layout::{INTERFACE_OF_BRIDGE, INTERFACE_OF_UPLINK},
    packet::{self, Action, Network, Packet, Rewrite, Then, Tunnel as _, parse, rewrite_headers},
    reason::{Reason, Verdict},
    select::Origin,
    unserved,
};

use self::{
    pod_sockets::{SocketTuple, SocketsAt},
    refuse::{AnswerPath, Refuse},
    tunnel::Encapsulate,
};
use crate::{
    bytes::{frame::ETHERNET, linear::Linear, skb::Skb},
    event::TellPacket,
    globals,
    maps::{
        self,
        map_access::{KernelMaps, count, count_packet, lease_has_ended, recently},
    },
    route::Route,
};

// Ethertypes as the context has them, in network order.
const IPV4: u32 = V4::ETHERTYPE.to_be() as u32;
const IPV6: u32 = V6::ETHERTYPE.to_be() as u32;

trait PacketFamily: Network + Refuse + Route + TellPacket + Encapsulate + SocketTuple {}
impl PacketFamily for V4 {}
impl PacketFamily for V6 {}

/// A packet enters the node.
#[inline(always)]
pub(crate) fn ingress(ctx: &TcContext, network: u32, origin: Origin) -> i32 {
    if network == ETHERNET && origin == Origin::Outside && is_for_another_host(ctx) {
        return TC_ACT_UNSPEC;
    }
    match ethertype(ctx) {
        IPV4 => arrives::<V4>(ctx, network, origin),
        IPV6 => arrives::<V6>(ctx, network, origin),
        _ => TC_ACT_UNSPEC,
    }
}

/// A packet leaves the node, towards clients or backends that are `peers`.
#[inline(always)]
pub(crate) fn egress(ctx: &TcContext, network: u32, peers: Origin) -> i32 {
    match ethertype(ctx) {
        IPV4 => leaves::<V4>(ctx, network, peers),
        IPV6 => leaves::<V6>(ctx, network, peers),
        _ => TC_ACT_UNSPEC,
    }
}

/// Returns true for a frame that is addressed to another host: a device shows such frames to a
/// node that captures packets, and the stack drops them. Frames look so too where they are for the
/// bridge that the device is a port of, and where a program of ours has moved the answer of a pod
/// to the uplink.
#[inline(always)]
fn is_for_another_host(ctx: &TcContext) -> bool {
    const PACKET_OTHERHOST: u32 = 3;
    const OF_BRIDGE: u16 = INTERFACE_OF_UPLINK | INTERFACE_OF_BRIDGE;
    // SAFETY: fields of the context.
    let (kind, interface) = unsafe { ((*ctx.skb.skb).pkt_type, (*ctx.skb.skb).ifindex) };
    if kind != PACKET_OTHERHOST || globals::HOST_PACKETS.load() == globals::ON {
        return false;
    }
    // SAFETY: read at once. An element that is removed meanwhile becomes no other interface's before the next change.
    let flags = unsafe { maps::interfaces.get(interface) }.map_or(0, |settings| settings.flags);
    flags & OF_BRIDGE == INTERFACE_OF_UPLINK
}

/// 0: not a packet of this device.
#[inline(always)]
fn ethertype(ctx: &TcContext) -> u32 {
    const VLAN_ID: u32 = 0xfff;
    // SAFETY: fields of the context.
    let (protocol, is_tagged, tag) =
        unsafe { ((*ctx.skb.skb).protocol, (*ctx.skb.skb).vlan_present != 0, (*ctx.skb.skb).vlan_tci) };
    // It is the VLAN device's, whose own programs see it without tag. Id 0 is a priority only.
    if is_tagged && tag & VLAN_ID != 0 { 0 } else { protocol }
}

/// Answered where a packet takes the slow path. The fast path has done nothing with it. No verdict.
const SLOW_PATH: i32 = i32::MIN;
/// Answered where a packet is to leave in another. No verdict.
const ENCAPSULATE: i32 = i32::MIN + 1;
/// Answered where a packet is to skip the stack. No verdict.
const SKIP_STACK: i32 = i32::MIN + 2;

#[inline(always)]
fn arrives<F: PacketFamily>(ctx: &TcContext, network: u32, origin: Origin) -> i32
where
    KernelMaps: FlowMaps<F>,
{
    let verdict = match fast_ingress::<F>(ctx.skb.skb, network, origin) {
        SLOW_PATH => slow_ingress::<F>(ctx.skb.skb, network, origin),
        verdict => verdict,
    };
    match verdict {
        SKIP_STACK if origin == Origin::Workload => skip_stack::send_answer::<F>(ctx.skb.skb, network),
        SKIP_STACK => skip_stack::send_translated::<F>(ctx.skb.skb, network),
        verdict => verdict,
    }
}

#[inline(always)]
fn leaves<F: PacketFamily>(ctx: &TcContext, network: u32, peers: Origin) -> i32
where
    KernelMaps: FlowMaps<F>,
{
    match fast_egress::<F>(ctx.skb.skb, network) {
        SLOW_PATH => match slow_egress::<F>(ctx.skb.skb, network, peers) {
            ENCAPSULATE if peers == Origin::Outside => encapsulate::<F>(ctx.skb.skb, network),
            // The backend is on this node after all, whatever its slice says: its answers come back here.
            ENCAPSULATE => TC_ACT_UNSPEC,
            verdict => verdict,
        },
        verdict => verdict,
    }
}

/// The packet goes on in another, as the client has sent it.
// Not inlined, for its stack.
#[inline(never)]
fn encapsulate<F: PacketFamily>(skb: *mut __sk_buff, network: u32) -> i32
where
    KernelMaps: FlowMaps<F>,
{
    let ctx = &TcContext::new(skb);
    let Some(scratch) = F::scratch() else { return TC_ACT_SHOT as i32 };
    if let Err(reason) = flow::encapsulating(&KernelMaps, scratch) {
        return pass_or_drop::<F>(reason);
    }
    let translated = translate::<F>(ctx, &scratch.packet, &scratch.action.rewrite);
    if translated != TC_ACT_UNSPEC {
        return translated;
    }
    match tunnel::encapsulate::<F>(skb, network, scratch) {
        tunnel::ENCAPSULATED => TC_ACT_UNSPEC,
        tunnel::TOO_BIG => {
            count(Reason::PacketTooBig);
            F::tell_packet(Reason::PacketTooBig);
            tunnel::tell_client::<F>(skb, scratch)
        }
        _ => pass_or_drop::<F>(Reason::RewriteFailed),
    }
}

// A function of its own, so that its stack does not lie beside what all others need. What it calls itself is inlined: each return takes as
// long as tens of instructions, where the kernel guards them against speculation.
#[inline(never)]
fn fast_ingress<F: PacketFamily>(skb: *mut __sk_buff, network: u32, origin: Origin) -> i32
where
    KernelMaps: FlowMaps<F>,
{
    fast_path::<F>(&TcContext::new(skb), network, origin, |scratch| {
        flow::arriving_fast(&KernelMaps, scratch, origin)
    })
}

// As above.
#[inline(never)]
fn fast_egress<F: PacketFamily>(skb: *mut __sk_buff, network: u32) -> i32
where
    KernelMaps: FlowMaps<F>,
{
    fast_path::<F>(&TcContext::new(skb), network, Origin::Host, |scratch| {
        flow::leaving_fast(&KernelMaps, scratch)
    })
}

#[inline(always)]
fn fast_path<F: PacketFamily>(
    ctx: &TcContext,
    network: u32,
    origin: Origin,
    decide: impl FnOnce(&mut Scratch<F::Address>) -> Option<Result<(), Reason>>,
) -> i32
where
    KernelMaps: FlowMaps<F>,
{
    let Some(scratch) = F::scratch() else { return TC_ACT_UNSPEC };
    if lease_has_ended(|| recently(&mut scratch.clock)) {
        return TC_ACT_UNSPEC;
    }
    scratch.is_parsed = parse::<F, _>(Linear::of(ctx), network, &mut scratch.packet).is_ok();
    if !scratch.is_parsed {
        return SLOW_PATH;
    }
    // SAFETY: a field of the context.
    scratch.interface = unsafe { (*ctx.skb.skb).ifindex };
    match decide(scratch) {
        None => SLOW_PATH,
        Some(Err(_)) => TC_ACT_UNSPEC,
        Some(Ok(())) => {
            let Scratch { packet, action: Action { rewrite, then }, .. } = scratch;
            let skips_stack = *then == Then::SkipStack;
            if skips_stack && origin == Origin::Workload {
                return SKIP_STACK;
            }
            count_packet(rewrite.service, ctx.len());
            match rewrite_headers::<F, _>(Linear::of(ctx), packet, rewrite) {
                Ok(()) if skips_stack => SKIP_STACK,
                Ok(()) => TC_ACT_UNSPEC,
                Err(reason) => pass_or_drop::<F>(reason),
            }
        }
    }
}

/// What is not parsed yet may go on in fragments of the skb.
#[inline(always)]
fn parsed<F: PacketFamily>(
    ctx: &TcContext,
    network: u32,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    if scratch.is_parsed {
        return Ok(());
    }
    parse_all::<F>(ctx.skb.skb, network, &mut scratch.packet)
}

// Not inlined: what it needs of the stack would be added to what opening a flow needs.
#[inline(never)]
fn parse_all<F: PacketFamily>(
    skb: *mut __sk_buff,
    network: u32,
    packet: &mut Packet<F::Address>,
) -> Result<(), Reason> {
    parse::<F, _>(Skb::of(&TcContext::new(skb)), network, packet)
}

// Not inlined: the stack of both families would lie beside each other.
#[inline(never)]
fn slow_ingress<F: PacketFamily>(skb: *mut __sk_buff, network: u32, origin: Origin) -> i32
where
    KernelMaps: FlowMaps<F>,
{
    let ctx = &TcContext::new(skb);
    let Some(scratch) = F::scratch() else { return TC_ACT_UNSPEC };
    scratch.outer_length = 0;
    let may_be_unpacked = origin == Origin::Outside;
    let unserved = match parsed::<F>(ctx, network, scratch) {
        Ok(()) if may_be_unpacked && flow::may_carry_another(&KernelMaps, scratch) => {
            Some(Reason::NotAService)
        }
        parsed => parsed.err(),
    };
    // The verifier knows nothing of what was in memory: it would go on once for each reason.
    scratch.unserved = unserved;
    if unserved.is_some() {
        if may_be_unpacked {
            scratch.outer_length = tunnel::parse_inner::<F>(skb, network, scratch);
        }
        if let (Some(reason), false) = (scratch.unserved, scratch.is_unpacked()) {
            return answer_or_pass::<F>(
                ctx,
                network,
                &mut scratch.packet,
                reason,
                AnswerPath::OutOfInterface,
            );
        }
    }
    // SAFETY: a field of the context.
    scratch.interface = unsafe { (*skb).ifindex };
    if let Err(reason) = flow::arriving(&KernelMaps, scratch, origin, &SocketsAt::<F>::new(ctx)) {
        if unserved::is_datagram_to_nobody(reason, scratch.packet.protocol)
            && awaited::is_by_socket::<F>(ctx, &scratch.packet)
        {
            return pass_or_drop::<F>(Reason::NotAService);
        }
        return conclude::<F>(ctx, scratch, reason, AnswerPath::OutOfInterface);
    }
    let skips_stack = scratch.action.then == Then::SkipStack;
    if skips_stack && origin == Origin::Workload {
        return SKIP_STACK;
    }
    match carry_out::<F>(ctx, scratch, origin) {
        TC_ACT_UNSPEC if skips_stack => SKIP_STACK,
        TC_ACT_UNSPEC if scratch.is_unpacked() && !tunnel::unpack(ctx, scratch.outer_length) => {
            pass_or_drop::<F>(Reason::RewriteFailed)
        }
        verdict => verdict,
    }
}

// Not inlined: the stack of both families would lie beside each other.
#[inline(never)]
fn slow_egress<F: PacketFamily>(skb: *mut __sk_buff, network: u32, peers: Origin) -> i32
where
    KernelMaps: FlowMaps<F>,
{
    let ctx = &TcContext::new(skb);
    let Some(scratch) = F::scratch() else { return TC_ACT_UNSPEC };
    if let Err(reason) = parsed::<F>(ctx, network, scratch) {
        if peers == Origin::Outside && host::is_local(ctx) {
            return answer_or_pass::<F>(ctx, network, &mut scratch.packet, reason, AnswerPath::IntoNode);
        }
        return pass_or_drop::<F>(reason);
    }
    // SAFETY: a field of the context.
    scratch.interface = unsafe { (*skb).ifindex };
    scratch.is_made_here = host::is_local(ctx);
    let from_host =
        peers == Origin::Outside && globals::HOST_PACKETS.load() == globals::ON && scratch.is_made_here;
    if let Err(reason) = flow::leaving(&KernelMaps, scratch, from_host) {
        return conclude::<F>(ctx, scratch, reason, AnswerPath::IntoNode);
    }
    if scratch.action.then == Then::Encapsulate {
        return ENCAPSULATE;
    }
    carry_out::<F>(ctx, scratch, peers)
}

/// A packet without ports, or one that could not be parsed.
#[inline(always)]
fn answer_or_pass<F: PacketFamily>(
    ctx: &TcContext,
    network: u32,
    packet: &mut Packet<F::Address>,
    reason: Reason,
    path: AnswerPath,
) -> i32
where
    KernelMaps: FlowMaps<F>,
{
    if globals::ANSWER_PING.load() != globals::ON {
        return pass_or_drop::<F>(reason);
    }
    match ping::answer::<F>(ctx.skb.skb, network, packet, path) {
        action @ 0.. => {
            count(Reason::PingAnswered);
            action as i32
        }
        ping::NOT_ONE => pass_or_drop::<F>(reason),
        _ => pass_or_drop::<F>(Reason::RewriteFailed),
    }
}

/// Does with the packet what was decided. `peers` are those beyond its interface.
#[inline(always)]
fn carry_out<F: PacketFamily>(ctx: &TcContext, scratch: &Scratch<F::Address>, peers: Origin) -> i32 {
    let Scratch { packet, action: Action { rewrite, then }, .. } = scratch;
    // Only packets of the node's own processes leave the way on which the stack has them.
    let then = if globals::HOST_PACKETS.load() == globals::ON { *then } else { Then::Pass };
    if then == Then::IntoNode {
        if peers == Origin::Workload
            && let Some(moved) = host::to_uplink::<F>(ctx, rewrite)
        {
            return moved;
        }
        host::accept(ctx);
    }
    match translate::<F>(ctx, packet, rewrite) {
        TC_ACT_UNSPEC if then == Then::Reroute => host::reroute::<F>(ctx, rewrite).unwrap_or(TC_ACT_UNSPEC),
        verdict => verdict,
    }
}

/// What a reason other than success means for a client's packet.
#[inline(always)]
fn conclude<F: PacketFamily>(
    ctx: &TcContext,
    scratch: &Scratch<F::Address>,
    reason: Reason,
    path: AnswerPath,
) -> i32 {
    // What another node has sent here is refused there.
    if reason.verdict() != Verdict::Refuse || scratch.is_unpacked() {
        return pass_or_drop::<F>(reason);
    }
    count(reason);
    F::tell_packet(reason);
    match refuse::refuse::<F>(ctx.skb.skb, &scratch.packet, path) {
        action @ 0.. => action as i32,
        refuse::LIMITED => pass_or_drop::<F>(Reason::RefusalsLimited),
        _ => pass_or_drop::<F>(Reason::RefusalFailed),
    }
}

#[inline(always)]
fn translate<F: PacketFamily>(
    ctx: &TcContext,
    packet: &Packet<F::Address>,
    rewrite: &Rewrite<F::Address>,
) -> i32 {
    if !packet.is_error() {
        count_packet(rewrite.service, ctx.len());
    }
    match packet::rewrite::<F, _>(Skb::of(ctx), packet, rewrite) {
        Ok(()) => TC_ACT_UNSPEC,
        Err(reason) => pass_or_drop::<F>(reason),
    }
}

/// The one place where a reason ends a packet. Passing means that other programs on the hook go on with it.
#[inline(always)]
fn pass_or_drop<F: PacketFamily>(reason: Reason) -> i32 {
    if reason as u32 != Reason::NotAService as u32 {
        count(reason);
        F::tell_packet(reason);
    }
    match reason.verdict() {
        Verdict::Pass => TC_ACT_UNSPEC,
        Verdict::Refuse | Verdict::Drop => TC_ACT_SHOT as i32,
    }
}
