//! When to try again after a failure: after a second, then after twice as long each time, up to a limit.

use std::time::{Duration, Instant};

const FIRST_PAUSE: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
pub(super) struct Retry {
    at: Option<Instant>,
    next_pause: Duration,
    longest_pause: Duration,
    /// The last attempt has failed.
    failing: bool,
}

impl Retry {
    /// The first attempt is due now.
    pub(super) fn due(now: Instant, longest_pause: Duration) -> Self {
        Self { at: Some(now), next_pause: FIRST_PAUSE.min(longest_pause), longest_pause, failing: false }
    }

    /// There is something new to try: now.
    pub(super) fn ask(&mut self, now: Instant) {
        self.at = Some(now);
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.at.is_some_and(|at| at <= now)
    }

    pub(super) fn is_pending(&self) -> bool {
        self.at.is_some()
    }

    pub(super) fn is_failing(&self) -> bool {
        self.failing
    }

    pub(super) fn at(&self) -> Option<Instant> {
        self.at
    }

    pub(super) fn set_longest_pause(&mut self, longest_pause: Duration) {
        self.longest_pause = longest_pause;
        self.next_pause = self.next_pause.min(longest_pause);
    }

    pub(super) fn succeeded(&mut self) {
        let next_pause = FIRST_PAUSE.min(self.longest_pause);
        *self = Self { at: None, next_pause, failing: false, ..*self };
    }

    /// Answers with the pause before the next attempt. An attempt that is already planned is not put off.
    pub(super) fn failed(&mut self, now: Instant) -> Duration {
        self.failing = true;
        if let Some(at) = self.at.filter(|at| *at > now) {
            return at - now;
        }
        let pause = self.next_pause;
        self.at = Some(now + pause);
        self.next_pause = (pause * 2).min(self.longest_pause);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_start_over_after_success() {
        let mut now = Instant::now();
        let mut retry = Retry::due(now, Duration::from_secs(5));
        let mut pauses = Vec::new();
        for _ in 0..5 {
            assert!(retry.is_due(now));
            let pause = retry.failed(now);
            assert!(!retry.is_due(now));
            pauses.push(pause.as_secs());
            now += pause;
        }
        assert_eq!(pauses, [1, 2, 4, 5, 5]);
        assert!(retry.is_failing());
        retry.succeeded();
        assert!(!retry.is_pending() && !retry.is_failing());
        assert_eq!(retry.failed(now), Duration::from_secs(1));
    }

    #[test]
    fn another_failure_does_not_put_off_the_attempt() {
        let now = Instant::now();
        let mut retry = Retry::due(now, Duration::from_secs(30));
        retry.failed(now);
        let soon = now + Duration::from_millis(900);
        assert_eq!(retry.failed(soon), Duration::from_millis(100));
        assert!(retry.is_due(now + Duration::from_secs(1)));
    }
}
