//! The real kube-proxy on a node: its configuration and command line.

use std::fs;

use anyhow::{Context as _, Result, bail};
use lab::{
    Lab,
    address::{NodeNumber, POD_RANGE4, POD_RANGE6},
    cluster::node_name,
};
use serde_json::json;

use super::Feed;
use crate::setting::Setting;

pub(super) fn arguments(lab: &Lab, setting: Setting, feed: &Feed, node: NodeNumber) -> Result<Vec<String>> {
    let Feed::ApiServer(server) = feed else { bail!("kube-proxy reads from an API server only") };
    let name = node_name(node);
    let at_once = json!({"minSyncPeriod": "1ms", "syncPeriod": "30s"});
    let configuration = json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": setting.datapath().mode(),
        "hostnameOverride": name,
        "clientConnection": {"kubeconfig": server.kubeconfig(), "qps": 1000, "burst": 1000},
        "clusterCIDR": format!("{POD_RANGE4},{POD_RANGE6}"),
        // The machine's own limits stay as they are.
        "conntrack": {"maxPerCore": 0},
        "iptables": at_once,
        "nftables": at_once,
    });
    let file = lab.directory().join(format!("{name}-kube-proxy.yaml"));
    fs::write(&file, configuration.to_string()).with_context(|| format!("writing {}", file.display()))?;
    Ok(vec![format!("--config={}", file.display()), "-v=2".to_owned()])
}
