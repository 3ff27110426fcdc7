//! The slow path of packets that leave the node, which decides about each of them.
//!
//! The other ways through the same rules are `fast_path.rs` (fast path) and `forward/` (XDP). Where
//! they decide, they decide as this one does. [`arriving`](super::arriving()) is its other half.

use super::{
    FlowMaps, Routine, Scratch, UnknownSockets,
    find::{find, find_by_origin, is_another_clients, is_from_host, set_key_of_packet},
    forward,
    fragments::record_first_fragment,
    keep::{end_if_gone, go_on, is_netfilters, is_over},
    open::{open, why_socket_is_unserved},
    ports::host_connection,
    routine::decide,
    scratch::OverlappingFlow,
    translate::translate_leaving,
    tuples::Position,
};
use crate::{family::Family, layout::*, packet::Then, reason::Reason, select::Origin};

/// A packet that leaves the node. `from_host`: a process of the node sends it, and no socket hook has seen its connection.
#[inline(always)]
pub fn leaving<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
    from_host: bool,
) -> Result<(), Reason> {
    scratch.origin = Origin::Host;
    scratch.outer_length = 0;
    scratch.fragment_key.direction = FRAGMENT_LEAVING;
    if scratch.packet.is_later_fragment() {
        return decide(maps, scratch, Routine::FollowFragment);
    }
    let outcome = leaving_with_ports(maps, scratch, from_host);
    record_first_fragment(maps, scratch, outcome);
    outcome
}

#[inline(always)]
pub(super) fn leaving_with_ports<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
    from_host: bool,
) -> Result<(), Reason> {
    scratch.action.then = Then::Pass;
    set_key_of_packet(scratch);
    let mut found = find(maps, scratch);
    (scratch.overlapping_flow, scratch.is_keyed_by_origin) = (OverlappingFlow::None, false);
    if found.is_some_and(|found| host_connection::meets(scratch, found.position)) {
        scratch.overlapping_flow = OverlappingFlow::Masqueraded;
    }
    let has_overlapping_flow = scratch.overlapping_flow != OverlappingFlow::None;
    if has_overlapping_flow || (found.is_none() && maps.is_remapped(scratch.packet.source_port)) {
        scratch.key.overlapping = 1;
        found = find(maps, scratch);
        if found.is_some() && scratch.packet.opens() && scratch.flow.state.has_ended() {
            maps.run(scratch, Routine::Replace);
            found = None;
        }
    }
    if from_host && !has_overlapping_flow {
        let is_anothers = found.is_some_and(|found| is_another_clients(scratch, found.position));
        if is_anothers || (found.is_none() && maps.is_remapped(scratch.packet.source_port)) {
            scratch.key.overlapping = 0;
            found = find_by_origin(maps, scratch);
            scratch.is_keyed_by_origin = is_anothers && found.is_none();
        }
    }
    if let Some(found) = found {
        if is_netfilters(maps, scratch, found.entry) {
            return Err(Reason::NotAService);
        }
        let is_hosts = from_host && found.position == Position::ToFrontend && is_from_host(scratch);
        if is_hosts && scratch.packet.opens() && is_over(maps, scratch, found.entry) {
            maps.run(scratch, Routine::Replace);
            scratch.is_keyed_by_origin = scratch.flow.flags & FLOW_KEYED_BY_ORIGIN != 0;
        } else {
            if found.position == Position::ToBackend
                && scratch.flow.flags & FLOW_MASQUERADE != 0
                && !scratch.flow.is_masqueraded()
            {
                if scratch.packet.is_error() {
                    return Err(Reason::NotAService);
                }
                scratch.stage = found.stage;
                decide(maps, scratch, Routine::Masquerade)?;
                scratch.action.rewrite = scratch.flow.masquerade_rewrite();
                return Ok(());
            }
            if found.position == Position::ToBackend && scratch.flow.flags & FLOW_DSR != 0 {
                // The flow was kept where the packet has come in.
                scratch.action.then = Then::Encapsulate;
                return Ok(());
            }
            if is_hosts {
                end_if_gone(maps, scratch, found.entry)?;
                scratch.action.then = Then::Reroute;
            }
            if forward::is_by_stack(scratch, found.position) {
                maps.run(scratch, Routine::LeaveToStack);
            }
            translate_leaving(scratch, found.position, is_hosts)?;
            go_on(maps, scratch, found)?;
            if forward::shows_way_out(maps, scratch, found.position) {
                maps.run(scratch, Routine::AllowForwarding);
            }
            return Ok(());
        }
    }
    if from_host && !has_overlapping_flow {
        scratch.action.then = Then::Reroute;
    }
    let outcome = if (from_host || has_overlapping_flow) && scratch.packet.opens() {
        open(maps, scratch, &UnknownSockets)
    } else {
        Err(why_socket_is_unserved(maps, scratch))
    };
    if !has_overlapping_flow && matches!(outcome, Err(Reason::NotAService)) {
        maps.run(scratch, Routine::NoteHostConnection);
    }
    outcome
}

/// What a packet becomes that leaves the node with [`Then::Encapsulate`]: as the client has sent it, in one with the ends `scratch.tunnel`.
#[inline(always)]
pub fn encapsulating<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    decide(maps, scratch, Routine::Encapsulate)
}

/// Leaves a pod's answer to the stack, although it was to skip it with [`Then::SkipStack`].
/// `has_way`: other packets of its flow may skip the stack.
#[inline(always)]
pub fn cannot_skip_stack<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
    has_way: bool,
) {
    // Of a later fragment the flow is not known.
    if !has_way && !scratch.packet.is_later_fragment() {
        maps.run(scratch, Routine::LeaveToStack);
    }
    record_first_fragment(maps, scratch, Err(Reason::NotAService));
}
