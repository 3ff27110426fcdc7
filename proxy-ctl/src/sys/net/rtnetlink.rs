//! Notifications from the kernel about changed links, addresses, routes, rules and neighbours.

use std::io;

use netlink_packet_core::{DecodeError, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{Socket, protocols::NETLINK_ROUTE};

use crate::sys::CallError;

/// Multicast groups of rtnetlink.
pub const LINKS: u32 = 1;
pub const NEIGHBOURS: u32 = 3;
pub const ADDRESSES: [u32; 2] = [5, 9];
pub const ROUTES: [u32; 2] = [7, 11];
pub const RULES: [u32; 2] = [8, 19];
/// The group of next hop objects. Needs Linux 5.3.
pub const NEXT_HOPS: u32 = 32;

/// The size of the socket's receive buffer. When it is full, the kernel drops changes and reports
/// an overrun.
const RECEIVE_BUFFER: usize = 1 << 20;

/// Returns a non-blocking socket that receives the changes of these groups.
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

/// The result of reading changes that wait.
#[derive(Debug, Eq, PartialEq)]
pub enum Waiting {
    Nothing,
    /// Some changes were taken. More may wait.
    Changes,
    /// The kernel has dropped changes for which there was no room. It drops all further ones until
    /// nothing waits any more.
    Lost,
}

/// Takes some of the changes that wait. `take` gets `None` for a message that is not understood,
/// such as one of a newer kernel.
pub fn take_waiting(
    socket: &Socket,
    take: impl FnMut(Option<&RouteNetlinkMessage>),
) -> Result<Waiting, CallError> {
    match socket.recv_from_full() {
        Ok((bytes, _)) => {
            each_change(&bytes, take);
            Ok(Waiting::Changes)
        }
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Waiting::Nothing),
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(Waiting::Changes),
        Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => Ok(Waiting::Lost),
        Err(e) => Err(CallError::new("recv", e)),
    }
}

/// Discards all that waits after [`Waiting::Lost`], so that the kernel reports changes again.
pub fn drop_waiting(socket: &Socket) -> Result<(), CallError> {
    while take_waiting(socket, |_| ())? != Waiting::Nothing {}
    Ok(())
}

fn each_change(bytes: &[u8], mut take: impl FnMut(Option<&RouteNetlinkMessage>)) {
    let mut rest = bytes;
    while let Some(length) = rest.first_chunk().map(|length| u32::from_ne_bytes(*length) as usize) {
        let Some(one) = rest.get(..length).filter(|one| !one.is_empty()) else { return };
        let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(one).inspect_err(not_understood);
        match message {
            Ok(NetlinkMessage { payload: NetlinkPayload::InnerMessage(change), .. }) => take(Some(&change)),
            Ok(_) | Err(_) => take(None),
        }
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
}

pub fn not_understood(error: &DecodeError) {
    tracing::debug!(%error, "netlink message not understood");
}
