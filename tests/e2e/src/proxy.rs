//! The proxies that serve the cluster's Services, one process on each node.

use std::{
    fmt, fs,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use control_plane::{Process, binaries};
use lab::{http, namespace, wait};
use serde_json::{Value, json};

use crate::{
    addresses::{self, POD_RANGE4, POD_RANGE6},
    node::Node,
};

const HEALTH: u16 = 10_256;
const METRICS: u16 = 10_249;
const READY_LIMIT: Duration = Duration::from_secs(60);
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// A proxy and its mode.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, ValueEnum)]
pub enum Setting {
    /// proxy-ctl, sockets and packets
    Ebpf,
    /// proxy-ctl, packets only: `socketLoadBalancing: off`
    EbpfPackets,
    /// proxy-ctl, sockets of the node itself, and packets of pods: `socketLoadBalancing: host`
    EbpfHost,
    Nftables,
    Iptables,
    /// The real kube-proxy
    KubeProxyNftables,
    /// The real kube-proxy
    KubeProxyIptables,
}

impl Setting {
    /// The columns of the table: the reference, then ours.
    pub const TABLE: [Self; 6] = [
        Self::KubeProxyNftables,
        Self::KubeProxyIptables,
        Self::Ebpf,
        Self::EbpfPackets,
        Self::Nftables,
        Self::Iptables,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Ebpf => "ebpf",
            Self::EbpfPackets => "ebpf-packets",
            Self::EbpfHost => "ebpf-host",
            Self::Nftables => "nftables",
            Self::Iptables => "iptables",
            Self::KubeProxyNftables => "kube-proxy-nftables",
            Self::KubeProxyIptables => "kube-proxy-iptables",
        }
    }

    pub const fn is_kube_proxy(self) -> bool {
        matches!(self, Self::KubeProxyNftables | Self::KubeProxyIptables)
    }

    pub const fn mode(self) -> &'static str {
        match self {
            Self::Ebpf | Self::EbpfPackets | Self::EbpfHost => "ebpf",
            Self::Nftables | Self::KubeProxyNftables => "nftables",
            Self::Iptables | Self::KubeProxyIptables => "iptables",
        }
    }

    pub fn program(self) -> Result<PathBuf> {
        if self.is_kube_proxy() { binaries::Program::KubeProxy.path() } else { lab::program("proxy-ctl") }
    }

    fn configuration(self, node: &str, kubeconfig: &Path) -> Value {
        let mut configuration = json!({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": self.mode(),
            "clientConnection": {"kubeconfig": kubeconfig, "qps": 100, "burst": 200},
            "clusterCIDR": format!("{POD_RANGE4},{POD_RANGE6}"),
            "hostnameOverride": node,
            // Zero keeps the proxy from changing the limits of the machine.
            "conntrack": {"maxPerCore": 0, "min": 0},
        });
        let sockets = match self {
            Self::Ebpf => "all",
            Self::EbpfPackets => "off",
            Self::EbpfHost => "host",
            Self::Nftables | Self::Iptables | Self::KubeProxyNftables | Self::KubeProxyIptables => {
                return configuration;
            }
        };
        configuration["ebpf"] = json!({"modeFallback": false, "socketLoadBalancing": sockets});
        configuration
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// Starts the proxy of a node. It ends when the returned process is dropped.
pub(crate) fn start(setting: Setting, node: &Node, kubeconfig: &Path) -> Result<Process> {
    let name = addresses::node_name(node.number);
    let file = node.folder().join("proxy.json");
    fs::write(&file, setting.configuration(&name, kubeconfig).to_string())
        .with_context(|| format!("writing {}", file.display()))?;
    let mut command = node.command(&setting.program()?)?;
    if !setting.is_kube_proxy() {
        command.arg("run");
    }
    command
        .arg(format!("--config={}", file.display()))
        .arg(format!("--hostname-override={name}"))
        .arg("-v=2");
    Process::start(&command, &node.folder().join("proxy.log"), None)
}

/// Waits until the proxy of a node has programmed everything, and is in its mode.
pub(crate) fn wait_until_ready(setting: Setting, node: &Node, process: &mut Process) -> Result<()> {
    let get = |port: u16, path: &str| {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        namespace::within(&node.namespace, || http::request(address, "GET", path, &[], None, ANSWER_LIMIT))
    };
    wait::until(&format!("the proxy of n{}", node.number), READY_LIMIT, || {
        process.alive().map_err(|error| format!("{error:#}"))?;
        let health = get(HEALTH, "/healthz").map_err(|error| format!("{error:#}"))?;
        let mode = get(METRICS, "/proxyMode").map_err(|error| format!("{error:#}"))?;
        match (health.status, mode.text().trim()) {
            (200, mode) if mode == setting.mode() => Ok(Some(())),
            (status, mode) => Err(format!("/healthz answers {status}, and the mode is {mode}")),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mode_ebpf_has_paths() {
        let sockets = |setting: Setting| {
            let configuration = setting.configuration("n1", Path::new("/x"));
            configuration["ebpf"]["socketLoadBalancing"].as_str().map(str::to_owned)
        };
        assert_eq!(sockets(Setting::Ebpf).as_deref(), Some("all"));
        assert_eq!(sockets(Setting::EbpfPackets).as_deref(), Some("off"));
        assert_eq!(sockets(Setting::KubeProxyIptables), None);
        assert!(
            Setting::TABLE.iter().all(|setting| Setting::from_str(setting.name(), false) == Ok(*setting))
        );
    }
}
