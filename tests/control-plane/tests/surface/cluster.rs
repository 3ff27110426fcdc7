//! The cluster that all proxies see, and the changes of it.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};
use control_plane::{
    ApiServer, Identity, Options,
    objects::{self, Subject},
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::network::{self, NODE_ADDRESS, SERVER};

pub(crate) const NODE: &str = "node-a";
/// Service whose load balancer asks at this port.
pub(crate) const CHECKED: (&str, u16) = ("checked", 32_456);
/// Identity of the proxies, with the rights that [`Cluster::grant`] gives.
const PROXY: Identity = Identity { name: "proxy-under-test", user: "proxy-under-test", group: "" };

pub(crate) struct Cluster {
    server: ApiServer,
    folder: TempDir,
}

/// Endpoint of [`CHECKED`].
#[derive(Clone, Copy)]
pub(crate) enum Endpoint {
    Here,
    Elsewhere,
    /// The endpoint is here. It terminates, and still answers.
    Leaving,
}

impl Cluster {
    /// Starts the cluster in a network of its own, see [`network::set_up`].
    pub(crate) fn start() -> Result<Self> {
        network::set_up()?;
        let folder = TempDir::new()?;
        let address = SERVER.parse().context("an address")?;
        let options = Options { address, identities: vec![PROXY], ..Options::default() };
        let server = ApiServer::start_with(&folder.path().join("control-plane"), options)?;
        let cluster = Self { server, folder };
        cluster.taint(&[])?;
        cluster.apply(&json!({
            "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "default", "name": "web"},
            "spec": {
                "type": "NodePort", "externalTrafficPolicy": "Local", "clusterIP": "10.96.7.7",
                "ports": [{"name": "main", "port": 80, "targetPort": 8080}],
            },
        }))?;
        cluster.endpoints_of_web(1, None)?;
        Ok(cluster)
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.server.kubeconfig(PROXY)
    }

    pub(crate) fn apply(&self, object: &Value) -> Result<()> {
        self.server.apply(object)
    }

    /// Sets what the proxies may list and watch, by API group and plural. They may also write
    /// events.
    pub(crate) fn grant(&self, readable: &[(&'static str, &'static str)]) -> Result<()> {
        let read =
            |(group, plural): &(&'static str, &'static str)| (*group, *plural, &["list", "watch"] as &[&str]);
        let events = ("events.k8s.io", "events", &["create", "patch"] as &[&str]);
        let rules: Vec<_> = readable.iter().map(read).chain([events]).collect();
        self.apply(&objects::cluster_role(PROXY.name, &rules))?;
        self.apply(&objects::cluster_role_binding(PROXY.name, PROXY.name, Subject::User(PROXY.user)))
    }

    /// Gives the Node these taints only.
    pub(crate) fn taint(&self, keys: &[&str]) -> Result<()> {
        let taints: Vec<Value> = keys.iter().map(|key| json!({"key": key, "effect": "NoSchedule"})).collect();
        self.apply(&json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE},
            "spec": {"podCIDR": "10.0.0.0/24", "taints": taints},
            "status": {"addresses": [{"type": "InternalIP", "address": NODE_ADDRESS}]},
        }))
    }

    /// Begins to delete the Node. A finalizer holds the deletion up.
    pub(crate) fn begin_to_delete_node(&self) -> Result<()> {
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}});
        let kept = json!({"metadata": {"finalizers": ["example.com/kept"]}});
        self.server.run(async |client| {
            objects::merge(&client, &node, &kept).await?;
            objects::delete(&client, &node).await
        })
    }

    /// Gives Service web this many endpoints, all on another node. `triggered` is the time of the
    /// change, if the slice has it.
    pub(crate) fn endpoints_of_web(&self, count: usize, triggered: Option<String>) -> Result<()> {
        let annotations =
            triggered.map(|time| json!({"endpoints.kubernetes.io/last-change-trigger-time": time}));
        let endpoints: Vec<Value> = (0..count)
            .map(|number| {
                let address = format!("10.0.{}.{}", 1 + number / 250, 1 + number % 250);
                json!({"addresses": [address], "conditions": {"ready": true}, "nodeName": "node-b"})
            })
            .collect();
        self.apply(&slice("web", annotations, &endpoints))
    }

    /// Writes a Service whose load balancer asks at this port.
    pub(crate) fn health_checked(&self, name: &str, port: u16) -> Result<()> {
        self.load_balancer(name, &json!({"externalTrafficPolicy": "Local", "healthCheckNodePort": port}))
    }

    /// Writes the Service so that its load balancer treats all nodes alike.
    pub(crate) fn not_health_checked(&self, name: &str) -> Result<()> {
        self.load_balancer(name, &json!({"externalTrafficPolicy": "Cluster"}))
    }

    fn load_balancer(&self, name: &str, policy: &Value) -> Result<()> {
        let mut service = json!({
            "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "default", "name": name},
            "spec": policy,
            "status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.1"}]}},
        });
        service["spec"]["type"] = json!("LoadBalancer");
        service["spec"]["ports"] = json!([{"name": "main", "port": 80, "targetPort": 8080}]);
        self.apply(&service)
    }

    pub(crate) fn endpoints_of_checked(&self, endpoints: &[Endpoint]) -> Result<()> {
        let endpoints: Vec<Value> = endpoints
            .iter()
            .enumerate()
            .map(|(number, endpoint)| {
                let node = if matches!(endpoint, Endpoint::Elsewhere) { "node-b" } else { NODE };
                let leaves = matches!(endpoint, Endpoint::Leaving);
                json!({
                    "addresses": [format!("10.0.9.{}", 1 + number)], "nodeName": node,
                    "conditions": {"ready": !leaves, "serving": true, "terminating": leaves},
                })
            })
            .collect();
        self.apply(&slice(CHECKED.0, None, &endpoints))
    }

    /// Returns all events that were written so far.
    pub(crate) fn events(&self) -> Result<Vec<Value>> {
        let path = "/apis/events.k8s.io/v1/namespaces/default/events?limit=500";
        let list = self.server.run(async |client| objects::get(&client, path).await)?;
        Ok(list["items"].as_array().cloned().unwrap_or_default())
    }
}

fn slice(service: &str, annotations: Option<Value>, endpoints: &[Value]) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "namespace": "default", "name": format!("{service}-1"), "annotations": annotations,
            "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": [{"name": "main", "protocol": "TCP", "port": 8080}],
    })
}

/// Returns the time a second from now, in RFC 3339.
pub(crate) fn soon() -> Result<String> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock")?.as_secs();
    let output = Command::new("date")
        .args(["-u", "+%Y-%m-%dT%H:%M:%SZ", "-d", &format!("@{}", seconds + 1)])
        .output()
        .context("starting date")?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
