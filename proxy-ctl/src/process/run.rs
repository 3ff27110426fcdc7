//! `proxy-ctl run`: the life of a proxy from its configuration to its end.
//!
//! 1. Everything that is said is read and checked, and the mode is chosen. Nothing has been touched so far.
//! 2. The servers answer, the sources list, the dataplane's thread loads its programs.
//! 3. [`Life`]: the node is set up, in the order of [`super`].
//! 4. Everything listed is written, and changes are followed: until a signal, a change that takes a new process, or a
//!    failure. What was programmed stays when the process ends.

use std::{collections::BTreeMap, io, net::SocketAddr, path::PathBuf, sync::Arc, thread, time::Duration};

use anyhow::Context as _;
use ipnet::IpNet;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use super::{
    event,
    former::Former,
    kernel::Kernel,
    life::Life,
    record::{self, Record},
    recorder::{self, Live},
    settings::Settings,
};
use crate::{
    config::{CommandLine, Config, RequestedMode},
    controller::{self, Controller, Ended, Inputs, Reports, UsageRequests},
    dataplane,
    events::Recorder,
    log,
    mode::{self, Choice, Mode, Request},
    model::{Update, objects::ObjectName},
    node::facts,
    report::{Health, HealthChecks, Metrics, SharedHealth},
    serve::{self, BindError, Pages},
    source::{
        kubernetes::{Kubernetes, SourceState},
        manifests::Manifests,
    },
    sys::{filesystem, limits},
};

/// Updates between the watchers and the dataplane's thread; then the watchers wait.
const UPDATES: usize = 4096;
/// Longest wait for the dataplane's thread to finish the call that it is in.
const LAST_CALL: Duration = Duration::from_secs(10);
/// Longest wait for the last events to reach the API server.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// What the user has said; the file of it may say something else later.
#[derive(Clone, Debug)]
pub(super) struct Given {
    pub(super) line: CommandLine,
}

impl Given {
    pub(super) fn settings(&self) -> anyhow::Result<Settings> {
        Settings::new(&self.line)
    }

    pub(super) fn config_file(&self) -> Option<PathBuf> {
        self.line.text("config").map(PathBuf::from)
    }
}

pub fn run(line: CommandLine) -> anyhow::Result<()> {
    let given = Given { line };
    let settings = given.settings()?;
    log::start(&settings.config.logging);
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
    if settings.init_only {
        super::prepare(requested(choice.mode), &settings.config, &Kernel::default(), &Recorder::silent())?;
        let bpffs = &settings.config.ebpf.bpffs;
        match choice.mode {
            Mode::Ebpf => filesystem::provide_bpffs(bpffs)
                .with_context(|| format!("mounting a bpffs on {}", bpffs.display()))?,
        }
        tracing::info!("System initialized and --init-only specified");
        return Ok(());
    }

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
    let process = Process { given, settings, choice, state };
    let done = runtime.block_on(process.run(source, runtime.handle().clone()));
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

    /// Must be called within the runtime.
    fn recorder(&self, node_name: &Arc<str>) -> anyhow::Result<Recorder> {
        let Self::Kubernetes(kubernetes) = self else { return Ok(Recorder::silent()) };
        let host = nix::unistd::gethostname().context("asking for the host's name")?;
        Ok(Recorder::new(kubernetes.api(), Arc::clone(node_name), &host.to_string_lossy()))
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
                let report = move |field: crate::source::InvalidField| {
                    metrics.invalid_objects.found(field.resource(), 1);
                    tracing::warn!(object = field.object, field = field.field, "{}", field.problem);
                };
                manifests.run(updates, report, stop).await?;
            }
        }
        Ok(())
    }
}

/// The mode as the configuration would ask for it.
fn requested(mode: Mode) -> RequestedMode {
    match mode {
        Mode::Ebpf => RequestedMode::Ebpf,
    }
}

struct Process {
    given: Given,
    settings: Settings,
    choice: Choice,
    state: SourceState,
}

/// Why the process ends.
enum End {
    Signal(&'static str),
    /// Of the dataplane's thread, which is over.
    Dataplane(anyhow::Error),
    Other(anyhow::Error),
}

impl Process {
    async fn run(self, source: Source, runtime: tokio::runtime::Handle) -> anyhow::Result<()> {
        let Self { given, settings, choice, state } = self;
        let from_api_server = matches!(source, Source::Kubernetes(_));
        let Settings { config, node_name, .. } = settings;
        let config = Arc::new(config);
        let stop = CancellationToken::new();
        let mut terminate = signal(SignalKind::terminate()).context("waiting for SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("waiting for SIGINT")?;

        let (updates_in, updates) = mpsc::channel(UPDATES);
        let (hosts_in, hosts) = watch::channel(None);
        let (asks_in, asks) = mpsc::channel(16);
        let (nodes_in, nodes) = mpsc::unbounded_channel();
        let (configs_in, configs) = watch::channel(Arc::clone(&config));
        let node_addresses = watch::Sender::new(None);
        let events = source.recorder(&node_name)?;
        let health = Arc::new(SharedHealth::new(Health::new(config.sync_period())));
        let register = |registry: &mut _| {
            if from_api_server {
                state.register(registry);
                events.register(registry.sub_registry_with_prefix("proxy"));
            }
        };
        let metrics =
            Arc::new(Metrics::new(Some(Box::new(UsageRequests(asks_in))), state.invalid_objects(), register));

        let mut tasks = JoinSet::new();
        let flags = given.line.values();
        let (document_in, document) = watch::channel(config.to_document());
        let pages = pages(&config, document, flags, choice.mode.name());
        serve_http(&mut tasks, &config, pages, &health, &metrics, &stop);
        tasks.spawn(source.run(updates_in, Arc::clone(&metrics), stop.clone()));
        let mode = choice.mode;
        let record = Record {
            pid: std::process::id(),
            began: record::began(std::process::id()).unwrap_or(0),
            node: node_name.to_string(),
            mode: choice.mode.name().to_owned(),
            reasons: choice.reasons,
            // Another value ends the process.
            exclude_cidrs: config.ipvs.exclude_cidrs.iter().map(IpNet::to_string).collect(),
            ..Record::default()
        };
        let live =
            Live { state: from_api_server.then_some(state), hosts: hosts.clone(), configs: configs.clone() };
        let recorded = CancellationToken::new();
        let keep = recorder::keep(record.clone(), live, recorded.clone(), stop.clone());
        tasks.spawn(async {
            keep.await;
            Ok(())
        });

        let life = Life {
            given,
            config: Arc::clone(&config),
            mode: requested(choice.mode),
            node_name: Arc::clone(&node_name),
            nodes: from_api_server.then_some(nodes),
            node_addresses: node_addresses.subscribe(),
            hosts: hosts_in,
            configs: configs_in,
            document: document_in,
            events: events.clone(),
            metrics: Arc::clone(&metrics),
            stop: stop.clone(),
        };
        tasks.spawn(async { life.lead().await.map(|never| match never {}) });

        let health_checks = watch::Sender::default();
        let checks = serve_services(
            Arc::clone(&node_name),
            health_checks.subscribe(),
            Arc::clone(&health),
            events.clone(),
            stop.clone(),
        );
        tasks.spawn(async {
            checks.await;
            Ok(())
        });
        let coverage = watch::Sender::default();
        // What a folder of manifests tells need not be all that a kube-proxy serves.
        if from_api_server {
            let former =
                Former { configs: configs.clone(), events: events.clone(), metrics: Arc::clone(&metrics) };
            let coverage = coverage.subscribe();
            let stop = stop.clone();
            tasks.spawn(async move {
                tokio::select! {
                    () = former.follow(coverage) => {}
                    () = stop.cancelled() => {}
                }
                Ok(())
            });
        }
        let reports = Reports { health, metrics, node_addresses, nodes: nodes_in, health_checks, coverage };
        let controller = Controller::new(Arc::clone(&config), node_name, reports);
        let inputs = Inputs { updates, networks: hosts, usage_requests: asks, configs, stop: stop.clone() };
        // Only whoever holds the lock of the pins speaks for them: one that is turned away leaves no record.
        let bpffs = config.ebpf.bpffs.clone();
        let opened = move || {
            if let Err(error) = record.write(&bpffs) {
                tracing::warn!(%error, "`proxy-ctl status` does not know about this process");
            }
            recorded.cancel();
        };
        let mut ended = start_dataplane(controller, inputs, mode, config, opened, runtime)?;
        let end = loop {
            tokio::select! {
                _ = terminate.recv() => break End::Signal("SIGTERM"),
                _ = interrupt.recv() => break End::Signal("SIGINT"),
                result = &mut ended => break End::Dataplane(dataplane_ended(result)),
                Some(task) = tasks.join_next() => match task {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => break End::Other(error),
                    Err(error) => break End::Other(error.into()),
                },
            }
        };
        stop.cancel();
        let result = match end {
            End::Dataplane(error) => return Err(error),
            End::Signal(signal) => {
                tracing::info!(signal, "stopping; what is programmed goes on working");
                Ok(())
            }
            End::Other(error) => {
                tracing::error!(
                    error = format!("{error:#}"),
                    "Error running ProxyServer; what is programmed goes on working"
                );
                tell(&error, &events);
                Err(error)
            }
        };
        if tokio::time::timeout(LAST_CALL, ended).await.is_err() {
            tracing::warn!("the dataplane is still busy, leaving it");
        }
        if tokio::time::timeout(LAST_WORDS, events.flush()).await.is_err() {
            tracing::debug!("the last events did not reach the API server");
        }
        result
    }
}

/// What the cluster should hear of the end.
fn tell(error: &anyhow::Error, events: &Recorder) {
    match error.downcast_ref::<BindError>() {
        Some(bind) if bind.purpose == "healthz" => events.record(event::healthz_failed(bind)),
        Some(bind) => events.record(event::metrics_failed(bind)),
        None => {}
    }
}

fn serve_http(
    tasks: &mut JoinSet<anyhow::Result<()>>,
    config: &Config,
    pages: Pages,
    health: &Arc<SharedHealth>,
    metrics: &Arc<Metrics>,
    stop: &CancellationToken,
) {
    let hard_fail = config.bind_address_hard_fail;
    if let Some(address) = config.healthz_bind_address {
        let healthz =
            serve::healthz(address, hard_fail, Arc::clone(health), Arc::clone(metrics), stop.clone());
        tasks.spawn(async { Ok(healthz.await?) });
    }
    if let Some(address) = config.metrics_bind_address {
        let metrics = serve::metrics(address, hard_fail, pages, Arc::clone(metrics), stop.clone());
        tasks.spawn(async { Ok(metrics.await?) });
    }
}

async fn serve_services(
    node_name: Arc<str>,
    checks: watch::Receiver<HealthChecks>,
    health: Arc<SharedHealth>,
    events: Recorder,
    stop: CancellationToken,
) {
    let failed = |service: &ObjectName, address: SocketAddr, error: &io::Error| {
        tracing::error!(%service, %address, %error, "healthCheckNodePort: cannot listen, tried again every 5 s");
        events.record(event::service_health_failed(&node_name, service, address, error));
    };
    serve::service_health(checks, health, failed, stop).await;
}

fn pages(
    config: &Config,
    document: watch::Receiver<serde_json::Value>,
    flags: BTreeMap<String, String>,
    mode: &'static str,
) -> Pages {
    Pages {
        mode,
        configuration: Some(document),
        flags: config.has_gate("ComponentFlagz").then_some(flags),
        status: config.has_gate("ComponentStatusz"),
        profiling: config.enable_profiling,
    }
}

/// The thread that blocks on system calls. The answer comes when it ends.
fn start_dataplane(
    controller: Controller,
    inputs: Inputs,
    mode: Mode,
    config: Arc<Config>,
    opened: impl FnOnce() + Send + 'static,
    runtime: tokio::runtime::Handle,
) -> anyhow::Result<oneshot::Receiver<Result<(), Ended>>> {
    let (end, ended) = oneshot::channel();
    let open = move || {
        let dataplane = dataplane::open(mode, &config)?;
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
fn dataplane_ended(result: Result<Result<(), Ended>, oneshot::error::RecvError>) -> anyhow::Error {
    match result {
        Ok(Err(Ended::NotOpened(error))) => anyhow::Error::new(error).context("starting the dataplane"),
        Ok(Err(error @ (Ended::NoSources | Ended::TakenOver(_)))) => error.into(),
        Ok(Ok(())) | Err(_) => anyhow::anyhow!("the dataplane's thread ended unexpectedly"),
    }
}
