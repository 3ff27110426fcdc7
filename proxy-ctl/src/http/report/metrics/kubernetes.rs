//! The metrics that every component of Kubernetes has about itself.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};

/// The Kubernetes release whose kube-proxy is followed.
const MAJOR: &str = "1";
const MINOR: &str = "36";
/// The Kubernetes release whose kube-proxy is followed, in the form of `/statusz`.
pub(crate) const EMULATED: &str = "1.36";

use crate::version::{commit, commit_date};
pub(crate) use crate::version::{platform, reported as version};

/// The metrics about the component: its version, and the number of metric families. `families` is
/// that number. It changes when the mode gets other metric families.
#[derive(Clone, Debug, Default)]
pub(super) struct ComponentInfo {
    pub(super) families: Arc<AtomicU64>,
}

impl Collector for ComponentInfo {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (version, platform) = (version(), platform());
        let build = [
            ("build_date", commit_date()),
            ("compiler", "rustc"),
            ("git_commit", commit()),
            ("git_tree_state", ""),
            ("git_version", version.as_str()),
            ("go_version", ""),
            ("major", MAJOR),
            ("minor", MINOR),
            ("platform", platform.as_str()),
        ];
        let help = "The release of Kubernetes that is followed, and the build; always 1.";
        let mut info = encoder.encode_descriptor("kubernetes_build_info", help, None, MetricType::Gauge)?;
        ConstGauge::new(1_i64).encode(info.encode_family(&build)?)?;

        let labels = [("deprecated_version", ""), ("stability_level", "ALPHA")];
        let help = "Families on this page.";
        let mut families =
            encoder.encode_descriptor("registered_metrics", help, None, MetricType::Counter)?;
        let count = self.families.load(Relaxed);
        ConstCounter::new(count).encode(families.encode_family(&labels)?)?;
        for (name, help) in [
            ("hidden_metrics", "Families that are not shown: none."),
            ("disabled_metrics", "Families that were switched off: none."),
        ] {
            let encoder = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            ConstCounter::new(0_u64).encode(encoder)?;
        }
        Ok(())
    }
}
