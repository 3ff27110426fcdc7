//! Allocates the slots of the maps `endpoints-<n>`. This module has no side effects.
//!
//! Slots are allocated in blocks of [`SLOTS_OF_BLOCK`]. An endpoint set owns whole blocks, so that
//! it can grow without moving. A slot without an element costs nothing.

use std::collections::BTreeMap;

const SLOTS_OF_BLOCK: u32 = 1024;
/// The number of blocks whose slots are in the same nftables map.
const BLOCKS_OF_MAP: u32 = 64;
const BLOCKS: u32 = u32::MAX / SLOTS_OF_BLOCK;

/// Consecutive slots that start at the beginning of a block.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Slots {
    first_block: u32,
    blocks: u32,
}

impl Slots {
    pub(super) fn first(self) -> u32 {
        self.first_block * SLOTS_OF_BLOCK
    }

    /// Returns the number of the map in which the slots are.
    pub(super) fn map(self) -> u32 {
        self.first_block / BLOCKS_OF_MAP
    }

    pub(super) fn hold(self, count: usize) -> bool {
        blocks(count) <= self.blocks
    }
}

/// Returns the number of the map with the endpoint set whose first slot this is.
pub(super) fn map_of(first: u32) -> u32 {
    first / SLOTS_OF_BLOCK / BLOCKS_OF_MAP
}

fn blocks(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX).div_ceil(SLOTS_OF_BLOCK).max(1)
}

/// The blocks in use: the first block of each endpoint set, and the number of its blocks.
#[derive(Clone, Debug, Default)]
pub(super) struct Blocks {
    taken: BTreeMap<u32, u32>,
    /// The block from which the search begins. All blocks before it are taken.
    search_from: u32,
}

impl Blocks {
    /// Allocates the first free blocks that have room for `count` slots. `None`: no block is free,
    /// because there are about four million endpoint sets.
    pub(super) fn allocate(&mut self, count: usize) -> Option<Slots> {
        let wanted = blocks(count);
        let mut first = self.search_from;
        for (&taken, &number) in self.taken.range(self.search_from..) {
            if taken.checked_sub(first).is_some_and(|gap| gap >= wanted) {
                break;
            }
            first = taken + number;
        }
        if first.checked_add(wanted).is_none_or(|end| end > BLOCKS) {
            return None;
        }
        self.taken.insert(first, wanted);
        if wanted == 1 {
            self.search_from = first + 1;
        }
        Some(Slots { first_block: first, blocks: wanted })
    }

    /// Takes the slots that a rule in the kernel uses. `None`: they are invalid, or another
    /// endpoint set has some of them.
    pub(super) fn claim(&mut self, first: u32, count: u32) -> Option<Slots> {
        let slots = Slots { first_block: first / SLOTS_OF_BLOCK, blocks: blocks(count as usize) };
        let end = slots.first_block.checked_add(slots.blocks)?;
        let before = self.taken.range(..end).next_back();
        let overlaps = before.is_some_and(|(first, number)| first + number > slots.first_block);
        if !first.is_multiple_of(SLOTS_OF_BLOCK) || end > BLOCKS || overlaps {
            return None;
        }
        self.taken.insert(slots.first_block, slots.blocks);
        Some(slots)
    }

    /// Takes these slots again. Returns false if another endpoint set has some of them.
    pub(super) fn claim_all(&mut self, slots: Slots) -> bool {
        self.claim(slots.first(), slots.blocks * SLOTS_OF_BLOCK).is_some()
    }

    pub(super) fn release(&mut self, slots: Slots) {
        self.taken.remove(&slots.first_block);
        self.search_from = self.search_from.min(slots.first_block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_get_blocks_of_their_own_in_maps_that_are_shared() {
        let mut blocks = Blocks::default();
        let all: Vec<_> = (0..65).map(|_| blocks.allocate(10).unwrap()).collect();
        assert_eq!(all[..3].iter().map(|slots| slots.first()).collect::<Vec<_>>(), [0, 1024, 2048]);
        assert_eq!((all[63].map(), all[64].map()), (0, 1));
        assert!(all[0].hold(1024) && !all[0].hold(1025));
    }

    #[test]
    fn what_is_released_is_given_out_again_where_it_is_large_enough() {
        let mut blocks = Blocks::default();
        let [first, second, third] = [10, 10, 10].map(|count| blocks.allocate(count).unwrap());
        blocks.release(first);
        blocks.release(second);
        let large = blocks.allocate(3000).unwrap();
        assert_eq!(large.first(), third.first() + 1024);
        assert_eq!(blocks.allocate(1500), Some(Slots { first_block: 0, blocks: 2 }));
        assert_eq!(blocks.allocate(1).unwrap().first(), large.first() + 3 * 1024);
    }

    #[test]
    fn what_the_kernel_has_is_claimed_once() {
        let mut blocks = Blocks::default();
        let slots = blocks.claim(2048, 1500).unwrap();
        assert_eq!((slots.first(), slots.hold(2048)), (2048, true));
        for (first, count) in [(2048, 1), (3072, 1), (1024, 1025), (5, 1), (u32::MAX - 1023, 2000)] {
            assert_eq!(blocks.claim(first, count), None, "{first} {count}");
        }
        assert_eq!(blocks.allocate(1).unwrap().first(), 0);
        assert_eq!(blocks.allocate(1).unwrap().first(), 1024);
        assert_eq!(blocks.allocate(1).unwrap().first(), 4096);
    }
}
