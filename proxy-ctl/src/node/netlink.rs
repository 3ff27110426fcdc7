//! Asks the kernel for links, addresses and routes, and follows their changes.

use std::{io, sync::Arc};

use netlink_packet_core::{NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage, address::AddressMessage, link::LinkMessage, route::RouteMessage,
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use tokio::{io::unix::AsyncFd, sync::watch};
use tokio_util::sync::CancellationToken;

use super::{
    own_node::OwnNode,
    state::{State, Surroundings},
};
use crate::{config::Config, dataplane::NodeNetwork, sys::ready};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("following interfaces and addresses by netlink, in {call}: {source}")]
    Call { call: &'static str, source: io::Error },
    #[error("netlink dump of {what}: the list kept changing while it was read")]
    Interrupted { what: &'static str },
}

fn failed(call: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Call { call, source }
}

/// Multicast groups: links, IPv4 and IPv6 addresses, IPv4 and IPv6 routes.
const GROUPS: [u32; 5] = [1, 5, 9, 7, 11];
/// Size of the socket's receive buffer. When it is full, the kernel drops changes and reports an overrun.
const RECEIVE_BUFFER: usize = 1 << 20;
const DUMP_TRIES: usize = 5;

/// Sends the node's network whenever it or the configuration changes, until `stop`: `clusterCIDR` and `ebpf.interfaces` decide over roles
/// of interfaces. Waits for the first list of the own Node, whose addresses show which interfaces are uplinks.
pub async fn watch(
    mut own_node: watch::Receiver<OwnNode>,
    mut configs: watch::Receiver<Arc<Config>>,
    hosts: watch::Sender<Option<NodeNetwork>>,
    stop: CancellationToken,
) -> Result<(), Error> {
    tokio::select! {
        listed = own_node.wait_for(OwnNode::is_listed) => if listed.is_err() { return Ok(()) },
        () = stop.cancelled() => return Ok(()),
    }
    // Subscribed before the dump, so that no change falls between them.
    let mut changes = subscribe()?;
    let mut state = dump().await?;
    let (mut own_node_told, mut configs_told) = (true, true);
    loop {
        let host = state.host(&surroundings(&own_node.borrow_and_update(), &configs.borrow_and_update()));
        hosts.send_if_modified(|sent| {
            let differs = sent.as_ref() != Some(&host);
            if differs {
                *sent = Some(host);
            }
            differs
        });
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = hosts.closed() => return Ok(()),
            changed = own_node.changed(), if own_node_told => own_node_told = changed.is_ok(),
            changed = configs.changed(), if configs_told => configs_told = changed.is_ok(),
            ready = changes.readable_mut() => {
                let mut ready = ready.map_err(failed("waiting for changes"))?;
                if take_waiting(ready.get_inner_mut(), &mut state)? == Waiting::Lost {
                    tracing::info!("changes of interfaces came faster than they were read; all are listed again");
                    // What still waits is older than the list, and the kernel drops changes until nothing waits.
                    while take_waiting(ready.get_inner_mut(), &mut state)? == Waiting::Lost {}
                    state = dump().await?;
                } else {
                    ready.clear_ready();
                }
            }
        }
    }
}

fn surroundings(own_node: &OwnNode, config: &Config) -> Surroundings {
    let pod_cidrs = own_node.node().map(|node| node.pod_cidrs.as_slice()).unwrap_or_default();
    Surroundings {
        node_addresses: own_node.addresses().to_vec(),
        pod_ranges: config.cluster_cidrs.iter().chain(pod_cidrs).copied().collect(),
        interfaces: config.ebpf.interfaces.clone(),
    }
}

fn subscribe() -> Result<AsyncFd<Socket>, Error> {
    let mut socket = Socket::new(NETLINK_ROUTE).map_err(failed("socket"))?;
    socket.bind_auto().map_err(failed("bind"))?;
    socket.set_rx_buf_sz(RECEIVE_BUFFER).map_err(failed("setsockopt(SO_RCVBUF)"))?;
    for group in GROUPS {
        socket.add_membership(group).map_err(failed("setsockopt(NETLINK_ADD_MEMBERSHIP)"))?;
    }
    socket.set_non_blocking(true).map_err(failed("fcntl(O_NONBLOCK)"))?;
    ready::readable(socket).map_err(failed("epoll"))
}

#[derive(Debug, Eq, PartialEq)]
enum Waiting {
    Taken,
    /// The kernel has dropped changes.
    Lost,
}

/// Applies all changes that are waiting.
fn take_waiting(socket: &mut Socket, state: &mut State) -> Result<Waiting, Error> {
    loop {
        match socket.recv_from_full() {
            Ok((bytes, _)) => each_message(&bytes, |message| {
                if let NetlinkPayload::InnerMessage(change) = &message.payload {
                    state.apply(change);
                }
            }),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Waiting::Taken),
            Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => return Ok(Waiting::Lost),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(failed("recv")(e)),
        }
    }
}

/// A message that does not parse is skipped: newer kernels may send what this version does not know.
fn each_message(bytes: &[u8], mut take: impl FnMut(&NetlinkMessage<RouteNetlinkMessage>)) {
    let mut rest = bytes;
    while let Some(length) = rest.first_chunk().map(|length| u32::from_ne_bytes(*length) as usize) {
        let Some(one) = rest.get(..length).filter(|one| !one.is_empty()) else { return };
        match NetlinkMessage::deserialize(one) {
            Ok(message) => take(&message),
            Err(error) => tracing::debug!(%error, "netlink message not understood"),
        }
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
}

async fn dump() -> Result<State, Error> {
    let done = tokio::task::spawn_blocking(dump_all).await;
    done.map_err(|e| failed("a blocking task")(io::Error::other(e)))?
}

fn dump_all() -> Result<State, Error> {
    let socket = Socket::new(NETLINK_ROUTE).map_err(failed("socket"))?;
    socket.connect(&SocketAddr::new(0, 0)).map_err(failed("connect"))?;
    let mut state = State::default();
    let mut routes = RouteMessage::default();
    routes.header.address_family = AddressFamily::Unspec;
    for (what, request) in [
        ("links", RouteNetlinkMessage::GetLink(LinkMessage::default())),
        ("addresses", RouteNetlinkMessage::GetAddress(AddressMessage::default())),
        ("routes", RouteNetlinkMessage::GetRoute(routes)),
    ] {
        dump_one(&socket, what, &request, &mut state)?;
    }
    Ok(state)
}

fn dump_one(
    socket: &Socket,
    what: &'static str,
    request: &RouteNetlinkMessage,
    state: &mut State,
) -> Result<(), Error> {
    for _ in 0..DUMP_TRIES {
        let mut message = NetlinkMessage::from(request.clone());
        message.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        socket.send(&bytes, 0).map_err(failed("send"))?;
        if read_dump(socket, state)? {
            return Ok(());
        }
    }
    Err(Error::Interrupted { what })
}

/// False: the list changed during the dump and may be incomplete.
fn read_dump(socket: &Socket, state: &mut State) -> Result<bool, Error> {
    let (mut consistent, mut done, mut refused) = (true, false, None);
    while !done {
        let (bytes, _) = socket.recv_from_full().map_err(failed("recv"))?;
        each_message(&bytes, |message| {
            consistent &= message.header.flags & NLM_F_DUMP_INTR == 0;
            match &message.payload {
                NetlinkPayload::InnerMessage(found) => state.apply(found),
                NetlinkPayload::Done(_) => done = true,
                NetlinkPayload::Error(error) => {
                    refused = Some(error.to_io());
                    done = true;
                }
                NetlinkPayload::Noop | NetlinkPayload::Overrun(_) => {}
                // The enum may grow.
                _ => {}
            }
        });
    }
    refused.map_or(Ok(consistent), |source| Err(failed("dump")(source)))
}
