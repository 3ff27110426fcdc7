//! The kinds of end that a flow can have, bad or good. Threads play both sides of all flows and
//! keep no state: the content of a packet says how its flow ends, and so what is answered.

use std::{
    io::{self, Read as _},
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::{Context as _, Result};
use lab::{address::Family, namespace::within};
use nix::sys::socket::{setsockopt, sockopt::RcvBufForce};
use proxy_common::flow::Side;
use socket2::{Domain, Protocol, Socket, Type};

use super::packet::{
    ACK, Carried, Ends, FIN, RST, SYN, Segment, Sender, datagram, icmp_error, read, segment,
};

/// An end of a flow. If a packet of the flow is lost, one side waits for an acknowledgement for
/// ever. So each of these flows is over after 300 seconds, whatever is lost.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
#[repr(u8)]
pub(super) enum End {
    /// Nobody answers the SYN.
    SynUnanswered,
    /// An ICMP error answers the SYN.
    SynRefusedByIcmp,
    /// The client does not acknowledge the SYN of the backend.
    HalfOpen,
    /// The backend sends data, and a RST right behind it.
    BackendResetsBehindData,
    /// The client sends data, and a RST right behind it.
    ClientResetsBehindData,
    /// The client is gone when the backend sends data.
    ClientVanished,
    /// The backend is gone when the client sends data.
    BackendVanished,
    /// The client's host answers data by an ICMP error, and is gone.
    ClientUnreachable,
    /// The backend is gone when the client closes.
    FinUnanswered,
    /// The client closes, and the backend acknowledges that.
    HalfClosed,
    /// The client closes, and then the backend does.
    Closed,
    /// A datagram and its answer.
    DatagramAnswered,
    /// A datagram that nobody answers.
    DatagramUnanswered,
    /// An ICMP error answers the datagram.
    DatagramRefusedByIcmp,
    /// Three datagrams in more than four seconds, each answered.
    DatagramsSustained,
}

impl End {
    const ALL: [Self; 15] = [
        Self::SynUnanswered,
        Self::SynRefusedByIcmp,
        Self::HalfOpen,
        Self::BackendResetsBehindData,
        Self::ClientResetsBehindData,
        Self::ClientVanished,
        Self::BackendVanished,
        Self::ClientUnreachable,
        Self::FinUnanswered,
        Self::HalfClosed,
        Self::Closed,
        Self::DatagramAnswered,
        Self::DatagramUnanswered,
        Self::DatagramRefusedByIcmp,
        Self::DatagramsSustained,
    ];

    /// The ends of 25 flows. Those that are kept for 300 seconds are few: at 5,000 flows a second
    /// they have most of the map entries.
    pub(super) const MIXED: [Self; 25] = [
        Self::HalfOpen,
        Self::Closed,
        Self::DatagramUnanswered,
        Self::SynUnanswered,
        Self::ClientResetsBehindData,
        Self::BackendResetsBehindData,
        Self::SynUnanswered,
        Self::DatagramAnswered,
        Self::ClientVanished,
        Self::HalfOpen,
        Self::Closed,
        Self::DatagramRefusedByIcmp,
        Self::ClientResetsBehindData,
        Self::BackendVanished,
        Self::BackendResetsBehindData,
        Self::DatagramsSustained,
        Self::SynRefusedByIcmp,
        Self::ClientUnreachable,
        Self::Closed,
        Self::DatagramAnswered,
        Self::ClientResetsBehindData,
        Self::FinUnanswered,
        Self::DatagramUnanswered,
        Self::HalfClosed,
        Self::BackendResetsBehindData,
    ];

    fn of(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|end| *end as u8 == number)
    }

    pub(super) fn is_tcp(self) -> bool {
        self < Self::DatagramAnswered
    }

    /// Returns true if one side has not acknowledged all that the other has sent.
    pub(super) fn is_unacknowledged(self) -> bool {
        matches!(
            self,
            Self::ClientVanished | Self::BackendVanished | Self::ClientUnreachable | Self::FinUnanswered
        )
    }

    /// Returns the port of clients whose flows end so.
    pub(super) fn client_port(self) -> u16 {
        FIRST_PORT + u16::from(self as u8)
    }

    pub(super) fn of_client_port(port: u16) -> Option<Self> {
        Self::of(u8::try_from(port.checked_sub(FIRST_PORT)?).ok()?)
    }

    /// Returns the client's first packet.
    pub(super) fn first(self, ends: Ends) -> Vec<u8> {
        if !self.is_tcp() {
            return datagram(ends, &self.data());
        }
        // The lowest byte of the sequence number is the kind of end.
        let sequence = u32::from(ends.source.port()) << 20 | u32::from(self as u8);
        segment(ends, &Segment { flags: SYN, sequence, acknowledgement: 0, payload: &[] })
    }

    fn data(self) -> [u8; LENGTH] {
        [self as u8; LENGTH]
    }
}

/// The port of the clients with the first kind of end.
const FIRST_PORT: u16 = 20_000;
/// The ports of all clients.
pub(super) const CLIENT_PORTS: Range<u16> = FIRST_PORT..FIRST_PORT + End::ALL.len() as u16;
/// Number of bytes of data. Each byte is the kind of end.
const LENGTH: usize = 16;

/// Returns what a side answers to a packet.
fn answers(by: Side, packet: &[u8]) -> Vec<Vec<u8>> {
    let Some((ends, carried)) = read(packet) else { return Vec::new() };
    match carried {
        Carried::Datagram(payload) => datagram_answers(by, packet, ends, payload),
        Carried::Segment(received) => segment_answers(by, packet, ends, &received),
    }
}

fn datagram_answers(by: Side, packet: &[u8], ends: Ends, payload: &[u8]) -> Vec<Vec<u8>> {
    let end = payload.first().copied().and_then(End::of);
    match (by, end) {
        (Side::Backend, Some(End::DatagramAnswered | End::DatagramsSustained)) => {
            vec![datagram(ends.reversed(), payload)]
        }
        (Side::Backend, Some(End::DatagramRefusedByIcmp)) => {
            vec![icmp_error(ends.destination.ip(), packet, ends, true)]
        }
        _ => Vec::new(),
    }
}

fn segment_answers(by: Side, packet: &[u8], ends: Ends, received: &Segment<'_>) -> Vec<Vec<u8>> {
    // Numbers of the backend begin here.
    const BACKENDS_FIRST: u32 = 0x5000_0000;
    let is_syn = received.flags & SYN != 0;
    let told = match (by, is_syn) {
        (Side::Backend, true) => Some(received.sequence as u8),
        (Side::Client, true) => Some(received.acknowledgement.wrapping_sub(1) as u8),
        _ => received.payload.first().copied(),
    };
    let Some(end) = told.and_then(End::of) else { return Vec::new() };
    let data = end.data();
    let answer = |flags: u8, payload| {
        let sequence = if by == Side::Backend && is_syn { BACKENDS_FIRST } else { received.acknowledgement };
        Segment { flags, sequence, acknowledgement: received.next(), payload }
    };
    let with_data = answer(ACK, &data);
    let reset = Segment { flags: RST | ACK, sequence: with_data.next(), payload: &[], ..with_data };
    let is_fin = received.flags & FIN != 0;
    let said: &[Segment<'_>] = match (by, end) {
        (Side::Backend, End::SynUnanswered) => &[],
        (Side::Backend, End::SynRefusedByIcmp) => {
            return vec![icmp_error(ends.destination.ip(), packet, ends, true)];
        }
        (Side::Backend, _) if is_syn => &[answer(SYN | ACK, &[])],
        (Side::Client, End::HalfOpen) => &[],
        (Side::Client, End::ClientResetsBehindData) if is_syn => &[with_data, reset],
        (Side::Client, _) if is_syn => &[with_data],
        (Side::Backend, End::BackendVanished | End::ClientResetsBehindData) => &[],
        (Side::Backend, End::BackendResetsBehindData) => &[with_data, reset],
        (Side::Backend, _) if !is_fin => &[with_data],
        (Side::Client, End::ClientUnreachable) => {
            return vec![icmp_error(ends.destination.ip(), packet, ends, false)];
        }
        (Side::Client, End::FinUnanswered | End::HalfClosed | End::Closed) if !is_fin => {
            &[answer(FIN | ACK, &data[..1])]
        }
        (Side::Backend, End::HalfClosed) => &[answer(ACK, &[])],
        (Side::Backend, End::Closed) => &[answer(FIN | ACK, &data[..1])],
        (Side::Client, End::Closed) => &[answer(ACK, &[])],
        _ => &[],
    };
    said.iter().map(|said| segment(ends.reversed(), said)).collect()
}

/// Answers packets that come to a network namespace, to these ports, until told to stop.
pub(super) fn play(
    by: Side,
    namespace: &str,
    family: Family,
    ports: Range<u16>,
    stop: &AtomicBool,
) -> Result<()> {
    within(namespace, || {
        let sender = Sender::new()?;
        let mut socket = arriving(family).context("listening for packets")?;
        let mut packet = [0; 2_048];
        while !stop.load(Ordering::Relaxed) {
            let length = match socket.read(&mut packet) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                length => length.context("receiving packets")?,
            };
            let packet = packet.get(..length).unwrap_or_default();
            let Some((ends, _)) = read(packet) else { continue };
            if ports.contains(&ends.destination.port()) {
                for answer in answers(by, packet) {
                    sender.send(ends.source.ip(), &answer)?;
                }
            }
        }
        Ok(())
    })
}

/// Returns a socket that gets all packets of a family that come to this network namespace, before
/// netfilter and routing have them.
fn arriving(family: Family) -> Result<Socket> {
    const ROOM: usize = 32 << 20;
    let ethertype: u16 = match family {
        Family::V4 => 0x0800,
        Family::V6 => 0x86dd,
    };
    let protocol = Protocol::from(i32::from(ethertype.to_be()));
    let socket = Socket::new(Domain::PACKET, Type::DGRAM, Some(protocol))?;
    setsockopt(&socket, RcvBufForce, &ROOM)?;
    socket.set_read_timeout(Some(Duration::from_millis(100)))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the packets of a flow: who has sent each, and the flags if it is a segment.
    fn told(end: End) -> Vec<(Side, Option<u8>)> {
        let ends = Ends {
            source: "100.64.0.1:20000".parse().unwrap(),
            destination: "10.0.0.1:9000".parse().unwrap(),
        };
        let (mut told, mut waiting) = (Vec::new(), vec![(Side::Client, end.first(ends))]);
        while !waiting.is_empty() {
            let (by, packet) = waiting.remove(0);
            let flags = match read(&packet) {
                Some((_, Carried::Segment(segment))) => Some(segment.flags),
                _ => None,
            };
            told.push((by, flags));
            let other = if by == Side::Client { Side::Backend } else { Side::Client };
            waiting.extend(answers(other, &packet).into_iter().map(|answer| (other, answer)));
        }
        told
    }

    #[test]
    fn flows_end_as_they_should() {
        use Side::{Backend as B, Client as C};
        let handshake = [(C, Some(SYN)), (B, Some(SYN | ACK)), (C, Some(ACK))];
        let with = |rest: &[(Side, Option<u8>)]| [&handshake, rest].concat();
        assert_eq!(told(End::SynUnanswered), handshake[..1]);
        assert_eq!(told(End::SynRefusedByIcmp), [(C, Some(SYN)), (B, None)]);
        assert_eq!(told(End::HalfOpen), handshake[..2]);
        assert_eq!(told(End::BackendVanished), handshake);
        assert_eq!(told(End::ClientVanished), with(&[(B, Some(ACK))]));
        assert_eq!(told(End::ClientUnreachable), with(&[(B, Some(ACK)), (C, None)]));
        assert_eq!(told(End::BackendResetsBehindData), with(&[(B, Some(ACK)), (B, Some(RST | ACK))]));
        assert_eq!(told(End::ClientResetsBehindData), with(&[(C, Some(RST | ACK))]));
        let closing = with(&[(B, Some(ACK)), (C, Some(FIN | ACK))]);
        assert_eq!(told(End::FinUnanswered), closing);
        assert_eq!(told(End::HalfClosed), [&closing[..], &[(B, Some(ACK))]].concat());
        assert_eq!(told(End::Closed), [&closing[..], &[(B, Some(FIN | ACK)), (C, Some(ACK))]].concat());
        for (end, packets) in [
            (End::DatagramAnswered, 2),
            (End::DatagramUnanswered, 1),
            (End::DatagramRefusedByIcmp, 2),
            (End::DatagramsSustained, 2),
        ] {
            assert_eq!(told(end).len(), packets, "{end:?}");
        }
    }

    #[test]
    fn every_end_is_mixed_in_and_has_a_port() {
        for end in End::ALL {
            assert!(End::MIXED.contains(&end), "{end:?}");
            assert_eq!(End::of_client_port(end.client_port()), Some(end));
        }
        assert_eq!(End::of_client_port(FIRST_PORT - 1), None);
    }
}
