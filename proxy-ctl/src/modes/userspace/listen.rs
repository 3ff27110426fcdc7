//! The sockets on which clients are served.

use std::{
    io,
    net::{SocketAddr, TcpListener, UdpSocket},
};

use socket2::{Domain, Protocol as IpProtocol, Socket, Type};

use super::plan::unspecified;
use crate::model::{
    node::PortRange,
    objects::{IpFamily, Protocol},
};

/// The most connections that wait to be accepted. The kernel has a limit of its own
/// (net.core.somaxconn).
const BACKLOG: i32 = 4096;

/// A socket that does not block.
#[derive(Debug)]
pub(super) enum Listening {
    Tcp(TcpListener),
    Udp(UdpSocket),
}

#[derive(Debug, thiserror::Error)]
pub(super) enum ListenError {
    #[error("{0}")]
    Bind(#[from] io::Error),
    #[error("portRange ({0}) has no free port left")]
    Exhausted(PortRange),
    #[error("mode userspace has no SCTP")]
    Sctp,
}

impl Listening {
    pub(super) fn on(protocol: Protocol, address: SocketAddr) -> Result<Self, ListenError> {
        match protocol {
            Protocol::Tcp => {
                let socket = bound(Type::STREAM, IpProtocol::TCP, address)?;
                socket.listen(BACKLOG)?;
                Ok(Self::Tcp(socket.into()))
            }
            Protocol::Udp => Ok(Self::Udp(bound(Type::DGRAM, IpProtocol::UDP, address)?.into())),
            Protocol::Sctp => Err(ListenError::Sctp),
        }
    }

    /// Listens on every address of the family, at a port of the range. Without a range the kernel
    /// chooses the port.
    pub(super) fn anywhere(
        protocol: Protocol,
        family: IpFamily,
        range: Option<PortRange>,
    ) -> Result<Self, ListenError> {
        let address = unspecified(family);
        let Some(range) = range else { return Self::on(protocol, SocketAddr::new(address, 0)) };
        for port in range.from(fastrand::u16(..)) {
            match Self::on(protocol, SocketAddr::new(address, port)) {
                Err(ListenError::Bind(error)) if error.kind() == io::ErrorKind::AddrInUse => {}
                done => return done,
            }
        }
        Err(ListenError::Exhausted(range))
    }

    pub(super) fn address(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Tcp(listener) => listener.local_addr(),
            Self::Udp(socket) => socket.local_addr(),
        }
    }
}

fn bound(kind: Type, protocol: IpProtocol, address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), kind, Some(protocol))?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    if kind == Type::STREAM {
        // Otherwise connections of a predecessor that have just ended would keep the address.
        socket.set_reuse_address(true)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

impl PortRange {
    /// Returns every port once, beginning with the port at `index`.
    fn from(self, index: u16) -> impl Iterator<Item = u16> {
        let (first, count) = (u32::from(self.first), u32::from(self.last - self.first) + 1);
        // The port is below 65,536, because `last` is.
        (0..count).map(move |step| (first + (u32::from(index) + step) % count) as u16)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::from_the_first(10, 13, 0, &[10, 11, 12, 13])]
    #[case::from_within(10, 13, 2, &[12, 13, 10, 11])]
    #[case::from_any_number(10, 13, 65_535, &[13, 10, 11, 12])]
    #[case::one(10, 10, 7, &[10])]
    #[case::to_the_end(65_534, 65_535, 1, &[65_535, 65_534])]
    fn each_port_of_the_range_is_tried_once(
        #[case] first: u16,
        #[case] last: u16,
        #[case] index: u16,
        #[case] expected: &[u16],
    ) {
        let ports: Vec<u16> = PortRange { first, last }.from(index).collect();
        assert_eq!(ports, expected);
    }

    #[rstest]
    #[case::tcp(Protocol::Tcp)]
    #[case::udp(Protocol::Udp)]
    fn a_range_is_used_up(#[case] protocol: Protocol) {
        let taken = Listening::anywhere(protocol, IpFamily::Ipv4, None).unwrap();
        let port = taken.address().unwrap().port();
        let range = PortRange { first: port, last: port };
        let error = Listening::anywhere(protocol, IpFamily::Ipv4, Some(range)).unwrap_err();
        assert_eq!(error.to_string(), format!("portRange ({port}) has no free port left"));
        drop(taken);
        let listening = Listening::anywhere(protocol, IpFamily::Ipv4, Some(range)).unwrap();
        assert_eq!(listening.address().unwrap().port(), port);
    }

    #[test]
    fn both_families_have_a_port() {
        let v4 = Listening::anywhere(Protocol::Tcp, IpFamily::Ipv4, None).unwrap();
        let port = v4.address().unwrap().port();
        let v6 = Listening::on(Protocol::Tcp, SocketAddr::new(unspecified(IpFamily::Ipv6), port)).unwrap();
        assert_eq!(v6.address().unwrap().port(), port);
    }
}
