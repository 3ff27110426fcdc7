//! Decisions about packets: which flow one belongs to, what opens a flow, and how it is translated.
//!
//! A flow has an entry for each pair of ends that its packets have at the hooks of this node: client and frontend, client and backend,
//! and, where its source is translated too, masquerade and backend. Each entry serves both directions, so that a packet of a flow
//! costs one lookup.
//!
//! A flow opens in the table of opening flows, which evicts. Its entries are copied to the established ones when the client has
//! shown that it received an answer: by acknowledging the backend's SYN, or, UDP, by sending on seconds later. A client with a forged
//! address does neither, so that a flood cannot fill the table that does not evict. The copies in the opening table stay until they
//! age: a reader between two lookups would otherwise find neither.
//!
//! The state of a flow is the union of what its entries know: no CPU overwrites what another learned.

mod entries;
mod fragments;
mod lifetimes;
mod masquerade;
mod open;
mod tcp;
#[cfg(test)]
mod tests;
mod tuples;

pub use lifetimes::FlowLifetimes;
pub use tcp::Speaker;

use self::{
    entries::{establish, is_stale, refresh, remove, retire},
    tuples::Step,
};
use crate::{
    family::Family,
    layout::*,
    packet::{Packet, Part, Rewrite, Then},
    port::Port,
    reason::Reason,
    select::{self, Origin},
    tables::Tables,
};

/// Which of the two tables a flow's entry lies in.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Stage {
    /// `opening_flows4/6`.
    Opening,
    /// `flows4/6`.
    Established,
}

/// A field of an entry that changes in place.
#[derive(Clone, Copy, Debug)]
pub enum Change<A> {
    LastSeen(u64),
    Epoch(u32),
    /// [`Numbers::acknowledged`] of one side.
    Acknowledged(Speaker, u32),
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
}

/// An entry of a flow table, in place. The kernel may give its memory to another flow at any time.
pub trait FlowEntry<A>: Copy {
    /// Into memory that is there already: a copy on the stack would fill it.
    fn read_into(&self, flow: &mut Flow<A>);
    fn opened(&self) -> u64;
    fn write(&self, change: Change<A>);
}

/// Why an entry was not inserted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum InsertError {
    Exists,
    /// No room or no memory.
    Full,
}

/// Where a packet is worked on. In the kernel it is memory of the CPU: it would fill the stack, and the verifier would go through a
/// program once for each combination of what it knows of a value on the stack.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(8))]
pub struct Scratch<A> {
    pub packet: Packet<A>,
    /// What the packet becomes, where that is decided, and where it goes.
    pub rewrite: Rewrite<A>,
    pub then: Then,
    /// Index of the interface that the packet leaves by; only of one that leaves.
    pub interface: u32,
    key: FlowKey<A>,
    flow: Flow<A>,
    /// One entry of `flow`, on its way from one table to the other.
    entry: Flow<A>,
    fragment_key: FragmentKey<A>,
    first_fragment: FirstFragment<A>,
}

/// The flow tables, the clock and the random numbers.
pub trait FlowTables<F: Family>: Tables<F> {
    type Entry: FlowEntry<F::Address>;

    fn flow(&self, stage: Stage, key: &FlowKey<F::Address>) -> Option<Self::Entry>;
    /// Fails if the key exists.
    fn insert(
        &self,
        stage: Stage,
        key: &FlowKey<F::Address>,
        flow: &Flow<F::Address>,
    ) -> Result<(), InsertError>;
    fn replace(&self, stage: Stage, key: &FlowKey<F::Address>, flow: &Flow<F::Address>);
    fn remove(&self, stage: Stage, key: &FlowKey<F::Address>);
    /// Copies a record of `fragments4/6`. False: there is none, or another has taken its place meanwhile.
    fn first_fragment(&self, key: &FragmentKey<F::Address>, into: &mut FirstFragment<F::Address>) -> bool;
    fn record_fragment(&self, key: &FragmentKey<F::Address>, first: &FirstFragment<F::Address>);
    /// Source of masqueraded packets that leave by this interface; unspecified: there is none.
    fn masquerade_address(&self, interface: u32) -> F::Address;
    /// The `attempt`th port after a random one, of those for masqueraded sources and aliases; [`Port::NONE`]: there are none.
    fn masquerade_port(&self, random: u32, attempt: u32) -> Port;
    /// [`Settings::epoch`].
    fn epoch(&self) -> u32;
    /// Nanoseconds since boot, suspend included.
    fn now(&self) -> u64;
    fn random(&self) -> u32;
    /// Counts a reason in addition to that of the packet's outcome.
    fn count(&self, reason: Reason);
    /// Counts a flow of a service.
    fn count_connection(&self, service: u32);
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
) -> Result<(), Reason> {
    if scratch.packet.is_later_fragment() {
        return fragments::follow(tables, scratch, FRAGMENT_ARRIVING);
    }
    let outcome = arriving_with_ports(tables, scratch, origin);
    if scratch.packet.fragment.part == Part::First {
        fragments::record(tables, scratch, FRAGMENT_ARRIVING, outcome);
    }
    outcome
}

/// A packet that leaves the node. `from_host`: a process of the node sends it, and no socket hook has seen its connection.
#[inline(always)]
pub fn leaving<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    from_host: bool,
) -> Result<(), Reason> {
    if scratch.packet.is_later_fragment() {
        return fragments::follow(tables, scratch, FRAGMENT_LEAVING);
    }
    let outcome = leaving_with_ports(tables, scratch, from_host);
    if scratch.packet.fragment.part == Part::First {
        fragments::record(tables, scratch, FRAGMENT_LEAVING, outcome);
    }
    outcome
}

#[inline(always)]
fn arriving_with_ports<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    origin: Origin,
) -> Result<(), Reason> {
    scratch.then = Then::Pass;
    set_key_of_packet(scratch);
    let mut is_overlapped = false;
    if let Some(mut found) = find(tables, scratch) {
        if is_netfilters(tables, scratch, found.entry) {
            return Err(Reason::NotAService);
        }
        if found.step == Step::ToBackend {
            // The client dials the endpoint itself, and would get the answers of this flow, or this flow its.
            scratch.key.overlapping = 1;
            if let Some(overlapping) = find(tables, scratch) {
                found = overlapping;
            } else {
                found.entry.read_into(&mut scratch.flow);
                is_overlapped = true;
            }
        }
        let is_over = scratch.packet.opens()
            && if is_overlapped {
                scratch.flow.state.has_ended()
            } else {
                found.step == Step::ToFrontend && is_over(tables, scratch, found.entry, origin)
            };
        if is_over {
            replace(tables, scratch);
            is_overlapped = false;
        } else if !is_overlapped {
            match found.step {
                Step::ToFrontend if !is_from_host(scratch) => {
                    scratch.rewrite = scratch.flow.forward_rewrite()
                }
                Step::FromBackendMasqueraded => scratch.rewrite = scratch.flow.unmasquerade_rewrite(),
                Step::FromBackend if is_from_host(scratch) => {
                    scratch.then = Then::IntoNode;
                    scratch.rewrite = scratch.flow.reply_rewrite();
                }
                // At the egress it would look like an answer that has come to the masquerade.
                Step::FromBackend
                    if scratch.flow.is_masqueraded()
                        && scratch.packet.is_tcp()
                        && !scratch.packet.is_error() =>
                {
                    return Err(Reason::ForgedAnswer);
                }
                Step::ToFrontend
                | Step::FromFrontend
                | Step::ToBackend
                | Step::FromBackend
                | Step::ToBackendMasqueraded => return Err(Reason::NotAService),
            }
            return go_on(tables, scratch, found);
        }
    }
    first_packet(tables, scratch, origin, is_overlapped)
}

#[inline(always)]
fn leaving_with_ports<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    from_host: bool,
) -> Result<(), Reason> {
    scratch.then = Then::Pass;
    set_key_of_packet(scratch);
    if let Some(found) = find(tables, scratch) {
        if is_netfilters(tables, scratch, found.entry) {
            return Err(Reason::NotAService);
        }
        let is_hosts = from_host && found.step == Step::ToFrontend && is_from_host(scratch);
        if is_hosts && scratch.packet.opens() && is_over(tables, scratch, found.entry, Origin::Host) {
            replace(tables, scratch);
        } else {
            match found.step {
                Step::FromBackend => scratch.rewrite = scratch.flow.reply_rewrite(),
                Step::ToBackend if scratch.flow.flags & FLOW_MASQUERADE != 0 => {
                    if !scratch.flow.is_masqueraded() && scratch.packet.is_error() {
                        return Err(Reason::NotAService);
                    }
                    if !scratch.flow.is_masqueraded() {
                        masquerade::choose(tables, scratch, found.stage, found.entry)?;
                    }
                    scratch.rewrite = scratch.flow.masquerade_rewrite();
                }
                Step::ToFrontend if is_hosts => {
                    scratch.then = Then::Reroute;
                    scratch.rewrite = scratch.flow.forward_rewrite();
                }
                Step::ToFrontend
                | Step::FromFrontend
                | Step::ToBackend
                | Step::ToBackendMasqueraded
                | Step::FromBackendMasqueraded => return Err(Reason::NotAService),
            }
            return go_on(tables, scratch, found);
        }
    }
    if !from_host {
        return Err(Reason::NotAService);
    }
    scratch.then = Then::Reroute;
    first_packet(tables, scratch, Origin::Host, false)
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
    entry.read_into(&mut scratch.flow);
    if entry.opened() != scratch.flow.opened {
        return None;
    }
    let step = scratch.flow.step_of(&scratch.packet)?;
    Some(Found { stage, entry, step })
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
    true
}

/// A packet that has no flow. `is_overlapped`: that in `scratch.flow` has the packet's ends as its client and backend.
#[inline(never)]
fn first_packet<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    origin: Origin,
    is_overlapped: bool,
) -> Result<(), Reason> {
    if !scratch.packet.opens() {
        return Err(Reason::NotAService);
    }
    // Before the tables are read: a change meanwhile has them compared once more.
    scratch.flow.epoch = tables.epoch();
    match select::find(tables, &scratch.packet.to(), origin) {
        Some(frontend) => open::prepare_to_frontend(tables, scratch, frontend, origin)?,
        None if is_overlapped => open::prepare_to_endpoint(scratch),
        None => return Err(Reason::NotAService),
    }
    if is_overlapped {
        scratch.flow.flags |= FLOW_OVERLAPPING;
    }
    open::insert(tables, scratch)?;
    scratch.rewrite = scratch.flow.forward_rewrite();
    Ok(())
}

/// The client gets another backend.
#[inline(always)]
fn replace<F: Family, T: FlowTables<F>>(tables: &T, scratch: &mut Scratch<F::Address>) {
    remove(tables, scratch);
    tables.count(Reason::FlowReplaced);
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
    let mut is_confirmed = false;
    if matches!(found.step, Step::ToFrontend | Step::FromBackend) {
        let speaker = if found.step == Step::ToFrontend { Speaker::Client } else { Speaker::Backend };
        if scratch.packet.is_tcp() {
            tcp::hear(tables, scratch, speaker, found.stage, found.entry);
            is_confirmed =
                speaker == Speaker::Client && tcp::confirms(&scratch.flow, &scratch.packet.segment);
        } else if speaker == Speaker::Client {
            is_confirmed = scratch.flow.state.progress == PROGRESS_SUSTAINED;
        } else if scratch.flow.state.progress < PROGRESS_SUSTAINED {
            hear_datagram(tables, scratch, found);
        }
    }
    if scratch.flow.state.has_ended() {
        if found.stage == Stage::Established {
            retire(tables, scratch);
        }
        return Ok(());
    }
    // A SYN keeps no connection that its backend may have forgotten.
    if found.step == Step::ToFrontend && scratch.packet.is_tcp() && scratch.packet.opens() {
        return Ok(());
    }
    let now = tables.now();
    let is_stale = is_stale(&scratch.flow, now);
    if found.stage == Stage::Opening {
        if is_confirmed {
            found.entry.write(Change::Progress(PROGRESS_CONFIRMED));
        }
        // Where there was no room among the established ones, it is tried again.
        if is_confirmed || (is_stale && scratch.flow.state.progress == PROGRESS_CONFIRMED) {
            establish(tables, scratch, now)?;
        }
    }
    if is_stale {
        refresh(tables, scratch, found.stage, now);
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
fn is_over<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &Scratch<F::Address>,
    entry: T::Entry,
    origin: Origin,
) -> bool {
    let Scratch { packet, flow, .. } = scratch;
    if packet.is_tcp() {
        // A connection that is up stays with its backend to the end: the SYN may be forged, and the backend knows. Where it is silent, and
        // its backend gone, nobody might answer.
        let may_be_over = flow.state.progress < PROGRESS_CONFIRMED
            || tables.now().saturating_sub(flow.last_seen) > SILENT_AFTER;
        return flow.state.has_ended() || (may_be_over && !is_in_service(tables, scratch, origin));
    }
    let epoch = tables.epoch();
    if flow.epoch == epoch {
        return false;
    }
    let is_in_service = is_in_service(tables, scratch, origin);
    if is_in_service {
        entry.write(Change::Epoch(epoch));
    }
    !is_in_service
}

/// Does the flow's frontend still belong to its service, and its backend to any?
// Not inlined: keys would lie on the stack on the way of each packet.
#[inline(never)]
fn is_in_service<F: Family, T: FlowTables<F>>(
    tables: &T,
    Scratch { packet, flow, .. }: &Scratch<F::Address>,
    origin: Origin,
) -> bool {
    let service = select::find(tables, &packet.to(), origin).map_or(NO_SERVICE, |frontend| frontend.service);
    service == flow.service && tables.backend(flow.backend_id).is_some()
}
