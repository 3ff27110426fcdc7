//! The metric family that modes with rules of iptables share.

use prometheus_client::metrics::MetricType;

use crate::{dataplane::MetricFamily, model::objects::IpFamily};

/// With kube-proxy's name. `counts`: of each family that is served.
pub(in crate::dataplane) fn restore_failures(counts: impl Iterator<Item = (IpFamily, u64)>) -> MetricFamily {
    MetricFamily {
        name: "kubeproxy_sync_proxy_rules_iptables_restore_failures",
        help: "Runs of iptables-restore that failed",
        kind: MetricType::Counter,
        samples: counts
            .map(|(family, count)| ([("ip_family", family.name().into())].into(), count))
            .collect(),
    }
}
