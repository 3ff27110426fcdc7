//! The maps of counts of connections, for service ports that use least connection.

use std::path::Path;

use proxy_common::{
    inventory::{Limit, map_name},
    layout::{Collected, Connections, is_backend},
};
use rustc_hash::{FxHashMap, FxHashSet};

use super::NamedMap;
use crate::modes::ebpf::Error;

/// The maps of counts. There is one of each for both families, because backend ids are unique
/// across families.
#[derive(Debug)]
pub(crate) struct ConnectionMaps {
    connections: NamedMap<u32, Connections>,
    collected: NamedMap<u32, Collected>,
}

impl ConnectionMaps {
    pub(crate) fn open(folder: &Path) -> Result<Self, Error> {
        Ok(Self {
            connections: NamedMap::open(folder, map_name::connections, Some(Limit::Backends))?,
            collected: NamedMap::open(folder, map_name::collected, Some(Limit::Backends))?,
        })
    }

    /// Reads the counts by backend id.
    pub(crate) fn read(&self) -> Result<FxHashMap<u32, Counted>, Error> {
        let mut connections = self.connections.read_all()?;
        connections.retain(|(id, _)| is_backend(*id));
        if connections.is_empty() {
            return Ok(FxHashMap::default());
        }
        let collected: FxHashMap<_, _> = self.collected.read_all()?.into_iter().collect();
        let counted = |(id, connections)| {
            let collected = collected.get(&id).copied().unwrap_or_default();
            (id, Counted { connections, collected })
        };
        Ok(connections.into_iter().map(counted).collect())
    }

    /// Returns the number of entries of each map.
    pub(crate) fn used(&self) -> Result<[(&'static str, u64); 2], Error> {
        let used = [self.connections.read_all()?.len(), self.collected.read_all()?.len()];
        Ok([(map_name::connections, used[0] as u64), (map_name::collected, used[1] as u64)])
    }

    /// Notes that `connections` more connections of the backend have ended. Nothing is noted if the
    /// programs have counted none of the backend, or have forgotten it.
    pub(crate) fn collect(&self, backend: u32, kind: Kind, connections: i64) -> Result<(), Error> {
        if self.connections.get(&backend)?.is_none() {
            return Ok(());
        }
        let mut collected = self.collected.get(&backend)?.unwrap_or_default();
        let count = match kind {
            Kind::Flows => &mut collected.flows,
            Kind::Sockets => &mut collected.sockets,
        };
        *count = count.wrapping_add_signed(connections);
        self.collected.set(&backend, &collected)
    }

    /// Corrects the count of an id, also if the programs have counted nothing of it yet.
    pub(crate) fn count_anew(&self, id: u32, missed: i64) -> Result<(), Error> {
        // Without an entry of the programs' own map, the correction would not count.
        self.connections.insert(&id, &Connections::default())?;
        self.collect(id, Kind::Flows, missed)
    }

    pub(crate) fn flows_of(&self, id: u32) -> Result<Tally, Error> {
        let connections = self.connections.get(&id)?.unwrap_or_default();
        let collected = self.collected.get(&id)?.unwrap_or_default();
        Ok(Counted { connections, collected }.tally(Kind::Flows))
    }

    /// Returns the backends of both maps, because a controller may have been killed between two
    /// writes.
    pub(crate) fn backends(&self) -> Result<FxHashSet<u32>, Error> {
        let (connections, collected) = (self.connections.read_all()?, self.collected.read_all()?);
        let ids = connections.into_iter().map(|(id, _)| id);
        let ids = ids.chain(collected.into_iter().map(|(id, _)| id));
        Ok(ids.filter(|id| is_backend(*id)).collect())
    }

    pub(crate) fn forget_all(&self) -> Result<(), Error> {
        self.backends()?.into_iter().try_for_each(|backend| self.forget(backend))
    }

    pub(crate) fn forget(&self, backend: u32) -> Result<(), Error> {
        // The order matters: `collected` has no effect on a backend that `connections` does not
        // have.
        self.connections.remove(&backend)?;
        self.collected.remove(&backend).map(drop)
    }
}

/// The counts of one backend in both maps.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counted {
    connections: Connections,
    collected: Collected,
}

impl Counted {
    pub(crate) fn open(&self) -> u64 {
        self.connections.open(self.collected.sum())
    }

    pub(crate) fn tally(&self, kind: Kind) -> Tally {
        let Self { connections, collected } = self;
        match kind {
            Kind::Flows => Tally {
                begun: connections.flows_opened,
                ended: connections.flows_closed.wrapping_add(collected.flows),
            },
            Kind::Sockets => Tally {
                begun: connections.sockets_opened,
                ended: connections.sockets_closed.wrapping_add(collected.sockets),
            },
        }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    Flows,
    Sockets,
}

/// Connections that were counted as begun and as ended.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    begun: u64,
    ended: u64,
}

impl Tally {
    /// Returns how many more connections have ended than are counted. The number is negative if
    /// fewer have.
    ///
    /// `before` is the tally when a walk began that has met `seen` connections, and `self` the one
    /// now that it is over. The walk may or may not have met connections that have begun or ended
    /// meanwhile.
    pub(crate) const fn missed(self, before: Self, seen: u64) -> i64 {
        let begun = self.begun.wrapping_sub(before.begun).cast_signed();
        let ended = self.ended.wrapping_sub(before.ended).cast_signed();
        let counted = self.begun.wrapping_sub(self.ended).cast_signed();
        let (least, most) =
            (seen.cast_signed().saturating_sub(ended), seen.cast_signed().saturating_add(begun));
        if counted > most {
            counted.wrapping_sub(most)
        } else if counted < least {
            counted.wrapping_sub(least)
        } else {
            0
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// The numbers that had begun and ended before a walk and after it, the number that the walk
    /// has met, and the correction.
    #[rstest]
    #[case::none((0, 0), (0, 0), 0, 0)]
    #[case::all_are_met((7, 3), (7, 3), 4, 0)]
    #[case::an_end_was_missed((7, 3), (7, 3), 3, 1)]
    #[case::a_beginning_was_missed((7, 3), (7, 3), 5, -1)]
    #[case::more_ended_than_began((3, 7), (3, 7), 0, -4)]
    #[case::one_began_and_was_met((7, 3), (8, 3), 5, 0)]
    #[case::one_began_and_was_not_met((7, 3), (8, 3), 4, 0)]
    #[case::one_ended_and_was_met((7, 3), (7, 4), 4, 0)]
    #[case::one_ended_and_was_not_met((7, 3), (7, 4), 3, 0)]
    #[case::one_came_and_one_went((7, 3), (8, 4), 4, 0)]
    #[case::more_than_what_came_explains((7, 3), (8, 4), 7, -2)]
    #[case::less_than_what_went_explains((9, 3), (10, 4), 3, 2)]
    #[case::nothing_was_counted_before((0, 0), (5, 0), 5, 0)]
    #[case::beyond_the_largest_number((u64::MAX, u64::MAX - 4), (1, u64::MAX - 4), 6, 0)]
    fn what_was_missed(
        #[case] before: (u64, u64),
        #[case] now: (u64, u64),
        #[case] seen: u64,
        #[case] expected: i64,
    ) {
        let tally = |(begun, ended)| Tally { begun, ended };
        let missed = tally(now).missed(tally(before), seen);
        assert_eq!(missed, expected);
        let right = tally((now.0, now.1.wrapping_add_signed(missed)));
        assert_eq!(right.missed(tally((before.0, before.1.wrapping_add_signed(missed))), seen), 0);
    }
}
