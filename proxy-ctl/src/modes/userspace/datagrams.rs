//! A socket that learns to which address of the node a datagram was sent, and answers from there.
//! Neither the client nor netfilter would recognize an answer from another address.

use std::{
    io::{self, IoSlice, IoSliceMut},
    net::{IpAddr, SocketAddr, UdpSocket as StdUdpSocket},
    os::fd::AsRawFd as _,
};

use nix::{
    cmsg_space,
    sys::socket::{
        ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg, setsockopt,
        sockopt::{Ipv4PacketInfo, Ipv6RecvPacketInfo},
    },
};
use tokio::{io::Interest, net::UdpSocket};

pub(super) struct Datagrams(UdpSocket);

/// A received datagram without its content.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Datagram {
    pub(super) length: usize,
    pub(super) client: SocketAddr,
    /// The address of the node to which it was sent.
    pub(super) node: IpAddr,
}

impl Datagrams {
    /// Wraps a socket, which must not block. It must be called in the runtime.
    pub(super) fn new(socket: StdUdpSocket) -> io::Result<Self> {
        if socket.local_addr()?.is_ipv4() {
            setsockopt(&socket, Ipv4PacketInfo, &true)?;
        } else {
            setsockopt(&socket, Ipv6RecvPacketInfo, &true)?;
        }
        Ok(Self(UdpSocket::from_std(socket)?))
    }

    pub(super) async fn readable(&self) -> io::Result<()> {
        self.0.readable().await
    }

    /// Receives a datagram. `None`: there is none, or the kernel does not report its source.
    pub(super) fn try_receive(&self, buffer: &mut [u8]) -> io::Result<Option<Datagram>> {
        let received = self.0.try_io(Interest::READABLE, || {
            let mut parts = [IoSliceMut::new(buffer)];
            let mut control = cmsg_space!(libc::in6_pktinfo);
            let message = recvmsg::<SockaddrStorage>(
                self.0.as_raw_fd(),
                &mut parts,
                Some(&mut control),
                MsgFlags::empty(),
            )?;
            let node = message.cmsgs()?.find_map(|message| address_in(&message));
            let client = message.address.as_ref().and_then(socket_address);
            let datagram = |(client, node)| Datagram { length: message.bytes, client, node };
            Ok(client.zip(node).map(datagram))
        });
        match received {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            received => received,
        }
    }

    /// Sends a datagram from this address of the node. It does not wait.
    pub(super) fn try_send(&self, content: &[u8], client: SocketAddr, node: IpAddr) -> io::Result<()> {
        let parts = [IoSlice::new(content)];
        let to = SockaddrStorage::from(client);
        let send = |control: ControlMessage<'_>| {
            sendmsg(self.0.as_raw_fd(), &parts, &[control], MsgFlags::empty(), Some(&to))
        };
        let sent = match node {
            IpAddr::V4(node) => send(ControlMessage::Ipv4PacketInfo(&libc::in_pktinfo {
                ipi_ifindex: 0,
                ipi_spec_dst: libc::in_addr { s_addr: u32::from_ne_bytes(node.octets()) },
                ipi_addr: libc::in_addr { s_addr: 0 },
            })),
            IpAddr::V6(node) => send(ControlMessage::Ipv6PacketInfo(&libc::in6_pktinfo {
                ipi6_addr: libc::in6_addr { s6_addr: node.octets() },
                // A link-local address belongs to the interface of the client.
                ipi6_ifindex: match client {
                    SocketAddr::V6(client) => client.scope_id(),
                    SocketAddr::V4(_) => 0,
                },
            })),
        };
        Ok(sent.map(drop)?)
    }
}

fn address_in(message: &ControlMessageOwned) -> Option<IpAddr> {
    if let ControlMessageOwned::Ipv4PacketInfo(info) = message {
        return Some(IpAddr::from(info.ipi_addr.s_addr.to_ne_bytes()));
    }
    if let ControlMessageOwned::Ipv6PacketInfo(info) = message {
        return Some(IpAddr::from(info.ipi6_addr.s6_addr));
    }
    None
}

fn socket_address(address: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = address.as_sockaddr_in().map(|address| SocketAddr::V4((*address).into()));
    v4.or_else(|| address.as_sockaddr_in6().map(|address| SocketAddr::V6((*address).into())))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::ipv4("0.0.0.0:0", "127.0.0.1:0", "127.0.0.7")]
    #[case::ipv6("[::]:0", "[::1]:0", "::1")]
    #[tokio::test]
    async fn a_datagram_is_answered_from_where_it_was_sent_to(
        #[case] any: &str,
        #[case] from: &str,
        #[case] node: IpAddr,
    ) {
        let socket = StdUdpSocket::bind(any).unwrap();
        let port = socket.local_addr().unwrap().port();
        socket.set_nonblocking(true).unwrap();
        let listener = Datagrams::new(socket).unwrap();
        let client = UdpSocket::bind(from).await.unwrap();
        client.send_to(b"hello", (node, port)).await.unwrap();
        let mut buffer = [0; 64];
        let received = loop {
            listener.readable().await.unwrap();
            if let Some(received) = listener.try_receive(&mut buffer).unwrap() {
                break received;
            }
        };
        assert_eq!(received, Datagram { length: 5, client: client.local_addr().unwrap(), node });
        listener.try_send(b"answer", received.client, received.node).unwrap();
        let (length, answered_by) = client.recv_from(&mut buffer).await.unwrap();
        assert_eq!((&buffer[..length], answered_by), (b"answer".as_slice(), SocketAddr::new(node, port)));
    }
}
