//! The controller turns what the sources report into calls of the dataplane. It is the one place
//! where the model and the dataplane meet.
//!
//! [`Controller`] is plain: it gets updates and the time, calls the dataplane, and says when it
//! wants to be called again. [`run`] is the thread around it.

mod coverage;
mod host;
mod latency;
mod run;
mod runner;
mod service_metrics;
mod switch;
mod write;

use std::{net::SocketAddr, sync::Arc, time::Instant};

use tokio::sync::watch;

use self::{
    coverage::CoverageTracker,
    latency::Latency,
    runner::{BoundedRunner, Intervals},
    service_metrics::ServiceMetrics,
    switch::DrainingMode,
};
pub use self::{
    coverage::{Coverage, UnservedPorts},
    run::{Ended, Inputs, MetricsRequest, MetricsRequests, run},
    switch::ModeOpener,
};
use crate::{
    config::{ALLOW_SERVICE_EXTERNAL_IPS, Config},
    http::report::{HealthChecks, Heartbeats, Metrics, ModeInForce, Moment, SharedHealth},
    model::{
        Model, Update,
        mode::Mode,
        node::NodeNetwork,
        objects::{IpFamily, Node, NodeForwarding},
    },
    modes::{self, Dataplane, Error, HookProblems, MetricFamily},
    node::OwnNode,
};

/// The number of runs for changes that need not wait for the mode's shortest interval. kube-proxy
/// allows as many.
const BURST: u32 = 2;

/// The channels and metrics by which the controller reports to others.
#[derive(Clone, Debug)]
pub struct Reports {
    pub health: Arc<SharedHealth>,
    pub metrics: Arc<Metrics>,
    pub own_node: watch::Sender<OwnNode>,
    /// The answers to load balancers' health checks, as they are programmed.
    pub health_checks: watch::Sender<HealthChecks>,
    /// The service ports that are not served as asked, and if everything listed is programmed.
    pub coverage: watch::Sender<Coverage>,
    pub mode: watch::Sender<ModeInForce>,
    /// Former modes of which something is still in the kernel. A mode is listed here before it
    /// releases its lock. Otherwise the search for former rules would take its rules for another
    /// kube-proxy's.
    pub draining: watch::Sender<Vec<Mode>>,
    pub heartbeats: Heartbeats,
    /// The reasons why interfaces lack programs.
    pub hook_problems: watch::Sender<HookProblems>,
}

/// The lists that have come in. Nothing is written before all have.
#[derive(Clone, Copy, Debug, Default)]
struct Listed {
    services: bool,
    slices: bool,
    node: bool,
}

pub struct Controller {
    config: Arc<Config>,
    node_name: Arc<str>,
    model: Model,
    listed: Listed,
    /// `None` until the node is set up.
    network: Option<NodeNetwork>,
    /// `None` until everything has been listed.
    active: Option<ActiveDataplane>,
    /// Modes that were active before and drain.
    draining: Vec<DrainingMode>,
    reports: Reports,
    /// The node's forwarding when the node was last written.
    forwarding: NodeForwarding,
    coverage: CoverageTracker,
    service_metrics: ServiceMetrics,
    latency: Latency,
    /// The error by which the controller learned that another one programs this node. From then on
    /// nothing is written.
    taken_over: Option<Error>,
}

/// The dataplane, and the times at which it is to be written.
struct ActiveDataplane {
    dataplane: Box<dyn Dataplane>,
    /// The time at which everything had been listed.
    listed_at: Instant,
    host: BoundedRunner,
    services: BoundedRunner,
    /// True if packets of the interfaces reach the dataplane. Some addresses for node ports may
    /// still be missing.
    attached: bool,
    garbage_failure: Option<String>,
}

impl Controller {
    pub fn new(config: Arc<Config>, node_name: impl Into<Arc<str>>, reports: Reports) -> Self {
        let start = Moment::now();
        let node_name = node_name.into();
        let model = Model::new(Arc::clone(&node_name));
        let serves_external_ips = config.has_gate(ALLOW_SERVICE_EXTERNAL_IPS);
        for family in IpFamily::ALL {
            reports.health.lock().updated(family, start);
        }
        Self {
            forwarding: config.ebpf.forwarding(),
            config,
            model: if serves_external_ips { model } else { model.without_external_ips() },
            node_name,
            listed: Listed::default(),
            network: None,
            active: None,
            draining: Vec::new(),
            coverage: CoverageTracker::new(reports.coverage.clone(), Arc::clone(&reports.metrics)),
            service_metrics: ServiceMetrics::new(Arc::clone(&reports.metrics)),
            reports,
            latency: Latency::new(start.time),
            taken_over: None,
        }
    }

    /// Has the model keep endpoints, as [`Model::keeping_endpoints_of`] describes.
    pub fn keeping_endpoints_of(self, server: Option<SocketAddr>) -> Self {
        Self { model: self.model.keeping_endpoints_of(server), ..self }
    }

    /// Takes in an update of a source. [`Controller::write`] then writes what all updates have
    /// changed.
    pub fn take(&mut self, update: Update) {
        let metrics = &self.reports.metrics;
        let count = |length: usize| u64::try_from(length).unwrap_or(u64::MAX);
        match &update {
            Update::ReplaceServices(services) => {
                self.listed.services = true;
                metrics.kube_proxy.service_changes.received(count(services.len()));
            }
            Update::ReplaceSlices(slices) => {
                self.listed.slices = true;
                metrics.kube_proxy.endpoint_changes.received(count(slices.len()));
            }
            Update::ApplyService(_) | Update::DeleteService(_) => {
                metrics.kube_proxy.service_changes.received(1)
            }
            Update::ApplySlice(_) | Update::DeleteSlice(_) => metrics.kube_proxy.endpoint_changes.received(1),
            Update::ReplaceServiceCidrs(_) | Update::ApplyServiceCidr(_) | Update::DeleteServiceCidr(_) => {
                let before = self.model.service_cidrs();
                self.model.update(update);
                if self.model.service_cidrs() != before {
                    self.ask_for_host();
                }
                return;
            }
            Update::Node(node) => self.take_node(node.as_ref()),
        }
        self.model.update(update);
    }

    fn take_node(&mut self, node: Option<&Node>) {
        let was_missing = self.listed.node && self.model.node().is_none();
        if node.is_none() && !was_missing {
            tracing::warn!(
                node = %self.node_name,
                "there is no such Node, or it may not be read: its zone and addresses are not known and \
                 /healthz answers 503; --hostname-override must be the name of this node's Node"
            );
        }
        self.listed.node = true;
        self.reports.health.lock().set_node(node);
        let listed = node.map_or(OwnNode::Absent, |node| OwnNode::Present(node.clone()));
        self.reports.own_node.send_replace(listed);
        let concerns = |node: &Node| (node.addresses.clone(), node.pod_cidrs.clone());
        if self.model.node().map(concerns) != node.map(concerns) {
            self.ask_for_host();
        }
    }

    /// Sets the node's addresses and interfaces.
    pub fn set_network(&mut self, network: NodeNetwork) {
        self.network = Some(network);
        self.ask_for_host();
    }

    fn ask_for_host(&mut self) {
        if let Some(active) = &mut self.active {
            active.host.ask();
        }
    }

    /// Returns true if every source has listed and the node is known, so that the dataplane can be
    /// started.
    pub fn is_ready(&self) -> bool {
        self.waits_for().is_empty()
    }

    /// Returns what is still missing, in words for log lines.
    pub fn waits_for(&self) -> Vec<&'static str> {
        let all = [
            (self.listed.services, "Services"),
            (self.listed.slices, "EndpointSlices"),
            (self.listed.node, "the own Node"),
            (self.network.is_some(), "the node to be set up"),
        ];
        all.into_iter().filter(|(there, _)| !there).map(|(_, what)| what).collect()
    }

    /// Starts to write to `dataplane`, everything first. `now` is when the last list came in.
    pub fn start(&mut self, dataplane: Box<dyn Dataplane>, now: Instant) {
        self.reports.metrics.own.listed.set(1);
        let services = service_intervals(self.reports.mode.borrow().modes.active, &self.config);
        self.active = Some(ActiveDataplane {
            dataplane,
            listed_at: now,
            host: BoundedRunner::new(now, host_intervals(&self.config)),
            services: BoundedRunner::new(now, services),
            attached: false,
            garbage_failure: None,
        });
    }

    /// Puts this configuration in force, as far as that is possible without a new process.
    pub fn configure(&mut self, config: Arc<Config>, now: Instant) {
        self.config = config;
        self.reports.health.lock().set_sync_period(self.config.periods.sync);
        if let Some(active) = &mut self.active {
            let services = service_intervals(self.reports.mode.borrow().modes.active, &self.config);
            active.host.set_intervals(host_intervals(&self.config), now);
            active.services.set_intervals(services, now);
            active.host.ask();
        }
    }

    /// Returns when [`Controller::write`] should be called although nothing has changed.
    pub fn wants_call_at(&self) -> Option<Instant> {
        let active = self.active.as_ref()?;
        active.host.next().into_iter().chain(active.services.next()).min()
    }

    pub fn metrics(&self) -> Option<Vec<MetricFamily>> {
        let families = self.active.as_ref()?.dataplane.metrics();
        families.inspect_err(|error| tracing::warn!(%error, "reading what is programmed failed")).ok()
    }
}

/// Returns the intervals for the node. A change of its network is written at once in every mode.
fn host_intervals(config: &Config) -> Intervals {
    Intervals { min: std::time::Duration::ZERO, burst: 1, max: config.periods.sync }
}

fn service_intervals(mode: Mode, config: &Config) -> Intervals {
    let min = modes::min_interval(mode, config.periods.min_sync);
    Intervals { min, burst: BURST, max: config.periods.sync }
}

#[cfg(test)]
mod tests;
