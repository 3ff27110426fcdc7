//! Opens a flow for the first packet of a connection: chooses the backend and the port that identifies its answers, and
//! inserts both entries or none.

mod backend;
pub(super) mod flood_limit;
mod insert;
pub(super) mod unknown;

pub(super) use self::{
    backend::{detect, prepare_as_drawn, set_backend},
    insert::insert,
};

use self::backend::prepare_to_frontend;
use super::{
    FlowMaps, PodSockets, Routine, Scratch, direct, ports::host_connection, routine::decide,
    scratch::OverlappingFlow,
};
use crate::{
    family::Family,
    layout::*,
    reason::Reason,
    select::{self, Origin},
    unserved,
};

/// Opens a flow for a packet that has none of its own.
#[inline(always)]
pub(super) fn open<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
    sockets: &impl PodSockets<F::Address>,
) -> Result<(), Reason> {
    decide(maps, scratch, Routine::Prepare)?;
    let overlapping_flow = scratch.overlapping_flow;
    if overlapping_flow != OverlappingFlow::None {
        scratch.flow.flags |= FLOW_OVERLAPPING;
    }
    if scratch.is_keyed_by_origin {
        scratch.flow.flags |= FLOW_KEYED_BY_ORIGIN;
    }
    if overlapping_flow == OverlappingFlow::Masqueraded {
        scratch.flow.flags |= FLOW_HOST_CONNECTION;
    }
    scratch.is_port_taken = scratch.origin == Origin::Workload && sockets.is_connected(scratch);
    decide(maps, scratch, Routine::Insert)?;
    scratch.action.rewrite = scratch.flow.dnat_rewrite();
    Ok(())
}

/// Makes `scratch.flow` one to what the packet dials.
#[inline(always)]
pub(super) fn prepare<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    prepare_flow(maps, scratch)?;
    if scratch.packet.is_tcp() && maps.holds_openings() { Err(Reason::OpeningsHeld) } else { Ok(()) }
}

#[inline(always)]
pub(super) fn prepare_flow<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    let Scratch { origin, overlapping_flow, .. } = *scratch;
    // Before the maps are read: a change meanwhile has them compared once more.
    scratch.flow.epoch = maps.epoch();
    if maps.holds_packets() {
        return Err(Reason::NotAService);
    }
    if scratch.is_unpacked() {
        return direct::prepare(maps, scratch);
    }
    if !scratch.packet.opens() {
        return unknown::prepare(maps, scratch);
    }
    let dials_frontend = overlapping_flow != OverlappingFlow::Masqueraded && find_frontend(maps, scratch);
    // To a node port that a host connection has: it would go round for ever.
    if dials_frontend && origin != Origin::Host && host_connection::is_answer(maps, scratch) {
        return Err(Reason::NotAService);
    }
    if dials_frontend && !is_source_allowed(maps, scratch) {
        return Err(Reason::SourceNotAllowed);
    }
    if dials_frontend {
        if !flood_limit::allows(maps, scratch) {
            return Err(Reason::ConnectionsLimited);
        }
        prepare_to_frontend(maps, scratch)?;
    } else if overlapping_flow == OverlappingFlow::None {
        return Err(why_unserved(maps, scratch));
    } else {
        prepare_to_endpoint(scratch);
    }
    Ok(())
}

/// Finds what the packet dials, as `scratch.frontend`.
// Not inlined: keys would lie on the stack on the way of each packet.
#[inline(never)]
pub(super) fn find_frontend<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) -> bool {
    let found = select::find(maps, &scratch.packet.to(), scratch.origin);
    scratch.frontend = found.unwrap_or_default();
    found.is_some()
}

/// Why nobody serves the packet, which dials no frontend.
// Not inlined: keys would lie on the stack on the way of each packet.
#[inline(never)]
pub(super) fn why_unserved<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &Scratch<F::Address>) -> Reason {
    unserved::reason(maps, &scratch.packet.destination)
}

/// As [`why_unserved`], of a packet that leaves. The hook on `connect` has let datagram sockets of the node pass.
#[inline(always)]
pub(super) fn why_socket_is_unserved<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &Scratch<F::Address>,
) -> Reason {
    let Scratch { packet, is_made_here, .. } = scratch;
    let is_of_socket = *is_made_here && !packet.is_tcp() && packet.opens();
    if is_of_socket { why_unserved(maps, scratch) } else { Reason::NotAService }
}

/// Does `scratch.frontend` serve the packet's client?
// Not inlined: keys would lie on the stack on the way of each packet.
#[inline(never)]
pub(super) fn is_source_allowed<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &Scratch<F::Address>) -> bool {
    select::allows_source(maps, scratch.frontend, &scratch.packet.source)
}

/// Returns the flag of flows whose client is there.
#[inline(always)]
pub(super) const fn flag_of(origin: Origin) -> u32 {
    match origin {
        Origin::Workload => FLOW_FROM_POD,
        Origin::Host => FLOW_FROM_HOST,
        Origin::Outside => 0,
    }
}

/// Makes `scratch.flow`, which has the packet's ends as client and backend, one to that endpoint itself.
#[inline(always)]
pub(super) fn prepare_to_endpoint<A: Address>(Scratch { packet, flow, origin, .. }: &mut Scratch<A>) {
    // The backend's id stays: while that endpoint lives, so does this flow.
    flow.backend = packet.destination;
    flow.set_backend_port(packet.destination_port);
    flow.service = NO_SERVICE;
    // `FLOW_HOST_CONNECTION` tells flows that leave with the node's address.
    flow.flags = flag_of(*origin) & FLOW_FROM_POD;
}
