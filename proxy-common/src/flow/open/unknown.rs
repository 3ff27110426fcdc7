//! Segments of connections that no map knows. Either the address that the client has dialled was
//! another node's before, or the flow was lost. If such a segment went on, it would leave the node
//! again: its client would wait for minutes, and a router may send it back until its TTL ends.
//!
//! If the choice of the backend is the same on every node, the segment opens its flow again, and
//! the connection goes on. Otherwise it is answered by a RST, as its endpoint would answer it.
//! Packets to the node's own addresses are the stack's.

use crate::{
    balance::HASH_FACTOR,
    family::Family,
    flow::{
        FlowMaps, PodSockets, Scratch,
        open::{self, flood_limit, is_source_allowed},
        scratch::OverlappingFlow,
    },
    layout::{Address, FLOW_MASQUERADE, FLOW_RESUMED, FRONTEND_ADDRESS_WORDS, FRONTEND_MAGLEV, FrontendKey},
    reason::Reason,
    select::Origin,
};

/// Returns the index of the word, and the bit in it, of an address in `frontend_addresses4/6`.
#[inline(always)]
pub fn frontend_address_bit<A: Address>(address: &A) -> (u32, u64) {
    const BITS: u32 = FRONTEND_ADDRESS_WORDS.ilog2() + u64::BITS.ilog2();
    let [upper, lower] = address.halves();
    let whole = if A::BITS > u64::BITS { upper.wrapping_mul(HASH_FACTOR) ^ lower } else { lower };
    let index = whole.wrapping_mul(HASH_FACTOR) >> (u64::BITS - BITS);
    ((index / u64::from(u64::BITS)) as u32, 1 << (index % u64::from(u64::BITS)))
}

/// Returns true if the packet, which has no flow, is of a connection to a frontend of an address
/// that is not the node's own. Sets `scratch.frontend`.
///
/// A packet that another node has sent here is of a connection that was dialled there. So its
/// frontend is looked for where its flow is made.
#[inline(always)]
pub(in crate::flow) fn is_one<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
    sockets: &impl PodSockets<F::Address>,
) -> bool {
    let Scratch { packet, origin, overlapping_flow, is_keyed_by_origin, .. } = &*scratch;
    let is_strange = *overlapping_flow != OverlappingFlow::None || *is_keyed_by_origin;
    packet.goes_on()
        && *origin != Origin::Host
        && !is_strange
        && maps.answers_unknown()
        && (scratch.is_unpacked() || (find_frontend(maps, scratch) && !sockets.stays_here(scratch)))
}

/// Sets `scratch.frontend` to the frontend at the packet's destination. Returns false if there is
/// none. A node port does not count.
// Not inlined: the key would lie on the stack beside what opening a flow needs.
#[inline(never)]
fn find_frontend<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) -> bool {
    let Scratch { packet, frontend, .. } = scratch;
    let key = FrontendKey::of_address(packet.destination, packet.destination_port, packet.protocol);
    let found = maps.frontend(&key);
    *frontend = found.unwrap_or_default();
    found.is_some()
}

/// Makes `scratch.flow` the one that the packet's connection has had, if it can be told which that
/// is.
// Not inlined: what it needs of the stack would be added to what dialling needs.
#[inline(never)]
pub(in crate::flow) fn prepare<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
) -> Result<(), Reason> {
    if !is_source_allowed(maps, scratch) {
        return Err(Reason::SourceNotAllowed);
    }
    open::prepare_as_drawn(maps, scratch)?;
    let Scratch { frontend, flow, .. } = &*scratch;
    // The port of a masqueraded source was chosen by the node that has forgotten it, or by another.
    let is_known = frontend.flags & FRONTEND_MAGLEV != 0 && flow.flags & FLOW_MASQUERADE == 0;
    if !is_known {
        return Err(Reason::UnknownConnection);
    }
    if !flood_limit::allows(maps, scratch) {
        return Err(Reason::ConnectionsLimited);
    }
    scratch.flow.flags |= FLOW_RESUMED;
    Ok(())
}
