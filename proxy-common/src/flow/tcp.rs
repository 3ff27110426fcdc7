//! What segments say of a connection. Anybody can send one with the ends of a connection, so that one counts only if it has a sequence
//! number that an attacker cannot know, or once the other side has acknowledged it.

use super::{
    Change, FlowEntry, FlowMaps, Routine, Scratch,
    entries::{KeyKind, REFRESH_AFTER, is_stale},
    keep::SILENT_AFTER,
};
use crate::{
    family::Family,
    layout::*,
    packet::{Packet, Segment, TCP_ACK, TCP_FIN, TCP_RST, TCP_SYN},
};

/// How much of the client's first data the backend's SYN may acknowledge (TCP Fast Open).
const FIRST_DATA: u32 = 0xffff;
/// How far beyond what its receiver waits for a RST may be: data before it may be on its way.
const RESET_WINDOW: u32 = 1 << 20;
/// How far both numbers of a segment may be from where the streams stand. The largest packet that the kernel puts together has 2^19 bytes;
/// one segment of 2^24 whose numbers are guessed is believed.
pub(super) const REACH: u32 = 1 << 19;

/// A side of a connection. Of a segment, the one that has sent it.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Side {
    #[default]
    Client,
    Backend,
}

impl Side {
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

    #[inline(always)]
    pub fn numbers_of<A>(self, flow: &mut Flow<A>) -> &mut Numbers {
        match self {
            Self::Client => &mut flow.client_numbers,
            Self::Backend => &mut flow.backend_numbers,
        }
    }
}

#[inline(always)]
pub(super) const fn is_near(number: u32, reached: u32) -> bool {
    number.wrapping_sub(reached).wrapping_add(REACH) < 2 * REACH
}

/// The largest window of TCP (RFC 7323, 2.3). Two numbers of a stream are never further apart.
const LARGEST_WINDOW: u32 = 1 << 30;

#[inline(always)]
pub(super) const fn is_ahead(number: u32, reached: u32) -> bool {
    let distance = number.wrapping_sub(reached);
    distance != 0 && distance < LARGEST_WINDOW
}

/// Returns 0 if a number is near one of the two ends of what is under way, or between them, and
/// otherwise less than 2^28. It has no branches, as the verifier would follow each of them.
#[inline(always)]
fn outside(number: u32, acknowledged: u32, sent: u32) -> u64 {
    let far = |from: u32| u64::from(number.wrapping_sub(from).wrapping_add(REACH) / (2 * REACH));
    let under_way = sent.wrapping_sub(acknowledged);
    let distance = u64::from(number.wrapping_sub(acknowledged));
    let is_behind_sent = distance.wrapping_sub(u64::from(under_way)) >> 63;
    let not_between = (is_behind_sent ^ 1) | u64::from(under_way / LARGEST_WINDOW);
    far(acknowledged).wrapping_mul(far(sent)).wrapping_mul(not_between)
}

/// Returns true if two numbers of a stream are no further apart than a window can be.
#[inline(always)]
pub(super) const fn is_in_reach(number: u32, other: u32) -> bool {
    number.wrapping_sub(other).wrapping_add(LARGEST_WINDOW) < 2 * LARGEST_WINDOW
}

/// Has the client received the backend's SYN?
#[inline(always)]
pub(super) fn confirms<A>(flow: &Flow<A>, segment: &Segment) -> bool {
    flow.state.progress == PROGRESS_ANSWERED
        && flow.flags & FLOW_RESUMED == 0
        && segment.has(TCP_ACK)
        && !segment.has(TCP_SYN | TCP_RST)
        && segment.acknowledgement == flow.client_numbers.awaited
}

/// `scratch.flow` is a copy of `entry`, the sender's own, which lies at `scratch.key` in `scratch.stage`. It learns what the entries learn.
#[inline(always)]
pub(super) fn track<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
    sender: Side,
    entry: T::Entry,
) {
    if track_fast(scratch, sender, entry) {
        return;
    }
    scratch.sender = sender;
    scratch.own_key = scratch.key;
    let others = if sender == Side::Client { KeyKind::Backend } else { KeyKind::Client };
    // Not in the routine: its own stack would be added.
    let _there = others.set_key(maps, scratch);
    maps.run(scratch, Routine::TrackSlow);
}

/// [`track`], of a segment of the fast path, which says no more than how far the streams have come. False: it takes the slow path, and nothing is learned.
#[inline(always)]
pub(super) fn track_fast<A: Address>(
    scratch: &mut Scratch<A>,
    sender: Side,
    entry: impl FlowEntry<A>,
) -> bool {
    let Scratch { flow, packet, .. } = scratch;
    let segment = &packet.segment;
    let is_control = segment.has(TCP_SYN | TCP_FIN | TCP_RST);
    let sent = sender.other().numbers_of(flow).reached;
    let Numbers { reached: acknowledged, awaited } = *sender.numbers_of(flow);
    let is_believed = segment.has(TCP_ACK)
        && is_near(segment.sequence, sent)
        && is_near(segment.acknowledgement, acknowledged);
    let acknowledges = segment.has(TCP_ACK) && segment.acknowledgement == awaited;
    let others_fin = *sender.other().fin_of(&mut flow.state);
    let is_slow = is_control
        || (segment.has(TCP_ACK) && !is_believed)
        || flow.state.reset != 0
        || (others_fin == FIN_SEEN && acknowledges)
        || flow.state.has_ended();
    if is_slow {
        return false;
    }
    if is_believed {
        advance(scratch, sender, entry);
    }
    true
}

/// The streams have come as far as the segment says, which is believed.
#[inline(always)]
pub(super) fn advance<A: Address>(scratch: &mut Scratch<A>, sender: Side, entry: impl FlowEntry<A>) {
    let Scratch { flow, packet, .. } = scratch;
    for (side, number) in [(sender, packet.segment.acknowledgement), (sender.other(), packet.segment.next)] {
        let numbers = side.numbers_of(flow);
        // A segment that comes late, or again, takes nothing back.
        if numbers.reached.wrapping_sub(number) >= LARGEST_WINDOW {
            numbers.reached = number;
            entry.write(Change::Reached(side, number));
        }
    }
}

/// The slow path: a segment that opens, ends or confirms, comes after the end, or has numbers that are far from where the streams stand. The sender's
/// entry is at `scratch.own_key`, the other side's at `scratch.key`.
#[inline(always)]
pub(super) fn track_slow<F: Family, T: FlowMaps<F>>(maps: &T, scratch: &mut Scratch<F::Address>) {
    let Scratch { sender, stage, .. } = *scratch;
    let is_of_flow = |entry: &T::Entry| entry.opened() == scratch.flow.opened;
    let Some(entry) = maps.flow(stage, &scratch.own_key).filter(is_of_flow) else { return };
    let others = maps.flow(stage, &scratch.key).filter(is_of_flow);
    let awaited = sender.numbers_of(&mut scratch.flow).awaited;
    // Where the other side's entry is evicted, nothing that ends the flow counts until it is restored.
    // Not an Option: the verifier of 5.10 refuses to look at the number of one that has none.
    let mut is_other_known = false;
    let Flow { client_numbers, backend_numbers, state: old, .. } = scratch.flow;
    (scratch.entry.client_numbers, scratch.entry.backend_numbers) = (client_numbers, backend_numbers);
    if let Some(others) = others {
        others.read_into(&mut scratch.entry);
        is_other_known = true;
    }
    if sender == Side::Client && scratch.packet.opens() {
        track_another_syn(maps, scratch, entry, others);
        return;
    }
    let is_believed = is_believed(scratch);
    let segment = &scratch.packet.segment;
    let is_resumed = scratch.flow.flags & FLOW_RESUMED != 0;
    let state = &mut scratch.flow.state;
    let others_fin = sender.other().fin_of(state);
    if *others_fin == FIN_SEEN && segment.has(TCP_ACK) && segment.acknowledgement == awaited {
        *others_fin = FIN_ACKNOWLEDGED;
    }
    let is_answer = sender == Side::Backend
        && segment.has(TCP_ACK)
        && segment.acknowledgement.wrapping_sub(awaited) <= FIRST_DATA;
    let is_opening = is_answer && segment.has(TCP_SYN) && state.progress <= PROGRESS_ANSWERED;
    if is_opening {
        state.progress = PROGRESS_ANSWERED;
    }
    if segment.has(TCP_RST) {
        let refuses = is_answer && state.progress < PROGRESS_ANSWERED;
        // Only who has acknowledged something waits for a number that is known.
        let acknowledged_from = if sender == Side::Client { PROGRESS_ANSWERED } else { PROGRESS_CONFIRMED };
        // The segment that has opened a `FLOW_RESUMED` has told what both sides wait for.
        let is_comparable = is_other_known && (state.progress >= acknowledged_from || is_resumed);
        if refuses {
            state.reset = RESET_CONFIRMED;
        } else if is_comparable {
            compare_reset(scratch);
        }
    } else if sender == Side::Backend
        && (is_believed || is_opening)
        && !may_precede_reset(&scratch.flow, segment, maps.now())
    {
        // The connection goes on: the RST was forged, or, after both FINs, these were. A client's
        // segment shows nothing: it may come late, or from a client that wants to keep the entries.
        let state = &mut scratch.flow.state;
        state.reset = 0;
        let goes_on = segment.has_data() || is_ahead(segment.acknowledgement, awaited);
        if goes_on && state.has_ended() {
            (state.client_fin, state.backend_fin) = (0, 0);
        }
    }
    let segment = &scratch.packet.segment;
    let fin = sender.fin_of(&mut scratch.flow.state);
    let is_end = segment.has(TCP_FIN) && is_other_known && is_believed && *fin != FIN_ACKNOWLEDGED;
    if is_end {
        *fin = FIN_SEEN;
    }
    if is_opening || is_end {
        let (receiver, next) = (sender.other(), segment.next);
        receiver.numbers_of(&mut scratch.flow).awaited = next;
        entry.write(Change::Awaited(receiver, next));
        if is_opening {
            entry.write(Change::Reached(receiver, next));
        }
        if let Some(others) = others {
            others.write(Change::Awaited(receiver, next));
            if is_opening {
                others.write(Change::Reached(receiver, next));
            }
        }
    }
    if is_believed && !segment.has(TCP_SYN | TCP_RST) {
        advance(scratch, sender, entry);
    }
    let state = scratch.flow.state;
    write(maps, entry, old, state);
    if let Some(others) = others {
        write(maps, others, old, state);
    }
}

/// Tracks another SYN of the client. After a silence it may be that of another
/// connection from the same port, which knows nothing of the first one's numbers.
///
/// A flow that is not confirmed takes the SYN's number, so that its answer is known. Forged SYNs
/// have a second at most for that: later ones come after the handshake. A confirmed flow keeps its
/// numbers, as the SYN may be forged, and a forged answer may follow it. But nothing counts as sent
/// and not acknowledged any more, as that would end the second connection after minutes. Whoever
/// still waits for an acknowledgement sends again.
#[inline(always)]
fn track_another_syn<F: Family, T: FlowMaps<F>>(
    maps: &T,
    scratch: &mut Scratch<F::Address>,
    entry: T::Entry,
    others: Option<T::Entry>,
) {
    let Scratch { flow, packet: Packet { segment, .. }, entry: of_others, .. } = scratch;
    let silence = maps.now().saturating_sub(flow.last_seen);
    if flow.state.progress < PROGRESS_CONFIRMED {
        if silence > REFRESH_AFTER {
            let awaited = Change::Awaited(Side::Backend, segment.sequence.wrapping_add(1));
            let sent = Change::Reached(Side::Backend, segment.next);
            for change in [awaited, sent] {
                entry.write(change);
                if let Some(others) = others {
                    others.write(change);
                }
            }
        }
    } else if silence > SILENT_AFTER
        && let Some(others) = others
    {
        entry.write(Change::Reached(Side::Backend, of_others.backend_numbers.reached));
        others.write(Change::Reached(Side::Client, flow.client_numbers.reached));
    }
}

/// The numbers that both sides' entries know of the stream that the receiver gets: what it has
/// acknowledged, and what was sent. `scratch.entry` is that of the other side.
#[inline(always)]
fn stream_to<A>(scratch: &mut Scratch<A>, receiver: Side) -> (u32, u32) {
    let own = receiver.numbers_of(&mut scratch.flow).reached;
    let others = receiver.numbers_of(&mut scratch.entry).reached;
    if scratch.sender == receiver { (own, others) } else { (others, own) }
}

/// Returns true if the numbers of a segment fit what the entries of both sides know.
// Not inlined, for the stack of its caller.
#[inline(never)]
fn is_believed<A>(scratch: &mut Scratch<A>) -> bool {
    let Scratch { sender, packet: Packet { segment, .. }, .. } = *scratch;
    let (awaited, sent) = stream_to(scratch, sender.other());
    let (acknowledged, sent_by_other) = stream_to(scratch, sender);
    // With megabytes under way one loss has acknowledgements jump by megabytes. What is between the
    // ends that both entries know is believed, as RFC 5961 and conntrack have it.
    let unexpected = outside(segment.sequence, awaited, sent)
        | outside(segment.acknowledgement, acknowledged, sent_by_other);
    // After a gap before this node, data goes on far ahead. Its exact acknowledgement vouches for
    // its sequence number.
    let is_after_gap = segment.acknowledgement == acknowledged
        && !segment.has(TCP_FIN)
        && is_in_reach(segment.sequence, sent);
    segment.has(TCP_ACK) && (unexpected == 0 || is_after_gap)
}

/// Judges a RST by what the entries of both sides know.
// Not inlined, for the stack of its caller.
#[inline(never)]
fn compare_reset<A>(scratch: &mut Scratch<A>) {
    let receiver = scratch.sender.other();
    let (awaited, sent) = stream_to(scratch, receiver);
    track_reset(&mut scratch.flow.state, scratch.packet.segment.sequence, awaited, sent);
}

/// A RST ended the flow less than a second ago, and may have overtaken this segment: an acknowledgement and the RST after it come from two CPUs
/// of their sender. If it took the end back, nobody would end the flow again, as the other side may answer nothing. Data does take it back: a
/// connection whose RST was forged loses none.
#[inline(always)]
pub(super) fn may_precede_reset<A>(flow: &Flow<A>, segment: &Segment, now: u64) -> bool {
    let is_plain = !segment.has_data() && !segment.has(TCP_SYN);
    flow.state.reset == RESET_CONFIRMED && is_plain && !is_stale(flow, now)
}

/// Returns true if a receiver that waits for `awaited` may take a RST with this number.
#[inline(always)]
const fn is_plausible(sequence: u32, awaited: u32, sent: u32) -> bool {
    let under_way = sent.wrapping_sub(awaited);
    let window =
        if under_way < LARGEST_WINDOW && under_way > RESET_WINDOW { under_way } else { RESET_WINDOW };
    sequence.wrapping_sub(awaited) < window
}

/// Judges a RST by its sequence number. It counts at `awaited`, where its receiver waits. It also
/// counts at `sent`, the end of what its own side has sent: a server that closes with data under
/// way sends its RST right behind that data (RFC 1122, 4.2.2.13). A forger who sees no packet of
/// the connection knows neither number.
#[inline(always)]
pub(super) fn track_reset(state: &mut FlowState, sequence: u32, awaited: u32, sent: u32) {
    if sequence == awaited || sequence == sent {
        state.reset = RESET_CONFIRMED;
    } else if is_plausible(sequence, awaited, sent) {
        state.reset = state.reset.max(RESET_PLAUSIBLE);
    }
}

#[inline(always)]
pub(super) fn write<F: Family, T: FlowMaps<F>>(maps: &T, entry: T::Entry, old: FlowState, new: FlowState) {
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
        if new.reset == RESET_CONFIRMED {
            // `may_precede_reset` counts from the end.
            entry.write(Change::LastSeen(maps.now()));
        }
        entry.write(Change::Reset(new.reset));
    }
}
