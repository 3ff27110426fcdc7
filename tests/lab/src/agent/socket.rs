//! Client sockets with the options that a scenario asks for.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        socket::{
            AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, setsockopt, socket, sockopt,
        },
        time::TimeVal,
    },
};

use super::protocol::{Dial, Outcome, Protocol};

/// A socket bound as the dial asks, not connected.
pub fn open(dial: &Dial, target: SocketAddr) -> io::Result<OwnedFd> {
    let family = if target.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let (kind, source) = match dial.protocol {
        Protocol::Tcp => (SockType::Stream, dial.source),
        Protocol::Udp => (SockType::Datagram, dial.source),
    };
    let fd = socket(family, kind, SockFlag::SOCK_CLOEXEC, None)?;
    if source.is_some() || dial.source_port.is_some() {
        setsockopt(&fd, sockopt::ReuseAddr, &true)?;
        let any = match target {
            SocketAddr::V4(_) => IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED),
            SocketAddr::V6(_) => IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED),
        };
        let local = SocketAddr::new(source.unwrap_or(any), dial.source_port.unwrap_or(0));
        bind(fd.as_raw_fd(), &SockaddrStorage::from(local))?;
    }
    let limit = limit(dial);
    let timeout =
        TimeVal::new(i64::try_from(limit.as_secs()).unwrap_or(i64::MAX), i64::from(limit.subsec_micros()));
    setsockopt(&fd, sockopt::SendTimeout, &timeout)?;
    setsockopt(&fd, sockopt::ReceiveTimeout, &timeout)?;
    Ok(fd)
}

pub fn limit(dial: &Dial) -> Duration {
    Duration::from_millis(dial.timeout_ms.max(1))
}

/// `connect`, blocking (bounded by the socket's send timeout) or non-blocking as the dial asks.
pub fn connect_to(fd: &OwnedFd, dial: &Dial, target: SocketAddr) -> io::Result<()> {
    let address = SockaddrStorage::from(target);
    if !dial.non_blocking {
        return match connect(fd.as_raw_fd(), &address) {
            // What connect says when the send timeout is over.
            Err(Errno::EINPROGRESS | Errno::EAGAIN) => Err(io::ErrorKind::TimedOut.into()),
            result => result.map_err(Into::into),
        };
    }
    let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
    fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    match connect(fd.as_raw_fd(), &address) {
        Err(Errno::EINPROGRESS) => finish(fd, limit(dial))?,
        result => result?,
    }
    fcntl(fd, FcntlArg::F_SETFL(flags))?;
    Ok(())
}

fn finish(fd: &OwnedFd, limit: Duration) -> io::Result<()> {
    let timeout = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
    let mut ready = [PollFd::new(fd.as_fd(), PollFlags::POLLOUT)];
    if poll(&mut ready, timeout)? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    match nix::sys::socket::getsockopt(fd, sockopt::SocketError)? {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

pub fn tcp(dial: &Dial, target: SocketAddr) -> io::Result<TcpStream> {
    let fd = open(dial, target)?;
    connect_to(&fd, dial, target)?;
    Ok(TcpStream::from(fd))
}

pub fn udp(dial: &Dial, target: SocketAddr) -> io::Result<UdpSocket> {
    let fd = open(dial, target)?;
    if !dial.unconnected {
        connect_to(&fd, dial, target)?;
    }
    Ok(UdpSocket::from(fd))
}

/// Closes with RST, so that the client's port does not stay in TIME_WAIT.
pub fn reset_on_close(stream: &TcpStream) -> io::Result<()> {
    let at_once = libc::linger { l_onoff: 1, l_linger: 0 };
    setsockopt(stream, sockopt::Linger, &at_once).map_err(Into::into)
}

/// What a failed call means for the scenario.
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
