//! Raises `route_epoch` when a route, rule, neighbour, address or interface changes, so that
//! programs look up next hops again. A thread does it, so that it waits for no other work of the
//! controller.

use std::{
    collections::HashMap,
    io,
    net::IpAddr,
    os::{fd::AsFd as _, unix::net::UnixStream},
    path::Path,
    thread::{self, JoinHandle},
};

use netlink_packet_route::{
    RouteNetlinkMessage,
    neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage},
};
use netlink_sys::Socket;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use proxy_common::{inventory::map_name, layout::RouteEpoch};

use crate::{
    modes::ebpf::{Error, maps::handles::shared},
    sys::{
        CallError,
        bpf::mmap::SharedArray,
        net::rtnetlink::{self, ADDRESSES, LINKS, NEIGHBOURS, NEXT_HOPS, ROUTES, RULES, Waiting},
    },
};

/// The milliseconds after a change at which the epoch is raised again, because the kernel reports
/// some changes before it makes them.
const SETTLED_AFTER: u8 = 50;

/// The thread that follows changes. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct RouteWatch {
    alive: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl RouteWatch {
    /// Starts the thread. `folder` has the maps.
    pub(crate) fn begin(folder: &Path) -> Result<Self, Error> {
        let epoch: SharedArray<RouteEpoch> = shared(folder, map_name::route_epoch, true)?;
        let groups = [LINKS, NEIGHBOURS, NEXT_HOPS].into_iter().chain(ADDRESSES).chain(ROUTES).chain(RULES);
        let socket = rtnetlink::subscribe(groups).map_err(Error::Routes)?;
        let pair = UnixStream::pair().map_err(CallError::of("socketpair"));
        let (alive, ended) = pair.map_err(Error::Routes)?;
        let mut follower = Follower { epoch, known: Neighbours::default() };
        // Changes may have been missed before this.
        follower.raise().map_err(Error::Routes)?;
        let follow = move || {
            if let Err(error) = follower.follow(&socket, &ended) {
                tracing::warn!(%error, "changes of routes are not followed for a moment");
            }
        };
        let spawned = thread::Builder::new().name("routes".to_owned()).spawn(follow);
        let thread = spawned.map_err(CallError::of("clone")).map_err(Error::Routes)?;
        Ok(Self { alive: Some(alive), thread: Some(thread) })
    }

    /// Returns true if the thread has failed. The reason was logged.
    pub(crate) fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for RouteWatch {
    fn drop(&mut self) {
        self.alive = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that follows routes has panicked");
        }
    }
}

struct Follower {
    epoch: SharedArray<RouteEpoch>,
    known: Neighbours,
}

impl Follower {
    /// Follows changes until the other end of `ended` is closed.
    fn follow(&mut self, socket: &Socket, ended: &UnixStream) -> Result<(), CallError> {
        let mut is_settled = true;
        loop {
            let [changes, end] = [socket.as_fd(), ended.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
            let mut descriptors = [changes, end];
            let timeout = if is_settled { PollTimeout::NONE } else { SETTLED_AFTER.into() };
            match poll(&mut descriptors, timeout) {
                Ok(0) => {
                    self.raise()?;
                    is_settled = true;
                    continue;
                }
                Ok(_) => {}
                Err(nix::Error::EINTR) => continue,
                Err(error) => return Err(CallError::new("poll", error.into())),
            }
            let [_, end] = descriptors;
            if end.any().unwrap_or_default() {
                return Ok(());
            }
            if self.take(socket)? {
                self.raise()?;
                is_settled = false;
            }
        }
    }

    /// Reads the waiting messages, and returns true if packets may go elsewhere from now on.
    fn take(&mut self, socket: &Socket) -> Result<bool, CallError> {
        let mut is_news = false;
        match rtnetlink::take_waiting(socket, |change| is_news |= self.known.is_news(change))? {
            Waiting::Changes | Waiting::Nothing => {}
            Waiting::Lost => {
                rtnetlink::drop_waiting(socket)?;
                self.known = Neighbours::default();
                is_news = true;
            }
        }
        Ok(is_news)
    }

    fn raise(&self) -> Result<(), CallError> {
        let is_raised = self.epoch.get(0).is_some_and(|RouteEpoch { number, .. }| {
            self.epoch.set(0, &RouteEpoch { number: number.wrapping_add(1), ..RouteEpoch::default() })
        });
        if is_raised {
            Ok(())
        } else {
            Err(CallError::new("mmap of a BPF array", io::ErrorKind::NotFound.into()))
        }
    }
}

/// The known link addresses, by interface and IP address; `None` for a neighbour that does not
/// answer.
///
/// The kernel also reports a neighbour each time that it finds it unchanged, which changes no next
/// hop.
#[derive(Debug, Default)]
struct Neighbours {
    addresses: HashMap<(u32, IpAddr), Option<Vec<u8>>>,
}

impl Neighbours {
    /// Returns true if packets may go elsewhere from now on. `None` is a change that is not
    /// understood, such as one of a nexthop object.
    fn is_news(&mut self, change: Option<&RouteNetlinkMessage>) -> bool {
        match change {
            Some(RouteNetlinkMessage::NewNeighbour(neighbour)) => {
                let (Some(key), link) = key_and_link(neighbour) else { return false };
                let link = link.map(<[u8]>::to_vec);
                self.addresses.insert(key, link.clone()).is_none_or(|before| before != link)
            }
            Some(RouteNetlinkMessage::DelNeighbour(neighbour)) => {
                let (Some(key), _) = key_and_link(neighbour) else { return false };
                self.addresses.remove(&key) != Some(None)
            }
            _ => true,
        }
    }
}

/// Returns the interface and IP address of a neighbour, and its link address. A bridge's entry has
/// no IP address, and so no key.
fn key_and_link(neighbour: &NeighbourMessage) -> (Option<(u32, IpAddr)>, Option<&[u8]>) {
    let (mut key, mut link) = (None, None);
    for attribute in &neighbour.attributes {
        if let NeighbourAttribute::Destination(NeighbourAddress::Inet(address)) = attribute {
            key = Some((neighbour.header.ifindex, IpAddr::from(*address)));
        } else if let NeighbourAttribute::Destination(NeighbourAddress::Inet6(address)) = attribute {
            key = Some((neighbour.header.ifindex, IpAddr::from(*address)));
        } else if let NeighbourAttribute::LinkLayerAddress(address) = attribute {
            link = Some(address.as_slice());
        }
    }
    (key, link)
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
            assert_eq!(neighbours.is_news(Some(&change)), expected, "{name}");
        }
        assert!(neighbours.is_news(None), "something else");
        assert_eq!(neighbours.addresses, HashMap::default());
    }
}
