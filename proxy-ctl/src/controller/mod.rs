//! From what the sources tell to what the dataplane does: the one place where the model and the dataplane meet.
//!
//! [`Controller`] is plain: given updates and the time it calls the dataplane, and says when it wants to be
//! called again. [`run`] is the thread around it.

mod coverage;
mod latency;
mod retry;
mod run;
mod service_metrics;

use std::{
    collections::BTreeSet,
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::{mpsc, watch};

pub use self::{
    coverage::Coverage,
    run::{Asks, Ended, Inputs, UsageAsk, run},
};
use self::{coverage::CoverageTracker, latency::Latency, retry::Retry, service_metrics::ServiceMetrics};
use crate::{
    config::Config,
    dataplane::{Applied, Dataplane, Error, Host, Usage},
    model::{
        Model, Update,
        desired::Changes,
        objects::{IpFamily, Node},
    },
    node::NodeIps,
    report::{HealthCheckAddresses, HealthChecks, Metrics, Moment, Phase, SharedHealth, SyncKind},
};

/// What the controller tells the world.
#[derive(Clone, Debug)]
pub struct Reports {
    pub health: Arc<SharedHealth>,
    pub metrics: Arc<Metrics>,
    /// Addresses of the own Node, best first; `None` before it was listed.
    pub node_addresses: watch::Sender<Option<Vec<IpAddr>>>,
    /// Every state of the own Node. Whoever has stopped listening is not told.
    pub nodes: mpsc::UnboundedSender<Option<Node>>,
    /// What load balancers ask for, as it is programmed.
    pub health_checks: watch::Sender<HealthChecks>,
    /// Whether everything listed is programmed, and the service ports that are not served as asked.
    pub coverage: watch::Sender<Coverage>,
}

/// Which lists have come in. Nothing is written before all have.
#[derive(Clone, Copy, Debug, Default)]
struct Listed {
    services: bool,
    slices: bool,
    node: bool,
}

pub struct Controller<D> {
    config: Arc<Config>,
    node_name: Arc<str>,
    model: Model,
    listed: Listed,
    /// As the node is, before the configuration has its say.
    host: Option<Host>,
    dataplane: Option<Programmed<D>>,
    reports: Reports,
    coverage: CoverageTracker,
    service_metrics: ServiceMetrics,
    latency: Latency,
    /// By whom; nothing is written any more.
    taken_over: Option<Error>,
}

/// The dataplane and what it still owes.
struct Programmed<D> {
    dataplane: D,
    /// When everything had been listed.
    listed_at: Instant,
    /// Everything was written at least once.
    complete: bool,
    host: Retry,
    /// Nothing of the node is missing but addresses for node ports, perhaps.
    attached: bool,
    resync: Retry,
    /// When everything is compared although nothing has failed.
    inspect_at: Instant,
    garbage_failure: Option<String>,
}

impl<D: Dataplane> Controller<D> {
    pub fn new(config: Arc<Config>, node_name: impl Into<Arc<str>>, reports: Reports) -> Self {
        let start = Moment::now();
        let node_name = node_name.into();
        for family in IpFamily::ALL {
            reports.health.lock().updated(family, start);
        }
        let coverage = CoverageTracker::new(reports.coverage.clone(), Arc::clone(&reports.metrics));
        let service_metrics = ServiceMetrics::new(Arc::clone(&reports.metrics));
        Self {
            config,
            model: Model::new(Arc::clone(&node_name)),
            node_name,
            listed: Listed::default(),
            host: None,
            dataplane: None,
            reports,
            coverage,
            service_metrics,
            latency: Latency::new(start.time),
            taken_over: None,
        }
    }

    /// Takes in what a source tells; [`Controller::write`] then writes what all updates have changed.
    pub fn take(&mut self, update: Update, now: Instant) {
        let metrics = &self.reports.metrics;
        let count = |length: usize| u64::try_from(length).unwrap_or(u64::MAX);
        match &update {
            Update::ReplaceServices(services) => {
                self.listed.services = true;
                metrics.service_changes.received(count(services.len()));
            }
            Update::ReplaceSlices(slices) => {
                self.listed.slices = true;
                metrics.endpoint_changes.received(count(slices.len()));
            }
            Update::ApplyService(_) | Update::DeleteService(_) => metrics.service_changes.received(1),
            Update::ApplySlice(_) | Update::DeleteSlice(_) | Update::ReplaceServiceSlices(_) => {
                metrics.endpoint_changes.received(1);
            }
            // Nobody waits for them, and nothing is programmed from them in mode ebpf.
            Update::ReplaceServiceCidrs(_) | Update::ApplyServiceCidr(_) | Update::DeleteServiceCidr(_) => {}
            Update::Node(node) => {
                let was_missing = self.listed.node && self.model.node().is_none();
                if node.is_none() && !was_missing {
                    tracing::warn!(
                        node = %self.node_name,
                        "there is no such Node, or it may not be read: its zone and addresses are not known and \
                         /healthz answers 503; --hostname-override must be the name of this node's Node"
                    );
                }
                self.listed.node = true;
                self.reports.health.lock().set_node(node.as_ref());
                let _ = self.reports.nodes.send(node.clone());
                let addresses = Some(node.as_ref().map(|node| node.addresses.clone()).unwrap_or_default());
                let differ = self.reports.node_addresses.send_if_modified(|told| {
                    let differ = *told != addresses;
                    *told = addresses;
                    differ
                });
                if let (true, Some(programmed)) = (differ, &mut self.dataplane) {
                    programmed.host.ask(now);
                }
            }
        }
        self.model.update(update);
    }

    /// The node's addresses and interfaces are now these.
    pub fn set_host(&mut self, host: Host, now: Instant) {
        self.host = Some(host);
        if let Some(programmed) = &mut self.dataplane {
            programmed.host.ask(now);
        }
    }

    /// Every source has listed, and the node is known: the dataplane can be started.
    pub fn is_ready(&self) -> bool {
        self.listed.services && self.listed.slices && self.listed.node && self.host.is_some()
    }

    /// What is still missing, for people.
    pub fn waits_for(&self) -> Vec<&'static str> {
        let all = [
            (self.listed.services, "Services"),
            (self.listed.slices, "EndpointSlices"),
            (self.listed.node, "the own Node"),
            (self.host.is_some(), "the node to be set up"),
        ];
        all.into_iter().filter(|(there, _)| !there).map(|(_, what)| what).collect()
    }

    /// From now on changes are written to `dataplane`, everything first. `now`: when the last list came in.
    pub fn start(&mut self, dataplane: D, now: Instant) {
        self.reports.metrics.listed.set(1);
        self.dataplane = Some(Programmed {
            dataplane,
            listed_at: now,
            complete: false,
            host: Retry::due(now, self.config.sync_period()),
            attached: false,
            resync: Retry::due(now, self.config.sync_period()),
            inspect_at: now + self.config.sync_period(),
            garbage_failure: None,
        });
    }

    pub fn is_started(&self) -> bool {
        self.dataplane.is_some()
    }

    /// From now on this configuration is in force, as far as it can be without a new process.
    pub fn configure(&mut self, config: Arc<Config>, now: Instant) {
        let period = config.sync_period();
        self.config = config;
        self.reports.health.lock().set_sync_period(period);
        if let Some(programmed) = &mut self.dataplane {
            programmed.host.set_longest_pause(period);
            programmed.resync.set_longest_pause(period);
            programmed.inspect_at = programmed.inspect_at.min(now + period);
            programmed.host.ask(now);
        }
    }

    /// Writes what is due. Failures are logged, counted, and tried again at [`Controller::wants_call_at`].
    pub fn write(&mut self, now: Instant) {
        let Some(programmed) = &mut self.dataplane else { return };
        let inspects = programmed.inspect_at <= now;
        let host = if inspects && !programmed.host.is_pending() { Why::Inspection } else { Why::Change };
        if inspects {
            programmed.inspect_at = now + self.config.sync_period();
            programmed.host.ask(now);
        }
        self.write_host(host, now);
        if self.taken_over.is_some() {
            return;
        }
        let started = Instant::now();
        let changes = self.model.take_changes();
        self.latency.received(self.model.take_triggers());
        if !changes.is_empty() {
            self.reports.metrics.phase(Phase::Compute, started.elapsed());
            self.service_metrics.changed(&changes, &self.model);
            self.queued(&changes, now);
        }
        let Some(programmed) = &mut self.dataplane else { return };
        let changes = self.coverage.changed(changes, &programmed.dataplane);
        if programmed.resync.is_due(now) {
            self.resync(now);
        } else if programmed.complete && !changes.is_empty() {
            self.apply(&changes, now);
        } else if programmed.complete && !programmed.resync.is_pending() {
            self.written();
        }
        if inspects && self.dataplane.as_ref().is_some_and(Programmed::is_quiet) {
            self.inspect(now);
        }
    }

    fn write_host(&mut self, why: Why, now: Instant) {
        let (Some(programmed), Some(host)) = (&mut self.dataplane, &self.host) else { return };
        if !programmed.host.is_due(now) {
            return;
        }
        let node_addresses = self.model.node().map(|node| node.addresses.as_slice()).unwrap_or_default();
        let host = selected(host, &self.config, node_addresses);
        let metrics = &self.reports.metrics;
        let started = Instant::now();
        let done = programmed.dataplane.set_host(&host);
        metrics.phase(Phase::Node, started.elapsed());
        match done {
            Ok(applied) => {
                programmed.host.succeeded();
                programmed.attached = true;
                metrics.applied(applied);
                if why == Why::Inspection {
                    tell_drift(applied, metrics);
                }
            }
            Err(error) if error.is_taken_over() => self.taken_over = Some(error),
            Err(error) => {
                metrics.sync_errors.inc();
                let pause = programmed.host.failed(now);
                programmed.attached = error.is_of_node_addresses();
                tracing::error!(
                    %error, next_attempt_in = ?pause,
                    "taking over the node's addresses and interfaces failed"
                );
                self.owed(now);
            }
        }
    }

    fn apply(&mut self, changes: &Changes, now: Instant) {
        let Some(programmed) = &mut self.dataplane else { return };
        let started = Instant::now();
        let result = programmed.dataplane.apply(changes);
        let took = started.elapsed();
        self.reports.metrics.phase(Phase::Write, took);
        match result {
            Ok(applied) => self.succeeded(applied, took, &families_of(changes), SyncKind::Partial),
            Err(error) => self.failed(&error, now, "writing changes failed"),
        }
    }

    fn resync(&mut self, now: Instant) {
        let Some(programmed) = &mut self.dataplane else { return };
        let desired = CoverageTracker::servable(self.model.desired(), &programmed.dataplane);
        let started = Instant::now();
        let result = programmed.dataplane.resync(&desired);
        let took = started.elapsed();
        self.reports.metrics.phase(Phase::Compare, took);
        self.reports.metrics.resyncs.inc();
        match result {
            Ok(applied) => {
                programmed.resync.succeeded();
                if !programmed.complete {
                    let took = programmed.listed_at.elapsed();
                    self.reports.metrics.first_sync_seconds.set(took.as_secs_f64());
                    tracing::info!(ports = desired.len(), ?took, "everything listed is programmed");
                }
                programmed.complete = true;
                self.succeeded(applied, took, &IpFamily::ALL, SyncKind::Full);
            }
            Err(error) => self.failed(&error, now, "writing everything failed"),
        }
    }

    /// Compares what is programmed with what should be. Everything is written already: a difference is somebody
    /// else's doing.
    fn inspect(&mut self, now: Instant) {
        let Some(programmed) = &mut self.dataplane else { return };
        let desired = CoverageTracker::servable(self.model.desired(), &programmed.dataplane);
        let started = Instant::now();
        let result = programmed.dataplane.resync(&desired);
        let took = started.elapsed();
        let metrics = &self.reports.metrics;
        metrics.phase(Phase::Compare, took);
        metrics.resyncs.inc();
        match result {
            Ok(applied) => {
                tell_drift(applied, metrics);
                self.succeeded(applied, took, &IpFamily::ALL, SyncKind::Full);
            }
            Err(error) => {
                self.failed(&error, now, "comparing what is programmed failed");
                self.owed(now);
            }
        }
    }

    fn succeeded(&mut self, applied: Applied, took: Duration, families: &[IpFamily], kind: SyncKind) {
        let metrics = &self.reports.metrics;
        metrics.applied(applied);
        for family in families {
            metrics.synced(*family, kind, took);
        }
        let what = match kind {
            SyncKind::Full => "everything compared and written",
            SyncKind::Partial => "changes written",
        };
        let (written, removed) = (applied.written, applied.removed);
        tracing::debug!(written, removed, ?took, "{what}");
        if self.dataplane.as_ref().is_some_and(|programmed| !programmed.resync.is_pending()) {
            self.written();
        }
    }

    /// Tells what load balancers may rely on: nothing before it is written.
    fn tell_health_checks(&self) {
        let Some(host) = &self.host else { return };
        let addresses = if self.config.serves_node_ports_everywhere() {
            HealthCheckAddresses::All
        } else {
            let node_addresses = self.model.node().map(|node| node.addresses.as_slice()).unwrap_or_default();
            HealthCheckAddresses::Only(node_port_addresses(host, &self.config, node_addresses))
        };
        let now = HealthChecks { addresses, services: self.model.health_checks() };
        self.reports.health_checks.send_if_modified(|told| {
            let differ = *told != now;
            *told = now;
            differ
        });
    }

    /// No change waits any more.
    fn written(&mut self) {
        self.tell_health_checks();
        self.reports.metrics.endpoint_changes.written();
        self.reports.metrics.service_changes.written();
        let now = Moment::now();
        self.latency.written(now.time, &self.reports.metrics);
        let Some(Programmed { host, attached, .. }) = &self.dataplane else { return };
        self.coverage.written(*attached);
        if !host.is_failing() {
            let mut health = self.reports.health.lock();
            for family in IpFamily::ALL {
                health.updated(family, now);
            }
        }
    }

    fn failed(&mut self, error: &Error, now: Instant, what: &'static str) {
        let Some(programmed) = &mut self.dataplane else { return };
        self.reports.metrics.sync_errors.inc();
        let pause = programmed.resync.failed(now);
        tracing::error!(%error, next_attempt_in = ?pause, "{what}; what was served before is served on");
    }

    /// Something that concerns both families could not be written: it makes the node unhealthy if it takes too long.
    fn owed(&self, now: Instant) {
        let mut health = self.reports.health.lock();
        for family in IpFamily::ALL {
            health.queued(family, now);
        }
    }

    fn queued(&self, changes: &Changes, now: Instant) {
        let mut health = self.reports.health.lock();
        for family in families_of(changes) {
            health.queued(family, now);
            self.reports.metrics.queued(family);
        }
    }

    /// Removes what nobody uses any more; a failure is logged when it begins and when it ends.
    pub fn collect_garbage(&mut self) {
        let Some(programmed) = &mut self.dataplane else { return };
        let started = Instant::now();
        let result = programmed.dataplane.collect_garbage();
        self.reports.metrics.phase(Phase::Collect, started.elapsed());
        let failure = match result {
            Ok(()) => None,
            Err(error) if error.is_taken_over() => {
                self.taken_over = Some(error);
                return;
            }
            Err(error) => Some(error.to_string()),
        };
        match (&failure, &programmed.garbage_failure) {
            (Some(error), before) if before.as_ref() != Some(error) => {
                tracing::warn!(%error, "removing expired flows failed");
            }
            (None, Some(_)) => tracing::info!("expired flows are removed again"),
            _ => {}
        }
        programmed.garbage_failure = failure;
    }

    /// When [`Controller::write`] should be called although nothing has changed.
    pub fn wants_call_at(&self) -> Option<Instant> {
        let programmed = self.dataplane.as_ref()?;
        let planned = [programmed.host.at(), programmed.resync.at(), Some(programmed.inspect_at)];
        planned.into_iter().flatten().min()
    }

    pub fn usage(&self) -> Option<Usage> {
        let usage = self.dataplane.as_ref()?.dataplane.usage();
        usage.inspect_err(|error| tracing::warn!(%error, "reading the state of the tables failed")).ok()
    }
}

/// Why the node's addresses and interfaces are written.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Why {
    Change,
    /// Nothing has changed that we know of.
    Inspection,
}

/// What an inspection had to write was somebody else's doing.
fn tell_drift(applied: Applied, metrics: &Metrics) {
    let Applied { written, removed } = applied;
    metrics.drift.inc_by(written + removed);
    if applied != Applied::default() {
        tracing::warn!(
            written,
            removed,
            "somebody had changed what is programmed; it is as it should be again"
        );
    }
}

impl<D> Programmed<D> {
    /// Everything was written, and nothing is to be tried again.
    fn is_quiet(&self) -> bool {
        self.complete && !self.resync.is_pending()
    }
}

/// What the configuration leaves of the node's addresses and interfaces.
fn selected(host: &Host, config: &Config, node_addresses: &[IpAddr]) -> Host {
    let mut node_port_addresses = node_port_addresses(host, config, node_addresses);
    node_port_addresses.retain(|address| config.iptables.localhost_node_ports || !address.is_loopback());
    Host {
        node_port_addresses,
        masquerade_addresses: host.masquerade_addresses.clone(),
        interfaces: host
            .interfaces
            .iter()
            .filter(|interface| config.ebpf.interfaces.select(&interface.name))
            .cloned()
            .collect(),
    }
}

fn node_port_addresses(host: &Host, config: &Config, node_addresses: &[IpAddr]) -> BTreeSet<IpAddr> {
    let primary = NodeIps::detect(config.bind_address, node_addresses).known();
    let serves = |address: &&IpAddr| config.serves_node_ports_on(**address, &primary);
    host.node_port_addresses.iter().filter(serves).copied().collect()
}

fn families_of(changes: &Changes) -> Vec<IpFamily> {
    let names = changes.changed.iter().map(|port| &port.name).chain(&changes.removed);
    let mut families: Vec<IpFamily> = names.map(|name| name.family).collect();
    families.sort_unstable();
    families.dedup();
    families
}

#[cfg(test)]
mod tests;
