//! Signs of life of the controller's loop and of the tasks that run beside it. A loop that gives
//! none for [`STUCK_AFTER`] is in a call that does not return, which only a new process ends.
//! Everything else that goes wrong is tried again by the process itself.
//!
//! A task that begins others vouches for its own thread only. The task "sources" is such a task:
//! each kind of the API server is watched by a task of its own, and "sources" waits for the first
//! of them to end. A watcher that blocks its thread is not found here. But the metrics show that
//! its kind is stale.

use std::{
    collections::BTreeMap,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::{Instant, interval};

/// The time without a sign of life after which a loop is stuck. It is far longer than the longest
/// call on a slow machine, such as the kernel's check of all programs.
pub const STUCK_AFTER: Duration = Duration::from_secs(300);
/// The pause between two signs of life of a task that waits.
const PERIOD: Duration = Duration::from_secs(10);

/// The last sign of life of each loop, by the loop's name. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Heartbeats(Arc<Mutex<BTreeMap<&'static str, Instant>>>);

/// The handle of one loop in [`Heartbeats`]. The loop is forgotten when this is dropped.
#[derive(Debug)]
pub struct Heartbeat {
    name: &'static str,
    all: Heartbeats,
}

impl Heartbeat {
    /// Gives a sign of life.
    pub fn beat(&self) {
        self.all.lock().insert(self.name, Instant::now());
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.all.lock().remove(self.name);
    }
}

impl Heartbeats {
    /// Begins to expect signs of life of a loop. No two loops have the same name.
    pub fn begin(&self, name: &'static str) -> Heartbeat {
        let heartbeat = Heartbeat { name, all: self.clone() };
        heartbeat.beat();
        heartbeat
    }

    /// Begins like [`begin`](Self::begin), with a last sign of life in the past.
    #[cfg(test)]
    pub(crate) fn begin_at(&self, name: &'static str, last: std::time::Instant) -> Heartbeat {
        let heartbeat = self.begin(name);
        self.lock().insert(name, Instant::from_std(last));
        heartbeat
    }

    /// Runs a task that gives signs of life while it waits, and none while it blocks the thread
    /// that it runs on.
    pub async fn watch<F: Future>(self, name: &'static str, task: F) -> F::Output {
        let heartbeat = self.begin(name);
        let (mut task, mut period) = (pin!(task), interval(PERIOD));
        loop {
            tokio::select! {
                biased;
                _ = period.tick() => heartbeat.beat(),
                output = &mut task => return output,
            }
        }
    }

    /// Returns the loops that are stuck, each with the time since its last sign of life.
    pub fn stuck(&self) -> Vec<(&'static str, Duration)> {
        let now = Instant::now();
        let silent = |(name, last): (&&'static str, &Instant)| (*name, now.saturating_duration_since(*last));
        self.lock().iter().map(silent).filter(|(_, silence)| *silence >= STUCK_AFTER).collect()
    }

    /// Locks the times. A thread that panicked while it held the lock leaves them usable, because
    /// each change is one insertion or removal.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<&'static str, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::{advance, sleep};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn a_loop_is_stuck_after_five_minutes_without_a_sign_and_no_longer_with_the_next() {
        let all = Heartbeats::default();
        let (dataplane, _other) = (all.begin("dataplane"), all.begin("other"));
        advance(STUCK_AFTER - SECOND).await;
        assert_eq!(all.stuck(), []);
        all.begin("a loop that ends is not expected any more");
        advance(SECOND).await;
        assert_eq!(all.stuck(), [("dataplane", STUCK_AFTER), ("other", STUCK_AFTER)]);
        dataplane.beat();
        assert_eq!(all.stuck(), [("other", STUCK_AFTER)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_waits_is_not_stuck_and_one_that_blocks_its_thread_is() {
        let all = Heartbeats::default();
        let waiting = tokio::spawn(all.clone().watch("waiting", pending::<()>()));
        let blocked = all.clone();
        // The clock advances while the task is being polled, as it does in a call that does not
        // return.
        let blocking = async move {
            sleep(SECOND).await;
            let mut passed = pin!(advance(STUCK_AFTER));
            let woken = std::task::Waker::noop();
            let _pending = passed.as_mut().poll(&mut std::task::Context::from_waker(woken));
            blocked.stuck()
        };
        sleep(STUCK_AFTER * 2).await;
        assert_eq!(all.stuck(), []);
        let stuck = tokio::spawn(all.clone().watch("blocking", blocking)).await.unwrap();
        assert!(stuck.iter().any(|(name, _)| *name == "blocking"), "{stuck:?}");
        assert!(!all.stuck().iter().any(|(name, _)| *name == "blocking"), "it has ended");
        waiting.abort();
    }
}
