//! The metric families of the active mode, with their samples as of the last scrape.

use std::sync::{Mutex, PoisonError};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _, MetricEncoder},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};

use crate::modes::MetricFamily;

#[derive(Debug, Default)]
pub(super) struct ModeMetrics(pub(super) Mutex<Vec<MetricFamily>>);

impl Collector for ModeMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> std::fmt::Result {
        for MetricFamily { name, help, kind, samples, histograms } in
            &*self.0.lock().unwrap_or_else(PoisonError::into_inner)
        {
            let mut metric = encoder.encode_descriptor(name, help, None, *kind)?;
            let encode = |metric: MetricEncoder<'_>, value| match matches!(kind, MetricType::Counter) {
                true => ConstCounter::new(value).encode(metric),
                false => ConstGauge::new(value).encode(metric),
            };
            for (labels, histogram) in histograms {
                histogram.encode(metric.encode_family(&&**labels)?)?;
            }
            match samples.as_slice() {
                [(labels, value)] if labels.is_empty() => encode(metric, *value)?,
                samples => {
                    for (labels, value) in samples {
                        encode(metric.encode_family(&&**labels)?, *value)?;
                    }
                }
            }
        }
        Ok(())
    }
}
