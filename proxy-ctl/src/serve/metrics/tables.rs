//! The tables as they were last seen.

use std::sync::{Mutex, PoisonError};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};
use proxy_common::reason::{Reason, Verdict};

use crate::dataplane::{TableUsage, Usage};

#[derive(Debug, Default)]
pub(super) struct LastUsage(Mutex<Usage>);

impl LastUsage {
    pub(super) fn set(&self, usage: Usage) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = usage;
    }
}

/// What happens to a packet or call that is counted under this reason.
fn verdict(reason: &str) -> &'static str {
    match Reason::ALL.iter().find(|one| one.name() == reason).map(|reason| reason.verdict()) {
        Some(Verdict::Pass) => "pass",
        Some(Verdict::Refuse) => "refuse",
        Some(Verdict::Drop) => "drop",
        None => "unknown",
    }
}

impl Collector for LastUsage {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> std::fmt::Result {
        let usage = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        type Value = fn(&TableUsage) -> u64;
        let gauges: [(&str, &str, Value); 3] = [
            ("proxy_table_used", "Entries in use.", |table| table.used),
            ("proxy_table_capacity", "Entries that the table has room for.", |table| table.capacity),
            ("proxy_table_bytes", "Kernel memory of the table.", |table| table.bytes),
        ];
        for (name, help, value) in gauges {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for table in &usage.tables {
                let gauge = ConstGauge::new(i64::try_from(value(table)).unwrap_or(i64::MAX));
                gauge.encode(metric.encode_family(&[("table", table.name)])?)?;
            }
        }
        let help = "Decisions of the datapath, by reason and by what became of the packet or call.";
        let mut metric = encoder.encode_descriptor("proxy_reasons", help, None, MetricType::Counter)?;
        for (reason, count) in &usage.reasons {
            let labels = [("reason", *reason), ("verdict", verdict(reason))];
            ConstCounter::new(*count).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }
}
