//! What the kernel tells of links, addresses, routes, rules and neighbours when they change.

use std::io;

use netlink_packet_core::{DecodeError, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{Socket, protocols::NETLINK_ROUTE};

use super::CallError;

/// Multicast groups.
pub const LINKS: u32 = 1;
pub const NEIGHBOURS: u32 = 3;
pub const ADDRESSES: [u32; 2] = [5, 9];
pub const ROUTES: [u32; 2] = [7, 11];
pub const RULES: [u32; 2] = [8, 19];
/// Since 5.3.
pub const NEXT_HOPS: u32 = 32;

/// Size of the socket's receive buffer. When it is full, the kernel drops changes and reports an overrun.
const RECEIVE_BUFFER: usize = 1 << 20;

/// A socket that does not block.
pub fn subscribe(groups: impl IntoIterator<Item = u32>) -> Result<Socket, CallError> {
    let mut socket = Socket::new(NETLINK_ROUTE).map_err(CallError::of("socket"))?;
    socket.bind_auto().map_err(CallError::of("bind"))?;
    socket.set_rx_buf_sz(RECEIVE_BUFFER).map_err(CallError::of("setsockopt(SO_RCVBUF)"))?;
    for group in groups {
        socket.add_membership(group).map_err(CallError::of("setsockopt(NETLINK_ADD_MEMBERSHIP)"))?;
    }
    socket.set_non_blocking(true).map_err(CallError::of("fcntl(O_NONBLOCK)"))?;
    Ok(socket)
}

#[derive(Debug, Eq, PartialEq)]
pub enum Waiting {
    Taken,
    /// The kernel has dropped changes.
    Lost,
}

/// Takes all changes that are waiting.
pub fn take_waiting(
    socket: &Socket,
    mut take: impl FnMut(&RouteNetlinkMessage),
) -> Result<Waiting, CallError> {
    loop {
        match socket.recv_from_full() {
            Ok((bytes, _)) => each_change(&bytes, &mut take),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Waiting::Taken),
            Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => return Ok(Waiting::Lost),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(CallError::new("recv", e)),
        }
    }
}

fn each_change(bytes: &[u8], take: &mut impl FnMut(&RouteNetlinkMessage)) {
    let mut rest = bytes;
    while let Some(length) = rest.first_chunk().map(|length| u32::from_ne_bytes(*length) as usize) {
        let Some(one) = rest.get(..length).filter(|one| !one.is_empty()) else { return };
        let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(one).inspect_err(not_understood);
        if let Ok(NetlinkMessage { payload: NetlinkPayload::InnerMessage(change), .. }) = message {
            take(&change);
        }
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
}

/// It is skipped: newer kernels may send what this version does not know.
pub fn not_understood(error: &DecodeError) {
    tracing::debug!(%error, "netlink message not understood");
}
