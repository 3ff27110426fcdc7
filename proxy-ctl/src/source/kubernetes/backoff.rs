//! How long to wait before the next attempt.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    time::Duration,
};

const FIRST: Duration = Duration::from_millis(800);
const LONGEST: Duration = Duration::from_secs(30);

/// Exponential, from 0.8 s to 30 s as in client-go, each delay lengthened by up to its own length, so
/// that the nodes of a cluster do not come back all at once.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// The delay after one more failure; `random` is in 0..1.
    pub(super) fn next(&mut self, random: f64) -> Duration {
        let delay = FIRST.saturating_mul(1 << self.failures.min(10)).min(LONGEST);
        self.failures = self.failures.saturating_add(1);
        delay.mul_f64(1.0 + random.clamp(0.0, 1.0)).min(LONGEST)
    }

    pub(super) fn reset(&mut self) {
        self.failures = 0;
    }
}

/// In 0..1, evenly spread; not for secrets.
pub(super) fn random() -> f64 {
    // Each RandomState hashes with keys of its own.
    let bits = RandomState::new().build_hasher().finish() >> 11;
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit into a double exactly")]
    let numerator = bits as f64;
    numerator / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_longest_and_start_again_after_a_success() {
        let mut backoff = Backoff::default();
        let delays: Vec<u128> = (0..8).map(|_| backoff.next(0.0).as_millis()).collect();
        assert_eq!(delays, [800, 1600, 3200, 6400, 12_800, 25_600, 30_000, 30_000]);
        backoff.reset();
        assert_eq!(backoff.next(0.0), FIRST);
    }

    #[test]
    fn jitter_lengthens_a_delay_and_never_beyond_the_longest() {
        let mut backoff = Backoff::default();
        assert_eq!(backoff.next(0.5), Duration::from_millis(1200));
        for _ in 0..100 {
            let drawn = random();
            assert!((0.0..1.0).contains(&drawn), "{drawn}");
            assert!(backoff.next(drawn) <= LONGEST);
        }
    }
}
