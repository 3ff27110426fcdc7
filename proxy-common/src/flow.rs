//! Decisions about packets: which flow one belongs to, what opens a flow, and how it is translated.
//!
//! A flow has an entry for each of its tuples: forward, reply, and masqueraded reply if its source is
//! translated too. The forward entry's flags tell what the client's packets said, the reply entry's what
//! the backend's said: the state of a flow is the union of both, and no CPU overwrites what another learned.
//!
//! A flow opens in the table of opening flows, and its entries are copied to the established ones by the first
//! packet of the client that follows an answer. A client with a forged address never sends that packet,
//! so a flood cannot fill the table that does not evict. The copies in the opening table stay until
//! they age: a reader between two lookups would otherwise find neither.

use crate::{
    family::{Family, Slot},
    layout::*,
    packet::{Packet, Rewrite, Side, TCP_FIN, TCP_RST},
    reason::Reason,
    select::{self, Origin},
    tables::Tables,
};

/// Which of the two tables a flow's entry lies in.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Stage {
    /// `opening_flows4/6`.
    Opening,
    /// `flows4/6`.
    Established,
}

/// An entry of a flow table, in place.
pub trait FlowEntry<A>: Copy {
    fn read(&self) -> Flow<A>;
    fn flags(&self) -> u32;
    fn last_seen(&self) -> u64;
    fn set_last_seen(&self, now: u64);
    /// Adds `FLOW_*`. May lose a race against another CPU that adds others.
    fn add_flags(&self, flags: u32);
}

/// Why an entry was not inserted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum InsertError {
    Exists,
    /// No room or no memory.
    Full,
}

/// Where a flow is worked on. In the kernel it is memory of the CPU: two IPv6 flows would fill the stack.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(8))]
pub struct Scratch<A> {
    key: FlowKey<A>,
    flow: Flow<A>,
}

/// Where translated sources come from.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Masquerade<A> {
    /// Unspecified: there is none.
    pub address: A,
    /// As [`Settings::masquerade_ports`].
    pub ports: [[u16; 2]; 2],
}

/// The flow tables, the clock and the dice.
pub trait FlowTables<F: Family>: Tables<F> {
    type Entry: FlowEntry<F::Address>;

    fn flow(&self, stage: Stage, key: &FlowKey<F::Address>) -> Option<Self::Entry>;
    /// Fails if the key exists.
    fn insert(
        &self,
        stage: Stage,
        key: &FlowKey<F::Address>,
        flow: &Flow<F::Address>,
    ) -> Result<(), InsertError>;
    fn replace(&self, stage: Stage, key: &FlowKey<F::Address>, flow: &Flow<F::Address>);
    fn remove(&self, stage: Stage, key: &FlowKey<F::Address>);
    fn masquerade(&self) -> Masquerade<F::Address>;
    /// Nanoseconds since boot, suspend included.
    fn now(&self) -> u64;
    fn random(&self) -> u32;
    /// Counts what is worth knowing beside the packet's own outcome.
    fn count(&self, reason: Reason);
}

const SECOND: u64 = 1_000_000_000;
/// An entry older than this is refreshed, together with its partners.
const REFRESH_AFTER: u64 = SECOND;
/// How many ports are tried for a translated source before the packet is dropped.
const MASQUERADE_TRIES: u32 = 16;
/// How many ports are tried for a client's alias, its own first.
const ALIAS_TRIES: u32 = 8;
/// A SYN of the same client port is then a new connection.
const ENDED: u32 = FLOW_CLIENT_CLOSED | FLOW_BACKEND_CLOSED | FLOW_RESET;
/// What an entry keeps when it is copied: the rest is what one side said, in the entry of that side.
const COPIED_FLAGS: u32 = FLOW_ANSWERED | FLOW_MASQUERADED | FLOW_FROM_HOST;

/// How long a flow that nothing is heard of is kept, in seconds. `flags` is the union of its entries' flags.
pub const fn lifetime_seconds(protocol: u8, flags: u32) -> u64 {
    const CLOSED: u32 = FLOW_CLIENT_CLOSED | FLOW_BACKEND_CLOSED;
    if protocol != PROTOCOL_TCP {
        return if flags & FLOW_ANSWERED == 0 { 30 } else { 120 };
    }
    if flags & FLOW_RESET != 0 {
        10
    } else if flags & CLOSED == CLOSED {
        // TIME_WAIT of Linux.
        60
    } else if flags & CLOSED != 0 {
        // One side may go on sending for long: as CLOSE_WAIT of conntrack in Kubernetes (kube-proxy's default).
        3600
    } else if flags & FLOW_ANSWERED == 0 {
        60
    } else {
        // kube-proxy's conntrack.tcpEstablishedTimeout.
        86_400
    }
}

impl<A: Address> Flow<A> {
    /// What the client sends.
    #[inline(always)]
    pub fn forward_key(&self) -> FlowKey<A> {
        FlowKey {
            source: self.client,
            destination: self.frontend,
            source_port: self.client_port,
            destination_port: self.frontend_port,
            protocol: self.protocol,
            tuple: TUPLE_FORWARD,
            _reserved: 0,
        }
    }

    /// What the backend answers, as netfilter and routing see it.
    #[inline(always)]
    pub fn reply_key(&self) -> FlowKey<A> {
        FlowKey {
            source: self.backend,
            destination: self.client,
            source_port: self.backend_port,
            destination_port: self.alias_port,
            protocol: self.protocol,
            tuple: TUPLE_REPLY,
            _reserved: 0,
        }
    }

    /// What the backend answers, if the flow is `FLOW_MASQUERADED`.
    #[inline(always)]
    pub fn masqueraded_reply_key(&self) -> FlowKey<A> {
        FlowKey {
            source: self.backend,
            destination: self.masquerade,
            source_port: self.backend_port,
            destination_port: self.masquerade_port,
            protocol: self.protocol,
            tuple: TUPLE_MASQUERADED_REPLY,
            _reserved: 0,
        }
    }

    #[inline(always)]
    fn is_masqueraded(&self) -> bool {
        self.flags & FLOW_MASQUERADED != 0
    }

    #[inline(always)]
    fn same_client_and_frontend(&self, other: &Self) -> bool {
        self.client_port == other.client_port
            && self.frontend_port == other.frontend_port
            && self.client == other.client
            && self.frontend == other.frontend
    }

    /// Client to frontend becomes client to backend.
    #[inline(always)]
    fn forward_rewrite(&self) -> Rewrite<A> {
        Rewrite {
            side: Side::Destination,
            address: self.backend,
            port: self.backend_port,
            other_port: self.alias_port,
        }
    }

    /// Backend to client becomes frontend to client.
    #[inline(always)]
    fn reply_rewrite(&self) -> Rewrite<A> {
        Rewrite {
            side: Side::Source,
            address: self.frontend,
            port: self.frontend_port,
            other_port: self.client_port,
        }
    }
}

/// A packet that enters the node, or one that a process of the node sends (`Origin::Host`).
#[inline(always)]
pub fn arriving<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    packet: &Packet<F::Address>,
    origin: Origin,
) -> Result<Rewrite<F::Address>, Reason> {
    if origin != Origin::Host
        && let Some(rewrite) = masqueraded_answer(tables, scratch, packet)
    {
        return Ok(rewrite);
    }
    scratch.key = packet.key(TUPLE_FORWARD);
    if let Some(rewrite) = known(tables, scratch, packet) {
        return Ok(rewrite);
    }
    let frontend = select::find(tables, &packet.to(), origin).ok_or(Reason::NotAService)?;
    if packet.opens() {
        open(tables, scratch, packet, frontend, origin)?;
        return Ok(scratch.flow.forward_rewrite());
    }
    // Its flow may have been established between the two lookups.
    match tables.flow(Stage::Established, &scratch.key) {
        Some(entry) => Ok(entry.read().forward_rewrite()),
        None => Err(Reason::TcpWithoutFlow),
    }
}

/// A packet that leaves the node.
#[inline(always)]
pub fn leaving<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    packet: &Packet<F::Address>,
) -> Result<Rewrite<F::Address>, Reason> {
    if let Some(rewrite) = answer(tables, scratch, packet, 0) {
        return Ok(rewrite);
    }
    scratch.key = packet.reversed_key(TUPLE_REPLY);
    let Some((_, entry)) = lookup(tables, &scratch.key) else { return Err(Reason::NotAService) };
    let flow = entry.read();
    if !flow.is_masqueraded() {
        return Err(Reason::NotAService);
    }
    Ok(Rewrite {
        side: Side::Source,
        address: flow.masquerade,
        port: flow.masquerade_port,
        other_port: packet.destination_port,
    })
}

/// A backend's answer to a flow that has all of `flags`.
#[inline(always)]
pub fn answer<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    packet: &Packet<F::Address>,
    flags: u32,
) -> Option<Rewrite<F::Address>> {
    scratch.key = packet.key(TUPLE_REPLY);
    let (stage, entry) = lookup(tables, &scratch.key)?;
    let known = entry.flags();
    if known & flags != flags {
        return None;
    }
    let said = if packet.is_tcp() && packet.tcp_flags & TCP_RST != 0 {
        FLOW_RESET
    } else if packet.is_tcp() && packet.tcp_flags & TCP_FIN != 0 {
        FLOW_ANSWERED | FLOW_BACKEND_CLOSED
    } else {
        FLOW_ANSWERED
    };
    let new = said & !known;
    if new != 0 {
        entry.add_flags(new);
        // The client's next packet looks only at the forward entry.
        if new & FLOW_ANSWERED != 0 {
            scratch.key = entry.read().forward_key();
            if let Some(forward) = tables.flow(stage, &scratch.key) {
                forward.add_flags(FLOW_ANSWERED);
            }
        }
    }
    if is_stale(tables, entry) {
        refresh(tables, scratch, stage, entry);
    }
    Some(entry.read().reply_rewrite())
}

/// A backend's answer to the address of this node that stands for the client.
#[inline(always)]
fn masqueraded_answer<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    packet: &Packet<F::Address>,
) -> Option<Rewrite<F::Address>> {
    let masquerade = tables.masquerade();
    if packet.destination != masquerade.address || !in_ranges(&masquerade.ports, packet.destination_port) {
        return None;
    }
    scratch.key = packet.key(TUPLE_MASQUERADED_REPLY);
    let (stage, entry) = lookup(tables, &scratch.key)?;
    if is_stale(tables, entry) {
        refresh(tables, scratch, stage, entry);
    }
    let flow = entry.read();
    Some(Rewrite {
        side: Side::Destination,
        address: flow.client,
        port: flow.alias_port,
        other_port: packet.source_port,
    })
}

#[inline(always)]
fn lookup<F: Family, T: FlowTables<F>>(tables: &T, key: &FlowKey<F::Address>) -> Option<(Stage, T::Entry)> {
    if let Some(entry) = tables.flow(Stage::Established, key) {
        return Some((Stage::Established, entry));
    }
    tables.flow(Stage::Opening, key).map(|entry| (Stage::Opening, entry))
}

/// A client's packet of a flow that goes on; `scratch.key` is its key. None: it has no flow, or one that ended
/// and was removed.
#[inline(always)]
fn known<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    packet: &Packet<F::Address>,
) -> Option<Rewrite<F::Address>> {
    let (stage, entry) = lookup(tables, &scratch.key)?;
    let flags = entry.flags();
    if packet.opens() {
        if ended(tables, scratch, packet.protocol, stage, entry) {
            scratch.flow = entry.read();
            forget(tables, scratch);
            tables.count(Reason::FlowReplaced);
            return None;
        }
    } else {
        let said = if packet.tcp_flags & TCP_RST != 0 {
            FLOW_RESET
        } else if packet.tcp_flags & TCP_FIN != 0 {
            FLOW_CLIENT_CLOSED
        } else {
            0
        };
        if said & !flags != 0 {
            entry.add_flags(said);
        }
    }
    let confirms = !packet.is_tcp() || !packet.opens();
    if stage == Stage::Opening && flags & FLOW_ANSWERED != 0 && confirms {
        scratch.flow = entry.read();
        establish(tables, scratch);
    } else if is_stale(tables, entry) {
        refresh(tables, scratch, stage, entry);
    }
    Some(entry.read().forward_rewrite())
}

/// May a packet that could open a flow no longer use this one?
#[inline(always)]
fn ended<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    protocol: u8,
    stage: Stage,
    entry: T::Entry,
) -> bool {
    let flow = entry.read();
    if protocol == PROTOCOL_TCP {
        let mut flags = flow.flags;
        scratch.key = flow.reply_key();
        if let Some(reply) = tables.flow(stage, &scratch.key) {
            flags |= reply.flags();
        }
        if flags & ENDED != 0 {
            return true;
        }
        // A connection that is up stays with its backend to the end.
        if flags & FLOW_ANSWERED != 0 {
            return false;
        }
    }
    tables.backend(flow.backend_id).is_none()
}

/// Copies `scratch.flow` to the established ones.
#[inline(never)]
fn establish<F: Family, T: FlowTables<F>>(tables: &T, scratch: &mut Scratch<F::Address>) {
    let Scratch { key, flow } = scratch;
    flow.last_seen = tables.now();
    *key = flow.reply_key();
    let mut full = tables.insert(Stage::Established, key, flow) == Err(InsertError::Full);
    if !full && flow.is_masqueraded() {
        *key = flow.masqueraded_reply_key();
        full = tables.insert(Stage::Established, key, flow) == Err(InsertError::Full);
    }
    if !full {
        *key = flow.forward_key();
        full = tables.insert(Stage::Established, key, flow) == Err(InsertError::Full);
    }
    if full {
        *key = flow.reply_key();
        tables.remove(Stage::Established, key);
        if flow.is_masqueraded() {
            *key = flow.masqueraded_reply_key();
            tables.remove(Stage::Established, key);
        }
        tables.count(Reason::FlowsFull);
    }
}

#[inline(always)]
fn is_stale<F: Family, T: FlowTables<F>>(tables: &T, entry: T::Entry) -> bool {
    // Another CPU's clock may be a little ahead.
    tables.now().saturating_sub(entry.last_seen()) > REFRESH_AFTER
}

/// Tells every entry that the flow lives, and restores those that are missing.
#[inline(never)]
fn refresh<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    stage: Stage,
    entry: T::Entry,
) {
    scratch.flow = entry.read();
    scratch.flow.last_seen = tables.now();
    scratch.flow.flags &= COPIED_FLAGS;
    scratch.key = scratch.flow.forward_key();
    refresh_entry(tables, scratch, stage);
    scratch.key = scratch.flow.reply_key();
    refresh_entry(tables, scratch, stage);
    if scratch.flow.is_masqueraded() {
        scratch.key = scratch.flow.masqueraded_reply_key();
        refresh_entry(tables, scratch, stage);
    }
}

#[inline(always)]
fn refresh_entry<F: Family, T: FlowTables<F>>(tables: &T, scratch: &mut Scratch<F::Address>, stage: Stage) {
    match tables.flow(stage, &scratch.key) {
        Some(entry) => entry.set_last_seen(scratch.flow.last_seen),
        None => {
            if tables.insert(stage, &scratch.key, &scratch.flow) == Ok(()) {
                tables.count(Reason::FlowRestored);
            }
        }
    }
}

/// Removes every entry of `scratch.flow`, forward first: while it is found its partners are.
#[inline(never)]
fn forget<F: Family, T: FlowTables<F>>(tables: &T, scratch: &mut Scratch<F::Address>) {
    let Scratch { key, flow } = scratch;
    *key = flow.forward_key();
    tables.remove(Stage::Established, key);
    tables.remove(Stage::Opening, key);
    *key = flow.reply_key();
    tables.remove(Stage::Established, key);
    tables.remove(Stage::Opening, key);
    if flow.is_masqueraded() {
        *key = flow.masqueraded_reply_key();
        tables.remove(Stage::Established, key);
        tables.remove(Stage::Opening, key);
    }
}

/// The first packet of a connection: chooses a backend and creates the flow, which is then in `scratch.flow`.
#[inline(never)]
fn open<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    packet: &Packet<F::Address>,
    frontend: Frontend,
    origin: Origin,
) -> Result<(), Reason> {
    let slot = select::choose(tables, frontend, origin, tables.random())?;
    let flow = &mut scratch.flow;
    flow.client = packet.source;
    flow.frontend = packet.destination;
    flow.backend = slot.address();
    flow.masquerade = F::Address::UNSPECIFIED;
    flow.client_port = packet.source_port;
    flow.frontend_port = packet.destination_port;
    flow.backend_port = slot.port();
    flow.masquerade_port = 0;
    flow.backend_id = slot.backend();
    flow.service = frontend.service;
    flow.last_seen = tables.now();
    flow.flags = if origin == Origin::Host { FLOW_FROM_HOST } else { 0 };
    flow.alias_port = packet.source_port;
    flow.protocol = packet.protocol;
    flow._reserved = 0;
    let remote = slot.flags() & BACKEND_LOCAL == 0;
    let to_outside = origin == Origin::Outside && remote && frontend.flags & FRONTEND_EXTERNAL != 0;
    let hairpin = origin != Origin::Host && flow.client == flow.backend;
    if to_outside || hairpin {
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
        return Ok(());
    }
    scratch.key = scratch.flow.reply_key();
    tables.remove(Stage::Opening, &scratch.key);
    release_masquerade_port(tables, scratch);
    scratch.key = scratch.flow.forward_key();
    // Lost the race to a packet that chose another backend?
    let Some(winner) = tables.flow(Stage::Opening, &scratch.key) else { return Err(Reason::FlowNotCreated) };
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
        let Some(port) = port_of(&masquerade.ports, start, attempt) else { break };
        flow.masquerade_port = port;
        key.destination_port = port;
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

/// Whose a reply entry is.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Reply {
    /// Inserted for our flow.
    Ours,
    /// Of the same client and frontend, at `scratch.key`: a flow that is as good as ours.
    Winners,
}

/// Inserts the reply entry. Where the same client port already talks to the same backend through another
/// frontend, the client gets an alias port.
#[inline(always)]
fn take_reply<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<Reply, Reason> {
    let ports = tables.masquerade().ports;
    let start = tables.random();
    let Scratch { key, flow } = scratch;
    *key = flow.reply_key();
    for attempt in 0..ALIAS_TRIES {
        if attempt > 0 {
            let Some(port) = port_of(&ports, start, attempt) else { break };
            flow.alias_port = port;
            key.destination_port = port;
        }
        // A hairpin's two directions would look the same.
        if flow.alias_port == flow.backend_port && flow.client == flow.backend {
            continue;
        }
        if let Some((_, entry)) = lookup(tables, key) {
            if !entry.read().same_client_and_frontend(flow) {
                continue;
            }
            if entry.flags() & ENDED == 0 {
                return Ok(Reply::Winners);
            }
            // All that is left of a connection that ended.
            tables.remove(Stage::Established, key);
            tables.remove(Stage::Opening, key);
        }
        match tables.insert(Stage::Opening, key, flow) {
            Ok(()) => {
                if attempt > 0 && flow.is_masqueraded() {
                    let reply = *key;
                    *key = flow.masqueraded_reply_key();
                    tables.replace(Stage::Opening, key, flow);
                    *key = reply;
                }
                return Ok(Reply::Ours);
            }
            Err(InsertError::Full) => return Err(Reason::FlowNotCreated),
            // By another CPU, in between.
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

#[inline(always)]
fn length(range: [u16; 2]) -> u32 {
    if range[0] > range[1] { 0 } else { u32::from(range[1]) - u32::from(range[0]) + 1 }
}

#[inline(always)]
fn in_ranges(ranges: &[[u16; 2]; 2], port: u16) -> bool {
    (ranges[0][0] <= port && port <= ranges[0][1]) || (ranges[1][0] <= port && port <= ranges[1][1])
}

/// The `attempt`th port after a random one; None if the ranges are empty.
#[inline(always)]
fn port_of(ranges: &[[u16; 2]; 2], random: u32, attempt: u32) -> Option<u16> {
    let (first, second) = (length(ranges[0]), length(ranges[1]));
    let total = first + second;
    if total == 0 {
        return None;
    }
    // Scales 32 random bits to 0..total without a division.
    let mut place = ((u64::from(random) * u64::from(total)) >> 32) as u32 + attempt;
    if place >= total {
        place -= total;
    }
    // A range shorter than the attempts is tried in part twice.
    if place >= total {
        place = 0;
    }
    Some(if place < first {
        ranges[0][0].wrapping_add(place as u16)
    } else {
        ranges[1][0].wrapping_add((place - first) as u16)
    })
}
