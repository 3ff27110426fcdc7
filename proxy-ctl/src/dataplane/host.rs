//! The node that a dataplane programs.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;
use proxy_common::flow::FlowLifetimes;

use crate::{
    config::{Encapsulation, PortRange},
    model::objects::{Algorithm, NodeForwarding},
};

/// The node's own addresses and interfaces, as its kernel has them.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct NodeNetwork {
    /// Every address that node ports could be served on.
    pub addresses: BTreeSet<IpAddr>,
    /// Source of translated flows, at most one of each family.
    pub masquerade_addresses: Vec<IpAddr>,
    pub interfaces: Vec<Interface>,
    /// CNI's bandwidth plugin has limited a pod since interfaces are followed.
    pub limits_bandwidth: bool,
}

/// The node as its dataplane sees it: its network, what the configuration selects of that, and the cluster around it.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Host {
    /// All addresses of the node, as [`NodeNetwork::addresses`].
    pub addresses: BTreeSet<IpAddr>,
    /// ClusterIPs among these. Mode ebpf takes them for the node's own where no service port is
    /// served there.
    pub own_cluster_ips: BTreeSet<IpAddr>,
    /// Every address on which node ports are served; loopback ones serve the host's own processes only.
    pub node_port_addresses: BTreeSet<IpAddr>,
    /// These are all of the node's addresses.
    pub node_ports_everywhere: bool,
    /// Source of translated flows, at most one of each family.
    pub masquerade_addresses: Vec<IpAddr>,
    pub interfaces: Vec<Interface>,
    /// CNI's bandwidth plugin has limited a pod since interfaces are followed.
    pub limits_bandwidth: bool,
    pub local_traffic: LocalTraffic,
    /// Addresses of all pods of the cluster; empty: not known.
    pub cluster_cidrs: Vec<IpNet>,
    /// Addresses of the pods of this node; empty: not known.
    pub pod_cidrs: Vec<IpNet>,
    /// Ranges that cluster IPs are allocated from; `None`: not known. An API server is asked only in modes that read them
    /// ([`super::reads_service_cidrs`]).
    pub service_cidrs: Option<Vec<IpNet>>,
    /// Traffic to cluster IPs is masqueraded whoever sends it.
    pub masquerade_all: bool,
    /// Bit of the packet mark that asks for masquerading, in modes that use one.
    pub masquerade_bit: u8,
    /// Ports of sources that netfilter masquerades, while mode ebpf has flows of its own; `None`: any from 1024 on, as the kernel chooses.
    pub masquerade_ports: Option<PortRange>,
    /// Of packets in mode ebpf, in a second; 0: any number.
    pub new_connections_per_core: u32,
    /// Of flows of mode ebpf.
    pub flow_lifetimes: FlowLifetimes,
    /// In mode ebpf, of Services that name none, as the next.
    pub algorithm: Algorithm,
    pub forwarding: NodeForwarding,
    /// Of mode ebpf.
    pub encapsulation: Encapsulation,
    /// Another mode serves other ports of the same addresses: a port of a cluster IP that is not known may be its.
    pub shares_addresses: bool,
}

/// By what traffic of pods is told from traffic of outside clients.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum LocalTraffic {
    /// The source is in one of these; none: it cannot be told.
    FromCidrs(Vec<IpNet>),
    /// It comes in by this bridge.
    FromBridge(String),
    /// It comes in by an interface whose name begins so.
    FromInterfacePrefix(String),
}

impl LocalTraffic {
    /// Whether what comes in by the interface is traffic of pods, whatever its source.
    pub fn comes_in_by(&self, interface: &Interface) -> bool {
        // What a bridge's port receives comes in by the bridge.
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
    /// False: packets start at the IP header (tun, wireguard, ipip).
    pub ethernet: bool,
    pub device: Device,
    /// Bytes of the longest packet that it takes, without link header; 0: of any length.
    pub mtu: u32,
    /// Of its Ethernet frames, where it has one.
    pub link_address: Option<[u8; 6]>,
    /// False: a workload's interface that no packet passes, as it or its other end is down.
    pub is_up: bool,
    /// VLAN devices are on it.
    pub has_vlans: bool,
    /// Name of the bridge that it is a port of.
    pub bridge: Option<String>,
    /// The network namespace of its other end, by the number that the node's own has for it.
    pub namespace: Option<u32>,
    /// Source of translated flows that leave by it, at most one of each family; none of a family: that of [`Host`].
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

/// What an interface is, as far as XDP tells them apart.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Device {
    /// Of hardware or of a hypervisor, not of the kernel alone.
    Card,
    Vlan(Vlan),
    Bond,
    Other,
}

/// The packets of an interface on another, where they have a tag.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Vlan {
    /// Index.
    pub below: u32,
    /// Ethertype of the tag.
    pub protocol: u16,
    pub id: u16,
}

/// By what an interface's role is decided.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, thiserror::Error)]
pub enum RoleReason {
    #[error("as ebpf.interfaces says")]
    Configured,
    #[error("has an address of the Node")]
    NodeAddress,
    #[error("the default route leaves by it")]
    DefaultRoute,
    #[error("has a network of its own, which is not of pods")]
    OwnNetwork,
    #[error("one end of a pair, without a network of its own")]
    Pair,
    #[error("tap, without a network of its own")]
    Tap,
    #[error("network card or tunnel")]
    Network,
}

/// Where an interface leads.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Role {
    /// To pods.
    Workload,
    /// To other nodes and the outside.
    Uplink,
}
