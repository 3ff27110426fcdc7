//! Network interfaces.

use std::net::IpAddr;

use netlink_sys::protocols::NETLINK_ROUTE;
use nix::{errno::Errno, net::if_::if_nametoindex};

use super::{
    CallError,
    netlink::{Attributes, Messages, NLM_F_ACK, NLM_F_DUMP, NetlinkSocket, ip_address},
};

const RTM_DELLINK: u16 = 17;
const RTM_GETADDR: u16 = 22;
/// `ifaddrmsg`: of both families.
const ANY_ADDRESS: [u8; 8] = [0; 8];
const IFA_ADDRESS: u16 = 1;
/// Differs from the former on point-to-point links, where that one is the peer's.
const IFA_LOCAL: u16 = 2;
/// `ifinfomsg`: the interface is found by its name.
const HEADER: [u8; 16] = [0; 16];
const IFLA_IFNAME: u16 = 3;

/// `None`: it is not there.
pub fn index(name: &str) -> Result<Option<u32>, CallError> {
    match if_nametoindex(name) {
        Ok(index) => Ok(Some(index)),
        Err(Errno::ENODEV) => Ok(None),
        Err(error) => Err(CallError::new("if_nametoindex", error.into())),
    }
}

/// Every address of this thread's network namespace, with the index of its interface.
pub fn addresses() -> Result<Vec<(u32, IpAddr)>, CallError> {
    let mut request = Messages::default();
    request.begin(RTM_GETADDR, NLM_F_DUMP, &ANY_ADDRESS);
    let listed = NetlinkSocket::open(NETLINK_ROUTE)
        .and_then(|connection| connection.dump(&request, |_, body| address(body)));
    listed.map_err(CallError::of("netlink RTM_GETADDR"))
}

fn address(body: &[u8]) -> Option<(u32, IpAddr)> {
    let (header, attributes) = body.split_first_chunk::<{ ANY_ADDRESS.len() }>()?;
    let [family, _, _, _, index @ ..] = *header;
    let attributes = Attributes(attributes);
    let bytes = attributes.get(IFA_LOCAL).or_else(|| attributes.get(IFA_ADDRESS))?;
    Some((u32::from_ne_bytes(index), ip_address(family.into(), bytes)?))
}

/// One that is not there is no error.
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

#[cfg(test)]
mod tests {
    use std::{
        net::{Ipv4Addr, Ipv6Addr},
        process::Command,
    };

    use nix::sched::{CloneFlags, unshare};

    use super::*;

    fn ip(arguments: &str) {
        let status = Command::new("ip").args(arguments.split(' ')).status().unwrap();
        assert!(status.success(), "ip {arguments}");
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
        let mut listed = addresses().unwrap();
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
}
