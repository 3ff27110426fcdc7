//! The configuration of `run`: a `KubeProxyConfiguration` as kube-proxy reads it, with our own
//! section `ebpf`, and the flags.
//!
//! [`fields`] and [`flags`] are the two tables of all settings. A file and a command line are
//! resolved once into a [`Config`], in which everything is validated and defaulted. The parsers,
//! the documentation and the writer of files use the same tables.

mod access;
mod command_line;
mod document;
pub mod documentation;
pub(crate) mod duration;
mod ebpf;
mod feature_gates;
mod fields;
mod flag_values;
mod flags;
mod media;
mod resolve;
mod url;

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

pub use access::Keyword;
pub use command_line::{CommandLine, FlagError, VersionFormat};
pub use document::LEFT_OUT_ELSEWHERE;
pub use ebpf::{
    Ebpf, Interfaces, Limits, NamePattern, SocketLoadBalancing, SourceAddress, UnallocatedServiceAddresses,
    Xdp,
};
pub use feature_gates::{ALLOW_SERVICE_EXTERNAL_IPS, WATCH_LIST_CLIENT, is_gone as is_gone_gate};
pub use fields::{FIELDS, Field};
pub use flags::{FLAGS, Flag, Group, REMOVED, Sets, ValueKind};
use ipnet::IpNet;
pub use media::Encoding;
pub use resolve::{Effective, Origin};
pub use url::without_userinfo;

use crate::model::{mode::RequestedMode, node::PortRange};

impl Keyword for RequestedMode {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("ebpf", Self::Ebpf),
        ("nftables", Self::Nftables),
        ("iptables", Self::Iptables),
        ("ipvs", Self::Ipvs),
        ("userspace", Self::Userspace),
    ];
}

impl std::fmt::Display for RequestedMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.word())
    }
}

/// All settings of the file and the flags, valid and with their defaults.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The feature gates that were set, in the order of their names. Each is a known gate.
    pub feature_gates: Vec<(String, bool)>,
    pub client_connection: ClientConnection,
    pub logging: Logging,
    /// The name as it was written. [`Config::node_name`] returns what it means.
    pub hostname_override: Option<String>,
    /// The node's own address. If it is unspecified, the addresses of the Node object are used.
    /// Nothing is bound to it.
    pub bind_address: IpAddr,
    /// The address of the health server. `None`: health is not served.
    pub healthz_bind_address: Option<SocketAddr>,
    /// The address of the metrics server. `None`: metrics are not served.
    pub metrics_bind_address: Option<SocketAddr>,
    /// True if a healthz or metrics address that cannot be bound ends the process.
    pub bind_address_hard_fail: bool,
    pub enable_profiling: bool,
    pub show_hidden_metrics_for_version: Option<String>,
    pub mode: RequestedMode,
    /// The sync periods from the section of the mode: `ipvs`, `nftables`, or else `iptables`.
    pub periods: SyncPeriods,
    /// The value of section `nftables` in that mode, or else of section `iptables`.
    pub masquerade_all: bool,
    pub iptables: Iptables,
    pub ipvs: Ipvs,
    pub nftables: Nftables,
    pub winkernel: Winkernel,
    pub windows_run_as_service: bool,
    pub detect_local_mode: LocalMode,
    pub bridge_interface: String,
    pub interface_name_prefix: String,
    /// The pods' networks, at most one of each family.
    pub cluster_cidrs: Vec<IpNet>,
    /// The addresses on which node ports are served. An empty list means every address of the node.
    pub node_port_addresses: Vec<NodePortAddress>,
    /// The OOM score adjustment of the process, from -1000 to 1000.
    pub oom_score_adj: i32,
    pub conntrack: Conntrack,
    pub config_sync_period: Duration,
    /// The ports that mode userspace listens on, to which rules redirect clients. `None`: the
    /// kernel chooses the ports.
    pub port_range: Option<PortRange>,
    /// The time that a UDP session of mode userspace lasts without a datagram.
    pub udp_idle_timeout: Duration,
    pub ebpf: Ebpf,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ClientConnection {
    pub kubeconfig: Option<PathBuf>,
    pub accept_content_types: Option<String>,
    pub content_type: Encoding,
    /// The number of requests a second. A negative value means no limit.
    pub qps: f64,
    pub burst: u32,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

impl Keyword for LogFormat {
    const WORDS: &'static [(&'static str, Self)] = &[("text", Self::Text), ("json", Self::Json)];
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Logging {
    pub format: LogFormat,
    pub flush_frequency: Duration,
    /// The verbosity, as klog's `-v`.
    pub verbosity: u32,
    pub vmodule: Vec<ModuleVerbosity>,
    pub text: OutputRouting,
    pub json: OutputRouting,
}

/// The verbosity of the source files that match a pattern.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ModuleVerbosity {
    pub file_pattern: String,
    pub verbosity: u32,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct OutputRouting {
    /// True if errors go to stderr, and everything else to stdout.
    pub split_stream: bool,
    /// A Kubernetes quantity of bytes, as it was written. It has no effect.
    pub info_buffer_size: String,
}

impl Default for OutputRouting {
    fn default() -> Self {
        Self { split_stream: false, info_buffer_size: "0".to_owned() }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SyncPeriods {
    /// The time after which everything is compared with what is programmed. It is also the longest
    /// pause between two attempts after a failure.
    pub sync: Duration,
    /// The shortest pause between two syncs.
    pub min_sync: Duration,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Iptables {
    pub masquerade_bit: u8,
    pub localhost_node_ports: bool,
}

#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Ipvs {
    /// The IPVS scheduler. An empty text means round robin.
    pub scheduler: String,
    pub exclude_cidrs: Vec<IpNet>,
    pub strict_arp: bool,
    /// The idle time of a TCP connection. Zero leaves the kernel's setting, in this field and in
    /// the next two.
    pub tcp_timeout: Duration,
    pub tcp_fin_timeout: Duration,
    pub udp_timeout: Duration,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Nftables {
    pub masquerade_bit: u8,
}

/// The settings for Windows. They are read and written back, and have no meaning here.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Winkernel {
    pub network_name: String,
    pub source_vip: String,
    pub enable_dsr: bool,
    pub root_hns_endpoint_name: String,
    pub forward_health_check_vip: bool,
}

impl PortRange {
    /// Parses a range such as `8000-9000`, `8000+1000` or `8000`.
    fn parse(text: &str) -> Option<Self> {
        let number = |text: &str| text.trim().parse::<u16>().ok();
        let (first, last) = if let Some((first, last)) = text.split_once('-') {
            (number(first)?, number(last)?)
        } else if let Some((first, more)) = text.split_once('+') {
            (number(first)?, number(first)?.checked_add(number(more)?)?)
        } else {
            (number(text)?, number(text)?)
        };
        (first > 0 && first <= last).then_some(Self { first, last })
    }
}

/// The way in which traffic of the node's own pods is distinguished from other traffic.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum LocalMode {
    #[default]
    ClusterCidr,
    NodeCidr,
    BridgeInterface,
    InterfaceNamePrefix,
}

impl Keyword for LocalMode {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("ClusterCIDR", Self::ClusterCidr),
        ("NodeCIDR", Self::NodeCidr),
        ("BridgeInterface", Self::BridgeInterface),
        ("InterfaceNamePrefix", Self::InterfaceNamePrefix),
    ];
}

/// The addresses on which node ports are served.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum NodePortAddress {
    /// The addresses of the Node object.
    Primary,
    /// The addresses 127.0.0.0/8 and ::1.
    Localhost,
    All,
    Network(IpNet),
}

impl NodePortAddress {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "primary" => Some(Self::Primary),
            "localhost" => Some(Self::Localhost),
            "all" => Some(Self::All),
            network => network.parse().ok().map(Self::Network),
        }
    }

    /// Returns true if node ports are served on `address`, which is one of this node's.
    fn covers(self, address: IpAddr, node_addresses: &[IpAddr]) -> bool {
        match self {
            Self::Primary => node_addresses.contains(&address),
            Self::Localhost => address.is_loopback(),
            Self::All => true,
            Self::Network(network) => network.contains(&address),
        }
    }

    fn family(self) -> Option<bool> {
        match self {
            Self::Network(network) => Some(network.addr().is_ipv4()),
            Self::Primary | Self::Localhost | Self::All => None,
        }
    }
}

impl std::fmt::Display for NodePortAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Primary => f.write_str("primary"),
            Self::Localhost => f.write_str("localhost"),
            Self::All => f.write_str("all"),
            Self::Network(network) => network.fmt(f),
        }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Conntrack {
    /// The least `nf_conntrack_max` for each core. 0 leaves the limit as it is.
    pub max_per_core: u32,
    pub min: u32,
    /// The idle time of an established TCP connection. Zero leaves the kernel's setting, in this
    /// field and in the next three.
    pub tcp_established_timeout: Duration,
    pub tcp_close_wait_timeout: Duration,
    pub udp_timeout: Duration,
    pub udp_stream_timeout: Duration,
    /// True if `nf_conntrack_tcp_be_liberal` is set. False leaves the kernel's setting.
    pub tcp_be_liberal: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path}: cannot be read: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path}: {problem}")]
    Syntax { path: PathBuf, problem: String },
    /// The invalid values, one line for each. A field of the file comes with the path of the file,
    /// and a flag with its name.
    #[error("{}", .0.join("\n"))]
    Values(Vec<String>),
}

impl Config {
    /// Returns every field, including defaults, as a file of `kubeproxy.config.k8s.io/v1alpha1`
    /// would have it. Reading it back gives the same configuration, except for
    /// [`Config::not_for_a_file`].
    pub fn to_document(&self) -> serde_json::Value {
        document::of(self)
    }

    /// Returns the settings that only flags can have, each with the value that a file would give
    /// instead. An example is a pause of zero, which means the default in a file.
    pub fn not_for_a_file(&self) -> Vec<(&'static Field, serde_json::Value)> {
        let Some(read) = Effective::of_document(self.to_document()) else { return Vec::new() };
        let differs = |field: &&Field| field.value(&read.config) != field.value(self);
        let used = FIELDS.iter().filter(|field| field.applies_in(self.mode)).filter(differs);
        used.map(|field| (field, field.value(&read.config))).collect()
    }

    /// Returns the name of the Node object. `None` means the host's name.
    pub fn node_name(&self) -> Option<String> {
        self.hostname_override.as_ref().map(|name| name.trim().to_lowercase()).filter(|name| !name.is_empty())
    }

    /// Returns true if `gate` is on. Its own setting counts first, then that of its group, then the
    /// default.
    pub fn has_gate(&self, gate: &str) -> bool {
        feature_gates::is_on(&self.feature_gates, gate)
    }

    /// Returns true if node ports are served on `address`, which is one of this node's.
    /// `node_addresses` are those of its Node object. As in kube-proxy, a family that the
    /// configuration does not mention is served everywhere.
    pub fn serves_node_ports_on(&self, address: IpAddr, node_addresses: &[IpAddr]) -> bool {
        let wanted = &self.node_port_addresses;
        let mentioned = wanted.iter().any(|one| one.family().is_none_or(|v4| v4 == address.is_ipv4()));
        !mentioned || wanted.iter().any(|one| one.covers(address, node_addresses))
    }

    /// Returns true if node ports are served on some address of 127.0.0.0/8. No mode serves node
    /// ports on ::1. As in kube-proxy, a network of `nodePortAddresses` counts if it lies in
    /// 127.0.0.0/8 or contains it.
    pub fn serves_node_ports_on_loopback(&self) -> bool {
        const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let in_loopback = |one: &NodePortAddress| match one {
            NodePortAddress::Network(network) => network.addr().is_ipv4() && network.addr().is_loopback(),
            NodePortAddress::Primary | NodePortAddress::Localhost | NodePortAddress::All => false,
        };
        self.iptables.localhost_node_ports
            && (self.serves_node_ports_on(LOOPBACK, &[self.bind_address])
                || self.node_port_addresses.iter().any(in_loopback))
    }

    /// Returns true if node ports are served on every address of both families.
    pub fn serves_node_ports_everywhere(&self) -> bool {
        let wanted = &self.node_port_addresses;
        let covers_all = |v4: bool| {
            let mut of_family = wanted.iter().filter(|one| one.family().is_none_or(|family| family == v4));
            of_family.clone().next().is_none()
                || of_family.any(|one| match one {
                    NodePortAddress::All => true,
                    NodePortAddress::Network(network) => network.prefix_len() == 0,
                    NodePortAddress::Primary | NodePortAddress::Localhost => false,
                })
        };
        covers_all(true) && covers_all(false)
    }
}

pub(crate) const HEALTHZ_PORT: u16 = 10256;
pub(crate) const METRICS_PORT: u16 = 10249;

impl Default for Config {
    fn default() -> Self {
        let second = Duration::from_secs(1);
        Self {
            feature_gates: Vec::new(),
            client_connection: ClientConnection {
                kubeconfig: None,
                accept_content_types: None,
                content_type: Encoding::Protobuf,
                qps: 5.0,
                burst: 10,
            },
            logging: Logging {
                format: LogFormat::Text,
                flush_frequency: 5 * second,
                verbosity: 0,
                vmodule: Vec::new(),
                text: OutputRouting::default(),
                json: OutputRouting::default(),
            },
            hostname_override: None,
            bind_address: Ipv4Addr::UNSPECIFIED.into(),
            healthz_bind_address: Some(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), HEALTHZ_PORT)),
            metrics_bind_address: Some(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), METRICS_PORT)),
            bind_address_hard_fail: false,
            enable_profiling: false,
            show_hidden_metrics_for_version: None,
            mode: RequestedMode::Automatic,
            periods: SyncPeriods { sync: 30 * second, min_sync: second },
            masquerade_all: false,
            iptables: Iptables { masquerade_bit: 14, localhost_node_ports: true },
            ipvs: Ipvs::default(),
            nftables: Nftables { masquerade_bit: 14 },
            winkernel: Winkernel::default(),
            windows_run_as_service: false,
            detect_local_mode: LocalMode::ClusterCidr,
            bridge_interface: String::new(),
            interface_name_prefix: String::new(),
            cluster_cidrs: Vec::new(),
            node_port_addresses: Vec::new(),
            oom_score_adj: -999,
            conntrack: Conntrack {
                max_per_core: 32_768,
                min: 131_072,
                tcp_established_timeout: 86_400 * second,
                tcp_close_wait_timeout: 3_600 * second,
                udp_timeout: Duration::ZERO,
                udp_stream_timeout: Duration::ZERO,
                tcp_be_liberal: false,
            },
            config_sync_period: 900 * second,
            port_range: None,
            udp_idle_timeout: Duration::from_millis(250),
            ebpf: Ebpf::default(),
        }
    }
}

#[cfg(test)]
mod tests;
