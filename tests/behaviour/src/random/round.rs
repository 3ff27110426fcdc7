//! Addresses and ports of a cluster's services, and its objects.

use std::net::SocketAddr;

use anyhow::Result;
use lab::{
    Lab, Objects,
    address::{self, Addresses, FAMILIES, Family, cluster_ip},
    cluster::{NODES, SERVER_PORT, node_name},
    objects::{self, Ingress, NAMESPACE, ServicePort, State},
};
use serde_json::{Value, json};

use super::cluster::{
    Cluster, Endpoint, Kind, Label, Port, Probe, SERVICES, Service, Slice, Spec, TargetPort,
};
use crate::table::Destination;

/// Port on which the pods' second servers listen.
pub const SECOND_PORT: u16 = 8_081;
/// Default of Kubernetes for the time of affinity.
const THREE_HOURS: u32 = 10_800;

/// Addresses and ports of the services of the `round`-th cluster of a lab. Conntrack knows an
/// earlier datagram by its addresses, so these come again only after minutes.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    pub number: u32,
}

/// Addresses and ports of one service.
struct Slot {
    number: u32,
    port: u16,
}

/// Returns `first` plus `value` modulo `count`.
fn within(first: u16, count: u16, value: u32) -> u16 {
    first + u16::try_from(value % u32::from(count)).unwrap_or_default()
}

fn low_byte(first: u8, count: u8, value: u32) -> u8 {
    first + u8::try_from(value % u32::from(count)).unwrap_or_default()
}

impl Slot {
    fn cluster_ips(&self) -> Addresses {
        cluster_ip(within(1_000, 60_000, self.number))
    }

    fn load_balancer(&self, node: u8) -> Addresses {
        address::external(node, low_byte(1, 120, self.number))
    }

    fn external_ip(&self, node: u8) -> Addresses {
        address::external(node, low_byte(121, 120, self.number))
    }

    /// Returns the first of the service's three node ports, which are from the range of the API
    /// server.
    fn node_ports(&self) -> u16 {
        30_000 + 3 * within(0, 922, self.number)
    }

    fn node_port(&self, port: Port) -> u16 {
        match port {
            Port::Tcp | Port::Udp => self.node_ports(),
            Port::More => self.node_ports() + 1,
        }
    }

    fn health_check_node_port(&self) -> u16 {
        self.node_ports() + 2
    }

    fn port(&self, port: Port) -> u16 {
        match port {
            Port::Tcp | Port::Udp => self.port,
            Port::More => self.port + 1,
        }
    }

    fn undefined_port(&self) -> u16 {
        self.port + 2
    }
}

impl Round {
    fn slot(self, service: usize) -> Slot {
        let services = u32::try_from(SERVICES).unwrap_or(u32::MAX);
        let number = self.number * services + u32::try_from(service).unwrap_or_default();
        Slot { number, port: 1_000 + 3 * within(0, 3_000, self.number) }
    }

    fn name(self, service: usize) -> String {
        format!("r{}-{service}", self.number)
    }

    /// Returns the address and port that a probe dials.
    pub fn target(self, service: usize, probe: &Probe) -> SocketAddr {
        let Probe { destination, port, family, .. } = *probe;
        let slot = self.slot(service);
        let (address, port) = match destination {
            Destination::ClusterIp => (slot.cluster_ips().of(family), slot.port(port)),
            Destination::UndefinedPort => (slot.cluster_ips().of(family), slot.undefined_port()),
            Destination::NodePort(node) => (address::node(node).of(family), slot.node_port(port)),
            Destination::NodePortOnBridge => (address::pod(2, 1).of(family), slot.node_port(port)),
            Destination::NodePortOnLoopback => (family.loopback(), slot.node_port(port)),
            Destination::LoadBalancer(node) => (slot.load_balancer(node).of(family), slot.port(port)),
            Destination::ExternalIp(node) => (slot.external_ip(node).of(family), slot.port(port)),
        };
        SocketAddr::new(address, port)
    }

    /// Replaces all services by those of the cluster, as `spec` gives them.
    pub fn write<'a>(
        self,
        lab: &Lab,
        objects: &mut Objects,
        cluster: &'a Cluster,
        spec: impl Fn(&'a Service) -> Option<&'a Spec>,
    ) -> Result<()> {
        objects.clear_services();
        for (number, service) in cluster.services() {
            let Some(spec) = spec(service) else { continue };
            let name = self.name(number);
            objects.set("Service", &name, self.service(number, service.headless, spec));
            for family in FAMILIES {
                for (index, slice) in spec.slices(family).iter().enumerate() {
                    let slice_name = format!("{name}-{}-{index}", family.to_string().to_lowercase());
                    let slice = self.slice(lab, number, spec, family, slice)?;
                    objects.set("EndpointSlice", &slice_name, named(slice, &slice_name));
                }
            }
        }
        Ok(())
    }

    fn service(self, number: usize, headless: bool, spec: &Spec) -> Value {
        let slot = self.slot(number);
        let both = |of: &dyn Fn(u8) -> Addresses| -> Vec<_> {
            NODES.into_iter().flat_map(|node| of(node).both()).collect()
        };
        let (is_load_balancer, proxied) = match spec.kind {
            Kind::LoadBalancer { proxied, .. } if !headless => (true, proxied),
            Kind::LoadBalancer { .. } | Kind::ClusterIp | Kind::NodePort => (false, false),
        };
        let addresses = if is_load_balancer { both(&|node| slot.load_balancer(node)) } else { Vec::new() };
        let port = |port: &Port| ServicePort {
            name: port_name(spec, *port).to_owned(),
            protocol: port.protocol(),
            port: slot.port(*port),
            target_port: SERVER_PORT,
            node_port: (spec.has_node_ports() && !headless).then(|| slot.node_port(*port)),
        };
        let ranges = spec.source_ranges.iter().map(|(range, family)| range.of(*family).to_owned());
        let service = objects::Service {
            name: self.name(number),
            cluster_ips: slot.cluster_ips(),
            ports: spec.ports.iter().map(port).collect(),
            internal_local: spec.internal_local,
            external_local: spec.external_local,
            affinity_seconds: spec.affinity.then_some(THREE_HOURS),
            external_ips: match spec.external_ips && !headless {
                true => both(&|node| slot.external_ip(node)),
                false => Vec::new(),
            },
            load_balancer: addresses.into_iter().map(|address| Ingress { address, proxied }).collect(),
            source_ranges: ranges.collect(),
            health_check_node_port: (is_load_balancer && spec.external_local)
                .then(|| slot.health_check_node_port()),
            algorithm: None,
            forwarding: None,
        };
        let mut object = service.object();
        if headless {
            object["spec"]["clusterIP"] = json!("None");
            object["spec"]["clusterIPs"] = json!(["None"]);
        }
        match spec.label {
            Some(Label::ServiceProxyName) => {
                object["metadata"]["labels"] = json!({"service.kubernetes.io/service-proxy-name": "another"});
            }
            Some(Label::Headless) => {
                object["metadata"]["labels"] = json!({"service.kubernetes.io/headless": ""});
            }
            None => {}
        }
        object
    }

    fn slice(self, lab: &Lab, number: usize, spec: &Spec, family: Family, slice: &Slice) -> Result<Value> {
        let ports = spec.ports.iter().filter_map(|port| {
            let number = match slice.ports[*port as usize] {
                TargetPort::First => SERVER_PORT,
                TargetPort::Second => SECOND_PORT,
                TargetPort::Absent => return None,
            };
            Some(json!({"name": port_name(spec, *port), "protocol": port.protocol().name(), "port": number}))
        });
        let endpoints = slice.endpoints.iter().map(|endpoint| {
            let address = lab.netns(endpoint.pod)?.addresses.of(family);
            Ok(json_of(endpoint, address, spec))
        });
        let mut labels = json!({"kubernetes.io/service-name": self.name(number)});
        if spec.label == Some(Label::Headless) {
            // The EndpointSlice controller copies this label from the service.
            labels["service.kubernetes.io/headless"] = json!("");
        }
        Ok(json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"namespace": NAMESPACE, "labels": labels},
            "addressType": family.to_string(),
            "endpoints": endpoints.collect::<Result<Vec<_>>>()?,
            "ports": Vec::from_iter(ports),
        }))
    }
}

fn named(mut object: Value, name: &str) -> Value {
    object["metadata"]["name"] = json!(name);
    object
}

fn port_name(spec: &Spec, port: Port) -> &'static str {
    if spec.unnamed_port && spec.ports.len() == 1 { "" } else { port.name() }
}

fn json_of(endpoint: &Endpoint, address: std::net::IpAddr, spec: &Spec) -> Value {
    let mut object = json!({"addresses": [address.to_string()]});
    if !(endpoint.bare && endpoint.state == State::Ready) {
        object["conditions"] = endpoint.state.conditions();
    }
    if let Some(node) = endpoint.node() {
        object["nodeName"] = json!(node_name(node));
    }
    let named = |names: &[&str]| names.iter().map(|name| json!({"name": name})).collect::<Vec<_>>();
    let hints =
        [("forZones", spec.zone_hints, endpoint.zones), ("forNodes", spec.node_hints, endpoint.nodes)];
    for (field, _, names) in hints.into_iter().filter(|(_, has, names)| *has && !names.is_empty()) {
        object["hints"][field] = named(names).into();
    }
    object
}
