//! Kubernetes objects that the proxies under test read.

use std::{collections::BTreeMap, fs, net::IpAddr, path::Path};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::{
    address::{Addresses, FAMILIES, Family, NodeNumber},
    agent::protocol::Protocol,
};

pub const NAMESPACE: &str = "default";

/// Service as the scenarios need it: dual-stack, with the same ports for TCP and UDP.
#[derive(Clone, Debug)]
pub struct Service {
    pub name: String,
    pub cluster_ips: Addresses,
    pub ports: Vec<ServicePort>,
    /// True if clients of the cluster IP get only endpoints of their own node.
    pub internal_local: bool,
    /// True if clients from outside get only endpoints of the node that they dial.
    pub external_local: bool,
    /// Seconds without a new connection after which a client may get another endpoint.
    pub affinity_seconds: Option<u32>,
    pub external_ips: Vec<IpAddr>,
    pub load_balancer: Vec<Ingress>,
    /// Clients that load-balancer addresses serve. If it is empty, they serve everybody.
    pub source_ranges: Vec<String>,
    pub health_check_node_port: Option<u16>,
    /// Annotations of proxy-ctl, this one and the next.
    pub algorithm: Option<&'static str>,
    pub forwarding: Option<&'static str>,
}

/// Load-balancer address.
#[derive(Clone, Copy, Debug)]
pub struct Ingress {
    pub address: IpAddr,
    /// True for `ipMode: Proxy`: the load balancer wants to see its connections itself.
    pub proxied: bool,
}

#[derive(Clone, Debug)]
pub struct ServicePort {
    pub name: String,
    pub protocol: Protocol,
    pub port: u16,
    pub target_port: u16,
    pub node_port: Option<u16>,
}

/// Endpoint of both families.
#[derive(Clone, Debug)]
pub struct Endpoint {
    pub addresses: Addresses,
    pub node: NodeNumber,
    pub state: State,
    /// Zones whose clients the endpoint is for. If it is empty, there is no hint.
    pub zones: &'static [&'static str],
    /// Nodes whose clients the endpoint is for. If it is empty, there is no hint.
    pub nodes: &'static [&'static str],
    /// Weight in an annotation of the endpoint's slice.
    pub weight: Option<u8>,
}

/// Conditions of an endpoint.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum State {
    Ready,
    Unready,
    /// The endpoint ends, and still answers.
    Terminating,
    /// The endpoint ends, and no longer answers.
    Ended,
}

impl State {
    /// Returns the conditions as an EndpointSlice has them.
    pub fn conditions(self) -> Value {
        let (ready, serving, terminating) = match self {
            Self::Ready => (true, true, false),
            Self::Unready => (false, false, false),
            Self::Terminating => (false, true, true),
            Self::Ended => (false, false, true),
        };
        json!({"ready": ready, "serving": serving, "terminating": terminating})
    }
}

impl Endpoint {
    pub fn ready(addresses: Addresses, node: NodeNumber) -> Self {
        Self { addresses, node, state: State::Ready, zones: &[], nodes: &[], weight: None }
    }
}

impl Service {
    /// Makes a Service with TCP and UDP on `port`, and with a node port if one is given.
    pub fn new(
        name: &str,
        cluster_ips: Addresses,
        port: u16,
        target_port: u16,
        node_port: Option<u16>,
    ) -> Self {
        let ports = [Protocol::Tcp, Protocol::Udp]
            .map(|protocol| ServicePort {
                name: protocol.name().to_lowercase(),
                protocol,
                port,
                target_port,
                node_port,
            })
            .to_vec();
        Self {
            name: name.to_owned(),
            cluster_ips,
            ports,
            internal_local: false,
            external_local: false,
            affinity_seconds: None,
            external_ips: Vec::new(),
            load_balancer: Vec::new(),
            source_ranges: Vec::new(),
            health_check_node_port: None,
            algorithm: None,
            forwarding: None,
        }
    }

    /// Returns the object as the API has it.
    pub fn object(&self) -> Value {
        let has_node_port = self.ports.iter().any(|port| port.node_port.is_some());
        let is_load_balancer = !self.load_balancer.is_empty();
        let kind = match (is_load_balancer, has_node_port) {
            (true, _) => "LoadBalancer",
            (false, true) => "NodePort",
            (false, false) => "ClusterIP",
        };
        let policy = |local| if local { "Local" } else { "Cluster" };
        let ports: Vec<Value> = self.ports.iter().map(ServicePort::object).collect();
        let mut spec = json!({
            "type": kind,
            "clusterIP": self.cluster_ips.v4.to_string(),
            "clusterIPs": [self.cluster_ips.v4.to_string(), self.cluster_ips.v6.to_string()],
            "ipFamilies": ["IPv4", "IPv6"],
            "ipFamilyPolicy": "RequireDualStack",
            "internalTrafficPolicy": policy(self.internal_local),
            "ports": ports,
        });
        if kind != "ClusterIP" || !self.external_ips.is_empty() {
            spec["externalTrafficPolicy"] = json!(policy(self.external_local));
        }
        if let Some(seconds) = self.affinity_seconds {
            spec["sessionAffinity"] = json!("ClientIP");
            spec["sessionAffinityConfig"] = json!({"clientIP": {"timeoutSeconds": seconds}});
        }
        if !self.external_ips.is_empty() {
            spec["externalIPs"] = json!(self.external_ips);
        }
        if let Some(port) = self.health_check_node_port {
            spec["healthCheckNodePort"] = json!(port);
        }
        let mut object =
            json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata(&self.name), "spec": spec});
        let annotations = [("algorithm", self.algorithm), ("forwarding", self.forwarding)];
        for (name, value) in annotations {
            if let Some(value) = value {
                object["metadata"]["annotations"][format!("proxy-ctl.dev/{name}")] = json!(value);
            }
        }
        if is_load_balancer {
            object["spec"]["allocateLoadBalancerNodePorts"] = json!(has_node_port);
            if !self.source_ranges.is_empty() {
                object["spec"]["loadBalancerSourceRanges"] = json!(self.source_ranges);
            }
            let ingress: Vec<Value> = self.load_balancer.iter().map(Ingress::object).collect();
            object["status"] = json!({"loadBalancer": {"ingress": ingress}});
        }
        object
    }
}

impl Ingress {
    fn object(&self) -> Value {
        json!({"ip": self.address, "ipMode": if self.proxied { "Proxy" } else { "VIP" }})
    }
}

impl ServicePort {
    fn object(&self) -> Value {
        let mut port = json!({
            "name": self.name,
            "protocol": self.protocol.name(),
            "port": self.port,
            "targetPort": self.target_port,
        });
        if let Some(node_port) = self.node_port {
            port["nodePort"] = json!(node_port);
        }
        port
    }
}

fn metadata(name: &str) -> Value {
    json!({"name": name, "namespace": NAMESPACE})
}

const ZONE_LABEL: &str = "topology.kubernetes.io/zone";

/// Returns the zone of a node. Each has its own: `node1` is in `zone-of-node1`.
pub fn zone_of(node: &str) -> String {
    format!("zone-of-{node}")
}

/// Kind and name of an object, which identify it.
pub type Key = (&'static str, String);

/// Objects by their identity.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Objects {
    objects: BTreeMap<Key, Value>,
}

impl Objects {
    pub fn set_node(&mut self, name: &str, addresses: Addresses, pod_ranges: [String; 2]) {
        let addresses: Vec<Value> = addresses
            .both()
            .map(|address| json!({"type": "InternalIP", "address": address.to_string()}))
            .to_vec();
        let node = json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": name,
                "labels": {"kubernetes.io/hostname": name, ZONE_LABEL: zone_of(name)},
            },
            "spec": {"podCIDR": pod_ranges[0], "podCIDRs": pod_ranges},
            "status": {"addresses": addresses},
        });
        self.objects.insert(("Node", name.to_owned()), node);
    }

    /// Adds or replaces a service and its endpoint slices, one for each family.
    pub fn set_service(&mut self, service: &Service, endpoints: &[Endpoint]) {
        self.objects.insert(("Service", service.name.clone()), service.object());
        for family in FAMILIES {
            let slice = endpoint_slice(service, family, endpoints);
            self.objects.insert(("EndpointSlice", slice_name(&service.name, family)), slice);
        }
    }

    pub fn remove_service(&mut self, name: &str) {
        self.objects.remove(&("Service", name.to_owned()));
        for family in FAMILIES {
            self.objects.remove(&("EndpointSlice", slice_name(name, family)));
        }
    }

    /// Returns the names of all services.
    pub fn services(&self) -> Vec<String> {
        let is_service = |key: &&Key| key.0 == "Service";
        self.objects.keys().filter(is_service).map(|(_, name)| name.clone()).collect()
    }

    /// Adds or replaces an object.
    pub fn set(&mut self, kind: &'static str, name: &str, object: Value) {
        self.objects.insert((kind, name.to_owned()), object);
    }

    pub fn remove(&mut self, key: &Key) {
        self.objects.remove(key);
    }

    /// Removes every service and slice.
    pub fn clear_services(&mut self) {
        self.objects.retain(|(kind, _), _| *kind == "Node");
    }

    /// Sets the zone that a node says it is in. Returns true if it said another before.
    pub fn set_zone(&mut self, node: &str, zone: Option<&str>) -> bool {
        let Some(node) = self.objects.get_mut(&("Node", node.to_owned())) else { return false };
        let former = node.clone();
        if let Some(labels) = node["metadata"]["labels"].as_object_mut() {
            match zone {
                Some(zone) => labels.insert(ZONE_LABEL.to_owned(), json!(zone)),
                None => labels.remove(ZONE_LABEL),
            };
        }
        *node != former
    }

    pub fn iter(&self) -> impl Iterator<Item = (&Key, &Value)> {
        self.objects.iter()
    }

    pub fn get(&self, key: &Key) -> Option<&Value> {
        self.objects.get(key)
    }

    /// Replaces `objects.yaml` in the folder by one rename, so that a reader sees a whole change or
    /// nothing.
    pub fn write_to(&self, folder: &Path) -> Result<()> {
        let mut text = String::new();
        for object in self.objects.values() {
            text.push_str("---\n");
            text.push_str(&serde_json::to_string(object)?);
            text.push('\n');
        }
        let written = folder.with_extension("next");
        fs::write(&written, text).with_context(|| format!("writing {}", written.display()))?;
        let target = folder.join("objects.yaml");
        fs::rename(&written, &target).with_context(|| format!("writing {}", target.display()))
    }
}

fn slice_name(service: &str, family: Family) -> String {
    format!("{service}-{}", family.to_string().to_lowercase())
}

fn endpoint_slice(service: &Service, family: Family, endpoints: &[Endpoint]) -> Value {
    let weight =
        |endpoint: &Endpoint| Some(format!("{}={}", endpoint.addresses.of(family), endpoint.weight?));
    let weights: Vec<String> = endpoints.iter().filter_map(weight).collect();
    let endpoints: Vec<Value> = endpoints
        .iter()
        .map(|endpoint| {
            let address: IpAddr = endpoint.addresses.of(family);
            let mut object = json!({
                "addresses": [address.to_string()],
                "nodeName": format!("node{}", endpoint.node),
                "conditions": endpoint.state.conditions(),
            });
            let names = |names: &[&str]| names.iter().map(|name| json!({"name": name})).collect::<Vec<_>>();
            for (field, hints) in [("forZones", endpoint.zones), ("forNodes", endpoint.nodes)] {
                if !hints.is_empty() {
                    object["hints"][field] = names(hints).into();
                }
            }
            object
        })
        .collect();
    let ports: Vec<Value> = service
        .ports
        .iter()
        .map(|port| json!({"name": port.name, "protocol": port.protocol.name(), "port": port.target_port}))
        .collect();
    let name = slice_name(&service.name, family);
    let mut metadata = metadata(&name);
    metadata["labels"] = json!({"kubernetes.io/service-name": service.name});
    if !weights.is_empty() {
        metadata["annotations"] = json!({"proxy-ctl.dev/weights": weights.join(",")});
    }
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": metadata,
        "addressType": family.to_string(),
        "endpoints": endpoints,
        "ports": ports,
    })
}
