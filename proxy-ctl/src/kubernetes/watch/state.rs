//! The state of the watchers: counters and gauges for /metrics, /healthz and `status`.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicU64},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

use super::{
    health::{Health, KindHealth},
    kind::{ResourceKind, Verb},
};
use crate::{
    config::Encoding,
    kubernetes::{
        convert::invalid::InvalidObjects,
        failure::{Failure, FailureReason},
        transport::requests::Requests,
    },
};

type Labels<const N: usize> = [(&'static str, &'static str); N];

fn of(kind: ResourceKind) -> Labels<1> {
    [("resource", kind.plural())]
}

fn of_with(kind: ResourceKind, name: &'static str, value: &'static str) -> Labels<2> {
    [("resource", kind.plural()), (name, value)]
}

/// The way in which a list was received.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ListMethod {
    /// A watch that begins with all objects (`sendInitialEvents`, Kubernetes 1.32 and newer).
    Streamed,
    /// A plain list, with everything in one answer.
    Whole,
}

impl ListMethod {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Streamed => "streamed",
            Self::Whole => "whole",
        }
    }
}

/// The state that the watchers share with its readers. Clones see the same values.
#[derive(Clone, Debug, Default)]
pub struct SourceState {
    lists: Family<Labels<2>, Counter>,
    watches: Family<Labels<1>, Counter>,
    errors: Family<Labels<2>, Counter>,
    invalid_objects: InvalidObjects,
    /// The client's metrics of requests and answers.
    pub requests: Requests,
    connected: Family<Labels<1>, Gauge>,
    objects: Family<Labels<1>, Gauge>,
    last_event: Family<Labels<1>, Gauge<f64, AtomicU64>>,
    denied: Family<Labels<2>, Gauge>,
    encoding: Family<Labels<2>, Gauge>,
    health: Arc<Mutex<Health>>,
}

impl SourceState {
    pub fn new() -> Self {
        let state = Self::default();
        for kind in [ResourceKind::Services, ResourceKind::EndpointSlices, ResourceKind::Nodes] {
            state.begin(kind);
        }
        state
    }

    /// Notes that this kind is to be watched from now on.
    pub(crate) fn begin(&self, kind: ResourceKind) {
        let labels = of(kind);
        if self.health().0.insert(kind, KindHealth::default()).is_none() {
            self.connected.get_or_create(&labels).set(0);
            self.objects.get_or_create(&labels).set(0);
            self.watches.get_or_create(&labels).inc_by(0);
        }
    }

    /// Notes that this kind is not watched any more, because the API server does not have it or
    /// nobody wants it.
    pub(crate) fn end(&self, kind: ResourceKind) {
        let labels = of(kind);
        if self.health().0.remove(&kind).is_some() {
            self.connected.remove(&labels);
            self.objects.remove(&labels);
            self.last_event.remove(&labels);
            for encoding in Encoding::ALL {
                self.encoding.remove(&of_with(kind, "encoding", encoding.name()));
            }
            for verb in Verb::ALL {
                self.denied.remove(&of_with(kind, "verb", verb.name()));
            }
        }
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the counter of invalid objects, which the metrics server registers.
    pub fn invalid_objects(&self) -> InvalidObjects {
        self.invalid_objects.clone()
    }

    /// Registers all other metrics: `proxy_source_…` and `rest_client_…`.
    pub fn register(&self, registry: &mut Registry) {
        self.requests.register(registry);
        let registry = registry.sub_registry_with_prefix("proxy_source");
        registry.register("lists", "Complete lists received from the API server", self.lists.clone());
        registry.register("watches", "Watches started", self.watches.clone());
        registry.register("errors", "Failed lists and watches, by reason", self.errors.clone());
        registry.register("connected", "1 while the resource is being watched", self.connected.clone());
        registry.register(
            "denied",
            "1 while RBAC does not allow this verb for the resource",
            self.denied.clone(),
        );
        registry.register(
            "encoding",
            "1 for the encoding of the API server's last answer for the resource",
            self.encoding.clone(),
        );
        registry.register("objects", "Objects that match the selectors", self.objects.clone());
        registry.register(
            "last_event_timestamp_seconds",
            "When the API server was last heard from, in seconds since the epoch",
            self.last_event.clone(),
        );
    }

    /// Returns the kinds that are watched, or would be if the API server allowed it.
    pub fn kinds(&self) -> Vec<ResourceKind> {
        self.health().0.keys().copied().collect()
    }

    /// Returns why the kind is not being watched now, for messages.
    pub fn problem(&self, kind: ResourceKind) -> Option<String> {
        self.health().0.get(&kind)?.problem().map(str::to_owned)
    }

    /// Returns true if the objects of this kind cannot be relied upon: it was never listed, it may
    /// not be listed, or it has not been watched for six minutes.
    pub fn is_stale(&self, kind: ResourceKind) -> bool {
        let denied = self.denied(kind);
        self.health().0.get(&kind).is_some_and(|health| health.is_stale(&denied, Instant::now()))
    }

    /// Returns the verbs that RBAC does not allow. Without `watch` a kind is listed again and
    /// again.
    pub fn denied(&self, kind: ResourceKind) -> Vec<Verb> {
        let denied = |verb: &Verb| {
            self.denied.get(&of_with(kind, "verb", verb.name())).is_some_and(|gauge| gauge.get() == 1)
        };
        Verb::ALL.into_iter().filter(denied).collect()
    }

    /// Returns true if the kind is being watched now.
    pub fn connected(&self, kind: ResourceKind) -> bool {
        self.connected.get(&of(kind)).is_some_and(|gauge| gauge.get() == 1)
    }

    /// Returns the number of objects that match the selectors, including those that are not served.
    pub fn objects(&self, kind: ResourceKind) -> i64 {
        self.objects.get(&of(kind)).map_or(0, |gauge| gauge.get())
    }

    /// Returns the encoding of the API server's last answer.
    pub fn encoding(&self, kind: ResourceKind) -> Option<Encoding> {
        Encoding::ALL.into_iter().find(|encoding| {
            let labels = of_with(kind, "encoding", encoding.name());
            self.encoding.get(&labels).is_some_and(|gauge| gauge.get() == 1)
        })
    }

    /// Returns the number of complete lists so far.
    pub fn lists(&self, kind: ResourceKind, method: ListMethod) -> u64 {
        self.lists.get_or_create(&of_with(kind, "method", method.name())).get()
    }

    /// Returns the number of watches started so far.
    pub fn watches(&self, kind: ResourceKind) -> u64 {
        self.watches.get_or_create(&of(kind)).get()
    }

    /// Returns the number of failures so far for one reason.
    pub fn errors(&self, kind: ResourceKind, reason: FailureReason) -> u64 {
        self.errors.get_or_create(&of_with(kind, "reason", reason.name())).get()
    }

    pub(crate) fn listed(&self, kind: ResourceKind, method: ListMethod, objects: usize) {
        let labels = of(kind);
        self.lists.get_or_create(&of_with(kind, "method", method.name())).inc();
        self.objects.get_or_create(&labels).set(i64::try_from(objects).unwrap_or(i64::MAX));
        self.heard_from(kind);
    }

    /// Notes the encoding of an answer.
    pub(super) fn answered_in(&self, kind: ResourceKind, encoding: Encoding) {
        for other in Encoding::ALL {
            let labels = of_with(kind, "encoding", other.name());
            if other == encoding {
                self.encoding.get_or_create(&labels).set(1);
            } else {
                self.encoding.remove(&labels);
            }
        }
    }

    pub(super) fn watch_started(&self, kind: ResourceKind) {
        self.watches.get_or_create(&of(kind)).inc();
    }

    pub(super) fn objects_changed(&self, kind: ResourceKind, by: i64) {
        self.objects.get_or_create(&of(kind)).inc_by(by);
    }

    pub(super) fn heard_from(&self, kind: ResourceKind) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        let labels = of(kind);
        self.connected.get_or_create(&labels).set(1);
        self.last_event.get_or_create(&labels).set(now);
        if let Some(health) = self.health().0.get_mut(&kind) {
            health.heard_from();
        }
    }

    pub(crate) fn failed(&self, kind: ResourceKind, failure: &Failure) {
        let reason = failure.reason.name();
        self.errors.get_or_create(&of_with(kind, "reason", reason)).inc();
        // A kind that the API server does not have is not reported.
        if let Some(health) = self.health().0.get_mut(&kind) {
            self.connected.get_or_create(&of(kind)).set(0);
            health.failed(failure.message.clone(), Instant::now());
        }
    }

    /// Logs a failure, unless the same one was logged before.
    pub(super) fn log_failure(&self, kind: ResourceKind, failure: &Failure, retry_in: Duration) {
        let denied = self.denied(kind);
        self.health().fails(kind, failure, &denied, retry_in);
    }

    /// Notes that a watch has begun. Returns true if the kind was failing.
    pub(super) fn works(&self, kind: ResourceKind) -> bool {
        self.heard_from(kind);
        self.health().works(kind)
    }

    pub(super) fn set_denied(&self, kind: ResourceKind, verb: Verb, denied: bool) {
        let labels = of_with(kind, "verb", verb.name());
        if denied {
            self.denied.get_or_create(&labels).set(1);
        } else if let Some(gauge) = self.denied.get(&labels) {
            gauge.set(0);
        }
    }

    pub(super) fn found_invalid(&self, kind: ResourceKind, problems: usize) {
        self.invalid_objects.found(kind.plural(), problems);
    }
}

#[cfg(test)]
impl SourceState {
    /// Returns a state in which every metric family has a sample.
    pub(crate) fn with_samples() -> Self {
        let state = Self::new();
        let kind = ResourceKind::Services;
        state.listed(kind, ListMethod::Whole, 1);
        state.failed(kind, &Failure::new(FailureReason::Timeout, "silence"));
        state.set_denied(kind, Verb::Watch, true);
        state.answered_in(kind, Encoding::Protobuf);
        state.requests.sample();
        state
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_have_these_names_and_labels() {
        let mut registry = Registry::default();
        let state = SourceState::new();
        state.register(&mut registry);
        state.invalid_objects().register(registry.sub_registry_with_prefix("proxy"));
        state.watch_started(ResourceKind::Services);
        state.listed(ResourceKind::Services, ListMethod::Streamed, 3);
        state.objects_changed(ResourceKind::Services, -1);
        state.failed(ResourceKind::Nodes, &Failure::new(FailureReason::Unreachable, "refused"));
        state.set_denied(ResourceKind::EndpointSlices, Verb::Watch, true);
        state.found_invalid(ResourceKind::EndpointSlices, 2);
        state.answered_in(ResourceKind::Services, Encoding::Json);
        state.answered_in(ResourceKind::Services, Encoding::Protobuf);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            "proxy_source_lists_total{resource=\"services\",method=\"streamed\"} 1",
            "proxy_source_watches_total{resource=\"services\"} 1",
            "proxy_source_watches_total{resource=\"nodes\"} 0",
            "proxy_source_errors_total{resource=\"nodes\",reason=\"unreachable\"} 1",
            "proxy_invalid_objects_total{resource=\"endpointslices\"} 2",
            "proxy_source_connected{resource=\"services\"} 1",
            "proxy_source_connected{resource=\"nodes\"} 0",
            "proxy_source_objects{resource=\"services\"} 2",
            "proxy_source_denied{resource=\"endpointslices\",verb=\"watch\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "no {line} in\n{text}");
        }
        let line = "proxy_source_encoding{resource=\"services\",encoding=\"protobuf\"} 1";
        assert!(text.contains(line) && !text.contains("encoding=\"json\""), "{text}");
        assert!(
            text.contains("proxy_source_last_event_timestamp_seconds{resource=\"services\"} 1"),
            "{text}"
        );
    }
    #[test]
    fn what_the_api_server_does_not_have_is_not_told_of() {
        let state = SourceState::new();
        state.end(ResourceKind::EndpointSlices);
        state.failed(ResourceKind::ServiceCidrs, &Failure::new(FailureReason::Unreachable, "refused"));
        assert_eq!(state.kinds(), [ResourceKind::Services, ResourceKind::Nodes]);
        let mut registry = Registry::default();
        state.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        assert!(text.contains("source_connected{resource=\"nodes\"} 0"), "{text}");
        for other in ["endpointslices", "servicecidrs"] {
            assert!(!text.contains(&format!("source_connected{{resource=\"{other}\"}}")), "{text}");
        }
    }

    #[test]
    fn a_problem_is_kept_until_the_server_is_heard_again() {
        let state = SourceState::new();
        state
            .failed(ResourceKind::Services, &Failure::new(FailureReason::Forbidden, "services is forbidden"));
        state.set_denied(ResourceKind::Services, Verb::Watch, true);
        assert_eq!(state.problem(ResourceKind::Services).as_deref(), Some("services is forbidden"));
        assert_eq!(state.denied(ResourceKind::Services), [Verb::Watch]);
        state.heard_from(ResourceKind::Services);
        state.set_denied(ResourceKind::Services, Verb::Watch, false);
        assert_eq!(
            (state.problem(ResourceKind::Services), state.denied(ResourceKind::Services)),
            (None, vec![])
        );
    }
}
