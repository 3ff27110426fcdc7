//! The usage of the dataplane, as of the last look.

use std::sync::{Mutex, PoisonError};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};

use crate::{
    dataplane::{ServiceUsage, TableUsage, Usage},
    model::desired::ServicePortName,
};

#[derive(Debug, Default)]
pub(super) struct LastUsage(Mutex<Usage>);

impl LastUsage {
    pub(super) fn set(&self, usage: Usage) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = usage;
    }
}

impl Collector for LastUsage {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> std::fmt::Result {
        let usage = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        type Value = fn(&TableUsage) -> Option<u64>;
        let gauges: [(&str, &str, Value); 3] = [
            ("proxy_table_used", "Entries in use.", |table| Some(table.used)),
            ("proxy_table_capacity", "Entries that the table has room for, if it can fill up.", |table| {
                table.can_fill_up.then_some(table.capacity)
            }),
            ("proxy_table_bytes", "Kernel memory of the table, in bytes.", |table| Some(table.bytes)),
        ];
        for (name, help, value) in gauges {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for table in &usage.tables {
                let Some(value) = value(table) else { continue };
                let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
                gauge.encode(metric.encode_family(&[("table", table.name)])?)?;
            }
        }
        let help = "Decisions of the datapath, by reason and by what became of the packet or call.";
        let mut metric = encoder.encode_descriptor("proxy_reasons", help, None, MetricType::Counter)?;
        for reason in &usage.reasons {
            let labels = [("reason", reason.name), ("verdict", reason.verdict)];
            ConstCounter::new(reason.count).encode(metric.encode_family(&labels)?)?;
        }
        encode_services(&usage, &mut encoder)
    }
}

/// As many as `ebpf.limits.serviceCounters` has room for.
fn encode_services(usage: &Usage, encoder: &mut DescriptorEncoder<'_>) -> std::fmt::Result {
    type Value = fn(&ServiceUsage) -> u64;
    let counters: [(&str, &str, Value); 3] = [
        ("proxy_service_connections", "Connections to a service port.", |service| service.connections),
        ("proxy_service_packets", "Packets of a service port's flows.", |service| service.packets),
        ("proxy_service_bytes", "Bytes of a service port's flows.", |service| service.bytes),
    ];
    for (name, help, value) in counters {
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for service in &usage.services {
            let ServicePortName { service: object, port, protocol, family } = &service.name;
            let labels = [
                ("namespace", object.namespace.to_string()),
                ("service", object.name.to_string()),
                ("port", port.to_string()),
                ("protocol", protocol.name().to_owned()),
                ("ip_family", family.name().to_owned()),
            ];
            ConstCounter::new(value(service)).encode(metric.encode_family(&labels)?)?;
        }
    }
    let help =
        "Service ports whose connections are not counted: there are more than ebpf.limits.serviceCounters.";
    let metric = encoder.encode_descriptor("proxy_services_not_counted", help, None, MetricType::Gauge)?;
    ConstGauge::new(i64::try_from(usage.uncounted_services).unwrap_or(i64::MAX)).encode(metric)
}
