//! The other end of a veth: whether it completes the checksums of what it sends.
//!
//! The sender of a packet may leave its checksum to the device (`CHECKSUM_PARTIAL`). A veth hands
//! such a packet on as it is. An XDP program sees the unfinished field, and nothing shows that it
//! is unfinished.

use std::{collections::BTreeSet, io, os::fd::AsRawFd as _, thread};

use libc::{IFLA_LINK, RTM_GETNSID};
use netlink_sys::protocols::NETLINK_ROUTE;

use super::{
    device, link,
    netlink::{Attributes, Messages, NLM_F_ACK, NetlinkSocket, word},
    network_namespaces::{NetworkNamespace, mounted},
};
use crate::sys::CallError;

/// The state of the checksums of packets that a veth receives.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum PeerChecksums {
    /// The other end completes them.
    Whole,
    /// The other end, which has this name in its namespace, leaves them to the device.
    Partial(String),
    /// The other end is in a network namespace that this process cannot enter.
    OutOfSight,
}

/// The offloads with which a device completes checksums, so that senders leave them to it. The
/// names are ethtool's.
const LEAVE_CHECKSUMS: [&str; 3] = ["tx-checksum-ip-generic", "tx-checksum-ipv4", "tx-checksum-ipv6"];

/// The other end of a veth.
#[derive(Clone, Copy, Debug, Default)]
struct Peer {
    index: u32,
    /// The number that its network namespace has in that of this thread. `None` means that both
    /// ends are in the same namespace.
    namespace: Option<i32>,
}

/// Returns what the other end of a veth of this thread's network namespace does with checksums.
pub fn peer_checksums(index: u32) -> Result<PeerChecksums, CallError> {
    let peer = peer(index)?;
    let Some(number) = peer.namespace else { return checksums_of(peer.index) };
    let Some(namespace) = namespace(number)? else { return Ok(PeerChecksums::OutOfSight) };
    let inside = || {
        // This fails without CAP_SYS_ADMIN.
        if let Err(error) = namespace.enter() {
            tracing::debug!(%error, "the network namespace of a veth's other end cannot be entered");
            return Ok(PeerChecksums::OutOfSight);
        }
        checksums_of(peer.index)
    };
    let asked = thread::scope(|scope| scope.spawn(inside).join());
    asked.unwrap_or_else(|_| Err(CallError::new("a thread", io::Error::other("it has panicked"))))
}

fn checksums_of(index: u32) -> Result<PeerChecksums, CallError> {
    let offloads: BTreeSet<String> = device::offloads(index)?;
    if !LEAVE_CHECKSUMS.iter().any(|offload| offloads.contains(*offload)) {
        return Ok(PeerChecksums::Whole);
    }
    let name = nix::net::if_::if_indextoname(index).ok().and_then(|name| name.into_string().ok());
    Ok(PeerChecksums::Partial(name.unwrap_or_default()))
}

fn peer(index: u32) -> Result<Peer, CallError> {
    const IFLA_LINK_NETNSID: u16 = 37;
    let mut peer = Peer::default();
    link::ask(index, |attributes| {
        let number = |kind| attributes.get(kind).and_then(|value| word(value, 0));
        peer = Peer {
            index: number(IFLA_LINK).unwrap_or_default(),
            namespace: number(IFLA_LINK_NETNSID).map(u32::cast_signed),
        };
    })?;
    Ok(peer)
}

/// Returns the network namespace that has this number here, or `None` if this process sees no mount
/// of it.
fn namespace(number: i32) -> Result<Option<NetworkNamespace>, CallError> {
    let failed = CallError::of("/proc/thread-self/mountinfo");
    for (inode, path) in mounted().map_err(failed)? {
        // A namespace that is gone meanwhile, or hidden by another mount, is skipped.
        let Ok(Some(found)) = NetworkNamespace::open(&path, inode) else { continue };
        if number_of(&found)? == Some(number) {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// Returns the number that a network namespace has in that of this thread, or `None` if it has
/// none.
fn number_of(namespace: &NetworkNamespace) -> Result<Option<i32>, CallError> {
    /// The length of `rtgenmsg` with its padding.
    const HEADER: usize = 4;
    const NETNSA_NSID: u16 = 1;
    const NETNSA_FD: u16 = 3;
    let mut request = Messages::default();
    let descriptor = namespace.file().as_raw_fd();
    request.begin(RTM_GETNSID, NLM_F_ACK, &[0; HEADER]).attribute(NETNSA_FD, &descriptor.to_ne_bytes());
    let mut number = None;
    let asked = NetlinkSocket::open(NETLINK_ROUTE).and_then(|connection| {
        connection.request(&request, |_, body| {
            let attributes = Attributes(body.get(HEADER..).unwrap_or_default());
            number = attributes.get(NETNSA_NSID).and_then(|value| word(value, 0)).map(u32::cast_signed);
        })
    });
    asked.map_err(CallError::of("netlink RTM_GETNSID"))?;
    Ok(number.filter(|number| *number >= 0))
}
