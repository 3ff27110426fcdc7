//! The world that the scenarios share: the API server, a client of it, and a runtime.

use std::net::Ipv4Addr;

use anyhow::{Context, Result};
use control_plane::{
    ApiServer, Identity, Options, Relay,
    binaries::{self, Program},
    objects,
};
use kube::Client;
use scenario::Started;
use serde_json::Value;
use tempfile::TempDir;
use tokio::{runtime::Runtime, task::JoinHandle};

/// Identity that has only the rights that a scenario grants.
pub(crate) const LIMITED: Identity = Identity { name: "limited", user: "limited", group: "" };

pub(crate) struct World {
    // These are dropped in this order: first what talks to the server, then the server, and last
    // its files.
    runtime: Runtime,
    pub(crate) server: ApiServer,
    pub(crate) directory: TempDir,
    client: Client,
    namespace: String,
}

impl World {
    /// Starts the API server. Returns what this machine lacks, if so.
    pub(crate) fn start() -> Result<Started<Self>> {
        if let Some(reason) = binaries::provide(&[Program::Etcd, Program::KubeApiServer])? {
            return Ok(Err(reason));
        }
        // The errors here are intended, so the log is only for people who ask for it with RUST_LOG.
        if let Ok(filter) = tracing_subscriber::EnvFilter::try_from_default_env() {
            tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
        }
        let directory = TempDir::new()?;
        let options = Options { identities: vec![LIMITED], ..Options::default() };
        let server = ApiServer::start_with(directory.path(), options)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .context("starting a runtime")?;
        let client = runtime.block_on(server.client())?;
        Ok(Ok(Self { runtime, server, directory, client, namespace: String::new() }))
    }

    /// Gives the next scenario a namespace of its own, named after it.
    pub(crate) fn enter(&mut self, scenario: &str) -> Result<()> {
        self.namespace = scenario.replace('_', "-").chars().take(60).collect::<String>();
        self.namespace.truncate(self.namespace.trim_end_matches('-').len());
        let namespace = objects::namespace(&self.namespace);
        self.block_on(objects::apply(&self.client, &namespace))
    }

    pub(crate) fn namespace(&self) -> &str {
        &self.namespace
    }

    pub(crate) fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    /// Starts a relay to the API server, on a port of the loopback.
    pub(crate) fn relay(&self) -> Result<Relay> {
        let listen = (Ipv4Addr::LOCALHOST, 0).into();
        self.block_on(Relay::start(listen, self.server.socket_address()))
    }

    pub(crate) fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        self.runtime.spawn(future)
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// Makes a new client. It must be called after the server's certificates or tokens have been
    /// replaced.
    pub(crate) fn renew_client(&mut self) -> Result<()> {
        self.client = self.block_on(self.server.client())?;
        Ok(())
    }

    pub(crate) fn service(&self, name: &str) -> Value {
        objects::service(&self.namespace, name, 80)
    }

    /// Makes a slice with the endpoints 10.0.0.x, which have these last bytes.
    pub(crate) fn slice(&self, name: &str, service: &str, endpoints: &[u8]) -> Value {
        let addresses: Vec<_> = endpoints.iter().map(|last| [10, 0, 0, *last].into()).collect();
        objects::endpoint_slice(&self.namespace, name, service, &addresses, 8080)
    }

    pub(crate) fn apply(&self, object: &Value) -> Result<()> {
        self.block_on(objects::apply(&self.client, object))
    }

    pub(crate) fn create(&self, object: &Value) -> Result<()> {
        self.block_on(objects::create(&self.client, object))
    }

    pub(crate) fn merge(&self, object: &Value, patch: &Value) -> Result<()> {
        self.block_on(objects::merge(&self.client, object, patch))
    }

    pub(crate) fn delete(&self, object: &Value) -> Result<()> {
        self.block_on(objects::delete(&self.client, object))
    }

    /// Returns the object that the API server has at this path.
    pub(crate) fn get(&self, path: &str) -> Result<Value> {
        self.block_on(objects::get(&self.client, path))
    }

    /// Prints a measurement for people.
    pub(crate) fn note(&self, note: String) {
        eprintln!("measured: {note}");
    }
}
