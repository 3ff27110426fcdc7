//! Chooses the backend of a flow that is opened, and with it what becomes of the flow's source.

use crate::{
    balance::{self, Draw},
    family::{Family, Slot as _},
    flow::{FlowMaps, Scratch, open::flag_of},
    layout::*,
    port::Port,
    reason::Reason,
    select::{self, Origin},
};

/// Makes `scratch.flow` one from the packet's client to a backend of `scratch.frontend`.
#[inline(always)]
pub(in crate::flow) fn prepare_to_frontend<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    detect(maps, scratch);
    set_draw(maps, scratch);
    let Scratch { packet, origin, frontend, detected, affinity_key, draw, .. } = &mut *scratch;
    affinity_key.service = frontend.service;
    affinity_key.client = Client::new(*origin, packet.source);
    let is_inside = select::is_inside(*origin, *detected);
    let index = select::choose_index(maps, *frontend, is_inside, affinity_key, *draw)?;
    set_backend(maps, scratch, index)
}

/// Chooses a backend as [`prepare_to_frontend`] does, but by the draw alone: affinity neither
/// decides nor remembers.
#[inline(always)]
pub(in crate::flow) fn prepare_as_drawn<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    detect(maps, scratch);
    set_draw(maps, scratch);
    let Scratch { origin, frontend, detected, draw, .. } = *scratch;
    let index = select::drawn_index(maps, frontend, select::is_inside(origin, detected), draw)?;
    set_backend(maps, scratch, index)
}

/// Sets by what the packet draws a backend of `scratch.frontend`, as `scratch.draw`.
// Not inlined, for its stack. The verifier knows nothing of what was in memory: what follows is the same to it, whatever is drawn by.
#[inline(never)]
fn set_draw<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) {
    let Scratch { packet, frontend, draw, .. } = scratch;
    *draw = Draw::of(frontend.flags, maps.random(), |with_port| {
        let port = if with_port { packet.source_port } else { Port::NONE };
        balance::connection_hash((&packet.source, port), packet.destination_port, packet.protocol)
    });
}

/// Makes the backend of this slot that of `scratch.flow`.
// Not inlined: what it needs of the stack would be added to what choosing a backend needs.
#[inline(never)]
pub(in crate::flow) fn set_backend<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
    index: u32,
) -> Result<(), Reason> {
    let slot = select::slot_at(maps, index)?;
    let Scratch { flow, frontend, .. } = &mut *scratch;
    flow.backend = slot.address();
    flow.set_backend_port(slot.port());
    flow.backend_id = slot.backend();
    flow.service = frontend.service;
    let is_remote = slot.flags() & BACKEND_LOCAL == 0;
    let counted = if frontend.flags & FRONTEND_LEAST_CONNECTION == 0 { 0 } else { FLOW_COUNTED };
    scratch.flow.flags = counted
        | flag_of(scratch.origin)
        | if scratch.origin == Origin::Host {
            0
        } else if is_remote && returns_directly(scratch) {
            FLOW_DSR
        } else if is_masqueraded(maps, scratch, is_remote) {
            FLOW_MASQUERADE
        } else {
            0
        };
    Ok(())
}

/// Do answers of another node reach the packet's client without this one? Pods may know their nodes' addresses only.
#[inline(always)]
fn returns_directly<A>(Scratch { origin, frontend, detected, .. }: &Scratch<A>) -> bool {
    frontend.flags & FRONTEND_DSR != 0 && *origin == Origin::Outside && !select::is_inside(*origin, *detected)
}

/// Does the backend of `scratch.flow` see the node's address instead of the client's?
#[inline(always)]
fn is_masqueraded<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &Scratch<F::Address>,
    is_remote: bool,
) -> bool {
    let Scratch { packet, origin, flow, frontend, detected, .. } = scratch;
    // Otherwise the answer would not come back to this node, or not leave the backend.
    let must_be = (*origin == Origin::Outside && is_remote) || packet.source == flow.backend;
    must_be
        || (!scratch.is_unpacked()
            && maps.masquerades_as_kube_proxy()
            && select::kube_proxy_masquerades(*frontend, *detected, maps.masquerades_all()))
}

/// Finds out whether the packet's client is a pod, as `scratch.detected`.
// Not inlined: what it needs of the stack would be added to what choosing a backend needs.
#[inline(never)]
pub(in crate::flow) fn detect<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) {
    scratch.detected = select::detect(maps, &scratch.packet.source, scratch.interface);
}
