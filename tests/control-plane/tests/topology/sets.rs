//! Answers one question about endpoint sets, from JSON to JSON, by the model.

use std::{
    io::{Read, Write},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use anyhow::{Context as _, Result, ensure};
use proxy_ctl::model::{
    Model,
    desired::{DesiredPort, Endpoint as Chosen},
    objects::{
        DEFAULT_WEIGHT, Endpoint, EndpointPort, EndpointSlice, Hints, IpFamily, Node, ObjectName, Protocol,
        Service, ServicePort, TrafficPolicy,
    },
};
use serde::{Deserialize, Serialize};

#[derive(Deserialize)]
struct Question {
    node: String,
    zone: String,
    internal_local: bool,
    external_local: bool,
    /// True if clients outside can reach the service port.
    external: bool,
    endpoints: Option<Vec<Asked>>,
}

#[derive(Deserialize)]
struct Asked {
    address: SocketAddr,
    local: bool,
    ready: bool,
    serving: bool,
    terminating: bool,
    zones: Option<Vec<Arc<str>>>,
    nodes: Option<Vec<Arc<str>>>,
}

#[derive(Serialize)]
struct Answer {
    cluster: Vec<SocketAddr>,
    local: Vec<SocketAddr>,
    all: Vec<SocketAddr>,
    any: bool,
}

/// The node's name if the question has none. A node of the cluster always has a name.
const UNNAMED: &str = "node";
const OTHER_NODE: &str = "other-node";
const CLUSTER_IP: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(172, 30, 0, 1));
const PORT: u16 = 80;
const NODE_PORT: u16 = 30080;

/// Reads a question, and writes the answer.
pub(crate) fn answer(question: impl Read, answer: impl Write) -> Result<()> {
    let question: Question = serde_json::from_reader(question).context("reading the question")?;
    let policies = [question.internal_local, question.external_local].map(policy);
    let port = desired(question)?;
    serde_json::to_writer(answer, &sets(&port, policies)).context("writing the answer")
}

fn policy(is_local: bool) -> TrafficPolicy {
    if is_local { TrafficPolicy::Local } else { TrafficPolicy::Cluster }
}

/// Returns what the model makes of the question's Service.
fn desired(question: Question) -> Result<Arc<DesiredPort>> {
    let node: Arc<str> =
        if question.node.is_empty() { UNNAMED.into() } else { question.node.as_str().into() };
    let zone = (!question.zone.is_empty()).then(|| question.zone.as_str().into());
    let mut model = Model::new(Arc::clone(&node));
    model.set_node(Some(Node { name: Arc::clone(&node), zone, ..Node::default() }));
    let name = ObjectName::new("default", "service");
    model.apply_service(Service {
        name: name.clone(),
        created: 0,
        ports: vec![ServicePort {
            name: "".into(),
            protocol: Protocol::Tcp,
            port: PORT,
            node_port: question.external.then_some(NODE_PORT),
        }],
        cluster_ips: vec![CLUSTER_IP],
        external_ips: Vec::new(),
        load_balancer_ips: Vec::new(),
        proxied_load_balancer_ips: Vec::new(),
        internal_policy: policy(question.internal_local),
        external_policy: policy(question.external_local),
        affinity_seconds: None,
        source_ranges: Vec::new(),
        health_check_node_port: None,
        algorithm: None,
        forwarding: None,
    });
    let endpoints = question.endpoints.unwrap_or_default();
    for (number, asked) in endpoints.into_iter().enumerate() {
        model.apply_slice(slice(number, &name, asked, &node));
    }
    model.take_changes();
    let mut ports = model.desired();
    ensure!(ports.len() == 1, "the model serves {} service ports", ports.len());
    Ok(ports.remove(0))
}

/// Returns a slice of one endpoint. Endpoints of a slice share their port, and those of the
/// question have ports of their own.
fn slice(number: usize, service: &ObjectName, asked: Asked, here: &Arc<str>) -> EndpointSlice {
    let hints = Hints { zones: asked.zones.unwrap_or_default(), nodes: asked.nodes.unwrap_or_default() };
    EndpointSlice {
        name: ObjectName::new(Arc::clone(&service.namespace), format!("slice-{number}")),
        service: Arc::clone(&service.name),
        family: IpFamily::of(asked.address.ip()),
        ports: vec![EndpointPort { name: "".into(), protocol: Protocol::Tcp, port: asked.address.port() }],
        endpoints: vec![Endpoint {
            address: asked.address.ip(),
            ready: asked.ready,
            serving: asked.serving,
            terminating: asked.terminating,
            weight: DEFAULT_WEIGHT,
            node: Some(if asked.local { Arc::clone(here) } else { OTHER_NODE.into() }),
            hints: (hints != Hints::default()).then(|| Arc::new(hints)),
        }],
        triggered: None,
    }
}

/// Returns the sets in kube-proxy's terms. Its local set is that of the clients whose policy is
/// Local.
fn sets(port: &DesiredPort, [internal, external]: [TrafficPolicy; 2]) -> Answer {
    let endpoints = &port.endpoints;
    let address = |endpoint: &Chosen| SocketAddr::new(endpoint.address, endpoint.port);
    let named = |set: &[u32]| set.iter().map(|index| address(&endpoints.all[*index as usize])).collect();
    let local: &[u32] = match (internal, external) {
        (TrafficPolicy::Local, _) => &endpoints.internal,
        (_, TrafficPolicy::Local) => &endpoints.external,
        _ => &[],
    };
    Answer {
        cluster: named(&endpoints.cluster),
        local: named(local),
        all: endpoints.all.iter().map(address).collect(),
        any: endpoints.any,
    }
}
