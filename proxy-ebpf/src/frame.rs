//! The bytes of a frame that no skb holds yet: they are reached directly, and their checksums are whole.

use core::{
    hint::black_box,
    ptr::{addr_of, read_volatile},
};

use aya_ebpf::bindings::xdp_md;
use proxy_common::{
    packet::{Bytes, Checksum, Covered, Sum},
    reason::Reason,
};

/// Offset of the network header on a device with Ethernet headers. A VLAN tag of an skb is in its metadata.
pub(crate) const ETHERNET: u32 = 14;
/// Offset of the network header on a device without Ethernet headers.
pub(crate) const BARE: u32 = 0;

/// The context of the running program.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Frame(*mut xdp_md);

/// Headers end before: the verifier follows offsets that have a bound.
const FARTHEST: u32 = 0x3ff;

impl Frame {
    #[inline(always)]
    pub(crate) fn of(ctx: *mut xdp_md) -> Self {
        Self(ctx)
    }

    /// Where the frame begins and ends. Each time anew: what the compiler keeps is cut to 32 bits, which the verifier forbids.
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

    /// None: the frame ends before.
    #[inline(always)]
    fn at<const N: usize>(self, offset: u32) -> Option<*mut [u8; N]> {
        let (begin, end) = self.bounds();
        // Compared and added in one register: the verifier of 5.10 forgets the bounds of a number on the stack.
        let offset = black_box(offset);
        if offset > FARTHEST {
            return None;
        }
        // The compiler must not compute what is compared and what is read apart: the verifier knows the bounds of one pointer.
        let place = black_box(begin + offset as usize);
        if place + N > end { None } else { Some(place as *mut [u8; N]) }
    }

    #[inline(always)]
    pub(crate) fn store<const N: usize>(self, offset: u32, bytes: [u8; N]) -> Result<(), Reason> {
        let place = self.at::<N>(offset).ok_or(Reason::RewriteFailed)?;
        // SAFETY: inside of the frame, which is this program's own while it runs.
        unsafe { place.write(bytes) };
        Ok(())
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
        for (index, byte) in into.iter_mut().enumerate() {
            [*byte] = self.read(offset + index as u32)?;
        }
        Ok(())
    }

    #[inline(always)]
    fn read<const N: usize>(self, offset: u32) -> Result<[u8; N], Reason> {
        let place = self.at::<N>(offset).ok_or(Reason::Malformed)?;
        // SAFETY: inside of the frame.
        Ok(unsafe { place.read() })
    }

    #[inline(always)]
    fn write(self, offset: u32, bytes: &[u8]) -> Result<(), Reason> {
        // Of the lengths of addresses and ports the bounds are checked once.
        if let Ok(ports) = <[u8; 4]>::try_from(bytes) {
            self.store(offset, ports)
        } else if let Ok(address) = <[u8; 16]>::try_from(bytes) {
            self.store(offset, address)
        } else {
            bytes.iter().zip(offset..).try_for_each(|(byte, offset)| self.store(offset, [*byte]))
        }
    }

    #[inline(always)]
    fn write_uncovered(self, offset: u32, bytes: &[u8]) -> Result<(), Reason> {
        self.write(offset, bytes)
    }

    #[inline(always)]
    fn change_header_checksum(self, offset: u32, change: Sum) -> Result<(), Reason> {
        self.store(offset, change.changed(self.read(offset)?))
    }

    #[inline(always)]
    fn change_checksum(self, checksum: Checksum, _covered: Covered, change: Sum) -> Result<(), Reason> {
        let new = checksum.after(self.read(checksum.offset)?, change);
        self.store(checksum.offset, new)
    }
}
