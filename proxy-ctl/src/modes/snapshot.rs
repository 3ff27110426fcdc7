//! A description of what is really programmed on the node, in the same form for all modes.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::model::{
    desired::ServicePortName,
    mode::Mode,
    node::Encapsulation,
    objects::{Algorithm, Forwarding, Protocol, TrafficPolicy},
};

#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Snapshot {
    /// The service ports, sorted by name.
    pub services: Vec<ServiceSnapshot>,
    /// The backends, sorted by address.
    pub backends: Vec<BackendSnapshot>,
    pub node: NodeSnapshot,
    /// The hooks of mode ebpf. A snapshot that comes over a socket, as that of mode userspace, has
    /// none.
    #[serde(skip_deserializing)]
    pub hooks: Vec<Hook>,
    /// The time that the node goes on serving without its controller. Zero: the time has passed,
    /// and all traffic passes untouched. `None`: it serves without end.
    pub lease: Option<Duration>,
}

impl Snapshot {
    /// Adds what a secondary mode serves: service ports, or more frontends of service ports that
    /// are there already.
    pub(crate) fn add(&mut self, mode: Mode, secondary: Snapshot) {
        for mut service in secondary.services {
            service.secondary = Some(mode);
            match self.services.binary_search_by(|one| one.name.cmp(&service.name)) {
                Ok(found) => {
                    let found = &mut self.services[found];
                    found.secondary = service.secondary;
                    service.frontends.retain(|one| !found.frontends.contains(one));
                    found.frontends.extend(service.frontends);
                }
                Err(index) => self.services.insert(index, service),
            }
        }
        let key = |one: &BackendSnapshot| (one.address, one.protocol);
        let known: HashSet<_> = self.backends.iter().map(key).collect();
        self.backends.extend(secondary.backends.into_iter().filter(|one| !known.contains(&key(one))));
        self.backends.sort_by_key(|one| one.address);
    }

    /// Adds what one IP family serves, and the backends that it uses. They get the next free ids.
    pub(super) fn add_family(&mut self, mut services: Vec<ServiceSnapshot>) {
        let mut backends: BTreeMap<(SocketAddr, Protocol), BackendSnapshot> = BTreeMap::new();
        for service in &mut services {
            let protocol = service.name.protocol;
            let mut used: Vec<_> = service.endpoint_sets().into_iter().flatten().collect();
            used.sort_by_key(|endpoint| endpoint.address);
            used.dedup_by_key(|endpoint| endpoint.address);
            for EndpointSnapshot { address, local, .. } in used {
                let unused = BackendSnapshot {
                    id: 0,
                    address: *address,
                    protocol: Some(protocol),
                    local: false,
                    terminating: false,
                    uses: 0,
                    connections: None,
                };
                let backend = backends.entry((*address, protocol)).or_insert(unused);
                backend.uses += 1;
                backend.local |= *local;
            }
        }
        let first = self.backends.len() as u32;
        (first..).zip(backends.values_mut()).for_each(|(id, backend)| backend.id = id);
        for service in &mut services {
            let protocol = service.name.protocol;
            for endpoint in service.endpoint_sets().into_iter().flatten() {
                endpoint.backend = backends[&(endpoint.address, protocol)].id;
            }
        }
        self.backends.extend(backends.into_values());
        self.services.extend(services);
        self.services.sort_by(|one, other| one.name.cmp(&other.name));
    }
}

/// A service port as the node serves it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ServiceSnapshot {
    /// The number by which the mode knows it.
    pub id: u32,
    pub name: ServicePortName,
    pub frontends: Vec<FrontendSnapshot>,
    pub cluster: Vec<EndpointSnapshot>,
    /// The endpoint set of clients of the ClusterIP.
    pub internal: Vec<EndpointSnapshot>,
    /// The endpoint set of clients from outside.
    pub external: Vec<EndpointSnapshot>,
    /// True if some endpoint is usable on any node. An empty set then drops packets instead of
    /// refusing them.
    pub any_endpoints: bool,
    pub internal_policy: TrafficPolicy,
    pub external_policy: TrafficPolicy,
    pub affinity_seconds: u32,
    /// The algorithm that chooses backends in mode ebpf.
    #[serde(default)]
    pub algorithm: Algorithm,
    /// `Snat` or `Dsr`, in mode ebpf.
    #[serde(default)]
    pub forwarding: Forwarding,
    /// The secondary mode that serves the service port, or some of its frontends.
    #[serde(skip)]
    pub secondary: Option<Mode>,
}

impl ServiceSnapshot {
    /// Returns a service port without frontends and endpoints.
    pub(super) const fn new(name: ServicePortName) -> Self {
        Self {
            id: 0,
            name,
            frontends: Vec::new(),
            cluster: Vec::new(),
            internal: Vec::new(),
            external: Vec::new(),
            any_endpoints: false,
            internal_policy: TrafficPolicy::Cluster,
            external_policy: TrafficPolicy::Cluster,
            affinity_seconds: 0,
            algorithm: Algorithm::Random,
            forwarding: Forwarding::Snat,
            secondary: None,
        }
    }

    const fn endpoint_sets(&mut self) -> [&mut Vec<EndpointSnapshot>; 3] {
        [&mut self.cluster, &mut self.internal, &mut self.external]
    }
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub struct FrontendSnapshot {
    /// The address. `None` for a node port.
    pub address: Option<IpAddr>,
    pub port: u16,
    /// True if clients outside the cluster can dial it.
    pub external: bool,
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct EndpointSnapshot {
    pub address: SocketAddr,
    /// True if the endpoint is on this node.
    pub local: bool,
    /// Id of the backend.
    pub backend: u32,
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct BackendSnapshot {
    pub id: u32,
    pub address: SocketAddr,
    /// The protocol. `None` for a number that no protocol of Kubernetes has.
    pub protocol: Option<Protocol>,
    pub local: bool,
    pub terminating: bool,
    /// The number of service ports that use the backend.
    pub uses: u32,
    /// Connections of this node to the backend, of service ports that choose by connections.
    /// `None`: there is no such service port, or the mode does not count.
    #[serde(default)]
    pub connections: Option<u64>,
}

/// The node itself as the mode has it programmed.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct NodeSnapshot {
    /// Indexes of the uplinks to which XDP sends frames that came in by others. Empty in modes
    /// other than ebpf.
    #[serde(default)]
    pub redirect_targets: BTreeSet<u32>,
    /// The addresses at which node ports are served. True: for the node's own processes only.
    pub node_port_addresses: Vec<(IpAddr, bool)>,
    pub masquerade_addresses: Vec<IpAddr>,
    /// The first and the last port of each range.
    pub masquerade_ports: Vec<(u16, u16)>,
    /// Cookie of the node's network namespace. 0 if the mode needs none.
    pub host_namespace: u64,
    /// The encapsulation of direct server return, in mode ebpf.
    #[serde(default)]
    pub encapsulation: Encapsulation,
}

/// Where a program of ours is attached to the node's traffic.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub struct Hook {
    /// The kernel's name of the hook: `connect4`, `ingress`.
    pub name: String,
    /// Index of the interface. `None` if the hook belongs to no interface.
    pub interface: Option<u32>,
    /// The way in which the program is attached: `cgroup`, `tcx`, `clsact` or `xdp`.
    pub kind: &'static str,
    /// Other owners' programs at the same hook of the interface, in the order in which they run.
    pub others: Vec<OtherProgram>,
}

/// Another owner's program at a hook that we use too.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OtherProgram {
    /// The program's name in the kernel, such as `cil_to_container`.
    pub name: String,
    /// `ingress` or `egress`.
    pub hook: &'static str,
    /// True if the program runs before ours, and so may keep packets from it.
    pub is_before: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::objects::{IpFamily, ObjectName};

    fn served(name: &str, ports: &[u16]) -> ServiceSnapshot {
        let frontend = |port: &u16| FrontendSnapshot { address: None, port: *port, external: true };
        let name = ServicePortName {
            service: ObjectName::new("default", name),
            port: "".into(),
            protocol: Protocol::Tcp,
            family: IpFamily::Ipv4,
        };
        ServiceSnapshot { frontends: ports.iter().map(frontend).collect(), ..ServiceSnapshot::new(name) }
    }

    fn backend(last: u8) -> BackendSnapshot {
        let address = SocketAddr::from(([10, 0, 0, last], 80));
        let protocol = Some(Protocol::Tcp);
        BackendSnapshot {
            id: 0,
            address,
            protocol,
            local: false,
            terminating: false,
            uses: 1,
            connections: None,
        }
    }

    #[test]
    fn what_a_secondary_mode_serves_is_added() {
        let (services, backends) =
            (vec![served("b", &[1, 2]), served("d", &[4])], vec![backend(1), backend(3)]);
        let mut both = Snapshot { services, backends, ..Snapshot::default() };
        let services = vec![served("a", &[7]), served("b", &[2, 3]), served("e", &[5])];
        both.add(
            Mode::Nftables,
            Snapshot { services, backends: vec![backend(2), backend(3)], ..Snapshot::default() },
        );
        assert_eq!(both.backends, [backend(1), backend(2), backend(3)]);
        let secondary = |served| ServiceSnapshot { secondary: Some(Mode::Nftables), ..served };
        let [a, b, e] = [("a", &[7][..]), ("b", &[1, 2, 3]), ("e", &[5])]
            .map(|(name, ports)| secondary(served(name, ports)));
        let expected = [a, b, served("d", &[4]), e];
        assert_eq!(both.services, expected);
    }
}
