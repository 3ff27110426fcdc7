//! Keeps a flow while its packets come: learns what each says, establishes the flow, and ends it.

use super::{
    Change, FlowEntry as _, FlowMaps, Routine, Scratch, Side, Stage, direct,
    entries::{KeyKind, is_stale},
    find::Found,
    routine::decide,
    tcp,
    tuples::Position,
};
use crate::{family::Family, layout::*, reason::Reason, select};

/// Keeps a connection that netfilter translates.
#[inline(always)]
pub(super) fn is_netfilters<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &Scratch<F::Address>,
    entry: T::Entry,
) -> bool {
    if scratch.flow.flags & FLOW_OF_NETFILTER == 0 {
        return false;
    }
    let now = maps.now();
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

/// A packet of a flow: learns what it says, and keeps the flow's entries.
#[inline(always)]
pub(super) fn go_on<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
    found: Found<T::Entry>,
) -> Result<(), Reason> {
    if scratch.packet.is_error() {
        return Ok(());
    }
    scratch.stage = found.stage;
    if found.position == Position::FromBackendMasqueraded {
        // It is tracked, and keeps the flow, where it leaves for the client: if it has an entry there.
        let is_stale = is_stale(&scratch.flow, maps.recently(&mut scratch.clock));
        if is_stale
            && KeyKind::Backend.set_key(maps, scratch)
            && maps.flow(found.stage, &scratch.key).is_none()
        {
            maps.run(scratch, Routine::Refresh);
        }
        return Ok(());
    }
    let mut is_confirmed = false;
    if matches!(found.position, Position::ToFrontend | Position::FromBackend) {
        let sender = if found.position == Position::ToFrontend { Side::Client } else { Side::Backend };
        if scratch.packet.is_tcp() {
            tcp::track(maps, scratch, sender, found.entry);
            is_confirmed = sender == Side::Client && tcp::confirms(&scratch.flow, &scratch.packet.segment);
        } else if sender == Side::Client {
            is_confirmed = scratch.flow.state.progress == PROGRESS_SUSTAINED;
        } else if scratch.flow.state.progress < PROGRESS_SUSTAINED {
            track_datagram(maps, scratch, found);
        }
    }
    if scratch.flow.state.has_ended() {
        // Also if it was found among the opening ones: another CPU may be establishing it.
        maps.run(scratch, Routine::Demote);
        return Ok(());
    }
    // A SYN keeps no connection that its backend may have forgotten.
    if found.position == Position::ToFrontend && scratch.packet.is_tcp() && scratch.packet.opens() {
        return Ok(());
    }
    let is_stale = is_stale(&scratch.flow, maps.recently(&mut scratch.clock));
    if found.stage == Stage::Opening {
        if is_confirmed {
            found.entry.write(Change::Progress(PROGRESS_CONFIRMED));
        }
        // Where there was no room among the established ones, it is tried again.
        if is_confirmed || (is_stale && scratch.flow.state.progress == PROGRESS_CONFIRMED) {
            decide(maps, scratch, Routine::Establish)?;
        }
    }
    if is_stale {
        maps.run(scratch, Routine::Refresh);
    }
    Ok(())
}

/// Nanoseconds between a flow's first packet and an answer that makes it sustained: as conntrack's for assured streams.
pub(super) const SUSTAINED_AFTER: u64 = 2_000_000_000;

/// A backend's datagram of a flow that is not sustained yet.
#[inline(always)]
pub(super) fn track_datagram<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
    found: Found<T::Entry>,
) {
    let age = maps.now().saturating_sub(scratch.flow.opened);
    let progress = if age < SUSTAINED_AFTER { PROGRESS_ANSWERED } else { PROGRESS_SUSTAINED };
    if progress > scratch.flow.state.progress {
        found.entry.write(Change::Progress(progress));
        // The client's next packet looks only at its own entry.
        scratch.key = scratch.flow.client_key();
        if let Some(entry) = maps.flow(found.stage, &scratch.key)
            && entry.opened() == scratch.flow.opened
        {
            entry.write(Change::Progress(progress));
        }
    }
}

/// Nanoseconds: a SYN takes as long to be given up.
pub(super) const SILENT_AFTER: u64 = 60_000_000_000;

/// May a packet that could open a flow no longer use this one?
#[inline(always)]
pub(super) fn is_over<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &Scratch<F::Address>,
    entry: T::Entry,
) -> bool {
    let Scratch { packet, flow, .. } = scratch;
    if packet.is_tcp() {
        // A connection that is up stays with its backend to the end: the SYN may be forged, and the backend knows. Where it is silent, and
        // its backend gone, nobody might answer.
        let may_be_over = flow.state.progress < PROGRESS_CONFIRMED
            || maps.now().saturating_sub(flow.last_seen) > SILENT_AFTER;
        let is_resumed = flow.flags & FLOW_RESUMED != 0;
        let has_ended = flow.state.has_ended() || direct::is_closing(flow) || is_resumed;
        return has_ended || (may_be_over && !is_in_service(maps, scratch));
    }
    let epoch = maps.epoch();
    if flow.epoch == epoch {
        return false;
    }
    let is_in_service = is_in_service(maps, scratch);
    if is_in_service {
        entry.write(Change::Epoch(epoch));
    }
    !is_in_service
}

/// Fails with `BackendGone`, and ends the flow, where the client's segment is of a connection whose backend is gone, and such connections
/// are reset. One that the backend has closed ends by itself, and one to an endpoint that was dialled itself is nobody's to reset.
#[inline(always)]
pub(super) fn end_if_gone<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
    entry: T::Entry,
) -> Result<(), Reason> {
    if maps.resets_gone() { end_one_that_is_gone(maps, scratch, entry) } else { Ok(()) }
}

// Not inlined: its branches would be verified once for each way to it.
#[inline(never)]
pub(super) fn end_one_that_is_gone<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
    entry: T::Entry,
) -> Result<(), Reason> {
    let Scratch { packet, flow, .. } = &*scratch;
    let is_served = flow.service != NO_SERVICE && flow.state.backend_fin == 0;
    if !packet.goes_on() || !is_served {
        return Ok(());
    }
    let epoch = maps.epoch();
    if flow.epoch == epoch {
        return Ok(());
    }
    let is_gone = maps.backend(flow.backend_id).is_none();
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
        maps.run(scratch, Routine::Demote);
    }
    Err(Reason::BackendGone)
}

/// Does the flow's frontend still belong to its service, and its backend to any? What another node has sent here was dialled there.
// Not inlined: keys would lie on the stack on the way of each packet.
#[inline(never)]
pub(super) fn is_in_service<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &Scratch<F::Address>) -> bool {
    let Scratch { packet, flow, origin, .. } = scratch;
    let service = if scratch.is_unpacked() {
        flow.service
    } else {
        select::find(maps, &packet.to(), *origin).map_or(NO_SERVICE, |frontend| frontend.service)
    };
    service == flow.service && maps.backend(flow.backend_id).is_some()
}
