//! Ports that refuse connections. Clients of service ports that nobody serves are redirected to
//! them.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use socket2::{Domain, Protocol as IpProtocol, Socket, Type};

use crate::{
    model::objects::{IpFamily, Protocol},
    modes::userspace::plan::unspecified,
};

/// Ports at which everybody is refused: they are held, and nothing listens there.
#[derive(Debug)]
pub(super) struct RefusingPorts {
    ports: BTreeMap<(IpFamily, Protocol), u16>,
    _sockets: Vec<Socket>,
}

impl RefusingPorts {
    pub(super) fn hold(families: &[IpFamily]) -> io::Result<Self> {
        let (mut ports, mut sockets) = (BTreeMap::new(), Vec::new());
        for family in families {
            let any = SocketAddr::new(unspecified(*family), 0);
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                let (kind, number) = match protocol {
                    Protocol::Udp => (Type::DGRAM, IpProtocol::UDP),
                    Protocol::Tcp | Protocol::Sctp => (Type::STREAM, IpProtocol::TCP),
                };
                let socket = Socket::new(Domain::for_address(any), kind, Some(number))?;
                if *family == IpFamily::Ipv6 {
                    socket.set_only_v6(true)?;
                }
                socket.bind(&any.into())?;
                let port = socket.local_addr()?.as_socket().map_or(0, |address| address.port());
                if protocol == Protocol::Udp {
                    // The socket's only peer is itself, and it never sends. So the kernel refuses
                    // the datagrams of all others.
                    let loopback: IpAddr = match family {
                        IpFamily::Ipv4 => Ipv4Addr::LOCALHOST.into(),
                        IpFamily::Ipv6 => Ipv6Addr::LOCALHOST.into(),
                    };
                    socket.connect(&SocketAddr::new(loopback, port).into())?;
                }
                ports.insert((*family, protocol), port);
                sockets.push(socket);
            }
        }
        Ok(Self { ports, _sockets: sockets })
    }

    /// Returns the port. `None`: clients of this IP family or protocol cannot be redirected.
    pub(super) fn port(&self, family: IpFamily, protocol: Protocol) -> Option<u16> {
        self.ports.get(&(family, protocol)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_that_refuse_are_held_and_refuse() {
        let refusing = RefusingPorts::hold(&[IpFamily::Ipv4]).unwrap();
        let port = |protocol| refusing.port(IpFamily::Ipv4, protocol).unwrap();
        let error = std::net::TcpStream::connect(("127.0.0.1", port(Protocol::Tcp))).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        assert!(std::net::TcpListener::bind(("127.0.0.1", port(Protocol::Tcp))).is_err());
        let client = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        client.connect(("127.0.0.1", port(Protocol::Udp))).unwrap();
        client.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
        client.send(b"?").unwrap();
        assert_eq!(client.recv(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }
}
