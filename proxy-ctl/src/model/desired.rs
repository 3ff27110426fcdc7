//! What a node must serve: the model's output and every dataplane's input.

use std::{fmt, net::IpAddr, sync::Arc};

use serde::{Deserialize, Serialize};

use super::objects::{Algorithm, Forwarding, IpFamily, ObjectName, Protocol, TrafficPolicy, Weight};

/// Identity of a service port in one family.
#[derive(Clone, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub struct ServicePortName {
    pub service: ObjectName,
    /// Empty where the Service has one unnamed port.
    pub port: Arc<str>,
    pub protocol: Protocol,
    pub family: IpFamily,
}

impl fmt::Display for ServicePortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.service)?;
        if self.port.is_empty() { Ok(()) } else { write!(f, ":{}", self.port) }
    }
}

/// Everything about one service port that any dataplane needs.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct DesiredPort {
    pub name: ServicePortName,
    pub frontends: Vec<Frontend>,
    /// Frontends that the Service asks for and that are not to be served here; mostly none.
    pub unserved: Box<[UnservedFrontend]>,
    pub endpoints: Endpoints,
    pub internal_policy: TrafficPolicy,
    pub external_policy: TrafficPolicy,
    pub health_check_node_port: Option<u16>,
    /// Seconds of client-IP affinity.
    pub affinity_seconds: Option<u32>,
    /// Of this family; empty: everyone may use the load-balancer addresses.
    pub source_ranges: Vec<ipnet::IpNet>,
    /// `None`: the node's, as the next.
    pub algorithm: Option<Algorithm>,
    pub forwarding: Option<Forwarding>,
}

#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum FrontendKind {
    ClusterIp,
    NodePort,
    ExternalIp,
    LoadBalancer,
}

/// An address, port and protocol that clients dial. At any time a frontend belongs to one service port.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Frontend {
    pub kind: FrontendKind,
    /// The unspecified address of the family for a node port.
    pub address: IpAddr,
    pub port: u16,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct UnservedFrontend {
    pub frontend: Frontend,
    pub reason: UnservedReason,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub enum UnservedReason {
    /// This service port claims the same frontend, with precedence.
    OwnedBy(ServicePortName),
    /// The address is the ClusterIP of this Service, whatever ports that has.
    ClusterIpOf(ObjectName),
    /// An external address that is no destination of its own: loopback, link-local, multicast and the like.
    SpecialAddress,
    /// A load-balancer address with ipMode Proxy: packets to it must reach the load balancer.
    NotVirtual,
}

/// The endpoint choice of reference kube-proxy (`CategorizeEndpoints`), resolved for this node.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Endpoints {
    /// Every endpoint some set uses, without duplicates; local before remote, then by address and port.
    pub all: Vec<Endpoint>,
    /// Indexes into `all`. The model gives equal sets the same memory.
    pub cluster: Arc<[u32]>,
    /// For clients of the cluster IP.
    pub internal: Arc<[u32]>,
    /// For clients from outside.
    pub external: Arc<[u32]>,
    /// Some endpoint is usable somewhere in the cluster: an empty set then drops instead of refusing.
    pub any: bool,
    /// Not each is known on its own node as one for clients outside: by hints of EndpointSlices nodes may have different ones, and
    /// one may be on no node of the cluster. The same on every node.
    pub need_snat: bool,
    /// Endpoints that no set uses and that still serve: flows that they have go on.
    pub unused: Box<[Endpoint]>,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Endpoint {
    pub address: IpAddr,
    pub port: u16,
    /// On this node.
    pub local: bool,
    pub terminating: bool,
    pub weight: Weight,
}

/// Has each of these the same weight?
pub fn weigh_alike<'e>(endpoints: impl IntoIterator<Item = &'e Endpoint>) -> bool {
    let mut weights = endpoints.into_iter().map(|endpoint| endpoint.weight);
    let first = weights.next();
    weights.all(|weight| Some(weight) == first)
}

/// The service ports whose desired state is now different, each named once.
#[derive(Clone, Debug, Default)]
pub struct Changes {
    pub changed: Vec<Arc<DesiredPort>>,
    pub removed: Vec<ServicePortName>,
}

impl Changes {
    pub fn is_empty(&self) -> bool {
        self.changed.is_empty() && self.removed.is_empty()
    }
}
