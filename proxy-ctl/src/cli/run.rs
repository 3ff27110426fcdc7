//! `proxy-ctl run`: everything is read and checked, then sources, servers and the dataplane's thread are started
//! and run until a signal. What was programmed stays when the process ends.

use std::{net::IpAddr, path::PathBuf, sync::Arc, thread, time::Duration};

use anyhow::Context as _;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use super::{
    args::RunArgs,
    facts,
    record::{self, Record},
    settings::Settings,
};
use crate::{
    config::Config,
    controller::{self, Asks, Controller, Inputs, Reports},
    dataplane::{self, Host, Role, ebpf::EbpfDataplane},
    log,
    mode::{self, Choice, Request},
    model::Update,
    node,
    serve::{self, Health, Metrics, Pages, SharedHealth},
    source::{
        kubernetes::{Kubernetes, ResourceKind, SourceState},
        manifests::Manifests,
    },
    sys::limits,
};

/// Updates between the watchers and the dataplane's thread; then the watchers wait.
const UPDATES: usize = 4096;
const RECORD_PERIOD: Duration = Duration::from_secs(1);
/// Longest wait for the dataplane's thread to finish the call that it is in.
const LAST_CALL: Duration = Duration::from_secs(10);

pub(super) fn run(args: RunArgs, bpffs: Option<PathBuf>) -> anyhow::Result<()> {
    let settings = Settings::new(args, bpffs)?;
    let logging = settings.config.logging;
    log::start(logging.format, logging.verbosity);
    for warning in &settings.warnings {
        tracing::warn!("{warning}");
    }
    facts::check(&settings.config.ebpf)?;
    let request = Request {
        mode: settings.config.mode,
        socket_load_balancing: settings.config.ebpf.socket_load_balancing,
    };
    let choice = mode::choose(request, &facts::gather(&settings.config.ebpf))?;
    tracing::info!(mode = %choice.mode, node = %settings.node_name, why = choice.reasons.join("; "), "starting");

    limits::return_freed_memory();
    if let Err(error) = limits::use_small_pages() {
        tracing::debug!(%error, "the memory of this process may be larger than it needs to be");
    }
    let state = SourceState::new();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("starting the async runtime")?;
    let source = {
        let _in_runtime = runtime.enter();
        Source::open(&settings, &state)?
    };
    protect_from_oom(settings.config.oom_score_adj);
    let done = runtime.block_on(Process { settings, choice, state }.run(source, runtime.handle().clone()));
    runtime.shutdown_timeout(Duration::from_secs(1));
    done
}

enum Source {
    Kubernetes(Box<Kubernetes>),
    Manifests(Manifests),
}

impl Source {
    fn open(settings: &Settings, state: &SourceState) -> anyhow::Result<Self> {
        match &settings.manifests {
            Some(folder) => Ok(Self::Manifests(Manifests::open(folder, Arc::clone(&settings.node_name))?)),
            None => Ok(Self::Kubernetes(Box::new(settings.kubernetes(state.clone())?))),
        }
    }

    async fn run(
        self,
        updates: mpsc::Sender<Update>,
        metrics: Arc<Metrics>,
        stop: CancellationToken,
    ) -> anyhow::Result<()> {
        match self {
            Self::Kubernetes(kubernetes) => {
                tracing::info!(server = kubernetes.server(), "watching the API server");
                tokio::select! {
                    done = kubernetes.run(updates) => done?,
                    () = stop.cancelled() => {}
                }
            }
            Self::Manifests(manifests) => {
                let odd = move |oddity: crate::source::Oddity| {
                    metrics.odd_objects.found(oddity.resource(), 1);
                    tracing::warn!(object = oddity.object, field = oddity.field, "{}", oddity.problem);
                };
                manifests.run(updates, odd, stop).await?;
            }
        }
        Ok(())
    }
}

struct Process {
    settings: Settings,
    choice: Choice,
    state: SourceState,
}

impl Process {
    async fn run(self, source: Source, runtime: tokio::runtime::Handle) -> anyhow::Result<()> {
        let Self { settings, choice, state } = self;
        let from_api_server = matches!(source, Source::Kubernetes(_));
        let Settings { config, node_name, .. } = settings;
        let config = Arc::new(config);
        let stop = CancellationToken::new();
        let mut terminate = signal(SignalKind::terminate()).context("waiting for SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("waiting for SIGINT")?;

        let (updates_in, updates) = mpsc::channel(UPDATES);
        let (hosts_in, hosts) = watch::channel(None);
        let (asks_in, asks) = mpsc::channel(16);
        let health = Arc::new(SharedHealth::new(Health::new(config.sync_period())));
        let register = |registry: &mut _| {
            if from_api_server {
                state.register(registry);
            }
        };
        let metrics = Arc::new(Metrics::new(Some(Box::new(Asks(asks_in))), state.odd_objects(), register));

        let mut tasks = JoinSet::new();
        serve_http(&mut tasks, &config, choice.mode.name(), &health, &metrics, &stop);
        tasks.spawn(source.run(updates_in, Arc::clone(&metrics), stop.clone()));
        let record = Record {
            pid: std::process::id(),
            began: record::began(std::process::id()).unwrap_or(0),
            node: node_name.to_string(),
            mode: choice.mode.name().to_owned(),
            reasons: choice.reasons,
            ..Record::default()
        };
        let live = Live { state: from_api_server.then_some(state), hosts: hosts.clone() };
        let recorded = CancellationToken::new();
        tasks.spawn(keep_record(record.clone(), live, Arc::clone(&config), recorded.clone(), stop.clone()));
        let node_addresses = watch::Sender::new(None);
        tasks.spawn(watch_node(node_addresses.subscribe(), hosts_in, stop.clone()));

        let reports = Reports { health, metrics, node_addresses };
        let controller = Controller::new(Arc::clone(&config), node_name, reports);
        let inputs = Inputs { updates, hosts, asks, stop: stop.clone() };
        // Only whoever holds the lock of the pins speaks for them: one that is turned away leaves no record.
        let bpffs = config.ebpf.bpffs.clone();
        let opened = move || {
            if let Err(error) = record.write(&bpffs) {
                tracing::warn!(%error, "`proxy-ctl status` does not know about this process");
            }
            recorded.cancel();
        };
        let mut ended = start_dataplane(controller, inputs, config, opened, runtime)?;
        let done = loop {
            tokio::select! {
                _ = terminate.recv() => break Ok("SIGTERM"),
                _ = interrupt.recv() => break Ok("SIGINT"),
                result = &mut ended => break Err(dataplane_ended(result)),
                Some(task) = tasks.join_next() => match task {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => break Err(error),
                    Err(error) => break Err(error.into()),
                },
            }
        };
        stop.cancel();
        match done {
            Ok(signal) => {
                tracing::info!(signal, "stopping; what is programmed goes on working");
                if tokio::time::timeout(LAST_CALL, ended).await.is_err() {
                    tracing::warn!("the dataplane is still busy, leaving it");
                }
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}

fn serve_http(
    tasks: &mut JoinSet<anyhow::Result<()>>,
    config: &Config,
    mode: &'static str,
    health: &Arc<SharedHealth>,
    metrics: &Arc<Metrics>,
    stop: &CancellationToken,
) {
    let hard_fail = config.bind_address_hard_fail;
    let healthz = serve::healthz(
        config.healthz_bind_address,
        hard_fail,
        Arc::clone(health),
        Arc::clone(metrics),
        stop.clone(),
    );
    tasks.spawn(async { Ok(healthz.await?) });
    let pages = pages(config, mode);
    let metrics =
        serve::metrics(config.metrics_bind_address, hard_fail, pages, Arc::clone(metrics), stop.clone());
    tasks.spawn(async { Ok(metrics.await?) });
}

fn pages(config: &Config, mode: &'static str) -> Pages {
    Pages { mode, configuration: None, flags: None, status: true, profiling: config.enable_profiling }
}

/// Follows the node's addresses and interfaces, from when the addresses of its Node object are known: by them it is
/// told which interfaces lead outside.
async fn watch_node(
    mut known: watch::Receiver<Option<Vec<IpAddr>>>,
    hosts: watch::Sender<Option<Host>>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let Ok(first) = known.wait_for(Option::is_some).await.map(|first| first.clone().unwrap_or_default())
    else {
        return Ok(());
    };
    let addresses = watch::Sender::new(first);
    let watched = addresses.subscribe();
    let forward = async {
        while known.changed().await.is_ok() {
            addresses.send_replace(known.borrow().clone().unwrap_or_default());
        }
        // The controller has ended; so will this process.
        std::future::pending::<()>().await;
    };
    tokio::select! {
        done = node::watch(watched, hosts, stop) => Ok(done?),
        () = forward => Ok(()),
    }
}

/// The thread that blocks on system calls. The answer comes when it ends.
fn start_dataplane(
    controller: Controller<EbpfDataplane>,
    inputs: Inputs,
    config: Arc<Config>,
    opened: impl FnOnce() + Send + 'static,
    runtime: tokio::runtime::Handle,
) -> anyhow::Result<oneshot::Receiver<Result<(), dataplane::Error>>> {
    let (end, ended) = oneshot::channel();
    let open = move || {
        let dataplane = EbpfDataplane::open(&config.ebpf)?;
        opened();
        Ok(dataplane)
    };
    let body = move || {
        // Whoever waits may have given up.
        let _ = end.send(controller::run(controller, inputs, open, &runtime));
    };
    thread::Builder::new()
        .name("dataplane".to_owned())
        .spawn(body)
        .context("starting the dataplane's thread")?;
    Ok(ended)
}

/// It should not have ended.
fn dataplane_ended(result: Result<Result<(), dataplane::Error>, oneshot::error::RecvError>) -> anyhow::Error {
    match result {
        Ok(Ok(())) => anyhow::anyhow!("the sources ended"),
        Ok(Err(error)) => anyhow::Error::new(error).context("starting the dataplane"),
        Err(_) => anyhow::anyhow!("the dataplane's thread ended unexpectedly"),
    }
}

/// Keeps what `status` reads up to date, from when `recorded` says that it is there.
async fn keep_record(
    mut record: Record,
    live: Live,
    config: Arc<Config>,
    recorded: CancellationToken,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    tokio::select! {
        () = recorded.cancelled() => {}
        () = stop.cancelled() => return Ok(()),
    }
    let mut written: Option<Record> = None;
    loop {
        record.sources = live.sources();
        record.interfaces = live.interfaces(&config);
        if written.as_ref() != Some(&record) {
            match record.write(&config.ebpf.bpffs) {
                Ok(()) => written = Some(record.clone()),
                Err(error) => tracing::debug!(%error, "what status reads is not up to date"),
            }
        }
        tokio::select! {
            () = tokio::time::sleep(RECORD_PERIOD) => {}
            () = stop.cancelled() => return Ok(()),
        }
    }
}

/// What changes while the process runs.
struct Live {
    /// `None`: the manifests tell nothing about themselves.
    state: Option<SourceState>,
    hosts: watch::Receiver<Option<Host>>,
}

impl Live {
    fn sources(&self) -> Vec<record::Source> {
        let source = |state: &SourceState, kind: ResourceKind| record::Source {
            name: kind.plural().to_owned(),
            connected: state.connected(kind),
            objects: state.objects(kind),
            problem: state.problem(kind),
        };
        let Some(state) = &self.state else { return Vec::new() };
        state.kinds().into_iter().map(|kind| source(state, kind)).collect()
    }

    fn interfaces(&self, config: &Config) -> Vec<record::Interface> {
        let hosts = self.hosts.borrow();
        let interfaces = hosts.iter().flat_map(|host| &host.interfaces);
        interfaces
            .filter(|interface| config.ebpf.interfaces.select(&interface.name))
            .map(|interface| record::Interface {
                index: interface.index,
                name: interface.name.clone(),
                role: match interface.role {
                    Role::Workload => "workload",
                    Role::Uplink => "uplink",
                }
                .to_owned(),
            })
            .collect()
    }
}

/// As kube-proxy: the node loses its network if this process is killed for want of memory.
fn protect_from_oom(score: i32) {
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", score.to_string()) {
        tracing::debug!(%error, score, "oomScoreAdj was not set");
    }
}
