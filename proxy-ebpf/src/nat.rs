//! Writes a translation into a packet.
//!
//! Checksums are changed by the difference, by helpers that know what a checksum field holds at the moment: a
//! whole sum, the pseudo header's only (CHECKSUM_PARTIAL, as of locally made and GSO packets), or nothing (UDP 0).

use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR, BPF_F_RECOMPUTE_CSUM},
    helpers::bpf_csum_diff,
    programs::TcContext,
};
use proxy_common::{
    family::{Family, V4, V6},
    packet::{Packet, Rewrite},
    port::Port,
};

const TCP_CHECKSUM: u32 = 16;
const UDP_CHECKSUM: u32 = 6;

/// Where a family has its addresses, and how their change is summed.
pub(crate) trait Addresses: Family {
    const SOURCE: u32;
    const DESTINATION: u32;

    /// What the change of an address means for the transport's checksum at `checksum`; `flags` are those for changing it.
    fn adjust_checksum(
        ctx: &TcContext,
        checksum: u32,
        flags: u64,
        old: &Self::Address,
        new: &Self::Address,
    ) -> Result<(), i64>;

    /// In the network header only. `address` is [`SOURCE`](Self::SOURCE) or [`DESTINATION`](Self::DESTINATION).
    fn replace_address(
        ctx: &TcContext,
        network: u32,
        address: u32,
        old: &Self::Address,
        new: &Self::Address,
    ) -> Result<(), i64>;
}

impl Addresses for V4 {
    const SOURCE: u32 = 12;
    const DESTINATION: u32 = 16;

    #[inline(always)]
    fn adjust_checksum(
        ctx: &TcContext,
        checksum: u32,
        flags: u64,
        old: &[u8; 4],
        new: &[u8; 4],
    ) -> Result<(), i64> {
        let from = u64::from(u32::from_ne_bytes(*old));
        let to = u64::from(u32::from_ne_bytes(*new));
        ctx.l4_csum_replace(checksum as usize, from, to, flags | u64::from(BPF_F_PSEUDO_HDR) | 4)
    }

    #[inline(always)]
    fn replace_address(
        ctx: &TcContext,
        network: u32,
        address: u32,
        old: &[u8; 4],
        new: &[u8; 4],
    ) -> Result<(), i64> {
        const HEADER_CHECKSUM: u32 = 10;
        let from = u64::from(u32::from_ne_bytes(*old));
        let to = u64::from(u32::from_ne_bytes(*new));
        ctx.l3_csum_replace((network + HEADER_CHECKSUM) as usize, from, to, 4)?;
        ctx.store((network + address) as usize, new, 0)
    }
}

impl Addresses for V6 {
    const SOURCE: u32 = 8;
    const DESTINATION: u32 = 24;

    #[inline(always)]
    fn adjust_checksum(
        ctx: &TcContext,
        checksum: u32,
        flags: u64,
        old: &[u8; 16],
        new: &[u8; 16],
    ) -> Result<(), i64> {
        let mut from = *old;
        let mut to = *new;
        // SAFETY: both are 16 bytes long.
        let difference =
            unsafe { bpf_csum_diff(from.as_mut_ptr().cast(), 16, to.as_mut_ptr().cast(), 16, 0) };
        ctx.l4_csum_replace(checksum as usize, 0, difference as u64, flags | u64::from(BPF_F_PSEUDO_HDR))
    }

    #[inline(always)]
    fn replace_address(
        ctx: &TcContext,
        network: u32,
        address: u32,
        _old: &[u8; 16],
        new: &[u8; 16],
    ) -> Result<(), i64> {
        // With CHECKSUM_COMPLETE the change of a transport's checksum moves the packet's sum by its own difference, as is right for
        // IPv4. Here no header checksum makes up for the address; this flag does. (BPF_F_IPV6 of 6.16 says the same, and
        // older kernels refuse it.)
        ctx.store((network + address) as usize, new, u64::from(BPF_F_RECOMPUTE_CSUM))
    }
}

/// False: part of the packet may be rewritten, and it must go no further.
// Not inlined: what it needs of the stack would be added to what opening a flow needs.
#[inline(never)]
pub(crate) fn rewrite<F: Addresses>(
    skb: *mut __sk_buff,
    packet: &Packet<F::Address>,
    rewrite: &Rewrite<F::Address>,
) -> bool {
    write::<F>(&TcContext::new(skb), packet, rewrite).is_ok()
}

#[inline(always)]
fn write<F: Addresses>(
    ctx: &TcContext,
    packet: &Packet<F::Address>,
    rewrite: &Rewrite<F::Address>,
) -> Result<(), i64> {
    let headers = packet.headers;
    let (field, flags) = if packet.is_tcp() {
        (TCP_CHECKSUM, 0)
    } else {
        // A checksum of 0 is none and stays so; a sum that comes out as 0 is written as 0xffff.
        (UDP_CHECKSUM, u64::from(BPF_F_MARK_MANGLED_0))
    };
    let checksum = headers.transport + field;
    // A later fragment has no transport header: the checksum in the first covers its bytes, and is changed there.
    let is_later = packet.is_later_fragment();
    if packet.source != rewrite.source {
        let (old, new) = (&packet.source, &rewrite.source);
        if !is_later {
            F::adjust_checksum(ctx, checksum, flags, old, new)?;
        }
        F::replace_address(ctx, headers.network, F::SOURCE, old, new)?;
    }
    if packet.destination != rewrite.destination {
        let (old, new) = (&packet.destination, &rewrite.destination);
        if !is_later {
            F::adjust_checksum(ctx, checksum, flags, old, new)?;
        }
        F::replace_address(ctx, headers.network, F::DESTINATION, old, new)?;
    }
    if is_later {
        return Ok(());
    }
    let (source_port, destination_port) = (headers.transport, headers.transport + 2);
    replace_port(ctx, source_port, checksum, flags, packet.source_port, rewrite.source_port)?;
    replace_port(ctx, destination_port, checksum, flags, packet.destination_port, rewrite.destination_port)
}

#[inline(always)]
fn replace_port(
    ctx: &TcContext,
    offset: u32,
    checksum: u32,
    flags: u64,
    old: Port,
    new: Port,
) -> Result<(), i64> {
    if old == new {
        return Ok(());
    }
    let sum_of = |port: Port| u64::from(u16::from_ne_bytes(port.to_network()));
    ctx.l4_csum_replace(checksum as usize, sum_of(old), sum_of(new), flags | 2)?;
    ctx.store(offset as usize, &new.to_network(), 0)
}
