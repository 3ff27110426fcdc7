//! CPU profiles for `serve/pages`: the call stacks of threads that use CPU time, with the number of
//! samples of each.

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

/// The CPU time from one sample to the next.
pub const PERIOD: Duration = Duration::from_millis(10);
/// The pause between two collections of the samples. The sampler has room for more samples than
/// come in this time.
const COLLECT_EVERY: Duration = Duration::from_millis(50);
/// The largest number of different stacks in a profile, which bounds its memory. Samples of further
/// stacks are lost.
const MOST_STACKS: usize = 8192;

#[derive(Debug)]
pub struct CpuProfile {
    pub start: SystemTime,
    pub duration: Duration,
    /// The number of samples of each stack.
    pub stacks: HashMap<Sample, u64>,
    /// The number of samples that there was no room for.
    pub lost: u64,
}

/// Samples this process for `duration`. Returns `None` if another profile is being taken.
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
