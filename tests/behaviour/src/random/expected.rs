//! Expected outcome of a probe, as kube-proxy's documentation and tables state it: which endpoints
//! a node may choose (`CategorizeEndpoints`), and who gets which of them, as itself or masqueraded
//! (`TestInternalExternalMasquerade`).

use std::{collections::BTreeMap, fmt};

use lab::{
    address::{Family, NodeNumber},
    objects::State,
};

use super::cluster::{Cluster, Endpoint, Kind, Label, Port, Probe, Range, Service, Spec, TargetPort};
use crate::{
    setting::Datapath,
    table::{Client, Destination, Found, Source},
};

/// Expected outcome of the connections of a probe.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Expected {
    /// Each of these servers answers, and nobody else. With affinity, only one of them answers.
    /// Each sees this source.
    Answered {
        by: BTreeMap<String, Source>,
        sticks: bool,
    },
    Refused,
    Dropped,
}

/// Returns the name of a pod's server on its second port.
pub fn second_server(pod: &str) -> String {
    format!("{pod}(2)")
}

/// Where the client is, as seen from the node whose rules a connection meets.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Origin {
    Pod,
    /// The client is the node itself.
    Host,
    Outside,
}

/// Endpoints that one node may choose for a service port.
struct Choice<'a> {
    /// Endpoints for policy Cluster, and in the next field for policy Local.
    cluster: Vec<(&'a Endpoint, String)>,
    local: Vec<(&'a Endpoint, String)>,
    has_any: bool,
}

/// Returns the expected outcome where this datapath translates. Returns `None` if the answers would
/// not come back by the node that translates.
pub fn expected(cluster: &Cluster, service: &Service, probe: &Probe, datapath: Datapath) -> Option<Expected> {
    let node = node_of(probe);
    let choice = choice(cluster, &service.now, probe, node);
    // A node other than the pod's has not masqueraded the connection, so an endpoint elsewhere
    // answers the pod directly.
    let goes_around = matches!(probe.client, Client::Pod(own) if own != node)
        && service.now.external_local
        && choice.cluster.iter().any(|(endpoint, _)| endpoint.real_node() != Some(node));
    (!goes_around).then(|| of_choice(choice, &service.now, probe, node, datapath))
}

fn of_choice(
    choice: Choice<'_>,
    spec: &Spec,
    probe: &Probe,
    node: NodeNumber,
    datapath: Datapath,
) -> Expected {
    let origin = origin(probe, node);
    let is_of_others = spec.label == Some(Label::ServiceProxyName);
    let is_served = match probe.destination {
        Destination::UndefinedPort if !is_of_others => {
            // These modes do not treat the address as their own, so the packet is forwarded.
            return match datapath {
                Datapath::Iptables | Datapath::Userspace => Expected::Dropped,
                Datapath::Ebpf | Datapath::Nftables | Datapath::Ipvs => Expected::Refused,
            };
        }
        Destination::UndefinedPort | Destination::NodePortOnBridge => false,
        Destination::ClusterIp | Destination::NodePort(_) | Destination::ExternalIp(_) => true,
        Destination::NodePortOnLoopback => match datapath {
            Datapath::Ebpf | Datapath::Iptables | Datapath::Userspace => probe.family == Family::V4,
            Datapath::Nftables | Datapath::Ipvs => false,
        },
        Destination::LoadBalancer(_) => !matches!(spec.kind, Kind::LoadBalancer { proxied: true, .. }),
    };
    // The chain that drops clients of node ports also meets what the node sends to its own ::1,
    // where nothing is translated.
    let is_on_loopback = matches!(probe.destination, Destination::NodePortOnLoopback);
    if datapath == Datapath::Iptables && is_on_loopback && !is_served && !is_of_others {
        let is_elsewhere = choice.has_any && spec.external_local && choice.local.is_empty();
        return if is_elsewhere { Expected::Dropped } else { Expected::Refused };
    }
    if !is_served || is_of_others {
        return match probe.destination {
            // The node has the address, and nobody listens there.
            Destination::NodePort(_) | Destination::NodePortOnLoopback | Destination::NodePortOnBridge => {
                Expected::Refused
            }
            Destination::ClusterIp
            | Destination::UndefinedPort
            | Destination::LoadBalancer(_)
            | Destination::ExternalIp(_) => Expected::Dropped,
        };
    }
    let is_denied = matches!(probe.destination, Destination::LoadBalancer(_)) && !is_allowed(spec, probe);
    // All modes but iptables look at source ranges first, whether there are endpoints or not.
    if datapath != Datapath::Iptables && is_denied {
        return Expected::Dropped;
    }
    let is_external = matches!(probe.destination, Destination::LoadBalancer(_) | Destination::ExternalIp(_));
    if !choice.has_any {
        // Packets that the node itself sends to external addresses pass no chain that refuses them.
        let is_sent_on = datapath == Datapath::Iptables && origin == Origin::Host && is_external;
        return if is_sent_on { Expected::Dropped } else { Expected::Refused };
    }
    if is_denied {
        return Expected::Dropped;
    }
    let is_cluster_ip = matches!(probe.destination, Destination::ClusterIp);
    let endpoints = match (is_cluster_ip, origin) {
        (true, _) if spec.internal_local => choice.local,
        (false, Origin::Outside) if spec.external_local => choice.local,
        (true | false, Origin::Pod | Origin::Host | Origin::Outside) => choice.cluster,
    };
    if endpoints.is_empty() {
        return Expected::Dropped;
    }
    let is_kept = match origin {
        Origin::Pod => is_cluster_ip || spec.external_local,
        Origin::Host => false,
        Origin::Outside => !is_cluster_ip && spec.external_local,
    };
    // The address of a client on a node is the node's, masqueraded or not.
    let is_kept = is_kept && !matches!(probe.client, Client::Node(_));
    let source = |endpoint: &Endpoint| match is_kept && endpoint.pod != probe.client.agent() {
        true => Source::Client,
        false => Source::Node,
    };
    let by = endpoints.into_iter().map(|(endpoint, name)| (name, source(endpoint))).collect();
    Expected::Answered { by, sticks: spec.affinity }
}

/// Returns the node whose rules the connection meets first.
fn node_of(probe: &Probe) -> NodeNumber {
    match (probe.client, probe.destination) {
        (_, Destination::NodePort(node))
        | (Client::Outside, Destination::LoadBalancer(node) | Destination::ExternalIp(node))
        | (Client::Pod(node) | Client::Node(node), _) => node,
        (
            Client::Outside,
            Destination::ClusterIp
            | Destination::UndefinedPort
            | Destination::NodePortOnLoopback
            | Destination::NodePortOnBridge,
        ) => 1,
    }
}

fn origin(probe: &Probe, node: NodeNumber) -> Origin {
    match probe.client {
        Client::Pod(_) => Origin::Pod,
        Client::Node(own) if own == node => Origin::Host,
        Client::Node(_) | Client::Outside => Origin::Outside,
    }
}

/// Returns true if the source ranges allow the client. Ranges of the other family do not count.
fn is_allowed(spec: &Spec, probe: &Probe) -> bool {
    let ranges: Vec<Range> = ranges(spec, probe.family).collect();
    ranges.is_empty() || ranges.iter().any(|range| range.has(probe.client))
}

fn ranges(spec: &Spec, family: Family) -> impl Iterator<Item = Range> {
    spec.source_ranges.iter().filter(move |(_, of)| *of == family).map(|(range, _)| *range)
}

fn choice<'a>(cluster: &Cluster, spec: &'a Spec, probe: &Probe, node: NodeNumber) -> Choice<'a> {
    let all = endpoints(spec, probe.port, probe.family);
    let with = |is_one: &dyn Fn(&Endpoint) -> bool| -> Vec<(&'a Endpoint, String)> {
        let chosen = all.iter().filter(|(_, endpoint)| is_one(endpoint));
        chosen.map(|((pod, port), endpoint)| (*endpoint, server(pod, *port))).collect()
    };
    let is_ready = |endpoint: &Endpoint| endpoint.state == State::Ready;
    let ends = |endpoint: &Endpoint| endpoint.state == State::Terminating;
    let is_local = |endpoint: &Endpoint| endpoint.node() == Some(node);
    let name = lab::cluster::node_name(node);
    let zone = cluster.zones[usize::from(node) - 1];
    let zones = |endpoint: &Endpoint| if spec.zone_hints { endpoint.zones } else { &[] };
    let nodes = |endpoint: &Endpoint| if spec.node_hints { endpoint.nodes } else { &[] };
    let is_for_node = |endpoint: &Endpoint| nodes(endpoint).contains(&name.as_str());
    let is_for_zone = |endpoint: &Endpoint| zone.is_some_and(|zone| zones(endpoint).contains(&zone));
    let ready: Vec<&Endpoint> = all.values().copied().filter(|endpoint| is_ready(endpoint)).collect();
    let every = |is_so: &dyn Fn(&Endpoint) -> bool| ready.iter().all(|endpoint| is_so(endpoint));
    let any = |is_so: &dyn Fn(&Endpoint) -> bool| ready.iter().any(|endpoint| is_so(endpoint));
    let is_near: &dyn Fn(&Endpoint) -> bool =
        if every(&|endpoint| !nodes(endpoint).is_empty()) && any(&is_for_node) {
            &is_for_node
        } else if every(&|endpoint| !zones(endpoint).is_empty()) && any(&is_for_zone) {
            &is_for_zone
        } else {
            &|_| true
        };
    let or_else = |first: Vec<_>, second: Vec<_>| if first.is_empty() { second } else { first };
    Choice {
        cluster: or_else(with(&|endpoint| is_ready(endpoint) && is_near(endpoint)), with(&ends)),
        local: or_else(
            with(&|endpoint| is_ready(endpoint) && is_local(endpoint)),
            with(&|endpoint| ends(endpoint) && is_local(endpoint)),
        ),
        has_any: all.values().any(|endpoint| is_ready(endpoint) || ends(endpoint)),
    }
}

/// Returns the endpoints by pod and port. If slices differ about one, the entry that does not
/// terminate counts.
fn endpoints(spec: &Spec, port: Port, family: Family) -> BTreeMap<(&'static str, TargetPort), &Endpoint> {
    let mut all = BTreeMap::new();
    // Slices with the label of another proxy are not read.
    let slices = spec.slices(family).iter().filter(|_| spec.label != Some(Label::Headless));
    for slice in slices {
        let target = slice.ports[port as usize];
        for endpoint in slice.endpoints.iter().filter(|_| target != TargetPort::Absent) {
            let known: &mut &Endpoint = all.entry((endpoint.pod, target)).or_insert(endpoint);
            if matches!(endpoint.state, State::Ready | State::Unready) {
                *known = endpoint;
            }
        }
    }
    all
}

fn server(pod: &str, port: TargetPort) -> String {
    match port {
        TargetPort::Second => second_server(pod),
        TargetPort::First | TargetPort::Absent => pod.to_owned(),
    }
}

/// Returns the setting of the probe in the words of the table's scenarios, which
/// docs/differences.md uses.
pub fn scenario(cluster: &Cluster, service: &Service, probe: &Probe) -> String {
    let spec = &service.now;
    let choice = choice(cluster, spec, probe, node_of(probe));
    let mut words = Vec::new();
    if matches!(probe.destination, Destination::LoadBalancer(_))
        && ranges(spec, probe.family).next().is_some()
    {
        let has = if is_allowed(spec, probe) { "with" } else { "without" };
        words.push(format!("source ranges {has} the client"));
    }
    let is_local = match probe.destination {
        Destination::ClusterIp | Destination::UndefinedPort => spec.internal_local,
        Destination::NodePort(_)
        | Destination::NodePortOnBridge
        | Destination::NodePortOnLoopback
        | Destination::LoadBalancer(_)
        | Destination::ExternalIp(_) => spec.external_local,
    };
    words.push(
        match (spec.internal_local, spec.external_local) {
            (false, false) => "both policies Cluster",
            (false, true) => "external policy Local",
            (true, false) => "internal policy Local",
            (true, true) => "both policies Local",
        }
        .to_owned(),
    );
    let is_unplaced = choice.cluster.iter().any(|(endpoint, _)| endpoint.node().is_none());
    let is_true = [
        (is_unplaced, "an endpoint without a node name"),
        (spec.affinity, "affinity"),
        (matches!(spec.kind, Kind::LoadBalancer { proxied: true, .. }), "ipMode Proxy"),
        (spec.label == Some(Label::ServiceProxyName), "another proxy's"),
        (spec.label == Some(Label::Headless), "labelled headless"),
        (!choice.has_any, "no endpoints"),
        (choice.has_any && is_local && choice.local.is_empty(), "endpoints elsewhere"),
    ];
    words.extend(is_true.into_iter().filter(|(is_so, _)| *is_so).map(|(_, word)| word.to_owned()));
    words.join(", ")
}

impl Expected {
    /// Returns the differences in words that explanations match. If the right endpoints answered,
    /// these are only about the address that they saw.
    pub fn differences(&self, found: &Found) -> Vec<String> {
        match (self, found) {
            (Self::Answered { by, sticks }, Found::Answered(found)) if reaches(by, *sticks, found) => {
                let other = |(name, source): &(String, Source)| {
                    let expected = by.get(name).filter(|expected| *expected != source)?;
                    Some(format!("address: expected {expected}, found {source}"))
                };
                let mut differences: Vec<String> = found.iter().filter_map(other).collect();
                differences.sort_unstable();
                differences.dedup();
                differences
            }
            (Self::Refused, Found::Refused | Found::NotPermitted)
            | (Self::Dropped, Found::Dropped | Found::NotPermitted) => Vec::new(),
            (Self::Answered { .. } | Self::Refused | Self::Dropped, _) => {
                vec![format!("expected {self}, found {found}")]
            }
        }
    }

    /// Returns the number of connections that meet each endpoint with a chance of failure of one in
    /// ten billion. A run has thousands of probes.
    pub fn connections(&self) -> u32 {
        let Self::Answered { by, sticks: false } = self else { return 0 };
        // With n endpoints and k connections, one is not met with a chance of at most
        // n (1 - 1/n)^k.
        let miss = |endpoints: f64, connections: u32| {
            endpoints * (1.0 - 1.0 / endpoints).powf(f64::from(connections))
        };
        let endpoints = f64::from(u32::try_from(by.len()).unwrap_or(u32::MAX));
        (1..).find(|connections| miss(endpoints, *connections) < 1e-10).unwrap_or(u32::MAX)
    }
}

/// Returns true if these are the endpoints that must answer.
fn reaches(
    by: &BTreeMap<String, Source>,
    sticks: bool,
    found: &std::collections::BTreeSet<(String, Source)>,
) -> bool {
    let names: std::collections::BTreeSet<&String> = found.iter().map(|(name, _)| name).collect();
    match sticks {
        true => names.len() == 1 && names.iter().all(|name| by.contains_key(*name)),
        false => names.into_iter().eq(by.keys()),
    }
}

impl fmt::Display for Expected {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Answered { by, sticks } => {
                let of = |(name, source): (&String, &Source)| format!("{name} {source}");
                let by: Vec<String> = by.iter().map(of).collect();
                write!(formatter, "{}{}", if *sticks { "one of " } else { "" }, by.join("+"))
            }
            Self::Refused => formatter.write_str("refused"),
            Self::Dropped => formatter.write_str("dropped"),
        }
    }
}
