//! From a Service and its slices to what the node must serve.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use super::{
    claims::{Claim, Claims},
    desired::{DesiredPort, Endpoints, Frontend, FrontendKind, ServicePortName},
    objects::{EndpointSlice, IpFamily, Service, ServicePort},
    topology::{self, Candidate, Place, Policies},
};

/// Whether the service is served in this family. As with kube-proxy, the cluster IPs decide: external and
/// load-balancer addresses of another family have no endpoints either.
pub(super) fn serves(service: &Service, family: IpFamily) -> bool {
    service.cluster_ips.iter().any(|address| IpFamily::of(*address) == family)
}

/// What the service port claims in this family: each address and port once, under its first kind.
pub(super) fn frontends(service: &Service, port: &ServicePort, family: IpFamily) -> Vec<Frontend> {
    let unspecified: IpAddr = match family {
        IpFamily::Ipv4 => Ipv4Addr::UNSPECIFIED.into(),
        IpFamily::Ipv6 => Ipv6Addr::UNSPECIFIED.into(),
    };
    let of = |kind, addresses| {
        let addresses: &[IpAddr] = addresses;
        addresses.iter().map(move |&address| Frontend { kind, address, port: port.port })
    };
    let node_port =
        port.node_port.map(|port| Frontend { kind: FrontendKind::NodePort, address: unspecified, port });

    let mut frontends: Vec<Frontend> = Vec::with_capacity(1 + usize::from(node_port.is_some()));
    for frontend in of(FrontendKind::ClusterIp, &service.cluster_ips)
        .chain(node_port)
        .chain(of(FrontendKind::ExternalIp, &service.external_ips))
        .chain(of(FrontendKind::LoadBalancer, &service.load_balancer_ips))
        .filter(|frontend| IpFamily::of(frontend.address) == family)
    {
        if !frontends.iter().any(|seen| seen.address == frontend.address && seen.port == frontend.port) {
            frontends.push(frontend);
        }
    }
    frontends
}

pub(super) fn desired_port(
    name: ServicePortName,
    service: &Service,
    port: &ServicePort,
    slices: &[EndpointSlice],
    claims: &Claims,
    place: Place<'_>,
) -> DesiredPort {
    let family = name.family;
    let mut frontends = frontends(service, port, family);
    let policies = Policies {
        internal: service.internal_policy,
        external: service.external_policy,
        externally_accessible: frontends.iter().any(|frontend| frontend.kind != FrontendKind::ClusterIp),
    };
    frontends.retain(|frontend| {
        claims.is_owned_by(Claim::new(frontend, port.protocol), &service.name, &port.name)
    });
    let source_ranges = service.source_ranges.iter().filter(|range| IpFamily::of(range.addr()) == family);
    DesiredPort {
        name,
        frontends,
        endpoints: endpoints(port, family, slices, policies, place),
        affinity_seconds: service.affinity_seconds,
        source_ranges: source_ranges.copied().collect(),
    }
}

fn endpoints(
    port: &ServicePort,
    family: IpFamily,
    slices: &[EndpointSlice],
    policies: Policies,
    place: Place<'_>,
) -> Endpoints {
    let mut candidates = Vec::new();
    for slice in slices.iter().filter(|slice| slice.family == family) {
        let ports = slice.ports.iter();
        for target in ports.filter(|target| target.name == port.name && target.protocol == port.protocol) {
            candidates.extend(slice.endpoints.iter().map(|endpoint| Candidate {
                endpoint,
                port: target.port,
                local: endpoint.node.as_deref() == Some(place.node),
            }));
        }
    }
    // An address may be listed twice while an endpoint moves between slices, or when a new pod has got the
    // address of one that is still terminating: the running one counts.
    candidates.sort_by_key(|candidate| {
        let endpoint = candidate.endpoint;
        let running = (!endpoint.terminating, endpoint.ready, endpoint.serving, candidate.local);
        (endpoint.address, candidate.port, std::cmp::Reverse(running))
    });
    candidates.dedup_by_key(|candidate| (candidate.endpoint.address, candidate.port));
    topology::choose(&candidates, policies, place)
}

/// Identity of the port in the family.
pub(super) fn port_name(service: &Service, port: &ServicePort, family: IpFamily) -> ServicePortName {
    ServicePortName {
        service: service.name.clone(),
        port: Arc::clone(&port.name),
        protocol: port.protocol,
        family,
    }
}
