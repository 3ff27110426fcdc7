//! The files that a node's programs read: configuration of containerd, kubelet and network plugins.

use std::{fs, path::Path};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::{
    addresses::{self, CONTROL_PLANE4, DNS_SERVICE, NodeNumber},
    image::PAUSE,
};

pub(crate) const CONTAINERD: &str = "containerd.toml";
pub(crate) const KUBELET: &str = "kubelet.json";
pub(crate) const CONTAINERD_SOCKET: &str = "/run/containerd/containerd.sock";
const RESOLVER: &str = "resolv.conf";
/// Folder with the configuration of the network plugins.
const NETWORK: &str = "cni";
/// Folder where Debian's package containernetworking-plugins has them.
pub const NETWORK_PLUGINS: &str = "/usr/lib/cni";

/// Writes all files of a node to its folder.
pub(crate) fn write(folder: &Path, number: NodeNumber) -> Result<()> {
    let network = folder.join(NETWORK);
    fs::create_dir_all(&network).with_context(|| format!("creating {}", network.display()))?;
    for (name, text) in [
        (CONTAINERD, containerd(&network)),
        (KUBELET, kubelet(&folder.join(RESOLVER)).to_string()),
        (RESOLVER, format!("nameserver {CONTROL_PLANE4}\n")),
        ("cni/10-e2e.conflist", network_plugins(number).to_string()),
    ] {
        let path = folder.join(name);
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// Returns containerd's configuration. It leaves out the plugins that need file systems or devices
/// of their own.
fn containerd(network: &Path) -> String {
    format!(
        r#"version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
  "io.containerd.internal.v1.opt",
]
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{NETWORK_PLUGINS}"
    conf_dir = "{network}"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"#,
        network = network.display()
    )
}

/// Returns kubelet's configuration. It lets everybody send requests, and it evicts no pod for what
/// the machine lacks.
fn kubelet(resolver: &Path) -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": false,
        "enforceNodeAllocatable": [],
        "failCgroupV1": false,
        "failSwapOn": false,
        "containerRuntimeEndpoint": format!("unix://{CONTAINERD_SOCKET}"),
        "clusterDNS": [DNS_SERVICE],
        "clusterDomain": "cluster.local",
        "resolvConf": resolver,
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"imagefs.available": "0%", "nodefs.available": "0%", "memory.available": "1Mi"},
        "maxPods": 110,
        "serializeImagePulls": false,
        "registryPullQPS": 0,
        "kubeAPIQPS": 100,
        "kubeAPIBurst": 200,
        "nodeStatusUpdateFrequency": "5s",
    })
}

/// Returns the network plugins' configuration, which gives each pod a routed veth and its host
/// ports.
fn network_plugins(number: NodeNumber) -> Value {
    let subnet = |subnet: String| json!([{"subnet": subnet}]);
    json!({
        "cniVersion": "0.4.0",
        "name": "e2e",
        "plugins": [
            {
                "type": "ptp",
                "mtu": 1500,
                "ipMasq": false,
                "ipam": {
                    "type": "host-local",
                    "ranges": [subnet(addresses::pods4(number)), subnet(addresses::pods6(number))],
                    "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": true}, "snat": true},
        ],
    })
}
