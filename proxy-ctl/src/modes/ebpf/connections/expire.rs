//! Removes flows whose lifetime has passed without a packet, a slice of the maps at a time.

use std::time::{Duration, Instant};

use aya::Pod;
use proxy_common::{
    flow::{
        FlowLifetimes, Stage,
        collect::{Entry, StoredFlows, is_counted, remove_expired, remove_if, unproven},
    },
    layout::{FLOW_OF_NETFILTER, Flow, FlowKey},
};

use super::{
    count::{Recount, UnprovenRecount},
    netfilter_ports::{EndedConnections, Judged, not_dialled},
    remapped_ports::RemappedPorts,
};
use crate::{
    modes::ebpf::{
        Error,
        maps::{
            family::MapFamily,
            handles::{FamilyMaps, NamedMap, counts::Kind},
        },
        services::writer::Failures,
    },
    sys::bpf::map::Cursor,
};

/// Number of entries that are read before the next decision whether to go on.
const SLICE: usize = 4_096;
/// Number of entries that one call reads in each map in any case. So a map of half a million
/// entries is walked through in half a minute.
const LEAST: usize = 16_384;
/// Time for which one call goes on in a map while a quarter of what it reads has expired.
const BUDGET: Duration = Duration::from_millis(100);

/// A walk through one map that goes on from call to call.
#[derive(Debug)]
pub(crate) struct Walk<K> {
    cursor: Cursor<K>,
    seen: u64,
    /// Number of entries that the last complete walk has met.
    pub(crate) counted: u64,
    /// Number of walks that have come to the end.
    complete: u64,
    /// Number of calls to leave out, because a walk visits each bucket even of an empty map.
    rest: u32,
}

impl<K> Default for Walk<K> {
    fn default() -> Self {
        Self { cursor: Cursor::Start, seen: 0, counted: 0, complete: 0, rest: 0 }
    }
}

/// Label of the failures to count connections anew.
const COUNTING: &str = "counting connections";

/// Number of calls to leave out after a walk that found nothing. Flows live longer than that.
const REST: u32 = 9;

impl<K: Copy> Walk<K> {
    fn advance(&mut self, next: Option<Cursor<K>>, seen: usize) {
        self.seen += seen as u64;
        match next {
            Some(cursor) => self.cursor = cursor,
            None => {
                self.cursor = Cursor::Start;
                self.counted = std::mem::take(&mut self.seen);
                self.complete += 1;
                self.rest = if self.counted == 0 { REST } else { 0 };
            }
        }
    }
}

impl<K: Pod + Default> Walk<K> {
    /// Goes on through the map for as long as a call may take, and returns true if the end was
    /// reached. `collect` removes what has expired of a slice, and returns how many entries it has
    /// removed.
    pub(crate) fn go_on<V: Pod + Default>(
        &mut self,
        map: &NamedMap<K, V>,
        mut collect: impl FnMut(&[(K, V)]) -> Result<u64, Error>,
    ) -> Result<bool, Error> {
        let start = Instant::now();
        let (mut slice, mut seen) = (Vec::new(), 0);
        loop {
            slice.clear();
            let next = map
                .map()
                .read(self.cursor, SLICE, &mut slice)
                .map_err(|source| Error::Map { name: map.name, source })?;
            self.advance(next, slice.len());
            seen += slice.len();
            let expired = collect(&slice)?;
            let is_worth_it = seen < LEAST || expired * 4 >= slice.len() as u64;
            if next.is_none() || !is_worth_it || start.elapsed() >= BUDGET {
                return Ok(next.is_none());
            }
        }
    }
}

impl<F: MapFamily> FamilyMaps<F> {
    fn flow_map(&self, stage: Stage) -> &NamedMap<FlowKey<F::Address>, Flow<F::Address>> {
        match stage {
            Stage::Opening => &self.opening_flows,
            Stage::Established => &self.flows,
        }
    }
}

impl<F: MapFamily> StoredFlows<F::Address> for FamilyMaps<F> {
    type Error = Error;

    fn get(&self, stage: Stage, key: &FlowKey<F::Address>) -> Result<Option<Flow<F::Address>>, Error> {
        self.flow_map(stage).get(key)
    }

    fn take(&self, stage: Stage, key: &FlowKey<F::Address>) -> Result<Option<Flow<F::Address>>, Error> {
        self.flow_map(stage).take(key)
    }

    fn put_back(
        &self,
        stage: Stage,
        key: &FlowKey<F::Address>,
        flow: &Flow<F::Address>,
    ) -> Result<bool, Error> {
        self.flow_map(stage).insert(key, flow)
    }

    fn count_collected(&self, backend: u32, connections: i64) -> Result<(), Error> {
        // A flow is removed even if there is no room to count its end.
        if let Err(error) = self.connections.collect(backend, Kind::Flows, connections) {
            tracing::debug!(backend, connections, %error, "ends of connections are not counted before the next walk");
        }
        Ok(())
    }
}

/// Garbage collection of both flow maps of one family.
#[derive(Debug)]
pub(crate) struct Collector<F: MapFamily> {
    opening: Walk<FlowKey<F::Address>>,
    established: Walk<FlowKey<F::Address>>,
    /// Count of the connections that the current walk through `flows` meets, if they are counted.
    pub(crate) recount: Option<Recount>,
    /// Count of the entries that prove no client, in a walk through `flows` that is followed from
    /// its beginning.
    unproven: Option<UnprovenRecount>,
    /// Search for entries of connections that netfilter no longer translates.
    pub(crate) ended: EndedConnections<F>,
}

impl<F: MapFamily> Default for Collector<F> {
    fn default() -> Self {
        Self {
            opening: Walk::default(),
            established: Walk::default(),
            recount: None,
            unproven: None,
            ended: EndedConnections::default(),
        }
    }
}

impl<F: MapFamily> Collector<F> {
    /// Returns the number of entries in `opening_flows` and `flows`, as of the last complete walk.
    pub(crate) fn counted(&self) -> (u64, u64) {
        (self.opening.counted, self.established.counted)
    }

    /// Returns the number of complete walks through each map.
    pub(crate) const fn walks(&self) -> [u64; 2] {
        [self.opening.complete, self.established.complete]
    }

    /// Returns true if the last complete walks have found no flow.
    pub(crate) fn is_empty(&self) -> bool {
        self.walks().iter().all(|walks| *walks > 0) && self.counted() == (0, 0)
    }

    /// Removes all flows except TCP flows that the programs translate, when the mode drains. A
    /// client's next datagram is a new flow for the mode that serves then. Ports of netfilter's
    /// connections need not be kept, because this mode opens no more flows.
    pub(crate) fn keep_translated_tcp(maps: &FamilyMaps<F>) -> Result<u64, Error> {
        let mut removed = 0;
        for map in [&maps.opening_flows, &maps.flows] {
            for (_, flow) in map.read_all()? {
                if i32::from(flow.protocol) == libc::IPPROTO_UDP || flow.flags & FLOW_OF_NETFILTER != 0 {
                    removed += remove_if(maps, &flow, |_| true)? as u64;
                }
            }
        }
        Ok(removed)
    }

    /// Makes the walk through `flows` that is about to begin count connections, unless they are
    /// counted already.
    pub(crate) fn count_connections(&mut self, maps: &FamilyMaps<F>) -> Result<(), Error> {
        if self.recount.is_none() && matches!(self.established.cursor, Cursor::Start) {
            self.recount = Some(Recount::begin(&maps.connections, Kind::Flows)?);
        }
        Ok(())
    }

    /// Goes on through both maps and removes expired flows, all entries of a flow together.
    pub(crate) fn collect(
        &mut self,
        maps: &FamilyMaps<F>,
        lifetimes: &FlowLifetimes,
        now: u64,
        (remapped, remapped_ports): (&mut RemappedPorts, &NamedMap<u32, u32>),
        failures: &mut Failures,
    ) {
        for (stage, name) in [(Stage::Opening, F::OPENING_FLOWS), (Stage::Established, F::FLOWS)] {
            if let Err(error) =
                self.walk(maps, stage, lifetimes, now, (&mut *remapped, remapped_ports), failures)
            {
                failures.add(name, error);
            }
        }
    }

    fn walk(
        &mut self,
        maps: &FamilyMaps<F>,
        stage: Stage,
        lifetimes: &FlowLifetimes,
        now: u64,
        (remapped, remapped_ports): (&mut RemappedPorts, &NamedMap<u32, u32>),
        failures: &mut Failures,
    ) -> Result<(), Error> {
        let map = maps.flow_map(stage);
        let walk = match stage {
            Stage::Opening => &mut self.opening,
            Stage::Established => &mut self.established,
        };
        if walk.rest > 0 {
            walk.rest -= 1;
            return Ok(());
        }
        if stage == Stage::Established && matches!(walk.cursor, Cursor::Start) {
            // If counting fails, flows expire all the same.
            self.unproven = match UnprovenRecount::begin::<F::Address>(&maps.connections) {
                Ok(recount) => Some(recount),
                Err(error) => {
                    failures.add(COUNTING, error);
                    None
                }
            };
            self.ended.begin();
        }
        let (recount, recount_unproven, ended) = (&mut self.recount, &mut self.unproven, &mut self.ended);
        let is_at_end = walk.go_on(map, |slice| {
            let mut expired = 0;
            remapped.see(remapped_ports, slice.iter().map(|(_, flow)| *flow))?;
            if let Some(recount) = recount.as_mut().filter(|_| stage == Stage::Established) {
                let counted = slice.iter().filter(|(key, flow)| is_counted(stage, key, flow));
                counted.for_each(|(_, flow)| recount.see(flow.backend_id));
            }
            if let Some(recount) = recount_unproven.as_mut().filter(|_| stage == Stage::Established) {
                slice.iter().for_each(|(key, flow)| recount.see(unproven(stage, key, flow)));
            }
            if stage == Stage::Established {
                for (key, flow) in slice {
                    match ended.judge(flow, maps.may_be_frontend(&flow.frontend)) {
                        Judged::Ended => expired += remove_if(maps, flow, |_| true)? as u64,
                        Judged::Dialled => map.set(key, &not_dialled(flow))?,
                        Judged::Other => {}
                    }
                }
            }
            for (key, flow) in slice {
                let met = Entry { stage, key: *key, flow: *flow };
                expired += remove_expired(maps, &met, lifetimes, now)? as u64;
            }
            Ok(expired)
        });
        if is_at_end.is_err() {
            // This walk has left entries out, and the next one may meet again what it has met. So
            // the counts are dropped.
            (self.recount, self.unproven) = (None, None);
            self.ended.forget_walk();
        }
        if is_at_end? && stage == Stage::Established {
            self.ended.end();
            if let Some(recount) = self.recount.take() {
                failures.see(COUNTING, recount.end(maps));
            }
            if let Some(recount) = self.unproven.take() {
                failures.see(COUNTING, recount.end(&maps.connections));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
