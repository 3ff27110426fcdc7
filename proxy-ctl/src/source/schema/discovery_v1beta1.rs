//! discovery.k8s.io/v1beta1: what API servers older than 1.21 have instead of v1.

use std::collections::BTreeMap;

use super::{
    discovery::{self, EndpointConditions, EndpointHints, EndpointPort},
    messages,
    meta::ObjectMeta,
};

const HOSTNAME: &str = "kubernetes.io/hostname";

messages! {
    EndpointSlice {
        (1, message, required) metadata: ObjectMeta,
        (2, message, repeated) endpoints: Vec<Endpoint>,
        (3, message, repeated) ports: Vec<EndpointPort>,
        (4, string) address_type: String,
    }

    Endpoint {
        (1, string, repeated) addresses: Vec<String>,
        (2, message, required) conditions: EndpointConditions,
        (5, btree_map = "string, string") topology: BTreeMap<String, String>,
        /// From 1.20 on; before, only the topology knew.
        (6, string, optional) node_name: Option<String>,
        (7, message, optional) hints: Option<EndpointHints>,
    }
}

impl EndpointSlice {
    /// The same in v1: the topology's host name is the node, as it was for kube-proxy.
    pub fn to_v1(&self) -> discovery::EndpointSlice {
        discovery::EndpointSlice {
            metadata: self.metadata.clone(),
            address_type: self.address_type.clone(),
            endpoints: self.endpoints.iter().map(Endpoint::to_v1).collect(),
            ports: self.ports.clone(),
        }
    }
}

impl Endpoint {
    fn to_v1(&self) -> discovery::Endpoint {
        discovery::Endpoint {
            addresses: self.addresses.clone(),
            conditions: self.conditions.clone(),
            node_name: self.node_name.clone().or_else(|| self.topology.get(HOSTNAME).cloned()),
            hints: self.hints.clone(),
        }
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
        let v1 = slice.to_v1();
        let nodes: Vec<_> = v1.endpoints.iter().map(|endpoint| endpoint.node_name.as_deref()).collect();
        assert_eq!(nodes, [Some("node-1"), Some("node-2"), None]);
        assert_eq!(v1.endpoints[0].conditions.ready, Some(true));
        assert_eq!(v1.endpoints[2].hints.as_ref().unwrap().for_zones[0].name, "z2");
        assert_eq!(v1.metadata.labels["kubernetes.io/service-name"], "web");
        assert_eq!(v1.ports[0].port, Some(8080));
    }
}
