//! Pods and services that every scenario finds.

use lab::{
    Lab, Objects,
    address::{NodeNumber, cluster_ip},
    cluster::{PodProcesses, SERVER_PORT},
    objects::{Endpoint, Service},
};

/// Port that every service has.
pub const PORT: u16 = 80;

/// Pod that every scenario finds.
pub struct Pod {
    pub name: &'static str,
    pub node: NodeNumber,
    pub is_client: bool,
}

/// Pods of every lab. Clients are endpoints too, of services that only they serve.
pub const PODS: [Pod; 5] = [
    Pod { name: "client-1", node: 1, is_client: true },
    Pod { name: "client-2", node: 2, is_client: true },
    Pod { name: "web-1", node: 1, is_client: false },
    Pod { name: "web-2", node: 2, is_client: false },
    Pod { name: "web-3", node: 2, is_client: false },
];

impl Pod {
    pub fn processes(&self, unseen: bool) -> PodProcesses {
        if self.is_client && unseen { PodProcesses::Elsewhere } else { PodProcesses::InNodeCgroup }
    }
}

/// Service that every scenario finds, and its endpoints.
pub struct ServiceFixture {
    pub name: &'static str,
    /// Index of its cluster IPs in the lab's range.
    pub index: u16,
    pub node_port: Option<u16>,
    pub endpoints: &'static [&'static str],
    pub internal_local: bool,
    pub external_local: bool,
}

const fn service(name: &'static str, index: u16, endpoints: &'static [&'static str]) -> ServiceFixture {
    ServiceFixture { name, index, node_port: None, endpoints, internal_local: false, external_local: false }
}

impl ServiceFixture {
    const fn node_port(mut self, port: u16) -> Self {
        self.node_port = Some(port);
        self
    }

    const fn internal_local(mut self) -> Self {
        self.internal_local = true;
        self
    }

    const fn external_local(mut self) -> Self {
        self.external_local = true;
        self
    }
}

/// Service with one endpoint on each node.
pub const BALANCED: ServiceFixture = service("balanced", 16, &["web-1", "web-2"]).node_port(30_080);
/// Service with an endpoint on node 1 only.
pub const ON_NODE1: ServiceFixture = service("on-node1", 17, &["web-1"]).node_port(30_081);
/// Service with an endpoint on node 2 only.
pub const ON_NODE2: ServiceFixture = service("on-node2", 18, &["web-2"]).node_port(30_082);
/// Service whose only endpoint is the client on node 1.
pub const LONER1: ServiceFixture = service("loner-1", 19, &["client-1"]);
/// Service whose only endpoint is the client on node 2.
pub const LONER2: ServiceFixture = service("loner-2", 20, &["client-2"]);
pub const EMPTY: ServiceFixture = service("empty", 21, &[]).node_port(30_083);
pub const INTERNAL_LOCAL: ServiceFixture =
    service("internal-local", 22, &["web-1", "web-2"]).internal_local();
pub const INTERNAL_LOCAL_ON_NODE2: ServiceFixture =
    service("internal-local-on-node2", 23, &["web-2"]).internal_local();
pub const EXTERNAL_LOCAL_ON_NODE1: ServiceFixture =
    service("external-local-on-node1", 24, &["web-1"]).node_port(30_084).external_local();
/// Service that scenarios about affinity write. Clients of all kinds reach it.
pub const AFFINE: ServiceFixture = service("affine", 26, &["web-1", "web-2", "web-3"]).node_port(30_085);
/// Service that scenarios about datagrams write.
pub const DATAGRAMS: ServiceFixture = service("datagrams", 27, &["web-1"]).node_port(30_086);
/// Service that scenarios about health checks write.
pub const HEALTH_CHECKED: ServiceFixture = service("health-checked", 28, &["web-1"]).external_local();
/// Service that scenarios about SCTP write.
pub const SCTP: ServiceFixture = service("sctp", 29, &["web-1", "web-2"]).node_port(30_087);
/// Service that scenarios about source ranges, and about ports of several protocols, write.
pub const RESTRICTED: ServiceFixture = service("restricted", 30, &["web-1", "web-2"]);
/// Service that scenarios about networks beside the fabric write.
pub const OVER_NETWORK: ServiceFixture = service("over-network", 31, &[]).node_port(30_088);
/// Service that scenarios about types, ports and load-balancer addresses write.
pub const SHIFTING: ServiceFixture = service("shifting", 32, &["web-1", "web-2"]).node_port(30_089);
/// Service that scenarios about algorithms and weights write.
pub const WEIGHED: ServiceFixture = service("weighed", 33, &["web-1", "web-2", "web-3"]).node_port(30_090);
/// Service that scenarios about direct server return write.
pub const DIRECT: ServiceFixture = service("direct", 34, &["web-2", "web-3"]).node_port(30_091);
/// Service that scenarios change.
pub const CHANGING: ServiceFixture = service("changing", 25, &["web-1", "web-2"]);

pub const SERVICES: [ServiceFixture; 10] = [
    BALANCED,
    ON_NODE1,
    ON_NODE2,
    LONER1,
    LONER2,
    EMPTY,
    INTERNAL_LOCAL,
    INTERNAL_LOCAL_ON_NODE2,
    EXTERNAL_LOCAL_ON_NODE1,
    CHANGING,
];

/// Index of the sentinel, the service by which a proxy shows that it has read everything before.
pub const SENTINEL_INDEX: u16 = 250;
/// Index of the first service that is added to see a proxy follow. No other service has so high a
/// number.
pub const FIRST_NEWCOMER_INDEX: u16 = 40_000;

impl ServiceFixture {
    pub fn service(&self) -> Service {
        let mut service = Service::new(self.name, cluster_ip(self.index), PORT, SERVER_PORT, self.node_port);
        service.internal_local = self.internal_local;
        service.external_local = self.external_local;
        service
    }

    /// Writes the service with the given pods as its endpoints.
    pub fn publish(&self, lab: &Lab, objects: &mut Objects, endpoints: &[&str]) -> anyhow::Result<()> {
        let endpoints = endpoints
            .iter()
            .map(|name| {
                let pod = lab.netns(name)?;
                Ok(Endpoint::ready(pod.addresses, pod.node.unwrap_or_default()))
            })
            .collect::<anyhow::Result<Vec<_>>>()?;
        objects.set_service(&self.service(), &endpoints);
        Ok(())
    }
}
