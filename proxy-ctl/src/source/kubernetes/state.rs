//! What the watchers know about themselves: counters and gauges for /metrics, /healthz and `status`.

use std::{
    fmt,
    sync::atomic::AtomicU64,
    time::{SystemTime, UNIX_EPOCH},
};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

/// What is watched, by the plural that RBAC rules and metrics use.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum ResourceKind {
    Services,
    EndpointSlices,
    Nodes,
}

impl ResourceKind {
    pub const ALL: [Self; 3] = [Self::Services, Self::EndpointSlices, Self::Nodes];

    /// As in `kubectl get …` and in a ClusterRole's `resources`.
    pub const fn plural(self) -> &'static str {
        match self {
            Self::Services => "services",
            Self::EndpointSlices => "endpointslices",
            Self::Nodes => "nodes",
        }
    }

    /// As in a ClusterRole's `apiGroups`; empty for the core group.
    pub const fn group(self) -> &'static str {
        match self {
            Self::Services | Self::Nodes => "",
            Self::EndpointSlices => "discovery.k8s.io",
        }
    }
}

impl fmt::Display for ResourceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.plural())
    }
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, EncodeLabelSet)]
struct ByResource {
    resource: &'static str,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, EncodeLabelSet)]
struct ByMethod {
    resource: &'static str,
    method: &'static str,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, EncodeLabelSet)]
struct ByReason {
    resource: &'static str,
    reason: &'static str,
}

/// How a list was got.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ListMethod {
    /// A watch that begins with all objects (`sendInitialEvents`, Kubernetes 1.32 and newer).
    Streamed,
    /// Page by page.
    Paged,
}

impl ListMethod {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Streamed => "streamed",
            Self::Paged => "paged",
        }
    }
}

/// Shared by the watchers and whoever reports about them; clones see the same values.
#[derive(Clone, Debug, Default)]
pub struct SourceState {
    lists: Family<ByMethod, Counter>,
    watches: Family<ByResource, Counter>,
    errors: Family<ByReason, Counter>,
    odd_objects: Family<ByResource, Counter>,
    connected: Family<ByResource, Gauge>,
    objects: Family<ByResource, Gauge>,
    last_event: Family<ByResource, Gauge<f64, AtomicU64>>,
}

impl SourceState {
    pub fn new() -> Self {
        let state = Self::default();
        for kind in ResourceKind::ALL {
            let labels = ByResource { resource: kind.plural() };
            state.connected.get_or_create(&labels).set(0);
            state.objects.get_or_create(&labels).set(0);
            state.watches.get_or_create(&labels).inc_by(0);
            state.odd_objects.get_or_create(&labels).inc_by(0);
        }
        state
    }

    /// Registers all metrics, named `source_…`, below whatever prefix `registry` has.
    pub fn register(&self, registry: &mut Registry) {
        let registry = registry.sub_registry_with_prefix("source");
        registry.register("lists", "Complete lists received from the API server", self.lists.clone());
        registry.register("watches", "Watches started", self.watches.clone());
        registry.register("errors", "Failed lists and watches, by reason", self.errors.clone());
        registry.register(
            "odd_objects",
            "Problems found in objects that were received",
            self.odd_objects.clone(),
        );
        registry.register("connected", "1 while the resource is being watched", self.connected.clone());
        registry.register("objects", "Objects that match the selectors", self.objects.clone());
        registry.register(
            "last_event_timestamp_seconds",
            "When the API server was last heard from, in seconds since the epoch",
            self.last_event.clone(),
        );
    }

    /// Whether the resource is being watched now.
    pub fn connected(&self, kind: ResourceKind) -> bool {
        self.connected.get_or_create(&ByResource { resource: kind.plural() }).get() == 1
    }

    /// Objects that match the selectors, also those that are not served.
    pub fn objects(&self, kind: ResourceKind) -> i64 {
        self.objects.get_or_create(&ByResource { resource: kind.plural() }).get()
    }

    /// Complete lists so far.
    pub fn lists(&self, kind: ResourceKind, method: ListMethod) -> u64 {
        self.lists.get_or_create(&ByMethod { resource: kind.plural(), method: method.name() }).get()
    }

    /// Watches started so far.
    pub fn watches(&self, kind: ResourceKind) -> u64 {
        self.watches.get_or_create(&ByResource { resource: kind.plural() }).get()
    }

    /// Failures so far for one reason, such as `unauthorized`; see [`super::failure::Reason`].
    pub fn errors(&self, kind: ResourceKind, reason: super::failure::Reason) -> u64 {
        self.errors.get_or_create(&ByReason { resource: kind.plural(), reason: reason.name() }).get()
    }

    pub(super) fn listed(&self, kind: ResourceKind, method: ListMethod, objects: usize) {
        let labels = ByResource { resource: kind.plural() };
        self.lists.get_or_create(&ByMethod { resource: kind.plural(), method: method.name() }).inc();
        self.objects.get_or_create(&labels).set(i64::try_from(objects).unwrap_or(i64::MAX));
        self.heard_from(kind);
    }

    pub(super) fn watch_started(&self, kind: ResourceKind) {
        self.watches.get_or_create(&ByResource { resource: kind.plural() }).inc();
    }

    pub(super) fn objects_changed(&self, kind: ResourceKind, by: i64) {
        self.objects.get_or_create(&ByResource { resource: kind.plural() }).inc_by(by);
    }

    pub(super) fn heard_from(&self, kind: ResourceKind) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        let labels = ByResource { resource: kind.plural() };
        self.connected.get_or_create(&labels).set(1);
        self.last_event.get_or_create(&labels).set(now);
    }

    pub(super) fn failed(&self, kind: ResourceKind, reason: super::failure::Reason) {
        self.connected.get_or_create(&ByResource { resource: kind.plural() }).set(0);
        self.errors.get_or_create(&ByReason { resource: kind.plural(), reason: reason.name() }).inc();
    }

    pub(super) fn odd(&self, kind: ResourceKind, problems: usize) {
        let problems = u64::try_from(problems).unwrap_or(u64::MAX);
        self.odd_objects.get_or_create(&ByResource { resource: kind.plural() }).inc_by(problems);
    }
}

#[cfg(test)]
mod tests {
    use super::{super::failure::Reason, *};

    #[test]
    fn metrics_have_these_names_and_labels() {
        let mut registry = Registry::default();
        let state = SourceState::new();
        state.register(&mut registry);
        state.watch_started(ResourceKind::Services);
        state.listed(ResourceKind::Services, ListMethod::Streamed, 3);
        state.objects_changed(ResourceKind::Services, -1);
        state.failed(ResourceKind::Nodes, Reason::Unreachable);
        state.odd(ResourceKind::EndpointSlices, 2);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            "source_lists_total{resource=\"services\",method=\"streamed\"} 1",
            "source_watches_total{resource=\"services\"} 1",
            "source_watches_total{resource=\"nodes\"} 0",
            "source_errors_total{resource=\"nodes\",reason=\"unreachable\"} 1",
            "source_odd_objects_total{resource=\"endpointslices\"} 2",
            "source_connected{resource=\"services\"} 1",
            "source_connected{resource=\"nodes\"} 0",
            "source_objects{resource=\"services\"} 2",
        ] {
            assert!(text.lines().any(|found| found == line), "no {line} in\n{text}");
        }
        assert!(text.contains("source_last_event_timestamp_seconds{resource=\"services\"} 1"), "{text}");
    }
}
