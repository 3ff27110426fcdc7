//! `Maps` over the BPF maps.

use core::ptr::{addr_of, addr_of_mut, read_volatile, write_volatile};

use aya_ebpf::{
    bindings::BPF_NOEXIST,
    btf_maps::{SkStorage, lpm_trie::Key},
    helpers::{bpf_jiffies64, bpf_ktime_get_boot_ns},
};
use proxy_common::{
    family::{Family, V4, V6},
    flow::Clock,
    layout::*,
    map_access::{AffinityEntry, AffinityMaps, Maps},
    reason::Reason,
};

use crate::{
    globals,
    maps::{self, connections},
};

/// The pinned maps, as the decisions see them.
pub(crate) struct KernelMaps;

/// An element of `affinity4/6`.
#[derive(Clone, Copy)]
pub(crate) struct KnownClient(*mut Affinity);

impl AffinityEntry for KnownClient {
    #[inline(always)]
    fn read(&self) -> Affinity {
        let entry = self.0;
        // SAFETY: a map element in bounds and aligned to 8, of plain integers.
        unsafe {
            Affinity {
                last_used: read_volatile(addr_of!((*entry).last_used)),
                backend: read_volatile(addr_of!((*entry).backend)),
                flags: read_volatile(addr_of!((*entry).flags)),
            }
        }
    }

    #[inline(always)]
    fn prolong(&self, now: u64) {
        // SAFETY: as above.
        unsafe { write_volatile(addr_of_mut!((*self.0).last_used), now) };
    }

    #[inline(always)]
    fn write(&self, Affinity { last_used, backend, flags }: Affinity) {
        let entry = self.0;
        // SAFETY: as above.
        unsafe {
            write_volatile(addr_of_mut!((*entry).backend), backend);
            write_volatile(addr_of_mut!((*entry).flags), flags);
        }
        self.prolong(last_used);
    }
}

/// Socket storage of one family.
pub(crate) trait SocketMaps: Family {
    fn socket_origin() -> &'static SkStorage<SocketOrigin<Self::Address>>;
    fn datagram_origins() -> &'static SkStorage<DatagramOrigins<Self::Address>>;
}

macro_rules! maps {
    ($family:ty, $address:ty, $frontends:ident, $node_addresses:ident, $slots:ident, $backends:ident,
     $affinity:ident, $source_ranges:ident, $service_cidrs:ident, $masquerade:ident, $pods:ident, $pod_range:ident, $bits:ident,
     $socket_origin:ident, $datagram_origins:ident, $less_busy:ident) => {
        impl Maps<$family> for KernelMaps {
            #[inline(always)]
            fn frontend(&self, key: &FrontendKey<$address>) -> Option<Frontend> {
                // SAFETY: copied at once; without preallocation an element is freed only after a grace period.
                unsafe { maps::$frontends.get(key) }.copied()
            }

            #[inline(always)]
            fn node_address(&self, address: &$address) -> Option<NodeAddress> {
                // SAFETY: as for `frontend`.
                unsafe { maps::$node_addresses.get(address) }.copied()
            }

            #[inline(always)]
            fn service(&self, id: u32) -> Option<Service> {
                let service = maps::services.get_ptr(id)?;
                Some(read_service(service))
            }

            #[inline(always)]
            fn slot(&self, index: u32) -> Option<<$family as Family>::Slot> {
                maps::$slots.get(index).copied()
            }

            #[inline(always)]
            fn backend(&self, id: u32) -> Option<Backend<$address>> {
                // SAFETY: as for `frontend`.
                unsafe { maps::$backends.get(id) }.copied()
            }
        }

        impl AffinityMaps<$family> for KernelMaps {
            type Affinity = KnownClient;

            #[inline(always)]
            fn affinity(&self, key: &AffinityKey<$address>) -> Option<KnownClient> {
                maps::$affinity.get_ptr_mut(key).map(KnownClient)
            }

            #[inline(always)]
            fn remember(&self, key: &AffinityKey<$address>, affinity: &Affinity) -> bool {
                let is_new = maps::$affinity.insert(key, affinity, u64::from(BPF_NOEXIST)).is_ok();
                if is_new {
                    // Clients that were never looked up are evicted first. From outside, an address may be forged.
                    if key.client.origin != CLIENT_OUTSIDE {
                        let _referenced = maps::$affinity.get_ptr(key);
                    }
                    count(Reason::ClientRemembered);
                }
                is_new
            }

            #[inline(always)]
            fn now(&self) -> u64 {
                now()
            }

            #[inline(always)]
            fn open_connections(&self, backend: u32) -> u64 {
                connections::open(backend)
            }

            #[inline(always)]
            fn less_busy(&self, set: EndpointSet, bits: u32) -> u32 {
                connections::$less_busy(set.word(), bits)
            }

            // Not inlined: the key would lie on the stack on the way of each packet.
            #[inline(never)]
            fn is_in_source_ranges(&self, service: u32, address: &$address) -> bool {
                let PrefixKey { bits, data } = SourceRange::of_prefix(service, *address, <$address>::BITS);
                maps::$source_ranges.get(&Key::new(bits, data)).is_some()
            }

            #[inline(always)]
            fn is_in_service_cidrs(&self, address: &$address) -> bool {
                let is_looked_up = globals::DROP_UNALLOCATED.load() == globals::ON;
                is_looked_up && maps::$service_cidrs.get(&Key::new(<$address>::BITS, *address)).is_some()
            }

            #[inline(always)]
            fn address_of_node(&self) -> $address {
                settings().map_or(<$address>::UNSPECIFIED, |settings| settings.$masquerade)
            }

            #[inline(always)]
            fn pods_told_by(&self) -> u16 {
                settings().map_or(PODS_UNKNOWN, |settings| settings.$pods)
            }

            #[inline(always)]
            fn is_in_pod_range(&self, address: &$address) -> bool {
                settings().is_some_and(|settings| address.is_in(&settings.$pod_range, settings.$bits.into()))
            }

            #[inline(always)]
            fn brings_pods(&self, interface: u32) -> bool {
                // SAFETY: as for `frontend`.
                unsafe { maps::interfaces.get(interface) }
                    .is_some_and(|interface| interface.flags & INTERFACE_OF_PODS != 0)
            }
        }

        impl SocketMaps for $family {
            #[inline(always)]
            fn socket_origin() -> &'static SkStorage<SocketOrigin<$address>> {
                &maps::$socket_origin
            }

            #[inline(always)]
            fn datagram_origins() -> &'static SkStorage<DatagramOrigins<$address>> {
                &maps::$datagram_origins
            }
        }
    };
}

maps!(
    V4,
    [u8; 4],
    frontends4,
    node_addresses4,
    slots4,
    backends4,
    affinity4,
    source_ranges4,
    service_cidrs4,
    masquerade4,
    pods4,
    pod_range4,
    pod_range4_bits,
    socket_origin4,
    datagrams4,
    less_busy4
);
maps!(
    V6,
    [u8; 16],
    frontends6,
    node_addresses6,
    slots6,
    backends6,
    affinity6,
    source_ranges6,
    service_cidrs6,
    masquerade6,
    pods6,
    pod_range6,
    pod_range6_bits,
    socket_origin6,
    datagrams6,
    less_busy6
);

#[inline(always)]
pub(crate) fn now() -> u64 {
    // SAFETY: no arguments; since 5.8.
    unsafe { bpf_ktime_get_boot_ns() }
}

/// As [`now`], late by a tick at most. `clock` is this CPU's.
#[inline(always)]
pub(crate) fn recently(clock: &mut Clock) -> u64 {
    // SAFETY: no arguments; since 5.5. The verifier makes a load of it.
    let tick = unsafe { bpf_jiffies64() };
    if clock.tick != tick {
        *clock = Clock { tick, time: now() };
    }
    clock.time
}

#[inline(always)]
fn read_service(service: *const Service) -> Service {
    // SAFETY: the pointer is of a map value, in bounds and aligned to 8.
    let (cluster, internal, external) = unsafe {
        (addr_of!((*service).cluster), addr_of!((*service).internal), addr_of!((*service).external))
    };
    // SAFETY: as above; other fields may change meanwhile and are plain integers.
    let (flags, affinity_seconds) = unsafe { ((*service).flags, (*service).affinity_seconds) };
    Service {
        cluster: read_set(cluster),
        internal: read_set(internal),
        external: read_set(external),
        flags,
        affinity_seconds,
    }
}

/// One 8-byte load: the controller replaces a set by one 8-byte store.
#[inline(always)]
fn read_set(set: *const EndpointSet) -> EndpointSet {
    // SAFETY: in bounds of the map value and aligned to 8 (`EndpointSet` is).
    let whole = unsafe { read_volatile(set.cast::<u64>()) };
    // The BPF object is little-endian.
    EndpointSet::from_word(whole)
}

#[inline(always)]
pub(crate) fn settings() -> Option<&'static Settings> {
    maps::settings.get(0)
}

/// Has nobody followed changes for as long as the configuration allows? Without `ebpf.withdrawAfter` the verifier removes the lookup.
#[inline(always)]
pub(crate) fn lease_has_ended(time: impl FnOnce() -> u64) -> bool {
    if globals::LEASE.load() != globals::ON {
        return false;
    }
    let Some(lease) = maps::lease.get_ptr(0) else { return false };
    // SAFETY: of a map value, in bounds and aligned to 8; one load, as the controller may be renewing it.
    let lease = Lease { end: unsafe { read_volatile(addr_of!((*lease).end)) } };
    lease.has_ended(time())
}

/// Counts a reason on this CPU.
#[inline(always)]
pub(crate) fn count(reason: Reason) {
    if let Some(counter) = maps::counters.get_ptr_mut(reason as u32) {
        // SAFETY: a value of this CPU, in bounds; a program on a CPU is not interrupted by another of ours
        // that counts the same reason except in a nested receive, where one count may be lost.
        unsafe { *counter = (*counter).wrapping_add(1) };
    }
}

/// Counts a connection of a service on this CPU.
#[inline(always)]
pub(crate) fn count_connection(service: u32) {
    if let Some(counters) = maps::service_counters.get_ptr_mut(service) {
        // SAFETY: as for `count`. Socket hooks may be preempted on a CPU: then one count may be lost.
        unsafe { (*counters).connections = (*counters).connections.wrapping_add(1) };
    }
}

/// Counts a packet of a service on this CPU.
#[inline(always)]
pub(crate) fn count_packet(service: u32, bytes: u32) {
    if let Some(counters) = maps::service_counters.get_ptr_mut(service) {
        // SAFETY: as for `count`.
        let counters = unsafe { &mut *counters };
        counters.packets = counters.packets.wrapping_add(1);
        counters.bytes = counters.bytes.wrapping_add(u64::from(bytes));
    }
}
