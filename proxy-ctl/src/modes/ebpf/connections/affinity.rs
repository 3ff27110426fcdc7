//! Forgets clients whose affinity has expired, a slice of the maps at a time, and counts how many
//! the kernel has evicted.
//!
//! The kernel does not count its evictions. They are computed: the clients that programs have
//! remembered, without those that were forgotten and those that a walk has found.

use proxy_common::{
    family::{V4, V6},
    layout::{Affinity, AffinityKey},
    reason::Reason,
};

use super::expire::Walk;
use crate::modes::ebpf::{
    Error,
    maps::{
        family::MapFamily,
        handles::{CommonMaps, FamilyMaps, NamedMap},
    },
};

/// Number of calls to leave out after a walk. An expired entry is harmless until it is removed,
/// because the programs compare it with the timeout themselves.
const REST: u32 = 9;

/// State of the walk through both maps, one after the other.
#[derive(Debug, Default)]
pub(crate) struct AffinityCollector {
    v4: Walk<AffinityKey<[u8; 4]>>,
    v6: Walk<AffinityKey<[u8; 16]>>,
    walk: Option<Begun>,
    rest: u32,
    tally: Tally,
}

/// A walk that is not over yet.
#[derive(Clone, Copy, Debug)]
struct Begun {
    is_in_v6: bool,
    /// Number of clients that programs had ever remembered when the walk began.
    remembered: u64,
    /// Number of clients that this process had forgotten when the walk began.
    forgotten: u64,
}

#[derive(Debug, Default)]
struct Tally {
    forgotten: u64,
    /// Number of clients that were gone when the first walk ended. It is negative if programs have
    /// lost counts.
    before: Option<i64>,
    /// Lower bound of the number of evicted clients. Clients that come and go during a walk are
    /// counted by the next walk.
    evicted: u64,
}

impl Tally {
    /// Counts evictions after a walk that has met `met` clients. `remembered` is the number of
    /// clients that programs have ever remembered, up to the end of the walk.
    fn count(&mut self, begun: Begun, remembered: u64, met: u64) {
        let kept = met.saturating_sub(self.forgotten - begun.forgotten);
        let gone = |remembered: u64| remembered.wrapping_sub(kept + self.forgotten) as i64;
        match self.before {
            None => self.before = Some(gone(remembered)),
            Some(before) => {
                let evicted = u64::try_from(gone(begun.remembered) - before).unwrap_or(0);
                self.evicted = self.evicted.max(evicted);
            }
        }
    }
}

impl AffinityCollector {
    /// Returns how many clients full maps have evicted since this process found them.
    pub(crate) fn evicted(&self) -> u64 {
        self.tally.evicted
    }

    /// Returns the number of entries of each map, as of the last complete walk.
    pub(crate) fn counted(&self) -> [(&'static str, u64); 2] {
        [(V4::AFFINITY, self.v4.counted), (V6::AFFINITY, self.v6.counted)]
    }

    pub(crate) fn collect(
        &mut self,
        common: &CommonMaps,
        v4: &FamilyMaps<V4>,
        v6: &FamilyMaps<V6>,
        now: u64,
    ) -> Result<(), Error> {
        if self.rest > 0 {
            self.rest -= 1;
            return Ok(());
        }
        let remembered = || common.counted(Reason::ClientRemembered);
        let begun = match &mut self.walk {
            Some(begun) => begun,
            walk => {
                let forgotten = self.tally.forgotten;
                walk.insert(Begun { is_in_v6: false, remembered: remembered()?, forgotten })
            }
        };
        if !begun.is_in_v6 {
            begun.is_in_v6 = forget(&mut self.v4, &mut self.tally, common, &v4.affinity, now)?;
        } else if forget(&mut self.v6, &mut self.tally, common, &v6.affinity, now)? {
            self.tally.count(*begun, remembered()?, self.v4.counted + self.v6.counted);
            self.walk = None;
            self.rest = REST;
        }
        Ok(())
    }
}

/// Goes on through one map, and returns true if its end was reached.
fn forget<A: proxy_common::layout::Address + Default>(
    walk: &mut Walk<AffinityKey<A>>,
    tally: &mut Tally,
    common: &CommonMaps,
    map: &NamedMap<AffinityKey<A>, Affinity>,
    now: u64,
) -> Result<bool, Error> {
    walk.go_on(map, |slice| {
        let before = tally.forgotten;
        for (key, affinity) in slice {
            let service = common.services.get(key.service as usize).unwrap_or_default();
            if affinity.has_expired(service.affinity_seconds, now) {
                tally.forgotten += u64::from(forget_one(map, key, service.affinity_seconds, now)?);
            }
        }
        Ok(tally.forgotten - before)
    })
}

/// Forgets a client, unless a connection has renewed its affinity meanwhile. Returns true if the
/// entry is gone.
fn forget_one<A: proxy_common::layout::Address + Default>(
    map: &NamedMap<AffinityKey<A>, Affinity>,
    key: &AffinityKey<A>,
    seconds: u32,
    now: u64,
) -> Result<bool, Error> {
    match map.take(key)? {
        Some(last) if last.has_expired(seconds, now) => Ok(true),
        Some(last) => Ok(!map.insert(key, &last)?),
        None => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts a walk that has met `met` clients and forgotten `forgotten` of them. Returns how many
    /// are known to be evicted then.
    fn walk(tally: &mut Tally, remembered: [u64; 2], met: u64, forgotten: u64) -> u64 {
        let begun = Begun { is_in_v6: true, remembered: remembered[0], forgotten: tally.forgotten };
        tally.forgotten += forgotten;
        tally.count(begun, remembered[1], met);
        tally.evicted
    }

    #[test]
    fn what_is_neither_found_nor_forgotten_was_evicted() {
        let mut tally = Tally::default();
        assert_eq!(walk(&mut tally, [100, 100], 60, 10), 0, "40 were gone when the process began");
        assert_eq!(walk(&mut tally, [100, 100], 50, 0), 0);
        assert_eq!(walk(&mut tally, [130, 130], 75, 5), 5);
        assert_eq!(walk(&mut tally, [130, 130], 70, 70), 5);
    }

    #[test]
    fn counts_that_programs_have_lost_before_hide_nothing_later() {
        let mut tally = Tally::default();
        assert_eq!(walk(&mut tally, [10, 10], 13, 0), 0);
        assert_eq!(walk(&mut tally, [30, 30], 26, 0), 7);
    }

    #[test]
    fn clients_that_come_during_a_walk_hide_evictions_for_that_time_only() {
        let mut tally = Tally::default();
        assert_eq!(walk(&mut tally, [0, 8], 5, 0), 0);
        assert_eq!(walk(&mut tally, [10, 16], 12, 0), 0);
        assert_eq!(walk(&mut tally, [20, 20], 12, 0), 5, "8 that it did not meet may have come behind it");
    }
}
