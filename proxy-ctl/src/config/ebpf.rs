//! The section `ebpf`: settings that only this proxy has, whatever the mode.

use std::{path::PathBuf, time::Duration};

use proxy_common::flow::FlowLifetimes;
pub use proxy_common::inventory::Limits;

use super::{Config, Keyword};
use crate::model::{
    node::{Encapsulation, Role},
    objects::{Algorithm, Forwarding, NodeForwarding},
};

/// The processes whose connections the socket hooks translate.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum SocketLoadBalancing {
    /// Every process on the node, pods included.
    #[default]
    All,
    /// Processes in the node's own network namespace.
    Host,
    /// No process, so that every packet is translated.
    Off,
}

impl Keyword for SocketLoadBalancing {
    const WORDS: &'static [(&'static str, Self)] =
        &[("all", Self::All), ("host", Self::Host), ("off", Self::Off)];
}

/// The treatment of traffic to addresses of ServiceCIDRs that no Service has.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum UnallocatedServiceAddresses {
    /// The traffic goes where its route leads.
    #[default]
    Pass,
    Drop,
}

impl Keyword for UnallocatedServiceAddresses {
    const WORDS: &'static [(&'static str, Self)] = &[("pass", Self::Pass), ("drop", Self::Drop)];
}

/// The uplinks on which XDP forwards packets to backends on other nodes, and their answers, before
/// they reach the network stack.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Xdp {
    #[default]
    Off,
    /// Hardware devices whose driver supports XDP.
    Auto,
    /// All uplinks whose driver supports XDP.
    Native,
    /// All uplinks. XDP runs at the beginning of the network stack.
    Generic,
}

impl Keyword for Xdp {
    const WORDS: &'static [(&'static str, Self)] =
        &[("off", Self::Off), ("auto", Self::Auto), ("native", Self::Native), ("generic", Self::Generic)];
}

/// The source address that a backend sees.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum SourceAddress {
    /// The client's address, if the answer comes back through this node with it.
    #[default]
    Preserve,
    /// The node's address, wherever kube-proxy masquerades.
    Masquerade,
}

impl Keyword for SourceAddress {
    const WORDS: &'static [(&'static str, Self)] =
        &[("preserve", Self::Preserve), ("masquerade", Self::Masquerade)];
}

impl Keyword for Forwarding {
    const WORDS: &'static [(&'static str, Self)] =
        &[("snat", Self::Snat), ("dsr", Self::Dsr), ("hybrid", Self::Hybrid)];
}

impl Keyword for Encapsulation {
    const WORDS: &'static [(&'static str, Self)] = &[("ip", Self::Ip), ("geneve", Self::Geneve)];
}

impl Keyword for Algorithm {
    const WORDS: &'static [(&'static str, Self)] =
        &[("random", Self::Random), ("maglev", Self::Maglev), ("leastConnection", Self::LeastConnection)];
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Ebpf {
    pub socket_load_balancing: SocketLoadBalancing,
    pub source_address: SourceAddress,
    pub xdp: Xdp,
    /// The forwarding of Services that name none. `algorithm` works in the same way.
    pub forwarding: Forwarding,
    /// True if Services may ask for direct server return although `forwarding` does not include it.
    pub allow_forwarding_annotation: bool,
    pub encapsulation: Encapsulation,
    pub algorithm: Algorithm,
    pub interfaces: Interfaces,
    /// The sizes of the maps. 0 stands for a size that follows from the machine.
    pub limits: Limits,
    /// The number of connections a second that packets may open on a core. 0 means any number.
    pub new_connections_per_core: u32,
    pub flow_lifetimes: OwnLifetimes,
    /// The cgroup v2 folder whose processes are served. `None`: a mount that can be opened.
    pub cgroup: Option<PathBuf>,
    pub bpffs: PathBuf,
    /// True if what another kube-proxy has left is removed once everything is served.
    pub remove_kube_proxy_rules: bool,
    /// True if another mode may replace one that was asked for and cannot run here.
    pub mode_fallback: bool,
    /// The time that the node goes on serving after its controller has gone. Zero means without
    /// end.
    pub withdraw_after: Duration,
    /// True if TCP connections are reset when their endpoint is gone.
    pub reset_connections_to_gone_endpoints: bool,
    pub unallocated_service_addresses: UnallocatedServiceAddresses,
    /// True if the node answers pings of ClusterIPs.
    pub answer_ping: bool,
}

impl Default for Ebpf {
    fn default() -> Self {
        Self {
            socket_load_balancing: SocketLoadBalancing::default(),
            source_address: SourceAddress::default(),
            xdp: Xdp::default(),
            forwarding: Forwarding::default(),
            allow_forwarding_annotation: false,
            encapsulation: Encapsulation::default(),
            algorithm: Algorithm::default(),
            interfaces: Interfaces::default(),
            limits: Limits { flows: 0, opening_flows: 0, ..Limits::default() },
            new_connections_per_core: NEW_CONNECTIONS_PER_CORE,
            flow_lifetimes: OwnLifetimes::default(),
            cgroup: None,
            bpffs: PathBuf::from("/sys/fs/bpf"),
            remove_kube_proxy_rules: true,
            mode_fallback: true,
            withdraw_after: Duration::ZERO,
            reset_connections_to_gone_endpoints: false,
            unallocated_service_addresses: UnallocatedServiceAddresses::default(),
            answer_ping: false,
        }
    }
}

impl Ebpf {
    /// Returns the processes whose connections the socket hooks translate in the end. With
    /// `masquerade` pods are left out. The source address of a pod is not known when it connects,
    /// so no hook can tell whether kube-proxy would masquerade it.
    pub fn sockets(&self) -> SocketLoadBalancing {
        match (self.socket_load_balancing, self.source_address) {
            (SocketLoadBalancing::All, SourceAddress::Masquerade) => SocketLoadBalancing::Host,
            (asked, SourceAddress::Preserve | SourceAddress::Masquerade) => asked,
        }
    }

    /// Returns the node's way of forwarding, and whether Services may ask for more than it.
    pub const fn forwarding(&self) -> NodeForwarding {
        NodeForwarding { by_default: self.forwarding, allows_more: self.allow_forwarding_annotation }
    }
}

/// The shortest lifetime of a flow. It must exceed a second, because the packets of a flow refresh
/// its time stamp once a second.
pub(super) const SHORTEST_LIFETIME: Duration = Duration::from_secs(2);

/// The lifetimes of flows in states for which kube-proxy has no field.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct OwnLifetimes {
    pub tcp_opening: Duration,
    pub tcp_closed: Duration,
    pub tcp_reset: Duration,
}

impl Default for OwnLifetimes {
    fn default() -> Self {
        let FlowLifetimes { tcp_opening, tcp_closed, tcp_reset, .. } = FlowLifetimes::default();
        Self { tcp_opening, tcp_closed, tcp_reset }
    }
}

impl Config {
    /// Returns the lifetimes of flows in all states. `conntrack` gives those that kube-proxy has
    /// fields for, where 0 means the default. A value that is too short for flows is raised to the
    /// shortest lifetime.
    pub fn flow_lifetimes(&self) -> FlowLifetimes {
        let OwnLifetimes { tcp_opening, tcp_closed, tcp_reset } = self.ebpf.flow_lifetimes;
        let default = FlowLifetimes::default();
        let set_or =
            |set: Duration, default| if set.is_zero() { default } else { set.max(SHORTEST_LIFETIME) };
        FlowLifetimes {
            tcp_opening,
            tcp_established: set_or(self.conntrack.tcp_established_timeout, default.tcp_established),
            tcp_close_wait: set_or(self.conntrack.tcp_close_wait_timeout, default.tcp_close_wait),
            tcp_closed,
            tcp_reset,
            udp: set_or(self.conntrack.udp_timeout, default.udp),
            udp_stream: set_or(self.conntrack.udp_stream_timeout, default.udp_stream),
        }
    }
}

/// The interfaces that the packet programs are attached to.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Interfaces {
    /// The interfaces to attach to. An empty list means all.
    pub include: Vec<NamePattern>,
    pub exclude: Vec<NamePattern>,
    /// The interfaces that lead to the outside and to other nodes, whatever is known of them.
    pub uplinks: Vec<NamePattern>,
    /// The interfaces that lead to pods, whatever is known of them. Those in `uplinks` are not
    /// among them.
    pub workloads: Vec<NamePattern>,
}

impl Interfaces {
    pub fn select(&self, name: &str) -> bool {
        let included = self.include.is_empty() || self.include.iter().any(|pattern| pattern.matches(name));
        included && !self.exclude.iter().any(|pattern| pattern.matches(name))
    }

    /// Returns the role that the configuration gives an interface, or None if it gives none.
    pub fn role(&self, name: &str) -> Option<Role> {
        let names = |patterns: &[NamePattern]| patterns.iter().any(|pattern| pattern.matches(name));
        let (is_uplink, is_workload) = (names(&self.uplinks), names(&self.workloads));
        is_uplink.then_some(Role::Uplink).or_else(|| is_workload.then_some(Role::Workload))
    }
}

/// An interface name. A `*` at its end stands for any text.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NamePattern {
    name: String,
    prefix: bool,
}

impl NamePattern {
    /// The size `IFNAMSIZ` without the final zero byte.
    const MAX_LENGTH: usize = 15;

    pub fn parse(text: &str) -> Option<Self> {
        let (name, prefix) = text.strip_suffix('*').map_or((text, false), |name| (name, true));
        let forbidden = |c: char| c == '*' || c == '/' || c.is_whitespace();
        let usable = !text.is_empty() && name.len() <= Self::MAX_LENGTH && !name.contains(forbidden);
        usable.then(|| Self { name: name.to_owned(), prefix })
    }

    pub fn matches(&self, name: &str) -> bool {
        if self.prefix { name.starts_with(&self.name) } else { name == self.name }
    }
}

impl std::fmt::Display for NamePattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.name, if self.prefix { "*" } else { "" })
    }
}

/// The default of `new_connections_per_core`. A CPU can open as many and also complete and serve
/// them. During a flood it still leaves other flows in the map of opening flows for longer than a
/// handshake takes (docs/floods.md).
const NEW_CONNECTIONS_PER_CORE: u32 = 20_000;
/// The largest allowed value, in new connections per core and second. No CPU can open as many.
pub(super) const MAX_NEW_CONNECTIONS_PER_CORE: i64 = 10_000_000;

/// The largest allowed size of a map. Kernels accept more, even for the map with the largest
/// elements.
pub(super) const MAX_ENTRIES: i64 = 1 << 26;
