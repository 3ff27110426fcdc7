//! Metrics of a mode as plain data, so that the code that shows them knows no mode by name.

use std::sync::Arc;

use prometheus_client::metrics::{MetricType, histogram::Histogram};

use crate::model::{desired::ServicePortName, objects::IpFamily};

/// Counters of what clients of a service port have done since it was first served. They may wrap.
#[derive(Clone, Debug)]
pub struct ServiceUsage {
    pub name: ServicePortName,
    /// Number of sockets that were connected and of flows that were opened.
    pub connections: u64,
    /// Packets of flows in both directions. Packets of connected sockets are not seen.
    pub packets: u64,
    pub bytes: u64,
}

pub type Labels = Arc<[(&'static str, Arc<str>)]>;

/// A counter, a gauge or a histogram.
#[derive(Clone, Debug)]
pub struct MetricFamily {
    /// The name of the metric family. A counter's name has no `_total`.
    pub name: &'static str,
    pub help: &'static str,
    pub kind: MetricType,
    /// The values of a counter or a gauge, by labels.
    pub samples: Vec<(Labels, u64)>,
    /// The values of a histogram, by labels.
    pub histograms: Vec<(Labels, Histogram)>,
}

impl MetricFamily {
    pub(super) fn counter(
        name: &'static str,
        help: &'static str,
        samples: impl IntoIterator<Item = (Labels, u64)>,
    ) -> Self {
        let (samples, histograms) = (samples.into_iter().collect(), Vec::new());
        Self { name, help, kind: MetricType::Counter, samples, histograms }
    }

    pub(super) fn gauge(
        name: &'static str,
        help: &'static str,
        samples: impl IntoIterator<Item = (Labels, u64)>,
    ) -> Self {
        Self { kind: MetricType::Gauge, ..Self::counter(name, help, samples) }
    }

    /// Returns a metric family with one counter for each IP family.
    pub(super) fn of_families(
        name: &'static str,
        help: &'static str,
        counts: impl IntoIterator<Item = (IpFamily, u64)>,
    ) -> Self {
        Self::counter(name, help, counts.into_iter().map(|(family, count)| (of_family(family), count)))
    }

    /// Returns a metric family with one histogram for each IP family.
    pub(super) fn histograms_of_families(
        name: &'static str,
        help: &'static str,
        histograms: impl IntoIterator<Item = (IpFamily, Histogram)>,
    ) -> Self {
        let histograms = histograms.into_iter().map(|(family, histogram)| (of_family(family), histogram));
        Self {
            kind: MetricType::Histogram,
            histograms: histograms.collect(),
            ..Self::counter(name, help, [])
        }
    }

    /// Returns the metric families that count what clients of service ports do, in every mode that
    /// can count it.
    pub(super) fn of_services(services: &[ServiceUsage]) -> [Self; 3] {
        let labels: Vec<Labels> = services.iter().map(|service| labels_of(&service.name)).collect();
        let family = |name, help, value: fn(&ServiceUsage) -> u64| {
            Self::counter(name, help, labels.iter().cloned().zip(services.iter().map(value)))
        };
        [
            family(
                "proxy_service_connections",
                "Connections to a service port, counted when a socket connects or a flow opens.",
                |of| of.connections,
            ),
            family("proxy_service_packets", "Packets of a service port's flows.", |of| of.packets),
            family("proxy_service_bytes", "Bytes of a service port's flows.", |of| of.bytes),
        ]
    }
}

fn of_family(family: IpFamily) -> Labels {
    Arc::new([("ip_family", family.name().into())])
}

fn labels_of(name: &ServicePortName) -> Labels {
    Arc::new([
        ("namespace", Arc::clone(&name.service.namespace)),
        ("service", Arc::clone(&name.service.name)),
        ("port", Arc::clone(&name.port)),
        ("protocol", name.protocol.name().into()),
        ("ip_family", name.family.name().into()),
    ])
}
