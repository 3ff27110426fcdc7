//! Plans which listeners a service port needs, and which frontends each of them serves. This module
//! has no side effects.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use crate::{
    model::{
        desired::{DesiredPort, Frontend, FrontendKind, ServicePortName},
        node::Host,
        objects::IpFamily,
    },
    modes::netfilter::{ClientPolicy, Outcome, PortPolicy},
};

/// The kind of frontend that clients dial. A listener does not see what was dialled, so each kind
/// has listeners of its own.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) enum Entrance {
    ClusterIp,
    /// Node ports and external IPs.
    External,
    /// Load-balancer addresses, to which source ranges apply.
    LoadBalancer,
}

impl Entrance {
    pub(super) const fn of(kind: FrontendKind) -> Self {
        match kind {
            FrontendKind::ClusterIp => Self::ClusterIp,
            FrontendKind::NodePort | FrontendKind::ExternalIp => Self::External,
            FrontendKind::LoadBalancer => Self::LoadBalancer,
        }
    }

    /// Returns true if some client that comes this way gets an endpoint.
    fn is_served(self, policy: &PortPolicy) -> bool {
        let serves = |clients: ClientPolicy| matches!(clients.outcome, Outcome::Balance(_));
        match self {
            Self::ClusterIp => serves(policy.internal),
            Self::External | Self::LoadBalancer => {
                serves(policy.external)
                    || policy.external_from_pods.is_some_and(serves)
                    || policy.external_from_node.is_some_and(serves)
            }
        }
    }
}

/// The way in which clients reach the listeners.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Reach {
    /// Rules redirect clients of frontends to listeners, whose ports do not matter.
    Redirected,
    /// Listeners are on the frontends themselves, as far as these are addresses of this node.
    Direct,
}

/// The key of a listener. Keys are sorted by service port.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct ListenerKey {
    pub(super) name: ServicePortName,
    pub(super) entrance: Entrance,
    /// The address and port of the listener. `None`: every address of the node, and any port.
    pub(super) at: Option<SocketAddr>,
}

#[derive(Debug, Default, Eq, PartialEq)]
pub(super) struct Plan {
    /// The listeners, each with the frontends that it serves.
    pub(super) listeners: BTreeMap<ListenerKey, Vec<Frontend>>,
    /// Frontends whose clients are all refused.
    pub(super) refused: Vec<Frontend>,
}

impl Plan {
    pub(super) fn new(port: &DesiredPort, host: &Host, reach: Reach) -> Self {
        let policy = PortPolicy::new(port, host);
        let mut plan = Self::default();
        for frontend in &port.frontends {
            let entrance = Entrance::of(frontend.kind);
            if !entrance.is_served(&policy) {
                plan.refused.push(*frontend);
                continue;
            }
            let bound = match reach {
                Reach::Redirected => vec![None],
                Reach::Direct => bound_addresses(frontend, port.name.family, host).map(Some).collect(),
            };
            for at in bound {
                let key = ListenerKey { name: port.name.clone(), entrance, at };
                plan.listeners.entry(key).or_default().push(*frontend);
            }
        }
        plan
    }
}

/// Returns the addresses to which listeners on the frontend itself are bound.
fn bound_addresses(frontend: &Frontend, family: IpFamily, host: &Host) -> impl Iterator<Item = SocketAddr> {
    let addresses = match frontend.kind {
        FrontendKind::NodePort => node_port_addresses(family, host),
        FrontendKind::ClusterIp | FrontendKind::ExternalIp | FrontendKind::LoadBalancer => {
            vec![frontend.address]
        }
    };
    let port = frontend.port;
    addresses.into_iter().map(move |address| SocketAddr::new(address, port))
}

/// Returns the addresses of node ports. If every address has node ports, and loopback ones too, it
/// is the unspecified address. Addresses that the node gets later are served then too.
fn node_port_addresses(family: IpFamily, host: &Host) -> Vec<IpAddr> {
    let of_family =
        host.node_port_addresses.iter().copied().filter(|address| IpFamily::of(*address) == family);
    let addresses: Vec<IpAddr> = of_family.collect();
    if host.node_ports_everywhere && addresses.iter().any(IpAddr::is_loopback) {
        return vec![unspecified(family)];
    }
    addresses
}

pub(super) const fn unspecified(family: IpFamily) -> IpAddr {
    match family {
        IpFamily::Ipv4 => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpFamily::Ipv6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{
        model::objects::TrafficPolicy,
        modes::userspace::test_support::{host, web},
    };

    fn shown(plan: &Plan) -> Vec<String> {
        let listeners = plan.listeners.iter().map(|(key, frontends)| {
            let at = key.at.map_or_else(|| "any port".to_owned(), |at| at.to_string());
            let kinds: Vec<_> = frontends.iter().map(|one| format!("{:?}", one.kind)).collect();
            format!("{:?} at {at}: {}", key.entrance, kinds.join(" "))
        });
        listeners.collect()
    }

    #[rstest]
    #[case::redirected(Reach::Redirected, &[
        "ClusterIp at any port: ClusterIp",
        "External at any port: NodePort ExternalIp",
        "LoadBalancer at any port: LoadBalancer",
    ])]
    #[case::direct(Reach::Direct, &[
        "ClusterIp at 10.96.0.1:80: ClusterIp",
        "External at 0.0.0.0:30080: NodePort",
        "External at 198.51.100.1:80: ExternalIp",
        "LoadBalancer at 203.0.113.1:80: LoadBalancer",
    ])]
    fn each_kind_of_frontend_has_its_listeners(#[case] reach: Reach, #[case] expected: &[&str]) {
        let port = web(&["10.0.0.1:8080"], TrafficPolicy::Cluster);
        assert_eq!(shown(&Plan::new(&port, &host(), reach)), expected);
    }

    #[rstest]
    #[case::everywhere(true, &["127.0.0.1", "192.0.2.1", "::1"], &["0.0.0.0:30080"])]
    #[case::everywhere_but_loopback(true, &["192.0.2.1", "::1"], &["192.0.2.1:30080"])]
    #[case::on_some(false, &["192.0.2.1", "192.0.2.2"], &["192.0.2.1:30080", "192.0.2.2:30080"])]
    #[case::on_none(false, &[], &[])]
    fn node_ports_without_rules(
        #[case] everywhere: bool,
        #[case] addresses: &[&str],
        #[case] expected: &[&str],
    ) {
        let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        let host =
            Host { node_ports_everywhere: everywhere, node_port_addresses: addresses, ..Host::default() };
        let frontend = Frontend { kind: FrontendKind::NodePort, address: [0, 0, 0, 0].into(), port: 30080 };
        let found: Vec<String> =
            bound_addresses(&frontend, IpFamily::Ipv4, &host).map(|address| address.to_string()).collect();
        assert_eq!(found, expected);
    }

    #[rstest]
    fn without_endpoints_everybody_is_refused(#[values(Reach::Redirected, Reach::Direct)] reach: Reach) {
        let port = web(&[], TrafficPolicy::Cluster);
        let plan = Plan::new(&port, &host(), reach);
        assert_eq!((plan.listeners.len(), plan.refused.len()), (0, 4));
    }

    #[test]
    fn outside_clients_alone_are_refused_where_no_endpoint_is_local() {
        let port = web(&["10.0.0.1:8080"], TrafficPolicy::Local);
        assert!(port.endpoints.external.is_empty());
        let plan = Plan::new(&port, &host(), Reach::Redirected);
        assert_eq!((plan.listeners.len(), plan.refused.len()), (3, 0), "the node's own processes are served");
    }
}
