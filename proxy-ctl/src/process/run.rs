//! The command `proxy-ctl run`, read from top to bottom.

use std::{sync::Arc, time::Duration};

use anyhow::Context as _;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
    task::JoinSet,
};

use super::{
    dataplane_thread::{self, DataplaneEnd},
    event, mode_choice,
    proxy::Proxy,
    set_up::{self, kernel::Kernel},
    settings::{self, Settings},
    source::Source,
};
use crate::{
    config::{CommandLine, Config},
    events::Recorder,
    http::{BindError, report::ModeChoice},
    kubernetes::SourceState,
    log,
    model::mode::Mode,
    modes,
    sys::proc::limits,
};

/// The longest wait for the dataplane's thread to finish the call that it is in.
const LONGEST_CALL: Duration = Duration::from_secs(10);
/// The longest wait for the last events to reach the API server.
const LONGEST_FLUSH: Duration = Duration::from_secs(2);

/// Runs the proxy. It ends with a signal, with a change that needs a new process, or with a
/// failure. What is programmed stays.
pub fn run(line: CommandLine) -> anyhow::Result<()> {
    let settings = Settings::new(&line)?;
    log::start(&settings.config.logging);
    for warning in &settings.warnings {
        tracing::warn!("{warning}");
    }
    let choice = mode_choice::choose(&settings.config)?;
    if let Some(why) = &choice.chosen.fallback {
        tracing::warn!(mode = %choice.modes.active, requested = %choice.chosen.requested, "{why}");
    }
    let unused = modes::unused_fields(choice.modes.active, &settings.config);
    for warning in settings::without_effect(&settings.config, choice.modes.active, &unused) {
        tracing::warn!("{warning}");
    }
    let why = choice.chosen.reasons.join("; ");
    tracing::info!(mode = %choice.modes.active, node = %settings.node_name, reasons = why, "starting");
    if settings.init_only {
        return initialize(&settings.config, choice.modes.active);
    }
    limit_memory();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("starting the async runtime")?;
    let done = runtime.block_on(serve(line, settings, choice));
    runtime.shutdown_timeout(Duration::from_secs(1));
    done
}

/// Does what needs all privileges, for `--init-only`.
fn initialize(config: &Config, mode: Mode) -> anyhow::Result<()> {
    set_up::prepare(config, &Kernel::default(), &Recorder::silent())?;
    modes::prepare(mode, config)?;
    tracing::info!("System initialized and --init-only specified");
    Ok(())
}

fn limit_memory() {
    if let Err(error) = limits::use_small_pages() {
        tracing::debug!(%error, "the memory of this process may be larger than it needs to be");
    }
}

enum ExitCause {
    Signal(&'static str),
    /// The dataplane's thread has ended.
    Dataplane(anyhow::Error),
    Task(anyhow::Error),
}

async fn serve(line: CommandLine, settings: Settings, choice: ModeChoice) -> anyhow::Result<()> {
    let mut signals = Signals::new()?;
    let source_state = SourceState::new();
    let source = Source::open(&settings, &source_state)?;
    let (proxy, inputs) = Proxy::new(line, settings, choice, &source, source_state)?;

    let mut tasks = JoinSet::new();
    proxy.serve_http(&mut tasks);
    proxy.serve_service_health(&mut tasks);
    let following = source.run(
        inputs.updates,
        proxy.metrics.clone(),
        proxy.mode.subscribe(),
        Arc::clone(&proxy.config),
        proxy.stop.clone(),
    );
    proxy.begin(&mut tasks, "sources", following);
    proxy.set_up_and_follow(&mut tasks);
    proxy.remove_former_rules(&mut tasks);
    proxy.tell_of_mode(&mut tasks);
    proxy.tell_of_unserved_fields(&mut tasks);
    proxy.tell_of_unattached_interfaces(&mut tasks);
    proxy.tell_of_filling_maps(&mut tasks);
    let opened = proxy.keep_record(&mut tasks);
    let mut ended = dataplane_thread::start(&proxy, inputs.controller, opened)?;

    let cause = tokio::select! {
        signal = signals.next() => ExitCause::Signal(signal),
        result = &mut ended => ExitCause::Dataplane(dataplane_thread::failure(result)),
        error = first_failure(&mut tasks) => ExitCause::Task(error),
    };
    proxy.stop.cancel();
    finish(cause, ended, &proxy.events).await
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate()).context("waiting for SIGTERM")?,
            interrupt: signal(SignalKind::interrupt()).context("waiting for SIGINT")?,
        })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// Returns the first failure of a task. Tasks may end without a failure, such as a server that
/// could not bind and need not.
async fn first_failure(tasks: &mut JoinSet<anyhow::Result<()>>) -> anyhow::Error {
    loop {
        match tasks.join_next().await {
            Some(Ok(Ok(()))) => {}
            Some(Ok(Err(error))) => return error,
            Some(Err(error)) => return error.into(),
            None => std::future::pending().await,
        }
    }
}

/// Reports why the process ends, and waits for what is under way.
async fn finish(
    cause: ExitCause,
    dataplane_end: oneshot::Receiver<DataplaneEnd>,
    events: &Recorder,
) -> anyhow::Result<()> {
    let result = match cause {
        ExitCause::Dataplane(error) => return Err(error),
        ExitCause::Signal(signal) => {
            tracing::info!(signal, "stopping; what is programmed goes on working");
            Ok(())
        }
        ExitCause::Task(error) => {
            tracing::error!(
                error = format!("{error:#}"),
                "Error running ProxyServer; what is programmed goes on working"
            );
            match error.downcast_ref::<BindError>() {
                Some(bind) if bind.purpose == "healthz" => events.record(event::healthz_failed(bind)),
                Some(bind) => events.record(event::metrics_failed(bind)),
                None => {}
            }
            Err(error)
        }
    };
    if tokio::time::timeout(LONGEST_CALL, dataplane_end).await.is_err() {
        tracing::warn!("the dataplane's thread is still busy; the process ends without waiting for it");
    }
    if tokio::time::timeout(LONGEST_FLUSH, events.flush()).await.is_err() {
        tracing::debug!("the last events did not reach the API server");
    }
    result
}
