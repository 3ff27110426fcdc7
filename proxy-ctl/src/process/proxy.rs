//! The tasks of a running proxy, and what they share.

use std::{io, net::SocketAddr, sync::Arc};

use ipnet::IpNet;
use prometheus_client::registry::Registry;
use serde_json::Value;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use super::{
    cleanup::FormerRuleRemoval,
    event::{self, filling_maps, unattached_interfaces, unserved_fields},
    mode_choice, own_node,
    record::{self, Record, RecordInputs, UnservedFieldRecord},
    reload::Reload,
    set_up,
    settings::Settings,
    source::Source,
};
use crate::{
    config::{CommandLine, Config},
    controller::{Coverage, Inputs, MetricsRequests, Reports, UnservedPorts},
    events::Recorder,
    http::{
        self, HealthPages, Pages,
        report::{Health, HealthChecks, Heartbeats, Metrics, ModeChoice, ModeInForce, SharedHealth},
    },
    kubernetes::SourceState,
    model::{Update, mode::Mode, node::NodeNetwork, objects::ObjectName},
    modes::HookProblems,
    node::{self, OwnNode},
};

/// The most updates that wait between the watchers and the dataplane's thread. When there are as
/// many, the watchers wait.
const UPDATES: usize = 4096;
/// The most requests for metrics that wait for the dataplane's thread.
const METRICS_REQUESTS: usize = 16;

type Tasks = JoinSet<anyhow::Result<()>>;

/// The state that tasks share. Each watch channel has one writer.
pub(super) struct Proxy {
    line: CommandLine,
    /// The configuration at the start.
    pub(super) config: Arc<Config>,
    pub(super) node_name: Arc<str>,
    /// `None` if the source is a folder of manifests. Such a folder need not name everything that a
    /// kube-proxy serves, and its Node is followed as it changes.
    source_state: Option<SourceState>,
    /// The address and port at which the API server is dialled. `None` if it has a name, or if
    /// there is a proxy in between.
    pub(super) server: Option<SocketAddr>,
    pub(super) events: Recorder,
    health: Arc<SharedHealth>,
    heartbeats: Heartbeats,
    pub(super) metrics: Arc<Metrics>,
    own_node: watch::Sender<OwnNode>,
    /// The node's network. Nothing is written before the first one.
    networks: watch::Sender<Option<NodeNetwork>>,
    /// The mode that results from the configuration in force. It is sent before the configuration.
    choices: watch::Sender<ModeChoice>,
    pub(super) mode: watch::Sender<ModeInForce>,
    /// Modes that were active before, while anything of them is left.
    draining: watch::Sender<Vec<Mode>>,
    /// The reasons why interfaces lack programs.
    hook_problems: watch::Sender<HookProblems>,
    /// The fields of Services that are not served as asked and were reported by events, also by
    /// those of a predecessor.
    told: watch::Sender<Vec<UnservedFieldRecord>>,
    /// The configuration in force.
    configs: watch::Sender<Arc<Config>>,
    /// The configuration in force, as `/configz` shows it.
    document: watch::Sender<Value>,
    health_checks: watch::Sender<HealthChecks>,
    coverage: watch::Sender<Coverage>,
    removal_blockers: watch::Sender<Vec<String>>,
    pub(super) stop: CancellationToken,
}

/// The ends of channels that have one owner each.
pub(super) struct ProxyInputs {
    pub(super) updates: mpsc::Sender<Update>,
    pub(super) controller: Inputs,
}

impl Proxy {
    pub(super) fn new(
        line: CommandLine,
        settings: Settings,
        choice: ModeChoice,
        source: &Source,
        source_state: SourceState,
    ) -> anyhow::Result<(Self, ProxyInputs)> {
        let from_api_server = matches!(source, Source::Kubernetes(_));
        let config = Arc::new(settings.config);
        let events = source.recorder(&settings.node_name)?;
        let (metrics_requests_in, metrics_requests) = mpsc::channel(METRICS_REQUESTS);
        let coverage = watch::Sender::default();
        let unserved = UnservedPorts(coverage.subscribe());
        let register = |registry: &mut Registry| {
            registry.register_collector(Box::new(unserved));
            if from_api_server {
                source_state.register(registry);
                events.register(registry.sub_registry_with_prefix("proxy"));
            }
        };
        let metrics = Metrics::new(
            Some(Box::new(MetricsRequests(metrics_requests_in))),
            source_state.invalid_objects(),
            register,
        );
        let proxy = Self {
            line,
            node_name: settings.node_name,
            source_state: from_api_server.then_some(source_state),
            server: source.server_address(),
            events,
            health: Arc::new(SharedHealth::new(Health::new(config.periods.sync))),
            heartbeats: Heartbeats::default(),
            metrics: Arc::new(metrics),
            own_node: watch::Sender::default(),
            networks: watch::Sender::default(),
            mode: watch::Sender::new(ModeInForce::new(choice.modes)),
            draining: watch::Sender::default(),
            hook_problems: watch::Sender::default(),
            told: watch::Sender::default(),
            choices: watch::Sender::new(choice),
            configs: watch::Sender::new(Arc::clone(&config)),
            document: watch::Sender::new(config.to_document()),
            health_checks: watch::Sender::default(),
            coverage,
            removal_blockers: watch::Sender::default(),
            stop: CancellationToken::new(),
            config,
        };
        let (updates_in, updates) = mpsc::channel(UPDATES);
        let (networks, configs) = (proxy.networks.subscribe(), proxy.configs.subscribe());
        let (choices, stop) = (proxy.choices.subscribe(), proxy.stop.clone());
        let controller = Inputs { updates, networks, metrics_requests, configs, choices, stop };
        Ok((proxy, ProxyInputs { updates: updates_in, controller }))
    }

    /// Returns the channels and metrics that the controller writes.
    pub(super) fn reports(&self) -> Reports {
        Reports {
            health: Arc::clone(&self.health),
            heartbeats: self.heartbeats.clone(),
            metrics: Arc::clone(&self.metrics),
            own_node: self.own_node.clone(),
            health_checks: self.health_checks.clone(),
            coverage: self.coverage.clone(),
            mode: self.mode.clone(),
            draining: self.draining.clone(),
            hook_problems: self.hook_problems.clone(),
        }
    }

    pub(super) fn serve_http(&self, tasks: &mut Tasks) {
        let hard_fail = self.config.bind_address_hard_fail;
        if let Some(address) = self.config.healthz_bind_address {
            let pages = HealthPages {
                health: Arc::clone(&self.health),
                heartbeats: self.heartbeats.clone(),
                sources: self.source_state.clone(),
                metrics: Arc::clone(&self.metrics),
            };
            let healthz = http::healthz(address, hard_fail, pages, self.stop.clone());
            self.begin(tasks, "health server", async { Ok(healthz.await?) });
        }
        if let Some(address) = self.config.metrics_bind_address {
            let metrics = Arc::clone(&self.metrics);
            let metrics = http::metrics(address, hard_fail, self.pages(), metrics, self.stop.clone());
            self.begin(tasks, "metrics server", async { Ok(metrics.await?) });
        }
    }

    fn pages(&self) -> Pages {
        Pages {
            mode: self.mode.subscribe(),
            configuration: self.document.subscribe(),
            flags: self.config.has_gate("ComponentFlagz").then(|| self.line.values()),
            status: self.config.has_gate("ComponentStatusz"),
            profiling: self.config.enable_profiling,
        }
    }

    /// Serves the answers to load balancers that ask at `healthCheckNodePort`.
    pub(super) fn serve_service_health(&self, tasks: &mut Tasks) {
        let (node_name, events) = (Arc::clone(&self.node_name), self.events.clone());
        let failed = move |service: &ObjectName, address: SocketAddr, error: &io::Error| {
            tracing::error!(%service, %address, %error, "healthCheckNodePort: cannot listen, tried again every 5 s");
            events.record(event::service_health_failed(&node_name, service, address, error));
        };
        let (checks, health) = (self.health_checks.subscribe(), Arc::clone(&self.health));
        let serving = http::service_health(checks, health, failed, self.stop.clone());
        self.spawn(tasks, "health checks of Services", serving);
    }

    /// Begins a task that is watched for being stuck. Its failure ends the process.
    pub(super) fn begin(
        &self,
        tasks: &mut Tasks,
        name: &'static str,
        task: impl Future<Output = anyhow::Result<()>> + Send + 'static,
    ) {
        tasks.spawn(self.heartbeats.clone().watch(name, task));
    }

    /// Begins a task whose end is no failure. It is cancelled when the process ends.
    fn spawn(&self, tasks: &mut Tasks, name: &'static str, work: impl Future<Output = ()> + Send + 'static) {
        let stop = self.stop.clone();
        self.begin(tasks, name, async move {
            stop.run_until_cancelled(work).await;
            Ok(())
        });
    }

    /// Sets the node up, then follows its addresses, its Node and the configuration file. The task
    /// ends only with what must end the process.
    pub(super) fn set_up_and_follow(&self, tasks: &mut Tasks) {
        let (config, node_name) = (Arc::clone(&self.config), Arc::clone(&self.node_name));
        let mut own_node = self.source_state.is_some().then(|| self.own_node.subscribe());
        let events = self.events.clone();
        let network_changes = node::watch(
            self.own_node.subscribe(),
            self.configs.subscribe(),
            self.networks.clone(),
            self.stop.clone(),
        );
        let reload = Reload::new(
            self.line.clone(),
            self.choices.clone(),
            self.configs.clone(),
            self.document.clone(),
            self.events.clone(),
            Arc::clone(&self.metrics),
        );
        self.begin(tasks, "node", async move {
            let node = set_up::set_up(&config, &node_name, own_node.as_mut(), &events).await?;
            let by_pod_cidrs = set_up::needs_pod_cidrs(&config);
            let node_change = async {
                match &mut own_node {
                    Some(own_node) => own_node::changed(own_node, node, by_pod_cidrs).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                change = node_change => Err(change.into()),
                error = reload.follow() => Err(error),
                done = network_changes => Ok(done?),
            }
        });
    }

    pub(super) fn remove_former_rules(&self, tasks: &mut Tasks) {
        if self.source_state.is_none() {
            return;
        }
        let removal = FormerRuleRemoval {
            configs: self.configs.subscribe(),
            coverage: self.coverage.subscribe(),
            mode: self.mode.subscribe(),
            draining: self.draining.subscribe(),
            health_checks: self.health_checks.subscribe(),
            blockers: self.removal_blockers.clone(),
            events: self.events.clone(),
            metrics: Arc::clone(&self.metrics),
        };
        self.spawn(tasks, "former rules", removal.follow());
    }

    pub(super) fn tell_of_mode(&self, tasks: &mut Tasks) {
        let (events, metrics) = (self.events.clone(), Arc::clone(&self.metrics));
        self.spawn(
            tasks,
            "mode",
            mode_choice::tell(self.mode.subscribe(), self.choices.subscribe(), events, metrics),
        );
    }

    /// Starts to report Services that are not served as asked, by events. It must be called before
    /// the record of a predecessor is replaced.
    pub(super) fn tell_of_unserved_fields(&self, tasks: &mut Tasks) {
        let told = match Record::read(&self.config.ebpf.bpffs) {
            Ok(record) => record.unwrap_or_default().told,
            Err(error) => {
                tracing::warn!(%error, "events that a predecessor has sent of Services may be sent again");
                Vec::new()
            }
        };
        self.told.send_replace(told);
        let (coverage, told, events) = (self.coverage.subscribe(), self.told.clone(), self.events.clone());
        let node = Arc::clone(&self.node_name);
        self.spawn(tasks, "unserved fields", async move {
            unserved_fields::follow(coverage, &told, &node, events).await
        });
    }

    pub(super) fn tell_of_unattached_interfaces(&self, tasks: &mut Tasks) {
        let (problems, events) = (self.hook_problems.subscribe(), self.events.clone());
        self.spawn(tasks, "unattached interfaces", unattached_interfaces::follow(problems, events));
    }

    pub(super) fn tell_of_filling_maps(&self, tasks: &mut Tasks) {
        let (problems, events) = (self.hook_problems.subscribe(), self.events.clone());
        self.spawn(tasks, "filling maps", filling_maps::follow(problems, events));
    }

    /// Starts to keep the record up to date. The returned function writes it first. It must be
    /// called by whoever holds the dataplane's lock, because nobody else may write the record.
    pub(super) fn keep_record(&self, tasks: &mut Tasks) -> impl FnOnce() + Send + 'static {
        let pid = std::process::id();
        let record = Record {
            pid,
            began: record::began(pid).unwrap_or(0),
            node: self.node_name.to_string(),
            // A changed value ends the process.
            exclude_cidrs: self.config.ipvs.exclude_cidrs.iter().map(IpNet::to_string).collect(),
            told: self.told.borrow().clone(),
            ..Record::default()
        }
        .in_mode(&self.choices.borrow(), &self.mode.borrow());
        let inputs = RecordInputs {
            choices: self.choices.subscribe(),
            mode: self.mode.subscribe(),
            source_state: self.source_state.clone(),
            networks: self.networks.subscribe(),
            configs: self.configs.subscribe(),
            removal_blockers: self.removal_blockers.subscribe(),
            coverage: self.coverage.subscribe(),
            hook_problems: self.hook_problems.subscribe(),
            told: self.told.subscribe(),
        };
        let written = CancellationToken::new();
        self.spawn(tasks, "record", record::keep(record.clone(), inputs, written.clone()));
        let bpffs = self.config.ebpf.bpffs.clone();
        move || {
            if let Err(error) = record.write(&bpffs) {
                tracing::warn!(%error, "`proxy-ctl status` does not know about this process");
            }
            written.cancel();
        }
    }
}
