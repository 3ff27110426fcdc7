//! Chooses the endpoint of a client's new connection. Pure: the caller passes the time.

use std::{
    collections::{BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use ipnet::IpNet;
use rustc_hash::FxHashSet;

use super::plan::Entrance;
use crate::{
    model::{
        desired::DesiredPort,
        node::{Host, LocalTraffic},
    },
    modes::netfilter::{EndpointSet, Outcome, PortPolicy},
};

/// The most clients that one service port remembers. A further client then replaces one of them.
const MOST_REMEMBERED: usize = 65_536;

/// The reason why a client gets no endpoint.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Refusal {
    NoEndpoint,
    /// The client is in none of the source ranges.
    SourceRanges,
}

/// The addresses that distinguish clients on this node from those outside.
#[derive(Clone, Debug, Default)]
struct Neighbours {
    node: BTreeSet<IpAddr>,
    pods: Vec<IpNet>,
}

impl Neighbours {
    fn new(host: &Host) -> Self {
        let node = host.node_port_addresses.iter().chain(&host.masquerade_addresses).copied().collect();
        let pods = match &host.local_traffic {
            LocalTraffic::FromCidrs(cidrs) => cidrs.clone(),
            // A listener does not see by which interface a client's packets come.
            LocalTraffic::FromBridge(_) | LocalTraffic::FromInterfacePrefix(_) => Vec::new(),
        };
        Self { node, pods }
    }

    fn is_node(&self, client: IpAddr) -> bool {
        client.is_loopback() || self.node.contains(&client)
    }

    fn is_pod(&self, client: IpAddr) -> bool {
        self.pods.iter().any(|network| network.contains(&client))
    }
}

/// A service port as its listeners see it.
#[derive(Debug)]
pub(super) struct Balancer {
    policy: PortPolicy,
    neighbours: Neighbours,
    source_ranges: Vec<IpNet>,
    sets: [EndpointTurn; 3],
    /// The endpoints of all sets.
    endpoints: FxHashSet<SocketAddr>,
    affinity: Option<Affinity>,
}

impl Balancer {
    /// Returns a balancer. Its first turn is the endpoint with the index `first`, modulo the number
    /// of endpoints.
    pub(super) fn new(port: &DesiredPort, host: &Host, first: usize) -> Self {
        let mut balancer = Self {
            policy: PortPolicy::new(port, host),
            neighbours: Neighbours::default(),
            source_ranges: Vec::new(),
            sets: std::array::from_fn(|_| EndpointTurn { endpoints: Vec::new(), next: first }),
            endpoints: FxHashSet::default(),
            affinity: None,
        };
        balancer.update(port, host);
        balancer
    }

    /// Takes over a changed service port. The turn and the remembered clients stay.
    pub(super) fn update(&mut self, port: &DesiredPort, host: &Host) {
        self.policy = PortPolicy::new(port, host);
        self.neighbours = Neighbours::new(host);
        self.source_ranges.clone_from(&port.source_ranges);
        let address = |index: &u32| {
            let endpoint = port.endpoints.all.get(*index as usize)?;
            Some(SocketAddr::new(endpoint.address, endpoint.port))
        };
        for (turn, set) in self.sets.iter_mut().zip(SETS) {
            turn.endpoints = set.of(port).iter().filter_map(address).collect();
        }
        self.endpoints = self.sets.iter().flat_map(|turn| &turn.endpoints).copied().collect();
        let timeout = port.affinity_seconds.map(|seconds| Duration::from_secs(seconds.into()));
        self.affinity = timeout.map(|timeout| {
            let remembered = self.affinity.take().map(|affinity| affinity.remembered).unwrap_or_default();
            Affinity { timeout, remembered }
        });
    }

    /// Chooses an endpoint. `tried` are endpoints that did not answer. They are chosen again only
    /// if there is no other.
    pub(super) fn choose(
        &mut self,
        entrance: Entrance,
        client: IpAddr,
        tried: &[SocketAddr],
        now: Instant,
    ) -> Result<SocketAddr, Refusal> {
        let set = self.set_for(entrance, client)?;
        let turn = &mut self.sets[index(set)];
        let remembered = self.affinity.as_ref().and_then(|affinity| affinity.endpoint_of(client, now));
        let endpoint = remembered
            .filter(|endpoint| turn.endpoints.contains(endpoint) && !tried.contains(endpoint))
            .or_else(|| turn.next(tried))
            .ok_or(Refusal::NoEndpoint)?;
        if let Some(affinity) = &mut self.affinity {
            affinity.remember(client, endpoint, now);
        }
        Ok(endpoint)
    }

    fn set_for(&self, entrance: Entrance, client: IpAddr) -> Result<EndpointSet, Refusal> {
        let policy = &self.policy;
        if entrance == Entrance::LoadBalancer
            && !self.source_ranges.is_empty()
            && !self.source_ranges.iter().any(|range| range.contains(&client))
        {
            return Err(Refusal::SourceRanges);
        }
        let clients = match entrance {
            Entrance::ClusterIp => policy.internal,
            Entrance::External | Entrance::LoadBalancer => {
                let from_node = policy.external_from_node.filter(|_| self.neighbours.is_node(client));
                let from_pods = policy.external_from_pods.filter(|_| self.neighbours.is_pod(client));
                from_node.or(from_pods).unwrap_or(policy.external)
            }
        };
        match clients.outcome {
            Outcome::Balance(set) => Ok(set),
            Outcome::Reject | Outcome::Drop => Err(Refusal::NoEndpoint),
        }
    }

    /// Returns true if some set has the endpoint.
    pub(super) fn has(&self, endpoint: SocketAddr) -> bool {
        self.endpoints.contains(&endpoint)
    }

    pub(super) fn forget_expired(&mut self, now: Instant) {
        if let Some(affinity) = &mut self.affinity {
            let Affinity { timeout, remembered } = affinity;
            remembered.retain(|_, one| !one.is_expired(*timeout, now));
        }
    }
}

const SETS: [EndpointSet; 3] = [EndpointSet::Cluster, EndpointSet::Internal, EndpointSet::External];

/// Returns the index of the set in [`SETS`].
const fn index(set: EndpointSet) -> usize {
    match set {
        EndpointSet::Cluster => 0,
        EndpointSet::Internal => 1,
        EndpointSet::External => 2,
    }
}

/// An endpoint set, and the endpoint whose turn it is.
#[derive(Debug)]
struct EndpointTurn {
    endpoints: Vec<SocketAddr>,
    /// The index of the next endpoint. It may be beyond the end, and counts modulo the number of
    /// endpoints.
    next: usize,
}

impl EndpointTurn {
    fn next(&mut self, tried: &[SocketAddr]) -> Option<SocketAddr> {
        let count = self.endpoints.len();
        let first = self.next.checked_rem(count)?;
        let turns = (0..count).map(|step| (first + step) % count);
        let untried = turns.clone().find(|turn| !tried.contains(&self.endpoints[*turn]));
        let turn = untried.unwrap_or(first);
        self.next = turn + 1;
        self.endpoints.get(turn).copied()
    }
}

#[derive(Debug)]
struct Affinity {
    timeout: Duration,
    remembered: HashMap<IpAddr, Remembered>,
}

#[derive(Debug)]
struct Remembered {
    endpoint: SocketAddr,
    used: Instant,
}

impl Remembered {
    fn is_expired(&self, timeout: Duration, now: Instant) -> bool {
        now.saturating_duration_since(self.used) > timeout
    }
}

impl Affinity {
    fn endpoint_of(&self, client: IpAddr, now: Instant) -> Option<SocketAddr> {
        let remembered = self.remembered.get(&client)?;
        (!remembered.is_expired(self.timeout, now)).then_some(remembered.endpoint)
    }

    fn remember(&mut self, client: IpAddr, endpoint: SocketAddr, now: Instant) {
        if self.remembered.len() >= MOST_REMEMBERED
            && !self.remembered.contains_key(&client)
            && let Some(any) = self.remembered.keys().next().copied()
        {
            self.remembered.remove(&any);
        }
        self.remembered.insert(client, Remembered { endpoint, used: now });
    }
}

pub(super) type SharedBalancer = Arc<std::sync::Mutex<Balancer>>;

#[cfg(test)]
mod tests;
