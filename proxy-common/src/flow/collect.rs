//! Removes a flow that nothing is heard of: all its entries together or none, while the programs go on.

use core::time::Duration;

use super::{FlowLifetimes, Stage};
use crate::layout::{Address, DIRECT_FLOWS, FLOW_COUNTED, FLOW_DSR, Flow, FlowKey, FlowState};

/// The flow tables from user space.
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

fn take<A: Address, T: StoredFlows<A>>(
    tables: &T,
    stage: Stage,
    key: &FlowKey<A>,
) -> Result<Option<Flow<A>>, T::Error> {
    let taken = tables.take(stage, key)?;
    if let Some(flow) = &taken {
        count(tables, (stage, key), flow, 1)?;
    }
    Ok(taken)
}

fn put_back<A: Address, T: StoredFlows<A>>(
    tables: &T,
    stage: Stage,
    key: &FlowKey<A>,
    flow: &Flow<A>,
) -> Result<(), T::Error> {
    if tables.put_back(stage, key, flow)? { count(tables, (stage, key), flow, -1) } else { Ok(()) }
}

/// Counts an entry that is taken, or, by -1, put back.
fn count<A: Address, T: StoredFlows<A>>(
    tables: &T,
    (stage, key): (Stage, &FlowKey<A>),
    flow: &Flow<A>,
    taken: i64,
) -> Result<(), T::Error> {
    if is_counted(stage, key, flow) {
        tables.count_collected(flow.backend_id, taken)?;
    }
    let is_direct = stage == Stage::Established && flow.flags & FLOW_DSR != 0 && *key == flow.client_key();
    if is_direct { tables.count_collected(DIRECT_FLOWS, taken) } else { Ok(()) }
}

/// Each of three keys in each of two tables.
const MOST_ENTRIES: usize = 6;

/// Entries of one flow, and where they are.
struct Entries<A> {
    places: [(Stage, FlowKey<A>); MOST_ENTRIES],
    flows: [Flow<A>; MOST_ENTRIES],
    count: usize,
}

impl<A: Address> Entries<A> {
    fn new() -> Self {
        let place = (Stage::Opening, FlowKey::default());
        Self { places: [place; MOST_ENTRIES], flows: [Flow::default(); MOST_ENTRIES], count: 0 }
    }

    fn push(&mut self, place: (Stage, FlowKey<A>), flow: Flow<A>) {
        (self.places[self.count], self.flows[self.count]) = (place, flow);
        self.count += 1;
    }

    fn flows(&self) -> &[Flow<A>] {
        &self.flows[..self.count]
    }

    fn iter(&self) -> impl Iterator<Item = (&(Stage, FlowKey<A>), &Flow<A>)> {
        self.places.iter().zip(self.flows())
    }
}

/// `is_over` judges by all entries of the flow. Answers how many were removed.
pub fn remove_if<A: Address, T: StoredFlows<A>>(
    tables: &T,
    flow: &Flow<A>,
    is_over: impl Fn(&[Flow<A>]) -> bool,
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
            if let Some(entry) = tables.get(stage, &key)?.filter(|entry| entry.is_same(flow)) {
                found.push((stage, key), entry);
            }
        }
    }
    if !is_over(found.flows()) {
        return Ok(0);
    }
    let mut taken = Entries::new();
    for ((stage, key), _) in found.iter() {
        match take(tables, *stage, key)? {
            Some(entry) if entry.is_same(flow) => taken.push((*stage, *key), entry),
            // The key has passed to another flow in this moment.
            Some(entry) => put_back(tables, *stage, key, &entry)?,
            None => {}
        }
    }
    if is_over(taken.flows()) {
        return Ok(taken.count);
    }
    // A packet has come since.
    let mut outcome = Ok(0);
    for ((stage, key), entry) in taken.iter() {
        outcome = outcome.and(put_back(tables, *stage, key, entry).map(|()| 0));
    }
    outcome
}

pub fn age<A>(flow: &Flow<A>, now: u64) -> Duration {
    // Another CPU may have stamped it a moment ahead of ours.
    Duration::from_nanos(now.saturating_sub(flow.last_seen))
}

/// Judged by all entries of a flow. `now` in nanoseconds since boot, suspend included.
pub fn is_expired<A>(entries: &[Flow<A>], lifetimes: &FlowLifetimes, now: u64) -> bool {
    let state = entries.iter().fold(FlowState::default(), |state, flow| state.union(&flow.state));
    entries.iter().all(|flow| age(flow, now) >= lifetimes.of(flow.protocol, state))
}
