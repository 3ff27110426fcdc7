//! Packets in fragments. Only the first has ports, so it decides: what becomes of it at a hook is recorded, and done with the others there.
//! They neither look for a flow nor keep one.

use super::{FlowMaps, Routine, Scratch};
use crate::{
    family::Family,
    layout::*,
    packet::{Action, Part, Then},
    port::Port,
    reason::{Reason, Verdict},
};

/// Nanoseconds. Linux waits as long for the other fragments of an IPv4 packet (net.ipv4.ipfrag_time); ids come back.
const KEPT_FOR: u64 = 30_000_000_000;

#[inline(always)]
pub(super) fn record_first_fragment<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
    outcome: Result<(), Reason>,
) {
    if scratch.packet.fragment.part == Part::First {
        scratch.failure = outcome.err();
        maps.run(scratch, Routine::RecordFragment);
    }
}

/// Does with a later fragment what was done with the first.
#[inline(always)]
pub(super) fn follow<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    set_key::<F>(scratch);
    let (is_unpacked, interface) = (scratch.is_unpacked(), scratch.interface);
    let Scratch { fragment_key, first_fragment: first, action: Action { rewrite, then }, tunnel, .. } =
        scratch;
    if !maps.first_fragment(fragment_key, first)
        || first.id != fragment_key.id
        || maps.now().saturating_sub(first.seen) > KEPT_FOR
    {
        return Err(Reason::Fragment);
    }
    // All fragments of a packet are sent to the endpoint that the first one was for.
    if is_unpacked && tunnel.destination != first.destination {
        return Err(Reason::NotAService);
    }
    *then = match first.fate {
        FATE_TRANSLATED => Then::Pass,
        FATE_REROUTED => Then::Reroute,
        FATE_INTO_NODE => Then::IntoNode,
        FATE_ENCAPSULATED => Then::Encapsulate,
        // Reverse path filtering does not see it.
        FATE_SKIPS_STACK if first.interface == interface => Then::SkipStack,
        FATE_DROPPED => return Err(Reason::FragmentOfDropped),
        _ => return Err(Reason::NotAService),
    };
    // One by one: together they would lie on the stack.
    rewrite.source = first.source;
    rewrite.destination = first.destination;
    rewrite.source_port = Port::NONE;
    rewrite.destination_port = Port::NONE;
    rewrite.service = first.service;
    Ok(())
}

/// Also what is not for us: the id may have been another packet's that was.
#[inline(always)]
pub(super) fn record<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) {
    set_key::<F>(scratch);
    if scratch.failure.is_none() && scratch.action.then == Then::Encapsulate {
        scratch.action.rewrite = scratch.flow.undo_dnat_rewrite();
    }
    let interface = scratch.interface;
    let Scratch { failure, fragment_key, first_fragment: first, action: Action { rewrite, then }, .. } =
        scratch;
    first.interface = interface;
    first.seen = maps.now();
    first.source = rewrite.source;
    first.destination = rewrite.destination;
    first.service = rewrite.service;
    first.id = fragment_key.id;
    first.fate = match failure.map(Reason::verdict) {
        None => match then {
            Then::Pass => FATE_TRANSLATED,
            Then::Reroute => FATE_REROUTED,
            Then::IntoNode => FATE_INTO_NODE,
            Then::Encapsulate => FATE_ENCAPSULATED,
            Then::SkipStack => FATE_SKIPS_STACK,
        },
        Some(Verdict::Pass) => FATE_PASSED,
        Some(Verdict::Refuse | Verdict::Drop) => FATE_DROPPED,
    };
    maps.record_fragment(fragment_key, first);
}

/// But for the direction, which is set.
#[inline(always)]
fn set_key<F: Family>(scratch: &mut Scratch<F::Address>) {
    let Scratch { packet, fragment_key: key, .. } = scratch;
    key.source = packet.source;
    key.destination = packet.destination;
    key.id = packet.fragment.id;
    key.protocol = if F::FRAGMENTS_BELONG_BY_PROTOCOL { packet.protocol } else { 0 };
}
