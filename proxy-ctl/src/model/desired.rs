//! The desired state of a node: the model's output and every dataplane's input.

use std::{fmt, net::IpAddr, sync::Arc};

use serde::{Deserialize, Serialize};

use super::objects::{Algorithm, Forwarding, IpFamily, ObjectName, Protocol, TrafficPolicy, Weight};

/// The identity of a service port, which has one family.
#[derive(Clone, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub struct ServicePortName {
    pub service: ObjectName,
    /// Empty if the Service has one unnamed port.
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
    /// Frontends that the Service asks for and that are not to be served here. There are usually
    /// none.
    pub unserved: Box<[UnservedFrontend]>,
    pub endpoints: Endpoints,
    pub internal_policy: TrafficPolicy,
    pub external_policy: TrafficPolicy,
    pub health_check_node_port: Option<u16>,
    /// The time of client-IP affinity in seconds.
    pub affinity_seconds: Option<u32>,
    /// The source ranges of this family. If there are none, everyone may use the load-balancer
    /// addresses.
    pub source_ranges: Vec<ipnet::IpNet>,
    /// The algorithm that the Service asks for. `None` means that of the node.
    pub algorithm: Option<Algorithm>,
    /// The forwarding that the Service asks for. `None` means that of the node.
    pub forwarding: Option<Forwarding>,
}

#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum FrontendKind {
    ClusterIp,
    NodePort,
    ExternalIp,
    LoadBalancer,
}

/// An address and port that clients dial by the protocol of the service port. At any time a
/// frontend belongs to one service port.
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
    /// The external address cannot be a Service's: it is loopback, link-local, multicast or the
    /// like.
    SpecialAddress,
    /// The load-balancer address has ipMode Proxy, so packets to it must reach the load balancer.
    NotVirtual,
}

/// The endpoints that kube-proxy's `CategorizeEndpoints` chooses for this node.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Endpoints {
    /// Every endpoint that some set uses, without duplicates. Local ones come first, then the order
    /// is by address and port.
    pub all: Vec<Endpoint>,
    /// The set for scope cluster, as indexes into `all`. The model gives equal sets the same
    /// memory.
    pub cluster: Arc<[u32]>,
    /// The set for clients of the cluster IP.
    pub internal: Arc<[u32]>,
    /// The set for clients from outside.
    pub external: Arc<[u32]>,
    /// True if some endpoint is usable somewhere in the cluster. An empty set then drops instead of
    /// refusing.
    pub any: bool,
    /// True if packets of clients outside need SNAT, because some endpoint is perhaps not used for
    /// such clients on its own node. By hints of EndpointSlices nodes may use different endpoints,
    /// and an endpoint may be on no node of the cluster. The value is the same on every node.
    pub need_snat: bool,
    /// Endpoints that no set uses and that still serve. Their flows go on.
    pub unused: Box<[Endpoint]>,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Endpoint {
    pub address: IpAddr,
    pub port: u16,
    /// True if the endpoint is on this node.
    pub local: bool,
    pub terminating: bool,
    pub weight: Weight,
}

/// Returns true if all of these have the same weight.
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
