//! Services, EndpointSlices and the own Node from an API server.

mod backoff;
mod connection;
pub mod failure;
mod health;
mod kubeconfig;
mod oddities;
mod resource;
mod state;
mod watch;
mod wire;

use std::sync::Arc;

use tokio::{sync::mpsc, task::JoinSet};

use self::{
    connection::Connection,
    resource::{EndpointSlices, OwnNode, SERVED, Services, Watched},
    watch::{Selection, Watcher},
};
use super::Update;

pub use kubeconfig::{Config, ConfigError};
pub use state::{ListMethod, ResourceKind, SourceState};

/// The watchers, ready to run.
pub struct Kubernetes {
    config: Config,
    loaded: kubeconfig::Loaded,
    node_name: Arc<str>,
    state: SourceState,
}

impl Kubernetes {
    /// Reads and checks the configuration. Nothing is connected, nothing runs yet.
    pub fn new(
        config: Config,
        node_name: impl Into<Arc<str>>,
        state: SourceState,
    ) -> Result<Self, ConfigError> {
        let loaded = config.load()?;
        Ok(Self { config, loaded, node_name: node_name.into(), state })
    }

    /// The API server's address.
    pub fn server(&self) -> String {
        self.loaded.client.cluster_url.to_string()
    }

    /// Watches until the receiver of `updates` is closed or the future is dropped. The first updates are one
    /// `Replace…` of each kind and `Update::Node`, each as soon as that list is complete. A failing API
    /// server is never an error here: it is logged, counted, and tried again.
    pub async fn run(self, updates: mpsc::Sender<Update>) -> Result<(), ConfigError> {
        let path = self.config.kubeconfig.clone().unwrap_or_default();
        let connection = tokio::task::spawn_blocking(move || Connection::new(self.config, self.loaded))
            .await
            .map_err(|error| error.to_string())
            .and_then(|connection| connection.map_err(|error| error.to_string()))
            .map_err(|problem| ConfigError::Parse { path, problem })?;
        let connection = Arc::new(connection);
        let served = Selection { labels: Some(SERVED.to_owned()), fields: None };
        let own = Selection { labels: None, fields: Some(format!("metadata.name={}", self.node_name)) };

        let mut watchers = JoinSet::new();
        let mut start = Starter { connection, updates, state: self.state, watchers: &mut watchers };
        start.watch::<Services>(served.clone());
        start.watch::<EndpointSlices>(served);
        start.watch::<OwnNode>(own);
        drop(start);
        while watchers.join_next().await.is_some() {}
        Ok(())
    }
}

struct Starter<'a> {
    connection: Arc<Connection>,
    updates: mpsc::Sender<Update>,
    state: SourceState,
    watchers: &'a mut JoinSet<()>,
}

impl Starter<'_> {
    fn watch<W: Watched>(&mut self, selection: Selection) {
        let watcher: Watcher<W> =
            Watcher::new(Arc::clone(&self.connection), selection, self.updates.clone(), self.state.clone());
        self.watchers.spawn(watcher.run());
    }
}
