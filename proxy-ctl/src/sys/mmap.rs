//! A `BPF_F_MMAPABLE` array as plain memory, shared with the programs in the kernel. Linux 5.5.

use std::{
    ffi::c_void,
    io,
    marker::PhantomData,
    num::NonZeroUsize,
    os::fd::{AsFd, OwnedFd},
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering},
};

use aya::Pod;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

use super::{
    CallError,
    bpf::{self, MapInfo},
};

const BPF_MAP_TYPE_ARRAY: u32 = 2;
const BPF_F_MMAPABLE: u32 = 1 << 10;
/// The largest element, in words of 8 bytes.
const WORDS: usize = 4;

/// Elements are read and written in words of 8 bytes, each in one step, in order of address.
#[derive(Debug)]
pub struct SharedArray<T> {
    base: NonNull<c_void>,
    bytes: usize,
    length: usize,
    writable: bool,
    element: PhantomData<T>,
}

// SAFETY: the mapping belongs to this value alone and is only accessed through atomics.
unsafe impl<T: Send> Send for SharedArray<T> {}

impl<T: Pod> SharedArray<T> {
    const STRIDE: usize = {
        assert!(size_of::<T>().is_multiple_of(8) && size_of::<T>() <= 8 * WORDS && size_of::<T>() > 0);
        size_of::<T>() / 8
    };

    /// Maps the array; `EINVAL` if it is not an mmapable array of `T`. `writable` is false for those who only look.
    pub fn new(fd: &OwnedFd, writable: bool) -> Result<Self, CallError> {
        const CALL: &str = "mmap of a BPF array";
        let info: MapInfo = bpf::map_info(fd.as_fd())?;
        if info.kind != BPF_MAP_TYPE_ARRAY
            || info.flags & BPF_F_MMAPABLE == 0
            || info.value_size as usize != size_of::<T>()
        {
            return Err(CallError::new(CALL, io::Error::from_raw_os_error(libc::EINVAL)));
        }
        let length = info.max_entries as usize;
        let bytes = length * size_of::<T>();
        let size = NonZeroUsize::new(bytes)
            .ok_or_else(|| CallError::new(CALL, io::Error::from_raw_os_error(libc::EINVAL)))?;
        let mut protection = ProtFlags::PROT_READ;
        protection.set(ProtFlags::PROT_WRITE, writable);
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe { mmap(None, size, protection, MapFlags::MAP_SHARED, fd, 0) }
            .map_err(|e| CallError::new(CALL, e.into()))?;
        Ok(Self { base, bytes, length, writable, element: PhantomData })
    }

    pub fn len(&self) -> usize {
        self.length
    }

    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    fn words(&self, index: usize) -> Option<&[AtomicU64]> {
        let first = index.checked_mul(Self::STRIDE)?;
        // SAFETY: the mapping is page-aligned, `bytes` long, and lives until `self` is dropped; others (the kernel)
        // access it by atomics or by loads that may see old or new words.
        let all: &[AtomicU64] =
            unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast_const().cast(), self.bytes / 8) };
        all.get(first..first + Self::STRIDE)
    }

    /// `None`: beyond the end.
    pub fn get(&self, index: usize) -> Option<T> {
        let mut copy = [0_u64; WORDS];
        for (to, from) in copy.iter_mut().zip(self.words(index)?) {
            *to = from.load(Ordering::Acquire);
        }
        // SAFETY: `STRIDE` proves that `T` is no longer than `copy`, and any bytes are a valid `Pod`.
        Some(unsafe { std::ptr::read_unaligned(copy.as_ptr().cast()) })
    }

    /// False: beyond the end or mapped for reading only; nothing is written.
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

impl<T> Drop for SharedArray<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new`, and no reference into it outlives `self`.
        let _ = unsafe { munmap(self.base, self.bytes) };
    }
}
