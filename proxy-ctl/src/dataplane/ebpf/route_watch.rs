//! Next hops that the programs have kept in flows are looked up anew once a route, a rule, a neighbour or an interface changes. The kernel tells a
//! thread so, which raises `route_epoch`: no other change of the tables has to be waited for.

use std::{
    collections::HashMap,
    net::IpAddr,
    os::{fd::AsFd as _, unix::net::UnixStream},
    path::Path,
    thread,
};

use netlink_packet_route::{
    RouteNetlinkMessage,
    neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage},
};
use netlink_sys::Socket;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use proxy_common::{inventory::table, layout::RouteEpoch};

use super::{Error, tables::shared};
use crate::sys::{
    CallError,
    mmap::SharedArray,
    rtnetlink::{self, ADDRESSES, LINKS, NEIGHBOURS, NEXT_HOPS, ROUTES, RULES, Waiting},
};

/// The thread ends with it.
#[derive(Debug)]
pub(super) struct RouteWatch {
    _alive: UnixStream,
}

impl RouteWatch {
    /// `maps`: the folder of the tables.
    pub(super) fn begin(maps: &Path) -> Result<Self, Error> {
        let epoch: SharedArray<RouteEpoch> = shared(maps, table::route_epoch, true)?;
        let groups = [LINKS, NEIGHBOURS, NEXT_HOPS].into_iter().chain(ADDRESSES).chain(ROUTES).chain(RULES);
        let socket = rtnetlink::subscribe(groups).map_err(Error::Routes)?;
        let pair = UnixStream::pair().map_err(CallError::of("socketpair"));
        let (alive, ended) = pair.map_err(Error::Routes)?;
        let mut follower = Follower { epoch, known: Neighbours::default() };
        // Changes may have been missed before this.
        follower.raise();
        let follow = move || {
            if let Err(error) = follower.follow(&socket, &ended) {
                tracing::warn!(%error, "changes of routes are not followed: next hops are kept for up to a second");
            }
        };
        let spawned = thread::Builder::new().name("routes".to_owned()).spawn(follow);
        spawned.map_err(CallError::of("clone")).map_err(Error::Routes)?;
        Ok(Self { _alive: alive })
    }
}

struct Follower {
    epoch: SharedArray<RouteEpoch>,
    known: Neighbours,
}

impl Follower {
    /// Until the other end of `ended` is closed.
    fn follow(&mut self, socket: &Socket, ended: &UnixStream) -> Result<(), CallError> {
        loop {
            let [changes, end] = [socket.as_fd(), ended.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
            let mut descriptors = [changes, end];
            match poll(&mut descriptors, PollTimeout::NONE) {
                Ok(_) => {}
                Err(nix::Error::EINTR) => continue,
                Err(error) => return Err(CallError::new("poll", error.into())),
            }
            let [_, end] = descriptors;
            if end.any().unwrap_or_default() {
                return Ok(());
            }
            let mut is_over = false;
            let waiting = rtnetlink::take_waiting(socket, |change| is_over |= self.known.is_news(change))?;
            if waiting == Waiting::Lost {
                self.known = Neighbours::default();
            }
            if is_over || waiting == Waiting::Lost {
                self.raise();
            }
        }
    }

    fn raise(&self) {
        let RouteEpoch { number, .. } = self.epoch.get(0).unwrap_or_default();
        let raised = RouteEpoch { number: number.wrapping_add(1), ..RouteEpoch::default() };
        let is_written = self.epoch.set(0, &raised);
        debug_assert!(is_written, "the array has one element, and is mapped for writing");
    }
}

/// Link addresses by interface and address; `None`: it does not answer. The kernel tells each time that it finds a neighbour still there, which
/// changes no next hop.
#[derive(Debug, Default)]
struct Neighbours {
    addresses: HashMap<(u32, IpAddr), Option<Vec<u8>>>,
}

impl Neighbours {
    /// May packets go elsewhere from now on?
    fn is_news(&mut self, change: &RouteNetlinkMessage) -> bool {
        match change {
            RouteNetlinkMessage::NewNeighbour(neighbour) => {
                let (Some(key), link) = key_and_link(neighbour) else { return false };
                let link = link.map(<[u8]>::to_vec);
                self.addresses.insert(key, link.clone()).is_none_or(|before| before != link)
            }
            RouteNetlinkMessage::DelNeighbour(neighbour) => {
                let (Some(key), _) = key_and_link(neighbour) else { return false };
                self.addresses.remove(&key) != Some(None)
            }
            _ => true,
        }
    }
}

/// No key: it is not of an IP address, but of a bridge.
fn key_and_link(neighbour: &NeighbourMessage) -> (Option<(u32, IpAddr)>, Option<&[u8]>) {
    let (mut key, mut link) = (None, None);
    for attribute in &neighbour.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(address)) => {
                key = Some(IpAddr::from(*address))
            }
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(address)) => {
                key = Some(IpAddr::from(*address))
            }
            NeighbourAttribute::LinkLayerAddress(address) => link = Some(address.as_slice()),
            _ => {}
        }
    }
    (key.map(|address| (neighbour.header.ifindex, address)), link)
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::{link::LinkMessage, route::RouteMessage};

    use super::*;

    fn neighbour(number: u8, link: Option<u8>) -> NeighbourMessage {
        let mut neighbour = NeighbourMessage::default();
        neighbour.header.ifindex = 2;
        neighbour
            .attributes
            .push(NeighbourAttribute::Destination(NeighbourAddress::Inet([10, 0, 0, number].into())));
        neighbour.attributes.extend(link.map(|link| NeighbourAttribute::LinkLayerAddress(vec![link; 6])));
        neighbour
    }

    #[test]
    fn what_changes_next_hops_is_news() {
        let is = |number, link| RouteNetlinkMessage::NewNeighbour(neighbour(number, link));
        let is_gone = |number| RouteNetlinkMessage::DelNeighbour(neighbour(number, None));
        let of_a_bridge = RouteNetlinkMessage::NewNeighbour(NeighbourMessage::default());
        let told = [
            ("its first word", is(1, Some(1)), true),
            ("it is still there", is(1, Some(1)), false),
            ("another of its interface", is(2, Some(2)), true),
            ("it has another link address", is(1, Some(3)), true),
            ("it does not answer", is(1, None), true),
            ("nor now", is(1, None), false),
            ("it is forgotten", is_gone(1), false),
            ("one that had answered is forgotten", is_gone(2), true),
            ("one of before this was followed", is_gone(3), true),
            ("of a bridge", of_a_bridge, false),
            ("a link", RouteNetlinkMessage::NewLink(LinkMessage::default()), true),
            ("a route", RouteNetlinkMessage::DelRoute(RouteMessage::default()), true),
        ];
        let mut neighbours = Neighbours::default();
        for (name, change, expected) in told {
            assert_eq!(neighbours.is_news(&change), expected, "{name}");
        }
        assert_eq!(neighbours.addresses, HashMap::default());
    }
}
