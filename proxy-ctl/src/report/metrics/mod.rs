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
    metrics::{family::Family, gauge::Gauge},
    registry::Registry,
};

use self::{
    kube_proxy::KubeProxyMetrics, kubernetes::ComponentInfo, own::ProxyMetrics, process::Process,
    usage::LastUsage,
};
use crate::{dataplane::Usage, source::InvalidObjects};

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
    pub kube_proxy: KubeProxyMetrics,
    pub own: ProxyMetrics,
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
        let kube_proxy = KubeProxyMetrics::new();
        let mut registry = Registry::default();
        kube_proxy.register(&mut registry);
        let own = ProxyMetrics::register(&mut registry, invalid_objects);
        register(&mut registry);
        registry.register_collector(Box::new(Arc::clone(&usage)));
        registry.register_collector(Box::new(component.clone()));
        registry.register_collector(Box::new(Process));
        let metrics = Self { registry, usage, usage_source, kube_proxy, own };
        let families = metrics.encode().unwrap_or_default();
        let families = families.lines().filter(|line| line.starts_with("# TYPE ")).count();
        component.families.get_or_init(|| families as u64);
        metrics
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
