//! Chooses the endpoints that this node uses for each kind of client, as kube-proxy's
//! `CategorizeEndpoints` does.

use std::sync::{Arc, OnceLock};

use super::{
    desired::{Endpoint, Endpoints},
    objects::{self, TrafficPolicy},
};

/// The node that the choice is made for.
#[derive(Clone, Copy, Debug)]
pub(super) struct NodeTopology<'a> {
    pub(super) node: &'a str,
    pub(super) zone: Option<&'a str>,
}

/// The clients that the service port serves, and the traffic policies for them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Policies {
    pub(super) internal: TrafficPolicy,
    pub(super) external: TrafficPolicy,
    /// True if the service port has a node port, an external IP or a load-balancer address.
    pub(super) externally_accessible: bool,
}

impl Policies {
    fn uses_cluster(self) -> bool {
        self.internal == TrafficPolicy::Cluster || self.externally_accessible
    }

    fn uses_local(self) -> bool {
        self.internal == TrafficPolicy::Local
            || (self.external == TrafficPolicy::Local && self.externally_accessible)
    }
}

/// An endpoint of the service port, with the port number of its slice.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate<'a> {
    pub(super) endpoint: &'a objects::Endpoint,
    pub(super) port: u16,
    pub(super) local: bool,
}

impl Candidate<'_> {
    fn ready(&self) -> bool {
        self.endpoint.ready
    }

    fn serves(&self) -> bool {
        self.endpoint.ready || self.endpoint.serving
    }

    fn desired(&self) -> Endpoint {
        let objects::Endpoint { address, terminating, weight, .. } = *self.endpoint;
        Endpoint { address, port: self.port, local: self.local, terminating, weight }
    }

    /// Returns true if the pod is being stopped and still answers.
    fn draining(&self) -> bool {
        self.endpoint.serving && self.endpoint.terminating
    }

    fn hints_node(&self, node: &str) -> bool {
        self.endpoint.hints.as_ref().is_some_and(|hints| hints.nodes.iter().any(|hint| **hint == *node))
    }

    fn hints_zone(&self, zone: Option<&str>) -> bool {
        let Some(zone) = zone else { return false };
        self.endpoint.hints.as_ref().is_some_and(|hints| hints.zones.iter().any(|hint| **hint == *zone))
    }
}

/// The rule by which candidates are taken into a set.
#[derive(Clone, Copy, Debug)]
enum CandidateFilter {
    Nobody,
    Ready,
    ReadyForNode,
    ReadyForZone,
    ReadyHere,
    Draining,
    DrainingHere,
}

impl CandidateFilter {
    fn takes(self, candidate: &Candidate<'_>, here: NodeTopology<'_>) -> bool {
        match self {
            Self::Nobody => false,
            Self::Ready => candidate.ready(),
            Self::ReadyForNode => candidate.ready() && candidate.hints_node(here.node),
            Self::ReadyForZone => candidate.ready() && candidate.hints_zone(here.zone),
            Self::ReadyHere => candidate.ready() && candidate.local,
            Self::Draining => candidate.draining(),
            Self::DrainingHere => candidate.draining() && candidate.local,
        }
    }

    fn or_else(self, other: Self, candidates: &[Candidate<'_>], here: NodeTopology<'_>) -> Self {
        if candidates.iter().any(|candidate| self.takes(candidate, here)) { self } else { other }
    }
}

/// Returns true if the candidate is perhaps not used for clients outside on its own node. Only its
/// slice decides that, so that all nodes get the same answer.
pub(super) fn needs_snat(candidate: &Candidate<'_>) -> bool {
    let objects::Endpoint { hints, node, .. } = candidate.endpoint;
    candidate.serves() && (hints.is_some() || node.as_deref().is_none_or(str::is_empty))
}

/// Returns the rule for scope cluster. Hints count only if every ready endpoint has one. A single
/// endpoint without a hint is a sign that the hints are being introduced or withdrawn.
fn cluster_rule(candidates: &[Candidate<'_>], here: NodeTopology<'_>) -> CandidateFilter {
    let (mut node_hints, mut zone_hints) = (true, true);
    let (mut for_node, mut for_zone) = (false, false);
    for candidate in candidates.iter().filter(|candidate| candidate.ready()) {
        let hints = candidate.endpoint.hints.as_ref();
        node_hints &= hints.is_some_and(|hints| !hints.nodes.is_empty());
        zone_hints &= hints.is_some_and(|hints| !hints.zones.is_empty());
        for_node |= candidate.hints_node(here.node);
        for_zone |= candidate.hints_zone(here.zone);
    }
    if node_hints && for_node {
        CandidateFilter::ReadyForNode
    } else if zone_hints && for_zone {
        CandidateFilter::ReadyForZone
    } else {
        CandidateFilter::Ready
    }
}

/// The largest size of a set that service ports share. Most service ports have few endpoints, and a
/// set of all of them.
const MOST_SHARED: usize = 64;

/// Returns the set in shared memory if it has all of a small number of endpoints. Such sets are the
/// same for all service ports.
fn shared(set: Vec<u32>) -> Arc<[u32]> {
    static WHOLE: [OnceLock<Arc<[u32]>>; MOST_SHARED + 1] = [const { OnceLock::new() }; MOST_SHARED + 1];
    let is_whole = (0..).zip(&set).all(|(position, index)| position == *index);
    match WHOLE.get(set.len()).filter(|_| is_whole) {
        Some(whole) => Arc::clone(whole.get_or_init(|| set.into())),
        None => set.into(),
    }
}

/// Chooses the endpoints among `candidates`, which have no duplicates and are in the order of
/// address and port.
pub(super) fn choose(candidates: &[Candidate<'_>], policies: Policies, here: NodeTopology<'_>) -> Endpoints {
    let cluster_rule = if policies.uses_cluster() {
        cluster_rule(candidates, here).or_else(CandidateFilter::Draining, candidates, here)
    } else {
        CandidateFilter::Nobody
    };
    let local_rule = if policies.uses_local() {
        CandidateFilter::ReadyHere.or_else(CandidateFilter::DrainingHere, candidates, here)
    } else {
        CandidateFilter::Nobody
    };

    let mut all = Vec::with_capacity(candidates.len());
    let (mut cluster, mut local, mut unused) = (Vec::new(), Vec::new(), Vec::new());
    for is_local in [true, false] {
        for candidate in candidates.iter().filter(|candidate| candidate.local == is_local) {
            let in_cluster = cluster_rule.takes(candidate, here);
            let in_local = local_rule.takes(candidate, here);
            if !in_cluster && !in_local {
                unused.extend(candidate.serves().then(|| candidate.desired()));
                continue;
            }
            let index = all.len() as u32;
            all.push(candidate.desired());
            if in_cluster {
                cluster.push(index);
            }
            if in_local {
                local.push(index);
            }
        }
    }
    all.shrink_to_fit();

    let [cluster, local] = [cluster, local].map(shared);
    let of = |policy| match policy {
        TrafficPolicy::Cluster => Arc::clone(&cluster),
        TrafficPolicy::Local => Arc::clone(&local),
    };
    let external = if policies.externally_accessible { of(policies.external) } else { Arc::default() };
    let internal = of(policies.internal);
    let any = !cluster.is_empty()
        || (policies.uses_local()
            && candidates.iter().any(|candidate| candidate.ready() || candidate.draining()));
    Endpoints { all, cluster, internal, external, any, need_snat: false, unused: unused.into() }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::all_of_three(0, 3, true)]
    #[case::nobody(0, 0, true)]
    #[case::all_but_the_first(1, 3, false)]
    #[case::too_many(0, MOST_SHARED as u32 + 1, false)]
    fn sets_of_all_endpoints_share_their_memory(
        #[case] first: u32,
        #[case] count: u32,
        #[case] expected: bool,
    ) {
        let set = || shared((first..first + count).collect());
        assert!(set().iter().copied().eq(first..first + count));
        assert_eq!(Arc::ptr_eq(&set(), &set()), expected);
    }
}
