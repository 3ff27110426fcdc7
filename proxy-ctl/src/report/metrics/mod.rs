//! The metric families: kube-proxy's own names where they have a meaning here, and `proxy_…` for what only
//! this proxy knows. docs/metrics.md lists all of them.

mod kube_proxy;
pub(crate) mod kubernetes;
mod own;
pub(crate) mod process;
mod usage;

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

pub use kube_proxy::{Pending, SyncKind};
pub use own::Phase;
use prometheus_client::{
    encoding::text,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

use self::{
    kube_proxy::KubeProxyMetrics, kubernetes::ComponentInfo, own::ProxyMetrics, process::Process,
    usage::LastUsage,
};
use crate::{
    dataplane::{Applied, Unsupported, Usage},
    model::objects::IpFamily,
    source::InvalidObjects,
};

type Label = (&'static str, &'static str);
type ByIpFamily<M> = Family<[Label; 1], M, fn() -> M>;
type Seconds = Gauge<f64, AtomicU64>;

/// Limit for the wait of a scrape for fresh usage; then the last known usage is shown.
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
    kube_proxy: KubeProxyMetrics,
    own: ProxyMetrics,
    /// Changes that were received and are not yet written.
    pub endpoint_changes: Pending,
    pub service_changes: Pending,
    pub sync_errors: Counter,
    pub resyncs: Counter,
    /// Entries that a resync had to repair.
    pub drift: Counter,
    /// Changed configuration files that were not valid.
    pub refused_configurations: Counter,
    /// Objects of another kube-proxy in the kernel, as of the last look.
    pub former_rules: Gauge,
    pub former_rule_blockers: Gauge,
    pub former_rule_errors: Counter,
    pub invalid_objects: InvalidObjects,
    pub frontend_conflicts: Counter,
    pub listed: Gauge,
    pub first_sync_seconds: Gauge<f64, AtomicU64>,
    pub service_ports: Gauge,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Metrics {
    /// `usage_source`: `None` shows no tables. `invalid_objects`: what the source counts. `register` adds the families
    /// of others.
    pub fn new(
        usage_source: Option<Box<dyn UsageSource>>,
        invalid_objects: InvalidObjects,
        register: impl FnOnce(&mut Registry),
    ) -> Self {
        let (usage, component) = (Arc::new(LastUsage::default()), ComponentInfo::default());
        let (kube_proxy, own) = (KubeProxyMetrics::new(), ProxyMetrics::new(invalid_objects.clone()));
        let mut registry = Registry::default();
        kube_proxy.register(&mut registry);
        own.register(&mut registry);
        register(&mut registry);
        registry.register_collector(Box::new(Arc::clone(&usage)));
        registry.register_collector(Box::new(component.clone()));
        registry.register_collector(Box::new(Process));
        let metrics = Self {
            registry,
            usage,
            usage_source,
            endpoint_changes: kube_proxy.endpoint_changes.clone(),
            service_changes: kube_proxy.service_changes.clone(),
            sync_errors: own.sync_errors.clone(),
            resyncs: own.resyncs.clone(),
            drift: own.drift.clone(),
            refused_configurations: own.refused_configurations.clone(),
            former_rules: own.former_rules.clone(),
            former_rule_blockers: own.former_rule_blockers.clone(),
            former_rule_errors: own.former_rule_errors.clone(),
            invalid_objects,
            frontend_conflicts: own.frontend_conflicts.clone(),
            listed: own.listed.clone(),
            first_sync_seconds: own.first_sync_seconds.clone(),
            service_ports: own.service_ports.clone(),
            kube_proxy,
            own,
        };
        let families = metrics.encode().unwrap_or_default();
        let families = families.lines().filter(|line| line.starts_with("# TYPE ")).count();
        component.families.get_or_init(|| families as u64);
        metrics
    }

    /// A change of this family waits to be written.
    pub fn queued(&self, family: IpFamily) {
        self.kube_proxy.queued(family);
    }

    /// A write for this family went well.
    pub fn synced(&self, family: IpFamily, kind: SyncKind, took: Duration) {
        self.kube_proxy.synced(family, kind, took);
    }

    /// A change in the cluster is served here, so many seconds after it was made.
    pub fn programmed(&self, family: IpFamily, seconds: f64) {
        self.kube_proxy.programmed(family, seconds);
    }

    pub fn applied(&self, applied: Applied) {
        self.own.applied(applied);
    }

    pub fn unsupported(&self, fields: &[Unsupported], change: i64) {
        self.own.unsupported(fields, change);
    }

    pub fn phase(&self, phase: Phase, took: Duration) {
        self.own.phase(phase, took);
    }

    pub fn without_local_endpoints(&self, family: IpFamily, internal: i64, external: i64) {
        self.kube_proxy.without_local_endpoints(family, internal, external);
    }

    /// An answer of the health server.
    pub(crate) fn answered(&self, ready: bool, code: u16) {
        let family = if ready { &self.kube_proxy.healthz } else { &self.kube_proxy.livez };
        family.get_or_create(&[("code", code.to_string())]).inc();
    }

    /// Asks for the state of the tables as it is now.
    pub(crate) async fn refresh(&self) {
        let Some(source) = &self.usage_source else { return };
        if let Ok(Some(usage)) = tokio::time::timeout(USAGE_WAIT, source.usage()).await {
            self.usage.set(usage);
        }
    }

    /// As OpenMetrics.
    pub(crate) fn encode(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}
