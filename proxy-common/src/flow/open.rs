//! Opens a flow for the first packet of a connection: chooses the backend and the ports that identify its answers, and
//! inserts all entries or none.

use super::{ENDED, FlowEntry as _, FlowTables, InsertError, Scratch, Stage, lookup};
use crate::{
    family::{Family, Slot as _},
    layout::*,
    packet::Packet,
    port::Port,
    reason::Reason,
    select::{self, Origin},
};

/// How many ports are tried for a translated source before the packet is dropped.
const MASQUERADE_TRIES: u32 = 16;
/// How many ports are tried for a client's alias, its own first.
const ALIAS_TRIES: u32 = 8;

/// The first packet of a connection: creates the flow, which is then in `scratch.flow`. One function for both
/// cases, because one more stack frame would exceed the verifier's limit.
///
/// With a frontend, a backend is chosen. Without one the packet is to an endpoint itself, and its answers would look
/// like those of the flow that lies in `scratch.flow`: it becomes a flow beside that, which gets an alias port.
#[inline(never)]
pub(super) fn open<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    packet: &Packet<F::Address>,
    frontend: Option<Frontend>,
    origin: Origin,
) -> Result<(), Reason> {
    let masqueraded = match frontend {
        Some(frontend) => {
            let slot = select::choose(tables, frontend, origin, tables.random())?;
            let flow = &mut scratch.flow;
            flow.backend = slot.address();
            flow.set_backend_port(slot.port());
            flow.backend_id = slot.backend();
            flow.service = frontend.service;
            let remote = slot.flags() & BACKEND_LOCAL == 0;
            let to_outside = origin == Origin::Outside && remote && frontend.flags & FRONTEND_EXTERNAL != 0;
            let hairpin = origin != Origin::Host && packet.source == flow.backend;
            to_outside || hairpin
        }
        None => {
            // The backend's id stays: while that endpoint lives, so does this flow.
            scratch.flow.service = NO_SERVICE;
            scratch.flow.backend = packet.destination;
            scratch.flow.set_backend_port(packet.destination_port);
            false
        }
    };
    let flow = &mut scratch.flow;
    flow.client = packet.source;
    flow.frontend = packet.destination;
    flow.masquerade = F::Address::UNSPECIFIED;
    flow.set_client_port(packet.source_port);
    flow.set_frontend_port(packet.destination_port);
    flow.set_masquerade_port(Port::NONE);
    flow.last_seen = tables.now();
    flow.flags = if origin == Origin::Host { FLOW_FROM_HOST } else { 0 };
    flow.set_alias_port(packet.source_port);
    flow.protocol = packet.protocol;
    if masqueraded {
        take_masquerade_port(tables, scratch)?;
    }
    let taken = take_reply(tables, scratch);
    if taken != Ok(Reply::Ours) {
        release_masquerade_port(tables, scratch);
        taken?;
        // The other packet of a race is a step ahead, or only this entry was left of the flow.
        let Some((_, entry)) = lookup(tables, &scratch.key) else { return Err(Reason::FlowNotCreated) };
        scratch.flow = entry.read();
        scratch.key = scratch.flow.forward_key();
        let _there_already = tables.insert(Stage::Opening, &scratch.key, &scratch.flow);
        return Ok(());
    }
    scratch.key = scratch.flow.forward_key();
    let inserted = tables.insert(Stage::Opening, &scratch.key, &scratch.flow);
    if inserted == Ok(()) {
        tables.count(Reason::FlowOpened);
        tables.count_connection(scratch.flow.service);
        return Ok(());
    }
    let winner = tables.flow(Stage::Opening, &scratch.key);
    if let Some(winner) = winner
        && winner.read().same_entries(&scratch.flow)
    {
        // The other packet of a race found our reply entry and went on from there.
        return Ok(());
    }
    scratch.key = scratch.flow.reply_key();
    tables.remove(Stage::Opening, &scratch.key);
    release_masquerade_port(tables, scratch);
    // Lost the race to a packet that chose another backend?
    let Some(winner) = winner else { return Err(Reason::FlowNotCreated) };
    scratch.flow = winner.read();
    Ok(())
}

/// Finds a port at which the backend's answers to this flow can be told from all others.
#[inline(always)]
fn take_masquerade_port<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    let masquerade = tables.masquerade();
    if masquerade.address == F::Address::UNSPECIFIED {
        return Err(Reason::NoMasqueradeAddress);
    }
    let Scratch { key, flow } = scratch;
    flow.masquerade = masquerade.address;
    flow.flags |= FLOW_MASQUERADED;
    *key = flow.masqueraded_reply_key();
    let start = tables.random();
    for attempt in 0..MASQUERADE_TRIES {
        let Some(port) = masquerade.ports.choose(start, attempt) else { break };
        flow.set_masquerade_port(port);
        key.set_destination_port(port);
        if tables.flow(Stage::Established, key).is_none()
            && tables.insert(Stage::Opening, key, flow) == Ok(())
        {
            return Ok(());
        }
    }
    Err(Reason::MasqueradePortsExhausted)
}

/// Leaves `scratch.key` as it is.
#[inline(always)]
fn release_masquerade_port<F: Family, T: FlowTables<F>>(tables: &T, scratch: &mut Scratch<F::Address>) {
    if scratch.flow.is_masqueraded() {
        let reply = scratch.key;
        scratch.key = scratch.flow.masqueraded_reply_key();
        tables.remove(Stage::Opening, &scratch.key);
        scratch.key = reply;
    }
}

/// The flow that a reply entry belongs to.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Reply {
    /// Inserted for our flow.
    Ours,
    /// Of the same client and frontend, at `scratch.key`: a flow that is as good as ours.
    Winners,
}

/// Inserts the reply entry. Where the same client port already talks to the same backend through another
/// frontend, the client gets an alias port. A process of the node gets one always: what it sends to the backend itself
/// is not seen, so nothing else tells the answers apart.
#[inline(always)]
fn take_reply<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<Reply, Reason> {
    let ports = tables.masquerade().ports;
    let start = tables.random();
    let Scratch { key, flow } = scratch;
    *key = flow.reply_key();
    let own_port_at = if flow.flags & FLOW_FROM_HOST != 0 { ALIAS_TRIES - 1 } else { 0 };
    for attempt in 0..ALIAS_TRIES {
        let port =
            if attempt == own_port_at { Some(flow.client_port()) } else { ports.choose(start, attempt) };
        let Some(port) = port else { continue };
        flow.set_alias_port(port);
        key.set_destination_port(port);
        // The two directions of a hairpin flow would have the same key.
        if flow.alias_port() == flow.backend_port() && flow.client == flow.backend {
            continue;
        }
        if let Some((_, entry)) = lookup(tables, key) {
            if !entry.read().same_client_and_frontend(flow) {
                continue;
            }
            if entry.flags() & ENDED == 0 {
                return Ok(Reply::Winners);
            }
            // The entry is the last one of a connection that has ended.
            tables.remove(Stage::Established, key);
            tables.remove(Stage::Opening, key);
        }
        match tables.insert(Stage::Opening, key, flow) {
            Ok(()) => {
                if flow.alias_port() != flow.client_port() && flow.is_masqueraded() {
                    let reply = *key;
                    *key = flow.masqueraded_reply_key();
                    tables.replace(Stage::Opening, key, flow);
                    *key = reply;
                }
                return Ok(Reply::Ours);
            }
            Err(InsertError::Full) => return Err(Reason::FlowNotCreated),
            // Another CPU has inserted the key meanwhile.
            Err(InsertError::Exists) => {
                if let Some(entry) = tables.flow(Stage::Opening, key)
                    && entry.read().same_client_and_frontend(flow)
                {
                    return Ok(Reply::Winners);
                }
            }
        }
    }
    Err(Reason::AliasPortsExhausted)
}
