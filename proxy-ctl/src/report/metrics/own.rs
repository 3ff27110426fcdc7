//! The families that only this proxy has.

use std::time::Duration;

use prometheus_client::{
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};

use super::{Label, Seconds};
use crate::{
    dataplane::{Applied, Unsupported},
    source::InvalidObjects,
};

/// What the controller spends its time with.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Phase {
    /// From objects to the desired state.
    Compute,
    /// Writing what has changed.
    Write,
    /// Comparing everything with the tables.
    Compare,
    /// Taking over addresses and interfaces.
    Node,
    /// Removing expired flows and unused entries.
    Collect,
}

impl Phase {
    const ALL: [Self; 5] = [Self::Compute, Self::Write, Self::Compare, Self::Node, Self::Collect];

    const fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Write => "write",
            Self::Compare => "compare",
            Self::Node => "node",
            Self::Collect => "collect",
        }
    }
}

#[derive(Debug)]
pub(super) struct ProxyMetrics {
    writes: Counter,
    removals: Counter,
    pub(super) sync_errors: Counter,
    pub(super) resyncs: Counter,
    pub(super) drift: Counter,
    pub(super) refused_configurations: Counter,
    pub(super) former_rules: Gauge,
    pub(super) former_rule_blockers: Gauge,
    pub(super) former_rule_errors: Counter,
    pub(super) frontend_conflicts: Counter,
    pub(super) listed: Gauge,
    pub(super) first_sync_seconds: Seconds,
    pub(super) service_ports: Gauge,
    unsupported_service_ports: Family<[Label; 1], Gauge>,
    phases: Family<[Label; 1], Histogram, fn() -> Histogram>,
    pub(super) invalid_objects: InvalidObjects,
}

/// 10 µs to 42 s.
fn phase_buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.000_01, 4.0, 12))
}

impl ProxyMetrics {
    pub(super) fn new(invalid_objects: InvalidObjects) -> Self {
        let phases: Family<[Label; 1], Histogram, fn() -> Histogram> =
            Family::new_with_constructor(phase_buckets);
        for phase in Phase::ALL {
            drop(phases.get_or_create(&[("phase", phase.name())]));
        }
        Self {
            writes: Counter::default(),
            removals: Counter::default(),
            sync_errors: Counter::default(),
            resyncs: Counter::default(),
            drift: Counter::default(),
            refused_configurations: Counter::default(),
            former_rules: Gauge::default(),
            former_rule_blockers: Gauge::default(),
            former_rule_errors: Counter::default(),
            frontend_conflicts: Counter::default(),
            listed: Gauge::default(),
            first_sync_seconds: Seconds::default(),
            service_ports: Gauge::default(),
            unsupported_service_ports: Family::default(),
            phases,
            invalid_objects,
        }
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        let build = Family::<[Label; 2], Gauge>::default();
        let labels = [
            ("version", env!("CARGO_PKG_VERSION")),
            ("object", option_env!("PROXY_EBPF_BUILT_WITH").unwrap_or("unknown")),
        ];
        build.get_or_create(&labels).set(1);
        let registry = registry.sub_registry_with_prefix("proxy");
        registry.register("build_info", "What is running; always 1", build);
        let counters = [
            ("writes", "Table entries written to follow the sources", &self.writes),
            ("removals", "Table entries removed to follow the sources", &self.removals),
            ("sync_errors", "Writes that failed and are tried again", &self.sync_errors),
            ("resyncs", "Comparisons of everything with the tables", &self.resyncs),
            ("drift", "Table entries that somebody else had changed and that were repaired", &self.drift),
            (
                "refused_configurations",
                "Changed configuration files that were not valid and are not in force",
                &self.refused_configurations,
            ),
            (
                "former_rule_errors",
                "Attempts to remove what another kube-proxy has left that did not remove all of it",
                &self.former_rule_errors,
            ),
            (
                "frontend_conflicts",
                "Frontends that several service ports have claimed",
                &self.frontend_conflicts,
            ),
        ];
        for (name, help, counter) in counters {
            registry.register(name, help, counter.clone());
        }
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
        registry.register(
            "former_rules",
            "Chains, tables, sets, virtual servers and devices of another kube-proxy that are in the kernel",
            self.former_rules.clone(),
        );
        registry.register(
            "former_rule_blockers",
            "Service ports that are not served, for which the rules of another kube-proxy stay",
            self.former_rule_blockers.clone(),
        );
        registry.register("service_ports", "Service ports that are served", self.service_ports.clone());
        registry.register(
            "unsupported_service_ports",
            "Service ports with a field that the mode does not honour",
            self.unsupported_service_ports.clone(),
        );
        registry.register(
            "phase_duration_seconds",
            "What the controller's thread spends its time with",
            self.phases.clone(),
        );
        self.invalid_objects.register(registry);
    }

    pub(super) fn applied(&self, applied: Applied) {
        self.writes.inc_by(applied.written);
        self.removals.inc_by(applied.removed);
    }

    /// Counts a service port that does not get these fields honoured, or no longer counts it (`change` -1).
    pub(super) fn unsupported(&self, fields: &[Unsupported], change: i64) {
        for unsupported in fields {
            self.unsupported_service_ports.get_or_create(&[("field", unsupported.field)]).inc_by(change);
        }
    }

    pub(super) fn phase(&self, phase: Phase, took: Duration) {
        self.phases.get_or_create(&[("phase", phase.name())]).observe(took.as_secs_f64());
    }
}
