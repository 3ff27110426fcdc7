//! Allocates slots and service ids. This module is pure: it knows nothing of maps.
//!
//! A range that is given back may still be read by a program that is running at this moment. So it
//! is not given out again before a grace period has passed.

use std::collections::{BTreeMap, BTreeSet};

/// `count` indexes from `first` on.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(crate) struct Range {
    pub(crate) first: u32,
    pub(crate) count: u32,
}

impl Range {
    fn end(self) -> u32 {
        self.first.saturating_add(self.count)
    }
}

/// The indexes `0..capacity`, given out in contiguous ranges. A request gets the smallest free
/// range that is large enough.
#[derive(Clone, Debug)]
pub(crate) struct Ranges {
    capacity: u32,
    /// Free ranges, first index → count. Neighbours are always merged.
    free: BTreeMap<u32, u32>,
    /// The same free ranges as (count, first).
    by_size: BTreeSet<(u32, u32)>,
    free_count: u32,
    pending_free: Vec<Range>,
}

impl Ranges {
    pub(crate) fn new(capacity: u32) -> Self {
        let mut ranges = Self {
            capacity,
            free: BTreeMap::new(),
            by_size: BTreeSet::new(),
            free_count: 0,
            pending_free: Vec::new(),
        };
        ranges.insert(Range { first: 0, count: capacity });
        ranges
    }

    /// Returns the same indexes, with all of them free but those that wait for a grace period.
    pub(super) fn without_owners(&self) -> Self {
        let mut fresh = Self::new(self.capacity);
        for range in &self.pending_free {
            if fresh.claim(*range) {
                fresh.pending_free.push(*range);
            }
        }
        fresh
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Raises the capacity. The added indexes are free.
    pub(crate) fn grow(&mut self, capacity: u32) {
        let added = Range { first: self.capacity, count: capacity.saturating_sub(self.capacity) };
        self.capacity += added.count;
        self.release(added);
    }

    /// Returns how many indexes are owned or wait for a grace period.
    pub(crate) fn used(&self) -> u32 {
        self.capacity - self.free_count
    }

    fn insert(&mut self, range: Range) {
        if range.count > 0 {
            self.free.insert(range.first, range.count);
            self.by_size.insert((range.count, range.first));
            self.free_count += range.count;
        }
    }

    fn take(&mut self, range: Range) {
        self.free.remove(&range.first);
        self.by_size.remove(&(range.count, range.first));
        self.free_count -= range.count;
    }

    /// Returns true if [`Ranges::allocate`] would find a range now.
    pub(super) fn has_room_for(&self, count: u32) -> bool {
        count == 0 || self.by_size.range((count, 0)..).next().is_some()
    }

    /// Allocates a range. Returns `None` if no free range is large enough now.
    pub(crate) fn allocate(&mut self, count: u32) -> Option<Range> {
        if count == 0 {
            return Some(Range::default());
        }
        let (found, first) = *self.by_size.range((count, 0)..).next()?;
        self.take(Range { first, count: found });
        self.insert(Range { first: first + count, count: found - count });
        Some(Range { first, count })
    }

    /// Takes exactly this range. Returns false if a part of it is not free.
    pub(crate) fn claim(&mut self, range: Range) -> bool {
        if range.count == 0 {
            return true;
        }
        let Some((&first, &count)) = self.free.range(..=range.first).next_back() else { return false };
        let around = Range { first, count };
        if range.first.checked_add(range.count).is_none_or(|end| end > around.end()) {
            return false;
        }
        self.take(around);
        self.insert(Range { first, count: range.first - first });
        self.insert(Range { first: range.end(), count: around.end() - range.end() });
        true
    }

    /// Gives back a range that no program can have seen.
    pub(crate) fn release(&mut self, range: Range) {
        if range.count == 0 {
            return;
        }
        let mut merged = range;
        if let Some((&first, &count)) = self.free.range(..range.first).next_back() {
            let before = Range { first, count };
            if before.end() == range.first {
                self.take(before);
                merged = Range { first, count: count + merged.count };
            }
        }
        if let Some(&count) = self.free.get(&range.end()) {
            self.take(Range { first: range.end(), count });
            merged.count += count;
        }
        self.insert(merged);
    }

    /// Gives back a range that programs may be reading. It is free after the next
    /// [`Ranges::grace_period_over`].
    pub(crate) fn free_later(&mut self, range: Range) {
        if range.count > 0 {
            self.pending_free.push(range);
        }
    }

    pub(crate) fn has_pending_free(&self) -> bool {
        !self.pending_free.is_empty()
    }

    /// Frees everything that was given back before the grace period began.
    pub(crate) fn grace_period_over(&mut self) {
        for range in std::mem::take(&mut self.pending_free) {
            self.release(range);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_smallest_range_that_fits_is_taken() {
        let mut ranges = Ranges::new(100);
        let (small, large) = (Range { first: 10, count: 4 }, Range { first: 20, count: 80 });
        assert!(ranges.claim(Range { first: 0, count: 100 }));
        ranges.release(small);
        ranges.release(large);
        assert_eq!(ranges.allocate(3), Some(Range { first: 10, count: 3 }));
        assert_eq!(ranges.allocate(3), Some(Range { first: 20, count: 3 }));
    }

    #[test]
    fn neighbours_merge() {
        let mut ranges = Ranges::new(30);
        let parts = [ranges.allocate(10), ranges.allocate(10), ranges.allocate(10)].map(Option::unwrap);
        assert_eq!(ranges.allocate(1), None);
        for part in [parts[0], parts[2], parts[1]] {
            ranges.release(part);
        }
        assert_eq!(ranges.allocate(30), Some(Range { first: 0, count: 30 }));
    }

    #[test]
    fn a_claim_of_something_owned_changes_nothing() {
        let mut ranges = Ranges::new(10);
        assert!(ranges.claim(Range { first: 2, count: 3 }));
        for overlapping in
            [Range { first: 4, count: 2 }, Range { first: 0, count: 3 }, Range { first: 9, count: 2 }]
        {
            assert!(!ranges.claim(overlapping));
        }
        assert!(!ranges.claim(Range { first: u32::MAX, count: 2 }));
        assert_eq!(ranges.used(), 3);
    }

    #[test]
    fn what_is_freed_later_stays_so_when_owners_are_forgotten() {
        let mut ranges = Ranges::new(10);
        let (kept, gone) = (ranges.allocate(4).unwrap(), ranges.allocate(4).unwrap());
        ranges.free_later(gone);
        let mut fresh = ranges.without_owners();
        assert_eq!(fresh.used(), 4);
        assert!(fresh.claim(kept));
        assert_eq!(fresh.allocate(3), None);
        fresh.grace_period_over();
        assert_eq!(fresh.allocate(6), Some(Range { first: 4, count: 6 }));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Allocate(u32),
        FreeLater(usize),
        Release(usize),
        GracePeriod,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..20_u32).prop_map(Step::Allocate),
            3 => any::<usize>().prop_map(Step::FreeLater),
            1 => any::<usize>().prop_map(Step::Release),
            1 => Just(Step::GracePeriod),
        ]
    }

    proptest! {
        #[test]
        fn nothing_is_owned_twice_nor_given_out_before_a_grace_period(
            steps in prop::collection::vec(step(), 1..200)
        ) {
            const CAPACITY: u32 = 100;
            let mut ranges = Ranges::new(CAPACITY);
            let mut owned: Vec<Range> = Vec::new();
            let mut waiting: Vec<Range> = Vec::new();
            for step in steps {
                match step {
                    Step::Allocate(count) => if let Some(range) = ranges.allocate(count) {
                        prop_assert_eq!(range.count, count);
                        if count > 0 { owned.push(range); }
                    },
                    Step::FreeLater(which) => if !owned.is_empty() {
                        let range = owned.swap_remove(which % owned.len());
                        ranges.free_later(range);
                        waiting.push(range);
                    },
                    Step::Release(which) => if !owned.is_empty() {
                        ranges.release(owned.swap_remove(which % owned.len()));
                    },
                    Step::GracePeriod => {
                        ranges.grace_period_over();
                        waiting.clear();
                    }
                }
                let mut is_taken = vec![false; CAPACITY as usize];
                for range in owned.iter().chain(&waiting) {
                    for index in range.first..range.end() {
                        prop_assert!(!std::mem::replace(&mut is_taken[index as usize], true));
                    }
                }
                let taken = is_taken.iter().filter(|taken| **taken).count() as u32;
                prop_assert_eq!(ranges.used(), taken);
                // Neighbours are merged, so there is a free range of the size of the largest gap.
                let largest = is_taken.split(|taken| *taken).map(<[bool]>::len).max().unwrap_or(0) as u32;
                for (count, fits) in [(largest, true), (largest + 1, false)] {
                    prop_assert_eq!(ranges.has_room_for(count), fits);
                    prop_assert_eq!(ranges.clone().allocate(count).is_some(), fits);
                }
            }
        }
    }
}
