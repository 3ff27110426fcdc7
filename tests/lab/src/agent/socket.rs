//! Client sockets with the options that a scenario asks for.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        LazyLock,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use nix::errno::Errno;
use socket2::{Domain, SockRef, Socket, Type};

use super::protocol::{Dial, Outcome, Protocol};

/// First of the ports from which the kernel chooses by default.
const FIRST_PORT: u16 = 32_768;
/// Number of these ports.
const PORTS: u16 = 28_232;
/// Number of the port that [`fresh_udp`] tries next. Each client begins at another number, so that
/// clients do not have the same ports at the same time.
static NEXT: LazyLock<AtomicU32> = LazyLock::new(|| AtomicU32::new(fastrand::u32(..u32::from(PORTS))));

const SCTP: socket2::Protocol = socket2::Protocol::SCTP;

/// Opens a socket, bound as the dial asks and not connected.
fn open(dial: &Dial, target: SocketAddr, kind: Type) -> io::Result<Socket> {
    let protocol = (dial.protocol == Protocol::Sctp).then_some(SCTP);
    let socket = Socket::new(Domain::for_address(target), kind, protocol)?;
    if dial.source.is_some() || dial.source_port.is_some() {
        socket.set_reuse_address(true)?;
        let local =
            SocketAddr::new(dial.source.unwrap_or_else(|| any(target)), dial.source_port.unwrap_or(0));
        socket.bind(&local.into())?;
    }
    socket.set_write_timeout(Some(limit(dial)))?;
    socket.set_read_timeout(Some(limit(dial)))?;
    Ok(socket)
}

fn any(target: SocketAddr) -> IpAddr {
    if target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}

fn limit(dial: &Dial) -> Duration {
    Duration::from_millis(dial.timeout_ms.max(1))
}

/// Connects, blocking (limited by the socket's write timeout) or non-blocking as the dial asks.
fn connect(socket: &Socket, dial: &Dial, target: SocketAddr) -> io::Result<()> {
    if dial.non_blocking {
        return socket.connect_timeout(&target.into(), limit(dial));
    }
    socket.connect(&target.into()).map_err(|error| match error.raw_os_error().map(Errno::from_raw) {
        // connect returns these when the write timeout is over.
        Some(Errno::EINPROGRESS | Errno::EAGAIN) => io::ErrorKind::TimedOut.into(),
        _ => error,
    })
}

/// Opens a connection of TCP, or of SCTP in TCP's style.
pub fn stream(dial: &Dial, target: SocketAddr) -> io::Result<TcpStream> {
    let socket = open(dial, target, Type::STREAM)?;
    connect(&socket, dial, target)?;
    Ok(socket.into())
}

pub fn udp(dial: &Dial, target: SocketAddr) -> io::Result<UdpSocket> {
    connected(open(dial, target, Type::DGRAM)?, dial, target)
}

/// Does what [`udp`] does, from the port that was used the longest time ago, unless the dial names
/// one.
///
/// The kernel chooses a port at random. After a hundred datagrams of other sockets, the next one
/// has the port of one of them with a chance of 0.4 %. Proxies send it to the endpoint of that
/// datagram as long as they know its flow, whatever the Service has now.
pub fn fresh_udp(dial: &Dial, target: SocketAddr) -> io::Result<UdpSocket> {
    if dial.source.is_some() || dial.source_port.is_some() {
        return udp(dial, target);
    }
    for _ in 0..PORTS {
        let socket = open(dial, target, Type::DGRAM)?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed) % u32::from(PORTS);
        let port = FIRST_PORT + number as u16;
        match socket.bind(&SocketAddr::new(any(target), port).into()) {
            // Another socket is open at the port.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(error),
            Ok(()) => return connected(socket, dial, target),
        }
    }
    Err(io::ErrorKind::AddrInUse.into())
}

fn connected(socket: Socket, dial: &Dial, target: SocketAddr) -> io::Result<UdpSocket> {
    if !dial.unconnected {
        connect(&socket, dial, target)?;
    }
    Ok(socket.into())
}

/// Listens for SCTP in TCP's style, on a socket that std treats as one of TCP.
pub fn listen_sctp(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(SCTP))?;
    socket.bind(&address.into())?;
    socket.listen(128)?;
    Ok(socket.into())
}

/// Closes with RST, so that the client's port does not stay in TIME_WAIT.
pub fn reset_on_close(stream: &TcpStream) -> io::Result<()> {
    SockRef::from(stream).set_linger(Some(Duration::ZERO))
}

/// Returns the outcome that a failed call is for the scenario.
pub fn outcome_of(error: &io::Error, start: Instant) -> Outcome {
    let errno = error.raw_os_error().map(Errno::from_raw);
    match (errno, error.kind()) {
        (Some(Errno::ECONNREFUSED), _) => Outcome::Refused { micros: micros_since(start) },
        (Some(Errno::EPERM), _) => Outcome::NotPermitted,
        (Some(Errno::EHOSTUNREACH | Errno::ENETUNREACH), _) => Outcome::Unreachable,
        (Some(Errno::ETIMEDOUT | Errno::EAGAIN), _) | (None, io::ErrorKind::TimedOut) => Outcome::TimedOut,
        _ => Outcome::Failed(error.to_string()),
    }
}

pub fn micros_since(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX)
}
