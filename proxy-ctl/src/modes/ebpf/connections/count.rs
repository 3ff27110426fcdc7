//! Counts the connections of backends, for service ports that use least connection.
//!
//! The programs count what they see begin and end, and the controller counts what it removes. Each
//! has a map that only it writes, so neither undoes what the other has counted.
//!
//! Some counts are wrong: when a process is killed a moment too early, when two CPUs remove each
//! other's entries, and when a connection ends and no program sees it. So everything is counted
//! again and again here, and the counts are corrected.

use std::{fmt, os::fd::AsFd as _, path::Path};

use aya::Pod;
use proxy_common::{
    family::{V4, V6},
    layout::{Address, SocketOrigin, unproven_entries},
};
use rustc_hash::FxHashMap;

use crate::{
    modes::ebpf::{
        Error,
        maps::{
            family::MapFamily,
            handles::{
                FamilyMaps,
                counts::{ConnectionMaps, Counted, Kind, Tally},
                pinned_map,
            },
        },
    },
    sys::{
        CallError,
        bpf::{kernel_types::KernelTypes, socket_storage::StorageReader},
    },
};

/// Counts all connections of one kind and family that exist.
#[derive(Debug)]
pub(crate) struct Recount {
    kind: Kind,
    before: FxHashMap<u32, Counted>,
    seen: FxHashMap<u32, u64>,
}

impl Recount {
    pub(crate) fn begin(maps: &ConnectionMaps, kind: Kind) -> Result<Self, Error> {
        Ok(Self { kind, before: maps.read()?, seen: FxHashMap::default() })
    }

    /// Counts a connection of this backend that the walk has met.
    pub(crate) fn see(&mut self, backend: u32) {
        *self.seen.entry(backend).or_default() += 1;
    }

    /// Corrects the counts that differ, now that the walk has met all connections.
    pub(crate) fn end<F: MapFamily>(self, maps: &FamilyMaps<F>) -> Result<(), Error> {
        let Self { kind, before, seen } = self;
        for (id, counted) in maps.connections.read()? {
            let tally = |counted: Option<&Counted>| counted.copied().unwrap_or_default().tally(kind);
            let missed =
                tally(Some(&counted)).missed(tally(before.get(&id)), seen.get(&id).copied().unwrap_or(0));
            if missed == 0 || maps.backends.get(&id)?.is_none() {
                continue;
            }
            tracing::debug!(backend = id, ?kind, missed, "connections of a backend are counted anew");
            maps.connections.collect(id, kind, missed)?;
        }
        Ok(())
    }
}

/// Counts the entries of one family's established flows that prove no client, while a walk meets
/// them all. A former version has counted them differently, or not at all.
#[derive(Debug)]
pub(crate) struct UnprovenRecount {
    id: u32,
    before: Tally,
    seen: u64,
}

impl UnprovenRecount {
    pub(crate) fn begin<A: Address>(maps: &ConnectionMaps) -> Result<Self, Error> {
        let id = unproven_entries::<A>();
        Ok(Self { id, before: maps.flows_of(id)?, seen: 0 })
    }

    pub(crate) fn see(&mut self, entries: u32) {
        self.seen += u64::from(entries);
    }

    /// Corrects the count, now that the walk has met all entries.
    pub(crate) fn end(self, maps: &ConnectionMaps) -> Result<(), Error> {
        let Self { id, before, seen } = self;
        match maps.flows_of(id)?.missed(before, seen) {
            0 => Ok(()),
            missed => {
                tracing::debug!(missed, "entries of flows that prove no client are counted anew");
                maps.count_anew(id, missed)
            }
        }
    }
}

/// Forgets backends that are gone, because nothing chooses them any more.
pub(crate) fn forget_gone(v4: &FamilyMaps<V4>, v6: &FamilyMaps<V6>) -> Result<(), Error> {
    for id in v4.connections.backends()? {
        if v4.backends.get(&id)?.is_none() && v6.backends.get(&id)?.is_none() {
            v4.connections.forget(id)?;
        }
    }
    Ok(())
}

/// Counts the sockets that were sent to backends, by reading their storage.
pub(crate) struct SocketCounter {
    reader4: StorageReader<SocketOrigin<[u8; 4]>>,
    reader6: StorageReader<SocketOrigin<[u8; 16]>>,
}

impl fmt::Debug for SocketCounter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SocketCounter").finish_non_exhaustive()
    }
}

impl SocketCounter {
    pub(crate) fn load() -> Result<Self, Error> {
        let types = KernelTypes::read().map_err(CallError::of("reading the kernel's types"));
        let types = types.map_err(Error::CountingSockets)?;
        Ok(Self {
            reader4: StorageReader::load(&types).map_err(Error::CountingSockets)?,
            reader6: StorageReader::load(&types).map_err(Error::CountingSockets)?,
        })
    }

    pub(crate) fn recount(
        &self,
        folder: &Path,
        v4: &FamilyMaps<V4>,
        v6: &FamilyMaps<V6>,
    ) -> Result<(), Error> {
        recount_sockets(&self.reader4, folder, v4)?;
        recount_sockets(&self.reader6, folder, v6)
    }
}

fn recount_sockets<F: MapFamily>(
    reader: &StorageReader<SocketOrigin<F::Address>>,
    folder: &Path,
    maps: &FamilyMaps<F>,
) -> Result<(), Error>
where
    SocketOrigin<F::Address>: Pod,
{
    let mut recount = Recount::begin(&maps.connections, Kind::Sockets)?;
    let origins = pinned_map(folder, F::SOCKET_ORIGIN)?;
    for socket in reader.read(origins.as_fd()).map_err(Error::CountingSockets)? {
        if socket.value.is_counted() {
            recount.see(socket.value.backend_id);
        }
    }
    recount.end(maps)
}
