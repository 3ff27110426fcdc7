//! Writes the maps `service_cidrs4/6`. In their ranges, packets to addresses that no Service has
//! are dropped (`ebpf.unallocatedServiceAddresses`).
//!
//! The maps are filled once everything desired is in `frontends4/6`, and emptied while something
//! waits for room there.

use std::collections::BTreeSet;

use ipnet::IpNet;
use proxy_common::{
    family::{V4, V6},
    layout::{PrefixKey, SERVICE_CIDRS},
};

use crate::{
    config::{Ebpf, UnallocatedServiceAddresses},
    modes::{
        Applied,
        ebpf::{
            Error,
            maps::{
                family::MapFamily,
                handles::{FamilyMaps, NamedMap},
            },
            services::writer::FamilyWriter,
        },
    },
};

pub(crate) fn are_read(config: &Ebpf) -> bool {
    config.unallocated_service_addresses == UnallocatedServiceAddresses::Drop
}

#[derive(Debug)]
pub(crate) struct ServiceCidrs {
    are_read: bool,
    /// The ranges that are wanted. `None` until they are known, and what a predecessor has written
    /// stays until then.
    known: Option<Vec<IpNet>>,
    /// True if everything desired was written once.
    is_synced: bool,
    /// The ranges in the maps; `None` if they are not known.
    written: Option<Vec<IpNet>>,
}

impl ServiceCidrs {
    pub(crate) fn begin(config: &Ebpf) -> Self {
        let are_read = are_read(config);
        // If the ranges are not read, none is wanted.
        let known = (!are_read).then(Vec::new);
        Self { are_read, known, is_synced: false, written: None }
    }

    /// Takes over the ranges of the cluster; `None` if they are not known.
    pub(crate) fn set(&mut self, all: Option<&[IpNet]>) {
        if let Some(all) = all.filter(|_| self.are_read) {
            self.known = Some(all.to_vec());
        }
    }

    pub(crate) fn synced(&mut self) {
        self.is_synced = true;
    }

    /// Lets the maps be emptied, because the mode drains and nothing is to be dropped any more.
    pub(crate) fn drain(&mut self) {
        *self = Self { are_read: false, known: Some(Vec::new()), is_synced: true, written: None };
    }

    /// Writes the maps if they must change. Call this after each change of the served service
    /// ports.
    pub(crate) fn write(&mut self, v4: &FamilyWriter<V4>, v6: &FamilyWriter<V6>) -> Result<Applied, Error> {
        let serves_all = v4.has_room_for_all() && v6.has_room_for_all();
        let wanted = if serves_all { self.known.clone() } else { Some(Vec::new()) };
        let Some(wanted) = wanted.filter(|_| self.is_synced) else { return Ok(Applied::default()) };
        if self.written.as_ref() == Some(&wanted) {
            return Ok(Applied::default());
        }
        self.written = None;
        let mut applied = write(&v4.maps, &wanted)?;
        applied += write(&v6.maps, &wanted)?;
        self.written = Some(wanted);
        Ok(applied)
    }
}

/// Makes the map hold exactly these ranges.
fn write<F: MapFamily>(maps: &FamilyMaps<F>, cidrs: &[IpNet]) -> Result<Applied, Error> {
    let map: &NamedMap<PrefixKey<F::Address>, u32> = &maps.service_cidrs;
    let key =
        |cidr: &IpNet| Some(PrefixKey { bits: cidr.prefix_len().into(), data: F::address(cidr.network())? });
    let mut wanted: BTreeSet<_> = cidrs.iter().filter_map(key).collect();
    if wanted.len() > SERVICE_CIDRS as usize {
        tracing::warn!(
            map = F::SERVICE_CIDRS,
            ranges = wanted.len(),
            room = SERVICE_CIDRS,
            "there are more ServiceCIDRs than the map has room for; traffic to some of them passes"
        );
        wanted = wanted.into_iter().take(SERVICE_CIDRS as usize).collect();
    }
    let found: BTreeSet<_> = map.read_all()?.into_iter().map(|(key, _)| key).collect();
    let mut applied = Applied::default();
    for key in found.difference(&wanted) {
        applied.removed += u64::from(map.remove(key)?);
    }
    for key in wanted.difference(&found) {
        map.set(key, &0)?;
        applied.written += 1;
    }
    Ok(applied)
}
