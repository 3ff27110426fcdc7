//! The way of a packet: parse, decide, rewrite.

use aya_ebpf::{
    bindings::{TC_ACT_SHOT, TC_ACT_UNSPEC},
    programs::TcContext,
};
use proxy_common::{
    family::{V4, V6},
    flow::{self, FlowTables, Scratch},
    layout::FLOW_FROM_HOST,
    packet::Rewrite,
    reason::{Reason, Verdict},
    select::Origin,
};

use crate::{
    flow::FlowScratch,
    globals,
    host::{self, Route},
    log::LogAddress,
    nat::{self, Addresses},
    parse::{Network, ParsedPacket},
    refuse::{self, AnswerPath, Refuse},
    tables::{Maps, count, count_packet, lease_has_ended},
};

// Ethertypes as the context has them, in network order.
const IPV4: u32 = 0x0800u16.to_be() as u32;
const IPV6: u32 = 0x86ddu16.to_be() as u32;

trait PacketFamily: Network<Address: LogAddress> + Addresses + Refuse + Route + FlowScratch {}
impl PacketFamily for V4 {}
impl PacketFamily for V6 {}

/// A packet enters the node.
#[inline(always)]
pub(crate) fn ingress(ctx: &TcContext, network: u32, origin: Origin) -> i32 {
    match ethertype(ctx) {
        IPV4 => ingress_of::<V4>(ctx, network, origin),
        IPV6 => ingress_of::<V6>(ctx, network, origin),
        _ => TC_ACT_UNSPEC,
    }
}

/// A packet leaves the node, towards clients or backends that are `peers`.
#[inline(always)]
pub(crate) fn egress(ctx: &TcContext, network: u32, peers: Origin) -> i32 {
    match ethertype(ctx) {
        IPV4 => egress_of::<V4>(ctx, network, peers),
        IPV6 => egress_of::<V6>(ctx, network, peers),
        _ => TC_ACT_UNSPEC,
    }
}

#[inline(always)]
fn ethertype(ctx: &TcContext) -> u32 {
    // SAFETY: a field of the context.
    unsafe { (*ctx.skb.skb).protocol }
}

#[inline(always)]
fn ingress_of<F: PacketFamily>(ctx: &TcContext, network: u32, origin: Origin) -> i32
where
    Maps: FlowTables<F>,
{
    if lease_has_ended() {
        return TC_ACT_UNSPEC;
    }
    let parsed = match F::parse(ctx, network) {
        Ok(parsed) => parsed,
        Err(reason) => return pass_or_drop(reason),
    };
    let Some(scratch) = F::scratch() else { return TC_ACT_UNSPEC };
    if globals::HOST_PACKETS.load() == globals::ON
        && let Some(rewrite) = flow::answer(&Maps, scratch, &parsed.packet, FLOW_FROM_HOST)
    {
        return answer_host::<F>(ctx, &parsed, &rewrite, origin);
    }
    match flow::arriving(&Maps, scratch, &parsed.packet, origin) {
        Ok(rewrite) => translate::<F>(ctx, &parsed, &rewrite),
        Err(reason) => conclude::<F>(ctx, &parsed, reason, AnswerPath::OutOfInterface),
    }
}

#[inline(always)]
fn egress_of<F: PacketFamily>(ctx: &TcContext, network: u32, peers: Origin) -> i32
where
    Maps: FlowTables<F>,
{
    if lease_has_ended() {
        return TC_ACT_UNSPEC;
    }
    let parsed = match F::parse(ctx, network) {
        Ok(parsed) => parsed,
        Err(reason) => return pass_or_drop(reason),
    };
    let Some(scratch) = F::scratch() else { return TC_ACT_UNSPEC };
    match flow::leaving(&Maps, scratch, &parsed.packet) {
        Ok(rewrite) => translate::<F>(ctx, &parsed, &rewrite),
        Err(reason) => {
            if peers == Origin::Outside && globals::HOST_PACKETS.load() == globals::ON && host::is_local(ctx)
            {
                send_for_host::<F>(ctx, scratch, &parsed)
            } else {
                pass_or_drop(reason)
            }
        }
    }
}

/// A packet that a process of the node itself sends.
#[inline(always)]
fn send_for_host<F: PacketFamily>(
    ctx: &TcContext,
    scratch: &mut Scratch<F::Address>,
    parsed: &ParsedPacket<F::Address>,
) -> i32
where
    Maps: FlowTables<F>,
{
    match flow::arriving(&Maps, scratch, &parsed.packet, Origin::Host) {
        Ok(rewrite) => match translate::<F>(ctx, parsed, &rewrite) {
            TC_ACT_UNSPEC => {
                host::to_backend::<F>(ctx, &parsed.packet.source, &rewrite.address).unwrap_or(TC_ACT_UNSPEC)
            }
            verdict => verdict,
        },
        Err(reason) => conclude::<F>(ctx, parsed, reason, AnswerPath::IntoNode),
    }
}

/// A backend's answer to a process of the node itself.
#[inline(always)]
fn answer_host<F: PacketFamily>(
    ctx: &TcContext,
    parsed: &ParsedPacket<F::Address>,
    rewrite: &Rewrite<F::Address>,
    origin: Origin,
) -> i32 {
    if origin == Origin::Workload
        && let Some(moved) = host::to_uplink::<F>(ctx, &parsed.packet.destination, &rewrite.address)
    {
        return moved;
    }
    host::accept(ctx);
    translate::<F>(ctx, parsed, rewrite)
}

/// What a reason other than success means for a client's packet.
#[inline(always)]
fn conclude<F: PacketFamily>(
    ctx: &TcContext,
    parsed: &ParsedPacket<F::Address>,
    reason: Reason,
    path: AnswerPath,
) -> i32 {
    if reason.verdict() != Verdict::Pass {
        // A copy: the packet itself need not lie in memory for the sake of the log.
        let packet = parsed.packet;
        F::Address::log_refusal(&packet, reason);
    }
    if reason.verdict() != Verdict::Refuse {
        return pass_or_drop(reason);
    }
    count(reason);
    match refuse::refuse::<F>(ctx, parsed, path) {
        Ok(action) => action,
        Err(_) => pass_or_drop(Reason::RefusalFailed),
    }
}

#[inline(always)]
fn translate<F: PacketFamily>(
    ctx: &TcContext,
    parsed: &ParsedPacket<F::Address>,
    rewrite: &Rewrite<F::Address>,
) -> i32 {
    count_packet(rewrite.service, ctx.len());
    match nat::rewrite::<F>(ctx, parsed, rewrite) {
        Ok(()) => TC_ACT_UNSPEC,
        Err(_) => pass_or_drop(Reason::RewriteFailed),
    }
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
