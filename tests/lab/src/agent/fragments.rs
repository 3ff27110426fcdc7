//! A datagram whose fragments are sent in an order that the kernel itself would not send them in.

use std::{
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use socket2::{Domain, Protocol, Socket, Type};

use super::{dial::answered_datagram, protocol::Outcome, socket::outcome_of};

/// Bytes after the network header in each fragment but the last.
const PIECE: usize = 1_400;
const UDP: u8 = 17;
const LIMIT: Duration = Duration::from_secs(1);

/// Sends `payload` bytes from `source`, the fragments of these numbers in this order, and waits for the answer.
pub fn dial(source: IpAddr, target: SocketAddr, payload: usize, order: &[usize]) -> Outcome {
    let start = Instant::now();
    request(source, target, payload, order, start).unwrap_or_else(|error| outcome_of(&error, start))
}

fn request(
    source: IpAddr,
    target: SocketAddr,
    payload: usize,
    order: &[usize],
    start: Instant,
) -> io::Result<Outcome> {
    // It has the port, and gets the answer.
    let socket = UdpSocket::bind(SocketAddr::new(source, 0))?;
    socket.set_read_timeout(Some(LIMIT))?;
    let own = socket.local_addr()?;
    let fragments = fragments(own, target, payload);
    // IPPROTO_RAW: the network header is ours.
    let raw = Socket::new(Domain::for_address(target), Type::RAW, Some(Protocol::from(255)))?;
    for number in order {
        let fragment = fragments.get(*number).ok_or(io::ErrorKind::InvalidInput)?;
        raw.send_to(fragment, &SocketAddr::new(target.ip(), 0).into())?;
    }
    let mut answer = vec![0; usize::from(u16::MAX)];
    let (length, peer) = socket.recv_from(&mut answer)?;
    answered_datagram(&answer[..length], payload, peer, start)
}

fn fragments(source: SocketAddr, target: SocketAddr, payload: usize) -> Vec<Vec<u8>> {
    let length = (8 + payload) as u16;
    let header = [source.port(), target.port(), length, 0].map(u16::to_be_bytes).concat();
    let mut datagram = [header, vec![b'x'; payload]].concat();
    let checksum = checksum(source.ip(), target.ip(), &datagram).to_be_bytes();
    datagram[6..8].copy_from_slice(&checksum);
    // Another one for each datagram between the same addresses.
    let id = source.port();
    let count = datagram.len().div_ceil(PIECE);
    let fragment = |(index, piece): (usize, &[u8])| {
        let header = network_header(source.ip(), target.ip(), id, index * PIECE, index + 1 < count, piece);
        [&header, piece].concat()
    };
    datagram.chunks(PIECE).enumerate().map(fragment).collect()
}

/// IPv4: the kernel sums the header.
fn network_header(
    source: IpAddr,
    target: IpAddr,
    id: u16,
    offset: usize,
    has_more: bool,
    piece: &[u8],
) -> Vec<u8> {
    const HOP_LIMIT: u8 = 64;
    const FRAGMENT: u8 = 44;
    let more = u16::from(has_more);
    let addresses = addresses(source, target);
    if source.is_ipv4() {
        let place = (offset / 8) as u16 | more << 13;
        let words = [0x4500, (20 + piece.len()) as u16, id, place].map(u16::to_be_bytes).concat();
        [&words, &[HOP_LIMIT, UDP, 0, 0][..], &addresses].concat()
    } else {
        let [high, low] = ((8 + piece.len()) as u16).to_be_bytes();
        let first = [0x60, 0, 0, 0, high, low, FRAGMENT, HOP_LIMIT];
        let [high, low] = (offset as u16 | more).to_be_bytes();
        let [id_high, id_low] = id.to_be_bytes();
        [&first[..], &addresses, &[UDP, 0, high, low, 0, 0, id_high, id_low]].concat()
    }
}

fn addresses(source: IpAddr, target: IpAddr) -> Vec<u8> {
    let bytes = |address: IpAddr| match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    };
    [bytes(source), bytes(target)].concat()
}

/// Of the datagram with its pseudo header.
fn checksum(source: IpAddr, target: IpAddr, datagram: &[u8]) -> u16 {
    let whole = [&addresses(source, target)[..], datagram].concat();
    let words = whole.chunks(2).map(|word| u64::from(word[0]) << 8 | u64::from(*word.get(1).unwrap_or(&0)));
    let mut sum = words.sum::<u64>() + datagram.len() as u64 + u64::from(UDP);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    match !(sum as u16) {
        0 => 0xffff,
        checksum => checksum,
    }
}
