//! Decides what becomes of new connections to a service port, depending on who opens them. The
//! behaviour is kube-proxy's in modes iptables and nftables (`TestInternalExternalMasquerade` of
//! pkg/proxy/iptables/proxier_test.go). Hairpin connections, whose endpoint is the client itself,
//! are masqueraded in any case.

use crate::model::{
    desired::DesiredPort,
    node::{Host, LocalTraffic},
    objects::{IpFamily, TrafficPolicy},
};

/// One of the sets of [`Endpoints`](crate::model::desired::Endpoints).
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum EndpointSet {
    Cluster,
    Internal,
    External,
}

impl EndpointSet {
    /// Returns the endpoints of the set, as indexes into `endpoints.all` of the port.
    pub fn of(self, port: &DesiredPort) -> &[u32] {
        match self {
            Self::Cluster => &port.endpoints.cluster,
            Self::Internal => &port.endpoints.internal,
            Self::External => &port.endpoints.external,
        }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Outcome {
    /// The connection goes to one endpoint of the set, which is not empty.
    Balance(EndpointSet),
    /// The connection is refused with ICMP port unreachable.
    Reject,
    Drop,
}

/// The clients whose source address is replaced by the node's.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Masquerade {
    Nobody,
    /// All clients except the pods that [`Host::local_traffic`] names.
    AllButPods,
    Everybody,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ClientPolicy {
    pub outcome: Outcome,
    pub masquerade: Masquerade,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PortPolicy {
    /// The policy for all clients of the ClusterIP.
    pub internal: ClientPolicy,
    /// The policy for clients of node ports, external IPs and load-balancer addresses, except those
    /// that the next two fields name.
    pub external: ClientPolicy,
    /// The policy for the pods that [`Host::local_traffic`] names. `None`: `external` holds for
    /// them.
    pub external_from_pods: Option<ClientPolicy>,
    /// The policy for the node's own processes. `None`: `external` holds for them.
    pub external_from_node: Option<ClientPolicy>,
}

impl PortPolicy {
    pub fn new(port: &DesiredPort, host: &Host) -> Self {
        let detects_pods = host.local_traffic.detects_pods(port.name.family);
        let outcome = |set: EndpointSet| match set.of(port) {
            [] if port.endpoints.any => Outcome::Drop,
            [] => Outcome::Reject,
            _ => Outcome::Balance(set),
        };
        let internal = ClientPolicy {
            outcome: outcome(EndpointSet::Internal),
            masquerade: match (host.masquerade_all, detects_pods) {
                (true, _) => Masquerade::Everybody,
                (false, true) => Masquerade::AllButPods,
                (false, false) => Masquerade::Nobody,
            },
        };
        let near = |masquerade| ClientPolicy { outcome: outcome(EndpointSet::Cluster), masquerade };
        match port.external_policy {
            TrafficPolicy::Cluster => Self {
                internal,
                external: ClientPolicy {
                    outcome: outcome(EndpointSet::External),
                    masquerade: Masquerade::Everybody,
                },
                external_from_pods: None,
                external_from_node: None,
            },
            TrafficPolicy::Local => Self {
                internal,
                external: ClientPolicy {
                    outcome: outcome(EndpointSet::External),
                    masquerade: Masquerade::Nobody,
                },
                external_from_pods: detects_pods.then(|| near(Masquerade::Nobody)),
                external_from_node: Some(near(Masquerade::Everybody)),
            },
        }
    }

    /// Returns true if new connections of at least one kind of client are balanced over the set.
    pub fn uses(&self, set: EndpointSet) -> bool {
        [Some(self.internal), Some(self.external), self.external_from_pods, self.external_from_node]
            .into_iter()
            .flatten()
            .any(|clients| clients.outcome == Outcome::Balance(set))
    }
}

impl LocalTraffic {
    /// Returns true if traffic of pods can be distinguished from other traffic in this IP family.
    pub fn detects_pods(&self, family: IpFamily) -> bool {
        match self {
            Self::FromCidrs(cidrs) => cidrs.iter().any(|cidr| IpFamily::of(cidr.addr()) == family),
            Self::FromBridge(_) | Self::FromInterfacePrefix(_) => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rstest::rstest;

    use super::*;
    use crate::model::{
        Model,
        desired::{Endpoint, Endpoints},
        test_support::service,
    };

    const CLUSTER: Outcome = Outcome::Balance(EndpointSet::Cluster);
    const INTERNAL: Outcome = Outcome::Balance(EndpointSet::Internal);
    const EXTERNAL: Outcome = Outcome::Balance(EndpointSet::External);

    fn host(detects_pods: bool, masquerade_all: bool) -> Host {
        let cidrs = if detects_pods { vec!["10.0.0.0/8".parse().unwrap()] } else { Vec::new() };
        Host { local_traffic: LocalTraffic::FromCidrs(cidrs), masquerade_all, ..Host::default() }
    }

    /// Returns a port. `sets` says whether the sets for cluster, internal and external clients have
    /// an endpoint.
    fn port(external_policy: TrafficPolicy, sets: [bool; 3]) -> DesiredPort {
        let endpoint =
            Endpoint { address: [10, 0, 0, 1].into(), port: 80, local: true, terminating: false, weight: 1 };
        let set = |has: bool| if has { [0].into() } else { Arc::default() };
        DesiredPort {
            endpoints: Endpoints {
                all: vec![endpoint],
                cluster: set(sets[0]),
                internal: set(sets[1]),
                external: set(sets[2]),
                any: sets.contains(&true),
                need_snat: false,
                unused: Box::default(),
            },
            external_policy,
            ..of_model()
        }
    }

    fn of_model() -> DesiredPort {
        let mut model = Model::new("node");
        model.apply_service(service("default/web", &["10.96.0.1"]));
        DesiredPort::clone(&model.take_changes().changed[0])
    }

    #[rstest]
    #[case::pods_keep_their_address(true, false, Masquerade::AllButPods)]
    #[case::nobody_where_pods_are_not_known(false, false, Masquerade::Nobody)]
    #[case::masquerade_all(true, true, Masquerade::Everybody)]
    fn clients_of_the_cluster_ip(
        #[case] detects_pods: bool,
        #[case] all: bool,
        #[case] masquerade: Masquerade,
    ) {
        let policy = PortPolicy::new(&port(TrafficPolicy::Cluster, [true; 3]), &host(detects_pods, all));
        assert_eq!(policy.internal, ClientPolicy { outcome: INTERNAL, masquerade });
        let external = ClientPolicy { outcome: EXTERNAL, masquerade: Masquerade::Everybody };
        assert_eq!(policy.external, external);
        assert_eq!((policy.external_from_pods, policy.external_from_node), (None, None));
    }

    #[rstest]
    #[case::pods_are_known(true, Some(ClientPolicy { outcome: CLUSTER, masquerade: Masquerade::Nobody }))]
    #[case::pods_are_not_known(false, None)]
    fn external_policy_local(#[case] detects_pods: bool, #[case] from_pods: Option<ClientPolicy>) {
        let policy = PortPolicy::new(&port(TrafficPolicy::Local, [true; 3]), &host(detects_pods, false));
        assert_eq!(policy.external, ClientPolicy { outcome: EXTERNAL, masquerade: Masquerade::Nobody });
        assert_eq!(policy.external_from_pods, from_pods);
        let from_node = ClientPolicy { outcome: CLUSTER, masquerade: Masquerade::Everybody };
        assert_eq!(policy.external_from_node, Some(from_node));
    }

    #[rstest]
    #[case::none_anywhere([false; 3], Outcome::Reject, Outcome::Reject, Outcome::Reject)]
    #[case::on_other_nodes_only([true, false, false], Outcome::Drop, Outcome::Drop, CLUSTER)]
    #[case::everywhere([true; 3], INTERNAL, EXTERNAL, CLUSTER)]
    fn sets_that_are_empty(
        #[case] sets: [bool; 3],
        #[case] internal: Outcome,
        #[case] external: Outcome,
        #[case] from_node: Outcome,
    ) {
        let policy = PortPolicy::new(&port(TrafficPolicy::Local, sets), &host(true, false));
        assert_eq!(policy.internal.outcome, internal);
        assert_eq!(policy.external.outcome, external);
        assert_eq!(policy.external_from_node.unwrap().outcome, from_node);
    }
}
