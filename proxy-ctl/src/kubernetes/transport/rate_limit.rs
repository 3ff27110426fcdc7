//! The limit of `clientConnection.qps` and `burst` for requests to the API server.

use std::{num::NonZeroU32, time::Duration};

use governor::{
    DefaultDirectRateLimiter, Quota,
    clock::{Clock as _, DefaultClock},
};
use tokio::{
    sync::Mutex,
    time::{Instant, sleep},
};
use tracing::debug;

const DEFAULT_QPS: f64 = 5.0;
const DEFAULT_BURST: NonZeroU32 = NonZeroU32::new(10).unwrap();
/// The wait from which on a request is logged.
const LONG_WAIT: Duration = Duration::from_secs(1);

/// The rate limit that all requests of the process share. None means no limit. The lock is held
/// while waiting, so that requests keep their order: governor itself lets any waiting request go
/// next.
#[derive(Debug)]
pub(crate) struct RateLimit(Option<Mutex<DefaultDirectRateLimiter>>);

impl RateLimit {
    /// Makes a limit. Zero stands for client-go's defaults, 5 and 10. A negative `qps` means no
    /// limit.
    pub(crate) fn new(qps: f64, burst: u32) -> Self {
        let per_second = if qps == 0.0 { DEFAULT_QPS } else { qps };
        let burst = NonZeroU32::new(burst).unwrap_or(DEFAULT_BURST);
        let period = Duration::try_from_secs_f64(1.0 / per_second).ok();
        let quota = period.and_then(Quota::with_period).map(|quota| quota.allow_burst(burst));
        Self(quota.map(|quota| Mutex::new(DefaultDirectRateLimiter::direct(quota))))
    }

    /// Returns when one more request may be sent. Requests are sent in the order in which they
    /// came.
    pub(crate) async fn wait(&self) {
        let Some(limiter) = &self.0 else { return };
        let began = Instant::now();
        let limiter = limiter.lock().await;
        while let Err(early) = limiter.check() {
            sleep(early.wait_time_from(DefaultClock::default().now())).await;
        }
        let waited = began.elapsed();
        if waited >= LONG_WAIT {
            debug!(?waited, "a request to the API server has waited for clientConnection.qps");
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// Returns how many of 1000 requests may go at once.
    fn at_once(limit: &RateLimit) -> usize {
        let Some(limiter) = &limit.0 else { return 1000 };
        let limiter = limiter.try_lock().unwrap();
        (0..1000).take_while(|_| limiter.check().is_ok()).count()
    }

    #[rstest]
    #[case::as_said(0.001, 3, 3)]
    #[case::zero_is_the_default(0.0, 0, 10)]
    #[case::no_limit(-1.0, 10, 1000)]
    fn a_burst_goes_at_once(#[case] qps: f64, #[case] burst: u32, #[case] expected: usize) {
        assert_eq!(at_once(&RateLimit::new(qps, burst)), expected);
    }

    #[tokio::test]
    async fn the_rest_goes_at_the_rate() {
        let limit = RateLimit::new(50.0, 1);
        let began = Instant::now();
        for _ in 0..4 {
            limit.wait().await;
        }
        let elapsed = began.elapsed();
        assert!(elapsed >= Duration::from_millis(55), "{elapsed:?}");
    }
}
