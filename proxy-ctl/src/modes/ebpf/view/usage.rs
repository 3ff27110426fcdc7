//! Tells how full the maps are.

use std::collections::BTreeMap;

use proxy_common::inventory::table;

use crate::modes::{
    Usage,
    ebpf::{
        EbpfDataplane, connections::expire::Collector, error::Error, maps::family::TableFamily, node::FOUR,
        services::writer::FamilyWriter, view,
    },
};

pub(crate) fn used_by<F: TableFamily>(
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
        (F::SERVICE_CIDRS, writer.tables.service_cidrs.read_all()?.len() as u64),
        (F::NODE_ADDRESSES, writer.tables.node_addresses.read_all()?.len() as u64),
    ])
}

impl EbpfDataplane {
    /// Returns how full and how large the maps are, and the counters by reason.
    pub(crate) fn read_usage(&self) -> Result<Usage, crate::modes::Error> {
        let mut used = BTreeMap::from([
            (table::services, u64::from(self.shared.ids.used().saturating_sub(1))),
            (table::service_names, (self.v4.entries.services.len() + self.v6.entries.services.len()) as u64),
            (table::interfaces, self.shared.tables.interfaces.read_all()?.len() as u64),
            (table::vlan_devices, self.shared.tables.vlan_devices.read_all()?.len() as u64),
            (table::pod_namespaces, self.shared.tables.pod_namespaces.read_all()?.len() as u64),
            (table::redirect_sources, self.shared.tables.redirect_sources.read_all()?.len() as u64),
            (table::redirect_targets, self.shared.tables.redirect_targets.read_all()?.len() as u64),
            (
                table::masquerade_ports,
                view::status::masquerade_ports(&self.shared.tables)?.len().div_ceil(FOUR) as u64,
            ),
            (table::settings, 1),
            (table::lease, 1),
        ]);
        used.extend(used_by(&self.v4, &self.flows4)?);
        used.extend(used_by(&self.v6, &self.flows6)?);
        used.extend(self.affinity.counted());
        used.extend(self.v4.tables.connections.used()?);
        let counted = self.shared.tables.service_counters.capacity();
        used.insert(table::service_counters, u64::from(counted.min(self.shared.ids.used())));
        let may_grow = self.growth.may_grow(&self.shapes);
        Ok(view::status::usage(&self.paths.maps(), &self.shapes, &may_grow, &used, &self.shared.tables)?)
    }
}
