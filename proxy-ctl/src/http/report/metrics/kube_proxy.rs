//! The metric families of kube-proxy: those that every mode of kube-proxy has, and those of its
//! rule-writing modes that have a meaning here. Names, types, labels and buckets are kube-proxy's.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus_client::{
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};

use super::{ByIpFamily, Label, Seconds};
use crate::model::objects::IpFamily;

/// The extent of a write.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SyncKind {
    /// Everything was compared and written.
    Full,
    /// Only what had changed was written.
    Partial,
}

/// The changes of one kind of object: their total, and those that wait to be written.
#[derive(Clone, Debug, Default)]
pub struct Pending {
    total: Counter,
    pending: Gauge,
}

impl Pending {
    pub fn received(&self, changes: u64) {
        self.total.inc_by(changes);
        self.pending.inc_by(i64::try_from(changes).unwrap_or(i64::MAX));
    }

    pub fn written(&self) {
        self.pending.set(0);
    }
}

#[derive(Debug)]
pub struct KubeProxyMetrics {
    sync: ByIpFamily<Histogram>,
    full_sync: ByIpFamily<Histogram>,
    partial_sync: ByIpFamily<Histogram>,
    synced_last: ByIpFamily<Seconds>,
    queued_last: ByIpFamily<Seconds>,
    programming: ByIpFamily<Histogram>,
    no_local_endpoints: Family<[Label; 2], Gauge>,
    /// The changes of EndpointSlices.
    pub endpoint_changes: Pending,
    pub service_changes: Pending,
    pub(super) healthz: Family<[(&'static str, String); 1], Counter>,
    pub(super) livez: Family<[(&'static str, String); 1], Counter>,
}

fn label(family: IpFamily) -> [Label; 1] {
    [("ip_family", family.name())]
}

/// Returns a histogram with buckets from 1 ms to 16.384 s.
fn sync_buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 15))
}

/// Returns a histogram with the buckets of kube-proxy: zero, then a quarter of a second to five
/// minutes. They belong to the service-level indicator that SIG Scalability has defined.
fn programming_buckets() -> Histogram {
    let seconds = |range: std::ops::RangeInclusive<u32>, step: usize| range.step_by(step).map(f64::from);
    let buckets = [0.0, 0.25, 0.5].into_iter().chain(seconds(1..=59, 1)).chain(seconds(60..=115, 5));
    Histogram::new(buckets.chain(seconds(120..=300, 30)))
}

fn since_epoch() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

impl KubeProxyMetrics {
    pub(super) fn new() -> Self {
        let new = Self {
            sync: Family::new_with_constructor(sync_buckets),
            full_sync: Family::new_with_constructor(sync_buckets),
            partial_sync: Family::new_with_constructor(sync_buckets),
            synced_last: Family::new_with_constructor(Seconds::default),
            queued_last: Family::new_with_constructor(Seconds::default),
            programming: Family::new_with_constructor(programming_buckets),
            no_local_endpoints: Family::default(),
            endpoint_changes: Pending::default(),
            service_changes: Pending::default(),
            healthz: Family::default(),
            livez: Family::default(),
        };
        new.show_all();
        new
    }

    /// Shows every metric family with a first value, which rates and alerts need.
    fn show_all(&self) {
        for family in IpFamily::ALL {
            let label = label(family);
            for histogram in [&self.sync, &self.full_sync, &self.partial_sync, &self.programming] {
                drop(histogram.get_or_create(&label));
            }
            drop(self.synced_last.get_or_create(&label));
            drop(self.queued_last.get_or_create(&label));
            self.without_local_endpoints(family, 0, 0);
        }
        for code in ["200", "503"] {
            drop(self.healthz.get_or_create(&[("code", code.to_owned())]));
            drop(self.livez.get_or_create(&[("code", code.to_owned())]));
        }
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        let registry = registry.sub_registry_with_prefix("kubeproxy");
        let histograms = [
            ("sync_proxy_rules_duration_seconds", "Time that one write took", &self.sync),
            (
                "sync_full_proxy_rules_duration_seconds",
                "Time that one comparison of everything with what is programmed took",
                &self.full_sync,
            ),
            (
                "sync_partial_proxy_rules_duration_seconds",
                "Time that one write of what had changed took",
                &self.partial_sync,
            ),
            (
                "network_programming_duration_seconds",
                "Time from the change of a Pod or Service in the cluster until it is served here",
                &self.programming,
            ),
        ];
        for (name, help, histogram) in histograms {
            registry.register(name, help, histogram.clone());
        }
        registry.register(
            "sync_proxy_rules_last_timestamp_seconds",
            "When everything was written last",
            self.synced_last.clone(),
        );
        registry.register(
            "sync_proxy_rules_last_queued_timestamp_seconds",
            "When a change was received last",
            self.queued_last.clone(),
        );
        let changes = [
            ("endpoint", "EndpointSlice", &self.endpoint_changes),
            ("service", "Service", &self.service_changes),
        ];
        for (name, object, changes) in changes {
            registry.register(
                format!("sync_proxy_rules_{name}_changes_pending"),
                format!("{object} changes that are not yet written"),
                changes.pending.clone(),
            );
            registry.register(
                format!("sync_proxy_rules_{name}_changes"),
                format!("{object} changes received"),
                changes.total.clone(),
            );
        }
        registry.register(
            "sync_proxy_rules_no_local_endpoints_total",
            "Service ports with traffic policy Local that have endpoints, but none on this node",
            self.no_local_endpoints.clone(),
        );
        registry.register("proxy_healthz", "Answers of /healthz", self.healthz.clone());
        registry.register("proxy_livez", "Answers of /livez", self.livez.clone());
    }

    /// Notes that a change of this IP family waits to be written.
    pub fn queued(&self, family: IpFamily) {
        self.queued_last.get_or_create(&label(family)).set(since_epoch());
    }

    /// Notes a successful write for this IP family.
    pub fn synced(&self, family: IpFamily, kind: SyncKind, took: Duration) {
        let part = match kind {
            SyncKind::Full => &self.full_sync,
            SyncKind::Partial => &self.partial_sync,
        };
        for histogram in [&self.sync, part] {
            histogram.get_or_create(&label(family)).observe(took.as_secs_f64());
        }
        self.synced_last.get_or_create(&label(family)).set(since_epoch());
    }

    /// Notes that a change in the cluster is served here, `seconds` after it was made.
    pub fn programmed(&self, family: IpFamily, seconds: f64) {
        self.programming.get_or_create(&label(family)).observe(seconds);
    }

    pub fn without_local_endpoints(&self, family: IpFamily, internal: i64, external: i64) {
        for (policy, ports) in [("internal", internal), ("external", external)] {
            self.no_local_endpoints.get_or_create(&[("traffic_policy", policy), label(family)[0]]).set(ports);
        }
    }
}
