//! A `BPF_F_MMAPABLE` array as plain memory that is shared with BPF programs. Needs Linux 5.5.

use std::{
    cell::OnceCell,
    ffi::c_void,
    io,
    marker::PhantomData,
    num::NonZeroUsize,
    os::fd::{AsFd, OwnedFd},
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering},
};

use aya::Pod;
use aya_obj::generated::BPF_F_MMAPABLE;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

use super::{MapInfo, map::kind::ARRAY};
use crate::sys::{CallError, bpf};

const CALL: &str = "mmap of a BPF array";
/// The largest element, in words of 8 bytes.
const WORDS: usize = 4;

/// The bytes that are mapped together. This is a multiple of every page size and element size.
const SEGMENT: usize = 1 << 18;

/// A part of the array, mapped into memory.
#[derive(Debug)]
struct Segment {
    base: NonNull<c_void>,
    bytes: usize,
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map`, and no reference into it outlives `self`.
        let _ = unsafe { munmap(self.base, self.bytes) };
    }
}

/// An array whose elements are read and written in words of 8 bytes, in order of address. Each word
/// is accessed in one step.
///
/// The kernel enters all pages of such a mapping at once, so that all of it counts as resident
/// memory. Therefore each segment is mapped when it is first touched: most of a large array never
/// is.
#[derive(Debug)]
pub struct SharedArray<T> {
    fd: OwnedFd,
    segments: Box<[OnceCell<Segment>]>,
    bytes: usize,
    length: usize,
    writable: bool,
    element: PhantomData<T>,
}

// SAFETY: the mappings belong to this value alone and are only accessed through atomics.
unsafe impl<T: Send> Send for SharedArray<T> {}

impl<T: Pod> SharedArray<T> {
    const STRIDE: usize = {
        assert!(size_of::<T>().is_multiple_of(8) && size_of::<T>() <= 8 * WORDS && size_of::<T>() > 0);
        assert!(SEGMENT.is_multiple_of(size_of::<T>()));
        size_of::<T>() / 8
    };

    /// Prepares access to the array. Returns `EINVAL` if it is not an mmapable array of `T`.
    /// `writable` is false for users that only read.
    pub fn new(fd: &OwnedFd, writable: bool) -> Result<Self, CallError> {
        let info: MapInfo = bpf::map_info(fd.as_fd())?;
        if info.kind != ARRAY
            || info.flags & BPF_F_MMAPABLE == 0
            || info.value_size as usize != size_of::<T>()
            || info.max_entries == 0
        {
            return Err(CallError::new(CALL, io::Error::from_raw_os_error(libc::EINVAL)));
        }
        let length = info.max_entries as usize;
        let bytes = length * size_of::<T>();
        let fd = fd.try_clone().map_err(|e| CallError::new("fcntl(F_DUPFD_CLOEXEC)", e))?;
        let segments = (0..bytes.div_ceil(SEGMENT)).map(|_| OnceCell::new()).collect();
        let array = Self { fd, segments, bytes, length, writable, element: PhantomData };
        // The first segment is mapped now, so that an array that cannot be mapped fails here.
        array.provide(0)?;
        Ok(array)
    }

    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    pub fn len(&self) -> usize {
        self.length
    }

    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    fn map(&self, segment: usize) -> Result<Segment, CallError> {
        let invalid = || CallError::new(CALL, io::Error::from_raw_os_error(libc::EINVAL));
        let start = segment.checked_mul(SEGMENT).ok_or_else(invalid)?;
        let bytes = self.bytes.saturating_sub(start).min(SEGMENT);
        let size = NonZeroUsize::new(bytes).ok_or_else(invalid)?;
        let offset = start.try_into().map_err(|_| invalid())?;
        let mut protection = ProtFlags::PROT_READ;
        protection.set(ProtFlags::PROT_WRITE, self.writable);
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe { mmap(None, size, protection, MapFlags::MAP_SHARED, &self.fd, offset) }
            .map_err(|e| CallError::new(CALL, e.into()))?;
        Ok(Segment { base, bytes })
    }

    /// Maps the segment of this element if it is not mapped yet. Afterwards the element can be read
    /// and written. Fails if there is no memory or the index is beyond the end.
    pub fn provide(&self, index: usize) -> Result<(), CallError> {
        let segment = index / (SEGMENT / size_of::<T>());
        match self.segments.get(segment) {
            Some(cell) if cell.get().is_some() => Ok(()),
            Some(cell) => {
                let mapped = self.map(segment)?;
                cell.get_or_init(|| mapped);
                Ok(())
            }
            None => Err(CallError::new(CALL, io::Error::from_raw_os_error(libc::EINVAL))),
        }
    }

    /// Unmaps the array. Segments that are touched later are mapped again.
    pub fn forget(&mut self) {
        for segment in &mut self.segments {
            segment.take();
        }
    }

    fn words(&self, index: usize) -> Option<&[AtomicU64]> {
        self.provide(index).ok()?;
        let in_segment = SEGMENT / size_of::<T>();
        let segment = self.segments.get(index / in_segment)?.get()?;
        // SAFETY: the mapping is page-aligned, `bytes` long, and lives until `self` is dropped;
        // others (the kernel) access it by atomics or by loads that may see old or new words.
        let all: &[AtomicU64] = unsafe {
            std::slice::from_raw_parts(segment.base.as_ptr().cast_const().cast(), segment.bytes / 8)
        };
        let first = (index % in_segment) * Self::STRIDE;
        all.get(first..first + Self::STRIDE)
    }

    /// Returns an element. Returns `None` if the index is beyond the end or the segment cannot be
    /// mapped, for which [`SharedArray::provide`] returns the reason.
    pub fn get(&self, index: usize) -> Option<T> {
        let mut copy = [0_u64; WORDS];
        for (to, from) in copy.iter_mut().zip(self.words(index)?) {
            *to = from.load(Ordering::Acquire);
        }
        // SAFETY: `STRIDE` proves that `T` is no longer than `copy`, and any bytes are a valid
        // `Pod`.
        Some(unsafe { std::ptr::read_unaligned(copy.as_ptr().cast()) })
    }

    /// Writes an element. Returns false, and writes nothing, if the index is beyond the end, the
    /// array is only for reading, or the segment cannot be mapped.
    #[must_use]
    pub fn set(&self, index: usize, value: &T) -> bool {
        let Some(words) = self.words(index).filter(|_| self.writable) else { return false };
        let mut copy = [0_u64; WORDS];
        // SAFETY: `STRIDE` proves that `copy` is no shorter than `T`, and a `Pod` has no padding.
        unsafe { std::ptr::write_unaligned(copy.as_mut_ptr().cast(), *value) };
        for (to, from) in words.iter().zip(copy) {
            to.store(from, Ordering::Release);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    mod as_root {
        use super::*;

        #[test]
        #[ignore = "needs root: makes a BPF map"]
        fn segments_are_mapped_when_they_are_touched() {
            const LENGTH: u32 = 3 * (SEGMENT as u32 / 8) - 100;
            let shape = MapInfo {
                kind: ARRAY,
                key_size: 4,
                value_size: 8,
                max_entries: LENGTH,
                flags: BPF_F_MMAPABLE,
                ..MapInfo::default()
            };
            let map = bpf::create_map(&shape, None).unwrap();
            let array = SharedArray::<u64>::new(&map, true).unwrap();
            let mapped =
                |array: &SharedArray<u64>| array.segments.iter().filter(|s| s.get().is_some()).count();
            assert_eq!((array.segments.len(), mapped(&array)), (3, 1));
            let (last, in_first) = (LENGTH as usize - 1, SEGMENT / 8 - 1);
            assert!(array.set(last, &7) && array.set(in_first, &5));
            assert_eq!((mapped(&array), array.get(last), array.get(in_first)), (2, Some(7), Some(5)));
            assert_eq!((array.get(last + 1), array.set(last + 1, &1)), (None, false));
            assert_eq!(array.get(usize::MAX), None);
            let mut array = array;
            array.forget();
            assert_eq!((mapped(&array), array.get(last), mapped(&array)), (0, Some(7), 1));
            let other = SharedArray::<u64>::new(&map, false).unwrap();
            assert_eq!(
                (other.get(last), other.get(in_first), other.get(in_first + 1)),
                (Some(7), Some(5), Some(0))
            );
            assert!(!other.set(0, &1));
        }
    }
}
