//! Virtual servers of IPVS: listed, quiesced and removed.

use std::{io, net::SocketAddr};

use netlink_sys::protocols::NETLINK_GENERIC;

use super::{
    CallError,
    netlink::{Attributes, Messages, NLM_F_ACK, NLM_F_DUMP, NetlinkSocket, ip_address},
};

const CONTROL: u16 = 0x10;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;

const VERSION: u8 = 1;
const DEL_SERVICE: u8 = 3;
const GET_SERVICE: u8 = 4;
const SET_DEST: u8 = 6;
const GET_DEST: u8 = 8;
const SERVICE: u16 = 1;
const DEST: u16 = 2;
const SERVICE_FAMILY: u16 = 1;
const SERVICE_PROTOCOL: u16 = 2;
const SERVICE_ADDRESS: u16 = 3;
const SERVICE_PORT: u16 = 4;
const SERVICE_MARK: u16 = 5;
const DEST_ADDRESS: u16 = 1;
const DEST_PORT: u16 = 2;
const DEST_FORWARDING: u16 = 3;
const DEST_WEIGHT: u16 = 4;
const DEST_UPPER: u16 = 5;
const DEST_LOWER: u16 = 6;
const DEST_ACTIVE: u16 = 7;
const DEST_INACTIVE: u16 = 8;
const DEST_FAMILY: u16 = 11;

/// `genlmsghdr`.
fn header(command: u8) -> [u8; 4] {
    [command, VERSION, 0, 0]
}

const HEADER: usize = 4;

/// What the kernel knows a virtual server by: attributes, as it has listed them.
type Key = Vec<(u16, Vec<u8>)>;

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct VirtualServer {
    key: Key,
    /// `None`: it is for packets with a mark.
    pub socket: Option<VirtualSocket>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct VirtualSocket {
    /// IANA's number.
    pub protocol: u16,
    pub address: SocketAddr,
}

impl std::fmt::Display for VirtualSocket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match i32::from(self.protocol) {
            libc::IPPROTO_TCP => write!(f, "{}/TCP", self.address),
            libc::IPPROTO_UDP => write!(f, "{}/UDP", self.address),
            libc::IPPROTO_SCTP => write!(f, "{}/SCTP", self.address),
            other => write!(f, "{}/{other}", self.address),
        }
    }
}

/// A real server behind a virtual one.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Destination {
    key: Key,
    /// New connections go to it.
    pub is_used: bool,
    /// Connections that the kernel knows: of TCP until some time after their end, of UDP until nothing has come for some
    /// time. Those of UDP, and those of TCP that one end has closed, are what it calls inactive.
    pub connections: u32,
}

impl Destination {
    /// As no kernel lists it.
    #[cfg(test)]
    pub(crate) const fn new(is_used: bool, connections: u32) -> Self {
        Self { key: Vec::new(), is_used, connections }
    }
}

/// A connection to IPVS of this thread's network namespace. Needs CAP_NET_ADMIN there.
pub struct Ipvs {
    connection: NetlinkSocket,
    family: u16,
}

impl Ipvs {
    /// `None`: the kernel has no IPVS, or its module is not loaded.
    pub fn open() -> Result<Option<Self>, CallError> {
        let connection =
            NetlinkSocket::open(NETLINK_GENERIC).map_err(CallError::of("socket(NETLINK_GENERIC)"))?;
        let mut request = Messages::default();
        request.begin(CONTROL, NLM_F_ACK, &header(GET_FAMILY)).text(FAMILY_NAME, "IPVS");
        let mut family = None;
        let answered = connection.request(&request, |_, body| {
            let id = Attributes(body.get(HEADER..).unwrap_or_default()).get(FAMILY_ID);
            family = id.and_then(|id| id.first_chunk()).map(|id| u16::from_ne_bytes(*id));
        });
        match answered {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(CallError::of("netlink CTRL_CMD_GETFAMILY")(error)),
            Ok(()) => Ok(family.map(|family| Self { connection, family })),
        }
    }

    pub fn servers(&self) -> Result<Vec<VirtualServer>, CallError> {
        let mut request = Messages::default();
        request.begin(self.family, NLM_F_DUMP, &header(GET_SERVICE));
        let parse = |_, body: &[u8]| server(Attributes(body.get(HEADER..)?).nested(SERVICE)?);
        self.connection.dump(&request, parse).map_err(CallError::of("netlink IPVS_CMD_GET_SERVICE"))
    }

    /// None if the virtual server is gone.
    pub fn destinations(&self, server: &VirtualServer) -> Result<Vec<Destination>, CallError> {
        let mut request = Messages::default();
        request
            .begin(self.family, NLM_F_DUMP, &header(GET_DEST))
            .nested(SERVICE, |inner| write(&server.key, inner));
        let parse = |_, body: &[u8]| destination(Attributes(body.get(HEADER..)?).nested(DEST)?);
        match self.connection.dump(&request, parse) {
            Err(error) if is_gone(&error) => Ok(Vec::new()),
            destinations => destinations.map_err(CallError::of("netlink IPVS_CMD_GET_DEST")),
        }
    }

    /// Sends no new connections to any of `destinations`, the real servers of `server`.
    pub fn quiesce(&self, server: &VirtualServer, destinations: &[Destination]) -> Result<(), CallError> {
        for destination in destinations.iter().filter(|destination| destination.is_used) {
            let mut request = Messages::default();
            request
                .begin(self.family, NLM_F_ACK, &header(SET_DEST))
                .nested(SERVICE, |inner| write(&server.key, inner))
                .nested(DEST, |inner| {
                    write(&destination.key, inner);
                    inner.attribute(DEST_WEIGHT, &0_u32.to_ne_bytes());
                });
            self.command(&request, "netlink IPVS_CMD_SET_DEST")?;
        }
        Ok(())
    }

    /// Ends its connections.
    pub fn remove(&self, server: &VirtualServer) -> Result<(), CallError> {
        let mut request = Messages::default();
        request
            .begin(self.family, NLM_F_ACK, &header(DEL_SERVICE))
            .nested(SERVICE, |inner| write(&server.key, inner));
        self.command(&request, "netlink IPVS_CMD_DEL_SERVICE")
    }

    fn command(&self, request: &Messages, call: &'static str) -> Result<(), CallError> {
        match self.connection.request(request, |_, _| ()) {
            Err(error) if !is_gone(&error) => Err(CallError::of(call)(error)),
            Ok(()) | Err(_) => Ok(()),
        }
    }
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ESRCH | libc::ENOENT))
}

fn write(key: &Key, to: &mut Messages) {
    for (kind, value) in key {
        to.attribute(*kind, value);
    }
}

fn key(of: Attributes<'_>, kinds: &[u16]) -> Key {
    of.filter(|(kind, _)| kinds.contains(kind)).map(|(kind, value)| (kind, value.to_vec())).collect()
}

fn server(server: Attributes<'_>) -> Option<VirtualServer> {
    const KEY: [u16; 5] = [SERVICE_FAMILY, SERVICE_PROTOCOL, SERVICE_ADDRESS, SERVICE_PORT, SERVICE_MARK];
    let family = u16::from_ne_bytes(*server.get(SERVICE_FAMILY)?.first_chunk()?);
    let socket = || {
        let address = ip_address(family.into(), server.get(SERVICE_ADDRESS)?)?;
        let port = u16::from_be_bytes(*server.get(SERVICE_PORT)?.first_chunk()?);
        let protocol = u16::from_ne_bytes(*server.get(SERVICE_PROTOCOL)?.first_chunk()?);
        Some(VirtualSocket { protocol, address: SocketAddr::new(address, port) })
    };
    let marked = server.get(SERVICE_MARK).is_some();
    Some(VirtualServer { key: key(server, &KEY), socket: if marked { None } else { socket() } })
}

fn destination(destination: Attributes<'_>) -> Option<Destination> {
    const KEY: [u16; 6] = [DEST_ADDRESS, DEST_PORT, DEST_FORWARDING, DEST_UPPER, DEST_LOWER, DEST_FAMILY];
    let number = |kind| Some(u32::from_ne_bytes(*destination.get(kind)?.first_chunk()?));
    Some(Destination {
        key: key(destination, &KEY),
        is_used: number(DEST_WEIGHT)? != 0,
        connections: number(DEST_ACTIVE)?.saturating_add(number(DEST_INACTIVE)?),
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{
        net::{IpAddr, SocketAddr},
        time::{Duration, Instant},
    };

    use super::*;

    /// As the kernel lists `10.96.0.1:443 rr` and one real server of it, the parts that are read.
    fn listed() -> Messages {
        let mut messages = Messages::default();
        messages.begin(0x1c, 0, &header(1)).nested(SERVICE, |service| {
            let mut address = [0; 16];
            address[..4].copy_from_slice(&[10, 96, 0, 1]);
            service
                .attribute(SERVICE_FAMILY, &2_u16.to_ne_bytes())
                .attribute(SERVICE_PROTOCOL, &6_u16.to_ne_bytes())
                .attribute(SERVICE_ADDRESS, &address)
                .attribute(SERVICE_PORT, &443_u16.to_be_bytes())
                .text(6, "rr");
        });
        messages
    }

    #[test]
    fn a_virtual_server_is_known_by_what_the_kernel_knows_it_by() {
        let listed = listed();
        let body = &listed.bytes()[16 + HEADER..];
        let server = server(Attributes(body).nested(SERVICE).unwrap()).unwrap();
        assert_eq!(server.socket.unwrap().to_string(), "10.96.0.1:443/TCP");
        let kinds: Vec<u16> = server.key.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds, [SERVICE_FAMILY, SERVICE_PROTOCOL, SERVICE_ADDRESS, SERVICE_PORT]);
    }

    #[test]
    fn a_real_server_keeps_everything_but_its_weight() {
        let mut messages = Messages::default();
        messages
            .begin(0x1c, 0, &[])
            .attribute(DEST_ADDRESS, &[10; 16])
            .attribute(DEST_PORT, &80_u16.to_be_bytes())
            .attribute(DEST_FORWARDING, &0_u32.to_ne_bytes())
            .attribute(DEST_WEIGHT, &1_u32.to_ne_bytes())
            .attribute(DEST_UPPER, &0_u32.to_ne_bytes())
            .attribute(DEST_LOWER, &0_u32.to_ne_bytes())
            .attribute(DEST_ACTIVE, &3_u32.to_ne_bytes())
            .attribute(DEST_INACTIVE, &2_u32.to_ne_bytes());
        let found = destination(Attributes(&messages.bytes()[16..])).unwrap();
        assert!(found.is_used);
        assert_eq!(found.connections, 5);
        let kinds: Vec<u16> = found.key.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds, [DEST_ADDRESS, DEST_PORT, DEST_FORWARDING, DEST_UPPER, DEST_LOWER]);
    }

    const NEW_SERVICE: u8 = 1;
    const NEW_DEST: u8 = 5;

    fn padded(address: IpAddr) -> [u8; 16] {
        let mut padded = [0; 16];
        match address {
            IpAddr::V4(address) => padded[..4].copy_from_slice(&address.octets()),
            IpAddr::V6(address) => padded.copy_from_slice(&address.octets()),
        }
        padded
    }

    fn socket_key(socket: SocketAddr) -> impl Fn(&mut Messages) {
        let family = if socket.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        move |service| {
            service
                .attribute(SERVICE_FAMILY, &(family as u16).to_ne_bytes())
                .attribute(SERVICE_PROTOCOL, &6_u16.to_ne_bytes())
                .attribute(SERVICE_ADDRESS, &padded(socket.ip()))
                .attribute(SERVICE_PORT, &socket.port().to_be_bytes());
        }
    }

    /// `socket` leads to each of `real` in turns, by TCP.
    pub(crate) fn serve(ipvs: &Ipvs, socket: &str, real: &[SocketAddr]) {
        let socket: SocketAddr = socket.parse().unwrap();
        let netmask = if socket.is_ipv4() { u32::MAX } else { 128_u32 };
        let mut request = Messages::default();
        request.begin(ipvs.family, NLM_F_ACK, &header(NEW_SERVICE)).nested(SERVICE, |service| {
            socket_key(socket)(service);
            service
                .text(6, "rr")
                .attribute(7, &[0, 0, 0, 0, 255, 255, 255, 255])
                .attribute(8, &0_u32.to_ne_bytes())
                .attribute(9, &netmask.to_ne_bytes());
        });
        ipvs.connection.request(&request, |_, _| ()).unwrap();
        for real in real {
            let mut request = Messages::default();
            request
                .begin(ipvs.family, NLM_F_ACK, &header(NEW_DEST))
                .nested(SERVICE, socket_key(socket))
                .nested(DEST, |dest| {
                    dest.attribute(DEST_ADDRESS, &padded(real.ip()))
                        .attribute(DEST_PORT, &real.port().to_be_bytes())
                        .attribute(DEST_FORWARDING, &0_u32.to_ne_bytes())
                        .attribute(DEST_WEIGHT, &1_u32.to_ne_bytes())
                        .attribute(DEST_UPPER, &0_u32.to_ne_bytes())
                        .attribute(DEST_LOWER, &0_u32.to_ne_bytes());
                });
            ipvs.connection.request(&request, |_, _| ()).unwrap();
        }
    }

    /// Waits until none of its connections is known. One that was reset is for 10 seconds.
    pub(crate) fn forgotten(ipvs: &Ipvs, server: &VirtualServer) {
        let limit = Instant::now() + Duration::from_mins(1);
        while ipvs.destinations(server).unwrap().iter().any(|destination| destination.connections > 0) {
            assert!(Instant::now() < limit, "its connections are known for ever");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}
