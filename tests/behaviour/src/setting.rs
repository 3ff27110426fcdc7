//! Which proxy is under test, and how its connections are translated.

use std::fmt;

use clap::ValueEnum;

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum ProxyKind {
    /// proxy-ctl in mode ebpf
    Ebpf,
    /// The real kube-proxy in mode iptables
    KubeProxyIptables,
    /// The real kube-proxy in mode nftables
    KubeProxyNftables,
}

impl ProxyKind {
    pub fn is_kube_proxy(self) -> bool {
        match self {
            Self::Ebpf => false,
            Self::KubeProxyIptables | Self::KubeProxyNftables => true,
        }
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

/// One column of the table.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Setting {
    pub proxy: ProxyKind,
    pub path: PathKind,
    /// The hooks pass everything on 10 s after their controller has gone.
    pub withdraws: bool,
}

impl Setting {
    /// The settings that the given choices leave; paths are a matter of mode ebpf only.
    pub fn matching(proxies: &[ProxyKind], paths: &[PathKind]) -> Vec<Self> {
        let mut settings = Vec::new();
        for proxy in proxies {
            for path in paths {
                let path = if proxy.is_kube_proxy() { PathKind::Packets } else { *path };
                let setting = Self { proxy: *proxy, path, withdraws: false };
                if !settings.contains(&setting) {
                    settings.push(setting);
                }
            }
        }
        settings
    }

    /// Connections of pods are translated in the socket layer.
    pub fn pods_use_sockets(self) -> bool {
        !self.proxy.is_kube_proxy() && self.path == PathKind::Sockets
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.proxy {
            ProxyKind::KubeProxyIptables => "kube-proxy/iptables",
            ProxyKind::KubeProxyNftables => "kube-proxy/nftables",
            ProxyKind::Ebpf => return write!(formatter, "ebpf/{}", self.path),
        };
        formatter.write_str(name)
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
