//! proxy-ctl on a node: its configuration and command line.

use std::fs;

use anyhow::{Context as _, Result};
use lab::{Lab, address::NodeNumber, cluster::node_name};
use serde_json::json;

use super::Feed;
use crate::setting::{PathKind, Setting};

pub(super) fn arguments(lab: &Lab, setting: Setting, feed: &Feed, node: NodeNumber) -> Result<Vec<String>> {
    let name = node_name(node);
    let mut configuration = json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": setting.datapath().mode(),
        "hostnameOverride": name,
        "clusterCIDR": format!("{},{}", lab::address::POD_RANGE4, lab::address::POD_RANGE6),
        "conntrack": {"maxPerCore": 0},
        "ebpf": {
            "withdrawAfter": if setting.withdraws { "10s" } else { "0s" },
            "socketLoadBalancing": match setting.path {
                PathKind::Sockets | PathKind::Unseen => "all",
                PathKind::Packets => "host",
                PathKind::Off => "off",
            },
            "cgroup": lab.netns(&name)?.cgroup,
            "bpffs": lab.bpffs(node),
        },
    });
    if let Feed::ApiServer(server) = feed {
        configuration["clientConnection"] = json!({"kubeconfig": server.kubeconfig()});
    }
    let file = lab.directory().join(format!("{name}.yaml"));
    fs::write(&file, configuration.to_string()).with_context(|| format!("writing {}", file.display()))?;
    let mut arguments = vec!["run".to_owned(), format!("--config={}", file.display())];
    if let Feed::Manifests(folder) = feed {
        arguments.push(format!("--manifests={}", folder.display()));
    }
    Ok(arguments)
}
