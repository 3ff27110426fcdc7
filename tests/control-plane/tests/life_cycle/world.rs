//! The world that the scenarios share: a network namespace with a real API server in it.

use std::{
    net::SocketAddr,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use control_plane::{
    ApiServer, Options, PROXY, Relay,
    binaries::{self, Program},
    objects,
};
use kube::Client;
use nix::{
    sched::{CloneFlags, unshare},
    unistd::Uid,
};
use scenario::Started;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::until::until;

/// One of conntrack's parameters. They exist in each network namespace if the module is loaded.
const CONNTRACK: &str = "/proc/sys/net/netfilter/nf_conntrack_udp_timeout";

pub(crate) struct World {
    // These are dropped in this order: first what talks to the server, then the server, and last
    // its files.
    runtime: Runtime,
    client: Client,
    pub(crate) server: ApiServer,
    pub(crate) directory: TempDir,
    /// Reason why the kernel has no parameters of conntrack, which the configuration's section of
    /// that name sets.
    pub(crate) without_conntrack: Option<String>,
}

impl World {
    /// Moves this process to a network namespace that ends with it. It must be called before there
    /// are other threads. Returns what this machine lacks, if so.
    pub(crate) fn start() -> Result<Started<Self>> {
        if !Uid::effective().is_root() {
            return Ok(Err("needs root".to_owned()));
        }
        if let Err(error) = lab::program("proxy-ctl") {
            return Ok(Err(error.to_string()));
        }
        // Nothing can be downloaded from the network namespace.
        if let Some(reason) = binaries::provide(&[Program::Etcd, Program::KubeApiServer])? {
            return Ok(Err(reason));
        }
        let _without_it_some_scenarios_are_skipped = Program::KubeProxy.here()?;
        unshare(CloneFlags::CLONE_NEWNET).context("making a network namespace")?;
        let up = Command::new("ip").args(["link", "set", "lo", "up"]).status().context("starting ip")?;
        ensure!(up.success(), "loopback does not come up");
        let directory = TempDir::new()?;
        // Without any route, kube-apiserver does not find an address by itself.
        let options = Options { flags: vec!["--advertise-address=192.0.2.254".into()], ..Options::default() };
        let server = ApiServer::start_with(directory.path(), options)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .context("starting a runtime")?;
        let client = runtime.block_on(server.client())?;
        let world = Self { runtime, client, server, directory, without_conntrack: load_conntrack() };
        world.apply(&objects::service("default", "web", 80))?;
        let slice = objects::endpoint_slice("default", "web-1", "web", &["10.0.0.1".parse()?], 8080);
        world.apply(&slice)?;
        Ok(Ok(world))
    }

    /// Returns a kubeconfig with the rights of system:node-proxier.
    pub(crate) fn kubeconfig(&self) -> String {
        self.server.kubeconfig(PROXY).display().to_string()
    }

    pub(crate) fn apply(&self, object: &Value) -> Result<()> {
        self.runtime.block_on(objects::apply(&self.client, object))
    }

    /// Starts a relay to the API server.
    pub(crate) fn relay(&self, listen: SocketAddr) -> Result<Relay> {
        self.runtime.block_on(Relay::start(listen, self.server.socket_address()))
    }

    pub(crate) fn delete(&self, object: &Value) -> Result<()> {
        self.runtime.block_on(objects::delete(&self.client, object))
    }

    /// Returns a token of this ServiceAccount.
    pub(crate) fn token(&self, namespace: &str, account: &str) -> Result<String> {
        self.runtime.block_on(objects::token(&self.client, namespace, account))
    }

    /// Waits for an event about a Node, and returns it.
    pub(crate) fn event(&self, node: &str, reason: &str) -> Result<Value> {
        let path = "/apis/events.k8s.io/v1/namespaces/default/events?limit=500";
        let is_it = |event: &Value| {
            let about = &event["regarding"];
            about["kind"] == "Node" && about["name"] == *node && event["reason"] == *reason
        };
        let all = || -> Result<Vec<Value>> {
            let list = self.runtime.block_on(objects::get(&self.client, path))?;
            Ok(list["items"].as_array().cloned().unwrap_or_default())
        };
        let found = || Ok(all()?.into_iter().find(is_it));
        until(&format!("event {reason} about Node {node}"), found, || format!("there are {:?}", all()))
    }
}

/// Loads the module if nothing on this machine has needed it yet. Returns the reason if it is not
/// there.
fn load_conntrack() -> Option<String> {
    let there = || Path::new(CONNTRACK).exists();
    if there() {
        return None;
    }
    let output = Command::new("modprobe").arg("nf_conntrack").stdin(Stdio::null()).output();
    if there() {
        return None;
    }
    let said = match output {
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        Err(error) => format!("starting modprobe: {error}"),
    };
    Some(format!("the kernel's nf_conntrack (CONFIG_NF_CONNTRACK) is not loaded; {said}"))
}

/// Makes a Node with these addresses and pod CIDRs.
pub(crate) fn node(name: &str, addresses: &[&str], pod_cidrs: &[&str]) -> Value {
    let addresses: Vec<Value> =
        addresses.iter().map(|address| json!({"type": "InternalIP", "address": address})).collect();
    let mut node = json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name},
        "spec": {},
        "status": {"addresses": addresses},
    });
    if let Some(first) = pod_cidrs.first() {
        node["spec"] = json!({"podCIDR": first, "podCIDRs": pod_cidrs});
    }
    node
}
