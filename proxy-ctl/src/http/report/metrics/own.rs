//! The metric families that only this proxy has.

use std::time::Duration;

use prometheus_client::{
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Metric, Registry},
};

use super::{Label, Seconds};
use crate::{
    config::Keyword as _,
    kubernetes::convert::invalid::InvalidObjects,
    model::mode::{ChosenMode, RequestedMode},
    modes::{Applied, UnservedField},
    version,
};

/// The kinds of work on which the controller spends its time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Phase {
    /// Computing the desired state from objects.
    Compute,
    /// Writing the service ports that have changed.
    Write,
    /// Comparing everything with the maps.
    Compare,
    /// Taking in the node's addresses and interfaces.
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

type ByPhase = Family<[Label; 1], Histogram, fn() -> Histogram>;

/// Defines the metric families. Each is `field: type = name of the family, its help;`.
macro_rules! families {
    ($($visible:vis $field:ident: $metric:ty = $name:literal, $help:literal;)+) => {
        #[derive(Debug)]
        pub struct ProxyMetrics {
            $(#[doc = $help] $visible $field: $metric,)+
            phases: ByPhase,
            pub invalid_objects: InvalidObjects,
        }

        impl ProxyMetrics {
            fn new(registry: &mut Registry, phases: ByPhase, invalid_objects: InvalidObjects) -> Self {
                Self { $($field: new(registry, $name, $help),)+ phases, invalid_objects }
            }
        }
    };
}

families! {
    writes: Counter = "writes", "Entries of maps or of netfilter tables that were written to follow the sources";
    removals: Counter = "removals", "Entries of maps or of netfilter tables that were removed to follow the sources";
    pub sync_errors: Counter = "sync_errors", "Writes that failed and are tried again";
    pub resyncs: Counter = "resyncs", "Comparisons of everything with what is programmed";
    pub drift: Counter = "drift", "Entries of maps or of netfilter tables that another program had changed and that were repaired";
    pub refused_configurations: Counter =
        "refused_configurations", "Changed configuration files that were not valid and are not in force";
    pub frontend_conflicts: Counter = "frontend_conflicts", "Frontends that several service ports have claimed";
    pub listed: Gauge = "sources_listed", "1 once every source has listed its objects";
    pub first_sync_seconds: Seconds =
        "first_sync_duration_seconds", "Time from everything listed to everything programmed and attached, at the start of the process; 0 before";
    pub former_rules: Gauge =
        "former_rules", "Chains, tables, sets, virtual servers and devices of another kube-proxy that are in the kernel";
    pub former_rule_blockers: Gauge =
        "former_rule_blockers", "Service ports that are not served, for which the rules of another kube-proxy stay";
    pub former_rule_errors: Counter =
        "former_rule_errors", "Attempts to remove what another kube-proxy has left that did not remove all of it";
    pub service_ports: Gauge = "service_ports", "Service ports that are served";
    mode: Family<[Label; 2], Gauge> = "mode", "The active mode, and the one that was asked for; always 1";
    mode_fallback: Gauge = "mode_fallback", "1 if the active mode replaces the one that was asked for";
    unserved_fields: Family<[Label; 1], Gauge> =
        "unserved_fields", "Service ports with a field that is not served as asked";
}

/// Returns a histogram with buckets from 10 µs to 42 s.
fn phase_buckets() -> Histogram {
    Histogram::new(exponential_buckets(0.000_01, 4.0, 12))
}

/// Registers a new metric and returns it.
fn new<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}

impl ProxyMetrics {
    pub(super) fn register(registry: &mut Registry, invalid_objects: InvalidObjects) -> Self {
        let build = Family::<[Label; 4], Gauge>::default();
        let labels = [
            ("version", env!("CARGO_PKG_VERSION")),
            ("commit", version::commit()),
            ("date", version::commit_date()),
            ("object", option_env!("PROXY_EBPF_BUILT_WITH").unwrap_or("unknown")),
        ];
        build.get_or_create(&labels).set(1);
        let registry = registry.sub_registry_with_prefix("proxy");
        registry.register("build_info", "What is running; always 1", build);
        let phases: ByPhase = Family::new_with_constructor(phase_buckets);
        for phase in Phase::ALL {
            drop(phases.get_or_create(&[("phase", phase.name())]));
        }
        let help = "What the controller's thread spends its time with";
        registry.register("phase_duration_seconds", help, phases.clone());
        invalid_objects.register(registry);
        Self::new(registry, phases, invalid_objects)
    }

    pub fn applied(&self, applied: Applied) {
        self.writes.inc_by(applied.written);
        self.removals.inc_by(applied.removed);
    }

    pub fn chosen(&self, choice: &ChosenMode) {
        let is_automatic = choice.requested == RequestedMode::Automatic;
        let requested = if is_automatic { "automatic" } else { choice.requested.word() };
        self.mode.clear();
        self.mode.get_or_create(&[("mode", choice.mode.name()), ("requested", requested)]).set(1);
        self.mode_fallback.set(choice.fallback.is_some().into());
    }

    /// Counts a service port for which these fields are not served as asked. If `change` is -1, the
    /// port is no longer counted.
    pub fn count_unserved_fields(&self, fields: &[UnservedField], change: i64) {
        for one in fields {
            self.unserved_fields.get_or_create(&[("field", one.field)]).inc_by(change);
        }
    }

    pub fn phase(&self, phase: Phase, took: Duration) {
        self.phases.get_or_create(&[("phase", phase.name())]).observe(took.as_secs_f64());
    }
}
