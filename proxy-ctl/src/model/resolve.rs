//! Computes what the node must serve from a Service and its slices.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use super::{
    addresses::{self, Addresses},
    claims::{Claim, Claims},
    desired::{
        DesiredPort, Endpoints, Frontend, FrontendKind, ServicePortName, UnservedFrontend, UnservedReason,
    },
    objects::{EndpointSlice, IpFamily, Service, ServicePort},
    topology::{self, Candidate, NodeTopology, Policies},
};

/// Returns true if the Service is served in this family. The cluster IPs decide, as in kube-proxy:
/// external and load-balancer addresses of another family have no endpoints either.
pub(super) fn serves(service: &Service, family: IpFamily) -> bool {
    service.cluster_ips.iter().any(|address| IpFamily::of(*address) == family)
}

/// The owners of frontends and addresses.
#[derive(Debug, Default)]
pub(super) struct Owners {
    pub(super) claims: Claims,
    pub(super) addresses: Addresses,
}

impl Owners {
    /// Returns why the service port does not get a frontend that it claims.
    fn refuse(&self, service: &Service, port: &ServicePort, frontend: &Frontend) -> Option<UnservedReason> {
        if matches!(frontend.kind, FrontendKind::ExternalIp | FrontendKind::LoadBalancer)
            && let Some(other) = self.addresses.cluster_ip_of_other(frontend.address, &service.name)
        {
            return Some(UnservedReason::ClusterIpOf(other.clone()));
        }
        let claim = Claim::new(frontend, port.protocol);
        self.claims.other_owner(claim, &service.name, &port.name).map(UnservedReason::OwnedBy)
    }
}

/// Lists what the service port claims in this family: each address and port once, under its first
/// kind. Load-balancer addresses come before external IPs, because only they have source ranges,
/// which an external IP with the same address must not circumvent.
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
    let external = of(FrontendKind::LoadBalancer, &service.load_balancer_ips)
        .chain(of(FrontendKind::ExternalIp, &service.external_ips))
        .filter(|frontend| !addresses::is_special(frontend.address));
    for frontend in of(FrontendKind::ClusterIp, &service.cluster_ips)
        .chain(node_port)
        .chain(external)
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
    owners: &Owners,
    here: NodeTopology<'_>,
) -> DesiredPort {
    let family = name.family;
    let claimed = frontends(service, port, family);
    let policies = Policies {
        internal: service.internal_policy,
        external: service.external_policy,
        externally_accessible: claimed.iter().any(|frontend| frontend.kind != FrontendKind::ClusterIp),
    };
    let (mut frontends, mut unserved) = (Vec::with_capacity(claimed.len()), Vec::new());
    for frontend in claimed {
        match owners.refuse(service, port, &frontend) {
            None => frontends.push(frontend),
            Some(reason) => unserved.push(UnservedFrontend { frontend, reason }),
        }
    }
    let (external, load_balancer) = (FrontendKind::ExternalIp, FrontendKind::LoadBalancer);
    for (kind, addresses, reason) in [
        (external, &service.external_ips, UnservedReason::SpecialAddress),
        (load_balancer, &service.load_balancer_ips, UnservedReason::SpecialAddress),
        (load_balancer, &service.proxied_load_balancer_ips, UnservedReason::NotVirtual),
    ] {
        let of_family = addresses.iter().filter(|address| IpFamily::of(**address) == family);
        let concerned = of_family
            .filter(|address| reason != UnservedReason::SpecialAddress || addresses::is_special(**address));
        unserved.extend(concerned.map(|&address| UnservedFrontend {
            frontend: Frontend { kind, address, port: port.port },
            reason: reason.clone(),
        }));
    }
    let source_ranges = service.source_ranges.iter().filter(|range| IpFamily::of(range.addr()) == family);
    DesiredPort {
        name,
        frontends,
        unserved: unserved.into(),
        internal_policy: service.internal_policy,
        external_policy: service.external_policy,
        health_check_node_port: service.health_check_node_port,
        endpoints: endpoints(port, family, slices, policies, here),
        affinity_seconds: service.affinity_seconds,
        source_ranges: source_ranges.copied().collect(),
        algorithm: service.algorithm,
        forwarding: service.forwarding,
    }
}

fn endpoints(
    port: &ServicePort,
    family: IpFamily,
    slices: &[EndpointSlice],
    policies: Policies,
    here: NodeTopology<'_>,
) -> Endpoints {
    let mut candidates = Vec::new();
    for slice in slices.iter().filter(|slice| slice.family == family) {
        let ports = slice.ports.iter();
        for target in ports.filter(|target| target.name == port.name && target.protocol == port.protocol) {
            candidates.extend(slice.endpoints.iter().map(|endpoint| Candidate {
                endpoint,
                port: target.port,
                local: endpoint.node.as_deref() == Some(here.node),
            }));
        }
    }
    // All listed candidates count, because nodes differ in which of two with the same address they
    // take.
    let need_snat = candidates.iter().any(topology::needs_snat);
    // An address may be listed twice while an endpoint moves between slices, or when a new pod has
    // got the address of one that is still terminating. The running one counts.
    candidates.sort_by_key(|candidate| {
        let endpoint = candidate.endpoint;
        let running = (!endpoint.terminating, endpoint.ready, endpoint.serving, candidate.local);
        (endpoint.address, candidate.port, std::cmp::Reverse(running))
    });
    candidates.dedup_by_key(|candidate| (candidate.endpoint.address, candidate.port));
    Endpoints { need_snat, ..topology::choose(&candidates, policies, here) }
}

/// Returns the identity of the port in the family.
pub(super) fn port_name(service: &Service, port: &ServicePort, family: IpFamily) -> ServicePortName {
    ServicePortName {
        service: service.name.clone(),
        port: Arc::clone(&port.name),
        protocol: port.protocol,
        family,
    }
}
