//! What is worth telling about all Services together: each oddity once, and counts.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use super::unsupported::Unsupported;
use crate::{
    model::{
        Conflict, Model,
        desired::{Changes, DesiredPort, FrontendKind, ServicePortName},
        objects::{Family, ObjectName},
    },
    serve::Metrics,
};

/// Which traffic policies of a service port leave it without an endpoint here although there are some elsewhere.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct WithoutLocal {
    internal: bool,
    external: bool,
}

impl WithoutLocal {
    fn of(port: &DesiredPort) -> Self {
        let endpoints = &port.endpoints;
        let is_external = port.frontends.iter().any(|frontend| frontend.kind != FrontendKind::ClusterIp);
        Self {
            internal: endpoints.any && endpoints.internal.is_empty(),
            external: endpoints.any && is_external && endpoints.external.is_empty(),
        }
    }
}

pub(super) struct Surveys {
    metrics: Arc<Metrics>,
    without_local: FxHashMap<ServicePortName, WithoutLocal>,
    warned: FxHashSet<(ObjectName, Unsupported)>,
    conflicts: Vec<Conflict>,
    ports: FxHashSet<ServicePortName>,
}

impl Surveys {
    pub(super) fn new(metrics: Arc<Metrics>) -> Self {
        Self {
            metrics,
            without_local: FxHashMap::default(),
            warned: FxHashSet::default(),
            conflicts: Vec::new(),
            ports: FxHashSet::default(),
        }
    }

    /// `changes` are as the model gave them.
    pub(super) fn changed(&mut self, changes: &Changes, model: &Model) {
        for name in &changes.removed {
            self.ports.remove(name);
            self.without_local.remove(name);
            for feature in Unsupported::ALL {
                self.warned.remove(&(name.service.clone(), feature));
            }
        }
        for port in &changes.changed {
            self.ports.insert(port.name.clone());
            self.survey(port);
        }
        self.metrics.service_ports.set(i64::try_from(self.ports.len()).unwrap_or(i64::MAX));
        self.count_without_local();
        self.conflicts(model.conflicts());
    }

    fn survey(&mut self, port: &DesiredPort) {
        match WithoutLocal::of(port) {
            without if without == WithoutLocal::default() => {
                self.without_local.remove(&port.name);
            }
            without => {
                self.without_local.insert(port.name.clone(), without);
            }
        }
        for feature in Unsupported::of(port) {
            if self.warned.insert((port.name.service.clone(), feature)) {
                self.metrics.odd_objects.found("services", 1);
                let (service, field) = (&port.name.service, feature.field());
                tracing::warn!(%service, field, "{}", feature.consequence());
            }
        }
    }

    fn count_without_local(&self) {
        for family in Family::ALL {
            let of_family = || self.without_local.iter().filter(|(name, _)| name.family == family);
            let count = |counts: fn(&WithoutLocal) -> bool| {
                i64::try_from(of_family().filter(|(_, without)| counts(without)).count()).unwrap_or(i64::MAX)
            };
            let (internal, external) = (count(|without| without.internal), count(|without| without.external));
            self.metrics.without_local_endpoints(family, internal, external);
        }
    }

    fn conflicts(&mut self, now: Vec<Conflict>) {
        if now == self.conflicts {
            return;
        }
        for conflict in now.iter().filter(|conflict| !self.conflicts.contains(conflict)) {
            self.metrics.frontend_conflicts.inc();
            let Conflict { address, port, protocol, winner, losers } = conflict;
            let losers: Vec<_> = losers.iter().map(ToString::to_string).collect();
            tracing::warn!(
                %address, port, ?protocol, served = %winner, left_out = losers.join(", "),
                "several Services claim the same frontend: the oldest has it"
            );
        }
        self.conflicts = now;
    }
}
