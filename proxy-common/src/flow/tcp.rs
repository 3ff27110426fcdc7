//! What segments say of a connection. Anybody can send one with the ends of a connection, so that one counts only if it has a sequence
//! number that an attacker cannot know, or once the other side has acknowledged it.

use super::{Change, FlowEntry, FlowTables, Scratch, Stage, entries::retire};
use crate::{
    family::Family,
    layout::*,
    packet::{Segment, TCP_ACK, TCP_FIN, TCP_RST, TCP_SYN},
};

/// How far beyond the backend's SYN the client's first acknowledgement may be: data may be on its way to it already.
const FIRST_WINDOW: u32 = 0xffff;
/// How far beyond what its receiver waits for a RST may be: data before it may be on its way.
const RESET_WINDOW: u32 = 1 << 20;

/// Who has sent a segment.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Speaker {
    Client,
    Backend,
}

impl Speaker {
    #[inline(always)]
    const fn other(self) -> Self {
        match self {
            Self::Client => Self::Backend,
            Self::Backend => Self::Client,
        }
    }

    #[inline(always)]
    fn fin_of(self, state: &mut FlowState) -> &mut u8 {
        match self {
            Self::Client => &mut state.client_fin,
            Self::Backend => &mut state.backend_fin,
        }
    }
}

/// Has the client received the backend's SYN? `flow` is as the client's entry has it.
#[inline(always)]
pub(super) fn confirms<A>(flow: &Flow<A>, segment: &Segment) -> bool {
    flow.state.progress == PROGRESS_ANSWERED
        && segment.has(TCP_ACK)
        && !segment.has(TCP_SYN | TCP_RST)
        && segment.acknowledgement.wrapping_sub(flow.awaited) <= FIRST_WINDOW
}

/// `scratch.flow` is a copy of `entry`, the speaker's own, and learns what the entries learn.
#[inline(always)]
pub(super) fn hear<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    speaker: Speaker,
    stage: Stage,
    entry: T::Entry,
) {
    let Scratch { flow, packet, .. } = scratch;
    let segment = &packet.segment;
    if segment.has(TCP_ACK) && segment.acknowledgement != flow.acknowledged {
        flow.acknowledged = segment.acknowledgement;
        entry.write(Change::Acknowledged(segment.acknowledgement));
    }
    let others_fin = *speaker.other().fin_of(&mut flow.state);
    let is_rare = segment.has(TCP_SYN | TCP_FIN | TCP_RST)
        || flow.state.reset == RESET_PLAUSIBLE
        || (others_fin == FIN_SEEN && acknowledges(flow, segment));
    if is_rare {
        hear_control(tables, scratch, speaker, stage, entry);
    }
}

#[inline(always)]
fn acknowledges<A>(flow: &Flow<A>, segment: &Segment) -> bool {
    segment.has(TCP_ACK) && segment.acknowledgement == flow.awaited
}

/// A segment that opens, ends or confirms.
#[inline(never)]
fn hear_control<F: Family, T: FlowTables<F>>(
    tables: &T,
    scratch: &mut Scratch<F::Address>,
    speaker: Speaker,
    stage: Stage,
    entry: T::Entry,
) {
    scratch.key = match speaker {
        Speaker::Client => scratch.flow.backend_key(),
        Speaker::Backend => scratch.flow.client_key(),
    };
    // It is evicted, or another flow's by now: it will be restored, and the next segment of this kind counts.
    let Some(others) = tables.flow(stage, &scratch.key) else { return };
    others.read_into(&mut scratch.entry);
    if !scratch.entry.is_same(&scratch.flow) {
        return;
    }
    let segment = &scratch.packet.segment;
    let mut state = scratch.flow.state;
    let others_fin = speaker.other().fin_of(&mut state);
    if *others_fin == FIN_SEEN && acknowledges(&scratch.flow, segment) {
        *others_fin = FIN_ACKNOWLEDGED;
    }
    let fin = speaker.fin_of(&mut state);
    if segment.has(TCP_FIN) && *fin != FIN_ACKNOWLEDGED {
        *fin = FIN_SEEN;
        others.write(Change::Awaited(segment.next));
    }
    let answers_syn = speaker == Speaker::Backend && segment.has(TCP_SYN) && segment.has(TCP_ACK);
    if answers_syn && state.progress <= PROGRESS_ANSWERED {
        state.progress = PROGRESS_ANSWERED;
        others.write(Change::Awaited(segment.next));
    }
    if state.reset != RESET_CONFIRMED {
        state.reset = if segment.has(TCP_RST) {
            let refuses = speaker == Speaker::Backend && state.progress == PROGRESS_OPENED;
            if refuses { RESET_CONFIRMED } else { reset(scratch.entry.acknowledged, segment, state.reset) }
        } else {
            0
        };
    }
    for changed in [entry, others] {
        write_state(changed, scratch.flow.state, state);
    }
    scratch.flow.state = state;
    if stage == Stage::Established && state.union(&scratch.entry.state).has_ended() {
        retire(tables, scratch);
    }
}

/// `awaited`: the sequence number that the receiver of the RST waits for.
#[inline(always)]
fn reset(awaited: u32, segment: &Segment, known: u8) -> u8 {
    match segment.sequence.wrapping_sub(awaited) {
        0 => RESET_CONFIRMED,
        1..RESET_WINDOW => RESET_PLAUSIBLE,
        _ => known,
    }
}

#[inline(always)]
fn write_state<A>(entry: impl FlowEntry<A>, old: FlowState, new: FlowState) {
    if new.progress != old.progress {
        entry.write(Change::Progress(new.progress));
    }
    if new.client_fin != old.client_fin {
        entry.write(Change::ClientFin(new.client_fin));
    }
    if new.backend_fin != old.backend_fin {
        entry.write(Change::BackendFin(new.backend_fin));
    }
    if new.reset != old.reset {
        entry.write(Change::Reset(new.reset));
    }
}
