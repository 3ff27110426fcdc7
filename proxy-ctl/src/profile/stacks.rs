//! Counts by call stack, in a fixed number of places.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

/// Places tried for a stack.
const TRIES: usize = 64;
/// The bits of a stack's extent that hold its length plus 1.
const LENGTH_BITS: u32 = 16;

/// What is known of up to `STACKS` stacks: `COUNTS` numbers for each. Stacks are slices of words, of which `WORDS` can be
/// stored in all.
pub(super) struct Stacks<const STACKS: usize, const WORDS: usize, const COUNTS: usize> {
    /// 0 is a free place. Two stacks with one hash are taken for one: there are 2^64.
    hashes: [AtomicU64; STACKS],
    /// Start and length of a stack in `words`; 0 until they are written.
    extents: [AtomicU64; STACKS],
    counts: [[AtomicU64; COUNTS]; STACKS],
    words: [AtomicUsize; WORDS],
    used: AtomicUsize,
}

/// A stack, by its place.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Place(u16);

impl Place {
    pub(super) const fn number(self) -> u16 {
        self.0
    }

    pub(super) const fn of(number: u16) -> Self {
        Self(number)
    }
}

impl<const STACKS: usize, const WORDS: usize, const COUNTS: usize> Stacks<STACKS, WORDS, COUNTS> {
    pub(super) const fn new() -> Self {
        const {
            assert!(STACKS > 0 && STACKS <= 1 << 16, "places are numbers of 16 bits");
            assert!(WORDS < 1 << (u64::BITS - LENGTH_BITS), "starts and lengths share 64 bits");
        }
        Self {
            hashes: [const { AtomicU64::new(0) }; STACKS],
            extents: [const { AtomicU64::new(0) }; STACKS],
            counts: [const { [const { AtomicU64::new(0) }; COUNTS] }; STACKS],
            words: [const { AtomicUsize::new(0) }; WORDS],
            used: AtomicUsize::new(0),
        }
    }

    /// The place of a stack, now taken if it had none. `None`: there is none left for it.
    pub(super) fn place(&self, stack: &[usize]) -> Option<Place> {
        let hash = hash(stack);
        let first = hash as usize % STACKS;
        (first..first + TRIES.min(STACKS)).map(|at| at % STACKS).find_map(|at| {
            match self.hashes[at].compare_exchange(0, hash, Relaxed, Relaxed) {
                Ok(_) => self.write(at, stack),
                Err(found) if found == hash => {}
                Err(_) => return None,
            }
            u16::try_from(at).ok().map(Place)
        })
    }

    /// Adds, and wraps around: so a count can be lowered too.
    pub(super) fn add(&self, place: Place, counts: [u64; COUNTS]) {
        let Some(known) = self.counts.get(usize::from(place.0)) else { return };
        for (known, more) in known.iter().zip(counts) {
            known.fetch_add(more, Relaxed);
        }
    }

    /// Every stack with its counts. One for whose words there was no room is empty.
    pub(super) fn all(&self) -> impl Iterator<Item = (Vec<usize>, [u64; COUNTS])> {
        self.extents.iter().zip(&self.counts).filter_map(|(extent, counts)| {
            let extent = extent.load(Acquire);
            let length = (extent & ((1 << LENGTH_BITS) - 1)).checked_sub(1)? as usize;
            let start = (extent >> LENGTH_BITS) as usize;
            let words = self.words.get(start..start + length)?;
            let stack = words.iter().map(|word| word.load(Relaxed)).collect();
            Some((stack, counts.each_ref().map(|count| count.load(Relaxed))))
        })
    }

    /// Forgets all. Nobody may be adding meanwhile.
    pub(super) fn clear(&self) {
        for hash in &self.hashes {
            hash.store(0, Relaxed);
        }
        for extent in &self.extents {
            extent.store(0, Relaxed);
        }
        for count in self.counts.iter().flatten() {
            count.store(0, Relaxed);
        }
        self.used.store(0, Relaxed);
    }

    fn write(&self, at: usize, stack: &[usize]) {
        let end = |start: usize| start.checked_add(stack.len()).filter(|end| *end <= WORDS);
        let (start, length) = match self.used.fetch_update(Relaxed, Relaxed, end) {
            Ok(start) => (start, stack.len()),
            Err(_) => (0, 0),
        };
        let words = self.words.get(start..start + length).unwrap_or_default();
        for (word, value) in words.iter().zip(stack) {
            word.store(*value, Relaxed);
        }
        let extent = (start as u64) << LENGTH_BITS | (length as u64 + 1);
        self.extents[at].store(extent, Release);
    }
}

/// Not 0.
fn hash(stack: &[usize]) -> u64 {
    let mixed = stack.iter().fold(stack.len() as u64, |hash, word| mix(hash ^ *word as u64));
    mixed.max(1)
}

/// Every bit of the result depends on every bit of the number (the last step of SplitMix64).
pub(super) const fn mix(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn all<const S: usize, const W: usize>(stacks: &Stacks<S, W, 2>) -> BTreeMap<Vec<usize>, [u64; 2]> {
        stacks.all().collect()
    }

    #[test]
    fn the_same_stack_is_counted_in_one_place() {
        let stacks: Stacks<8, 32, 2> = Stacks::new();
        let add = |stack: &[usize], counts| stacks.add(stacks.place(stack).unwrap(), counts);
        add(&[1, 2, 3], [1, 10]);
        add(&[1, 2], [2, 20]);
        add(&[1, 2, 3], [4, u64::MAX]);
        assert_eq!(all(&stacks), [(vec![1, 2], [2, 20]), (vec![1, 2, 3], [5, 9])].into());
        stacks.clear();
        assert_eq!(all(&stacks), BTreeMap::new());
        add(&[7], [1, 1]);
        assert_eq!(all(&stacks), [(vec![7], [1, 1])].into());
    }

    #[test]
    fn what_there_is_no_room_for_is_counted_without_its_frames_or_not_at_all() {
        let stacks: Stacks<3, 4, 2> = Stacks::new();
        let places: Vec<_> = (0..4).map(|number| stacks.place(&[number, 0])).collect();
        assert!(places[..3].iter().all(Option::is_some) && places[3].is_none(), "{places:?}");
        for place in places.into_iter().flatten() {
            stacks.add(place, [1, 0]);
        }
        assert_eq!(all(&stacks).into_keys().collect::<Vec<_>>(), [vec![], vec![0, 0], vec![1, 0]]);
    }

    #[test]
    fn threads_that_meet_the_same_stacks_count_each_once() {
        static STACKS: Stacks<256, 1024, 2> = Stacks::new();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 0..5_000 {
                        let place = STACKS.place(&[round % 100, 5]).unwrap();
                        STACKS.add(place, [1, 2]);
                    }
                });
            }
        });
        let all = all(&STACKS);
        assert_eq!(all.len(), 100);
        assert!(all.values().all(|counts| *counts == [200, 400]), "{all:?}");
    }
}
