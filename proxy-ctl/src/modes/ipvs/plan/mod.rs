//! Plans the virtual servers, addresses of the device and members of sets of a service port. This
//! module has no side effects.
//!
//! A virtual server has one set of destinations, whoever the client is. So with traffic policy
//! Local, pods and the node itself also get only the local endpoints of external addresses. Without
//! local endpoints, everybody gets those of policy Cluster, as from kube-proxy in this mode
//! (kubernetes/kubernetes#97081). A service port with only a ClusterIP and internal policy Local
//! has no endpoints of policy Cluster: it refuses.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use ipnet::IpNet;

use super::sets::{Set, SetRole};
use crate::{
    model::{
        desired::{DesiredPort, Frontend, FrontendKind},
        node::Host,
        objects::{IpFamily, Protocol},
    },
    modes::netfilter::{EndpointSet, Masquerade, PortPolicy},
    sys::net::{
        ipset::Member,
        ipvs::{Balancing, VirtualSocket},
    },
};

/// The default scheduler: round robin.
const DEFAULT_SCHEDULER: &str = "rr";
/// The scheduler that also hashes the client's port, as in kube-proxy.
const MAGLEV: &str = "mh";

/// The properties of the node and of the configuration on which virtual servers depend.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Site {
    pub(super) host: Host,
    /// The addresses of all interfaces but the device of this mode.
    pub(super) own_addresses: BTreeSet<IpAddr>,
    scheduler: Arc<str>,
}

impl Site {
    /// Returns a site with the configured scheduler. Empty: the default.
    pub(super) fn new(scheduler: &str) -> Self {
        let scheduler = if scheduler.is_empty() { DEFAULT_SCHEDULER } else { scheduler };
        Self { host: Host::default(), own_addresses: BTreeSet::new(), scheduler: scheduler.into() }
    }

    pub(super) fn scheduler(&self) -> &str {
        &self.scheduler
    }

    fn balancing(&self, port: &DesiredPort) -> Balancing {
        Balancing {
            scheduler: Arc::clone(&self.scheduler),
            affinity_seconds: port.affinity_seconds,
            by_source_port: *self.scheduler == *MAGLEV,
        }
    }

    /// Returns the addresses at which node ports have virtual servers. Loopback addresses are never
    /// among them.
    fn node_port_addresses(&self, family: IpFamily) -> impl Iterator<Item = IpAddr> {
        let of_family = move |address: &IpAddr| IpFamily::of(*address) == family && !address.is_loopback();
        self.host.node_port_addresses.iter().copied().filter(of_family)
    }

    fn is_in(&self, ranges: &[IpNet]) -> bool {
        self.host.masquerade_addresses.iter().any(|own| ranges.iter().any(|range| range.contains(own)))
    }
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Server {
    pub(super) balancing: Balancing,
    pub(super) destinations: BTreeSet<SocketAddr>,
}

/// The precedence of frontends that share one virtual socket. Node ports come first.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Rank {
    NodePort,
    Address,
}

/// The objects that the kernel must have for one service port.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct PortObjects {
    pub(super) servers: BTreeMap<VirtualSocket, (Rank, Server)>,
    /// The addresses of the device.
    pub(super) addresses: BTreeSet<IpAddr>,
    pub(super) members: BTreeSet<(Set, Member)>,
    /// Virtual sockets that the node itself may not reach, because no source range contains its
    /// address.
    pub(super) closed_to_node: BTreeSet<VirtualSocket>,
}

pub(super) fn plan(port: &DesiredPort, site: &Site) -> PortObjects {
    let mut planner = Planner { port, site, objects: PortObjects::default() };
    planner.hairpins();
    for frontend in &port.frontends {
        match frontend.kind {
            FrontendKind::ClusterIp => planner.cluster_ip(*frontend),
            FrontendKind::ExternalIp => planner.external_ip(*frontend),
            FrontendKind::LoadBalancer => planner.load_balancer(*frontend),
            FrontendKind::NodePort => planner.node_port(frontend.port),
        }
    }
    if let Some(number) = port.health_check_node_port {
        planner.member(SetRole::HealthCheckPort, Member::Port(number));
    }
    planner.objects
}

struct Planner<'a> {
    port: &'a DesiredPort,
    site: &'a Site,
    objects: PortObjects,
}

impl Planner<'_> {
    fn socket(&self, address: IpAddr, port: u16) -> VirtualSocket {
        let protocol = self.port.name.protocol.number().into();
        VirtualSocket { protocol, address: SocketAddr::new(address, port) }
    }

    fn member(&mut self, role: SetRole, member: Member) {
        self.objects.members.insert((Set { role, family: self.port.name.family }, member));
    }

    fn server(&mut self, socket: VirtualSocket, rank: Rank, set: EndpointSet) {
        let all = &self.port.endpoints.all;
        let set = Some(set.of(self.port)).filter(|set| !set.is_empty());
        let set = set.unwrap_or_else(|| EndpointSet::Cluster.of(self.port));
        let endpoints = set.iter().filter_map(|index| all.get(*index as usize));
        let destinations = endpoints.map(|endpoint| SocketAddr::new(endpoint.address, endpoint.port));
        let server =
            Server { balancing: self.site.balancing(self.port), destinations: destinations.collect() };
        self.objects.servers.insert(socket, (rank, server));
    }

    fn bind(&mut self, address: IpAddr) {
        self.objects.addresses.insert(address);
        self.member(SetRole::DeviceAddresses, Member::Address(address));
    }

    fn bind_unless_own(&mut self, address: IpAddr) {
        if !self.site.own_addresses.contains(&address) {
            self.bind(address);
        }
    }

    /// Adds the members for connections that go to the endpoint from which they come. They are
    /// masqueraded.
    fn hairpins(&mut self) {
        let endpoints = self.port.endpoints.all.iter().chain(&self.port.endpoints.unused);
        for endpoint in endpoints.filter(|endpoint| endpoint.local) {
            let socket = self.socket(endpoint.address, endpoint.port);
            self.member(SetRole::Hairpin, Member::SocketAndNetwork(socket, endpoint.address.into()));
        }
    }

    fn cluster_ip(&mut self, frontend: Frontend) {
        let socket = self.socket(frontend.address, frontend.port);
        self.member(SetRole::ClusterIp, Member::Socket(socket));
        self.server(socket, Rank::Address, EndpointSet::Internal);
        self.bind(frontend.address);
    }

    fn keeps_client_address(&self) -> bool {
        PortPolicy::new(self.port, &self.site.host).external.masquerade == Masquerade::Nobody
    }

    fn external_ip(&mut self, frontend: Frontend) {
        let socket = self.socket(frontend.address, frontend.port);
        let role = if self.keeps_client_address() { SetRole::ExternalIpLocal } else { SetRole::ExternalIp };
        self.member(role, Member::Socket(socket));
        self.server(socket, Rank::Address, EndpointSet::External);
        self.bind_unless_own(frontend.address);
    }

    fn load_balancer(&mut self, frontend: Frontend) {
        let socket = self.socket(frontend.address, frontend.port);
        self.member(SetRole::LoadBalancer, Member::Socket(socket));
        if self.keeps_client_address() {
            self.member(SetRole::LoadBalancerLocal, Member::Socket(socket));
        }
        let ranges = &self.port.source_ranges;
        if !ranges.is_empty() {
            self.member(SetRole::LoadBalancerRestricted, Member::Socket(socket));
            for range in ranges.iter().flat_map(|range| without_zero_prefix(*range)) {
                self.member(SetRole::LoadBalancerSources, Member::SocketAndNetwork(socket, range));
            }
            // If the node itself dials an address of the device, the kernel uses that same address
            // as source. So the address must be an allowed source if the node is in the ranges.
            if self.site.is_in(ranges) {
                let itself = Member::SocketAndNetwork(socket, frontend.address.into());
                self.member(SetRole::LoadBalancerFromItself, itself);
            } else {
                self.objects.closed_to_node.insert(socket);
            }
        }
        self.server(socket, Rank::Address, EndpointSet::External);
        self.bind_unless_own(frontend.address);
    }

    fn node_port(&mut self, number: u16) {
        let name = &self.port.name;
        let (protocol, family) = (name.protocol, name.family);
        let addresses: Vec<_> = self.site.node_port_addresses(family).collect();
        if addresses.is_empty() {
            return;
        }
        let members: Vec<_> = match protocol {
            Protocol::Tcp | Protocol::Udp => vec![Member::Port(number)],
            Protocol::Sctp => {
                addresses.iter().map(|address| Member::Socket(self.socket(*address, number))).collect()
            }
        };
        let keeps_client_address = self.keeps_client_address();
        for member in members {
            self.member(SetRole::NodePort(protocol), member);
            if keeps_client_address {
                self.member(SetRole::NodePortLocal(protocol), member);
            }
        }
        for address in addresses {
            let socket = self.socket(address, number);
            self.server(socket, Rank::NodePort, EndpointSet::External);
        }
    }
}

/// Returns the members for a range. A set has no member with a prefix of length 0, so such a range
/// becomes its two halves.
fn without_zero_prefix(range: IpNet) -> Vec<IpNet> {
    if range.prefix_len() > 0 {
        return vec![range.trunc()];
    }
    range.subnets(1).map_or_else(|_| vec![range], Iterator::collect)
}

#[cfg(test)]
mod tests;
