//! What the model keeps of Kubernetes objects: parsed once at the edge, true from there on.

use std::{fmt, net::IpAddr, num::NonZeroI64, sync::Arc};

use serde::{Deserialize, Serialize};

/// Namespace and name of an object.
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

    /// As Kubernetes writes it.
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
    /// IANA number.
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }

    /// As Kubernetes writes it.
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

/// How a new connection's backend is chosen.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Algorithm {
    /// Each by its weight.
    #[default]
    Random,
    /// By a hash of the connection that leads to the same endpoint on every node.
    Maglev,
    /// Of two that are drawn at random, the one with fewer connections for its weight.
    LeastConnection,
}

/// How packets from outside reach a backend on another node.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Forwarding {
    /// From an address of this node, to which the backend answers.
    #[default]
    Snat,
    /// As they are, in packets of this node. The backend's node answers the client: direct server return.
    Dsr,
    /// TCP as `Dsr`, UDP as `Snat`.
    Hybrid,
}

impl Forwarding {
    /// `Hybrid` is one or the other for each protocol.
    #[must_use]
    pub fn of_protocol(self, protocol: Protocol) -> Self {
        match (self, protocol) {
            (Self::Hybrid, Protocol::Tcp) => Self::Dsr,
            (Self::Hybrid, Protocol::Udp | Protocol::Sctp) => Self::Snat,
            (one @ (Self::Snat | Self::Dsr), _) => one,
        }
    }
}

/// How a node forwards, and what Services may ask for instead.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct NodeForwarding {
    /// Of Services that ask for nothing.
    pub by_default: Forwarding,
    /// A Service may ask for direct server return also where `by_default` has none. It makes the
    /// nodes of its endpoints take packets of other hosts out of the packets that carry them.
    pub allows_more: bool,
}

impl NodeForwarding {
    /// `Snat` or `Dsr`, for a Service that asks for this.
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

/// Of new connections an endpoint gets as many as its weight is of all endpoints' sum. 0: none, as long as others have more.
pub type Weight = u8;

/// Where nothing else is asked for.
pub const DEFAULT_WEIGHT: Weight = 1;

/// A Service that this proxy serves: has at least one cluster IP; not headless, not ExternalName, not
/// another proxy's.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Service {
    pub name: ObjectName,
    /// Seconds since the epoch; decides between two services that claim the same frontend as of the same kind: older wins.
    pub created: i64,
    pub ports: Vec<ServicePort>,
    /// At most one of each family.
    pub cluster_ips: Vec<IpAddr>,
    pub external_ips: Vec<IpAddr>,
    /// Load-balancer addresses with ipMode VIP.
    pub load_balancer_ips: Vec<IpAddr>,
    /// Load-balancer addresses with ipMode Proxy: packets to them must reach the load balancer.
    pub proxied_load_balancer_ips: Vec<IpAddr>,
    pub internal_policy: TrafficPolicy,
    pub external_policy: TrafficPolicy,
    /// Length of client-IP affinity in seconds.
    pub affinity_seconds: Option<u32>,
    pub source_ranges: Vec<ipnet::IpNet>,
    pub health_check_node_port: Option<u16>,
    /// `None`: the node's, as the next.
    pub algorithm: Option<Algorithm>,
    pub forwarding: Option<Forwarding>,
}

/// What this node answers a load balancer that sends clients only to nodes with endpoints.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct HealthCheck {
    pub service: ObjectName,
    /// `spec.healthCheckNodePort`.
    pub port: u16,
    /// Addresses of ready endpoints on this node; of two families the larger number, as pods have one of each.
    pub local_ready: usize,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ServicePort {
    /// Empty where the Service has one unnamed port.
    pub name: Arc<str>,
    pub protocol: Protocol,
    /// Never 0.
    pub port: u16,
    pub node_port: Option<u16>,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct EndpointSlice {
    pub name: ObjectName,
    /// Name of the Service, which is in the slice's namespace.
    pub service: Arc<str>,
    pub family: IpFamily,
    pub ports: Vec<EndpointPort>,
    pub endpoints: Vec<Endpoint>,
    /// When the Pod or Service changed that made the cluster write this slice, if the cluster says so: nanoseconds
    /// since the epoch. Only measured by, nothing is served differently.
    pub triggered: Option<NonZeroI64>,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct EndpointPort {
    pub name: Arc<str>,
    pub protocol: Protocol,
    /// Never 0.
    pub port: u16,
}

/// One address of a slice. Conditions are already defaulted (ready and serving: true, terminating: false).
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

/// Ranges that service addresses are allocated from.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ServiceCidr {
    pub name: Arc<str>,
    pub ranges: Vec<ipnet::IpNet>,
}

/// Nodes and zones that should prefer an endpoint.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub struct Hints {
    pub zones: Vec<Arc<str>>,
    pub nodes: Vec<Arc<str>>,
}

/// This proxy's own Node.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Node {
    pub name: Arc<str>,
    /// Label `topology.kubernetes.io/zone`, if not empty.
    pub zone: Option<Arc<str>>,
    /// InternalIPs, then ExternalIPs, in the order listed.
    pub addresses: Vec<IpAddr>,
    pub pod_cidrs: Vec<ipnet::IpNet>,
    pub being_deleted: bool,
    pub taints: Vec<Arc<str>>,
}
