//! The page `/metrics/slis`: how often `/healthz` of the metrics server was called, and its
//! answers.

use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric, text},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Registry,
};

use crate::http::report::process;

/// The number of answers of `/healthz` since the start or the last reset. All of them were good.
#[derive(Debug, Default)]
pub(in crate::http) struct Slis {
    answers: AtomicU64,
}

impl Slis {
    pub(in crate::http) fn answered(&self) {
        self.answers.fetch_add(1, Ordering::Relaxed);
    }

    pub(in crate::http) fn reset(&self) {
        self.answers.store(0, Ordering::Relaxed);
    }

    /// Returns the metrics as OpenMetrics.
    pub(in crate::http) fn encode(&self) -> Result<String, std::fmt::Error> {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Answers(self.answers.load(Ordering::Relaxed))));
        registry.register_collector(Box::new(process::StartTime));
        let mut text = String::new();
        text::encode(&mut text, &registry)?;
        Ok(text)
    }
}

#[derive(Debug)]
struct Answers(u64);

impl Collector for Answers {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> std::fmt::Result {
        if self.0 == 0 {
            return Ok(());
        }
        let labels = [("name", "ping"), ("type", "healthz")];
        let help = "Result of the last health check.";
        let mut last = encoder.encode_descriptor("kubernetes_healthcheck", help, None, MetricType::Gauge)?;
        ConstGauge::new(1_i64).encode(last.encode_family(&labels)?)?;
        let labels = [("name", "ping"), ("status", "success"), ("type", "healthz")];
        let help = "Results of all health checks.";
        let mut all =
            encoder.encode_descriptor("kubernetes_healthchecks", help, None, MetricType::Counter)?;
        ConstCounter::new(self.0).encode(all.encode_family(&labels)?)
    }
}
