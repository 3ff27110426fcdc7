//! The bytes of a frame that no skb holds yet: they are reached directly, and their checksums are whole.

use core::{
    ffi::c_void,
    ptr::{addr_of, read_volatile},
};

use aya_ebpf::{
    bindings::xdp_md,
    helpers::{bpf_xdp_adjust_head, bpf_xdp_get_buff_len},
};
use proxy_common::{
    packet::{Bytes, Checksum, Sum},
    reason::Reason,
};

use crate::bytes::direct::Direct;

/// Offset of the network header on a device with Ethernet headers. A VLAN tag of an skb is in its metadata.
pub(crate) const ETHERNET: u32 = 14;
/// Offset of the network header on a device without Ethernet headers.
pub(crate) const BARE: u32 = 0;

/// That of the running program.
#[derive(Clone, Copy)]
pub(crate) struct Frame {
    ctx: *mut xdp_md,
    length: u32,
}

impl Frame {
    /// One that lies in one piece.
    #[inline(always)]
    pub(crate) fn whole(ctx: *mut xdp_md) -> Self {
        let (begin, end) = Self { ctx, length: 0 }.bounds();
        Self { ctx, length: (end - begin) as u32 }
    }

    /// One that may go on in fragments, which are not reached.
    #[inline(always)]
    pub(crate) fn in_fragments(ctx: *mut xdp_md) -> Self {
        // SAFETY: the context; since 5.18, as are such frames.
        Self { ctx, length: unsafe { bpf_xdp_get_buff_len(ctx) } as u32 }
    }

    /// Nothing of it is in fragments.
    #[inline(always)]
    pub(crate) fn is_whole(self) -> bool {
        let (begin, end) = self.bounds();
        (end - begin) as u32 == self.length
    }

    /// With so many bytes more before its first one, which are still to be written. None: there is no room; the frame is untouched.
    #[inline(always)]
    pub(crate) fn grown(self, bytes: u32) -> Option<Self> {
        // SAFETY: the context. It moves the frame's begin, which every access reads anew.
        let moved = unsafe { bpf_xdp_adjust_head(self.ctx, -(bytes as i32)) };
        (moved == 0).then_some(Self { length: self.length + bytes, ..self })
    }

    /// For helpers.
    #[inline(always)]
    pub(crate) fn context(self) -> *mut c_void {
        self.ctx.cast()
    }

    /// Index of the interface that it has come by.
    #[inline(always)]
    pub(crate) fn interface(self) -> u32 {
        // SAFETY: a field of the context.
        unsafe { (*self.ctx).ingress_ifindex }
    }
}

impl Direct for Frame {
    #[inline(always)]
    fn bounds(self) -> (usize, usize) {
        // SAFETY: fields of the context.
        unsafe {
            (
                read_volatile(addr_of!((*self.ctx).data)) as usize,
                read_volatile(addr_of!((*self.ctx).data_end)) as usize,
            )
        }
    }
}

impl Bytes for Frame {
    const PLAIN_ONLY: bool = true;

    /// Of all of it.
    #[inline(always)]
    fn length(self) -> u32 {
        self.length
    }

    #[inline(always)]
    fn read_into(self, offset: u32, into: &mut [u8]) -> Result<(), Reason> {
        self.load_into(offset, into)
    }

    #[inline(always)]
    fn read<const N: usize>(self, offset: u32) -> Result<[u8; N], Reason> {
        self.load(offset)
    }

    #[inline(always)]
    fn write(self, offset: u32, bytes: &[u8]) -> Result<(), Reason> {
        self.store_from(offset, bytes)
    }

    #[inline(always)]
    fn write_uncovered(self, offset: u32, bytes: &[u8]) -> Result<(), Reason> {
        self.store_from(offset, bytes)
    }

    #[inline(always)]
    fn change_header_checksum(self, offset: u32, change: Sum) -> Result<(), Reason> {
        self.store(offset, change.changed(self.load(offset)?))
    }

    #[inline(always)]
    fn change_checksum(self, checksum: Checksum, addresses: Sum, payload: Sum) -> Result<(), Reason> {
        let new = checksum.after(self.load(checksum.offset)?, addresses + payload);
        self.store(checksum.offset, new)
    }
}
