//! Objects sent to a real API server to see what it says of them.

use anyhow::{Context as _, Result, anyhow};
use kube::Client;
use serde_json::Value;

/// `/apis/apps/v1/namespaces/kube-system/daemonsets` and the like.
fn collection(object: &Value) -> Result<String> {
    let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str);
    let version = text("/apiVersion").context("apiVersion is missing")?;
    let kind = text("/kind").context("kind is missing")?;
    let (plural, namespaced) = match kind {
        "ServiceAccount" => ("serviceaccounts", true),
        "ConfigMap" => ("configmaps", true),
        "DaemonSet" => ("daemonsets", true),
        "Pod" => ("pods", true),
        "PodMonitor" => ("podmonitors", true),
        "PrometheusRule" => ("prometheusrules", true),
        "ClusterRoleBinding" => ("clusterrolebindings", false),
        "CustomResourceDefinition" => ("customresourcedefinitions", false),
        other => return Err(anyhow!("kind {other} is none that deploy/ has")),
    };
    let root = if version.contains('/') { format!("/apis/{version}") } else { format!("/api/{version}") };
    Ok(if namespaced {
        format!("{root}/namespaces/{}/{plural}", text("/metadata/namespace").context("no namespace")?)
    } else {
        format!("{root}/{plural}")
    })
}

/// What the API server would store: everything is checked, unknown fields and duplicates too, nothing is kept.
pub async fn dry_run(client: &Client, object: &Value) -> Result<Value> {
    create(client, object, "?dryRun=All&fieldValidation=Strict").await
}

/// Creates the object for good.
pub async fn store(client: &Client, object: &Value) -> Result<Value> {
    create(client, object, "").await
}

async fn create(client: &Client, object: &Value, query: &str) -> Result<Value> {
    let uri = format!("{}{query}", collection(object)?);
    post(client, &uri, object).await.with_context(|| object["metadata"]["name"].to_string())
}

pub async fn post(client: &Client, uri: &str, body: &Value) -> Result<Value> {
    let request = http::Request::post(uri).header(http::header::CONTENT_TYPE, "application/json");
    let request = request.body(serde_json::to_vec(body)?)?;
    client.request(request).await.with_context(|| format!("POST {uri}"))
}

/// A strategic merge patch, as `kubectl patch` sends.
pub async fn patch(client: &Client, object: &Value, patch: &Value) -> Result<Value> {
    let name = object["metadata"]["name"].as_str().context("metadata.name is missing")?;
    let uri = format!("{}/{name}?fieldValidation=Strict", collection(object)?);
    let request = http::Request::patch(&uri);
    let request = request.header(http::header::CONTENT_TYPE, "application/strategic-merge-patch+json");
    let request = request.body(serde_json::to_vec(patch)?)?;
    client.request(request).await.with_context(|| format!("patching {uri}"))
}

pub async fn get(client: &Client, path: &str) -> Result<Value> {
    let request = http::Request::get(path).body(Vec::new())?;
    client.request(request).await.with_context(|| path.to_owned())
}
