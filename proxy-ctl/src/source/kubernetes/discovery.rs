//! What the API server serves: older ones lack EndpointSlices, or have them in an older version, and lack
//! ServiceCIDRs.

use std::sync::Arc;

use serde::Deserialize;
use tracing::debug;

use super::{
    connection::ApiConnection,
    failure::{Failure, FailureReason},
};
use crate::config::Encoding;

/// Where endpoints come from, best first.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum EndpointsApi {
    /// discovery.k8s.io/v1, Kubernetes 1.21 and newer.
    SlicesV1,
    /// discovery.k8s.io/v1beta1, 1.17 to 1.24.
    SlicesV1Beta1,
    /// Endpoints of core/v1, always there.
    Endpoints,
}

/// Where the ranges of service addresses come from.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum ServiceCidrApi {
    /// networking.k8s.io/v1, Kubernetes 1.33 and newer.
    V1,
    /// They are only known to the API server itself.
    Nowhere,
}

/// As much of an APIResourceList as is asked for.
#[derive(Deserialize)]
struct Resources {
    #[serde(default)]
    resources: Vec<Resource>,
}

#[derive(Deserialize)]
struct Resource {
    name: String,
}

/// The versions of an API of which one is watched.
pub(super) trait ServedApi: Copy + Eq + std::fmt::Debug + Send + Sync + 'static {
    /// The best that the API server has.
    fn ask(connection: &Arc<ApiConnection>) -> impl Future<Output = Result<Self, Failure>> + Send;
}

impl ServedApi for EndpointsApi {
    async fn ask(connection: &Arc<ApiConnection>) -> Result<Self, Failure> {
        Ok(if serves(connection, "discovery.k8s.io/v1", "endpointslices").await? {
            Self::SlicesV1
        } else if serves(connection, "discovery.k8s.io/v1beta1", "endpointslices").await? {
            Self::SlicesV1Beta1
        } else {
            Self::Endpoints
        })
    }
}

impl ServedApi for ServiceCidrApi {
    async fn ask(connection: &Arc<ApiConnection>) -> Result<Self, Failure> {
        let is_served = serves(connection, "networking.k8s.io/v1", "servicecidrs").await?;
        Ok(if is_served { Self::V1 } else { Self::Nowhere })
    }
}

/// Whether the group and version has this resource. Where RBAC does not allow the request the result is true: the list
/// will show whether it is served.
async fn serves(connection: &Arc<ApiConnection>, version: &str, resource: &str) -> Result<bool, Failure> {
    let json = Encoding::Json.media_type();
    let request =
        || http::Request::get(format!("/apis/{version}")).header(http::header::ACCEPT, json).body(Vec::new());
    match connection.ask(request).await {
        Ok(body) => has(&body, resource),
        Err(failure) if failure.reason == FailureReason::NotServed => Ok(false),
        Err(failure) if failure.reason == FailureReason::Forbidden => {
            debug!("asking for what {version} has is not allowed, trying {resource}: {failure}");
            Ok(true)
        }
        Err(failure) => Err(failure),
    }
}

fn has(body: &[u8], resource: &str) -> Result<bool, Failure> {
    let list: Resources = serde_json::from_slice(body)
        .map_err(|error| Failure::new(FailureReason::Malformed, format!("list of resources: {error}")))?;
    Ok(list.resources.iter().any(|served| served.name == resource))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As kube-apiserver 1.19 answers for discovery.k8s.io/v1beta1.
    const RECORDED: &str = r#"{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"discovery.k8s.io/v1beta1","resources":[{"name":"endpointslices","singularName":"","namespaced":true,"kind":"EndpointSlice","verbs":["create","delete","deletecollection","get","list","patch","update","watch"],"storageVersionHash":"Nx3SIv6I0mE="}]}"#;

    #[test]
    fn a_resource_is_served_if_it_is_listed() {
        assert!(has(RECORDED.as_bytes(), "endpointslices").unwrap());
        assert!(!has(RECORDED.as_bytes(), "endpoints").unwrap());
        assert_eq!(has(b"{}", "endpoints").ok(), Some(false));
        assert_eq!(has(b"<html>", "endpoints").unwrap_err().reason, FailureReason::Malformed);
    }
}
