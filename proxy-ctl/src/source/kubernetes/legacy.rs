//! discovery.k8s.io/v1beta1: what API servers older than 1.21 have instead of v1.

use std::{borrow::Cow, collections::BTreeMap};

use k8s_openapi::{
    NamespaceResourceScope, api::discovery::v1, apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::Resource;
use serde::Deserialize;

const HOSTNAME: &str = "kubernetes.io/hostname";
const ZONE: &str = "topology.kubernetes.io/zone";

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct EndpointSlice {
    #[serde(default)]
    metadata: ObjectMeta,
    #[serde(default)]
    address_type: String,
    #[serde(default)]
    endpoints: Option<Vec<Endpoint>>,
    #[serde(default)]
    ports: Option<Vec<v1::EndpointPort>>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Endpoint {
    #[serde(default)]
    addresses: Vec<String>,
    conditions: Option<v1::EndpointConditions>,
    /// From 1.20 on; before, only the topology knew.
    node_name: Option<String>,
    topology: Option<BTreeMap<String, String>>,
    hints: Option<v1::EndpointHints>,
}

impl EndpointSlice {
    /// The same in v1: the topology's host name is the node, as it was for kube-proxy.
    pub(super) fn to_v1(&self) -> v1::EndpointSlice {
        v1::EndpointSlice {
            metadata: self.metadata.clone(),
            address_type: self.address_type.clone(),
            endpoints: self.endpoints.iter().flatten().map(Endpoint::to_v1).collect(),
            ports: self.ports.clone(),
        }
    }
}

impl Endpoint {
    fn to_v1(&self) -> v1::Endpoint {
        let topology = |label: &str| self.topology.as_ref().and_then(|labels| labels.get(label)).cloned();
        v1::Endpoint {
            addresses: self.addresses.clone(),
            conditions: self.conditions.clone(),
            node_name: self.node_name.clone().or_else(|| topology(HOSTNAME)),
            zone: topology(ZONE),
            hints: self.hints.clone(),
            ..v1::Endpoint::default()
        }
    }
}

impl Resource for EndpointSlice {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        "EndpointSlice".into()
    }

    fn group((): &()) -> Cow<'_, str> {
        "discovery.k8s.io".into()
    }

    fn version((): &()) -> Cow<'_, str> {
        "v1beta1".into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        "endpointslices".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_is_named_by_itself_or_by_the_topology() {
        let slice: EndpointSlice = serde_json::from_value(serde_json::json!({
            "apiVersion": "discovery.k8s.io/v1beta1", "kind": "EndpointSlice",
            "metadata": {"namespace": "shop", "name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
            "addressType": "IPv4",
            "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
            "endpoints": [
                {
                    "addresses": ["10.0.0.1"],
                    "conditions": {"ready": true},
                    "topology": {"kubernetes.io/hostname": "node-1", "topology.kubernetes.io/zone": "z1"},
                },
                {"addresses": ["10.0.0.2"], "nodeName": "node-2", "topology": {"kubernetes.io/hostname": "other"}},
                {"addresses": ["10.0.0.3"], "hints": {"forZones": [{"name": "z2"}]}},
            ],
        }))
        .unwrap();
        assert_eq!(EndpointSlice::url_path(&(), None), "/apis/discovery.k8s.io/v1beta1/endpointslices");
        let v1 = slice.to_v1();
        let nodes: Vec<_> = v1.endpoints.iter().map(|endpoint| endpoint.node_name.as_deref()).collect();
        assert_eq!(nodes, [Some("node-1"), Some("node-2"), None]);
        assert_eq!(v1.endpoints[0].zone.as_deref(), Some("z1"));
        assert_eq!(v1.endpoints[2].hints.as_ref().unwrap().for_zones.as_ref().unwrap()[0].name, "z2");
        assert_eq!(v1.metadata.labels.unwrap()["kubernetes.io/service-name"], "web");
        assert_eq!(v1.ports.unwrap()[0].port, Some(8080));
    }

    #[test]
    fn a_slice_without_endpoints_may_say_null() {
        let text = r#"{"metadata":{"name":"a"},"addressType":"IPv4","endpoints":null,"ports":null}"#;
        let slice: EndpointSlice = serde_json::from_str(text).unwrap();
        assert!(slice.to_v1().endpoints.is_empty());
    }
}
