//! Decides when work is done, like kube-proxy's `BoundedFrequencyRunner`, as plain data.
//!
//! A change is done at once, but not more often than allowed. After a failure work is tried again,
//! after a pause that doubles. Everything is inspected after the longest interval.

use std::time::{Duration, Instant};

const FIRST_RETRY: Duration = Duration::from_secs(1);

/// The extent of a run.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum RunScope {
    /// Only what has changed.
    Changes,
    /// Everything, because nothing was done yet or the last run has failed.
    Everything,
    /// Everything, although nothing has changed since the last time.
    Inspection,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Intervals {
    /// The mean interval between runs for changes. If it is zero, each change runs at once.
    pub(super) min: Duration,
    /// The number of runs for changes that need not wait for `min`.
    pub(super) burst: u32,
    /// The interval after which everything is inspected. Retries are not further apart either.
    pub(super) max: Duration,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct BoundedRunner {
    intervals: Intervals,
    asked: bool,
    /// The time up to which past runs have used up the rate limit: each run moves it by `min`. A
    /// run for changes begins at this time, or earlier by up to `burst - 1` intervals.
    paid_until: Instant,
    everything_at: Option<Instant>,
    inspection_at: Instant,
    next_retry: Duration,
    /// True once everything was done.
    complete: bool,
    failing: bool,
}

impl BoundedRunner {
    /// Returns a runner for which everything is due now.
    pub(super) fn new(now: Instant, intervals: Intervals) -> Self {
        Self {
            intervals,
            asked: false,
            paid_until: now,
            everything_at: Some(now),
            inspection_at: now + intervals.max,
            next_retry: FIRST_RETRY.min(intervals.max),
            complete: false,
            failing: false,
        }
    }

    pub(super) fn set_intervals(&mut self, intervals: Intervals, now: Instant) {
        self.intervals = intervals;
        self.next_retry = self.next_retry.min(intervals.max);
        self.inspection_at = self.inspection_at.min(now + intervals.max);
    }

    /// Makes everything due now, because nothing is known to be done.
    pub(super) fn begin_anew(&mut self, now: Instant) {
        self.everything_at = Some(now);
    }

    /// Records that something has changed.
    pub(super) fn ask(&mut self) {
        self.asked = true;
    }

    pub(super) fn due(&self, now: Instant) -> Option<RunScope> {
        let runs = [
            (self.everything_at, RunScope::Everything),
            (self.changes_at(), RunScope::Changes),
            (self.is_settled().then_some(self.inspection_at), RunScope::Inspection),
        ];
        runs.into_iter().find(|(at, _)| at.is_some_and(|at| at <= now)).map(|(_, scope)| scope)
    }

    /// Returns when something will be due without a request.
    pub(super) fn next(&self) -> Option<Instant> {
        let inspection = self.is_settled().then_some(self.inspection_at);
        [self.everything_at, self.changes_at(), inspection].into_iter().flatten().min()
    }

    /// Returns true if everything is done and nothing is planned but the next inspection.
    pub(super) fn is_settled(&self) -> bool {
        self.complete && !self.asked && self.everything_at.is_none()
    }

    pub(super) fn is_complete(&self) -> bool {
        self.complete
    }

    /// Returns true if a run has failed, and no run for everything has succeeded since.
    pub(super) fn is_failing(&self) -> bool {
        self.failing
    }

    pub(super) fn succeeded(&mut self, scope: RunScope, now: Instant) {
        self.ran(now);
        if scope != RunScope::Changes {
            self.everything_at = None;
            self.complete = true;
            self.failing = false;
            self.next_retry = FIRST_RETRY.min(self.intervals.max);
            self.inspection_at = now + self.intervals.max;
        }
    }

    /// Puts the next inspection off until then.
    pub(super) fn put_inspection_off(&mut self, until: Instant) {
        self.inspection_at = self.inspection_at.max(until);
    }

    /// Plans another run for everything, and returns the pause before it. A retry that is already
    /// planned is not put off.
    pub(super) fn failed(&mut self, now: Instant) -> Duration {
        self.ran(now);
        self.failing = true;
        if let Some(at) = self.everything_at.filter(|at| *at > now) {
            return at - now;
        }
        let pause = self.next_retry;
        self.everything_at = Some(now + pause);
        self.next_retry = (pause * 2).min(self.intervals.max);
        pause
    }

    fn ran(&mut self, now: Instant) {
        self.asked = false;
        self.paid_until = self.paid_until.max(now) + self.intervals.min;
    }

    /// Returns when changes may run. Changes alone cannot be written before everything was.
    fn changes_at(&self) -> Option<Instant> {
        let Intervals { min, burst, .. } = self.intervals;
        let in_advance = min * burst.saturating_sub(1);
        let at = self.paid_until.checked_sub(in_advance).unwrap_or(self.paid_until);
        (self.asked && self.complete).then_some(at)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn intervals(min: u64, burst: u32, max: u64) -> Intervals {
        Intervals { min: SECOND * min as u32, burst, max: SECOND * max as u32 }
    }

    fn complete(now: Instant, intervals: Intervals) -> BoundedRunner {
        let mut runner = BoundedRunner::new(now, intervals);
        assert_eq!(runner.due(now), Some(RunScope::Everything));
        runner.succeeded(RunScope::Everything, now);
        runner
    }

    #[rstest]
    #[case::short(10, 30)]
    #[case::long(100, 100)]
    fn inspections_that_take_long_are_further_apart(#[case] rest: u32, #[case] seconds: u32) {
        let now = Instant::now();
        let mut runner = complete(now, intervals(0, 1, 30));
        runner.succeeded(RunScope::Inspection, now);
        runner.put_inspection_off(now + SECOND * rest);
        assert_eq!(runner.next(), Some(now + SECOND * seconds));
    }

    #[test]
    fn everything_comes_first_and_then_changes_at_once() {
        let now = Instant::now();
        let mut runner = BoundedRunner::new(now, intervals(0, 1, 30));
        runner.ask();
        runner.failed(now);
        runner.ask();
        assert_eq!(runner.due(now), None, "changes alone are of no use before everything was written");
        runner.succeeded(RunScope::Everything, now);
        for _ in 0..100 {
            assert_eq!(runner.due(now), None);
            runner.ask();
            assert_eq!(runner.due(now), Some(RunScope::Changes));
            runner.succeeded(RunScope::Changes, now);
        }
    }

    #[test]
    fn pauses_double_up_to_the_longest_and_start_over_after_success() {
        let mut now = Instant::now();
        let mut runner = BoundedRunner::new(now, intervals(0, 1, 5));
        let mut pauses = Vec::new();
        for _ in 0..5 {
            assert_eq!(runner.due(now), Some(RunScope::Everything));
            let pause = runner.failed(now);
            assert_eq!(runner.due(now), None);
            assert_eq!(runner.next(), Some(now + pause));
            pauses.push(pause.as_secs());
            now += pause;
        }
        assert_eq!(pauses, [1, 2, 4, 5, 5]);
        assert!(runner.is_failing());
        runner.succeeded(RunScope::Everything, now);
        assert!(runner.is_settled() && !runner.is_failing());
        assert_eq!(runner.failed(now), SECOND);
    }

    #[test]
    fn changes_go_on_while_a_retry_is_planned_and_do_not_put_it_off() {
        let now = Instant::now();
        let mut runner = complete(now, intervals(0, 1, 30));
        runner.failed(now);
        let soon = now + Duration::from_millis(900);
        runner.ask();
        assert_eq!(runner.due(soon), Some(RunScope::Changes));
        assert_eq!(runner.failed(soon), Duration::from_millis(100));
        runner.ask();
        runner.succeeded(RunScope::Changes, soon);
        assert!(runner.is_failing() && !runner.is_settled());
        assert_eq!(runner.due(now + SECOND), Some(RunScope::Everything));
    }

    #[rstest]
    #[case::one_each_interval(intervals(2, 1, 30), &[2, 4, 6])]
    #[case::a_burst_first(intervals(2, 2, 30), &[0, 2, 4])]
    fn changes_wait_for_the_shortest_interval(#[case] intervals: Intervals, #[case] expected: &[u64]) {
        let start = Instant::now();
        let mut now = start;
        let mut runner = complete(now, intervals);
        let mut ran = Vec::new();
        for _ in 0..3 {
            runner.ask();
            now = runner.next().unwrap().max(now);
            assert_eq!(runner.due(now), Some(RunScope::Changes));
            runner.succeeded(RunScope::Changes, now);
            ran.push((now - start).as_secs());
        }
        assert_eq!(ran, expected);
    }

    #[test]
    fn an_inspection_comes_after_the_longest_interval_but_not_before_changes_and_retries() {
        let start = Instant::now();
        let mut runner = complete(start, intervals(0, 1, 30));
        let late = start + SECOND * 30;
        assert_eq!(runner.next(), Some(late));
        assert_eq!(runner.due(late), Some(RunScope::Inspection));
        runner.ask();
        assert_eq!(runner.due(late), Some(RunScope::Changes));
        runner.succeeded(RunScope::Changes, late);
        assert_eq!(runner.due(late), Some(RunScope::Inspection), "changes are no inspection");
        runner.failed(late);
        assert_eq!(runner.due(late), None);
        runner.succeeded(RunScope::Everything, late + SECOND);
        assert_eq!(runner.next(), Some(late + SECOND * 31));
    }

    #[test]
    fn a_shorter_longest_interval_counts_from_now() {
        let start = Instant::now();
        let mut runner = complete(start, intervals(0, 1, 30));
        runner.set_intervals(intervals(0, 1, 5), start + SECOND);
        assert_eq!(runner.next(), Some(start + SECOND * 6));
        runner.set_intervals(intervals(0, 1, 60), start + SECOND);
        assert_eq!(runner.next(), Some(start + SECOND * 6));
    }
}
