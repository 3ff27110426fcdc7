//! Pings, which are ICMP echo requests.

use super::{Bytes, Checksum, Headers, Network, Packet, Sum};
use crate::reason::Reason;

/// The offset of the checksum in the ICMP header.
const CHECKSUM: u32 = 2;

/// Reads the addresses of an echo request into `packet`, and where its headers begin.
///
/// Fails with `NotAService` for any other packet, for a fragment, and if there are extension
/// headers.
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
    // The bytes are read right into the packet. On the stack, the compiler would keep each byte in
    // a slot of its own.
    bytes.read_into(network + F::SOURCE, packet.source.as_mut())?;
    bytes.read_into(network + F::DESTINATION, packet.destination.as_mut())?;
    packet.headers = Headers { network, transport, ..Headers::default() };
    Ok(())
}

/// Changes the ICMP message into the reply. The caller swaps the addresses, which changes no
/// checksum.
#[inline(always)]
pub fn make_reply<F: Network, B: Bytes>(bytes: B, packet: &Packet<F::Address>) -> Result<(), Reason> {
    let transport = packet.headers.transport;
    // Sums are made of words of 4 bytes.
    let change = Sum::of_change(&[F::ECHO_REQUEST, 0, 0, 0], &[F::ECHO_REPLY, 0, 0, 0]);
    let checksum = Checksum { offset: transport + CHECKSUM, is_optional: false };
    bytes.change_checksum(checksum, Sum::ZERO, change)?;
    bytes.write(transport, &[F::ECHO_REPLY])
}
