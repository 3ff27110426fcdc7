//! The port by which a backend knows a flow's client: its own, or an alias where that one is taken.

use crate::{
    family::Family,
    flow::{
        FlowEntry as _, FlowMaps, InsertError, Routine, Scratch, Stage,
        find::{is_from_host, is_host_connection, lookup},
        ports::{
            Try,
            host_connection::{self, Held},
        },
    },
    layout::*,
    port::{PORT_TRIES, Port},
    reason::Reason,
};

/// How many ports are tried for a client's alias, its own first: half of them at random, then one after the other.
const ALIAS_TRIES: u32 = 16;

/// Inserts the entry of client and backend. Where the same client port already talks to the same backend through another
/// frontend, the client gets an alias port. A process of the node gets one always: what it sends to the backend itself
/// is not seen, so nothing else tells the answers apart.
#[inline(always)]
pub(in crate::flow) fn take_backend_key<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<Try, Reason> {
    for attempt in 0..ALIAS_TRIES {
        scratch.attempt = attempt;
        maps.run(scratch, Routine::TryAliasPort);
        match scratch.tried {
            done @ (Try::Taken | Try::Joined) => return Ok(done),
            Try::Failed => return Err(Reason::FlowNotCreated),
            Try::Next => {}
        }
    }
    Err(Reason::AliasPortsExhausted)
}

/// Inserts the entry of client and backend with this attempt's port.
#[inline(always)]
pub(in crate::flow) fn try_port<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
) -> Try {
    let port = alias_port(maps, scratch);
    if port == Port::NONE || is_ambiguous(&scratch.flow, port) {
        return Try::Next;
    }
    scratch.flow.set_alias_port(port);
    scratch.key = scratch.flow.backend_key();
    let is_nodes = is_host_connection(scratch) || is_from_host(scratch);
    let Scratch { packet, key, flow, entry, .. } = scratch;
    if is_nodes && host_connection::holds(maps, key, packet.is_tcp(), Held::ByAny) {
        return Try::Next;
    }
    if let Some((_, found)) = lookup(maps, key) {
        found.read_into(entry);
        if entry.flags & FLOW_OF_NETFILTER != 0 || !entry.same_client_and_frontend(flow) {
            return Try::Next;
        }
        if !entry.state.has_ended() {
            return Try::Joined;
        }
        // The entry is the last one of a connection that has ended.
        maps.remove(Stage::Established, key);
        maps.remove(Stage::Opening, key);
    }
    match maps.insert(Stage::Opening, key, flow) {
        Ok(()) => Try::Taken,
        Err(InsertError::Full) => Try::Failed,
        // Another CPU has inserted the key meanwhile.
        Err(InsertError::Exists) => {
            let Some(found) = maps.flow(Stage::Opening, key) else { return Try::Next };
            found.read_into(entry);
            if entry.same_client_and_frontend(flow) { Try::Joined } else { Try::Next }
        }
    }
}

/// [`Port::NONE`]: none is tried.
#[inline(always)]
fn alias_port<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) -> Port {
    let attempt = scratch.attempt;
    let own_port_at = if is_from_host(scratch) { ALIAS_TRIES - 1 } else { 0 };
    let is_random = attempt < ALIAS_TRIES / 2;
    if is_random {
        scratch.random = maps.random();
    }
    if attempt != own_port_at {
        let attempt = if is_random { attempt } else { attempt + PORT_TRIES - ALIAS_TRIES };
        let port = maps.masquerade_port(scratch.random, attempt);
        // The client's own port is tried at its turn alone: here another connection may have it.
        if port == scratch.flow.client_port() { Port::NONE } else { port }
    } else if is_host_connection(scratch) || scratch.is_port_taken {
        // Another connection has its own.
        Port::NONE
    } else {
        scratch.flow.client_port()
    }
}

/// Would two of the flow's packets look alike? Those of both directions where the client is the backend, and those before and after
/// translation where the frontend is.
#[inline(always)]
fn is_ambiguous<A: Address>(flow: &Flow<A>, alias: Port) -> bool {
    let meets_backend = alias == flow.backend_port() && flow.client == flow.backend;
    let is_frontend = flow.frontend_port() == flow.backend_port() && flow.frontend == flow.backend;
    meets_backend || (is_frontend && alias == flow.client_port() && flow.flags & FLOW_OVERLAPPING == 0)
}
