//! Defines the expected shape of each map, and typed handles to the maps.
//!
//! A pinned map is adopted only if its shape is the expected one. The loader, which binds it to the
//! programs, would not notice a difference.

pub(crate) mod counts;

use std::{collections::BTreeMap, io, os::fd::OwnedFd, path::Path};

use aya::Pod;
use aya_obj::generated::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC, BPF_F_RDONLY, BPF_F_RDONLY_PROG, BPF_F_WRONLY};
use proxy_common::{
    inventory::{Limit, map_name},
    layout::{
        Affinity, AffinityKey, Backend, Collected, Connections, DatagramOrigins, EVENT_BYTES, Event,
        EventControl, FRONTEND_ADDRESS_WORDS, FirstFragment, Flow, FlowKey, FourPorts, FragmentKey, Frontend,
        FrontendKey, HostConnection, InterfaceSettings, Lease, LinkAddress, MASQUERADE_PORT_ROOM,
        NodeAddress, PORTS, PrefixKey, REDIRECTS, RedirectTarget, RouteEpoch, SERVICE_CIDRS, Service,
        ServiceCounters, ServiceName, Settings, Slot4, Slot6, SocketOrigin, SourceRange, VlanTag,
    },
    reason::{REASONS, Reason},
};

use self::counts::ConnectionMaps;
use super::family::MapFamily;
use crate::{
    config::Limits,
    modes::{
        Applied,
        ebpf::{
            Error,
            error::{Difference, FullMap},
        },
    },
    sys::{
        CallError,
        bpf::{
            self, MapInfo,
            map::{
                Cursor, Map, PerCpuArray,
                kind::{ARRAY, DEVMAP_HASH, HASH, LPM_TRIE, LRU_HASH, PER_CPU_ARRAY, RING, SK_STORAGE},
            },
            mmap::SharedArray,
        },
    },
};

/// The flags that say how a map is accessed through one descriptor, not what it is.
const IGNORED_FLAGS: u32 = BPF_F_RDONLY | BPF_F_WRONLY;

/// The number of entries in memory at once. Those of `service_names` are the largest, with 200
/// bytes.
const WALKED_TOGETHER: usize = 4_096;

/// The expected shape of a map.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Shape {
    pub(crate) name: &'static str,
    kind: u32,
    key: usize,
    value: usize,
    pub(crate) entries: u32,
    flags: u32,
    /// The limit that sets `entries`, if any.
    pub(crate) limit: Option<Limit>,
    /// The number of entries up to which the map grows when more are desired.
    pub(crate) most: u32,
    /// True if the map may start empty without hurting an established flow or the next resync.
    pub(super) expendable: bool,
}

impl Shape {
    /// Returns true unless this is a ring.
    pub(crate) fn has_entries(&self) -> bool {
        self.kind != RING
    }

    /// Returns the shape of a map with this number of entries, which does not grow.
    pub(crate) fn with_entries(self, entries: u32) -> Self {
        Self { entries, most: entries, ..self }
    }

    /// Returns true if programs keep flows in the map.
    pub(crate) fn is_of_flows(&self) -> bool {
        map_name::OF_FLOWS.contains(&self.name)
    }

    fn new<K, V>(name: &'static str, kind: u32, flags: u32, entries: (u32, Option<Limit>)) -> Self {
        let (key, value) = (size_of::<K>(), size_of::<V>());
        let is_of_flows = map_name::OF_FLOWS.contains(&name);
        let expendable = matches!(kind, LRU_HASH | PER_CPU_ARRAY | DEVMAP_HASH | RING) && !is_of_flows;
        let (most, limit) = entries;
        let entries = limit.map_or(most, |limit| limit.first_entries(most));
        Self { name, kind, key, value, entries, flags, limit, most, expendable }
    }
}

type A4 = [u8; 4];
type A6 = [u8; 16];

/// Returns the shape of every map, in the order of the inventory.
pub(crate) fn shapes(limits: &Limits) -> Vec<Shape> {
    macro_rules! kind {
        (hash) => {
            (HASH, BPF_F_NO_PREALLOC)
        };
        (preallocated_hash) => {
            (HASH, 0)
        };
        (lru_hash) => {
            (LRU_HASH, 0)
        };
        (lpm_trie) => {
            (LPM_TRIE, BPF_F_NO_PREALLOC)
        };
        (array) => {
            (ARRAY, 0)
        };
        (shared_array) => {
            (ARRAY, BPF_F_MMAPABLE)
        };
        (per_cpu_array) => {
            (PER_CPU_ARRAY, 0)
        };
        (devices) => {
            // The kernel gives every map of devices this flag.
            (DEVMAP_HASH, BPF_F_RDONLY_PROG)
        };
        (socket_storage) => {
            (SK_STORAGE, BPF_F_NO_PREALLOC)
        };
        (ring) => {
            (RING, 0)
        };
    }
    macro_rules! entries {
        ([$limit:ident]) => {
            (limits.entries(Limit::$limit), Some(Limit::$limit))
        };
        ($entries:tt) => {
            ($entries, None)
        };
    }
    macro_rules! shapes {
        ($($(#[doc = $doc:literal])* $name:ident: $kind:ident($key:ty, $value:ty), $entries:tt;)+) => {
            vec![$({
                let (kind, flags) = kind!($kind);
                let entries = entries!($entries);
                if kind == RING {
                    Shape::new::<(), ()>(stringify!($name), kind, flags, entries)
                } else if kind == LPM_TRIE {
                    Shape::new::<PrefixKey<$key>, $value>(stringify!($name), kind, flags, entries)
                } else {
                    Shape::new::<$key, $value>(stringify!($name), kind, flags, entries)
                }
            },)+]
        };
    }
    proxy_common::maps!(shapes)
}

/// Returns the first difference between a map and the expected shape. A different number of entries
/// comes last, so that nothing else differs then.
pub(crate) fn difference(found: &MapInfo, shape: &Shape) -> Option<Difference> {
    let flags = found.flags & !IGNORED_FLAGS;
    if found.kind != shape.kind {
        Some(Difference::Kind(found.kind, shape.kind))
    } else if found.key_size as usize != shape.key && found.kind != SK_STORAGE {
        Some(Difference::KeySize(found.key_size, shape.key))
    } else if found.value_size as usize != shape.value {
        Some(Difference::ValueSize(found.value_size, shape.value))
    } else if flags != shape.flags {
        Some(Difference::Flags(flags, shape.flags))
    } else if found.max_entries != shape.entries {
        Some(Difference::Entries(found.max_entries, shape.entries, shape.limit))
    } else {
        None
    }
}

/// Opens what is pinned at `path`. Returns `None` if nothing is pinned there.
pub(crate) fn open_pinned(path: &Path) -> Result<Option<OwnedFd>, CallError> {
    match bpf::pinned(path) {
        Ok(fd) => Ok(Some(fd)),
        Err(e) if e.errno() == libc::ENOENT => Ok(None),
        Err(e) => Err(e),
    }
}

/// A hash map with its name, which errors mention.
#[derive(Debug)]
pub(crate) struct NamedMap<K, V> {
    pub(crate) name: &'static str,
    limit: Option<Limit>,
    map: Map<K, V>,
}

impl<K: Pod + Default, V: Pod + Default> NamedMap<K, V> {
    pub(crate) fn open(folder: &Path, name: &'static str, limit: Option<Limit>) -> Result<Self, Error> {
        let map = typed(&pinned_map(folder, name)?, name)?;
        Ok(Self { name, limit, map })
    }

    pub(crate) fn map(&self) -> &Map<K, V> {
        &self.map
    }

    fn error(&self, source: CallError) -> Error {
        match self.limit {
            // A full hash map fails with E2BIG, a full LPM trie with ENOSPC.
            Some(limit) if matches!(source.errno(), libc::E2BIG | libc::ENOSPC) => {
                Error::Full(FullMap { name: self.name, capacity: self.map.capacity(), limit })
            }
            _ => Error::Map { name: self.name, source },
        }
    }

    pub(crate) fn get(&self, key: &K) -> Result<Option<V>, Error> {
        self.map.get(key).map_err(|e| self.error(e))
    }

    pub(crate) fn set(&self, key: &K, value: &V) -> Result<(), Error> {
        self.map.set(key, value).map_err(|e| self.error(e))
    }

    /// Inserts an entry, as [`Map::insert`] does.
    pub(crate) fn insert(&self, key: &K, value: &V) -> Result<bool, Error> {
        self.map.insert(key, value).map_err(|e| self.error(e))
    }

    /// Sets several entries, as [`Map::set_all`] does.
    pub(crate) fn set_all(&self, keys: &[K], values: &[V]) -> Result<(), (usize, Error)> {
        self.map.set_all(keys, values).map_err(|(done, e)| (done, self.error(e)))
    }

    pub(crate) fn remove(&self, key: &K) -> Result<bool, Error> {
        self.map.remove(key).map_err(|e| self.error(e))
    }

    pub(crate) fn take(&self, key: &K) -> Result<Option<V>, Error> {
        self.map.take(key).map_err(|e| self.error(e))
    }

    pub(crate) fn read_all(&self) -> Result<Vec<(K, V)>, Error> {
        self.map.read_all().map_err(|e| self.error(e))
    }

    /// Gives all entries to `each`, a few at once, until it returns false. Returns true if it never
    /// has.
    pub(crate) fn walk(&self, mut each: impl FnMut(&[(K, V)]) -> bool) -> Result<bool, Error> {
        let (mut cursor, mut few) = (Some(Cursor::Start), Vec::new());
        while let Some(at) = cursor {
            few.clear();
            cursor = self.map.read(at, WALKED_TOGETHER, &mut few).map_err(|e| self.error(e))?;
            if !each(&few) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Makes the map hold exactly these entries.
    pub(crate) fn replace_all(&self, wanted: &BTreeMap<K, V>) -> Result<Applied, Error>
    where
        K: Ord,
        V: PartialEq,
    {
        let found: BTreeMap<_, _> = self.read_all()?.into_iter().collect();
        let mut applied = Applied::default();
        // Writes come before removals: from Linux 6.1 on, a new entry may get the memory of a
        // removed one, which a program may still be reading.
        for (key, value) in wanted.iter().filter(|(key, value)| found.get(key) != Some(value)) {
            self.set(key, value)?;
            applied.written += 1;
        }
        for key in found.keys().filter(|key| !wanted.contains_key(*key)) {
            applied.removed += u64::from(self.remove(key)?);
        }
        Ok(applied)
    }

    /// Returns true if the map has this number of entries and each of them is right.
    pub(crate) fn holds(&self, entries: usize, is_right: impl Fn(&K, &V) -> bool) -> Result<bool, Error> {
        let mut found = 0;
        let are_right = self.walk(|few| {
            found += few.len();
            few.iter().all(|(key, value)| is_right(key, value))
        })?;
        Ok(are_right && found == entries)
    }
}

pub(crate) fn typed<K: Pod + Default, V: Pod + Default>(
    fd: &OwnedFd,
    name: &'static str,
) -> Result<Map<K, V>, Error> {
    let failed = |source| Error::Map { name, source };
    let fd = fd.try_clone().map_err(|e| failed(CallError::new("fcntl(F_DUPFD_CLOEXEC)", e)))?;
    let is_another = |mismatch| failed(CallError::new("adopting the map", io::Error::other(mismatch)));
    Map::new(fd).map_err(failed)?.map_err(is_another)
}

pub(crate) fn pinned_map(folder: &Path, name: &'static str) -> Result<OwnedFd, Error> {
    bpf::pinned(&folder.join(name)).map_err(|source| Error::Map { name, source })
}

pub(crate) fn shared<T: Pod>(
    folder: &Path,
    name: &'static str,
    writable: bool,
) -> Result<SharedArray<T>, Error> {
    SharedArray::new(&pinned_map(folder, name)?, writable).map_err(|source| Error::Map { name, source })
}

fn per_cpu<V: Pod + Default>(folder: &Path, name: &'static str) -> Result<PerCpuArray<V>, Error> {
    PerCpuArray::new(pinned_map(folder, name)?).map_err(|source| Error::Map { name, source })
}

pub(crate) type SourceRangeKey<F> = PrefixKey<SourceRange<<F as proxy_common::family::Family>::Address>>;

/// The maps of one family.
#[derive(Debug)]
pub(crate) struct FamilyMaps<F: MapFamily> {
    pub(crate) frontends: NamedMap<FrontendKey<F::Address>, Frontend>,
    pub(crate) frontend_addresses: SharedArray<u64>,
    pub(crate) slots: SharedArray<F::Slot>,
    pub(crate) backends: NamedMap<u32, Backend<F::Address>>,
    pub(crate) flows: NamedMap<FlowKey<F::Address>, Flow<F::Address>>,
    pub(crate) opening_flows: NamedMap<FlowKey<F::Address>, Flow<F::Address>>,
    pub(crate) affinity: NamedMap<AffinityKey<F::Address>, Affinity>,
    pub(crate) source_ranges: NamedMap<SourceRangeKey<F>, u32>,
    pub(crate) service_cidrs: NamedMap<PrefixKey<F::Address>, u32>,
    pub(crate) node_addresses: NamedMap<F::Address, NodeAddress>,
    pub(crate) connections: ConnectionMaps,
}

impl<F: MapFamily> FamilyMaps<F> {
    /// Opens the maps that are pinned in `folder`.
    pub(crate) fn open(folder: &Path, writable: bool) -> Result<Self, Error> {
        Ok(Self {
            frontends: NamedMap::open(folder, F::FRONTENDS, Some(Limit::Frontends))?,
            frontend_addresses: shared(folder, F::FRONTEND_ADDRESSES, writable)?,
            slots: shared(folder, F::SLOTS, writable)?,
            backends: NamedMap::open(folder, F::BACKENDS, Some(Limit::Backends))?,
            flows: NamedMap::open(folder, F::FLOWS, Some(Limit::Flows))?,
            opening_flows: NamedMap::open(folder, F::OPENING_FLOWS, Some(Limit::OpeningFlows))?,
            affinity: NamedMap::open(folder, F::AFFINITY, Some(Limit::Affinity))?,
            source_ranges: NamedMap::open(folder, F::SOURCE_RANGES, Some(Limit::SourceRanges))?,
            service_cidrs: NamedMap::open(folder, F::SERVICE_CIDRS, None)?,
            node_addresses: NamedMap::open(folder, F::NODE_ADDRESSES, Some(Limit::NodeAddresses))?,
            connections: ConnectionMaps::open(folder)?,
        })
    }
}

/// The maps that both families share.
#[derive(Debug)]
pub(crate) struct CommonMaps {
    pub(crate) services: SharedArray<Service>,
    pub(crate) names: NamedMap<u32, ServiceName>,
    pub(crate) interfaces: NamedMap<u32, InterfaceSettings>,
    pub(crate) vlan_devices: NamedMap<VlanTag, u32>,
    pub(crate) pod_namespaces: NamedMap<u32, u32>,
    pub(crate) redirect_sources: NamedMap<u32, LinkAddress>,
    pub(crate) redirect_targets: NamedMap<u32, RedirectTarget>,
    pub(crate) masquerade_ports: SharedArray<FourPorts>,
    pub(crate) remapped_ports: NamedMap<u32, u32>,
    pub(crate) settings: NamedMap<u32, Settings>,
    pub(crate) lease: NamedMap<u32, Lease>,
    pub(crate) counters: PerCpuArray<u64>,
    pub(crate) service_counters: PerCpuArray<ServiceCounters>,
}

impl CommonMaps {
    /// Returns how often all CPUs have counted this reason.
    pub(crate) fn counted(&self, reason: Reason) -> Result<u64, Error> {
        let values = self.counters.get(reason as u32);
        let values = values.map_err(|source| Error::Map { name: map_name::counters, source })?;
        Ok(values.iter().copied().fold(0, u64::wrapping_add))
    }

    /// Opens the maps that are pinned in `folder`.
    pub(crate) fn open(folder: &Path, writable: bool) -> Result<Self, Error> {
        Ok(Self {
            services: shared(folder, map_name::services, writable)?,
            names: NamedMap::open(folder, map_name::service_names, Some(Limit::Services))?,
            interfaces: NamedMap::open(folder, map_name::interfaces, Some(Limit::NodeAddresses))?,
            vlan_devices: NamedMap::open(folder, map_name::vlan_devices, Some(Limit::NodeAddresses))?,
            pod_namespaces: NamedMap::open(folder, map_name::pod_namespaces, Some(Limit::NodeAddresses))?,
            redirect_sources: NamedMap::open(folder, map_name::redirect_sources, None)?,
            redirect_targets: NamedMap::open(folder, map_name::redirect_targets, None)?,
            masquerade_ports: shared(folder, map_name::masquerade_ports, writable)?,
            remapped_ports: NamedMap::open(folder, map_name::remapped_ports, None)?,
            settings: NamedMap::open(folder, map_name::settings, None)?,
            lease: NamedMap::open(folder, map_name::lease, None)?,
            counters: per_cpu(folder, map_name::counters)?,
            service_counters: per_cpu(folder, map_name::service_counters)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expected() -> (Shape, MapInfo) {
        let shape = Shape::new::<u32, u64>("some", HASH, BPF_F_NO_PREALLOC, (7, Some(Limit::Backends)));
        let found = MapInfo {
            kind: HASH,
            id: 1,
            key_size: 4,
            value_size: 8,
            max_entries: 7,
            flags: BPF_F_NO_PREALLOC,
        };
        (shape, found)
    }

    #[test]
    fn the_same_shape_has_no_difference() {
        let (shape, found) = expected();
        assert_eq!(difference(&found, &shape), None);
    }

    #[test]
    fn each_field_is_compared() {
        let (shape, found) = expected();
        let differences = [
            MapInfo { kind: ARRAY, ..found },
            MapInfo { key_size: 8, ..found },
            MapInfo { value_size: 4, ..found },
            MapInfo { max_entries: 8, ..found },
            MapInfo { flags: 0, ..found },
        ]
        .map(|found| difference(&found, &shape));
        assert_eq!(
            differences,
            [
                Some(Difference::Kind(ARRAY, HASH)),
                Some(Difference::KeySize(8, 4)),
                Some(Difference::ValueSize(4, 8)),
                Some(Difference::Entries(8, 7, Some(Limit::Backends))),
                Some(Difference::Flags(0, BPF_F_NO_PREALLOC)),
            ]
        );
    }

    #[test]
    fn limits_override_the_defaults() {
        let limits = Limits { backends: 5, ..Limits::default() };
        let entries = |name| shapes(&limits).iter().find(|shape| shape.name == name).unwrap().entries;
        assert_eq!((entries("backends6"), entries("frontends4")), (5, 131_072));
        assert_eq!((entries("connections"), entries("collected")), (5, 5));
    }
}
