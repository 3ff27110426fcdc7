//! The linear part of an skb, in which headers lie almost always: its bytes are reached directly. What is not in it is left to `skb.rs`.

use core::ptr::{addr_of, read_volatile};

use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_PSEUDO_HDR},
    helpers::bpf_csum_update,
    programs::TcContext,
};
use proxy_common::{
    packet::{Bytes, Checksum, Sum},
    reason::Reason,
};

use crate::{direct::Direct, skb::Skb};

/// The context of the running program.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Linear(*mut __sk_buff);

impl Linear {
    #[inline(always)]
    pub(crate) fn of(ctx: &TcContext) -> Self {
        Self(ctx.skb.skb)
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
        self.store_from(offset, bytes)
    }

    #[inline(always)]
    fn write_uncovered(self, offset: u32, bytes: &[u8], change: Sum) -> Result<(), Reason> {
        // SAFETY: the context. Fails where a device has left no sum over the packet, as is usual.
        let _changed = unsafe { bpf_csum_update(self.0, change.folded()) };
        self.store_from(offset, bytes)
    }

    #[inline(always)]
    fn change_header_checksum(self, offset: u32, change: Sum) -> Result<(), Reason> {
        self.store(offset, change.changed(self.load(offset)?))
    }

    #[inline(always)]
    fn change_checksum(self, checksum: Checksum, addresses: Sum, payload: Sum) -> Result<(), Reason> {
        let (skb, old) = (Skb::of_context(self.0), self.load(checksum.offset)?);
        skb.replace_checksum(checksum, addresses, BPF_F_PSEUDO_HDR)?;
        let new = self.load(checksum.offset)?;
        if checksum.shows_whole(old, new, addresses) {
            self.store(checksum.offset, checksum.after(new, payload))
        } else {
            skb.replace_checksum(checksum, payload, 0)
        }
    }
}
