//! Removes the rules of another kube-proxy once this proxy serves every service port. After that it
//! reports rules that come back, which a kube-proxy that still runs writes. If those rules accepted
//! health checks of load balancers, these go on being accepted.

use std::{collections::BTreeSet, fmt::Display, sync::Arc, time::Duration};

use tokio::{sync::watch, time::Instant};

use super::event;
use crate::{
    cleanup::{self, FormerRules, Found, Part, PendingRemoval, Purpose, Removal, Retained},
    config::Config,
    controller::Coverage,
    events::Recorder,
    http::report::{HealthChecks, Metrics, ModeInForce},
    model::{desired::ServicePortName, mode::Mode},
    modes::{self, UnservedField, netfilter::AcceptedHealthChecks},
    names,
};

const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_mins(5);
/// The most service ports that are named as holding back the removal. The others are counted.
const MOST_NAMED: usize = 10;

pub(super) struct FormerRuleRemoval {
    pub(super) configs: watch::Receiver<Arc<Config>>,
    pub(super) coverage: watch::Receiver<Coverage>,
    pub(super) mode: watch::Receiver<ModeInForce>,
    /// Modes of this proxy that drain, and that the controller removes.
    pub(super) draining: watch::Receiver<Vec<Mode>>,
    pub(super) health_checks: watch::Receiver<HealthChecks>,
    /// The reasons that hold back the removal, for the record.
    pub(super) blockers: watch::Sender<Vec<String>>,
    pub(super) events: Recorder,
    pub(super) metrics: Arc<Metrics>,
}

struct Progress {
    former_rules: FormerRules,
    accepted: AcceptedHealthChecks,
    /// True once `accepted` has the tables that a former process of this proxy has left.
    has_adopted: bool,
    /// The ports of health checks that were written last.
    accepted_ports: BTreeSet<u16>,
    pending: PendingRemoval,
    next_attempt: Instant,
    pause: Duration,
    baseline: Baseline,
    reported: Reported,
}

impl FormerRuleRemoval {
    /// Removes and reports. It ends only if the controller ends before everything is programmed.
    pub(super) async fn follow(mut self) {
        if self.translates_in_connect() {
            deprecate_addresses().await;
        }
        if self.coverage.wait_for(|coverage| coverage.programmed).await.is_err() {
            return;
        }
        let mut progress = self.begin().await;
        loop {
            self.look_and_remove(&mut progress).await;
            self.accept_health_checks(&mut progress).await;
            // A running kube-proxy writes missing rules within its own sync period.
            let next_look = Instant::now() + self.configs.borrow().periods.sync;
            let held_back = !progress.reported.blockers.is_empty();
            let attempts = !progress.pending.is_empty() && !held_back;
            let next = if attempts { next_look.min(progress.next_attempt) } else { next_look };
            self.wait(next, held_back, &mut progress).await;
        }
    }

    /// Waits until the next search is due. Meanwhile it follows the ports of health checks.
    async fn wait(&mut self, next: Instant, held_back: bool, progress: &mut Progress) {
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(next) => return,
                _ = self.coverage.wait_for(|coverage| removal_blockers(coverage).next().is_none()), if held_back => return,
                Ok(()) = self.health_checks.changed(), if !progress.accepted.is_empty() => {}
            }
            if self.health_checks.borrow_and_update().ports() != progress.accepted_ports {
                self.accept_health_checks(progress).await;
            }
        }
    }

    /// Accepts health checks where a former kube-proxy did. What cannot be written is tried again
    /// after the next search.
    async fn accept_health_checks(&self, progress: &mut Progress) {
        if !progress.has_adopted {
            match blocking(&mut progress.accepted, AcceptedHealthChecks::adopt).await {
                Some(Ok(())) => progress.has_adopted = true,
                Some(Err(error)) => progress.reported.not_accepted(&error),
                None => {}
            }
        }
        if progress.accepted.is_empty() {
            return;
        }
        let ports = self.health_checks.borrow().ports();
        let wanted = ports.clone();
        let written = blocking(&mut progress.accepted, move |accepted| accepted.write(&wanted)).await;
        match written {
            Some(Ok(_)) => progress.accepted_ports = ports,
            Some(Err(error)) => progress.reported.not_accepted(&error),
            None => {}
        }
    }

    /// Accepts health checks wherever another kube-proxy does, before its rules are removed. Modes
    /// iptables and ipvs do so by rules of their own. Returns false if the removal has to wait for
    /// another attempt.
    async fn keep_accepting(&self, progress: &mut Progress) -> bool {
        if matches!(self.mode.borrow().modes.active, Mode::Iptables | Mode::Ipvs) {
            return true;
        }
        let ports = self.health_checks.borrow().ports();
        let taken_over = blocking(&mut progress.accepted, move |accepted| accepted.take_over(&ports)).await;
        match taken_over {
            Some(Ok(is_new)) => {
                if is_new {
                    tracing::info!(
                        "INPUT goes on accepting health checks of load balancers, as another kube-proxy's rules did, by the \
                         chain {}",
                        names::OWN_HEALTH_CHECKS
                    );
                }
                true
            }
            Some(Err(error)) => {
                progress.reported.not_accepted(&error);
                error.is_lasting()
            }
            None => false,
        }
    }

    fn translates_in_connect(&self) -> bool {
        modes::translates_in_connect(self.mode.borrow().modes.active, &self.configs.borrow())
    }

    /// Returns the progress at the beginning. With `ebpf.removeKubeProxyRules: false` nothing is
    /// pending.
    async fn begin(&self) -> Progress {
        let removes = self.configs.borrow().ebpf.remove_kube_proxy_rules;
        let by_connect = self.translates_in_connect();
        let mut progress = Progress {
            former_rules: FormerRules::default(),
            accepted: AcceptedHealthChecks::default(),
            has_adopted: false,
            accepted_ports: BTreeSet::new(),
            pending: if removes { PendingRemoval::before(by_connect) } else { PendingRemoval::default() },
            next_attempt: Instant::now(),
            pause: FIRST_PAUSE,
            baseline: Baseline::default(),
            reported: Reported::default(),
        };
        if !removes {
            let (found, _) = self.look(&mut progress.former_rules).await;
            progress.reported.unknown(&found);
            if !found.parts.is_empty() {
                tracing::warn!(
                    "rules of another kube-proxy are on this node and stay, as ebpf.removeKubeProxyRules is false: {}",
                    joined(&found.parts)
                );
            }
        }
        progress
    }

    /// Removes what another kube-proxy has left, and tries again until each removal has succeeded
    /// once. Rules that come back are reported and not removed again, because two proxies would
    /// write and remove them in turns.
    async fn look_and_remove(&self, progress: &mut Progress) {
        let blockers = blockers(&self.coverage.borrow());
        let attempts =
            blockers.is_empty() && !progress.pending.is_empty() && progress.next_attempt <= Instant::now();
        if attempts {
            self.remove(progress).await;
            progress.baseline.removed_since = true;
        }
        let (found, draining) = self.look(&mut progress.former_rules).await;
        progress.reported.unknown(&found);
        if found.parts.is_empty() && found.problems.is_empty() && !blockers.is_empty() {
            // Rules that appear from now on are those of a running kube-proxy.
            progress.pending = PendingRemoval::default();
        }
        let holds_back = !progress.pending.is_empty() && !found.parts.is_empty();
        self.hold_back(if holds_back { blockers } else { Vec::new() }, &found.parts, &mut progress.reported);
        if found.problems.is_empty() {
            self.metrics.own.former_rules.set(i64::try_from(found.count()).unwrap_or(i64::MAX));
            self.report_growth(&progress.baseline.update(&found.parts, draining), &mut progress.reported);
        }
    }

    async fn remove(&self, progress: &mut Progress) {
        if self.keep_accepting(progress).await {
            self.remove_rules(progress).await;
        } else {
            self.metrics.own.former_rule_errors.inc();
        }
        progress.next_attempt = Instant::now() + progress.pause;
        progress.pause = (progress.pause * 2).min(LONGEST_PAUSE);
    }

    async fn remove_rules(&self, progress: &mut Progress) {
        let config = Arc::clone(&self.configs.borrow());
        let pending = progress.pending.clone();
        let work = move |former_rules: &mut FormerRules| {
            former_rules.remove(Purpose::TakeOver, &config.ipvs.exclude_cidrs, &pending)
        };
        if let Some(removal) = blocking(&mut progress.former_rules, work).await {
            self.report_removal(&removal, progress);
            progress.pending = removal.pending;
        }
    }

    fn report_removal(&self, removal: &Removal, progress: &mut Progress) {
        progress.reported.removal(removal);
        if removal.problems.is_empty() {
            return;
        }
        self.metrics.own.former_rule_errors.inc();
        let problems = joined(&removal.problems);
        if problems != progress.reported.problems {
            tracing::warn!(
                next_attempt_in = ?progress.pause,
                "rules of another kube-proxy could not be removed, and may lead to endpoints that are gone: {problems}"
            );
            self.events.record(event::former_rules_stay(&problems));
            progress.reported.problems = problems;
        }
    }

    /// Reports what holds back the removal. `blockers` is empty if nothing is held back.
    fn hold_back(&self, blockers: Vec<String>, parts: &[Part], reported: &mut Reported) {
        if blockers == reported.blockers {
            return;
        }
        if blockers.is_empty() {
            tracing::info!("the removal of another kube-proxy's rules is no longer held back");
        } else {
            let (parts, blockers) = (joined(parts), joined(&blockers));
            tracing::warn!(
                "rules of another kube-proxy stay on this node ({parts}), because this proxy does not serve: {blockers}. \
                 They are removed once it serves them, or those Services are deleted"
            );
            self.events.record(event::former_rules_stay(&format!(
                "they stay because these are not served: {blockers}"
            )));
        }
        self.metrics.own.former_rule_blockers.set(i64::try_from(blockers.len()).unwrap_or(i64::MAX));
        self.blockers.send_replace(blockers.clone());
        reported.blockers = blockers;
    }

    fn report_growth(&self, grown: &[Part], reported: &mut Reported) {
        if !grown.is_empty() && !reported.other_runs {
            let parts = joined(grown);
            tracing::warn!(
                "another kube-proxy runs on this node: its rules are there again ({parts}). Two proxies must not run on one \
                 node: stop that one, then restart this one, which removes its rules"
            );
            self.events.record(event::former_rules_are_back(&parts));
        }
        reported.other_runs = !grown.is_empty();
    }

    /// Searches for what another kube-proxy has left. Returns it with the modes of this proxy that
    /// drain, whose rules the search leaves out.
    async fn look(&self, former_rules: &mut FormerRules) -> (Found, Vec<Mode>) {
        loop {
            let (config, draining) = (Arc::clone(&self.configs.borrow()), self.draining.borrow().clone());
            let but = draining.clone();
            let work =
                move |former_rules: &mut FormerRules| former_rules.find(&config.ipvs.exclude_cidrs, &but);
            let found = blocking(former_rules, work).await.unwrap_or_else(Found::unknown);
            // If a mode has released its lock during the search, its rules may count as former
            // rules.
            if *self.draining.borrow() == draining {
                return (found, draining);
            }
        }
    }
}

/// Returns what this proxy does not serve and the other kube-proxy may serve.
fn removal_blockers(coverage: &Coverage) -> impl Iterator<Item = (&ServicePortName, &UnservedField)> {
    coverage.unserved().filter(|(_, one)| one.may_be_served_by_another())
}

/// Returns the service ports that this proxy does not serve, each with the reason.
fn blockers(coverage: &Coverage) -> Vec<String> {
    let mut blockers: Vec<String> = removal_blockers(coverage)
        .map(|(name, one)| format!("{name} ({}: {})", one.field, one.instead))
        .collect();
    // Service ports of both families have the same name.
    blockers.dedup();
    let more = blockers.len().saturating_sub(MOST_NAMED);
    if more > 0 {
        blockers.truncate(MOST_NAMED);
        blockers.push(format!("{more} more"));
    }
    blockers
}

/// Runs `work` on a thread of its own, because large rule sets take long to read. Returns `None` if
/// it panicked, which is logged.
async fn blocking<S: Default + Send + 'static, T: Send + 'static>(
    state: &mut S,
    work: impl FnOnce(&mut S) -> T + Send + 'static,
) -> Option<T> {
    let mut lent = std::mem::take(state);
    let work = move || (work(&mut lent), lent);
    let failed = |error| tracing::error!(%error, "the work on another kube-proxy's rules failed");
    let (done, back) = tokio::task::spawn_blocking(work).await.map_err(failed).ok()?;
    *state = back;
    Some(done)
}

/// Deprecates the IPv6 addresses of kube-ipvs0, so that the node does not send from them to its
/// pods. It is also done where rules stay, because answers would go to a ClusterIP. The hooks in
/// `connect` come later, after the lists.
async fn deprecate_addresses() {
    let done = blocking(&mut (), |()| cleanup::deprecate_addresses()).await;
    if let Some(Err(error)) = done {
        tracing::warn!(
            %error,
            "IPv6 addresses of kube-ipvs0 may become the source of what this node sends to its pods, which is then without an answer"
        );
    }
}

fn joined(all: &[impl Display]) -> String {
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// The former rules that are expected while no other kube-proxy runs.
#[derive(Default)]
struct Baseline {
    /// The former rules of the first search, without those that were removed since. `None` before
    /// that search.
    parts: Option<Vec<Part>>,
    removed_since: bool,
    /// Modes of this proxy that drained at the last search. Their rules are not counted in `parts`.
    draining: Vec<Mode>,
}

impl Baseline {
    /// Returns the former rules of `now` that are new or more than expected. `now` does not count
    /// the rules of `draining`, the modes of this proxy that drain.
    ///
    /// When such a mode has ended, rules of it that other programs use are still there, and count
    /// as former rules from now on. So `now` is taken as what is expected.
    fn update(&mut self, now: &[Part], draining: Vec<Mode>) -> Vec<Part> {
        let before_it = std::mem::replace(&mut self.draining, draining);
        if before_it.iter().any(|mode| !self.draining.contains(mode)) {
            self.parts = None;
        }
        let before = self.parts.get_or_insert_with(|| now.to_vec());
        let more = grown(before, now);
        if std::mem::take(&mut self.removed_since) {
            *before = shrunk(before, now);
        }
        more
    }
}

/// Returns the former rules of `now` that are new or more than in `before`.
fn grown(before: &[Part], now: &[Part]) -> Vec<Part> {
    let was = |part: &Part| {
        let same = before.iter().find(|old| (&old.location, old.what) == (&part.location, part.what));
        same.map_or(0, |old| old.count)
    };
    now.iter().filter(|part| part.count > was(part)).cloned().collect()
}

/// Returns the former rules of `before` that are still there, each with the smaller count.
fn shrunk(before: &[Part], now: &[Part]) -> Vec<Part> {
    let still = |old: &Part| {
        let same = now.iter().find(|part| (&part.location, part.what) == (&old.location, old.what))?;
        Some(Part { count: old.count.min(same.count), ..old.clone() })
    };
    before.iter().filter_map(still).collect()
}

/// The last reports, so that each is logged only when it changes.
#[derive(Default)]
struct Reported {
    not_accepted: String,
    problems: String,
    unknown: String,
    waiting: usize,
    retained: Vec<Retained>,
    without_holder: Vec<String>,
    blockers: Vec<String>,
    other_runs: bool,
}

impl Reported {
    fn not_accepted(&mut self, error: &dyn Display) {
        let error = error.to_string();
        if error != self.not_accepted {
            tracing::warn!(
                "INPUT may drop health checks of load balancers, which another kube-proxy's rules accepted: {error}"
            );
            self.not_accepted = error;
        }
    }

    /// Logs if the search has failed in another way than before. Returns true if something was
    /// logged.
    fn unknown(&mut self, found: &Found) -> bool {
        let unknown = joined(&found.problems);
        let news = !unknown.is_empty() && unknown != self.unknown;
        if news {
            tracing::warn!("it is unknown whether another kube-proxy runs or has left rules: {unknown}");
        }
        self.unknown = unknown;
        news
    }

    fn removal(&mut self, removal: &Removal) {
        if !removal.parts.is_empty() {
            tracing::info!("removed rules of another kube-proxy: {}", joined(&removal.parts));
        }
        if removal.waiting > 0 && removal.waiting != self.waiting {
            tracing::info!(
                servers = removal.waiting,
                "virtual servers of another kube-proxy stay until their connections have ended"
            );
        }
        self.waiting = removal.waiting;
        for location in
            removal.without_holder.iter().filter(|location| !self.without_holder.contains(location))
        {
            tracing::warn!(
                location,
                "connections that another kube-proxy's rules have translated break, unless other rules translate too: the \
                 kernel lacks nf_tables with nft_chain_nat and nft_ct, which would keep them"
            );
        }
        self.without_holder.extend_from_slice(&removal.without_holder);
        for retained in self.new_retained(&removal.retained) {
            tracing::warn!(
                location = retained.location,
                name = retained.name,
                "of another kube-proxy, {}",
                retained.reason
            );
        }
    }

    fn new_retained<'a>(&mut self, retained: &'a [Retained]) -> Vec<&'a Retained> {
        let new: Vec<_> = retained.iter().filter(|one| !self.retained.contains(one)).collect();
        self.retained.extend(new.iter().map(|one| (*one).clone()));
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cleanup::PartKind,
        model::objects::{IpFamily, ObjectName, Protocol},
        modes::Effect,
        sys::CallError,
    };

    fn part(location: &str, count: usize) -> Part {
        Part { location: location.to_owned(), what: PartKind::Chains, count }
    }

    #[test]
    fn parts_that_stay_or_shrink_have_not_grown() {
        let before = [part("nat", 3), part("filter", 2)];
        assert_eq!(grown(&before, &before), []);
        assert_eq!(grown(&before, &[part("nat", 2)]), []);
        assert_eq!(grown(&before, &[part("nat", 4), part("mangle", 1)]), [part("nat", 4), part("mangle", 1)]);
    }

    /// Another kube-proxy has written chains again that the second attempt had removed.
    #[test]
    fn parts_that_come_back_have_grown() {
        let first = [part("nat", 3), part("filter", 2)];
        let second = shrunk(&first, &[part("filter", 2), part("mangle", 1)]);
        assert_eq!(second, [part("filter", 2)]);
        assert_eq!(grown(&second, &first), [part("nat", 3)]);
        assert_eq!(shrunk(&first, &[part("nat", 1), part("filter", 9)]), [part("nat", 1), part("filter", 2)]);
    }

    /// A search that failed shows neither removed nor new former rules.
    #[test]
    fn a_failed_search_changes_nothing() {
        let mut baseline = Baseline { removed_since: true, ..Baseline::default() };
        let stays = [part("nat", 3), part("filter", 2)];
        assert_eq!(baseline.update(&stays, Vec::new()), []);
        assert_eq!(baseline.update(&stays, Vec::new()), []);
        // The search after the next attempt fails.
        baseline.removed_since = true;
        assert_eq!(baseline.update(&stays[..1], Vec::new()), []);
        assert_eq!(baseline.update(&stays, Vec::new()), stays[1..]);
        // The new rules are reported and not removed.
        assert_eq!(baseline.update(&stays, Vec::new()), stays[1..]);
    }

    /// KUBE-FORWARD of mode iptables may stay. One chain more than that is another kube-proxy's.
    #[test]
    fn what_stays_of_an_own_mode_that_has_drained_has_not_grown() {
        let mut baseline = Baseline::default();
        assert_eq!(baseline.update(&[], Vec::new()), []);
        assert_eq!(baseline.update(&[], vec![Mode::Iptables]), []);
        assert_eq!(baseline.update(&[part("filter", 1)], Vec::new()), []);
        assert_eq!(baseline.update(&[part("filter", 2)], Vec::new()), [part("filter", 2)]);
        assert_eq!(baseline.update(&[part("filter", 2)], vec![Mode::Ipvs]), [part("filter", 2)]);
    }

    #[test]
    fn a_failed_search_is_logged_once_while_its_error_is_the_same() {
        let found = |call: Option<&'static str>| {
            let problem = |call| CallError::new(call, std::io::ErrorKind::TimedOut.into()).into();
            Found { parts: vec![part("nat", 3)], problems: call.map(problem).into_iter().collect() }
        };
        let mut reported = Reported::default();
        let calls = [None, Some("a"), Some("a"), Some("b"), None, Some("b")];
        let news = calls.map(|call| reported.unknown(&found(call)));
        assert_eq!(news, [false, true, false, true, false, true]);
        assert_eq!(Found::unknown().problems.len(), 1);
    }

    #[test]
    fn a_retained_chain_is_logged_once() {
        let retained =
            |name: &str| Retained { location: "nat".into(), name: name.into(), reason: "in use".into() };
        let mut reported = Reported::default();
        assert_eq!(reported.new_retained(&[retained("KUBE-A")]), [&retained("KUBE-A")]);
        assert_eq!(reported.new_retained(&[retained("KUBE-A"), retained("KUBE-B")]), [&retained("KUBE-B")]);
        assert!(reported.new_retained(&[retained("KUBE-B"), retained("KUBE-A")]).is_empty());
    }

    fn unserved(name: &str, effect: Effect) -> (ServicePortName, Vec<UnservedField>) {
        let name = ServicePortName {
            service: ObjectName::new("default", name),
            port: "".into(),
            protocol: Protocol::Tcp,
            family: IpFamily::Ipv4,
        };
        (name, vec![UnservedField { field: "spec.x", effect, instead: "not served".into() }])
    }

    #[test]
    fn some_of_many_blockers_are_named_and_the_others_counted() {
        let unserved_fields =
            (10..30).map(|number| unserved(&format!("s{number}"), Effect::NotServed)).collect();
        let blockers = blockers(&Coverage { unserved_fields, ..Coverage::default() });
        assert_eq!((blockers.len(), blockers[MOST_NAMED].as_str()), (MOST_NAMED + 1, "10 more"));
    }
}
