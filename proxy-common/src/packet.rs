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

/// A TCP or UDP packet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Packet<A> {
    pub source: A,
    pub destination: A,
    pub source_port: Port,
    pub destination_port: Port,
    /// IANA number.
    pub protocol: u8,
    /// `TCP_*`; 0 for UDP.
    pub tcp_flags: u8,
}

impl<A: Address> Packet<A> {
    #[inline(always)]
    pub fn is_tcp(&self) -> bool {
        self.protocol == PROTOCOL_TCP
    }

    /// A client may open a flow with it: a SYN without ACK, or any datagram.
    #[inline(always)]
    pub fn opens(&self) -> bool {
        !self.is_tcp() || self.tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST) == TCP_SYN
    }

    #[inline(always)]
    pub fn to(&self) -> Destination<A> {
        Destination { address: self.destination, port: self.destination_port, protocol: self.protocol }
    }

    /// The key under which a flow has this packet as its `TUPLE_*`.
    #[inline(always)]
    pub fn key(&self, tuple: u8) -> FlowKey<A> {
        let (source, destination) = self.ends();
        FlowKey::new(source, destination, self.protocol, tuple)
    }

    /// As [`Packet::key`], for a packet in the other direction.
    #[inline(always)]
    pub fn reversed_key(&self, tuple: u8) -> FlowKey<A> {
        let (source, destination) = self.ends();
        FlowKey::new(destination, source, self.protocol, tuple)
    }

    #[inline(always)]
    fn ends(&self) -> ((A, Port), (A, Port)) {
        ((self.source, self.source_port), (self.destination, self.destination_port))
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Side {
    Source,
    Destination,
}

/// A translation: address and port of one side, and the port of the other, which mostly stays as it is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Rewrite<A> {
    pub side: Side,
    pub address: A,
    pub port: Port,
    pub other_port: Port,
    /// Index into `services` that the packet counts for; `NO_SERVICE`: none, or it is counted elsewhere on its way.
    pub service: u32,
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
        let packet = Packet { source, destination, source_port, destination_port, protocol, tcp_flags };
        assert_eq!(packet.opens(), opens);
    }
}
