//! Writes what is due to the dataplane, and reports what has come of it.

use std::time::{Duration, Instant};

use super::{
    ActiveDataplane, Controller,
    coverage::CoverageTracker,
    host::{host, node_port_addresses},
    runner::RunScope,
    switch::DrainingMode,
};
use crate::{
    http::report::{HealthCheckAddresses, Metrics, Moment, Phase, SyncKind},
    model::{desired::Changes, objects::IpFamily},
    modes::{self, Applied, Error},
};

/// The longest time by which an inspection is put off because the last one took long.
const LONGEST_REST: Duration = Duration::from_secs(600);

impl Controller {
    /// Writes what is due. Failures are logged, counted, and tried again at
    /// [`Controller::wants_call_at`].
    pub fn write(&mut self, now: Instant) {
        self.write_what_is_due(now);
        let programmed = self.programmed();
        self.reports.health.lock().set_programmed(programmed);
    }

    /// Returns Ok if everything that was listed is programmed, or is about to be written. Otherwise
    /// returns the reason.
    fn programmed(&mut self) -> Result<(), String> {
        let Some(active) = &mut self.active else {
            return Err(format!("waiting for {}", self.waits_for().join(", ")));
        };
        if active.services.is_failing() || !active.services.is_complete() {
            return Err("Services are not written".to_owned());
        }
        if active.host.is_failing() || !active.attached {
            return Err("the node's addresses and interfaces are not programmed".to_owned());
        }
        if let Some(reason) =
            active.dataplane.packet_mode().and_then(|mode| mode.packet_programs().fit_nowhere)
        {
            return Err(format!("no interface of a workload takes packet programs: {reason}"));
        }
        Ok(())
    }

    fn write_what_is_due(&mut self, now: Instant) {
        let host = self.write_host(now);
        if self.taken_over.is_some() {
            return;
        }
        if self.model.has_changes()
            && let Some(active) = &mut self.active
        {
            active.services.ask();
        }
        while let Some(scope) = self.active.as_ref().and_then(|active| active.services.due(now)) {
            match scope {
                RunScope::Changes => self.write_changes(now),
                RunScope::Everything | RunScope::Inspection => self.write_everything(scope, now),
            }
        }
        if let Some((scope, written)) = host {
            self.attach(scope, written, now);
        }
        if self.active.as_ref().is_some_and(|active| active.services.is_settled()) {
            self.written();
        }
    }

    /// Writes the node if that is due, and returns what has come of it.
    fn write_host(&mut self, now: Instant) -> Option<(RunScope, Result<Applied, Error>)> {
        let (Some(active), Some(network)) = (&mut self.active, &self.network) else { return None };
        let scope = active.host.due(now)?;
        let active_mode = self.reports.mode.borrow().modes.active;
        let ports =
            modes::masquerade_ports(self.draining.iter().map(DrainingMode::mode).chain([active_mode]));
        let host = host(network, &self.config, self.model.node(), self.model.service_cidrs(), ports);
        let metrics = &self.reports.metrics;
        let started = Instant::now();
        let written = active.dataplane.set_host(&host);
        metrics.own.phase(Phase::Node, started.elapsed());
        if std::mem::replace(&mut self.forwarding, host.forwarding) != host.forwarding {
            // A Service may now ask for more than the node allows, or for less.
            let all = Changes { changed: self.model.desired(), removed: Vec::new() };
            self.coverage.changed(all, active.dataplane.as_ref());
        }
        self.coverage.take_waiting(active.dataplane.as_mut());
        match written {
            Err(error) if error.is_taken_over() => {
                self.taken_over = Some(error);
                None
            }
            written => Some((scope, written)),
        }
    }

    /// Attaches the dataplane to the interfaces, after the node and the service ports were written.
    /// `written` is the result of [`write_host`](Self::write_host).
    fn attach(&mut self, scope: RunScope, written: Result<Applied, Error>, now: Instant) {
        let Some(active) = &mut self.active else { return };
        let metrics = &self.reports.metrics;
        let started = Instant::now();
        let attached = active.dataplane.packet_mode().map_or(Ok(()), |mode| mode.attach());
        metrics.own.phase(Phase::Node, started.elapsed());
        active.attached = attached.is_ok() && written.as_ref().err().is_none_or(Error::is_of_node_addresses);
        match attached.and(written) {
            Ok(applied) => {
                let done = if scope == RunScope::Changes { RunScope::Everything } else { scope };
                active.host.succeeded(done, now);
                metrics.own.applied(applied);
                if scope == RunScope::Inspection {
                    report_drift(applied, metrics);
                }
            }
            Err(error) => {
                metrics.own.sync_errors.inc();
                let pause = active.host.failed(now);
                tracing::error!(
                    %error, next_attempt_in = ?pause,
                    "programming the node's addresses and interfaces failed"
                );
                self.overdue(now);
            }
        }
    }

    /// Takes what has changed in the model, as far as the mode serves it.
    fn take_changes(&mut self, now: Instant) -> Changes {
        let Some(active) = &self.active else { return Changes::default() };
        let started = Instant::now();
        let changes = self.model.take_changes();
        self.latency.received(self.model.take_triggers());
        if changes.is_empty() {
            return changes;
        }
        self.reports.metrics.own.phase(Phase::Compute, started.elapsed());
        self.service_metrics.changed(&changes, self.model.take_new_conflicts());
        for family in families_of(&changes) {
            self.reports.health.lock().queued(family, now);
            self.reports.metrics.kube_proxy.queued(family);
        }
        self.coverage.changed(changes, active.dataplane.as_ref())
    }

    fn write_changes(&mut self, now: Instant) {
        let changes = self.take_changes(now);
        let Some(active) = &mut self.active else { return };
        if changes.is_empty() {
            active.services.succeeded(RunScope::Changes, now);
            return;
        }
        let started = Instant::now();
        let result = active.dataplane.apply(&changes);
        self.coverage.take_waiting(active.dataplane.as_mut());
        let took = started.elapsed();
        self.reports.metrics.own.phase(Phase::Write, took);
        match result {
            Ok(applied) => {
                active.services.succeeded(RunScope::Changes, now);
                self.report_written(applied, took, &families_of(&changes), SyncKind::Partial);
            }
            Err(error) => self.failed(&error, now, "writing changes failed"),
        }
    }

    /// Writes everything. All changes were written before an inspection begins, so whatever it has
    /// to write was changed by another program.
    fn write_everything(&mut self, scope: RunScope, now: Instant) {
        self.take_changes(now);
        let Some(active) = &mut self.active else { return };
        let desired = CoverageTracker::servable(self.model.desired(), active.dataplane.as_ref());
        let started = Instant::now();
        let result = active.dataplane.resync(&desired);
        self.coverage.take_waiting(active.dataplane.as_mut());
        let took = started.elapsed();
        let metrics = &self.reports.metrics;
        metrics.own.phase(Phase::Compare, took);
        metrics.own.resyncs.inc();
        match result {
            Ok(applied) => {
                if scope == RunScope::Inspection {
                    report_drift(applied, metrics);
                }
                if !active.services.is_complete() {
                    let took = active.listed_at.elapsed();
                    tracing::info!(ports = desired.len(), ?took, "everything listed is programmed");
                }
                active.services.succeeded(scope, now);
                if scope == RunScope::Inspection && applied == Applied::default() {
                    let share = active.dataplane.packet_mode().map_or(0, |mode| mode.inspection_share());
                    let rest = took * share;
                    active.services.put_inspection_off(now + rest.min(LONGEST_REST));
                }
                self.report_written(applied, took, &IpFamily::ALL, SyncKind::Full);
            }
            Err(error) => {
                self.failed(&error, now, "writing everything failed");
                self.overdue(now);
            }
        }
    }

    fn report_written(&self, applied: Applied, took: Duration, families: &[IpFamily], kind: SyncKind) {
        let metrics = &self.reports.metrics;
        metrics.own.applied(applied);
        for family in families {
            metrics.kube_proxy.synced(*family, kind, took);
        }
        let Applied { written, removed } = applied;
        match kind {
            SyncKind::Full => tracing::debug!(written, removed, ?took, "everything compared and written"),
            SyncKind::Partial => tracing::debug!(written, removed, ?took, "changes written"),
        }
    }

    fn failed(&mut self, error: &Error, now: Instant, what: &'static str) {
        let Some(active) = &mut self.active else { return };
        self.reports.metrics.own.sync_errors.inc();
        let pause = active.services.failed(now);
        tracing::error!(%error, next_attempt_in = ?pause, "{what}; what was served before is served on");
    }

    /// Records that something of both IP families could not be written. The node becomes unhealthy
    /// if that lasts too long.
    fn overdue(&self, now: Instant) {
        let mut health = self.reports.health.lock();
        for family in IpFamily::ALL {
            health.queued(family, now);
        }
    }

    /// Reports that no change of Services waits any more.
    fn written(&mut self) {
        self.report_health_checks();
        self.reports.metrics.kube_proxy.endpoint_changes.written();
        self.reports.metrics.kube_proxy.service_changes.written();
        let now = Moment::now();
        self.latency.written(now.time, &self.reports.metrics);
        let Some(ActiveDataplane { host, attached, listed_at, .. }) = &self.active else { return };
        let first_sync = &self.reports.metrics.own.first_sync_seconds;
        if *attached && first_sync.get() == 0.0 {
            first_sync.set(listed_at.elapsed().as_secs_f64());
        }
        self.coverage.written(*attached);
        if !host.is_failing() {
            let mut health = self.reports.health.lock();
            for family in IpFamily::ALL {
                health.updated(family, now);
            }
        }
    }

    /// Reports what load balancers may rely on. Nothing is reported before it is written.
    fn report_health_checks(&mut self) {
        let Some(network) = &self.network else { return };
        let addresses = if self.config.serves_node_ports_everywhere() {
            HealthCheckAddresses::All
        } else {
            HealthCheckAddresses::Only(node_port_addresses(network, &self.config, self.model.node()))
        };
        let changed = self.model.take_health_checks();
        self.reports.health_checks.send_if_modified(|reported| {
            let modified = !changed.is_empty() || reported.addresses != addresses;
            reported.addresses = addresses;
            for (service, check) in changed {
                match check {
                    Some(check) => reported.services.insert(service, check),
                    None => reported.services.remove(&service),
                };
            }
            modified
        });
    }

    /// Removes what is no longer used. A failure is logged when it begins and when it ends.
    pub fn collect_garbage(&mut self) {
        let Some(active) = &mut self.active else { return };
        let started = Instant::now();
        let result = active.dataplane.collect_garbage();
        let hook_problems =
            active.dataplane.packet_mode().map(|mode| mode.hook_problems()).unwrap_or_default();
        self.reports.hook_problems.send_if_modified(|told| {
            let is_other = *told != hook_problems;
            *told = hook_problems;
            is_other
        });
        self.coverage.take_waiting(active.dataplane.as_mut());
        self.reports.metrics.own.phase(Phase::Collect, started.elapsed());
        let failure = match result {
            Ok(()) => None,
            Err(error) if error.is_taken_over() => {
                self.taken_over = Some(error);
                return;
            }
            Err(error) => Some(error.to_string()),
        };
        match (&failure, &active.garbage_failure) {
            (Some(error), before) if before.as_ref() != Some(error) => {
                tracing::warn!(%error, "removing expired flows failed");
            }
            (None, Some(_)) => tracing::info!("expired flows are removed again"),
            _ => {}
        }
        active.garbage_failure = failure;
    }
}

/// Reports what an inspection had to write as changes by another program.
fn report_drift(applied: Applied, metrics: &Metrics) {
    let Applied { written, removed } = applied;
    metrics.own.drift.inc_by(written + removed);
    if applied != Applied::default() {
        tracing::warn!(
            written,
            removed,
            "another program had changed what is programmed; the differences are repaired"
        );
    }
}

fn families_of(changes: &Changes) -> Vec<IpFamily> {
    let names = changes.changed.iter().map(|port| &port.name).chain(&changes.removed);
    let mut families: Vec<IpFamily> = names.map(|name| name.family).collect();
    families.sort_unstable();
    families.dedup();
    families
}
