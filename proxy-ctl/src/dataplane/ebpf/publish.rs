//! The order of writes, so that a reader in the kernel finds the old or the new state of a service port, never a
//! mixture: backends, slots (always an unused range), the service (each endpoint set in one store), its name,
//! its frontends; then what is gone, in the reverse order.
//!
//! One port that cannot be written keeps its old state and does not stop the others.

use std::sync::Arc;

use proxy_common::{
    inventory::{Limit, table},
    layout::{EndpointSet, Frontend, FrontendKey, Service, ServiceName},
};
use rustc_hash::FxHashSet;

use super::{
    Error,
    allocate::{Range, Ranges},
    family::TableFamily,
    layout::{self, Arrangement},
    programmed::{BackendKey, Entries, Published, UsedEndpoints, Wanted},
    tables::{CommonTables, FamilyTables},
};
use crate::{
    dataplane::Applied,
    model::desired::{DesiredPort, Endpoints, ServicePortName},
    sys::grace::GracePeriod,
};

/// Backend ids are set aside in blocks of this many, one write of `settings` for each.
const BACKEND_ID_BLOCK: u32 = 1_024;

/// What both families share.
#[derive(Debug)]
pub(super) struct Common {
    pub(super) tables: CommonTables,
    /// Owners of `services`.
    pub(super) ids: Ranges,
    pub(super) next_backend: u32,
    /// Ids below are set aside in `settings.next_backend`.
    pub(super) backends_set_aside: u32,
    pub(super) grace: GracePeriod,
}

impl Common {
    /// An id that no backend ever had, also if the controller is killed at this moment.
    pub(super) fn backend_id(&mut self, applied: &mut Applied) -> Result<u32, Error> {
        let id = self.next_backend;
        let next = id.checked_add(1).ok_or(Error::BackendIdsExhausted)?;
        if next > self.backends_set_aside {
            let mut settings = self.tables.settings.get(&0)?.unwrap_or_default();
            settings.next_backend = id.saturating_add(BACKEND_ID_BLOCK);
            self.tables.settings.set(&0, &settings)?;
            applied.written += 1;
            self.backends_set_aside = settings.next_backend;
        }
        self.next_backend = next;
        Ok(id)
    }
}

/// The tables of one family and what is in them.
#[derive(Debug)]
pub(super) struct FamilyWriter<F: TableFamily> {
    pub(super) tables: FamilyTables<F>,
    pub(super) entries: Entries<F>,
}

/// What one call of the dataplane does to one family.
#[derive(Debug)]
pub(super) struct Writes<F: TableFamily> {
    pub(super) applied: Applied,
    pub(super) failures: Failures,
    names: Vec<(u32, ServiceName)>,
    pub(super) frontends: Vec<Wanted<F>>,
    /// With the id of the service that had them.
    stale_frontends: Vec<(FrontendKey<F::Address>, u32)>,
    gone: Vec<(u32, Option<Range>)>,
    pub(super) touched: Vec<BackendKey<F::Address>>,
    /// Backends that this call has inserted, of which no slot in use can know.
    pub(super) inserted: Vec<BackendKey<F::Address>>,
}

impl<F: TableFamily> Default for Writes<F> {
    fn default() -> Self {
        Self {
            applied: Applied::default(),
            failures: Failures::default(),
            names: Vec::new(),
            frontends: Vec::new(),
            stale_frontends: Vec::new(),
            gone: Vec::new(),
            touched: Vec::new(),
            inserted: Vec::new(),
        }
    }
}

/// What could not be done: how much, and the first reason.
#[derive(Debug, Default)]
pub(super) struct Failures {
    count: usize,
    first: Option<(String, Error)>,
}

impl Failures {
    pub(super) fn add(&mut self, what: impl ToString, error: Error) {
        self.count += 1;
        self.first.get_or_insert_with(|| (what.to_string(), error));
    }

    pub(super) fn merge(&mut self, other: Self) {
        self.count += other.count;
        if self.first.is_none() {
            self.first = other.first;
        }
    }

    pub(super) fn into_result(self) -> Result<(), Error> {
        match self.first {
            None => Ok(()),
            Some((what, source)) => {
                Err(Error::Incomplete { failed: self.count, what, source: Box::new(source) })
            }
        }
    }
}

impl<F: TableFamily> FamilyWriter<F> {
    /// Writes ports that are new or different, and removes others.
    pub(super) fn apply<'a>(
        &mut self,
        shared: &mut Common,
        changed: impl Iterator<Item = &'a Arc<DesiredPort>> + Clone,
        removed: impl Iterator<Item = &'a ServicePortName>,
    ) -> Writes<F> {
        let mut writes = Writes::default();
        self.publish_all(shared, changed, &mut writes);
        for name in removed {
            self.remove(name, &mut writes);
        }
        self.retire(shared, &mut writes);
        writes
    }

    /// As [`FamilyWriter::apply`], after adopting: what is not desired is removed.
    pub(super) fn resync(&mut self, shared: &mut Common, desired: &[&Arc<DesiredPort>]) -> Writes<F> {
        let mut writes = Writes::default();
        self.publish_all(shared, desired.iter().copied(), &mut writes);
        let wanted: FxHashSet<&ServicePortName> = desired.iter().map(|port| &port.name).collect();
        let undesired: Vec<_> =
            self.entries.services.keys().filter(|name| !wanted.contains(name)).cloned().collect();
        for name in &undesired {
            self.remove(name, &mut writes);
        }
        self.use_adopted_endpoints();
        self.drop_strays(&mut writes);
        self.retire(shared, &mut writes);
        writes
    }

    fn publish_all<'a>(
        &mut self,
        shared: &mut Common,
        changed: impl Iterator<Item = &'a Arc<DesiredPort>> + Clone,
        writes: &mut Writes<F>,
    ) {
        self.add_backends(shared, changed.clone(), writes);
        for port in changed {
            if let Err(error) = self.publish(shared, port, writes) {
                writes.failures.add(&port.name, error);
                self.remove_unused_insertions(writes);
            }
        }
        self.write_names(shared, writes);
        self.write_frontends(writes);
    }

    /// Publishes one port, all but its name and frontends, which are written together with those of others.
    fn publish(
        &mut self,
        shared: &mut Common,
        port: &Arc<DesiredPort>,
        writes: &mut Writes<F>,
    ) -> Result<(), Error> {
        let slots = self.use_backends(shared, port, writes)?;
        let old = self.entries.services.remove_entry(&port.name);
        let (old_name, old) = old.map_or((None, None), |(name, old)| (Some(name), Some(old)));
        let (id, range) = match self.write_service(shared, port, &slots, old.as_ref(), writes) {
            Ok(written) => written,
            Err(error) => {
                if let (Some(name), Some(old)) = (old_name, old) {
                    self.entries.services.insert(name, old);
                }
                self.release_backends(&port.name, &port.endpoints.all, writes);
                return Err(error);
            }
        };
        let wanted = layout::frontends::<F>(port);
        let keys: Box<[_]> = wanted.iter().map(|(key, _)| *key).collect();
        for (key, flags) in wanted {
            let frontend = Frontend { service: id, flags };
            let is_settled = self.entries.frontends.get(&key) == Some(&frontend)
                || self.entries.without_room.holds(&key, &frontend);
            if !is_settled {
                writes.frontends.push((key, frontend, port.name.clone()));
            }
        }
        if let Some(old) = old {
            for key in old.frontends.iter().filter(|key| !keys.contains(key)) {
                writes.stale_frontends.push((*key, id));
                self.entries.without_room.remove(key, id);
            }
            self.release_backends(&port.name, old.used.endpoints(), writes);
        }
        let used = UsedEndpoints::Desired(Arc::clone(port));
        self.entries
            .services
            .insert(port.name.clone(), Published { id, range: Some(range), frontends: keys, used });
        Ok(())
    }

    /// Writes slots and service where they differ; answers with the service's id and range.
    fn write_service(
        &mut self,
        shared: &mut Common,
        port: &DesiredPort,
        slots: &[F::Slot],
        old: Option<&Published<F>>,
        writes: &mut Writes<F>,
    ) -> Result<(u32, Range), Error> {
        let endpoints = &port.endpoints;
        let flags = layout::service_flags(port);
        let affinity_seconds = port.affinity_seconds.unwrap_or(0);
        let current = old.and_then(|old| shared.tables.services.get(old.id as usize)).unwrap_or_default();
        let same_sets = [
            (current.cluster, &endpoints.cluster),
            (current.internal, &endpoints.internal),
            (current.external, &endpoints.external),
        ]
        .into_iter()
        .all(|(set, indexes)| self.is_set(set, indexes, slots));
        if let Some(Published { id, range: Some(range), .. }) = old
            && same_sets
        {
            let service = Service { flags, affinity_seconds, ..current };
            if service != current {
                write_service(shared, *id, &service, &mut writes.applied)?;
            }
            return Ok((*id, *range));
        }
        let name = layout::name(&port.name).ok_or_else(|| Error::NameTooLong(port.name.clone()))?;
        let (range, sets) = self.write_slots(shared, endpoints, slots, writes)?;
        let service = Service {
            cluster: layout::placed(sets.cluster, range),
            internal: layout::placed(sets.internal, range),
            external: layout::placed(sets.external, range),
            flags,
            affinity_seconds,
        };
        let id = match old {
            Some(old) => old.id,
            None => match new_service_id(shared) {
                Ok(id) => id,
                Err(error) => {
                    self.entries.slots.release(range);
                    return Err(error);
                }
            },
        };
        write_service(shared, id, &service, &mut writes.applied)?;
        match old {
            Some(old) => self.entries.slots.retire(old.range.unwrap_or_default()),
            None => writes.names.push((id, name)),
        }
        Ok((id, range))
    }

    /// Does the set in the tables consist of exactly these slots?
    fn is_set(&self, set: EndpointSet, indexes: &[u32], slots: &[F::Slot]) -> bool {
        set.count as usize == indexes.len()
            && indexes.iter().zip(set.first as usize..).all(|(index, place)| {
                let found = self.tables.slots.get(place);
                found.is_some() && found.as_ref() == slots.get(*index as usize)
            })
    }

    fn write_slots(
        &mut self,
        shared: &mut Common,
        endpoints: &Endpoints,
        slots: &[F::Slot],
        writes: &mut Writes<F>,
    ) -> Result<(Range, Arrangement), Error> {
        let arrangement = Arrangement::of(endpoints);
        let full = || Error::Full {
            table: F::SLOTS,
            capacity: self.tables.slots.len() as u32,
            limit: Limit::Slots.name(),
        };
        let count = u32::try_from(arrangement.slots.len()).map_err(|_| full())?;
        let mut range = self.entries.slots.allocate(count);
        if range.is_none() && self.entries.slots.has_retired() {
            shared.grace.wait().map_err(Error::Grace)?;
            self.entries.slots.grace_period_over();
            range = self.entries.slots.allocate(count);
        }
        let range = range.ok_or_else(full)?;
        for (index, place) in arrangement.slots.iter().zip(range.first..) {
            let Some(slot) = slots.get(*index as usize) else { continue };
            if !self.tables.slots.set(place as usize, slot) {
                let error = self.tables.slots.provide(place as usize).err();
                self.entries.slots.release(range);
                return Err(error.map_or_else(full, |source| Error::Table { table: F::SLOTS, source }));
            }
            writes.applied.written += 1;
        }
        Ok((range, arrangement))
    }

    fn write_names(&mut self, shared: &Common, writes: &mut Writes<F>) {
        let (ids, names): (Vec<_>, Vec<_>) = std::mem::take(&mut writes.names).into_iter().unzip();
        match shared.tables.names.set_all(&ids, &names) {
            Ok(()) => writes.applied.written += ids.len() as u64,
            Err((done, error)) => {
                writes.applied.written += done as u64;
                writes.failures.add("names of service ports", error);
            }
        }
    }

    fn write_frontends(&mut self, writes: &mut Writes<F>) {
        let wanted = self.fit(writes);
        let keys: Vec<_> = wanted.iter().map(|(key, ..)| *key).collect();
        let values: Vec<_> = wanted.iter().map(|(_, frontend, _)| *frontend).collect();
        let mut next = 0;
        while next < wanted.len() {
            let written = match self.tables.frontends.set_all(&keys[next..], &values[next..]) {
                Ok(()) => wanted.len() - next,
                Err((done, error)) => {
                    if let Some((_, _, name)) = wanted.get(next + done) {
                        writes.failures.add(name, error);
                    }
                    done
                }
            };
            for (key, frontend, _) in &wanted[next..next + written] {
                self.entries.frontends.insert(*key, *frontend);
            }
            writes.applied.written += written as u64;
            // Beyond the one that failed, if one did.
            next += written + 1;
        }
    }

    fn remove(&mut self, name: &ServicePortName, writes: &mut Writes<F>) {
        let Some(old) = self.entries.services.remove(name) else { return };
        for key in &old.frontends {
            writes.stale_frontends.push((*key, old.id));
            self.entries.without_room.remove(key, old.id);
        }
        self.release_backends(name, old.used.endpoints(), writes);
        writes.gone.push((old.id, old.range));
    }

    /// Removes frontends without a service, and backends without users.
    fn drop_strays(&mut self, writes: &mut Writes<F>) {
        let owned: FxHashSet<_> =
            self.entries.services.values().flat_map(|published| published.frontends.iter()).collect();
        let strays = self.entries.frontends.iter().filter(|(key, _)| !owned.contains(key));
        writes.stale_frontends.extend(strays.map(|(key, frontend)| (*key, frontend.service)));
        writes.touched.extend(self.entries.backends.keys());
        for id in std::mem::take(&mut self.entries.stray_backends) {
            match self.tables.backends.remove(&id) {
                Ok(found) => writes.applied.removed += u64::from(found),
                Err(error) => writes.failures.add(format_args!("backend {id}"), error),
            }
        }
    }

    /// Removes what is gone, after everything new is in place.
    fn retire(&mut self, shared: &mut Common, writes: &mut Writes<F>) {
        let mut still_dialled = FxHashSet::default();
        for (key, id) in std::mem::take(&mut writes.stale_frontends) {
            // Another service may have taken it over.
            if self.entries.frontends.get(&key).is_none_or(|frontend| frontend.service != id) {
                continue;
            }
            match self.tables.frontends.remove(&key) {
                Ok(found) => {
                    writes.applied.removed += u64::from(found);
                    self.entries.frontends.remove(&key);
                }
                Err(error) => {
                    still_dialled.insert(id);
                    writes.failures.add("a frontend that is gone", error);
                }
            }
        }
        // What is gone has left room.
        self.write_frontends(writes);
        for (id, range) in std::mem::take(&mut writes.gone) {
            // Its frontend could not be removed: stays whole until the next resync.
            if still_dialled.contains(&id) {
                continue;
            }
            if let Err(error) = remove_service(shared, id, &mut writes.applied) {
                writes.failures.add(format_args!("service {id}"), error);
                continue;
            }
            shared.ids.retire(Range { first: id, count: 1 });
            self.entries.slots.retire(range.unwrap_or_default());
        }
        self.write_uses(writes);
    }
}

fn new_service_id(shared: &mut Common) -> Result<u32, Error> {
    let mut id = shared.ids.allocate(1);
    if id.is_none() && shared.ids.has_retired() {
        shared.grace.wait().map_err(Error::Grace)?;
        shared.ids.grace_period_over();
        id = shared.ids.allocate(1);
    }
    let full = || Error::Full {
        table: table::services,
        capacity: shared.ids.capacity(),
        limit: Limit::Services.name(),
    };
    let id = id.map(|range| range.first).ok_or_else(full)?;
    let counters = &mut shared.tables.service_counters;
    if id < counters.capacity() {
        counters.clear(id).map_err(|source| {
            shared.ids.release(Range { first: id, count: 1 });
            Error::Table { table: table::service_counters, source }
        })?;
    }
    Ok(id)
}

fn write_service(shared: &Common, id: u32, service: &Service, applied: &mut Applied) -> Result<(), Error> {
    if shared.tables.services.set(id as usize, service) {
        applied.written += 1;
        return Ok(());
    }
    let capacity = shared.tables.services.len() as u32;
    Err(Error::Full { table: table::services, capacity, limit: Limit::Services.name() })
}

pub(super) fn remove_service(shared: &Common, id: u32, applied: &mut Applied) -> Result<(), Error> {
    let found = shared.tables.services.get(id as usize).unwrap_or_default();
    if found != Service::default() && shared.tables.services.set(id as usize, &Service::default()) {
        applied.removed += 1;
    }
    if shared.tables.names.remove(&id)? {
        applied.removed += 1;
    }
    Ok(())
}
