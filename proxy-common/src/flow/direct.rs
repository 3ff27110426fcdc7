//! Direct server return. The node that a client dials chooses a backend of another node, and sends the client's packets there as they are,
//! each in a packet to the backend. The backend's node takes them out, translates their destination, and its answers go straight to the
//! client, from the address that the client has dialled.
//!
//! So the first node sees one direction of a flow, and the second has an ordinary one, with a client and a backend of its own.

use super::{
    Change, FlowEntry as _, FlowTables, Routine, SUSTAINED_AFTER, Scratch, Speaker, Step, decide, find, find_frontend, go_on,
    is_admitted, is_over, open, set_key_of_packet,
    tcp::{self, REACH, RESET_WINDOW, is_near},
};
use crate::{
    affinity,
    family::{Family, Slot as _},
    layout::*,
    packet::{Ends, Packet, TCP_ACK, TCP_FIN, TCP_RST, TCP_SYN, Then},
    port::Port,
    reason::Reason,
};

/// Has the client closed a connection whose answers are not seen? The backend may go on sending for long. Nobody here sees the end, so that
/// the flow must not stay in the table that does not evict.
#[inline(always)]
pub(super) fn is_closing<A>(flow: &Flow<A>) -> bool {
    flow.flags & FLOW_DSR != 0 && flow.state.client_fin != 0
}

/// The ends of the packet in which `scratch.packet`, which goes to a backend, leaves this node. What clients have sent to a node port comes
/// from the address that they have dialled: it is this node's, and the backend's node answers from it.
#[inline(always)]
pub(super) fn set_tunnel<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    let Scratch { packet, action, interface, tunnel, .. } = scratch;
    tunnel.destination = packet.destination;
    let dialled = action.rewrite.destination;
    tunnel.source = if tables.node_address(&dialled).is_some() {
        dialled
    } else {
        tables.masquerade_address(*interface)
    };
    if tunnel.source == F::Address::UNSPECIFIED { Err(Reason::NoMasqueradeAddress) } else { Ok(()) }
}

/// Decides what becomes of `scratch.packet`, which has come in one to an address of `scratch.tunnel`. Fails with `NotAService` where it is
/// not for a backend of this node: then it is nobody's to take out.
#[inline(always)]
pub(super) fn unpack<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    scratch.action.then = Then::Pass;
    set_key_of_packet(scratch);
    if let Some(found) = find(tables, scratch) {
        if found.step != Step::ToFrontend {
            return Err(Reason::NotAService);
        }
        let Scratch { packet, flow, tunnel, .. } = &*scratch;
        // The other node may have forgotten its flow, and chosen anew.
        let is_its = flow.backend == tunnel.destination && flow.flags & FLOW_DSR == 0;
        let goes_on = is_its && !(packet.opens() && is_over(tables, scratch, found.entry));
        if goes_on {
            scratch.action.rewrite = scratch.flow.forward_rewrite();
            return go_on(tables, scratch, found);
        }
        if scratch.packet.opens() {
            tables.run(scratch, Routine::Replace);
        }
    }
    if !scratch.packet.opens() {
        return Err(Reason::NotAService);
    }
    prepare(tables, scratch)?;
    decide(tables, scratch, Routine::Insert)?;
    scratch.action.rewrite = scratch.flow.forward_rewrite();
    Ok(())
}

/// Makes `scratch.flow` one to the backend that another node has chosen.
#[inline(always)]
fn prepare<F: Family, T: FlowTables<F>>(tables: &T, scratch: &mut Scratch<F::Address>) -> Result<(), Reason> {
    // Before the tables are read: a change meanwhile has them compared once more.
    scratch.flow.epoch = tables.epoch();
    let _found = find_frontend(tables, scratch);
    if scratch.frontend.flags & FRONTEND_DSR == 0 {
        return Err(Reason::NotAService);
    }
    if !is_admitted(tables, scratch) {
        return Err(Reason::SourceNotAllowed);
    }
    let place = place(tables, scratch);
    if place == NOWHERE {
        return Err(Reason::NotAService);
    }
    open::detect(tables, scratch);
    open::set_backend(tables, scratch, place)
}

/// Is a packet that was in another sent to an address at which node ports are served? To that of the node which has encapsulated it, and to
/// no other: whoever forges one can have an answer come only from an address that it can forge anyway.
#[inline(always)]
pub(super) fn has_node_ports<A: Address>(tunnel: &Ends<A>, packet: &Packet<A>) -> bool {
    tunnel.source.difference(&packet.destination) == 0
}

/// No slot has this index.
const NOWHERE: u32 = u32::MAX;

/// Index of the slot of this node's backend with the address that the packet was sent to, among those that `scratch.frontend` leads to.
// Not inlined, for its stack.
#[inline(never)]
fn place<F: Family, T: FlowTables<F>>(tables: &T, scratch: &Scratch<F::Address>) -> u32 {
    let Scratch { frontend, tunnel, .. } = scratch;
    let Some(service) = tables.service(frontend.service) else { return NOWHERE };
    if service.external.count() == 0 {
        return NOWHERE;
    }
    let wanted = F::Slot::new(tunnel.destination, Port::new(u16::MAX), 0, BACKEND_LOCAL);
    let place = affinity::last_up_to(tables, service.external, &wanted);
    match tables.slot(place) {
        Some(slot) if slot.address() == tunnel.destination && slot.flags() & BACKEND_LOCAL != 0 => place,
        Some(_) | None => NOWHERE,
    }
}

/// What a client says of `scratch.flow`, whose entry is at `scratch.key` in `scratch.stage`. Nothing tells an acknowledgement that is made up
/// from one of what the backend has sent. So a client is believed to receive answers once it goes on: its flow is established by a segment
/// that comes a second after the last stamp, or by a datagram seconds after the first one.
#[inline(always)]
pub(super) fn hear_client<F: Family, T: FlowTables<F>>(tables: &T, scratch: &mut Scratch<F::Address>) {
    let Some(entry) = tables.flow(scratch.stage, &scratch.key) else { return };
    if entry.opened() != scratch.flow.opened {
        return;
    }
    let old = scratch.flow.state;
    let mut state = old;
    if !scratch.packet.is_tcp() {
        let age = tables.now().saturating_sub(scratch.flow.opened);
        if age >= SUSTAINED_AFTER {
            state.progress = state.progress.max(PROGRESS_SUSTAINED);
        }
    } else {
        let segment = scratch.packet.segment;
        let sent = scratch.flow.backend_numbers.reached;
        let is_plain = segment.has(TCP_ACK) && !segment.has(TCP_SYN | TCP_RST);
        if state.progress < PROGRESS_CONFIRMED && is_plain && is_near(segment.sequence, sent) {
            // Where the backend's stream begins, nobody else says.
            scratch.flow.client_numbers.reached = segment.acknowledgement;
            entry.write(Change::Reached(Speaker::Client, segment.acknowledgement));
            state.progress = PROGRESS_CONFIRMED;
        }
        let is_believed = is_plain
            && is_near(segment.sequence, sent)
            && is_near(segment.acknowledgement, scratch.flow.client_numbers.reached);
        if segment.has(TCP_RST) {
            let distance = segment.sequence.wrapping_sub(sent);
            if distance == 0 {
                state.reset = RESET_CONFIRMED;
            } else if distance < RESET_WINDOW {
                state.reset = state.reset.max(RESET_PLAUSIBLE);
            }
        } else if is_believed {
            state.reset = 0;
            let is_beyond = segment.next.wrapping_sub(sent).wrapping_sub(1) < REACH;
            if segment.has(TCP_FIN) {
                state.client_fin = FIN_ACKNOWLEDGED;
            } else if is_beyond {
                // The FIN before was forged.
                state.client_fin = 0;
            }
            tcp::advance(scratch, Speaker::Client, entry);
        }
    }
    tcp::write(entry, old, state);
    scratch.flow.state = state;
}
