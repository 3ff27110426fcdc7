//! The metric families of this mode.

use crate::modes::{Labels, MapUsage, MetricFamily, ServiceUsage, Usage};

pub(crate) fn families(
    usage: &Usage,
    services: &[ServiceUsage],
    uncounted: u64,
    sockets_ended: [(&'static str, u64); 2],
    affinity_evictions: u64,
) -> Vec<MetricFamily> {
    let of_maps = |name, help, value: fn(&MapUsage) -> Option<u64>| {
        let of_map = |map: &MapUsage| Some(([("map", map.name.into())].into(), value(map)?));
        MetricFamily::gauge(name, help, usage.maps.iter().filter_map(of_map))
    };
    let reasons = usage.reasons.iter().map(|of| {
        let labels: Labels = [("reason", of.name.into()), ("verdict", of.verdict.into())].into();
        (labels, of.count)
    });
    let mut families = vec![
        of_maps("proxy_map_used", "Entries of the map in use.", |map| Some(map.used)),
        of_maps("proxy_map_capacity", "Entries that the map has room for, if it can fill up.", |map| {
            map.can_fill_up.then_some(map.capacity)
        }),
        of_maps("proxy_map_bytes", "Kernel memory of the map, in bytes.", |map| Some(map.bytes)),
        MetricFamily::counter(
            "proxy_reasons",
            "Decisions of the datapath, by reason and by what became of the packet or call.",
            reasons,
        ),
    ];
    families.extend(MetricFamily::of_services(services));
    families.extend([
        MetricFamily::gauge(
            "proxy_uncounted_service_ports",
            "Service ports whose connections are not counted: there are more than ebpf.limits.serviceCounters.",
            [([].into(), uncounted)],
        ),
        MetricFamily::counter(
            "proxy_sockets_ended",
            "Connected sockets that were ended because their endpoint is gone.",
            sockets_ended.map(|(protocol, ended)| ([("protocol", protocol.into())].into(), ended)),
        ),
        MetricFamily::counter(
            "proxy_affinity_evictions",
            "Clients whose session affinity was evicted because the map was full.",
            [([].into(), affinity_evictions)],
        ),
    ]);
    families
}

pub(crate) fn unattached_interfaces(number: usize) -> MetricFamily {
    MetricFamily::gauge(
        "proxy_unattached_interfaces",
        "Interfaces of workloads that packet programs cannot be attached to; status names them.",
        [([].into(), u64::try_from(number).unwrap_or(u64::MAX))],
    )
}

/// Returns a sample of each metric family, with each reason.
#[cfg(test)]
pub(crate) fn sample_metrics() -> Vec<MetricFamily> {
    use proxy_common::reason::Reason;

    use crate::{
        model::{
            desired::ServicePortName,
            objects::{IpFamily, ObjectName, Protocol},
        },
        modes::ReasonUsage,
    };
    let name = ServicePortName {
        service: ObjectName::new("default", "web"),
        port: "http".into(),
        protocol: Protocol::Tcp,
        family: IpFamily::Ipv4,
    };
    let web = ServiceUsage { name, connections: 2, packets: 10, bytes: 1500 };
    let map = MapUsage { name: "frontends4", used: 3, capacity: 100, can_fill_up: true, bytes: 4096 };
    let reason =
        |of: &Reason| ReasonUsage { name: of.name(), verdict: super::status::verdict(*of), count: 7 };
    let mut all = families(
        &Usage { maps: vec![map], reasons: Reason::ALL.iter().map(reason).collect() },
        &[web],
        3,
        [("TCP", 1), ("UDP", 2)],
        4,
    );
    all.push(unattached_interfaces(1));
    all
}
