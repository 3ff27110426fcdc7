//! Keys and values of the BPF tables.
//!
//! `bpftool map dump name frontends4` is read by people, so ports are numbers in host byte order (a [`Port`] would be
//! shown as a struct; methods give and take it) and addresses are bytes in the order they are written. There is no padding that is not a named field:
//! a hash table compares keys byte by byte.
//!
//! Any change of a released layout raises [`LAYOUT_VERSION`], the name of the folder that the tables are pinned in. Tables of another
//! shape in that folder are refused when they are opened.

use core::mem::{align_of, size_of};

use crate::port::Port;

/// Version of every layout in this file; the tables live in `<bpffs>/proxy-ctl/v<LAYOUT_VERSION>/`.
pub const LAYOUT_VERSION: u32 = 1;

/// An address as tables hold it: 4 bytes of IPv4 or 16 bytes of IPv6, in network order.
pub trait Address: Copy + Eq + Default + AsRef<[u8]> + AsMut<[u8]> + 'static {
    const UNSPECIFIED: Self;
    const BITS: u32;

    /// `other` where all bits of `mask` are 1, itself where none is.
    fn or_if(&self, other: &Self, mask: u64) -> Self;

    /// 0: it is the other.
    fn difference(&self, other: &Self) -> u64;

    /// In an order like that of the addresses.
    fn halves(&self) -> [u64; 2];

    /// Are its first `bits` bits those of `range`?
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

/// In memory's order.
#[inline(always)]
fn words(address: &[u8; 16]) -> [u64; 2] {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *address;
    [u64::from_ne_bytes([a, b, c, d, e, f, g, h]), u64::from_ne_bytes([i, j, k, l, m, n, o, p])]
}

pub const PROTOCOL_TCP: u8 = 6;
pub const PROTOCOL_UDP: u8 = 17;

/// The frontend is the address in the key.
pub const SCOPE_ADDRESS: u8 = 0;
/// The frontend is this port on every address of `node_addresses4/6`; the address in the key is unspecified.
pub const SCOPE_NODE_PORT: u8 = 1;

/// Table `frontends4/6`, hash: what clients dial.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct FrontendKey<A> {
    pub address: A,
    port: u16,
    /// IANA number.
    pub protocol: u8,
    /// `SCOPE_*`.
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

    /// What says that the address is a ClusterIP: whatever has no frontend of its own there is nobody's. Port and protocol are 0, and so
    /// that no packet asks for it; its value is [`Frontend::NONE`].
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

/// Words of `frontend_addresses4/6`, arrays with a bit for each hash of an address. The bit is set
/// if some address with this hash has a frontend. Most packets without a flow are not for Services,
/// and one load tells that.
pub const FRONTEND_ADDRESS_WORDS: u32 = 8_192;

/// The frontend can be dialled from outside (node port, external IP, load-balancer IP): such clients
/// get the service's `external` set, clients on this node its `cluster` set. Without the flag (cluster IP)
/// every client gets `internal`.
pub const FRONTEND_EXTERNAL: u32 = 1;

/// Only clients in `source_ranges4/6` of the service get in.
pub const FRONTEND_SOURCE_RANGES: u32 = 2;

/// With `FRONTEND_EXTERNAL`: the external traffic policy is Local.
pub const FRONTEND_LOCAL_POLICY: u32 = 4;

/// The service has affinity, which goes by the address of the client.
pub const FRONTEND_AFFINITY: u32 = 8;

/// New connections draw their backend by a hash of their ends, where these are known: each node chooses the same.
pub const FRONTEND_MAGLEV: u32 = 16;

/// New connections draw two backends, and go to the one with fewer connections.
pub const FRONTEND_LEAST_CONNECTION: u32 = 32;
/// With `FRONTEND_EXTERNAL`: what clients outside send to backends of other nodes goes there in a packet of this node, and the answers
/// straight to the client (direct server return).
pub const FRONTEND_DSR: u32 = 64;

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Frontend {
    /// Index into `services`.
    pub service: u32,
    /// `FRONTEND_*`.
    pub flags: u32,
}

impl Frontend {
    /// Of no service.
    pub const NONE: Self = Self { service: NO_SERVICE, flags: 0 };
}

/// Contiguous slots of `slots4/6`, and the places that new connections draw from where these are not the slots themselves: copies of
/// them that follow at once. Aligned so that one 8-byte load or store moves all of it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C, align(8))]
pub struct EndpointSet {
    pub first: u32,
    /// Slots, in the lowest `TABLE_SHIFT` bits. In those above the binary logarithm of the copies' number; 0: there are none.
    sizes: u32,
}

const TABLE_SHIFT: u32 = 27;

impl EndpointSet {
    /// The most slots that a set can have.
    pub const MOST: u32 = (1 << TABLE_SHIFT) - 1;
    /// The most copies that can follow, as their binary logarithm.
    pub const MOST_TABLE_BITS: u32 = 16;

    /// Without copies.
    #[inline(always)]
    pub const fn new(first: u32, count: u32) -> Self {
        Self { first, sizes: count & Self::MOST }
    }

    /// With `2^bits` copies; 0: none.
    #[inline(always)]
    pub const fn with_table(self, bits: u32) -> Self {
        Self { sizes: self.count() | bits << TABLE_SHIFT, ..self }
    }

    /// As the tables hold it.
    #[inline(always)]
    pub const fn from_word(word: u64) -> Self {
        Self { first: word as u32, sizes: (word >> 32) as u32 }
    }

    #[inline(always)]
    pub const fn word(&self) -> u64 {
        (self.sizes as u64) << 32 | self.first as u64
    }

    /// Its slots.
    #[inline(always)]
    pub const fn count(&self) -> u32 {
        self.sizes & Self::MOST
    }

    #[inline(always)]
    pub const fn table_bits(&self) -> u32 {
        self.sizes >> TABLE_SHIFT
    }

    /// Slots and copies.
    pub const fn places(&self) -> u32 {
        self.count() + if self.table_bits() == 0 { 0 } else { 1 << self.table_bits() }
    }

    /// Where the places begin that are drawn from, and how many there are.
    #[inline(always)]
    const fn drawn_from(&self) -> (u32, u32) {
        let (count, table_bits) = (self.count(), self.table_bits());
        // Without a branch, as the verifier goes both ways from each: 1 where there are copies, and a mask.
        let is_copied = (table_bits + (u32::BITS - 1)) >> u32::BITS.ilog2();
        let mask = 0_u32.wrapping_sub(is_copied);
        (self.first.wrapping_add(count & mask), count & !mask | is_copied << table_bits)
    }

    /// The index that 32 bits choose, which are as likely to be any.
    #[inline(always)]
    pub const fn place(&self, bits: u32) -> u32 {
        let (start, size) = self.drawn_from();
        start.wrapping_add(scaled(bits, size))
    }

    /// Another index than `place`, which 32 bits choose, where there is another.
    #[inline(always)]
    pub const fn place_beside(&self, place: u32, bits: u32) -> u32 {
        let (start, size) = self.drawn_from();
        let step = scaled(bits, size.wrapping_sub(1)).wrapping_add(1);
        let drawn = place.wrapping_sub(start).wrapping_add(step);
        start.wrapping_add(if drawn < size { drawn } else { drawn.wrapping_sub(size) })
    }
}

/// The bits as a number below `size`, without a division.
#[inline(always)]
const fn scaled(bits: u32, size: u32) -> u32 {
    ((bits as u64 * size as u64) >> u32::BITS) as u32
}

/// Some endpoint is usable somewhere: an empty set then means "drop" (traffic policy Local without a local
/// endpoint), otherwise "refuse".
pub const SERVICE_HAS_ENDPOINTS: u32 = 1;
/// Traffic policies, for people: the endpoint sets are what they have led to.
pub const SERVICE_INTERNAL_LOCAL: u32 = 2;
pub const SERVICE_EXTERNAL_LOCAL: u32 = 4;
/// For people: its frontends have `FRONTEND_MAGLEV`.
pub const SERVICE_MAGLEV: u32 = 8;
/// For people: its frontends have `FRONTEND_LEAST_CONNECTION`.
pub const SERVICE_LEAST_CONNECTION: u32 = 16;
/// For people: its frontends have `FRONTEND_DSR`.
pub const SERVICE_DSR: u32 = 32;

/// Table `services`, mmapable array by service id: one entry for each service port and family. All zero: unused.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Service {
    /// Every usable endpoint in the cluster.
    pub cluster: EndpointSet,
    /// What clients of the cluster IP get (internal traffic policy).
    pub internal: EndpointSet,
    /// What clients from outside get (external traffic policy).
    pub external: EndpointSet,
    /// `SERVICE_*`.
    pub flags: u32,
    /// Length of client-IP affinity in seconds; 0: none.
    pub affinity_seconds: u32,
}

/// Key of an LPM trie.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(C)]
pub struct PrefixKey<K> {
    /// How many bits of `data` count, from its first byte on.
    pub bits: u32,
    pub data: K,
}

/// Table `source_ranges4/6`, LPM trie: addresses of clients that frontends with `FRONTEND_SOURCE_RANGES` are for. Of a key, all bits of
/// `service` count, and those of the range's prefix. Values say nothing.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(C)]
pub struct SourceRange<A> {
    /// Index into `services`.
    pub service: u32,
    pub address: A,
}

impl<A: Address> SourceRange<A> {
    /// The key of a range with this many bits.
    pub const fn of_prefix(service: u32, address: A, bits: u32) -> PrefixKey<Self> {
        PrefixKey { bits: u32::BITS + bits, data: Self { service, address } }
    }
}

/// Room in the tables `service_cidrs4/6`, LPM tries: where ClusterIPs are from, if what is sent to those that no service has is dropped.
/// Values say nothing.
pub const SERVICE_CIDRS: u32 = 256;

/// Room for a namespace, a name and a port name, each: Kubernetes allows 63 bytes.
pub const NAME_BYTES: usize = 64;

/// Table `service_names`, hash by service id: which service port an id is, for people and for the next
/// controller. No kernel program reads it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(C)]
pub struct ServiceName {
    /// Filled up with zeros, as the next two.
    pub namespace: [u8; NAME_BYTES],
    pub name: [u8; NAME_BYTES],
    /// All zero: the service's only port, which has no name.
    pub port: [u8; NAME_BYTES],
    /// IANA number.
    pub protocol: u8,
    /// 4 or 6.
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
/// Of a slot: its endpoint terminates, and has connections of the set only from nodes that do not know yet (direct server return).
pub const BACKEND_DRAINING: u32 = 2;
/// Of a slot: in the bits from here on, by how much its weight is more than 1.
pub const BACKEND_WEIGHT_SHIFT: u32 = 8;

/// Table `slots4`/`slots6`, mmapable array: all that the packet path needs of an endpoint. The slots of an endpoint set are in the
/// order of [`Slot::precedes`](crate::family::Slot::precedes), their copies in that of its [table](crate::balance).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Slot4 {
    pub address: [u8; 4],
    pub(crate) port: u16,
    pub(crate) _reserved: u16,
    /// Key of `backends4`.
    pub backend: u32,
    /// `BACKEND_*`.
    pub flags: u32,
}

/// As [`Slot4`].
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Slot6 {
    pub address: [u8; 16],
    pub(crate) port: u16,
    pub(crate) _reserved: u16,
    /// Key of `backends6`.
    pub backend: u32,
    /// `BACKEND_*`.
    pub flags: u32,
    pub(crate) _reserved2: u32,
}

pub const BACKEND_ACTIVE: u8 = 1;
/// No new connection should choose it unless nothing else is left; established ones stay.
pub const BACKEND_TERMINATING: u8 = 2;

/// Table `backends4/6`, hash by backend id: the endpoints that some service uses, or has used and that still serve. Ids grow and are
/// never given again, so an id that is not in the table is of a backend that is gone.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Backend<A> {
    pub address: A,
    /// Host byte order; only for people and the controller.
    pub port: u16,
    /// IANA number.
    pub protocol: u8,
    /// `BACKEND_ACTIVE` or `BACKEND_TERMINATING`.
    pub state: u8,
    /// How many service ports use it.
    pub uses: u32,
    /// `BACKEND_LOCAL`.
    pub flags: u32,
    /// 0: shared by all service ports that use the endpoint. UDP: a hash of the name of the one service port whose
    /// it is, so that the backend is gone as soon as the endpoint is gone from that port, and its flows see it.
    pub owner: u32,
}

/// Place in an array `<table>_maps`: the map that new entries go into.
pub const MAP_IN_USE: u32 = 0;
/// Place in an array `<table>_maps`: the map of another size that was in use before, while its entries move; empty otherwise. An entry is in
/// the map in use before it leaves this one, so that who looks here first finds it.
pub const MAP_BEFORE: u32 = 1;

/// Table `flows4/6` (hash, confirmed flows) and `opening_flows4/6` (LRU hash, all others). The two ends that a flow's packets have at
/// a hook, in either direction.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(C)]
pub struct FlowKey<A> {
    /// The end with the lower port, or with the lower address where the ports are equal.
    pub lower: A,
    pub upper: A,
    lower_port: u16,
    upper_port: u16,
    /// IANA number.
    pub protocol: u8,
    /// 1: client and frontend of a `FLOW_OVERLAPPING`. With a [mark](Self::mark_of): client and
    /// frontend of a `FLOW_APART`.
    pub overlapping: u8,
    _reserved: u16,
}

/// 1 if the first number that differs is less in `one`, else 0. Without branches: the verifier would go on from each.
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
        // All ones where the ends change places.
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

    /// Returns what `overlapping` has in addition for client and frontend of a `FLOW_APART` whose
    /// client is where these flags say.
    #[inline(always)]
    pub const fn mark_of(flags: u32) -> u8 {
        let of_pod = if flags & FLOW_FROM_POD == 0 { 0 } else { Self::APART_OF_POD };
        let of_host = if flags & FLOW_FROM_HOST == 0 { 0 } else { Self::APART_OF_HOST };
        Self::APART | of_pod | of_host
    }
}

/// It leaves this node with an address of the node as its source, which is chosen where its first packet leaves.
pub const FLOW_MASQUERADE: u32 = 1;
/// The client is a process of this node whose packets are translated (socket balancing off).
pub const FLOW_FROM_HOST: u32 = 2;
/// Netfilter translates it, the programs do not. It has two entries, of the ends of its client's
/// packets and of those of its answers, so that no other flow gets these.
pub const FLOW_OF_NETFILTER: u32 = 4;
/// Its client and frontend are client and backend of another flow: the client has dialled an endpoint itself, from a port from which it
/// reaches the endpoint through a frontend already.
pub const FLOW_OVERLAPPING: u32 = 8;
/// Its client is this node's own address at a port that a masqueraded flow to the same backend had when it began: a connection of one of the
/// node's sockets, or one that netfilter masquerades. It gets another port where it leaves the node, and its own where answers come in.
pub const FLOW_FOREIGN: u32 = 16;
/// Its entry of client and frontend in `flows4/6` is counted as a connection of its backend.
pub const FLOW_COUNTED: u32 = 64;
/// Its client's packets come in by an interface of pods: those that come in by another are forged.
pub const FLOW_FROM_POD: u32 = 128;
/// When the flow was opened, another had its client and frontend, whose client is elsewhere: in a
/// pod, on this node or outside. One of the two clients is forged. The key of its client and
/// frontend has a mark of where its client is.
pub const FLOW_APART: u32 = 256;
/// Its packets leave the node as the client has sent them, each in a packet to the backend, whose node answers the client itself: no answer
/// is seen here (direct server return).
pub const FLOW_DSR: u32 = 32;
/// A segment of a connection that this node has not seen begin has opened the flow. Nothing proves
/// its client, so it is never established: it stays in the table that evicts, and the next segment
/// opens it again.
pub const FLOW_RESUMED: u32 = 512;

/// Nothing is heard of the backend.
pub const PROGRESS_OPENED: u8 = 0;
/// The backend has answered.
pub const PROGRESS_ANSWERED: u8 = 1;
/// UDP: the backend has answered seconds after the flow was opened.
pub const PROGRESS_SUSTAINED: u8 = 2;
/// The client has received an answer: its address is not forged.
pub const PROGRESS_CONFIRMED: u8 = 3;

/// A FIN was seen. It may be forged.
pub const FIN_SEEN: u8 = 1;
/// The other side has acknowledged it.
pub const FIN_ACKNOWLEDGED: u8 = 2;

/// A RST was seen that its receiver may have taken. It may be forged.
pub const RESET_PLAUSIBLE: u8 = 1;
/// A RST was seen with exactly the sequence number that its receiver waits for.
pub const RESET_CONFIRMED: u8 = 2;

/// What is known of the stream of bytes that one side of a TCP connection receives. Sequence numbers, host byte order.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct Numbers {
    /// How far the stream has come. In the entry of the side that receives it, what that side last acknowledged; in the sender's, the
    /// end of what was sent.
    pub reached: u32,
    /// By acknowledging this number, the side confirms the other's SYN or FIN. The same in both sides' entries.
    pub awaited: u32,
}

/// What has become of a flow. Each is a byte of its own: one CPU can change it without undoing what another has learned.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct FlowState {
    /// `PROGRESS_*`.
    pub progress: u8,
    /// 0 or `FIN_*`: the client's.
    pub client_fin: u8,
    /// 0 or `FIN_*`: the backend's.
    pub backend_fin: u8,
    /// 0 or `RESET_*`: from either.
    pub reset: u8,
}

/// Whole in each of a flow's entries, so that each can rebuild the others: client and frontend; client (with the alias port) and
/// backend; masquerade and backend.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct Flow<A> {
    /// Nanoseconds since boot, suspend included. First, because the kernel may give an element that is removed to another flow while
    /// it is read: what follows is of the flow that it was looked up for if this is the same before and after.
    pub opened: u64,
    /// Nanoseconds since boot, suspend included; up to a second late.
    pub last_seen: u64,
    pub client: A,
    pub frontend: A,
    pub backend: A,
    /// Source address towards the backend, where `masquerade_port` is not 0.
    pub masquerade: A,
    client_port: u16,
    frontend_port: u16,
    backend_port: u16,
    /// 0: none is chosen.
    masquerade_port: u16,
    /// The client's port as the backend's side of this node sees it: differs from `client_port` only where the
    /// same client port already talks to the same backend through another frontend, and with `FLOW_FROM_HOST`.
    alias_port: u16,
    /// IANA number.
    pub protocol: u8,
    /// Where XDP may send packets of the flow on: the stack has brought one to the egress of an uplink, with `FLOW_DSR` one of the client, without it
    /// an answer, if it [has left](Self::has_left).
    pub left: u8,
    /// Key of `backends4/6`.
    pub backend_id: u32,
    /// Index into `services`; `NO_SERVICE`: the client dialled the backend itself.
    pub service: u32,
    /// `FLOW_*`.
    pub flags: u32,
    /// `Settings::epoch` when frontend and backend were last found to be in service; TCP: the backend, where connections are reset.
    pub epoch: u32,
    /// TCP. Up to date in the entry of client and frontend.
    pub client_numbers: Numbers,
    /// TCP. Up to date in the entry of client and backend.
    pub backend_numbers: Numbers,
    pub state: FlowState,
    /// Of the packets that this entry is found for, where the driver sends them on. In the entry of client and backend of a flow to a pod: that XDP sends
    /// the client's packets to the interface of this stamp.
    pub next_hop: KnownHop,
}

/// A [`NextHop`](crate::flow::NextHop) that the routing tables have named. The upper 48 bits of the words are the destination's link address, the
/// source's, and index of the interface and length of the longest packet. Each word is replaced by one store. Its lower bits are a part of
/// a stamp, by which words of different lookups are told apart.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct KnownHop {
    pub(crate) words: [u64; 3],
}

/// Table `route_epoch`, mmapable array with one entry.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C, align(8))]
pub struct RouteEpoch {
    /// Rises after each change of routes, neighbours or interfaces that the controller is told of: next hops are then looked up once more.
    pub number: u32,
    pub _reserved: u32,
}

/// Table `foreign_flows4/6`, LRU hash by the ends of a connection that leaves with this node's address, to which flows are masqueraded too,
/// and of which the programs know nothing else.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct ForeignFlow {
    /// Nanoseconds since boot, suspend included. TCP: of its SYN. UDP: up to a second late.
    pub last_seen: u64,
}

/// The client is beyond the uplink, so that its address may be forged.
pub const CLIENT_OUTSIDE: u32 = 0;
/// The client is in a pod of this node.
pub const CLIENT_WORKLOAD: u32 = 1;
/// The node itself is one client, by whatever address.
pub const CLIENT_NODE: u32 = 2;

/// Who has affinity.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct Client<A> {
    /// Unspecified: the node itself.
    pub address: A,
    /// `CLIENT_*`.
    pub origin: u32,
}

/// Table `affinity4/6`, LRU hash: clients of service ports with affinity.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct AffinityKey<A> {
    /// Index into `services`.
    pub service: u32,
    pub client: Client<A>,
}

/// Where the client's new connections go, as long as it lasts and the backend is in the endpoint set that they are for.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct Affinity {
    /// Nanoseconds since boot, suspend included: the client's last new connection.
    pub last_used: u64,
    /// Key of `backends4/6`.
    pub backend: u32,
    /// `BACKEND_*`, as the slot had it.
    pub flags: u32,
}

/// Of a packet that enters the node.
pub const FRAGMENT_ARRIVING: u8 = 0;
/// Of a packet that leaves the node.
pub const FRAGMENT_LEAVING: u8 = 1;
/// It has come in another packet.
pub const FRAGMENT_UNPACKED: u8 = 2;

/// Table `fragments4/6`, LRU hash: the packet that a fragment is a part of, as it is at a hook of one direction.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct FragmentKey<A> {
    pub source: A,
    pub destination: A,
    /// Host byte order. IPv4 has 16 bits of it.
    pub id: u32,
    /// IANA number. 0 for IPv6: its stack knows what belongs together without it, and a later fragment need not have it.
    pub protocol: u8,
    /// `FRAGMENT_*`.
    pub direction: u8,
    pub(crate) _reserved: u16,
}

/// It goes on as it is.
pub const FATE_PASSED: u32 = 0;
/// It goes no further.
pub const FATE_DROPPED: u32 = 1;
/// It gets the addresses, and goes on.
pub const FATE_TRANSLATED: u32 = 2;
/// As `FATE_TRANSLATED`, by the route to its new destination.
pub const FATE_REROUTED: u32 = 3;
/// As `FATE_TRANSLATED`, into the node by the interface that leads to its new source.
pub const FATE_INTO_NODE: u32 = 4;
/// As `FATE_TRANSLATED`, in a packet to the backend.
pub const FATE_ENCAPSULATED: u32 = 5;
/// Untouched, past the stack.
pub const FATE_PAST_STACK: u32 = 6;

/// What became of the first fragment, so of the others.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct FirstFragment<A> {
    /// Nanoseconds since boot, suspend included. First for the same reason as in [`Flow`].
    pub seen: u64,
    pub source: A,
    pub destination: A,
    /// Index into `services` that the packet counts for, or `NO_SERVICE`.
    pub service: u32,
    /// `FATE_*`.
    pub fate: u32,
    /// As in the key: the kernel may give the element to another packet at any time.
    pub id: u32,
    /// Index of the interface that the first fragment has come or left by.
    pub interface: u32,
}

/// Table `socket_origin4/6`, socket storage: what a connected socket dialled, and where it was sent.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct SocketOrigin<A> {
    pub frontend: A,
    pub backend: A,
    frontend_port: u16,
    backend_port: u16,
    /// Key of `backends4/6`.
    pub backend_id: u32,
    /// Index into `services`, and `SOCKET_COUNTED`: the value is as long as it was before that was there.
    service: u32,
}

/// As long as the socket is open, and in `socket_origin4/6`, it is counted as a connection of its backend. No service has so large an index.
const SOCKET_COUNTED: u32 = 1 << 31;

impl<A> SocketOrigin<A> {
    /// Index into `services`.
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

/// In place of a backend's id, which is lower: the entries of `flows4` whose flows
/// [prove no client](Flow::proves_no_client).
const UNPROVEN_ENTRIES4: u32 = u32::MAX;
/// The id for the entries of `flows6`, as `UNPROVEN_ENTRIES4` is for those of `flows4`.
const UNPROVEN_ENTRIES6: u32 = u32::MAX - 1;

/// Returns the id under which `connections` has the entries of one family's established flows
/// that [prove no client](Flow::proves_no_client).
#[inline(always)]
pub const fn unproven_entries<A: Address>() -> u32 {
    if A::BITS == u32::BITS { UNPROVEN_ENTRIES4 } else { UNPROVEN_ENTRIES6 }
}

/// Returns false for what `connections` counts in place of a backend.
pub const fn is_backend(id: u32) -> bool {
    id < UNPROVEN_ENTRIES6
}

/// Table `connections`, hash by backend id: what of its connections through service ports with `FRONTEND_LEAST_CONNECTION` the programs
/// have seen begin and end. Only they write it, until the backend is gone: what is open is this without [`Collected`].
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Connections {
    /// Flows with `FLOW_COUNTED`.
    pub flows_opened: u64,
    pub flows_closed: u64,
    /// Sockets that [are counted](SocketOrigin::is_counted).
    pub sockets_opened: u64,
    pub sockets_closed: u64,
}

/// Table `collected`, hash by backend id: the connections of [`Connections`] that have ended otherwise. Only the controller writes it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Collected {
    /// May be less than 0, which wraps: where the programs have missed one that began.
    pub flows: u64,
    /// As `flows`.
    pub sockets: u64,
}

impl Connections {
    /// Flows and sockets that are open now. `collected`: [`Collected::sum`].
    #[inline(always)]
    pub const fn open(&self, collected: u64) -> u64 {
        let begun = self.flows_opened.wrapping_add(self.sockets_opened);
        let ended = self.flows_closed.wrapping_add(self.sockets_closed).wrapping_add(collected);
        let open = begun.wrapping_sub(ended);
        // What was missed may make it less than 0: without a branch, all ones then.
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

/// Table `service_counters`, per-CPU array by index into `services`: what a service's clients did. Services with
/// larger indexes than the table has places are not counted.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct ServiceCounters {
    /// Sockets that were connected, unconnected sockets' first datagrams to it, and flows that were opened.
    pub connections: u64,
    /// Packets of flows, both directions. Those of sockets that were sent to a backend when they connected are not
    /// seen.
    pub packets: u64,
    /// Bytes of these packets, as the hook sees them: with link header, several segments where they are merged.
    pub bytes: u64,
}

/// An index into `services` that is never used.
pub const NO_SERVICE: u32 = u32::MAX;

/// Services that one unconnected UDP socket can talk to at the same time with exact answers.
pub const DATAGRAM_ORIGINS: usize = 4;

/// Table `datagrams4/6`, socket storage: the services an unconnected UDP socket sent to. A zero
/// `frontend_port` marks a free place.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct DatagramOrigins<A> {
    pub origins: [SocketOrigin<A>; DATAGRAM_ORIGINS],
    /// Place that the next new service takes.
    pub next: u32,
}

/// Table `node_addresses4/6`, hash by address: where node ports are served.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct NodeAddress {
    /// `NODE_ADDRESS_*`.
    pub flags: u32,
}

/// Loopback: serves node ports for processes of the node's own network namespace only.
pub const NODE_ADDRESS_LOOPBACK: u32 = 1;

/// What comes in by the interface is traffic of pods.
pub const INTERFACE_OF_PODS: u16 = 1;
/// It is an uplink: packets may leave by it past the stack.
pub const INTERFACE_OF_UPLINK: u16 = 2;
/// Its packets have no link headers, as those of IPIP and WireGuard.
pub const INTERFACE_WITHOUT_LINK_HEADERS: u16 = 4;

/// It is the port of a bridge. Frames for the bridge come by it too.
pub const INTERFACE_OF_BRIDGE: u16 = 8;

/// Table `interfaces`, hash by interface index: what the programs need to know of those of which they need to know anything.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct InterfaceSettings {
    /// Source of translated flows that leave by it. Unspecified: the interface has none of this family, and that of [`Settings`] is taken.
    pub masquerade6: [u8; 16],
    /// As `masquerade6`.
    pub masquerade4: [u8; 4],
    /// `INTERFACE_*`.
    pub flags: u16,
    /// Bytes of the longest packet that leaves by it, without link header; 0: of any length. Uplinks have it.
    pub mtu: u16,
}

/// Table `vlan_devices`, hash by tag → index of the interface that the stack gives a packet with it to. It has uplinks only.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
#[repr(C)]
pub struct VlanTag {
    /// Index of the interface that the packet comes by: of the inner one of two tags, the interface of the outer one.
    pub interface: u32,
    /// `TAG_*`, host byte order.
    pub protocol: u16,
    /// 1 to 4094.
    pub id: u16,
}

/// Room in the tables `redirect_sources` and `redirect_targets`.
pub const REDIRECTS: u32 = 512;

/// Table `redirect_sources`, hash by interface index: uplinks whose frames XDP may send on by others, with their own link address. What is for
/// another address is only seen by them.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct LinkAddress {
    pub bytes: [u8; 6],
    pub _padding: [u8; 2],
}

/// Table `redirect_targets`, map of devices: uplinks and interfaces of pods that XDP may send frames on by which have come by others. The key is the interface index,
/// of a pod with [`TO_POD`], for frames in fragments with [`IN_FRAGMENTS`]. When a device goes, the kernel removes its entries.
///
/// As the kernel's `bpf_devmap_val`.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct RedirectTarget {
    pub interface: u32,
    /// 0: none.
    pub program: u32,
}

/// Indexes of interfaces have neither this bit nor the next one.
pub const IN_FRAGMENTS: u32 = 1 << 31;
pub const TO_POD: u32 = 1 << 30;

/// Ethertype of 802.1Q.
pub const TAG_CUSTOMER: u16 = 0x8100;
/// Ethertype of 802.1ad.
pub const TAG_SERVICE: u16 = 0x88a8;

/// Nothing tells traffic of pods from other traffic.
pub const PODS_UNKNOWN: u16 = 0;
/// Traffic of pods has a source in `Settings::pod_range4/6`.
pub const PODS_BY_SOURCE: u16 = 1;
/// Traffic of pods comes in by interfaces with `INTERFACE_OF_PODS`.
pub const PODS_BY_INTERFACE: u16 = 2;

/// With direct server return, packets go to backends of other nodes in IP alone.
pub const ENCAPSULATION_IP: u16 = 0;
/// In UDP, by Geneve.
pub const ENCAPSULATION_GENEVE: u16 = 1;

/// Table `settings`, array with one entry: what the programs need to know of the node.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Settings {
    /// Network namespace of the node, as `bpf_get_netns_cookie` gives it.
    pub host_namespace: u64,
    /// Cookie of the socket by which the controller learns its namespace on kernels without SO_NETNS_COOKIE.
    pub probe_socket: u64,
    /// Source of translated flows, IPv6, where `interfaces` has none; unspecified: none.
    pub masquerade6: [u8; 16],
    /// As `masquerade6`, IPv4.
    pub masquerade4: [u8; 4],
    /// Those of `masquerade_ports` that are apart lie in these: up to two ranges, inclusive, host byte order; first > last: empty. The
    /// programs of former versions know no others.
    pub apart_ports: [[u16; 2]; 2],
    /// The next backend id that was never given.
    pub next_backend: u32,
    /// Rises after each change of what frontends lead to: datagrams of flows, and segments where connections are
    /// reset, are then compared with the tables once more.
    pub epoch: u32,
    /// How many ports the table `masquerade_ports` has for translated sources and aliases.
    pub masquerade_ports: u16,
    /// How many of them, the first ones, are apart: the kernel gives them to no socket.
    pub masquerade_ports_apart: u16,
    /// Addresses of pods, IPv6, with `PODS_BY_SOURCE`.
    pub pod_range6: [u8; 16],
    /// As `pod_range6`, IPv4.
    pub pod_range4: [u8; 4],
    /// How many bits of `pod_range6` count, from its first byte on.
    pub pod_range6_bits: u8,
    /// As `pod_range6_bits`, IPv4.
    pub pod_range4_bits: u8,
    /// 1: all clients of cluster IPs are masqueraded, where the programs masquerade as kube-proxy does.
    pub masquerade_all: u8,
    /// 1: no packet opens a flow, as not all interfaces have their programs yet.
    pub packets_held: u8,
    /// `PODS_*`: how traffic of pods is told from other traffic, IPv6.
    pub pods6: u16,
    /// `ENCAPSULATION_*`. What other nodes have sent is taken out of either.
    pub encapsulation: u16,
    /// As `pods6`, IPv4.
    pub pods4: u16,
    /// 1: segments of connections that no table knows are answered, as netfilter translates none of
    /// them.
    pub answers_unknown: u8,
    pub _reserved: u8,
    /// How many flows of each family a CPU opens in a window ([`openings_per_window`](crate::flow::openings_per_window)) before services are
    /// held to their shares; 0: any number.
    pub openings_per_window: u32,
    /// The most entries of `flows4`, and of `flows6`, that flows which
    /// [prove no client](Flow::proves_no_client) may have; 0: any number.
    pub most_unproven_entries: u32,
}

/// Table `masquerade_ports`, array: the ports of translated sources, four in an element; [`Settings`] say how many.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C, align(8))]
pub struct FourPorts {
    /// Host byte order.
    pub ports: [u16; 4],
}

/// Ports that there are, 0 included.
pub const PORTS: u32 = 1 << 16;
/// Ports that `masquerade_ports` has room for.
pub const MASQUERADE_PORT_ROOM: u32 = PORTS;

/// Table `lease`, array with one entry: how long the programs may rely on the tables without their controller.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Lease {
    /// Nanoseconds since boot, suspend included; 0: none.
    pub end: u64,
}

impl Lease {
    /// Nobody has followed changes since: the programs pass everything on untouched.
    #[inline(always)]
    pub const fn has_ended(&self, now: u64) -> bool {
        self.end != 0 && now >= self.end
    }
}

/// Table `event_control`, array with one entry: what the programs tell of in `events`.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct EventControl {
    /// Nanoseconds since boot, suspend included: from then on they tell nothing. 0: nobody watches.
    pub until: u64,
    /// A bit for each reason that they tell of, by number.
    pub reasons: u64,
    /// They tell one of so many, at random; 0 and 1: each.
    pub one_of: u64,
}

/// Table `kernel_log`, array with one entry: whether the programs log, and how much they did. Each load of the programs
/// has its own.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct LogControl {
    /// Seconds since boot: when `lines` was last counted from 0.
    pub second: u64,
    /// Lines in that second, also those that were left out.
    pub lines: u32,
    /// 0: nothing is logged.
    pub enabled: u32,
}

/// How much the programs log at most.
pub const LOG_LINES_PER_SECOND: u32 = 20;

/// Size of `events` in bytes: room for 11,000 events.
pub const EVENT_BYTES: u32 = 1 << 20;

/// The event is a packet's.
pub const EVENT_OF_PACKET: u8 = 0;
/// The event is a system call's.
pub const EVENT_OF_SOCKET: u8 = 1;

/// Table `events`, ring buffer: what the programs tell of. IPv4 addresses are in the first four bytes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct Event {
    /// Nanoseconds since boot, suspend included.
    pub time: u64,
    /// Unspecified with port 0: a socket, whose address no hook knows.
    pub client: [u8; 16],
    /// What the client dialled.
    pub frontend: [u8; 16],
    /// Unspecified with port 0: there is none, or it is not known.
    pub backend: [u8; 16],
    /// Host byte order, as the next two.
    pub client_port: u16,
    pub frontend_port: u16,
    pub backend_port: u16,
    /// IANA number.
    pub protocol: u8,
    /// 4 or 6.
    pub family: u8,
    /// Number of a [`Reason`](crate::reason::Reason) that makes events.
    pub reason: u32,
    /// Index into `services`; `NO_SERVICE`: the client dialled the backend itself, or only the frontend says which it is.
    pub service: u32,
    /// Key of `backends4/6`; 0: none.
    pub backend_id: u32,
    /// `EVENT_OF_*`.
    pub place: u8,
    pub(crate) _reserved: [u8; 3],
}

/// Table `icmp_errors`, per-CPU array with one entry for each [`IcmpBudget`]: how many answers were
/// sent. Each load of the programs has its own.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct IcmpErrorCount {
    /// Since boot: when `errors` was last counted from 0.
    pub second: u64,
    /// In that second, also those that were left out.
    pub errors: u64,
}

/// The purpose of an ICMP error or a RST. Each has a budget of its own, so that a flood of refused
/// packets does not keep clients from learning which length of packets goes through.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum IcmpBudget {
    Refusals = 0,
    TooBig = 1,
    /// RSTs to segments of connections that no table knows.
    Resets = 2,
}

/// How many ICMP errors each CPU sends at most of each budget, as the kernel's net.ipv4.icmp_msgs_per_sec: their addressees may be forged.
pub const ICMP_ERRORS_PER_SECOND: u64 = 1_000;
/// The most segments of unknown connections that each CPU answers in a second. They take about a
/// hundredth of the CPU, and the clients of an address that moves learn it within seconds.
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

/// Each port by the name of its role, and a method that sets it where code does.
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
    //! What aya may copy as plain bytes.
    use super::*;

    macro_rules! pod {
        ($($t:ty),* $(,)?) => { $(
            // SAFETY: repr(C), integers and byte arrays only, every byte belongs to a field, any pattern is valid.
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
            // SAFETY: as above; an `Address` is an array of 4 or 16 bytes, for which the sizes are asserted.
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

    // SAFETY: as above.
    unsafe impl<A: Address> aya::Pod for PrefixKey<SourceRange<A>> {}
    // SAFETY: as above.
    unsafe impl<A: Address> aya::Pod for PrefixKey<A> {}
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// Bytes 1, 2, 3, … of keys and values, and what they are read as.
    const RECORDED: &str = include_str!("layout-v1.txt");

    fn read_as<T: core::fmt::Debug>(lines: &mut String, table: &str, part: &str) {
        let bytes: Vec<u8> = (1..=size_of::<T>()).map(|byte| byte as u8).collect();
        // SAFETY: `bytes` is as long as `T`, of which any bytes are valid: integers and arrays of them.
        let value: T = unsafe { core::ptr::read_unaligned(bytes.as_ptr().cast()) };
        *lines += &format!("{table} {part}, {} bytes: {value:x?}\n", bytes.len());
    }

    /// A node's tables outlive the process that wrote them, and the next one may be of another version.
    #[test]
    fn layouts_are_as_recorded() {
        type A4 = [u8; 4];
        type A6 = [u8; 16];
        let mut lines = String::new();
        macro_rules! record {
            ($($name:ident: $kind:ident($key:ty, $value:ty), $entries:tt;)+) => { $(
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
