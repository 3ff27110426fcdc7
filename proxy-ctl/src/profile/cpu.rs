//! Where CPU time goes, from a sample each 10 ms of it.

use std::time::{Duration, Instant, SystemTime};

use super::stacks::Stacks;
use crate::sys::{
    CallError,
    frames::{DEEPEST, Frames},
    sampler::{Observer, Sampler, ThreadName},
};

/// CPU time from one sample to the next.
pub const PERIOD: Duration = Duration::from_millis(10);

const WORD: usize = size_of::<usize>();
/// Before the frames of a stack.
const NAME_WORDS: usize = size_of::<ThreadName>() / WORD;

static SAMPLES: Stacks<4096, { 128 * 1024 }, 1> = Stacks::new();

/// A profile that is being taken.
#[derive(Debug)]
pub struct Recording {
    sampler: Sampler<CpuProfile>,
    since: SystemTime,
    start: Instant,
}

#[derive(Debug)]
struct CpuProfile;

impl Observer for CpuProfile {
    fn interrupted(frames: &Frames, thread: ThreadName) {
        let mut stack = [0; NAME_WORDS + DEEPEST];
        let (name, places) = stack.split_at_mut(NAME_WORDS);
        for (word, bytes) in name.iter_mut().zip(thread.as_chunks::<WORD>().0) {
            *word = usize::from_ne_bytes(*bytes);
        }
        let frames = frames.addresses();
        for (place, frame) in places.iter_mut().zip(frames) {
            *place = *frame;
        }
        let stack = stack.get(..NAME_WORDS + frames.len()).unwrap_or_default();
        // Samples for which there is no place are not told: thousands of other stacks are.
        if let Some(place) = SAMPLES.place(stack) {
            SAMPLES.add(place, [1]);
        }
    }
}

/// How often threads of one name were met in one call stack.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Busy {
    /// Addresses behind the calls, the innermost first.
    pub frames: Vec<usize>,
    pub thread: String,
    pub samples: u64,
}

#[derive(Clone, Debug)]
pub struct Recorded {
    pub since: SystemTime,
    pub duration: Duration,
    pub stacks: Vec<Busy>,
}

impl Recording {
    /// `None`: one is being taken already.
    ///
    /// # Errors
    /// There is no /proc, or the kernel refuses the timer.
    pub fn start() -> Result<Option<Self>, CallError> {
        let (since, start) = (SystemTime::now(), Instant::now());
        Ok(Sampler::start(PERIOD)?.map(|sampler| Self { sampler, since, start }))
    }

    pub fn stop(self) -> Recorded {
        self.sampler.stop();
        let read = |(words, [samples]): (Vec<usize>, [u64; 1])| {
            // A stack that there was no room for has no name either.
            let (name, frames) = words.split_at_checked(NAME_WORDS).unwrap_or_default();
            let name: Vec<u8> =
                name.iter().flat_map(|word| word.to_ne_bytes()).take_while(|byte| *byte != 0).collect();
            let thread = String::from_utf8_lossy(&name).into_owned();
            Busy { frames: frames.to_vec(), thread, samples }
        };
        Recorded {
            since: self.since,
            duration: self.start.elapsed(),
            stacks: SAMPLES.all().map(read).collect(),
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.sampler.stop();
        SAMPLES.clear();
    }
}
