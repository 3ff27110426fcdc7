//! Tells how full the maps are.

use std::collections::BTreeMap;

use proxy_common::inventory::map_name;

use crate::modes::{
    MetricFamily, Usage,
    ebpf::{
        EbpfDataplane, connections::expire::Collector, error::Error, maps::family::MapFamily, node::FOUR,
        services::writer::FamilyWriter, view,
    },
};

pub(crate) fn used_by<F: MapFamily>(
    writer: &FamilyWriter<F>,
    flows: &Collector<F>,
) -> Result<[(&'static str, u64); 8], Error> {
    let (opening, established) = flows.counted();
    Ok([
        (F::FRONTENDS, writer.entries.frontends.len() as u64),
        (F::SLOTS, u64::from(writer.entries.slots.used())),
        (F::BACKENDS, writer.entries.backends.len() as u64),
        (F::FLOWS, established),
        (F::OPENING_FLOWS, opening),
        (F::SOURCE_RANGES, u64::from(writer.entries.source_ranges)),
        (F::SERVICE_CIDRS, writer.maps.service_cidrs.read_all()?.len() as u64),
        (F::NODE_ADDRESSES, writer.maps.node_addresses.read_all()?.len() as u64),
    ])
}

impl EbpfDataplane {
    /// Returns how full and how large the maps are, and the counters by reason.
    pub(crate) fn read_usage(&self) -> Result<Usage, crate::modes::Error> {
        let mut used = BTreeMap::from([
            (map_name::services, u64::from(self.services.shared.ids.used().saturating_sub(1))),
            (
                map_name::service_names,
                (self.services.v4.entries.services.len() + self.services.v6.entries.services.len()) as u64,
            ),
            (map_name::interfaces, self.services.shared.maps.interfaces.read_all()?.len() as u64),
            (map_name::vlan_devices, self.services.shared.maps.vlan_devices.read_all()?.len() as u64),
            (map_name::pod_namespaces, self.services.shared.maps.pod_namespaces.read_all()?.len() as u64),
            (map_name::redirect_sources, self.services.shared.maps.redirect_sources.read_all()?.len() as u64),
            (map_name::redirect_targets, self.services.shared.maps.redirect_targets.read_all()?.len() as u64),
            (
                map_name::masquerade_ports,
                view::status::masquerade_ports(&self.services.shared.maps)?.len().div_ceil(FOUR) as u64,
            ),
            (map_name::settings, 1),
            (map_name::lease, 1),
        ]);
        used.extend(used_by(&self.services.v4, &self.connections.flows4)?);
        used.extend(used_by(&self.services.v6, &self.connections.flows6)?);
        used.extend(self.connections.affinity.counted());
        used.extend(self.services.v4.maps.connections.used()?);
        let counted = self.services.shared.maps.service_counters.capacity();
        used.insert(map_name::service_counters, u64::from(counted.min(self.services.shared.ids.used())));
        let may_grow = self.maps.may_grow();
        Ok(view::status::usage(
            &self.maps.paths.maps(),
            &self.maps.shapes,
            &may_grow,
            &used,
            &self.services.shared.maps,
        )?)
    }

    /// Returns the metric families of this mode, as they are now.
    pub(crate) fn read_metrics(&self) -> Result<Vec<MetricFamily>, crate::modes::Error> {
        let v4 = self.services.v4.entries.services.iter().map(|(name, published)| (published.id, name));
        let v6 = self.services.v6.entries.services.iter().map(|(name, published)| (published.id, name));
        let (services, uncounted) = view::status::service_usage(&self.services.shared.maps, v4.chain(v6))?;
        let ended = self.connections.stale_sockets.ended();
        let mut families = view::metrics::families(
            &self.read_usage()?,
            &services,
            uncounted,
            ended,
            self.connections.affinity.evicted(),
        );
        families.push(view::metrics::unattached_interfaces(self.hooks.unattached_count()));
        Ok(families)
    }
}
