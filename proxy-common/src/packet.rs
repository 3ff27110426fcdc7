//! A packet as the decisions see it, and what is to be written into it.

use crate::{
    family::Destination,
    layout::{Address, FlowKey, PROTOCOL_TCP},
    port::Port,
};

pub const TCP_FIN: u8 = 0x01;
pub const TCP_SYN: u8 = 0x02;
pub const TCP_RST: u8 = 0x04;
pub const TCP_ACK: u8 = 0x10;

/// What the header of a TCP segment says. Sequence numbers are modulo 2³², in host byte order.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Segment {
    /// `TCP_*`.
    pub flags: u8,
    pub sequence: u32,
    pub acknowledgement: u32,
    /// The sequence number after it: SYN, FIN and each byte of payload count as one.
    pub next: u32,
}

impl Segment {
    #[inline(always)]
    pub fn new(flags: u8, sequence: u32, acknowledgement: u32, payload: u32) -> Self {
        let control = u32::from(flags & TCP_SYN != 0) + u32::from(flags & TCP_FIN != 0);
        let next = sequence.wrapping_add(payload).wrapping_add(control);
        Self { flags, sequence, acknowledgement, next }
    }

    /// Has it one of these `TCP_*`?
    #[inline(always)]
    pub fn has(&self, flags: u8) -> bool {
        self.flags & flags != 0
    }
}

/// What of a packet is in a fragment.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Part {
    /// All of it.
    #[default]
    Whole,
    /// Its begin, with the transport's header.
    First,
    /// Not its begin: there are no ports.
    Later,
}

/// Of an IPv4 header, or an IPv6 fragment header.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Fragment {
    pub part: Part,
    /// Host byte order. The same in all fragments of a packet.
    pub id: u32,
}

impl Fragment {
    /// `offset` in 8 bytes.
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

/// Address and port of one side of a flow.
pub type End<A> = (A, Port);

/// A TCP or UDP packet. Or an ICMP error that quotes one: then that one's ends turned round, as an answer to it would have them.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Packet<A> {
    pub source: A,
    pub destination: A,
    pub source_port: Port,
    pub destination_port: Port,
    /// IANA number.
    pub protocol: u8,
    /// All zero for UDP.
    pub segment: Segment,
    /// A later fragment has [no ports](Port::NONE).
    pub fragment: Fragment,
    /// Where its headers begin.
    pub headers: Headers,
}

/// Offsets in a packet's bytes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Headers {
    pub network: u32,
    pub transport: u32,
    /// Of an ICMP error, its own network header. The other two are then of the packet that it quotes.
    pub outer: u32,
    /// Of an ICMP error, its ICMP header; 0: the packet is none.
    pub icmp: u32,
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

    /// A client may open a flow with it: a SYN without ACK, or any datagram.
    #[inline(always)]
    pub fn opens(&self) -> bool {
        if self.is_error() {
            return false;
        }
        !self.is_tcp() || self.segment.flags & (TCP_SYN | TCP_ACK | TCP_RST) == TCP_SYN
    }

    #[inline(always)]
    pub fn to(&self) -> Destination<A> {
        Destination { address: self.destination, port: self.destination_port, protocol: self.protocol }
    }

    #[inline(always)]
    pub fn is_between(&self, source: End<A>, destination: End<A>) -> bool {
        // Ports first: addresses take longer.
        self.source_port == source.1
            && self.destination_port == destination.1
            && self.source == source.0
            && self.destination == destination.0
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
    /// Index into `services` that the packet counts for; `NO_SERVICE`: none, or it is counted elsewhere on its way.
    pub service: u32,
}

/// The way of a packet after its translation.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Then {
    /// As the stack has it.
    #[default]
    Pass,
    /// By the route to its new destination: the stack has routed it to the old one.
    Reroute,
    /// Into the node, by the interface that leads to its new source: there reverse path filtering accepts it.
    IntoNode,
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::layout::PROTOCOL_UDP;

    #[rstest]
    #[case::syn(PROTOCOL_TCP, TCP_SYN, true)]
    #[case::answered_syn(PROTOCOL_TCP, TCP_SYN | TCP_ACK, false)]
    #[case::reset_syn(PROTOCOL_TCP, TCP_SYN | TCP_RST, false)]
    #[case::syn_that_also_ends(PROTOCOL_TCP, TCP_SYN | TCP_FIN, true)]
    #[case::ack(PROTOCOL_TCP, TCP_ACK, false)]
    #[case::datagram(PROTOCOL_UDP, 0, true)]
    fn what_opens_a_flow(#[case] protocol: u8, #[case] tcp_flags: u8, #[case] opens: bool) {
        let (source, destination) = ([192, 0, 2, 1], [10, 96, 0, 1]);
        let (source_port, destination_port) = (Port::new(40_000), Port::new(80));
        let segment = Segment::new(tcp_flags, 0, 0, 0);
        let headers = Headers::default();
        let packet = Packet {
            source,
            destination,
            source_port,
            destination_port,
            protocol,
            segment,
            fragment: Fragment::default(),
            headers,
        };
        assert_eq!(packet.opens(), opens);
    }

    #[rstest]
    #[case::whole(0, false, Part::Whole)]
    #[case::first(0, true, Part::First)]
    #[case::middle(1, true, Part::Later)]
    #[case::last(1, false, Part::Later)]
    fn parts_of_a_packet(#[case] offset: u16, #[case] has_more: bool, #[case] part: Part) {
        assert_eq!(Fragment::new(7, offset, has_more), Fragment { part, id: 7 });
    }

    #[rstest]
    #[case::data(TCP_ACK, 100, 110)]
    #[case::syn(TCP_SYN, 0, 11)]
    #[case::last_data(TCP_FIN | TCP_ACK, 100, 111)]
    #[case::beyond_the_end(TCP_ACK, u32::MAX, 9)]
    fn what_follows_a_segment(#[case] flags: u8, #[case] payload: u32, #[case] next: u32) {
        assert_eq!(Segment::new(flags, 10, 0, payload).next, next);
    }
}
