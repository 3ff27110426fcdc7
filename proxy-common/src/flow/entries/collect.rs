//! Removes a flow that has had no packet for its lifetime: all its entries together or none, while the programs go on.

use core::time::Duration;

use crate::{
    flow::{FlowLifetimes, Stage, tcp::is_ahead},
    layout::{
        Address, FIN_ACKNOWLEDGED, FLOW_COUNTED, FLOW_DSR, FLOW_RESUMED, Flow, FlowKey, FlowState,
        PROGRESS_CONFIRMED, PROTOCOL_TCP, unproven_entries,
    },
};

/// The flow maps from user space.
pub trait StoredFlows<A> {
    type Error;

    fn get(&self, stage: Stage, key: &FlowKey<A>) -> Result<Option<Flow<A>>, Self::Error>;
    /// Removes an entry and answers what it was at that moment.
    fn take(&self, stage: Stage, key: &FlowKey<A>) -> Result<Option<Flow<A>>, Self::Error>;
    /// Leaves what has the key by now. Answers whether nothing had.
    fn put_back(&self, stage: Stage, key: &FlowKey<A>, flow: &Flow<A>) -> Result<bool, Self::Error>;
    /// So many connections of the backend have ended without the programs.
    fn count_collected(&self, backend: u32, connections: i64) -> Result<(), Self::Error>;
}

/// Does this entry stand for one of its backend's connections?
pub fn is_counted<A: Address>(stage: Stage, key: &FlowKey<A>, flow: &Flow<A>) -> bool {
    stage == Stage::Established && flow.flags & FLOW_COUNTED != 0 && *key == flow.client_key()
}

/// Returns how many entries of flows that [prove no client](Flow::proves_no_client) this one
/// stands for.
pub fn unproven<A: Address>(stage: Stage, key: &FlowKey<A>, flow: &Flow<A>) -> u32 {
    let stands_for_all = stage == Stage::Established && flow.proves_no_client() && *key == flow.client_key();
    if stands_for_all { flow.entries() } else { 0 }
}

fn take<A: Address, T: StoredFlows<A>>(
    maps: &T,
    stage: Stage,
    key: &FlowKey<A>,
) -> Result<Option<Flow<A>>, T::Error> {
    let taken = maps.take(stage, key)?;
    if let Some(flow) = &taken {
        count(maps, (stage, key), flow, 1)?;
    }
    Ok(taken)
}

fn put_back<A: Address, T: StoredFlows<A>>(
    maps: &T,
    stage: Stage,
    key: &FlowKey<A>,
    flow: &Flow<A>,
) -> Result<(), T::Error> {
    if maps.put_back(stage, key, flow)? { count(maps, (stage, key), flow, -1) } else { Ok(()) }
}

/// Counts an entry that is taken, or, by -1, put back.
fn count<A: Address, T: StoredFlows<A>>(
    maps: &T,
    (stage, key): (Stage, &FlowKey<A>),
    flow: &Flow<A>,
    taken: i64,
) -> Result<(), T::Error> {
    if is_counted(stage, key, flow) {
        maps.count_collected(flow.backend_id, taken)?;
    }
    match unproven(stage, key, flow) {
        0 => Ok(()),
        entries => maps.count_collected(unproven_entries::<A>(), taken * i64::from(entries)),
    }
}

/// An entry of a flow, and where it lies.
#[derive(Clone, Copy, Debug, Default)]
pub struct Entry<A> {
    pub stage: Stage,
    pub key: FlowKey<A>,
    pub flow: Flow<A>,
}

/// Each of three keys in each of two maps.
const MOST_ENTRIES: usize = 6;

/// The entries that were found of one flow.
struct Entries<A> {
    entries: [Entry<A>; MOST_ENTRIES],
    count: usize,
}

impl<A: Address> Entries<A> {
    fn new() -> Self {
        Self { entries: [Entry::default(); MOST_ENTRIES], count: 0 }
    }

    fn push(&mut self, entry: Entry<A>) {
        self.entries[self.count] = entry;
        self.count += 1;
    }

    fn found(&self) -> &[Entry<A>] {
        &self.entries[..self.count]
    }
}

/// `is_over` judges by all entries of the flow. Answers how many were removed.
pub fn remove_if<A: Address, T: StoredFlows<A>>(
    maps: &T,
    flow: &Flow<A>,
    is_over: impl Fn(&[Entry<A>]) -> bool,
) -> Result<usize, T::Error> {
    let keys = [
        flow.is_masqueraded().then(|| flow.masquerade_key()),
        Some(flow.backend_key()),
        Some(flow.client_key()),
    ];
    let mut found = Entries::new();
    for key in keys.into_iter().flatten() {
        for stage in [Stage::Opening, Stage::Established] {
            // A key may have passed to another flow since.
            if let Some(entry) = maps.get(stage, &key)?.filter(|entry| entry.is_same(flow)) {
                found.push(Entry { stage, key, flow: entry });
            }
        }
    }
    if !is_over(found.found()) {
        return Ok(0);
    }
    let mut taken = Entries::new();
    for Entry { stage, key, .. } in found.found() {
        match take(maps, *stage, key)? {
            Some(entry) if entry.is_same(flow) => taken.push(Entry { stage: *stage, key: *key, flow: entry }),
            // The key has passed to another flow in this moment.
            Some(entry) => put_back(maps, *stage, key, &entry)?,
            None => {}
        }
    }
    if is_over(taken.found()) {
        return Ok(taken.count);
    }
    // A packet has come since.
    let mut outcome = Ok(0);
    for Entry { stage, key, flow } in taken.found() {
        outcome = outcome.and(put_back(maps, *stage, key, flow).map(|()| 0));
    }
    outcome
}

/// Removes the flow of an entry that a walk has met, if the flow has expired. Returns how many
/// entries were removed. `now` is in nanoseconds since boot, suspend included.
pub fn remove_expired<A: Address, T: StoredFlows<A>>(
    maps: &T,
    met: &Entry<A>,
    lifetimes: &FlowLifetimes,
    now: u64,
) -> Result<usize, T::Error> {
    if !may_be_expired(&met.flow, lifetimes, now) && !is_abandoned(maps, met, lifetimes, now)? {
        return Ok(0);
    }
    if met.stage == Stage::Opening && is_established(maps, met)? {
        // A copy that no reader between its two lookups needs any more.
        return Ok(usize::from(take(maps, met.stage, &met.key)?.is_some()));
    }
    remove_if(maps, &met.flow, |entries| is_expired(entries, lifetimes, now))
}

/// Returns the state that the lifetime of a flow with these flags goes by. The connection of a
/// resumed flow was up before, and its backend may be the next to speak. Without the flow, nobody
/// would translate that segment.
fn of_connection(flags: u32, state: FlowState) -> FlowState {
    let progress = if flags & FLOW_RESUMED == 0 { state.progress } else { PROGRESS_CONFIRMED };
    FlowState { progress, ..state }
}

fn is_established<A: Address, T: StoredFlows<A>>(maps: &T, met: &Entry<A>) -> Result<bool, T::Error> {
    Ok(maps.get(Stage::Established, &met.key)?.is_some_and(|established| established.is_same(&met.flow)))
}

/// Judges by one entry alone. Another may know more of how the flow ends, and have been seen later.
fn may_be_expired<A>(flow: &Flow<A>, lifetimes: &FlowLifetimes, now: u64) -> bool {
    let lifetime = lifetimes.of(flow.protocol, of_connection(flow.flags, flow.state));
    let ended = FlowState { client_fin: FIN_ACKNOWLEDGED, backend_fin: FIN_ACKNOWLEDGED, ..flow.state };
    let is_ending = flow.state.client_fin.max(flow.state.backend_fin) == FIN_ACKNOWLEDGED;
    age(flow, now) >= if is_ending { lifetime.min(lifetimes.of(flow.protocol, ended)) } else { lifetime }
}

/// Returns true if a silent connection may have lost one of its sides. The client's entry alone is
/// looked at, so that a connection which is only silent costs one lookup in each walk.
fn is_abandoned<A: Address, T: StoredFlows<A>>(
    maps: &T,
    Entry { stage, key, flow }: &Entry<A>,
    lifetimes: &FlowLifetimes,
    now: u64,
) -> Result<bool, T::Error> {
    let is_silent = *stage == Stage::Established
        && flow.protocol == PROTOCOL_TCP
        && flow.flags & FLOW_DSR == 0
        && age(flow, now) >= lifetimes.unacknowledged(flow.state)
        && *key == flow.client_key();
    if !is_silent {
        return Ok(false);
    }
    let backends = maps.get(*stage, &flow.backend_key())?.filter(|entry| entry.is_same(flow));
    Ok(backends.is_some_and(|backends| is_unacknowledged(flow, &backends)))
}

/// Returns true if one side has sent what the other has not acknowledged. The entry of each side is
/// up to date in what that side has said.
fn is_unacknowledged<A>(clients: &Flow<A>, backends: &Flow<A>) -> bool {
    is_ahead(clients.backend_numbers.reached, backends.backend_numbers.reached)
        || is_ahead(backends.client_numbers.reached, clients.client_numbers.reached)
}

pub fn age<A>(flow: &Flow<A>, now: u64) -> Duration {
    // Another CPU may have stamped it a moment ahead of ours.
    Duration::from_nanos(now.saturating_sub(flow.last_seen))
}

/// Judges by all entries of a flow. `now` is in nanoseconds since boot, suspend included.
pub fn is_expired<A: Address>(entries: &[Entry<A>], lifetimes: &FlowLifetimes, now: u64) -> bool {
    let flags = entries.iter().fold(0, |flags, entry| flags | entry.flow.flags);
    let state = entries.iter().fold(FlowState::default(), |state, entry| state.union(&entry.flow.state));
    let state = of_connection(flags, state);
    let entry_with = |key: fn(&Flow<A>) -> FlowKey<A>| {
        let is_sides = |entry: &&Entry<A>| entry.stage == Stage::Established && entry.key == key(&entry.flow);
        entries.iter().find(is_sides).map(|entry| &entry.flow)
    };
    let sides = entry_with(Flow::client_key).zip(entry_with(Flow::backend_key));
    let is_waiting = sides.is_some_and(|(clients, backends)| {
        let sees_both = clients.protocol == PROTOCOL_TCP && clients.flags & FLOW_DSR == 0;
        sees_both && is_unacknowledged(clients, backends)
    });
    let lifetime = |flow: &Flow<A>| {
        if is_waiting { lifetimes.unacknowledged(state) } else { lifetimes.of(flow.protocol, state) }
    };
    entries.iter().all(|Entry { flow, .. }| age(flow, now) >= lifetime(flow))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::layout::{PROGRESS_SUSTAINED, PROTOCOL_UDP, RESET_CONFIRMED};

    const SECOND: u64 = 1_000_000_000;

    const OPEN: FlowState =
        FlowState { progress: PROGRESS_CONFIRMED, client_fin: 0, backend_fin: 0, reset: 0 };
    const SILENT: FlowState = FlowState { progress: 0, ..OPEN };
    const SUSTAINED: FlowState = FlowState { progress: PROGRESS_SUSTAINED, ..OPEN };
    const CLIENT_CLOSED: FlowState = FlowState { client_fin: FIN_ACKNOWLEDGED, ..OPEN };
    const BACKEND_CLOSED: FlowState = FlowState { backend_fin: FIN_ACKNOWLEDGED, ..OPEN };
    const RESET: FlowState = FlowState { reset: RESET_CONFIRMED, ..OPEN };

    fn entry(protocol: u8, state: FlowState, last_seen: u64) -> Entry<[u8; 4]> {
        let mut entry = Entry::default();
        let flow: &mut Flow<[u8; 4]> = &mut entry.flow;
        (flow.protocol, flow.state, flow.last_seen) = (protocol, state, last_seen * SECOND);
        entry
    }

    #[rstest]
    #[case::answered_tcp_lives_a_day(PROTOCOL_TCP, OPEN, 86_399, false)]
    #[case::answered_tcp_ends_after_a_day(PROTOCOL_TCP, OPEN, 86_400, true)]
    #[case::reset(PROTOCOL_TCP, RESET, 10, true)]
    #[case::half_closed(PROTOCOL_TCP, CLIENT_CLOSED, 100, false)]
    #[case::unanswered_udp(PROTOCOL_UDP, SILENT, 30, true)]
    #[case::answered_udp(PROTOCOL_UDP, SUSTAINED, 30, false)]
    fn one_entry_decides_where_it_is_alone(
        #[case] protocol: u8,
        #[case] state: FlowState,
        #[case] age: u64,
        #[case] expired: bool,
    ) {
        let entries = [entry(protocol, state, 1_000)];
        assert_eq!(is_expired(&entries, &FlowLifetimes::default(), (1_000 + age) * SECOND), expired);
        assert!(
            !expired || may_be_expired(&entries[0].flow, &FlowLifetimes::default(), (1_000 + age) * SECOND)
        );
    }

    /// Its backend may be the next to speak.
    #[rstest]
    #[case::is_silent(SILENT, 86_399, false)]
    #[case::is_silent_for_a_day(SILENT, 86_400, true)]
    #[case::half_closed(FlowState { progress: 0, ..CLIENT_CLOSED }, 3_599, false)]
    #[case::reset(FlowState { progress: 0, ..RESET }, 10, true)]
    fn a_resumed_connection_lives_as_long_as_another(
        #[case] state: FlowState,
        #[case] age: u64,
        #[case] expired: bool,
    ) {
        let mut entries = [entry(PROTOCOL_TCP, state, 1_000)];
        entries[0].flow.flags = FLOW_RESUMED;
        let now = (1_000 + age) * SECOND;
        assert_eq!(is_expired(&entries, &FlowLifetimes::default(), now), expired);
        assert!(!expired || may_be_expired(&entries[0].flow, &FlowLifetimes::default(), now));
    }

    #[test]
    fn an_entry_that_was_seen_keeps_its_partners() {
        let entries = [entry(PROTOCOL_UDP, SILENT, 10), entry(PROTOCOL_UDP, SILENT, 1_000)];
        assert!(may_be_expired(&entries[0].flow, &FlowLifetimes::default(), 1_010 * SECOND));
        assert!(!is_expired(&entries, &FlowLifetimes::default(), 1_010 * SECOND));
    }

    #[test]
    fn two_halves_of_a_close_make_a_whole() {
        let entries = [entry(PROTOCOL_TCP, CLIENT_CLOSED, 1_000), entry(PROTOCOL_TCP, BACKEND_CLOSED, 1_000)];
        assert!(may_be_expired(&entries[0].flow, &FlowLifetimes::default(), 1_060 * SECOND));
        assert!(is_expired(&entries, &FlowLifetimes::default(), 1_060 * SECOND));
        assert!(!is_expired(&entries[..1], &FlowLifetimes::default(), 1_060 * SECOND));
    }

    #[test]
    fn a_short_lifetime_after_one_fin_is_kept() {
        let lifetimes = FlowLifetimes { tcp_close_wait: Duration::from_secs(5), ..FlowLifetimes::default() };
        let entries = [entry(PROTOCOL_TCP, CLIENT_CLOSED, 1_000)];
        for (age, expired) in [(4, false), (5, true)] {
            let now = (1_000 + age) * SECOND;
            assert_eq!(may_be_expired(&entries[0].flow, &lifetimes, now), expired);
            assert_eq!(is_expired(&entries, &lifetimes, now), expired);
        }
    }

    #[test]
    fn a_stamp_from_the_future_is_no_age() {
        assert!(!is_expired(&[entry(PROTOCOL_UDP, SILENT, 1_000)], &FlowLifetimes::default(), 999 * SECOND));
    }
}
