//! Tracks which service ports the active mode serves as their Services ask, and which it does not.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, gauge::ConstGauge},
};
use rustc_hash::FxHashSet;
use tokio::sync::watch;

use crate::{
    http::report::Metrics,
    model::desired::{Changes, DesiredPort, ServicePortName},
    modes::{Dataplane, Effect, UnservedField, refused, servable},
};

/// The part of what is listed that the node serves.
#[derive(Clone, Debug, Default)]
pub struct Coverage {
    /// True once everything listed that the mode can serve was programmed. It stays true when a
    /// later write fails.
    pub programmed: bool,
    /// Service ports that are not served as their Services ask. A port leaves this map when its new
    /// state is written.
    pub unserved_fields: BTreeMap<ServicePortName, Vec<UnservedField>>,
    /// Service ports that cannot be served yet, whole or in part. They wait for room in the maps,
    /// for a listener, or for the kernel to take them.
    pub waiting: BTreeMap<ServicePortName, Vec<UnservedField>>,
}

impl Coverage {
    /// Returns everything that is not served as its Service asks.
    pub fn exceptions(&self) -> impl Iterator<Item = (&ServicePortName, &UnservedField)> {
        let ports = self.unserved_fields.iter().chain(&self.waiting);
        ports.flat_map(|(name, all)| all.iter().map(move |one| (name, one)))
    }

    /// Returns the service ports of which some frontend is not served.
    pub fn unserved(&self) -> impl Iterator<Item = (&ServicePortName, &UnservedField)> {
        self.exceptions().filter(|(_, one)| one.leaves_unserved())
    }
}

/// The metric that names the service ports of which some frontend is not served.
#[derive(Debug)]
pub struct UnservedPorts(pub watch::Receiver<Coverage>);

/// The largest number of service ports that one scrape names, so that a tenant's Services cannot
/// make it long. `proxy_unserved_fields` counts all of them.
const MOST_NAMED: usize = 100;

impl Collector for UnservedPorts {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> std::fmt::Result {
        let help = "Service ports of which some frontend is not served, by name; at most 100 of them.";
        let mut metric =
            encoder.encode_descriptor("proxy_unserved_service_port", help, None, MetricType::Gauge)?;
        for (name, one) in self.0.borrow().unserved().take(MOST_NAMED) {
            let ServicePortName { service, port, protocol, family } = name;
            let labels = [
                ("namespace", &*service.namespace),
                ("service", &*service.name),
                ("port", port),
                ("protocol", protocol.name()),
                ("ip_family", family.name()),
                ("field", one.field),
            ];
            ConstGauge::new(1_i64).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// Keeps a [`Coverage`] up to date. The cost of a change follows the change.
pub(super) struct CoverageTracker {
    coverage: watch::Sender<Coverage>,
    metrics: Arc<Metrics>,
    /// Service ports that the dataplane was given.
    served: FxHashSet<ServicePortName>,
    /// Service ports that leave the coverage with the next write.
    leaving: BTreeSet<ServicePortName>,
}

impl CoverageTracker {
    pub(super) fn new(coverage: watch::Sender<Coverage>, metrics: Arc<Metrics>) -> Self {
        Self { coverage, metrics, served: FxHashSet::default(), leaving: BTreeSet::new() }
    }

    /// Records what the dataplane cannot serve of the changes, and returns what it can serve.
    pub(super) fn changed(&mut self, changes: Changes, dataplane: &dyn Dataplane) -> Changes {
        let mut servable_changes = Changes::default();
        let mut unserved_fields = Vec::new();
        for port in changes.changed {
            let name = port.name.clone();
            let reasons = [dataplane.unserved_fields(&port), refused(&port)].concat();
            if let Some(port) = servable(port, &reasons) {
                self.served.insert(name.clone());
                servable_changes.changed.push(port);
            } else if self.served.remove(&name) {
                servable_changes.removed.push(name.clone());
            }
            if reasons.is_empty() {
                self.leave(name);
            } else {
                self.leaving.remove(&name);
                unserved_fields.push((name, reasons));
            }
        }
        for name in changes.removed {
            if self.served.remove(&name) {
                servable_changes.removed.push(name.clone());
            }
            self.leave(name);
        }
        self.metrics.own.service_ports.set(i64::try_from(self.served.len()).unwrap_or(i64::MAX));
        self.enter(unserved_fields);
        servable_changes
    }

    /// Returns everything of `desired` that the dataplane can serve.
    pub(super) fn servable(
        desired: Vec<Arc<DesiredPort>>,
        dataplane: &dyn Dataplane,
    ) -> Vec<Arc<DesiredPort>> {
        let served = |port: Arc<DesiredPort>| {
            let unserved_fields = dataplane.unserved_fields(&port);
            servable(port, &unserved_fields)
        };
        desired.into_iter().filter_map(served).collect()
    }

    /// Records that everything that changed has been written. If `attached` is true, clients reach
    /// it too.
    pub(super) fn written(&mut self, attached: bool) {
        let leaving = std::mem::take(&mut self.leaving);
        self.coverage.send_if_modified(|coverage| {
            let mut modified = attached && !std::mem::replace(&mut coverage.programmed, attached);
            for name in leaving {
                if let Some(reasons) = coverage.unserved_fields.remove(&name) {
                    self.tell(&name, &reasons, &[]);
                    modified = true;
                }
            }
            modified
        });
    }

    /// Takes over what the dataplane cannot serve yet.
    pub(super) fn take_waiting(&self, dataplane: &mut dyn Dataplane) {
        let Some(now) = dataplane.take_waiting() else { return };
        self.coverage.send_if_modified(|coverage| {
            if coverage.waiting == now {
                return false;
            }
            let before = std::mem::replace(&mut coverage.waiting, now);
            let now = &coverage.waiting;
            for (name, reasons) in before.iter().filter(|(name, _)| !now.contains_key(*name)) {
                self.tell(name, reasons, &[]);
            }
            for (name, reasons) in now {
                self.tell(name, before.get(name).map(Vec::as_slice).unwrap_or_default(), reasons);
            }
            true
        });
    }

    fn leave(&mut self, name: ServicePortName) {
        if self.coverage.borrow().unserved_fields.contains_key(&name) {
            self.leaving.insert(name);
        }
    }

    fn enter(&self, unserved_fields: Vec<(ServicePortName, Vec<UnservedField>)>) {
        self.coverage.send_if_modified(|coverage| {
            let mut modified = false;
            for (name, reasons) in unserved_fields {
                let before = coverage.unserved_fields.get(&name).map(Vec::as_slice).unwrap_or_default();
                if before == reasons {
                    continue;
                }
                self.tell(&name, before, &reasons);
                coverage.unserved_fields.insert(name, reasons);
                modified = true;
            }
            modified
        });
    }

    /// Logs what is new among a service port's exceptions, and counts them.
    fn tell(&self, service_port: &ServicePortName, before: &[UnservedField], now: &[UnservedField]) {
        for UnservedField { field, effect, instead } in now.iter().filter(|one| !before.contains(one)) {
            match effect {
                Effect::LeftToNode => tracing::info!(%service_port, field, "{instead}"),
                Effect::Delegated => tracing::debug!(%service_port, field, "{instead}"),
                Effect::ServedDifferently
                | Effect::NotToOwnNode(_)
                | Effect::Refused
                | Effect::PartlyServed
                | Effect::NotServed => tracing::warn!(%service_port, field, "{instead}"),
            }
        }
        self.metrics.own.count_unserved_fields(before, -1);
        self.metrics.own.count_unserved_fields(now, 1);
    }
}
