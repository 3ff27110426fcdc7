//! proxy-ctl on a node: its configuration and command line.

use anyhow::Result;
use lab::{
    Lab,
    address::{NodeNumber, POD_RANGE4, POD_RANGE6},
    cluster::node_name,
};
use serde_json::{Value, json};

use super::Feed;
use crate::setting::{PathKind, Setting};

pub(super) fn configuration(lab: &Lab, setting: Setting, feed: &Feed, node: NodeNumber) -> Result<Value> {
    let name = node_name(node);
    let mut configuration = json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": setting.datapath().mode(),
        "hostnameOverride": name,
        "clusterCIDR": format!("{POD_RANGE4},{POD_RANGE6}"),
        "conntrack": {"maxPerCore": 0},
        // Scenarios hold sockets that are silent for longer than 250 ms, after which sessions of
        // mode userspace end by default.
        "udpIdleTimeout": "30s",
        "iptables": {"minSyncPeriod": "1ms"},
        "nftables": {"minSyncPeriod": "1ms"},
        "ebpf": {
            // The lease is longer than a slow machine takes from the end of the controller to the
            // dials that follow.
            "withdrawAfter": if setting.withdraws { "30s" } else { "0s" },
            "socketLoadBalancing": match setting.path {
                PathKind::Sockets | PathKind::Unseen => "all",
                PathKind::Packets => "host",
                PathKind::Off => "off",
            },
            "sourceAddress": setting.source.to_string(),
            "xdp": if setting.uses_xdp() { "native" } else { "off" },
            "allowForwardingAnnotation": true,
            "cgroup": lab.netns(&name)?.cgroup,
            "bpffs": lab.bpffs(node),
        },
    });
    if let Feed::ApiServer(server) = feed {
        configuration["clientConnection"] = json!({"kubeconfig": server.kubeconfig()});
    }
    Ok(configuration)
}

pub(super) fn arguments(feed: &Feed) -> Vec<String> {
    let mut arguments = vec!["run".to_owned()];
    if let Feed::Manifests(folder) = feed {
        arguments.push(format!("--manifests={}", folder.display()));
    }
    arguments
}
