//! The entry points, by the names under which the controller attaches them.

#![expect(unreachable_pub, reason = "the macros export what they wrap")]

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};

use crate::socket;

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
