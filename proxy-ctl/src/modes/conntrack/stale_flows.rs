//! Finds and ends UDP flows and TCP connections that lead to an address where nobody serves their
//! clients any more.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::Instant,
};

use nix::sys::socket::AddressFamily;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use rustc_hash::{FxHashMap, FxHashSet};

use super::address_family;
use crate::{
    model::{
        desired::{Frontend, FrontendKind},
        objects::IpFamily,
    },
    sys::{
        CallError,
        net::{
            conntrack::{AnsweredConnection, BegunConnection, Conntrack, TrackedFlow},
            socket_diag::SocketDiag,
        },
    },
};

/// An address and port that clients dial. Without an address it is the node port on each of the
/// node's addresses.
type Dialled = (Option<IpAddr>, u16);

fn dialled(frontend: &Frontend) -> Dialled {
    let address = match frontend.kind {
        FrontendKind::NodePort => None,
        FrontendKind::ClusterIp | FrontendKind::ExternalIp | FrontendKind::LoadBalancer => {
            Some(frontend.address)
        }
    };
    (address, frontend.port)
}

/// The addresses that may still answer the clients of a frontend.
pub(in crate::modes) trait Repliers {
    fn has(&self, replier: SocketAddr) -> bool;
}

/// The frontends that have changed since flows were last ended. Each is listed with the addresses
/// that may still answer its clients, and flows to all other addresses are ended.
#[derive(Debug)]
pub(in crate::modes) struct StaleFlows<R> {
    pending: FxHashMap<(IpFamily, Dialled), R>,
    /// The number of flows that were ended so far.
    pub(in crate::modes) ended: BTreeMap<IpFamily, u64>,
    /// The durations, in seconds, of listing flows and ending the stale ones.
    pub(in crate::modes) took: BTreeMap<IpFamily, Histogram>,
}

impl<R> Default for StaleFlows<R> {
    fn default() -> Self {
        let ended = IpFamily::ALL.into_iter().map(|family| (family, 0)).collect();
        // The buckets are kube-proxy's: 1 ms to 16.384 s.
        let took = || Histogram::new(exponential_buckets(0.001, 2.0, 15));
        let took = IpFamily::ALL.into_iter().map(|family| (family, took())).collect();
        Self { pending: FxHashMap::default(), ended, took }
    }
}

impl<R: Repliers> StaleFlows<R> {
    /// Notes that from now on only `repliers` answer the frontend's clients.
    pub(in crate::modes) fn answered_by(&mut self, family: IpFamily, frontend: &Frontend, repliers: R) {
        self.pending.insert((family, dialled(frontend)), repliers);
    }

    /// Does the same as [`Self::answered_by`], unless repliers were named for the frontend already.
    pub(in crate::modes) fn else_answered_by(&mut self, family: IpFamily, frontend: &Frontend, repliers: R) {
        self.pending.entry((family, dialled(frontend))).or_insert(repliers);
    }

    pub(in crate::modes) fn is_stale(
        &self,
        family: IpFamily,
        flow: &TrackedFlow,
        node_addresses: &BTreeSet<IpAddr>,
    ) -> bool {
        let (address, port) = (flow.destination.ip(), flow.destination.port());
        let of_address = self.pending.get(&(family, (Some(address), port)));
        let of_node_port =
            || self.pending.get(&(family, (None, port))).filter(|_| node_addresses.contains(&address));
        of_address.or_else(of_node_port).is_some_and(|repliers| !repliers.has(flow.replier))
    }

    /// Ends the stale UDP flows. If that fails, they stay pending for the next call. Node ports are
    /// served at `node_addresses`. Returns false if there was nothing to end, or if it failed.
    pub(in crate::modes) fn end(&mut self, node_addresses: &BTreeSet<IpAddr>) -> bool {
        if self.pending.is_empty() {
            return false;
        }
        let ended = self.try_end(node_addresses, Conntrack::udp_flows);
        match &ended {
            Ok(()) => self.pending.clear(),
            Err(error) => tracing::warn!(
                %error,
                "UDP flows whose endpoint or listener is gone could not be ended; it is tried again with the next change"
            ),
        }
        ended.is_ok()
    }

    /// Ends TCP connections to these frontends that began before this start and that nobody answers
    /// any more.
    ///
    /// The kernel keeps translating a connection as it translated the first packet. It mostly
    /// treats a new connection from the same client port in the same way. If nobody served the
    /// first packet, the new connection is not translated for up to two minutes. If a process of
    /// mode userspace had accepted the old connection and has ended, the new connection goes to a
    /// closed port for up to five days, because conntrack has not seen both ends close.
    ///
    /// `node_addresses` is as in [`Self::end`]. `own` are further addresses at which a process of
    /// mode userspace listened. Returns false if it failed.
    pub(in crate::modes) fn end_unanswered(
        mut self,
        node_addresses: &BTreeSet<IpAddr>,
        own: &[IpAddr],
    ) -> bool {
        let is_own = |address: IpAddr| {
            address.is_loopback() || own.contains(&address) || node_addresses.contains(&address)
        };
        let ended = self.try_end(node_addresses, |conntrack, family| unanswered(conntrack, family, is_own));
        if let Err(error) = &ended {
            tracing::warn!(
                %error,
                "TCP connections from before this start that nobody answers could not be ended; their clients may be refused once, and it is tried again"
            );
        }
        ended.is_ok()
    }

    fn try_end(
        &mut self,
        node_addresses: &BTreeSet<IpAddr>,
        list: impl Fn(&Conntrack, AddressFamily) -> Result<Vec<TrackedFlow>, CallError>,
    ) -> Result<(), CallError> {
        let conntrack = Conntrack::open()?;
        let families: BTreeSet<IpFamily> = self.pending.keys().map(|(family, _)| *family).collect();
        for family in families {
            let started = Instant::now();
            let kernels = address_family(family);
            let flows = list(&conntrack, kernels)?;
            let mut ended = 0;
            for flow in flows.iter().filter(|flow| self.is_stale(family, flow, node_addresses)) {
                ended += u64::from(conntrack.remove(kernels, flow)?);
            }
            if ended > 0 {
                tracing::debug!(ended, family = family.name(), "stale flows ended");
            }
            *self.ended.entry(family).or_default() += ended;
            if let Some(took) = self.took.get(&family) {
                took.observe(started.elapsed().as_secs_f64());
            }
        }
        Ok(())
    }

    #[cfg(test)]
    pub(in crate::modes) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    #[cfg(test)]
    pub(in crate::modes) fn forget(&mut self) {
        self.pending.clear();
    }
}

/// Lists connections that nobody has answered, and answered connections to this node whose socket
/// is gone. A client that an overloaded listener knows only by SYN cookies has no socket either, so
/// its connection is listed too.
fn unanswered(
    conntrack: &Conntrack,
    family: AddressFamily,
    is_own: impl Fn(IpAddr) -> bool,
) -> Result<Vec<TrackedFlow>, CallError> {
    let (mut unanswered, mut answered) = (Vec::new(), Vec::new());
    // Connections are listed before sockets, so that each connection that goes on has its socket by
    // then.
    for connection in conntrack.begun_connections(family, is_own)? {
        match connection {
            BegunConnection::Unanswered(flow) => unanswered.push(flow),
            BegunConnection::Answered(connection) => answered.push(connection),
        }
    }
    unanswered.extend(without_socket(answered)?);
    Ok(unanswered)
}

fn without_socket(
    mut connections: Vec<AnsweredConnection>,
) -> Result<impl Iterator<Item = TrackedFlow>, CallError> {
    /// The number of lists that are taken. A list may miss a socket while others close.
    const LISTS: usize = 2;
    for _ in 0..LISTS {
        if connections.is_empty() {
            break;
        }
        let sockets = match open_sockets() {
            Err(error) if error.errno() == libc::ENOENT => {
                tracing::warn!(
                    "the kernel lists no sockets (CONFIG_INET_TCP_DIAG): connections of an ended process are not told from others"
                );
                connections.clear();
                break;
            }
            sockets => sockets?,
        };
        connections.retain(|of| !sockets.contains(&(of.flow.replier, of.answers_to)));
    }
    Ok(connections.into_iter().map(|connection| connection.flow))
}

/// Returns the local end and the peer of each open TCP socket.
fn open_sockets() -> Result<FxHashSet<(SocketAddr, SocketAddr)>, CallError> {
    // A socket of IPv6 may have clients of IPv4.
    let canonical = |end: SocketAddr| SocketAddr::new(end.ip().to_canonical(), end.port());
    let diag = SocketDiag::open()?;
    let mut ends = FxHashSet::default();
    for family in IpFamily::ALL {
        let sockets = diag.connections(address_family(family))?;
        let open = sockets.iter().filter(|socket| socket.is_open);
        ends.extend(open.map(|socket| (canonical(socket.local), canonical(socket.peer))));
    }
    Ok(ends)
}
