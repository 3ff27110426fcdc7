//! Sets of ipset: lists, writes and destroys them, and reads the version of the protocol.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    path::Path,
};

use ipnet::IpNet;
use netlink_sys::protocols::NETLINK_NETFILTER;

use super::{
    ipvs::VirtualSocket,
    netlink::{Attributes, Messages, NLM_F_ACK, NLM_F_DUMP, NetlinkSocket, ip_address},
};
use crate::sys::CallError;

const SUBSYSTEM: u16 = 6;
const PROTOCOL_COMMAND: u16 = SUBSYSTEM << 8 | 1;
const CREATE: u16 = SUBSYSTEM << 8 | 2;
const DESTROY: u16 = SUBSYSTEM << 8 | 3;
const LIST: u16 = SUBSYSTEM << 8 | 7;
const ADD: u16 = SUBSYSTEM << 8 | 9;
const REMOVE: u16 = SUBSYSTEM << 8 | 10;

const NET_BYTE_ORDER: u16 = 1 << 14;
const PROTOCOL: u16 = 1;
const SET_NAME: u16 = 2;
const TYPE_NAME: u16 = 3;
const REVISION: u16 = 4;
const FAMILY: u16 = 5;
const FLAGS: u16 = 6 | NET_BYTE_ORDER;
const DATA: u16 = 7;
const MEMBERS: u16 = 8;

/// Attributes of a member.
const IP: u16 = 1;
const PORT: u16 = 4;
const PORT_TO: u16 = 5;
const MEMBER_PROTOCOL: u16 = 7;
const LINE: u16 = 9;
const SECOND_IP: u16 = 20;
const SECOND_PREFIX: u16 = 21;
/// Attributes of a new set.
const HASH_SIZE: u16 = 18;
const MOST_MEMBERS: u16 = 19;
/// Attributes within an address.
const IPV4: u16 = 1;
const IPV6: u16 = 2;

/// The version of the protocol that every kernel since 2.6.39 understands.
const VERSION: [u8; 1] = [6];
const NAMES_ONLY: u32 = 1 << 1;
/// An `nfgenmsg` without a family.
const HEADER: [u8; 4] = [0; 4];
/// The revision of the set types that introduced SCTP.
const TYPE_REVISION: u8 = 1;
/// The defaults of `ipset create`. kube-proxy takes a set of another size for another set.
const DEFAULT_HASH_SIZE: u32 = 1024;
const DEFAULT_MOST_MEMBERS: u32 = 65_536;

/// The first of ipset's own error numbers.
const OWN_ERRORS: i32 = 4096;
/// `IPSET_ERR_BUSY`: a rule or another set uses the set.
const BUSY: i32 = 4100;

/// The type of a set, which says what its members are.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum SetKind {
    /// `hash:ip`
    Addresses,
    /// `hash:ip,port`
    Sockets,
    /// `hash:ip,port,ip`
    SocketsAndAddresses,
    /// `hash:ip,port,net`
    SocketsAndNetworks,
    /// `bitmap:port`
    Ports,
}

impl SetKind {
    const fn type_name(self) -> &'static str {
        match self {
            Self::Addresses => "hash:ip",
            Self::Sockets => "hash:ip,port",
            Self::SocketsAndAddresses => "hash:ip,port,ip",
            Self::SocketsAndNetworks => "hash:ip,port,net",
            Self::Ports => "bitmap:port",
        }
    }
}

/// A member of a set.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Member {
    Address(IpAddr),
    Socket(VirtualSocket),
    /// A member of [`SetKind::SocketsAndAddresses`] has a network with the full prefix. A prefix of
    /// length 0 cannot be a member.
    SocketAndNetwork(VirtualSocket, IpNet),
    Port(u16),
}

impl std::fmt::Display for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Socket(socket) => socket.fmt(f),
            Self::SocketAndNetwork(socket, network) => write!(f, "{socket} from {network}"),
            Self::Port(port) => port.fmt(f),
        }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum MemberChange {
    Add(Member),
    Remove(Member),
}

impl MemberChange {
    fn write(self, set: &str, kind: SetKind, to: &mut Messages) {
        let (command, member) = match self {
            Self::Add(member) => (ADD, member),
            Self::Remove(member) => (REMOVE, member),
        };
        // Without NLM_F_EXCL, adding an existing member and removing a missing one are no errors.
        to.begin(command, 0, &HEADER).attribute(PROTOCOL, &VERSION).text(SET_NAME, set).nested(
            DATA,
            |data| {
                match member {
                    Member::Address(address) => write_address(IP, address, data),
                    Member::Socket(socket) => write_socket(socket, data),
                    Member::SocketAndNetwork(socket, network) => {
                        write_socket(socket, data);
                        write_address(SECOND_IP, network.network(), data);
                        if kind == SetKind::SocketsAndNetworks {
                            data.attribute(SECOND_PREFIX, &[network.prefix_len()]);
                        }
                    }
                    Member::Port(port) => {
                        data.attribute(PORT | NET_BYTE_ORDER, &port.to_be_bytes());
                    }
                }
                data.attribute(LINE | NET_BYTE_ORDER, &0_u32.to_be_bytes());
            },
        );
    }
}

fn write_address(kind: u16, address: IpAddr, data: &mut Messages) {
    data.nested(kind, |inner| {
        match address {
            IpAddr::V4(address) => inner.attribute(IPV4 | NET_BYTE_ORDER, &address.octets()),
            IpAddr::V6(address) => inner.attribute(IPV6 | NET_BYTE_ORDER, &address.octets()),
        };
    });
}

fn write_socket(socket: VirtualSocket, data: &mut Messages) {
    write_address(IP, socket.address.ip(), data);
    data.attribute(PORT | NET_BYTE_ORDER, &socket.address.port().to_be_bytes())
        .attribute(MEMBER_PROTOCOL, &[socket.protocol as u8]);
}

/// Parses a member. Returns `None` if it is not a member of this kind.
fn member(kind: SetKind, data: Attributes<'_>) -> Option<Member> {
    let address = |kind| {
        let inner = data.nested(kind)?;
        let of = |family, kind| ip_address(family, inner.get(kind)?);
        of(libc::AF_INET, IPV4).or_else(|| of(libc::AF_INET6, IPV6))
    };
    let port = || Some(u16::from_be_bytes(*data.get(PORT)?.first_chunk()?));
    let socket = || {
        let protocol = u16::from(*data.get(MEMBER_PROTOCOL)?.first()?);
        Some(VirtualSocket { protocol, address: SocketAddr::new(address(IP)?, port()?) })
    };
    Some(match kind {
        SetKind::Addresses => Member::Address(address(IP)?),
        SetKind::Sockets => Member::Socket(socket()?),
        SetKind::SocketsAndAddresses => Member::SocketAndNetwork(socket()?, address(SECOND_IP)?.into()),
        SetKind::SocketsAndNetworks => {
            // The kernel may omit the prefix of a network that is a single address.
            let prefix = data.get(SECOND_PREFIX).and_then(|prefix| prefix.first());
            let network = address(SECOND_IP)?;
            let network = prefix.map_or(Some(network.into()), |prefix| IpNet::new(network, *prefix).ok())?;
            Member::SocketAndNetwork(socket()?, network)
        }
        SetKind::Ports => Member::Port(port()?),
    })
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Destroyed {
    /// The set is gone, or was not there.
    Done,
    InUse,
}

/// A connection to ipset in this thread's network namespace. Needs CAP_NET_ADMIN there.
pub struct IpSets(NetlinkSocket);

impl IpSets {
    /// Opens a connection. Returns `None` if the kernel has no ipset or its module is not loaded.
    pub fn open() -> Result<Option<Self>, CallError> {
        if !Path::new("/sys/module/ip_set").exists() {
            return Ok(None);
        }
        Self::connect().map(Some)
    }

    /// Opens a connection and makes the kernel load its modules, which it does with the first use.
    /// Returns `None` if the kernel has no ipset, or one older than 2.6.39.
    pub fn load() -> Result<Option<Self>, CallError> {
        let sets = match Self::connect() {
            Err(error) if error.errno() == libc::EPROTONOSUPPORT => return Ok(None),
            sets => sets?,
        };
        let mut request = Messages::default();
        request.begin(PROTOCOL_COMMAND, NLM_F_ACK, &HEADER).attribute(PROTOCOL, &VERSION);
        match sets.0.request(&request, |_, _| ()) {
            Ok(()) => Ok(Some(sets)),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(None),
            Err(error) => Err(failed("netlink IPSET_CMD_PROTOCOL", error)),
        }
    }

    fn connect() -> Result<Self, CallError> {
        NetlinkSocket::open(NETLINK_NETFILTER).map(Self).map_err(CallError::of("socket(NETLINK_NETFILTER)"))
    }

    /// Returns the newest protocol that the kernel speaks: 6 since Linux 2.6.39, 7 since 4.20.
    pub fn protocol(&self) -> Result<u8, CallError> {
        const CALL: &str = "netlink IPSET_CMD_PROTOCOL";
        let mut request = Messages::default();
        request.begin(PROTOCOL_COMMAND, NLM_F_ACK, &HEADER).attribute(PROTOCOL, &VERSION);
        let mut protocol = None;
        let read = |_: u16, body: &[u8]| {
            let told = Attributes(body.get(HEADER.len()..).unwrap_or_default()).get(PROTOCOL);
            protocol = told.and_then(|told| told.first().copied());
        };
        self.0.request(&request, read).map_err(CallError::of(CALL))?;
        protocol.ok_or_else(|| CallError::new(CALL, io::ErrorKind::UnexpectedEof.into()))
    }

    pub fn names(&self) -> Result<Vec<String>, CallError> {
        let mut request = Messages::default();
        request
            .begin(LIST, NLM_F_DUMP, &HEADER)
            .attribute(PROTOCOL, &VERSION)
            .attribute(FLAGS, &NAMES_ONLY.to_be_bytes());
        let parse = |_, body: &[u8]| Some(Attributes(body.get(HEADER.len()..)?).text(SET_NAME)?.to_owned());
        self.0.dump(&request, parse).map_err(|error| failed("netlink IPSET_CMD_LIST", error))
    }

    /// Makes a set. `ipv4` is the family of the addresses. Fails if another set has the name, but
    /// not if the same set exists.
    pub fn create(&self, name: &str, kind: SetKind, ipv4: bool) -> Result<(), CallError> {
        let family = match (kind == SetKind::Ports, ipv4) {
            (true, _) => libc::AF_UNSPEC,
            (false, true) => libc::AF_INET,
            (false, false) => libc::AF_INET6,
        };
        let mut request = Messages::default();
        request
            .begin(CREATE, NLM_F_ACK, &HEADER)
            .attribute(PROTOCOL, &VERSION)
            .text(SET_NAME, name)
            .text(TYPE_NAME, kind.type_name())
            .attribute(REVISION, &[TYPE_REVISION])
            .attribute(FAMILY, &[family as u8])
            .nested(DATA, |data| {
                if kind == SetKind::Ports {
                    data.attribute(PORT | NET_BYTE_ORDER, &0_u16.to_be_bytes())
                        .attribute(PORT_TO | NET_BYTE_ORDER, &u16::MAX.to_be_bytes());
                } else {
                    data.attribute(HASH_SIZE | NET_BYTE_ORDER, &DEFAULT_HASH_SIZE.to_be_bytes())
                        .attribute(MOST_MEMBERS | NET_BYTE_ORDER, &DEFAULT_MOST_MEMBERS.to_be_bytes());
                }
            });
        self.0.request(&request, |_, _| ()).map_err(|error| failed("netlink IPSET_CMD_CREATE", error))
    }

    /// Returns the members of a set, or `None` if there is no such set.
    pub fn members(&self, name: &str, kind: SetKind) -> Result<Option<Vec<Member>>, CallError> {
        let mut request = Messages::default();
        request.begin(LIST, NLM_F_DUMP, &HEADER).attribute(PROTOCOL, &VERSION).text(SET_NAME, name);
        let parse = |_, body: &[u8]| {
            let members = Attributes(body.get(HEADER.len()..)?).nested(MEMBERS)?;
            Some(members.filter_map(|(_, data)| member(kind, Attributes(data))).collect::<Vec<_>>())
        };
        match self.0.dump(&request, parse) {
            Ok(parts) => Ok(Some(parts.concat())),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(failed("netlink IPSET_CMD_LIST", error)),
        }
    }

    /// Writes every change that the kernel accepts, and returns those that it has refused, by
    /// index. Adding an existing member and removing a missing one are no errors.
    pub fn write(
        &self,
        name: &str,
        kind: SetKind,
        changes: &[MemberChange],
    ) -> Result<Vec<(usize, CallError)>, CallError> {
        let refused = self
            .0
            .send_each(changes, |change, to| change.write(name, kind, to))
            .map_err(CallError::of("netlink of ipset"))?;
        let errors = refused.into_iter().filter_map(|(index, errno)| {
            let call = match changes.get(index)? {
                MemberChange::Add(_) => "netlink IPSET_CMD_ADD",
                MemberChange::Remove(_) => "netlink IPSET_CMD_DEL",
            };
            Some((index, failed(call, io::Error::from_raw_os_error(errno))))
        });
        Ok(errors.collect())
    }

    pub fn destroy(&self, name: &str) -> Result<Destroyed, CallError> {
        let mut request = Messages::default();
        request.begin(DESTROY, NLM_F_ACK, &HEADER).attribute(PROTOCOL, &VERSION).text(SET_NAME, name);
        match self.0.request(&request, |_, _| ()) {
            Ok(()) => Ok(Destroyed::Done),
            Err(error) => match error.raw_os_error() {
                Some(libc::ENOENT) => Ok(Destroyed::Done),
                Some(BUSY) => Ok(Destroyed::InUse),
                Some(_) | None => Err(failed("netlink IPSET_CMD_DESTROY", error)),
            },
        }
    }
}

/// The names of ipset's own error numbers, from [`OWN_ERRORS`] on.
const ERROR_NAMES: [&str; 11] = [
    "IPSET_ERR_PRIVATE",
    "IPSET_ERR_PROTOCOL",
    "IPSET_ERR_FIND_TYPE: the kernel has no such set type",
    "IPSET_ERR_MAX_SETS",
    "IPSET_ERR_BUSY",
    "IPSET_ERR_EXIST_SETNAME2",
    "IPSET_ERR_TYPE_MISMATCH",
    "IPSET_ERR_EXIST",
    "IPSET_ERR_INVALID_CIDR",
    "IPSET_ERR_INVALID_NETMASK",
    "IPSET_ERR_INVALID_FAMILY",
];
/// `IPSET_ERR_HASH_FULL` of the hash types.
const HASH_FULL: i32 = 4352;

fn failed(call: &'static str, error: io::Error) -> CallError {
    let source = match error.raw_os_error() {
        Some(HASH_FULL) => {
            io::Error::other(format!("the set is full: it has {DEFAULT_MOST_MEMBERS} members"))
        }
        Some(own @ OWN_ERRORS..) => {
            let name = usize::try_from(own - OWN_ERRORS).ok().and_then(|index| ERROR_NAMES.get(index));
            io::Error::other(format!(
                "error {own} of ipset{}",
                name.map_or(String::new(), |name| format!(", {name}"))
            ))
        }
        Some(_) | None => error,
    };
    CallError::new(call, source)
}

#[cfg(test)]
mod tests {
    use nix::sched::{CloneFlags, unshare};
    use rstest::rstest;

    use super::*;

    /// Puts the set `member` into the set `list`.
    fn add(sets: &IpSets, list: &str, member: &str) {
        let mut request = Messages::default();
        request.begin(ADD, NLM_F_ACK, &HEADER).attribute(PROTOCOL, &VERSION).text(SET_NAME, list).nested(
            DATA,
            |inner| {
                inner.text(18, member);
            },
        );
        sets.0.request(&request, |_, _| ()).unwrap();
    }

    fn create_list(sets: &IpSets, name: &str) {
        let mut request = Messages::default();
        request
            .begin(CREATE, NLM_F_ACK, &HEADER)
            .attribute(PROTOCOL, &VERSION)
            .text(SET_NAME, name)
            .text(TYPE_NAME, "list:set")
            .attribute(REVISION, &[0])
            .attribute(FAMILY, &[2])
            .nested(DATA, |_| ());
        sets.0.request(&request, |_, _| ()).unwrap();
    }

    /// Opens a connection in a network namespace that ends with the test's thread.
    fn alone() -> Option<IpSets> {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let sets = IpSets::load().unwrap();
        if sets.is_none() {
            println!("skipped: the kernel's ip_set (CONFIG_IP_SET) is not loaded");
        }
        sets
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_sets_are_listed_and_destroyed() {
        let Some(sets) = alone() else { return };
        assert!(sets.protocol().unwrap() >= 6);
        assert_eq!(sets.names().unwrap(), [""; 0]);
        sets.create("KUBE-CLUSTER-IP", SetKind::Sockets, true).unwrap();
        sets.create("KUBE-6-CLUSTER-IP", SetKind::Addresses, false).unwrap();
        create_list(&sets, "all");
        add(&sets, "all", "KUBE-CLUSTER-IP");
        let mut names = sets.names().unwrap();
        names.sort_unstable();
        assert_eq!(names, ["KUBE-6-CLUSTER-IP", "KUBE-CLUSTER-IP", "all"]);
        assert_eq!(sets.destroy("KUBE-6-CLUSTER-IP").unwrap(), Destroyed::Done);
        assert_eq!(sets.destroy("KUBE-6-CLUSTER-IP").unwrap(), Destroyed::Done);
        assert_eq!(sets.destroy("KUBE-CLUSTER-IP").unwrap(), Destroyed::InUse);
        assert_eq!(sets.destroy("all").unwrap(), Destroyed::Done);
        assert_eq!(sets.destroy("KUBE-CLUSTER-IP").unwrap(), Destroyed::Done);
    }

    fn socket(address: &str, protocol: i32) -> VirtualSocket {
        VirtualSocket { protocol: protocol as u16, address: address.parse().unwrap() }
    }

    fn members(kind: SetKind, v4: bool) -> Vec<Member> {
        let (address, other) = if v4 { ("10.96.0.1", "10.244.0.1") } else { ("fd00:96::1", "fd00:244::1") };
        let network = if v4 { "10.244.0.0/16" } else { "fd00:244::/64" };
        let at = |port: u16| SocketAddr::new(address.parse().unwrap(), port).to_string();
        let sockets = [
            socket(&at(80), libc::IPPROTO_TCP),
            socket(&at(80), libc::IPPROTO_UDP),
            socket(&at(65_535), libc::IPPROTO_SCTP),
        ];
        let with = |other: IpNet| sockets.map(|socket| Member::SocketAndNetwork(socket, other)).to_vec();
        match kind {
            SetKind::Addresses => [address, other].map(|one| Member::Address(one.parse().unwrap())).to_vec(),
            SetKind::Sockets => sockets.map(Member::Socket).to_vec(),
            SetKind::SocketsAndAddresses => with(other.parse::<IpAddr>().unwrap().into()),
            SetKind::SocketsAndNetworks => {
                let half = if v4 { "128.0.0.0/1" } else { "8000::/1" };
                [network, half].into_iter().flat_map(|one| with(one.parse().unwrap())).collect()
            }
            SetKind::Ports => [0, 30_080, 65_535].map(Member::Port).to_vec(),
        }
    }

    #[rstest]
    #[ignore = "needs root"]
    fn as_root_what_is_written_is_listed(
        #[values(
            SetKind::Addresses,
            SetKind::Sockets,
            SetKind::SocketsAndAddresses,
            SetKind::SocketsAndNetworks,
            SetKind::Ports
        )]
        kind: SetKind,
        #[values(true, false)] v4: bool,
    ) {
        let Some(sets) = alone() else { return };
        assert_eq!(sets.members("set", kind).unwrap(), None);
        // The second call finds the set.
        sets.create("set", kind, v4).unwrap();
        sets.create("set", kind, v4).unwrap();
        assert_eq!(sets.members("set", kind).unwrap(), Some(Vec::new()));
        let mut expected = members(kind, v4);
        let listed = || {
            let mut listed = sets.members("set", kind).unwrap().unwrap();
            listed.sort_unstable();
            listed
        };
        for _ in 0..2 {
            let changes: Vec<_> = expected.iter().copied().map(MemberChange::Add).collect();
            assert!(sets.write("set", kind, &changes).unwrap().is_empty());
            expected.sort_unstable();
            assert_eq!(listed(), expected);
        }
        let gone = expected.pop().unwrap();
        assert!(sets.write("set", kind, &[MemberChange::Remove(gone); 2]).unwrap().is_empty());
        assert_eq!(listed(), expected);
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_many_members_are_listed_whole() {
        let Some(sets) = alone() else { return };
        sets.create("set", SetKind::Sockets, true).unwrap();
        let all: Vec<_> = (0..5000_u32)
            .map(|n| Member::Socket(socket(&format!("10.96.{}.{}:80", n / 250, n % 250), libc::IPPROTO_TCP)))
            .collect();
        let changes: Vec<_> = all.iter().copied().map(MemberChange::Add).collect();
        assert!(sets.write("set", SetKind::Sockets, &changes).unwrap().is_empty());
        let mut listed = sets.members("set", SetKind::Sockets).unwrap().unwrap();
        listed.sort_unstable();
        assert_eq!(listed, all);
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_a_refusal_names_its_member_and_hinders_no_other() {
        let Some(sets) = alone() else { return };
        sets.create("set", SetKind::SocketsAndNetworks, true).unwrap();
        let at = socket("10.96.0.1:80", libc::IPPROTO_TCP);
        let [everybody, some] = ["0.0.0.0/0", "192.0.2.0/24"]
            .map(|network| MemberChange::Add(Member::SocketAndNetwork(at, network.parse().unwrap())));
        let refused = sets.write("set", SetKind::SocketsAndNetworks, &[some, everybody, some]).unwrap();
        let [(1, error)] = &refused[..] else { panic!("{refused:?}") };
        assert!(error.to_string().contains("IPSET_ERR_INVALID_CIDR"), "{error}");
        let error = sets.create("set", SetKind::Ports, true).unwrap_err();
        assert_eq!(error.errno(), libc::EEXIST);
    }
}
