//! Metrics about all Services together, kept up to date by what changes.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::{
    http::report::Metrics,
    model::{
        desired::{Changes, DesiredPort, FrontendKind, ServicePortName},
        objects::IpFamily,
    },
};

/// The traffic policies that leave a service port without an endpoint on this node although there
/// are some elsewhere.
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

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    internal: i64,
    external: i64,
}

impl Counts {
    fn add(&mut self, port: WithoutLocal, sign: i64) {
        self.internal += sign * i64::from(port.internal);
        self.external += sign * i64::from(port.external);
    }
}

pub(super) struct ServiceMetrics {
    metrics: Arc<Metrics>,
    /// Service ports without a local endpoint. No value is the default.
    without_local: FxHashMap<ServicePortName, WithoutLocal>,
    ipv4: Counts,
    ipv6: Counts,
}

impl ServiceMetrics {
    pub(super) fn new(metrics: Arc<Metrics>) -> Self {
        Self {
            metrics,
            without_local: FxHashMap::default(),
            ipv4: Counts::default(),
            ipv6: Counts::default(),
        }
    }

    /// Updates the metrics by `changes`, as the model gave them.
    pub(super) fn changed(&mut self, changes: &Changes, new_conflicts: usize) {
        for name in &changes.removed {
            self.set_without_local(name, WithoutLocal::default());
        }
        for port in &changes.changed {
            self.set_without_local(&port.name, WithoutLocal::of(port));
        }
        for (family, counts) in [(IpFamily::Ipv4, self.ipv4), (IpFamily::Ipv6, self.ipv6)] {
            self.metrics.kube_proxy.without_local_endpoints(family, counts.internal, counts.external);
        }
        self.metrics.own.frontend_conflicts.inc_by(new_conflicts as u64);
    }

    fn set_without_local(&mut self, name: &ServicePortName, now: WithoutLocal) {
        let before = if now == WithoutLocal::default() {
            self.without_local.remove(name)
        } else {
            self.without_local.insert(name.clone(), now)
        };
        let counts = match name.family {
            IpFamily::Ipv4 => &mut self.ipv4,
            IpFamily::Ipv6 => &mut self.ipv6,
        };
        counts.add(before.unwrap_or_default(), -1);
        counts.add(now, 1);
    }
}
