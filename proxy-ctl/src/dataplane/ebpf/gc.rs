//! Removes flows of which nothing was heard for their lifetime, a bounded slice of the tables at a time.

use proxy_common::{
    flow::lifetime_seconds,
    layout::{
        FLOW_BACKEND_CLOSED, FLOW_CLIENT_CLOSED, FLOW_MASQUERADED, FLOW_OF_NETFILTER, FLOW_RESET, Flow,
        FlowKey,
    },
};

use super::{Error, family::TableFamily, tables::FamilyTables};
use crate::sys::map::Cursor;

/// Entries looked at in one call and table: a table of half a million is walked in half a minute.
const SLICE: usize = 16_384;
const SECOND: u64 = 1_000_000_000;
const CLOSING: u32 = FLOW_CLIENT_CLOSED | FLOW_BACKEND_CLOSED | FLOW_RESET;

/// A walk through one flow table that goes on from call to call.
#[derive(Debug)]
struct Walk<A> {
    cursor: Cursor<FlowKey<A>>,
    seen: u64,
    /// Entries of the last walk that came to the end.
    counted: u64,
    /// A walk has come to the end.
    complete: bool,
    /// Calls to leave out: an empty table costs a look at each of its buckets.
    rest: u32,
}

impl<A> Default for Walk<A> {
    fn default() -> Self {
        Self { cursor: Cursor::Start, seen: 0, counted: 0, complete: false, rest: 0 }
    }
}

/// Calls to leave out after a walk that found nothing. A flow lives longer.
const REST: u32 = 9;

impl<A: Copy> Walk<A> {
    fn advance(&mut self, next: Option<Cursor<FlowKey<A>>>, seen: usize) {
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

/// Which of the two flow tables.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum FlowTable {
    Opening,
    Established,
}

/// Both flow tables of one family.
#[derive(Debug)]
pub(super) struct Collector<F: TableFamily> {
    opening: Walk<F::Address>,
    established: Walk<F::Address>,
}

impl<F: TableFamily> Default for Collector<F> {
    fn default() -> Self {
        Self { opening: Walk::default(), established: Walk::default() }
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

    /// Ends all UDP flows: the clients' next packets are new to whoever serves them then. Ports of netfilter's connections are kept no
    /// longer: no flow is opened any more.
    pub(super) fn end_all_but_tcp_flows(tables: &FamilyTables<F>) -> Result<u64, Error> {
        let mut removed = 0;
        for table in [&tables.opening_flows, &tables.flows] {
            for (_, flow) in table.read_all()? {
                if i32::from(flow.protocol) == libc::IPPROTO_UDP || flow.flags & FLOW_OF_NETFILTER != 0 {
                    removed += remove_if(tables, &flow, |_| true)?;
                }
            }
        }
        Ok(removed)
    }

    /// Looks at the next slice of both tables and removes expired flows, all their entries together. Answers how many
    /// entries were removed.
    pub(super) fn collect(&mut self, tables: &FamilyTables<F>, now: u64) -> Result<u64, Error> {
        Ok(self.walk(tables, FlowTable::Opening, now)? + self.walk(tables, FlowTable::Established, now)?)
    }

    fn walk(&mut self, tables: &FamilyTables<F>, which: FlowTable, now: u64) -> Result<u64, Error> {
        let (walk, table) = match which {
            FlowTable::Opening => (&mut self.opening, &tables.opening_flows),
            FlowTable::Established => (&mut self.established, &tables.flows),
        };
        if walk.rest > 0 {
            walk.rest -= 1;
            return Ok(0);
        }
        let mut slice = Vec::new();
        let next = table
            .map()
            .read(walk.cursor, SLICE, &mut slice)
            .map_err(|source| Error::Table { table: table.name, source })?;
        walk.advance(next, slice.len());
        let mut removed = 0;
        for (_, flow) in slice.iter().filter(|(_, flow)| may_be_expired(flow, now)) {
            removed += remove_if(tables, flow, |entries| is_expired(entries, now))?;
        }
        Ok(removed)
    }
}

fn age_seconds<A>(flow: &Flow<A>, now: u64) -> u64 {
    // Another CPU may have stamped it a moment ahead of ours.
    now.saturating_sub(flow.last_seen) / SECOND
}

/// Judged by one entry alone. A closing flow's other entries may know that both sides have closed.
fn may_be_expired<A>(flow: &Flow<A>, now: u64) -> bool {
    let flags = if flow.flags & CLOSING == 0 { flow.flags } else { flow.flags | FLOW_RESET };
    age_seconds(flow, now) >= lifetime_seconds(flow.protocol, flags)
}

/// Judged by all entries of a flow.
fn is_expired<A>(entries: &[Flow<A>], now: u64) -> bool {
    let flags = entries.iter().fold(0, |flags, flow| flags | flow.flags);
    entries.iter().all(|flow| age_seconds(flow, now) >= lifetime_seconds(flow.protocol, flags))
}

/// `is_over`: judges by all entries of the flow.
fn remove_if<F: TableFamily>(
    tables: &FamilyTables<F>,
    flow: &Flow<F::Address>,
    is_over: impl FnOnce(&[Flow<F::Address>]) -> bool,
) -> Result<u64, Error> {
    let keys = [
        Some(flow.forward_key()),
        Some(flow.reply_key()),
        (flow.flags & FLOW_MASQUERADED != 0).then(|| flow.masqueraded_reply_key()),
    ];
    let mut found = Vec::with_capacity(6);
    let mut entries = Vec::with_capacity(6);
    for key in keys.into_iter().flatten() {
        for table in [&tables.opening_flows, &tables.flows] {
            // A key may have passed to another flow since.
            if let Some(entry) = table.get(&key)?.filter(|entry| same_flow(entry, flow)) {
                found.push((table, key));
                entries.push(entry);
            }
        }
    }
    if !is_over(&entries) {
        return Ok(0);
    }
    let mut removed = 0;
    for (table, key) in found {
        removed += u64::from(table.remove(&key)?);
    }
    Ok(removed)
}

fn same_flow<A: PartialEq>(one: &Flow<A>, other: &Flow<A>) -> bool {
    one.client == other.client
        && one.client_port() == other.client_port()
        && one.frontend == other.frontend
        && one.frontend_port() == other.frontend_port()
        && one.backend_id == other.backend_id
}

#[cfg(test)]
mod tests {
    use proxy_common::layout::{FLOW_ANSWERED, PROTOCOL_TCP, PROTOCOL_UDP};
    use rstest::rstest;

    use super::*;

    fn flow(protocol: u8, flags: u32, last_seen: u64) -> Flow<[u8; 4]> {
        let mut flow = Flow::default();
        (flow.protocol, flow.flags, flow.last_seen) = (protocol, flags, last_seen * SECOND);
        flow
    }

    #[rstest]
    #[case::answered_tcp_lives_a_day(PROTOCOL_TCP, FLOW_ANSWERED, 86_399, false)]
    #[case::answered_tcp_ends_after_a_day(PROTOCOL_TCP, FLOW_ANSWERED, 86_400, true)]
    #[case::reset(PROTOCOL_TCP, FLOW_ANSWERED | FLOW_RESET, 10, true)]
    #[case::half_closed(PROTOCOL_TCP, FLOW_ANSWERED | FLOW_CLIENT_CLOSED, 100, false)]
    #[case::unanswered_udp(PROTOCOL_UDP, 0, 30, true)]
    #[case::answered_udp(PROTOCOL_UDP, FLOW_ANSWERED, 30, false)]
    fn one_entry_decides_where_it_is_alone(
        #[case] protocol: u8,
        #[case] flags: u32,
        #[case] age: u64,
        #[case] expired: bool,
    ) {
        let entries = [flow(protocol, flags, 1_000)];
        assert_eq!(is_expired(&entries, (1_000 + age) * SECOND), expired);
        assert!(!expired || may_be_expired(&entries[0], (1_000 + age) * SECOND));
    }

    #[test]
    fn an_entry_that_was_seen_keeps_its_partners() {
        let entries = [flow(PROTOCOL_UDP, 0, 10), flow(PROTOCOL_UDP, 0, 1_000)];
        assert!(may_be_expired(&entries[0], 1_010 * SECOND));
        assert!(!is_expired(&entries, 1_010 * SECOND));
    }

    #[test]
    fn two_halves_of_a_close_make_a_whole() {
        let entries = [
            flow(PROTOCOL_TCP, FLOW_ANSWERED | FLOW_CLIENT_CLOSED, 1_000),
            flow(PROTOCOL_TCP, FLOW_ANSWERED | FLOW_BACKEND_CLOSED, 1_000),
        ];
        assert!(may_be_expired(&entries[0], 1_060 * SECOND));
        assert!(is_expired(&entries, 1_060 * SECOND));
        assert!(!is_expired(&entries[..1], 1_060 * SECOND));
    }

    #[test]
    fn a_stamp_from_the_future_is_no_age() {
        assert!(!is_expired(&[flow(PROTOCOL_UDP, 0, 1_000)], 999 * SECOND));
    }

    #[test]
    fn a_walk_counts_what_it_has_seen_when_it_ends() {
        let mut walk = Walk::<[u8; 4]>::default();
        walk.advance(Some(Cursor::Bucket(7)), 100);
        assert_eq!(walk.counted, 0);
        walk.advance(None, 20);
        assert_eq!((walk.counted, walk.seen, walk.rest), (120, 0, 0));
        walk.advance(None, 0);
        assert_eq!((walk.counted, walk.rest), (0, REST));
    }
}
