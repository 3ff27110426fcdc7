//! Network interfaces and their addresses.

use std::{
    net::IpAddr,
    os::fd::{AsRawFd as _, BorrowedFd},
};

use libc::{
    IFA_ADDRESS, IFA_CACHEINFO, IFA_LOCAL, IFLA_IFNAME, IFLA_INFO_KIND, IFLA_LINKINFO, IFLA_XDP, RTM_DELADDR,
    RTM_DELLINK, RTM_GETADDR, RTM_GETLINK, RTM_NEWADDR, RTM_NEWLINK, RTM_SETLINK,
};
use netlink_sys::protocols::NETLINK_ROUTE;
use nix::{errno::Errno, net::if_::if_nametoindex};

use super::netlink::{
    Attributes, Messages, NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REPLACE, NetlinkSocket,
    ip_address,
};
use crate::sys::{CallError, bpf::XdpMode};

/// An `ifaddrmsg` for addresses of both families.
const ANY_ADDRESS: [u8; 8] = [0; 8];
const FOREVER: u32 = u32::MAX;
/// An `ifinfomsg` that leaves it to an attribute to name the interface.
const HEADER: [u8; 16] = [0; 16];

/// Returns an `ifinfomsg` that names an interface.
fn header(interface: u32) -> [u8; HEADER.len()] {
    let mut header = HEADER;
    header[4..8].copy_from_slice(&interface.to_ne_bytes());
    header
}

/// The flag that turns off duplicate address detection: no other node is asked whether it has the
/// address.
const IFA_F_NODAD: u8 = 2;
const IFA_F_DEPRECATED: u8 = 0x20;

/// Returns the index of an interface, or `None` if there is no such interface.
pub fn index(name: &str) -> Result<Option<u32>, CallError> {
    match if_nametoindex(name) {
        Ok(index) => Ok(Some(index)),
        Err(Errno::ENODEV) => Ok(None),
        Err(error) => Err(CallError::new("if_nametoindex", error.into())),
    }
}

/// Gives `take` what the kernel tells of an interface.
pub(crate) fn ask(interface: u32, mut take: impl FnMut(Attributes<'_>)) -> Result<(), CallError> {
    let mut request = Messages::default();
    request.begin(RTM_GETLINK, NLM_F_ACK, &header(interface));
    let take = |_, body: &[u8]| take(Attributes(body.get(HEADER.len()..).unwrap_or_default()));
    let answered =
        NetlinkSocket::open(NETLINK_ROUTE).and_then(|connection| connection.request(&request, take));
    answered.map_err(CallError::of("netlink RTM_GETLINK"))
}

/// An address that an interface has.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Address {
    /// The index of the interface.
    pub interface: u32,
    pub address: IpAddr,
    /// True if the kernel does not choose it as a source for other destinations as long as another
    /// address fits.
    pub is_deprecated: bool,
}

/// Returns every address of this thread's network namespace.
pub fn addresses() -> Result<Vec<Address>, CallError> {
    let mut request = Messages::default();
    request.begin(RTM_GETADDR, NLM_F_DUMP, &ANY_ADDRESS);
    let listed = NetlinkSocket::open(NETLINK_ROUTE)
        .and_then(|connection| connection.dump(&request, |_, body| address(body)));
    listed.map_err(CallError::of("netlink RTM_GETADDR"))
}

/// Returns the addresses of one device. The list is empty if there is no such device.
pub fn addresses_of(device: &str) -> Result<Vec<Address>, CallError> {
    let Some(device) = index(device)? else { return Ok(Vec::new()) };
    let mut addresses = addresses()?;
    addresses.retain(|one| one.interface == device);
    Ok(addresses)
}

fn address(body: &[u8]) -> Option<Address> {
    let (header, attributes) = body.split_first_chunk::<{ ANY_ADDRESS.len() }>()?;
    let [family, _, flags, _, index @ ..] = *header;
    let attributes = Attributes(attributes);
    // The two differ on point-to-point links, where IFA_ADDRESS is the peer's.
    let bytes = attributes.get(IFA_LOCAL).or_else(|| attributes.get(IFA_ADDRESS))?;
    Some(Address {
        interface: u32::from_ne_bytes(index),
        address: ip_address(family.into(), bytes)?,
        is_deprecated: flags & IFA_F_DEPRECATED != 0,
    })
}

/// Deletes an interface. It is no error if there is none of that name.
pub fn delete(name: &str) -> Result<(), CallError> {
    let mut request = Messages::default();
    request.begin(RTM_DELLINK, NLM_F_ACK, &HEADER).text(IFLA_IFNAME, name);
    let deleted =
        NetlinkSocket::open(NETLINK_ROUTE).and_then(|connection| connection.request(&request, |_, _| ()));
    match deleted {
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
        deleted => deleted.map_err(CallError::of("netlink RTM_DELLINK")),
    }
}

/// Makes a dummy device, which sends nothing, and leaves it down. It is no error if the device
/// exists.
pub fn create_dummy(name: &str) -> Result<(), CallError> {
    let mut request = Messages::default();
    request
        .begin(RTM_NEWLINK, NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL, &HEADER)
        .text(IFLA_IFNAME, name)
        .nested(IFLA_LINKINFO, |link| {
            link.text(IFLA_INFO_KIND, "dummy");
        });
    let created =
        NetlinkSocket::open(NETLINK_ROUTE).and_then(|connection| connection.request(&request, |_, _| ()));
    match created {
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        created => created.map_err(CallError::of("netlink RTM_NEWLINK of a dummy device")),
    }
}

/// Returns why the kernel does not attach an XDP program, in its own words or the driver's.
/// `bpf(2)` does not pass these words on, so the program is attached once more by netlink.
///
/// Returns `None` if there are no words, or if attaching succeeds now. The program does not stay
/// attached.
pub fn words_against_xdp(
    program: BorrowedFd<'_>,
    interface: u32,
    mode: XdpMode,
) -> Result<Option<String>, CallError> {
    const IFLA_XDP_FD: u16 = 1;
    const IFLA_XDP_FLAGS: u16 = 3;
    const IFLA_XDP_EXPECTED_FD: u16 = 8;
    const XDP_FLAGS_UPDATE_IF_NOEXIST: u32 = 1;
    const XDP_FLAGS_REPLACE: u32 = 1 << 4;
    const NONE: i32 = -1;
    let program = program.as_raw_fd();
    let header = header(interface);
    let set = |program: i32, flags: u32, expected: Option<i32>| {
        let mut request = Messages::default();
        request.begin(RTM_SETLINK, NLM_F_ACK, &header).nested(IFLA_XDP, |xdp| {
            xdp.attribute(IFLA_XDP_FD, &program.to_ne_bytes());
            xdp.attribute(IFLA_XDP_FLAGS, &(mode.flag() | flags).to_ne_bytes());
            if let Some(expected) = expected {
                xdp.attribute(IFLA_XDP_EXPECTED_FD, &expected.to_ne_bytes());
            }
        });
        NetlinkSocket::open(NETLINK_ROUTE).and_then(|connection| connection.verdict(&request))
    };
    let asked = set(program, XDP_FLAGS_UPDATE_IF_NOEXIST, None).and_then(|(attached, words)| {
        if attached.is_err() {
            return Ok(words);
        }
        // The program is to be attached by a link, so this attachment is undone.
        set(NONE, XDP_FLAGS_REPLACE, Some(program))?.0.map(|()| None)
    });
    asked.map_err(CallError::of("netlink RTM_SETLINK with an XDP program"))
}

/// A change to the addresses of an interface. The address has the full prefix.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum AddressChange {
    /// Adds the address, or updates it if it exists. An IPv6 address is made deprecated. Otherwise
    /// the kernel might choose it as a source (RFC 6724), also for masquerading, if the interface
    /// towards a destination has no address of its own with a fitting prefix.
    Add(IpAddr),
    Remove(IpAddr),
}

impl AddressChange {
    fn write(self, interface: u32, to: &mut Messages) {
        let (kind, flags, address) = match self {
            Self::Add(address) => (RTM_NEWADDR, NLM_F_CREATE | NLM_F_REPLACE, address),
            Self::Remove(address) => (RTM_DELADDR, 0, address),
        };
        let (family, length, bytes) = match address {
            IpAddr::V4(address) => (libc::AF_INET, 32, address.octets().to_vec()),
            IpAddr::V6(address) => (libc::AF_INET6, 128, address.octets().to_vec()),
        };
        // `ifaddrmsg` has the family, the length of the prefix, flags, the scope and the interface.
        let [a, b, c, d] = interface.to_ne_bytes();
        to.begin(kind, flags, &[family as u8, length, IFA_F_NODAD, 0, a, b, c, d])
            .attribute(IFA_LOCAL, &bytes)
            .attribute(IFA_ADDRESS, &bytes);
        if address.is_ipv6() && matches!(self, Self::Add(_)) {
            let lifetimes = [0, FOREVER, 0, 0].map(u32::to_ne_bytes);
            to.attribute(IFA_CACHEINFO, lifetimes.as_flattened());
        }
    }
}

/// Writes every change that the kernel accepts, and returns those that it has refused, by index.
/// Removing a missing address is no error.
pub fn change_addresses(
    interface: u32,
    changes: &[AddressChange],
) -> Result<Vec<(usize, CallError)>, CallError> {
    let refused = NetlinkSocket::open(NETLINK_ROUTE)
        .and_then(|connection| connection.send_each(changes, |change, to| change.write(interface, to)))
        .map_err(CallError::of("netlink of addresses"))?;
    let errors = refused.into_iter().filter_map(|(index, errno)| {
        let call = match changes.get(index)? {
            AddressChange::Remove(_) if errno == libc::EADDRNOTAVAIL => return None,
            AddressChange::Remove(_) => "netlink RTM_DELADDR",
            AddressChange::Add(_) => "netlink RTM_NEWADDR",
        };
        Some((index, CallError::new(call, std::io::Error::from_raw_os_error(errno))))
    });
    Ok(errors.collect())
}

#[cfg(test)]
mod tests {
    use std::{
        net::{Ipv4Addr, Ipv6Addr},
        os::fd::AsFd as _,
        process::Command,
        time::{Duration, Instant},
    };

    use nix::sched::{CloneFlags, unshare};
    use rstest::rstest;

    use super::*;
    use crate::sys::bpf;

    fn ip(arguments: &str) {
        let status = Command::new("ip").args(arguments.split(' ')).status().unwrap();
        assert!(status.success(), "ip {arguments}");
    }

    fn listed() -> Vec<(u32, IpAddr)> {
        addresses().unwrap().into_iter().map(|one| (one.interface, one.address)).collect()
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_addresses_are_listed_with_their_interface() {
        // The thread ends with the test, and its network namespace with it.
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        assert_eq!(index("here").unwrap(), None);
        ip("link set lo up");
        ip("link add here type veth peer name there");
        ip("address add 10.96.0.1/32 dev here");
        ip("address add 192.0.2.1 peer 192.0.2.2/32 dev there");
        ip("address add 2001:db8::1/128 dev there");
        let (here, there) = (index("here").unwrap().unwrap(), index("there").unwrap().unwrap());
        let lo = index("lo").unwrap().unwrap();
        let mut listed = listed();
        listed.sort_unstable();
        let mut expected = [
            (lo, Ipv4Addr::LOCALHOST.into()),
            (lo, Ipv6Addr::LOCALHOST.into()),
            (here, Ipv4Addr::new(10, 96, 0, 1).into()),
            (there, Ipv4Addr::new(192, 0, 2, 1).into()),
            (there, "2001:db8::1".parse().unwrap()),
        ];
        expected.sort_unstable();
        assert_eq!(listed, expected);
        delete("here").unwrap();
        assert_eq!((index("here").unwrap(), index("there").unwrap()), (None, None));
        delete("here").unwrap();
    }

    #[rstest]
    #[case::too_few_queues(
        "ethtool -L there tx 2",
        Some("veth: XDP expects number of rx queues not less than peer tx queues")
    )]
    #[case::too_large_an_mtu("ip link set there mtu 9000", Some("veth: Peer MTU is too large to set XDP"))]
    #[case::nothing("ip link set there mtu 1500", None)]
    #[ignore = "needs root"]
    fn as_root_a_driver_tells_why_it_takes_no_xdp_program(
        #[case] setting: &str,
        #[case] expected: Option<&str>,
    ) {
        /// The instructions `r0 = XDP_PASS; exit`.
        const PASS: [u64; 2] = [0x0000_0002_0000_00b7, 0x95];
        const XDP: u32 = 6;
        const BPF_XDP: u32 = 37;
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        ip("link add here type veth peer name there");
        let set = Command::new("sh").args(["-c", setting]).status().unwrap();
        assert!(set.success(), "{setting}");
        let here = index("here").unwrap().unwrap();
        let program = bpf::load_program(XDP, BPF_XDP, &PASS).unwrap();
        let words = words_against_xdp(program.as_fd(), here, XdpMode::Native).unwrap();
        assert_eq!(words.as_deref(), expected);
        let link = bpf::link_xdp(program.as_fd(), here, XdpMode::Native);
        assert_eq!(link.is_err(), expected.is_some(), "to ask leaves nothing behind: {link:?}");
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_addresses_are_written() {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        ip("link add here type veth peer name there");
        let here = index("here").unwrap().unwrap();
        let [one, other] = ["10.96.0.1", "fd00:96::1"].map(|address| address.parse::<IpAddr>().unwrap());
        let add = [one, other, one].map(AddressChange::Add);
        assert!(change_addresses(here, &add).unwrap().is_empty());
        assert_eq!(listed(), [(here, one), (here, other)]);
        let remove = [one, other, one].map(AddressChange::Remove);
        assert!(change_addresses(here, &remove).unwrap().is_empty());
        assert_eq!(listed(), []);
        let refused = change_addresses(here, &[AddressChange::Add([127, 0, 0, 1].into()), add[0]]);
        assert!(refused.unwrap().is_empty());
        let refused = change_addresses(here + 100, &add[..2]).unwrap();
        let refused: Vec<_> = refused.into_iter().map(|(index, error)| (index, error.errno())).collect();
        assert_eq!(refused, [(0, libc::ENODEV), (1, libc::ENODEV)]);
    }

    /// Covers an address that a former process has added in another way. The pods are behind
    /// interfaces that have no address of their own.
    #[rstest]
    #[case::as_it_is_added(None)]
    #[case::as_kube_proxy_adds_it(Some("address add fd00:10:96::1/128 dev held nodad"))]
    #[ignore = "needs root"]
    fn as_root_an_address_is_no_source_of_what_is_sent_to_others(#[case] before: Option<&str>) {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        ip("link set lo up");
        for pair in [
            "uplink type veth peer name beyond",
            "pod type veth peer name podside",
            "held type veth peer name none",
        ] {
            ip(&format!("link add {pair}"));
        }
        ["uplink", "beyond", "pod", "podside"].iter().for_each(|name| ip(&format!("link set {name} up")));
        ip("address add 2001:db8::11/64 dev uplink nodad");
        ip("address add fe80::1/64 dev pod nodad");
        ip("route add fd00:10:244::2/128 dev pod");
        before.into_iter().for_each(ip);
        let held = index("held").unwrap().unwrap();
        let address: IpAddr = "fd00:10:96::1".parse().unwrap();
        assert!(change_addresses(held, &[AddressChange::Add(address)]).unwrap().is_empty());
        let found = addresses().unwrap().into_iter().find(|one| one.address == address);
        assert_eq!(found, Some(Address { interface: held, address, is_deprecated: true }));
        let source_to = |destination: &str| {
            let socket = std::net::UdpSocket::bind("[::]:0").unwrap();
            socket.connect(destination).map(|()| socket.local_addr().unwrap().ip().to_string())
        };
        // The kernel adds the route to an address a moment after the address.
        let limit = Instant::now() + Duration::from_secs(60);
        let to_itself = std::iter::repeat_with(|| source_to("[fd00:10:96::1]:80"));
        let to_itself = to_itself.take_while(|_| Instant::now() < limit).find_map(Result::ok);
        // The rules for masquerading recognise the node's own connections by this source.
        assert_eq!(to_itself.as_deref(), Some("fd00:10:96::1"));
        assert_eq!(source_to("[fd00:10:244::2]:80").unwrap(), "2001:db8::11");
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_a_dummy_device_is_made_once() {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        match create_dummy("here") {
            Err(error) if error.errno() == libc::EOPNOTSUPP => {
                println!("skipped: the kernel's dummy devices (CONFIG_DUMMY) are not loaded");
                return;
            }
            created => created.unwrap(),
        }
        let here = index("here").unwrap().unwrap();
        create_dummy("here").unwrap();
        assert_eq!(index("here").unwrap(), Some(here));
        // An address of a device that is down is still an address of the node.
        let [one, other] = ["10.96.0.1", "fd00:96::1"].map(|address| address.parse::<IpAddr>().unwrap());
        assert!(change_addresses(here, &[one, other].map(AddressChange::Add)).unwrap().is_empty());
        ip("link set lo up");
        for address in [one, other] {
            std::net::TcpListener::bind((address, 80)).unwrap();
        }
    }
}
