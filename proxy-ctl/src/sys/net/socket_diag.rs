//! Sockets of a network namespace by NETLINK_SOCK_DIAG. Lists connected and listening sockets, and
//! ends connected ones.

use std::{io, net::SocketAddr};

use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use nix::sys::socket::AddressFamily;

use super::netlink::{Messages, NLM_F_ACK, NLM_F_DUMP, NetlinkSocket, ip_address, word};
use crate::sys::CallError;

const LIST: u16 = 20;
const DESTROY: u16 = 21;

/// The offset of a socket's id in an answer, behind family, state, timer and retransmissions.
const ID: usize = 4;
/// The length of `inet_diag_sockid`: ports and addresses in network byte order, interface, cookie.
const ID_LENGTH: usize = 48;
/// The offset of the number of bytes that the peer has not acknowledged, in which a FIN counts as
/// one. It is behind the time of expiry and the length of the receive queue.
const UNACKNOWLEDGED: usize = ID + ID_LENGTH + 8;
/// The offset of the inode, behind that number and the user.
const INODE: usize = UNACKNOWLEDGED + 8;

/// States of linux/tcp_states.h.
const FIN_WAIT1: u8 = 4;
const FIN_WAIT2: u8 = 5;
const LAST_ACK: u8 = 9;
const CLOSING: u8 = 11;
/// Datagram sockets without a peer have this state.
const CLOSE: u32 = 1 << 7;
const LISTEN: u32 = 1 << 10;
const SYN_SENT: u32 = 1 << 2;
const SYN_RECEIVED: u32 = 1 << 3;
/// These include ESTABLISHED, which connected UDP sockets have too, and CLOSE_WAIT.
const WITH_PEER: u32 =
    SYN_SENT | 1 << 1 | 1 << FIN_WAIT1 | 1 << FIN_WAIT2 | 1 << 8 | 1 << LAST_ACK | 1 << CLOSING;

/// The transport protocol of a socket.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Transport {
    Tcp,
    Udp,
}

impl Transport {
    /// Returns IANA's number of the protocol.
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
        }
    }

    /// Returns the transport for IANA's number, or `None` for another protocol.
    pub const fn from_number(number: u8) -> Option<Self> {
        match number {
            6 => Some(Self::Tcp),
            17 => Some(Self::Udp),
            _ => None,
        }
    }
}

/// A socket that has a peer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ConnectedSocket {
    transport: Transport,
    family: u8,
    id: [u8; ID_LENGTH],
    /// The cookie, as `bpf_get_socket_cookie` returns it.
    pub cookie: u64,
    pub local: SocketAddr,
    pub peer: SocketAddr,
    /// True if a process has the socket open or will accept it. It is also true if the process has
    /// closed it, but the peer has not received all data yet.
    pub is_open: bool,
}

/// Returns an `inet_diag_req_v2`.
fn header(family: u8, transport: Transport, states: u32, id: &[u8; ID_LENGTH]) -> [u8; 8 + ID_LENGTH] {
    let mut header = [0; 8 + ID_LENGTH];
    (header[0], header[1]) = (family, transport.number());
    header[4..8].copy_from_slice(&states.to_ne_bytes());
    header[8..].copy_from_slice(id);
    header
}

fn list(family: AddressFamily, transport: Transport, states: u32) -> Messages {
    let mut request = Messages::default();
    request.begin(LIST, NLM_F_DUMP, &header(family as u8, transport, states, &[0; ID_LENGTH]));
    request
}

fn destroy(socket: &ConnectedSocket) -> Messages {
    let mut request = Messages::default();
    request.begin(DESTROY, NLM_F_ACK, &header(socket.family, socket.transport, WITH_PEER, &socket.id));
    request
}

fn parse(transport: Transport, answer: &[u8]) -> Option<ConnectedSocket> {
    let family = *answer.first()?;
    let id: [u8; ID_LENGTH] = *answer.get(ID..)?.first_chunk()?;
    let end = |address, port| Some(SocketAddr::new(ip_address(i32::from(family), address)?, port));
    let local = end(&id[4..20], u16::from_be_bytes([id[0], id[1]]))?;
    let peer = end(&id[20..36], u16::from_be_bytes([id[2], id[3]]))?;
    let cookie = u64::from(word(&id, 40)?) | u64::from(word(&id, 44)?) << 32;
    // A socket that is not accepted yet has no inode either, but it is in none of these states.
    let is_closing = [FIN_WAIT1, FIN_WAIT2, LAST_ACK, CLOSING].contains(answer.get(1)?);
    let (unacknowledged, inode) = (word(answer, UNACKNOWLEDGED)?, word(answer, INODE)?);
    let is_open = !is_closing || inode != 0 || unacknowledged > 1;
    Some(ConnectedSocket { transport, family, id, cookie, local, peer, is_open })
}

/// The sockets of one network namespace: that of the thread that opened it.
pub struct SocketDiag(NetlinkSocket);

impl SocketDiag {
    pub fn open() -> Result<Self, CallError> {
        NetlinkSocket::open(NETLINK_SOCK_DIAG).map(Self).map_err(CallError::of("socket(NETLINK_SOCK_DIAG)"))
    }

    /// Returns the connected sockets of `family`, which is Inet or Inet6. Inet6 sockets may have
    /// IPv4-mapped peers. The kernel gives each of them a cookie.
    ///
    /// Returns `ENOENT` if the kernel cannot list this protocol (CONFIG_INET_TCP_DIAG,
    /// CONFIG_INET_UDP_DIAG).
    pub fn connected(
        &self,
        family: AddressFamily,
        transport: Transport,
    ) -> Result<Vec<ConnectedSocket>, CallError> {
        self.list(family, transport, WITH_PEER)
    }

    /// Returns the TCP sockets of [`Self::connected`], and those whose handshake is not over.
    pub fn connections(&self, family: AddressFamily) -> Result<Vec<ConnectedSocket>, CallError> {
        self.list(family, Transport::Tcp, WITH_PEER | SYN_RECEIVED)
    }

    /// Returns the addresses where sockets of `family` accept connections, or receive datagrams
    /// from any peer. A socket for every address has the unspecified one. Errors are as for
    /// [`Self::connected`].
    pub fn listening(
        &self,
        family: AddressFamily,
        transport: Transport,
    ) -> Result<Vec<SocketAddr>, CallError> {
        let state = match transport {
            Transport::Tcp => LISTEN,
            Transport::Udp => CLOSE,
        };
        let sockets = self.list(family, transport, state)?;
        Ok(sockets.into_iter().map(|socket| socket.local).collect())
    }

    fn list(
        &self,
        family: AddressFamily,
        transport: Transport,
        states: u32,
    ) -> Result<Vec<ConnectedSocket>, CallError> {
        let sockets = self.0.dump(&list(family, transport, states), |_, answer| parse(transport, answer));
        sockets.map_err(CallError::of("netlink SOCK_DIAG_BY_FAMILY"))
    }

    /// Ends a socket. A process that reads or polls gets ECONNABORTED. One that sends datagrams
    /// before that gets EDESTADDRREQ. A TCP peer gets a RST.
    ///
    /// The kernel finds the socket by its ends and compares the cookie. Returns false if it is gone
    /// or is no longer connected to this peer. Also returns false if another socket with the same
    /// ends (SO_REUSEPORT) was found instead.
    ///
    /// Needs CAP_NET_ADMIN in the user namespace that owns the network namespace. Returns
    /// `EOPNOTSUPP` if the kernel cannot end sockets (CONFIG_INET_DIAG_DESTROY).
    pub fn destroy(&self, socket: &ConnectedSocket) -> Result<bool, CallError> {
        done(self.0.request(&destroy(socket), |_, _| ()))
    }
}

fn done(answer: io::Result<()>) -> Result<bool, CallError> {
    match answer {
        Ok(()) => Ok(true),
        // ESTALE means that another socket has these ends.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESTALE)) => Ok(false),
        Err(error) => Err(CallError::new("netlink SOCK_DESTROY", error)),
    }
}

/// Returns the option of the kernel's configuration that is missing to end connected sockets. Ends
/// no socket.
pub fn lacks(transport: Transport) -> Result<Option<&'static str>, CallError> {
    let diag = SocketDiag::open()?;
    let mut request = Messages::default();
    // No socket has port 0.
    let nobody = header(AddressFamily::Inet as u8, transport, SYN_SENT, &[0; ID_LENGTH]);
    request.begin(DESTROY, NLM_F_ACK, &nobody);
    match done(diag.0.request(&request, |_, _| ())) {
        Err(error) if error.errno() == libc::EOPNOTSUPP => return Ok(Some("CONFIG_INET_DIAG_DESTROY")),
        result => result?,
    };
    let mut request = Messages::default();
    request.begin(LIST, NLM_F_DUMP, &nobody);
    match diag.0.request(&request, |_, _| ()) {
        Ok(()) => Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(Some(match transport {
            Transport::Tcp => "CONFIG_INET_TCP_DIAG",
            Transport::Udp => "CONFIG_INET_UDP_DIAG",
        })),
        Err(error) => Err(CallError::new("netlink SOCK_DIAG_BY_FAMILY", error)),
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use rstest::rstest;

    use super::*;
    use crate::sys::net::namespace::socket_cookie;

    #[test]
    fn a_listed_socket_is_named_by_all_that_the_kernel_says_of_it() {
        // The answer lists the socket 10.1.0.5:4000 → 10.1.0.9:5353.
        let mut answer = vec![0; INODE + 4];
        (answer[0], answer[1]) = (libc::AF_INET as u8, 1);
        let id = &mut answer[ID..];
        id[0..2].copy_from_slice(&4000_u16.to_be_bytes());
        id[2..4].copy_from_slice(&5353_u16.to_be_bytes());
        id[4..8].copy_from_slice(&[10, 1, 0, 5]);
        id[20..24].copy_from_slice(&[10, 1, 0, 9]);
        id[40..44].copy_from_slice(&7_u32.to_ne_bytes());
        id[44..48].copy_from_slice(&1_u32.to_ne_bytes());
        let socket = parse(Transport::Udp, &answer).unwrap();
        assert_eq!((socket.peer.to_string().as_str(), socket.cookie), ("10.1.0.9:5353", 1 << 32 | 7));
        assert_eq!(socket.local.to_string(), "10.1.0.5:4000");
        let request = destroy(&socket);
        // The request has the netlink header, family and protocol, the states, and then the id with
        // the cookie at its end.
        assert_eq!(request.bytes()[16..18], [libc::AF_INET as u8, 17]);
        assert_eq!(request.bytes()[24..], answer[ID..ID + ID_LENGTH]);
        assert!((0..answer.len()).all(|length| parse(Transport::Udp, &answer[..length]).is_none()));
    }

    #[test]
    fn a_request_names_family_protocol_and_states() {
        let request = list(AddressFamily::Inet6, Transport::Tcp, WITH_PEER);
        assert_eq!(request.bytes()[16..18], [libc::AF_INET6 as u8, 6]);
        // The states leave out TIME_WAIT, CLOSE, LISTEN and the sockets of a handshake.
        assert_eq!(request.bytes()[20..24], 0b1011_0011_0110_u32.to_ne_bytes());
    }

    #[rstest]
    #[case::established(1, 4711, 0, true)]
    #[case::not_accepted_yet(1, 0, 0, true)]
    #[case::in_the_handshake(3, 0, 0, true)]
    #[case::not_accepted_and_closed_by_its_peer(8, 0, 0, true)]
    #[case::shut_down(FIN_WAIT2, 4711, 0, true)]
    #[case::closed(FIN_WAIT2, 0, 0, false)]
    #[case::closed_before_the_peer_has_all(FIN_WAIT1, 0, 1_449, true)]
    #[case::closed_and_the_peer_has_not_said_so(FIN_WAIT1, 0, 1, false)]
    #[case::closed_after_its_peer(LAST_ACK, 0, 1, false)]
    fn sockets_that_somebody_has_open(
        #[case] state: u8,
        #[case] inode: u32,
        #[case] unacknowledged: u32,
        #[case] expected: bool,
    ) {
        let mut answer = vec![0; INODE + 4];
        (answer[0], answer[1]) = (libc::AF_INET as u8, state);
        answer[UNACKNOWLEDGED..][..4].copy_from_slice(&unacknowledged.to_ne_bytes());
        answer[INODE..].copy_from_slice(&inode.to_ne_bytes());
        assert_eq!(parse(Transport::Tcp, &answer).unwrap().is_open, expected);
    }

    fn find(transport: Transport, local: SocketAddr) -> Option<ConnectedSocket> {
        let mut all = SocketDiag::open().unwrap().connected(AddressFamily::Inet, transport).unwrap();
        all.retain(|socket| socket.local == local);
        all.pop()
    }

    #[test]
    fn who_listens_is_listed_with_the_address() {
        let (listener, socket) =
            (TcpListener::bind("127.0.0.3:0").unwrap(), UdpSocket::bind("127.0.0.3:0").unwrap());
        let (tcp, udp) = (listener.local_addr().unwrap(), socket.local_addr().unwrap());
        let listening =
            |transport| SocketDiag::open().unwrap().listening(AddressFamily::Inet, transport).unwrap();
        assert!(listening(Transport::Tcp).contains(&tcp) && !listening(Transport::Udp).contains(&tcp));
        assert!(listening(Transport::Udp).contains(&udp) && !listening(Transport::Tcp).contains(&udp));
    }

    #[test]
    fn the_kernel_says_what_it_lacks() {
        assert_eq!(lacks(Transport::Udp).unwrap(), None);
        assert_eq!(lacks(Transport::Tcp).unwrap(), None);
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_a_socket_is_ended_and_no_other_with_its_ends() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.connect(server.local_addr().unwrap()).unwrap();
        let found = find(Transport::Udp, client.local_addr().unwrap()).unwrap();
        assert_eq!(found.peer, server.local_addr().unwrap());
        assert_eq!(found.cookie, socket_cookie(&client).unwrap());
        let diag = SocketDiag::open().unwrap();
        let mut another = found;
        another.id[40] ^= 1;
        assert!(!diag.destroy(&another).unwrap());
        assert_eq!(client.send(b"x").unwrap(), 1);
        assert!(diag.destroy(&found).unwrap());
        assert_eq!(client.recv(&mut [0]).unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
        assert_eq!(client.send(b"x").unwrap_err().raw_os_error(), Some(libc::EDESTADDRREQ));
        assert!(!diag.destroy(&found).unwrap());
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_a_connection_is_reset() {
        use std::io::Read as _;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let found = find(Transport::Tcp, client.local_addr().unwrap()).unwrap();
        assert!(SocketDiag::open().unwrap().destroy(&found).unwrap());
        assert_eq!(client.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
        assert_eq!(server.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }
}
