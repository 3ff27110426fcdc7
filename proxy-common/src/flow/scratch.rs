//! The memory in which a packet is worked on.

use super::{NextHop, Side, Stage, entries::KeyKind, open::flood_limit::Openings, ports::Try};
use crate::{
    balance::Draw,
    layout::*,
    packet::{Action, End, Ends, Packet},
    reason::Reason,
    select::{Detected, Origin},
};

/// Where a packet is worked on. In the kernel it is memory of the CPU: it would fill the stack, and the verifier would go through a
/// program once for each combination of what it knows of a value on the stack.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(8))]
pub struct Scratch<A> {
    pub packet: Packet<A>,
    /// What the packet becomes, where that is decided.
    pub action: Action<A>,
    /// Index of the interface that the packet comes in or leaves by.
    pub interface: u32,
    /// A process of the node has sent it; only of one that leaves.
    pub is_made_here: bool,
    /// `packet` is it. Its headers are reached without helpers, and the fast path (`fast_path.rs`) has
    /// looked at it.
    pub is_parsed: bool,
    /// Of a packet that arrives and `is_parsed`: no map had a flow with its ends.
    pub(super) has_no_flow: bool,
    /// The next hop of a packet that XDP forwards.
    pub next_hop: NextHop,
    /// Why the packet is not served as it has come; one inside it may be.
    pub unserved: Option<Reason>,
    /// Bytes of the headers that were before the packet, which has come in another; 0: it has not.
    pub outer_length: u32,
    /// Of the packet that this one was in, or is to be in.
    pub tunnel: Ends<A>,
    /// Where the packet comes from.
    pub(super) origin: Origin,
    pub(super) overlapping_flow: OverlappingFlow,
    /// Another flow has the packet's ends, and a client elsewhere. So the packet's flow is keyed
    /// by origin.
    pub(super) is_keyed_by_origin: bool,
    /// The client uses its port for a connection of its own to the backend.
    pub(super) is_port_taken: bool,
    pub(super) key_kind: KeyKind,
    pub(super) sender: Side,
    pub(super) own_key: FlowKey<A>,
    /// Why a routine has failed, if it has.
    pub(super) failure: Option<Reason>,
    /// How many ports were tried before.
    pub(super) attempt: u32,
    pub(super) tried: Try,
    /// The last random number that ports were tried with.
    pub(super) random: u32,
    pub clock: Clock,
    pub(super) openings: Openings,
    /// Where the entries of `flow` are, for a routine that goes through them.
    pub(super) stage: Stage,
    pub(super) key: FlowKey<A>,
    pub(super) flow: Flow<A>,
    /// One entry of `flow`, on its way from one map to the other.
    pub(super) entry: Flow<A>,
    /// That the packet dials, once it is found.
    pub(super) frontend: Frontend,
    /// Of the packet's client, once it is asked for.
    pub(super) detected: Detected,
    pub(super) affinity_key: AffinityKey<A>,
    pub(super) draw: Draw,
    pub(super) fragment_key: FragmentKey<A>,
    pub(super) first_fragment: FirstFragment<A>,
}

impl<A: Address> Scratch<A> {
    /// Returns the ends of a packet from the flow's backend to the client itself.
    #[inline(always)]
    pub fn direct_ends(&self) -> [End<A>; 2] {
        let Self { packet, flow, .. } = self;
        [(flow.backend, flow.backend_port()), (packet.source, packet.source_port)]
    }
}

impl<A> Scratch<A> {
    /// Returns true if the packet comes from beyond the uplink.
    #[inline(always)]
    pub fn is_from_outside(&self) -> bool {
        self.origin == Origin::Outside
    }

    /// Has the packet come in another?
    #[inline(always)]
    pub fn is_unpacked(&self) -> bool {
        self.outer_length != 0
    }
}

/// The flow that has the ends of a packet of another flow. It is in `scratch.flow`.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum OverlappingFlow {
    #[default]
    None,
    /// One of the same client, to the same backend.
    OfClient,
    /// One of another, masqueraded to the same address and port of the node.
    Masqueraded,
}

/// When a CPU has last asked for the time.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Clock {
    /// Counts the ticks of the kernel's timer.
    pub tick: u64,
    /// Nanoseconds as of [`now`](crate::map_access::AffinityMaps::now).
    pub time: u64,
}
