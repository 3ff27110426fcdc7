//! The metric families of this mode, with kube-proxy's names.

use prometheus_client::metrics::MetricType;

use super::{
    rules::Table,
    writer::{Failures, Writer},
};
use crate::{
    dataplane::{Labels, MetricFamily, netfilter::metrics},
    model::objects::IpFamily,
};

/// What is counted in one family.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counts {
    family: IpFamily,
    failures: Failures,
    /// Rules that are written, by table.
    rules: [u64; 3],
    /// Of the last write.
    last: [u64; 3],
}

impl Counts {
    pub(super) fn of(writer: &Writer) -> Self {
        Self { family: writer.family, failures: writer.failures, rules: writer.rules(), last: writer.last }
    }
}

pub(super) fn families(counts: &[Counts]) -> Vec<MetricFamily> {
    let of_family = |of: &Counts| -> Labels { [("ip_family", of.family.name().into())].into() };
    let counter = |name, help, value: fn(&Counts) -> u64| MetricFamily {
        name,
        help,
        kind: MetricType::Counter,
        samples: counts.iter().map(|of| (of_family(of), value(of))).collect(),
    };
    let by_table = |name, help, value: fn(&Counts) -> [u64; 3]| {
        let of_tables = |of: &Counts| {
            let (numbers, family): (_, &str) = (value(of), of.family.name());
            [Table::Filter, Table::Nat].map(|table| {
                let labels: Labels = [("table", table.name().into()), ("ip_family", family.into())].into();
                (labels, numbers[table as usize])
            })
        };
        MetricFamily {
            name,
            help,
            kind: MetricType::Gauge,
            samples: counts.iter().flat_map(of_tables).collect(),
        }
    };
    vec![
        metrics::restore_failures(counts.iter().map(|of| (of.family, of.failures.all))),
        counter(
            "kubeproxy_sync_proxy_rules_iptables_partial_restore_failures",
            "Runs of iptables-restore that failed and were for some service ports only",
            |of| of.failures.partial,
        ),
        by_table("kubeproxy_sync_proxy_rules_iptables_total", "Rules that are written", |of| of.rules),
        by_table("kubeproxy_sync_proxy_rules_iptables_last", "Rules that the last write has written", |of| {
            of.last
        }),
    ]
}

#[cfg(test)]
pub(crate) fn sample_metrics() -> Vec<MetricFamily> {
    let failures = Failures { all: 2, partial: 1 };
    families(&[Counts { family: IpFamily::Ipv4, failures, rules: [0, 43, 17], last: [0, 3, 1] }])
}
