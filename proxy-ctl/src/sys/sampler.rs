//! Interrupts this process in proportion to the CPU time that it uses (SIGPROF), and keeps the call
//! stacks that it was in until they are collected.
//!
//! The signal handler neither waits, locks nor allocates: it writes to static slots, which cost no
//! memory before they are used.

use std::{
    ffi::{c_int, c_void},
    marker::PhantomData,
    ptr,
    sync::atomic::{
        AtomicBool, AtomicU8, AtomicU64, AtomicUsize,
        Ordering::{Acquire, Relaxed, Release, SeqCst},
    },
    time::Duration,
};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, SigmaskHow, Signal, sigaction};

use super::{
    CallError,
    frames::{self, DEEPEST, Frames, Registers},
};

/// The number of samples that are kept until they are collected.
const SLOTS: usize = 512;

/// True while a sampler exists.
static TAKEN: AtomicBool = AtomicBool::new(false);
static SAMPLES: [Slot; SLOTS] = [const { Slot::new() }; SLOTS];
static NEXT: AtomicUsize = AtomicUsize::new(0);
static MISSED: AtomicU64 = AtomicU64::new(0);

/// A call stack in which a thread was interrupted.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Sample {
    /// The name of the thread, filled up with zero bytes.
    pub thread: [u8; 16],
    /// The return addresses of the calls, the innermost first.
    pub frames: Vec<usize>,
}

/// The owner of the process's timer and signal (SIGPROF), until it is dropped.
#[derive(Debug)]
pub struct Sampler(());

impl Sampler {
    /// Starts a sampler. Returns `None` if there is one already.
    ///
    /// # Errors
    /// Fails if there is no /proc, or if the kernel refuses the timer.
    pub fn start(period: Duration) -> Result<Option<Self>, CallError> {
        frames::prepare()?;
        if TAKEN.swap(true, SeqCst) {
            return Ok(None);
        }
        let sampler = Self(());
        sampler.collect(drop);
        MISSED.store(0, Relaxed);
        // The kernel restarts interrupted system calls where it can.
        let flags = SaFlags::SA_RESTART | SaFlags::SA_SIGINFO;
        let action = SigAction::new(SigHandler::SigAction(handle), flags, SigSet::empty());
        // SAFETY: `handle` may run at any time: it calls nothing that waits or allocates. It stays
        // installed, as a signal may still be on its way when the timer has been stopped.
        unsafe { sigaction(Signal::SIGPROF, &action) }
            .map_err(|errno| CallError::new("sigaction(SIGPROF)", errno.into()))?;
        set_timer(period)?;
        Ok(Some(sampler))
    }

    /// Gives `each` every sample that was taken since the last call.
    pub fn collect(&self, each: impl FnMut(Sample)) {
        SAMPLES.iter().filter_map(Slot::take).for_each(each);
    }

    /// Returns the number of samples for which there was no free slot.
    pub fn missed(&self) -> u64 {
        MISSED.load(Relaxed)
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        // Stopping a timer with valid arguments cannot fail.
        let _ = set_timer(Duration::ZERO);
        TAKEN.store(false, SeqCst);
    }
}

const FREE: u8 = 0;
const WRITING: u8 = 1;
const READY: u8 = 2;

/// A slot for one sample. A signal handler fills it, then the owner of the [`Sampler`] takes the
/// sample.
struct Slot {
    state: AtomicU8,
    thread: [AtomicU8; 16],
    length: AtomicUsize,
    frames: [AtomicUsize; DEEPEST],
}

impl Slot {
    const fn new() -> Self {
        Self {
            state: AtomicU8::new(FREE),
            thread: [const { AtomicU8::new(0) }; 16],
            length: AtomicUsize::new(0),
            frames: [const { AtomicUsize::new(0) }; DEEPEST],
        }
    }

    /// Fills the slot. Returns false if it is not free.
    fn put(&self, thread: [u8; 16], frames: &[usize]) -> bool {
        if self.state.compare_exchange(FREE, WRITING, Acquire, Relaxed).is_err() {
            return false;
        }
        for (place, byte) in self.thread.iter().zip(thread) {
            place.store(byte, Relaxed);
        }
        for (place, frame) in self.frames.iter().zip(frames) {
            place.store(*frame, Relaxed);
        }
        self.length.store(frames.len().min(DEEPEST), Relaxed);
        self.state.store(READY, Release);
        true
    }

    fn take(&self) -> Option<Sample> {
        if self.state.load(Acquire) != READY {
            return None;
        }
        let frames = self.frames.iter().take(self.length.load(Relaxed));
        let sample = Sample {
            thread: self.thread.each_ref().map(|byte| byte.load(Relaxed)),
            frames: frames.map(|frame| frame.load(Relaxed)).collect(),
        };
        self.state.store(FREE, Release);
        Some(sample)
    }
}

/// A guard that keeps samplers from interrupting the calling thread until it is dropped. It
/// protects calls that the kernel gives up when a signal arrives, such as the verification of a
/// program (EAGAIN).
#[derive(Debug)]
pub struct Undisturbed {
    /// The signal mask from before, which belongs to this thread.
    before: SigSet,
    of_thread: PhantomData<*const ()>,
}

impl Undisturbed {
    /// # Errors
    /// Returns those of pthread_sigmask(3).
    pub fn begin() -> Result<Self, CallError> {
        let mut own = SigSet::empty();
        own.add(Signal::SIGPROF);
        let before = own
            .thread_swap_mask(SigmaskHow::SIG_BLOCK)
            .map_err(|errno| CallError::new("pthread_sigmask(SIGPROF)", errno.into()))?;
        Ok(Self { before, of_thread: PhantomData })
    }
}

impl Drop for Undisturbed {
    fn drop(&mut self) {
        // Restores a mask that was valid for this thread.
        let _ = self.before.thread_set_mask();
    }
}

extern "C" fn handle(_: c_int, _: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: with SA_SIGINFO the third argument is the interrupted context, this handler's alone
    // while it runs.
    let context = unsafe { context.cast::<libc::ucontext_t>().as_ref() };
    let Some(context) = context.filter(|_| TAKEN.load(SeqCst)) else { return };
    let frames = Frames::interrupted(Registers::of(context));
    let slot = &SAMPLES[NEXT.fetch_add(1, Relaxed) % SLOTS];
    if !slot.put(thread_name(), frames.addresses()) {
        MISSED.fetch_add(1, Relaxed);
    }
}

fn thread_name() -> [u8; 16] {
    let mut name = [0; 16];
    // SAFETY: the kernel writes up to 16 bytes to `name`. It cannot fail, and so leaves errno
    // alone.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    name
}

/// Sets a timer over the CPU time of all threads together. Zero stops it.
fn set_timer(period: Duration) -> Result<(), CallError> {
    let period =
        libc::timeval { tv_sec: period.as_secs().cast_signed(), tv_usec: period.subsec_micros().into() };
    let timer = libc::itimerval { it_interval: period, it_value: period };
    // SAFETY: reads `timer`, and writes nothing.
    let result = unsafe { libc::setitimer(libc::ITIMER_PROF, &timer, ptr::null_mut()) };
    if result == 0 { Ok(()) } else { Err(CallError::last("setitimer(ITIMER_PROF)")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_holds_one_sample_until_it_is_taken() {
        let slot = Slot::new();
        assert_eq!(slot.take(), None);
        let deep: Vec<usize> = (0..DEEPEST + 1).collect();
        for frames in [&[1, 2, 3][..], &deep, &[]] {
            assert!(slot.put(*b"a thread of ours", frames));
            assert!(!slot.put([0; 16], &[7]));
            let kept = frames[..frames.len().min(DEEPEST)].to_vec();
            assert_eq!(slot.take(), Some(Sample { thread: *b"a thread of ours", frames: kept }));
            assert_eq!(slot.take(), None);
        }
    }
}
