//! The fast path, which takes almost all packets: those of established flows of which nothing is
//! learned but how far their streams have come, and those that neither have a flow nor open one.
//!
//! It is a second way through the rules of the slow path (`arriving.rs` and `leaving.rs`), in so
//! little code that it needs no calls. It decides what [`arriving`](super::arriving()) and
//! [`leaving`](super::leaving()) decide, or leaves the packet to them. XDP has a third way
//! (`forward/`).

use super::{
    FlowMaps, Scratch, Side, Stage,
    entries::is_stale,
    find::{Found, is_of_origin, read},
    forward::{answers_xdp, is_by_stack, skips_stack},
    tcp,
    translate::{translate_arriving, translate_leaving},
    tuples::Position,
};
use crate::{
    family::Family,
    layout::{
        FLOW_DSR, FLOW_FROM_HOST, FLOW_HOST_CONNECTION, FLOW_MASQUERADE, FLOW_OF_NETFILTER,
        PROGRESS_SUSTAINED,
    },
    packet::{Part, TCP_FIN, TCP_RST, Then},
    reason::Reason,
    select::Origin,
};

/// A packet that enters the node. None: it takes the slow path, and nothing is changed.
#[inline(always)]
pub fn arriving_fast<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
    origin: Origin,
) -> Option<Result<(), Reason>> {
    scratch.origin = origin;
    let looked_up = find(maps, scratch);
    scratch.has_no_flow = matches!(looked_up, Lookup::NoFlow);
    let found = match looked_up {
        Lookup::Flow(found) => found,
        Lookup::SlowPath => return None,
        Lookup::NoFlow => {
            let packet = &scratch.packet;
            let may_be_unknown = packet.goes_on() && maps.may_be_frontend(&packet.destination);
            let is_of_nobody = !packet.opens() && !may_be_unknown && !maps.is_remapped(packet.source_port);
            return is_of_nobody.then_some(Err(Reason::NotAService));
        }
    };
    let is_anothers = found.position == Position::ToFrontend && !is_of_origin(scratch);
    if found.position == Position::ToBackend || is_anothers {
        return None;
    }
    if answers_xdp(maps, scratch, found.position) {
        scratch.action.then = Then::SkipStack;
        return Some(Ok(()));
    }
    match translate_arriving(scratch, found.position) {
        Ok(()) => goes_on(maps, scratch, found).then(|| {
            if skips_stack(maps, scratch, found.position) {
                scratch.action.then = Then::SkipStack;
            }
            Ok(())
        }),
        Err(Reason::NotAService) => Some(Err(Reason::NotAService)),
        Err(_) => None,
    }
}

/// A packet that leaves the node. None: as for [`arriving_fast`].
#[inline(always)]
pub fn leaving_fast<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
) -> Option<Result<(), Reason>> {
    let found = match find(maps, scratch) {
        Lookup::Flow(found) => found,
        Lookup::SlowPath => return None,
        Lookup::NoFlow => {
            let packet = &scratch.packet;
            let may_be_host_connection = packet.opens() || packet.segment.has(TCP_FIN | TCP_RST);
            let is_of_nobody = !may_be_host_connection && !maps.is_remapped(packet.source_port);
            return is_of_nobody.then_some(Err(Reason::NotAService));
        }
    };
    let gets_source = scratch.flow.flags & FLOW_MASQUERADE != 0 && !scratch.flow.is_masqueraded();
    if found.position == Position::ToBackendMasqueraded || gets_source || is_by_stack(scratch, found.position)
    {
        return None;
    }
    match translate_leaving(scratch, found.position, false) {
        Ok(()) => goes_on(maps, scratch, found).then_some(Ok(())),
        Err(reason) => Some(Err(reason)),
    }
}

/// What the flow maps have for a packet.
enum Lookup<E> {
    /// It is established, from a client elsewhere to a frontend.
    Flow(Found<E>),
    NoFlow,
    /// The slow path looks at the packet.
    SlowPath,
}

#[inline(always)]
fn find<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) -> Lookup<T::Entry> {
    scratch.action.then = Then::Pass;
    if scratch.packet.fragment.part != Part::Whole || scratch.packet.is_error() {
        return Lookup::SlowPath;
    }
    scratch.key = scratch.packet.key();
    let Some(entry) = maps.flow(Stage::Established, &scratch.key) else {
        let is_opening = maps.flow(Stage::Opening, &scratch.key).is_some();
        return if is_opening { Lookup::SlowPath } else { Lookup::NoFlow };
    };
    if read(scratch, entry).is_none()
        || scratch.flow.flags & (FLOW_OF_NETFILTER | FLOW_FROM_HOST | FLOW_HOST_CONNECTION | FLOW_DSR) != 0
    {
        return Lookup::SlowPath;
    }
    match scratch.flow.position_of(&scratch.packet) {
        Some(position) => Lookup::Flow(Found { stage: Stage::Established, entry, position }),
        None => Lookup::SlowPath,
    }
}

/// [`go_on`](super::keep::go_on), where it only moves the streams. False: it would do more.
#[inline(always)]
fn goes_on<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
    found: Found<T::Entry>,
) -> bool {
    if scratch.flow.state.has_ended() || is_stale(&scratch.flow, maps.recently(&mut scratch.clock)) {
        return false;
    }
    let sender = match found.position {
        Position::ToFrontend => Side::Client,
        Position::FromBackend => Side::Backend,
        Position::ToBackend
        | Position::ToBackendMasqueraded
        | Position::FromBackendMasqueraded
        | Position::FromFrontend => {
            return true;
        }
    };
    let is_tcp = scratch.packet.is_tcp();
    // Its backend may be gone, which ends some flows.
    let is_compared = sender == Side::Client && (!is_tcp || maps.resets_gone());
    if is_compared && scratch.flow.epoch != maps.epoch() {
        return false;
    }
    if is_tcp {
        !scratch.packet.opens() && tcp::track_fast(scratch, sender, found.entry)
    } else {
        sender == Side::Client || scratch.flow.state.progress >= PROGRESS_SUSTAINED
    }
}
