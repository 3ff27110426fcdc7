//! The source under test, with a model behind it as in the controller.

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use control_plane::Identity;
use proxy_ctl::{
    kubernetes::{Api, Config, Kubernetes, SourceState},
    model::{
        Model, Update,
        desired::{Frontend, FrontendKind},
    },
};
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
    time::{Instant, timeout_at},
};

use crate::world::World;

const LIMIT: Duration = Duration::from_secs(60);
/// Longest wait for the creation of many objects on a busy machine.
const WORK_LIMIT: Duration = Duration::from_secs(900);
pub(crate) const NODE: &str = "node-under-test";

/// Endpoints, as `address:port`, of each service port, as `name:port`.
pub(crate) type Served = BTreeMap<String, Vec<String>>;

pub(crate) struct Follower {
    source: JoinHandle<()>,
    updates: mpsc::Receiver<Update>,
    pub(crate) model: Model,
    pub(crate) state: SourceState,
    pub(crate) api: Api,
    pub(crate) wants_service_cidrs: watch::Sender<bool>,
    /// Updates received so far, in order.
    pub(crate) log: Vec<Update>,
    namespace: String,
}

impl Follower {
    /// Follows as `identity`. Waits for nothing.
    pub(crate) fn start(world: &World, identity: Identity) -> Result<Self> {
        Self::start_with(world, &world.server.kubeconfig(identity))
    }

    /// Follows through a relay.
    pub(crate) fn start_through(world: &World, identity: Identity, relay: SocketAddr) -> Result<Self> {
        Self::start_with(world, &kubeconfig_at(world, identity, relay)?)
    }

    /// Follows with this kubeconfig. Waits for nothing.
    pub(crate) fn start_with(world: &World, kubeconfig: &Path) -> Result<Self> {
        Self::start_as(world, Config { kubeconfig: Some(kubeconfig.to_owned()), ..Config::default() })
    }

    /// Follows with this configuration. Waits for nothing.
    pub(crate) fn start_as(world: &World, config: Config) -> Result<Self> {
        let state = SourceState::new();
        let source = Kubernetes::new(config, NODE, state.clone()).context("configuring the source")?;
        let (wants_service_cidrs, wanted) = watch::channel(true);
        let source = source.with_service_cidrs_while(wanted);
        let api = source.api();
        let (sender, updates) = mpsc::channel(64);
        let source = world.spawn(async move {
            if let Err(error) = source.run(sender).await {
                eprintln!("the source ended: {error}");
            }
        });
        Ok(Self {
            source,
            updates,
            model: Model::new(NODE),
            state,
            api,
            wants_service_cidrs,
            log: Vec::new(),
            namespace: world.namespace().to_owned(),
        })
    }

    /// Follows, and waits until everything has been listed.
    pub(crate) fn listed(world: &World, identity: Identity) -> Result<Self> {
        let mut follower = Self::start(world, identity)?;
        follower.wait_listed(world)?;
        Ok(follower)
    }

    pub(crate) fn wait_listed(&mut self, world: &World) -> Result<()> {
        self.wait(world, "the first lists", |follower| {
            let seen = |kind: fn(&Update) -> bool| follower.log.iter().any(kind);
            seen(|update| matches!(update, Update::ReplaceServices(_)))
                && seen(|update| matches!(update, Update::ReplaceSlices(_)))
                && seen(|update| matches!(update, Update::Node(_)))
        })
    }

    /// Takes in updates until `condition` returns true.
    pub(crate) fn wait(
        &mut self,
        world: &World,
        what: &str,
        condition: impl FnMut(&Self) -> bool,
    ) -> Result<()> {
        self.wait_within(world, LIMIT, what, condition)
    }

    fn wait_within(
        &mut self,
        world: &World,
        limit: Duration,
        what: &str,
        mut condition: impl FnMut(&Self) -> bool,
    ) -> Result<()> {
        world.block_on(async {
            let deadline = Instant::now() + limit;
            while !condition(self) {
                // Some conditions are about counters, which change without an update.
                let look = (Instant::now() + Duration::from_millis(20)).min(deadline);
                match timeout_at(look, self.updates.recv()).await {
                    Ok(Some(update)) => self.take(update),
                    Ok(None) => bail!("the source ended while waiting for {what}"),
                    Err(_) if Instant::now() >= deadline => {
                        let served: String = format!("{:?}", self.served()).chars().take(2000).collect();
                        bail!("not within {} s: {what}; served: {served}", limit.as_secs())
                    }
                    Err(_) => {}
                }
            }
            Ok(())
        })
    }

    /// Takes in updates while `work` is done.
    pub(crate) fn during<T: Send + 'static>(
        &mut self,
        world: &World,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let (sender, mut done) = tokio::sync::oneshot::channel();
        let _working = world.spawn(async move {
            // The receiver may have given up.
            let _ = sender.send(work.await);
        });
        let mut outcome = None;
        self.wait_within(world, WORK_LIMIT, "the end of the work", |_| {
            outcome = done.try_recv().ok();
            outcome.is_some()
        })?;
        outcome.context("the work ended without a word")?
    }

    fn take(&mut self, update: Update) {
        self.log.push(update.clone());
        self.model.update(update);
        self.model.take_changes();
    }

    /// Waits until exactly `expected` is served in the scenario's namespace.
    pub(crate) fn wait_served(&mut self, world: &World, expected: &[(&str, &[&str])]) -> Result<()> {
        self.wait_served_within(world, LIMIT, expected)
    }

    pub(crate) fn wait_served_within(
        &mut self,
        world: &World,
        limit: Duration,
        expected: &[(&str, &[&str])],
    ) -> Result<()> {
        let expected: Served = expected
            .iter()
            .map(|(port, endpoints)| {
                ((*port).to_owned(), endpoints.iter().map(|&one| one.to_owned()).collect())
            })
            .collect();
        self.wait_within(world, limit, &format!("{expected:?}"), |follower| follower.served() == expected)
    }

    /// Returns what the model serves in the scenario's namespace.
    pub(crate) fn served(&self) -> Served {
        self.model
            .desired()
            .iter()
            .filter(|port| *port.name.service.namespace == *self.namespace)
            .map(|port| {
                let endpoints = port.endpoints.all.iter();
                let endpoints = endpoints.map(|endpoint| format!("{}:{}", endpoint.address, endpoint.port));
                (format!("{}:{}", port.name.service.name, port.name.port), endpoints.collect())
            })
            .collect()
    }

    /// Returns the kind of each frontend that the model serves in the scenario's namespace, with
    /// the address of an external one.
    pub(crate) fn frontends(&self) -> Vec<String> {
        let ports = self.model.desired();
        let of_namespace = ports.iter().filter(|port| *port.name.service.namespace == *self.namespace);
        let shown = |frontend: &Frontend| match frontend.kind {
            FrontendKind::ClusterIp | FrontendKind::NodePort => format!("{:?}", frontend.kind),
            FrontendKind::ExternalIp | FrontendKind::LoadBalancer => {
                format!("{:?} {}", frontend.kind, frontend.address)
            }
        };
        of_namespace.flat_map(|port| &port.frontends).map(shown).collect()
    }

    /// Waits until exactly these frontends are served, as [`Follower::frontends`] shows them.
    pub(crate) fn wait_frontends(&mut self, world: &World, expected: &[&str]) -> Result<()> {
        self.wait(world, &format!("{expected:?}"), |follower| follower.frontends() == expected)
    }

    /// Returns the updates that were received since the log had this length.
    pub(crate) fn since(&self, length: usize) -> &[Update] {
        &self.log[length..]
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.source.abort();
    }
}

/// Writes a copy of the identity's kubeconfig with another address of the server.
pub(crate) fn kubeconfig_at(world: &World, identity: Identity, server: SocketAddr) -> Result<PathBuf> {
    copy_at(world, &world.server.kubeconfig(identity), server)
}

/// Writes a copy of this kubeconfig with another address of the server.
pub(crate) fn copy_at(world: &World, original: &Path, server: SocketAddr) -> Result<PathBuf> {
    let text = fs::read_to_string(original).context("reading the kubeconfig")?;
    let text = text.replace(&world.server.url(), &format!("https://{server}"));
    let copy = original.with_extension(format!("{}.kubeconfig", server.port()));
    fs::write(&copy, text).context("writing a kubeconfig")?;
    Ok(copy)
}
