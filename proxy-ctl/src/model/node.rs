//! The node in the words of the model: its interfaces, their roles, and what a mode needs to know
//! of it.

use std::{collections::BTreeSet, fmt, net::IpAddr};

use ipnet::IpNet;
use proxy_common::flow::FlowLifetimes;
use serde::{Deserialize, Serialize};

use crate::model::objects::{Algorithm, NodeForwarding};

/// The node's own addresses and interfaces, as its kernel has them.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct NodeNetwork {
    /// Every address that node ports could be served on.
    pub addresses: BTreeSet<IpAddr>,
    /// Sources of masqueraded flows, at most one address of each family.
    pub masquerade_addresses: Vec<IpAddr>,
    pub interfaces: Vec<Interface>,
    /// True if CNI's bandwidth plugin has limited a pod since the process began to follow
    /// interfaces.
    pub limits_bandwidth: bool,
}

/// The ports from `first` to `last`. `last` is not smaller than `first`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PortRange {
    pub first: u16,
    pub last: u16,
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { first, last } = self;
        if first == last { write!(f, "{first}") } else { write!(f, "{first}-{last}") }
    }
}

/// The encapsulation of packets to backends on other nodes in direct server return.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Encapsulation {
    /// A second IP header.
    #[default]
    Ip,
    /// The headers of IP, UDP and Geneve.
    Geneve,
}

/// The node as its dataplane sees it: its network, what the configuration selects of it, and the
/// cluster around it.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Host {
    /// All addresses of the node, as [`NodeNetwork::addresses`].
    pub addresses: BTreeSet<IpAddr>,
    /// The ClusterIPs among these addresses. Mode ebpf takes such an address for the node's own
    /// where it serves no service port at it.
    pub own_cluster_ips: BTreeSet<IpAddr>,
    /// Every address on which node ports are served. Loopback addresses serve the host's own
    /// processes only.
    pub node_port_addresses: BTreeSet<IpAddr>,
    /// True if `node_port_addresses` are all of the node's addresses.
    pub node_ports_everywhere: bool,
    /// Sources of masqueraded flows, at most one address of each family.
    pub masquerade_addresses: Vec<IpAddr>,
    pub interfaces: Vec<Interface>,
    /// True if CNI's bandwidth plugin has limited a pod since the process began to follow
    /// interfaces.
    pub limits_bandwidth: bool,
    pub local_traffic: LocalTraffic,
    /// Addresses of all pods of the cluster. Empty if they are not known.
    pub cluster_cidrs: Vec<IpNet>,
    /// Addresses of the pods of this node. Empty if they are not known.
    pub pod_cidrs: Vec<IpNet>,
    /// Ranges from which ClusterIPs are allocated. `None` if they are not known. The API server is
    /// asked only in modes that read them ([`crate::modes::reads_service_cidrs`]).
    pub service_cidrs: Option<Vec<IpNet>>,
    /// True if traffic to ClusterIPs is masqueraded whoever sends it.
    pub masquerade_all: bool,
    /// The bit of the fwmark that asks for masquerading, in modes that use one.
    pub masquerade_bit: u8,
    /// Ports to which netfilter masquerades while mode ebpf has flows of its own. `None`: the
    /// kernel chooses any port from 1024 on.
    pub masquerade_ports: Option<PortRange>,
    /// Connections that packets may open per second and CPU in mode ebpf. 0: any number.
    pub new_connections_per_core: u32,
    /// Lifetimes of the flows of mode ebpf.
    pub flow_lifetimes: FlowLifetimes,
    /// The algorithm of Services that name none, in mode ebpf.
    pub algorithm: Algorithm,
    pub forwarding: NodeForwarding,
    /// The encapsulation of direct server return, in mode ebpf.
    pub encapsulation: Encapsulation,
    /// True if another mode serves other ports of the same addresses. A port of a ClusterIP that
    /// this mode does not know may then be served by that mode.
    pub shares_addresses: bool,
}

/// The way to distinguish traffic of pods from traffic of outside clients.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum LocalTraffic {
    /// Traffic of pods has a source in one of these ranges. Empty: pods cannot be distinguished
    /// from other clients.
    FromCidrs(Vec<IpNet>),
    /// Traffic of pods comes in by this bridge.
    FromBridge(String),
    /// Traffic of pods comes in by an interface whose name begins with this prefix.
    FromInterfacePrefix(String),
}

impl LocalTraffic {
    /// Returns true if all packets that come in by the interface are traffic of pods, whatever
    /// their source.
    pub fn comes_in_by(&self, interface: &Interface) -> bool {
        // Packets that a bridge's port receives come in by the bridge.
        let name = interface.bridge.as_ref().unwrap_or(&interface.name);
        match self {
            Self::FromCidrs(_) => false,
            Self::FromBridge(bridge) => name == bridge,
            Self::FromInterfacePrefix(prefix) => name.starts_with(prefix),
        }
    }
}

impl Default for LocalTraffic {
    fn default() -> Self {
        Self::FromCidrs(Vec::new())
    }
}

#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Interface {
    pub index: u32,
    pub name: String,
    pub role: Role,
    pub reason: RoleReason,
    /// False if packets start at the IP header, as those of tun, wireguard and ipip do.
    pub ethernet: bool,
    pub device: Device,
    /// Length in bytes of the longest packet that the interface takes, without link header. 0: any
    /// length.
    pub mtu: u32,
    /// The address in its Ethernet frames. `None` if the interface has no such address.
    pub link_address: Option<[u8; 6]>,
    /// False for a workload interface that no packet can pass, because it or its other end is down.
    pub is_up: bool,
    /// True if VLAN devices are on this interface.
    pub has_vlans: bool,
    /// Name of the bridge whose port this interface is.
    pub bridge: Option<String>,
    /// The network namespace of its other end, as the number that the node's own namespace has for
    /// it.
    pub namespace: Option<u32>,
    /// Sources of masqueraded flows that leave by this interface, at most one address of each
    /// family. A family without one uses the address of [`Host`].
    pub masquerade_addresses: Vec<IpAddr>,
}

#[cfg(test)]
impl Interface {
    /// `eth0`, with index 2.
    pub(crate) fn uplink(device: Device) -> Self {
        Self {
            index: 2,
            name: "eth0".to_owned(),
            role: Role::Uplink,
            reason: RoleReason::DefaultRoute,
            ethernet: true,
            device,
            mtu: 1_500,
            link_address: None,
            is_up: true,
            has_vlans: false,
            bridge: None,
            namespace: None,
            masquerade_addresses: Vec::new(),
        }
    }
}

/// The kinds of interfaces that XDP distinguishes.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Device {
    /// A device of hardware or of a hypervisor. The kernel alone does not make it.
    Card,
    Vlan(Vlan),
    Bond,
    Other,
}

/// The VLAN of an interface whose packets pass another interface with a tag.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Vlan {
    /// Index of the interface below.
    pub below: u32,
    /// Ethertype of the tag.
    pub protocol: u16,
    pub id: u16,
}

/// The fact that decides an interface's role.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, thiserror::Error)]
pub enum RoleReason {
    #[error("ebpf.interfaces says so")]
    Configured,
    #[error("has an address of the Node")]
    NodeAddress,
    #[error("the default route leaves by it")]
    DefaultRoute,
    #[error("has a network of its own, which is not a network of pods")]
    OwnNetwork,
    #[error("is one end of a pair, without a network of its own")]
    Pair,
    #[error("is a tap device, without a network of its own")]
    Tap,
    #[error("is a network card or a tunnel")]
    Network,
}

/// The side to which an interface leads.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Role {
    /// The interface leads to pods.
    Workload,
    /// The interface leads to other nodes and clients outside.
    Uplink,
}
