//! CPU profiles: call stacks of the threads that use CPU time, counted by stack, for `serve/pages`.

mod names;

use std::{
    collections::HashMap,
    time::{Duration, Instant, SystemTime},
};

pub use self::names::SymbolNames;
use crate::sys::{
    CallError,
    sampler::{Sample, Sampler},
};

/// CPU time from one sample to the next.
pub const PERIOD: Duration = Duration::from_millis(10);
/// Pause between two collections of the samples: the sampler keeps more than come in this time.
const COLLECT_EVERY: Duration = Duration::from_millis(50);
/// Bounds the memory of a profile; samples of further stacks are lost.
const MOST_STACKS: usize = 8192;

#[derive(Debug)]
pub struct CpuProfile {
    pub start: SystemTime,
    pub duration: Duration,
    /// How often each stack was met.
    pub stacks: HashMap<Sample, u64>,
    /// Samples that there was no room for.
    pub lost: u64,
}

/// Samples this process for `duration`. `None`: another profile is being taken.
///
/// # Errors
/// There is no /proc, or the kernel refuses the timer.
pub async fn record(duration: Duration) -> Result<Option<CpuProfile>, CallError> {
    let Some(sampler) = Sampler::start(PERIOD)? else { return Ok(None) };
    let (start, started) = (SystemTime::now(), Instant::now());
    let (mut stacks, mut without_room) = (HashMap::new(), 0);
    while let Some(left) = duration.checked_sub(started.elapsed()) {
        tokio::time::sleep(left.min(COLLECT_EVERY)).await;
        sampler.collect(|sample| {
            if let Some(count) = stacks.get_mut(&sample) {
                *count += 1;
            } else if stacks.len() < MOST_STACKS {
                stacks.insert(sample, 1_u64);
            } else {
                without_room += 1;
            }
        });
    }
    let lost = sampler.missed() + without_room;
    Ok(Some(CpuProfile { start, duration: started.elapsed(), stacks, lost }))
}
