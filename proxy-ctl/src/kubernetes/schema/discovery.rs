//! Objects of the API group discovery.k8s.io/v1.

use super::{messages, meta::ObjectMeta};

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
        (6, string, optional) node_name: Option<String>,
        (8, message, optional) hints: Option<EndpointHints>,
    }

    EndpointConditions {
        (1, bool, optional) ready: Option<bool>,
        (2, bool, optional) serving: Option<bool>,
        (3, bool, optional) terminating: Option<bool>,
    }

    EndpointHints {
        (1, message, repeated) for_zones: Vec<ForZone>,
        (2, message, repeated) for_nodes: Vec<ForNode>,
    }

    ForZone {
        (1, string) name: String,
    }

    ForNode {
        (1, string) name: String,
    }

    EndpointPort {
        (1, string, optional) name: Option<String>,
        (2, string, optional) protocol: Option<String>,
        (3, int32, optional) port: Option<i32>,
    }
}
