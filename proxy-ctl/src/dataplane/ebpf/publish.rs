//! The order of writes, so that a reader in the kernel finds the old or the new state of a service port, never a
//! mixture: backends, slots (always a range nobody reads), the service (each endpoint set in one store), its name,
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
    programmed::{BackendKey, Image, Published, UsedEndpoints},
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
pub(super) struct Shared {
    pub(super) tables: CommonTables,
    /// Owners of `services`.
    pub(super) ids: Ranges,
    pub(super) next_backend: u32,
    /// Ids below are set aside in `settings.next_backend`.
    pub(super) backends_set_aside: u32,
    pub(super) grace: GracePeriod,
}

impl Shared {
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
pub(super) struct Plane<F: TableFamily> {
    pub(super) tables: FamilyTables<F>,
    pub(super) image: Image<F>,
}

/// What one call of the dataplane does to one family.
#[derive(Debug)]
pub(super) struct Round<F: TableFamily> {
    pub(super) applied: Applied,
    pub(super) failures: Failures,
    names: Vec<(u32, ServiceName)>,
    frontends: Vec<(FrontendKey<F::Address>, Frontend, ServicePortName)>,
    /// With the id of the service that had them.
    stale_frontends: Vec<(FrontendKey<F::Address>, u32)>,
    gone: Vec<(u32, Option<Range>)>,
    pub(super) touched: Vec<BackendKey<F::Address>>,
    /// Backends that this round has inserted, of which no slot in use can know.
    pub(super) inserted: Vec<BackendKey<F::Address>>,
}

impl<F: TableFamily> Default for Round<F> {
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

impl<F: TableFamily> Plane<F> {
    /// Writes ports that are new or different, and removes others.
    pub(super) fn apply<'a>(
        &mut self,
        shared: &mut Shared,
        changed: impl Iterator<Item = &'a Arc<DesiredPort>> + Clone,
        removed: impl Iterator<Item = &'a ServicePortName>,
    ) -> Round<F> {
        let mut round = Round::default();
        self.publish_all(shared, changed, &mut round);
        for name in removed {
            self.remove(name, &mut round);
        }
        self.retire(shared, &mut round);
        round
    }

    /// As [`Plane::apply`], on an image that was just adopted: what is not desired goes.
    pub(super) fn resync(&mut self, shared: &mut Shared, desired: &[&Arc<DesiredPort>]) -> Round<F> {
        let mut round = Round::default();
        self.publish_all(shared, desired.iter().copied(), &mut round);
        let wanted: FxHashSet<&ServicePortName> = desired.iter().map(|port| &port.name).collect();
        let undesired: Vec<_> =
            self.image.services.keys().filter(|name| !wanted.contains(name)).cloned().collect();
        for name in &undesired {
            self.remove(name, &mut round);
        }
        self.use_adopted_endpoints();
        self.drop_strays(&mut round);
        self.retire(shared, &mut round);
        round
    }

    fn publish_all<'a>(
        &mut self,
        shared: &mut Shared,
        changed: impl Iterator<Item = &'a Arc<DesiredPort>> + Clone,
        round: &mut Round<F>,
    ) {
        self.add_backends(shared, changed.clone(), round);
        for port in changed {
            if let Err(error) = self.publish(shared, port, round) {
                round.failures.add(&port.name, error);
                self.remove_unused_insertions(round);
            }
        }
        self.write_names(shared, round);
        self.write_frontends(round);
    }

    /// Publishes one port, all but its name and frontends, which are written together with those of others.
    fn publish(
        &mut self,
        shared: &mut Shared,
        port: &Arc<DesiredPort>,
        round: &mut Round<F>,
    ) -> Result<(), Error> {
        let slots = self.use_backends(shared, port, round)?;
        let old = self.image.services.remove_entry(&port.name);
        let (old_name, old) = old.map_or((None, None), |(name, old)| (Some(name), Some(old)));
        let (id, range) = match self.write_service(shared, port, &slots, old.as_ref(), round) {
            Ok(written) => written,
            Err(error) => {
                if let (Some(name), Some(old)) = (old_name, old) {
                    self.image.services.insert(name, old);
                }
                self.release_backends(&port.name, &port.endpoints.all, round);
                return Err(error);
            }
        };
        let wanted = layout::frontends::<F>(port);
        let keys: Box<[_]> = wanted.iter().map(|(key, _)| *key).collect();
        for (key, flags) in wanted {
            let frontend = Frontend { service: id, flags };
            if self.image.frontends.get(&key) != Some(&frontend) {
                round.frontends.push((key, frontend, port.name.clone()));
            }
        }
        if let Some(old) = old {
            let stale = old.frontends.iter().filter(|key| !keys.contains(key));
            round.stale_frontends.extend(stale.map(|key| (*key, id)));
            self.release_backends(&port.name, old.used.endpoints(), round);
        }
        let used = UsedEndpoints::Desired(Arc::clone(port));
        self.image
            .services
            .insert(port.name.clone(), Published { id, range: Some(range), frontends: keys, used });
        Ok(())
    }

    /// Writes slots and service where they differ; answers with the service's id and range.
    fn write_service(
        &mut self,
        shared: &mut Shared,
        port: &DesiredPort,
        slots: &[F::Slot],
        old: Option<&Published<F>>,
        round: &mut Round<F>,
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
                write_service(shared, *id, &service, &mut round.applied)?;
            }
            return Ok((*id, *range));
        }
        let name = layout::name(&port.name).ok_or_else(|| Error::NameTooLong(port.name.clone()))?;
        let (range, sets) = self.write_slots(shared, endpoints, slots, round)?;
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
                    self.image.slots.release(range);
                    return Err(error);
                }
            },
        };
        write_service(shared, id, &service, &mut round.applied)?;
        match old {
            Some(old) => self.image.slots.retire(old.range.unwrap_or_default()),
            None => round.names.push((id, name)),
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
        shared: &mut Shared,
        endpoints: &Endpoints,
        slots: &[F::Slot],
        round: &mut Round<F>,
    ) -> Result<(Range, Arrangement), Error> {
        let arrangement = Arrangement::of(endpoints);
        let full = || Error::Full {
            table: F::SLOTS,
            capacity: self.tables.slots.len() as u32,
            limit: Limit::Slots.name(),
        };
        let count = u32::try_from(arrangement.slots.len()).map_err(|_| full())?;
        let mut range = self.image.slots.allocate(count);
        if range.is_none() && self.image.slots.has_retired() {
            shared.grace.wait().map_err(Error::Grace)?;
            self.image.slots.grace_period_over();
            range = self.image.slots.allocate(count);
        }
        let range = range.ok_or_else(full)?;
        for (index, place) in arrangement.slots.iter().zip(range.first..) {
            let Some(slot) = slots.get(*index as usize) else { continue };
            if !self.tables.slots.set(place as usize, slot) {
                let error = self.tables.slots.provide(place as usize).err();
                self.image.slots.release(range);
                return Err(error.map_or_else(full, |source| Error::Table { table: F::SLOTS, source }));
            }
            round.applied.written += 1;
        }
        Ok((range, arrangement))
    }

    fn write_names(&mut self, shared: &Shared, round: &mut Round<F>) {
        let (ids, names): (Vec<_>, Vec<_>) = std::mem::take(&mut round.names).into_iter().unzip();
        match shared.tables.names.set_all(&ids, &names) {
            Ok(()) => round.applied.written += ids.len() as u64,
            Err((done, error)) => {
                round.applied.written += done as u64;
                round.failures.add("names of service ports", error);
            }
        }
    }

    fn write_frontends(&mut self, round: &mut Round<F>) {
        let wanted = std::mem::take(&mut round.frontends);
        let keys: Vec<_> = wanted.iter().map(|(key, ..)| *key).collect();
        let values: Vec<_> = wanted.iter().map(|(_, frontend, _)| *frontend).collect();
        let mut next = 0;
        while next < wanted.len() {
            let written = match self.tables.frontends.set_all(&keys[next..], &values[next..]) {
                Ok(()) => wanted.len() - next,
                Err((done, error)) => {
                    if let Some((_, _, name)) = wanted.get(next + done) {
                        round.failures.add(name, error);
                    }
                    done
                }
            };
            for (key, frontend, _) in &wanted[next..next + written] {
                self.image.frontends.insert(*key, *frontend);
            }
            round.applied.written += written as u64;
            // Beyond the one that failed, if one did.
            next += written + 1;
        }
    }

    fn remove(&mut self, name: &ServicePortName, round: &mut Round<F>) {
        let Some(old) = self.image.services.remove(name) else { return };
        round.stale_frontends.extend(old.frontends.iter().map(|key| (*key, old.id)));
        self.release_backends(name, old.used.endpoints(), round);
        round.gone.push((old.id, old.range));
    }

    /// Frontends that belong to nobody, and backends that nobody uses.
    fn drop_strays(&mut self, round: &mut Round<F>) {
        let owned: FxHashSet<_> =
            self.image.services.values().flat_map(|published| published.frontends.iter()).collect();
        let strays = self.image.frontends.iter().filter(|(key, _)| !owned.contains(key));
        round.stale_frontends.extend(strays.map(|(key, frontend)| (*key, frontend.service)));
        round.touched.extend(self.image.backends.keys());
        for id in std::mem::take(&mut self.image.stray_backends) {
            match self.tables.backends.remove(&id) {
                Ok(found) => round.applied.removed += u64::from(found),
                Err(error) => round.failures.add(format_args!("backend {id}"), error),
            }
        }
    }

    /// Removes what is gone, after everything new is in place.
    fn retire(&mut self, shared: &mut Shared, round: &mut Round<F>) {
        let mut still_dialled = FxHashSet::default();
        for (key, id) in std::mem::take(&mut round.stale_frontends) {
            // Another service may have taken it over.
            if self.image.frontends.get(&key).is_none_or(|frontend| frontend.service != id) {
                continue;
            }
            match self.tables.frontends.remove(&key) {
                Ok(found) => {
                    round.applied.removed += u64::from(found);
                    self.image.frontends.remove(&key);
                }
                Err(error) => {
                    still_dialled.insert(id);
                    round.failures.add("a frontend that is gone", error);
                }
            }
        }
        for (id, range) in std::mem::take(&mut round.gone) {
            // Its frontend could not be removed: stays whole until the next resync.
            if still_dialled.contains(&id) {
                continue;
            }
            if let Err(error) = remove_service(shared, id, &mut round.applied) {
                round.failures.add(format_args!("service {id}"), error);
                continue;
            }
            shared.ids.retire(Range { first: id, count: 1 });
            self.image.slots.retire(range.unwrap_or_default());
        }
        self.write_uses(round);
    }
}

fn new_service_id(shared: &mut Shared) -> Result<u32, Error> {
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
    let counters = &shared.tables.service_counters;
    if id < counters.capacity() {
        counters.clear(id).map_err(|source| {
            shared.ids.release(Range { first: id, count: 1 });
            Error::Table { table: table::service_counters, source }
        })?;
    }
    Ok(id)
}

fn write_service(shared: &Shared, id: u32, service: &Service, applied: &mut Applied) -> Result<(), Error> {
    if shared.tables.services.set(id as usize, service) {
        applied.written += 1;
        return Ok(());
    }
    let capacity = shared.tables.services.len() as u32;
    Err(Error::Full { table: table::services, capacity, limit: Limit::Services.name() })
}

pub(super) fn remove_service(shared: &Shared, id: u32, applied: &mut Applied) -> Result<(), Error> {
    let found = shared.tables.services.get(id as usize).unwrap_or_default();
    if found != Service::default() && shared.tables.services.set(id as usize, &Service::default()) {
        applied.removed += 1;
    }
    if shared.tables.names.remove(&id)? {
        applied.removed += 1;
    }
    Ok(())
}
