//! The lab with an API server in it, the Services that are dialled, and as many others as are asked
//! for.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::Result;
use control_plane::{
    ADMIN, ApiServer, Options,
    objects::{self, Bulk},
};
use lab::{
    Agent, Lab, Objects, Protocol,
    address::{self, Family, NodeNumber, POD_RANGE4, POD_RANGE6, cluster_ip, gateway},
    cluster::{FABRIC, NODES, OUTSIDE, PodProcesses, SERVER_PORT, node_name},
    namespace::sysctl,
    objects::{Endpoint, Service, ServicePort},
};

use crate::{measure::change, plan::Route};

/// Node on which the proxies run.
pub(crate) const NODE: NodeNumber = 1;
pub(crate) const CLIENT: &str = "client";
/// Servers of each node. There are two, so that a Service is never served by one process alone,
/// with a proxy or without.
const SERVERS: [(NodeNumber, [&str; 2]); 2] = [(1, ["server-a", "server-c"]), (2, ["server-b", "server-d"])];
/// Endpoints between which the endpoint of the measured Service moves.
pub(crate) const MOVES_BETWEEN: [&str; 2] = ["server-a", "server-b"];
pub(crate) const PORT: u16 = 80;
const PORT_OF_BULK: u16 = 81;
const PORT_OF_NAMES: u16 = 82;
/// Port of the servers that send bytes back.
pub(crate) const BYTE_PORT: u16 = 9_090;
/// Port of the servers that take many bytes.
const BULK_PORT: u16 = 9_091;

pub(crate) struct Cluster {
    pub(crate) client: Agent,
    outside: Agent,
    _servers: Vec<Agent>,
    pub(crate) server: ApiServer,
    others: Bulk,
    pub(crate) lab: Lab,
}

/// Addresses that are dialled on a route.
pub(crate) struct Targets {
    pub(crate) direct: Vec<SocketAddr>,
    pub(crate) service: SocketAddr,
}

/// Service whose endpoints are all on one node.
struct OnNode {
    name: &'static str,
    index: u16,
    node: NodeNumber,
    node_port: u16,
}

const ON_NODES: [OnNode; 2] = [
    OnNode { name: "near", index: 300, node: 1, node_port: 30_080 },
    OnNode { name: "far", index: 301, node: 2, node_port: 30_083 },
];

impl Route {
    fn service(self) -> &'static OnNode {
        match self {
            Self::ClusterIp | Self::NodePortLocal => &ON_NODES[0],
            Self::NodePortRemote => &ON_NODES[1],
        }
    }

    /// Returns the pods that serve the route's Service.
    pub(crate) fn servers(self) -> [&'static str; 2] {
        servers_of(self.service().node)
    }
}

fn servers_of(node: NodeNumber) -> [&'static str; 2] {
    SERVERS[usize::from(node != SERVERS[0].0)].1
}

impl OnNode {
    fn object(&self) -> Service {
        let mut service =
            Service::new(self.name, cluster_ip(self.index), PORT, BYTE_PORT, Some(self.node_port));
        let others = [("bulk", PORT_OF_BULK, BULK_PORT), ("names", PORT_OF_NAMES, SERVER_PORT)];
        for (node_port, (name, port, target_port)) in (self.node_port + 1..).zip(others) {
            service.ports.push(ServicePort {
                name: name.to_owned(),
                protocol: Protocol::Tcp,
                port,
                target_port,
                node_port: Some(node_port),
            });
        }
        service
    }
}

impl Cluster {
    /// Starts the cluster with the Services that are dialled and no others. `endpoints` is the
    /// number of endpoints that each of the others will have.
    pub(crate) fn start(endpoints: usize) -> Result<Self> {
        let mut lab = Lab::new()?;
        lab.add_pod(NODE, CLIENT, PodProcesses::InNodeCgroup)?;
        let mut servers = Vec::new();
        for (node, names) in SERVERS {
            for name in names {
                lab.add_pod(node, name, PodProcesses::InNodeCgroup)?;
                let server = lab.server(name)?;
                let addresses = lab.netns(name)?.addresses;
                server.serve_bytes(&addresses.with_port(BYTE_PORT))?;
                server.serve_bulk(&addresses.with_port(BULK_PORT))?;
                servers.push(server);
            }
        }
        route_pods(&lab)?;
        let options = Options {
            address: gateway().v4.into(),
            namespace: Some(lab.netns(FABRIC)?.namespace.clone()),
            ..Options::default()
        };
        let server = ApiServer::start_with(&lab.directory().join("control-plane"), options)?;
        let cluster = Self {
            client: lab.agent(CLIENT)?,
            outside: lab.agent(OUTSIDE)?,
            _servers: servers,
            server,
            others: Bulk::new("many", 0, endpoints),
            lab,
        };
        cluster.publish()?;
        Ok(cluster)
    }

    fn publish(&self) -> Result<()> {
        let mut objects = Objects::default();
        for node in NODES {
            let pods = [format!("10.244.{node}.0/24"), format!("fd00:10:244:{node}::/64")];
            objects.set_node(&node_name(node), address::node(node), pods);
        }
        for service in &ON_NODES {
            let endpoint = |name: &&str| Ok(Endpoint::ready(self.lab.netns(name)?.addresses, service.node));
            let endpoints = servers_of(service.node).iter().map(endpoint).collect::<Result<Vec<_>>>()?;
            objects.set_service(&service.object(), &endpoints);
        }
        let addresses = self.moves_between()?;
        self.server.run(async |api| {
            for (_, object) in objects.iter() {
                objects::apply(&api, object).await?;
            }
            change::create(&api, addresses).await
        })
    }

    /// Creates what is missing until there are as many Services. The Services that are dialled
    /// count as one.
    pub(crate) fn grow(&mut self, services: usize) -> Result<()> {
        let others = services.saturating_sub(1);
        if others > self.others.services {
            let first = std::mem::replace(&mut self.others.services, others);
            let namespace = objects::namespace(&self.others.namespace);
            self.server.run(async |api| objects::apply(&api, &namespace).await)?;
            self.server.store(self.others.stored(first))?;
        }
        Ok(())
    }

    pub(crate) fn others(&self) -> &Bulk {
        &self.others
    }

    pub(crate) fn moves_between(&self) -> Result<[Ipv4Addr; 2]> {
        let [first, second] = MOVES_BETWEEN.map(|name| self.lab.netns(name).map(|pod| pod.addresses.v4));
        Ok([first?, second?])
    }

    pub(crate) fn kubeconfig(&self) -> std::path::PathBuf {
        self.server.kubeconfig(ADMIN)
    }

    /// Returns the agent that dials on this route.
    pub(crate) fn dialler(&self, route: Route) -> &Agent {
        match route {
            Route::ClusterIp => &self.client,
            Route::NodePortLocal | Route::NodePortRemote => &self.outside,
        }
    }

    pub(crate) fn targets(&self, route: Route, bulk: bool) -> Result<Targets> {
        let service = route.service();
        let port = if bulk { BULK_PORT } else { BYTE_PORT };
        let direct = route.servers().into_iter().map(|name| {
            let pod = self.lab.netns(name)?;
            anyhow::Ok(SocketAddr::new(pod.addresses.of(Family::V4), port))
        });
        let service = match route {
            Route::ClusterIp => {
                let port = if bulk { PORT_OF_BULK } else { PORT };
                SocketAddr::new(cluster_ip(service.index).of(Family::V4), port)
            }
            Route::NodePortLocal | Route::NodePortRemote => {
                let port = service.node_port + u16::from(bulk);
                SocketAddr::new(address::node(NODE).of(Family::V4), port)
            }
        };
        Ok(Targets { direct: direct.collect::<Result<_>>()?, service })
    }

    /// Returns a node port whose endpoints are on the other node, and answer with their names.
    pub(crate) fn names() -> SocketAddr {
        let port = Route::NodePortRemote.service().node_port + 2;
        SocketAddr::new(address::node(NODE).of(Family::V4), port)
    }
}

/// Makes the client outside reach pods by their nodes. No node may send it an ICMP redirect for a
/// shorter way.
fn route_pods(lab: &Lab) -> Result<()> {
    let mut routes = String::new();
    for node in NODES {
        routes.push_str(&format!("route add 10.244.{node}.0/24 via {}\n", address::node(node).v4));
        let quiet = [("net/ipv4/conf/all/send_redirects", "0"), ("net/ipv4/conf/eth0/send_redirects", "0")];
        sysctl(&lab.netns(&node_name(node))?.namespace, &quiet)?;
    }
    lab.netns(OUTSIDE)?.ip(&routes)
}

/// Returns the pod ranges as the proxies' configuration has them.
pub(crate) fn pod_ranges() -> String {
    format!("{POD_RANGE4},{POD_RANGE6}")
}
