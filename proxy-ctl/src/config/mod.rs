//! The configuration file: a `KubeProxyConfiguration` as kube-proxy reads it, with our own section `ebpf`.
//!
//! A file is parsed once into a [`Config`], in which everything is validated and defaulted. Zero values
//! (`0s`, `null`, `""`), which kubeadm writes for most fields, mean the default.

mod duration;
mod ebpf;
mod fields;
mod read;

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

pub use ebpf::{Ebpf, Interfaces, Limits, NamePattern, SocketLoadBalancing};
use ipnet::IpNet;

/// `mode` of the file, `--proxy-mode` of the command line.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum RequestedMode {
    /// Nothing was asked for.
    #[default]
    Automatic,
    Ebpf,
    Nftables,
    Iptables,
    Ipvs,
    Userspace,
}

impl RequestedMode {
    const WORDS: [(&'static str, Option<Self>); 5] = [
        ("ebpf", Some(Self::Ebpf)),
        ("nftables", Some(Self::Nftables)),
        ("iptables", Some(Self::Iptables)),
        ("ipvs", Some(Self::Ipvs)),
        ("userspace", Some(Self::Userspace)),
    ];
}

impl std::fmt::Display for RequestedMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Automatic => "",
            Self::Ebpf => "ebpf",
            Self::Nftables => "nftables",
            Self::Iptables => "iptables",
            Self::Ipvs => "ipvs",
            Self::Userspace => "userspace",
        })
    }
}

impl std::str::FromStr for RequestedMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Ok(Self::Automatic);
        }
        let known = Self::WORDS.iter().find(|(word, _)| *word == text).and_then(|(_, mode)| *mode);
        known.ok_or_else(|| format!("must be {}", fields::one_of(Self::WORDS.iter().map(|(word, _)| *word))))
    }
}

/// Everything the file can say, true from here on.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub feature_gates: Vec<(String, bool)>,
    pub client_connection: ClientConnection,
    pub logging: Logging,
    pub hostname_override: Option<String>,
    /// Says only which family healthz and metrics prefer; nothing is bound to it.
    pub bind_address: IpAddr,
    pub healthz_bind_address: SocketAddr,
    pub metrics_bind_address: SocketAddr,
    /// A healthz or metrics address that cannot be bound ends the process.
    pub bind_address_hard_fail: bool,
    pub enable_profiling: bool,
    pub show_hidden_metrics_for_version: Option<String>,
    pub mode: RequestedMode,
    pub iptables: Iptables,
    pub ipvs: Ipvs,
    pub nftables: Nftables,
    pub detect_local: DetectLocal,
    /// At most one of each family.
    pub cluster_cidrs: Vec<IpNet>,
    /// Empty: every address of the node.
    pub node_port_addresses: Vec<NodePortAddress>,
    pub oom_score_adj: i32,
    pub conntrack: Conntrack,
    pub config_sync_period: Duration,
    pub ebpf: Ebpf,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ClientConnection {
    pub kubeconfig: Option<PathBuf>,
    pub accept_content_types: Option<String>,
    pub content_type: String,
    pub qps: f64,
    pub burst: u32,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Logging {
    pub format: LogFormat,
    pub flush_frequency: Duration,
    /// As klog's `-v`.
    pub verbosity: u32,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SyncPeriods {
    pub sync: Duration,
    pub min_sync: Duration,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Iptables {
    pub masquerade_bit: u8,
    pub masquerade_all: bool,
    pub localhost_node_ports: bool,
    pub periods: SyncPeriods,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Ipvs {
    pub periods: SyncPeriods,
    /// `None`: round robin.
    pub scheduler: Option<String>,
    pub exclude_cidrs: Vec<IpNet>,
    pub strict_arp: bool,
    /// Zero: left as the kernel has it; as the next two.
    pub tcp_timeout: Duration,
    pub tcp_fin_timeout: Duration,
    pub udp_timeout: Duration,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Nftables {
    pub masquerade_bit: u8,
    pub masquerade_all: bool,
    pub periods: SyncPeriods,
}

/// How traffic of the node's own pods is told from other traffic.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum DetectLocal {
    ClusterCidr,
    NodeCidr,
    BridgeInterface(String),
    InterfaceNamePrefix(String),
}

/// Where node ports are served.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum NodePortAddress {
    /// The addresses of the Node object.
    Primary,
    /// 127.0.0.0/8 and ::1.
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

    /// Whether node ports are served on `address`, which is one of this node's.
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

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Conntrack {
    /// 0: the limit stays as it is.
    pub max_per_core: u32,
    pub min: u32,
    /// Zero: left as the kernel has it; as the next three.
    pub tcp_established_timeout: Duration,
    pub tcp_close_wait_timeout: Duration,
    pub udp_timeout: Duration,
    pub udp_stream_timeout: Duration,
    pub tcp_be_liberal: bool,
}

/// A configuration and what was odd about its file.
#[derive(Clone, Debug)]
pub struct Loaded {
    pub config: Config,
    pub warnings: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path}: cannot be read: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path}: {problem}")]
    Syntax { path: PathBuf, problem: String },
    #[error("{}", lines(path, problems))]
    Fields { path: PathBuf, problems: Vec<String> },
}

fn lines(path: &Path, problems: &[String]) -> String {
    let lines: Vec<_> = problems.iter().map(|problem| format!("{}: {problem}", path.display())).collect();
    lines.join("\n")
}

impl Config {
    /// Reads and checks a file, YAML or JSON. Unknown and duplicate fields are warnings, as with kube-proxy.
    pub fn load(path: &Path) -> Result<Loaded, Error> {
        let text =
            std::fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
        read::document(path, &text)
    }

    /// How often everything is compared with what is programmed, and the longest pause between two attempts
    /// after a failure.
    pub fn sync_period(&self) -> Duration {
        match self.mode {
            RequestedMode::Ipvs => self.ipvs.periods.sync,
            RequestedMode::Nftables => self.nftables.periods.sync,
            RequestedMode::Automatic
            | RequestedMode::Ebpf
            | RequestedMode::Iptables
            | RequestedMode::Userspace => self.iptables.periods.sync,
        }
    }

    /// Whether node ports are served on `address`, one of this node's; `node_addresses` are those of its
    /// Node object. A family that the configuration does not mention is served everywhere, as by kube-proxy.
    pub fn serves_node_ports_on(&self, address: IpAddr, node_addresses: &[IpAddr]) -> bool {
        let wanted = &self.node_port_addresses;
        let mentioned = wanted.iter().any(|one| one.family().is_none_or(|v4| v4 == address.is_ipv4()));
        !mentioned || wanted.iter().any(|one| one.covers(address, node_addresses))
    }
}

impl Default for Config {
    fn default() -> Self {
        read::defaults(IpAddr::V4(Ipv4Addr::UNSPECIFIED))
    }
}

#[cfg(test)]
mod tests;
