//! Requests over a new connection, a shared socket or a held connection.

use std::{
    io,
    net::{SocketAddr, TcpStream, UdpSocket},
    thread,
    time::Instant,
};

use nix::errno::Errno;

use super::{
    protocol::{Answer, Dial, Outcome, Protocol},
    serve::{Seen, read_frame, write_frame},
    socket::{self, micros_since, outcome_of},
};
use crate::address::mapped;

/// Opens a new socket for each of the dial's requests.
pub fn dial(dial: &Dial) -> Vec<Outcome> {
    (0..dial.count).map(|_| once(dial)).collect()
}

/// Dials the dials of a group one after another, and the groups at the same time. A dial ends with
/// the first request that is not answered.
pub fn groups(groups: &[Vec<Dial>]) -> io::Result<Vec<Vec<Vec<Outcome>>>> {
    thread::scope(|scope| {
        let one = |dial: &Dial| {
            let mut outcomes = Vec::new();
            for _ in 0..dial.count {
                outcomes.push(once(dial));
                if !matches!(outcomes.last(), Some(Outcome::Answered(_))) {
                    break;
                }
            }
            outcomes
        };
        let start = |group| scope.spawn(move || Vec::from_iter(<[Dial]>::iter(group).map(one)));
        let threads: Vec<_> = groups.iter().map(Vec::as_slice).map(start).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, _>| {
            thread.join().map_err(|_| io::Error::other("a dial panicked"))
        };
        threads.into_iter().map(join).collect()
    })
}

/// Makes one request on a new socket.
pub fn once(dial: &Dial) -> Outcome {
    let start = Instant::now();
    let result = match dial.protocol {
        Protocol::Tcp | Protocol::Sctp => stream(dial, start),
        Protocol::Udp => udp(dial, start),
    };
    result.unwrap_or_else(|error| outcome_of(&error, start))
}

fn target_of(dial: &Dial) -> SocketAddr {
    if dial.mapped { mapped(dial.target) } else { dial.target }
}

fn stream(dial: &Dial, start: Instant) -> io::Result<Outcome> {
    let mut connection = Held::Stream(socket::stream(dial, target_of(dial))?);
    let outcome = connection.request(dial.payload, start);
    if let Held::Stream(stream) = &connection {
        socket::reset_on_close(stream)?;
    }
    outcome
}

fn udp(dial: &Dial, start: Instant) -> io::Result<Outcome> {
    let socket = socket::fresh_udp(dial, target_of(dial))?;
    Datagrams { socket, dial: dial.clone() }.request(dial.payload, start)
}

/// Makes one request to each target in turn, `rounds` times, from one unconnected socket.
pub fn shared(targets: &[SocketAddr], rounds: u32, as_mapped: bool) -> io::Result<Vec<Outcome>> {
    let Some(first) = targets.first() else { return Ok(Vec::new()) };
    let mut dial = Dial::new(Protocol::Udp, *first).unconnected();
    dial.mapped = as_mapped;
    let socket = socket::udp(&dial, target_of(&dial))?;
    let mut outcomes = Vec::new();
    for _ in 0..rounds {
        for target in targets {
            let target = if as_mapped { mapped(*target) } else { *target };
            let start = Instant::now();
            outcomes.push(
                exchange(&socket, target, dial.payload).unwrap_or_else(|error| outcome_of(&error, start)),
            );
        }
    }
    Ok(outcomes)
}

fn exchange(socket: &UdpSocket, target: SocketAddr, payload: usize) -> io::Result<Outcome> {
    let start = Instant::now();
    socket.send_to(&vec![b'x'; payload], target)?;
    let mut answer = vec![0; usize::from(u16::MAX)];
    let (length, peer) = socket.recv_from(&mut answer)?;
    answered_datagram(&answer[..length], payload, peer, start)
}

pub(super) fn answered_datagram(
    answer: &[u8],
    payload: usize,
    peer: SocketAddr,
    start: Instant,
) -> io::Result<Outcome> {
    if answer.len() < payload {
        let what = format!("{} bytes answer {payload}", answer.len());
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    answered(answer, peer, start)
}

fn answered(answer: &[u8], peer: SocketAddr, start: Instant) -> io::Result<Outcome> {
    let seen: Seen = serde_json::from_slice(answer)?;
    Ok(Outcome::Answered(Answer {
        by: seen.by,
        peer,
        source: seen.source,
        server: seen.server,
        original: seen.original,
        bytes: seen.bytes,
        micros: micros_since(start),
    }))
}

/// Connection that stays open.
pub enum Held {
    Stream(TcpStream),
    Datagrams(Datagrams),
}

/// UDP socket, and the dial that opened it.
pub struct Datagrams {
    socket: UdpSocket,
    dial: Dial,
}

impl Datagrams {
    fn open(dial: &Dial) -> io::Result<Self> {
        Ok(Self { socket: socket::udp(dial, target_of(dial))?, dial: dial.clone() })
    }

    /// Makes a request. If the socket was ended, opens another one and tries again.
    fn request(&mut self, payload: usize, start: Instant) -> io::Result<Outcome> {
        match self.exchange(payload, start) {
            Err(error) if has_ended(&error) => {
                *self = Self::open(&self.dial)?;
                self.exchange(payload, start)
            }
            outcome => outcome,
        }
    }

    fn exchange(&self, payload: usize, start: Instant) -> io::Result<Outcome> {
        let Self { socket, dial } = self;
        if dial.unconnected {
            return exchange(socket, target_of(dial), payload);
        }
        socket.send(&vec![b'x'; payload])?;
        let mut answer = vec![0; usize::from(u16::MAX)];
        let length = socket.recv(&mut answer)?;
        answered_datagram(&answer[..length], payload, socket.peer_addr()?, start)
    }
}

/// Returns true if a proxy has ended the socket because its endpoint is gone, now or at an earlier
/// call.
fn has_ended(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::ECONNABORTED | Errno::EDESTADDRREQ))
}

impl Held {
    pub fn open(dial: &Dial) -> io::Result<Self> {
        Ok(match dial.protocol {
            Protocol::Tcp | Protocol::Sctp => {
                let stream = socket::stream(dial, target_of(dial))?;
                // Proxies and the kernel soon forget a connection that ends with a RST.
                socket::reset_on_close(&stream)?;
                Self::Stream(stream)
            }
            Protocol::Udp => Self::Datagrams(Datagrams::open(dial)?),
        })
    }

    /// Returns the ends, such as `198.18.0.9:40000 to 192.0.2.11:30080`.
    pub fn ends(&self) -> String {
        let (local, peer) = match self {
            Self::Stream(socket) => (socket.local_addr(), socket.peer_addr()),
            Self::Datagrams(held) => (held.socket.local_addr(), held.socket.peer_addr()),
        };
        let name = |end: io::Result<SocketAddr>| end.map_or_else(|_| "?".to_owned(), |end| end.to_string());
        format!("{} to {}", name(local), name(peer))
    }

    pub fn ping(&mut self) -> Outcome {
        let start = Instant::now();
        self.request(16, start).unwrap_or_else(|error| outcome_of(&error, start))
    }

    fn request(&mut self, payload: usize, start: Instant) -> io::Result<Outcome> {
        match self {
            Self::Stream(stream) => {
                write_frame(stream, &vec![b'x'; payload])?;
                let answer = read_frame(stream)?;
                answered(&answer, stream.peer_addr()?, start)
            }
            Self::Datagrams(held) => held.request(payload, start),
        }
    }
}
