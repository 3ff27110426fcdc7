//! The real kube-proxy on a node: its configuration and command line.

use anyhow::{Result, bail};
use lab::{
    address::{NodeNumber, POD_RANGE4, POD_RANGE6},
    cluster::node_name,
};
use serde_json::{Value, json};

use super::Feed;
use crate::setting::Setting;

pub(super) fn configuration(setting: Setting, feed: &Feed, node: NodeNumber) -> Result<Value> {
    let Feed::ApiServer(server) = feed else { bail!("kube-proxy reads from an API server only") };
    let at_once = json!({"minSyncPeriod": "1ms", "syncPeriod": "30s"});
    Ok(json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": setting.datapath().mode(),
        "hostnameOverride": node_name(node),
        "clientConnection": {"kubeconfig": server.kubeconfig(), "qps": 1000, "burst": 1000},
        "clusterCIDR": format!("{POD_RANGE4},{POD_RANGE6}"),
        // Zero keeps kube-proxy from changing the limits of the machine.
        "conntrack": {"maxPerCore": 0},
        "iptables": at_once,
        "ipvs": at_once,
        "nftables": at_once,
    }))
}

pub(super) fn arguments() -> Vec<String> {
    vec!["-v=2".to_owned()]
}
