//! A pod's answer to packets that XDP sends to the pod. It leaves without the stack too, so that connection tracking sees neither direction, and is
//! translated at the egress of the uplink, as all are.

use aya_ebpf::{
    bindings::{__sk_buff, TC_ACT_UNSPEC, bpf_redir_neigh as NextHop},
    helpers::bpf_redirect_neigh,
    programs::TcContext,
};
use proxy_common::{
    flow::{FlowTables, Scratch, not_past_stack},
    packet::{Bytes as _, Network, shorten_lifetime},
    reason::Reason,
};

use crate::{
    flow::FlowScratch,
    host::redirected,
    maps,
    route::{self, FOUND, NO_NEIGHBOUR, Route, TOO_LONG},
    skb::Skb,
    tables::{Maps, count},
    tunnel::length_of_each,
};

/// Sends the packet of the family's `Scratch` where the stack would. `TC_ACT_UNSPEC`: it is untouched, and the stack's, which tells its sender what
/// is wrong with it.
#[inline(always)]
pub(crate) fn send<F: FlowScratch + Network + Route>(skb: *mut __sk_buff, network: u32) -> i32
where
    Maps: FlowTables<F>,
{
    match redirect::<F>(skb, network) {
        refusal @ (NO_WAY | NOT_THIS) => {
            if let Some(scratch) = F::scratch() {
                not_past_stack(&Maps, scratch, refusal == NOT_THIS);
            }
            TC_ACT_UNSPEC
        }
        verdict => verdict,
    }
}

/// Answered by [`redirect`]: the routing tables do not lead to an uplink with XDP.
const NO_WAY: i32 = i32::MIN;
/// As above: this packet is the stack's.
const NOT_THIS: i32 = i32::MIN + 1;

// Not inlined, for its stack.
#[inline(never)]
fn redirect<F: FlowScratch + Network + Route>(skb: *mut __sk_buff, network: u32) -> i32 {
    let ctx = &TcContext::new(skb);
    let bytes = Skb::of(ctx);
    let (Some(scratch), Ok(begin)) = (F::scratch(), bytes.read(network)) else { return NOT_THIS };
    if has_options(begin) || !bytes.read(network + F::LIFETIME).is_ok_and(|[lifetime]: [u8; 1]| lifetime > 1)
    {
        return NOT_THIS;
    }
    let Scratch { packet, interface, .. } = &*scratch;
    let (Ok(length), source, destination) =
        (u16::try_from(length_of_each(ctx, network, packet)), &packet.source, &packet.destination)
    else {
        return NOT_THIS;
    };
    let mut parameters = route::parameters::<F>(*interface, source, destination);
    let ports = (packet.source_port, packet.destination_port);
    route::set_transport(&mut parameters, packet.protocol, ports, length);
    match route::look_up(skb.cast(), &mut parameters) {
        FOUND | NO_NEIGHBOUR => {}
        TOO_LONG => return NOT_THIS,
        _ => return NO_WAY,
    }
    // SAFETY: not read.
    if unsafe { maps::redirect_sources.get(parameters.ifindex) }.is_none() {
        return NO_WAY;
    }
    // SAFETY: integers, whichever they are: of IPv4 only the first counts.
    let address = unsafe { parameters.__bindgen_anon_4.ipv6_dst };
    // A gateway may be of IPv6 where the packet is of IPv4, which the lookup tells.
    let mut next_hop = NextHop { nh_family: parameters.family.into(), ..no_next_hop() };
    next_hop.__bindgen_anon_1.ipv6_nh = address;
    // SAFETY: the parameters with their size; since 5.10. Without effect unless the program ends with this verdict.
    let verdict = redirected(unsafe {
        bpf_redirect_neigh(parameters.ifindex, &raw mut next_hop, size_of::<NextHop>() as i32, 0)
    });
    match verdict {
        Some(verdict) if shorten_lifetime::<F, _>(bytes, network).is_ok() => {
            count(Reason::AnswerPastStack);
            verdict
        }
        Some(_) | None => NOT_THIS,
    }
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
