//! nf_tables lets go of what removed rules used in a work queue, after the transaction has been answered.

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::sys::CallError;

const WITHIN: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(5);

/// One wait for all that the removed rules used.
pub(super) struct LettingGo {
    deadline: Instant,
}

impl LettingGo {
    /// Must be called after the rules are removed.
    pub(super) fn begin() -> Self {
        Self { deadline: Instant::now() + WITHIN }
    }

    /// Removes what the rules used, again for as long as the outcome is `in_use`.
    pub(super) fn wait<T: PartialEq>(
        &self,
        in_use: T,
        remove: impl Fn() -> Result<T, CallError>,
    ) -> Result<T, CallError> {
        loop {
            let outcome = remove()?;
            if outcome != in_use || Instant::now() >= self.deadline {
                return Ok(outcome);
            }
            thread::sleep(PAUSE);
        }
    }
}
