//! The way through the rules for a packet that goes on without the stack between: to a backend, here
//! or on another node, or back from there. XDP takes it.
//!
//! It is a third way beside the slow path (`arriving.rs` and `leaving.rs`) and the fast path
//! (`fast_path.rs`). It decides in one step what the slow path decides of the packet where it arrives
//! and where it leaves. Packets that it does not decide about are left to the stack, and to the
//! programs of the other ways.

pub(super) mod next_hop;

use self::next_hop::{Stamp, leaves};
use super::{
    Change, FlowEntry as _, FlowMaps, Forwarder, Routine, Scratch, Stage, direct,
    entries::KeyKind,
    find::{Found, find, lookup, set_key_of_packet},
    keep::{end_if_gone, go_on, is_over},
    routine::decide,
    tuples::Position,
};
use crate::{
    balance::HASH_FACTOR,
    family::Family,
    layout::{
        Address, CachedHop, FLOW_DSR, FLOW_FROM_HOST, FLOW_FROM_POD, FLOW_HOST_CONNECTION, FLOW_MASQUERADE,
        FLOW_OF_NETFILTER, Flow,
    },
    packet::{Packet, Part, Then},
    reason::Reason,
    select::Origin,
};

/// Decides what [`arriving`](super::arriving()) and [`leaving`](super::leaving()) decide one after
/// the other, of packets of flows that the stack has let out before: reverse path filtering, rules
/// of netfilter for new connections and IPsec have judged these. The packet is sent to
/// `scratch.next_hop`, where the stack would send one with the ends between the two. With
/// [`Then::Encapsulate`] it leaves in one with the ends `scratch.tunnel`.
///
/// Fails where the packet is the stack's. It is untouched then.
#[inline(always)]
pub fn forward<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
    forwarder: &impl Forwarder<F>,
) -> Result<(), Reason> {
    if !is_simple(&scratch.packet) || may_begin_another(&scratch.packet) {
        return Err(Reason::NotAService);
    }
    scratch.origin = Origin::Outside;
    scratch.outer_length = 0;
    set_key_of_packet(scratch);
    let found = find(maps, scratch).ok_or(Reason::NotAService)?;
    scratch.stage = found.stage;
    let flow = &scratch.flow;
    scratch.action.then = match flow.flags & (FLOW_MASQUERADE | FLOW_DSR | NEVER_FORWARDED) {
        FLOW_MASQUERADE if flow.is_masqueraded() => Then::Pass,
        FLOW_DSR if flow.is_forwardable() => Then::Encapsulate,
        0 if flow.is_forwardable() => Then::Pass,
        _ => return Err(Reason::NotAService),
    };
    match found.position {
        Position::ToFrontend => {
            if scratch.packet.opens() && is_over(maps, scratch, found.entry) {
                return Err(Reason::NotAService);
            }
            end_if_gone(maps, scratch, found.entry)?;
            scratch.action.rewrite = scratch.flow.dnat_rewrite();
            if scratch.action.then == Then::Encapsulate {
                direct::set_tunnel_but_source(maps, scratch);
            }
            let Some(is_asked) = leaves(maps, scratch, &found, forwarder) else {
                if scratch.is_for_pod() {
                    // With the token, XDP would look up its route for each packet in vain.
                    found.entry.write(Change::ForwardToken(0));
                }
                return Err(Reason::NotAService);
            };
            if scratch.action.then == Then::Encapsulate {
                direct::finish_tunnel(maps, scratch)?;
                return decide(maps, scratch, Routine::GoOnDirectly);
            }
            if scratch.flow.is_masqueraded() {
                scratch.action.rewrite = scratch.flow.masquerade_rewrite();
                scratch.action.rewrite.service = scratch.flow.service;
            }
            go_on(maps, scratch, found)?;
            // Again with each lookup: another CPU may have copied the entry before.
            if scratch.is_for_pod() && is_asked {
                maps.run(scratch, Routine::NoteForwardedByXdp);
            }
            Ok(())
        }
        Position::FromBackendMasqueraded => {
            scratch.action.rewrite = scratch.flow.unmasquerade_rewrite();
            leaves(maps, scratch, &found, forwarder).ok_or(Reason::NotAService)?;
            scratch.action.rewrite = scratch.flow.reply_rewrite();
            // What the backend says is kept in the entry of the other position.
            scratch.key = scratch.flow.backend_key();
            let (stage, entry) = lookup(maps, &scratch.key).ok_or(Reason::NotAService)?;
            let opened = scratch.flow.opened;
            entry.read_into(&mut scratch.flow);
            if scratch.flow.opened != opened || entry.opened() != opened {
                return Err(Reason::NotAService);
            }
            go_on(maps, scratch, Found { stage, entry, position: Position::FromBackend })
        }
        Position::ToBackend
        | Position::ToBackendMasqueraded
        | Position::FromBackend
        | Position::FromFrontend => Err(Reason::NotAService),
    }
}

/// Is it whole, and a packet of the flow itself?
#[inline(always)]
fn is_simple<A: Address>(packet: &Packet<A>) -> bool {
    packet.fragment.part == Part::Whole && !packet.is_error()
}

/// A SYN may begin another flow.
#[inline(always)]
fn may_begin_another<A: Address>(packet: &Packet<A>) -> bool {
    packet.is_tcp() && packet.opens()
}

/// Flows whose packets XDP never forwards, and that never skip the stack.
const NEVER_FORWARDED: u32 = FLOW_FROM_HOST | FLOW_FROM_POD | FLOW_HOST_CONNECTION | FLOW_OF_NETFILTER;

/// Is the packet, which leaves by `scratch.interface`, one by which the stack has shown that it lets a pod's answers out there?
#[inline(always)]
pub(super) fn shows_way_out<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &Scratch<F::Address>,
    position: Position,
) -> bool {
    let Scratch { flow, interface, .. } = scratch;
    let is_pods = position == Position::FromBackend && flow.is_of_a_pod();
    is_pods && !flow.is_forwardable() && maps.xdp_redirects_from(*interface)
}

/// Is the packet, which comes in by `scratch.interface`, a pod's answer to packets that XDP sends to it there? Then it skips the stack too, or
/// connection tracking would see one direction only.
#[inline(always)]
pub(super) fn answers_xdp<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &Scratch<F::Address>,
    position: Position,
) -> bool {
    let Scratch { flow, interface, origin, .. } = scratch;
    let is_pods = position == Position::FromBackend && *origin == Origin::Workload && flow.is_of_a_pod();
    is_pods
        && flow.next_hop.is_of(Stamp::of_answers(flow.opened, *interface))
        && maps.xdp_sends_to(*interface)
}

/// Returns true if the packet, which has been translated as it came from outside, skips the stack. So do packets of masqueraded flows in both
/// directions, once the stack has let out what opened them: where XDP has not sent them on, as to overlays. The backend's SYN is one of them: connection
/// tracking would keep a connection of which it sees the opening alone for a day.
#[inline(always)]
pub(super) fn skips_stack<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &Scratch<F::Address>,
    position: Position,
) -> bool {
    let Scratch { packet, flow, origin, .. } = scratch;
    let leaves_again = matches!(position, Position::ToFrontend | Position::FromBackendMasqueraded);
    let is_plain = is_simple(packet) && !may_begin_another(packet);
    let is_let_out = flow.flags & NEVER_FORWARDED == 0 && flow.is_masqueraded();
    let is_outsides = *origin == Origin::Outside && maps.may_skip_stack();
    is_outsides && leaves_again && is_let_out && is_plain
}

/// Is the packet, which leaves to a backend, one that the stack has brought there although XDP sends the client's packets? Where it has been let out,
/// connection tracking knows the connection again, as the client's. It makes none for an error, and takes a SYN for a new one.
#[inline(always)]
pub(super) fn is_by_stack<A: Address>(Scratch { packet, flow, .. }: &Scratch<A>, position: Position) -> bool {
    let is_noted =
        position == Position::ToBackend && flow.is_of_a_pod() && flow.next_hop != CachedHop::default();
    is_noted && !packet.is_error() && !may_begin_another(packet)
}

/// Notes that the stack has let a packet of `scratch.flow` out. The client's entry comes first, in both maps, as another CPU may be copying it to the
/// second one: what is not noted there is noted for the next packet.
#[inline(always)]
pub(super) fn allow_forwarding<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) {
    if !is_simple(&scratch.packet) || scratch.is_made_here || scratch.flow.is_forwardable() {
        return;
    }
    let token = Change::ForwardToken(scratch.flow.token_of_flow());
    for key_kind in [KeyKind::Client, KeyKind::Backend] {
        if !write(maps, scratch, key_kind, token) {
            return;
        }
    }
}

/// Notes for a pod's answers that XDP has sent a packet of the client to `scratch.next_hop`, an interface of that pod.
#[inline(always)]
pub(super) fn note_forwarded_by_xdp<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) {
    let stamp = Stamp::of_answers(scratch.flow.opened, scratch.next_hop.interface);
    let hop = Change::NextHop(CachedHop::new(&scratch.next_hop, stamp));
    write(maps, scratch, KeyKind::Backend, hop);
}

/// Leaves all packets of `scratch.flow`, which XDP has sent to a pod, to the stack.
#[inline(always)]
pub(super) fn leave_to_stack<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) {
    let none = Change::NextHop(CachedHop::default());
    write(maps, scratch, KeyKind::Client, Change::ForwardToken(0));
    write(maps, scratch, KeyKind::Client, none);
    write(maps, scratch, KeyKind::Backend, none);
}

/// In both maps. False: neither has the flow's entry.
#[inline(always)]
fn write<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
    key_kind: KeyKind,
    change: Change<F::Address>,
) -> bool {
    key_kind.set_key(maps, scratch);
    let mut is_written = false;
    for stage in [Stage::Opening, Stage::Established] {
        if let Some(entry) = maps.flow(stage, &scratch.key)
            && entry.opened() == scratch.flow.opened
        {
            entry.write(change);
            is_written = true;
        }
    }
    is_written
}

impl<A> Scratch<A> {
    /// Returns true if the packet, which XDP forwards, is for a pod of this node.
    #[inline(always)]
    pub fn is_for_pod(&self) -> bool {
        self.flow.is_of_a_pod()
    }
}

impl<A> Flow<A> {
    /// Not 0, and of two flows rarely the same: the kernel may give an entry to another flow while the token is written.
    #[inline(always)]
    fn token_of_flow(&self) -> u8 {
        (self.opened.wrapping_mul(HASH_FACTOR) >> 56) as u8 | 1
    }

    #[inline(always)]
    pub(super) fn is_forwardable(&self) -> bool {
        self.forward_token == self.token_of_flow()
    }

    /// Is it between a client outside and an endpoint of this node, whose answers come back here without being masqueraded?
    #[inline(always)]
    fn is_of_a_pod(&self) -> bool {
        self.flags & (FLOW_MASQUERADE | FLOW_DSR | NEVER_FORWARDED) == 0
    }
}
