//! A hash or array map with typed keys and values.

use std::{
    fmt, io,
    marker::PhantomData,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use aya::{
    Pod,
    maps::{MapData, MapError, PerCpuValues, RingBuf},
};
use aya_obj::generated::{BPF_EXIST, BPF_NOEXIST, bpf_cmd, bpf_map_type};

use self::kind::{ARRAY, ARRAY_OF_MAPS, DEVMAP_HASH, HASH, LPM_TRIE, LRU_HASH};
use super::{MapInfo, address, number};
use crate::sys::{CallError, bpf};

/// The types of maps, as [`MapInfo::kind`] has them.
pub mod kind {
    use super::bpf_map_type;

    pub const HASH: u32 = bpf_map_type::BPF_MAP_TYPE_HASH as u32;
    pub const ARRAY: u32 = bpf_map_type::BPF_MAP_TYPE_ARRAY as u32;
    pub const PER_CPU_ARRAY: u32 = bpf_map_type::BPF_MAP_TYPE_PERCPU_ARRAY as u32;
    pub const LRU_HASH: u32 = bpf_map_type::BPF_MAP_TYPE_LRU_HASH as u32;
    pub const LPM_TRIE: u32 = bpf_map_type::BPF_MAP_TYPE_LPM_TRIE as u32;
    pub const ARRAY_OF_MAPS: u32 = bpf_map_type::BPF_MAP_TYPE_ARRAY_OF_MAPS as u32;
    pub const SK_STORAGE: u32 = bpf_map_type::BPF_MAP_TYPE_SK_STORAGE as u32;
    pub const DEVMAP_HASH: u32 = bpf_map_type::BPF_MAP_TYPE_DEVMAP_HASH as u32;
    pub const RING: u32 = bpf_map_type::BPF_MAP_TYPE_RINGBUF as u32;
}

/// The reason why a map cannot be read with the given types of keys and values.
#[derive(Debug, thiserror::Error)]
pub enum Mismatch {
    #[error("a BPF map of type {0} does not have one value for each key")]
    Kind(u32),
    #[error(
        "a map with {found_key}-byte keys and {found_value}-byte values cannot be read as {key} and {value} bytes"
    )]
    Size { found_key: u32, found_value: u32, key: usize, value: usize },
}

#[derive(Debug)]
pub struct Map<K, V> {
    fd: OwnedFd,
    info: MapInfo,
    types: PhantomData<fn(K) -> V>,
}

#[repr(C)]
struct Element {
    map: u32,
    _padding: u32,
    key: u64,
    /// The value, or where the kernel writes the next key.
    value: u64,
    flags: u64,
}

#[repr(C)]
struct Batch {
    from: u64,
    to: u64,
    keys: u64,
    values: u64,
    count: u32,
    map: u32,
    element_flags: u64,
    flags: u64,
}

/// The position of a walk through a map. A walk sees each entry that stays in the map at least
/// once.
#[derive(Clone, Copy, Debug, Default)]
pub enum Cursor<K> {
    #[default]
    Start,
    /// The bucket of the hash map, or the index of the array.
    Bucket(u32),
    /// The key that was seen last, for maps that the kernel cannot read in batches.
    After(K),
}

/// The number of entries that are read at once.
const SLICE: usize = 16_384;

/// The kernel's internal error number for "not supported". Some batch calls return it to user
/// space.
const ENOTSUPP: i32 = 524;

impl Map<u32, u32> {
    /// Puts a map into an array of maps, at `index`. Since Linux 4.20, this returns when
    /// no program uses the former one any more.
    pub fn put_map(&self, index: u32, map: BorrowedFd<'_>) -> Result<(), CallError> {
        self.set(&index, &number(map))
    }
}

impl<K: Pod + Default, V: Pod + Default> Map<K, V> {
    /// Takes a map that has one value for each key, with the sizes of `K` and `V`. A per-CPU map is
    /// refused: the kernel would write one value for each CPU, and so write beyond a `V`.
    pub fn new(fd: OwnedFd) -> Result<Result<Self, Mismatch>, CallError> {
        let info = bpf::map_info(fd.as_fd())?;
        if !matches!(info.kind, HASH | ARRAY | LRU_HASH | LPM_TRIE | ARRAY_OF_MAPS | DEVMAP_HASH) {
            return Ok(Err(Mismatch::Kind(info.kind)));
        }
        if info.key_size as usize == size_of::<K>() && info.value_size as usize == size_of::<V>() {
            return Ok(Ok(Self { fd, info, types: PhantomData }));
        }
        Ok(Err(Mismatch::Size {
            found_key: info.key_size,
            found_value: info.value_size,
            key: size_of::<K>(),
            value: size_of::<V>(),
        }))
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub fn capacity(&self) -> u32 {
        self.info.max_entries
    }

    /// Returns true if the map has all its entries from the beginning.
    pub fn is_array(&self) -> bool {
        matches!(self.info.kind, ARRAY | ARRAY_OF_MAPS)
    }

    /// Returns true if a full map evicts an entry to make room for a new one.
    pub fn evicts(&self) -> bool {
        self.info.kind == LRU_HASH
    }

    fn element(&self, key: *const K, value: *const V) -> Element {
        Element { map: number(self.fd()), _padding: 0, key: address(key), value: address(value), flags: 0 }
    }

    pub fn get(&self, key: &K) -> Result<Option<V>, CallError> {
        self.value_by(bpf_cmd::BPF_MAP_LOOKUP_ELEM, key)
            .map_err(|e| CallError::new("bpf(BPF_MAP_LOOKUP_ELEM)", e))
    }

    /// Returns a key's value by the given command.
    fn value_by(&self, command: bpf_cmd, key: &K) -> io::Result<Option<V>> {
        let mut value = V::default();
        let target: *mut V = &mut value;
        let mut attr = self.element(key, target);
        // SAFETY: the kernel reads a key and writes a value; `new` has compared their sizes with
        // the types.
        match unsafe { bpf::call(command, &mut attr) } {
            Ok(_) => Ok(Some(value)),
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Inserts or replaces an entry. If the map is full, returns `E2BIG`, or `ENOSPC` for a trie.
    pub fn set(&self, key: &K, value: &V) -> Result<(), CallError> {
        let mut attr = self.element(key, value);
        // SAFETY: the kernel reads a key and a value; `new` has compared their sizes with the
        // types.
        unsafe { bpf::call(bpf_cmd::BPF_MAP_UPDATE_ELEM, &mut attr) }
            .map_err(|e| CallError::new("bpf(BPF_MAP_UPDATE_ELEM)", e))?;
        Ok(())
    }

    /// Inserts an entry. Returns false, and keeps the value, if the key exists. If the map is full,
    /// returns `E2BIG`, or `ENOSPC` for a trie.
    pub fn insert(&self, key: &K, value: &V) -> Result<bool, CallError> {
        self.update_unless(libc::EEXIST, BPF_NOEXIST, key, value)
    }

    /// Replaces an entry. Returns false if the key does not exist.
    pub fn replace(&self, key: &K, value: &V) -> Result<bool, CallError> {
        self.update_unless(libc::ENOENT, BPF_EXIST, key, value)
    }

    /// Writes an entry under the condition of `flag`. Returns false if the condition does not hold,
    /// for which the kernel's error is `refusal`.
    fn update_unless(&self, refusal: i32, flag: u32, key: &K, value: &V) -> Result<bool, CallError> {
        let mut attr = Element { flags: flag.into(), ..self.element(key, value) };
        // SAFETY: the kernel reads a key and a value; `new` has compared their sizes with the
        // types.
        match unsafe { bpf::call(bpf_cmd::BPF_MAP_UPDATE_ELEM, &mut attr) } {
            Ok(_) => Ok(true),
            Err(e) if e.raw_os_error() == Some(refusal) => Ok(false),
            Err(e) => Err(CallError::new("bpf(BPF_MAP_UPDATE_ELEM)", e)),
        }
    }

    /// Inserts or replaces entries in order. An error comes with the number of entries that were
    /// written before it.
    pub fn set_all(&self, keys: &[K], values: &[V]) -> Result<(), (usize, CallError)> {
        let count = keys.len().min(values.len());
        let mut done = 0;
        while done < count {
            let mut attr = Batch {
                from: 0,
                to: 0,
                keys: address(keys[done..count].as_ptr()),
                values: address(values[done..count].as_ptr()),
                count: u32::try_from(count - done).unwrap_or(u32::MAX),
                map: number(self.fd()),
                element_flags: 0,
                flags: 0,
            };
            // SAFETY: the kernel reads `count` keys and values; `new` has compared their sizes with
            // the types.
            let result = unsafe { bpf::call(bpf_cmd::BPF_MAP_UPDATE_BATCH, &mut attr) };
            let error = match result {
                Ok(_) => {
                    done += attr.count as usize;
                    continue;
                }
                Err(e) => e,
            };
            if !matches!(error.raw_os_error(), Some(libc::EINVAL | ENOTSUPP)) {
                return Err((done + attr.count as usize, CallError::new("bpf(BPF_MAP_UPDATE_BATCH)", error)));
            }
            // The kernel has no batches for this kind of map.
            for (key, value) in keys[done..count].iter().zip(&values[done..count]) {
                self.set(key, value).map_err(|e| (done, e))?;
                done += 1;
            }
        }
        Ok(())
    }

    /// Removes an entry. Returns false if there was no such key.
    pub fn remove(&self, key: &K) -> Result<bool, CallError> {
        let mut attr = self.element(key, std::ptr::null());
        // SAFETY: the kernel reads a key; `new` has compared its size with the type.
        match unsafe { bpf::call(bpf_cmd::BPF_MAP_DELETE_ELEM, &mut attr) } {
            Ok(_) => Ok(true),
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(false),
            Err(e) => Err(CallError::new("bpf(BPF_MAP_DELETE_ELEM)", e)),
        }
    }

    /// Removes an entry of a hash map and returns its value at that moment. Before Linux 5.14,
    /// where the kernel cannot do both at once, it returns the value from shortly before.
    pub fn take(&self, key: &K) -> Result<Option<V>, CallError> {
        match self.value_by(bpf_cmd::BPF_MAP_LOOKUP_AND_DELETE_ELEM, key) {
            Ok(found) => Ok(found),
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP | ENOTSUPP)) => {
                let found = self.get(key)?;
                Ok(if self.remove(key)? { found } else { None })
            }
            Err(e) => Err(CallError::new("bpf(BPF_MAP_LOOKUP_AND_DELETE_ELEM)", e)),
        }
    }

    /// Reads about `limit` entries from `cursor` on. Returns `None` as the next cursor after the
    /// last entry.
    pub fn read(
        &self,
        cursor: Cursor<K>,
        limit: usize,
        into: &mut Vec<(K, V)>,
    ) -> Result<Option<Cursor<K>>, CallError> {
        match cursor {
            Cursor::Start if !self.has_batches() => self.read_keys(None, limit, into),
            Cursor::Start => self.read_batch(None, limit, into),
            Cursor::Bucket(bucket) => self.read_batch(Some(bucket), limit, into),
            Cursor::After(key) => self.read_keys(Some(key), limit, into),
        }
    }

    /// Reads every entry.
    pub fn read_all(&self) -> Result<Vec<(K, V)>, CallError> {
        let mut all = Vec::new();
        let mut cursor = Some(Cursor::Start);
        while let Some(at) = cursor {
            cursor = self.read(at, SLICE, &mut all)?;
        }
        Ok(all)
    }

    /// Gives all entries to `each`, slice by slice, until it returns false. Returns true if `each`
    /// has seen all.
    pub fn walk(
        &self,
        mut each: impl FnMut(&[(K, V)]) -> Result<bool, CallError>,
    ) -> Result<bool, CallError> {
        let (mut cursor, mut slice) = (Some(Cursor::Start), Vec::new());
        while let Some(at) = cursor {
            slice.clear();
            cursor = self.read(at, SLICE, &mut slice)?;
            if !each(&slice)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns true if a position within a batch is a number of 4 bytes: the bucket of a hash
    /// map, or the index of an array. In other kinds of maps it is as long as a key.
    fn has_batches(&self) -> bool {
        matches!(self.info.kind, HASH | LRU_HASH | ARRAY)
    }

    /// Reads a batch of a map that has batches.
    fn read_batch(
        &self,
        from: Option<u32>,
        limit: usize,
        into: &mut Vec<(K, V)>,
    ) -> Result<Option<Cursor<K>>, CallError> {
        let mut limit = limit.clamp(1, self.info.max_entries.max(1) as usize);
        loop {
            let mut keys = vec![K::default(); limit];
            let mut values = vec![V::default(); limit];
            let mut to = 0_u32;
            let next: *mut u32 = &mut to;
            let first: *const u32 = from.as_ref().map_or(std::ptr::null(), |bucket| bucket);
            let mut attr = Batch {
                from: address(first),
                to: address(next),
                keys: address(keys.as_mut_ptr()),
                values: address(values.as_mut_ptr()),
                count: limit as u32,
                map: number(self.fd()),
                element_flags: 0,
                flags: 0,
            };
            // SAFETY: the kernel writes at most `count` keys and values, whose sizes `new` has
            // compared, and a position of 4 bytes, as `has_batches` says of this kind of map.
            let result = unsafe { bpf::call(bpf_cmd::BPF_MAP_LOOKUP_BATCH, &mut attr) };
            let errno = result.as_ref().map_or_else(|e| e.raw_os_error().unwrap_or(0), |_| 0);
            match errno {
                0 | libc::ENOENT => {
                    let count = (attr.count as usize).min(limit);
                    into.extend(keys.into_iter().zip(values).take(count));
                    return Ok((errno == 0).then_some(Cursor::Bucket(to)));
                }
                // A bucket holds more than `limit` entries.
                libc::ENOSPC => limit *= 2,
                libc::EINVAL | ENOTSUPP if from.is_none() => return self.read_keys(None, limit, into),
                _ => {
                    let error = result.err().unwrap_or_else(|| io::Error::from_raw_os_error(errno));
                    return Err(CallError::new("bpf(BPF_MAP_LOOKUP_BATCH)", error));
                }
            }
        }
    }

    fn read_keys(
        &self,
        mut after: Option<K>,
        limit: usize,
        into: &mut Vec<(K, V)>,
    ) -> Result<Option<Cursor<K>>, CallError> {
        for _ in 0..limit {
            let Some(key) = self.next_key(after.as_ref())? else { return Ok(None) };
            if let Some(value) = self.get(&key)? {
                into.push((key, value));
            }
            after = Some(key);
        }
        Ok(Some(after.map_or(Cursor::Start, Cursor::After)))
    }

    fn next_key(&self, after: Option<&K>) -> Result<Option<K>, CallError> {
        let mut next = K::default();
        let target: *mut K = &mut next;
        let after: *const K = after.map_or(std::ptr::null(), |key| key);
        let mut attr = Element {
            map: number(self.fd()),
            _padding: 0,
            key: address(after),
            value: address(target.cast_const()),
            flags: 0,
        };
        // SAFETY: the kernel reads a key (or none) and writes a key; `new` has compared its size
        // with the type.
        match unsafe { bpf::call(bpf_cmd::BPF_MAP_GET_NEXT_KEY, &mut attr) } {
            Ok(_) => Ok(Some(next)),
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(e) => Err(CallError::new("bpf(BPF_MAP_GET_NEXT_KEY)", e)),
        }
    }
}

/// A ring buffer whose records are a `T` each. It has one reader. Needs Linux 5.8.
pub struct Ring<T> {
    ring: RingBuf<MapData>,
    records: PhantomData<T>,
}

impl<T> fmt::Debug for Ring<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").finish_non_exhaustive()
    }
}

impl<T> TryFrom<aya::maps::Map> for Ring<T> {
    type Error = MapError;

    fn try_from(map: aya::maps::Map) -> Result<Self, MapError> {
        Ok(Self { ring: RingBuf::try_from(map)?, records: PhantomData })
    }
}

impl<T: Pod> Ring<T> {
    /// Opens a ring buffer, and continues where the last reader has stopped.
    pub fn new(fd: OwnedFd) -> Result<Self, CallError> {
        let map = MapData::from_fd(fd).and_then(aya::maps::Map::from_map_data).and_then(Self::try_from);
        map.map_err(|error| map_error("adopting a ring buffer", error))
    }

    /// Returns the oldest record, or `None` if there is none. Records of another size are skipped.
    pub fn take(&mut self) -> Option<T> {
        loop {
            let record = self.ring.next()?;
            if record.len() == size_of::<T>() {
                return bpf::pod(&record);
            }
        }
    }
}

impl<T> AsFd for Ring<T> {
    /// Returns the descriptor, which is readable when there is a record.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }
}

/// An array that has a value for each CPU at each index. Needs Linux 4.6.
pub struct PerCpuArray<V: Pod>(aya::maps::PerCpuArray<MapData, V>);

impl<V: Pod> fmt::Debug for PerCpuArray<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PerCpuArray").finish_non_exhaustive()
    }
}

impl<V: Pod + Default> PerCpuArray<V> {
    /// Takes a per-CPU array whose values have the size of `V`.
    pub fn new(fd: OwnedFd) -> Result<Self, CallError> {
        let map = MapData::from_fd(fd).and_then(aya::maps::Map::from_map_data).and_then(TryInto::try_into);
        map.map(Self).map_err(|error| map_error("adopting a per-CPU array", error))
    }

    pub fn capacity(&self) -> u32 {
        self.0.len()
    }

    /// Returns the value of each possible CPU.
    pub fn get(&self, index: u32) -> Result<PerCpuValues<V>, CallError> {
        self.0.get(&index, 0).map_err(|error| map_error("bpf(BPF_MAP_LOOKUP_ELEM)", error))
    }

    /// Sets the value of every CPU to zero.
    pub fn clear(&mut self, index: u32) -> Result<(), CallError> {
        let cpus = aya::util::nr_cpus().map_err(|(_, error)| CallError::new("counting CPUs", error))?;
        let zeros =
            PerCpuValues::try_from(vec![V::default(); cpus]).map_err(CallError::of("counting CPUs"))?;
        self.0.set(index, zeros, 0).map_err(|error| map_error("bpf(BPF_MAP_UPDATE_ELEM)", error))
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "only the kernel's errors have a number")]
fn map_error(call: &'static str, error: MapError) -> CallError {
    let source = match error {
        MapError::SyscallError(error) => error.io_error,
        other => io::Error::other(other),
    };
    CallError::new(call, source)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const PER_CPU_HASH: u32 = bpf_map_type::BPF_MAP_TYPE_PERCPU_HASH as u32;

    fn opened<V: Pod + Default>(kind: u32) -> Result<Map<u32, V>, String> {
        let shape = MapInfo { kind, id: 0, key_size: 4, value_size: 8, max_entries: 8, flags: 0 };
        Map::new(bpf::create_map(&shape, None).unwrap()).unwrap().map_err(|mismatch| mismatch.to_string())
    }

    #[rstest]
    #[case::per_cpu_hash(PER_CPU_HASH)]
    #[case::per_cpu_array(kind::PER_CPU_ARRAY)]
    #[ignore = "needs root: makes BPF maps"]
    fn as_root_other_kinds_are_refused(#[case] kind: u32) {
        let error = opened::<u64>(kind).unwrap_err();
        assert!(error.starts_with(&format!("a BPF map of type {kind} ")), "{error}");
    }

    #[rstest]
    #[case::hash(HASH)]
    #[case::lru(LRU_HASH)]
    #[case::array(ARRAY)]
    #[ignore = "needs root: makes BPF maps"]
    fn as_root_every_kind_that_is_taken_can_be_read_in_batches(#[case] kind: u32) {
        let map = opened::<u64>(kind).unwrap();
        for key in 0..8 {
            map.set(&key, &u64::from(key)).unwrap();
        }
        assert!(map.has_batches());
        let mut all = Vec::new();
        let mut cursor = Some(Cursor::Start);
        while let Some(at) = cursor {
            cursor = map.read(at, 3, &mut all).unwrap();
        }
        all.sort_unstable();
        all.dedup();
        assert_eq!(all, (0..8).map(|key| (key, u64::from(key))).collect::<Vec<_>>());
        assert!(opened::<u32>(kind).unwrap_err().contains("8-byte values"));
    }
}
