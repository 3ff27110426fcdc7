//! The maps. The controller sets the sizes of `ebpf.limits` when it loads the object.
#![expect(non_upper_case_globals, reason = "a symbol is its map's name, which people read in bpftool")]

pub(crate) mod connections;
pub(crate) mod flow;
pub(crate) mod map_access;

use aya_ebpf::{
    bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC},
    btf_maps::{Array, DevMapHash, HashMap, LpmTrie, LruHashMap, PerCpuArray, RingBuf, SkStorage},
    macros::btf_map,
};
use proxy_common::{
    flow::{OPENING_SERVICES, Scratch, ServiceOpenings},
    inventory::Limit,
    layout::*,
    reason::REASONS,
};

type A4 = [u8; 4];
type A6 = [u8; 16];

macro_rules! entries {
    ([$limit:ident]) => {
        Limit::$limit.first_entries(Limit::$limit.default_entries()) as usize
    };
    ($entries:expr) => {
        $entries as usize
    };
}

macro_rules! map_type {
    (hash, $key:ty, $value:ty, $entries:tt) => {
        HashMap<$key, $value, { entries!($entries) }, { BPF_F_NO_PREALLOC as usize }>
    };
    (preallocated_hash, $key:ty, $value:ty, $entries:tt) => { HashMap<$key, $value, { entries!($entries) }> };
    (lpm_trie, $key:ty, $value:ty, $entries:tt) => { LpmTrie<$key, $value, { entries!($entries) }> };
    (lru_hash, $key:ty, $value:ty, $entries:tt) => { LruHashMap<$key, $value, { entries!($entries) }> };
    (array, $key:ty, $value:ty, $entries:tt) => { Array<$value, { entries!($entries) }> };
    (shared_array, $key:ty, $value:ty, $entries:tt) => {
        Array<$value, { entries!($entries) }, { BPF_F_MMAPABLE as usize }>
    };
    (per_cpu_array, $key:ty, $value:ty, $entries:tt) => { PerCpuArray<$value, { entries!($entries) }> };
    (devices, $key:ty, $value:ty, $entries:tt) => { DevMapHash<{ entries!($entries) }> };
    (socket_storage, $key:ty, $value:ty, $entries:tt) => { SkStorage<$value> };
    (ring, $key:ty, $value:ty, $entries:tt) => { RingBuf<$value, { entries!($entries) }> };
}

macro_rules! define {
    ($($(#[doc = $doc:literal])* $name:ident: $kind:ident($key:ty, $value:ty), $entries:tt;)+) => {
        $(
            #[btf_map]
            pub(crate) static $name: map_type!($kind, $key, $value, $entries) =
                <map_type!($kind, $key, $value, $entries)>::new();
        )+
    };
}

proxy_common::maps!(define);

// Not pinned: each load of the programs has its own.
define! {
    kernel_log: array(u32, LogControl), 1;
    openings_held_until: array(u32, u64), 1;
    icmp_errors: per_cpu_array(u32, IcmpErrorCount), (IcmpBudget::ALL.len());
    service_openings: per_cpu_array(u32, ServiceOpenings), OPENING_SERVICES;
    scratch4: per_cpu_array(u32, Scratch<A4>), 1;
    scratch6: per_cpu_array(u32, Scratch<A6>), 1;
}
