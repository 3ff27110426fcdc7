//! The bytes of an skb, by helpers. These are slower than direct access (`linear.rs`); they also read what lies in its fragments, and
//! know what a checksum field holds at the moment: a whole sum, the pseudo header's only (CHECKSUM_PARTIAL, as of locally made and GSO
//! packets), or nothing (UDP 0).

use core::mem::MaybeUninit;

use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR, BPF_F_RECOMPUTE_CSUM},
    helpers::{bpf_l3_csum_replace, bpf_l4_csum_replace, bpf_skb_load_bytes, bpf_skb_store_bytes},
    programs::TcContext,
};
use proxy_common::{
    packet::{Bytes, Checksum, Sum},
    reason::Reason,
};

/// The context of the running program.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Skb(*mut __sk_buff);

#[inline(always)]
fn written(result: i64) -> Result<(), Reason> {
    if result == 0 { Ok(()) } else { Err(Reason::RewriteFailed) }
}

impl Skb {
    #[inline(always)]
    pub(crate) fn of(ctx: &TcContext) -> Self {
        Self(ctx.skb.skb)
    }

    #[inline(always)]
    fn load(self, offset: u32, to: *mut u8, length: usize) -> Result<(), Reason> {
        // SAFETY: the context, and memory of this length.
        let result = unsafe { bpf_skb_load_bytes(self.0.cast(), offset, to.cast(), length as u32) };
        if result == 0 { Ok(()) } else { Err(Reason::Malformed) }
    }

    #[inline(always)]
    fn store(self, offset: u32, bytes: &[u8], flags: u32) -> Result<(), Reason> {
        let (from, length) = (bytes.as_ptr(), bytes.len() as u32);
        // SAFETY: the context, and memory of this length.
        written(unsafe { bpf_skb_store_bytes(self.0.cast(), offset, from.cast(), length, flags.into()) })
    }

    #[inline(always)]
    fn replace_checksum(self, checksum: Checksum, change: Sum, flags: u32) -> Result<(), Reason> {
        if change.is_zero() {
            return Ok(());
        }
        let optional = if checksum.is_optional { BPF_F_MARK_MANGLED_0 } else { 0 };
        let (change, flags) = (change.folded().into(), (flags | optional).into());
        // SAFETY: the context. Size 0: the difference itself is given.
        written(unsafe { bpf_l4_csum_replace(self.0.cast(), checksum.offset, 0, change, flags) })
    }
}

impl Bytes for Skb {
    #[inline(always)]
    fn length(self) -> u32 {
        // SAFETY: a field of the context.
        unsafe { (*self.0).len }
    }

    #[inline(always)]
    fn read_into(self, offset: u32, into: &mut [u8]) -> Result<(), Reason> {
        self.load(offset, into.as_mut_ptr(), into.len())
    }

    #[inline(always)]
    fn read<const N: usize>(self, offset: u32) -> Result<[u8; N], Reason> {
        let mut bytes = MaybeUninit::<[u8; N]>::uninit();
        self.load(offset, bytes.as_mut_ptr().cast(), N)?;
        // SAFETY: the helper has written all of it.
        Ok(unsafe { bytes.assume_init() })
    }

    #[inline(always)]
    fn write(self, offset: u32, bytes: &[u8]) -> Result<(), Reason> {
        self.store(offset, bytes, 0)
    }

    #[inline(always)]
    fn write_uncovered(self, offset: u32, bytes: &[u8]) -> Result<(), Reason> {
        // With CHECKSUM_COMPLETE the change of a transport's checksum moves the packet's sum by its own difference, as is right for
        // IPv4. Here no header checksum makes up for the address; this flag does. (BPF_F_IPV6 of 6.16 says the same, and
        // older kernels refuse it.)
        self.store(offset, bytes, BPF_F_RECOMPUTE_CSUM)
    }

    #[inline(always)]
    fn change_header_checksum(self, offset: u32, change: Sum) -> Result<(), Reason> {
        // SAFETY: the context. Size 0: the difference itself is given.
        written(unsafe { bpf_l3_csum_replace(self.0.cast(), offset, 0, change.folded().into(), 0) })
    }

    #[inline(always)]
    fn change_checksum(self, checksum: Checksum, addresses: Sum, payload: Sum) -> Result<(), Reason> {
        self.replace_checksum(checksum, addresses, BPF_F_PSEUDO_HDR)?;
        self.replace_checksum(checksum, payload, 0)
    }
}
