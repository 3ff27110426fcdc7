//! The controller's own thread: it blocks on system calls of the dataplane, so that nobody else has to.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::Controller;
use crate::{
    config::Config,
    dataplane::{Dataplane, Error, Host, Usage},
    model::Update,
    report::UsageSource,
};

/// Pause between two removals of expired flows.
const GARBAGE_PERIOD: Duration = Duration::from_secs(1);
/// Pause between two lines that say what is being waited for.
const PATIENCE: Duration = Duration::from_secs(10);
/// The sources are gone: so long whoever runs them has to say why, and to stop everything. That says more.
const LAST_WORD_OF_SOURCES: Duration = Duration::from_secs(1);
/// Updates that are taken in before they are written: more than any channel holds.
const MOST_AT_ONCE: usize = 65_536;

/// Why the thread has ended without being told to.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    #[error(transparent)]
    NotOpened(#[from] Error),
    #[error("the sources have ended, so that no change would be seen any more")]
    NoSources,
    #[error("this node is programmed by somebody else now: {0}")]
    TakenOver(#[source] Error),
}

/// Somebody wants to know the state of the tables.
pub type UsageAsk = oneshot::Sender<Option<Usage>>;

/// The asking end.
#[derive(Clone, Debug)]
pub struct Asks(pub mpsc::Sender<UsageAsk>);

impl UsageSource for Asks {
    fn usage(&self) -> Pin<Box<dyn Future<Output = Option<Usage>> + Send + '_>> {
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
    pub hosts: watch::Receiver<Option<Host>>,
    pub asks: mpsc::Receiver<UsageAsk>,
    /// What the configuration is now, as far as it is taken over without a new process.
    pub configs: watch::Receiver<Arc<Config>>,
    pub stop: CancellationToken,
}

enum Wake {
    Updates,
    Host,
    Ask(UsageAsk),
    Config,
    Time,
    Stop,
    NoSources,
}

/// Runs on the calling thread until told to stop, until `open` fails, or until there are no sources any more. `open`
/// is called at once: the kernel takes about as long to check the programs as the sources take to list. Nothing is
/// written before all have listed.
pub fn run<D: Dataplane>(
    mut controller: Controller<D>,
    mut inputs: Inputs,
    open: impl FnOnce() -> Result<D, Error>,
    runtime: &tokio::runtime::Handle,
) -> Result<(), Ended> {
    let started = Instant::now();
    controller.reports.health.lock().busy(started);
    let mut opened = Some(open()?);
    tracing::debug!(took = ?started.elapsed(), "dataplane opened");
    let mut batch = Vec::new();
    let mut garbage_at = Instant::now() + GARBAGE_PERIOD;
    let mut patient_until = Instant::now() + PATIENCE;
    take_host(&mut controller, &mut inputs.hosts);
    loop {
        let until = match controller.wants_call_at() {
            _ if !controller.is_started() => patient_until,
            Some(retry_at) => retry_at.min(garbage_at),
            None => garbage_at,
        };
        controller.reports.health.lock().idle();
        let wake = runtime.block_on(inputs.wake(&mut batch, until));
        let woken = Instant::now();
        controller.reports.health.lock().busy(woken);
        match wake {
            Wake::Stop => return Ok(()),
            Wake::NoSources => return Err(Ended::NoSources),
            Wake::Updates => batch.drain(..).for_each(|update| controller.take(update, woken)),
            Wake::Host => take_host(&mut controller, &mut inputs.hosts),
            Wake::Ask(answer) => {
                // Whoever asked may have gone.
                let _ = answer.send(controller.usage());
                continue;
            }
            Wake::Config => {
                let config = Arc::clone(&inputs.configs.borrow_and_update());
                controller.configure(config, woken);
            }
            Wake::Time => {}
        }
        if let Some(dataplane) = opened.take_if(|_| controller.is_ready()) {
            tracing::info!("all sources have listed");
            controller.start(dataplane, woken);
        }
        let now = Instant::now();
        controller.write(now);
        if controller.is_started() && garbage_at <= now {
            controller.collect_garbage();
            garbage_at = Instant::now() + GARBAGE_PERIOD;
        } else if !controller.is_started() && patient_until <= now {
            tracing::warn!("waiting for {}", controller.waits_for().join(", "));
            patient_until = now + PATIENCE;
        }
        if let Some(error) = controller.taken_over.take() {
            return Err(Ended::TakenOver(error));
        }
    }
}

fn take_host<D: Dataplane>(controller: &mut Controller<D>, hosts: &mut watch::Receiver<Option<Host>>) {
    let host = hosts.borrow_and_update().clone();
    if let Some(host) = host {
        controller.set_host(host, Instant::now());
    }
}

impl Inputs {
    /// Whatever comes first; `batch` then holds every update that was waiting.
    async fn wake(&mut self, batch: &mut Vec<Update>, until: Instant) -> Wake {
        tokio::select! {
            biased;
            () = self.stop.cancelled() => Wake::Stop,
            Ok(()) = self.hosts.changed() => Wake::Host,
            Ok(()) = self.configs.changed() => Wake::Config,
            received = self.updates.recv_many(batch, MOST_AT_ONCE) => {
                if received == 0 { self.without_sources().await } else { Wake::Updates }
            }
            Some(ask) = self.asks.recv() => Wake::Ask(ask),
            () = tokio::time::sleep_until(until.into()) => Wake::Time,
        }
    }

    async fn without_sources(&self) -> Wake {
        let stopped = tokio::time::timeout(LAST_WORD_OF_SOURCES, self.stop.cancelled()).await;
        stopped.map_or(Wake::NoSources, |()| Wake::Stop)
    }
}
