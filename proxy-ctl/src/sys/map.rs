//! A hash or array map with typed keys and values.

use std::{
    io,
    marker::PhantomData,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use aya::Pod;
use aya_obj::generated::bpf_cmd;

use super::{
    CallError,
    bpf::{self, MapInfo, address, number},
};

/// The map's keys or values have another size than the types they would be read as.
#[derive(Debug, thiserror::Error)]
#[error(
    "a map with {found_key}-byte keys and {found_value}-byte values cannot be read as {key} and {value} bytes"
)]
pub struct SizeMismatch {
    pub found_key: u32,
    pub found_value: u32,
    pub key: usize,
    pub value: usize,
}

/// Not for per-CPU maps: their values are one for each CPU.
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
    /// The value, or where the next key goes.
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

/// Position of a walk through a hash map. A walk sees each entry that stays in the map at least once.
#[derive(Clone, Copy, Debug, Default)]
pub enum Cursor<K> {
    #[default]
    Start,
    /// Bucket of the hash table.
    Bucket(u32),
    /// The key seen last, where the kernel has no batches for this kind of map.
    After(K),
}

/// The kernel's own error number for "not supported", which escapes to user space from some batch calls.
const ENOTSUPP: i32 = 524;

impl<K: Pod + Default, V: Pod + Default> Map<K, V> {
    /// Takes a map whose keys and values have the size of `K` and `V`.
    pub fn new(fd: OwnedFd) -> Result<Result<Self, SizeMismatch>, CallError> {
        let info = bpf::map_info(fd.as_fd())?;
        if info.key_size as usize == size_of::<K>() && info.value_size as usize == size_of::<V>() {
            return Ok(Ok(Self { fd, info, types: PhantomData }));
        }
        Ok(Err(SizeMismatch {
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

    fn element(&self, key: *const K, value: *const V) -> Element {
        Element { map: number(self.fd()), _padding: 0, key: address(key), value: address(value), flags: 0 }
    }

    pub fn get(&self, key: &K) -> Result<Option<V>, CallError> {
        let mut value = V::default();
        let target: *mut V = &mut value;
        let mut attr = self.element(key, target);
        // SAFETY: the kernel reads a key and writes a value; `new` has compared their sizes with the types.
        match unsafe { bpf::call(bpf_cmd::BPF_MAP_LOOKUP_ELEM, &mut attr) } {
            Ok(_) => Ok(Some(value)),
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(e) => Err(CallError::new("bpf(BPF_MAP_LOOKUP_ELEM)", e)),
        }
    }

    /// Inserts or replaces. `E2BIG`: the table is full.
    pub fn set(&self, key: &K, value: &V) -> Result<(), CallError> {
        let mut attr = self.element(key, value);
        // SAFETY: the kernel reads a key and a value; `new` has compared their sizes with the types.
        unsafe { bpf::call(bpf_cmd::BPF_MAP_UPDATE_ELEM, &mut attr) }
            .map_err(|e| CallError::new("bpf(BPF_MAP_UPDATE_ELEM)", e))?;
        Ok(())
    }

    /// Inserts or replaces in order; after an error tells how many were written before it.
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
            // SAFETY: the kernel reads `count` keys and values; `new` has compared their sizes with the types.
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
            // No batches for this kind of map.
            for (key, value) in keys[done..count].iter().zip(&values[done..count]) {
                self.set(key, value).map_err(|e| (done, e))?;
                done += 1;
            }
        }
        Ok(())
    }

    /// False: there was no such key.
    pub fn remove(&self, key: &K) -> Result<bool, CallError> {
        let mut attr = self.element(key, std::ptr::null());
        // SAFETY: the kernel reads a key; `new` has compared its size with the type.
        match unsafe { bpf::call(bpf_cmd::BPF_MAP_DELETE_ELEM, &mut attr) } {
            Ok(_) => Ok(true),
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(false),
            Err(e) => Err(CallError::new("bpf(BPF_MAP_DELETE_ELEM)", e)),
        }
    }

    /// Reads about `limit` entries from `cursor` on. `None` for the cursor: that was all.
    pub fn read(
        &self,
        cursor: Cursor<K>,
        limit: usize,
        into: &mut Vec<(K, V)>,
    ) -> Result<Option<Cursor<K>>, CallError> {
        match cursor {
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
            cursor = self.read(at, 16_384, &mut all)?;
        }
        Ok(all)
    }

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
            // SAFETY: the kernel writes at most `count` keys and values, whose sizes `new` has compared, and a
            // bucket number of 4 bytes (hash maps; the position in other kinds of map is as long as their key).
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
        // SAFETY: the kernel reads a key (or none) and writes a key; `new` has compared its size with the type.
        match unsafe { bpf::call(bpf_cmd::BPF_MAP_GET_NEXT_KEY, &mut attr) } {
            Ok(_) => Ok(Some(next)),
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(e) => Err(CallError::new("bpf(BPF_MAP_GET_NEXT_KEY)", e)),
        }
    }
}

/// An array that has a value for each CPU in each place. Since Linux 4.6.
#[derive(Debug)]
pub struct PerCpuArray<V> {
    fd: OwnedFd,
    capacity: u32,
    cpus: usize,
    types: PhantomData<fn() -> V>,
}

impl<V: Pod + Default> PerCpuArray<V> {
    /// The kernel pads each CPU's value to 8 bytes.
    const PADDED: () = assert!(size_of::<V>().is_multiple_of(8));

    /// Takes a per-CPU array whose values have the size of `V`; `EINVAL`: it is something else.
    pub fn new(fd: OwnedFd) -> Result<Self, CallError> {
        const PER_CPU_ARRAY: u32 = 6;
        let () = Self::PADDED;
        let info = bpf::map_info(fd.as_fd())?;
        if info.kind != PER_CPU_ARRAY || info.key_size != 4 || info.value_size as usize != size_of::<V>() {
            let source = io::Error::from_raw_os_error(libc::EINVAL);
            return Err(CallError::new("adopting a per-CPU array", source));
        }
        let cpus = aya::util::nr_cpus().map_err(|(_, e)| CallError::new("counting CPUs", e))?;
        Ok(Self { fd, capacity: info.max_entries, cpus, types: PhantomData })
    }

    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// The value of each possible CPU. `ENOENT`: `index` is not below the capacity.
    pub fn get(&self, index: u32) -> Result<Vec<V>, CallError> {
        let mut values = vec![V::default(); self.cpus];
        let target = values.as_mut_ptr();
        self.call(bpf_cmd::BPF_MAP_LOOKUP_ELEM, "bpf(BPF_MAP_LOOKUP_ELEM)", index, target)?;
        Ok(values)
    }

    /// Makes every CPU's value zero. `E2BIG`: `index` is not below the capacity.
    pub fn clear(&self, index: u32) -> Result<(), CallError> {
        let mut zeros = vec![V::default(); self.cpus];
        self.call(bpf_cmd::BPF_MAP_UPDATE_ELEM, "bpf(BPF_MAP_UPDATE_ELEM)", index, zeros.as_mut_ptr())
    }

    /// `values`: as many as there are CPUs.
    fn call(
        &self,
        command: bpf_cmd,
        name: &'static str,
        index: u32,
        values: *mut V,
    ) -> Result<(), CallError> {
        let key: *const u32 = &index;
        let mut attr = Element {
            map: number(self.fd.as_fd()),
            _padding: 0,
            key: address(key),
            value: address(values),
            flags: 0,
        };
        // SAFETY: the kernel reads a key of 4 bytes, and reads or writes a value for each possible CPU; `new` has
        // compared their size with the type, which needs no padding.
        unsafe { bpf::call(command, &mut attr) }.map_err(|e| CallError::new(name, e))?;
        Ok(())
    }
}
