//! Packets as bytes from their network header on: made, sent from any source address, and read.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use lab::address::Family;
use socket2::{Domain, Protocol, Socket, Type};

pub(super) const FIN: u8 = 1;
pub(super) const SYN: u8 = 2;
pub(super) const RST: u8 = 4;
pub(super) const ACK: u8 = 16;

const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;
/// The number of IPv6's fragment header.
const FRAGMENT: u8 = 44;

/// Bytes of a TCP header without options.
const TCP_HEADER: usize = 20;
const UDP_HEADER: usize = 8;

/// The ends of a packet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Ends {
    pub(super) source: SocketAddr,
    pub(super) destination: SocketAddr,
}

impl Ends {
    pub(super) fn reversed(self) -> Self {
        Self { source: self.destination, destination: self.source }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Segment<'a> {
    pub(super) flags: u8,
    pub(super) sequence: u32,
    pub(super) acknowledgement: u32,
    pub(super) payload: &'a [u8],
}

impl Segment<'_> {
    /// Returns the sequence number that comes after this segment.
    pub(super) fn next(&self) -> u32 {
        let controls = self.flags & (SYN | FIN);
        self.sequence.wrapping_add(self.payload.len() as u32 + controls.count_ones())
    }
}

/// The part of a packet behind its network header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Carried<'a> {
    Segment(Segment<'a>),
    Datagram(&'a [u8]),
}

pub(super) fn segment(ends: Ends, segment: &Segment<'_>) -> Vec<u8> {
    const WINDOW: u16 = 64_240;
    let Segment { flags, sequence, acknowledgement, payload } = segment;
    let mut body = ports(ends);
    body.extend(sequence.to_be_bytes());
    body.extend(acknowledgement.to_be_bytes());
    body.extend([(TCP_HEADER as u8 / 4) << 4, *flags]);
    body.extend(WINDOW.to_be_bytes());
    // Checksum and urgent pointer.
    body.extend([0; 4]);
    body.extend(*payload);
    network(ends, TCP, summed(ends, TCP, body, 16))
}

pub(super) fn datagram(ends: Ends, payload: &[u8]) -> Vec<u8> {
    network(ends, UDP, udp(ends, payload))
}

fn udp(ends: Ends, payload: &[u8]) -> Vec<u8> {
    let mut body = ports(ends);
    body.extend(((UDP_HEADER + payload.len()) as u16).to_be_bytes());
    body.extend([0; 2]);
    body.extend(payload);
    summed(ends, UDP, body, 6)
}

/// Returns an ICMP error from `by` to the source of the packet that it quotes: the port cannot be
/// reached, or the host.
pub(super) fn icmp_error(by: IpAddr, quoted: &[u8], quoted_ends: Ends, is_port: bool) -> Vec<u8> {
    let ends = Ends { source: SocketAddr::new(by, 0), destination: quoted_ends.source };
    let (protocol, kind, code) = match (by, is_port) {
        (IpAddr::V4(_), true) => (ICMP, 3, 3),
        (IpAddr::V4(_), false) => (ICMP, 3, 1),
        (IpAddr::V6(_), true) => (ICMPV6, 1, 4),
        (IpAddr::V6(_), false) => (ICMPV6, 1, 3),
    };
    let mut body = vec![kind, code, 0, 0, 0, 0, 0, 0];
    body.extend(quoted);
    network(ends, protocol, summed(ends, protocol, body, 2))
}

/// Returns the first fragment of a datagram, or the last one.
pub(super) fn fragment(ends: Ends, id: u32, is_first: bool) -> Vec<u8> {
    const LENGTH: usize = 64;
    const MORE_FRAGMENTS4: u16 = 1 << 13;
    const MORE_FRAGMENTS6: u16 = 1;
    let body = if is_first { udp(ends, &[b'x'; LENGTH - UDP_HEADER]) } else { vec![b'x'; LENGTH] };
    // Offsets are counted in units of eight bytes.
    let offset = if is_first { 0 } else { LENGTH as u16 / 8 };
    let more = |flag| if is_first { flag } else { 0 };
    if ends.source.is_ipv4() {
        let mut packet = network(ends, UDP, body);
        packet[4..6].copy_from_slice(&(id as u16).to_be_bytes());
        packet[6..8].copy_from_slice(&(offset | more(MORE_FRAGMENTS4)).to_be_bytes());
        return packet;
    }
    let mut header = vec![UDP, 0];
    header.extend((offset << 3 | more(MORE_FRAGMENTS6)).to_be_bytes());
    header.extend(id.to_be_bytes());
    network(ends, FRAGMENT, [header, body].concat())
}

fn ports(ends: Ends) -> Vec<u8> {
    [ends.source.port().to_be_bytes(), ends.destination.port().to_be_bytes()].concat()
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// Writes the checksum into the body. Only ICMP of IPv4 has no pseudo header.
fn summed(ends: Ends, protocol: u8, mut body: Vec<u8>, place: usize) -> Vec<u8> {
    let mut sum = sum(&body);
    if protocol != ICMP {
        sum += u64::from(protocol) + body.len() as u64;
        sum += self::sum(&octets(ends.source.ip())) + self::sum(&octets(ends.destination.ip()));
    }
    body[place..place + 2].copy_from_slice(&folded(sum).to_be_bytes());
    body
}

fn sum(bytes: &[u8]) -> u64 {
    let pairs = bytes.chunks(2);
    pairs.map(|pair| u64::from(pair[0]) << 8 | u64::from(pair.get(1).copied().unwrap_or(0))).sum()
}

fn folded(mut sum: u64) -> u16 {
    while sum > u64::from(u16::MAX) {
        sum = (sum & u64::from(u16::MAX)) + (sum >> 16);
    }
    !(sum as u16)
}

fn network(ends: Ends, protocol: u8, body: Vec<u8>) -> Vec<u8> {
    const HOP_LIMIT: u8 = 64;
    let addresses = [octets(ends.source.ip()), octets(ends.destination.ip())].concat();
    let header = if ends.source.is_ipv4() {
        const LENGTH: usize = 20;
        let mut header = vec![0x45, 0];
        header.extend(((LENGTH + body.len()) as u16).to_be_bytes());
        header.extend([0, 0, 0, 0, HOP_LIMIT, protocol, 0, 0]);
        header.extend(addresses);
        let sum = folded(sum(&header)).to_be_bytes();
        header[10..12].copy_from_slice(&sum);
        header
    } else {
        let mut header = vec![0x60, 0, 0, 0];
        header.extend((body.len() as u16).to_be_bytes());
        header.extend([protocol, HOP_LIMIT]);
        header.extend(addresses);
        header
    };
    [header, body].concat()
}

/// Reads a whole packet of TCP or UDP without options of the network header.
pub(super) fn read(packet: &[u8]) -> Option<(Ends, Carried<'_>)> {
    let byte = |at: usize| packet.get(at).copied();
    let (protocol, addresses, header, length) = match byte(0)? >> 4 {
        4 => (byte(9)?, 12..20, 20, usize::from(half(packet, 2)?)),
        6 => (byte(6)?, 8..40, 40, 40 + usize::from(half(packet, 4)?)),
        _ => return None,
    };
    let (source, destination) = packet.get(addresses.clone())?.split_at(addresses.len() / 2);
    let body = packet.get(header..length)?;
    let ends = Ends {
        source: SocketAddr::new(address(source)?, half(body, 0)?),
        destination: SocketAddr::new(address(destination)?, half(body, 2)?),
    };
    let carried = match protocol {
        TCP => {
            let word = |at: usize| Some(u32::from_be_bytes(body.get(at..at + 4)?.try_into().ok()?));
            let options = usize::from(body.get(12)? >> 4) * 4;
            Carried::Segment(Segment {
                flags: *body.get(13)?,
                sequence: word(4)?,
                acknowledgement: word(8)?,
                payload: body.get(options..)?,
            })
        }
        UDP => Carried::Datagram(body.get(UDP_HEADER..)?),
        _ => return None,
    };
    Some((ends, carried))
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn address(octets: &[u8]) -> Option<IpAddr> {
    match octets.len() {
        4 => <[u8; 4]>::try_from(octets).ok().map(IpAddr::from),
        _ => <[u8; 16]>::try_from(octets).ok().map(IpAddr::from),
    }
}

/// Sends packets of both families whose network headers are ours, from the network namespace in
/// which it was made.
pub(super) struct Sender {
    v4: Socket,
    v6: Socket,
}

impl Sender {
    pub(super) fn new() -> io::Result<Self> {
        // IPPROTO_RAW: the network header is ours. The kernel sums that of IPv4.
        let raw = |domain| Socket::new(domain, Type::RAW, Some(Protocol::from(255)));
        Ok(Self { v4: raw(Domain::IPV4)?, v6: raw(Domain::IPV6)? })
    }

    /// A full queue of a device loses the packet, as a network may.
    pub(super) fn send(&self, to: IpAddr, packet: &[u8]) -> io::Result<()> {
        let socket = match Family::of(to) {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        };
        match socket.send_to(packet, &SocketAddr::new(to, 0).into()) {
            Err(error) if error.raw_os_error() == Some(nix::errno::Errno::ENOBUFS as i32) => Ok(()),
            sent => sent.map(drop),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(source: &str, destination: &str) -> Ends {
        Ends { source: source.parse().unwrap(), destination: destination.parse().unwrap() }
    }

    /// Pairs of ends of each family.
    fn both() -> [Ends; 2] {
        [ends("100.64.0.1:2000", "192.0.2.11:80"), ends("[2001:db8::1]:2000", "[2001:db8::2]:80")]
    }

    #[test]
    fn what_is_made_can_be_read() {
        for ends in both() {
            let made = Segment { flags: SYN | ACK, sequence: 7, acknowledgement: 9, payload: b"abc" };
            assert_eq!(read(&segment(ends, &made)), Some((ends, Carried::Segment(made))));
            assert_eq!(made.next(), 11);
            assert_eq!(read(&datagram(ends, b"abcd")), Some((ends, Carried::Datagram(b"abcd"))));
            assert_eq!(read(&icmp_error(ends.source.ip(), &[0; 40], ends, true)), None);
        }
    }

    #[test]
    fn checksums_of_what_has_one_are_right() {
        for ends in both() {
            let made = Segment { flags: ACK, sequence: 7, acknowledgement: 9, payload: b"abc" };
            let header = if ends.source.is_ipv4() { 20 } else { 40 };
            for (protocol, packet) in [(TCP, segment(ends, &made)), (UDP, datagram(ends, b"abc"))] {
                let body = packet[header..].to_vec();
                let addresses = [octets(ends.source.ip()), octets(ends.destination.ip())].concat();
                let all = sum(&body) + sum(&addresses) + u64::from(protocol) + body.len() as u64;
                assert_eq!(folded(all), 0);
            }
        }
        let [ends, _] = both();
        let packet = icmp_error(ends.source.ip(), &datagram(ends, b"abc"), ends, false);
        assert_eq!([folded(sum(&packet[..20])), folded(sum(&packet[20..]))], [0, 0]);
    }
}
