//! Work that a program does before SIGINT, SIGTERM or SIGHUP ends it.

use anyhow::{Context as _, Result};
use nix::sys::signal::{SigSet, Signal};

/// Makes SIGINT, SIGTERM and SIGHUP run `clean_up` before they end the process, and holds what it
/// returns until then. It must be called before any other thread exists, since threads inherit the
/// signals that are blocked.
pub fn before_end<T>(clean_up: impl FnOnce() -> T + Send + 'static) -> Result<()> {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        signals.add(signal);
    }
    signals.thread_block().context("blocking signals")?;
    std::thread::spawn(move || {
        let signal = signals.wait();
        let _held = clean_up();
        std::process::exit(128 + signal.map_or(1, |signal| signal as i32));
    });
    Ok(())
}
