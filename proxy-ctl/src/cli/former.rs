//! What another kube-proxy has left is removed once everything that it served is served by us, and looked for from then
//! on: one that is still at work writes it again.

use std::{sync::Arc, time::Duration};

use tokio::sync::watch;

use crate::{
    config::Config,
    events::Recorder,
    leftovers::{self, Extent, Found, Part, Removed},
    serve::Metrics,
    start::event,
};

const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_mins(5);

pub(super) struct Former {
    pub(super) configs: watch::Receiver<Arc<Config>>,
    pub(super) events: Recorder,
    pub(super) metrics: Arc<Metrics>,
}

impl Former {
    /// Does not end, unless nothing will ever be served.
    pub(super) async fn follow(self, mut programmed: watch::Receiver<bool>) {
        if programmed.wait_for(|programmed| *programmed).await.is_err() {
            return;
        }
        if self.configs.borrow().ebpf.remove_kube_proxy_rules {
            self.remove().await;
        } else {
            self.leave().await;
        }
        self.watch().await;
    }

    async fn leave(&self) {
        let found = self.look().await;
        if !found.parts.is_empty() {
            tracing::warn!(
                "rules of another kube-proxy are on this node and stay, as ebpf.removeKubeProxyRules is false: {}",
                in_words(&found.parts)
            );
        }
    }

    /// Until nothing is left that could be removed.
    async fn remove(&self) {
        let (mut pause, mut said) = (FIRST_PAUSE, String::new());
        loop {
            let config = Arc::clone(&self.configs.borrow());
            let removed =
                blocking(move || leftovers::remove(Extent::Served, &config.ipvs.exclude_cidrs)).await;
            tell(&removed);
            if removed.problems.is_empty() && removed.waiting == 0 {
                return;
            }
            let problems: Vec<_> = removed.problems.iter().map(ToString::to_string).collect();
            let problems = problems.join("; ");
            self.metrics.former_rule_errors.inc_by(u64::from(!problems.is_empty()));
            if !problems.is_empty() && problems != said {
                tracing::warn!(
                    next_attempt_in = ?pause,
                    "rules of another kube-proxy are still on this node, and lead to the endpoints of its time: {problems}"
                );
                self.events.record(event::former_rules_stay(&problems));
                said = problems;
            }
            self.count(&self.look().await);
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Tells of what comes back. It is not removed again: two that write the same rules in turns help nobody.
    async fn watch(&self) {
        let quiet = self.look().await;
        self.count(&quiet);
        let mut told = false;
        loop {
            // In less time than this, a kube-proxy writes anew what it misses.
            let period = self.configs.borrow().sync_period();
            tokio::time::sleep(period).await;
            let found = self.look().await;
            self.count(&found);
            let more = grown(&quiet.parts, &found.parts);
            if !more.is_empty() && !told {
                let parts = in_words(&more);
                tracing::warn!(
                    "another kube-proxy is at work on this node: its rules are there again ({parts}). Two proxies get in \
                     each other's way: end that one, then start this one anew, which removes them"
                );
                self.events.record(event::former_rules_are_back(&parts));
            }
            told = !more.is_empty();
        }
    }

    async fn look(&self) -> Found {
        let config = Arc::clone(&self.configs.borrow());
        blocking(move || leftovers::find(&config.ipvs.exclude_cidrs)).await
    }

    fn count(&self, found: &Found) {
        self.metrics.former_rules.set(i64::try_from(found.count()).unwrap_or(i64::MAX));
    }
}

/// The calls to the kernel take long where there is much.
async fn blocking<T: Default + Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        tracing::error!(%error, "looking for what another kube-proxy has left failed");
        T::default()
    })
}

fn tell(removed: &Removed) {
    if removed.parts.is_empty() {
        return;
    }
    tracing::info!("removed what another kube-proxy had left: {}", in_words(&removed.parts));
    if removed.waiting > 0 {
        tracing::info!(
            servers = removed.waiting,
            "virtual servers of it stay until their connections have ended"
        );
    }
    for kept in &removed.kept {
        tracing::warn!(place = kept.place, name = kept.name, "of another kube-proxy, {}", kept.why);
    }
}

fn in_words(parts: &[Part]) -> String {
    parts.iter().map(Part::to_string).collect::<Vec<_>>().join(", ")
}

/// What is there now and was not, or was fewer.
fn grown(before: &[Part], now: &[Part]) -> Vec<Part> {
    let was = |part: &Part| {
        let same = before.iter().find(|old| (&old.place, old.what) == (&part.place, part.what));
        same.map_or(0, |old| old.count)
    };
    now.iter().filter(|part| part.count > was(part)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leftovers::What;

    fn part(place: &str, count: usize) -> Part {
        Part { place: place.to_owned(), what: What::Chains, count }
    }

    #[test]
    fn what_stays_or_goes_has_not_come_back() {
        let before = [part("nat", 3), part("filter", 2)];
        assert_eq!(grown(&before, &before), []);
        assert_eq!(grown(&before, &[part("nat", 2)]), []);
        assert_eq!(grown(&before, &[part("nat", 4), part("mangle", 1)]), [part("nat", 4), part("mangle", 1)]);
    }
}
