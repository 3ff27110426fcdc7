//! The answers of the health server: `/healthz` and `/livez` by kube-proxy's rules, and two paths
//! of our own for the probes of our manifests. kube-proxy's rules tell load balancers to leave a
//! node whose changes are late. That is no reason for a restart, which would not help.

use std::{sync::Arc, time::Duration};

use http::StatusCode;

use super::reply::{JSON, Reply, not_found, plain, reply};
use crate::{
    http::report::{Heartbeats, Metrics, SharedHealth},
    kubernetes::{ResourceKind, SourceState},
};

/// The state that the health server answers from. Clones share it.
#[derive(Clone)]
pub struct HealthPages {
    pub health: Arc<SharedHealth>,
    pub heartbeats: Heartbeats,
    /// The state of the watchers. `None` if Services come from a folder of manifests.
    pub sources: Option<SourceState>,
    pub metrics: Arc<Metrics>,
}

impl HealthPages {
    /// Answers a request. Every method is accepted, as by kube-proxy.
    pub(super) fn answer(&self, path: &str) -> Reply {
        match path {
            "/healthz" => self.health(true),
            "/livez" => self.health(false),
            "/livez/threads" => checked("livez/threads", stuck(&self.heartbeats.stuck())),
            "/readyz" => checked("readyz", self.unready()),
            _ => not_found(),
        }
    }

    fn health(&self, with_node: bool) -> Reply {
        let report = self.health.report();
        let well = report.healthy && (!with_node || report.node_eligible);
        let status = if well { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        self.metrics.answered(with_node, status.as_u16());
        reply(status, JSON, report.body(with_node, well))
    }

    /// Returns why the node is not ready. Everybody may ask, so the reason why a list fails is only
    /// in the log and in `status`.
    fn unready(&self) -> Vec<String> {
        let unprogrammed = self.health.lock().unprogrammed();
        let is_stale = |kind: &ResourceKind| self.sources.as_ref().is_some_and(|of| of.is_stale(*kind));
        let stale = [ResourceKind::Services, ResourceKind::EndpointSlices].into_iter().filter(is_stale);
        let stale = stale.map(|kind| format!("sources failed: {} cannot be watched", kind.plural()));
        unprogrammed.map(|why| format!("programmed failed: {why}")).into_iter().chain(stale).collect()
    }
}

fn stuck(loops: &[(&'static str, Duration)]) -> Vec<String> {
    let line = |(name, silence): &(&str, Duration)| {
        format!("{name} failed: no sign of life for {} s", silence.as_secs())
    };
    loops.iter().map(line).collect()
}

/// Returns an answer in the form of kube-apiserver's checks. The status of a failure is 503, as in
/// kube-proxy.
fn checked(path: &str, failures: Vec<String>) -> Reply {
    if failures.is_empty() {
        return plain(StatusCode::OK, "ok");
    }
    let failures: String = failures.into_iter().map(|failure| format!("[-]{failure}\n")).collect();
    plain(StatusCode::SERVICE_UNAVAILABLE, format!("{failures}{path} check failed\n"))
}
