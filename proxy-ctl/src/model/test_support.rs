//! Small builders for the objects of tests.

use std::{net::IpAddr, sync::Arc};

use super::{
    desired::{DesiredPort, ServicePortName},
    objects::{
        DEFAULT_WEIGHT, Endpoint, EndpointPort, EndpointSlice, Hints, IpFamily, Node, ObjectName, Protocol,
        Service, ServicePort, TrafficPolicy,
    },
};

pub(crate) const HERE: &str = "here";
pub(crate) const THERE: &str = "there";

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Parses `namespace/name`.
pub(crate) fn name(text: &str) -> ObjectName {
    let (namespace, name) = text.split_once('/').unwrap();
    ObjectName::new(namespace, name)
}

/// Returns a Service with an unnamed port 80/TCP. `text` is `namespace/name`.
pub(crate) fn service(text: &str, cluster_ips: &[&str]) -> Service {
    Service {
        name: name(text),
        created: 0,
        ports: vec![port("", 80)],
        cluster_ips: cluster_ips.iter().map(|address| ip(address)).collect(),
        external_ips: vec![],
        load_balancer_ips: vec![],
        proxied_load_balancer_ips: vec![],
        internal_policy: TrafficPolicy::Cluster,
        external_policy: TrafficPolicy::Cluster,
        affinity_seconds: None,
        source_ranges: vec![],
        health_check_node_port: None,
        algorithm: None,
        forwarding: None,
    }
}

pub(crate) fn port(name: &str, port: u16) -> ServicePort {
    ServicePort { name: name.into(), protocol: Protocol::Tcp, port, node_port: None }
}

impl Service {
    pub(crate) fn created(self, created: i64) -> Self {
        Self { created, ..self }
    }

    pub(crate) fn ports(self, ports: Vec<ServicePort>) -> Self {
        Self { ports, ..self }
    }

    pub(crate) fn node_port(mut self, number: u16) -> Self {
        self.ports[0].node_port = Some(number);
        self
    }

    pub(crate) fn external_ip(mut self, address: &str) -> Self {
        self.external_ips.push(ip(address));
        self
    }

    pub(crate) fn load_balancer_ip(mut self, address: &str) -> Self {
        self.load_balancer_ips.push(ip(address));
        self
    }

    pub(crate) fn policies(self, internal_policy: TrafficPolicy, external_policy: TrafficPolicy) -> Self {
        Self { internal_policy, external_policy, ..self }
    }
}

impl ServicePort {
    pub(crate) fn protocol(self, protocol: Protocol) -> Self {
        Self { protocol, ..self }
    }

    pub(crate) fn node_port(self, number: u16) -> Self {
        Self { node_port: Some(number), ..self }
    }
}

/// Returns a slice with an unnamed port 8080/TCP. It has the family of its first endpoint, or IPv4
/// if it has none.
pub(crate) fn slice(text: &str, service: &str, endpoints: Vec<Endpoint>) -> EndpointSlice {
    EndpointSlice {
        name: name(text),
        service: service.into(),
        family: endpoints.first().map_or(IpFamily::Ipv4, |endpoint| IpFamily::of(endpoint.address)),
        ports: vec![target("", 8080)],
        endpoints,
        triggered: None,
    }
}

impl EndpointSlice {
    pub(crate) fn ports(self, ports: Vec<EndpointPort>) -> Self {
        Self { ports, ..self }
    }
}

pub(crate) fn target(name: &str, port: u16) -> EndpointPort {
    EndpointPort { name: name.into(), protocol: Protocol::Tcp, port }
}

/// Returns a ready endpoint on another node.
pub(crate) fn remote(address: &str) -> Endpoint {
    Endpoint {
        address: ip(address),
        ready: true,
        serving: true,
        terminating: false,
        weight: DEFAULT_WEIGHT,
        node: Some(THERE.into()),
        hints: None,
    }
}

/// Returns a ready endpoint on this node.
pub(crate) fn local(address: &str) -> Endpoint {
    Endpoint { node: Some(HERE.into()), ..remote(address) }
}

impl Endpoint {
    pub(crate) fn unready(self) -> Self {
        Self { ready: false, ..self }
    }

    pub(crate) fn dead(self) -> Self {
        Self { ready: false, serving: false, ..self }
    }

    pub(crate) fn draining(self) -> Self {
        Self { ready: false, terminating: true, ..self }
    }

    pub(crate) fn zones(self, zones: &[&str]) -> Self {
        self.hints(zones, &[])
    }

    pub(crate) fn hints(self, zones: &[&str], nodes: &[&str]) -> Self {
        let names = |names: &[&str]| names.iter().map(|name| Arc::from(*name)).collect();
        Self { hints: Some(Arc::new(Hints { zones: names(zones), nodes: names(nodes) })), ..self }
    }
}

pub(crate) fn node(zone: Option<&str>) -> Node {
    Node { name: HERE.into(), zone: zone.map(Arc::from), ..Node::default() }
}

/// Returns the identity of a TCP service port. `service` is `namespace/name`.
pub(crate) fn port_name(service: &str, port: &str, family: IpFamily) -> ServicePortName {
    ServicePortName { service: name(service), port: port.into(), protocol: Protocol::Tcp, family }
}

/// Returns `address:port` of the endpoints that `set` names, in its order.
pub(crate) fn shown(port: &DesiredPort, set: &[u32]) -> Vec<String> {
    set.iter()
        .map(|index| &port.endpoints.all[*index as usize])
        .map(|endpoint| std::net::SocketAddr::new(endpoint.address, endpoint.port).to_string())
        .collect()
}
