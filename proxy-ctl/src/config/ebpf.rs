//! The section `ebpf`: settings that only this proxy has, whatever the mode.

use std::{path::PathBuf, time::Duration};

use proxy_common::flow::FlowLifetimes;
pub use proxy_common::inventory::Limits;
use serde::{Deserialize, Serialize};

use super::{Config, Keyword};
use crate::{
    dataplane::Role,
    model::objects::{Algorithm, Forwarding, NodeForwarding},
};

/// Whose connections the socket hooks translate.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum SocketLoadBalancing {
    /// Those of every process on the node, pods included.
    #[default]
    All,
    /// Those of processes in the node's own network namespace.
    Host,
    /// Nobody's: every packet is translated.
    Off,
}

impl Keyword for SocketLoadBalancing {
    const WORDS: &'static [(&'static str, Self)] =
        &[("all", Self::All), ("host", Self::Host), ("off", Self::Off)];
}

/// What becomes of traffic to ServiceCIDRs' addresses that no Service has.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum UnallocatedServiceAddresses {
    /// It goes where its route leads.
    #[default]
    Pass,
    Drop,
}

impl Keyword for UnallocatedServiceAddresses {
    const WORDS: &'static [(&'static str, Self)] = &[("pass", Self::Pass), ("drop", Self::Drop)];
}

/// On which uplinks packets to backends on other nodes, and their answers, are sent on before they reach the network stack.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Xdp {
    #[default]
    Off,
    /// Devices of hardware whose driver does it.
    Auto,
    /// All whose driver does it.
    Native,
    /// All, by the stack where it begins.
    Generic,
}

impl Keyword for Xdp {
    const WORDS: &'static [(&'static str, Self)] =
        &[("off", Self::Off), ("auto", Self::Auto), ("native", Self::Native), ("generic", Self::Generic)];
}

/// The source address that a backend sees.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum SourceAddress {
    /// The client's, where the answer comes back.
    #[default]
    Preserve,
    /// The node's, wherever kube-proxy masquerades.
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

/// What packets get before them on their way to backends of other nodes that answer clients themselves.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Encapsulation {
    /// Another IP header.
    #[default]
    Ip,
    /// Headers of IP, UDP and Geneve.
    Geneve,
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
    /// Of Services that name none, as `algorithm`.
    pub forwarding: Forwarding,
    /// Services may ask for direct server return where `forwarding` has none.
    pub allow_forwarding_annotation: bool,
    pub encapsulation: Encapsulation,
    pub algorithm: Algorithm,
    pub interfaces: Interfaces,
    /// A size of 0 is that of the machine.
    pub limits: Limits,
    /// In a second, that packets open; 0: any number.
    pub new_connections_per_core: u32,
    pub flow_lifetimes: OwnLifetimes,
    /// The cgroup v2 folder whose processes are served; `None`: the mount that opens.
    pub cgroup: Option<PathBuf>,
    pub bpffs: PathBuf,
    /// Remove what another kube-proxy has left, once everything is served.
    pub remove_kube_proxy_rules: bool,
    /// Another mode takes the place of one that was asked for and cannot run here.
    pub mode_fallback: bool,
    /// How long the node serves after its controller has gone; zero: without end.
    pub withdraw_after: Duration,
    /// Of TCP, by sockets.
    pub reset_connections_to_gone_endpoints: bool,
    pub unallocated_service_addresses: UnallocatedServiceAddresses,
    /// The node answers pings of ClusterIPs.
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
    /// Whose connections the socket hooks translate in the end: what a pod sends from is not known when it connects, so that no hook can
    /// tell whether kube-proxy would masquerade it.
    pub fn sockets(&self) -> SocketLoadBalancing {
        match (self.socket_load_balancing, self.source_address) {
            (SocketLoadBalancing::All, SourceAddress::Masquerade) => SocketLoadBalancing::Host,
            (asked, SourceAddress::Preserve | SourceAddress::Masquerade) => asked,
        }
    }

    /// What Services get that ask for a way of forwarding, and that do not.
    pub const fn forwarding(&self) -> NodeForwarding {
        NodeForwarding { by_default: self.forwarding, allows_more: self.allow_forwarding_annotation }
    }
}

/// Packets of a flow stamp it once a second.
pub(super) const SHORTEST_LIFETIME: Duration = Duration::from_secs(2);

/// How long flows are kept in states for which kube-proxy has no field.
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
    /// Of all states: `conntrack` says those that kube-proxy has fields for, where 0 is the default, and what is too short for flows is
    /// as much as they need.
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

/// Interfaces that the packet programs are attached to.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Interfaces {
    /// Empty: all.
    pub include: Vec<NamePattern>,
    pub exclude: Vec<NamePattern>,
    /// Lead to the outside and to other nodes, whatever is known of them.
    pub uplinks: Vec<NamePattern>,
    /// Lead to pods, whatever is known of them; not those of `uplinks`.
    pub workloads: Vec<NamePattern>,
}

impl Interfaces {
    pub fn select(&self, name: &str) -> bool {
        let included = self.include.is_empty() || self.include.iter().any(|pattern| pattern.matches(name));
        included && !self.exclude.iter().any(|pattern| pattern.matches(name))
    }

    /// The role that is chosen for an interface, if one is.
    pub fn role(&self, name: &str) -> Option<Role> {
        let names = |patterns: &[NamePattern]| patterns.iter().any(|pattern| pattern.matches(name));
        let (is_uplink, is_workload) = (names(&self.uplinks), names(&self.workloads));
        is_uplink.then_some(Role::Uplink).or_else(|| is_workload.then_some(Role::Workload))
    }
}

/// An interface name, in which one `*` at the end stands for anything.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NamePattern {
    name: String,
    prefix: bool,
}

impl NamePattern {
    /// `IFNAMSIZ` without the final zero.
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

/// As many as a CPU can open that also completes and serves them, and so few that a flood leaves others' flows in the table of opening
/// flows for longer than a handshake takes (docs/floods.md).
const NEW_CONNECTIONS_PER_CORE: u32 = 20_000;
/// More than a CPU can open.
pub(super) const MAX_NEW_CONNECTIONS_PER_CORE: i64 = 10_000_000;

/// Kernels accept more even for the largest of these tables.
pub(super) const MAX_ENTRIES: i64 = 1 << 26;
