//! The health of this node's proxy, by kube-proxy's rules. An IP family is unhealthy when a change
//! has been waiting for [`Health::timeout`] without a successful sync. A node that is being deleted
//! is not eligible.
//!
//! One rule is not kube-proxy's: both IP families are unhealthy when one call of the dataplane
//! takes longer than the timeout.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use jiff::Timestamp;
use serde::Serialize;

use crate::model::objects::{IpFamily, Node};

/// The taint that the cluster autoscaler puts on a node before it deletes the node.
const TO_BE_DELETED: &str = "ToBeDeletedByClusterAutoscaler";

/// A moment on two clocks: the monotonic one to measure, and the wall clock to show.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    pub instant: Instant,
    pub time: Timestamp,
}

impl Moment {
    pub fn now() -> Self {
        Self { instant: Instant::now(), time: Timestamp::now() }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct FamilyHealth {
    last_updated: Option<Moment>,
    oldest_pending: Option<Instant>,
}

#[derive(Debug)]
pub struct Health {
    timeout: Duration,
    families: [FamilyHealth; 2],
    busy_since: Option<Instant>,
    node_eligible: bool,
    /// The reason why not everything that was listed is programmed. `None` if everything is.
    unprogrammed: Option<String>,
}

impl Health {
    /// Makes the health of a process that has just begun. The node is not eligible before the Node
    /// is known.
    pub fn new(sync_period: Duration) -> Self {
        Self {
            timeout: sync_period * 2,
            families: Default::default(),
            busy_since: None,
            node_eligible: false,
            unprogrammed: Some("the process has just begun".to_owned()),
        }
    }

    pub fn set_sync_period(&mut self, sync_period: Duration) {
        self.timeout = sync_period * 2;
    }

    /// Notes that a change of this IP family waits to be written.
    pub fn queued(&mut self, family: IpFamily, now: Instant) {
        self.family(family).oldest_pending.get_or_insert(now);
    }

    /// Notes that everything of this IP family has been written.
    pub fn updated(&mut self, family: IpFamily, now: Moment) {
        *self.family(family) = FamilyHealth { last_updated: Some(now), oldest_pending: None };
    }

    /// Notes that the dataplane's thread begins work that can block.
    pub fn busy(&mut self, now: Instant) {
        self.busy_since.get_or_insert(now);
    }

    /// Notes that the dataplane's thread is done and waits for more work.
    pub fn idle(&mut self) {
        self.busy_since = None;
    }

    /// Notes whether everything that was listed is programmed, and if not, why. A change that is
    /// about to be written does not count.
    pub fn set_programmed(&mut self, programmed: Result<(), String>) {
        self.unprogrammed = programmed.err();
    }

    /// Returns the reason why not everything that was listed is programmed. `None` if everything
    /// is.
    pub fn unprogrammed(&self) -> Option<String> {
        self.unprogrammed.clone()
    }

    pub fn set_node(&mut self, node: Option<&Node>) {
        self.node_eligible = node.is_some_and(|node| {
            !node.being_deleted && !node.taints.iter().any(|taint| &**taint == TO_BE_DELETED)
        });
    }

    fn family(&mut self, family: IpFamily) -> &mut FamilyHealth {
        match family {
            IpFamily::Ipv4 => &mut self.families[0],
            IpFamily::Ipv6 => &mut self.families[1],
        }
    }

    pub fn report(&self, now: Moment) -> HealthReport {
        let families = self.families.map(|family| {
            let late = |since: Instant| now.instant.saturating_duration_since(since) >= self.timeout;
            let healthy = !family.oldest_pending.is_some_and(late) && !self.busy_since.is_some_and(late);
            family.last_updated.map(|moment| FamilyReport { last_updated: moment.time, healthy })
        });
        HealthReport {
            now: now.time,
            healthy: families.iter().flatten().all(|family| family.healthy),
            node_eligible: self.node_eligible,
            families,
        }
    }
}

/// The report of an IP family. There is none for a family that was never updated.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct FamilyReport {
    last_updated: Timestamp,
    healthy: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct HealthReport {
    now: Timestamp,
    pub healthy: bool,
    pub node_eligible: bool,
    families: [Option<FamilyReport>; 2],
}

/// The body of an answer, with its fields in kube-proxy's order.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Body {
    last_updated: String,
    current_time: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_eligible: Option<bool>,
    healthy: bool,
    #[serde(skip_serializing_if = "FamilyReports::is_empty")]
    status: FamilyReports,
}

#[derive(Serialize)]
struct FamilyReports {
    #[serde(rename = "IPv4", skip_serializing_if = "Option::is_none")]
    v4: Option<FamilyReport>,
    #[serde(rename = "IPv6", skip_serializing_if = "Option::is_none")]
    v6: Option<FamilyReport>,
}

impl FamilyReports {
    fn is_empty(&self) -> bool {
        self.v4.is_none() && self.v6.is_none()
    }
}

impl HealthReport {
    /// Returns the body as one line of JSON. With `with_node` it says whether the node is eligible
    /// for load balancers. `well` is true if the status is 200. `lastUpdated` is then the current
    /// time, and otherwise the time of the last update.
    pub(crate) fn body(&self, with_node: bool, well: bool) -> String {
        let newest = self.families.iter().flatten().map(|family| family.last_updated).max();
        let [v4, v6] = self.families;
        let body = Body {
            last_updated: time(if well { Some(self.now) } else { newest }),
            current_time: self.now,
            node_eligible: with_node.then_some(self.node_eligible),
            healthy: self.healthy,
            status: FamilyReports { v4, v6 },
        };
        // The body has only texts and booleans, so this cannot fail.
        serde_json::to_string(&body).unwrap_or_default()
    }
}

/// Returns a time as text. As in Go, the zero time stands for what never happened.
fn time(time: Option<Timestamp>) -> String {
    time.map_or_else(|| "0001-01-01T00:00:00Z".to_owned(), |time| time.to_string())
}

/// The health that the controller writes and the servers read.
#[derive(Debug)]
pub struct SharedHealth(Mutex<Health>);

impl SharedHealth {
    pub fn new(health: Health) -> Self {
        Self(Mutex::new(health))
    }

    /// Locks the health. A thread that panicked while it held the lock leaves the health usable,
    /// because each change is a plain store.
    pub fn lock(&self) -> MutexGuard<'_, Health> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn report(&self) -> HealthReport {
        self.lock().report(Moment::now())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const PERIOD: Duration = Duration::from_secs(30);

    fn after(start: Moment, seconds: u64) -> Moment {
        let wait = Duration::from_secs(seconds);
        Moment { instant: start.instant + wait, time: start.time + wait }
    }

    fn healthy(health: &Health, at: Moment) -> bool {
        health.report(at).healthy
    }

    #[test]
    fn a_family_without_changes_stays_healthy() {
        let start = Moment::now();
        let mut health = Health::new(PERIOD);
        assert!(healthy(&health, start));
        health.updated(IpFamily::Ipv4, start);
        assert!(healthy(&health, after(start, 100_000)));
    }

    #[test]
    fn a_change_that_waits_for_two_sync_periods_is_unhealthy_until_written() {
        let start = Moment::now();
        let mut health = Health::new(PERIOD);
        health.updated(IpFamily::Ipv6, start);
        health.queued(IpFamily::Ipv6, start.instant);
        health.queued(IpFamily::Ipv6, after(start, 50).instant);
        assert!(healthy(&health, after(start, 59)));
        assert!(!healthy(&health, after(start, 60)));
        health.updated(IpFamily::Ipv6, after(start, 61));
        assert!(healthy(&health, after(start, 62)));
    }

    #[test]
    fn a_call_that_does_not_end_is_unhealthy_until_it_ends() {
        let start = Moment::now();
        let mut health = Health::new(PERIOD);
        for family in IpFamily::ALL {
            health.updated(family, start);
        }
        health.busy(start.instant);
        health.busy(after(start, 59).instant);
        assert!(healthy(&health, after(start, 59)));
        assert!(!healthy(&health, after(start, 60)));
        health.idle();
        assert!(healthy(&health, after(start, 1000)));
        health.busy(after(start, 1000).instant);
        assert!(healthy(&health, after(start, 1001)));
    }

    #[test]
    fn nothing_is_unhealthy_before_the_first_update() {
        let start = Moment::now();
        let mut health = Health::new(PERIOD);
        health.queued(IpFamily::Ipv4, start.instant);
        assert!(healthy(&health, after(start, 1000)));
    }

    #[rstest]
    #[case::unknown(None, false)]
    #[case::fine(Some(Node::default()), true)]
    #[case::being_deleted(Some(Node { being_deleted: true, ..Node::default() }), false)]
    #[case::autoscaler(Some(Node { taints: vec![TO_BE_DELETED.into()], ..Node::default() }), false)]
    #[case::cordoned(Some(Node { taints: vec!["node.kubernetes.io/unschedulable".into()], ..Node::default() }), true)]
    fn node_eligibility(#[case] node: Option<Node>, #[case] eligible: bool) {
        let mut health = Health::new(PERIOD);
        health.set_node(node.as_ref());
        assert_eq!(health.report(Moment::now()).node_eligible, eligible);
    }
}
