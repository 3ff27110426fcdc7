//! Expected outcome of single connections, as data. The rows are kube-proxy's own tables of
//! behaviour (its packet flow tests). Each has a setting, a service, its endpoints, who dials what,
//! and who may answer.
//!
//! Policies, masquerading and refusals are those of kube-proxy in modes iptables and nftables. The
//! real kube-proxy, in the same lab, shows whether a row is right.

mod differences;
mod observe;
mod rows;

use std::{collections::BTreeSet, fmt};

pub use differences::Differences;
use lab::{
    address::{Family, NodeNumber},
    cluster::{OUTSIDE, node_name},
    objects::State,
};
pub use observe::{Observed, RowNumber, observe, publish, variants};
pub(crate) use observe::{by_client, told};
pub use rows::SCENARIOS;
use serde_json::{Value, json};

use crate::setting::Datapath;

/// Service, and what becomes of the clients that dial it.
pub struct Scenario {
    pub name: &'static str,
    pub configuration: Configuration,
    pub asks: Asks,
    pub endpoints: &'static [EndpointRow],
    pub rows: &'static [Row],
}

/// Configuration of the proxies.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Configuration {
    /// The cluster's CIDRs show which clients are pods.
    Plain,
    MasqueradeAll,
    /// Nothing distinguishes pods from other clients.
    NoDetector,
    /// Pods come from the bridge, which only node 2 has.
    Bridge,
    /// Pods come from interfaces with this prefix, which only node 1 has.
    Prefix,
    /// The node's own CIDRs show which clients are pods.
    NodeCidr,
    NodePortsOnPrimary,
    NodePortsEverywhere,
    /// Node ports are served only on addresses of pod networks: that of node 2's bridge.
    NodePortsOnBridge,
    NoLocalhostNodePorts,
}

impl Configuration {
    /// Returns the fields of the configuration file.
    pub fn fields(self) -> Value {
        let both =
            |field: &str, value: Value| json!({"iptables": {field: value}, "nftables": {field: value}});
        match self {
            Self::Plain => json!({}),
            Self::MasqueradeAll => both("masqueradeAll", true.into()),
            Self::NoDetector => json!({"clusterCIDR": ""}),
            Self::Bridge => {
                json!({"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "cni0"}})
            }
            Self::Prefix => {
                json!({"detectLocalMode": "InterfaceNamePrefix", "detectLocal": {"interfaceNamePrefix": "cali"}})
            }
            Self::NodeCidr => json!({"detectLocalMode": "NodeCIDR"}),
            Self::NodePortsOnPrimary => json!({"nodePortAddresses": ["primary"]}),
            Self::NodePortsEverywhere => json!({"nodePortAddresses": ["0.0.0.0/0", "::/0"]}),
            Self::NodePortsOnBridge => {
                json!({"nodePortAddresses": [lab::address::POD_RANGE4, lab::address::POD_RANGE6]})
            }
            Self::NoLocalhostNodePorts => json!({"iptables": {"localhostNodePorts": false}}),
        }
    }
}

/// Wishes of the service. Each service has a cluster IP, a node port, load-balancer addresses and
/// external IPs.
pub struct Asks {
    pub internal_local: bool,
    pub external_local: bool,
    pub affinity: bool,
    pub source_ranges: &'static [&'static str],
    /// True for `ipMode: Proxy`: the load balancer itself serves its addresses.
    pub proxied: bool,
}

/// Endpoint with its conditions and hints.
pub struct EndpointRow {
    pub pod: &'static str,
    pub state: State,
    pub zones: &'static [&'static str],
    pub nodes: &'static [&'static str],
}

/// One kind of connection.
pub struct Row {
    pub client: Client,
    pub destination: Destination,
    /// Family of the connection. `None` stands for both.
    pub family: Option<Family>,
    pub expected: Expected,
    /// Expected outcomes of modes in which kube-proxy differs.
    pub elsewhere: &'static [(Datapath, Expected)],
}

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Client {
    Pod(NodeNumber),
    Node(NodeNumber),
    Outside,
}

impl Client {
    pub fn agent(self) -> String {
        match self {
            Self::Pod(node) => format!("client-{node}"),
            Self::Node(node) => node_name(node),
            Self::Outside => OUTSIDE.to_owned(),
        }
    }
}

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Destination {
    ClusterIp,
    /// The cluster IP with a port that the service does not have.
    UndefinedPort,
    /// The node port on the node's primary address.
    NodePort(NodeNumber),
    /// The node port on the address of node 2's bridge.
    NodePortOnBridge,
    NodePortOnLoopback,
    /// The load-balancer address that the client outside sends to this node.
    LoadBalancer(NodeNumber),
    ExternalIp(NodeNumber),
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Expected {
    /// Each of these servers answers, and nobody else.
    Answered(&'static [&'static str], Source),
    /// One of these servers answers, always the same.
    Sticks(&'static [&'static str], Source),
    Refused,
    /// The connection is neither answered nor refused. It is dropped, or forwarded to where nobody
    /// is.
    Dropped,
}

/// Address that the endpoint sees.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Source {
    Client,
    /// An address of a node. A client on a node has such an address itself.
    Node,
}

/// Outcome of the connections of a row, of one protocol and family.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Found {
    /// These servers answered, each of which saw such an address.
    Answered(BTreeSet<(String, Source)>),
    Refused,
    Dropped,
    /// The client got EPERM, which a local process gets for packets that netfilter refuses or
    /// drops.
    NotPermitted,
    Other(String),
}

impl Row {
    /// Returns the outcome that this datapath must have.
    pub fn expected(&self, datapath: Datapath) -> Expected {
        let other = self.elsewhere.iter().find(|(other, _)| *other == datapath);
        other.map_or(self.expected, |(_, expected)| *expected)
    }
}

impl Expected {
    pub fn is(&self, found: &Found) -> bool {
        match (self, found) {
            (Self::Answered(_, source) | Self::Sticks(_, source), Found::Answered(by)) => {
                self.reaches(&names(by)) && sources(by).into_iter().eq([*source])
            }
            (Self::Refused, Found::Refused | Found::NotPermitted)
            | (Self::Dropped, Found::Dropped | Found::NotPermitted) => true,
            (
                Self::Answered(..) | Self::Sticks(..) | Self::Refused | Self::Dropped,
                Found::Answered(..) | Found::Refused | Found::Dropped | Found::NotPermitted | Found::Other(_),
            ) => false,
        }
    }

    /// Returns true if these are the endpoints that must answer.
    fn reaches(&self, names: &BTreeSet<&str>) -> bool {
        match self {
            Self::Answered(by, _) => names.iter().eq(by.iter()),
            Self::Sticks(by, _) => names.len() == 1 && names.iter().all(|name| by.contains(name)),
            Self::Refused | Self::Dropped => false,
        }
    }

    /// Returns the difference in words that explanations match. If the right endpoints answered, it
    /// is only about the address that they saw.
    pub fn difference(&self, found: &Found) -> String {
        match (self, found) {
            (Self::Answered(_, source) | Self::Sticks(_, source), Found::Answered(by))
                if self.reaches(&names(by)) =>
            {
                let sources: Vec<String> = sources(by).iter().map(Source::to_string).collect();
                format!("address: expected {source}, found {}", sources.join(" and "))
            }
            _ => format!("expected {self}, found {found}"),
        }
    }

    /// Returns how many connections are made. They meet each of two endpoints but for a chance of
    /// 2^-33, which is one in eight million for the thousand of such rows of a run. If only one
    /// endpoint is to answer, a second one stays unseen with a chance of one in a hundred.
    pub(crate) const fn connections(&self) -> u32 {
        match self {
            Self::Answered([_], _) => 8,
            Self::Refused | Self::Dropped => 3,
            Self::Answered([_, _], _) => 34,
            Self::Answered(..) => 60,
            Self::Sticks(..) => 40,
        }
    }
}

/// Returns the names of the servers that answered.
fn names(by: &BTreeSet<(String, Source)>) -> BTreeSet<&str> {
    by.iter().map(|(name, _)| name.as_str()).collect()
}

fn sources(by: &BTreeSet<(String, Source)>) -> BTreeSet<Source> {
    by.iter().map(|(_, source)| *source).collect()
}

impl fmt::Display for Client {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(node) => write!(formatter, "pod on node {node}"),
            Self::Node(node) => write!(formatter, "node {node}"),
            Self::Outside => formatter.write_str("outside"),
        }
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ClusterIp => formatter.write_str("cluster IP"),
            Self::UndefinedPort => formatter.write_str("another port of the cluster IP"),
            Self::NodePort(node) => write!(formatter, "node port of node {node}"),
            Self::NodePortOnBridge => formatter.write_str("node port on the bridge's address"),
            Self::NodePortOnLoopback => formatter.write_str("node port on loopback"),
            Self::LoadBalancer(node) => write!(formatter, "load balancer by node {node}"),
            Self::ExternalIp(node) => write!(formatter, "external IP by node {node}"),
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} to {}", self.client, self.destination)?;
        self.family.map_or(Ok(()), |family| write!(formatter, ", {family}"))
    }
}

impl fmt::Display for Source {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Client => "as itself",
            Self::Node => "as a node",
        })
    }
}

impl fmt::Display for Expected {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Answered(by, source) => write!(formatter, "{} {source}", by.join("+")),
            Self::Sticks(by, source) => write!(formatter, "one of {} {source}", by.join("+")),
            Self::Refused => formatter.write_str("refused"),
            Self::Dropped => formatter.write_str("dropped"),
        }
    }
}

impl fmt::Display for Found {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Answered(by) => {
                let sources: Vec<String> = sources(by).iter().map(Source::to_string).collect();
                write!(formatter, "{} {}", Vec::from_iter(names(by)).join("+"), sources.join(" and "))
            }
            Self::Refused => formatter.write_str("refused"),
            Self::Dropped => formatter.write_str("dropped"),
            Self::NotPermitted => formatter.write_str("EPERM"),
            Self::Other(text) => formatter.write_str(text),
        }
    }
}
