//! A packet in another of its family, as it goes to a backend of another node that answers the client itself: IPv4 in IPv4, IPv6 in IPv6.

use super::{Bytes, Network, Sum};
use crate::{
    family::{V4, V6},
    layout::Address as _,
    reason::Reason,
};

/// Addresses of the outer packet.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Ends<A> {
    /// The node that has encapsulated it.
    pub source: A,
    /// The backend.
    pub destination: A,
}

const HOP_LIMIT: u8 = 64;

pub trait Tunnel: Network {
    /// Bytes of the outer header.
    const OUTER: u32;
    type Outer: Copy;

    /// The outer header of a packet with this many bytes, whose own header begins with `inner`: a traffic class is kept, and in IPv6 the
    /// flow label.
    fn outer(inner: [u8; 4], length: u32, ends: &Ends<Self::Address>) -> Self::Outer;

    /// Is there at `network` a header like [`outer`](Self::outer), without options and of no fragment?
    fn is_outer<B: Bytes>(bytes: B, network: u32) -> Result<bool, Reason>;
}

/// Where the packet begins that the one at `network` carries, and its ends. Fails with `NotAService` where that carries none.
#[inline(always)]
pub fn inner<F: Tunnel, B: Bytes>(
    bytes: B,
    network: u32,
    ends: &mut Ends<F::Address>,
) -> Result<u32, Reason> {
    if !F::is_outer(bytes, network)? {
        return Err(Reason::NotAService);
    }
    // Past the stack, on which the compiler would keep each byte in a place of its own.
    bytes.read_into(network + F::SOURCE, ends.source.as_mut())?;
    bytes.read_into(network + F::DESTINATION, ends.destination.as_mut())?;
    Ok(network + F::OUTER)
}

impl Tunnel for V4 {
    const OUTER: u32 = 20;
    type Outer = [u8; 20];

    #[inline(always)]
    fn outer(inner: [u8; 4], length: u32, ends: &Ends<[u8; 4]>) -> [u8; 20] {
        const IPV4_IN_IPV4: u8 = 4;
        const DO_NOT_FRAGMENT: u8 = 0x40;
        let [high, low] = length_field(length + Self::OUTER);
        let ([a, b, c, d], [e, f, g, h]) = (ends.source, ends.destination);
        let first = [0x45, inner[1], high, low, 0, 0, DO_NOT_FRAGMENT, 0];
        let lifetime = [HOP_LIMIT, IPV4_IN_IPV4, 0, 0];
        let sum = Sum::of(&first) + Sum::of(&lifetime) + Sum::of(&ends.source) + Sum::of(&ends.destination);
        let [k, l] = sum.checksum();
        [
            first[0], first[1], first[2], first[3], 0, 0, first[6], 0, lifetime[0], lifetime[1], k, l, a, b, c, d, e, f,
            g, h,
        ]
    }

    #[inline(always)]
    fn is_outer<B: Bytes>(bytes: B, network: u32) -> Result<bool, Reason> {
        let header: [u8; 10] = bytes.read(network)?;
        let is_fragment = (header[6] & 0x3f) | header[7] != 0;
        Ok(header[0] == 0x45 && header[9] == 4 && !is_fragment)
    }
}

impl Tunnel for V6 {
    const OUTER: u32 = 40;
    type Outer = [[u8; 8]; 5];

    #[inline(always)]
    fn outer(inner: [u8; 4], length: u32, ends: &Ends<[u8; 16]>) -> [[u8; 8]; 5] {
        const IPV6_IN_IPV6: u8 = 41;
        let [high, low] = length_field(length);
        let halves = |address: &[u8; 16]| address.halves().map(u64::to_be_bytes);
        let ([a, b], [c, d]) = (halves(&ends.source), halves(&ends.destination));
        [[inner[0], inner[1], inner[2], inner[3], high, low, IPV6_IN_IPV6, HOP_LIMIT], a, b, c, d]
    }

    #[inline(always)]
    fn is_outer<B: Bytes>(bytes: B, network: u32) -> Result<bool, Reason> {
        let header: [u8; 8] = bytes.read(network)?;
        Ok(header[0] >> 4 == 6 && header[6] == 41)
    }
}

/// What several segments in one make longer than the field can say is written anew when they are cut.
#[inline(always)]
fn length_field(length: u32) -> [u8; 2] {
    (length.min(u16::MAX.into()) as u16).to_be_bytes()
}
