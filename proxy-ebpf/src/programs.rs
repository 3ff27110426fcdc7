//! The entry points, by the names under which the controller attaches them.

#![expect(unreachable_pub, reason = "the macros export what they wrap")]

use aya_ebpf::{
    macros::{cgroup_sock_addr, classifier},
    programs::{SockAddrContext, TcContext},
};
use proxy_common::select::Origin;

use crate::{
    socket,
    tc::{self, BARE, ETHERNET},
};

macro_rules! socket_hooks {
    ($($hook:ident)+) => {
        $(
            #[cgroup_sock_addr($hook)]
            pub fn $hook(ctx: SockAddrContext) -> i32 {
                socket::$hook(&ctx)
            }
        )+
    };
}

socket_hooks! { connect4 connect6 sendmsg4 sendmsg6 recvmsg4 recvmsg6 getpeername4 getpeername6 }

#[cgroup_sock_addr(connect4)]
pub fn learn_namespace(ctx: SockAddrContext) -> i32 {
    socket::learn_namespace(&ctx)
}

macro_rules! packet_hooks {
    ($($name:ident: $direction:ident, $network:expr, $peers:expr;)+) => {
        $(
            #[classifier]
            pub fn $name(ctx: TcContext) -> i32 {
                tc::$direction(&ctx, $network, $peers)
            }
        )+
    };
}

packet_hooks! {
    workload_ingress: ingress, ETHERNET, Origin::Workload;
    workload_ingress_l3: ingress, BARE, Origin::Workload;
    workload_egress: egress, ETHERNET, Origin::Workload;
    workload_egress_l3: egress, BARE, Origin::Workload;
    uplink_ingress: ingress, ETHERNET, Origin::Outside;
    uplink_ingress_l3: ingress, BARE, Origin::Outside;
    uplink_egress: egress, ETHERNET, Origin::Outside;
    uplink_egress_l3: egress, BARE, Origin::Outside;
}
