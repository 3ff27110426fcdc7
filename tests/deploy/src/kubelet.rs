//! Work that a kubelet does for a pod of its node, before and while a container runtime runs it.

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, SocketAddr},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use control_plane::objects::requested_token;
use kube::Client;
use lab::http;
use serde_json::{Value, json};

use super::{api, node::NodeFiles};

/// Path of the API server's own Service.
pub const API_SERVICE: &str = "/api/v1/namespaces/default/services/kubernetes";

/// Returns where on the node each volume of an admitted pod is. Volumes that have to be written are
/// below `folder`.
pub async fn volumes(
    client: &Client,
    pod: &Value,
    node: &mut NodeFiles,
    folder: &Path,
) -> Result<BTreeMap<String, PathBuf>> {
    let mut volumes = BTreeMap::new();
    for volume in pod["spec"]["volumes"].as_array().into_iter().flatten() {
        let name = volume["name"].as_str().context("a volume without a name")?;
        let at = folder.join(name);
        let path = provide(client, pod, volume, node, &at).await.with_context(|| format!("volume {name}"))?;
        volumes.insert(name.to_owned(), path);
    }
    Ok(volumes)
}

/// Returns the environment of a container.
pub async fn environment(
    client: &Client,
    pod: &Value,
    container: &Value,
) -> Result<BTreeMap<String, String>> {
    let mut environment = services(client, pod).await?;
    for variable in container["env"].as_array().into_iter().flatten() {
        let name = variable["name"].as_str().context("a variable without a name")?;
        let value = match variable["valueFrom"]["fieldRef"]["fieldPath"].as_str() {
            Some(path) => pod_field(pod, path)?,
            None => variable["value"].as_str().with_context(|| format!("no value: {variable}"))?.to_owned(),
        };
        environment.insert(name.to_owned(), value);
    }
    Ok(environment)
}

fn pod_field(pod: &Value, path: &str) -> Result<String> {
    let value = pod.pointer(&format!("/{}", path.replace('.', "/"))).and_then(Value::as_str);
    Ok(value.with_context(|| format!("the pod has no {path}"))?.to_owned())
}

/// Returns the variables by which each pod finds the API server, with service links or without.
async fn services(client: &Client, pod: &Value) -> Result<BTreeMap<String, String>> {
    let service = api::get(client, API_SERVICE).await?;
    let address = service["spec"]["clusterIP"].as_str().context("Service kubernetes has no address")?;
    let port = &service["spec"]["ports"][0]["port"];
    ensure!(pod["spec"]["enableServiceLinks"] == true, "service links are off");
    let variables = [
        ("KUBERNETES_SERVICE_HOST", address.to_owned()),
        ("KUBERNETES_SERVICE_PORT", port.to_string()),
        ("KUBERNETES_SERVICE_PORT_HTTPS", port.to_string()),
        ("KUBERNETES_PORT", format!("tcp://{address}:{port}")),
    ];
    Ok(variables.map(|(name, value)| (name.to_owned(), value)).into())
}

async fn provide(
    client: &Client,
    pod: &Value,
    volume: &Value,
    node: &mut NodeFiles,
    at: &Path,
) -> Result<PathBuf> {
    let namespace = pod["metadata"]["namespace"].as_str().context("metadata.namespace")?;
    let config_map = async |source: &Value| -> Result<BTreeMap<String, String>> {
        let name = source["name"].as_str().context("a ConfigMap without a name")?;
        let path = format!("/api/v1/namespaces/{namespace}/configmaps/{name}");
        let found = api::get(client, &path).await?;
        let content: BTreeMap<String, String> = serde_json::from_value(found["data"].clone())?;
        let Some(items) = source["items"].as_array() else { return Ok(content) };
        let chosen = items.iter().map(|item| {
            let (key, path) =
                (item["key"].as_str().unwrap_or_default(), item["path"].as_str().unwrap_or_default());
            Some((path.to_owned(), content.get(key)?.clone()))
        });
        chosen.collect::<Option<_>>().with_context(|| format!("{name} lacks one of {items:?}"))
    };
    if let Some(path) = volume["hostPath"]["path"].as_str() {
        return node.host_path(path, volume["hostPath"]["type"].as_str().unwrap_or_default());
    }
    if volume["emptyDir"].is_object() {
        ensure!(volume["emptyDir"]["medium"] == "Memory", "an emptyDir that is not in memory");
        fs::create_dir_all(at).with_context(|| format!("making {}", at.display()))?;
        return node.mount_memory(at).map(|()| at.to_owned());
    }
    let mut files = BTreeMap::new();
    if volume["configMap"].is_object() {
        files = config_map(&volume["configMap"]).await?;
    } else {
        let sources = volume["projected"]["sources"].as_array().context("a volume of another kind")?;
        for source in sources {
            if source["configMap"].is_object() {
                files.extend(config_map(&source["configMap"]).await?);
            } else if source["serviceAccountToken"].is_object() {
                let asked = &source["serviceAccountToken"];
                let path = asked["path"].as_str().context("serviceAccountToken.path")?;
                files.insert(path.to_owned(), token(client, pod, asked).await?);
            } else {
                for item in source["downwardAPI"]["items"].as_array().context("another projection")? {
                    let path = item["path"].as_str().context("downwardAPI.items.path")?;
                    let field = item["fieldRef"]["fieldPath"].as_str().context("fieldRef.fieldPath")?;
                    files.insert(path.to_owned(), pod_field(pod, field)?);
                }
            }
        }
    }
    write_atomically(at, &files)?;
    Ok(at.to_owned())
}

/// Returns a token that is bound to the pod, as the kubelet asks for it.
async fn token(client: &Client, pod: &Value, projection: &Value) -> Result<String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let metadata = &pod["metadata"];
    let spec = json!({
        "audiences": [],
        "expirationSeconds": projection["expirationSeconds"],
        "boundObjectRef": {
            "kind": "Pod", "apiVersion": "v1", "name": metadata["name"], "uid": metadata["uid"],
        },
    });
    let (namespace, account) = (text(&metadata["namespace"]), text(&pod["spec"]["serviceAccountName"]));
    requested_token(client, &namespace, &account, spec).await
}

/// Writes files as volumes look that may change: links through `..data` to a folder of this
/// version.
fn write_atomically(at: &Path, files: &BTreeMap<String, String>) -> Result<()> {
    const VERSION: &str = "..2026_01_02_03_04_05.000000001";
    let write = || -> std::io::Result<()> {
        fs::create_dir_all(at.join(VERSION))?;
        symlink(VERSION, at.join("..data"))?;
        for (name, content) in files {
            fs::write(at.join(VERSION).join(name), content)?;
            symlink(Path::new("..data").join(name), at.join(name))?;
        }
        Ok(())
    };
    write().with_context(|| format!("writing the volume {}", at.display()))
}

/// Probe of a container.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Probe {
    address: SocketAddr,
    path: String,
    timeout: Duration,
    /// Time for which the probe may fail in a row.
    pub patience: Duration,
}

impl Probe {
    /// Returns a probe of a container, or `None` if the container has no such probe. The kubelet
    /// sends it to `pod_address`, which is the node's for a pod on the host network.
    pub fn of(container: &Value, name: &str, pod_address: IpAddr) -> Result<Option<Self>> {
        let probe = &container[name];
        if probe.is_null() {
            return Ok(None);
        }
        let asked = &probe["httpGet"];
        let seconds = |field: &str| probe[field].as_u64().with_context(|| format!("{name}.{field}"));
        ensure!(asked["scheme"] == "HTTP" && asked["host"].is_null(), "{name}: {asked}");
        ensure!(asked["httpHeaders"].is_null() && probe["initialDelaySeconds"].is_null(), "{name}: {probe}");
        let port = asked["port"].as_u64().and_then(|port| u16::try_from(port).ok());
        Ok(Some(Self {
            address: SocketAddr::new(pod_address, port.with_context(|| format!("{name}: {asked}"))?),
            path: asked["path"].as_str().with_context(|| format!("{name}.httpGet.path"))?.to_owned(),
            timeout: Duration::from_secs(seconds("timeoutSeconds")?),
            patience: Duration::from_secs(seconds("periodSeconds")? * seconds("failureThreshold")?),
        }))
    }

    /// Asks once. An error says what `kubectl describe` would show.
    pub fn ask(&self) -> Result<()> {
        let Self { address, path, timeout, .. } = self;
        match http::get(*address, path, *timeout)? {
            (200..=399, _) => Ok(()),
            (status, body) => bail!("{path}: {status} {}", String::from_utf8_lossy(&body)),
        }
    }
}
