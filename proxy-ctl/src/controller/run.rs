//! The controller's own thread, which blocks on system calls of the dataplane.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::{Controller, ModeOpener};
use crate::{
    config::Config,
    http::report::{ModeChoice, ModeFamilies, ModeInForce},
    model::{Update, node::NodeNetwork},
    modes::{Dataplane, Error, MetricFamily, Modes},
};

/// The pause between two removals of expired flows.
const GARBAGE_PERIOD: Duration = Duration::from_secs(1);
/// The pause between two log lines that say what is being waited for.
const WAIT_REPORT_PERIOD: Duration = Duration::from_secs(10);
/// The time that the thread waits to be stopped after the sources have ended. Whoever runs them
/// stops the process with their error, which says more than [`Ended::NoSources`].
const SOURCE_ERROR_GRACE: Duration = Duration::from_secs(1);
/// The most updates that are taken in before they are written. No channel holds as many.
const MOST_AT_ONCE: usize = 65_536;

/// The reason why the thread has ended without being told to.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    #[error(transparent)]
    NotOpened(#[from] Error),
    #[error("the sources have ended: no change would be seen any more")]
    NoSources,
    #[error("another controller programs this node now: {0}")]
    TakenOver(#[source] Error),
}

/// A request for the metric families of the mode.
pub type MetricsRequest = oneshot::Sender<Option<Vec<MetricFamily>>>;

/// The sender by which the metric families of the mode are requested.
#[derive(Clone, Debug)]
pub struct MetricsRequests(pub mpsc::Sender<MetricsRequest>);

impl ModeFamilies for MetricsRequests {
    fn families(&self) -> Pin<Box<dyn Future<Output = Option<Vec<MetricFamily>>> + Send + '_>> {
        Box::pin(async {
            let (answer, answered) = oneshot::channel();
            self.0.send(answer).await.ok()?;
            answered.await.ok().flatten()
        })
    }
}

/// Everything that wakes the controller.
pub struct Inputs {
    pub updates: mpsc::Receiver<Update>,
    /// `None` until the node is known.
    pub networks: watch::Receiver<Option<NodeNetwork>>,
    pub metrics_requests: mpsc::Receiver<MetricsRequest>,
    /// The present configuration, as far as it is taken over without a new process.
    pub configs: watch::Receiver<Arc<Config>>,
    /// The mode that results from the configuration. It is sent before the configuration.
    pub choices: watch::Receiver<ModeChoice>,
    pub stop: CancellationToken,
}

enum Wake {
    Updates,
    Network,
    Metrics(MetricsRequest),
    Config,
    Time,
    Stop,
    NoSources,
}

/// Runs on the calling thread until it is told to stop, the mode cannot be opened, or no sources
/// are left.
///
/// The mode is opened at once, because the kernel takes about as long to check the programs as the
/// sources take to list. `when_opened` is called then. Nothing is written before all sources have
/// listed.
pub fn run(
    mut controller: Controller,
    mut inputs: Inputs,
    opener: &dyn ModeOpener,
    when_opened: impl FnOnce(),
    runtime: &tokio::runtime::Handle,
) -> Result<(), Ended> {
    let started = Instant::now();
    let heartbeat = controller.reports.heartbeats.begin("dataplane");
    controller.reports.health.lock().busy(started);
    let mut opened = Some(opener.open(inputs.choices.borrow().modes, &controller.config)?);
    when_opened();
    controller.find_modes_to_drain(opener);
    tracing::debug!(took = ?started.elapsed(), "dataplane opened");
    let mut batch = Vec::new();
    let mut garbage_at = Instant::now() + GARBAGE_PERIOD;
    let mut report_wait_at = Instant::now() + WAIT_REPORT_PERIOD;
    take_network(&mut controller, &mut inputs.networks);
    loop {
        heartbeat.beat();
        let until = controller.wants_call_at().map_or(garbage_at, |retry_at| retry_at.min(garbage_at));
        controller.reports.health.lock().idle();
        let wake = runtime.block_on(inputs.wake(&mut batch, until));
        let woken = Instant::now();
        controller.reports.health.lock().busy(woken);
        match wake {
            Wake::Stop => return Ok(()),
            Wake::NoSources => return Err(Ended::NoSources),
            Wake::Updates => batch.drain(..).for_each(|update| controller.take(update)),
            Wake::Network => take_network(&mut controller, &mut inputs.networks),
            Wake::Metrics(answer) => {
                // The requester may have gone.
                let _ = answer.send(controller.metrics());
                continue;
            }
            Wake::Config => {
                let config = Arc::clone(&inputs.configs.borrow_and_update());
                controller.configure(config, woken);
                switch(&mut controller, &mut opened, inputs.choices.borrow().modes, opener, woken);
            }
            Wake::Time => {}
        }
        if let Some(dataplane) = opened.take_if(|_| controller.is_ready()) {
            tracing::info!("all sources have listed");
            controller.start(dataplane, woken);
        }
        let now = Instant::now();
        controller.write(now);
        if garbage_at <= now {
            match &mut opened {
                Some(waiting) => {
                    renew_lease(waiting.as_mut());
                    if report_wait_at <= now {
                        tracing::warn!("waiting for {}", controller.waits_for().join(", "));
                        report_wait_at = now + WAIT_REPORT_PERIOD;
                    }
                }
                None => {
                    controller.collect_garbage();
                    controller.drain(opener, now);
                }
            }
            garbage_at = Instant::now() + GARBAGE_PERIOD;
        }
        if let Some(error) = controller.taken_over.take() {
            return Err(Ended::TakenOver(error));
        }
    }
}

/// Switches if other modes than those in force result from the configuration. While nothing is
/// written yet, `waiting` is the opened dataplane, and it is replaced.
pub(super) fn switch(
    controller: &mut Controller,
    waiting: &mut Option<Box<dyn Dataplane>>,
    modes: Modes,
    opener: &dyn ModeOpener,
    now: Instant,
) {
    if controller.reports.mode.borrow().modes == modes {
        return;
    }
    let Some(waiting) = waiting else { return controller.switch(modes, opener, now) };
    match opener.open(modes, &controller.config) {
        Ok(dataplane) => {
            *waiting = dataplane;
            controller.reports.mode.send_replace(ModeInForce::new(modes));
            controller.find_modes_to_drain(opener);
        }
        Err(error) => controller.refuse_switch(modes, &error),
    }
}

/// Renews the lease that a predecessor has written, so that the programs go on serving its maps
/// until everything is listed.
fn renew_lease(dataplane: &mut dyn Dataplane) {
    if let Some(mode) = dataplane.packet_mode()
        && let Err(error) = mode.renew_lease()
    {
        tracing::warn!(%error, "the lease of ebpf.withdrawAfter was not renewed");
    }
}

fn take_network(controller: &mut Controller, networks: &mut watch::Receiver<Option<NodeNetwork>>) {
    let network = networks.borrow_and_update().clone();
    if let Some(network) = network {
        controller.set_network(network);
    }
}

impl Inputs {
    /// Waits for whatever comes first. After [`Wake::Updates`], `batch` holds every update that was
    /// waiting.
    async fn wake(&mut self, batch: &mut Vec<Update>, until: Instant) -> Wake {
        tokio::select! {
            biased;
            () = self.stop.cancelled() => Wake::Stop,
            Ok(()) = self.networks.changed() => Wake::Network,
            Ok(()) = self.configs.changed() => Wake::Config,
            received = self.updates.recv_many(batch, MOST_AT_ONCE) => {
                if received == 0 { self.without_sources().await } else { Wake::Updates }
            }
            Some(request) = self.metrics_requests.recv() => Wake::Metrics(request),
            () = tokio::time::sleep_until(until.into()) => Wake::Time,
        }
    }

    async fn without_sources(&self) -> Wake {
        let stopped = tokio::time::timeout(SOURCE_ERROR_GRACE, self.stop.cancelled()).await;
        stopped.map_or(Wake::NoSources, |()| Wake::Stop)
    }
}
