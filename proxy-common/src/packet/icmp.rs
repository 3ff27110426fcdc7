//! ICMP errors (unreachable, packet too big, time exceeded, parameter problem) that quote a packet
//! of a flow.
//!
//! An error travels as an answer to the quoted packet would. So it is parsed as that answer, with
//! the quoted packet's ends reversed, and it finds the flow and gets the flow's translation.

use super::{
    Bytes, Checksum, Fragment, Headers, Network, Packet, Rewrite, Segment, Sum,
    nat::{ports, replace_address, transport_checksum},
};
use crate::{
    layout::{PROTOCOL_TCP, PROTOCOL_UDP},
    port::Port,
    reason::Reason,
};

/// The length of the ICMP header: type, code, checksum and four bytes that depend on the type.
const ICMP_HEADER: u32 = 8;
const CHECKSUM: u32 = 2;

/// Parses the packet that an error quotes.
///
/// Fails with `NotAService` if it is no error, if it quotes neither TCP nor UDP, or if it does not
/// go to the source of the quoted packet.
#[inline(always)]
pub(super) fn parse<F: Network, B: Bytes>(
    bytes: B,
    mut headers: Headers,
    packet: &mut Packet<F::Address>,
) -> Result<(), Reason> {
    let kind: [u8; 1] = bytes.read(headers.icmp)?;
    if !F::is_error(kind[0]) {
        return Err(Reason::NotAService);
    }
    headers.network = headers.icmp + ICMP_HEADER;
    let told = headers.outer + F::DESTINATION;
    let (transport, protocol) = F::parse_quoted(bytes, headers.network, told, packet)?;
    if protocol != PROTOCOL_TCP && protocol != PROTOCOL_UDP {
        return Err(Reason::NotAService);
    }
    let ports: [u8; 4] = bytes.read(transport)?;
    if transport + 4 > headers.end || headers.end > bytes.length() {
        return Err(Reason::Malformed);
    }
    packet.destination_port = Port::from_network([ports[0], ports[1]]);
    packet.source_port = Port::from_network([ports[2], ports[3]]);
    packet.protocol = protocol;
    packet.segment = Segment::default();
    packet.fragment = Fragment::default();
    packet.headers = Headers { transport, ..headers };
    Ok(())
}

/// Writes a translation into an error: into its own header, and into the packet that it quotes.
#[inline(always)]
pub(super) fn rewrite<F: Network, B: Bytes>(
    bytes: B,
    packet: &Packet<F::Address>,
    rewrite: &Rewrite<F::Address>,
) -> Result<(), Reason> {
    rewrite_outside::<F, B>(bytes, packet, rewrite)
        .and_then(|()| rewrite_quoted::<F, B>(bytes, packet, rewrite))
        .map_err(|_| Reason::RewriteFailed)
}

#[inline(always)]
const fn checksum_of(headers: Headers) -> Checksum {
    Checksum { offset: headers.icmp + CHECKSUM, is_optional: false }
}

// Not inlined: its stack would be added to what opening a flow needs.
#[inline(never)]
fn rewrite_outside<F: Network, B: Bytes>(
    bytes: B,
    packet: &Packet<F::Address>,
    rewrite: &Rewrite<F::Address>,
) -> Result<(), Reason> {
    let headers = packet.headers;
    let mut change = Sum::ZERO;
    if packet.destination != rewrite.destination {
        // The error is sent to the source of the quoted packet. `packet` has the quoted ends
        // reversed, so its destination is this address too.
        let (old, new) = (&packet.destination, &rewrite.destination);
        change += replace_address::<F, B>(bytes, headers.outer + F::DESTINATION, old, new)?;
    }
    if packet.source != rewrite.source {
        // The outer source may be any address, such as that of a router that reports the error. It
        // becomes the address to which the receiver of the error has sent the quoted packet, as in
        // netfilter.
        let old = F::read_address(bytes, headers.outer + F::SOURCE)?;
        change += replace_address::<F, B>(bytes, headers.outer + F::SOURCE, &old, &rewrite.source)?;
    }
    match F::CHECKSUM {
        Some(offset) => bytes.change_header_checksum(headers.outer + offset, change),
        None => bytes.change_checksum(checksum_of(headers), change, Sum::ZERO),
    }
}

// Not inlined: its stack would be added to what opening a flow needs.
#[inline(never)]
fn rewrite_quoted<F: Network, B: Bytes>(
    bytes: B,
    packet: &Packet<F::Address>,
    rewrite: &Rewrite<F::Address>,
) -> Result<(), Reason> {
    let headers = packet.headers;
    let mut quoted = Sum::ZERO;
    if packet.destination != rewrite.destination {
        let (old, new) = (packet.destination.as_ref(), rewrite.destination.as_ref());
        quoted += replace_quoted(bytes, headers.network + F::SOURCE, old, new)?;
    }
    if packet.source != rewrite.source {
        let (old, new) = (packet.source.as_ref(), rewrite.source.as_ref());
        quoted += replace_quoted(bytes, headers.network + F::DESTINATION, old, new)?;
    }
    // `message` is the change of what the error's own checksum covers.
    let mut message = quoted;
    if let Some(offset) = F::CHECKSUM {
        let checksum = Checksum { offset: headers.network + offset, is_optional: false };
        message += change_quoted_checksum(bytes, checksum, quoted)?;
    }
    let old = ports(packet.destination_port, packet.source_port);
    let new = ports(rewrite.destination_port, rewrite.source_port);
    if old != new {
        let change = replace_quoted(bytes, headers.transport, &old, &new)?;
        quoted += change;
        message += change;
    }
    let checksum = transport_checksum(packet);
    // An error may quote less than the whole header.
    if checksum.offset + 2 <= headers.end {
        message += change_quoted_checksum(bytes, checksum, quoted)?;
    }
    bytes.change_checksum(checksum_of(headers), Sum::ZERO, message)
}

#[inline(always)]
fn replace_quoted<B: Bytes>(bytes: B, offset: u32, old: &[u8], new: &[u8]) -> Result<Sum, Reason> {
    bytes.write(offset, new)?;
    Ok(Sum::of_change(old, new))
}

/// Changes a checksum in the quoted packet, and returns the change of the message. `change` is that
/// of what this checksum covers.
#[inline(always)]
fn change_quoted_checksum<B: Bytes>(bytes: B, checksum: Checksum, change: Sum) -> Result<Sum, Reason> {
    let old: [u8; 2] = bytes.read(checksum.offset)?;
    let new = checksum.after(old, change);
    bytes.write(checksum.offset, &new)?;
    Ok(Sum::of_change(&[old[0], old[1], 0, 0], &[new[0], new[1], 0, 0]))
}
