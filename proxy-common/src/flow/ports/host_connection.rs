//! Host connections leave with the node's own address although no flow is masqueraded to it. They are those of the node's sockets, and those that
//! netfilter masquerades for others, such as a network plugin. Where one had the ends of a masqueraded flow, its answers would reach that
//! flow's client. So the ends of each are kept from flows; and where a flow has them already, the connection gets another port where it
//! leaves the node. Where one has a node port, its answers are no client's datagrams.
//!
//! Of TCP only packets that open or end something are looked at: what is noted of a connection stays until it ends, or until the map
//! evicts it.

use crate::{
    family::Family,
    flow::{FlowMaps, Scratch, entries::REFRESH_AFTER, find::is_host_connection, tuples::Position},
    layout::{FlowKey, FrontendKey},
    packet::{Packet, TCP_FIN, TCP_RST},
    port::NODE_PORTS,
};

/// Nanoseconds after which a flow may have the ends of a host connection's datagrams. As long as conntrack keeps them.
const KEPT: u64 = 120_000_000_000;

/// Returns true if a port of `remapped_ports` counts. `set_in` is its value: the generation
/// in which a program has set it, or the controller has met a flow for which it was set.
/// `generation` is the current one, which the map has for port 0. The controller begins another
/// one after it has met all flows, so that whatever is two generations old stands for no flow.
#[inline(always)]
pub const fn is_remapped(set_in: u32, generation: u32) -> bool {
    set_in != 0 && generation.saturating_sub(set_in) < 2
}

/// Whose ends a flow leaves alone.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(in crate::flow) enum Held {
    ByAny,
    /// Who was seen lately: a connection may be over without having been ended here.
    ByRecent,
}

/// Returns true if a host connection has the ends.
#[inline(always)]
pub(in crate::flow) fn holds<F: Family, T: FlowMaps<F>>(
    maps: &T,
    key: &FlowKey<F::Address>,
    is_tcp: bool,
    held: Held,
) -> bool {
    let Some(last_seen) = maps.host_connection(key) else { return false };
    (is_tcp && held == Held::ByAny) || maps.now().saturating_sub(last_seen) < KEPT
}

/// Returns true if a packet that arrives and has no flow is a datagram to a host connection. (Of TCP, answers are known by their ACK.)
#[inline(always)]
pub(in crate::flow) fn is_answer<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
) -> bool {
    let Scratch { packet, key, .. } = scratch;
    if packet.is_tcp() {
        return false;
    }
    key.overlapping = 0;
    holds(maps, key, false, Held::ByAny)
}

/// Returns true if a packet that leaves the node is a host connection's, and not of `scratch.flow`. It was not translated to the ends that it has.
#[inline(always)]
pub(in crate::flow) fn meets<A>(scratch: &Scratch<A>, position: Position) -> bool {
    position == Position::ToBackendMasqueraded
        || (position == Position::ToBackend && is_host_connection(scratch))
}

/// A packet that leaves the node and has no flow.
#[inline(always)]
pub(in crate::flow) fn note<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) {
    let Scratch { packet, key, interface, is_made_here, .. } = scratch;
    key.overlapping = 0;
    if packet.segment.has(TCP_FIN | TCP_RST) && !packet.is_error() {
        maps.forget_host_connection(key);
        return;
    }
    if !packet.opens() || (!packet.is_tcp() && !may_be_mistaken(maps, packet, *is_made_here)) {
        return;
    }
    if packet.source != maps.masquerade_address(*interface) {
        return;
    }
    let now = maps.now();
    let is_fresh = !packet.is_tcp()
        && maps.host_connection(key).is_some_and(|last_seen| now.saturating_sub(last_seen) <= REFRESH_AFTER);
    if !is_fresh {
        maps.note_host_connection(key, now);
    }
}

/// May answers to a datagram be taken for those of a flow, or for a client's to a node port? Flows get ports of sockets only where a backend
/// has tens of thousands of them, and each packet of an overlay comes from one. A socket of the node with a node port is that of a proxy which
/// serves it still, perhaps before the map `frontends` has it: what it sends are answers, and its clients are ours from now on. While packets
/// are held, so are those that rules of netfilter answer.
#[inline(always)]
fn may_be_mistaken<F: Family, T: FlowMaps<F>>(
    maps: &T,
    packet: &Packet<F::Address>,
    is_made_here: bool,
) -> bool {
    if maps.holds_packets() {
        return false;
    }
    let port = packet.source_port;
    if maps.frontend(&FrontendKey::of_node_port(port, packet.protocol)).is_some() {
        return !is_made_here;
    }
    maps.is_reserved(port) && !(is_made_here && NODE_PORTS.contains(&port.number()))
}
