//! The writing of a translation into a packet. Checksums are changed by the difference, because no
//! program reads all that they cover.

use super::{Bytes, Checksum, Network, Packet, Rewrite, Sum};
use crate::{layout::Address, port::Port, reason::Reason};

/// Does what [`rewrite`](super::rewrite) does, for a packet that is no ICMP error.
///
/// Fails with `RewriteFailed`. A part of the packet may be rewritten then, so it must go no
/// further.
#[inline(always)]
pub fn rewrite<F: Network, B: Bytes>(
    bytes: B,
    packet: &Packet<F::Address>,
    rewrite: &Rewrite<F::Address>,
) -> Result<(), Reason> {
    write::<F, B>(bytes, packet, rewrite).map_err(|_| Reason::RewriteFailed)
}

#[inline(always)]
fn write<F: Network, B: Bytes>(
    bytes: B,
    packet: &Packet<F::Address>,
    rewrite: &Rewrite<F::Address>,
) -> Result<(), Reason> {
    let headers = packet.headers;
    let mut addresses = Sum::ZERO;
    if packet.source != rewrite.source {
        let offset = headers.network + F::SOURCE;
        addresses += replace_address::<F, B>(bytes, offset, &packet.source, &rewrite.source)?;
    }
    if packet.destination != rewrite.destination {
        let offset = headers.network + F::DESTINATION;
        addresses += replace_address::<F, B>(bytes, offset, &packet.destination, &rewrite.destination)?;
    }
    if let Some(offset) = F::CHECKSUM {
        bytes.change_header_checksum(headers.network + offset, addresses)?;
    }
    // A later fragment has no transport header. The checksum in the first fragment covers its
    // bytes, and is changed there.
    if packet.is_later_fragment() {
        return Ok(());
    }
    let old = ports(packet.source_port, packet.destination_port);
    let new = ports(rewrite.source_port, rewrite.destination_port);
    bytes.change_checksum(transport_checksum(packet), addresses, Sum::of_change(&old, &new))?;
    bytes.write(headers.transport, &new)
}

/// Decrements the lifetime (TTL, hop limit) in the header at `network`, as a router does. The
/// lifetime must not be 0.
#[inline(always)]
pub fn shorten_lifetime<F: Network, B: Bytes>(bytes: B, network: u32) -> Result<(), Reason> {
    let lifetime = network + F::LIFETIME;
    let [old, protocol] = bytes.read::<2>(lifetime)?;
    let new = old.wrapping_sub(1);
    match F::CHECKSUM {
        None => bytes.write_uncovered(lifetime, &[new]),
        Some(checksum) => {
            bytes.write(lifetime, &[new])?;
            let change = Sum::of_change(&[old, protocol, 0, 0], &[new, protocol, 0, 0]);
            bytes.change_header_checksum(network + checksum, change)
        }
    }
}

#[inline(always)]
pub(super) fn transport_checksum<A: Address>(packet: &Packet<A>) -> Checksum {
    const OF_TCP: u32 = 16;
    const OF_UDP: u32 = 6;
    let is_tcp = packet.is_tcp();
    let offset = packet.headers.transport + if is_tcp { OF_TCP } else { OF_UDP };
    Checksum { offset, is_optional: !is_tcp }
}

/// Replaces an address in a network header, and returns the change. The header's own checksum stays
/// as it is.
#[inline(always)]
pub(super) fn replace_address<F: Network, B: Bytes>(
    bytes: B,
    offset: u32,
    old: &F::Address,
    new: &F::Address,
) -> Result<Sum, Reason> {
    if F::CHECKSUM.is_some() {
        bytes.write(offset, new.as_ref())?;
    } else {
        bytes.write_uncovered(offset, new.as_ref())?;
    }
    Ok(Sum::of_change(old.as_ref(), new.as_ref()))
}

/// Returns the ports as a transport header has them.
#[inline(always)]
pub(super) fn ports(source: Port, destination: Port) -> [u8; 4] {
    let (source, destination) = (source.to_network(), destination.to_network());
    [source[0], source[1], destination[0], destination[1]]
}
