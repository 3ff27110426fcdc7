//! The metric families: kube-proxy's own names where they have a meaning here, and `proxy_…` for what only
//! this proxy knows.

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError, atomic::AtomicU64},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric, text},
    metrics::{
        MetricType,
        counter::{ConstCounter, Counter},
        family::Family,
        gauge::{ConstGauge, Gauge},
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};

use super::process::Process;
use crate::{
    dataplane::{Applied, Usage},
    model::objects::Family as AddressFamily,
};

type Label = (&'static str, &'static str);
type ByFamily<M> = Family<[Label; 1], M, fn() -> M>;
type Seconds = Gauge<f64, AtomicU64>;

/// Longest wait of a scrape for fresh table numbers; then the last known ones are shown.
const USAGE_WAIT: Duration = Duration::from_secs(2);

/// Where a scrape gets the state of the tables.
pub trait UsageSource: Send + Sync {
    /// `None`: the dataplane does not answer.
    fn usage(&self) -> Pin<Box<dyn Future<Output = Option<Usage>> + Send + '_>>;
}

/// Every family of `/metrics`; the controller writes, scrapes read.
pub struct Metrics {
    registry: Registry,
    usage: Arc<LastUsage>,
    usage_source: Option<Box<dyn UsageSource>>,

    pub(super) healthz: Family<[(&'static str, String); 1], Counter>,
    pub(super) livez: Family<[(&'static str, String); 1], Counter>,

    sync_duration: ByFamily<Histogram>,
    sync_last: ByFamily<Seconds>,
    queued_last: ByFamily<Seconds>,
    no_local_endpoints: Family<[Label; 2], Gauge>,
    /// Changes that were received and are not yet written.
    pub endpoint_changes: Pending,
    pub service_changes: Pending,

    writes: Counter,
    removals: Counter,
    pub sync_errors: Counter,
    pub resyncs: Counter,
    pub odd_objects: Counter,
    pub frontend_conflicts: Counter,
    pub listed: Gauge,
    pub first_sync_seconds: Seconds,
    pub service_ports: Gauge,
}

/// Changes of one kind: all there were, and those that wait to be written.
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

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

fn label(family: AddressFamily) -> [Label; 1] {
    let name = match family {
        AddressFamily::Ipv4 => "IPv4",
        AddressFamily::Ipv6 => "IPv6",
    };
    [("ip_family", name)]
}

/// kube-proxy's: 1 ms to 16.384 s.
fn sync_buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 15))
}

fn since_epoch() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

impl Metrics {
    /// `register` adds the families of others below the prefix `proxy`. `usage_source`: `None` shows no tables.
    pub fn new(usage_source: Option<Box<dyn UsageSource>>, register: impl FnOnce(&mut Registry)) -> Self {
        let usage = Arc::new(LastUsage::default());
        let mut metrics = Self {
            registry: Registry::default(),
            usage: Arc::clone(&usage),
            usage_source,
            healthz: Family::default(),
            livez: Family::default(),
            sync_duration: Family::new_with_constructor(sync_buckets),
            sync_last: Family::new_with_constructor(Seconds::default),
            queued_last: Family::new_with_constructor(Seconds::default),
            no_local_endpoints: Family::default(),
            endpoint_changes: Pending::default(),
            service_changes: Pending::default(),
            writes: Counter::default(),
            removals: Counter::default(),
            sync_errors: Counter::default(),
            resyncs: Counter::default(),
            odd_objects: Counter::default(),
            frontend_conflicts: Counter::default(),
            listed: Gauge::default(),
            first_sync_seconds: Seconds::default(),
            service_ports: Gauge::default(),
        };
        metrics.register_kube_proxy();
        metrics.register_own();
        register(metrics.registry.sub_registry_with_prefix("proxy"));
        metrics.registry.register_collector(Box::new(usage));
        metrics.registry.register_collector(Box::new(Process));
        for family in AddressFamily::ALL {
            let label = label(family);
            drop(metrics.sync_duration.get_or_create(&label));
            drop(metrics.sync_last.get_or_create(&label));
            drop(metrics.queued_last.get_or_create(&label));
            for policy in ["internal", "external"] {
                metrics.no_local_endpoints.get_or_create(&[("traffic_policy", policy), label[0]]).set(0);
            }
        }
        for code in ["200", "503"] {
            drop(metrics.healthz.get_or_create(&[("code", code.to_owned())]));
            drop(metrics.livez.get_or_create(&[("code", code.to_owned())]));
        }
        metrics
    }

    fn register_kube_proxy(&mut self) {
        let registry = self.registry.sub_registry_with_prefix("kubeproxy");
        registry.register(
            "sync_proxy_rules_duration_seconds",
            "Time that one write of changes took",
            self.sync_duration.clone(),
        );
        registry.register(
            "sync_proxy_rules_last_timestamp_seconds",
            "When everything was written last",
            self.sync_last.clone(),
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

    fn register_own(&mut self) {
        let build = Family::<[Label; 2], Gauge>::default();
        let labels = [
            ("version", env!("CARGO_PKG_VERSION")),
            ("object", option_env!("PROXY_EBPF_BUILT_WITH").unwrap_or("unknown")),
        ];
        build.get_or_create(&labels).set(1);
        let registry = self.registry.sub_registry_with_prefix("proxy");
        registry.register("build_info", "What is running; always 1", build);
        registry.register("writes", "Table entries written to follow the sources", self.writes.clone());
        registry.register("removals", "Table entries removed to follow the sources", self.removals.clone());
        registry.register("sync_errors", "Writes that failed and are tried again", self.sync_errors.clone());
        registry.register("resyncs", "Comparisons of everything with the tables", self.resyncs.clone());
        registry.register(
            "odd_objects",
            "Fields of objects that cannot be served as they are",
            self.odd_objects.clone(),
        );
        registry.register(
            "frontend_conflicts",
            "Frontends that several service ports have claimed",
            self.frontend_conflicts.clone(),
        );
        registry.register(
            "sources_listed",
            "1 once every source has listed its objects",
            self.listed.clone(),
        );
        registry.register(
            "first_sync_duration_seconds",
            "From everything listed to everything programmed, at the start of the process",
            self.first_sync_seconds.clone(),
        );
        registry.register("service_ports", "Service ports that are served", self.service_ports.clone());
    }

    /// A change of this family waits to be written.
    pub fn queued(&self, family: AddressFamily) {
        self.queued_last.get_or_create(&label(family)).set(since_epoch());
    }

    /// A write for this family went well.
    pub fn synced(&self, family: AddressFamily, took: Duration) {
        self.sync_duration.get_or_create(&label(family)).observe(took.as_secs_f64());
        self.sync_last.get_or_create(&label(family)).set(since_epoch());
    }

    pub fn applied(&self, applied: Applied) {
        self.writes.inc_by(applied.written);
        self.removals.inc_by(applied.removed);
    }

    pub fn without_local_endpoints(&self, family: AddressFamily, internal: i64, external: i64) {
        for (policy, ports) in [("internal", internal), ("external", external)] {
            self.no_local_endpoints.get_or_create(&[("traffic_policy", policy), label(family)[0]]).set(ports);
        }
    }

    /// Asks for the state of the tables as it is now.
    pub(super) async fn refresh(&self) {
        let Some(source) = &self.usage_source else { return };
        if let Ok(Some(usage)) = tokio::time::timeout(USAGE_WAIT, source.usage()).await {
            self.usage.set(usage);
        }
    }

    pub(crate) fn encode(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

/// The tables as they were last seen.
#[derive(Debug, Default)]
struct LastUsage(Mutex<Usage>);

impl LastUsage {
    fn set(&self, usage: Usage) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = usage;
    }
}

impl Collector for LastUsage {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> std::fmt::Result {
        let usage = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        type Value = fn(&crate::dataplane::TableUsage) -> u64;
        let gauges: [(&str, &str, Value); 3] = [
            ("proxy_table_used", "Entries in use.", |table| table.used),
            ("proxy_table_capacity", "Entries that the table has room for.", |table| table.capacity),
            ("proxy_table_bytes", "Kernel memory of the table.", |table| table.bytes),
        ];
        for (name, help, value) in gauges {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for table in &usage.tables {
                let gauge = ConstGauge::new(i64::try_from(value(table)).unwrap_or(i64::MAX));
                gauge.encode(metric.encode_family(&[("table", table.name)])?)?;
            }
        }
        let help = "Decisions of the datapath, by reason.";
        let mut metric = encoder.encode_descriptor("proxy_reasons", help, None, MetricType::Counter)?;
        for (reason, count) in &usage.reasons {
            ConstCounter::new(*count).encode(metric.encode_family(&[("reason", *reason)])?)?;
        }
        Ok(())
    }
}
