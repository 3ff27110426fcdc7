//! Asks the kernel about a packet that enters the node: about the sockets of the pod that it comes
//! from, in the pod's network namespace, and whether the packet would be forwarded.

use core::{
    marker::PhantomData,
    mem::size_of_val,
    ptr::{addr_of, addr_of_mut, read_volatile},
};

use aya_ebpf::{
    bindings::{__sk_buff, bpf_sock},
    helpers::{bpf_sk_lookup_tcp, bpf_sk_lookup_udp, bpf_sk_release},
    programs::TcContext,
};
use proxy_common::{
    family::{Family, V4, V6},
    flow::{PodSockets, Scratch},
    layout::INTERFACE_OF_UPLINK,
    packet::End,
};

use crate::{
    maps,
    route::{self, Route},
};

/// Makes the tuple that the helpers take for the ends of a packet to the socket.
pub(crate) trait SocketTuple: Family {
    type Tuple;

    fn tuple(source: End<Self::Address>, destination: End<Self::Address>) -> Self::Tuple;
}

/// `bpf_sock_tuple`: addresses, then ports, all in network order.
#[repr(C)]
pub(crate) struct Tuple<A> {
    source: A,
    destination: A,
    source_port: [u8; 2],
    destination_port: [u8; 2],
}

macro_rules! tuples {
    ($($family:ty),+) => { $(
        impl SocketTuple for $family {
            type Tuple = Tuple<Self::Address>;

            #[inline(always)]
            fn tuple(source: End<Self::Address>, destination: End<Self::Address>) -> Self::Tuple {
                Tuple {
                    source: source.0,
                    destination: destination.0,
                    source_port: source.1.number().to_be_bytes(),
                    destination_port: destination.1.number().to_be_bytes(),
                }
            }
        }
    )+ };
}

tuples!(V4, V6);

/// The sockets of the pod at the interface of a packet.
pub(crate) struct SocketsAt<'a, F>(&'a TcContext, PhantomData<F>);

impl<'a, F> SocketsAt<'a, F> {
    #[inline(always)]
    pub(crate) const fn new(ctx: &'a TcContext) -> Self {
        Self(ctx, PhantomData)
    }
}

impl<F: SocketTuple + Route> PodSockets<F::Address> for SocketsAt<'_, F> {
    #[inline(always)]
    fn is_connected(&self, scratch: &Scratch<F::Address>) -> bool {
        is_connected::<F>(self.0.skb.skb, scratch) != 0
    }

    #[inline(always)]
    fn stays_here(&self, scratch: &Scratch<F::Address>) -> bool {
        let skb = self.0.skb.skb;
        (scratch.is_from_outside() && is_flooded(skb) != 0)
            || route::is_forwarded::<F>(skb, &scratch.packet) == 0
    }
}

/// Returns 1 for a frame by an uplink that is addressed to another host. A switch has flooded it,
/// and its connection may be another node's.
// Not inlined: the branches would be verified with what opening a flow needs.
#[inline(never)]
fn is_flooded(skb: *mut __sk_buff) -> u32 {
    const PACKET_OTHERHOST: u32 = 3;
    // SAFETY: fields of the context.
    let (kind, interface) = unsafe { ((*skb).pkt_type, (*skb).ifindex) };
    // SAFETY: copied at once, as in `is_connected`.
    let flags = unsafe { maps::interfaces.get(interface) }.map_or(0, |settings| settings.flags);
    u32::from(kind == PACKET_OTHERHOST && flags & INTERFACE_OF_UPLINK != 0)
}

// Not inlined: the tuple would lie on the stack beside what opening a flow needs.
#[inline(never)]
fn is_connected<F: SocketTuple>(skb: *mut __sk_buff, scratch: &Scratch<F::Address>) -> u32 {
    // SAFETY: copied at once. An element that is removed meanwhile becomes no other interface's
    // before the next change.
    let Some(namespace) = (unsafe { maps::pod_namespaces.get(scratch.interface) }) else { return 0 };
    // Less than 0: the node's own.
    let namespace = i64::from(namespace.cast_signed()).cast_unsigned();
    let [backend, client] = scratch.direct_ends();
    let mut tuple = F::tuple(backend, client);
    let size = size_of_val(&tuple) as u32;
    let ends = addr_of_mut!(tuple).cast();
    if scratch.packet.is_tcp() {
        // SAFETY: the ends are as long as one of the two forms of a tuple; since 4.20.
        has_peer(unsafe { bpf_sk_lookup_tcp(skb.cast(), ends, size, namespace, 0) })
    } else {
        // SAFETY: as above.
        has_peer(unsafe { bpf_sk_lookup_udp(skb.cast(), ends, size, namespace, 0) })
    }
}

/// Returns 1 for a socket that is connected, and not one that listens, and gives it back.
#[inline(always)]
fn has_peer(socket: *mut bpf_sock) -> u32 {
    if socket.is_null() {
        return 0;
    }
    // SAFETY: the helper has answered with a socket, which is there until it is given back.
    let port = unsafe { read_volatile(addr_of!((*socket).dst_port)) };
    // SAFETY: as above.
    unsafe { bpf_sk_release(socket.cast()) };
    u32::from(port != 0)
}
