//! Compares the maps with what is desired.
//!
//! An inspection usually finds no difference. So entries are compared as they are read, a few at
//! once, and no copy of the maps is kept. If anything differs, `adopt` and `publish` find out what.

use std::sync::Arc;

use proxy_common::{
    inventory::map_name,
    layout::{Frontend, Service, ServiceName},
};

use super::{
    allocate::Range,
    draining::with_draining,
    entries,
    programmed::{BackendKey, Entries, Published, UsedEndpoints, Uses},
    writer::{Common, FamilyWriter},
};
use crate::{
    model::desired::{DesiredPort, ServicePortName},
    modes::ebpf::{
        Error,
        maps::{family::MapFamily, handles::typed},
    },
};

/// Service ports that are published, in the order of their ids.
pub(crate) type ById<'a> = [(u32, &'a ServicePortName)];

impl Common {
    /// Returns true if the maps that both families share have these service ports and no others.
    pub(crate) fn has_only(&self, published: &ById<'_>) -> Result<bool, Error> {
        let name_of = |id: u32| {
            let index = published.binary_search_by_key(&id, |(id, _)| *id).ok()?;
            published.get(index).map(|(_, name)| *name)
        };
        let is_right =
            |id: &u32, name: &ServiceName| name_of(*id).and_then(entries::name).as_ref() == Some(name);
        if !self.maps.names.holds(published.len(), is_right)? {
            return Ok(false);
        }
        // The map is not read through the mapped memory, all of which would count as resident from
        // then on.
        let services = typed::<u32, Service>(self.maps.services.fd(), map_name::services)?;
        let is_anothers =
            |(id, service): &(u32, Service)| *service != Service::default() && name_of(*id).is_none();
        services
            .walk(|few| Ok(!few.iter().any(is_anothers)))
            .map_err(|source| Error::Map { name: map_name::services, source })
    }
}

impl<F: MapFamily> FamilyWriter<F> {
    pub(crate) fn published(&self) -> impl Iterator<Item = (u32, &ServicePortName)> {
        self.entries.services.iter().map(|(name, published)| (published.id, name))
    }

    /// Returns true if these service ports are published, and this family's maps hold them and
    /// nothing else. `desired` has each service port once.
    pub(crate) fn has_only<'a>(
        &self,
        shared: &Common,
        desired: impl Iterator<Item = &'a Arc<DesiredPort>>,
    ) -> Result<bool, Error> {
        if !self.is_settled() {
            return Ok(false);
        }
        let mut others = self.entries.services.len();
        for port in desired {
            if !self.has_published(shared, &with_draining(port, shared.forwarding_of(port))) {
                return Ok(false);
            }
            others = others.saturating_sub(1);
        }
        Ok(others == 0 && self.has_backends()? && self.has_frontends()? && self.has_source_ranges()?)
    }

    /// Returns true if nothing waits to be written or to be removed.
    fn is_settled(&self) -> bool {
        let Entries { stray_backends, stray_source_ranges, without_room, cluster_ips, .. } = &self.entries;
        stray_backends.is_empty()
            && stray_source_ranges.is_empty()
            && without_room.frontends.is_empty()
            && without_room.ports.is_empty()
            && cluster_ips.missing.is_empty()
            && cluster_ips.gone.is_empty()
    }

    /// Returns true if the service port is published, and its service and endpoint sets are in the
    /// maps as they should be.
    fn has_published(&self, shared: &Common, port: &Arc<DesiredPort>) -> bool {
        let Some(published) = self.entries.services.get(&port.name) else { return false };
        let Published { id, range: Some(range), used: UsedEndpoints::Desired(used), .. } = published else {
            return false;
        };
        let service = shared.maps.services.get(*id as usize).unwrap_or_default();
        let (algorithm, forwarding) = (shared.algorithm_of(port), shared.forwarding_of(port));
        let has_frontend =
            |(key, flags)| self.entries.frontends.get(&key) == Some(&Frontend { service: *id, flags });
        (Arc::ptr_eq(used, port) || used == port)
            && service.flags == entries::service_flags(port, algorithm, forwarding)
            && service.affinity_seconds == port.affinity_seconds.unwrap_or(0)
            // The published ranges are the former ones if the map had no room for others.
            && published.source_ranges == entries::source_ranges::<F>(port, *id)
            && holds(*range, entries::span([service.cluster, service.internal, service.external]))
            && self.has_sets(shared, *id, port)
            && entries::frontends::<F>(port, algorithm, forwarding).into_iter().all(has_frontend)
    }

    fn has_backends(&self) -> Result<bool, Error> {
        let backends = &self.entries.backends;
        self.maps.backends.holds(backends.len(), |id, backend| {
            let key = BackendKey::of(backend);
            let is_right = |uses: &Uses| uses.id == *id && !uses.is_unused() && uses.wanted(&key) == *backend;
            backends.get(&key).is_some_and(is_right)
        })
    }

    fn has_frontends(&self) -> Result<bool, Error> {
        let Entries { frontends, services, cluster_ips, .. } = &self.entries;
        let of_services: usize = services.values().map(|published| published.frontends.len()).sum();
        let is_right = |key: &_, frontend: &_| frontends.get(key) == Some(frontend);
        Ok(frontends.len() == of_services + cluster_ips.users.len()
            && self.maps.frontends.holds(frontends.len(), is_right)?)
    }

    fn has_source_ranges(&self) -> Result<bool, Error> {
        let mut ranges: Vec<_> =
            self.entries.services.values().flat_map(|published| &published.source_ranges).collect();
        ranges.sort_unstable();
        self.maps.source_ranges.holds(ranges.len(), |key, _| ranges.binary_search(&key).is_ok())
    }
}

fn holds(range: Range, part: Range) -> bool {
    let end = |range: Range| u64::from(range.first) + u64::from(range.count);
    part.count == 0 || (range.first <= part.first && end(part) <= end(range))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::all_of_it((4, 3), true)]
    #[case::a_part((5, 1), true)]
    #[case::nothing((0, 0), true)]
    #[case::before((3, 3), false)]
    #[case::beyond((5, 3), false)]
    #[case::out_of_bounds((u32::MAX, u32::MAX), false)]
    fn sets_lie_in_the_range_of_their_service(#[case] (first, count): (u32, u32), #[case] expected: bool) {
        assert_eq!(holds(Range { first: 4, count: 3 }, Range { first, count }), expected);
    }
}
