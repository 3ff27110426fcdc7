//! Answers to sockets of the node that have a ClusterIP as their own address.
//!
//! kube-proxy's mode ipvs adds the ClusterIPs to the node, and from one of IPv6 the kernel sends to pods whose interfaces have no
//! address. Where kube-proxy comes back, these programs run until they are removed.

use aya_ebpf::{
    bindings::BPF_F_CURRENT_NETNS,
    helpers::{bpf_sk_lookup_udp, bpf_sk_release},
    programs::TcContext,
};
use proxy_common::packet::{Network, Packet};

/// The kernel's `bpf_sock_tuple`, whose length says which family it is of. Ports in network order.
#[repr(C)]
struct Tuple<A> {
    remote: A,
    local: A,
    remote_port: [u8; 2],
    local_port: [u8; 2],
}

/// Is a UDP socket of this network namespace connected to the datagram's source?
// Not inlined: the tuple would lie on the stack beside what opening a flow needs.
#[inline(never)]
pub(crate) fn is_by_socket<F: Network>(ctx: &TcContext, packet: &Packet<F::Address>) -> bool {
    let mut tuple = Tuple {
        remote: packet.source,
        local: packet.destination,
        remote_port: packet.source_port.to_network(),
        local_port: packet.destination_port.to_network(),
    };
    // SAFETY: the context of this program, and a tuple of the length that is told; since 4.20.
    let socket = unsafe {
        bpf_sk_lookup_udp(
            ctx.skb.skb.cast(),
            (&raw mut tuple).cast(),
            size_of::<Tuple<F::Address>>() as u32,
            BPF_F_CURRENT_NETNS as i64 as u64,
            0,
        )
    };
    if socket.is_null() {
        return false;
    }
    // SAFETY: the kernel has found it and holds it. A socket without peer takes datagrams from anybody.
    let is_connected = unsafe { (*socket).dst_port } != 0;
    // SAFETY: it is held, and not used after this.
    let _released = unsafe { bpf_sk_release(socket.cast()) };
    is_connected
}
