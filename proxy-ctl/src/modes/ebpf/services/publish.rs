//! Writes service ports in such an order that a reader in the kernel finds the old or the new state
//! of each, never a mixture.
//!
//! The order is: backends; slots, always in an unused range; the service, each endpoint set in one
//! store; its name, its source ranges and its frontends. Then what is gone is removed in reverse
//! order. Last come the cluster-IP entries (`cluster_ips`).
//!
//! A service port that cannot be written keeps its old state and does not stop the others. One
//! without room waits (`reserve`).

use std::{io, sync::Arc};

use proxy_common::{
    inventory::{Limit, map_name},
    layout::{EndpointSet, FRONTEND_SOURCE_RANGES, Frontend, FrontendKey, Service},
};
use rustc_hash::FxHashSet;

use super::{
    allocate::Range,
    draining::with_draining,
    entries::{self, Arrangement},
    maglev,
    programmed::{BackendKey, Published, UsedEndpoints, Uses},
    reserve::{Reservation, ReservedSlots},
    writer::{Common, FamilyWriter, Writes},
};
use crate::{
    model::{
        desired::{DesiredPort, ServicePortName},
        objects::{Algorithm, Forwarding},
    },
    modes::{
        Applied,
        ebpf::{
            Error,
            error::FullMap,
            maps::{family::MapFamily, handles::SourceRangeKey},
        },
    },
    sys::{CallError, net::socket_diag::Transport},
};

/// The number of service ports that are written together. What is collected for one write is held
/// in memory until then.
const PORTS_WRITTEN_TOGETHER: usize = 256;

impl<F: MapFamily> FamilyWriter<F> {
    /// Writes ports that are new or different, and removes others.
    pub(crate) fn apply<'a>(
        &mut self,
        shared: &mut Common,
        changed: impl Iterator<Item = &'a Arc<DesiredPort>>,
        removed: impl Iterator<Item = &'a ServicePortName>,
    ) -> Writes<F> {
        let mut writes = Writes::default();
        self.publish_all(shared, changed, &mut writes);
        for name in removed {
            self.remove(name, &mut writes);
        }
        self.remove_gone(shared, &mut writes);
        writes
    }

    /// Does what [`FamilyWriter::apply`] does after an adoption, and removes what is not desired.
    pub(crate) fn resync(&mut self, shared: &mut Common, desired: &[&Arc<DesiredPort>]) -> Writes<F> {
        let mut writes = Writes::default();
        let strays = std::mem::take(&mut self.entries.stray_source_ranges);
        for id in self.remove_source_ranges(strays, &mut writes) {
            // No service may get this id, because the source ranges that are left would be open for
            // it.
            shared.ids.claim(Range { first: id, count: 1 });
        }
        self.publish_all(shared, desired.iter().copied(), &mut writes);
        let wanted: FxHashSet<&ServicePortName> = desired.iter().map(|port| &port.name).collect();
        let undesired: Vec<_> =
            self.entries.services.keys().filter(|name| !wanted.contains(name)).cloned().collect();
        for name in &undesired {
            self.remove(name, &mut writes);
        }
        self.use_adopted_endpoints();
        self.drop_strays(&mut writes);
        self.remove_gone(shared, &mut writes);
        writes
    }

    /// Publishes the ports that depend on the node's algorithm or forwarding, which have changed.
    pub(crate) fn publish_by_the_nodes_choices(&mut self, shared: &mut Common) -> Writes<F> {
        let mut writes = Writes::default();
        let published = self.entries.services.values().filter_map(|published| match &published.used {
            UsedEndpoints::Desired(port) => Some(port),
            UsedEndpoints::Adopted(_) | UsedEndpoints::NotCounted => None,
        });
        let is_waiting = |port: &Arc<DesiredPort>| self.entries.without_room.ports.contains_key(&port.name);
        let depends_on_the_node =
            |port: &Arc<DesiredPort>| port.algorithm.is_none() || port.forwarding != Some(Forwarding::Snat);
        let ports: Vec<_> =
            published.filter(|port| depends_on_the_node(port) && !is_waiting(port)).cloned().collect();
        self.publish_all(shared, ports.iter(), &mut writes);
        self.remove_gone(shared, &mut writes);
        writes
    }

    /// Publishes the ports that have room. The others wait.
    pub(super) fn publish_all<'a>(
        &mut self,
        shared: &mut Common,
        changed: impl Iterator<Item = &'a Arc<DesiredPort>>,
        writes: &mut Writes<F>,
    ) {
        let changed: Vec<_> = changed.map(|port| with_draining(port, shared.forwarding_of(port))).collect();
        let (reserved, refused) = self.reserve_all(shared, changed.iter().collect());
        for (port, error) in refused {
            if let Error::Full(full) = error {
                self.entries.without_room.insert_port(port, full);
            } else {
                self.entries.without_room.remove_port(&port.name);
                writes.failures.add(&port.name, error);
            }
        }
        for (port, _) in &reserved {
            self.entries.without_room.replace_port(port);
        }
        for (port, closed) in self.publish_reserved(shared, reserved, writes) {
            match closed {
                None => self.entries.without_room.remove_port(&port.name),
                Some(full) => self.entries.without_room.insert_port(port, full),
            }
        }
    }

    /// Returns the ports that are published. A port whose source ranges have no room comes with the
    /// map that lacks it.
    pub(super) fn publish_reserved<'a>(
        &mut self,
        shared: &mut Common,
        ports: Vec<(&'a Arc<DesiredPort>, Reservation)>,
        writes: &mut Writes<F>,
    ) -> Vec<(&'a Arc<DesiredPort>, Option<FullMap>)> {
        let mut published = Vec::with_capacity(ports.len());
        // If there may not be room for all frontends, it is decided for all of them together which
        // have room.
        let have_room = self.has_room_for_frontends(ports.iter().map(|(port, _)| *port));
        let mut ports = ports.into_iter().peekable();
        while ports.peek().is_some() {
            let together: Vec<_> = ports.by_ref().take(PORTS_WRITTEN_TOGETHER).collect();
            self.add_backends(shared, together.iter().map(|(port, _)| *port), writes);
            for (port, reservation) in together {
                match self.publish(shared, port, reservation, writes) {
                    Ok(closed) => published.push((port, closed)),
                    Err(error) => {
                        writes.failures.add(&port.name, error);
                        self.remove_unused_insertions(writes);
                    }
                }
            }
            // The backends that are left have a port that uses them.
            writes.inserted.clear();
            self.write_names(shared, writes);
            if have_room {
                self.write_frontends(writes);
            }
        }
        if !have_room {
            self.write_frontends(writes);
        }
        published
    }

    /// Publishes one port, except its name and frontends. These are written together with those of
    /// other ports.
    fn publish(
        &mut self,
        shared: &mut Common,
        port: &Arc<DesiredPort>,
        reservation: Reservation,
        writes: &mut Writes<F>,
    ) -> Result<Option<FullMap>, Error> {
        let slots = match self.use_backends(shared, port, writes) {
            Ok(slots) => slots,
            Err(error) => {
                self.release(shared, &port.name, reservation);
                return Err(error);
            }
        };
        let range = match self.write_service(shared, port, &slots, &reservation, writes) {
            Ok(range) => range,
            Err(error) => {
                self.release(shared, &port.name, reservation);
                self.release_backends(&port.name, &port.endpoints.all, writes);
                return Err(error);
            }
        };
        let id = reservation.id;
        let mut wanted = entries::frontends::<F>(port, shared.algorithm_of(port), shared.forwarding_of(port));
        let (source_ranges, without_ranges) = self.write_source_ranges(port, id, writes);
        if without_ranges.is_some() && source_ranges.is_empty() {
            wanted.retain(|(_, flags)| flags & FRONTEND_SOURCE_RANGES == 0);
        }
        let keys: Box<[_]> = wanted.iter().map(|(key, _)| *key).collect();
        for (key, flags) in wanted {
            let frontend = Frontend { service: id, flags };
            let is_settled = self.entries.frontends.get(&key) == Some(&frontend)
                || self.entries.without_room.holds(&key, &frontend);
            if !is_settled {
                writes.frontends.push((key, frontend, port.name.clone()));
            }
        }
        let cluster_ips = entries::cluster_ips::<F>(port);
        self.use_cluster_ips(&cluster_ips);
        let used = UsedEndpoints::Desired(Arc::clone(port));
        let kept = self.keep_backends(port);
        let now = Published {
            id,
            range: Some(range),
            frontends: keys.clone(),
            cluster_ips,
            source_ranges: source_ranges.clone(),
            used,
            kept,
        };
        let old = self.entries.services.remove(&port.name);
        // Inserting over the former entry would keep its key, and with it text that only a former
        // version of the port has.
        self.entries.services.insert(port.name.clone(), now);
        if let Some(old) = old {
            for key in old.frontends.iter().filter(|key| !keys.contains(key)) {
                writes.stale_frontends.push((*key, id));
                self.entries.without_room.remove(key, id);
            }
            self.release_cluster_ips(&old.cluster_ips);
            writes.stale_source_ranges.extend(missing_in(&source_ranges, &old.source_ranges));
            self.release_backends(&port.name, old.used.endpoints(), writes);
            self.stop_keeping_backends(&port.name, &old.kept, writes);
            if matches!(reservation.slots, ReservedSlots::Fresh(..)) {
                self.entries.slots.free_later(old.range.unwrap_or_default());
            }
        }
        match without_ranges {
            None => Ok(None),
            Some(Error::Full(full)) => Ok(Some(full)),
            // Everything else is published.
            Some(error) => Err(error),
        }
    }

    /// Returns the source ranges that the service port has now: those that it asks for, or those
    /// that it had before, with the error.
    fn write_source_ranges(
        &mut self,
        port: &DesiredPort,
        service: u32,
        writes: &mut Writes<F>,
    ) -> (Box<[SourceRangeKey<F>]>, Option<Error>) {
        let wanted = entries::source_ranges::<F>(port, service);
        let old = self.entries.services.get(&port.name).map(|old| old.source_ranges.clone());
        let old = old.unwrap_or_default();
        let new = missing_in(&old, &wanted);
        match self.insert_source_ranges(&new, writes) {
            Ok(()) => (wanted, None),
            Err(error) => (old, Some(error)),
        }
    }

    /// Inserts all of these source ranges or none.
    fn insert_source_ranges(
        &mut self,
        new: &[SourceRangeKey<F>],
        writes: &mut Writes<F>,
    ) -> Result<(), Error> {
        let capacity = self.maps.source_ranges.map().capacity();
        let free = capacity.saturating_sub(self.entries.source_ranges) as usize;
        if new.len() > free {
            let limit = Limit::SourceRanges;
            return Err(Error::Full(FullMap { name: F::SOURCE_RANGES, capacity, limit }));
        }
        for (done, key) in new.iter().enumerate() {
            if let Err(error) = self.maps.source_ranges.set(key, &0) {
                self.remove_source_ranges(new[..done].to_vec(), writes);
                return Err(error);
            }
            self.entries.source_ranges += 1;
            writes.applied.written += 1;
        }
        Ok(())
    }

    /// Removes source ranges, and returns the services of those that could not be removed.
    fn remove_source_ranges(
        &mut self,
        keys: Vec<SourceRangeKey<F>>,
        writes: &mut Writes<F>,
    ) -> FxHashSet<u32> {
        let mut left = FxHashSet::default();
        for key in keys {
            match self.maps.source_ranges.remove(&key) {
                Ok(found) => {
                    writes.applied.removed += u64::from(found);
                    self.entries.source_ranges = self.entries.source_ranges.saturating_sub(u32::from(found));
                }
                Err(error) => {
                    left.insert(key.data.service);
                    writes.failures.add("a source range that is gone", error);
                }
            }
        }
        left
    }

    /// Writes the slots and the service if they differ, and returns the range of the slots.
    fn write_service(
        &mut self,
        shared: &mut Common,
        port: &DesiredPort,
        slots: &[F::Slot],
        reservation: &Reservation,
        writes: &mut Writes<F>,
    ) -> Result<Range, Error> {
        let Reservation { id, slots: reserved } = reservation;
        let flags = entries::service_flags(port, shared.algorithm_of(port), shared.forwarding_of(port));
        let affinity_seconds = port.affinity_seconds.unwrap_or(0);
        let (range, sets) = match reserved {
            ReservedSlots::Same(range) => {
                let current = shared.maps.services.get(*id as usize).unwrap_or_default();
                let service = Service { flags, affinity_seconds, ..current };
                if service != current {
                    write_service(shared, *id, &service, &mut writes.applied)?;
                }
                return Ok(*range);
            }
            ReservedSlots::Fresh(range, arrangement) => (*range, arrangement),
        };
        let name = entries::name(&port.name).ok_or_else(|| Error::NameTooLong(port.name.clone()))?;
        self.write_slots(range, sets, port, slots, writes)?;
        let service = Service {
            cluster: entries::moved_into(sets.cluster, range),
            internal: entries::moved_into(sets.internal, range),
            external: entries::moved_into(sets.external, range),
            flags,
            affinity_seconds,
        };
        let is_new = !self.entries.services.contains_key(&port.name);
        if is_new {
            clear_counters(shared, *id)?;
        }
        write_service(shared, *id, &service, &mut writes.applied)?;
        if is_new {
            writes.names.push((*id, name));
        }
        Ok(range)
    }

    /// Returns true if the set in the maps consists of exactly these slots of the port, with the
    /// lookup table that belongs to them.
    pub(crate) fn is_set(
        &self,
        set: EndpointSet,
        indexes: &[u32],
        port: &DesiredPort,
        slots: &[F::Slot],
        algorithm: Algorithm,
    ) -> bool {
        let table_bits = maglev::table_bits(algorithm, entries::members(&port.endpoints, indexes));
        if (set.count() as usize, set.table_bits()) != (indexes.len(), table_bits) {
            return false;
        }
        let holds = |(index, slot_index): (u32, usize)| {
            let found = self.maps.slots.get(slot_index);
            found.is_some() && found.as_ref() == slots.get(index as usize)
        };
        entries::contents::<F>(port, indexes, table_bits).zip(set.first as usize..).all(holds)
    }

    fn write_slots(
        &self,
        range: Range,
        arrangement: &Arrangement,
        port: &DesiredPort,
        slots: &[F::Slot],
        writes: &mut Writes<F>,
    ) -> Result<(), Error> {
        let contents = arrangement.runs.iter().flat_map(|run| run.contents::<F>(port));
        for (index, slot_index) in contents.zip(range.first..) {
            let Some(slot) = slots.get(index as usize) else { continue };
            if !self.maps.slots.set(slot_index as usize, slot) {
                return Err(unwritten(F::SLOTS, self.maps.slots.provide(slot_index as usize)));
            }
            writes.applied.written += 1;
        }
        Ok(())
    }

    fn write_names(&mut self, shared: &Common, writes: &mut Writes<F>) {
        let (ids, names): (Vec<_>, Vec<_>) = std::mem::take(&mut writes.names).into_iter().unzip();
        match shared.maps.names.set_all(&ids, &names) {
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
            let written = match self.maps.frontends.set_all(&keys[next..], &values[next..]) {
                Ok(()) => wanted.len() - next,
                Err((done, error)) => {
                    if let Some((_, _, name)) = wanted.get(next + done) {
                        writes.failures.add(name, error);
                    }
                    done
                }
            };
            for (key, frontend, _) in &wanted[next..next + written] {
                let before = self.note_frontend(*key, *frontend);
                let is_anothers = before.is_some_and(|before| before.service != frontend.service);
                let is_closed =
                    before.is_some_and(|before| frontend.flags & !before.flags & FRONTEND_SOURCE_RANGES != 0);
                writes.has_new_frontends |= before.is_none() || is_anothers;
                let is_lost = is_anothers || is_closed;
                writes.lost.extend(Transport::from_number(key.protocol).filter(|_| is_lost));
            }
            writes.applied.written += written as u64;
            // This leaves out the frontend that failed, if one did.
            next += written + 1;
        }
    }

    fn remove(&mut self, name: &ServicePortName, writes: &mut Writes<F>) {
        self.entries.without_room.remove_port(name);
        let Some(old) = self.entries.services.remove(name) else { return };
        for key in &old.frontends {
            writes.stale_frontends.push((*key, old.id));
            self.entries.without_room.remove(key, old.id);
        }
        self.release_cluster_ips(&old.cluster_ips);
        self.release_backends(name, old.used.endpoints(), writes);
        self.stop_keeping_backends(name, &old.kept, writes);
        writes.stale_source_ranges.extend(old.source_ranges);
        writes.gone.push((old.id, old.range));
    }

    /// Removes frontends without a service, and backends without users.
    fn drop_strays(&mut self, writes: &mut Writes<F>) {
        let owned: FxHashSet<_> =
            self.entries.services.values().flat_map(|published| published.frontends.iter()).collect();
        let is_stray = |key: &FrontendKey<_>| !owned.contains(key) && !key.is_cluster_ip();
        let strays = self.entries.frontends.iter().filter(|(key, _)| is_stray(*key));
        writes.stale_frontends.extend(strays.map(|(key, frontend)| (*key, frontend.service)));
        self.release_stray_cluster_ip_entries();
        let is_to_be_written =
            |(key, uses): &(&BackendKey<_>, &Uses)| uses.is_unused() || !uses.is_written(&uses.wanted(*key));
        let backends = self.entries.backends.iter().filter(is_to_be_written);
        writes.touched.extend(backends.map(|(key, _)| *key));
        if !self.entries.stray_backends.is_empty() {
            writes.lost.extend([Transport::Tcp, Transport::Udp]);
        }
        for id in std::mem::take(&mut self.entries.stray_backends) {
            match self.maps.backends.remove(&id) {
                Ok(found) => writes.applied.removed += u64::from(found),
                Err(error) => writes.failures.add(format_args!("backend {id}"), error),
            }
        }
    }

    /// Removes what is gone, after everything new is in place.
    pub(crate) fn remove_gone(&mut self, shared: &mut Common, writes: &mut Writes<F>) {
        self.remove_gone_cluster_ip_entries(writes);
        let mut kept = FxHashSet::default();
        for (key, id) in std::mem::take(&mut writes.stale_frontends) {
            // Another service may have taken over the frontend.
            if self.entries.frontends.get(&key).is_none_or(|frontend| frontend.service != id) {
                continue;
            }
            match self.maps.frontends.remove(&key) {
                Ok(found) => {
                    writes.applied.removed += u64::from(found);
                    writes.lost.extend(Transport::from_number(key.protocol));
                    self.forget_frontend(&key);
                }
                Err(error) => {
                    kept.insert(id);
                    writes.failures.add("a frontend that is gone", error);
                }
            }
        }
        // The frontends that are gone have left room.
        self.write_frontends(writes);
        let stale = std::mem::take(&mut writes.stale_source_ranges);
        kept.extend(self.remove_source_ranges(stale, writes));
        for (id, range) in std::mem::take(&mut writes.gone) {
            // A frontend or a source range of the service could not be removed, so the service
            // stays until the next resync.
            if kept.contains(&id) {
                continue;
            }
            if let Err(error) = remove_service(shared, id, &mut writes.applied) {
                writes.failures.add(format_args!("service {id}"), error);
                continue;
            }
            shared.ids.free_later(Range { first: id, count: 1 });
            self.entries.slots.free_later(range.unwrap_or_default());
        }
        self.write_uses(writes);
        self.write_cluster_ip_entries(writes);
        shared.is_epoch_over |= writes.has_new_frontends || writes.applied.removed > 0;
        shared.lost_backends.append(&mut writes.lost);
    }
}

/// Returns those of `wanted` that are not among `present`, which is sorted.
fn missing_in<K: Copy + Ord>(present: &[K], wanted: &[K]) -> Vec<K> {
    if present == wanted {
        return Vec::new();
    }
    wanted.iter().filter(|key| present.binary_search(key).is_err()).copied().collect()
}

/// Resets the counters of a service id before it is reused for another service port.
fn clear_counters(shared: &mut Common, id: u32) -> Result<(), Error> {
    let counters = &mut shared.maps.service_counters;
    if id < counters.capacity() {
        counters.clear(id).map_err(|source| Error::Map { name: map_name::service_counters, source })?;
    }
    Ok(())
}

fn write_service(shared: &Common, id: u32, service: &Service, applied: &mut Applied) -> Result<(), Error> {
    if shared.maps.services.set(id as usize, service) {
        applied.written += 1;
        return Ok(());
    }
    Err(unwritten(map_name::services, shared.maps.services.provide(id as usize)))
}

/// Returns the error for an element of a mapped array that could not be written.
fn unwritten(name: &'static str, provided: Result<(), CallError>) -> Error {
    let beyond_the_end = || CallError::new("writing to memory", io::Error::from_raw_os_error(libc::ERANGE));
    Error::Map { name, source: provided.err().unwrap_or_else(beyond_the_end) }
}

pub(crate) fn remove_service(shared: &Common, id: u32, applied: &mut Applied) -> Result<(), Error> {
    let found = shared.maps.services.get(id as usize).unwrap_or_default();
    if found != Service::default() && shared.maps.services.set(id as usize, &Service::default()) {
        applied.removed += 1;
    }
    if shared.maps.names.remove(&id)? {
        applied.removed += 1;
    }
    Ok(())
}
