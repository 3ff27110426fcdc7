//! What happens to a proxy between its start and its end, beside following the sources: the node is set up, and then
//! watched for what this process cannot take over.

use std::{convert::Infallible, net::IpAddr, pin::pin, sync::Arc, time::Duration};

use anyhow::anyhow;
use serde_json::Value;
use tokio::{sync::watch, time::timeout};
use tokio_util::sync::CancellationToken;

use super::{
    self as process,
    checks::{self, LocalBy, NodeFacts},
    config_file::ConfigFile,
    event,
    kernel::Kernel,
    node::{Nodes, Patience},
    reload::Changes,
    run::Given,
};
use crate::{
    config::{Config, LocalMode, RequestedMode},
    dataplane::NodeNetwork,
    events::Recorder,
    log,
    model::objects::Node,
    node::{self, NodeIps},
    report::Metrics,
};

pub(super) struct Life {
    /// To be read again when the file has changed.
    pub(super) given: Given,
    pub(super) config: Arc<Config>,
    pub(super) mode: RequestedMode,
    pub(super) node_name: Arc<str>,
    /// `None`: a folder of manifests, whose Node is taken as it is and followed as it changes.
    pub(super) nodes: Option<Nodes>,
    pub(super) node_addresses: watch::Receiver<Option<Vec<IpAddr>>>,
    /// Nothing is written before the first.
    pub(super) hosts: watch::Sender<Option<NodeNetwork>>,
    pub(super) configs: watch::Sender<Arc<Config>>,
    /// The same, as `/configz` shows it.
    pub(super) document: watch::Sender<Value>,
    pub(super) events: Recorder,
    pub(super) metrics: Arc<Metrics>,
    pub(super) stop: CancellationToken,
}

impl Life {
    /// Ends only with what must end the process.
    pub(super) async fn lead(mut self) -> anyhow::Result<Infallible> {
        let local_by = local_by(&self.config);
        let by_pod_cidrs = local_by == LocalBy::NodeCidr;
        let node = match &mut self.nodes {
            Some(nodes) => {
                process::node::settle(&self.node_name, nodes, by_pod_cidrs, Patience::default()).await?
            }
            None => None,
        };
        process::prepare(self.mode, &self.config, &Kernel::default(), &self.events)?;
        self.check(local_by, node.as_ref())?;
        self.events.record(event::starting());
        let Self { nodes, node_addresses, hosts, stop, .. } = self;
        let following = Following {
            given: self.given,
            mode: self.mode,
            configs: self.configs,
            document: self.document,
            events: self.events,
            metrics: self.metrics,
            kernel: Kernel::default(),
            refused: None,
            owed: None,
            first_pause: FIRST_PAUSE,
        };
        let node_change = async {
            match nodes {
                Some(mut nodes) => process::node::changed(&mut nodes, node, by_pod_cidrs).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            change = node_change => Err(change.into()),
            error = following.follow() => Err(error),
            done = watch_node(node_addresses, hosts, stop) => {
                done?;
                // Told to stop.
                std::future::pending().await
            }
        }
    }

    /// Says what does not fit this node.
    fn check(&self, local_by: LocalBy, node: Option<&Node>) -> anyhow::Result<()> {
        if self.nodes.is_none() {
            return Ok(());
        }
        let addresses = node.map(|node| node.addresses.as_slice()).unwrap_or_default();
        let ips = NodeIps::detect(self.config.bind_address, addresses);
        if ips.is_assumed() {
            tracing::warn!(
                "Can't determine this node's IP, assuming loopback; if this is incorrect, please set the \
                 --bind-address flag"
            );
        }
        let pod_cidrs = match (local_by, node) {
            (LocalBy::NodeCidr, Some(node)) => node.pod_cidrs.clone(),
            _ => Vec::new(),
        };
        let facts = NodeFacts { ips, pod_cidrs, dual_stack: process::is_dual_stack() };
        tracing::info!(primary = ?ips.primary, dual_stack = facts.dual_stack, "address families");
        if let Some(nothing) = checks::nothing_is_local(&self.config, local_by, &facts) {
            tracing::info!(ip_family = ips.primary.name(), "{nothing}");
        }
        let findings = checks::check(&self.config, local_by, &facts);
        for warning in &findings.warnings {
            tracing::warn!("{warning}");
        }
        if findings.fatal.is_empty() {
            return Ok(());
        }
        Err(anyhow!("kube-proxy configuration is incorrect: {}", findings.fatal.join("; ")))
    }
}

fn local_by(config: &Config) -> LocalBy {
    match config.detect_local_mode {
        LocalMode::ClusterCidr => LocalBy::ClusterCidr,
        LocalMode::NodeCidr => LocalBy::NodeCidr,
        LocalMode::BridgeInterface | LocalMode::InterfaceNamePrefix => LocalBy::Interface,
    }
}

/// Follows the node's addresses and interfaces, from when the addresses of its Node object are known: by them it is
/// told which interfaces lead outside.
async fn watch_node(
    mut known: watch::Receiver<Option<Vec<IpAddr>>>,
    hosts: watch::Sender<Option<NodeNetwork>>,
    stop: CancellationToken,
) -> Result<(), node::Error> {
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
        done = node::watch(watched, hosts, stop) => done,
        () = forward => Ok(()),
    }
}

/// The configuration file while the process runs.
struct Following {
    given: Given,
    mode: RequestedMode,
    configs: watch::Sender<Arc<Config>>,
    document: watch::Sender<Value>,
    events: Recorder,
    metrics: Arc<Metrics>,
    kernel: Kernel,
    /// What is wrong with the file as it is now.
    refused: Option<String>,
    /// What of the file could not be taken over.
    owed: Option<Owed>,
    /// Before that is tried again for the first time.
    first_pause: Duration,
}

/// It is tried again without anybody changing the file: what was in the way may be gone.
#[derive(Debug)]
struct Owed {
    /// The configuration that is to be in force.
    wanted: Config,
    problem: String,
    pause: Duration,
}

const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

impl Following {
    /// Ends with a change that needs a new process.
    async fn follow(mut self) -> anyhow::Error {
        let Some(path) = self.given.config_file() else { return std::future::pending().await };
        // Watched before it is compared, so that nothing that has happened since the start is missed.
        let mut file = ConfigFile::watch(&path);
        loop {
            if let Some(end) = self.compare() {
                return end;
            }
            // One wait, however often something is tried meanwhile: it knows what was taken away a moment ago.
            let mut changed = pin!(file.changed());
            while let Some(owed) = &self.owed {
                if timeout(owed.pause, changed.as_mut()).await.is_ok() {
                    break;
                }
                self.try_again();
            }
            if self.owed.is_none() {
                changed.await;
            }
        }
    }

    fn compare(&mut self) -> Option<anyhow::Error> {
        match self.given.settings() {
            Ok(settings) => {
                if self.refused.take().is_some() {
                    tracing::info!("the configuration file is valid again");
                }
                let new = settings.config;
                let changes = Changes::between(&self.document.borrow(), &new.to_document());
                if !changes.restart.is_empty() {
                    return Some(anyhow!(
                        "content of the proxy server's configuration file was updated: {} changed, which takes a new \
                         process",
                        changes.restart.join(", ")
                    ));
                }
                if !changes.live.is_empty() || self.owed.is_some() {
                    self.take_over(new, &changes.live);
                }
            }
            Err(error) => self.refuse(&error),
        }
        None
    }

    /// Without another look at the file, which somebody may just be replacing.
    fn try_again(&mut self) {
        if let Some(owed) = &self.owed {
            let wanted = owed.wanted.clone();
            let changes = Changes::between(&self.document.borrow(), &wanted.to_document());
            self.take_over(wanted, &changes.live);
        }
    }

    /// What cannot be taken over keeps its former value. What is owed stays so until it has been done, whatever the file
    /// says meanwhile: an attempt that failed may have been half of one.
    fn take_over(&mut self, mut new: Config, fields: &[String]) {
        let former = Arc::clone(&self.configs.borrow());
        let changed = fields.join(", ");
        if self.owed.is_none() {
            tracing::info!(changed, "the configuration file has changed; it is taken over");
        }
        let owed = self.owed.take();
        let changes = |name: &str| fields.iter().any(|field| field.starts_with(name));
        if changes("logging.verbosity") && !log::set_verbosity(new.logging.verbosity) {
            tracing::warn!("the log level of this process cannot be changed");
            new.logging.verbosity = former.logging.verbosity;
        }
        if owed.is_some() || changes("conntrack") || changes("oomScoreAdj") {
            match process::prepare(self.mode, &new, &self.kernel, &self.events) {
                Ok(()) if owed.is_some() => {
                    tracing::info!("the rest of the changed configuration is taken over now");
                }
                Ok(()) => {}
                Err(error) => {
                    self.owe(new.clone(), error.to_string(), owed);
                    new.conntrack = former.conntrack;
                }
            }
        }
        self.document.send_replace(new.to_document());
        self.configs.send_replace(Arc::new(new));
    }

    /// `before`: what was owed until now. The same problem is told once.
    fn owe(&mut self, wanted: Config, problem: String, before: Option<Owed>) {
        let pause = before.as_ref().map_or(self.first_pause, |before| (before.pause * 2).min(LONGEST_PAUSE));
        if before.is_none_or(|before| before.problem != problem) {
            tracing::error!(
                problem,
                next_attempt_in = ?pause,
                "the section conntrack of the changed configuration could not be taken over: the former one stays in \
                 force, and it is tried again"
            );
        }
        self.owed = Some(Owed { wanted, problem, pause });
    }

    /// kube-proxy would end here, and not start again.
    fn refuse(&mut self, error: &anyhow::Error) {
        let problem = format!("{error:#}");
        if self.refused.as_ref() == Some(&problem) {
            return;
        }
        tracing::error!(
            problem,
            "the changed configuration file is not valid; the former configuration stays in force"
        );
        self.metrics.refused_configurations.inc();
        self.events.record(event::invalid_configuration(&problem));
        self.refused = Some(problem);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        path::{Path, PathBuf},
    };

    use tempfile::TempDir;

    use super::*;
    use crate::{config::CommandLine, source::InvalidObjects};

    const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

    /// A proxy whose file says no more than this.
    struct Scene {
        folder: TempDir,
        following: Following,
        before: Arc<Config>,
        in_force: watch::Receiver<Arc<Config>>,
        shown: watch::Receiver<Value>,
    }

    impl Scene {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("config.yaml");
            write(&path, "oomScoreAdj: 0\nconntrack: {maxPerCore: 0}\n");
            let flag = format!("--config={}", path.display());
            let given = Given { line: CommandLine::parse([flag.into()]).unwrap() };
            let before = Arc::new(given.settings().unwrap().config);
            let (configs, in_force) = watch::channel(Arc::clone(&before));
            let (document, shown) = watch::channel(before.to_document());
            let following = Following {
                given,
                mode: RequestedMode::Ebpf,
                configs,
                document,
                events: Recorder::silent(),
                metrics: Arc::new(Metrics::new(None, InvalidObjects::default(), |_| {})),
                kernel: Kernel::below(folder.path().join("root")),
                refused: None,
                owed: None,
                first_pause: Duration::from_millis(1),
            };
            Self { folder, following, before, in_force, shown }
        }
    }

    fn configure(folder: &TempDir, text: &str) {
        write(&folder.path().join("config.yaml"), text);
    }

    fn limit_below(folder: &TempDir) -> PathBuf {
        folder.path().join("root/proc/sys/net/netfilter/nf_conntrack_max")
    }

    /// No file that a number could be read from.
    fn spoil(limit: &Path) {
        fs::create_dir_all(limit).unwrap();
    }

    fn mend(limit: &Path) {
        fs::remove_dir(limit).unwrap();
        fs::write(limit, "5\n").unwrap();
    }

    /// As an editor does that renames: nobody reads half of it.
    fn write(path: &Path, text: &str) {
        let draft = path.with_extension("draft");
        fs::write(&draft, format!("{HEAD}hostnameOverride: a\n{text}")).unwrap();
        fs::rename(draft, path).unwrap();
    }

    #[tokio::test]
    async fn what_cannot_be_taken_over_is_tried_again_although_nobody_changes_the_file() {
        let Scene { folder, following, mut in_force, .. } = Scene::new();
        let limit = limit_below(&folder);
        spoil(&limit);
        configure(&folder, "oomScoreAdj: 0\nconntrack: {maxPerCore: 1000}\n");
        let taken_over = async {
            // Two attempts, of which the second is not the file's.
            in_force.changed().await.unwrap();
            in_force.changed().await.unwrap();
            mend(&limit);
            in_force.wait_for(|config| config.conntrack.max_per_core == 1000).await.unwrap();
        };
        let most = Duration::from_secs(30);
        tokio::select! {
            end = following.follow() => panic!("{end}"),
            done = timeout(most, taken_over) => done.unwrap(),
        }
    }

    #[test]
    fn attempts_become_rarer_and_end_when_nothing_is_owed() {
        let mut scene = Scene::new();
        let limit = limit_below(&scene.folder);
        spoil(&limit);
        configure(&scene.folder, "oomScoreAdj: 0\nconntrack: {maxPerCore: 1000}\n");
        let mut pauses = Vec::new();
        scene.following.first_pause = FIRST_PAUSE;
        for _ in 0..8 {
            assert!(scene.following.compare().is_none());
            pauses.extend(scene.following.owed.as_ref().map(|owed| owed.pause.as_secs()));
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        configure(&scene.folder, "oomScoreAdj: 0\nconntrack: {maxPerCore: 0}\n");
        assert!(scene.following.compare().is_none());
        assert!(scene.following.owed.is_none());
    }

    #[test]
    fn what_is_owed_is_tried_again_while_the_file_is_being_replaced() {
        let mut scene = Scene::new();
        let limit = limit_below(&scene.folder);
        spoil(&limit);
        configure(&scene.folder, "oomScoreAdj: 0\nconntrack: {maxPerCore: 1000}\n");
        assert!(scene.following.compare().is_none());
        fs::remove_file(scene.folder.path().join("config.yaml")).unwrap();
        scene.following.try_again();
        assert!(scene.following.owed.is_some());
        mend(&limit);
        scene.following.try_again();
        assert!(scene.following.owed.is_none() && scene.following.refused.is_none());
        assert_eq!(scene.in_force.borrow().conntrack.max_per_core, 1000);
    }

    #[test]
    fn what_failed_is_owed_until_it_succeeds_although_the_file_says_nothing_new_of_it() {
        let mut scene = Scene::new();
        let limit = limit_below(&scene.folder);
        let mut before = (*scene.before).clone();
        before.conntrack.max_per_core = 1000;
        scene.following.document.send_replace(before.to_document());
        scene.following.configs.send_replace(Arc::new(before));
        spoil(&limit);
        configure(&scene.folder, "oomScoreAdj: 1\nconntrack: {maxPerCore: 1000}\n");
        for _ in 0..3 {
            assert!(scene.following.compare().is_none());
            assert!(scene.following.owed.is_some());
        }
        mend(&limit);
        assert!(scene.following.compare().is_none());
        assert_ne!(fs::read_to_string(&limit).unwrap().trim(), "5");
        assert!(scene.following.owed.is_none());
    }

    #[test]
    fn what_cannot_be_taken_over_is_not_in_force_until_it_can() {
        let mut scene = Scene::new();
        let limit = limit_below(&scene.folder);
        spoil(&limit);
        configure(
            &scene.folder,
            "oomScoreAdj: 0\nconntrack: {maxPerCore: 1000}\niptables: {syncPeriod: 7s}\n",
        );
        assert!(scene.following.compare().is_none());
        assert_eq!(scene.in_force.borrow().conntrack, scene.before.conntrack);
        assert_eq!(scene.shown.borrow()["conntrack"]["maxPerCore"], 0);
        assert_eq!(scene.shown.borrow()["iptables"]["syncPeriod"], "7s");

        mend(&limit);
        assert!(scene.following.compare().is_none());
        assert_eq!(scene.in_force.borrow().conntrack.max_per_core, 1000);
        assert_eq!(scene.shown.borrow()["conntrack"]["maxPerCore"], 1000);
        assert_ne!(fs::read_to_string(&limit).unwrap().trim(), "5");
        assert!(scene.following.owed.is_none());
    }
}
