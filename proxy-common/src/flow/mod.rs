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

mod entries;
mod open;
#[cfg(test)]
mod tests;
mod tuples;

pub use tuples::lifetime_seconds;

use self::{
    entries::{establish, is_stale, refresh, remove},
    open::open,
};
use crate::{
    family::Family,
    layout::*,
    packet::{Packet, Rewrite, Side, TCP_FIN, TCP_RST},
    port::PortRanges,
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
    pub ports: PortRanges,
}

/// The flow tables, the clock and the random numbers.
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
    /// Counts a reason in addition to that of the packet's outcome.
    fn count(&self, reason: Reason);
    /// Counts a flow of a service.
    fn count_connection(&self, service: u32);
}

/// A SYN of the same client port is then a new connection.
const ENDED: u32 = FLOW_CLIENT_CLOSED | FLOW_BACKEND_CLOSED | FLOW_RESET;

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
    if let Some(rewrite) = continue_flow(tables, scratch, packet) {
        return Ok(rewrite);
    }
    let Some(frontend) = select::find(tables, &packet.to(), origin) else {
        return direct(tables, scratch, packet, origin);
    };
    if packet.opens() {
        open(tables, scratch, packet, Some(frontend), origin)?;
        return Ok(scratch.flow.forward_rewrite());
    }
    // Its flow may have been established between the two lookups. The key may be another flow's by now, see `establish`.
    scratch.key = packet.key(TUPLE_FORWARD);
    match tables.flow(Stage::Established, &scratch.key) {
        Some(entry) => Ok(entry.read().forward_rewrite()),
        None => Err(Reason::TcpWithoutFlow),
    }
}

/// A packet to no frontend. Mostly not ours, but the same client port may be talking to the same endpoint through a
/// frontend already.
#[inline(always)]
fn direct<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    packet: &Packet<F::Address>,
    origin: Origin,
) -> Result<Rewrite<F::Address>, Reason> {
    if !packet.opens() || origin == Origin::Host {
        return Err(Reason::NotAService);
    }
    scratch.key = packet.reversed_key(TUPLE_REPLY);
    let Some((stage, reply)) = lookup(tables, &scratch.key) else { return Err(Reason::NotAService) };
    scratch.flow = reply.read();
    if scratch.flow.flags & FLOW_OF_NETFILTER != 0 {
        // Netfilter sees this packet too, and tells the two apart.
        return Err(Reason::NotAService);
    }
    if packet.is_tcp() {
        scratch.key = scratch.flow.forward_key();
        if united_flags(tables, stage, reply, &scratch.key) & ENDED != 0 {
            remove(tables, scratch);
            return Err(Reason::NotAService);
        }
    }
    match open(tables, scratch, packet, None, origin) {
        Ok(()) => Ok(scratch.flow.forward_rewrite()),
        // The older flow may be unused; if it is not, its next datagram opens it again.
        Err(Reason::AliasPortsExhausted) if !packet.is_tcp() => {
            scratch.key = packet.reversed_key(TUPLE_REPLY);
            if let Some((_, reply)) = lookup(tables, &scratch.key) {
                scratch.flow = reply.read();
                remove(tables, scratch);
                tables.count(Reason::FlowReplaced);
            }
            Err(Reason::NotAService)
        }
        Err(reason) => Err(reason),
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
        port: flow.masquerade_port(),
        other_port: packet.destination_port,
        service: NO_SERVICE,
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
    scratch.key = packet.key(tuples::reply_tuple(flags));
    let (stage, entry) = lookup(tables, &scratch.key)?;
    let known = entry.flags();
    if known & FLOW_OF_NETFILTER != 0 {
        keep(tables, entry);
        return None;
    }
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
    if !masquerade.ports.contain(packet.destination_port) {
        return None;
    }
    // Flows keep the address that they were opened with when the node prefers another one of its own.
    if packet.destination != masquerade.address && tables.node_address(&packet.destination).is_none() {
        return None;
    }
    scratch.key = packet.key(TUPLE_MASQUERADED_REPLY);
    let (stage, entry) = lookup(tables, &scratch.key)?;
    if entry.flags() & FLOW_OF_NETFILTER != 0 {
        keep(tables, entry);
        return None;
    }
    if is_stale(tables, entry) {
        refresh(tables, scratch, stage, entry);
    }
    let flow = entry.read();
    Some(Rewrite {
        side: Side::Destination,
        address: flow.client,
        port: flow.alias_port(),
        other_port: packet.source_port,
        service: NO_SERVICE,
    })
}

/// A connection that netfilter translates goes on.
#[inline(always)]
fn keep<F: Family, T: FlowTables<F>>(tables: &T, entry: T::Entry) {
    if is_stale(tables, entry) {
        entry.set_last_seen(tables.now());
    }
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
fn continue_flow<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    packet: &Packet<F::Address>,
) -> Option<Rewrite<F::Address>> {
    let (stage, entry) = lookup(tables, &scratch.key)?;
    let flags = entry.flags();
    if packet.opens() {
        if ended(tables, scratch, packet.protocol, stage, entry) {
            scratch.flow = entry.read();
            remove(tables, scratch);
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
        if !establish(tables, scratch) {
            return None;
        }
    } else if is_stale(tables, entry) {
        refresh(tables, scratch, stage, entry);
    }
    Some(entry.read().forward_rewrite())
}

/// The flags that both sides have set; `partner` is the key of the flow's other entry.
#[inline(always)]
fn united_flags<F: Family, T: FlowTables<F>>(
    tables: &T,
    stage: Stage,
    entry: T::Entry,
    partner: &FlowKey<F::Address>,
) -> u32 {
    entry.flags() | tables.flow(stage, partner).map_or(0, |partner| partner.flags())
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
        scratch.key = flow.reply_key();
        let flags = united_flags(tables, stage, entry, &scratch.key);
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
