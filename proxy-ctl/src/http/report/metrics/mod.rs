//! The metric families. Those of kube-proxy that have a meaning here keep its names, and those that
//! only this proxy has begin with `proxy_`. docs/metrics.md lists all of them.

mod kube_proxy;
pub(crate) mod kubernetes;
mod mode;
mod own;
pub(crate) mod process;

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
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
    kube_proxy::KubeProxyMetrics, kubernetes::ComponentInfo, mode::ModeMetrics, own::ProxyMetrics,
    process::Process,
};
use crate::{kubernetes::convert::invalid::InvalidObjects, modes::MetricFamily};

type Label = (&'static str, &'static str);
type ByIpFamily<M> = Family<[Label; 1], M, fn() -> M>;
type Seconds = Gauge<f64, AtomicU64>;

/// The longest time that a scrape waits for the mode's metric families. After it the last known
/// ones are shown.
const MODE_WAIT: Duration = Duration::from_secs(2);

/// The source from which a scrape gets the metric families of the active mode.
pub trait ModeFamilies: Send + Sync {
    /// Returns the metric families with their samples. `None` if the dataplane does not answer.
    fn families(&self) -> Pin<Box<dyn Future<Output = Option<Vec<MetricFamily>>> + Send + '_>>;
}

/// All metric families of `/metrics`. The controller writes them, and scrapes read them.
pub struct Metrics {
    registry: Registry,
    component: ComponentInfo,
    mode: Arc<ModeMetrics>,
    source: Option<Box<dyn ModeFamilies>>,
    pub kube_proxy: KubeProxyMetrics,
    pub own: ProxyMetrics,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Metrics {
    /// Makes the metric families. No metric families of a mode are shown if `source` is `None`.
    /// `invalid_objects` is the counter of the source of objects. `register` adds the metric
    /// families of other modules.
    pub fn new(
        source: Option<Box<dyn ModeFamilies>>,
        invalid_objects: InvalidObjects,
        register: impl FnOnce(&mut Registry),
    ) -> Self {
        let (mode, component) = (Arc::new(ModeMetrics::default()), ComponentInfo::default());
        let kube_proxy = KubeProxyMetrics::new();
        let mut registry = Registry::default();
        kube_proxy.register(&mut registry);
        let own = ProxyMetrics::register(&mut registry, invalid_objects);
        register(&mut registry);
        registry.register_collector(Box::new(Arc::clone(&mode)));
        registry.register_collector(Box::new(component.clone()));
        registry.register_collector(Box::new(Process));
        let metrics = Self { registry, component, mode, source, kube_proxy, own };
        let families = metrics.encode().unwrap_or_default();
        let families = families.lines().filter(|line| line.starts_with("# TYPE ")).count();
        metrics.component.families.store(families as u64, Relaxed);
        metrics
    }

    /// Counts an answer of the health server.
    pub(crate) fn answered(&self, ready: bool, code: u16) {
        let family = if ready { &self.kube_proxy.healthz } else { &self.kube_proxy.livez };
        family.get_or_create(&[("code", code.to_string())]).inc();
    }

    /// Asks the mode for its metric families, which are shown until the next call.
    pub(crate) async fn refresh(&self) {
        let Some(source) = &self.source else { return };
        if let Ok(Some(now)) = tokio::time::timeout(MODE_WAIT, source.families()).await {
            let mut shown = self.mode.0.lock().unwrap_or_else(PoisonError::into_inner);
            self.component.families.fetch_add(now.len() as u64, Relaxed);
            self.component.families.fetch_sub(shown.len() as u64, Relaxed);
            *shown = now;
        }
    }

    /// Returns all metric families as OpenMetrics.
    pub(crate) fn encode(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}
