//! Opens a flow for the first packet of a connection: chooses the backend and the port that identifies its answers, and
//! inserts both entries or none.

use super::{
    FlowEntry as _, FlowTables, InsertError, PodSockets, Routine, Scratch, Stage, direct,
    entries::Leg,
    find::{is_foreign, is_from_host, lookup},
    foreign::{self, Held},
    guard,
    routine::decide,
    scratch::{Rival, Try},
    unknown,
};
use crate::{
    balance::{self, Draw},
    family::{Family, Slot as _},
    layout::*,
    port::{PORT_TRIES, Port},
    reason::Reason,
    select::{self, Origin},
    unserved,
};

/// How many ports are tried for a client's alias, its own first: half of them at random, then one after the other.
const ALIAS_TRIES: u32 = 16;

/// Opens a flow for a packet that has none of its own.
#[inline(always)]
pub(super) fn open<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    sockets: &impl PodSockets<F::Address>,
) -> Result<(), Reason> {
    decide(tables, scratch, Routine::Prepare)?;
    let rival = scratch.rival;
    if rival != Rival::None {
        scratch.flow.flags |= FLOW_OVERLAPPING;
    }
    if scratch.is_apart {
        scratch.flow.flags |= FLOW_APART;
    }
    if rival == Rival::Masqueraded {
        scratch.flow.flags |= FLOW_FOREIGN;
    }
    scratch.is_port_taken = scratch.origin == Origin::Workload && sockets.is_connected(scratch);
    decide(tables, scratch, Routine::Insert)?;
    scratch.action.rewrite = scratch.flow.forward_rewrite();
    Ok(())
}

/// Makes `scratch.flow` one to what the packet dials.
#[inline(always)]
pub(super) fn prepare<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    prepare_flow(tables, scratch)?;
    if scratch.packet.is_tcp() && tables.holds_openings() { Err(Reason::OpeningsHeld) } else { Ok(()) }
}

#[inline(always)]
pub(super) fn prepare_flow<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    let Scratch { origin, rival, .. } = *scratch;
    // Before the tables are read: a change meanwhile has them compared once more.
    scratch.flow.epoch = tables.epoch();
    if tables.holds_packets() {
        return Err(Reason::NotAService);
    }
    if scratch.is_unpacked() {
        return direct::prepare(tables, scratch);
    }
    if !scratch.packet.opens() {
        return unknown::prepare(tables, scratch);
    }
    let dials_frontend = rival != Rival::Masqueraded && find_frontend(tables, scratch);
    // To a node port at which another's datagrams are masqueraded: it would go round for ever.
    if dials_frontend && origin != Origin::Host && foreign::is_answer(tables, scratch) {
        return Err(Reason::NotAService);
    }
    if dials_frontend && !is_admitted(tables, scratch) {
        return Err(Reason::SourceNotAllowed);
    }
    if dials_frontend {
        if !guard::admits(tables, scratch) {
            return Err(Reason::ConnectionsLimited);
        }
        prepare_to_frontend(tables, scratch)?;
    } else if rival == Rival::None {
        return Err(why_unserved(tables, scratch));
    } else {
        prepare_to_endpoint(scratch);
    }
    Ok(())
}

/// Finds what the packet dials, as `scratch.frontend`.
// Not inlined: keys would lie on the stack on the way of each packet.
#[inline(never)]
pub(super) fn find_frontend<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
) -> bool {
    let found = select::find(tables, &scratch.packet.to(), scratch.origin);
    scratch.frontend = found.unwrap_or_default();
    found.is_some()
}

/// Why nobody serves the packet, which dials no frontend.
// Not inlined: keys would lie on the stack on the way of each packet.
#[inline(never)]
pub(super) fn why_unserved<F: Family, T: FlowTables<F>>(tables: &T, scratch: &Scratch<F::Address>) -> Reason {
    unserved::reason(tables, &scratch.packet.destination)
}

/// As [`why_unserved`], of a packet that leaves. The hook on `connect` has let datagram sockets of the node pass.
#[inline(always)]
pub(super) fn why_socket_is_unserved<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &Scratch<F::Address>,
) -> Reason {
    let Scratch { packet, is_made_here, .. } = scratch;
    let is_of_socket = *is_made_here && !packet.is_tcp() && packet.opens();
    if is_of_socket { why_unserved(tables, scratch) } else { Reason::NotAService }
}

/// Does `scratch.frontend` serve the packet's client?
// Not inlined: keys would lie on the stack on the way of each packet.
#[inline(never)]
pub(super) fn is_admitted<F: Family, T: FlowTables<F>>(tables: &T, scratch: &Scratch<F::Address>) -> bool {
    select::admits(tables, scratch.frontend, &scratch.packet.source)
}

/// Makes `scratch.flow` one from the packet's client to a backend of `scratch.frontend`.
#[inline(always)]
pub(super) fn prepare_to_frontend<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    detect(tables, scratch);
    set_draw(tables, scratch);
    let Scratch { packet, origin, frontend, detected, affinity_key, draw, .. } = &mut *scratch;
    affinity_key.service = frontend.service;
    affinity_key.client = Client::new(*origin, packet.source);
    let is_inside = select::is_inside(*origin, *detected);
    let place = select::choose_place(tables, *frontend, is_inside, affinity_key, *draw)?;
    set_backend(tables, scratch, place)
}

/// Chooses a backend as [`prepare_to_frontend`] does, but by the draw alone: affinity neither
/// decides nor remembers.
#[inline(always)]
pub(super) fn prepare_as_drawn<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    detect(tables, scratch);
    set_draw(tables, scratch);
    let Scratch { origin, frontend, detected, draw, .. } = *scratch;
    let place = select::drawn_place(tables, frontend, select::is_inside(origin, detected), draw)?;
    set_backend(tables, scratch, place)
}

/// Sets by what the packet draws a backend of `scratch.frontend`, as `scratch.draw`.
// Not inlined, for its stack. The verifier knows nothing of what was in memory: what follows is the same to it, whatever is drawn by.
#[inline(never)]
fn set_draw<F: Family, T: FlowTables<F>>(tables: &T, scratch: &mut Scratch<F::Address>) {
    let Scratch { packet, frontend, draw, .. } = scratch;
    *draw = Draw::of(frontend.flags, tables.random(), |with_port| {
        let port = if with_port { packet.source_port } else { Port::NONE };
        balance::connection_hash((&packet.source, port), packet.destination_port, packet.protocol)
    });
}

/// Makes the backend of this slot that of `scratch.flow`.
// Not inlined: what it needs of the stack would be added to what choosing a backend needs.
#[inline(never)]
pub(super) fn set_backend<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    place: u32,
) -> Result<(), Reason> {
    let slot = select::slot_at(tables, place)?;
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
        } else if is_masqueraded(tables, scratch, is_remote) {
            FLOW_MASQUERADE
        } else {
            0
        };
    Ok(())
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

/// Do answers of another node reach the packet's client without this one? Pods may know their nodes' addresses only.
#[inline(always)]
fn returns_directly<A>(Scratch { origin, frontend, detected, .. }: &Scratch<A>) -> bool {
    frontend.flags & FRONTEND_DSR != 0 && *origin == Origin::Outside && !select::is_inside(*origin, *detected)
}

/// Does the backend of `scratch.flow` see the node's address instead of the client's?
#[inline(always)]
fn is_masqueraded<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &Scratch<F::Address>,
    is_remote: bool,
) -> bool {
    let Scratch { packet, origin, flow, frontend, detected, .. } = scratch;
    // Otherwise the answer would not come back to this node, or not leave the backend.
    let must_be = (*origin == Origin::Outside && is_remote) || packet.source == flow.backend;
    must_be
        || (!scratch.is_unpacked()
            && tables.masquerades_as_kube_proxy()
            && select::kube_proxy_masquerades(*frontend, *detected, tables.masquerades_all()))
}

/// Finds out whether the packet's client is a pod, as `scratch.detected`.
// Not inlined: what it needs of the stack would be added to what choosing a backend needs.
#[inline(never)]
pub(super) fn detect<F: Family, T: FlowTables<F>>(tables: &T, scratch: &mut Scratch<F::Address>) {
    scratch.detected = select::detect(tables, &scratch.packet.source, scratch.interface);
}

/// Makes `scratch.flow`, which has the packet's ends as client and backend, one to that endpoint itself.
#[inline(always)]
pub(super) fn prepare_to_endpoint<A: Address>(Scratch { packet, flow, origin, .. }: &mut Scratch<A>) {
    // The backend's id stays: while that endpoint lives, so does this flow.
    flow.backend = packet.destination;
    flow.set_backend_port(packet.destination_port);
    flow.service = NO_SERVICE;
    // `FLOW_FOREIGN` tells flows that leave with the node's address.
    flow.flags = flag_of(*origin) & FLOW_FROM_POD;
}

/// Inserts `scratch.flow`, whose backend is chosen, as that of the packet. It may be another CPU's then, which was first.
#[inline(always)]
pub(super) fn insert<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    let Scratch { packet, flow, .. } = scratch;
    flow.client = packet.source;
    flow.frontend = packet.destination;
    flow.set_client_port(packet.source_port);
    flow.set_frontend_port(packet.destination_port);
    flow.protocol = packet.protocol;
    flow.masquerade = F::Address::UNSPECIFIED;
    flow.set_masquerade_port(Port::NONE);
    let is_resumed = flow.flags & FLOW_RESUMED != 0;
    // The backend's stream has come as far as the client acknowledges.
    let reached = if is_resumed { packet.segment.acknowledgement } else { 0 };
    flow.client_numbers = Numbers { reached, awaited: 0 };
    flow.backend_numbers =
        Numbers { reached: packet.segment.next, awaited: packet.segment.sequence.wrapping_add(1) };
    flow.state = FlowState::default();
    flow.left = 0;
    flow.next_hop = KnownHop::default();
    flow.opened = tables.now();
    flow.last_seen = flow.opened;
    if flow.flags & (FLOW_OVERLAPPING | FLOW_APART) != 0 {
        // The flow whose ends it has may end first.
        tables.set_moved(packet.source_port);
    }
    if take_backend_key(tables, scratch)? == Try::Joined {
        // The other packet of a race is a step ahead, or only this entry was left of the flow.
        let Some((_, entry)) = lookup(tables, &scratch.key) else { return Err(Reason::FlowNotCreated) };
        entry.read_into(&mut scratch.flow);
        Leg::Client.set_key(tables, scratch);
        if tables.insert(Stage::Opening, &scratch.key, &scratch.flow) == Err(InsertError::Exists)
            && let Some(clients) = tables.flow(Stage::Opening, &scratch.key)
        {
            // Of another flow, if the other packet has chosen another backend: the client's next packets go there.
            clients.read_into(&mut scratch.flow);
        }
        return Ok(());
    }
    Leg::Client.set_key(tables, scratch);
    if tables.insert(Stage::Opening, &scratch.key, &scratch.flow) == Ok(()) {
        tables.tell(scratch, Reason::FlowOpened);
        tables.count_connection(scratch.flow.service);
        return Ok(());
    }
    let winner = tables.flow(Stage::Opening, &scratch.key);
    if let Some(winner) = winner {
        winner.read_into(&mut scratch.entry);
        if scratch.entry.opened == scratch.flow.opened {
            // The other packet of a race found our entry and went on from there.
            return Ok(());
        }
    }
    Leg::Backend.set_key(tables, scratch);
    tables.remove(Stage::Opening, &scratch.key);
    // Lost the race to a packet that chose another backend?
    let Some(winner) = winner else { return Err(Reason::FlowNotCreated) };
    winner.read_into(&mut scratch.flow);
    // It was there, unless this CPU has taken it for one of the flow that the winner has replaced.
    Leg::Backend.set_key(tables, scratch);
    let _there_already = tables.insert(Stage::Opening, &scratch.key, &scratch.flow);
    Ok(())
}

/// Inserts the entry of client and backend. Where the same client port already talks to the same backend through another
/// frontend, the client gets an alias port. A process of the node gets one always: what it sends to the backend itself
/// is not seen, so nothing else tells the answers apart.
#[inline(always)]
fn take_backend_key<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<Try, Reason> {
    for attempt in 0..ALIAS_TRIES {
        scratch.attempt = attempt;
        tables.run(scratch, Routine::TryAliasPort);
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
pub(super) fn try_port<F: Family, T: FlowTables<F>>(tables: &T, scratch: &mut Scratch<F::Address>) -> Try {
    let port = alias_port(tables, scratch);
    if port == Port::NONE || is_ambiguous(&scratch.flow, port) {
        return Try::Next;
    }
    scratch.flow.set_alias_port(port);
    scratch.key = scratch.flow.backend_key();
    let is_nodes = is_foreign(scratch) || is_from_host(scratch);
    let Scratch { packet, key, flow, entry, .. } = scratch;
    if is_nodes && foreign::holds(tables, key, packet.is_tcp(), Held::ByAny) {
        return Try::Next;
    }
    if let Some((_, found)) = lookup(tables, key) {
        found.read_into(entry);
        if entry.flags & FLOW_OF_NETFILTER != 0 || !entry.same_client_and_frontend(flow) {
            return Try::Next;
        }
        if !entry.state.has_ended() {
            return Try::Joined;
        }
        // The entry is the last one of a connection that has ended.
        tables.remove(Stage::Established, key);
        tables.remove(Stage::Opening, key);
    }
    match tables.insert(Stage::Opening, key, flow) {
        Ok(()) => Try::Taken,
        Err(InsertError::Full) => Try::Failed,
        // Another CPU has inserted the key meanwhile.
        Err(InsertError::Exists) => {
            let Some(found) = tables.flow(Stage::Opening, key) else { return Try::Next };
            found.read_into(entry);
            if entry.same_client_and_frontend(flow) { Try::Joined } else { Try::Next }
        }
    }
}

/// [`Port::NONE`]: none is tried.
#[inline(always)]
fn alias_port<F: Family, T: FlowTables<F>>(tables: &T, scratch: &mut Scratch<F::Address>) -> Port {
    let attempt = scratch.attempt;
    let own_port_at = if is_from_host(scratch) { ALIAS_TRIES - 1 } else { 0 };
    let is_random = attempt < ALIAS_TRIES / 2;
    if is_random {
        scratch.random = tables.random();
    }
    if attempt != own_port_at {
        let attempt = if is_random { attempt } else { attempt + PORT_TRIES - ALIAS_TRIES };
        let port = tables.masquerade_port(scratch.random, attempt);
        // The client's own port is tried at its turn alone: here another connection may have it.
        if port == scratch.flow.client_port() { Port::NONE } else { port }
    } else if is_foreign(scratch) || scratch.is_port_taken {
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
