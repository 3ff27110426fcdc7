//! The entry points, by the names under which the controller attaches them.

#![expect(unreachable_pub, reason = "the macros export what they wrap")]

use aya_ebpf::{
    macros::{cgroup_sock, cgroup_sock_addr, classifier, xdp},
    programs::{SockAddrContext, SockContext, TcContext, XdpContext},
};
use proxy_common::select::Origin;

use crate::{
    bytes::frame::{BARE, ETHERNET, Frame},
    socket, tc,
    xdp::forward,
};

macro_rules! socket_hooks {
    ($($hook:ident: $attach_type:ident;)+) => {
        $(
            #[cgroup_sock_addr($hook)]
            pub fn $hook(ctx: SockAddrContext) -> i32 {
                socket::$hook(&ctx)
            }
        )+
    };
}

proxy_common::socket_programs!(socket_hooks);

#[cgroup_sock(sock_release)]
pub fn sock_release(ctx: SockContext) -> i32 {
    socket::sock_release(&ctx)
}

#[cgroup_sock_addr(connect4)]
pub fn learn_namespace(ctx: SockAddrContext) -> i32 {
    socket::learn_namespace(&ctx)
}

macro_rules! on_packet {
    (Ingress, $ctx:expr, $network:expr, $peers:expr) => {
        tc::ingress($ctx, $network, $peers)
    };
    (Egress, $ctx:expr, $network:expr, $peers:expr) => {
        tc::egress($ctx, $network, $peers)
    };
}

/// The origin of clients behind an interface of this role.
macro_rules! peers {
    (Workload) => {
        Origin::Workload
    };
    (Uplink) => {
        Origin::Outside
    };
}

macro_rules! packet_hooks {
    ($($name:ident: ($role:ident, $direction:ident, $ethernet:literal);)+) => {
        $(
            #[classifier]
            pub fn $name(ctx: TcContext) -> i32 {
                on_packet!($direction, &ctx, if $ethernet { ETHERNET } else { BARE }, peers!($role))
            }
        )+
    };
}

proxy_common::packet_programs!(packet_hooks);

#[xdp]
pub fn xdp_forward(ctx: XdpContext) -> u32 {
    forward(Frame::whole(ctx.ctx))
}

#[xdp(frags)]
pub fn xdp_forward_frags(ctx: XdpContext) -> u32 {
    forward(Frame::in_fragments(ctx.ctx))
}
