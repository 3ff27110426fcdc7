//! The metric family that modes with rules of iptables share.

use crate::{model::objects::IpFamily, modes::MetricFamily};

/// Returns the metric family with kube-proxy's name. `counts` has a count for each IP family that
/// is served.
pub(in crate::modes) fn restore_failures(counts: impl Iterator<Item = (IpFamily, u64)>) -> MetricFamily {
    let name = "kubeproxy_sync_proxy_rules_iptables_restore_failures";
    MetricFamily::of_families(name, "Runs of iptables-restore that failed", counts)
}
