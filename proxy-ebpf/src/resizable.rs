//! Tables that change their size while programs write them: an array of the map in use and, while its entries move to that, of the one
//! before. See [`MAP_BEFORE`].

use aya_ebpf::{
    bindings::{BPF_ANY, BPF_NOEXIST},
    btf_maps::{ArrayOfMaps, HashMap, LruHashMap},
};
use proxy_common::layout::{MAP_BEFORE, MAP_IN_USE};

const ENOENT: i32 = -2;
const EEXIST: i32 = -17;

pub(crate) type Resizable<M> = ArrayOfMaps<M, 2>;

/// A hash table, of either kind.
pub(crate) trait Entries {
    type Key;
    type Value;

    fn find(&self, key: &Self::Key) -> Option<*mut Self::Value>;
    fn set(&self, key: &Self::Key, value: &Self::Value, flags: u32) -> Result<(), i32>;
    fn delete(&self, key: &Self::Key) -> Result<(), i32>;
}

macro_rules! entries {
    ($($map:ident),+) => {
        $(impl<K, V, const ENTRIES: usize, const FLAGS: usize> Entries for $map<K, V, ENTRIES, FLAGS> {
            type Key = K;
            type Value = V;

            #[inline(always)]
            fn find(&self, key: &K) -> Option<*mut V> {
                self.get_ptr_mut(key)
            }

            #[inline(always)]
            fn set(&self, key: &K, value: &V, flags: u32) -> Result<(), i32> {
                self.insert(key, value, u64::from(flags))
            }

            #[inline(always)]
            fn delete(&self, key: &K) -> Result<(), i32> {
                self.remove(key)
            }
        })+
    };
}

entries!(HashMap, LruHashMap);

#[inline(always)]
pub(crate) fn find<M: Entries>(table: &'static Resizable<M>, key: &M::Key) -> Option<*mut M::Value> {
    let found = find_in_either(table, key);
    if found.is_null() { None } else { Some(found) }
}

/// As [`find`], faster.
#[inline(always)]
pub(crate) fn find_inlined<M: Entries>(table: &'static Resizable<M>, key: &M::Key) -> Option<*mut M::Value> {
    if let Some(before) = table.get(MAP_BEFORE)
        && let Some(found) = before.find(key)
    {
        return Some(found);
    }
    table.get(MAP_IN_USE)?.find(key)
}

/// Null: in neither. A function of its own, so that the verifier goes on from one state, wherever the entry is found.
#[inline(never)]
fn find_in_either<M: Entries>(table: &'static Resizable<M>, key: &M::Key) -> *mut M::Value {
    match find_inlined(table, key) {
        Some(found) => found,
        None => core::ptr::null_mut(),
    }
}

/// `EEXIST`: the key is there already, and its value stays.
#[inline(always)]
pub(crate) fn insert<M: Entries>(table: &Resizable<M>, key: &M::Key, value: &M::Value) -> Result<(), i32> {
    if let Some(before) = table.get(MAP_BEFORE)
        && before.find(key).is_some()
    {
        return Err(EEXIST);
    }
    table.get(MAP_IN_USE).ok_or(ENOENT)?.set(key, value, BPF_NOEXIST)
}

/// Inserts or replaces.
#[inline(always)]
pub(crate) fn put<M: Entries>(table: &Resizable<M>, key: &M::Key, value: &M::Value) -> Result<(), i32> {
    let _there_was_none = remove_before(table, key);
    table.get(MAP_IN_USE).ok_or(ENOENT)?.set(key, value, BPF_ANY)
}

/// False: there was no such key.
#[inline(always)]
pub(crate) fn remove<M: Entries>(table: &Resizable<M>, key: &M::Key) -> bool {
    let was_before = remove_before(table, key);
    table.get(MAP_IN_USE).is_some_and(|in_use| in_use.delete(key).is_ok()) || was_before
}

#[inline(always)]
fn remove_before<M: Entries>(table: &Resizable<M>, key: &M::Key) -> bool {
    table.get(MAP_BEFORE).is_some_and(|before| before.delete(key).is_ok())
}
