//! The clock of the kernel programs.

use std::time::Duration;

/// Nanoseconds since boot, suspend included: `bpf_ktime_get_boot_ns`.
pub fn since_boot() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let target: *mut libc::timespec = &mut now;
    // SAFETY: the kernel writes a timespec to `target`.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, target) };
    // Cannot fail: the clock exists since 2.6.39 and the address is valid.
    debug_assert_eq!(result, 0);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// The moment on this clock when so long has passed since `then`.
pub fn later(then: u64, duration: Duration) -> u64 {
    then.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
}
