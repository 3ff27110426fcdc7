//! Questions to the kernel's routing tables.

use core::ffi::c_void;

use aya_ebpf::{
    bindings::{__sk_buff, bpf_fib_lookup as FibLookup},
    helpers::bpf_fib_lookup,
};
use proxy_common::{
    family::{Family, V4, V6},
    packet::Packet,
    port::Port,
};

/// Answered by [`look_up`] where the packet is forwarded, and the next hop's link address is known.
pub(crate) const FOUND: i64 = 0;
/// Answered by [`look_up`] where the next hop's link address is not known yet: bpf_redirect_neigh asks for it.
pub(crate) const NO_NEIGHBOUR: i64 = 7;
/// Answered by [`look_up`] for addresses of the node, and where there is no route.
const NOT_FORWARDED: i64 = 4;
/// Answered by [`look_up`] where the packet's interface forwards nothing: the kernel has not looked
/// whose the address is.
const FORWARDING_IS_OFF: i64 = 5;
/// Answered by [`look_up`] where the packet is longer than what goes there.
pub(crate) const TOO_LONG: i64 = 8;

/// How a family's addresses lie in the parameters of a route lookup.
pub(crate) trait Route: Family {
    fn set_addresses(parameters: &mut FibLookup, source: &Self::Address, destination: &Self::Address);
}

impl Route for V4 {
    #[inline(always)]
    fn set_addresses(parameters: &mut FibLookup, source: &[u8; 4], destination: &[u8; 4]) {
        const AF_INET: u8 = 2;
        parameters.family = AF_INET;
        parameters.__bindgen_anon_3.ipv4_src = u32::from_ne_bytes(*source);
        parameters.__bindgen_anon_4.ipv4_dst = u32::from_ne_bytes(*destination);
    }
}

impl Route for V6 {
    #[inline(always)]
    fn set_addresses(parameters: &mut FibLookup, source: &[u8; 16], destination: &[u8; 16]) {
        const AF_INET6: u8 = 10;
        parameters.family = AF_INET6;
        parameters.__bindgen_anon_3.ipv6_src = words(source);
        parameters.__bindgen_anon_4.ipv6_dst = words(destination);
    }
}

#[inline(always)]
fn words(address: &[u8; 16]) -> [u32; 4] {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *address;
    [
        u32::from_ne_bytes([a, b, c, d]),
        u32::from_ne_bytes([e, f, g, h]),
        u32::from_ne_bytes([i, j, k, l]),
        u32::from_ne_bytes([m, n, o, p]),
    ]
}

/// Of a packet between these ends that has come by this interface.
#[inline(always)]
pub(crate) fn parameters<F: Route>(
    interface: u32,
    source: &F::Address,
    destination: &F::Address,
) -> FibLookup {
    // SAFETY: integers and unions of integers: all zero is valid.
    let mut parameters: FibLookup = unsafe { core::mem::zeroed() };
    F::set_addresses(&mut parameters, source, destination);
    parameters.ifindex = interface;
    parameters
}

/// For rules by protocol and ports, and what is longer than what goes there.
#[inline(always)]
pub(crate) fn set_transport(
    parameters: &mut FibLookup,
    protocol: u8,
    (source, destination): (Port, Port),
    length: u16,
) {
    parameters.l4_protocol = protocol;
    parameters.sport = u16::from_ne_bytes(source.to_network());
    parameters.dport = u16::from_ne_bytes(destination.to_network());
    parameters.__bindgen_anon_1.tot_len = length;
}

/// Answers with `BPF_FIB_LKUP_RET_*`, or with a negative error. `ctx`: of the running program.
#[inline(always)]
pub(crate) fn look_up(ctx: *mut c_void, parameters: &mut FibLookup) -> i64 {
    // SAFETY: the context of this program, and the parameters with their size.
    unsafe { bpf_fib_lookup(ctx, parameters, size_of::<FibLookup>() as i32, 0) }
}

/// Returns 1 if the kernel would send the packet on, or a route says that nobody gets it. Where the
/// kernel cannot tell, the packet is left to it.
// Not inlined: the parameters would lie on the stack beside what opening a flow needs.
#[inline(never)]
pub(crate) fn is_forwarded<F: Route>(ctx: *mut __sk_buff, packet: &Packet<F::Address>) -> u32 {
    // SAFETY: a field of the context.
    let interface = unsafe { (*ctx).ifindex };
    let mut parameters = parameters::<F>(interface, &packet.source, &packet.destination);
    let ports = (packet.source_port, packet.destination_port);
    // Without a length: it is not asked whether the packet is too long.
    set_transport(&mut parameters, packet.protocol, ports, 0);
    let found = look_up(ctx.cast(), &mut parameters);
    u32::from(found >= 0 && found != NOT_FORWARDED && found != FORWARDING_IS_OFF)
}
