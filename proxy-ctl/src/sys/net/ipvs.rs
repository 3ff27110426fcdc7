//! Virtual servers of IPVS: lists, writes, quiesces and removes them.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use super::{
    generic_netlink::{self, GenericFamily, HEADER},
    netlink::{Attributes, Messages, NLM_F_ACK, NLM_F_DUMP, NetlinkSocket, ip_address},
};
use crate::sys::CallError;

const VERSION: u8 = 1;
const NEW_SERVICE: u8 = 1;
const SET_SERVICE: u8 = 2;
const DEL_SERVICE: u8 = 3;
const GET_SERVICE: u8 = 4;
const NEW_DEST: u8 = 5;
const SET_DEST: u8 = 6;
const DEL_DEST: u8 = 7;
const GET_DEST: u8 = 8;
const SET_CONFIG: u8 = 12;
const SERVICE: u16 = 1;
const DEST: u16 = 2;
const TIMEOUT_TCP: u16 = 4;
const TIMEOUT_TCP_FIN: u16 = 5;
const TIMEOUT_UDP: u16 = 6;
const SERVICE_FAMILY: u16 = 1;
const SERVICE_PROTOCOL: u16 = 2;
const SERVICE_ADDRESS: u16 = 3;
const SERVICE_PORT: u16 = 4;
const SERVICE_SCHEDULER: u16 = 6;
const SERVICE_FLAGS: u16 = 7;
const SERVICE_TIMEOUT: u16 = 8;
const SERVICE_NETMASK: u16 = 9;
const DEST_ADDRESS: u16 = 1;
const DEST_PORT: u16 = 2;
const DEST_FORWARDING: u16 = 3;
const DEST_WEIGHT: u16 = 4;
const DEST_UPPER: u16 = 5;
const DEST_LOWER: u16 = 6;
const DEST_ACTIVE: u16 = 7;
const DEST_INACTIVE: u16 = 8;
const DEST_FAMILY: u16 = 11;

/// `IP_VS_SVC_F_PERSISTENT`.
const PERSISTENT: u32 = 1;
/// `IP_VS_SVC_F_HASHED`, a flag that the kernel keeps for itself.
const HASHED: u32 = 2;
/// `IP_VS_SVC_F_SCHED_MH_PORT`, `IP_VS_SVC_F_SCHED_SH_PORT`.
const BY_SOURCE_PORT: u32 = 1 << 4;
/// `IP_VS_CONN_F_MASQ`: the forwarding method that translates the destination.
const MASQUERADING: u32 = 0;

fn header(command: u8) -> [u8; HEADER] {
    generic_netlink::header(command, VERSION)
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct VirtualServer {
    pub socket: VirtualSocket,
    pub balancing: Balancing,
}

/// The way in which a virtual server chooses a destination.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Balancing {
    /// The scheduler: `rr`, `wrr`, `lc` and so on. The kernel loads the module `ip_vs_<scheduler>`.
    pub scheduler: Arc<str>,
    /// The number of seconds for which a client's connections, from any port, keep their
    /// destination. The time begins anew with each connection of the client.
    pub affinity_seconds: Option<u32>,
    /// True if schedulers that hash also take the client's port.
    pub by_source_port: bool,
}

#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct VirtualSocket {
    /// IANA's number of the protocol.
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
    pub address: SocketAddr,
    /// True if new connections go to the destination.
    pub is_used: bool,
    /// The number of connections that the kernel knows. A TCP connection counts until some time
    /// after its end, and a UDP one until nothing has come for some time.
    ///
    /// UDP connections, and TCP connections that one end has closed, are what the kernel calls
    /// inactive.
    pub connections: u32,
}

/// A change to write.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum ServerChange {
    Create(VirtualSocket, Balancing),
    /// Changes a virtual server that exists. Its connections and destinations stay.
    Set(VirtualSocket, Balancing),
    /// Removes a virtual server. Its connections end with their next packet.
    Remove(VirtualSocket),
    /// Adds a destination that gets new connections.
    AddDestination(VirtualSocket, SocketAddr),
    /// Sets whether an existing destination gets new connections.
    UseDestination(VirtualSocket, SocketAddr, bool),
    /// Removes a destination. Its connections end with their next packet if
    /// `net/ipv4/vs/expire_nodest_conn` is set.
    RemoveDestination(VirtualSocket, SocketAddr),
}

impl ServerChange {
    pub const fn socket(&self) -> VirtualSocket {
        match self {
            Self::Create(socket, _)
            | Self::Set(socket, _)
            | Self::Remove(socket)
            | Self::AddDestination(socket, _)
            | Self::UseDestination(socket, _, _)
            | Self::RemoveDestination(socket, _) => *socket,
        }
    }

    const fn call(&self) -> (u8, &'static str) {
        match self {
            Self::Create(..) => (NEW_SERVICE, "netlink IPVS_CMD_NEW_SERVICE"),
            Self::Set(..) => (SET_SERVICE, "netlink IPVS_CMD_SET_SERVICE"),
            Self::Remove(_) => (DEL_SERVICE, "netlink IPVS_CMD_DEL_SERVICE"),
            Self::AddDestination(..) => (NEW_DEST, "netlink IPVS_CMD_NEW_DEST"),
            Self::UseDestination(..) => (SET_DEST, "netlink IPVS_CMD_SET_DEST"),
            Self::RemoveDestination(..) => (DEL_DEST, "netlink IPVS_CMD_DEL_DEST"),
        }
    }

    const fn removes(&self) -> bool {
        matches!(self, Self::Remove(_) | Self::RemoveDestination(..))
    }

    fn write(&self, ipvs_family: u16, to: &mut Messages) {
        let socket = self.socket();
        to.begin(ipvs_family, 0, &header(self.call().0)).nested(SERVICE, |service| {
            write_socket(socket, service);
            if let Self::Create(_, balancing) | Self::Set(_, balancing) = self {
                write_balancing(socket, balancing, service);
            }
        });
        match self {
            Self::Create(..) | Self::Set(..) | Self::Remove(_) => {}
            Self::AddDestination(_, address) => write_destination(*address, true, to),
            Self::UseDestination(_, address, is_used) => write_destination(*address, *is_used, to),
            Self::RemoveDestination(_, address) => write_destination(*address, false, to),
        }
    }
}

fn write_socket(socket: VirtualSocket, service: &mut Messages) {
    service
        .attribute(SERVICE_FAMILY, &family(socket.address).to_ne_bytes())
        .attribute(SERVICE_PROTOCOL, &socket.protocol.to_ne_bytes())
        .attribute(SERVICE_ADDRESS, &padded(socket.address.ip()))
        .attribute(SERVICE_PORT, &socket.address.port().to_be_bytes());
}

fn write_balancing(socket: VirtualSocket, balancing: &Balancing, service: &mut Messages) {
    let mut flags = 0;
    if balancing.affinity_seconds.is_some() {
        flags |= PERSISTENT;
    }
    if balancing.by_source_port {
        flags |= BY_SOURCE_PORT;
    }
    // `ip_vs_flags` has the values, and a mask of those that count.
    let flags = [flags.to_ne_bytes(), u32::MAX.to_ne_bytes()].concat();
    // The netmask groups client addresses: all bits for IPv4, the length of the prefix for IPv6.
    let netmask = if socket.address.is_ipv4() { u32::MAX } else { 128 };
    service
        .text(SERVICE_SCHEDULER, &balancing.scheduler)
        .attribute(SERVICE_FLAGS, &flags)
        .attribute(SERVICE_TIMEOUT, &balancing.affinity_seconds.unwrap_or(0).to_ne_bytes())
        .attribute(SERVICE_NETMASK, &netmask.to_ne_bytes());
}

fn write_destination(address: SocketAddr, is_used: bool, to: &mut Messages) {
    to.nested(DEST, |destination| {
        destination
            .attribute(DEST_ADDRESS, &padded(address.ip()))
            .attribute(DEST_PORT, &address.port().to_be_bytes())
            .attribute(DEST_FORWARDING, &MASQUERADING.to_ne_bytes())
            .attribute(DEST_WEIGHT, &u32::from(is_used).to_ne_bytes())
            .attribute(DEST_UPPER, &0_u32.to_ne_bytes())
            .attribute(DEST_LOWER, &0_u32.to_ne_bytes())
            .attribute(DEST_FAMILY, &family(address).to_ne_bytes());
    });
}

fn family(address: SocketAddr) -> u16 {
    (if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 }) as u16
}

/// Returns an `nf_inet_addr`.
fn padded(address: IpAddr) -> [u8; 16] {
    let mut padded = [0; 16];
    match address {
        IpAddr::V4(address) => padded[..4].copy_from_slice(&address.octets()),
        IpAddr::V6(address) => padded = address.octets(),
    }
    padded
}

/// The seconds after which a connection without packets is forgotten. 0 leaves a timeout as it is.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Timeouts {
    pub tcp: u32,
    pub tcp_fin: u32,
    pub udp: u32,
}

/// A connection to IPVS in this thread's network namespace. Needs CAP_NET_ADMIN there.
pub struct Ipvs {
    connection: NetlinkSocket,
    family: u16,
}

impl Ipvs {
    /// Opens a connection. Returns `None` if the kernel has no IPVS or its module is not loaded.
    pub fn open() -> Result<Option<Self>, CallError> {
        let family = GenericFamily::open("IPVS")?;
        Ok(family.map(|GenericFamily { connection, id: family }| Self { connection, family }))
    }

    pub fn servers(&self) -> Result<Vec<VirtualServer>, CallError> {
        let mut request = Messages::default();
        request.begin(self.family, NLM_F_DUMP, &header(GET_SERVICE));
        let parse = |_, body: &[u8]| server(Attributes(body.get(HEADER..)?).nested(SERVICE)?);
        self.connection.dump(&request, parse).map_err(CallError::of("netlink IPVS_CMD_GET_SERVICE"))
    }

    /// Writes every change that the kernel accepts, and returns those that it has refused, by
    /// index. Removing what is not there is no error.
    pub fn write(&self, changes: &[ServerChange]) -> Result<Vec<(usize, CallError)>, CallError> {
        let refused = self
            .connection
            .send_each(changes, |change, to| change.write(self.family, to))
            .map_err(CallError::of("netlink of IPVS"))?;
        let errors = refused.into_iter().filter_map(|(index, errno)| {
            let change = changes.get(index)?;
            let error = io::Error::from_raw_os_error(errno);
            let is_done = change.removes() && is_gone(&error);
            (!is_done).then(|| (index, CallError::new(change.call().1, error)))
        });
        Ok(errors.collect())
    }

    pub fn set_timeouts(&self, timeouts: Timeouts) -> Result<(), CallError> {
        let mut request = Messages::default();
        request
            .begin(self.family, NLM_F_ACK, &header(SET_CONFIG))
            .attribute(TIMEOUT_TCP, &timeouts.tcp.to_ne_bytes())
            .attribute(TIMEOUT_TCP_FIN, &timeouts.tcp_fin.to_ne_bytes())
            .attribute(TIMEOUT_UDP, &timeouts.udp.to_ne_bytes());
        self.connection.request(&request, |_, _| ()).map_err(CallError::of("netlink IPVS_CMD_SET_CONFIG"))
    }

    /// Returns the destinations of the virtual server for `socket`. The list is empty if there is
    /// no such server.
    pub fn destinations(&self, socket: VirtualSocket) -> Result<Vec<Destination>, CallError> {
        let mut request = Messages::default();
        request
            .begin(self.family, NLM_F_DUMP, &header(GET_DEST))
            .nested(SERVICE, |service| write_socket(socket, service));
        let parse = |_, body: &[u8]| destination(Attributes(body.get(HEADER..)?).nested(DEST)?);
        match self.connection.dump(&request, parse) {
            Err(error) if is_gone(&error) => Ok(Vec::new()),
            destinations => destinations.map_err(CallError::of("netlink IPVS_CMD_GET_DEST")),
        }
    }
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ESRCH | libc::ENOENT))
}

/// Parses a virtual server. Returns `None` for one that matches packets by fwmark, which no proxy
/// makes.
fn server(server: Attributes<'_>) -> Option<VirtualServer> {
    let family = u16::from_ne_bytes(*server.get(SERVICE_FAMILY)?.first_chunk()?);
    let address = ip_address(family.into(), server.get(SERVICE_ADDRESS)?)?;
    let port = u16::from_be_bytes(*server.get(SERVICE_PORT)?.first_chunk()?);
    let protocol = u16::from_ne_bytes(*server.get(SERVICE_PROTOCOL)?.first_chunk()?);
    let socket = VirtualSocket { protocol, address: SocketAddr::new(address, port) };
    let number =
        |kind| server.get(kind).and_then(|value| value.first_chunk()).map(|value| u32::from_ne_bytes(*value));
    let flags = number(SERVICE_FLAGS).unwrap_or(0) & !HASHED;
    let balancing = Balancing {
        scheduler: server.text(SERVICE_SCHEDULER).unwrap_or_default().into(),
        affinity_seconds: (flags & PERSISTENT != 0).then(|| number(SERVICE_TIMEOUT).unwrap_or(0)),
        by_source_port: flags & BY_SOURCE_PORT != 0,
    };
    Some(VirtualServer { socket, balancing })
}

fn destination(destination: Attributes<'_>) -> Option<Destination> {
    let number = |kind| Some(u32::from_ne_bytes(*destination.get(kind)?.first_chunk()?));
    let bytes = destination.get(DEST_ADDRESS)?;
    // The kernel sends this attribute since Linux 3.18.
    let family = u16::from_ne_bytes(*destination.get(DEST_FAMILY)?.first_chunk()?);
    let port = u16::from_be_bytes(*destination.get(DEST_PORT)?.first_chunk()?);
    Some(Destination {
        address: SocketAddr::new(ip_address(family.into(), bytes)?, port),
        is_used: number(DEST_WEIGHT)? != 0,
        connections: number(DEST_ACTIVE)?.saturating_add(number(DEST_INACTIVE)?),
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::{Duration, Instant};

    use nix::sched::{CloneFlags, unshare};
    use rstest::rstest;

    use super::*;

    /// Returns the kernel's listing of `10.96.0.1:443 mh persistent 10800`, with the attributes
    /// that are read.
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
                .text(SERVICE_SCHEDULER, "mh")
                .attribute(
                    SERVICE_FLAGS,
                    &[PERSISTENT | HASHED | BY_SOURCE_PORT, u32::MAX].map(u32::to_ne_bytes).concat(),
                )
                .attribute(SERVICE_TIMEOUT, &10_800_u32.to_ne_bytes());
        });
        messages
    }

    #[test]
    fn a_virtual_server_as_the_kernel_lists_it() {
        let listed = listed();
        let body = &listed.bytes()[16 + HEADER..];
        let server = server(Attributes(body).nested(SERVICE).unwrap()).unwrap();
        assert_eq!(server.socket.to_string(), "10.96.0.1:443/TCP");
        let balancing =
            Balancing { scheduler: "mh".into(), affinity_seconds: Some(10_800), by_source_port: true };
        assert_eq!(server.balancing, balancing);
    }

    #[test]
    fn a_real_server_as_the_kernel_lists_it() {
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
            .attribute(DEST_INACTIVE, &2_u32.to_ne_bytes())
            .attribute(DEST_FAMILY, &2_u16.to_ne_bytes());
        let expected = Destination { address: ([10; 4], 80).into(), is_used: true, connections: 5 };
        assert_eq!(destination(Attributes(&messages.bytes()[16..])), Some(expected));
    }

    pub(crate) fn round_robin() -> Balancing {
        Balancing { scheduler: "rr".into(), affinity_seconds: None, by_source_port: false }
    }

    /// Opens IPVS in a network namespace that ends with the test's thread. Returns `None` if IPVS
    /// is not available, and prints that the test is skipped.
    pub(crate) fn of_own_namespace() -> Option<Ipvs> {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let ipvs = Ipvs::open().unwrap();
        if ipvs.is_none() {
            println!("skipped: the kernel's ip_vs (CONFIG_IP_VS) is not loaded");
        }
        ipvs
    }

    /// Makes `socket` lead to each of `real` in turn, by TCP.
    pub(crate) fn serve(ipvs: &Ipvs, socket: &str, real: &[SocketAddr]) {
        let socket = VirtualSocket { protocol: 6, address: socket.parse().unwrap() };
        let mut changes = vec![ServerChange::Create(socket, round_robin())];
        changes.extend(real.iter().map(|real| ServerChange::AddDestination(socket, *real)));
        let refused = ipvs.write(&changes).unwrap();
        assert!(refused.is_empty(), "{refused:?}");
    }

    /// Waits until none of the server's connections is known. The kernel knows a connection that
    /// was reset for another 10 seconds.
    pub(crate) fn forgotten(ipvs: &Ipvs, socket: VirtualSocket) {
        let limit = Instant::now() + Duration::from_mins(1);
        while ipvs.destinations(socket).unwrap().iter().any(|destination| destination.connections > 0) {
            assert!(Instant::now() < limit, "its connections are known for ever");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    #[rstest]
    #[case::ipv4("10.96.0.1:443", ["10.244.0.1:8443", "10.244.1.1:8443"])]
    #[case::ipv6("[fd00:96::1]:443", ["[fd00:244::1]:8443", "[fd00:244:1::1]:8443"])]
    #[ignore = "needs root"]
    fn as_root_what_is_written_is_listed(#[case] virtual_socket: &str, #[case] real: [&str; 2]) {
        let Some(ipvs) = of_own_namespace() else { return };
        // Without any address, the kernel takes every IPv4 destination for a broadcast address.
        let status = std::process::Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap();
        assert!(status.success());
        let [one, other] = real.map(|real| real.parse::<SocketAddr>().unwrap());
        let sockets = [libc::IPPROTO_TCP, libc::IPPROTO_UDP, libc::IPPROTO_SCTP].map(|protocol| {
            VirtualSocket { protocol: protocol as u16, address: virtual_socket.parse().unwrap() }
        });
        for socket in sockets {
            let hashing =
                Balancing { scheduler: "mh".into(), affinity_seconds: Some(600), by_source_port: true };
            let written = |changes: &[ServerChange]| {
                let refused = ipvs.write(changes).unwrap();
                assert!(refused.is_empty(), "{refused:?}");
            };
            written(&[
                ServerChange::Create(socket, round_robin()),
                ServerChange::AddDestination(socket, one),
                ServerChange::AddDestination(socket, other),
                ServerChange::UseDestination(socket, other, false),
                ServerChange::Set(socket, hashing.clone()),
            ]);
            let servers = ipvs.servers().unwrap();
            let [server] = &servers[..] else { panic!("{servers:?}") };
            assert_eq!((server.socket, &server.balancing), (socket, &hashing));
            let mut listed = ipvs.destinations(socket).unwrap();
            listed.sort_by_key(|destination| destination.address);
            let listed: Vec<_> =
                listed.iter().map(|one| (one.address, one.is_used, one.connections)).collect();
            assert_eq!(listed, [(one, true, 0), (other, false, 0)]);
            written(&[
                ServerChange::UseDestination(socket, other, true),
                ServerChange::RemoveDestination(socket, one),
            ]);
            let listed: Vec<_> =
                ipvs.destinations(socket).unwrap().iter().map(|one| (one.address, one.is_used)).collect();
            assert_eq!(listed, [(other, true)]);
            written(&[ServerChange::Remove(socket), ServerChange::Remove(socket)]);
        }
        assert_eq!(ipvs.servers().unwrap(), []);
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_a_refusal_names_its_change_and_hinders_no_other() {
        let Some(ipvs) = of_own_namespace() else { return };
        let socket = |port| VirtualSocket { protocol: 6, address: ([10, 96, 0, 1], port).into() };
        let odd = Balancing { scheduler: "odd".into(), ..round_robin() };
        let changes: Vec<ServerChange> = (1..=1000)
            .map(|port| {
                ServerChange::Create(socket(port), if port == 300 { odd.clone() } else { round_robin() })
            })
            .collect();
        let refused = ipvs.write(&changes).unwrap();
        let [(299, error)] = &refused[..] else { panic!("{refused:?}") };
        assert_eq!(error.errno(), libc::ENOENT);
        assert_eq!(ipvs.servers().unwrap().len(), 999);
    }

    /// Returns the timeouts that the kernel reports.
    fn read_timeouts(ipvs: &Ipvs) -> Timeouts {
        const GET_CONFIG: u8 = 13;
        let mut request = Messages::default();
        request.begin(ipvs.family, NLM_F_ACK, &header(GET_CONFIG));
        let mut read = None;
        let take = |_, body: &[u8]| {
            let Some(attributes) = body.get(HEADER..).map(Attributes) else { return };
            let seconds = |kind| Some(u32::from_ne_bytes(*attributes.get(kind)?.first_chunk()?));
            read = read.or_else(|| {
                let (tcp, tcp_fin, udp) =
                    (seconds(TIMEOUT_TCP)?, seconds(TIMEOUT_TCP_FIN)?, seconds(TIMEOUT_UDP)?);
                Some(Timeouts { tcp, tcp_fin, udp })
            });
        };
        ipvs.connection.request(&request, take).unwrap();
        read.unwrap()
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_a_timeout_of_zero_stays_as_it_is() {
        let Some(ipvs) = of_own_namespace() else { return };
        let before = read_timeouts(&ipvs);
        ipvs.set_timeouts(Timeouts { tcp: 310, tcp_fin: 0, udp: 31 }).unwrap();
        assert_eq!(read_timeouts(&ipvs), Timeouts { tcp: 310, udp: 31, ..before });
    }
}
