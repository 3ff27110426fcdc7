//! Reads what a former controller has left in the maps into the controller's memory.
//!
//! A controller may have been killed between any two writes. Whatever does not fit together is left
//! out, so that the resync that follows writes it anew or removes it.

use std::{collections::BTreeSet, hash::Hash};

use proxy_common::{
    inventory::map_name,
    layout::{Backend, EndpointSet, FRONTEND_EXTERNAL, Frontend, Service},
};
use rustc_hash::{FxHashMap, FxHashSet};

use super::{
    addresses::frontend_addresses::AddressBits,
    allocate::{Range, Ranges},
    backends::Backends,
    entries,
    programmed::{BackendKey, ClusterIps, Entries, Published, UsedEndpoints, Uses, WithoutRoom},
    writer::{Common, FamilyWriter},
};
use crate::{
    model::desired::ServicePortName,
    modes::ebpf::{
        Error,
        maps::{family::MapFamily, handles::typed},
    },
};

/// Services and their names, read from the maps that both families share.
#[derive(Debug)]
pub(crate) struct AdoptedNames {
    pub(crate) known: Vec<(u32, ServicePortName)>,
    /// Services without a usable name. They are removed.
    pub(crate) strays: Vec<Stray>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Stray {
    pub(crate) id: u32,
    /// True if the id is given to no other service before this one gives it up. False if the id is
    /// never given out, or waits for a grace period already.
    pub(crate) is_claimed: bool,
}

impl Common {
    /// Reads names and services anew, and makes the services that are found the owners of their
    /// ids.
    pub(crate) fn adopt(&mut self) -> Result<AdoptedNames, Error> {
        let mut names = Vec::new();
        self.maps.names.walk(|few| {
            names.extend(few.iter().map(|(id, name)| (*id, entries::port_name(name))));
            true
        })?;
        names.sort_unstable_by_key(|(id, _)| *id);
        let mut ids = self.ids.without_owners();
        // An empty frontend has service id 0, so no service may have it.
        ids.claim(Range { first: 0, count: 1 });
        let mut seen = FxHashSet::default();
        let mut is_first = |id: u32, name| {
            !seen.contains(name) && ids.claim(Range { first: id, count: 1 }) && seen.insert(name)
        };
        let are_known: Vec<bool> =
            names.iter().map(|(id, name)| name.as_ref().is_some_and(|name| is_first(*id, name))).collect();
        let (mut known, mut strays) = (Vec::with_capacity(names.len()), Vec::new());
        for ((id, name), is_known) in names.into_iter().zip(are_known) {
            match name.filter(|_| is_known) {
                Some(name) => known.push((id, name)),
                None => strays.push(id),
            }
        }
        let named: FxHashSet<u32> = known.iter().map(|(id, _)| *id).chain(strays.iter().copied()).collect();
        // The map is not read through the mapped memory, all of which would count as resident from
        // then on.
        let services = typed::<u32, Service>(self.maps.services.fd(), map_name::services)?;
        let is_stray =
            |(id, service): &&(u32, Service)| *service != Service::default() && !named.contains(id);
        services
            .walk(|slice| {
                strays.extend(slice.iter().filter(is_stray).map(|(id, _)| *id));
                Ok(true)
            })
            .map_err(|source| Error::Map { name: map_name::services, source })?;
        // The id of a stray is not given to another service before the stray is gone.
        let claimed = |id| Stray { id, is_claimed: ids.claim(Range { first: id, count: 1 }) };
        let strays = strays.into_iter().map(claimed).collect();
        self.ids = ids;
        Ok(AdoptedNames { known, strays })
    }

    /// Makes the next backend id one that was never given.
    pub(crate) fn continue_backend_ids(&mut self, largest_found: u32) -> Result<(), Error> {
        if self.next_backend == 0 {
            self.backends_set_aside = self.maps.settings.get(&0)?.unwrap_or_default().next_backend;
            // A slot with backend id 0 is not in use.
            self.next_backend = self.backends_set_aside.max(1);
        }
        self.next_backend = self.next_backend.max(largest_found.saturating_add(1));
        Ok(())
    }
}

impl<F: MapFamily> FamilyWriter<F> {
    /// Reads this family's maps anew, and returns the largest backend id found.
    pub(crate) fn adopt(&mut self, shared: &Common, names: &AdoptedNames) -> Result<u32, Error> {
        let found_frontends = self.maps.frontends.read_all()?;
        let found_backends = self.maps.backends.read_all()?;
        let source_ranges = self.maps.source_ranges.read_all()?;
        // Nothing fails from here on. The memory of the former entries is used again for those that
        // are found.
        let mut frontends = emptied(&mut self.entries.frontends);
        frontends.extend(found_frontends);
        let mut backends = std::mem::take(&mut self.entries.backends);
        backends.clear();
        let (stray_backends, largest) = adopt_backends(found_backends, &mut backends);
        let mut services = emptied(&mut self.entries.services);
        let mut slots = self.entries.slots.without_owners();
        let mut of_service = by_service(frontends.iter().map(|(key, frontend)| (frontend.service, *key)));
        let mut ranges_of = by_service(source_ranges.iter().map(|(key, _)| (key.data.service, *key)));
        for (id, name) in &names.known {
            if name.family != F::FAMILY {
                continue;
            }
            let service = shared.maps.services.get(*id as usize).unwrap_or_default();
            let sets = [service.cluster, service.internal, service.external];
            let keys = of_service.remove(id).unwrap_or_default();
            let is_external = |key| {
                frontends.get(key).is_some_and(|frontend: &Frontend| frontend.flags & FRONTEND_EXTERNAL != 0)
            };
            let internal = keys.iter().filter(|key| !is_external(*key) && !key.is_cluster_ip());
            let cluster_ips: BTreeSet<_> = internal.map(|key| key.address).collect();
            let published = Published {
                id: *id,
                range: claim(&mut slots, sets),
                frontends: keys.into(),
                cluster_ips: cluster_ips.into_iter().collect(),
                source_ranges: ranges_of.remove(id).map(sorted).unwrap_or_default(),
                used: UsedEndpoints::NotCounted,
                kept: Box::default(),
            };
            services.insert(name.clone(), published);
        }
        // The service ports that had no room are not kept: the writes that follow find them again.
        let WithoutRoom { frontends: waiting, ports, changed, .. } = &self.entries.without_room;
        let changed = *changed || !waiting.is_empty() || !ports.is_empty();
        let without_room = WithoutRoom { changed, ..WithoutRoom::none() };
        let address_bits = AddressBits::of::<F>(frontends.keys());
        address_bits.write_all(&self.maps);
        self.entries = Entries {
            frontends,
            address_bits,
            services,
            cluster_ips: ClusterIps::none(),
            backends,
            stray_backends,
            slots,
            stray_source_ranges: ranges_of.into_values().flatten().collect(),
            source_ranges: source_ranges.len() as u32,
            without_room,
        };
        let cluster_ips = self.entries.services.values().flat_map(|published| &published.cluster_ips);
        let cluster_ips: Vec<_> = cluster_ips.copied().collect();
        self.use_cluster_ips(&cluster_ips);
        Ok(largest)
    }
}

fn emptied<K, V>(map: &mut FxHashMap<K, V>) -> FxHashMap<K, V> {
    let mut map = std::mem::take(map);
    map.clear();
    map
}

/// Returns the ids that no service can refer to, and the largest id.
fn adopt_backends<A: Copy + Eq + Hash>(
    mut found: Vec<(u32, Backend<A>)>,
    backends: &mut Backends<A>,
) -> (Vec<u32>, u32) {
    found.sort_unstable_by_key(|(id, _)| *id);
    let largest = found.last().map_or(0, |(id, _)| *id);
    let mut strays = Vec::new();
    for (id, backend) in found {
        let key = BackendKey::of(&backend);
        // If two ids have the same endpoint, the older one stays.
        if id == 0 || backends.contains_key(&key) {
            strays.push(id);
        } else {
            backends.insert(key, Uses::of(id, &backend));
        }
    }
    (strays, largest)
}

fn sorted<K: Ord>(mut keys: Vec<K>) -> Box<[K]> {
    keys.sort_unstable();
    keys.into()
}

/// Claims the range of a service's slots. Returns `None` if a part of it is another's or out of
/// bounds.
fn claim(slots: &mut Ranges, sets: [EndpointSet; 3]) -> Option<Range> {
    let range = entries::span(sets);
    slots.claim(range).then_some(range)
}

/// Groups keys by the service id that comes with each.
fn by_service<K>(keys: impl Iterator<Item = (u32, K)>) -> FxHashMap<u32, Vec<K>> {
    let mut of_service: FxHashMap<u32, Vec<K>> = FxHashMap::default();
    for (service, key) in keys {
        of_service.entry(service).or_default().push(key);
    }
    of_service
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(first: u32, count: u32) -> EndpointSet {
        EndpointSet::new(first, count)
    }

    #[test]
    fn a_range_is_claimed_once() {
        let mut slots = Ranges::new(100);
        assert_eq!(
            claim(&mut slots, [set(10, 5), set(12, 1), set(0, 0)]),
            Some(Range { first: 10, count: 5 })
        );
        assert_eq!(claim(&mut slots, [set(14, 3), set(0, 0), set(0, 0)]), None);
        assert_eq!(claim(&mut slots, [set(99, 2), set(0, 0), set(0, 0)]), None);
        assert_eq!(claim(&mut slots, [set(u32::MAX, 2), set(0, 0), set(0, 0)]), None);
        assert_eq!(slots.used(), 5);
    }

    #[test]
    fn a_service_without_endpoints_needs_no_range() {
        assert_eq!(claim(&mut Ranges::new(1), [set(0, 0); 3]), Some(Range::default()));
    }
}
