//! What is really programmed on the node, as data, whatever the mode.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::model::{
    desired::ServicePortName,
    objects::{Protocol, TrafficPolicy},
};

#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Snapshot {
    /// By name.
    pub services: Vec<ServiceSnapshot>,
    /// By address.
    pub backends: Vec<BackendSnapshot>,
    pub node: NodeSnapshot,
    /// A mode that is asked over a socket has none.
    #[serde(skip_deserializing)]
    pub hooks: Vec<Hook>,
    /// What is left of the time for which the node serves without its controller; zero: everything passes untouched. `None`: no
    /// end.
    pub lease: Option<Duration>,
}

/// A service port as the node serves it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ServiceSnapshot {
    /// The number by which the mode knows it.
    pub id: u32,
    pub name: ServicePortName,
    pub frontends: Vec<FrontendSnapshot>,
    pub cluster: Vec<EndpointSnapshot>,
    /// For clients of the cluster IP.
    pub internal: Vec<EndpointSnapshot>,
    /// For clients from outside.
    pub external: Vec<EndpointSnapshot>,
    /// Some endpoint is usable somewhere: an empty set drops instead of refusing.
    pub any_endpoints: bool,
    pub internal_policy: TrafficPolicy,
    pub external_policy: TrafficPolicy,
    pub affinity_seconds: u32,
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub struct FrontendSnapshot {
    /// `None`: a node port.
    pub address: Option<IpAddr>,
    pub port: u16,
    /// Can be dialled from outside.
    pub external: bool,
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct EndpointSnapshot {
    pub address: SocketAddr,
    /// On this node.
    pub local: bool,
    /// Id of the backend.
    pub backend: u32,
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct BackendSnapshot {
    pub id: u32,
    pub address: SocketAddr,
    /// `None`: a number that no protocol of Kubernetes has.
    pub protocol: Option<Protocol>,
    pub local: bool,
    pub terminating: bool,
    /// How many service ports use it.
    pub uses: u32,
}

/// What is programmed of the node itself.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct NodeSnapshot {
    /// Where node ports are served; true: for the node's own processes only.
    pub node_port_addresses: Vec<(IpAddr, bool)>,
    pub masquerade_addresses: Vec<IpAddr>,
    /// Inclusive.
    pub masquerade_ports: Vec<(u16, u16)>,
    /// Cookie of the node's network namespace; 0 where the mode needs none.
    pub host_namespace: u64,
}

/// Where the node's traffic meets what is programmed.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub struct Hook {
    /// As the kernel calls it: `connect4`, `ingress`.
    pub name: String,
    /// Index; `None`: of no interface.
    pub interface: Option<u32>,
    /// How it is attached: `cgroup`, `tcx` or `clsact`.
    pub kind: &'static str,
}
