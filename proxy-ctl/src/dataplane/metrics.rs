//! Metrics of a mode, as data: what shows them knows no mode's names.

use std::sync::Arc;

use prometheus_client::metrics::{MetricType, histogram::Histogram};

use crate::model::{desired::ServicePortName, objects::IpFamily};

/// What the clients of a service port did since it is served; counters may wrap.
#[derive(Clone, Debug)]
pub struct ServiceUsage {
    pub name: ServicePortName,
    /// Sockets that were connected, and flows that were opened.
    pub connections: u64,
    /// Of flows, both directions; those of sockets are not seen.
    pub packets: u64,
    pub bytes: u64,
}

pub type Labels = Arc<[(&'static str, Arc<str>)]>;

/// A counter, a gauge or a histogram.
#[derive(Clone, Debug)]
pub struct MetricFamily {
    /// A counter's without `_total`.
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

    /// A counter of each family of addresses.
    pub(super) fn of_families(
        name: &'static str,
        help: &'static str,
        counts: impl IntoIterator<Item = (IpFamily, u64)>,
    ) -> Self {
        Self::counter(name, help, counts.into_iter().map(|(family, count)| (of_family(family), count)))
    }

    /// A histogram of each family of addresses.
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

    /// The families that count what clients of service ports do, in every mode that can.
    pub(super) fn of_services(services: &[ServiceUsage]) -> [Self; 3] {
        let labels: Vec<Labels> = services.iter().map(|service| labels_of(&service.name)).collect();
        let family = |name, help, value: fn(&ServiceUsage) -> u64| {
            Self::counter(name, help, labels.iter().cloned().zip(services.iter().map(value)))
        };
        [
            family("proxy_service_connections", "Connections to a service port.", |of| of.connections),
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
