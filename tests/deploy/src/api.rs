//! Requests that send objects to a real API server, to see what it says about them.

use anyhow::Result;
use control_plane::objects;
pub use control_plane::objects::get;
use kube::Client;
use serde_json::Value;

/// Returns what the API server would store. Everything is checked, including unknown fields and
/// duplicates, and nothing is kept.
pub async fn dry_run(client: &Client, object: &Value) -> Result<Value> {
    objects::create_with(client, object, "?dryRun=All&fieldValidation=Strict").await
}

/// Creates the object for good.
pub async fn store(client: &Client, object: &Value) -> Result<Value> {
    objects::create_with(client, object, "").await
}

/// Sends a strategic merge patch, as `kubectl patch` does.
pub async fn patch(client: &Client, object: &Value, patch: &Value) -> Result<Value> {
    let uri = format!("{}?fieldValidation=Strict", objects::path(object)?);
    objects::send(client, "PATCH", &uri, Some("application/strategic-merge-patch+json"), patch).await
}
