//! What happens to a proxy between its start and its end, beside following the sources: the node is set up, and then
//! watched for what this process cannot take over.

use std::{convert::Infallible, net::IpAddr, sync::Arc};

use anyhow::anyhow;
use serde_json::Value;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::run::Given;
use crate::{
    config::{Config, LocalMode, RequestedMode},
    dataplane::Host,
    events::Recorder,
    log,
    model::objects::Node,
    node::{self, NodeIps},
    serve::Metrics,
    start::{
        self,
        checks::{self, LocalBy, NodeFacts},
        config_file::ConfigFile,
        event,
        kernel::Kernel,
        node::{Nodes, Patience},
        reload::Changes,
    },
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
    pub(super) hosts: watch::Sender<Option<Host>>,
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
                start::node::settle(&self.node_name, nodes, by_pod_cidrs, Patience::default()).await?
            }
            None => None,
        };
        start::prepare(self.mode, &self.config, &Kernel::default(), &self.events)?;
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
        };
        let node_change = async {
            match nodes {
                Some(mut nodes) => start::node::changed(&mut nodes, node, by_pod_cidrs).await,
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
        let facts = NodeFacts { ips, pod_cidrs, dual_stack: start::is_dual_stack() };
        tracing::info!(primary = ?ips.primary, dual_stack = facts.dual_stack, "address families");
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
    hosts: watch::Sender<Option<Host>>,
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
}

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
            file.changed().await;
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
                if !changes.live.is_empty() {
                    self.take_over(new, &changes.live);
                }
            }
            Err(error) => self.refuse(&error),
        }
        None
    }

    /// What cannot be taken over keeps its former value, and so is different still when the file is compared again.
    fn take_over(&mut self, mut new: Config, fields: &[String]) {
        let former = Arc::clone(&self.configs.borrow());
        tracing::info!(changed = fields.join(", "), "the configuration file has changed; it is taken over");
        let changed = |name: &str| fields.iter().any(|field| field.starts_with(name));
        if changed("logging.verbosity") && !log::set_verbosity(new.logging.verbosity) {
            tracing::warn!("the log level of this process cannot be changed");
            new.logging.verbosity = former.logging.verbosity;
        }
        if (changed("conntrack") || changed("oomScoreAdj"))
            && let Err(error) = start::prepare(self.mode, &new, &self.kernel, &self.events)
        {
            tracing::error!(
                %error,
                "the section conntrack of the changed configuration could not be taken over: the former one stays in \
                 force until the file changes again"
            );
            new.conntrack = former.conntrack;
        }
        self.document.send_replace(new.to_document());
        self.configs.send_replace(Arc::new(new));
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
    use std::fs;

    use super::*;
    use crate::{config::CommandLine, source::OddObjects};

    const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

    #[test]
    fn what_cannot_be_taken_over_is_not_in_force_and_is_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.yaml");
        let configure = |text: &str| fs::write(&path, format!("{HEAD}hostnameOverride: a\n{text}")).unwrap();
        configure("oomScoreAdj: 0\nconntrack: {maxPerCore: 0}\n");
        let flag = format!("--config={}", path.display());
        let given = Given { line: CommandLine::parse([flag.into()]).unwrap() };
        let config = Arc::new(given.settings().unwrap().config);
        let root = folder.path().join("root");
        // No file that a number could be read from.
        let limit = root.join("proc/sys/net/netfilter/nf_conntrack_max");
        fs::create_dir_all(&limit).unwrap();
        let (configs, in_force) = watch::channel(Arc::clone(&config));
        let (document, shown) = watch::channel(config.to_document());
        let mut following = Following {
            given,
            mode: RequestedMode::Ebpf,
            configs,
            document,
            events: Recorder::silent(),
            metrics: Arc::new(Metrics::new(None, OddObjects::default(), |_| {})),
            kernel: Kernel::below(&root),
            refused: None,
        };

        configure("oomScoreAdj: 0\nconntrack: {maxPerCore: 1000}\niptables: {syncPeriod: 7s}\n");
        assert!(following.compare().is_none());
        assert_eq!(in_force.borrow().conntrack, config.conntrack);
        assert_eq!(shown.borrow()["conntrack"]["maxPerCore"], 0);
        assert_eq!(shown.borrow()["iptables"]["syncPeriod"], "7s");

        fs::remove_dir(&limit).unwrap();
        fs::write(&limit, "5\n").unwrap();
        assert!(following.compare().is_none());
        assert_eq!(in_force.borrow().conntrack.max_per_core, 1000);
        assert_eq!(shown.borrow()["conntrack"]["maxPerCore"], 1000);
        assert_ne!(fs::read_to_string(&limit).unwrap().trim(), "5");
    }
}
