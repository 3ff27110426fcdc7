//! Objects sent to a real API server to see what it says of them.

use anyhow::Result;
use control_plane::objects;
pub use control_plane::objects::get;
use kube::Client;
use serde_json::Value;

/// What the API server would store: everything is checked, unknown fields and duplicates too, nothing is kept.
pub async fn dry_run(client: &Client, object: &Value) -> Result<Value> {
    objects::create_with(client, object, "?dryRun=All&fieldValidation=Strict").await
}

/// Creates the object for good.
pub async fn store(client: &Client, object: &Value) -> Result<Value> {
    objects::create_with(client, object, "").await
}

/// A strategic merge patch, as `kubectl patch` sends.
pub async fn patch(client: &Client, object: &Value, patch: &Value) -> Result<Value> {
    let uri = format!("{}?fieldValidation=Strict", objects::path(object)?);
    objects::send(client, "PATCH", &uri, Some("application/strategic-merge-patch+json"), patch).await
}
