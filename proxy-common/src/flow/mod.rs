//! Decisions about packets: which flow one belongs to, what opens a flow, and how it is translated.
//!
//! A flow has an entry for each pair of ends that its packets have at the hooks of this node: client and frontend, client and backend,
//! and, where its source is translated too, masquerade and backend. Each entry serves both directions, so that a packet of a flow
//! costs one lookup.
//!
//! A flow opens in the table of opening flows, which evicts. Its entries are copied to the
//! established ones when the client has acknowledged the backend's SYN, whose number a client with
//! a forged address does not know. Datagrams prove nothing of their client: flows of datagrams that
//! go on for seconds may take a part of the established ones. So no flood can fill the table that
//! does not evict. The copies in the opening table stay until they age: a reader between two
//! lookups would otherwise find neither.
//!
//! The state of a flow is the union of what its entries know: no CPU overwrites what another learned.

pub mod collect;
pub mod copy;
mod describe;
mod direct;
mod entries;
mod foreign;
mod fragments;
mod guard;
mod known;
mod lifetimes;
mod masquerade;
mod next_hop;
mod open;
mod routine;
mod tcp;
#[cfg(test)]
mod tests;
mod transit;
mod tuples;
mod unknown;

pub use foreign::is_moved;
pub use guard::{OPENING_SERVICES, ServiceOpenings, openings_per_window};
pub use known::{arriving_known, leaving_known};
pub use lifetimes::FlowLifetimes;
pub use next_hop::{Driver, NextHop};
pub use routine::{Routine, run};
pub use tcp::Speaker;
pub use transit::in_transit;
pub use tuples::NetfilterConnection;
pub use unknown::frontend_address_bit;

use self::{
    entries::{Leg, is_stale},
    guard::Openings,
    tuples::Step,
};
use crate::{
    balance::Draw,
    family::Family,
    layout::*,
    packet::{Action, End, Ends, GENEVE, Packet, Part, Then},
    port::Port,
    reason::Reason,
    select::{self, Detected, Origin},
    tables::AffinityTables,
    unserved,
};

/// Which of the two tables a flow's entry lies in.
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
    Reached(Speaker, u32),
    /// [`Numbers::awaited`] of one side.
    Awaited(Speaker, u32),
    /// `PROGRESS_*`.
    Progress(u8),
    /// `FIN_*`.
    ClientFin(u8),
    /// `FIN_*`.
    BackendFin(u8),
    /// `RESET_*`.
    Reset(u8),
    Masquerade(A, Port),
    /// [`Flow::left`].
    Left(u8),
    NextHop(KnownHop),
}

/// An entry of a flow table, in place. The kernel may give its memory to another flow at any time.
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

/// What came of one of several ports that are tried.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum Try {
    #[default]
    Next,
    /// The entry with this port is inserted.
    Taken,
    /// The entry is there, at `scratch.key`: of another CPU's flow that is as good as ours.
    Joined,
    /// No other port is to be tried.
    Failed,
}

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
    /// `packet` is it. Its headers are reached without helpers, and [`arriving_known`] or [`leaving_known`] has looked at it.
    pub is_parsed: bool,
    /// Of a packet that arrives and `is_parsed`: no table had a flow with its ends.
    has_no_flow: bool,
    /// Of a packet in transit.
    pub next_hop: NextHop,
    /// Why the packet is not served as it has come; one inside it may be.
    pub unserved: Option<Reason>,
    /// Bytes of the headers that were before the packet, which has come in another; 0: it has not.
    pub outer_length: u32,
    /// Of the packet that this one was in, or is to be in.
    pub tunnel: Ends<A>,
    /// Where the packet comes from.
    origin: Origin,
    rival: Rival,
    /// Another flow has the packet's ends, and a client elsewhere.
    is_apart: bool,
    /// The client uses its port for a connection of its own to the backend.
    is_port_taken: bool,
    leg: Leg,
    speaker: Speaker,
    own_key: FlowKey<A>,
    /// Why a routine has failed, if it has.
    failure: Option<Reason>,
    /// How many ports were tried before.
    attempt: u32,
    tried: Try,
    /// The last random number that ports were tried with.
    random: u32,
    pub clock: Clock,
    openings: Openings,
    /// Where the entries of `flow` are, for a routine that goes through them.
    stage: Stage,
    key: FlowKey<A>,
    flow: Flow<A>,
    /// One entry of `flow`, on its way from one table to the other.
    entry: Flow<A>,
    /// That the packet dials, once it is found.
    frontend: Frontend,
    /// Of the packet's client, once it is asked for.
    detected: Detected,
    affinity_key: AffinityKey<A>,
    draw: Draw,
    fragment_key: FragmentKey<A>,
    first_fragment: FirstFragment<A>,
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

/// When a CPU has last asked for the time.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Clock {
    /// Counts the ticks of the kernel's timer.
    pub tick: u64,
    /// Nanoseconds as of [`now`](AffinityTables::now).
    pub time: u64,
}

/// The flow tables and the random numbers.
pub trait FlowTables<F: Family>: AffinityTables<F> {
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
    /// When the connection of others was last seen, in nanoseconds as of [`now`](AffinityTables::now).
    fn foreign(&self, key: &FlowKey<F::Address>) -> Option<u64>;
    fn note_foreign(&self, key: &FlowKey<F::Address>, now: u64);
    fn forget_foreign(&self, key: &FlowKey<F::Address>);
    /// Returns true if a flow may have another key than its packets from this source port say: it
    /// is a `FLOW_OVERLAPPING` or `FLOW_APART`.
    fn is_moved(&self, port: Port) -> bool;
    fn set_moved(&self, port: Port);
    /// Does the kernel give this port to no socket of the node?
    fn is_apart(&self, port: Port) -> bool;
    /// Copies a record of `fragments4/6`. False: there is none, or another has taken its place meanwhile.
    fn first_fragment(&self, key: &FragmentKey<F::Address>, into: &mut FirstFragment<F::Address>) -> bool;
    fn record_fragment(&self, key: &FragmentKey<F::Address>, first: &FirstFragment<F::Address>);
    /// Source of masqueraded packets that leave by this interface; unspecified: there is none.
    fn masquerade_address(&self, interface: u32) -> F::Address;
    /// The port at [`PortPool::place`](crate::port::PortPool::place), of those for masqueraded sources and aliases; [`Port::NONE`]:
    /// there is none.
    fn masquerade_port(&self, random: u32, attempt: u32) -> Port;
    /// Carries a [`Routine`] out, as [`run`] does.
    fn run(&self, scratch: &mut Scratch<F::Address>, routine: Routine)
    where
        Self: Sized,
    {
        run(self, scratch, routine);
    }
    /// As [`now`](AffinityTables::now), late by a tick of the kernel's timer at most: a few milliseconds.
    fn recently(&self, _clock: &mut Clock) -> u64 {
        self.now()
    }
    /// May XDP send frames to a pod by this interface?
    fn driver_sends_to(&self, interface: u32) -> bool;
    /// Do packets that come from outside leave by uplinks past the stack, where they may?
    fn sends_past_stack(&self) -> bool;
    /// May XDP send frames by others that have come by this interface?
    fn driver_redirects_from(&self, interface: u32) -> bool;
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
    /// Whether `admit` lets a flow of the service open, by what is counted of it at its place among [`OPENING_SERVICES`].
    fn count_opening(&self, service: u32, admit: impl FnOnce(&mut ServiceOpenings) -> bool) -> bool;
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

/// A flow that has the packet's ends. A copy of its entry is in `scratch.flow`.
#[derive(Clone, Copy)]
struct Found<E> {
    stage: Stage,
    entry: E,
    step: Step,
}

/// A packet that enters the node.
#[inline(always)]
pub fn arriving<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    origin: Origin,
    sockets: &impl PodSockets<F::Address>,
) -> Result<(), Reason> {
    scratch.origin = origin;
    scratch.fragment_key.direction =
        if scratch.is_unpacked() { FRAGMENT_UNPACKED } else { FRAGMENT_ARRIVING };
    if scratch.packet.is_later_fragment() {
        return decide(tables, scratch, Routine::FollowFragment);
    }
    let outcome = arriving_with_ports(tables, scratch, sockets);
    record_first_fragment(tables, scratch, outcome);
    outcome
}

/// A packet that leaves the node. `from_host`: a process of the node sends it, and no socket hook has seen its connection.
#[inline(always)]
pub fn leaving<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    from_host: bool,
) -> Result<(), Reason> {
    scratch.origin = Origin::Host;
    scratch.outer_length = 0;
    scratch.fragment_key.direction = FRAGMENT_LEAVING;
    if scratch.packet.is_later_fragment() {
        return decide(tables, scratch, Routine::FollowFragment);
    }
    let outcome = leaving_with_ports(tables, scratch, from_host);
    record_first_fragment(tables, scratch, outcome);
    outcome
}

/// Is the packet, which has come from outside, one of Geneve and for nobody by itself? Then the one that it carries may be for this node.
#[inline(always)]
pub fn may_carry_another<F: Family, T: FlowTables<F>>(tables: &T, scratch: &mut Scratch<F::Address>) -> bool {
    scratch.packet.destination_port == GENEVE && is_datagram_to_nobody(tables, scratch)
}

// Not inlined: what follows would be verified once more.
#[inline(never)]
fn is_datagram_to_nobody<F: Family, T: FlowTables<F>>(tables: &T, scratch: &mut Scratch<F::Address>) -> bool {
    let packet = &scratch.packet;
    if packet.protocol != PROTOCOL_UDP || packet.fragment.part != Part::Whole || packet.is_error() {
        return false;
    }
    scratch.origin = Origin::Outside;
    set_key_of_packet(scratch);
    lookup(tables, &scratch.key).is_none()
        && !find_frontend(tables, scratch)
        && why_unserved(tables, scratch) == Reason::NotAService
}

/// What a packet becomes that leaves the node with [`Then::Encapsulate`]: as the client has sent it, in one with the ends `scratch.tunnel`.
#[inline(always)]
pub fn encapsulating<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    decide(tables, scratch, Routine::Encapsulate)
}

/// A pod's answer that was to go past the stack with [`Then::PastStack`] is the stack's. `has_way`: other packets of its flow may go past it.
#[inline(always)]
pub fn not_past_stack<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    has_way: bool,
) {
    // Of a later fragment the flow is not known.
    if !has_way && !scratch.packet.is_later_fragment() {
        tables.run(scratch, Routine::LeaveToStack);
    }
    record_first_fragment(tables, scratch, Err(Reason::NotAService));
}

#[inline(always)]
fn record_first_fragment<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    outcome: Result<(), Reason>,
) {
    if scratch.packet.fragment.part == Part::First {
        scratch.failure = outcome.err();
        tables.run(scratch, Routine::RecordFragment);
    }
}

/// Carries out a routine that may fail.
#[inline(always)]
fn decide<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    routine: Routine,
) -> Result<(), Reason> {
    tables.run(scratch, routine);
    scratch.failure.map_or(Ok(()), Err)
}

#[inline(always)]
fn arriving_with_ports<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    sockets: &impl PodSockets<F::Address>,
) -> Result<(), Reason> {
    scratch.action.then = Then::Pass;
    set_key_of_packet(scratch);
    (scratch.rival, scratch.is_apart) = (Rival::None, false);
    // Not of a packet inside the one that was looked at.
    let has_no_flow = scratch.is_parsed && scratch.has_no_flow && !scratch.is_unpacked();
    let mut met = if has_no_flow { None } else { find(tables, scratch) };
    if met.is_none() && tables.is_moved(scratch.packet.source_port) {
        tables.run(scratch, Routine::FindMoved);
        met = find(tables, scratch);
    }
    if let Some(met) = met {
        if is_netfilters(tables, scratch, met.entry) {
            return Err(Reason::NotAService);
        }
        let own = own_of_arriving(tables, scratch, met);
        let is_over = scratch.packet.opens()
            && match own {
                Some(own) => own.step == Step::ToFrontend && is_over(tables, scratch, own.entry),
                None => !scratch.is_apart && scratch.flow.state.has_ended(),
            };
        if is_over {
            tables.run(scratch, Routine::Replace);
            scratch.rival = Rival::None;
            scratch.is_apart = scratch.flow.flags & FLOW_APART != 0;
        } else if let Some(own) = own {
            if own.step == Step::ToFrontend && !is_from_host(scratch) {
                end_if_gone(tables, scratch, own.entry)?;
            }
            if transit::answers_driver(tables, scratch, own.step) {
                scratch.action.then = Then::PastStack;
                return Ok(());
            }
            translate_arriving(scratch, own.step)?;
            if scratch.flow.flags & FLOW_DSR != 0 {
                scratch.stage = own.stage;
                return decide(tables, scratch, Routine::GoOnDirectly);
            }
            let step = own.step;
            go_on(tables, scratch, own)?;
            if transit::goes_past_stack(tables, scratch, step) {
                scratch.action.then = Then::PastStack;
            }
            return Ok(());
        }
    } else {
        scratch.key.overlapping = 0;
    }
    if scratch.packet.opens() || unknown::is_one(tables, scratch, sockets) {
        open(tables, scratch, sockets)
    } else {
        Err(Reason::NotAService)
    }
}

/// Returns the flow that an arriving packet belongs to, where `met` has its ends. None: it has none
/// of its own, and `scratch.rival` and `scratch.is_apart` say what stands in its way.
#[inline(always)]
fn own_of_arriving<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    met: Found<T::Entry>,
) -> Option<Found<T::Entry>> {
    let mut own = met;
    if met.step == Step::ToBackend {
        // The client dials the endpoint itself, and would get the answers of this flow, or this
        // flow its answers.
        scratch.key.overlapping = 1;
        let Some(overlapping) = find(tables, scratch) else {
            met.entry.read_into(&mut scratch.flow);
            scratch.rival = Rival::OfClient;
            return None;
        };
        own = overlapping;
    }
    if own.step != Step::ToFrontend || is_of_origin(scratch) {
        return Some(own);
    }
    // The other client may be forged, or this one.
    let overlapping = scratch.key.overlapping;
    if let Some(apart) = find_apart(tables, scratch) {
        return Some(apart);
    }
    own.entry.read_into(&mut scratch.flow);
    // Nobody forges the client of a connection that is up: its interface has got another role.
    // Datagrams that go on may all be forged, so that they do not follow the interface.
    let is_up = scratch.packet.is_tcp() && scratch.flow.state.progress == PROGRESS_CONFIRMED;
    if is_up && !scratch.packet.opens() {
        scratch.key.overlapping = overlapping;
        return Some(own);
    }
    scratch.is_apart = true;
    if overlapping != 0 {
        scratch.rival = Rival::OfClient;
    }
    None
}

/// Looks for the flow of the packet's client among those whose ends another flow has too.
#[inline(always)]
fn find_apart<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
) -> Option<Found<T::Entry>> {
    scratch.key.overlapping |= FlowKey::<F::Address>::mark_of(open::flag_of(scratch.origin));
    find(tables, scratch)
}

/// Sets `scratch.key` to another key at which the arriving packet has its flow, if it has one. The
/// flow with the usual key has ended first.
#[inline(always)]
fn find_moved<F: Family, T: FlowTables<F>>(tables: &T, scratch: &mut Scratch<F::Address>) {
    let apart = FlowKey::<F::Address>::mark_of(open::flag_of(scratch.origin));
    for overlapping in [apart, 1 | apart, 1] {
        scratch.key.overlapping = overlapping;
        if let Some((_, entry)) = lookup(tables, &scratch.key) {
            entry.read_into(&mut scratch.flow);
            // Packets of a host connection have it where they leave the node.
            if !is_foreign(scratch) {
                return;
            }
        }
    }
    scratch.key.overlapping = 0;
}

/// Returns true if the client of `scratch.flow` is where the packet, which arrives, comes from.
#[inline(always)]
fn is_of_origin<A>(Scratch { flow, origin, .. }: &Scratch<A>) -> bool {
    let is_nodes = flow.flags & (FLOW_FROM_HOST | FLOW_FOREIGN) != 0;
    is_nodes || (flow.flags & FLOW_FROM_POD != 0) == (*origin == Origin::Workload)
}

#[inline(always)]
fn leaving_with_ports<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    from_host: bool,
) -> Result<(), Reason> {
    scratch.action.then = Then::Pass;
    set_key_of_packet(scratch);
    let mut found = find(tables, scratch);
    (scratch.rival, scratch.is_apart) = (Rival::None, false);
    if found.is_some_and(|found| foreign::meets(scratch, found.step)) {
        scratch.rival = Rival::Masqueraded;
    }
    let has_rival = scratch.rival != Rival::None;
    if has_rival || (found.is_none() && tables.is_moved(scratch.packet.source_port)) {
        scratch.key.overlapping = 1;
        found = find(tables, scratch);
        if found.is_some() && scratch.packet.opens() && scratch.flow.state.has_ended() {
            tables.run(scratch, Routine::Replace);
            found = None;
        }
    }
    if from_host && !has_rival {
        let is_anothers = found.is_some_and(|found| is_another_clients(scratch, found.step));
        if is_anothers || (found.is_none() && tables.is_moved(scratch.packet.source_port)) {
            scratch.key.overlapping = 0;
            found = find_apart(tables, scratch);
            scratch.is_apart = is_anothers && found.is_none();
        }
    }
    if let Some(found) = found {
        if is_netfilters(tables, scratch, found.entry) {
            return Err(Reason::NotAService);
        }
        let is_hosts = from_host && found.step == Step::ToFrontend && is_from_host(scratch);
        if is_hosts && scratch.packet.opens() && is_over(tables, scratch, found.entry) {
            tables.run(scratch, Routine::Replace);
            scratch.is_apart = scratch.flow.flags & FLOW_APART != 0;
        } else {
            if found.step == Step::ToBackend
                && scratch.flow.flags & FLOW_MASQUERADE != 0
                && !scratch.flow.is_masqueraded()
            {
                if scratch.packet.is_error() {
                    return Err(Reason::NotAService);
                }
                scratch.stage = found.stage;
                decide(tables, scratch, Routine::Masquerade)?;
                scratch.action.rewrite = scratch.flow.masquerade_rewrite();
                return Ok(());
            }
            if found.step == Step::ToBackend && scratch.flow.flags & FLOW_DSR != 0 {
                // The flow was kept where the packet has come in.
                scratch.action.then = Then::Encapsulate;
                return Ok(());
            }
            if is_hosts {
                end_if_gone(tables, scratch, found.entry)?;
                scratch.action.then = Then::Reroute;
            }
            if transit::is_by_stack(scratch, found.step) {
                tables.run(scratch, Routine::LeaveToStack);
            }
            translate_leaving(scratch, found.step, is_hosts)?;
            go_on(tables, scratch, found)?;
            if transit::shows_way_out(tables, scratch, found.step) {
                tables.run(scratch, Routine::NoteLeft);
            }
            return Ok(());
        }
    }
    if from_host && !has_rival {
        scratch.action.then = Then::Reroute;
    }
    let outcome = if (from_host || has_rival) && scratch.packet.opens() {
        open(tables, scratch, &UnknownSockets)
    } else {
        Err(why_socket_is_unserved(tables, scratch))
    };
    if !has_rival && matches!(outcome, Err(Reason::NotAService)) {
        tables.run(scratch, Routine::NoticeForeign);
    }
    outcome
}

/// Returns true if the flow, which has the ends of a packet that a process of the node sends, has
/// another client: that one has forged the node's address.
#[inline(always)]
fn is_another_clients<A>(Scratch { flow, .. }: &Scratch<A>, step: Step) -> bool {
    const OF_NODE: u32 = FLOW_FROM_HOST | FLOW_FOREIGN | FLOW_OF_NETFILTER;
    step == Step::ToFrontend && flow.flags & OF_NODE == 0
}

/// What a packet of `scratch.flow` becomes where it enters the node.
#[inline(always)]
fn translate_arriving<A: Address>(scratch: &mut Scratch<A>, step: Step) -> Result<(), Reason> {
    let Scratch { packet, action, flow, .. } = scratch;
    let (is_foreign, is_from_host) = (flow.flags & FLOW_FOREIGN != 0, flow.flags & FLOW_FROM_HOST != 0);
    action.rewrite = match step {
        Step::ToFrontend if !is_from_host => flow.forward_rewrite(),
        Step::FromBackendMasqueraded => flow.unmasquerade_rewrite(),
        Step::FromBackend if is_foreign => flow.reply_rewrite(),
        Step::FromBackend if is_from_host => {
            action.then = Then::IntoNode;
            flow.reply_rewrite()
        }
        // At the egress it would look like an answer that has come to the masquerade.
        Step::FromBackend if flow.is_masqueraded() && packet.is_tcp() && !packet.is_error() => {
            return Err(Reason::ForgedAnswer);
        }
        Step::ToFrontend
        | Step::FromFrontend
        | Step::ToBackend
        | Step::FromBackend
        | Step::ToBackendMasqueraded => return Err(Reason::NotAService),
    };
    Ok(())
}

/// What a packet of `scratch.flow` becomes where it leaves the node. `is_hosts`: a process of the node sends it to the frontend.
#[inline(always)]
fn translate_leaving<A: Address>(scratch: &mut Scratch<A>, step: Step, is_hosts: bool) -> Result<(), Reason> {
    let Scratch { action, flow, .. } = scratch;
    action.rewrite = match step {
        Step::FromBackend => flow.reply_rewrite(),
        Step::ToBackend if flow.flags & FLOW_MASQUERADE != 0 => flow.masquerade_rewrite(),
        Step::ToFrontend if is_hosts || flow.flags & FLOW_FOREIGN != 0 => flow.forward_rewrite(),
        Step::ToFrontend
        | Step::FromFrontend
        | Step::ToBackend
        | Step::ToBackendMasqueraded
        | Step::FromBackendMasqueraded => return Err(Reason::NotAService),
    };
    Ok(())
}

/// The flow that has the ends of a packet which is not of it. It is in `scratch.flow`.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum Rival {
    #[default]
    None,
    /// One of the same client, to the same backend.
    OfClient,
    /// One of another, masqueraded to the same address and port of the node.
    Masqueraded,
}

// Not inlined: the key would lie on the stack on the way of each packet.
#[inline(never)]
fn set_key_of_packet<A: Address>(scratch: &mut Scratch<A>) {
    scratch.key = scratch.packet.key();
}

/// The flow at `scratch.key`. None also where the element has become another flow's meanwhile.
#[inline(always)]
fn find<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
) -> Option<Found<T::Entry>> {
    let (stage, entry) = lookup(tables, &scratch.key)?;
    found(scratch, stage, entry)
}

#[inline(always)]
fn found<A: Address, E: FlowEntry<A>>(scratch: &mut Scratch<A>, stage: Stage, entry: E) -> Option<Found<E>> {
    read(scratch, entry)?;
    let step = step_of_packet(scratch)?;
    Some(Found { stage, entry, step })
}

/// Copies an entry to `scratch.flow`. None: it has become another flow's meanwhile.
#[inline(always)]
fn read<A: Address>(scratch: &mut Scratch<A>, entry: impl FlowEntry<A>) -> Option<()> {
    entry.read_into(&mut scratch.flow);
    (entry.opened() == scratch.flow.opened).then_some(())
}

// Not inlined: the ends would lie on the stack on the way of each packet.
#[inline(never)]
fn step_of_packet<A: Address>(scratch: &Scratch<A>) -> Option<Step> {
    if scratch.is_unpacked() && !direct::is_for(scratch) {
        return None;
    }
    scratch.flow.step_of(&scratch.packet)
}

#[inline(always)]
fn lookup<F: Family, T: FlowTables<F>>(tables: &T, key: &FlowKey<F::Address>) -> Option<(Stage, T::Entry)> {
    if let Some(entry) = tables.flow(Stage::Established, key) {
        return Some((Stage::Established, entry));
    }
    tables.flow(Stage::Opening, key).map(|entry| (Stage::Opening, entry))
}

#[inline(always)]
fn is_from_host<A>(scratch: &Scratch<A>) -> bool {
    scratch.flow.flags & FLOW_FROM_HOST != 0
}

#[inline(always)]
fn is_foreign<A>(scratch: &Scratch<A>) -> bool {
    scratch.flow.flags & FLOW_FOREIGN != 0
}

/// Keeps a connection that netfilter translates.
#[inline(always)]
fn is_netfilters<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &Scratch<F::Address>,
    entry: T::Entry,
) -> bool {
    if scratch.flow.flags & FLOW_OF_NETFILTER == 0 {
        return false;
    }
    let now = tables.now();
    if is_stale(&scratch.flow, now) {
        entry.write(Change::LastSeen(now));
    }
    // The client dials again: the controller asks whether the connection has ended. The SYN may be
    // forged, so that it opens no flow before.
    if scratch.packet.opens() && scratch.flow.state.reset == 0 {
        entry.write(Change::Reset(RESET_PLAUSIBLE));
    }
    true
}

/// Opens a flow for a packet that has none of its own.
#[inline(always)]
fn open<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    sockets: &impl PodSockets<F::Address>,
) -> Result<(), Reason> {
    decide(tables, scratch, Routine::Prepare)?;
    let rival = scratch.rival;
    if rival != Rival::None {
        scratch.flow.flags |= FLOW_OVERLAPPING;
    }
    if scratch.is_apart {
        scratch.flow.flags |= FLOW_APART;
    }
    if rival == Rival::Masqueraded {
        scratch.flow.flags |= FLOW_FOREIGN;
    }
    scratch.is_port_taken = scratch.origin == Origin::Workload && sockets.is_connected(scratch);
    decide(tables, scratch, Routine::Insert)?;
    scratch.action.rewrite = scratch.flow.forward_rewrite();
    Ok(())
}

/// Makes `scratch.flow` one to what the packet dials.
#[inline(always)]
fn prepare<F: Family, T: FlowTables<F>>(tables: &T, scratch: &mut Scratch<F::Address>) -> Result<(), Reason> {
    prepare_flow(tables, scratch)?;
    if scratch.packet.is_tcp() && tables.holds_openings() { Err(Reason::OpeningsHeld) } else { Ok(()) }
}

#[inline(always)]
fn prepare_flow<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    let Scratch { origin, rival, .. } = *scratch;
    // Before the tables are read: a change meanwhile has them compared once more.
    scratch.flow.epoch = tables.epoch();
    if tables.holds_packets() {
        return Err(Reason::NotAService);
    }
    if scratch.is_unpacked() {
        return direct::prepare(tables, scratch);
    }
    if !scratch.packet.opens() {
        return unknown::prepare(tables, scratch);
    }
    let dials_frontend = rival != Rival::Masqueraded && find_frontend(tables, scratch);
    // To a node port at which another's datagrams are masqueraded: it would go round for ever.
    if dials_frontend && origin != Origin::Host && foreign::is_answer(tables, scratch) {
        return Err(Reason::NotAService);
    }
    if dials_frontend && !is_admitted(tables, scratch) {
        return Err(Reason::SourceNotAllowed);
    }
    if dials_frontend {
        if !guard::admits(tables, scratch) {
            return Err(Reason::ConnectionsLimited);
        }
        open::prepare_to_frontend(tables, scratch)?;
    } else if rival == Rival::None {
        return Err(why_unserved(tables, scratch));
    } else {
        open::prepare_to_endpoint(scratch);
    }
    Ok(())
}

/// Finds what the packet dials, as `scratch.frontend`.
// Not inlined, for the same reason.
#[inline(never)]
fn find_frontend<F: Family, T: FlowTables<F>>(tables: &T, scratch: &mut Scratch<F::Address>) -> bool {
    let found = select::find(tables, &scratch.packet.to(), scratch.origin);
    scratch.frontend = found.unwrap_or_default();
    found.is_some()
}

/// Why nobody serves the packet, which dials no frontend.
// Not inlined, for the same reason.
#[inline(never)]
fn why_unserved<F: Family, T: FlowTables<F>>(tables: &T, scratch: &Scratch<F::Address>) -> Reason {
    unserved::reason(tables, &scratch.packet.destination)
}

/// As [`why_unserved`], of a packet that leaves. The hook on `connect` has let datagram sockets of the node pass.
#[inline(always)]
fn why_socket_is_unserved<F: Family, T: FlowTables<F>>(tables: &T, scratch: &Scratch<F::Address>) -> Reason {
    let Scratch { packet, is_made_here, .. } = scratch;
    let is_of_socket = *is_made_here && !packet.is_tcp() && packet.opens();
    if is_of_socket { why_unserved(tables, scratch) } else { Reason::NotAService }
}

/// Does `scratch.frontend` serve the packet's client?
// Not inlined, for the same reason.
#[inline(never)]
fn is_admitted<F: Family, T: FlowTables<F>>(tables: &T, scratch: &Scratch<F::Address>) -> bool {
    select::admits(tables, scratch.frontend, &scratch.packet.source)
}

/// A packet of a flow: learns what it says, and keeps the flow's entries.
#[inline(always)]
fn go_on<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    found: Found<T::Entry>,
) -> Result<(), Reason> {
    if scratch.packet.is_error() {
        return Ok(());
    }
    scratch.stage = found.stage;
    if found.step == Step::FromBackendMasqueraded {
        // It is heard, and keeps the flow, where it leaves for the client: if it has an entry there.
        let is_stale = is_stale(&scratch.flow, tables.recently(&mut scratch.clock));
        if is_stale
            && Leg::Backend.set_key(tables, scratch)
            && tables.flow(found.stage, &scratch.key).is_none()
        {
            tables.run(scratch, Routine::Refresh);
        }
        return Ok(());
    }
    let mut is_confirmed = false;
    if matches!(found.step, Step::ToFrontend | Step::FromBackend) {
        let speaker = if found.step == Step::ToFrontend { Speaker::Client } else { Speaker::Backend };
        if scratch.packet.is_tcp() {
            tcp::hear(tables, scratch, speaker, found.entry);
            is_confirmed =
                speaker == Speaker::Client && tcp::confirms(&scratch.flow, &scratch.packet.segment);
        } else if speaker == Speaker::Client {
            is_confirmed = scratch.flow.state.progress == PROGRESS_SUSTAINED;
        } else if scratch.flow.state.progress < PROGRESS_SUSTAINED {
            hear_datagram(tables, scratch, found);
        }
    }
    if scratch.flow.state.has_ended() {
        // Also if it was found among the opening ones: another CPU may be establishing it.
        tables.run(scratch, Routine::Retire);
        return Ok(());
    }
    // A SYN keeps no connection that its backend may have forgotten.
    if found.step == Step::ToFrontend && scratch.packet.is_tcp() && scratch.packet.opens() {
        return Ok(());
    }
    let is_stale = is_stale(&scratch.flow, tables.recently(&mut scratch.clock));
    if found.stage == Stage::Opening {
        if is_confirmed {
            found.entry.write(Change::Progress(PROGRESS_CONFIRMED));
        }
        // Where there was no room among the established ones, it is tried again.
        if is_confirmed || (is_stale && scratch.flow.state.progress == PROGRESS_CONFIRMED) {
            decide(tables, scratch, Routine::Establish)?;
        }
    }
    if is_stale {
        tables.run(scratch, Routine::Refresh);
    }
    Ok(())
}

/// Nanoseconds between a flow's first packet and an answer that makes it sustained: as conntrack's for assured streams.
const SUSTAINED_AFTER: u64 = 2_000_000_000;

/// A backend's datagram of a flow that is not sustained yet.
#[inline(always)]
fn hear_datagram<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    found: Found<T::Entry>,
) {
    let age = tables.now().saturating_sub(scratch.flow.opened);
    let progress = if age < SUSTAINED_AFTER { PROGRESS_ANSWERED } else { PROGRESS_SUSTAINED };
    if progress > scratch.flow.state.progress {
        found.entry.write(Change::Progress(progress));
        // The client's next packet looks only at its own entry.
        scratch.key = scratch.flow.client_key();
        if let Some(entry) = tables.flow(found.stage, &scratch.key)
            && entry.opened() == scratch.flow.opened
        {
            entry.write(Change::Progress(progress));
        }
    }
}

/// Nanoseconds: a SYN takes as long to be given up.
const SILENT_AFTER: u64 = 60_000_000_000;

/// May a packet that could open a flow no longer use this one?
#[inline(always)]
fn is_over<F: Family, T: FlowTables<F>>(tables: &T, scratch: &Scratch<F::Address>, entry: T::Entry) -> bool {
    let Scratch { packet, flow, .. } = scratch;
    if packet.is_tcp() {
        // A connection that is up stays with its backend to the end: the SYN may be forged, and the backend knows. Where it is silent, and
        // its backend gone, nobody might answer.
        let may_be_over = flow.state.progress < PROGRESS_CONFIRMED
            || tables.now().saturating_sub(flow.last_seen) > SILENT_AFTER;
        let is_resumed = flow.flags & FLOW_RESUMED != 0;
        let has_ended = flow.state.has_ended() || direct::is_closing(flow) || is_resumed;
        return has_ended || (may_be_over && !is_in_service(tables, scratch));
    }
    let epoch = tables.epoch();
    if flow.epoch == epoch {
        return false;
    }
    let is_in_service = is_in_service(tables, scratch);
    if is_in_service {
        entry.write(Change::Epoch(epoch));
    }
    !is_in_service
}

/// Fails with `BackendGone`, and ends the flow, where the client's segment is of a connection whose backend is gone, and such connections
/// are reset. One that the backend has closed ends by itself, and one to an endpoint that was dialled itself is nobody's to reset.
#[inline(always)]
fn end_if_gone<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    entry: T::Entry,
) -> Result<(), Reason> {
    if tables.resets_gone() { end_one_that_is_gone(tables, scratch, entry) } else { Ok(()) }
}

// Not inlined: its branches would be verified once for each way to it.
#[inline(never)]
fn end_one_that_is_gone<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    entry: T::Entry,
) -> Result<(), Reason> {
    let Scratch { packet, flow, .. } = &*scratch;
    let is_served = flow.service != NO_SERVICE && flow.state.backend_fin == 0;
    if !packet.goes_on() || !is_served {
        return Ok(());
    }
    let epoch = tables.epoch();
    if flow.epoch == epoch {
        return Ok(());
    }
    let is_gone = tables.backend(flow.backend_id).is_none();
    let is_current = entry.opened() == flow.opened;
    if !is_gone {
        if is_current {
            entry.write(Change::Epoch(epoch));
        }
        return Ok(());
    }
    if is_current && !flow.state.has_ended() {
        scratch.flow.state.reset = RESET_CONFIRMED;
        entry.write(Change::Reset(RESET_CONFIRMED));
        tables.run(scratch, Routine::Retire);
    }
    Err(Reason::BackendGone)
}

/// Does the flow's frontend still belong to its service, and its backend to any? What another node has sent here was dialled there.
// Not inlined: keys would lie on the stack on the way of each packet.
#[inline(never)]
fn is_in_service<F: Family, T: FlowTables<F>>(tables: &T, scratch: &Scratch<F::Address>) -> bool {
    let Scratch { packet, flow, origin, .. } = scratch;
    let service = if scratch.is_unpacked() {
        flow.service
    } else {
        select::find(tables, &packet.to(), *origin).map_or(NO_SERVICE, |frontend| frontend.service)
    };
    service == flow.service && tables.backend(flow.backend_id).is_some()
}
