//! The parts of Kubernetes objects that the model keeps. They are parsed once at the edge, and
//! valid from there on.

use std::{fmt, net::IpAddr, num::NonZeroI64, sync::Arc};

use serde::{Deserialize, Serialize};

/// The namespace and name of an object.
#[derive(Clone, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub struct ObjectName {
    pub namespace: Arc<str>,
    pub name: Arc<str>,
}

impl ObjectName {
    pub fn new(namespace: impl Into<Arc<str>>, name: impl Into<Arc<str>>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub enum IpFamily {
    #[serde(rename = "IPv4")]
    Ipv4,
    #[serde(rename = "IPv6")]
    Ipv6,
}

impl IpFamily {
    pub const ALL: [Self; 2] = [Self::Ipv4, Self::Ipv6];

    pub fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::Ipv4,
            IpAddr::V6(_) => Self::Ipv6,
        }
    }

    /// Returns the name that Kubernetes uses.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ipv4 => "IPv4",
            Self::Ipv6 => "IPv6",
        }
    }
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Protocol {
    Tcp,
    Udp,
    Sctp,
}

impl Protocol {
    /// Returns the number that IANA has assigned.
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }

    /// Returns the name that Kubernetes uses.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        }
    }
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub enum TrafficPolicy {
    #[default]
    Cluster,
    Local,
}

/// The way to choose a new connection's backend.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Algorithm {
    /// Each backend is chosen at random, by its weight.
    #[default]
    Random,
    /// A hash of the connection chooses the backend, so that it leads to the same endpoint on every
    /// node.
    Maglev,
    /// Two backends are drawn at random, and the one with fewer connections for its weight is
    /// chosen.
    LeastConnection,
}

/// The way in which packets from outside reach a backend on another node.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Forwarding {
    /// Packets come from an address of this node, to which the backend answers.
    #[default]
    Snat,
    /// Packets are carried unchanged in packets of this node. The backend's node answers the
    /// client, which is direct server return.
    Dsr,
    /// TCP is forwarded like `Dsr`, UDP like `Snat`.
    Hybrid,
}

impl Forwarding {
    /// Returns the forwarding for a protocol. `Hybrid` is one or the other for each.
    #[must_use]
    pub fn of_protocol(self, protocol: Protocol) -> Self {
        match (self, protocol) {
            (Self::Hybrid, Protocol::Tcp) => Self::Dsr,
            (Self::Hybrid, Protocol::Udp | Protocol::Sctp) => Self::Snat,
            (one @ (Self::Snat | Self::Dsr), _) => one,
        }
    }
}

/// The way in which a node forwards, and what Services may ask for instead.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct NodeForwarding {
    /// The forwarding of Services that ask for nothing.
    pub by_default: Forwarding,
    /// True if a Service may ask for direct server return also where `by_default` has none. It
    /// makes the nodes of its endpoints take packets of other hosts out of the packets that carry
    /// them.
    pub allows_more: bool,
}

impl NodeForwarding {
    /// Returns `Snat` or `Dsr`, for a Service that asks for this.
    #[must_use]
    pub fn of(self, asked: Option<Forwarding>, protocol: Protocol) -> Forwarding {
        if self.refuses(asked, protocol) {
            return Forwarding::Snat;
        }
        asked.unwrap_or(self.by_default).of_protocol(protocol)
    }

    /// Returns true if the Service asks for more than the node allows.
    #[must_use]
    pub fn refuses(self, asked: Option<Forwarding>, protocol: Protocol) -> bool {
        let is_direct = |forwarding: Forwarding| forwarding.of_protocol(protocol) == Forwarding::Dsr;
        asked.is_some_and(is_direct) && !is_direct(self.by_default) && !self.allows_more
    }
}

/// The weight of an endpoint. Its share of new connections is its weight divided by the sum of all
/// endpoints' weights. An endpoint of weight 0 gets none as long as others have more.
pub type Weight = u8;

/// The weight of endpoints for which nothing else is asked.
pub const DEFAULT_WEIGHT: Weight = 1;

/// A Service that this proxy serves. It has at least one cluster IP, and is not headless,
/// ExternalName or another proxy's.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Service {
    pub name: ObjectName,
    /// The creation, in seconds since the epoch. Of two Services that claim the same frontend as
    /// the same kind, the older one wins.
    pub created: i64,
    pub ports: Vec<ServicePort>,
    /// The cluster IPs, at most one of each family.
    pub cluster_ips: Vec<IpAddr>,
    pub external_ips: Vec<IpAddr>,
    /// Load-balancer addresses with ipMode VIP.
    pub load_balancer_ips: Vec<IpAddr>,
    /// Load-balancer addresses with ipMode Proxy. Packets to them must reach the load balancer.
    pub proxied_load_balancer_ips: Vec<IpAddr>,
    pub internal_policy: TrafficPolicy,
    pub external_policy: TrafficPolicy,
    /// The length of client-IP affinity in seconds.
    pub affinity_seconds: Option<u32>,
    pub source_ranges: Vec<ipnet::IpNet>,
    pub health_check_node_port: Option<u16>,
    /// The algorithm that the Service asks for. `None` means that of the node.
    pub algorithm: Option<Algorithm>,
    /// The forwarding that the Service asks for. `None` means that of the node.
    pub forwarding: Option<Forwarding>,
}

/// This node's answer to a load balancer that sends clients only to nodes with endpoints.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct HealthCheck {
    pub service: ObjectName,
    /// The port of `spec.healthCheckNodePort`.
    pub port: u16,
    /// The number of addresses of ready endpoints on this node. Of two families the larger number
    /// counts, because pods have one address of each.
    pub local_ready: usize,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ServicePort {
    /// Empty if the Service has one unnamed port.
    pub name: Arc<str>,
    pub protocol: Protocol,
    /// The port number, which is never 0.
    pub port: u16,
    pub node_port: Option<u16>,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct EndpointSlice {
    pub name: ObjectName,
    /// The name of the Service, which is in the slice's namespace.
    pub service: Arc<str>,
    pub family: IpFamily,
    pub ports: Vec<EndpointPort>,
    pub endpoints: Vec<Endpoint>,
    /// The time at which the Pod or Service changed that made the cluster write this slice, if the
    /// cluster says so. It is in nanoseconds since the epoch. It is only measured, and nothing is
    /// served differently by it.
    pub triggered: Option<NonZeroI64>,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct EndpointPort {
    pub name: Arc<str>,
    pub protocol: Protocol,
    /// The port number, which is never 0.
    pub port: u16,
}

/// One address of a slice. Its conditions are already defaulted: ready and serving are true, and
/// terminating is false.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Endpoint {
    pub address: IpAddr,
    pub ready: bool,
    pub serving: bool,
    pub terminating: bool,
    pub weight: Weight,
    pub node: Option<Arc<str>>,
    pub hints: Option<Arc<Hints>>,
}

/// The ranges of one ServiceCIDR, from which service addresses are allocated.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ServiceCidr {
    pub name: Arc<str>,
    pub ranges: Vec<ipnet::IpNet>,
}

/// The nodes and zones that should prefer an endpoint.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub struct Hints {
    pub zones: Vec<Arc<str>>,
    pub nodes: Vec<Arc<str>>,
}

/// This proxy's own Node.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Node {
    pub name: Arc<str>,
    /// The label `topology.kubernetes.io/zone`, if it is not empty.
    pub zone: Option<Arc<str>>,
    /// The InternalIPs, then the ExternalIPs, in the order listed.
    pub addresses: Vec<IpAddr>,
    pub pod_cidrs: Vec<ipnet::IpNet>,
    pub being_deleted: bool,
    pub taints: Vec<Arc<str>>,
}
