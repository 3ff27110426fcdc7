//! Interrupts this process in proportion to the CPU time that it uses, and tells where it was.

use std::{
    ffi::{c_int, c_void},
    marker::PhantomData,
    ptr,
    sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    thread,
    time::Duration,
};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, SigmaskHow, Signal, sigaction};

use super::{
    CallError,
    frames::{self, Frames, Registers},
};

/// Is told of every interruption, in a signal handler: it may neither wait nor allocate.
pub trait Observer {
    fn interrupted(frames: &Frames, thread: ThreadName);
}

/// Ends with zero bytes.
pub type ThreadName = [u8; 16];

/// The timer and the signal are somebody's.
static TAKEN: AtomicBool = AtomicBool::new(false);
/// Interruptions are told.
static TOLD: AtomicBool = AtomicBool::new(false);
/// Threads in the handler.
static AT_WORK: AtomicU32 = AtomicU32::new(0);

/// The process's timer and signal (SIGPROF), until it is dropped.
#[derive(Debug)]
pub struct Sampler<O>(PhantomData<O>);

impl<O: Observer> Sampler<O> {
    /// `None`: there is one already.
    ///
    /// # Errors
    /// There is no /proc, or the kernel refuses the timer.
    pub fn start(period: Duration) -> Result<Option<Self>, CallError> {
        frames::prepare()?;
        if TAKEN.swap(true, SeqCst) {
            return Ok(None);
        }
        let sampler = Self(PhantomData);
        // Calls that can go on are not interrupted.
        let flags = SaFlags::SA_RESTART | SaFlags::SA_SIGINFO;
        let action = SigAction::new(SigHandler::SigAction(handle::<O>), flags, SigSet::empty());
        // SAFETY: `handle` may run at any time: it calls nothing that waits or allocates. It stays installed, as a
        // signal may still be on its way when the timer has been stopped.
        unsafe { sigaction(Signal::SIGPROF, &action) }
            .map_err(|errno| CallError::new("sigaction(SIGPROF)", errno.into()))?;
        TOLD.store(true, SeqCst);
        set_timer(period)?;
        Ok(Some(sampler))
    }
}

impl<O> Sampler<O> {
    /// When this returns, the observer is told no more, and is at work in no thread.
    pub fn stop(&self) {
        // Stopping a timer with valid arguments cannot fail.
        let _ = set_timer(Duration::ZERO);
        TOLD.store(false, SeqCst);
        // Whoever came before sees to its end: it waits for nobody.
        while AT_WORK.load(SeqCst) > 0 {
            thread::yield_now();
        }
    }
}

impl<O> Drop for Sampler<O> {
    fn drop(&mut self) {
        self.stop();
        TAKEN.store(false, SeqCst);
    }
}

/// No sampler interrupts the calling thread, until it is dropped: for calls that the kernel gives up when a signal
/// comes, as checking a program does (EAGAIN).
#[derive(Debug)]
pub struct Undisturbed {
    /// What was blocked before; it belongs to this thread.
    before: SigSet,
    of_thread: PhantomData<*const ()>,
}

impl Undisturbed {
    /// # Errors
    /// Those of pthread_sigmask(3).
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
        // It was this thread's mask a moment ago.
        let _ = self.before.thread_set_mask();
    }
}

extern "C" fn handle<O: Observer>(_: c_int, _: *mut libc::siginfo_t, context: *mut c_void) {
    AT_WORK.fetch_add(1, SeqCst);
    // SAFETY: with SA_SIGINFO the third argument is the interrupted context, this handler's alone while it runs.
    let context = unsafe { context.cast::<libc::ucontext_t>().as_ref() };
    if let Some(context) = context.filter(|_| TOLD.load(SeqCst)) {
        O::interrupted(&Frames::interrupted(Registers::of(context)), thread_name());
    }
    AT_WORK.fetch_sub(1, SeqCst);
}

fn thread_name() -> ThreadName {
    let mut name = [0; 16];
    // SAFETY: the kernel writes up to 16 bytes to `name`. It cannot fail, and so leaves errno alone.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    name
}

/// Of CPU time, of all threads together. Zero stops it.
fn set_timer(period: Duration) -> Result<(), CallError> {
    let period =
        libc::timeval { tv_sec: period.as_secs().cast_signed(), tv_usec: period.subsec_micros().into() };
    let timer = libc::itimerval { it_interval: period, it_value: period };
    // SAFETY: reads `timer`, and writes nothing.
    let result = unsafe { libc::setitimer(libc::ITIMER_PROF, &timer, ptr::null_mut()) };
    if result == 0 { Ok(()) } else { Err(CallError::last("setitimer(ITIMER_PROF)")) }
}
