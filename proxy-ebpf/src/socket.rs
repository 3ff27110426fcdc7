//! Socket hooks: a connection or datagram to a service is sent to a backend before there is a packet, and the
//! application still sees the address it dialled.

use core::ptr::{self, addr_of, addr_of_mut, read_volatile, write_volatile};

use aya_ebpf::{
    EbpfContext as _,
    helpers::{
        bpf_get_netns_cookie, bpf_get_prandom_u32, bpf_get_socket_cookie, bpf_set_retval,
        generated::bpf_sk_storage_get,
    },
    programs::{SockAddrContext, SockContext},
};
use proxy_common::{
    event::EventKind,
    family::{Destination, Family, V4, V6},
    layout::*,
    map_access::AffinityMaps,
    port::Port,
    reason::{Reason, Verdict},
    select::Origin,
    socket, unserved,
};

use crate::{
    event::tell_socket,
    globals,
    log::LogAddress,
    maps::{
        connections::{count_socket_closed, count_socket_opened},
        map_access::{KernelMaps, SocketMaps, count, count_connection, lease_has_ended, now, settings},
    },
};

/// The system call goes on.
const PROCEED: i32 = 1;
/// The system call fails, with EPERM unless another error was set.
const FAIL: i32 = 0;
const ECONNREFUSED: i32 = 111;

/// How an address lies in the context.
pub(crate) trait AddressFormat {
    type Family: SocketMaps<Address: LogAddress>;

    fn read(ctx: &SockAddrContext) -> <Self::Family as Family>::Address;
    fn write(ctx: &SockAddrContext, address: &<Self::Family as Family>::Address);
}

/// IPv4 in an IPv4 socket.
pub(crate) struct Inet4;
/// IPv4 in an IPv6 socket: `::ffff:a.b.c.d`.
struct Mapped4;
/// IPv6.
struct Inet6;

impl AddressFormat for Inet4 {
    type Family = V4;

    #[inline(always)]
    fn read(ctx: &SockAddrContext) -> [u8; 4] {
        // SAFETY: a field of the context.
        unsafe { read_volatile(addr_of!((*ctx.sock_addr).user_ip4)) }.to_ne_bytes()
    }

    #[inline(always)]
    fn write(ctx: &SockAddrContext, address: &[u8; 4]) {
        // SAFETY: a field of the context that these hooks may write.
        unsafe { write_volatile(addr_of_mut!((*ctx.sock_addr).user_ip4), u32::from_ne_bytes(*address)) };
    }
}

#[inline(always)]
fn word6(ctx: &SockAddrContext, index: usize) -> u32 {
    // SAFETY: a field of the context; index is a constant below 4 at every call.
    unsafe { read_volatile(addr_of!((*ctx.sock_addr).user_ip6).cast::<u32>().add(index)) }
}

#[inline(always)]
fn set_word6(ctx: &SockAddrContext, index: usize, word: u32) {
    // SAFETY: as for `word6`; these hooks may write it.
    unsafe { write_volatile(addr_of_mut!((*ctx.sock_addr).user_ip6).cast::<u32>().add(index), word) };
}

impl AddressFormat for Mapped4 {
    type Family = V4;

    #[inline(always)]
    fn read(ctx: &SockAddrContext) -> [u8; 4] {
        word6(ctx, 3).to_ne_bytes()
    }

    #[inline(always)]
    fn write(ctx: &SockAddrContext, address: &[u8; 4]) {
        set_word6(ctx, 3, u32::from_ne_bytes(*address));
    }
}

impl AddressFormat for Inet6 {
    type Family = V6;

    #[inline(always)]
    fn read(ctx: &SockAddrContext) -> [u8; 16] {
        let mut address = [0; 16];
        let (a, b, c, d) = (word6(ctx, 0), word6(ctx, 1), word6(ctx, 2), word6(ctx, 3));
        address[0..4].copy_from_slice(&a.to_ne_bytes());
        address[4..8].copy_from_slice(&b.to_ne_bytes());
        address[8..12].copy_from_slice(&c.to_ne_bytes());
        address[12..16].copy_from_slice(&d.to_ne_bytes());
        address
    }

    #[inline(always)]
    fn write(ctx: &SockAddrContext, address: &[u8; 16]) {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *address;
        set_word6(ctx, 0, u32::from_ne_bytes([a, b, c, d]));
        set_word6(ctx, 1, u32::from_ne_bytes([e, f, g, h]));
        set_word6(ctx, 2, u32::from_ne_bytes([i, j, k, l]));
        set_word6(ctx, 3, u32::from_ne_bytes([m, n, o, p]));
    }
}

/// Does the IPv6 socket talk to an IPv4-mapped address?
#[inline(always)]
fn is_mapped(ctx: &SockAddrContext) -> bool {
    word6(ctx, 0) == 0 && word6(ctx, 1) == 0 && word6(ctx, 2) == u32::from_be(0xffff)
}

#[inline(always)]
fn port(ctx: &SockAddrContext) -> Port {
    // SAFETY: a field of the context; holds the port in network order in its first two bytes.
    let port = unsafe { read_volatile(addr_of!((*ctx.sock_addr).user_port)) };
    Port::from_network((port as u16).to_ne_bytes())
}

#[inline(always)]
fn set_port(ctx: &SockAddrContext, port: Port) {
    let port = u32::from(u16::from_ne_bytes(port.to_network()));
    // SAFETY: a field of the context that these hooks may write.
    unsafe { write_volatile(addr_of_mut!((*ctx.sock_addr).user_port), port) };
}

/// IANA number of the socket's protocol, if it is one that services have.
#[inline(always)]
fn protocol(ctx: &SockAddrContext) -> Option<u8> {
    // SAFETY: a field of the context.
    match unsafe { read_volatile(addr_of!((*ctx.sock_addr).protocol)) } {
        6 => Some(PROTOCOL_TCP),
        17 => Some(PROTOCOL_UDP),
        _ => None,
    }
}

#[inline(always)]
fn destination<F: AddressFormat>(
    ctx: &SockAddrContext,
    protocol: u8,
) -> Destination<<F::Family as Family>::Address> {
    Destination { address: F::read(ctx), port: port(ctx), protocol }
}

#[inline(always)]
fn redirect<F: AddressFormat>(ctx: &SockAddrContext, origin: &SocketOrigin<<F::Family as Family>::Address>) {
    F::write(ctx, &origin.backend);
    set_port(ctx, origin.backend_port());
}

/// Cookie of the socket's network namespace.
#[inline(always)]
fn namespace(ctx: &SockAddrContext) -> u64 {
    // SAFETY: the context of this program; the helper is there since 5.7.
    unsafe { bpf_get_netns_cookie(ctx.as_ptr()) }
}

/// Is the socket the node's own?
#[inline(always)]
fn origin(ctx: &SockAddrContext) -> Origin {
    match settings() {
        Some(settings) if settings.host_namespace == namespace(ctx) => Origin::Host,
        _ => Origin::Workload,
    }
}

/// Are this socket's connections ours to send? With `socketLoadBalancing: host` only those of the node itself.
#[inline(always)]
fn serves(origin: Origin) -> bool {
    globals::SOCKET_HOST_ONLY.load() != globals::ON || origin == Origin::Host
}

/// A backend, unless the lease has ended: then a destination is as one that is no service's, which also clears what the
/// socket remembers of it.
#[inline(always)]
fn choose<F: AddressFormat>(
    destination: &Destination<<F::Family as Family>::Address>,
    origin: Origin,
    ended: bool,
) -> Result<SocketOrigin<<F::Family as Family>::Address>, Reason>
where
    KernelMaps: AffinityMaps<F::Family>,
{
    if ended { Err(Reason::NotAService) } else { socket::connect(&KernelMaps, destination, origin, random()) }
}

#[inline(always)]
fn random() -> u32 {
    // SAFETY: no arguments.
    unsafe { bpf_get_prandom_u32() }
}

/// The one place where a reason ends a system call that named `destination`; `sent_to`: the backend in its place.
// Not inlined: what it needs of the stack would be added to what choosing a backend needs.
#[inline(never)]
fn conclude<A: LogAddress>(
    reason: Reason,
    destination: &Destination<A>,
    sent_to: Option<&SocketOrigin<A>>,
) -> i32 {
    if reason as u32 != Reason::NotAService as u32 {
        count(reason);
    }
    if EventKind::of(reason).is_some() {
        tell_socket(reason as u32, destination, sent_to);
    }
    match reason.verdict() {
        Verdict::Pass => PROCEED,
        // A dropped connect() would wait for its timeout: an error ends it at once.
        Verdict::Refuse | Verdict::Drop => {
            if globals::CAN_REFUSE.load() == globals::ON {
                // SAFETY: no pointers; the verifier prunes the call where the helper is missing (before 5.18).
                unsafe { bpf_set_retval(-ECONNREFUSED) };
            }
            FAIL
        }
    }
}

#[inline(always)]
pub(crate) fn connect4(ctx: &SockAddrContext) -> i32 {
    connect::<Inet4>(ctx)
}

#[inline(always)]
pub(crate) fn connect6(ctx: &SockAddrContext) -> i32 {
    if is_mapped(ctx) { connect::<Mapped4>(ctx) } else { connect::<Inet6>(ctx) }
}

#[inline(always)]
fn connect<F: AddressFormat>(ctx: &SockAddrContext) -> i32
where
    KernelMaps: AffinityMaps<F::Family>,
{
    let Some(protocol) = protocol(ctx) else { return PROCEED };
    let origin = origin(ctx);
    if !serves(origin) {
        return PROCEED;
    }
    let destination = destination::<F>(ctx, protocol);
    match choose::<F>(&destination, origin, lease_has_ended(now)) {
        Ok(new) => {
            let Some(known) = stored_or_new(ctx, <F::Family as SocketMaps>::socket_origin()) else {
                return conclude(Reason::SocketStorageFull, &destination, None);
            };
            stop_counting(known);
            *known = new;
            count_socket_opened(new.backend_id, new.is_counted().into());
            redirect::<F>(ctx, &new);
            count_connection(new.service());
            conclude(Reason::SocketConnected, &destination, Some(&new))
        }
        Err(reason) => {
            // The socket may have been connected to a service before.
            forget_origin::<F>(ctx);
            if protocol == PROTOCOL_UDP {
                if let Some(known) = stored(ctx, <F::Family as SocketMaps>::datagram_origins()) {
                    socket::clear_origins_of_backend(known, &destination);
                }
            }
            conclude(unserved::at_connect(reason, protocol), &destination, None)
        }
    }
}

#[inline(always)]
pub(crate) fn sendmsg4(ctx: &SockAddrContext) -> i32 {
    sendmsg::<Inet4>(ctx)
}

#[inline(always)]
pub(crate) fn sendmsg6(ctx: &SockAddrContext) -> i32 {
    if is_mapped(ctx) { sendmsg::<Mapped4>(ctx) } else { sendmsg::<Inet6>(ctx) }
}

#[inline(always)]
fn sendmsg<F: AddressFormat>(ctx: &SockAddrContext) -> i32
where
    KernelMaps: AffinityMaps<F::Family>,
{
    let origin = origin(ctx);
    if !serves(origin) {
        return PROCEED;
    }
    let destination = destination::<F>(ctx, PROTOCOL_UDP);
    let ended = lease_has_ended(now);
    if let Some(peer) = peer::<F>(ctx) {
        if !ended && socket::remembered_peer(&KernelMaps, peer, &destination, origin) {
            redirect::<F>(ctx, peer);
            return PROCEED;
        }
    }
    let storage = <F::Family as SocketMaps>::datagram_origins();
    if !ended && let Some(known) = stored(ctx, storage) {
        if let Some(same) = socket::remembered(&KernelMaps, known, &destination, origin) {
            redirect::<F>(ctx, &same);
            return PROCEED;
        }
    }
    match choose::<F>(&destination, origin, ended) {
        Ok(new) => {
            let Some(known) = stored_or_new(ctx, storage) else {
                return conclude(Reason::SocketStorageFull, &destination, None);
            };
            socket::remember(known, &new);
            redirect::<F>(ctx, &new);
            count_connection(new.service());
            conclude(Reason::SocketSent, &destination, Some(&new))
        }
        Err(reason) => {
            if let Some(known) = stored(ctx, storage) {
                socket::clear_origins_of_backend(known, &destination);
            }
            // A socket connected to a service keeps its origin: the kernel itself names the backend here, when an
            // IPv4-mapped socket sends without an address.
            conclude(reason, &destination, None)
        }
    }
}

#[inline(always)]
pub(crate) fn recvmsg4(ctx: &SockAddrContext) -> i32 {
    recvmsg::<Inet4>(ctx)
}

#[inline(always)]
pub(crate) fn recvmsg6(ctx: &SockAddrContext) -> i32 {
    if is_mapped(ctx) { recvmsg::<Mapped4>(ctx) } else { recvmsg::<Inet6>(ctx) }
}

/// The sender of a datagram, as the application knows it.
#[inline(always)]
fn recvmsg<F: AddressFormat>(ctx: &SockAddrContext) -> i32 {
    // One after the other: the verifier forbids what `or` of two pointers compiles to.
    if let Some(origin) = peer::<F>(ctx) {
        if let Some(shown) = socket::shown(origin, &F::read(ctx), port(ctx)) {
            show::<F>(ctx, shown);
            return PROCEED;
        }
    }
    if let Some(origins) = stored(ctx, <F::Family as SocketMaps>::datagram_origins()) {
        if let Some(shown) = socket::shown_datagram(origins, &F::read(ctx), port(ctx)) {
            show::<F>(ctx, shown);
        }
    }
    PROCEED
}

#[inline(always)]
pub(crate) fn getpeername4(ctx: &SockAddrContext) -> i32 {
    getpeername::<Inet4>(ctx)
}

#[inline(always)]
pub(crate) fn getpeername6(ctx: &SockAddrContext) -> i32 {
    if is_mapped(ctx) { getpeername::<Mapped4>(ctx) } else { getpeername::<Inet6>(ctx) }
}

#[inline(always)]
fn getpeername<F: AddressFormat>(ctx: &SockAddrContext) -> i32 {
    if let Some(origin) = stored(ctx, <F::Family as SocketMaps>::socket_origin()) {
        if let Some(shown) = socket::shown(origin, &F::read(ctx), port(ctx)) {
            show::<F>(ctx, shown);
        }
    }
    PROCEED
}

#[inline(always)]
fn show<F: AddressFormat>(ctx: &SockAddrContext, (address, port): (<F::Family as Family>::Address, Port)) {
    F::write(ctx, &address);
    set_port(ctx, port);
}

/// Tells the controller which namespace it is in: kernels before 5.14 have no SO_NETNS_COOKIE.
#[inline(always)]
pub(crate) fn learn_namespace(ctx: &SockAddrContext) -> i32 {
    let Some(settings) = crate::maps::settings.get_ptr_mut(0) else { return PROCEED };
    // SAFETY: the context of this program.
    let socket = unsafe { bpf_get_socket_cookie(ctx.as_ptr()) };
    // SAFETY: a map value in bounds.
    let probe = unsafe { read_volatile(addr_of!((*settings).probe_socket)) };
    if probe == socket {
        // SAFETY: a map value in bounds.
        unsafe { write_volatile(addr_of_mut!((*settings).host_namespace), namespace(ctx)) };
        // SAFETY: as above. Tells the controller that it was here.
        unsafe { write_volatile(addr_of_mut!((*settings).probe_socket), 0) };
    }
    PROCEED
}

type Storage<T> = aya_ebpf::btf_maps::SkStorage<T>;

#[inline(always)]
fn stored<T>(ctx: &SockAddrContext, storage: &'static Storage<T>) -> Option<&'static mut T> {
    // SAFETY: the socket of the context. The value lives as long as the socket, which outlives the program; it
    // is this socket's alone, and system calls that reach these hooks on one socket at once can at worst
    // mix two answers to a race that the application made.
    unsafe { storage.get_ptr_mut(ctx).as_mut() }
}

/// The origin of a datagram socket that is connected. `connect` with AF_UNSPEC ends a connection
/// and runs no program, so that the storage still has its origin.
#[inline(always)]
fn peer<F: AddressFormat>(
    ctx: &SockAddrContext,
) -> Option<&'static mut SocketOrigin<<F::Family as Family>::Address>> {
    /// The state of a datagram socket that is connected, named as that of a TCP socket.
    const ESTABLISHED: u32 = 1;
    // SAFETY: the socket of the context, which is there since 5.3.
    let state = unsafe { read_volatile(addr_of!((*(*ctx.sock_addr).__bindgen_anon_1.sk).state)) };
    if state == ESTABLISHED { stored(ctx, <F::Family as SocketMaps>::socket_origin()) } else { None }
}

#[inline(always)]
fn stored_or_new<T>(ctx: &SockAddrContext, storage: &'static Storage<T>) -> Option<&'static mut T> {
    // SAFETY: as for `stored`; a new value is all zero.
    unsafe { storage.get_or_insert_ptr_mut(ctx, None).as_mut() }
}

#[inline(always)]
fn forget_origin<F: AddressFormat>(ctx: &SockAddrContext) {
    let storage = <F::Family as SocketMaps>::socket_origin();
    if let Some(origin) = stored(ctx, storage) {
        stop_counting(origin);
        // SAFETY: the socket of the context.
        let socket = unsafe { (*ctx.sock_addr).__bindgen_anon_1.sk };
        // SAFETY: as above. Fails only if the value is already gone.
        let _gone_already = unsafe { storage.delete(socket) };
    }
}

/// The socket is not connected there any more.
#[inline(always)]
fn stop_counting<A>(origin: &mut SocketOrigin<A>) {
    let is_counted = origin.is_counted();
    // Who counts sockets by their storage must not find one that is closed, and not freed yet.
    origin.stop_counting();
    count_socket_closed(origin.backend_id, is_counted.into());
}

/// The process has closed the socket.
#[inline(always)]
pub(crate) fn sock_release(ctx: &SockContext) -> i32 {
    if let Some(origin) = stored_of(ctx, V4::socket_origin()) {
        stop_counting(origin);
    }
    if let Some(origin) = stored_of(ctx, V6::socket_origin()) {
        stop_counting(origin);
    }
    PROCEED
}

/// As [`stored`], of a socket that is closed.
#[inline(always)]
fn stored_of<T>(ctx: &SockContext, storage: &'static Storage<T>) -> Option<&'static mut T> {
    let map = ptr::from_ref(storage).cast_mut().cast();
    // SAFETY: a map and the socket of the context; since 5.9. Nobody else has the socket any more.
    unsafe { bpf_sk_storage_get(map, ctx.as_ptr(), ptr::null_mut(), 0).cast::<T>().as_mut() }
}
