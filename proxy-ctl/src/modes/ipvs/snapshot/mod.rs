//! Turns the kernel's objects into a [`Snapshot`]. This module has no side effects. IPVS knows no
//! names of Services, so without a controller a virtual server is shown by its address.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use super::{
    sets::{Set, SetRole},
    state::{KernelObjects, ProgrammedServer},
};
use crate::{
    model::{
        desired::ServicePortName,
        objects::{IpFamily, ObjectName, Protocol, TrafficPolicy},
    },
    modes::{BackendSnapshot, EndpointSnapshot, FrontendSnapshot, NodeSnapshot, ServiceSnapshot, Snapshot},
    sys::net::{ipset::Member, ipvs::VirtualSocket},
};

/// Returns the snapshot. `name` returns the service port of a virtual server, if it is known.
pub(super) fn snapshot(
    objects: &KernelObjects,
    name: impl Fn(VirtualSocket) -> Option<ServicePortName>,
) -> Snapshot {
    let backends = Backends::of(objects);
    let mut services: BTreeMap<ServicePortName, ServiceSnapshot> = BTreeMap::new();
    for (socket, server) in &objects.servers {
        let Some(protocol) = protocol(*socket) else { continue };
        let name = name(*socket).unwrap_or_else(|| unnamed(*socket, protocol));
        let service = services.entry(name.clone()).or_insert_with(|| ServiceSnapshot::new(name));
        add(objects, &backends, *socket, protocol, server, service);
    }
    let on_node = |socket: &VirtualSocket| !objects.addresses.contains_key(&socket.address.ip());
    let node_ports = objects.servers.keys().filter(|socket| on_node(socket));
    let node_port_addresses: BTreeSet<IpAddr> = node_ports.map(|socket| socket.address.ip()).collect();
    Snapshot {
        services: services.into_values().collect(),
        backends: backends.list(),
        node: NodeSnapshot {
            node_port_addresses: node_port_addresses.into_iter().map(|address| (address, false)).collect(),
            ..NodeSnapshot::default()
        },
        ..Snapshot::default()
    }
}

pub(super) fn protocol(socket: VirtualSocket) -> Option<Protocol> {
    let all = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp];
    all.into_iter().find(|protocol| u16::from(protocol.number()) == socket.protocol)
}

fn unnamed(socket: VirtualSocket, protocol: Protocol) -> ServicePortName {
    ServicePortName {
        service: ObjectName::new("", socket.address.to_string()),
        port: "".into(),
        protocol,
        family: IpFamily::of(socket.address.ip()),
    }
}

fn add(
    objects: &KernelObjects,
    backends: &Backends,
    socket: VirtualSocket,
    protocol: Protocol,
    server: &ProgrammedServer,
    service: &mut ServiceSnapshot,
) {
    let (address, port) = (socket.address.ip(), socket.address.port());
    let family = IpFamily::of(address);
    let is_member = |role, member| objects.members.contains(&(Set { role, family }, member));
    let in_set = |role| is_member(role, Member::Socket(socket)) || is_member(role, Member::Port(port));
    let is_node_port = !objects.addresses.contains_key(&address) && in_set(SetRole::NodePort(protocol));
    let is_internal = in_set(SetRole::ClusterIp);
    let frontend =
        FrontendSnapshot { address: (!is_node_port).then_some(address), port, external: !is_internal };
    // A node port is one frontend, with a virtual server on each of the node's addresses.
    if !service.frontends.contains(&frontend) {
        service.frontends.push(frontend);
    }
    let is_local = [SetRole::ExternalIpLocal, SetRole::LoadBalancerLocal, SetRole::NodePortLocal(protocol)];
    if !is_internal && is_local.into_iter().any(in_set) {
        service.external_policy = TrafficPolicy::Local;
    }
    service.affinity_seconds = server.balancing.affinity_seconds.unwrap_or(0);
    let used = server.destinations.iter().filter(|(_, is_used)| **is_used);
    let endpoints: Vec<_> = used.map(|(address, _)| backends.endpoint(socket.protocol, *address)).collect();
    service.any_endpoints |= !endpoints.is_empty();
    if is_internal {
        service.cluster.clone_from(&endpoints);
        service.internal = endpoints;
    } else {
        service.external = endpoints;
    }
}

/// The destinations of all virtual servers, by protocol and address. Their positions in this order
/// are their ids.
struct Backends(BTreeMap<(u16, SocketAddr), BackendSnapshot>);

impl Backends {
    fn of(objects: &KernelObjects) -> Self {
        let mut backends = BTreeMap::new();
        for (socket, server) in &objects.servers {
            for (address, is_used) in &server.destinations {
                let at = VirtualSocket { protocol: socket.protocol, address: *address };
                let family = IpFamily::of(address.ip());
                let itself = Member::SocketAndNetwork(at, address.ip().into());
                let local = objects.members.contains(&(Set { role: SetRole::Hairpin, family }, itself));
                let backend = backends.entry((socket.protocol, *address)).or_insert(BackendSnapshot {
                    id: 0,
                    address: *address,
                    protocol: protocol(*socket),
                    local,
                    terminating: true,
                    uses: 0,
                    connections: None,
                });
                backend.uses += 1;
                // New connections go to the backend by at least one virtual server.
                backend.terminating &= !is_used;
            }
        }
        (1..).zip(backends.values_mut()).for_each(|(id, backend)| backend.id = id);
        Self(backends)
    }

    fn endpoint(&self, protocol: u16, address: SocketAddr) -> EndpointSnapshot {
        let found = self.0.get(&(protocol, address));
        EndpointSnapshot {
            address,
            local: found.is_some_and(|backend| backend.local),
            backend: found.map_or(0, |backend| backend.id),
        }
    }

    fn list(self) -> Vec<BackendSnapshot> {
        let mut list: Vec<_> = self.0.into_values().collect();
        list.sort_by_key(|backend| (backend.address, backend.id));
        list
    }
}

#[cfg(test)]
mod tests;
