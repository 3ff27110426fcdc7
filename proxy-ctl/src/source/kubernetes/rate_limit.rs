//! No more requests to the API server than `clientConnection.qps` and `burst` allow.

use std::time::Duration;

use tokio::{
    sync::Mutex,
    time::{Instant, sleep},
};
use tracing::debug;

const DEFAULT_QPS: f64 = 5.0;
const DEFAULT_BURST: u32 = 10;
/// Longer waits are told.
const WORTH_TELLING: Duration = Duration::from_secs(1);

/// Shared by all requests of the process.
#[derive(Debug)]
pub(super) struct RateLimit(Option<Mutex<Bucket>>);

impl RateLimit {
    /// Zero stands for client-go's defaults, 5 and 10; a negative `qps` for no limit.
    pub(super) fn new(qps: f64, burst: u32) -> Self {
        if qps < 0.0 {
            return Self(None);
        }
        let per_second = if qps > 0.0 { qps } else { DEFAULT_QPS };
        let burst = if burst == 0 { DEFAULT_BURST } else { burst };
        Self(Some(Mutex::new(Bucket::new(per_second, burst, Instant::now()))))
    }

    /// Returns when one more request may be sent. First come, first served.
    pub(super) async fn wait(&self) {
        let Some(bucket) = &self.0 else { return };
        let began = Instant::now();
        // Held while waiting, so that nobody overtakes.
        let mut bucket = bucket.lock().await;
        while let Err(longer) = bucket.take(Instant::now()) {
            sleep(longer).await;
        }
        let waited = began.elapsed();
        if waited >= WORTH_TELLING {
            debug!(?waited, "a request to the API server has waited for clientConnection.qps");
        }
    }
}

/// A token bucket: `burst` requests at once, then `per_second`.
#[derive(Debug)]
struct Bucket {
    per_second: f64,
    burst: f64,
    tokens: f64,
    filled: Instant,
}

impl Bucket {
    fn new(per_second: f64, burst: u32, now: Instant) -> Self {
        let burst = f64::from(burst);
        Self { per_second, burst, tokens: burst, filled: now }
    }

    /// Takes a token, or says how long it takes until there is one.
    fn take(&mut self, now: Instant) -> Result<(), Duration> {
        let gained = now.saturating_duration_since(self.filled).as_secs_f64() * self.per_second;
        self.tokens = (self.tokens + gained).min(self.burst);
        self.filled = now;
        // What is missing may be less than a clock can tell.
        let missing = 1.0 - self.tokens;
        if missing > 1e-9 {
            let wait = Duration::try_from_secs_f64(missing / self.per_second).unwrap_or(Duration::MAX);
            return Err(wait.max(Duration::from_micros(1)));
        }
        self.tokens -= 1.0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_goes_at_once_and_the_rest_at_the_rate() {
        let start = Instant::now();
        let mut bucket = Bucket::new(5.0, 3, start);
        for _ in 0..3 {
            assert_eq!(bucket.take(start), Ok(()));
        }
        let wait = bucket.take(start).unwrap_err();
        assert_eq!(wait, Duration::from_millis(200));
        assert_eq!(bucket.take(start + wait), Ok(()));
        assert!(bucket.take(start + wait).is_err());
    }

    #[test]
    fn an_idle_time_gives_no_more_than_a_burst() {
        let start = Instant::now();
        let mut bucket = Bucket::new(5.0, 2, start);
        let later = start + Duration::from_secs(3600);
        assert_eq!((bucket.take(later), bucket.take(later)), (Ok(()), Ok(())));
        assert!(bucket.take(later).is_err());
    }

    #[tokio::test]
    async fn zero_is_the_default_and_a_negative_rate_no_limit() {
        let RateLimit(Some(bucket)) = RateLimit::new(0.0, 0) else { panic!("no limit") };
        let bucket = bucket.into_inner();
        assert_eq!((bucket.per_second, bucket.burst), (5.0, 10.0));
        assert!(RateLimit::new(-1.0, 10).0.is_none());
        // Far more than any bucket holds, at once.
        let unlimited = RateLimit::new(-1.0, 1);
        for _ in 0..1000 {
            unlimited.wait().await;
        }
    }
}
