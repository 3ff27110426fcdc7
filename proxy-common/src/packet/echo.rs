//! Pings: ICMP echo requests.

use super::{Bytes, Checksum, Headers, Network, Packet, Sum};
use crate::reason::Reason;

/// Of the ICMP header.
const CHECKSUM: u32 = 2;

/// Reads the ends of an echo request into `packet`, and where its headers begin. Fails with `NotAService` where it is none, a fragment, or
/// behind extension headers.
#[inline(always)]
pub fn parse<F: Network, B: Bytes>(
    bytes: B,
    network: u32,
    packet: &mut Packet<F::Address>,
) -> Result<(), Reason> {
    let transport = F::find_icmp(bytes, network)?;
    let kind: [u8; 2] = bytes.read(transport)?;
    if kind != [F::ECHO_REQUEST, 0] {
        return Err(Reason::NotAService);
    }
    // Past the stack, on which the compiler would keep each byte in a place of its own.
    bytes.read_into(network + F::SOURCE, packet.source.as_mut())?;
    bytes.read_into(network + F::DESTINATION, packet.destination.as_mut())?;
    packet.headers = Headers { network, transport, ..Headers::default() };
    Ok(())
}

/// Makes the ICMP message the reply. Its ends are not touched, nor do they change its checksum when they are swapped.
#[inline(always)]
pub fn make_reply<F: Network, B: Bytes>(bytes: B, packet: &Packet<F::Address>) -> Result<(), Reason> {
    let transport = packet.headers.transport;
    // In words, as sums are.
    let change = Sum::of_change(&[F::ECHO_REQUEST, 0, 0, 0], &[F::ECHO_REPLY, 0, 0, 0]);
    let checksum = Checksum { offset: transport + CHECKSUM, is_optional: false };
    bytes.change_checksum(checksum, Sum::ZERO, change)?;
    bytes.write(transport, &[F::ECHO_REPLY])
}
