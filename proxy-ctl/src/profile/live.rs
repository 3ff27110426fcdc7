//! Sampled blocks of memory that are not freed yet.

use std::sync::atomic::{
    AtomicU64, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};

use super::stacks::{Place, mix};

/// Places of one block: a cache line of addresses.
const WAYS: usize = 8;
/// No address of a block: its place is being written.
const RESERVED: usize = 1;
const SIZE_BITS: u32 = 48;

/// A sampled block.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Block {
    pub(super) stack: Place,
    /// Below 2^48.
    pub(super) size: u64,
}

/// Up to `SETS` * 8 blocks by address. Every freed block is looked up here: that reads one cache line.
pub(super) struct Live<const SETS: usize> {
    sets: [Set; SETS],
}

#[repr(align(64))]
struct Set {
    addresses: [AtomicUsize; WAYS],
    blocks: [AtomicU64; WAYS],
}

impl<const SETS: usize> Live<SETS> {
    pub(super) const fn new() -> Self {
        Self {
            sets: [const {
                Set {
                    addresses: [const { AtomicUsize::new(0) }; WAYS],
                    blocks: [const { AtomicU64::new(0) }; WAYS],
                }
            }; SETS],
        }
    }

    /// False: there is no room for it.
    pub(super) fn insert(&self, address: usize, block: Block) -> bool {
        let set = self.set(address);
        let reserve = |place: &AtomicUsize| place.compare_exchange(0, RESERVED, Acquire, Relaxed).is_ok();
        let Some(way) = set.addresses.iter().position(reserve) else { return false };
        let word = u64::from(block.stack.number()) << SIZE_BITS | block.size & ((1 << SIZE_BITS) - 1);
        set.blocks[way].store(word, Relaxed);
        set.addresses[way].store(address, Release);
        true
    }

    /// Only who frees the block asks for its address, so that nobody else removes it meanwhile.
    pub(super) fn remove(&self, address: usize) -> Option<Block> {
        let set = self.set(address);
        let way = set.addresses.iter().position(|found| found.load(Acquire) == address)?;
        let word = set.blocks[way].load(Relaxed);
        set.addresses[way].store(0, Release);
        let stack = Place::of((word >> SIZE_BITS) as u16);
        Some(Block { stack, size: word & ((1 << SIZE_BITS) - 1) })
    }

    fn set(&self, address: usize) -> &Set {
        &self.sets[mix(address as u64) as usize % SETS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(size: u64) -> Block {
        Block { stack: Place::of(u16::MAX), size }
    }

    #[test]
    fn a_block_is_found_once() {
        let live: Live<4> = Live::new();
        assert!(live.insert(0x1000, block((1 << 48) - 1)) && live.insert(0x2000, block(7)));
        assert_eq!(live.remove(0x3000), None);
        assert_eq!(live.remove(0x1000), Some(block((1 << 48) - 1)));
        assert_eq!(live.remove(0x1000), None);
        assert_eq!(live.remove(0x2000), Some(block(7)));
    }

    #[test]
    fn a_full_set_takes_no_more_until_one_is_freed() {
        let live: Live<1> = Live::new();
        assert!((1..=8).all(|number| live.insert(number * 16, block(1))));
        assert!(!live.insert(0x1000, block(1)));
        assert!(live.remove(32).is_some());
        assert!(live.insert(0x1000, block(1)));
    }
}
