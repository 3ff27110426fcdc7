//! Packets that skip the stack, and leave where it would send them: a pod's answers to packets that XDP sends to the pod, so that connection tracking
//! sees neither direction, and what goes from outside to a backend on another node, or back. All that there is to be done to them at the egress of
//! the uplink is done there, as to all others.

use core::ptr;

use aya_ebpf::{
    bindings::{__sk_buff, TC_ACT_UNSPEC, bpf_redir_neigh as NextHop},
    helpers::{bpf_redirect_neigh, bpf_skb_change_head, bpf_skb_vlan_pop},
    programs::TcContext,
};
use proxy_common::{
    flow::{FlowMaps, Scratch, cannot_skip_stack},
    layout::{INTERFACE_OF_UPLINK, INTERFACE_WITHOUT_LINK_HEADERS},
    packet::{Bytes as _, Network, Packet, Rewrite, shorten_lifetime},
    port::Port,
    reason::Reason,
};

use crate::{
    bytes::{
        frame::{BARE, ETHERNET},
        skb::Skb,
    },
    maps::{
        self,
        flow::FlowScratch,
        map_access::{KernelMaps, count},
    },
    route::{self, FOUND, NO_NEIGHBOUR, Route, TOO_LONG},
    tc::{
        host::{PACKET_HOST, redirected},
        tunnel::length_of_each,
    },
};

/// Sends the pod's answer of the family's `Scratch` where the stack would. `TC_ACT_UNSPEC`: it is untouched, and the stack's, which tells its sender
/// what is wrong with it.
#[inline(always)]
pub(crate) fn send_answer<F: FlowScratch + Network + Route>(skb: *mut __sk_buff, network: u32) -> i32
where
    KernelMaps: FlowMaps<F>,
{
    match redirect_answer::<F>(skb, network) {
        refusal @ (NO_WAY | NOT_THIS) => {
            if let Some(scratch) = F::scratch() {
                cannot_skip_stack(&KernelMaps, scratch, refusal == NOT_THIS);
            }
            TC_ACT_UNSPEC
        }
        verdict => verdict,
    }
}

/// As [`send_answer`], a packet from outside that has been translated as `scratch.action` says.
#[inline(always)]
pub(crate) fn send_translated<F: FlowScratch + Network + Route>(skb: *mut __sk_buff, network: u32) -> i32 {
    match redirect_translated::<F>(skb, network) {
        NO_WAY | NOT_THIS => TC_ACT_UNSPEC,
        verdict => verdict,
    }
}

/// Answered by [`redirect`]: the routing tables do not lead to such an interface.
const NO_WAY: i32 = i32::MIN;
/// As above: this packet is the stack's.
const NOT_THIS: i32 = i32::MIN + 1;

// Not inlined, for its stack.
#[inline(never)]
fn redirect_answer<F: FlowScratch + Network + Route>(skb: *mut __sk_buff, network: u32) -> i32 {
    let Some(scratch) = F::scratch() else { return NOT_THIS };
    let Packet { source, destination, source_port, destination_port, .. } = &scratch.packet;
    let ends = (source, *source_port, destination, *destination_port);
    let target = |interface| {
        // SAFETY: not read.
        unsafe { maps::redirect_sources.get(interface) }.map(|_| Target::WithLinkHeaders)
    };
    redirect::<F>(skb, network, scratch, ends, target, Reason::AnswerSkippedStack)
}

// As above.
#[inline(never)]
fn redirect_translated<F: FlowScratch + Network + Route>(skb: *mut __sk_buff, network: u32) -> i32 {
    let Some(scratch) = F::scratch() else { return NOT_THIS };
    // SAFETY: fields of the context.
    let (kind, is_tagged) = unsafe { ((*skb).pkt_type, (*skb).vlan_present != 0) };
    // For other link addresses, flooded by a switch: the stack drops these.
    if network != BARE && kind != PACKET_HOST {
        return NOT_THIS;
    }
    // With id 0 the tag is a priority, for the link that the packet has come by.
    // SAFETY: the context of this program.
    if is_tagged && unsafe { bpf_skb_vlan_pop(skb) } != 0 {
        return NOT_THIS;
    }
    let Rewrite { source, destination, source_port, destination_port, .. } = &scratch.action.rewrite;
    let ends = (source, *source_port, destination, *destination_port);
    let target = |interface| {
        // SAFETY: read at once. An element that is removed meanwhile becomes no other interface's before the next change.
        let flags = unsafe { maps::interfaces.get(interface) }.map_or(0, |settings| settings.flags);
        if flags & INTERFACE_OF_UPLINK == 0 {
            None
        } else if flags & INTERFACE_WITHOUT_LINK_HEADERS == 0 {
            Some(Target::WithLinkHeaders)
        } else {
            Some(Target::WithoutLinkHeaders)
        }
    };
    redirect::<F>(skb, network, scratch, ends, target, Reason::SkippedStack)
}

/// An interface that packets may leave by.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Target {
    WithLinkHeaders,
    WithoutLinkHeaders,
}

/// `ends` are those that the packet has now.
#[inline(always)]
fn redirect<F: FlowScratch + Network + Route>(
    skb: *mut __sk_buff,
    network: u32,
    scratch: &Scratch<F::Address>,
    (source, source_port, destination, destination_port): (&F::Address, Port, &F::Address, Port),
    target: impl FnOnce(u32) -> Option<Target>,
    reason: Reason,
) -> i32 {
    let ctx = &TcContext::new(skb);
    let bytes = Skb::of(ctx);
    let Ok(begin) = bytes.read(network) else { return NOT_THIS };
    if has_options(begin) || !bytes.read(network + F::LIFETIME).is_ok_and(|[lifetime]: [u8; 1]| lifetime > 1)
    {
        return NOT_THIS;
    }
    let Scratch { packet, interface, .. } = scratch;
    let Ok(length) = u16::try_from(length_of_each(ctx, network, packet)) else { return NOT_THIS };
    let mut parameters = route::parameters::<F>(*interface, source, destination);
    route::set_transport(&mut parameters, packet.protocol, (source_port, destination_port), length);
    match route::look_up(skb.cast(), &mut parameters) {
        FOUND | NO_NEIGHBOUR => {}
        TOO_LONG => return NOT_THIS,
        _ => return NO_WAY,
    }
    let Some(target) = target(parameters.ifindex) else { return NO_WAY };
    let sent = if target == Target::WithLinkHeaders {
        // SAFETY: integers, whichever they are: of IPv4 only the first counts.
        let address = unsafe { parameters.__bindgen_anon_4.ipv6_dst };
        // A gateway may be of IPv6 where the packet is of IPv4, which the lookup tells.
        let mut next_hop = NextHop { nh_family: parameters.family.into(), ..no_next_hop() };
        next_hop.__bindgen_anon_1.ipv6_nh = address;
        // SAFETY: the parameters with their size; since 5.10. Without effect unless the program ends with this verdict.
        unsafe { bpf_redirect_neigh(parameters.ifindex, &raw mut next_hop, size_of::<NextHop>() as i32, 0) }
    } else {
        // A tunnel without fixed remote takes it from the route, which the kernel looks up again where no next hop is given.
        // SAFETY: as above.
        unsafe { bpf_redirect_neigh(parameters.ifindex, ptr::null_mut(), 0, 0) }
    };
    let Some(network) = with_link_header(skb, network) else { return NOT_THIS };
    match redirected(sent) {
        Some(verdict) if shorten_lifetime::<F, _>(bytes, network).is_ok() => {
            count(reason);
            verdict
        }
        Some(_) | None => NOT_THIS,
    }
}

/// Gives the packet room for a link header, which bpf_redirect_neigh expects, and takes off again. Answers with where its network header begins then.
#[inline(always)]
fn with_link_header(skb: *mut __sk_buff, network: u32) -> Option<u32> {
    if network != BARE {
        return Some(network);
    }
    // SAFETY: the context of this program.
    let grown = unsafe { bpf_skb_change_head(skb, ETHERNET, 0) };
    (grown == 0).then_some(ETHERNET)
}

/// By the first bytes of an IP header: the stack looks at options, or a pod could choose its way by source routing.
#[inline(always)]
fn has_options(header: [u8; 7]) -> bool {
    const IPV4_WITHOUT: u8 = 0x45;
    const IPV6: u8 = 6;
    const HOP_BY_HOP: u8 = 0;
    let [begin, .., next] = header;
    begin != IPV4_WITHOUT && (begin >> 4 != IPV6 || next == HOP_BY_HOP)
}

#[inline(always)]
fn no_next_hop() -> NextHop {
    // SAFETY: an integer and a union of integers: all zero is valid.
    unsafe { core::mem::zeroed() }
}
