//! Objects sent to a real API server to see what it says of them.

use anyhow::{Context as _, Result};
use control_plane::objects;
pub use control_plane::objects::get;
use kube::Client;
use serde_json::Value;

/// What the API server would store: everything is checked, unknown fields and duplicates too, nothing is kept.
pub async fn dry_run(client: &Client, object: &Value) -> Result<Value> {
    create(client, object, "?dryRun=All&fieldValidation=Strict").await
}

/// Creates the object for good.
pub async fn store(client: &Client, object: &Value) -> Result<Value> {
    create(client, object, "").await
}

async fn create(client: &Client, object: &Value, query: &str) -> Result<Value> {
    let path = objects::path(object)?;
    let collection = path.rsplit_once('/').map_or("", |(collection, _)| collection);
    let uri = format!("{collection}{query}");
    post(client, &uri, object).await.with_context(|| object["metadata"]["name"].to_string())
}

pub async fn post(client: &Client, uri: &str, body: &Value) -> Result<Value> {
    let request = http::Request::post(uri).header(http::header::CONTENT_TYPE, "application/json");
    let request = request.body(serde_json::to_vec(body)?)?;
    client.request(request).await.with_context(|| format!("POST {uri}"))
}

/// A strategic merge patch, as `kubectl patch` sends.
pub async fn patch(client: &Client, object: &Value, patch: &Value) -> Result<Value> {
    let uri = format!("{}?fieldValidation=Strict", objects::path(object)?);
    let request = http::Request::patch(&uri);
    let request = request.header(http::header::CONTENT_TYPE, "application/strategic-merge-patch+json");
    let request = request.body(serde_json::to_vec(patch)?)?;
    client.request(request).await.with_context(|| format!("patching {uri}"))
}
