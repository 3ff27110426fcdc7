//! Counts who uses which backend. Backends are inserted before the first slot refers to them, and
//! removed when no service port uses or keeps them any more.

use std::sync::Arc;

use proxy_common::{
    family::Slot as _,
    layout::{BACKEND_LOCAL, Backend},
    port::Port,
};
use rustc_hash::{FxHashMap, FxHashSet};

use super::{
    backends::Backends,
    entries::{self, backend_flags},
    programmed::{BackendKey, Entries, UsedEndpoints, Uses},
    writer::{Common, FamilyWriter, Writes},
};
use crate::{
    model::{
        desired::{DesiredPort, Endpoint, ServicePortName},
        objects::DEFAULT_WEIGHT,
    },
    modes::ebpf::{Error, maps::family::MapFamily},
    sys::net::socket_diag::Transport,
};

impl<F: MapFamily> FamilyWriter<F> {
    /// Inserts the missing backends of all these ports together. If one cannot be inserted,
    /// `publish` fails for the ports that need it.
    pub(super) fn add_backends<'a>(
        &mut self,
        shared: &mut Common,
        changed: impl Iterator<Item = &'a Arc<DesiredPort>>,
        writes: &mut Writes<F>,
    ) {
        let mut missing: FxHashMap<BackendKey<F::Address>, Uses> = FxHashMap::default();
        for port in changed {
            for endpoint in &port.endpoints.all {
                let Some(key) = backend_key::<F>(&port.name, endpoint) else { continue };
                if !self.entries.backends.contains_key(&key) {
                    missing.entry(key).or_default().add(endpoint);
                }
            }
        }
        let mut ids = Vec::with_capacity(missing.len());
        let mut values = Vec::with_capacity(missing.len());
        for (key, uses) in &mut missing {
            let Ok(id) = shared.backend_id(&mut writes.applied) else { break };
            uses.id = id;
            ids.push(id);
            values.push(uses.wanted(key));
        }
        // The rest is tried again one by one, so the error is not lost.
        let written = match self.maps.backends.set_all(&ids, &values) {
            Ok(()) => ids.len(),
            Err((done, _)) => done,
        };
        writes.applied.written += written as u64;
        for (id, backend) in ids.into_iter().zip(values).take(written) {
            self.remember_backend(id, &backend, writes);
        }
    }

    /// Notes a backend that was inserted and has no counted users yet.
    fn remember_backend(&mut self, id: u32, backend: &Backend<F::Address>, writes: &mut Writes<F>) -> Uses {
        let (key, uses) = (BackendKey::of(backend), Uses::of(id, backend));
        self.entries.backends.insert(key, uses);
        writes.inserted.push(key);
        uses
    }

    /// Removes the backends that were inserted for ports that could not be published.
    pub(super) fn remove_unused_insertions(&mut self, writes: &mut Writes<F>) {
        for key in std::mem::take(&mut writes.inserted) {
            let Some(uses) = self.entries.backends.get(&key).filter(|uses| uses.is_unused()) else {
                continue;
            };
            match self.maps.backends.remove(&uses.id) {
                Ok(found) => {
                    writes.applied.removed += u64::from(found);
                    self.entries.backends.remove(&key);
                }
                // The backend stays without users until the end of the call.
                Err(_) => writes.touched.push(key),
            }
        }
    }

    /// Returns the slot of each of the port's endpoints, or `None` if a backend is missing.
    pub(crate) fn slots_of(&self, port: &DesiredPort) -> Option<Vec<F::Slot>> {
        let slot = |endpoint| {
            let key = backend_key::<F>(&port.name, endpoint)?;
            let uses = self.entries.backends.get(&key)?;
            Some(F::Slot::new(key.address, key.port, uses.id, backend_flags(endpoint)))
        };
        port.endpoints.all.iter().map(slot).collect()
    }

    /// Counts the port's endpoints as used, inserts missing backends, and returns the slot of each
    /// endpoint.
    pub(super) fn use_backends(
        &mut self,
        shared: &mut Common,
        port: &DesiredPort,
        writes: &mut Writes<F>,
    ) -> Result<Vec<F::Slot>, Error> {
        let mut slots = Vec::with_capacity(port.endpoints.all.len());
        for endpoint in &port.endpoints.all {
            match self.use_backend(shared, port, endpoint, writes) {
                Ok(slot) => slots.push(slot),
                Err(error) => {
                    let held = &port.endpoints.all[..slots.len()];
                    self.release_backends(&port.name, held, writes);
                    return Err(error);
                }
            }
        }
        Ok(slots)
    }

    fn use_backend(
        &mut self,
        shared: &mut Common,
        port: &DesiredPort,
        endpoint: &Endpoint,
        writes: &mut Writes<F>,
    ) -> Result<F::Slot, Error> {
        let key = backend_key::<F>(&port.name, endpoint)
            .ok_or_else(|| Error::WrongFamily { port: port.name.clone(), address: endpoint.address })?;
        let uses = match self.entries.backends.get_mut(&key) {
            Some(uses) => {
                uses.add(endpoint);
                *uses
            }
            None => {
                let mut uses = Uses::default();
                uses.id = shared.backend_id(&mut writes.applied)?;
                uses.add(endpoint);
                let backend = uses.wanted(&key);
                self.maps.backends.set(&uses.id, &backend)?;
                writes.applied.written += 1;
                let mut uses = self.remember_backend(uses.id, &backend, writes);
                uses.add(endpoint);
                self.entries.backends.insert(key, uses);
                uses
            }
        };
        if !uses.is_written(&uses.wanted(&key)) {
            writes.touched.push(key);
        }
        Ok(F::Slot::new(key.address, key.port, uses.id, backend_flags(endpoint)))
    }

    pub(super) fn release_backends(
        &mut self,
        port: &ServicePortName,
        endpoints: &[Endpoint],
        writes: &mut Writes<F>,
    ) {
        for endpoint in endpoints {
            let Some(key) = backend_key::<F>(port, endpoint) else { continue };
            if let Some(uses) = self.entries.backends.get_mut(&key) {
                uses.subtract(endpoint);
                writes.touched.push(key);
            }
        }
    }

    /// Keeps the backends of endpoints that no set uses any more and that still serve. An endpoint
    /// without a backend gets none.
    pub(super) fn keep_backends(&mut self, port: &DesiredPort) -> Box<[Endpoint]> {
        keep::<F>(&mut self.entries.backends, port)
    }

    pub(super) fn stop_keeping_backends(
        &mut self,
        port: &ServicePortName,
        kept: &[Endpoint],
        writes: &mut Writes<F>,
    ) {
        for endpoint in kept {
            let Some(key) = backend_key::<F>(port, endpoint) else { continue };
            if let Some(uses) = self.entries.backends.get_mut(&key) {
                uses.stop_keeping();
                writes.touched.push(key);
            }
        }
    }

    /// Counts the endpoints of adopted ports as used if the new state could not be written. Such a
    /// port goes on being served as it is.
    pub(super) fn use_adopted_endpoints(&mut self) {
        let Entries { services, backends, without_room, .. } = &mut self.entries;
        for (name, published) in services {
            if !matches!(published.used, UsedEndpoints::NotCounted) {
                continue;
            }
            let Some(range) = published.range else { continue };
            let desired = without_room.ports.get(name).map(|waiting| &waiting.port);
            published.kept = desired.map(|port| keep::<F>(backends, port)).unwrap_or_default();
            let terminating: FxHashSet<_> = desired
                .into_iter()
                .flat_map(|port| &port.endpoints.all)
                .filter_map(|one| one.terminating.then_some((one.address, one.port)))
                .collect();
            let mut seen = FxHashSet::default();
            let mut held = Vec::new();
            for index in range.first..range.first + range.count {
                let Some(slot) = self.maps.slots.get(index as usize) else { continue };
                let (protocol, owner) = (name.protocol.number(), entries::owner(name));
                let key = BackendKey { address: slot.address(), port: slot.port(), protocol, owner };
                let Some(uses) = backends.get_mut(&key).filter(|_| seen.insert(key)) else { continue };
                let (address, port) = (F::ip(key.address), key.port.number());
                let endpoint = Endpoint {
                    // The weight counts nowhere, because the sets that the endpoint is in stay as
                    // they are.
                    weight: DEFAULT_WEIGHT,
                    address,
                    port,
                    local: slot.flags() & BACKEND_LOCAL != 0,
                    terminating: terminating.contains(&(address, port)),
                };
                uses.add(&endpoint);
                held.push(endpoint);
            }
            published.used = UsedEndpoints::Adopted(held.into());
        }
    }

    /// Brings the use counts in `backends4/6` up to date, and removes backends without uses.
    pub(super) fn write_uses(&mut self, writes: &mut Writes<F>) {
        for key in std::mem::take(&mut writes.touched) {
            let Some(uses) = self.entries.backends.get_mut(&key) else { continue };
            let wanted = uses.wanted(&key);
            let result = if uses.is_unused() {
                self.maps.backends.remove(&uses.id).map(|found| writes.applied.removed += u64::from(found))
            } else if uses.is_written(&wanted) {
                Ok(())
            } else {
                self.maps.backends.set(&uses.id, &wanted).map(|()| writes.applied.written += 1)
            };
            match result {
                Ok(()) if uses.is_unused() => {
                    writes.lost.extend(Transport::from_number(key.protocol));
                    self.entries.backends.remove(&key);
                }
                Ok(()) => uses.wrote(&wanted),
                Err(error) => {
                    let what = format!("backend {} port {}", F::ip(key.address), key.port.number());
                    writes.failures.add(what, error);
                }
            }
        }
    }
}

fn keep<F: MapFamily>(backends: &mut Backends<F::Address>, port: &DesiredPort) -> Box<[Endpoint]> {
    let has_backend = |endpoint: &&Endpoint| {
        let uses = backend_key::<F>(&port.name, endpoint).and_then(|key| backends.get_mut(&key));
        uses.map(Uses::keep).is_some()
    };
    port.endpoints.unused.iter().filter(has_backend).copied().collect()
}

pub(crate) fn backend_key<F: MapFamily>(
    port: &ServicePortName,
    endpoint: &Endpoint,
) -> Option<BackendKey<F::Address>> {
    let address = F::address(endpoint.address)?;
    let (protocol, owner) = (port.protocol.number(), entries::owner(port));
    Some(BackendKey { address, port: Port::new(endpoint.port), protocol, owner })
}
