//! Reads links, addresses and default routes from the kernel, and follows their changes.

use std::{io, sync::Arc};

use netlink_packet_core::{NetlinkDeserializable as _, NetlinkHeader};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::protocols::NETLINK_ROUTE;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    own_node::OwnNode,
    state::{State, Surroundings},
};
use crate::{
    config::Config,
    model::node::NodeNetwork,
    sys::{
        CallError,
        net::{
            netlink::{Messages, NLM_F_DUMP, NetlinkSocket},
            rtnetlink::{self, ADDRESSES, LINKS, ROUTES, Waiting, not_understood},
        },
        proc::ready,
    },
};

#[derive(Debug, thiserror::Error)]
#[error("following interfaces and addresses by netlink: {0}")]
pub struct Error(#[from] CallError);

const RTM_GETLINK: u16 = 18;
const RTM_GETADDR: u16 = 22;
const RTM_GETROUTE: u16 = 26;

/// Sends the node's network whenever it or the configuration changes, until `stop`. The
/// configuration matters because `clusterCIDR` and `ebpf.interfaces` decide the roles of
/// interfaces.
///
/// Waits for the first list of the own Node, whose addresses show which interfaces are uplinks.
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
    // The subscription comes before the dump, so that no change between them is missed.
    let groups = [LINKS].into_iter().chain(ADDRESSES).chain(ROUTES);
    let changes = ready::readable(rtnetlink::subscribe(groups)?).map_err(CallError::of("epoll"))?;
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
            ready = changes.readable() => {
                let mut ready = ready.map_err(CallError::of("waiting for changes"))?;
                let socket = ready.get_inner();
                let mut waiting = Waiting::Changes;
                while waiting == Waiting::Changes {
                    waiting = rtnetlink::take_waiting(socket, |change| {
                        change.into_iter().for_each(|change| state.apply(change));
                    })?;
                }
                if waiting == Waiting::Lost {
                    tracing::info!("changes of interfaces came faster than they were read; all are listed again");
                    // The changes that still wait are older than the new list.
                    rtnetlink::drop_waiting(socket)?;
                    state.replace(dump().await?);
                } else {
                    ready.clear_ready();
                }
            }
        }
    }
}

/// Returns the node's network as it is now. It does not know the Node's addresses, which it does
/// not ask for.
pub fn network(config: &Config) -> Result<NodeNetwork, Error> {
    Ok(dump_all()?.host(&surroundings(&OwnNode::default(), config)))
}

fn surroundings(own_node: &OwnNode, config: &Config) -> Surroundings {
    let pod_cidrs = own_node.node().map(|node| node.pod_cidrs.as_slice()).unwrap_or_default();
    Surroundings {
        node_addresses: own_node.addresses().to_vec(),
        pod_ranges: config.cluster_cidrs.iter().chain(pod_cidrs).copied().collect(),
        interfaces: config.ebpf.interfaces.clone(),
    }
}

async fn dump() -> Result<State, Error> {
    let done = tokio::task::spawn_blocking(dump_all).await;
    done.map_err(|e| CallError::new("a blocking task", io::Error::other(e)))?
}

fn dump_all() -> Result<State, Error> {
    let socket = NetlinkSocket::open(NETLINK_ROUTE).map_err(CallError::of("socket"))?;
    let mut state = State::default();
    // An empty header of these lengths asks for all objects.
    for (call, kind, header) in [
        ("dump of links", RTM_GETLINK, &[0; 16][..]),
        ("dump of addresses", RTM_GETADDR, &[0; 8]),
        ("dump of routes", RTM_GETROUTE, &[0; 12]),
    ] {
        let mut request = Messages::default();
        request.begin(kind, NLM_F_DUMP, header);
        let found = socket.dump(&request, parse).map_err(CallError::of(call))?;
        found.iter().for_each(|message| state.apply(message));
    }
    Ok(state)
}

/// Parses a message. Leaves out routes that are not default routes, because a node may have many.
fn parse(kind: u16, body: &[u8]) -> Option<RouteNetlinkMessage> {
    let mut header = NetlinkHeader::default();
    header.message_type = kind;
    let message = RouteNetlinkMessage::deserialize(&header, body).inspect_err(not_understood).ok()?;
    let is_other_route = matches!(&message, RouteNetlinkMessage::NewRoute(route) if route.header.destination_prefix_length > 0);
    (!is_other_route).then_some(message)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn what_the_kernel_lists_is_understood() {
        let host = dump_all().unwrap().host(&Surroundings::default());
        assert!(host.addresses.contains(&Ipv4Addr::LOCALHOST.into()), "{host:?}");
    }
}
