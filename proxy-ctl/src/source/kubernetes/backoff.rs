//! How long to wait before the next attempt.

use std::time::Duration;

use kube::runtime::{utils::Backoff as _, watcher::DefaultBackoff};

const LONGEST: Duration = Duration::from_secs(30);

/// As client-go's reflector: from 0.8 s to 30 s, each delay lengthened by up to its own length, so that the nodes of a
/// cluster do not come back all at once; but never longer than 30 s.
#[derive(Default)]
pub(super) struct Backoff(DefaultBackoff);

impl Backoff {
    /// The delay after one more failure.
    pub(super) fn next(&mut self) -> Duration {
        self.0.next().unwrap_or(LONGEST).min(LONGEST)
    }

    pub(super) fn reset(&mut self) {
        self.0.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_up_to_the_longest_and_start_again_after_a_success() {
        let mut backoff = Backoff::default();
        for shortest in [800, 1600, 3200, 6400, 12_800, 25_600, 30_000, 30_000] {
            let delay = backoff.next().as_millis();
            assert!((shortest..=(2 * shortest).min(30_000)).contains(&delay), "{delay} ms");
        }
        backoff.reset();
        assert!(backoff.next() <= Duration::from_millis(1600));
    }
}
