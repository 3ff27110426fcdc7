//! The metric families of this mode, with kube-proxy's names.

use super::{
    names::Table,
    writer::{Failures, Writer},
};
use crate::{
    model::objects::IpFamily,
    modes::{Labels, MetricFamily, netfilter::metrics},
};

/// The counts of one family.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counts {
    family: IpFamily,
    failures: Failures,
    /// The number of rules that are written, by table.
    rules: [u64; 3],
    /// The number of rules that the last write has written, by table.
    last: [u64; 3],
}

impl Counts {
    pub(super) fn of(writer: &Writer) -> Self {
        Self { family: writer.family, failures: writer.failures, rules: writer.rules(), last: writer.last }
    }
}

/// The numbers of packets that rules have counted. `None`: nothing counts them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PacketCounts {
    pub(super) invalid: Option<u64>,
    pub(super) localhost: Option<u64>,
}

pub(super) fn families(counts: &[Counts], packets: PacketCounts) -> Vec<MetricFamily> {
    let by_table = |name, help, value: fn(&Counts) -> [u64; 3]| {
        let of_tables = |of: &Counts| {
            let (numbers, family): (_, &str) = (value(of), of.family.name());
            [Table::Filter, Table::Nat].map(|table| {
                let labels: Labels = [("table", table.name().into()), ("ip_family", family.into())].into();
                (labels, numbers[table as usize])
            })
        };
        MetricFamily::gauge(name, help, counts.iter().flat_map(of_tables))
    };
    let of_packets = |name, help, count: Option<u64>| {
        MetricFamily::counter(name, help, count.map(|count| ([].into(), count)))
    };
    let mut families = vec![
        metrics::restore_failures(counts.iter().map(|of| (of.family, of.failures.all))),
        MetricFamily::of_families(
            "kubeproxy_sync_proxy_rules_iptables_partial_restore_failures",
            "Runs of iptables-restore that failed and were for some service ports only",
            counts.iter().map(|of| (of.family, of.failures.partial)),
        ),
        by_table("kubeproxy_sync_proxy_rules_iptables_total", "Rules that are written", |of| of.rules),
        by_table("kubeproxy_sync_proxy_rules_iptables_last", "Rules that the last write has written", |of| {
            of.last
        }),
        of_packets(
            "kubeproxy_iptables_ct_state_invalid_dropped_packets",
            "Packets that were dropped, as connection tracking found them invalid",
            packets.invalid,
        ),
        of_packets(
            "kubeproxy_iptables_localhost_nodeports_accepted_packets",
            "Packets to node ports on 127.0.0.1 that opened a connection",
            packets.localhost,
        ),
    ];
    families.retain(|family| !family.samples.is_empty());
    families
}

#[cfg(test)]
pub(crate) fn sample_metrics() -> Vec<MetricFamily> {
    let failures = Failures { all: 2, partial: 1 };
    let counts = Counts { family: IpFamily::Ipv4, failures, rules: [0, 43, 17], last: [0, 3, 1] };
    families(&[counts], PacketCounts { invalid: Some(3), localhost: Some(2) })
}
