//! Direct server return. The node that a client dials chooses a backend of another node, and sends the client's packets there as they are,
//! each in a packet to the backend. The backend's node takes them out, translates their destination, and its answers go straight to the
//! client, from the address that the client has dialled.
//!
//! So the first node sees one direction of a flow, and the second has an ordinary one, with a client and a backend of its own.

use super::{
    Change, FlowEntry as _, FlowMaps, Routine, Scratch, Side, Stage,
    entries::is_stale,
    find::lookup,
    forward,
    keep::SUSTAINED_AFTER,
    open::{self, flood_limit, is_source_allowed},
    routine::decide,
    tcp::{self, is_in_reach, is_near},
};
use crate::{
    affinity::{self, NOWHERE},
    balance,
    family::{Family, Slot as _},
    layout::*,
    packet::{Packet, Part, TCP_ACK, TCP_FIN, TCP_RST, TCP_SYN},
    port::Port,
    reason::Reason,
    select,
};

/// Has the client closed a connection whose answers are not seen? The backend may go on sending for long. Nobody here sees the end, so that
/// the flow must not stay in the map that does not evict.
#[inline(always)]
pub(super) fn is_closing<A>(flow: &Flow<A>) -> bool {
    flow.flags & FLOW_DSR != 0 && flow.state.client_fin != 0
}

/// What `scratch.packet`, which goes to a backend, is when it leaves this node, and in what. What clients have sent to a node port comes from the
/// address that they have dialled: it is this node's, and the backend's node answers from it.
#[inline(always)]
pub(super) fn encapsulate<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    let Scratch { packet, action, tunnel, flow, .. } = &mut *scratch;
    // The first fragment has told what the others are.
    if !packet.is_later_fragment() {
        action.rewrite = flow.undo_dnat_rewrite();
    }
    tunnel.destination = packet.destination;
    // Later fragments have none: all of a packet stay together.
    let ports = match packet.fragment.part {
        Part::Whole => (packet.source_port, packet.destination_port),
        Part::First | Part::Later => (Port::NONE, Port::NONE),
    };
    tunnel.source_port = tunnel_port(maps, packet, ports);
    let interface = scratch.interface;
    set_tunnel_source(maps, scratch, interface)?;
    forward::allow_forwarding(maps, scratch);
    Ok(())
}

/// Sets `scratch.tunnel` of a packet that XDP forwards, with the ends of `scratch.action`, but for its source: that depends on the next hop, whose
/// lookup needs the length of the outer headers.
// Not inlined, for its stack.
#[inline(never)]
pub(super) fn set_tunnel_but_source<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) {
    let Scratch { packet, action, tunnel, .. } = scratch;
    tunnel.destination = action.rewrite.destination;
    let ports = (action.rewrite.source_port, action.rewrite.destination_port);
    tunnel.source_port = tunnel_port(maps, packet, ports);
}

/// Makes the packet, which XDP forwards, what leaves the node by `scratch.next_hop`, as [`encapsulate`] does, and sets the source of `scratch.tunnel`.
// Not inlined, for its stack.
#[inline(never)]
pub(super) fn finish_tunnel<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    scratch.action.rewrite = scratch.flow.undo_dnat_rewrite();
    scratch.action.rewrite.service = scratch.flow.service;
    let interface = scratch.next_hop.interface;
    set_tunnel_source(maps, scratch, interface)
}

/// By which networks and their cards tell flows apart that go between the same two addresses. The ports are those of the alias and the backend.
/// It is one of those that the kernel gives to sockets by default. Reserved ports are for sources
/// of the programs, which would look for their flows wherever the packet leaves a second time.
#[inline(always)]
fn tunnel_port<F: Family, T: FlowMaps<F>>(
    maps: &T,
    packet: &Packet<F::Address>,
    (from, to): (Port, Port),
) -> Port {
    const FIRST: u16 = 1 << 15;
    const BITS: u32 = 14;
    if maps.encapsulation() != ENCAPSULATION_GENEVE {
        return Port::NONE;
    }
    let hash = balance::connection_hash((&packet.source, from), to, packet.protocol);
    Port::new(FIRST | (hash & ((1 << BITS) - 1)) as u16)
}

/// Makes `scratch.tunnel` come from the address that the client has dialled, if it is this node's: the backend's node answers from it. Otherwise
/// from the one that packets leave with by `interface`.
#[inline(always)]
fn set_tunnel_source<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
    interface: u32,
) -> Result<(), Reason> {
    let Scratch { action, tunnel, .. } = scratch;
    let dialled = action.rewrite.destination;
    tunnel.source =
        if maps.node_address(&dialled).is_some() { dialled } else { maps.masquerade_address(interface) };
    if tunnel.source == F::Address::UNSPECIFIED { Err(Reason::NoMasqueradeAddress) } else { Ok(()) }
}

/// Is `scratch.packet`, which has come in another, of `scratch.flow`, which has its ends?
#[inline(always)]
pub(super) fn is_for<A: Address>(Scratch { packet, flow, tunnel, .. }: &Scratch<A>) -> bool {
    let from_client = packet.source.difference(&flow.client) | packet.destination.difference(&flow.frontend);
    let elsewhere = u64::from(flow.flags & FLOW_DSR) | flow.backend.difference(&tunnel.destination);
    from_client | elsewhere == 0
}

/// Makes `scratch.flow` one to the backend that another node has chosen. Fails with `NotAService` where the packet is for nobody here: then it
/// is not taken out.
///
/// A segment of a connection that no map knows opens its flow again. Its endpoint goes on with the
/// connection, or answers by a RST.
#[inline(always)]
pub(super) fn prepare<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    find_frontend(maps, scratch);
    if scratch.frontend.flags & FRONTEND_DSR == 0 {
        return Err(Reason::NotAService);
    }
    if !is_source_allowed(maps, scratch) {
        return Err(Reason::SourceNotAllowed);
    }
    let index = index(maps, scratch);
    if index == NOWHERE {
        return Err(Reason::NotAService);
    }
    if !flood_limit::allows(maps, scratch) {
        return Err(Reason::ConnectionsLimited);
    }
    let is_resumed = !scratch.packet.opens();
    // The other node may have forgotten its flow, and chosen anew.
    if let Some((_, entry)) = lookup(maps, &scratch.key) {
        entry.read_into(&mut scratch.flow);
        // A late segment of a connection that is over opens nothing where another one has begun.
        if is_live(&scratch.flow) || (is_resumed && !scratch.flow.state.has_ended()) {
            return Err(Reason::NotAService);
        }
        maps.run(scratch, Routine::Replace);
    }
    scratch.flow.epoch = maps.epoch();
    open::detect(maps, scratch);
    open::set_backend(maps, scratch, index)?;
    if is_resumed {
        // The port of a masqueraded source was chosen by the flow that is lost.
        if scratch.flow.flags & FLOW_MASQUERADE != 0 {
            return Err(Reason::NotAService);
        }
        scratch.flow.flags |= FLOW_RESUMED;
    }
    Ok(())
}

/// Must the flow be left to its backend? Whoever can send a packet in another must not move a connection that others have.
#[inline(always)]
fn is_live<A>(flow: &Flow<A>) -> bool {
    let is_confirmed = flow.protocol == PROTOCOL_TCP && flow.state.progress >= PROGRESS_CONFIRMED;
    flow.flags & FLOW_OF_NETFILTER != 0 || (is_confirmed && !flow.state.has_ended())
}

/// Sets `scratch.frontend`. Node ports are served at the address of the node that has encapsulated the packet, and at no other: whoever forges
/// one can have an answer come only from an address that it can forge anyway.
// Not inlined, for its stack.
#[inline(never)]
fn find_frontend<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) {
    let Scratch { packet, tunnel, frontend, .. } = scratch;
    let has_node_ports = || tunnel.source.difference(&packet.destination) == 0;
    *frontend = select::find_where(maps, &packet.to(), has_node_ports).unwrap_or_default();
}

/// Index of the slot of this node's backend with the address that the packet was sent to, among those that `scratch.frontend` leads to.
// Not inlined, for its stack.
#[inline(never)]
fn index<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &Scratch<F::Address>) -> u32 {
    let Scratch { frontend, tunnel, .. } = scratch;
    let Some(service) = maps.service(frontend.service) else { return NOWHERE };
    if service.external.count() == 0 {
        return NOWHERE;
    }
    let wanted = F::Slot::new(tunnel.destination, Port::new(u16::MAX), 0, BACKEND_LOCAL);
    let index = affinity::last_up_to(maps, service.external, &wanted);
    match maps.slot(index) {
        Some(slot) if slot.address() == tunnel.destination && slot.flags() & BACKEND_LOCAL != 0 => index,
        Some(_) | None => NOWHERE,
    }
}

/// A client's packet of `scratch.flow`, whose entry is at `scratch.key` in `scratch.stage`: learns what it says, and keeps the flow's entries.
#[inline(always)]
pub(super) fn go_on<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    if scratch.packet.is_error() {
        return Ok(());
    }
    maps.run(scratch, Routine::TrackClient);
    let Scratch { flow, stage, packet, .. } = &*scratch;
    let is_opening = *stage == Stage::Opening;
    if flow.state.has_ended() || (is_closing(flow) && !is_opening) {
        maps.run(scratch, Routine::Demote);
        return Ok(());
    }
    // A SYN keeps no connection that its backend may have forgotten.
    if !is_stale(flow, maps.now()) || (packet.is_tcp() && packet.opens()) {
        return Ok(());
    }
    if is_opening && flow.state.progress >= PROGRESS_SUSTAINED && !is_closing(flow) {
        decide(maps, scratch, Routine::Establish)?;
    }
    maps.run(scratch, Routine::Refresh);
    Ok(())
}

/// What the packet says of `scratch.flow`. Nothing tells an acknowledgement that is made up from one of what the backend has sent. So a client
/// is believed to receive answers once it goes on: its flow is established by a segment that comes a second after the flow's last stamp, or by
/// a datagram that comes seconds after the first one.
#[inline(always)]
pub(super) fn track_client<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) {
    let Some(entry) = maps.flow(scratch.stage, &scratch.key) else { return };
    if entry.opened() != scratch.flow.opened {
        return;
    }
    let old = scratch.flow.state;
    let mut state = old;
    if !scratch.packet.is_tcp() {
        let age = maps.now().saturating_sub(scratch.flow.opened);
        if age >= SUSTAINED_AFTER {
            state.progress = state.progress.max(PROGRESS_SUSTAINED);
        }
    } else {
        let segment = scratch.packet.segment;
        let sent = scratch.flow.backend_numbers.reached;
        let is_plain = segment.has(TCP_ACK) && !segment.has(TCP_SYN | TCP_RST);
        let is_resumed = scratch.flow.flags & FLOW_RESUMED != 0;
        let is_first = state.progress < PROGRESS_CONFIRMED && !is_resumed;
        if is_first && is_plain && is_near(segment.sequence, sent) {
            // Where the backend's stream begins, nobody else says.
            scratch.flow.client_numbers.reached = segment.acknowledgement;
            entry.write(Change::Reached(Side::Client, segment.acknowledgement));
            state.progress = PROGRESS_CONFIRMED;
        }
        let acknowledged = scratch.flow.client_numbers.reached;
        let is_expected = is_near(segment.sequence, sent) && is_near(segment.acknowledgement, acknowledged);
        // After a loss an acknowledgement jumps over all that was under way. The data is not seen
        // here, so that the exact sequence number has to vouch for the acknowledgement.
        let is_jump = segment.sequence == sent && is_in_reach(segment.acknowledgement, acknowledged);
        let is_believed = is_plain && (is_expected || is_jump);
        let is_unconfirmed = state.progress < PROGRESS_CONFIRMED;
        if scratch.packet.opens() && is_unconfirmed && is_stale(&scratch.flow, maps.now()) {
            // The client has given the first connection up, and opens another from the same port.
            scratch.flow.backend_numbers.reached = segment.next;
            entry.write(Change::Reached(Side::Backend, segment.next));
        }
        if segment.has(TCP_RST) {
            tcp::track_reset(&mut state, segment.sequence, sent, sent);
        } else if is_believed && !tcp::may_precede_reset(&scratch.flow, &segment, maps.now()) {
            state.reset = 0;
            if segment.has(TCP_FIN) {
                state.client_fin = FIN_ACKNOWLEDGED;
            }
            tcp::advance(scratch, Side::Client, entry);
        }
    }
    tcp::write(maps, entry, old, state);
    scratch.flow.state = state;
}
