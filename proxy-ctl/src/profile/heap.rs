//! What has been allocated where, and what of it is still in use, from a sample of the allocations.
//!
//! Every thread draws a distance in bytes, from an exponential distribution with a mean of 512 KiB, and the allocation in
//! which it ends is a sample: a block of `size` bytes is one with probability 1 - e^(-size / mean), as in Go. Counted
//! divided by that, samples give what all allocations together would, on average.

use std::{
    cell::Cell,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::SystemTime,
};

use super::{
    live::{Block, Live},
    stacks::{Stacks, mix},
};
use crate::sys::{
    CallError,
    allocator::Observer,
    frames::{self, Frames},
};

/// Bytes allocated for each sample, on average.
pub const PERIOD: u64 = 512 * 1024;
/// Samples are parts of an object where blocks are large: counted so fine.
const PARTS: f64 = 1024.0;

/// For the program's allocator.
#[derive(Debug)]
pub struct HeapProfile;

static ON: AtomicBool = AtomicBool::new(false);
static SINCE: OnceLock<SystemTime> = OnceLock::new();
static SAMPLES: Samples<4096, { 128 * 1024 }, 1024> = Samples::new();

/// From now on allocations are sampled, for as long as the process lives. Nothing is known of earlier ones.
///
/// # Errors
/// There is no /proc.
pub fn switch_on() -> Result<(), CallError> {
    frames::prepare()?;
    SINCE.get_or_init(SystemTime::now);
    ON.store(true, Relaxed);
    Ok(())
}

impl Observer for HeapProfile {
    #[inline(always)]
    fn is_on() -> bool {
        ON.load(Relaxed)
    }

    fn allocated(address: usize, size: usize) {
        if is_sampled(size as u64) {
            SAMPLES.add(address, size as u64, Frames::here().addresses());
        }
    }

    fn freed(address: usize) {
        SAMPLES.freed(address);
    }
}

/// What one call stack has allocated.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Site {
    /// Return addresses, the innermost first.
    pub frames: Vec<usize>,
    pub allocated: Amount,
    pub in_use: Amount,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Amount {
    pub objects: u64,
    pub bytes: u64,
}

/// All that has been sampled.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub since: SystemTime,
    pub sites: Vec<Site>,
    /// Samples that there was no room for: they are missing in what is in use, or altogether.
    pub lost: u64,
}

/// `None`: allocations are not sampled.
pub fn snapshot() -> Option<Snapshot> {
    let since = *SINCE.get()?;
    Some(Snapshot { since, sites: SAMPLES.sites(), lost: SAMPLES.lost.load(Relaxed) })
}

thread_local! {
    // Without a destructor: can be used as long as the thread runs, and needs no memory.
    static RANDOM: Cell<u64> = const { Cell::new(0) };
    /// Bytes that this thread allocates before its next sample ends. `None`: not drawn yet.
    static DISTANCE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Whether the next sample of this thread is one of the next `size` bytes.
fn is_sampled(size: u64) -> bool {
    let distance = DISTANCE.get().unwrap_or_else(draw);
    let sampled = distance <= size;
    DISTANCE.set(Some(if sampled { draw() } else { distance - size }));
    sampled
}

fn draw() -> u64 {
    static THREADS: AtomicU64 = AtomicU64::new(0);
    let state = match RANDOM.get() {
        0 => mix(THREADS.fetch_add(1, Relaxed)),
        state => mix(state),
    };
    RANDOM.set(state);
    distance(state)
}

/// At least 1. `random`: any number of 64 bits, each as likely as the others.
fn distance(random: u64) -> u64 {
    // 53 bits, in the middle between two: never 0 or 1.
    let uniform = ((random >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
    (-uniform.ln() * PERIOD as f64) as u64 + 1
}

/// For how many parts of an object, and for how many bytes, a sampled block of this size stands.
fn weight(size: u64) -> (u64, u64) {
    let size = size.max(1) as f64;
    let objects = 1.0 / -(-size / PERIOD as f64).exp_m1();
    ((objects * PARTS).round() as u64, (objects * size).round() as u64)
}

/// Parts of objects and bytes allocated, then in use.
struct Samples<const STACKS: usize, const WORDS: usize, const SETS: usize> {
    stacks: Stacks<STACKS, WORDS, 4>,
    live: Live<SETS>,
    lost: AtomicU64,
}

impl<const STACKS: usize, const WORDS: usize, const SETS: usize> Samples<STACKS, WORDS, SETS> {
    const fn new() -> Self {
        Self { stacks: Stacks::new(), live: Live::new(), lost: AtomicU64::new(0) }
    }

    fn add(&self, address: usize, size: u64, frames: &[usize]) {
        let Some(stack) = self.stacks.place(frames) else {
            self.lost.fetch_add(1, Relaxed);
            return;
        };
        let (parts, bytes) = weight(size);
        // Counted before it can be found and uncounted.
        self.stacks.add(stack, [parts, bytes, parts, bytes]);
        if !self.live.insert(address, Block { stack, size }) {
            self.stacks.add(stack, [0, 0, parts.wrapping_neg(), bytes.wrapping_neg()]);
            self.lost.fetch_add(1, Relaxed);
        }
    }

    fn freed(&self, address: usize) {
        if let Some(Block { stack, size }) = self.live.remove(address) {
            let (parts, bytes) = weight(size);
            self.stacks.add(stack, [0, 0, parts.wrapping_neg(), bytes.wrapping_neg()]);
        }
    }

    fn sites(&self) -> Vec<Site> {
        let whole = |parts: u64| (parts as f64 / PARTS).round() as u64;
        let site = |(frames, [parts, bytes, live_parts, live_bytes]): (_, [u64; 4])| Site {
            frames,
            allocated: Amount { objects: whole(parts), bytes },
            in_use: Amount { objects: whole(live_parts), bytes: live_bytes },
        };
        self.stacks.all().map(site).collect()
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn close(found: f64, expected: f64, tolerance: f64) -> bool {
        (found / expected - 1.0).abs() < tolerance
    }

    #[test]
    fn distances_are_exponential_with_the_period_as_mean() {
        let drawn: Vec<f64> = (0..200_000).map(|seed| distance(mix(seed)) as f64).collect();
        let mean = drawn.iter().sum::<f64>() / drawn.len() as f64;
        assert!(close(mean, PERIOD as f64, 0.01), "{mean}");
        for periods in [0.1, 1.0, 3.0] {
            let beyond = drawn.iter().filter(|distance| **distance > periods * PERIOD as f64).count();
            let part = beyond as f64 / drawn.len() as f64;
            assert!(close(part, f64::exp(-periods), 0.03), "{periods}: {part}");
        }
        // The largest and the smallest that there are.
        assert_eq!((distance(u64::MAX), distance(0) / PERIOD), (1, 37));
    }

    #[rstest]
    #[case(0, 512.0 * 1024.0, PERIOD)]
    #[case(16, 32768.5, 16 * 32768 + 8)]
    #[case(PERIOD, 1.582, 829_411)]
    #[case(100 * PERIOD, 1.0, 100 * PERIOD)]
    fn what_a_sample_stands_for(#[case] size: u64, #[case] objects: f64, #[case] bytes: u64) {
        let (parts, found) = weight(size);
        assert!(close(parts as f64 / PARTS, objects, 0.001), "{parts}");
        assert!(found.abs_diff(bytes) <= 1, "{found}");
    }

    #[rstest]
    #[case::small(64, 400_000)]
    #[case::of_a_page(4096, 60_000)]
    #[case::large(PERIOD / 2, 2_000)]
    #[case::larger_than_the_period(3 * PERIOD, 500)]
    fn samples_stand_for_all_allocations(#[case] size: u64, #[case] count: u64) {
        let weigh = |_| if is_sampled(size) { weight(size) } else { (0, 0) };
        let add = |sum: (u64, u64), more: (u64, u64)| (sum.0 + more.0, sum.1 + more.1);
        let (parts, bytes) = (0..count).map(weigh).fold((0, 0), add);
        // Seven standard deviations: of a Poisson distribution with so many samples.
        let samples = count as f64 * -(-(size as f64) / PERIOD as f64).exp_m1();
        let tolerance = 7.0 / samples.sqrt();
        assert!(close(parts as f64 / PARTS, count as f64, tolerance), "{parts}");
        assert!(close(bytes as f64, (count * size) as f64, tolerance), "{bytes}");
    }

    #[test]
    fn what_is_freed_is_no_longer_in_use() {
        static SAMPLES: Samples<16, 64, 4> = Samples::new();
        SAMPLES.add(0x1000, 10 * PERIOD, &[1, 2]);
        SAMPLES.add(0x2000, 10 * PERIOD, &[1, 2]);
        SAMPLES.add(0x3000, 10 * PERIOD, &[3]);
        SAMPLES.freed(0x2000);
        SAMPLES.freed(0x3000);
        SAMPLES.freed(0x4000);
        let amount = |objects: u64| Amount { objects, bytes: weight(10 * PERIOD).1 * objects };
        let mut sites = SAMPLES.sites();
        sites.sort_by_key(|site| site.frames.clone());
        let expected = [
            Site { frames: vec![1, 2], allocated: amount(2), in_use: amount(1) },
            Site { frames: vec![3], allocated: amount(1), in_use: amount(0) },
        ];
        assert_eq!(sites, expected);
    }

    #[test]
    fn what_there_is_no_room_for_is_not_in_use_and_is_told() {
        static SAMPLES: Samples<1, 64, 1> = Samples::new();
        for number in 1..=9 {
            SAMPLES.add(number * 16, 10 * PERIOD, &[1]);
        }
        SAMPLES.add(0x1000, 10 * PERIOD, &[2]);
        let [site] = &SAMPLES.sites()[..] else { panic!("one place") };
        assert_eq!((site.allocated.objects, site.in_use.objects), (9, 8));
        assert_eq!(SAMPLES.lost.load(Relaxed), 2);
    }
}
