//! Reserves room for a service port in `services`, `slots4/6` and `backends4/6`. Either all that it
//! needs is reserved before anything of it is written, or the port waits.
//!
//! A published port is not removed for one that waits. If it has no room for its new endpoints, it
//! is served with those that it has and that are still desired. An endpoint that is gone is left
//! out, because its address may be another pod's tomorrow.

use std::sync::Arc;

use proxy_common::inventory::{Limit, map_name};
use rustc_hash::FxHashSet;

use super::{
    allocate::Range,
    draining::has_weight,
    entries::{self, Arrangement, is_draining},
    programmed::{BackendKey, UsedEndpoints, Waiting, WithoutRoom},
    uses::backend_key,
    writer::{Common, FamilyWriter, Writes},
};
use crate::{
    model::{
        desired::{DesiredPort, Endpoints, FrontendKind, ServicePortName},
        objects::{Algorithm, DEFAULT_WEIGHT},
    },
    modes::ebpf::{Error, error::FullMap, maps::family::MapFamily},
};

/// The id and the slots that are reserved for a service port.
#[derive(Debug)]
pub(crate) struct Reservation {
    /// The index into `services`.
    pub(crate) id: u32,
    pub(crate) slots: ReservedSlots,
}

#[derive(Debug)]
pub(crate) enum ReservedSlots {
    /// The endpoint sets in the maps are already the desired ones.
    Same(Range),
    Fresh(Range, Arrangement),
}

/// The backends that are to be inserted for the ports that have room.
#[derive(Debug)]
struct NewBackends<A> {
    /// The number of free backends; `None` if there is room for all that these ports can need.
    room: Option<usize>,
    keys: FxHashSet<BackendKey<A>>,
}

type Ports<'a> = Vec<&'a Arc<DesiredPort>>;
type Refused<'a> = (&'a Arc<DesiredPort>, Error);

impl<F: MapFamily> FamilyWriter<F> {
    /// Reserves room for as many of the ports as possible. Each other port is returned with
    /// [`Error::Full`], or with the reason why it can never be written.
    ///
    /// Published ports come first, so that they keep their room. Ports with ClusterIPs or node
    /// ports come before those that have external addresses only.
    pub(super) fn reserve_all<'a>(
        &mut self,
        shared: &mut Common,
        mut ports: Ports<'a>,
    ) -> (Vec<(&'a Arc<DesiredPort>, Reservation)>, Vec<Refused<'a>>) {
        let is_internal = |kind| matches!(kind, FrontendKind::ClusterIp | FrontendKind::NodePort);
        ports.sort_by_cached_key(|port| {
            let is_published = self.entries.services.contains_key(&port.name);
            (!is_published, !port.frontends.iter().any(|frontend| is_internal(frontend.kind)))
        });
        let (mut reserved, mut refused) = (Vec::with_capacity(ports.len()), Vec::new());
        let used = self.entries.backends.len() + self.entries.stray_backends.len();
        let free = (self.maps.backends.map().capacity() as usize).saturating_sub(used);
        let most: usize = ports.iter().map(|port| port.endpoints.all.len()).sum();
        let room = (most > free).then_some(free);
        let mut new = NewBackends { room, keys: FxHashSet::default() };
        for port in ports {
            match self.reserve(shared, port, &mut new) {
                Ok(reservation) => reserved.push((port, reservation)),
                Err(error) => refused.push((port, error)),
            }
        }
        (reserved, refused)
    }

    fn reserve(
        &mut self,
        shared: &mut Common,
        port: &DesiredPort,
        new: &mut NewBackends<F::Address>,
    ) -> Result<Reservation, Error> {
        let old = self.entries.services.get(&port.name).map(|old| (old.id, old.range));
        if let Some((id, Some(range))) = old
            && self.has_sets(shared, id, port)
        {
            return Ok(Reservation { id, slots: ReservedSlots::Same(range) });
        }
        entries::name(&port.name).ok_or_else(|| Error::NameTooLong(port.name.clone()))?;
        if old.is_none() && !shared.ids.has_room_for(1) {
            return Err(Error::Full(services_full(shared)));
        }
        let capacity = self.maps.slots.len() as u32;
        let full = || Error::Full(FullMap { name: F::SLOTS, capacity, limit: Limit::Slots });
        // Each endpoint has at least one slot. That is checked first, because it costs less than
        // what follows.
        let least = u32::try_from(port.endpoints.all.len()).map_err(|_| full())?;
        if !self.entries.slots.has_room_for(least) {
            return Err(full());
        }
        let added = self.backends_to_add(port, new)?;
        let arrangement = Arrangement::of(&port.endpoints, shared.algorithm_of(port));
        let range = self.entries.slots.allocate(arrangement.slot_count()).ok_or_else(full)?;
        let id = old.map(|(id, _)| id).or_else(|| shared.ids.allocate(1).map(|id| id.first));
        let Some(id) = id else {
            self.entries.slots.release(range);
            return Err(Error::Full(services_full(shared)));
        };
        new.keys.extend(added);
        Ok(Reservation { id, slots: ReservedSlots::Fresh(range, arrangement) })
    }

    /// Returns the backends that the port needs and that nobody has yet. They are left out if there
    /// is room for all anyway.
    fn backends_to_add(
        &self,
        port: &DesiredPort,
        new: &NewBackends<F::Address>,
    ) -> Result<Vec<BackendKey<F::Address>>, Error> {
        let Some(room) = new.room else { return Ok(Vec::new()) };
        let room = room.saturating_sub(new.keys.len());
        let mut added = Vec::new();
        for endpoint in &port.endpoints.all {
            let Some(key) = backend_key::<F>(&port.name, endpoint) else { continue };
            if self.entries.backends.contains_key(&key) || new.keys.contains(&key) {
                continue;
            }
            if added.len() == room {
                let capacity = self.maps.backends.map().capacity();
                return Err(Error::Full(FullMap { name: F::BACKENDS, capacity, limit: Limit::Backends }));
            }
            added.push(key);
        }
        Ok(added)
    }

    /// Returns true if the maps hold the port's endpoint sets in the service of this id.
    pub(super) fn has_sets(&self, shared: &Common, id: u32, port: &DesiredPort) -> bool {
        let Some(slots) = self.slots_of(port) else { return false };
        let current = shared.maps.services.get(id as usize).unwrap_or_default();
        let Endpoints { cluster, internal, external, .. } = &port.endpoints;
        let algorithm = shared.algorithm_of(port);
        [(current.cluster, cluster), (current.internal, internal), (current.external, external)]
            .into_iter()
            .all(|(set, indexes)| self.is_set(set, indexes, port, &slots, algorithm))
    }

    /// Gives back what was reserved and not written.
    pub(crate) fn release(&mut self, shared: &mut Common, name: &ServicePortName, unused: Reservation) {
        let Reservation { id, slots } = unused;
        if let ReservedSlots::Fresh(range, _) = slots {
            self.entries.slots.release(range);
        }
        if !self.entries.services.contains_key(name) {
            shared.ids.release(Range { first: id, count: 1 });
        }
    }

    /// Publishes the ports that wait for room in `services`, `slots4/6` or `backends4/6` and have
    /// it now.
    pub(crate) fn publish_waiting(&mut self, shared: &mut Common) -> Writes<F> {
        let mut writes = Writes::default();
        if !self.entries.without_room.ports.is_empty() {
            self.publish_those_with_room(shared, &mut writes);
            if !self.is_about_to_grow() && self.leave_endpoints_that_are_gone(shared, &mut writes) {
                self.publish_those_with_room(shared, &mut writes);
            }
        }
        if self.entries.without_room.is_unplanned || self.entries.cluster_ips.missing() > 0 {
            self.remove_gone(shared, &mut writes);
        }
        writes
    }

    fn is_about_to_grow(&self) -> bool {
        let WithoutRoom { ports, may_grow, .. } = &self.entries.without_room;
        ports.values().any(|one| may_grow.contains(&one.full.limit))
    }

    fn publish_those_with_room(&mut self, shared: &mut Common, writes: &mut Writes<F>) {
        loop {
            self.wait_for_grace_period(shared, writes);
            let waiting: Vec<_> =
                self.entries.without_room.ports.values().map(|one| Arc::clone(&one.port)).collect();
            self.publish_all(shared, waiting.iter(), writes);
            self.remove_gone(shared, writes);
            let still = self.entries.without_room.ports.len();
            if still == 0 || still == waiting.len() {
                return;
            }
        }
    }

    /// Waits for a grace period if a port may wait for slots or ids that were given back.
    fn wait_for_grace_period(&mut self, shared: &mut Common, writes: &mut Writes<F>) {
        let mut waiting = self.entries.without_room.ports.values();
        let is_wanted = waiting.any(|one| one.full.limit != Limit::Backends);
        if !is_wanted || !(self.entries.slots.has_pending_free() || shared.ids.has_pending_free()) {
            return;
        }
        match shared.grace.wait() {
            Ok(()) => {
                shared.ids.grace_period_over();
                self.entries.slots.grace_period_over();
            }
            Err(source) => writes.failures.add("service ports that wait for room", Error::Grace(source)),
        }
    }

    /// Publishes waiting ports in a form that needs less room, and returns true if that differs
    /// from what is served. A published port gets those of its desired endpoints that it has. A
    /// port that lacks room for a lookup table gets none.
    fn leave_endpoints_that_are_gone(&mut self, shared: &mut Common, writes: &mut Writes<F>) -> bool {
        let waiting = self.entries.without_room.ports.values();
        let reduced: Vec<_> = waiting.filter_map(|waiting| self.reduced(shared, waiting)).collect();
        for port in &reduced {
            let is_published = self.entries.services.contains_key(&port.name);
            if !self.publish_at_once(shared, port, writes) && is_published {
                self.publish_in_its_own_slots(shared, port, writes);
            }
        }
        !reduced.is_empty()
    }

    /// Publishes a port for which no slot is free, by giving back its own slots for a grace period.
    ///
    /// Only one port does so at a time, so each finds at least as many slots as it had. `reduced`
    /// is served if they are not enough for all of its endpoints.
    fn publish_in_its_own_slots(
        &mut self,
        shared: &mut Common,
        reduced: &Arc<DesiredPort>,
        writes: &mut Writes<F>,
    ) {
        self.publish_at_once(shared, &Arc::new(with_endpoints(reduced, |_| false)), writes);
        self.wait_for_grace_period(shared, writes);
        let name = &reduced.name;
        if let Some(waiting) = self.entries.without_room.ports.get(name).map(|one| Arc::clone(&one.port)) {
            self.publish_all(shared, std::iter::once(&waiting), writes);
            self.remove_gone(shared, writes);
        }
        if self.entries.without_room.ports.contains_key(name) {
            self.publish_at_once(shared, reduced, writes);
        }
    }

    /// Publishes one port, and returns false if it has no room.
    fn publish_at_once(
        &mut self,
        shared: &mut Common,
        port: &Arc<DesiredPort>,
        writes: &mut Writes<F>,
    ) -> bool {
        let (reserved, refused) = self.reserve_all(shared, vec![port]);
        self.publish_reserved(shared, reserved, writes);
        self.remove_gone(shared, writes);
        for (port, error) in refused {
            if matches!(error, Error::Full(_)) {
                return false;
            }
            writes.failures.add(&port.name, error);
        }
        true
    }

    /// Returns the port with those of its endpoints that it has, and without lookup tables.
    ///
    /// It is `None` if that is published already, if the port is not published and needs no lookup
    /// table, or if it waits for source ranges.
    fn reduced(&self, shared: &Common, Waiting { port, full }: &Waiting) -> Option<Arc<DesiredPort>> {
        if full.limit == Limit::SourceRanges {
            return None;
        }
        let has_tables = Arrangement::of(&port.endpoints, shared.algorithm_of(port)).has_tables();
        let equal = has_tables.then(|| without_tables(port));
        let Some(published) = self.entries.services.get(&port.name) else { return equal.map(Arc::new) };
        let (used, port) = (&published.used, equal.as_ref().unwrap_or(port));
        let held: FxHashSet<_> = used.endpoints().iter().map(|one| (one.address, one.port)).collect();
        let reduced = with_endpoints(port, |index| {
            port.endpoints.all.get(index as usize).is_some_and(|one| held.contains(&(one.address, one.port)))
        });
        let is_published = matches!(used, UsedEndpoints::Desired(published) if **published == reduced);
        (!is_published).then(|| Arc::new(reduced))
    }
}

/// Returns the port with some of its endpoints, by their indexes. A port without any refuses
/// clients, and does not drop their packets.
fn with_endpoints(port: &DesiredPort, is_kept: impl Fn(u32) -> bool) -> DesiredPort {
    let Endpoints { all, cluster, internal, external, any, need_snat, unused } = &port.endpoints;
    let kept: Vec<u32> = (0..).take(all.len()).filter(|index| is_kept(*index)).collect();
    let set = |indexes: &[u32]| -> Arc<[u32]> {
        let found = indexes.iter().filter_map(|index| kept.binary_search(index).ok());
        found.filter_map(|index| u32::try_from(index).ok()).collect()
    };
    // Flows and sockets stay with the endpoints that are left out, as far as these have a backend.
    let left_out =
        (0..).zip(all).filter(|(index, _)| kept.binary_search(index).is_err()).map(|(_, one)| *one);
    let endpoints = Endpoints {
        all: kept.iter().filter_map(|index| all.get(*index as usize)).copied().collect(),
        cluster: set(cluster),
        internal: set(internal),
        external: set(external),
        any: *any && !kept.is_empty(),
        need_snat: *need_snat,
        unused: unused.iter().copied().chain(left_out).collect(),
    };
    DesiredPort { endpoints, ..port.clone() }
}

/// Returns the port with endpoints that are chosen at random with equal shares.
fn without_tables(port: &DesiredPort) -> DesiredPort {
    let has_others = has_weight(&port.endpoints);
    let is_draining = |index: u32| port.endpoints.all.get(index as usize).is_some_and(is_draining);
    let drawn = with_endpoints(port, |index| !(has_others && is_draining(index)));
    let mut equal = DesiredPort { algorithm: Some(Algorithm::Random), ..drawn };
    equal.endpoints.all.iter_mut().for_each(|endpoint| endpoint.weight = DEFAULT_WEIGHT);
    equal
}

fn services_full(shared: &Common) -> FullMap {
    FullMap { name: map_name::services, capacity: shared.ids.capacity(), limit: Limit::Services }
}
