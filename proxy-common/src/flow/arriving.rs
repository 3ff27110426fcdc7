//! The slow path of packets that enter the node, which decides about each of them.
//!
//! The other ways through the same rules are `fast_path.rs` (fast path) and `forward/` (XDP). Where
//! they decide, they decide as this one does. [`leaving`](super::leaving()) is its other half.

use super::{
    FlowEntry as _, FlowMaps, PodSockets, Routine, Scratch,
    find::{Found, find, find_by_origin, is_from_host, is_of_origin, lookup, set_key_of_packet},
    forward,
    fragments::record_first_fragment,
    keep::{end_if_gone, go_on, is_netfilters, is_over},
    open::{find_frontend, open, unknown, why_unserved},
    routine::decide,
    scratch::OverlappingFlow,
    translate::translate_arriving,
    tuples::Position,
};
use crate::{
    family::Family,
    layout::*,
    packet::{GENEVE, Part, Then},
    reason::Reason,
    select::Origin,
};

/// A packet that enters the node.
#[inline(always)]
pub fn arriving<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
    origin: Origin,
    sockets: &impl PodSockets<F::Address>,
) -> Result<(), Reason> {
    scratch.origin = origin;
    scratch.fragment_key.direction =
        if scratch.is_unpacked() { FRAGMENT_UNPACKED } else { FRAGMENT_ARRIVING };
    if scratch.packet.is_later_fragment() {
        return decide(maps, scratch, Routine::FollowFragment);
    }
    let outcome = arriving_with_ports(maps, scratch, sockets);
    record_first_fragment(maps, scratch, outcome);
    outcome
}

#[inline(always)]
pub(super) fn arriving_with_ports<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
    sockets: &impl PodSockets<F::Address>,
) -> Result<(), Reason> {
    scratch.action.then = Then::Pass;
    set_key_of_packet(scratch);
    (scratch.overlapping_flow, scratch.is_keyed_by_origin) = (OverlappingFlow::None, false);
    // Not of a packet inside the one that was looked at.
    let has_no_flow = scratch.is_parsed && scratch.has_no_flow && !scratch.is_unpacked();
    let mut met = if has_no_flow { None } else { find(maps, scratch) };
    if met.is_none() && maps.is_remapped(scratch.packet.source_port) {
        maps.run(scratch, Routine::FindRemapped);
        met = find(maps, scratch);
    }
    if let Some(met) = met {
        if is_netfilters(maps, scratch, met.entry) {
            return Err(Reason::NotAService);
        }
        let own = own_of_arriving(maps, scratch, met);
        let is_over = scratch.packet.opens()
            && match own {
                Some(own) => own.position == Position::ToFrontend && is_over(maps, scratch, own.entry),
                None => !scratch.is_keyed_by_origin && scratch.flow.state.has_ended(),
            };
        if is_over {
            maps.run(scratch, Routine::Replace);
            scratch.overlapping_flow = OverlappingFlow::None;
            scratch.is_keyed_by_origin = scratch.flow.flags & FLOW_KEYED_BY_ORIGIN != 0;
        } else if let Some(own) = own {
            if own.position == Position::ToFrontend && !is_from_host(scratch) {
                end_if_gone(maps, scratch, own.entry)?;
            }
            if forward::answers_xdp(maps, scratch, own.position) {
                scratch.action.then = Then::SkipStack;
                return Ok(());
            }
            translate_arriving(scratch, own.position)?;
            if scratch.flow.flags & FLOW_DSR != 0 {
                scratch.stage = own.stage;
                return decide(maps, scratch, Routine::GoOnDirectly);
            }
            let position = own.position;
            go_on(maps, scratch, own)?;
            if forward::skips_stack(maps, scratch, position) {
                scratch.action.then = Then::SkipStack;
            }
            return Ok(());
        }
    } else {
        scratch.key.overlapping = 0;
    }
    if scratch.packet.opens() || unknown::is_one(maps, scratch, sockets) {
        open(maps, scratch, sockets)
    } else {
        Err(Reason::NotAService)
    }
}

/// Returns the flow that an arriving packet belongs to, where `met` has its ends. None: it has none
/// of its own, and `scratch.overlapping_flow` and `scratch.is_keyed_by_origin` say why.
#[inline(always)]
pub(super) fn own_of_arriving<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
    met: Found<T::Entry>,
) -> Option<Found<T::Entry>> {
    let mut own = met;
    if met.position == Position::ToBackend {
        // The client dials the endpoint itself, and would get the answers of this flow, or this
        // flow its answers.
        scratch.key.overlapping = 1;
        let Some(overlapping) = find(maps, scratch) else {
            met.entry.read_into(&mut scratch.flow);
            scratch.overlapping_flow = OverlappingFlow::OfClient;
            return None;
        };
        own = overlapping;
    }
    if own.position != Position::ToFrontend || is_of_origin(scratch) {
        return Some(own);
    }
    // The other client may be forged, or this one.
    let overlapping = scratch.key.overlapping;
    if let Some(by_origin) = find_by_origin(maps, scratch) {
        return Some(by_origin);
    }
    own.entry.read_into(&mut scratch.flow);
    // Nobody forges the client of a connection that is up: its interface has got another role.
    // Datagrams that go on may all be forged, so that they do not follow the interface.
    let is_up = scratch.packet.is_tcp() && scratch.flow.state.progress == PROGRESS_CONFIRMED;
    if is_up && !scratch.packet.opens() {
        scratch.key.overlapping = overlapping;
        return Some(own);
    }
    scratch.is_keyed_by_origin = true;
    if overlapping != 0 {
        scratch.overlapping_flow = OverlappingFlow::OfClient;
    }
    None
}

/// Is the packet, which has come from outside, one of Geneve and for nobody by itself? Then the one that it carries may be for this node.
#[inline(always)]
pub fn may_carry_another<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) -> bool {
    scratch.packet.destination_port == GENEVE && is_datagram_to_nobody(maps, scratch)
}

// Not inlined: what follows would be verified once more.
#[inline(never)]
pub(super) fn is_datagram_to_nobody<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
) -> bool {
    let packet = &scratch.packet;
    if packet.protocol != PROTOCOL_UDP || packet.fragment.part != Part::Whole || packet.is_error() {
        return false;
    }
    scratch.origin = Origin::Outside;
    set_key_of_packet(scratch);
    lookup(maps, &scratch.key).is_none()
        && !find_frontend(maps, scratch)
        && why_unserved(maps, scratch) == Reason::NotAService
}
