//! Objects as JSON, and requests that write them to the API server.

use std::{
    net::{IpAddr, Ipv4Addr},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use kube::{
    Client, Resource as _,
    core::{ApiResource, DynamicObject, GroupVersionKind},
};
use serde_json::{Value, json};

/// Name by which `managedFields` shows who has changed what.
const FIELD_MANAGER: &str = "control-plane";

/// Makes a ClusterIP Service with one TCP port named `main`.
pub fn service(namespace: &str, name: &str, port: u16) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"ports": [{"name": "main", "protocol": "TCP", "port": port, "targetPort": port}]},
    })
}

/// Makes a slice of `service` with ready endpoints, all of one family, and one TCP port named
/// `main`.
pub fn endpoint_slice(namespace: &str, name: &str, service: &str, addresses: &[IpAddr], port: u16) -> Value {
    let family = if addresses.iter().any(IpAddr::is_ipv6) { "IPv6" } else { "IPv4" };
    let endpoints: Vec<Value> = addresses
        .iter()
        .map(|address| json!({"addresses": [address.to_string()], "conditions": {"ready": true}}))
        .collect();
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "namespace": namespace,
            "name": name,
            "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": family,
        "endpoints": endpoints,
        "ports": [{"name": "main", "protocol": "TCP", "port": port}],
    })
}

pub fn namespace(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
}

pub fn service_account(namespace: &str, name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"namespace": namespace, "name": name}})
}

const RBAC: &str = "rbac.authorization.k8s.io";

/// Makes a ClusterRole. Each rule has an API group, a plural and verbs.
pub fn cluster_role(name: &str, rules: &[(&str, &str, &[&str])]) -> Value {
    let rule = |(group, plural, verbs): &(&str, &str, &[&str])| json!({"apiGroups": [group], "resources": [plural], "verbs": verbs});
    json!({
        "apiVersion": format!("{RBAC}/v1"), "kind": "ClusterRole", "metadata": {"name": name},
        "rules": rules.iter().map(rule).collect::<Vec<_>>(),
    })
}

/// User or account to which a role is bound.
#[derive(Clone, Copy, Debug)]
pub enum Subject<'a> {
    User(&'a str),
    /// Namespace and name of a ServiceAccount.
    ServiceAccount(&'a str, &'a str),
}

pub fn cluster_role_binding(name: &str, role: &str, to: Subject<'_>) -> Value {
    let subject = match to {
        Subject::User(name) => json!({"apiGroup": RBAC, "kind": "User", "name": name}),
        Subject::ServiceAccount(namespace, name) => {
            json!({"kind": "ServiceAccount", "namespace": namespace, "name": name})
        }
    };
    json!({
        "apiVersion": format!("{RBAC}/v1"), "kind": "ClusterRoleBinding", "metadata": {"name": name},
        "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": role}, "subjects": [subject],
    })
}

/// Creates the object or takes over the existing one (server-side apply). A `status` goes to the
/// object's subresource, because only that changes it.
pub async fn apply(client: &Client, object: &Value) -> Result<()> {
    let mut object = object.clone();
    let status = object.as_object_mut().and_then(|fields| fields.remove("status"));
    let path = path(&object)?;
    let uri = format!("{path}?fieldManager={FIELD_MANAGER}&force=true");
    send(client, "PATCH", &uri, Some("application/apply-patch+yaml"), &object).await?;
    if let Some(status) = status {
        let uri = format!("{path}/status");
        send(client, "PATCH", &uri, Some("application/merge-patch+json"), &json!({"status": status})).await?;
    }
    Ok(())
}

/// Creates the object. Returns an error if it exists already.
pub async fn create(client: &Client, object: &Value) -> Result<()> {
    create_with(client, object, "").await.map(drop)
}

/// Creates the object with this query, and returns what the API server has made of it.
pub async fn create_with(client: &Client, object: &Value, query: &str) -> Result<Value> {
    let path = path(object)?;
    let collection = path.rsplit_once('/').map_or("", |(collection, _)| collection);
    send(client, "POST", &format!("{collection}{query}"), Some("application/json"), object).await
}

/// Changes fields of the object that `object` names by kind and metadata, by a JSON merge patch.
pub async fn merge(client: &Client, object: &Value, patch: &Value) -> Result<()> {
    send(client, "PATCH", &path(object)?, Some("application/merge-patch+json"), patch).await.map(drop)
}

/// Deletes the object that `object` names. Returns an error if there is none.
pub async fn delete(client: &Client, object: &Value) -> Result<()> {
    send(client, "DELETE", &path(object)?, None, &Value::Null).await.map(drop)
}

/// Returns a token of this ServiceAccount that is bound to nothing else. It is valid for an hour,
/// and no longer than the account lives.
pub async fn token(client: &Client, namespace: &str, account: &str) -> Result<String> {
    let spec = json!({"audiences": [], "expirationSeconds": 3600});
    requested_token(client, namespace, account, spec).await
}

/// Returns a token of this ServiceAccount, as `spec` of a TokenRequest asks for it.
pub async fn requested_token(client: &Client, namespace: &str, account: &str, spec: Value) -> Result<String> {
    let body = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec});
    let uri = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token");
    let answer = send(client, "POST", &uri, Some("application/json"), &body).await?;
    let token = answer.pointer("/status/token").and_then(Value::as_str);
    Ok(token.context("the answer to a TokenRequest has no status.token")?.to_owned())
}

/// Returns the object that the API server has at this path.
pub async fn get(client: &Client, path: &str) -> Result<Value> {
    send(client, "GET", path, None, &Value::Null).await
}

/// Many Services, each with one slice.
#[derive(Clone, Debug)]
pub struct Bulk {
    pub namespace: String,
    pub services: usize,
    /// Number of endpoints of each slice, at most 1,000.
    pub endpoints: usize,
    /// Number of requests at a time.
    pub parallel: usize,
}

impl Bulk {
    /// Makes Services `s-0`, `s-1`, …, with slices of the same names. Addresses are in
    /// 10.128.0.0/9, and the port is 8080.
    pub fn new(namespace: &str, services: usize, endpoints: usize) -> Self {
        Self { namespace: namespace.to_owned(), services, endpoints, parallel: 400 }
    }

    pub fn service(&self, index: usize) -> Value {
        service(&self.namespace, &format!("s-{index}"), 80)
    }

    pub fn slice(&self, index: usize) -> Value {
        let addresses: Vec<IpAddr> =
            (0..self.endpoints).map(|endpoint| self.address(index, endpoint).into()).collect();
        let name = format!("s-{index}");
        endpoint_slice(&self.namespace, &name, &name, &addresses, 8080)
    }

    /// Returns the address of an endpoint. Addresses are distinct for the first 8 million
    /// endpoints.
    pub fn address(&self, service: usize, endpoint: usize) -> Ipv4Addr {
        let number = (service * self.endpoints + endpoint) % (1 << 23);
        Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 128, 0, 0)) | u32::try_from(number).unwrap_or_default())
    }

    /// Creates all of them, and the namespace. Returns how long it took.
    pub async fn create(&self, client: &Client) -> Result<Duration> {
        apply(client, &namespace(&self.namespace)).await?;
        let start = Instant::now();
        let requests = (0..self.services).flat_map(|index| [(index, false), (index, true)]);
        stream::iter(requests)
            .map(|(index, slice)| async move {
                let object = if slice { self.slice(index) } else { self.service(index) };
                create(client, &object).await.or_else(unless_there)
            })
            .buffer_unordered(self.parallel)
            .try_for_each(|()| async { Ok(()) })
            .await?;
        Ok(start.elapsed())
    }

    /// Returns the keys and values that kube-apiserver stores in etcd for Services from `first` on,
    /// and for their slices. The namespace must exist already.
    pub fn stored(&self, first: usize) -> impl Iterator<Item = (String, Value)> {
        (first..self.services).flat_map(|index| {
            let name = format!("s-{index}");
            let at = |kind: &str| format!("/registry/{kind}/{}/{name}", self.namespace);
            let address = Self::cluster_ip(index).to_string();
            let mut service = self.service(index);
            service["spec"]["clusterIP"] = json!(address);
            service["spec"]["clusterIPs"] = json!([address]);
            service["spec"]["ipFamilies"] = json!(["IPv4"]);
            service["spec"]["ipFamilyPolicy"] = json!("SingleStack");
            let parent = json!({"resource": "services", "namespace": self.namespace, "name": name});
            let allocated = json!({
                "apiVersion": "networking.k8s.io/v1",
                "kind": "IPAddress",
                "metadata": {"name": address, "labels": {
                    "ipaddress.kubernetes.io/ip-family": "IPv4",
                    "ipaddress.kubernetes.io/managed-by": "ipallocator.k8s.io",
                }},
                "spec": {"parentRef": parent},
            });
            let all = [
                (format!("/registry/ipaddresses/{address}"), allocated),
                (at("services/specs"), service),
                (at("endpointslices"), self.slice(index)),
            ];
            all.into_iter().enumerate().map(move |(kind, (key, mut object))| {
                object["metadata"]["uid"] = json!(format!("{kind:08x}-0000-4000-8000-{index:012x}"));
                object["metadata"]["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
                (key, object)
            })
        })
    }

    /// Returns a cluster IP from the half of the default range that the API server gives to
    /// Services that ask for no address.
    fn cluster_ip(index: usize) -> Ipv4Addr {
        let first = u32::from(Ipv4Addr::new(10, 104, 0, 0));
        Ipv4Addr::from(first + u32::try_from(index).unwrap_or_default())
    }
}

/// Ignores the error if the object is there. A busy API server may have done what it was asked
/// without saying so in time. The request is then sent again.
fn unless_there(error: anyhow::Error) -> Result<()> {
    match error.downcast_ref::<kube::Error>() {
        Some(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        _ => Err(error),
    }
}

/// Returns the path of an object, such as `/api/v1/namespaces/ns/services/name`.
pub fn path(object: &Value) -> Result<String> {
    const OF_NO_NAMESPACE: [&str; 6] =
        ["ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "Namespace", "Node", "ServiceCIDR"];
    let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str);
    let version = text("/apiVersion").context("apiVersion is missing")?;
    let kind = text("/kind").context("kind is missing")?;
    let name = text("/metadata/name").context("metadata.name is missing")?;
    let (group, version) = version.split_once('/').unwrap_or(("", version));
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
    let namespace = text("/metadata/namespace").unwrap_or("default");
    let namespace = (!OF_NO_NAMESPACE.contains(&kind)).then_some(namespace);
    Ok(format!("{}/{name}", DynamicObject::url_path(&resource, namespace)))
}

/// Sends one request. `content` is the type of its body, if it has one.
pub async fn send(
    client: &Client,
    method: &str,
    uri: &str,
    content: Option<&str>,
    body: &Value,
) -> Result<Value> {
    let mut request = http::Request::builder().method(method).uri(uri);
    if let Some(content) = content {
        request = request.header(http::header::CONTENT_TYPE, content);
    }
    let body = if content.is_some() { serde_json::to_vec(body)? } else { Vec::new() };
    client.request(request.body(body)?).await.with_context(|| format!("{method} {uri}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_those_of_the_api() {
        assert_eq!(path(&service("a", "b", 80)).unwrap(), "/api/v1/namespaces/a/services/b");
        assert_eq!(
            path(&endpoint_slice("a", "c", "b", &[], 80)).unwrap(),
            "/apis/discovery.k8s.io/v1/namespaces/a/endpointslices/c"
        );
        assert_eq!(path(&namespace("a")).unwrap(), "/api/v1/namespaces/a");
        let endpoints = json!({"apiVersion": "v1", "kind": "Endpoints", "metadata": {"name": "a"}});
        assert_eq!(path(&endpoints).unwrap(), "/api/v1/namespaces/default/endpoints/a");
    }

    #[test]
    fn addresses_of_a_bulk_are_distinct() {
        let bulk = Bulk::new("a", 10_000, 10);
        let all: std::collections::HashSet<Ipv4Addr> = (0..10_000)
            .flat_map(|service| (0..10).map(move |endpoint| (service, endpoint)))
            .map(|(service, endpoint)| bulk.address(service, endpoint))
            .collect();
        assert_eq!(all.len(), 100_000);
    }
}
