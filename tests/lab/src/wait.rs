//! Waits for a condition, with a limit.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

const BETWEEN_LOOKS: Duration = Duration::from_millis(5);
const TELLS_EACH: Duration = Duration::from_mins(1);

/// Returns the factor by which waits, and the pauses between two checks, are longer than usual. It
/// is set by `LAB_PATIENCE` for emulated machines, where a check takes as long as what is waited
/// for.
pub fn patience() -> u32 {
    std::env::var("LAB_PATIENCE").ok().and_then(|factor| factor.parse().ok()).unwrap_or(1)
}

/// Asks `condition` until it returns a value, and prints once a minute what is still missing. The
/// error names `what` was waited for, and the last reason that `condition` gave.
pub fn until<T>(
    what: &str,
    limit: Duration,
    mut condition: impl FnMut() -> Result<Option<T>, String>,
) -> Result<T> {
    let start = Instant::now();
    let (limit, between_looks) = (limit * patience(), BETWEEN_LOOKS * patience());
    let mut last = "no reason given".to_owned();
    let mut tell_at = start + TELLS_EACH;
    loop {
        match condition() {
            Ok(Some(value)) => return Ok(value),
            Ok(None) => {}
            Err(reason) => last = reason,
        }
        if start.elapsed() > limit {
            bail!("{what}: not after {} s: {last}", limit.as_secs_f32());
        }
        if Instant::now() >= tell_at {
            eprintln!("{what}: waiting for {} s: {last}", start.elapsed().as_secs());
            tell_at += TELLS_EACH;
        }
        std::thread::sleep(between_looks);
    }
}
