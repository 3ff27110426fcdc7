//! A packet that leaves the node by the interface that it has come by, without the stack between: to a backend on another node, or
//! back from there.

use super::{FlowTables, Scratch, arriving_with_ports, leaving_with_ports};
use crate::{
    family::Family,
    layout::{FLOW_FOREIGN, FLOW_FROM_HOST, FLOW_MASQUERADE, NO_SERVICE},
    packet::{Packet, Part, Rewrite, Then},
    reason::Reason,
    select::Origin,
};

/// Decides what [`arriving`](super::arriving) and [`leaving`](super::leaving) decide one after the other. `returns` says whether the
/// stack would send a packet with the ends between the two out by the interface that it has come by, and where to.
///
/// Fails where the packet is the stack's. It is untouched then, and `arriving` finds what was learned of its flow.
#[inline(always)]
pub fn in_transit<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    returns: impl FnOnce(&mut Scratch<F::Address>) -> bool,
) -> Result<(), Reason> {
    if scratch.packet.fragment.part != Part::Whole || scratch.packet.is_error() {
        return Err(Reason::NotAService);
    }
    arriving_with_ports(tables, scratch, Origin::Outside)?;
    let is_masqueraded =
        scratch.flow.flags & (FLOW_MASQUERADE | FLOW_FROM_HOST | FLOW_FOREIGN) == FLOW_MASQUERADE;
    if !is_masqueraded || scratch.action.then != Then::Pass || !returns(scratch) {
        return Err(Reason::NotAService);
    }
    scratch.entered = scratch.packet.ends(scratch.action.rewrite.service);
    scratch.packet.set_ends(&scratch.action.rewrite);
    let left = leaving_with_ports(tables, scratch, false);
    let Scratch { packet, action, entered, .. } = scratch;
    packet.set_ends(entered);
    // Each packet counts for its service on one of the two steps.
    if action.rewrite.service == NO_SERVICE {
        action.rewrite.service = entered.service;
    }
    left
}

impl<A: Copy> Packet<A> {
    #[inline(always)]
    fn ends(&self, service: u32) -> Rewrite<A> {
        Rewrite {
            source: self.source,
            destination: self.destination,
            source_port: self.source_port,
            destination_port: self.destination_port,
            service,
        }
    }

    #[inline(always)]
    fn set_ends(&mut self, ends: &Rewrite<A>) {
        self.source = ends.source;
        self.destination = ends.destination;
        self.source_port = ends.source_port;
        self.destination_port = ends.destination_port;
    }
}
