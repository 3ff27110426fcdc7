//! Flows that are led where nobody serves their clients: which they are, and their end.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use nix::sys::socket::AddressFamily;
use rustc_hash::FxHashMap;

use super::address_family;
use crate::{
    model::{
        desired::{Frontend, FrontendKind},
        objects::IpFamily,
    },
    sys::{
        CallError,
        conntrack::{Conntrack, TrackedFlow},
    },
};

/// What is dialled; without an address: the node port on each of the node's addresses.
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

/// Who may go on answering the clients of a frontend.
pub(in crate::dataplane) trait Repliers {
    fn has(&self, replier: SocketAddr) -> bool;
}

/// What is to be ended since flows were ended last, by the frontend that was dialled.
#[derive(Debug)]
pub(in crate::dataplane) struct StaleFlows<R> {
    pending: FxHashMap<(IpFamily, Dialled), R>,
    /// Flows that were ended so far.
    pub(in crate::dataplane) ended: BTreeMap<IpFamily, u64>,
}

impl<R> Default for StaleFlows<R> {
    fn default() -> Self {
        let ended = IpFamily::ALL.into_iter().map(|family| (family, 0)).collect();
        Self { pending: FxHashMap::default(), ended }
    }
}

impl<R: Repliers> StaleFlows<R> {
    /// From now on only these answer the frontend's clients.
    pub(in crate::dataplane) fn answered_by(&mut self, family: IpFamily, frontend: &Frontend, repliers: R) {
        self.pending.insert((family, dialled(frontend)), repliers);
    }

    /// As [`Self::answered_by`], where nobody was named yet.
    pub(in crate::dataplane) fn else_answered_by(
        &mut self,
        family: IpFamily,
        frontend: &Frontend,
        repliers: R,
    ) {
        self.pending.entry((family, dialled(frontend))).or_insert(repliers);
    }

    pub(in crate::dataplane) fn is_stale(
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

    /// Ends them. What fails stays pending for the next call. `node_addresses`: where node ports are served. False: nothing was to be
    /// ended, or it failed.
    pub(in crate::dataplane) fn end(&mut self, node_addresses: &BTreeSet<IpAddr>) -> bool {
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

    /// Ends TCP connections to these frontends that began before anybody served them. The kernel translates a connection as it did its
    /// first packet: not at all, however often the client repeats its SYN, and for two minutes whoever uses its port again.
    pub(in crate::dataplane) fn end_unanswered(mut self, node_addresses: &BTreeSet<IpAddr>) {
        if let Err(error) = self.try_end(node_addresses, Conntrack::unanswered_connections) {
            tracing::warn!(%error, "TCP connections that began before this start could not be ended; clients may have to repeat them");
        }
    }

    fn try_end(
        &mut self,
        node_addresses: &BTreeSet<IpAddr>,
        list: impl Fn(&Conntrack, AddressFamily) -> Result<Vec<TrackedFlow>, CallError>,
    ) -> Result<(), CallError> {
        let conntrack = Conntrack::open()?;
        let families: BTreeSet<IpFamily> = self.pending.keys().map(|(family, _)| *family).collect();
        for family in families {
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
        }
        Ok(())
    }

    #[cfg(test)]
    pub(in crate::dataplane) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    #[cfg(test)]
    pub(in crate::dataplane) fn forget(&mut self) {
        self.pending.clear();
    }
}
