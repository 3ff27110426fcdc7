//! Packets of the node's own processes, where no socket hook sends them (`socketLoadBalancing: off`).
//!
//! Such a packet is routed towards the frontend, and only on the uplink's egress is it seen: translated there, it is
//! handed to the interface that leads to the backend. The answer must come in where a packet from the
//! frontend would, or reverse path filtering drops it: one that comes from a pod is moved to the uplink's
//! ingress, and translated there.

use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_INGRESS, TC_ACT_REDIRECT},
    helpers::{bpf_redirect, bpf_redirect_neigh, bpf_skb_change_type},
    programs::TcContext,
};
use proxy_common::packet::Rewrite;

use crate::route::{self, FOUND, NO_NEIGHBOUR, Route};

/// Was the packet made on this node, not forwarded?
#[inline(always)]
pub(crate) fn is_local(ctx: &TcContext) -> bool {
    // SAFETY: a field of the context.
    unsafe { (*ctx.skb.skb).ingress_ifindex == 0 }
}

/// The interface that a packet to `destination` leaves by; 0: this node itself, or no route.
// Not inlined: the parameters would lie on the stack beside what opening a flow needs.
#[inline(never)]
fn interface_to<F: Route>(ctx: *mut __sk_buff, source: &F::Address, destination: &F::Address) -> u32 {
    // SAFETY: a field of the context.
    let mut parameters = route::parameters::<F>(unsafe { (*ctx).ifindex }, source, destination);
    let found = route::look_up(ctx.cast(), &mut parameters);
    if found == FOUND || found == NO_NEIGHBOUR { parameters.ifindex } else { 0 }
}

/// Sends a translated packet towards its new destination. None: it goes on as it was routed.
#[inline(always)]
pub(crate) fn reroute<F: Route>(ctx: &TcContext, rewrite: &Rewrite<F::Address>) -> Option<i32> {
    let interface = interface_to::<F>(ctx.skb.skb, &rewrite.source, &rewrite.destination);
    if interface == 0 {
        return None;
    }
    // SAFETY: without parameters the kernel looks the neighbour up itself; since 5.10.
    redirected(unsafe { bpf_redirect_neigh(interface, core::ptr::null_mut(), 0, 0) })
}

/// Redirects a pod's answer to the uplink's ingress, where reverse path filtering accepts the frontend's address: it is translated there.
#[inline(always)]
pub(crate) fn to_uplink<F: Route>(ctx: &TcContext, rewrite: &Rewrite<F::Address>) -> Option<i32> {
    let interface = interface_to::<F>(ctx.skb.skb, &rewrite.destination, &rewrite.source);
    if interface == 0 {
        return None;
    }
    // SAFETY: no pointers.
    redirected(unsafe { bpf_redirect(interface, u64::from(BPF_F_INGRESS)) })
}

#[inline(always)]
pub(crate) fn redirected(action: i64) -> Option<i32> {
    (action == i64::from(TC_ACT_REDIRECT)).then_some(action as i32)
}

/// Of `pkt_type`: for the link address of the interface that the packet has come by.
pub(crate) const PACKET_HOST: u32 = 0;

/// A redirected packet has the link address of another interface, so the kernel has made it PACKET_OTHERHOST.
#[inline(always)]
pub(crate) fn accept(ctx: &TcContext) {
    // SAFETY: the context of this program. Fails for no type that a received packet has.
    let _changed = unsafe { bpf_skb_change_type(ctx.skb.skb, PACKET_HOST) };
}
