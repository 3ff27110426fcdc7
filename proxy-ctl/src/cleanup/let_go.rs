//! Waits until nf_tables has released the objects that removed rules used. It does so in a work
//! queue, after it has answered the transaction.

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::sys::CallError;

const WITHIN: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(5);

/// One common deadline for all objects that the removed rules used.
pub(super) struct LettingGo {
    deadline: Instant,
}

impl LettingGo {
    /// Starts the time. Must be called after the rules are removed.
    pub(super) fn begin() -> Self {
        Self { deadline: Instant::now() + WITHIN }
    }

    /// Calls `remove`, again and again while it returns `in_use`, until the deadline.
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
