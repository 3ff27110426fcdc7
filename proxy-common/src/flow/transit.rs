//! A packet that goes on without the stack between: to a backend, here or on another node, or back from there.

use super::{
    Change, Driver, FlowEntry as _, FlowTables, Found, Routine, Scratch, Stage, Step, decide, direct,
    end_if_gone,
    entries::{Leg, is_stale},
    find_inlined, go_on, is_over, lookup,
    next_hop::leaves,
    set_key_of_packet,
};
use crate::{
    balance::HASH_FACTOR,
    family::Family,
    layout::{
        FLOW_DSR, FLOW_FOREIGN, FLOW_FROM_HOST, FLOW_FROM_POD, FLOW_MASQUERADE, FLOW_OF_NETFILTER, Flow,
    },
    packet::{Part, Then},
    reason::Reason,
    select::Origin,
};

/// Decides what [`arriving`](super::arriving) and [`leaving`](super::leaving) decide one after the other, of packets of flows that the stack
/// has let out before: reverse path filtering, rules of netfilter for new connections and IPsec have judged these. The
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
    scratch.action.then = match flow.flags & (FLOW_MASQUERADE | FLOW_DSR | OF_OTHERS) {
        FLOW_MASQUERADE if flow.is_masqueraded() => Then::Pass,
        FLOW_DSR if flow.has_left() => Then::Encapsulate,
        0 if flow.has_left() => Then::Pass,
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
            if scratch.flow.is_masqueraded() {
                scratch.action.rewrite = scratch.flow.masquerade_rewrite();
                scratch.action.rewrite.service = scratch.flow.service;
            }
            // Once more from time to time: another CPU may have copied an entry before it was marked.
            let is_due = !scratch.flow.is_sent_by_driver()
                || is_stale(&scratch.flow, tables.recently(&mut scratch.clock));
            go_on(tables, scratch, found)?;
            if scratch.flow.is_of_a_pod() && is_due {
                tables.run(scratch, Routine::NoteSentByDriver);
            }
            Ok(())
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

/// Flows whose packets are never sent on without the stack.
const OF_OTHERS: u32 = FLOW_FROM_HOST | FLOW_FROM_POD | FLOW_FOREIGN | FLOW_OF_NETFILTER;

/// Is the packet, which leaves by `scratch.interface`, one by which the stack has shown that it lets a pod's answers out there?
#[inline(always)]
pub(super) fn shows_way_out<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &Scratch<F::Address>,
    step: Step,
) -> bool {
    let Scratch { flow, interface, .. } = scratch;
    let is_pods = step == Step::FromBackend && flow.is_of_a_pod();
    is_pods && !flow.has_left() && tables.driver_redirects_from(*interface)
}

/// Is the packet, which comes in by `scratch.interface`, a pod's answer to packets that XDP sends to it there? Then it goes past the stack too, or
/// connection tracking would see one direction only.
#[inline(always)]
pub(super) fn answers_driver<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &Scratch<F::Address>,
    step: Step,
) -> bool {
    let Scratch { flow, interface, origin, .. } = scratch;
    let is_pods = step == Step::FromBackend && *origin == Origin::Workload && flow.is_of_a_pod();
    is_pods && flow.is_sent_by_driver() && tables.driver_sends_by(*interface)
}

/// Writes `mark` into the entries of `scratch.flow`, for a whole packet that the node has not made itself. The client's entry comes first, in both
/// tables, as another CPU may be copying it to the second one: what is not noted there is noted for the next packet.
#[inline(always)]
pub(super) fn note<F: Family, T: FlowTables<F>>(tables: &T, scratch: &mut Scratch<F::Address>, mark: u8) {
    let Scratch { packet, is_made_here, .. } = &*scratch;
    if packet.fragment.part != Part::Whole || packet.is_error() || *is_made_here {
        return;
    }
    for leg in [Leg::Client, Leg::Backend] {
        leg.set_key(tables, scratch);
        let mut is_noted = false;
        for stage in [Stage::Opening, Stage::Established] {
            if let Some(entry) = tables.flow(stage, &scratch.key)
                && entry.opened() == scratch.flow.opened
            {
                entry.write(Change::Left(mark));
                is_noted = true;
            }
        }
        if !is_noted {
            return;
        }
    }
}

/// Of two flows the marks are rarely the same: the kernel may give an entry to another flow while it is marked.
impl<A> Flow<A> {
    #[inline(always)]
    fn mark(&self) -> u8 {
        (self.opened.wrapping_mul(HASH_FACTOR) >> 56) as u8
    }

    /// Not 0.
    #[inline(always)]
    pub(super) fn mark_of_left(&self) -> u8 {
        self.mark() | 1
    }

    /// Neither 0 nor [`mark_of_left`](Self::mark_of_left).
    #[inline(always)]
    pub(super) fn mark_of_sent_by_driver(&self) -> u8 {
        (self.mark() | 3) ^ 1
    }

    #[inline(always)]
    pub(super) fn has_left(&self) -> bool {
        self.left == self.mark_of_left() || self.is_sent_by_driver()
    }

    #[inline(always)]
    fn is_sent_by_driver(&self) -> bool {
        self.left == self.mark_of_sent_by_driver()
    }

    /// Is it between a client outside and a pod of this node, whose answers come back here without being masqueraded?
    #[inline(always)]
    fn is_of_a_pod(&self) -> bool {
        self.flags & (FLOW_MASQUERADE | FLOW_DSR | OF_OTHERS) == 0
    }
}
