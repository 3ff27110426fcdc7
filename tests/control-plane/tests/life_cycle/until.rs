//! Polls a condition, with a limit.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

const BETWEEN_LOOKS: Duration = Duration::from_millis(10);
/// Longest wait for a condition, longer than anything takes that does happen, on a busy machine
/// too. Up to 30 s lie between two attempts of the proxy.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// Asks until there is an answer. `state` says in the error how things stood at the end.
pub(crate) fn until<T>(
    what: &str,
    mut ask: impl FnMut() -> Result<Option<T>>,
    state: impl FnOnce() -> String,
) -> Result<T> {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(answer) = ask()? {
            return Ok(answer);
        }
        if Instant::now() > deadline {
            bail!("{what}: not within {LIMIT:?}; {}", state());
        }
        std::thread::sleep(BETWEEN_LOOKS);
    }
}
