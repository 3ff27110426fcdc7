//! Virtual servers of IPVS: listed, quiesced and removed.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use netlink_sys::protocols::NETLINK_GENERIC;

use super::{
    CallError,
    netlink::{Attributes, Connection, Messages, NLM_F_ACK, NLM_F_DUMP},
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
    pub address: Option<IpAddr>,
}

/// A real server behind a virtual one.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Destination {
    key: Key,
    /// New connections go to it.
    is_used: bool,
    active: u32,
}

/// A connection to IPVS of this thread's network namespace. Needs CAP_NET_ADMIN there.
pub struct Ipvs {
    connection: Connection,
    family: u16,
}

fn failed(call: &'static str) -> impl FnOnce(io::Error) -> CallError {
    move |source| CallError::new(call, source)
}

impl Ipvs {
    /// `None`: the kernel has no IPVS, or its module is not loaded.
    pub fn open() -> Result<Option<Self>, CallError> {
        let connection = Connection::open(NETLINK_GENERIC).map_err(failed("socket(NETLINK_GENERIC)"))?;
        let mut request = Messages::default();
        request.begin(CONTROL, NLM_F_ACK, &header(GET_FAMILY)).text(FAMILY_NAME, "IPVS");
        let mut family = None;
        let answered = connection.request(&request, |_, body| {
            let id = Attributes(body.get(HEADER..).unwrap_or_default()).get(FAMILY_ID);
            family = id.and_then(|id| id.first_chunk()).map(|id| u16::from_ne_bytes(*id));
        });
        match answered {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(failed("netlink CTRL_CMD_GETFAMILY")(error)),
            Ok(()) => Ok(family.map(|family| Self { connection, family })),
        }
    }

    pub fn servers(&self) -> Result<Vec<VirtualServer>, CallError> {
        let mut request = Messages::default();
        request.begin(self.family, NLM_F_DUMP, &header(GET_SERVICE));
        let parse = |_, body: &[u8]| server(Attributes(body.get(HEADER..)?).nested(SERVICE)?);
        self.connection.dump(&request, parse).map_err(failed("netlink IPVS_CMD_GET_SERVICE"))
    }

    /// Sends no new connections to any of its real servers; answers with the number of connections that are under way.
    pub fn quiesce(&self, server: &VirtualServer) -> Result<u64, CallError> {
        let mut request = Messages::default();
        request
            .begin(self.family, NLM_F_DUMP, &header(GET_DEST))
            .nested(SERVICE, |inner| write(&server.key, inner));
        let parse = |_, body: &[u8]| destination(Attributes(body.get(HEADER..)?).nested(DEST)?);
        let destinations = match self.connection.dump(&request, parse) {
            // Gone since it was listed.
            Err(error) if is_gone(&error) => return Ok(0),
            destinations => destinations.map_err(failed("netlink IPVS_CMD_GET_DEST"))?,
        };
        for destination in
            destinations.iter().filter(|destination| destination.is_used && destination.active > 0)
        {
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
        Ok(destinations.iter().map(|destination| u64::from(destination.active)).sum())
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
            Err(error) if !is_gone(&error) => Err(failed(call)(error)),
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
    let address = server.get(SERVICE_ADDRESS).and_then(|bytes| match i32::from(family) {
        libc::AF_INET => Some(Ipv4Addr::from(*bytes.first_chunk::<4>()?).into()),
        libc::AF_INET6 => Some(Ipv6Addr::from(*bytes.first_chunk::<16>()?).into()),
        _ => None,
    });
    Some(VirtualServer {
        key: key(server, &KEY),
        address: address.filter(|_| server.get(SERVICE_MARK).is_none()),
    })
}

fn destination(destination: Attributes<'_>) -> Option<Destination> {
    const KEY: [u16; 6] = [DEST_ADDRESS, DEST_PORT, DEST_FORWARDING, DEST_UPPER, DEST_LOWER, DEST_FAMILY];
    let number = |kind| Some(u32::from_ne_bytes(*destination.get(kind)?.first_chunk()?));
    Some(Destination {
        key: key(destination, &KEY),
        is_used: number(DEST_WEIGHT)? != 0,
        active: number(DEST_ACTIVE)?,
    })
}

#[cfg(test)]
mod tests {
    use std::{
        net::{SocketAddr, TcpListener, TcpStream},
        process::Command,
        time::Duration,
    };

    use nix::sched::{CloneFlags, unshare};

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
        assert_eq!(server.address, Some([10, 96, 0, 1].into()));
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
            .attribute(8, &1_u32.to_ne_bytes());
        let found = destination(Attributes(&messages.bytes()[16..])).unwrap();
        assert!(found.is_used);
        assert_eq!(found.active, 3);
        let kinds: Vec<u16> = found.key.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds, [DEST_ADDRESS, DEST_PORT, DEST_FORWARDING, DEST_UPPER, DEST_LOWER]);
    }

    const NEW_SERVICE: u8 = 1;
    const NEW_DEST: u8 = 5;

    /// 127.0.0.2:80 leads to `real`.
    fn serve(ipvs: &Ipvs, real: SocketAddr) {
        let address = |last: u8| {
            let mut address = [0; 16];
            address[..4].copy_from_slice(&[127, 0, 0, last]);
            address
        };
        let write_key = |service: &mut Messages| {
            service
                .attribute(SERVICE_FAMILY, &2_u16.to_ne_bytes())
                .attribute(SERVICE_PROTOCOL, &6_u16.to_ne_bytes())
                .attribute(SERVICE_ADDRESS, &address(2))
                .attribute(SERVICE_PORT, &80_u16.to_be_bytes());
        };
        let mut request = Messages::default();
        request.begin(ipvs.family, NLM_F_ACK, &header(NEW_SERVICE)).nested(SERVICE, |service| {
            write_key(service);
            service
                .text(6, "rr")
                .attribute(7, &[0, 0, 0, 0, 255, 255, 255, 255])
                .attribute(8, &0_u32.to_ne_bytes())
                .attribute(9, &u32::MAX.to_ne_bytes());
        });
        ipvs.connection.request(&request, |_, _| ()).unwrap();
        let mut request = Messages::default();
        request.begin(ipvs.family, NLM_F_ACK, &header(NEW_DEST)).nested(SERVICE, write_key).nested(
            DEST,
            |dest| {
                dest.attribute(DEST_ADDRESS, &address(1))
                    .attribute(DEST_PORT, &real.port().to_be_bytes())
                    .attribute(DEST_FORWARDING, &0_u32.to_ne_bytes())
                    .attribute(DEST_WEIGHT, &1_u32.to_ne_bytes())
                    .attribute(DEST_UPPER, &0_u32.to_ne_bytes())
                    .attribute(DEST_LOWER, &0_u32.to_ne_bytes());
            },
        );
        ipvs.connection.request(&request, |_, _| ()).unwrap();
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_a_server_with_connections_takes_no_new_ones() {
        // The thread ends with the test, and its network namespace with it.
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let Some(ipvs) = Ipvs::open().unwrap() else {
            println!("skipped: the kernel's ip_vs (CONFIG_IP_VS) is not loaded");
            return;
        };
        assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
        assert_eq!(ipvs.servers().unwrap(), []);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        serve(&ipvs, listener.local_addr().unwrap());
        let servers = ipvs.servers().unwrap();
        let [server] = servers.as_slice() else { panic!("{servers:?}") };
        assert_eq!(server.address, Some([127, 0, 0, 2].into()));

        assert_eq!(ipvs.quiesce(server).unwrap(), 0);
        let dial = || TcpStream::connect_timeout(&([127, 0, 0, 2], 80).into(), Duration::from_secs(2));
        let (client, (accepted, _)) = (dial().unwrap(), listener.accept().unwrap());
        assert_eq!(ipvs.quiesce(server).unwrap(), 1);
        assert!(dial().is_err(), "a new connection is taken");
        assert_eq!(ipvs.servers().unwrap(), servers);
        drop((client, accepted));
        assert_eq!(ipvs.quiesce(server).unwrap(), 0);
        ipvs.remove(server).unwrap();
        assert_eq!(ipvs.servers().unwrap(), []);
        // Once more is no error.
        ipvs.remove(server).unwrap();
        assert_eq!(ipvs.quiesce(server).unwrap(), 0);
    }
}
