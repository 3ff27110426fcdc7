//! Keys and values of the BPF maps.
//!
//! People read `bpftool map dump name frontends4`. So ports are numbers in host byte order (a
//! [`Port`] would be shown as a struct), and methods give and take them as a [`Port`]. Addresses
//! are bytes in the order in which they are written.
//!
//! There is no padding that is not a named field, because a hash map compares keys byte by byte.
//!
//! Any change of a released layout raises [`LAYOUT_VERSION`], which names the folder in which the
//! maps are pinned. Maps of another shape in that folder are refused when they are opened.

use core::mem::{align_of, size_of};

use crate::port::Port;

/// The version of every layout in this file. The maps live in
/// `<bpffs>/proxy-ctl/v<LAYOUT_VERSION>/`.
pub const LAYOUT_VERSION: u32 = 1;

/// An address as maps hold it: 4 bytes of IPv4 or 16 bytes of IPv6, in network order.
pub trait Address: Copy + Eq + Default + AsRef<[u8]> + AsMut<[u8]> + 'static {
    const UNSPECIFIED: Self;
    const BITS: u32;

    /// Returns `other` if all bits of `mask` are 1, and the address itself if all are 0.
    fn or_if(&self, other: &Self, mask: u64) -> Self;

    /// Returns 0 if both addresses are the same.
    fn difference(&self, other: &Self) -> u64;

    /// Returns two numbers whose order, upper one first, is that of the addresses.
    fn halves(&self) -> [u64; 2];

    /// Returns true if the first `bits` bits are those of `range`.
    #[inline(always)]
    fn is_in(&self, range: &Self, bits: u32) -> bool {
        let ([upper, lower], [range_upper, range_lower]) = (self.halves(), range.halves());
        let rest = Self::BITS.saturating_sub(bits);
        let differs = |one: u64, other: u64, rest: u32| (one ^ other).checked_shr(rest).unwrap_or(0) != 0;
        if rest >= u64::BITS {
            !differs(upper, range_upper, rest - u64::BITS)
        } else {
            upper == range_upper && !differs(lower, range_lower, rest)
        }
    }
}

impl Address for [u8; 4] {
    const UNSPECIFIED: Self = [0; 4];
    const BITS: u32 = u32::BITS;

    #[inline(always)]
    fn or_if(&self, other: &Self, mask: u64) -> Self {
        let (own, other) = (u32::from_ne_bytes(*self), u32::from_ne_bytes(*other));
        (own ^ ((own ^ other) & mask as u32)).to_ne_bytes()
    }

    #[inline(always)]
    fn difference(&self, other: &Self) -> u64 {
        (u32::from_ne_bytes(*self) ^ u32::from_ne_bytes(*other)).into()
    }

    #[inline(always)]
    fn halves(&self) -> [u64; 2] {
        [0, u32::from_be_bytes(*self).into()]
    }
}

impl Address for [u8; 16] {
    const UNSPECIFIED: Self = [0; 16];
    const BITS: u32 = u128::BITS;

    #[inline(always)]
    fn or_if(&self, other: &Self, mask: u64) -> Self {
        let ([first, second], [other_first, other_second]) = (words(self), words(other));
        let chosen = [first ^ ((first ^ other_first) & mask), second ^ ((second ^ other_second) & mask)];
        let mut address = [0; 16];
        let (of_first, of_second) = address.split_at_mut(8);
        of_first.copy_from_slice(&chosen[0].to_ne_bytes());
        of_second.copy_from_slice(&chosen[1].to_ne_bytes());
        address
    }

    #[inline(always)]
    fn difference(&self, other: &Self) -> u64 {
        let ([first, second], [other_first, other_second]) = (words(self), words(other));
        (first ^ other_first) | (second ^ other_second)
    }

    #[inline(always)]
    fn halves(&self) -> [u64; 2] {
        let whole = u128::from_be_bytes(*self);
        [(whole >> 64) as u64, whole as u64]
    }
}

/// Returns the address as two words in the byte order of this machine's memory.
#[inline(always)]
fn words(address: &[u8; 16]) -> [u64; 2] {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *address;
    [u64::from_ne_bytes([a, b, c, d, e, f, g, h]), u64::from_ne_bytes([i, j, k, l, m, n, o, p])]
}

pub const PROTOCOL_TCP: u8 = 6;
pub const PROTOCOL_UDP: u8 = 17;

/// The scope of a frontend that is the address in the key.
pub const SCOPE_ADDRESS: u8 = 0;
/// The scope of a frontend that is this port on every address of `node_addresses4/6`. The address
/// in the key is unspecified.
pub const SCOPE_NODE_PORT: u8 = 1;

/// Key of the map `frontends4/6` (hash): what clients dial.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct FrontendKey<A> {
    pub address: A,
    port: u16,
    /// The IANA protocol number.
    pub protocol: u8,
    /// The scope of the frontend (`SCOPE_*`).
    pub scope: u8,
}

impl<A: Address> FrontendKey<A> {
    #[inline(always)]
    pub fn of_address(address: A, port: Port, protocol: u8) -> Self {
        Self { address, port: port.number(), protocol, scope: SCOPE_ADDRESS }
    }

    #[inline(always)]
    pub fn of_node_port(port: Port, protocol: u8) -> Self {
        Self { address: A::UNSPECIFIED, port: port.number(), protocol, scope: SCOPE_NODE_PORT }
    }

    /// Returns the key of the entry which says that the address is a ClusterIP. Clients of its
    /// ports without a frontend of their own are refused.
    ///
    /// Port and protocol are 0, so that no packet looks the entry up. Its value is
    /// [`Frontend::NONE`].
    #[inline(always)]
    pub fn of_cluster_ip(address: A) -> Self {
        Self { address, port: 0, protocol: 0, scope: SCOPE_ADDRESS }
    }

    #[inline(always)]
    pub fn is_cluster_ip(&self) -> bool {
        self.port == 0 && self.protocol == 0
    }

    /// Returns true for a frontend that is served at its address alone.
    pub fn is_of_address(&self) -> bool {
        self.scope == SCOPE_ADDRESS && !self.is_cluster_ip()
    }
}

/// The number of words of `frontend_addresses4/6`, arrays with a bit for each hash of an address.
///
/// The bit is set if some address with this hash has a frontend. Most packets without a flow are
/// not for Services, and one load tells that.
pub const FRONTEND_ADDRESS_WORDS: u32 = 8_192;

/// The frontend can be dialled from outside: it is a node port, an external IP or a load-balancer
/// IP.
///
/// Clients outside get the service's `external` set, and clients on this node its `cluster` set.
/// Without the flag the frontend is a ClusterIP, and every client gets `internal`.
pub const FRONTEND_EXTERNAL: u32 = 1;

/// Only clients in `source_ranges4/6` of the service are admitted.
pub const FRONTEND_SOURCE_RANGES: u32 = 2;

/// The external traffic policy is Local. The flag is set only together with `FRONTEND_EXTERNAL`.
pub const FRONTEND_LOCAL_POLICY: u32 = 4;

/// The service has session affinity, which goes by the address of the client.
pub const FRONTEND_AFFINITY: u32 = 8;

/// New connections draw their backend by a hash of their ends, if these are known. So each node
/// chooses the same backend.
pub const FRONTEND_MAGLEV: u32 = 16;

/// New connections draw two backends, and go to the one with fewer connections for its weight.
pub const FRONTEND_LEAST_CONNECTION: u32 = 32;
/// Packets of clients outside go to backends on other nodes inside a packet of this node, and the
/// answers go straight to the client (direct server return).
///
/// The flag is set only together with `FRONTEND_EXTERNAL`.
pub const FRONTEND_DSR: u32 = 64;

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Frontend {
    /// Index into `services`.
    pub service: u32,
    /// Flags of the frontend (`FRONTEND_*`).
    pub flags: u32,
}

impl Frontend {
    /// The frontend of no service.
    pub const NONE: Self = Self { service: NO_SERVICE, flags: 0 };
}

/// Contiguous slots of `slots4/6`, and the lookup table behind them if there is one.
///
/// New connections draw from the lookup table, which consists of copies of the slots, or else from
/// the slots. The alignment lets one 8-byte load or store move all of it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C, align(8))]
pub struct EndpointSet {
    pub first: u32,
    /// The number of slots, in the lowest `TABLE_SHIFT` bits. The bits above have the binary
    /// logarithm of the lookup table's size; 0: there is no lookup table.
    sizes: u32,
}

const TABLE_SHIFT: u32 = 27;

impl EndpointSet {
    /// The largest number of slots that a set can have.
    pub const MOST: u32 = (1 << TABLE_SHIFT) - 1;
    /// The binary logarithm of the largest lookup table.
    pub const MOST_TABLE_BITS: u32 = 16;

    /// Returns a set without lookup table.
    #[inline(always)]
    pub const fn new(first: u32, count: u32) -> Self {
        Self { first, sizes: count & Self::MOST }
    }

    /// Returns the set with a lookup table of `2^bits` slots; 0: without one.
    #[inline(always)]
    pub const fn with_table(self, bits: u32) -> Self {
        Self { sizes: self.count() | bits << TABLE_SHIFT, ..self }
    }

    /// Returns the set from the word that maps hold.
    #[inline(always)]
    pub const fn from_word(word: u64) -> Self {
        Self { first: word as u32, sizes: (word >> 32) as u32 }
    }

    #[inline(always)]
    pub const fn word(&self) -> u64 {
        (self.sizes as u64) << 32 | self.first as u64
    }

    /// Returns the number of slots, without those of the lookup table.
    #[inline(always)]
    pub const fn count(&self) -> u32 {
        self.sizes & Self::MOST
    }

    #[inline(always)]
    pub const fn table_bits(&self) -> u32 {
        self.sizes >> TABLE_SHIFT
    }

    /// Returns the number of slots, with those of the lookup table.
    pub const fn places(&self) -> u32 {
        self.count() + if self.table_bits() == 0 { 0 } else { 1 << self.table_bits() }
    }

    /// Returns the first index that is drawn from, and how many there are.
    #[inline(always)]
    const fn drawn_from(&self) -> (u32, u32) {
        let (count, table_bits) = (self.count(), self.table_bits());
        // There is no branch, because the verifier follows both ways of each. `is_copied` is 1 if
        // there is a lookup table, and `mask` has all bits set then.
        let is_copied = (table_bits + (u32::BITS - 1)) >> u32::BITS.ilog2();
        let mask = 0_u32.wrapping_sub(is_copied);
        (self.first.wrapping_add(count & mask), count & !mask | is_copied << table_bits)
    }

    /// Returns the index that 32 random bits choose. All indexes are equally likely.
    #[inline(always)]
    pub const fn place(&self, bits: u32) -> u32 {
        let (start, size) = self.drawn_from();
        start.wrapping_add(scaled(bits, size))
    }

    /// Returns another index than `place`, chosen by 32 random bits. Only if there is no other
    /// index, it returns the same.
    #[inline(always)]
    pub const fn place_beside(&self, place: u32, bits: u32) -> u32 {
        let (start, size) = self.drawn_from();
        let step = scaled(bits, size.wrapping_sub(1)).wrapping_add(1);
        let drawn = place.wrapping_sub(start).wrapping_add(step);
        start.wrapping_add(if drawn < size { drawn } else { drawn.wrapping_sub(size) })
    }
}

/// Scales random bits to a number below `size`, without a division.
#[inline(always)]
const fn scaled(bits: u32, size: u32) -> u32 {
    ((bits as u64 * size as u64) >> u32::BITS) as u32
}

/// Some endpoint of the service is usable on some node. An empty endpoint set then means "drop"
/// (policy Local without a local endpoint), and otherwise "refuse".
pub const SERVICE_HAS_ENDPOINTS: u32 = 1;
/// The internal traffic policy is Local. Like the flags below, it is for people alone: the endpoint
/// sets and the flags of frontends are what follows from it.
pub const SERVICE_INTERNAL_LOCAL: u32 = 2;
pub const SERVICE_EXTERNAL_LOCAL: u32 = 4;
/// The frontends of the service have `FRONTEND_MAGLEV`.
pub const SERVICE_MAGLEV: u32 = 8;
/// The frontends of the service have `FRONTEND_LEAST_CONNECTION`.
pub const SERVICE_LEAST_CONNECTION: u32 = 16;
/// The frontends of the service have `FRONTEND_DSR`.
pub const SERVICE_DSR: u32 = 32;

/// Value of the map `services` (mmapable array, index: service id), with one entry for each service
/// port. An entry that is all zero is unused.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Service {
    /// The endpoint set with every usable endpoint of the cluster.
    pub cluster: EndpointSet,
    /// The endpoint set for clients of the ClusterIP, by the internal traffic policy.
    pub internal: EndpointSet,
    /// The endpoint set for clients from outside, by the external traffic policy.
    pub external: EndpointSet,
    /// Flags of the service (`SERVICE_*`).
    pub flags: u32,
    /// The duration of session affinity in seconds; 0: the service has none.
    pub affinity_seconds: u32,
}

/// Key of an LPM trie.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(C)]
pub struct PrefixKey<K> {
    /// The number of bits of `data` that count, from its first byte on.
    pub bits: u32,
    pub data: K,
}

/// Key of the map `source_ranges4/6` (LPM trie): client addresses that may dial frontends with
/// `FRONTEND_SOURCE_RANGES`.
///
/// All bits of `service` count, and those of the range's prefix. The values have no meaning.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(C)]
pub struct SourceRange<A> {
    /// Index into `services`.
    pub service: u32,
    pub address: A,
}

impl<A: Address> SourceRange<A> {
    /// Returns the key of a range with this many bits.
    pub const fn of_prefix(service: u32, address: A, bits: u32) -> PrefixKey<Self> {
        PrefixKey { bits: u32::BITS + bits, data: Self { service, address } }
    }
}

/// The size of the maps `service_cidrs4/6` (LPM tries): the ranges of ClusterIPs, if packets to
/// unallocated addresses are dropped. The values have no meaning.
pub const SERVICE_CIDRS: u32 = 256;

/// The room for a namespace, a name or a port name. Kubernetes allows 63 bytes.
pub const NAME_BYTES: usize = 64;

/// Value of the map `service_names` (hash, key: service id): which service port has an id. It is
/// for people and for the next controller, and no program reads it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(C)]
pub struct ServiceName {
    /// The namespace. It is padded with zeros, and so are the next two fields.
    pub namespace: [u8; NAME_BYTES],
    pub name: [u8; NAME_BYTES],
    /// The name of the port. All zero: it is the service's only port, which has no name.
    pub port: [u8; NAME_BYTES],
    /// The IANA protocol number.
    pub protocol: u8,
    /// The IP family, 4 or 6.
    pub family: u8,
}

impl Default for ServiceName {
    fn default() -> Self {
        let empty = [0; NAME_BYTES];
        Self { namespace: empty, name: empty, port: empty, protocol: 0, family: 0 }
    }
}

/// The backend runs on this node.
pub const BACKEND_LOCAL: u32 = 1;
/// A slot's endpoint terminates. Only nodes that do not know that yet send it new connections of
/// the set (direct server return).
pub const BACKEND_DRAINING: u32 = 2;
/// The position in a slot's flags from which on the bits hold its weight less 1.
pub const BACKEND_WEIGHT_SHIFT: u32 = 8;

/// Value of the map `slots4/6` (mmapable array): all that the packet programs need of a backend.
///
/// The slots of an endpoint set are in the order of
/// [`Slot::precedes`](crate::family::Slot::precedes). The slots of its lookup table are in the
/// order of the [lookup table](crate::balance).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Slot4 {
    pub address: [u8; 4],
    pub(crate) port: u16,
    pub(crate) _reserved: u16,
    /// Key of `backends4`.
    pub backend: u32,
    /// Flags of the backend (`BACKEND_*`).
    pub flags: u32,
}

/// Value of the map `slots6`, with the meaning of [`Slot4`].
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Slot6 {
    pub address: [u8; 16],
    pub(crate) port: u16,
    pub(crate) _reserved: u16,
    /// Key of `backends6`.
    pub backend: u32,
    /// Flags of the backend (`BACKEND_*`).
    pub flags: u32,
    pub(crate) _reserved2: u32,
}

pub const BACKEND_ACTIVE: u8 = 1;
/// The endpoint terminates. It gets new connections only if no other endpoint is left, and keeps
/// established ones.
pub const BACKEND_TERMINATING: u8 = 2;

/// Value of the map `backends4/6` (hash, key: backend id): endpoints that a service uses, and
/// endpoints that a service has used and that still serve.
///
/// Ids grow and are never given again, so an id that is not in the map belongs to a backend that is
/// gone.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Backend<A> {
    pub address: A,
    /// The port in host byte order. Only people and the controller read it.
    pub port: u16,
    /// The IANA protocol number.
    pub protocol: u8,
    /// `BACKEND_ACTIVE` or `BACKEND_TERMINATING`.
    pub state: u8,
    /// The number of service ports that use the backend. 0: it is kept for flows and sockets alone.
    pub uses: u32,
    /// Flags of the backend (`BACKEND_LOCAL`).
    pub flags: u32,
    /// A hash of the name of the one service port that a UDP backend belongs to. 0: all service
    /// ports that use the endpoint share the backend.
    ///
    /// A UDP backend is gone as soon as the endpoint leaves its service port, so that the flows
    /// notice it.
    pub owner: u32,
}

/// Key of the flow maps: the two ends that a flow's packets have at a hook, in either direction.
/// The maps are `flows4/6` (hash, established flows) and `opening_flows4/6` (LRU hash, all others).
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(C)]
pub struct FlowKey<A> {
    /// The address of the end with the lower port. If the ports are equal, it is the lower address.
    pub lower: A,
    pub upper: A,
    lower_port: u16,
    upper_port: u16,
    /// The IANA protocol number.
    pub protocol: u8,
    /// 0 for most keys. 1: the ends are client and frontend of a `FLOW_OVERLAPPING`. The bits of
    /// [`mark_of`](Self::mark_of): they are client and frontend of a `FLOW_APART`.
    pub overlapping: u8,
    _reserved: u16,
}

/// Returns 1 if the first number that differs is less in `one`, else 0. There are no branches,
/// because the verifier follows both ways of each.
#[inline(always)]
fn is_before<const N: usize>(one: &[u64; N], other: &[u64; N]) -> u64 {
    let (mut is_before, mut are_equal) = (0, 1);
    for (one, other) in one.iter().zip(other) {
        let is_less = ((!one & other) | ((!one | other) & one.wrapping_sub(*other))) >> 63;
        let differs = one ^ other;
        let is_equal = !(differs | differs.wrapping_neg()) >> 63;
        is_before |= are_equal & is_less;
        are_equal &= is_equal;
    }
    is_before
}

impl<A: Address> FlowKey<A> {
    #[inline(always)]
    pub fn between(one: (A, Port), other: (A, Port), protocol: u8) -> Self {
        let (one_port, other_port) = (u64::from(one.1.number()), u64::from(other.1.number()));
        let ([one_upper, one_lower], [other_upper, other_lower]) = (one.0.halves(), other.0.halves());
        let in_order = is_before(&[one_port, one_upper, one_lower], &[other_port, other_upper, other_lower]);
        // All bits are set if the ends change places.
        let swap = in_order.wrapping_sub(1);
        let ports = (one_port ^ other_port) & swap;
        Self {
            lower: one.0.or_if(&other.0, swap),
            upper: other.0.or_if(&one.0, swap),
            lower_port: (one_port ^ ports) as u16,
            upper_port: (other_port ^ ports) as u16,
            protocol,
            overlapping: 0,
            _reserved: 0,
        }
    }
}

impl<A> FlowKey<A> {
    const APART: u8 = 2;
    const APART_OF_POD: u8 = 4;
    const APART_OF_HOST: u8 = 8;

    /// Returns the bits that `overlapping` has in addition for client and frontend of a
    /// `FLOW_APART` whose client is where these flags say.
    #[inline(always)]
    pub const fn mark_of(flags: u32) -> u8 {
        let of_pod = if flags & FLOW_FROM_POD == 0 { 0 } else { Self::APART_OF_POD };
        let of_host = if flags & FLOW_FROM_HOST == 0 { 0 } else { Self::APART_OF_HOST };
        Self::APART | of_pod | of_host
    }
}

/// The flow leaves this node with an address of the node as its source. Source address and port are
/// chosen when its first packet leaves.
pub const FLOW_MASQUERADE: u32 = 1;
/// The client is a process of this node whose packets are translated, because
/// `ebpf.socketLoadBalancing` is off.
pub const FLOW_FROM_HOST: u32 = 2;
/// Netfilter translates the flow, and the programs do not. It has two entries, for the ends of its
/// client's packets and of its answers, so that no other flow gets these ends.
pub const FLOW_OF_NETFILTER: u32 = 4;
/// The client and frontend of the flow are client and backend of another flow. The client dials an
/// endpoint itself, from a port from which it already reaches the endpoint through a frontend.
pub const FLOW_OVERLAPPING: u32 = 8;
/// The flow is a host connection. Its client is this node's own address, at a port that a
/// masqueraded flow to the same backend had when the flow began.
///
/// It belongs to a socket of the node, or netfilter masquerades it. It gets another port where it
/// leaves the node, and its own port back where answers come in.
pub const FLOW_FOREIGN: u32 = 16;
/// The flow's entry of client and frontend in `flows4/6` is counted as a connection of its backend.
pub const FLOW_COUNTED: u32 = 64;
/// The client's packets come in by an interface of pods. Packets that come in by another interface
/// are forged.
pub const FLOW_FROM_POD: u32 = 128;
/// When the flow was opened, another flow had its client and frontend, with a client that is
/// elsewhere: in a pod, on this node or outside. One of the two clients is forged.
///
/// The key of client and frontend has bits for where the client is.
pub const FLOW_APART: u32 = 256;
/// The flow has direct server return: its packets leave the node as the client has sent them, each
/// inside a packet to the backend.
///
/// The backend's node answers the client itself, so no answer is seen here.
pub const FLOW_DSR: u32 = 32;
/// The flow was opened by a segment of a connection that this node has not seen begin.
///
/// Nothing proves its client, so it is never established. It stays in the map that evicts, and the
/// next segment opens it again.
pub const FLOW_RESUMED: u32 = 512;

/// No packet of the backend was seen yet.
pub const PROGRESS_OPENED: u8 = 0;
/// The backend has answered.
pub const PROGRESS_ANSWERED: u8 = 1;
/// The backend has answered seconds after the flow was opened. Only UDP has this state.
pub const PROGRESS_SUSTAINED: u8 = 2;
/// The client has received an answer, so its address is not forged.
pub const PROGRESS_CONFIRMED: u8 = 3;

/// A FIN was seen. It may be forged.
pub const FIN_SEEN: u8 = 1;
/// The other side has acknowledged the FIN.
pub const FIN_ACKNOWLEDGED: u8 = 2;

/// A RST was seen that its receiver may have accepted. It may be forged.
pub const RESET_PLAUSIBLE: u8 = 1;
/// A RST was seen with exactly the sequence number that its receiver waits for.
pub const RESET_CONFIRMED: u8 = 2;

/// The known sequence numbers of the stream of bytes that one side of a TCP connection receives, in
/// host byte order.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct Numbers {
    /// The sequence number that the stream has reached. In the entry of the receiving side it is
    /// what that side last acknowledged. In the sender's entry it is the end of what was sent.
    pub reached: u32,
    /// The number whose acknowledgement confirms the other side's SYN or FIN. It is the same in the
    /// entries of both sides.
    pub awaited: u32,
}

/// The state of a flow. Each fact is a byte of its own, so that one CPU can change it without
/// undoing what another has learned.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct FlowState {
    /// The progress of the flow (`PROGRESS_*`).
    pub progress: u8,
    /// The FIN of the client: 0 or `FIN_*`.
    pub client_fin: u8,
    /// The FIN of the backend: 0 or `FIN_*`.
    pub backend_fin: u8,
    /// The RST of either side: 0 or `RESET_*`.
    pub reset: u8,
}

/// Value of the flow maps. Each of a flow's entries has the whole flow, so that each can restore
/// the others.
///
/// The entries are those of client and frontend, of client (with the alias port) and backend, and
/// of masquerade address and backend.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct Flow<A> {
    /// The time at which the flow was opened, in nanoseconds since boot, suspend included.
    ///
    /// It is the first field, because the kernel may give a removed element to another flow while a
    /// program reads it. If this field is the same before and after, what was read is of the flow
    /// that was looked up.
    pub opened: u64,
    /// The time of the last packet, in nanoseconds since boot, suspend included. It may be up to a
    /// second late.
    pub last_seen: u64,
    pub client: A,
    pub frontend: A,
    pub backend: A,
    /// The source address towards the backend. It counts only if `masquerade_port` is not 0.
    pub masquerade: A,
    client_port: u16,
    frontend_port: u16,
    backend_port: u16,
    /// The source port towards the backend. 0: none is chosen.
    masquerade_port: u16,
    /// The client's port as the backend's side of this node sees it (alias port).
    ///
    /// It differs from `client_port` only if the client's own port is taken at the backend, for
    /// example through another frontend, and with `FLOW_FROM_HOST`.
    alias_port: u16,
    /// The IANA protocol number.
    pub protocol: u8,
    /// A value that lets XDP forward packets of the flow, if it says that the flow
    /// [has left](Self::has_left).
    ///
    /// It is set when the stack has brought a packet to the egress of an uplink. With `FLOW_DSR`
    /// that is a packet of the client, otherwise an answer.
    pub left: u8,
    /// Key of `backends4/6`.
    pub backend_id: u32,
    /// Index into `services`. `NO_SERVICE`: the client dialled the backend itself.
    pub service: u32,
    /// Flags of the flow (`FLOW_*`).
    pub flags: u32,
    /// The value of `Settings::epoch` when frontend and backend were last found to be in service.
    /// For TCP it concerns the backend alone, and only if connections to gone endpoints are reset.
    pub epoch: u32,
    /// The numbers of the stream that the client receives (TCP). They are up to date in the entry
    /// of client and frontend.
    pub client_numbers: Numbers,
    /// The numbers of the stream that the backend receives (TCP). They are up to date in the entry
    /// of client and backend.
    pub backend_numbers: Numbers,
    pub state: FlowState,
    /// The next hop of the packets that find this entry, if the driver forwards them.
    ///
    /// In the entry of client and backend of a flow to a pod it says something else: XDP sends the
    /// client's packets to the interface of this stamp.
    pub next_hop: KnownHop,
}

/// A [`NextHop`](crate::flow::NextHop) that the routing tables have named.
///
/// The upper 48 bits of the words are the link address of the destination, that of the source, and
/// the index of the interface with the length of the longest packet. Their lower bits are parts of
/// a stamp, which tells words of different lookups apart. Each word is replaced by one store.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct KnownHop {
    pub(crate) words: [u64; 3],
}

/// Value of the map `route_epoch` (mmapable array with one entry).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C, align(8))]
pub struct RouteEpoch {
    /// A number that the controller raises after each change of routes, neighbours or interfaces.
    /// Next hops are then looked up again.
    pub number: u32,
    pub _reserved: u32,
}

/// Value of the map `foreign_flows4/6` (LRU hash, key: [`FlowKey`] of the ends): host connections.
///
/// Such a connection leaves with an address of this node to which flows are masqueraded, too. The
/// programs know nothing else of it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct ForeignFlow {
    /// The time of the last packet, in nanoseconds since boot, suspend included. For TCP it is that
    /// of the SYN, for UDP it may be up to a second late.
    pub last_seen: u64,
}

/// The client is beyond the uplink, so its address may be forged.
pub const CLIENT_OUTSIDE: u32 = 0;
/// The client is in a pod of this node.
pub const CLIENT_WORKLOAD: u32 = 1;
/// The client is the node itself, which is one client, whatever its address is.
pub const CLIENT_NODE: u32 = 2;

/// A client for session affinity.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct Client<A> {
    /// The address of the client. Unspecified: the client is the node itself.
    pub address: A,
    /// The origin of the client (`CLIENT_*`).
    pub origin: u32,
}

/// Key of the map `affinity4/6` (LRU hash): a client of a service port with session affinity.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct AffinityKey<A> {
    /// Index into `services`.
    pub service: u32,
    pub client: Client<A>,
}

/// Value of the map `affinity4/6`: the backend of the client's new connections. It counts until it
/// expires, and only for endpoint sets that have the backend.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct Affinity {
    /// The time of the client's last new connection, in nanoseconds since boot, suspend included.
    pub last_used: u64,
    /// Key of `backends4/6`.
    pub backend: u32,
    /// The `BACKEND_*` flags that the slot had.
    pub flags: u32,
}

/// The packet enters the node.
pub const FRAGMENT_ARRIVING: u8 = 0;
/// The packet leaves the node.
pub const FRAGMENT_LEAVING: u8 = 1;
/// The packet has come inside another packet.
pub const FRAGMENT_UNPACKED: u8 = 2;

/// Key of the map `fragments4/6` (LRU hash): the packet that a fragment is part of, at a hook of
/// one direction.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct FragmentKey<A> {
    pub source: A,
    pub destination: A,
    /// The id of the packet, in host byte order. In IPv4 it has 16 bits.
    pub id: u32,
    /// The IANA protocol number. 0 for IPv6: its stack reassembles without it, and a later fragment
    /// need not have it.
    pub protocol: u8,
    /// The direction of the packet (`FRAGMENT_*`).
    pub direction: u8,
    pub(crate) _reserved: u16,
}

/// The fragments go on as they are.
pub const FATE_PASSED: u32 = 0;
/// The fragments are dropped.
pub const FATE_DROPPED: u32 = 1;
/// The fragments get the recorded addresses, and go on.
pub const FATE_TRANSLATED: u32 = 2;
/// The fragments get the recorded addresses, and go by the route to their new destination.
pub const FATE_REROUTED: u32 = 3;
/// The fragments get the recorded addresses, and enter the node by the interface that leads to
/// their new source.
pub const FATE_INTO_NODE: u32 = 4;
/// The fragments get the recorded addresses, and go to the backend inside a packet.
pub const FATE_ENCAPSULATED: u32 = 5;
/// The fragments are not translated, and skip the stack.
pub const FATE_PAST_STACK: u32 = 6;

/// Value of the map `fragments4/6`: the fate of the first fragment, which the others share.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct FirstFragment<A> {
    /// The time at which the first fragment was seen, in nanoseconds since boot, suspend included.
    /// It is the first field for the same reason as in [`Flow`].
    pub seen: u64,
    pub source: A,
    pub destination: A,
    /// Index into `services` that the packet counts for, or `NO_SERVICE`.
    pub service: u32,
    /// The fate of the fragments (`FATE_*`).
    pub fate: u32,
    /// The id of the key. It is repeated, because the kernel may give the element to another packet
    /// at any time.
    pub id: u32,
    /// The index of the interface by which the first fragment has come or left.
    pub interface: u32,
}

/// Value of the map `socket_origin4/6` (socket storage): the frontend that a connected socket
/// dialled, and the backend it was sent to.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct SocketOrigin<A> {
    pub frontend: A,
    pub backend: A,
    frontend_port: u16,
    backend_port: u16,
    /// Key of `backends4/6`.
    pub backend_id: u32,
    /// Index into `services`, and the flag `SOCKET_COUNTED`. They share a field, because the value
    /// had to keep its length when the flag was added.
    service: u32,
}

/// The flag of a socket that counts as a connection of its backend, as long as it is open and has
/// its value in `socket_origin4/6`. No index of a service is that large.
const SOCKET_COUNTED: u32 = 1 << 31;

impl<A> SocketOrigin<A> {
    /// Returns the index into `services`.
    #[inline(always)]
    pub const fn service(&self) -> u32 {
        self.service & !SOCKET_COUNTED
    }

    #[inline(always)]
    pub const fn is_counted(&self) -> bool {
        self.service & SOCKET_COUNTED != 0
    }

    #[inline(always)]
    pub(crate) const fn count(&mut self) {
        self.service |= SOCKET_COUNTED;
    }

    #[inline(always)]
    pub const fn stop_counting(&mut self) {
        self.service &= !SOCKET_COUNTED;
    }

    #[inline(always)]
    pub(crate) fn new(frontend: (A, Port), backend: (A, Port), backend_id: u32, service: u32) -> Self {
        Self {
            frontend: frontend.0,
            backend: backend.0,
            frontend_port: frontend.1.number(),
            backend_port: backend.1.number(),
            backend_id,
            service,
        }
    }
}

/// The id under which `connections` counts the entries of `flows4` whose flows [prove no
/// client](Flow::proves_no_client). Ids of backends are lower.
const UNPROVEN_ENTRIES4: u32 = u32::MAX;
/// The id under which `connections` counts the entries of `flows6` in the same way.
const UNPROVEN_ENTRIES6: u32 = u32::MAX - 1;

/// Returns the id under which `connections` has the entries of one family's established flows that
/// [prove no client](Flow::proves_no_client).
#[inline(always)]
pub const fn unproven_entries<A: Address>() -> u32 {
    if A::BITS == u32::BITS { UNPROVEN_ENTRIES4 } else { UNPROVEN_ENTRIES6 }
}

/// Returns false for the ids under which `connections` counts something other than a backend.
pub const fn is_backend(id: u32) -> bool {
    id < UNPROVEN_ENTRIES6
}

/// Value of the map `connections` (hash, key: backend id): what the programs have seen of a
/// backend's connections through frontends with `FRONTEND_LEAST_CONNECTION`.
///
/// Only the programs write it, until the backend is gone. The difference to [`Collected`] is what
/// is open.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Connections {
    /// The number of flows with `FLOW_COUNTED` that have begun.
    pub flows_opened: u64,
    pub flows_closed: u64,
    /// The number of sockets that [are counted](SocketOrigin::is_counted).
    pub sockets_opened: u64,
    pub sockets_closed: u64,
}

/// Value of the map `collected` (hash, key: backend id): the connections of [`Connections`] that
/// have ended without the programs. Only the controller writes it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Collected {
    /// The number of flows. It may fall below 0, and wraps then, because the programs may miss a
    /// flow that begins.
    pub flows: u64,
    /// The number of sockets, which may wrap for the same reason.
    pub sockets: u64,
}

impl Connections {
    /// Returns how many flows and sockets are open now. `collected` is [`Collected::sum`].
    #[inline(always)]
    pub const fn open(&self, collected: u64) -> u64 {
        let begun = self.flows_opened.wrapping_add(self.sockets_opened);
        let ended = self.flows_closed.wrapping_add(self.sockets_closed).wrapping_add(collected);
        let open = begun.wrapping_sub(ended);
        // Missed connections may make the difference negative. The mask then has all bits set,
        // which needs no branch.
        let is_negative = 0_u64.wrapping_sub(open >> (u64::BITS - 1));
        open & !is_negative
    }
}

impl Collected {
    #[inline(always)]
    pub const fn sum(&self) -> u64 {
        self.flows.wrapping_add(self.sockets)
    }
}

/// Value of the map `service_counters` (per-CPU array, index: that of `services`): what the clients
/// of a service did. Services with larger indexes than the map has are not counted.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct ServiceCounters {
    /// The number of sockets that were connected, of first datagrams of unconnected sockets to the
    /// service, and of flows that were opened.
    pub connections: u64,
    /// The number of packets of flows, in both directions. Packets of sockets that were sent to a
    /// backend at `connect` are not seen.
    pub packets: u64,
    /// The bytes of these packets as the hook sees them: with the link header, and merged segments
    /// as one packet.
    pub bytes: u64,
}

/// The index into `services` that is never used.
pub const NO_SERVICE: u32 = u32::MAX;

/// The number of services that one unconnected UDP socket can talk to at the same time with exact
/// answers.
pub const DATAGRAM_ORIGINS: usize = 4;

/// Value of the map `datagrams4/6` (socket storage): the services to which an unconnected UDP
/// socket has sent. An element with a `frontend_port` of zero is free.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct DatagramOrigins<A> {
    pub origins: [SocketOrigin<A>; DATAGRAM_ORIGINS],
    /// The index of the element that the next new service takes.
    pub next: u32,
}

/// Value of the map `node_addresses4/6` (hash, key: address): the addresses at which node ports are
/// served.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct NodeAddress {
    /// Flags of the address (`NODE_ADDRESS_*`).
    pub flags: u32,
}

/// The address is a loopback address. It serves node ports for processes in the node's own network
/// namespace only.
pub const NODE_ADDRESS_LOOPBACK: u32 = 1;

/// The interface brings traffic of pods.
pub const INTERFACE_OF_PODS: u16 = 1;
/// The interface is an uplink. Packets may skip the stack and leave by it.
pub const INTERFACE_OF_UPLINK: u16 = 2;
/// The packets of the interface have no link headers, as with IPIP and WireGuard.
pub const INTERFACE_WITHOUT_LINK_HEADERS: u16 = 4;

/// The interface is the port of a bridge, so frames for the bridge come by it, too.
pub const INTERFACE_OF_BRIDGE: u16 = 8;

/// Value of the map `interfaces` (hash, key: interface index). Only interfaces that differ from the
/// default have an entry.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct InterfaceSettings {
    /// The source address of flows that are masqueraded and leave by the interface. Unspecified:
    /// the interface has none of this family, and the address in [`Settings`] is taken.
    pub masquerade6: [u8; 16],
    /// The IPv4 source address, with the meaning of `masquerade6`.
    pub masquerade4: [u8; 4],
    /// Flags of the interface (`INTERFACE_*`).
    pub flags: u16,
    /// The length of the longest packet that leaves by the interface, without link header. 0: there
    /// is no limit. Uplinks have a value.
    pub mtu: u16,
}

/// Key of the map `vlan_devices` (hash). The value is the index of the interface to which the stack
/// gives a packet with this tag. The map has only uplinks.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
#[repr(C)]
pub struct VlanTag {
    /// The index of the interface by which the packet comes. For the inner one of two tags it is
    /// the interface of the outer tag.
    pub interface: u32,
    /// The Ethertype of the tag (`TAG_*`), in host byte order.
    pub protocol: u16,
    /// The VLAN id, 1 to 4094.
    pub id: u16,
}

/// The size of the maps `redirect_sources` and `redirect_targets`.
pub const REDIRECTS: u32 = 512;

/// Value of the map `redirect_sources` (hash, key: interface index): the link address of an uplink
/// whose frames XDP may send out by other interfaces. The uplink only overhears frames to other
/// addresses.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct LinkAddress {
    pub bytes: [u8; 6],
    pub _padding: [u8; 2],
}

/// Value of the map `redirect_targets` (map of devices): uplinks and interfaces of pods by which
/// XDP may send frames that have come by others. It has the layout of the kernel's
/// `bpf_devmap_val`.
///
/// The key is the interface index, with [`TO_POD`] for a pod's interface and with [`IN_FRAGMENTS`]
/// for frames in fragments. When a device goes, the kernel removes its entries.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct RedirectTarget {
    pub interface: u32,
    /// The program that the kernel runs on each frame. 0: there is none.
    pub program: u32,
}

/// The bit in the key for frames in fragments. No interface index has this bit, nor that of
/// [`TO_POD`].
pub const IN_FRAGMENTS: u32 = 1 << 31;
pub const TO_POD: u32 = 1 << 30;

/// The Ethertype of 802.1Q.
pub const TAG_CUSTOMER: u16 = 0x8100;
/// The Ethertype of 802.1ad.
pub const TAG_SERVICE: u16 = 0x88a8;

/// The configuration does not tell traffic of pods from other traffic.
pub const PODS_UNKNOWN: u16 = 0;
/// Traffic of pods has a source in `Settings::pod_range4/6`.
pub const PODS_BY_SOURCE: u16 = 1;
/// Traffic of pods comes in by interfaces with `INTERFACE_OF_PODS`.
pub const PODS_BY_INTERFACE: u16 = 2;

/// Packets with direct server return go to backends on other nodes in IP alone.
pub const ENCAPSULATION_IP: u16 = 0;
/// Packets with direct server return go to backends on other nodes in UDP, by Geneve.
pub const ENCAPSULATION_GENEVE: u16 = 1;

/// Value of the map `settings` (array with one entry): what the programs need to know of the node.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Settings {
    /// The cookie of the node's network namespace, as `bpf_get_netns_cookie` gives it.
    pub host_namespace: u64,
    /// The cookie of the socket by which the controller learns its namespace on kernels without
    /// SO_NETNS_COOKIE.
    pub probe_socket: u64,
    /// The IPv6 source of masqueraded flows, if `interfaces` has none. Unspecified: there is none.
    pub masquerade6: [u8; 16],
    /// The IPv4 source of masqueraded flows, with the meaning of `masquerade6`.
    pub masquerade4: [u8; 4],
    /// The ranges in which the reserved ports of `masquerade_ports` lie. There are up to two,
    /// inclusive, in host byte order; a range with first > last is empty.
    ///
    /// The programs of former versions know reserved ports only by this field.
    pub apart_ports: [[u16; 2]; 2],
    /// The lowest backend id that was never given.
    pub next_backend: u32,
    /// A number that the controller raises after each change of what frontends lead to. The next
    /// datagram of a flow then compares the flow with the maps again. A segment does so if
    /// connections to gone endpoints are reset.
    pub epoch: u32,
    /// The number of ports in the map `masquerade_ports`, which are used as masquerade and alias
    /// ports.
    pub masquerade_ports: u16,
    /// The number of reserved ports among them, which come first. The kernel gives them to no
    /// socket.
    pub masquerade_ports_apart: u16,
    /// The IPv6 range of pods' addresses, with `PODS_BY_SOURCE`.
    pub pod_range6: [u8; 16],
    /// The IPv4 range of pods' addresses, with `PODS_BY_SOURCE`.
    pub pod_range4: [u8; 4],
    /// The number of bits of `pod_range6` that count, from its first byte on.
    pub pod_range6_bits: u8,
    /// The number of bits of `pod_range4` that count, from its first byte on.
    pub pod_range4_bits: u8,
    /// 1: all clients of ClusterIPs are masqueraded, if the programs masquerade as kube-proxy does.
    pub masquerade_all: u8,
    /// 1: no packet opens a flow, because not all interfaces have their programs yet.
    pub packets_held: u8,
    /// The way to tell IPv6 traffic of pods from other traffic (`PODS_*`).
    pub pods6: u16,
    /// The encapsulation of packets with direct server return (`ENCAPSULATION_*`). Packets from
    /// other nodes are unpacked from either.
    pub encapsulation: u16,
    /// The way to tell IPv4 traffic of pods from other traffic (`PODS_*`).
    pub pods4: u16,
    /// 1: segments of connections that no map knows are answered, because netfilter translates none
    /// of them.
    pub answers_unknown: u8,
    pub _reserved: u8,
    /// The number of flows of each family that a CPU opens in a window before services are held to
    /// their shares ([`openings_per_window`](crate::flow::openings_per_window)). 0: there is no
    /// limit.
    pub openings_per_window: u32,
    /// The largest number of entries of `flows4`, and of `flows6`, that flows which [prove no
    /// client](Flow::proves_no_client) may have. 0: there is no limit.
    pub most_unproven_entries: u32,
}

/// Value of the map `masquerade_ports` (array): masquerade and alias ports, four in an element.
/// [`Settings`] say how many there are.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C, align(8))]
pub struct FourPorts {
    /// The ports in host byte order.
    pub ports: [u16; 4],
}

/// The number of ports that exist, 0 included.
pub const PORTS: u32 = 1 << 16;
/// The number of ports for which `masquerade_ports` has room.
pub const MASQUERADE_PORT_ROOM: u32 = PORTS;

/// Value of the map `lease` (array with one entry): how long the programs may rely on the maps
/// without their controller.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Lease {
    /// The end of the lease, in nanoseconds since boot, suspend included. 0: there is no lease.
    pub end: u64,
}

impl Lease {
    /// Returns true if the lease has ended. No controller has followed changes since then, so the
    /// programs pass everything untouched.
    #[inline(always)]
    pub const fn has_ended(&self, now: u64) -> bool {
        self.end != 0 && now >= self.end
    }
}

/// Value of the map `event_control` (array with one entry): which events the programs write to
/// `events`.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct EventControl {
    /// The time at which the programs stop writing events, in nanoseconds since boot, suspend
    /// included. 0: nobody watches.
    pub until: u64,
    /// A mask with one bit for each reason of which they write events, at its number.
    pub reasons: u64,
    /// The sampling: they write one of so many events, at random. 0 and 1: they write each event.
    pub one_of: u64,
}

/// Value of the map `kernel_log` (array with one entry): whether the programs log, and how much
/// they have logged. Each load of the programs has its own map.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct LogControl {
    /// The second since boot in which `lines` was last counted from 0.
    pub second: u64,
    /// The number of lines in that second, including those that were left out.
    pub lines: u32,
    /// 0: the programs log nothing.
    pub enabled: u32,
}

/// The largest number of lines that the programs log in a second.
pub const LOG_LINES_PER_SECOND: u32 = 20;

/// The size of `events` in bytes, which has room for 11,000 events.
pub const EVENT_BYTES: u32 = 1 << 20;

/// The event concerns a packet.
pub const EVENT_OF_PACKET: u8 = 0;
/// The event concerns a system call.
pub const EVENT_OF_SOCKET: u8 = 1;

/// Value of the map `events` (ring buffer). An IPv4 address is in the first four bytes of its
/// field.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Event {
    /// The time of the event, in nanoseconds since boot, suspend included.
    pub time: u64,
    /// The address of the client. Unspecified, with port 0: it is a socket, whose address no hook
    /// knows.
    pub client: [u8; 16],
    /// The address that the client dialled.
    pub frontend: [u8; 16],
    /// The address of the backend. Unspecified, with port 0: there is no backend, or it is not
    /// known.
    pub backend: [u8; 16],
    /// The port of the client, in host byte order. The next two ports are in the same order.
    pub client_port: u16,
    pub frontend_port: u16,
    pub backend_port: u16,
    /// The IANA protocol number.
    pub protocol: u8,
    /// The IP family, 4 or 6.
    pub family: u8,
    /// The number of a [`Reason`](crate::reason::Reason) that makes events.
    pub reason: u32,
    /// Index into `services`. `NO_SERVICE`: the client dialled the backend itself, or only the
    /// frontend says which service it is.
    pub service: u32,
    /// Key of `backends4/6`; 0: there is no backend.
    pub backend_id: u32,
    /// The kind of hook that the event comes from (`EVENT_OF_*`).
    pub place: u8,
    pub(crate) _reserved: [u8; 3],
}

/// Value of the map `icmp_errors` (per-CPU array): how many answers were sent. It has one entry for
/// each [`IcmpBudget`], and each load of the programs has its own map.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct IcmpErrorCount {
    /// The second since boot in which `errors` was last counted from 0.
    pub second: u64,
    /// The number of answers in that second, including those that were left out.
    pub errors: u64,
}

/// The purpose of an ICMP error or a RST. Each has a budget of its own, so that a flood of refused
/// packets does not keep clients from learning which length of packets goes through.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum IcmpBudget {
    /// ICMP errors that refuse a packet.
    Refusals = 0,
    TooBig = 1,
    /// RSTs that refuse a SYN, or a segment of a connection which no map knows.
    Resets = 2,
}

/// The largest number of ICMP errors that each CPU sends in a second for each budget. There is a
/// limit, like the kernel's net.ipv4.icmp_msgs_per_sec, because the addressees may be forged.
pub const ICMP_ERRORS_PER_SECOND: u64 = 1_000;
/// The largest number of segments that each CPU answers by a RST in a second.
///
/// These answers take about a hundredth of the CPU, and the clients of an address that moves learn
/// it within seconds.
pub const RESETS_PER_SECOND: u64 = 10_000;

impl IcmpBudget {
    /// Every budget.
    pub const ALL: [Self; 3] = [Self::Refusals, Self::TooBig, Self::Resets];

    /// Returns how many answers of this budget each CPU sends at most in a second.
    pub const fn per_second(self) -> u64 {
        match self {
            Self::Refusals | Self::TooBig => ICMP_ERRORS_PER_SECOND,
            Self::Resets => RESETS_PER_SECOND,
        }
    }
}

/// Defines a method for each port that returns it as a [`Port`], and one that sets it if code needs
/// that.
macro_rules! ports {
    ($($table:ident: $($port:ident $($set:ident)?),+;)+) => { $(
        impl<A> $table<A> { $(
            #[inline(always)]
            pub const fn $port(&self) -> Port {
                Port::new(self.$port)
            }

            $(
                #[inline(always)]
                pub const fn $set(&mut self, port: Port) {
                    self.$port = port.number();
                }
            )?
        )+ }
    )+ };
}

ports! {
    FrontendKey: port;
    FlowKey: lower_port, upper_port;
    Flow: client_port set_client_port, frontend_port set_frontend_port, backend_port set_backend_port,
        masquerade_port set_masquerade_port, alias_port set_alias_port;
    SocketOrigin: frontend_port set_frontend_port, backend_port set_backend_port;
}

const _: () = {
    assert!(size_of::<FrontendKey<[u8; 4]>>() == 8 && size_of::<FrontendKey<[u8; 16]>>() == 20);
    assert!(size_of::<Frontend>() == 8);
    assert!(size_of::<EndpointSet>() == 8 && align_of::<EndpointSet>() == 8);
    assert!(size_of::<Service>() == 32 && size_of::<ServiceName>() == 194);
    assert!(size_of::<Slot4>() == 16 && size_of::<Slot6>() == 32);
    assert!(size_of::<Backend<[u8; 4]>>() == 20 && size_of::<Backend<[u8; 16]>>() == 32);
    assert!(size_of::<FlowKey<[u8; 4]>>() == 16 && size_of::<FlowKey<[u8; 16]>>() == 40);
    assert!(size_of::<Flow<[u8; 4]>>() == 104 && size_of::<Flow<[u8; 16]>>() == 152);
    assert!(size_of::<FragmentKey<[u8; 4]>>() == 16 && size_of::<FragmentKey<[u8; 16]>>() == 40);
    assert!(size_of::<FirstFragment<[u8; 4]>>() == 32 && size_of::<FirstFragment<[u8; 16]>>() == 56);
    assert!(size_of::<SocketOrigin<[u8; 4]>>() == 20 && size_of::<SocketOrigin<[u8; 16]>>() == 44);
    assert!(size_of::<DatagramOrigins<[u8; 4]>>() == 84 && size_of::<DatagramOrigins<[u8; 16]>>() == 180);
    assert!(size_of::<Settings>() == 96 && size_of::<FlowState>() == 4 && size_of::<ServiceCounters>() == 24);
    assert!(
        size_of::<InterfaceSettings>() == 24 && size_of::<FourPorts>() == 8 && size_of::<RouteEpoch>() == 8
    );
    assert!(size_of::<VlanTag>() == 8);
    assert!(size_of::<LinkAddress>() == 8 && size_of::<RedirectTarget>() == 8);
    assert!(size_of::<ForeignFlow>() == 8);
    assert!(size_of::<Connections>() == 32 && size_of::<Collected>() == 16);
    assert!(size_of::<AffinityKey<[u8; 4]>>() == 12 && size_of::<AffinityKey<[u8; 16]>>() == 24);
    assert!(size_of::<Affinity>() == 16);
    assert!(size_of::<PrefixKey<SourceRange<[u8; 4]>>>() == 12);
    assert!(size_of::<PrefixKey<SourceRange<[u8; 16]>>>() == 24);
    assert!(
        size_of::<Lease>() == 8
            && size_of::<LogControl>() == 16
            && size_of::<EventControl>() == 24
            && size_of::<Event>() == 80
    );
    assert!(size_of::<IcmpErrorCount>() == 16);
};

#[cfg(feature = "user")]
mod pod {
    //! Declares which types aya may copy as plain bytes.
    use super::*;

    macro_rules! pod {
        ($($t:ty),* $(,)?) => { $(
            // SAFETY: the type is repr(C) and has integers and byte arrays only. Every byte belongs
            // to a field, and any pattern is valid.
            unsafe impl aya::Pod for $t {}
        )* };
    }
    pod!(
        Frontend,
        EndpointSet,
        Service,
        ServiceName,
        Slot4,
        Slot6,
        NodeAddress,
        InterfaceSettings,
        VlanTag,
        LinkAddress,
        RedirectTarget,
        FourPorts,
        ForeignFlow,
        Affinity,
        ServiceCounters,
        Connections,
        Collected,
        Settings,
        Lease,
        RouteEpoch,
        EventControl,
        Event,
        LogControl,
        IcmpErrorCount
    );

    macro_rules! pod_of_family {
        ($($t:ident),* $(,)?) => { $(
            // SAFETY: the reasons above hold. An `Address` is an array of 4 or 16 bytes, and the
            // sizes are asserted for both.
            unsafe impl<A: Address> aya::Pod for $t<A> {}
        )* };
    }
    pod_of_family!(
        FrontendKey,
        Backend,
        FlowKey,
        Flow,
        AffinityKey,
        FragmentKey,
        FirstFragment,
        SocketOrigin,
        SourceRange
    );

    // SAFETY: the reasons above hold for this type, too.
    unsafe impl<A: Address> aya::Pod for PrefixKey<SourceRange<A>> {}
    // SAFETY: the reasons above hold for this type, too.
    unsafe impl<A: Address> aya::Pod for PrefixKey<A> {}
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// The bytes 1, 2, 3, … of keys and values, and what they are read as.
    const RECORDED: &str = include_str!("layout-v1.txt");

    fn read_as<T: core::fmt::Debug>(lines: &mut String, table: &str, part: &str) {
        let bytes: Vec<u8> = (1..=size_of::<T>()).map(|byte| byte as u8).collect();
        // SAFETY: `bytes` is as long as `T`. Any bytes are valid for `T`, which has integers and
        // arrays of them only.
        let value: T = unsafe { core::ptr::read_unaligned(bytes.as_ptr().cast()) };
        *lines += &format!("{table} {part}, {} bytes: {value:x?}\n", bytes.len());
    }

    /// The maps of a node outlive the process that wrote them, and the next process may have
    /// another version.
    #[test]
    fn layouts_are_as_recorded() {
        type A4 = [u8; 4];
        type A6 = [u8; 16];
        let mut lines = String::new();
        macro_rules! record {
            ($($(#[doc = $doc:literal])* $name:ident: $kind:ident($key:ty, $value:ty), $entries:tt;)+) => { $(
                read_as::<$key>(&mut lines, stringify!($name), "key");
                read_as::<$value>(&mut lines, stringify!($name), "value");
            )+ };
        }
        crate::tables!(record);
        if std::env::var_os("WRITE_LAYOUT").is_some() {
            return std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/src/layout-v1.txt"), lines).unwrap();
        }
        assert_eq!(LAYOUT_VERSION, 1);
        for (line, recorded) in lines.lines().zip(RECORDED.lines()) {
            assert_eq!(line, recorded, "{CHANGED}");
        }
        assert_eq!(lines.lines().count(), RECORDED.lines().count(), "{CHANGED}");
    }

    const CHANGED: &str = "a layout has changed: where it was released, raise LAYOUT_VERSION and convert version 1; \
        before a release WRITE_LAYOUT=1 records it anew";

    #[rstest]
    #[case::all(0, [203, 0, 113, 1], true)]
    #[case::first_bit(1, [192, 0, 2, 1], false)]
    #[case::most_bits(25, [10, 244, 1, 127], true)]
    #[case::most_bits_and_one_differs(25, [10, 244, 1, 128], false)]
    #[case::each_bit(32, [10, 244, 1, 0], true)]
    #[case::each_bit_and_the_last_differs(32, [10, 244, 1, 1], false)]
    fn ranges(#[case] bits: u32, #[case] address: [u8; 4], #[case] expected: bool) {
        assert_eq!(address.is_in(&[10, 244, 1, 0], bits), expected);
        for place in [0, 4, 8, 12] {
            let of6 = |four: [u8; 4]| {
                let mut all = [7; 16];
                all[place..place + 4].copy_from_slice(&four);
                all
            };
            let bits = place as u32 * 8 + bits;
            assert_eq!(of6(address).is_in(&of6([10, 244, 1, 0]), bits), expected, "{place}");
        }
    }

    #[rstest]
    #[case::none(0, u64::MAX, false)]
    #[case::goes_on(7, 6, false)]
    #[case::just_now(7, 7, true)]
    #[case::long_ago(7, u64::MAX, true)]
    fn a_lease_ends(#[case] end: u64, #[case] now: u64, #[case] expected: bool) {
        assert_eq!(Lease { end }.has_ended(now), expected);
    }
}
