//! The traits by which decisions reach the node. [`FlowMaps`] has the flow maps, settings, counters
//! and random numbers, [`FlowEntry`] is an element of a flow map, and [`PodSockets`] asks the kernel.
//! Programs and tests on the host implement them.

use super::{Clock, Routine, Scratch, ServiceOpenings, Side, run};
use crate::{family::Family, layout::*, map_access::AffinityMaps, port::Port, reason::Reason};

/// Which of the two maps a flow's entry lies in.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(u8)]
pub enum Stage {
    /// `opening_flows4/6`.
    #[default]
    Opening,
    /// `flows4/6`.
    Established,
}

/// A field of an entry that changes in place.
#[derive(Clone, Copy, Debug)]
pub enum Change<A> {
    LastSeen(u64),
    Epoch(u32),
    /// [`Numbers::reached`] of one side.
    Reached(Side, u32),
    /// [`Numbers::awaited`] of one side.
    Awaited(Side, u32),
    /// `PROGRESS_*`.
    Progress(u8),
    /// `FIN_*`.
    ClientFin(u8),
    /// `FIN_*`.
    BackendFin(u8),
    /// `RESET_*`.
    Reset(u8),
    Masquerade(A, Port),
    /// [`Flow::forward_token`].
    ForwardToken(u8),
    NextHop(CachedHop),
}

/// An entry of a flow map, in place. The kernel may give its memory to another flow at any time.
pub trait FlowEntry<A>: Copy {
    /// Into memory that is there already: a copy on the stack would fill it.
    fn read_into(&self, flow: &mut Flow<A>);
    fn opened(&self) -> u64;
    fn write(&self, change: Change<A>);
}

/// Why an entry was not inserted.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum InsertError {
    Exists,
    /// No room or no memory.
    Full,
}

/// Asks the kernel about a packet that enters the node: about the sockets of the pod that it comes
/// from, and where it goes.
pub trait PodSockets<A> {
    /// Returns true if one of them is connected from the client's port to the backend of the flow
    /// that the packet opens ([`Scratch::direct_ends`]): through the flow its answers would look
    /// like those of the frontend.
    fn is_connected(&self, scratch: &Scratch<A>) -> bool;
    /// Returns true unless the kernel would forward the packet as it is. Mostly its destination is
    /// an address of the node then, whose own sockets may serve it.
    fn stays_here(&self, scratch: &Scratch<A>) -> bool;
}

/// Stands for the sockets of packets that come from no pod.
pub struct UnknownSockets;

impl<A> PodSockets<A> for UnknownSockets {
    #[inline(always)]
    fn is_connected(&self, _: &Scratch<A>) -> bool {
        false
    }

    #[inline(always)]
    fn stays_here(&self, _: &Scratch<A>) -> bool {
        false
    }
}

/// The flow maps and the random numbers.
pub trait FlowMaps<F: Family>: AffinityMaps<F> {
    type Entry: FlowEntry<F::Address>;

    fn flow(&self, stage: Stage, key: &FlowKey<F::Address>) -> Option<Self::Entry>;
    /// Fails if the key exists.
    fn insert(
        &self,
        stage: Stage,
        key: &FlowKey<F::Address>,
        flow: &Flow<F::Address>,
    ) -> Result<(), InsertError>;
    /// False: there was none.
    fn remove(&self, stage: Stage, key: &FlowKey<F::Address>) -> bool;
    /// When the host connection was last seen, in nanoseconds as of [`now`](AffinityMaps::now).
    fn host_connection(&self, key: &FlowKey<F::Address>) -> Option<u64>;
    fn note_host_connection(&self, key: &FlowKey<F::Address>, now: u64);
    fn forget_host_connection(&self, key: &FlowKey<F::Address>);
    /// Returns true if a flow may have another key than its packets from this source port say: it
    /// is a `FLOW_OVERLAPPING` or `FLOW_KEYED_BY_ORIGIN`.
    fn is_remapped(&self, port: Port) -> bool;
    fn set_remapped(&self, port: Port);
    /// Returns true if the kernel gives this port to no socket of the node.
    fn is_reserved(&self, port: Port) -> bool;
    /// Copies a record of `fragments4/6`. False: there is none, or another has replaced it meanwhile.
    fn first_fragment(&self, key: &FragmentKey<F::Address>, into: &mut FirstFragment<F::Address>) -> bool;
    fn record_fragment(&self, key: &FragmentKey<F::Address>, first: &FirstFragment<F::Address>);
    /// Source of masqueraded packets that leave by this interface; unspecified: there is none.
    fn masquerade_address(&self, interface: u32) -> F::Address;
    /// The port at [`PortPool::index`](crate::port::PortPool::index), of those for masqueraded sources and aliases; [`Port::NONE`]:
    /// there is none.
    fn masquerade_port(&self, random: u32, attempt: u32) -> Port;
    /// Carries a [`Routine`] out, as [`run`] does.
    fn run(&self, scratch: &mut Scratch<F::Address>, routine: Routine)
    where
        Self: Sized,
    {
        run(self, scratch, routine);
    }
    /// As [`now`](AffinityMaps::now), late by a tick of the kernel's timer at most: a few milliseconds.
    fn recently(&self, _clock: &mut Clock) -> u64 {
        self.now()
    }
    /// May XDP send frames to a pod by this interface?
    fn xdp_sends_to(&self, interface: u32) -> bool;
    /// Returns true if packets that come from outside may skip the stack.
    fn may_skip_stack(&self) -> bool;
    /// May XDP send frames by others that have come by this interface?
    fn xdp_redirects_from(&self, interface: u32) -> bool;
    /// [`Settings::epoch`].
    fn epoch(&self) -> u32;
    /// [`RouteEpoch::number`].
    fn route_epoch(&self) -> u32;

    /// Are connections reset whose backend is gone?
    fn resets_gone(&self) -> bool;
    /// Is everybody masqueraded whom kube-proxy masquerades?
    fn masquerades_as_kube_proxy(&self) -> bool;
    /// [`Settings::masquerade_all`].
    fn masquerades_all(&self) -> bool;
    /// [`Settings::packets_held`].
    fn holds_packets(&self) -> bool;
    /// Returns true while flow maps are copied to maps of another size. A TCP flow that opened now
    /// might be missing in the copy. Datagrams are not held, as nobody would send them again.
    fn holds_openings(&self) -> bool;
    /// [`Settings::answers_unknown`].
    fn answers_unknown(&self) -> bool;
    /// Returns false if no frontend has the address, by `frontend_addresses4/6`.
    fn may_be_frontend(&self, address: &F::Address) -> bool;
    /// [`Settings::openings_per_window`].
    fn openings_per_window(&self) -> u32;
    /// [`Settings::most_unproven_entries`].
    fn most_unproven_entries(&self) -> u32;
    /// `ENCAPSULATION_*`.
    fn encapsulation(&self) -> u16;
    /// Returns true if `allow` lets a flow of the service open, by what is counted of it at its index
    /// among [`OPENING_SERVICES`](super::OPENING_SERVICES).
    fn count_opening(&self, service: u32, allow: impl FnOnce(&mut ServiceOpenings) -> bool) -> bool;
    fn random(&self) -> u32;
    /// Counts a reason in addition to that of the packet's outcome.
    fn count(&self, reason: Reason);
    /// As [`count`](Self::count), and tells those who watch of `scratch.flow`.
    fn tell(&self, _scratch: &mut Scratch<F::Address>, reason: Reason) {
        self.count(reason);
    }
    /// Counts a flow of a service.
    fn count_connection(&self, service: u32);
    /// One of the backend's connections, if the flow with these flags has `FLOW_COUNTED`.
    fn count_opened(&self, backend: u32, flags: u32);
    /// It is over.
    fn count_closed(&self, backend: u32, flags: u32);
}
