//! What another kube-proxy has left is removed once everything that it served is served by us, and looked for from then
//! on: one that is still at work writes it again.

use std::{sync::Arc, time::Duration};

use tokio::{sync::watch, time::Instant};

use super::event;
use crate::{
    config::Config,
    controller::Coverage,
    events::Recorder,
    leftovers::{Error, Extent, Found, Kept, Leftovers, Owed, Part, Removed},
    report::Metrics,
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
    pub(super) async fn follow(self, mut coverage: watch::Receiver<Coverage>) {
        if coverage.wait_for(|coverage| coverage.programmed).await.is_err() {
            return;
        }
        let (mut leftovers, mut told) = (Leftovers::default(), Told::default());
        let owed = if self.configs.borrow().ebpf.remove_kube_proxy_rules {
            Owed::everything()
        } else {
            self.leave(&mut leftovers, &mut told).await;
            Owed::default()
        };
        self.remove_and_watch(owed, leftovers, told).await;
    }

    async fn leave(&self, leftovers: &mut Leftovers, told: &mut Told) {
        let found = self.look(leftovers).await;
        told.unknown(&found);
        if !found.parts.is_empty() {
            tracing::warn!(
                "rules of another kube-proxy are on this node and stay, as ebpf.removeKubeProxyRules is false: {}",
                in_words(&found.parts)
            );
        }
    }

    /// Removes what is owed, each part until that has succeeded once, and tells of what comes back. That is not removed
    /// again: two that write the same rules in turns help nobody.
    async fn remove_and_watch(&self, mut owed: Owed, mut leftovers: Leftovers, mut told: Told) {
        let (mut pause, mut attempt_at) = (FIRST_PAUSE, Instant::now());
        let mut quiet = Quiet::default();
        loop {
            let attempts = !owed.is_empty() && attempt_at <= Instant::now();
            if attempts {
                owed = self.remove(&mut leftovers, owed, pause, &mut told).await;
                attempt_at = Instant::now() + pause;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            quiet.removal |= attempts;
            let found = self.look(&mut leftovers).await;
            told.unknown(&found);
            if found.problems.is_empty() {
                self.count(&found);
                let more = quiet.look(&found.parts);
                if !more.is_empty() && !told.back {
                    let parts = in_words(&more);
                    tracing::warn!(
                        "another kube-proxy is at work on this node: its rules are there again ({parts}). Two proxies get \
                         in each other's way: end that one, then start this one anew, which removes them"
                    );
                    self.events.record(event::former_rules_are_back(&parts));
                }
                told.back = !more.is_empty();
            }
            // In less time than this, a kube-proxy writes anew what it misses.
            let next_look = Instant::now() + self.configs.borrow().sync_period();
            let next = if owed.is_empty() { next_look } else { next_look.min(attempt_at) };
            tokio::time::sleep_until(next).await;
        }
    }

    /// Answers with what is left to be removed. `pause`: until the next attempt.
    async fn remove(&self, leftovers: &mut Leftovers, owed: Owed, pause: Duration, told: &mut Told) -> Owed {
        let config = Arc::clone(&self.configs.borrow());
        let kept_for = owed.clone();
        let work = move |leftovers: &mut Leftovers| {
            leftovers.remove(Extent::Served, &config.ipvs.exclude_cidrs, &owed)
        };
        let Some(removed) = blocking(leftovers, work).await else { return kept_for };
        told.removed(&removed);
        let problems = joined(&removed.problems);
        self.metrics.former_rule_errors.inc_by(u64::from(!problems.is_empty()));
        if !problems.is_empty() && problems != told.problems {
            tracing::warn!(
                next_attempt_in = ?pause,
                "rules of another kube-proxy are still on this node, and lead to the endpoints of its time: {problems}"
            );
            self.events.record(event::former_rules_stay(&problems));
            told.problems = problems;
        }
        removed.owed
    }

    async fn look(&self, leftovers: &mut Leftovers) -> Found {
        let config = Arc::clone(&self.configs.borrow());
        let work = move |leftovers: &mut Leftovers| leftovers.find(&config.ipvs.exclude_cidrs);
        blocking(leftovers, work).await.unwrap_or_else(Found::unknown)
    }

    fn count(&self, found: &Found) {
        self.metrics.former_rules.set(i64::try_from(found.count()).unwrap_or(i64::MAX));
    }
}

/// The calls to the kernel take long where there is much. `None`: it could not be done, which is told.
async fn blocking<T: Send + 'static>(
    leftovers: &mut Leftovers,
    work: impl FnOnce(&mut Leftovers) -> T + Send + 'static,
) -> Option<T> {
    let mut lent = std::mem::take(leftovers);
    let work = move || (work(&mut lent), lent);
    let failed = |error| tracing::error!(%error, "looking for what another kube-proxy has left failed");
    let (done, back) = tokio::task::spawn_blocking(work).await.map_err(failed).ok()?;
    *leftovers = back;
    Some(done)
}

fn joined(problems: &[Error]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// What is there while no other kube-proxy is at work.
#[derive(Default)]
struct Quiet {
    /// `None`: nothing has been seen yet.
    parts: Option<Vec<Part>>,
    /// Something may have been removed since.
    removal: bool,
}

impl Quiet {
    /// `now`: all that is there. Answers with what somebody has written since.
    fn look(&mut self, now: &[Part]) -> Vec<Part> {
        let before = self.parts.get_or_insert_with(|| now.to_vec());
        let more = grown(before, now);
        if std::mem::take(&mut self.removal) {
            *before = shrunk(before, now);
        }
        more
    }
}

/// What need not be told again.
#[derive(Default)]
struct Told {
    problems: String,
    /// Why it is not known what is there.
    unknown: String,
    waiting: usize,
    kept: Vec<Kept>,
    not_held: Vec<String>,
    back: bool,
}

impl Told {
    /// Answers whether there was something to tell.
    fn unknown(&mut self, found: &Found) -> bool {
        let unknown = joined(&found.problems);
        let news = !unknown.is_empty() && unknown != self.unknown;
        if news {
            tracing::warn!(
                "what another kube-proxy has left cannot be told, nor whether one is at work: {unknown}"
            );
        }
        self.unknown = unknown;
        news
    }

    fn removed(&mut self, removed: &Removed) {
        if !removed.parts.is_empty() {
            tracing::info!("removed what another kube-proxy had left: {}", in_words(&removed.parts));
        }
        if removed.waiting > 0 && removed.waiting != self.waiting {
            tracing::info!(
                servers = removed.waiting,
                "virtual servers of it stay until their connections have ended"
            );
        }
        self.waiting = removed.waiting;
        for place in removed.not_held.iter().filter(|place| !self.not_held.contains(place)) {
            tracing::warn!(
                place,
                "connections that another kube-proxy's rules have translated end, unless somebody else translates: the \
                 kernel lacks what would keep them (nf_tables with nft_chain_nat and nft_ct)"
            );
        }
        self.not_held.extend_from_slice(&removed.not_held);
        for kept in self.news(&removed.kept) {
            tracing::warn!(place = kept.place, name = kept.name, "of another kube-proxy, {}", kept.why);
        }
    }

    fn news<'a>(&mut self, kept: &'a [Kept]) -> Vec<&'a Kept> {
        let news: Vec<_> = kept.iter().filter(|kept| !self.kept.contains(kept)).collect();
        self.kept.extend(news.iter().map(|kept| (*kept).clone()));
        news
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

/// What was there before and still is, at most as many.
fn shrunk(before: &[Part], now: &[Part]) -> Vec<Part> {
    let still = |old: &Part| {
        let same = now.iter().find(|part| (&part.place, part.what) == (&old.place, old.what))?;
        Some(Part { count: old.count.min(same.count), ..old.clone() })
    };
    before.iter().filter_map(still).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{leftovers::What, sys::CallError};

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

    /// Chains that were removed at the second attempt, and written again by somebody.
    #[test]
    fn what_comes_back_after_it_was_removed_has_come_back() {
        let first = [part("nat", 3), part("filter", 2)];
        let second = shrunk(&first, &[part("filter", 2), part("mangle", 1)]);
        assert_eq!(second, [part("filter", 2)]);
        assert_eq!(grown(&second, &first), [part("nat", 3)]);
        assert_eq!(shrunk(&first, &[part("nat", 1), part("filter", 9)]), [part("nat", 1), part("filter", 2)]);
    }

    /// What could not be looked at is neither gone nor back.
    #[test]
    fn a_look_that_failed_changes_nothing() {
        let mut quiet = Quiet { removal: true, ..Quiet::default() };
        let stays = [part("nat", 3), part("filter", 2)];
        assert_eq!(quiet.look(&stays), []);
        assert_eq!(quiet.look(&stays), []);
        // An attempt, and no look after it.
        quiet.removal = true;
        assert_eq!(quiet.look(&stays[..1]), []);
        assert_eq!(quiet.look(&stays), stays[1..]);
        // That is not fought, and stays said.
        assert_eq!(quiet.look(&stays), stays[1..]);
    }

    #[test]
    fn why_nothing_is_known_is_told_once_while_it_stays_the_same() {
        let found = |call: Option<&'static str>| {
            let problem = |call| CallError::new(call, std::io::ErrorKind::TimedOut.into()).into();
            Found { parts: vec![part("nat", 3)], problems: call.map(problem).into_iter().collect() }
        };
        let mut told = Told::default();
        let calls = [None, Some("a"), Some("a"), Some("b"), None, Some("b")];
        let news = calls.map(|call| told.unknown(&found(call)));
        assert_eq!(news, [false, true, false, true, false, true]);
        assert_eq!(Found::unknown().problems.len(), 1);
    }

    #[test]
    fn what_stays_is_told_once_whatever_was_removed() {
        let kept = |name: &str| Kept { place: "nat".into(), name: name.into(), why: "in use".into() };
        let mut told = Told::default();
        assert_eq!(told.news(&[kept("KUBE-A")]), [&kept("KUBE-A")]);
        assert_eq!(told.news(&[kept("KUBE-A"), kept("KUBE-B")]), [&kept("KUBE-B")]);
        assert!(told.news(&[kept("KUBE-B"), kept("KUBE-A")]).is_empty());
    }
}
