//! Flows and host connections: the maps `flows4/6`, `opening_flows4/6` and `host_connections4/6`.

use super::Address;
use crate::port::Port;

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
    /// [`origin_bits`](Self::origin_bits): they are those of a `FLOW_KEYED_BY_ORIGIN`.
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
        // All bits are set if the ends change sides.
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
    const KEYED_BY_ORIGIN: u8 = 2;
    const ORIGIN_POD: u8 = 4;
    const ORIGIN_HOST: u8 = 8;

    /// Returns the bits that `overlapping` has in addition for client and frontend of a
    /// `FLOW_KEYED_BY_ORIGIN` whose client is where these flags say.
    #[inline(always)]
    pub const fn origin_bits(flags: u32) -> u8 {
        let of_pod = if flags & FLOW_FROM_POD == 0 { 0 } else { Self::ORIGIN_POD };
        let of_host = if flags & FLOW_FROM_HOST == 0 { 0 } else { Self::ORIGIN_HOST };
        Self::KEYED_BY_ORIGIN | of_pod | of_host
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
pub const FLOW_HOST_CONNECTION: u32 = 16;
/// The flow's entry of client and frontend in `flows4/6` is counted as a connection of its backend.
pub const FLOW_COUNTED: u32 = 64;
/// The client's packets come in by an interface of pods. Packets that come in by another interface
/// are forged.
pub const FLOW_FROM_POD: u32 = 128;
/// When the flow was opened, another flow had its client and frontend, with a client that is
/// elsewhere: in a pod, on this node or outside. One of the two clients is forged.
///
/// The key of client and frontend has bits for where the client is.
pub const FLOW_KEYED_BY_ORIGIN: u32 = 256;
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
    /// A token that lets XDP forward packets of the flow, if it
    /// [is the flow's](Self::is_forwardable).
    ///
    /// It is set when the stack has brought a packet to the egress of an uplink. With `FLOW_DSR`
    /// that is a packet of the client, otherwise an answer.
    pub forward_token: u8,
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
    /// The next hop of the packets that find this entry, if XDP forwards them.
    ///
    /// In the entry of client and backend of a flow to a pod it says something else: XDP sends the
    /// client's packets to the interface of this stamp.
    pub next_hop: CachedHop,
}

/// A [`NextHop`](crate::flow::NextHop) that the routing tables have named.
///
/// The upper 48 bits of the words are the link address of the destination, that of the source, and
/// the index of the interface with the length of the longest packet. Their lower bits are parts of
/// a stamp, which tells words of different lookups apart. Each word is replaced by one store.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[repr(C)]
pub struct CachedHop {
    pub(crate) words: [u64; 3],
}

/// Value of the map `host_connections4/6` (LRU hash, key: [`FlowKey`] of the ends).
///
/// Such a connection leaves with an address of this node to which flows are masqueraded, too. The
/// programs know nothing else of it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(C)]
pub struct HostConnection {
    /// The time of the last packet, in nanoseconds since boot, suspend included. For TCP it is that
    /// of the SYN, for UDP it may be up to a second late.
    pub last_seen: u64,
}

ports! {
    FlowKey: lower_port, upper_port;
    Flow: client_port set_client_port, frontend_port set_frontend_port, backend_port set_backend_port,
        masquerade_port set_masquerade_port, alias_port set_alias_port;
}

const _: () = {
    assert!(size_of::<FlowKey<[u8; 4]>>() == 16 && size_of::<FlowKey<[u8; 16]>>() == 40);
    assert!(size_of::<Flow<[u8; 4]>>() == 104 && size_of::<Flow<[u8; 16]>>() == 152);
    assert!(size_of::<FlowState>() == 4);
    assert!(size_of::<HostConnection>() == 8);
};
