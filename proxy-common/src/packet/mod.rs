//! A packet as the decisions see it, and what is written into it. The same code parses and writes
//! bytes in the kernel and on the host.

mod bytes;
pub mod echo;
mod icmp;
mod nat;
mod parse;
#[cfg(any(test, fuzzing))]
pub mod properties;
mod sum;
#[cfg(test)]
mod tests;
mod tunnel;

use core::hint::black_box;

pub use self::{
    bytes::{Bytes, Checksum},
    nat::{rewrite as rewrite_headers, shorten_lifetime},
    parse::{Network, parse},
    sum::Sum,
    tunnel::{Ends, GENEVE, Tunnel, inner, outer_length, write_outer},
};
use crate::{
    family::Destination,
    layout::{Address, FlowKey, PROTOCOL_TCP},
    port::Port,
    reason::Reason,
};

pub const TCP_FIN: u8 = 0x01;
pub const TCP_SYN: u8 = 0x02;
pub const TCP_RST: u8 = 0x04;
pub const TCP_ACK: u8 = 0x10;

/// The facts of a TCP segment's header. Sequence numbers are modulo 2³², in host byte order.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Segment {
    /// The `TCP_*` flags.
    pub flags: u8,
    pub sequence: u32,
    pub acknowledgement: u32,
    /// The sequence number after the segment. SYN, FIN and each byte of payload count as one.
    pub next: u32,
}

/// Returns 0 in a way that the compiler cannot see. With plain zeros it would call a function in
/// the kernel that fills memory byte by byte.
#[inline(always)]
fn zero() -> u32 {
    black_box(0)
}

impl Segment {
    /// Returns the segment of a packet that is not TCP.
    #[inline(always)]
    fn none() -> Self {
        let zero = zero();
        Self { flags: zero as u8, sequence: zero, acknowledgement: zero, next: zero }
    }

    #[inline(always)]
    pub fn new(flags: u8, sequence: u32, acknowledgement: u32, payload: u32) -> Self {
        let control = u32::from(flags & TCP_SYN != 0) + u32::from(flags & TCP_FIN != 0);
        let next = sequence.wrapping_add(payload).wrapping_add(control);
        Self { flags, sequence, acknowledgement, next }
    }

    /// Returns true if the segment has one of these `TCP_*` flags.
    #[inline(always)]
    pub fn has(&self, flags: u8) -> bool {
        self.flags & flags != 0
    }

    /// Returns true if the segment has payload and neither SYN nor FIN.
    #[inline(always)]
    pub fn has_data(&self) -> bool {
        self.next != self.sequence && !self.has(TCP_SYN | TCP_FIN)
    }
}

/// The part of a packet that a fragment has.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Part {
    /// All of the packet.
    #[default]
    Whole,
    /// The beginning of the packet, with the transport header.
    First,
    /// A part that is not the beginning, so it has no ports.
    Later,
}

/// The facts of an IPv4 header, or of an IPv6 fragment header, about fragments.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Fragment {
    pub part: Part,
    /// The id that all fragments of a packet share, in host byte order.
    pub id: u32,
}

impl Fragment {
    /// Returns the part that begins at `offset`, in units of 8 bytes.
    #[inline(always)]
    pub fn new(id: u32, offset: u16, has_more: bool) -> Self {
        let part = match (offset, has_more) {
            (0, false) => Part::Whole,
            (0, true) => Part::First,
            (1.., _) => Part::Later,
        };
        Self { part, id }
    }
}

/// An address and port of one side of a flow.
pub type End<A> = (A, Port);

/// A TCP or UDP packet, or an ICMP error that quotes one. An error has the ends that an answer to
/// the quoted packet would have.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Packet<A> {
    pub source: A,
    pub destination: A,
    pub source_port: Port,
    pub destination_port: Port,
    /// The IANA protocol number.
    pub protocol: u8,
    /// The facts of a TCP segment. All are zero for UDP.
    pub segment: Segment,
    /// The facts about fragments. A later fragment has [no ports](Port::NONE).
    pub fragment: Fragment,
    /// The offsets of the headers.
    pub headers: Headers,
}

/// The offsets of headers in a packet's bytes. In an ICMP error, `network` and `transport` are
/// those of the quoted packet.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Headers {
    pub network: u32,
    pub transport: u32,
    /// The offset of an ICMP error's own network header.
    pub outer: u32,
    /// The offset of an ICMP error's ICMP header. 0: the packet is no ICMP error.
    pub icmp: u32,
    /// The offset of an ICMP error's end.
    pub end: u32,
}

impl Headers {
    #[inline(always)]
    fn of_packet(network: u32, transport: u32) -> Self {
        let zero = zero();
        Self { network, transport, outer: zero, icmp: zero, end: zero }
    }

    /// Returns the offsets of an ICMP error. Those of the packet that it quotes are not known yet.
    #[inline(always)]
    const fn of_error(outer: u32, icmp: u32, end: u32) -> Self {
        Self { network: 0, transport: 0, outer, icmp, end }
    }
}

impl<A: Address> Packet<A> {
    #[inline(always)]
    pub fn is_tcp(&self) -> bool {
        self.protocol == PROTOCOL_TCP
    }

    #[inline(always)]
    pub fn is_error(&self) -> bool {
        self.headers.icmp != 0
    }

    #[inline(always)]
    pub fn is_later_fragment(&self) -> bool {
        self.fragment.part == Part::Later
    }

    /// Returns true if a client may open a flow with the packet: it is a SYN without ACK, or any
    /// datagram.
    #[inline(always)]
    pub fn opens(&self) -> bool {
        if self.is_error() {
            return false;
        }
        !self.is_tcp() || self.segment.flags & (TCP_SYN | TCP_ACK | TCP_RST) == TCP_SYN
    }

    /// Returns true for a whole segment that only a connection which is up can have. It can be
    /// answered by a RST.
    #[inline(always)]
    pub fn goes_on(&self) -> bool {
        self.is_tcp()
            && !self.is_error()
            && self.fragment.part == Part::Whole
            && self.segment.flags & (TCP_SYN | TCP_RST | TCP_ACK) == TCP_ACK
    }

    #[inline(always)]
    pub fn to(&self) -> Destination<A> {
        Destination { address: self.destination, port: self.destination_port, protocol: self.protocol }
    }

    #[inline(always)]
    pub fn is_between(&self, source: End<A>, destination: End<A>) -> bool {
        // All comparisons end in one branch, because the verifier follows both ways of each branch.
        let ports = (self.source_port.number() ^ source.1.number())
            | (self.destination_port.number() ^ destination.1.number());
        let addresses = self.source.difference(&source.0) | self.destination.difference(&destination.0);
        u64::from(ports) | addresses == 0
    }

    #[inline(always)]
    pub fn key(&self) -> FlowKey<A> {
        let (source, destination) =
            ((self.source, self.source_port), (self.destination, self.destination_port));
        FlowKey::between(source, destination, self.protocol)
    }
}

/// The addresses and ports that a packet gets.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Rewrite<A> {
    pub source: A,
    pub destination: A,
    pub source_port: Port,
    pub destination_port: Port,
    /// Index into `services` that the packet counts for. `NO_SERVICE`: there is none, or the packet
    /// is counted elsewhere on its way.
    pub service: u32,
}

/// Writes a translation into the packet.
///
/// Fails with `RewriteFailed`. A part of the translation may be written then, so the packet must go
/// no further.
#[inline(always)]
pub fn rewrite<F: Network, B: Bytes>(
    bytes: B,
    packet: &Packet<F::Address>,
    rewrite: &Rewrite<F::Address>,
) -> Result<(), Reason> {
    if packet.is_error() {
        icmp::rewrite::<F, B>(bytes, packet, rewrite)
    } else {
        rewrite_whole::<F, B>(bytes, packet, rewrite)
    }
}

// Not inlined: its stack would be added to what opening a flow needs.
#[inline(never)]
fn rewrite_whole<F: Network, B: Bytes>(
    bytes: B,
    packet: &Packet<F::Address>,
    rewrite: &Rewrite<F::Address>,
) -> Result<(), Reason> {
    nat::rewrite::<F, B>(bytes, packet, rewrite)
}

/// The translation of a packet of a flow, and its way afterwards.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Action<A> {
    pub rewrite: Rewrite<A>,
    pub then: Then,
}

/// The way of a packet after its translation.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Then {
    /// The packet goes the way that the stack has chosen.
    #[default]
    Pass,
    /// The packet goes by the route to its new destination, because the stack has routed it to the
    /// old one.
    Reroute,
    /// The packet enters the node by the interface that leads to its new source, where reverse path
    /// filtering accepts it.
    IntoNode,
    /// The packet goes to the backend inside an outer packet.
    Encapsulate,
    /// The packet skips the stack: it goes to its destination by the route there, as it is.
    SkipStack,
}
