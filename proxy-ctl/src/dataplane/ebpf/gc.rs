//! Removes flows of which nothing was heard for their lifetime, a slice of the tables at a time.

use std::time::{Duration, Instant};

use aya::Pod;
use proxy_common::{
    flow::{
        FlowLifetimes, Stage,
        collect::{StoredFlows, age, is_counted, is_expired, remove_if},
    },
    layout::{FIN_ACKNOWLEDGED, FLOW_OF_NETFILTER, Flow, FlowKey, FlowState},
};

use super::{
    Error,
    connections::{Kind, Recount},
    family::TableFamily,
    tables::{FamilyTables, Table},
};
use crate::sys::map::Cursor;

/// Entries looked at before the next decision to go on.
const SLICE: usize = 4_096;
/// How many are looked at in one call and table in any case: a table of half a million is walked in half a minute.
const LEAST: usize = 16_384;
/// How long one call walks through a table while a quarter of what it meets has expired.
const BUDGET: Duration = Duration::from_millis(100);

/// A walk through one table that goes on from call to call.
#[derive(Debug)]
pub(super) struct Walk<K> {
    cursor: Cursor<K>,
    seen: u64,
    /// Entries of the last walk that came to the end.
    pub(super) counted: u64,
    /// A walk has come to the end.
    complete: bool,
    /// Calls to leave out: an empty table costs a look at each of its buckets.
    rest: u32,
}

impl<K> Default for Walk<K> {
    fn default() -> Self {
        Self { cursor: Cursor::Start, seen: 0, counted: 0, complete: false, rest: 0 }
    }
}

/// Calls to leave out after a walk that found nothing. A flow lives longer.
const REST: u32 = 9;

impl<K: Copy> Walk<K> {
    fn advance(&mut self, next: Option<Cursor<K>>, seen: usize) {
        self.seen += seen as u64;
        match next {
            Some(cursor) => self.cursor = cursor,
            None => {
                self.cursor = Cursor::Start;
                self.counted = std::mem::take(&mut self.seen);
                self.complete = true;
                self.rest = if self.counted == 0 { REST } else { 0 };
            }
        }
    }
}

/// What a walk has come to in one call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress {
    pub(super) removed: u64,
    /// It is at the end.
    pub(super) ended: bool,
}

impl<K: Pod + Default> Walk<K> {
    /// Goes on through the table for as long as a call may take. `collect` removes what has expired of a slice, and answers how many
    /// entries those were.
    pub(super) fn go_on<V: Pod + Default>(
        &mut self,
        table: &Table<K, V>,
        mut collect: impl FnMut(&[(K, V)]) -> Result<u64, Error>,
    ) -> Result<Progress, Error> {
        let start = Instant::now();
        let (mut slice, mut seen, mut removed) = (Vec::new(), 0, 0);
        loop {
            slice.clear();
            let next = table
                .map()
                .read(self.cursor, SLICE, &mut slice)
                .map_err(|source| Error::Table { table: table.name, source })?;
            self.advance(next, slice.len());
            seen += slice.len();
            let expired = collect(&slice)?;
            removed += expired;
            let is_worth_it = seen < LEAST || expired * 4 >= slice.len() as u64;
            if next.is_none() || !is_worth_it || start.elapsed() >= BUDGET {
                return Ok(Progress { removed, ended: next.is_none() });
            }
        }
    }
}

impl<F: TableFamily> FamilyTables<F> {
    fn flow_table(&self, stage: Stage) -> &Table<FlowKey<F::Address>, Flow<F::Address>> {
        match stage {
            Stage::Opening => &self.opening_flows,
            Stage::Established => &self.flows,
        }
    }
}

impl<F: TableFamily> StoredFlows<F::Address> for FamilyTables<F> {
    type Error = Error;

    fn get(&self, stage: Stage, key: &FlowKey<F::Address>) -> Result<Option<Flow<F::Address>>, Error> {
        self.flow_table(stage).get(key)
    }

    fn take(&self, stage: Stage, key: &FlowKey<F::Address>) -> Result<Option<Flow<F::Address>>, Error> {
        self.flow_table(stage).take(key)
    }

    fn put_back(
        &self,
        stage: Stage,
        key: &FlowKey<F::Address>,
        flow: &Flow<F::Address>,
    ) -> Result<bool, Error> {
        self.flow_table(stage).insert(key, flow)
    }

    fn count_collected(&self, backend: u32, connections: i64) -> Result<(), Error> {
        // Flows are removed also where their end finds no room.
        if let Err(error) = self.connections.collect(backend, Kind::Flows, connections) {
            tracing::debug!(backend, connections, %error, "ends of connections are not counted before the next walk");
        }
        Ok(())
    }
}

/// Both flow tables of one family.
#[derive(Debug)]
pub(super) struct Collector<F: TableFamily> {
    opening: Walk<FlowKey<F::Address>>,
    established: Walk<FlowKey<F::Address>>,
    /// Of those that the walk through `flows` meets.
    pub(super) recount: Option<Recount>,
}

impl<F: TableFamily> Default for Collector<F> {
    fn default() -> Self {
        Self { opening: Walk::default(), established: Walk::default(), recount: None }
    }
}

impl<F: TableFamily> Collector<F> {
    /// Entries in `opening_flows` and `flows`, as of the last complete walk.
    pub(super) fn counted(&self) -> (u64, u64) {
        (self.opening.counted, self.established.counted)
    }

    /// The last complete walks have found no flow.
    pub(super) fn is_empty(&self) -> bool {
        self.opening.complete && self.established.complete && self.counted() == (0, 0)
    }

    /// Leaves only TCP flows of the programs' own: the clients' next datagrams are new to whoever serves them then, and ports of
    /// netfilter's connections need not be kept where no flow is opened any more.
    pub(super) fn end_for_retirement(tables: &FamilyTables<F>) -> Result<u64, Error> {
        let mut removed = 0;
        for table in [&tables.opening_flows, &tables.flows] {
            for (_, flow) in table.read_all()? {
                if i32::from(flow.protocol) == libc::IPPROTO_UDP || flow.flags & FLOW_OF_NETFILTER != 0 {
                    removed += remove_if(tables, &flow, |_| true)? as u64;
                }
            }
        }
        Ok(removed)
    }

    /// Has the next walk through `flows` count connections, unless one does.
    pub(super) fn count_connections(&mut self, tables: &FamilyTables<F>) -> Result<(), Error> {
        if self.recount.is_none() && matches!(self.established.cursor, Cursor::Start) {
            self.recount = Some(Recount::begin(&tables.connections, Kind::Flows)?);
        }
        Ok(())
    }

    /// Goes on through both tables and removes expired flows, all their entries together. Answers how many entries were removed.
    pub(super) fn collect(
        &mut self,
        tables: &FamilyTables<F>,
        lifetimes: &FlowLifetimes,
        now: u64,
    ) -> Result<u64, Error> {
        let opening = self.walk(tables, Stage::Opening, lifetimes, now)?;
        Ok(opening + self.walk(tables, Stage::Established, lifetimes, now)?)
    }

    fn walk(
        &mut self,
        tables: &FamilyTables<F>,
        stage: Stage,
        lifetimes: &FlowLifetimes,
        now: u64,
    ) -> Result<u64, Error> {
        let table = tables.flow_table(stage);
        let walk = match stage {
            Stage::Opening => &mut self.opening,
            Stage::Established => &mut self.established,
        };
        if walk.rest > 0 {
            walk.rest -= 1;
            return Ok(0);
        }
        let recount = &mut self.recount;
        let progress = walk.go_on(table, |slice| {
            let mut expired = 0;
            if let Some(recount) = recount.as_mut().filter(|_| stage == Stage::Established) {
                let counted = slice.iter().filter(|(key, flow)| is_counted(stage, key, flow));
                counted.for_each(|(_, flow)| recount.see(flow.backend_id));
            }
            for (key, flow) in slice.iter().filter(|(_, flow)| may_be_expired(flow, lifetimes, now)) {
                expired += if stage == Stage::Opening && is_established(tables, key, flow)? {
                    // A copy that no reader between its two lookups needs any more.
                    u64::from(table.remove(key)?)
                } else {
                    remove_if(tables, flow, |entries| is_expired(entries, lifetimes, now))? as u64
                };
            }
            Ok(expired)
        });
        if progress.is_err() {
            // The next walk may meet again what this one has met.
            self.recount = None;
        }
        let progress = progress?;
        if stage == Stage::Established
            && progress.ended
            && let Some(recount) = self.recount.take()
        {
            recount.end(tables)?;
        }
        Ok(progress.removed)
    }
}

fn is_established<F: TableFamily>(
    tables: &FamilyTables<F>,
    key: &FlowKey<F::Address>,
    flow: &Flow<F::Address>,
) -> Result<bool, Error> {
    Ok(tables.flows.get(key)?.is_some_and(|established| established.is_same(flow)))
}

/// Judged by one entry alone. Another may know more of how the flow ends, and have been seen later.
fn may_be_expired<A>(flow: &Flow<A>, lifetimes: &FlowLifetimes, now: u64) -> bool {
    let lifetime = lifetimes.of(flow.protocol, flow.state);
    let ended = FlowState { client_fin: FIN_ACKNOWLEDGED, backend_fin: FIN_ACKNOWLEDGED, ..flow.state };
    let is_ending = flow.state.client_fin.max(flow.state.backend_fin) == FIN_ACKNOWLEDGED;
    age(flow, now) >= if is_ending { lifetime.min(lifetimes.of(flow.protocol, ended)) } else { lifetime }
}

#[cfg(test)]
mod tests {
    use proxy_common::layout::{
        PROGRESS_CONFIRMED, PROGRESS_SUSTAINED, PROTOCOL_TCP, PROTOCOL_UDP, RESET_CONFIRMED,
    };
    use rstest::rstest;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    const OPEN: FlowState =
        FlowState { progress: PROGRESS_CONFIRMED, client_fin: 0, backend_fin: 0, reset: 0 };
    const SILENT: FlowState = FlowState { progress: 0, ..OPEN };
    const SUSTAINED: FlowState = FlowState { progress: PROGRESS_SUSTAINED, ..OPEN };
    const CLIENT_CLOSED: FlowState = FlowState { client_fin: FIN_ACKNOWLEDGED, ..OPEN };
    const BACKEND_CLOSED: FlowState = FlowState { backend_fin: FIN_ACKNOWLEDGED, ..OPEN };
    const RESET: FlowState = FlowState { reset: RESET_CONFIRMED, ..OPEN };

    fn flow(protocol: u8, state: FlowState, last_seen: u64) -> Flow<[u8; 4]> {
        let mut flow = Flow::default();
        (flow.protocol, flow.state, flow.last_seen) = (protocol, state, last_seen * SECOND);
        flow
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
        let entries = [flow(protocol, state, 1_000)];
        assert_eq!(is_expired(&entries, &FlowLifetimes::default(), (1_000 + age) * SECOND), expired);
        assert!(!expired || may_be_expired(&entries[0], &FlowLifetimes::default(), (1_000 + age) * SECOND));
    }

    #[test]
    fn an_entry_that_was_seen_keeps_its_partners() {
        let entries = [flow(PROTOCOL_UDP, SILENT, 10), flow(PROTOCOL_UDP, SILENT, 1_000)];
        assert!(may_be_expired(&entries[0], &FlowLifetimes::default(), 1_010 * SECOND));
        assert!(!is_expired(&entries, &FlowLifetimes::default(), 1_010 * SECOND));
    }

    #[test]
    fn two_halves_of_a_close_make_a_whole() {
        let entries = [flow(PROTOCOL_TCP, CLIENT_CLOSED, 1_000), flow(PROTOCOL_TCP, BACKEND_CLOSED, 1_000)];
        assert!(may_be_expired(&entries[0], &FlowLifetimes::default(), 1_060 * SECOND));
        assert!(is_expired(&entries, &FlowLifetimes::default(), 1_060 * SECOND));
        assert!(!is_expired(&entries[..1], &FlowLifetimes::default(), 1_060 * SECOND));
    }

    #[test]
    fn a_short_lifetime_after_one_fin_is_kept() {
        let lifetimes = FlowLifetimes { tcp_close_wait: Duration::from_secs(5), ..FlowLifetimes::default() };
        let entries = [flow(PROTOCOL_TCP, CLIENT_CLOSED, 1_000)];
        for (age, expired) in [(4, false), (5, true)] {
            let now = (1_000 + age) * SECOND;
            assert_eq!(may_be_expired(&entries[0], &lifetimes, now), expired);
            assert_eq!(is_expired(&entries, &lifetimes, now), expired);
        }
    }

    #[test]
    fn a_stamp_from_the_future_is_no_age() {
        assert!(!is_expired(&[flow(PROTOCOL_UDP, SILENT, 1_000)], &FlowLifetimes::default(), 999 * SECOND));
    }

    #[test]
    fn a_walk_counts_what_it_has_seen_when_it_ends() {
        let mut walk = Walk::<u32>::default();
        walk.advance(Some(Cursor::Bucket(7)), 100);
        assert_eq!(walk.counted, 0);
        walk.advance(None, 20);
        assert_eq!((walk.counted, walk.seen, walk.rest), (120, 0, 0));
        walk.advance(None, 0);
        assert_eq!((walk.counted, walk.rest), (0, REST));
    }
}
