//! The way of a packet: parse, decide, rewrite.

use aya_ebpf::{
    bindings::{__sk_buff, TC_ACT_SHOT, TC_ACT_UNSPEC},
    programs::TcContext,
};
use proxy_common::{
    family::{V4, V6},
    flow::{self, FlowTables},
    packet::{Packet, Rewrite, Then},
    reason::{Reason, Verdict},
    select::Origin,
};

use crate::{
    flow::FlowScratch,
    globals,
    host::{self, Route},
    icmp,
    log::LogAddress,
    nat,
    parse::{Network, parse},
    refuse::{self, AnswerPath, Refuse},
    tables::{Maps, count, count_packet, lease_has_ended},
};

// Ethertypes as the context has them, in network order.
const IPV4: u32 = 0x0800u16.to_be() as u32;
const IPV6: u32 = 0x86ddu16.to_be() as u32;

trait PacketFamily: Network<Address: LogAddress> + Refuse + Route + FlowScratch {}
impl PacketFamily for V4 {}
impl PacketFamily for V6 {}

/// A packet enters the node.
#[inline(always)]
pub(crate) fn ingress(ctx: &TcContext, network: u32, origin: Origin) -> i32 {
    match ethertype(ctx) {
        IPV4 => ingress_of::<V4>(ctx.skb.skb, network, origin),
        IPV6 => ingress_of::<V6>(ctx.skb.skb, network, origin),
        _ => TC_ACT_UNSPEC,
    }
}

/// A packet leaves the node, towards clients or backends that are `peers`.
#[inline(always)]
pub(crate) fn egress(ctx: &TcContext, network: u32, peers: Origin) -> i32 {
    match ethertype(ctx) {
        IPV4 => egress_of::<V4>(ctx.skb.skb, network, peers),
        IPV6 => egress_of::<V6>(ctx.skb.skb, network, peers),
        _ => TC_ACT_UNSPEC,
    }
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

// Not inlined: the stack of both families would lie beside each other.
#[inline(never)]
fn ingress_of<F: PacketFamily>(skb: *mut __sk_buff, network: u32, origin: Origin) -> i32
where
    Maps: FlowTables<F>,
{
    let ctx = &TcContext::new(skb);
    if lease_has_ended() {
        return TC_ACT_UNSPEC;
    }
    let Some(scratch) = F::scratch() else { return TC_ACT_UNSPEC };
    if let Err(reason) = parse::<F>(skb, network, &mut scratch.packet) {
        return pass_or_drop(reason);
    }
    if let Err(reason) = flow::arriving(&Maps, scratch, origin) {
        return conclude::<F>(ctx, &scratch.packet, reason, AnswerPath::OutOfInterface);
    }
    if globals::HOST_PACKETS.load() == globals::ON && scratch.then == Then::IntoNode {
        if origin == Origin::Workload
            && let Some(moved) = host::to_uplink::<F>(ctx, &scratch.rewrite)
        {
            return moved;
        }
        host::accept(ctx);
    }
    translate::<F>(ctx, &scratch.packet, &scratch.rewrite)
}

// Not inlined: the stack of both families would lie beside each other.
#[inline(never)]
fn egress_of<F: PacketFamily>(skb: *mut __sk_buff, network: u32, peers: Origin) -> i32
where
    Maps: FlowTables<F>,
{
    let ctx = &TcContext::new(skb);
    if lease_has_ended() {
        return TC_ACT_UNSPEC;
    }
    let Some(scratch) = F::scratch() else { return TC_ACT_UNSPEC };
    if let Err(reason) = parse::<F>(skb, network, &mut scratch.packet) {
        return pass_or_drop(reason);
    }
    // SAFETY: a field of the context.
    scratch.interface = unsafe { (*skb).ifindex };
    let from_host =
        peers == Origin::Outside && globals::HOST_PACKETS.load() == globals::ON && host::is_local(ctx);
    if let Err(reason) = flow::leaving(&Maps, scratch, from_host) {
        return conclude::<F>(ctx, &scratch.packet, reason, AnswerPath::IntoNode);
    }
    match translate::<F>(ctx, &scratch.packet, &scratch.rewrite) {
        TC_ACT_UNSPEC if scratch.then == Then::Reroute => {
            host::reroute::<F>(ctx, &scratch.rewrite).unwrap_or(TC_ACT_UNSPEC)
        }
        verdict => verdict,
    }
}

/// What a reason other than success means for a client's packet.
#[inline(always)]
fn conclude<F: PacketFamily>(
    ctx: &TcContext,
    packet: &Packet<F::Address>,
    reason: Reason,
    path: AnswerPath,
) -> i32 {
    if reason.verdict() != Verdict::Pass {
        F::Address::log_refusal(packet, reason);
    }
    if reason.verdict() != Verdict::Refuse {
        return pass_or_drop(reason);
    }
    count(reason);
    match refuse::refuse::<F>(ctx.skb.skb, packet, path) {
        action @ 0.. => action as i32,
        refuse::LIMITED => pass_or_drop(Reason::RefusalsLimited),
        _ => pass_or_drop(Reason::RefusalFailed),
    }
}

#[inline(always)]
fn translate<F: PacketFamily>(
    ctx: &TcContext,
    packet: &Packet<F::Address>,
    rewrite: &Rewrite<F::Address>,
) -> i32 {
    let is_rewritten = if packet.is_error() {
        icmp::rewrite::<F>(ctx.skb.skb, packet, rewrite)
    } else {
        count_packet(rewrite.service, ctx.len());
        nat::rewrite::<F>(ctx.skb.skb, packet, rewrite)
    };
    if is_rewritten { TC_ACT_UNSPEC } else { pass_or_drop(Reason::RewriteFailed) }
}

/// The one place where a reason ends a packet. Passing means that other programs on the hook go on with it.
#[inline(always)]
fn pass_or_drop(reason: Reason) -> i32 {
    if reason as u32 != Reason::NotAService as u32 {
        count(reason);
    }
    match reason.verdict() {
        Verdict::Pass => TC_ACT_UNSPEC,
        Verdict::Refuse | Verdict::Drop => TC_ACT_SHOT as i32,
    }
}
