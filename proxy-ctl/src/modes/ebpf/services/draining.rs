//! Keeps endpoints of this node that terminate and still serve in the set for clients outside, for
//! service ports with direct server return.
//!
//! The node that a client dials may not know yet that such an endpoint terminates, and sends it
//! connections. So it stays in the set, where the programs search for it by its address. It has no
//! weight, so that this node itself never chooses it.

use std::sync::Arc;

use super::entries::members;
use crate::model::{
    desired::{DesiredPort, Endpoint, Endpoints},
    objects::{Forwarding, TrafficPolicy},
};

/// Returns the service port with such endpoints in its external set. `forwarding` is the port's:
/// `Snat` or `Dsr`.
pub(super) fn with_draining(port: &Arc<DesiredPort>, forwarding: Forwarding) -> Arc<DesiredPort> {
    let Endpoints { all, cluster, internal, external, unused, .. } = &port.endpoints;
    // With policy Local, the node that is dialled sends nothing to endpoints of other nodes.
    let is_sent_here = forwarding == Forwarding::Dsr && port.external_policy == TrafficPolicy::Cluster;
    let drains = |endpoint: &&Endpoint| endpoint.local && endpoint.terminating;
    if !is_sent_here || !unused.iter().any(|endpoint| drains(&endpoint)) || !has_weight(&port.endpoints) {
        return Arc::clone(port);
    }
    let draining = unused.iter().filter(drains).map(|endpoint| Endpoint { weight: 0, ..*endpoint });
    let mut numbered: Vec<_> = (0..).map(Some).zip(all.iter().copied()).collect();
    numbered.extend(draining.map(|endpoint| (None, endpoint)));
    // The order is the one of `Endpoints::all`.
    numbered.sort_by_key(|(_, endpoint)| (!endpoint.local, endpoint.address, endpoint.port));
    let set = |indexes: &[u32], is_extended: bool| -> Arc<[u32]> {
        let is_in =
            |before: Option<u32>| before.map_or(is_extended, |before| indexes.binary_search(&before).is_ok());
        (0..).zip(&numbered).filter(|(_, (before, _))| is_in(*before)).map(|(index, _)| index).collect()
    };
    let endpoints = Endpoints {
        cluster: set(cluster, false),
        internal: set(internal, false),
        external: set(external, true),
        unused: unused.iter().filter(|endpoint| !drains(endpoint)).copied().collect(),
        all: numbered.iter().map(|(_, endpoint)| *endpoint).collect(),
        ..port.endpoints
    };
    Arc::new(DesiredPort { endpoints, ..DesiredPort::clone(port) })
}

/// Returns true if clients outside can be sent to endpoints that have weight.
pub(super) fn has_weight(endpoints: &Endpoints) -> bool {
    members(endpoints, &endpoints.external).any(|endpoint| endpoint.weight > 0)
}

#[cfg(test)]
mod tests {
    use proxy_common::{
        family::V4,
        layout::{BACKEND_DRAINING, BACKEND_LOCAL},
    };
    use rstest::rstest;

    use super::*;
    use crate::{
        model::{
            Model,
            objects::{self, Algorithm},
            test_support::{HERE, local, remote, service, shown, slice},
        },
        modes::ebpf::services::entries::{Arrangement, backend_flags, contents, is_draining},
    };

    /// Returns a service port with a node port.
    fn port(policy: TrafficPolicy, endpoints: Vec<objects::Endpoint>) -> Arc<DesiredPort> {
        let mut model = Model::new(HERE);
        let service = service("shop/web", &["10.96.0.1"]).node_port(30080);
        model.apply_service(service.policies(TrafficPolicy::Cluster, policy));
        model.apply_slice(slice("shop/web-1", "web", endpoints));
        Arc::clone(&model.take_changes().changed[0])
    }

    fn weightless(address: &str) -> objects::Endpoint {
        objects::Endpoint { weight: 0, ..remote(address) }
    }

    #[rstest]
    #[case::one_of_this_node(vec![local("10.0.0.1").draining(), local("10.0.0.2"), remote("10.0.0.3")], &["10.0.0.1:8080"])]
    #[case::of_all_here(vec![remote("10.0.0.1"), local("10.0.0.2").draining()], &["10.0.0.2:8080"])]
    #[case::one_of_another_node(vec![remote("10.0.0.1").draining(), local("10.0.0.2")], &[])]
    #[case::one_that_serves_no_more(vec![local("10.0.0.1").draining().dead(), remote("10.0.0.2")], &[])]
    #[case::all_terminate(vec![local("10.0.0.1").draining(), remote("10.0.0.2").draining()], &[])]
    #[case::the_others_have_no_weight(vec![local("10.0.0.1").draining(), weightless("10.0.0.2")], &[])]
    fn who_is_added_to_the_set_for_clients_outside(
        #[case] endpoints: Vec<objects::Endpoint>,
        #[case] added: &[&str],
    ) {
        let before = port(TrafficPolicy::Cluster, endpoints);
        let now = with_draining(&before, Forwarding::Dsr);
        let mut others = shown(&now, &now.endpoints.external);
        let (ones, others): (Vec<_>, Vec<_>) =
            others.drain(..).partition(|one| added.contains(&one.as_str()));
        assert_eq!(
            (ones, others),
            (added.iter().map(ToString::to_string).collect(), shown(&before, &before.endpoints.external))
        );
        let Endpoints { all, cluster, internal, unused, .. } = &now.endpoints;
        assert_eq!(shown(&now, cluster), shown(&before, &before.endpoints.cluster));
        assert_eq!(shown(&now, internal), shown(&before, &before.endpoints.internal));
        assert!(all.is_sorted_by_key(|one| (!one.local, one.address, one.port)), "{all:?}");
        assert_eq!(all.len() + unused.len(), before.endpoints.all.len() + before.endpoints.unused.len());
        assert_eq!(with_draining(&now, Forwarding::Dsr), now, "a second time");
    }

    #[rstest]
    #[case::snat(TrafficPolicy::Cluster, Forwarding::Snat)]
    #[case::policy_local(TrafficPolicy::Local, Forwarding::Dsr)]
    fn where_no_other_node_sends_any(#[case] policy: TrafficPolicy, #[case] forwarding: Forwarding) {
        let before = port(policy, vec![local("10.0.0.1").draining(), local("10.0.0.2"), remote("10.0.0.3")]);
        assert!(Arc::ptr_eq(&with_draining(&before, forwarding), &before));
    }

    /// The slots of the set say that the endpoint drains, and the lookup table does not have it.
    #[rstest]
    fn this_node_chooses_none(
        #[values(Algorithm::Random, Algorithm::Maglev, Algorithm::LeastConnection)] algorithm: Algorithm,
    ) {
        let endpoints = vec![local("10.0.0.1").draining(), local("10.0.0.2"), remote("10.0.0.3")];
        let port = with_draining(&port(TrafficPolicy::Cluster, endpoints), Forwarding::Dsr);
        let set = Arrangement::of(&port.endpoints, algorithm).external;
        assert!(set.table_bits() > 0);
        let flags: Vec<_> = contents::<V4>(&port, &port.endpoints.external, set.table_bits())
            .map(|index| backend_flags(&port.endpoints.all[index as usize]))
            .collect();
        let (slots, table) = flags.split_at(set.count() as usize);
        assert_eq!(slots, [BACKEND_LOCAL | BACKEND_DRAINING, BACKEND_LOCAL, 0]);
        assert!(table.iter().all(|flags| flags & BACKEND_DRAINING == 0));
        assert!(is_draining(&port.endpoints.all[0]) && has_weight(&port.endpoints));
    }
}
