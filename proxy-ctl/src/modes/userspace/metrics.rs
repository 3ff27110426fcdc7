//! The counters of this mode as metrics.

use std::sync::atomic::{AtomicU64, Ordering};

use super::shared::Counters;
use crate::modes::MetricFamily;

pub(super) fn families(counters: &Counters) -> Vec<MetricFamily> {
    let family = |name, help, counter: &AtomicU64| {
        MetricFamily::counter(name, help, [([].into(), counter.load(Ordering::Relaxed))])
    };
    let Counters { connections, sessions, failed_dials, refused_clients } = counters;
    vec![
        family("proxy_userspace_connections", "TCP connections that an endpoint has answered.", connections),
        family("proxy_userspace_sessions", "UDP sessions that were begun.", sessions),
        family("proxy_userspace_failed_dials", "Failed attempts to reach an endpoint.", failed_dials),
        family("proxy_userspace_refused_clients", "Clients for which there is no endpoint.", refused_clients),
    ]
}

#[cfg(test)]
pub(crate) fn sample_metrics() -> Vec<MetricFamily> {
    families(&Counters::default())
}
