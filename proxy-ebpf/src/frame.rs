//! The bytes of a frame that no skb holds yet: they are reached directly, and their checksums are whole.

use core::ptr::{addr_of, read_volatile};

use aya_ebpf::bindings::xdp_md;
use proxy_common::{
    packet::{Bytes, Checksum, Sum},
    reason::Reason,
};

use crate::direct::Direct;

/// Offset of the network header on a device with Ethernet headers. A VLAN tag of an skb is in its metadata.
pub(crate) const ETHERNET: u32 = 14;
/// Offset of the network header on a device without Ethernet headers.
pub(crate) const BARE: u32 = 0;

/// The context of the running program.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Frame(*mut xdp_md);

impl Frame {
    #[inline(always)]
    pub(crate) fn of(ctx: *mut xdp_md) -> Self {
        Self(ctx)
    }
}

impl Direct for Frame {
    #[inline(always)]
    fn bounds(self) -> (usize, usize) {
        // SAFETY: fields of the context.
        unsafe {
            (
                read_volatile(addr_of!((*self.0).data)) as usize,
                read_volatile(addr_of!((*self.0).data_end)) as usize,
            )
        }
    }
}

impl Bytes for Frame {
    #[inline(always)]
    fn length(self) -> u32 {
        let (begin, end) = self.bounds();
        (end - begin) as u32
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
