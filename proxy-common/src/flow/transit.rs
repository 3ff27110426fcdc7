//! A packet that leaves the node again without the stack between: to a backend on another node, or back from there.

use super::{
    Driver, FlowEntry as _, FlowTables, Found, Routine, Scratch, Step, decide, direct, end_if_gone,
    find_inlined, go_on, is_over, lookup, next_hop::leaves, set_key_of_packet,
};
use crate::{
    family::Family,
    layout::{FLOW_DSR, FLOW_FOREIGN, FLOW_FROM_HOST, FLOW_FROM_POD, FLOW_MASQUERADE, FLOW_OF_NETFILTER},
    packet::{Part, Then},
    reason::Reason,
    select::Origin,
};

/// Decides what [`arriving`](super::arriving) and [`leaving`](super::leaving) decide one after the other, of packets of flows that the stack
/// has let out by an uplink before: reverse path filtering, rules of netfilter for new connections and IPsec have judged these. The
/// packet is sent to `scratch.next_hop`, where the stack would send one with the ends between the two. With [`Then::Encapsulate`] it
/// leaves in one with the ends `scratch.tunnel`.
///
/// Fails where the packet is the stack's. It is untouched then.
#[inline(always)]
pub fn in_transit<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    driver: &impl Driver<F>,
) -> Result<(), Reason> {
    let is_simple = scratch.packet.fragment.part == Part::Whole && !scratch.packet.is_error();
    // A SYN may begin another flow.
    if !is_simple || (scratch.packet.is_tcp() && scratch.packet.opens()) {
        return Err(Reason::NotAService);
    }
    scratch.origin = Origin::Outside;
    scratch.outer_length = 0;
    set_key_of_packet(scratch);
    let found = find_inlined(tables, scratch).ok_or(Reason::NotAService)?;
    scratch.stage = found.stage;
    let flow = &scratch.flow;
    let of_others = FLOW_FROM_HOST | FLOW_FROM_POD | FLOW_FOREIGN | FLOW_OF_NETFILTER;
    scratch.action.then = match flow.flags & (FLOW_MASQUERADE | FLOW_DSR | of_others) {
        FLOW_MASQUERADE if flow.is_masqueraded() => Then::Pass,
        FLOW_DSR if flow.has_left() => Then::Encapsulate,
        _ => return Err(Reason::NotAService),
    };
    match found.step {
        Step::ToFrontend => {
            if scratch.packet.opens() && is_over(tables, scratch, found.entry) {
                return Err(Reason::NotAService);
            }
            end_if_gone(tables, scratch, found.entry)?;
            scratch.action.rewrite = scratch.flow.forward_rewrite();
            if scratch.action.then == Then::Encapsulate {
                direct::set_tunnel_but_source(tables, scratch);
            }
            if !leaves(tables, scratch, &found, driver) {
                return Err(Reason::NotAService);
            }
            if scratch.action.then == Then::Encapsulate {
                direct::finish_tunnel(tables, scratch)?;
                return decide(tables, scratch, Routine::GoOnDirectly);
            }
            scratch.action.rewrite = scratch.flow.masquerade_rewrite();
            scratch.action.rewrite.service = scratch.flow.service;
            go_on(tables, scratch, found)
        }
        Step::FromBackendMasqueraded => {
            scratch.action.rewrite = scratch.flow.unmasquerade_rewrite();
            if !leaves(tables, scratch, &found, driver) {
                return Err(Reason::NotAService);
            }
            scratch.action.rewrite = scratch.flow.reply_rewrite();
            // What the backend says is kept in the entry of the other step.
            scratch.key = scratch.flow.backend_key();
            let (stage, entry) = lookup(tables, &scratch.key).ok_or(Reason::NotAService)?;
            let opened = scratch.flow.opened;
            entry.read_into(&mut scratch.flow);
            if scratch.flow.opened != opened || entry.opened() != opened {
                return Err(Reason::NotAService);
            }
            go_on(tables, scratch, Found { stage, entry, step: Step::FromBackend })
        }
        Step::ToBackend | Step::ToBackendMasqueraded | Step::FromBackend | Step::FromFrontend => {
            Err(Reason::NotAService)
        }
    }
}
