//! Sends a datagram whose fragments are in an order in which the kernel itself would not send them.

use std::{
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use etherparse::{IpFragOffset, IpNumber, Ipv4Header, Ipv6FragmentHeader, Ipv6Header, UdpHeader};
use socket2::{Domain, Protocol, Socket, Type};

use super::{dial::answered_datagram, protocol::Outcome, socket::outcome_of};

/// Number of bytes after the network header in each fragment but the last.
const PIECE: usize = 1_400;

/// Sends a datagram of `payload` bytes from `source`, as fragments with these numbers in this
/// order. Waits for the answer, but not longer than `limit`.
pub fn dial(source: IpAddr, target: SocketAddr, payload: usize, order: &[usize], limit: Duration) -> Outcome {
    let start = Instant::now();
    request(source, target, payload, order, limit, start).unwrap_or_else(|error| outcome_of(&error, start))
}

fn request(
    source: IpAddr,
    target: SocketAddr,
    payload: usize,
    order: &[usize],
    limit: Duration,
    start: Instant,
) -> io::Result<Outcome> {
    // This socket has the port, and gets the answer.
    let socket = UdpSocket::bind(SocketAddr::new(source, 0))?;
    socket.set_read_timeout(Some(limit))?;
    let own = socket.local_addr()?;
    let fragments = fragments(own, target, payload)?;
    // With IPPROTO_RAW, the program writes the network header.
    let raw = Socket::new(Domain::for_address(target), Type::RAW, Some(Protocol::from(255)))?;
    for number in order {
        let fragment = fragments.get(*number).ok_or(io::ErrorKind::InvalidInput)?;
        raw.send_to(fragment, &SocketAddr::new(target.ip(), 0).into())?;
    }
    let mut answer = vec![0; usize::from(u16::MAX)];
    let (length, peer) = socket.recv_from(&mut answer)?;
    answered_datagram(&answer[..length], payload, peer, start)
}

fn fragments(source: SocketAddr, target: SocketAddr, payload: usize) -> io::Result<Vec<Vec<u8>>> {
    let payload = vec![b'x'; payload];
    let (source_port, destination_port) = (source.port(), target.port());
    let length = (UdpHeader::LEN + payload.len()) as u16;
    let mut header = UdpHeader { source_port, destination_port, length, checksum: 0 };
    header.checksum = match (source.ip(), target.ip()) {
        (IpAddr::V4(source), IpAddr::V4(target)) => {
            header.calc_checksum_ipv4_raw(source.octets(), target.octets(), &payload)
        }
        (IpAddr::V6(source), IpAddr::V6(target)) => {
            header.calc_checksum_ipv6_raw(source.octets(), target.octets(), &payload)
        }
        _ => return Err(io::ErrorKind::InvalidInput.into()),
    }
    .map_err(io::Error::other)?;
    let datagram = [&header.to_bytes()[..], &payload].concat();
    // The id differs between datagrams between the same addresses.
    let id = source.port();
    let count = datagram.len().div_ceil(PIECE);
    let fragment = |(index, piece): (usize, &[u8])| {
        let position =
            (IpFragOffset::try_new((index * PIECE / 8) as u16).map_err(io::Error::other)?, index + 1 < count);
        let headers = network_headers(source.ip(), target.ip(), id, position, piece.len())?;
        Ok([&headers, piece].concat())
    };
    datagram.chunks(PIECE).enumerate().map(fragment).collect()
}

/// Returns the network headers of a fragment at `offset`, with others after it if `more_fragments`.
fn network_headers(
    source: IpAddr,
    target: IpAddr,
    id: u16,
    (offset, more_fragments): (IpFragOffset, bool),
    length: usize,
) -> io::Result<Vec<u8>> {
    const HOP_LIMIT: u8 = 64;
    match (source, target) {
        (IpAddr::V4(source), IpAddr::V4(target)) => {
            let header =
                Ipv4Header::new(length as u16, HOP_LIMIT, IpNumber::UDP, source.octets(), target.octets());
            let header = header.map_err(io::Error::other)?;
            // The kernel computes the checksum of the header.
            let header = Ipv4Header {
                identification: id,
                dont_fragment: false,
                more_fragments,
                fragment_offset: offset,
                ..header
            };
            Ok(header.to_bytes().to_vec())
        }
        (IpAddr::V6(source), IpAddr::V6(target)) => {
            let fragment = Ipv6FragmentHeader::new(IpNumber::UDP, offset, more_fragments, id.into());
            let header = Ipv6Header {
                payload_length: (Ipv6FragmentHeader::LEN + length) as u16,
                next_header: IpNumber::IPV6_FRAGMENTATION_HEADER,
                hop_limit: HOP_LIMIT,
                source: source.octets(),
                destination: target.octets(),
                ..Ipv6Header::default()
            };
            Ok([&header.to_bytes()[..], &fragment.to_bytes()].concat())
        }
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}
