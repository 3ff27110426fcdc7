//! Looks for the flow of a packet, and for what of it the packet is.

use super::{FlowEntry, FlowMaps, Scratch, Stage, direct, open, tuples::Position};
use crate::{family::Family, layout::*, select::Origin};

/// A flow that has the packet's ends. A copy of its entry is in `scratch.flow`.
#[derive(Clone, Copy)]
pub(super) struct Found<E> {
    pub(super) stage: Stage,
    pub(super) entry: E,
    pub(super) position: Position,
}

// Not inlined: the key would lie on the stack on the way of each packet.
#[inline(never)]
pub(super) fn set_key_of_packet<A: Address>(scratch: &mut Scratch<A>) {
    scratch.key = scratch.packet.key();
}

/// The flow at `scratch.key`. None also where the element has become another flow's meanwhile.
#[inline(always)]
pub(super) fn find<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
) -> Option<Found<T::Entry>> {
    let (stage, entry) = lookup(maps, &scratch.key)?;
    found(scratch, stage, entry)
}

#[inline(always)]
pub(super) fn found<A: Address, E: FlowEntry<A>>(
    scratch: &mut Scratch<A>,
    stage: Stage,
    entry: E,
) -> Option<Found<E>> {
    read(scratch, entry)?;
    let position = position_of_packet(scratch)?;
    Some(Found { stage, entry, position })
}

/// Copies an entry to `scratch.flow`. None: it has become another flow's meanwhile.
#[inline(always)]
pub(super) fn read<A: Address>(scratch: &mut Scratch<A>, entry: impl FlowEntry<A>) -> Option<()> {
    entry.read_into(&mut scratch.flow);
    (entry.opened() == scratch.flow.opened).then_some(())
}

// Not inlined: the ends would lie on the stack on the way of each packet.
#[inline(never)]
pub(super) fn position_of_packet<A: Address>(scratch: &Scratch<A>) -> Option<Position> {
    if scratch.is_unpacked() && !direct::is_for(scratch) {
        return None;
    }
    scratch.flow.position_of(&scratch.packet)
}

#[inline(always)]
pub(super) fn lookup<F: Family, T: FlowMaps<F>>(
    maps: &T,
    key: &FlowKey<F::Address>,
) -> Option<(Stage, T::Entry)> {
    if let Some(entry) = maps.flow(Stage::Established, key) {
        return Some((Stage::Established, entry));
    }
    maps.flow(Stage::Opening, key).map(|entry| (Stage::Opening, entry))
}

/// Looks for the flow of the packet's client among those that are keyed by origin.
#[inline(always)]
pub(super) fn find_by_origin<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
) -> Option<Found<T::Entry>> {
    scratch.key.overlapping |= FlowKey::<F::Address>::origin_bits(open::flag_of(scratch.origin));
    find(maps, scratch)
}

/// Sets `scratch.key` to another key at which the arriving packet has its flow, if it has one. The
/// flow with the usual key has ended first.
#[inline(always)]
pub(super) fn find_remapped<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) {
    let origin_bits = FlowKey::<F::Address>::origin_bits(open::flag_of(scratch.origin));
    for overlapping in [origin_bits, 1 | origin_bits, 1] {
        scratch.key.overlapping = overlapping;
        if let Some((_, entry)) = lookup(maps, &scratch.key) {
            entry.read_into(&mut scratch.flow);
            // Packets of a host connection have it where they leave the node.
            if !is_host_connection(scratch) {
                return;
            }
        }
    }
    scratch.key.overlapping = 0;
}

/// Returns true if the client of `scratch.flow` is where the packet, which arrives, comes from.
#[inline(always)]
pub(super) fn is_of_origin<A>(Scratch { flow, origin, .. }: &Scratch<A>) -> bool {
    let is_nodes = flow.flags & (FLOW_FROM_HOST | FLOW_HOST_CONNECTION) != 0;
    is_nodes || (flow.flags & FLOW_FROM_POD != 0) == (*origin == Origin::Workload)
}

/// Returns true if the flow, which has the ends of a packet that a process of the node sends, has
/// another client: that one has forged the node's address.
#[inline(always)]
pub(super) fn is_another_clients<A>(Scratch { flow, .. }: &Scratch<A>, position: Position) -> bool {
    const OF_NODE: u32 = FLOW_FROM_HOST | FLOW_HOST_CONNECTION | FLOW_OF_NETFILTER;
    position == Position::ToFrontend && flow.flags & OF_NODE == 0
}

#[inline(always)]
pub(super) fn is_from_host<A>(scratch: &Scratch<A>) -> bool {
    scratch.flow.flags & FLOW_FROM_HOST != 0
}

#[inline(always)]
pub(super) fn is_host_connection<A>(scratch: &Scratch<A>) -> bool {
    scratch.flow.flags & FLOW_HOST_CONNECTION != 0
}
