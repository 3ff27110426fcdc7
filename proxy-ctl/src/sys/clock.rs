//! The clock of the kernel programs.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Nanoseconds since boot, suspend included: `bpf_ktime_get_boot_ns`.
pub fn since_boot() -> u64 {
    // Cannot fail: the clock exists since 2.6.39.
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(0, |now| Duration::from(now).as_nanos() as u64)
}

/// The moment on this clock when so long has passed since `then`.
pub fn later(then: u64, duration: Duration) -> u64 {
    then.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
}
