//! The proxy under test, and how its connections are translated.

use std::fmt;

use clap::ValueEnum;

#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd, ValueEnum)]
pub enum ProxyKind {
    /// proxy-ctl in mode ebpf
    Ebpf,
    /// proxy-ctl in mode nftables
    Nftables,
    /// proxy-ctl in mode iptables
    Iptables,
    /// proxy-ctl in mode ipvs
    Ipvs,
    /// proxy-ctl in mode userspace
    Userspace,
    /// The real kube-proxy in mode iptables
    KubeProxyIptables,
    /// The real kube-proxy in mode nftables
    KubeProxyNftables,
    /// The real kube-proxy in mode ipvs
    KubeProxyIpvs,
}

pub const OURS: [ProxyKind; 5] =
    [ProxyKind::Ebpf, ProxyKind::Nftables, ProxyKind::Iptables, ProxyKind::Ipvs, ProxyKind::Userspace];
/// Modes of the real kube-proxy that every kernel can run.
pub const REAL: [ProxyKind; 2] = [ProxyKind::KubeProxyIptables, ProxyKind::KubeProxyNftables];

/// Way in which connections are translated, whichever proxy programs it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Datapath {
    Ebpf,
    Nftables,
    Iptables,
    Ipvs,
    Userspace,
}

impl ProxyKind {
    /// Returns true if this is the real kube-proxy.
    pub fn is_kube_proxy(self) -> bool {
        match self {
            Self::Ebpf | Self::Nftables | Self::Iptables | Self::Ipvs | Self::Userspace => false,
            Self::KubeProxyIptables | Self::KubeProxyNftables | Self::KubeProxyIpvs => true,
        }
    }

    pub fn datapath(self) -> Datapath {
        match self {
            Self::Ebpf => Datapath::Ebpf,
            Self::Nftables | Self::KubeProxyNftables => Datapath::Nftables,
            Self::Iptables | Self::KubeProxyIptables => Datapath::Iptables,
            Self::Ipvs | Self::KubeProxyIpvs => Datapath::Ipvs,
            Self::Userspace => Datapath::Userspace,
        }
    }
}

impl fmt::Display for ProxyKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_kube_proxy() {
            formatter.write_str("kube-proxy/")?;
        }
        formatter.write_str(self.datapath().mode())
    }
}

impl Datapath {
    /// Returns the mode's name in the configuration's `mode` and in `/proxyMode`.
    pub const fn mode(self) -> &'static str {
        match self {
            Self::Ebpf => "ebpf",
            Self::Nftables => "nftables",
            Self::Iptables => "iptables",
            Self::Ipvs => "ipvs",
            Self::Userspace => "userspace",
        }
    }

    /// Returns true if netfilter's rules decide. They refuse a connection by ICMP.
    pub const fn is_netfilter(self) -> bool {
        match self {
            Self::Nftables | Self::Iptables | Self::Ipvs => true,
            Self::Ebpf | Self::Userspace => false,
        }
    }

    /// Returns true if new connections to a frontend get its endpoints in turn, whoever opens them.
    pub const fn takes_turns(self) -> bool {
        matches!(self, Self::Ipvs | Self::Userspace)
    }

    /// Returns true if a process carries connections. They end with it, and endpoints see it as the
    /// client.
    pub const fn is_a_process(self) -> bool {
        matches!(self, Self::Userspace)
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum PathKind {
    /// Socket hooks for every process of the node (socketLoadBalancing: all)
    Sockets,
    /// Packets of pods are translated (socketLoadBalancing: host)
    Packets,
    /// Socket hooks for all, but the pods' processes are outside the node's cgroup, as those of virtual
    /// machines are
    Unseen,
    /// No socket hooks at all (socketLoadBalancing: off)
    Off,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, ValueEnum)]
pub enum SourceKind {
    /// Endpoints see the client's address wherever the answer comes back (sourceAddress: preserve)
    #[default]
    Preserve,
    /// Endpoints see the node's address wherever kube-proxy masquerades (sourceAddress: masquerade)
    Masquerade,
}

/// Proxy, and the choices under which it is tested. It is a column of the printed table.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Setting {
    pub proxy: ProxyKind,
    /// Path of mode ebpf. The other modes translate packets.
    pub path: PathKind,
    /// Source address that endpoints see in mode ebpf.
    pub source: SourceKind,
    /// True if the hooks pass everything on 30 s after their controller has gone.
    pub withdraws: bool,
}

impl Setting {
    pub const fn new(proxy: ProxyKind, path: PathKind) -> Self {
        Self { proxy, path, source: SourceKind::Preserve, withdraws: false }
    }

    /// Returns the settings of these proxies and paths. Only mode ebpf has several paths.
    pub fn matching(proxies: &[ProxyKind], paths: &[PathKind]) -> Vec<Self> {
        let mut settings = Vec::new();
        for proxy in proxies {
            for path in paths {
                let path = if *proxy == ProxyKind::Ebpf { *path } else { PathKind::Packets };
                let setting = Self::new(*proxy, path);
                if !settings.contains(&setting) {
                    settings.push(setting);
                }
            }
        }
        settings
    }

    /// Returns each of these settings with each source. Only mode ebpf has several sources.
    pub fn with_sources(settings: &[Self], sources: &[SourceKind]) -> Vec<Self> {
        let with = |setting: &Self| {
            let of_mode: &[_] =
                if setting.proxy == ProxyKind::Ebpf { sources } else { &[SourceKind::Preserve] };
            of_mode.iter().map(|source| Self { source: *source, ..*setting }).collect::<Vec<_>>()
        };
        settings.iter().flat_map(with).collect()
    }

    pub fn datapath(self) -> Datapath {
        self.proxy.datapath()
    }

    /// Returns true if XDP forwards packets. On the other paths, TC programs get all packets.
    pub fn uses_xdp(self) -> bool {
        self.proxy == ProxyKind::Ebpf && self.path == PathKind::Packets
    }

    /// Returns true if pods' connections are translated at their sockets.
    pub fn pods_use_sockets(self) -> bool {
        self.proxy == ProxyKind::Ebpf && self.path == PathKind::Sockets && self.source == SourceKind::Preserve
    }

    /// Returns true if connections of the node's processes are translated at their sockets.
    pub fn node_uses_sockets(self) -> bool {
        self.proxy == ProxyKind::Ebpf && self.path != PathKind::Off
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.proxy)?;
        match (self.proxy, self.source) {
            (ProxyKind::Ebpf, SourceKind::Preserve) => write!(formatter, "/{}", self.path),
            (ProxyKind::Ebpf, SourceKind::Masquerade) => write!(formatter, "/{}/{}", self.path, self.source),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for SourceKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Preserve => "preserve",
            Self::Masquerade => "masquerade",
        })
    }
}

impl fmt::Display for PathKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Sockets => "sockets",
            Self::Packets => "packets",
            Self::Unseen => "unseen",
            Self::Off => "off",
        })
    }
}
