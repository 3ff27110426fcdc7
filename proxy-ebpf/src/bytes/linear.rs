//! The linear part of an skb, in which headers lie almost always: its bytes are read directly. What is not in it is left to `skb.rs`, as
//! is all that writes: before a program that writes directly the kernel copies the headers of each packet that has a clone.

use core::ptr::{addr_of, read_volatile};

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use proxy_common::{
    packet::{Bytes, Checksum, Sum},
    reason::Reason,
};

use crate::bytes::{direct::Direct, skb::Skb};

/// The context of the running program.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Linear(*mut __sk_buff);

impl Linear {
    #[inline(always)]
    pub(crate) fn of(ctx: &TcContext) -> Self {
        Self(ctx.skb.skb)
    }

    #[inline(always)]
    fn skb(self) -> Skb {
        Skb::of(&TcContext::new(self.0))
    }
}

impl Direct for Linear {
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

impl Bytes for Linear {
    const PLAIN_ONLY: bool = true;

    /// Of the whole packet.
    #[inline(always)]
    fn length(self) -> u32 {
        // SAFETY: a field of the context.
        unsafe { (*self.0).len }
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
        self.skb().write(offset, bytes)
    }

    #[inline(always)]
    fn write_uncovered(self, offset: u32, bytes: &[u8]) -> Result<(), Reason> {
        self.skb().write_uncovered(offset, bytes)
    }

    #[inline(always)]
    fn change_header_checksum(self, offset: u32, change: Sum) -> Result<(), Reason> {
        self.skb().change_header_checksum(offset, change)
    }

    #[inline(always)]
    fn change_checksum(self, checksum: Checksum, addresses: Sum, payload: Sum) -> Result<(), Reason> {
        self.skb().change_checksum(checksum, addresses, payload)
    }
}
