//! The clock that the BPF programs read.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Returns the nanoseconds since boot, time in suspend included, as `bpf_ktime_get_boot_ns` does.
pub fn since_boot() -> u64 {
    // This cannot fail: the clock exists since Linux 2.6.39.
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(0, |now| Duration::from(now).as_nanos() as u64)
}

/// Returns the time on this clock that is `duration` after `then`.
pub fn later(then: u64, duration: Duration) -> u64 {
    then.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
}
