//! Answers to pings of ClusterIPs (`ebpf.answerPing`): the node itself answers for whoever serves them.

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use proxy_common::{
    map_access::Maps,
    packet::{Packet, echo},
    unserved,
};

use crate::{
    bytes::skb::Skb,
    maps::map_access::KernelMaps,
    tc::refuse::{AnswerPath, Refuse, send_back},
};

/// Answered by [`answer`] where the packet is not such a ping. No error number of a helper.
pub(crate) const NOT_ONE: i64 = i64::MIN;

/// Turns the ping into its answer and sends it back. Answers with what is to become of it, with a negative error, or with [`NOT_ONE`].
// Not inlined: it would need stack on the way of each packet.
#[inline(never)]
pub(crate) fn answer<F: Refuse>(
    skb: *mut __sk_buff,
    network: u32,
    packet: &mut Packet<F::Address>,
    path: AnswerPath,
) -> i64
where
    KernelMaps: Maps<F>,
{
    let ctx = &TcContext::new(skb);
    let is_ping = echo::parse::<F, _>(Skb::of(ctx), network, packet).is_ok();
    if !is_ping || !unserved::is_cluster_ip(&KernelMaps, &packet.destination) {
        return NOT_ONE;
    }
    let turned =
        F::turn_around(ctx, packet).is_ok() && echo::make_reply::<F, _>(Skb::of(ctx), packet).is_ok();
    if !turned {
        return -1;
    }
    send_back(ctx, network, path).unwrap_or_else(|error| -error.abs())
}
