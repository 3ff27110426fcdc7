//! Random clusters: what they may contain, and how one is made. A cluster is a pure function of
//! seed and number.

use lab::{
    Protocol,
    address::{Family, NodeNumber},
    objects::State,
};
use proptest::{
    array::{uniform2, uniform6, uniform8},
    bool::{ANY, weighted},
    collection::vec,
    option,
    prelude::{Just, Strategy},
    prop_oneof,
    sample::{select, subsequence},
    strategy::ValueTree,
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};

use crate::{
    fixtures::PODS,
    table::{Client, Destination},
};

/// Cluster with all that proxies read, and the probes of its clients.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    /// Zones of node 1 and node 2.
    pub zones: [Option<&'static str>; 2],
    /// Services. The index of each is its number.
    pub services: [Option<Service>; SERVICES],
}

/// Largest number of services in a cluster.
pub const SERVICES: usize = 6;

#[derive(Clone, Debug, PartialEq)]
pub struct Service {
    /// Spec that the service had when proxies first read of it. With `None`, it did not exist then.
    pub before: Option<Spec>,
    pub probes: Vec<Probe>,
    /// True for a service without cluster IP. It can never get one.
    pub headless: bool,
    pub now: Spec,
}

/// Part of a service that may change, and its endpoints.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    pub kind: Kind,
    pub external_ips: bool,
    pub internal_local: bool,
    pub external_local: bool,
    pub affinity: bool,
    /// Source ranges of the load-balancer addresses.
    pub source_ranges: Vec<(Range, Family)>,
    pub label: Option<Label>,
    pub ports: Vec<Port>,
    /// True if the port has no name. This counts only if the service has one port.
    pub unnamed_port: bool,
    /// True if endpoints have hints of the zone, and in the next field of the node.
    pub zone_hints: bool,
    pub node_hints: bool,
    /// Slices of IPv4 and IPv6.
    pub slices: [Vec<Slice>; 2],
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    ClusterIp,
    NodePort,
    LoadBalancer {
        node_ports: bool,
        /// True for `ipMode: Proxy`.
        proxied: bool,
    },
}

/// Label that says that the service is for another proxy.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Label {
    ServiceProxyName,
    Headless,
}

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Port {
    Tcp,
    /// UDP port with the same number as [`Self::Tcp`].
    Udp,
    /// TCP port with another number.
    More,
}

/// Clients that a source range contains.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Range {
    Outside,
    Node1,
    /// The client outside and the nodes.
    Fabric,
    PodsOfNode1,
    Elsewhere,
    Everywhere,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Slice {
    /// Port of the endpoints for each [`Port`].
    pub ports: [TargetPort; 3],
    pub endpoints: Vec<Endpoint>,
}

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum TargetPort {
    First,
    Second,
    /// The slice does not list the port.
    Absent,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Endpoint {
    pub pod: &'static str,
    pub state: State,
    /// True if the conditions of [`State::Ready`] are left out, because they are the defaults.
    pub bare: bool,
    /// True if the slice does not say which node the endpoint is on.
    pub nowhere: bool,
    pub zones: &'static [&'static str],
    pub nodes: &'static [&'static str],
}

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Probe {
    pub client: Client,
    pub destination: Destination,
    pub port: Port,
    pub family: Family,
}

const PORTS: [Port; 3] = [Port::Tcp, Port::Udp, Port::More];
const ZONES: [&str; 2] = ["zone-a", "zone-b"];
const ZONE_HINTS: [&[&str]; 7] =
    [&[], &["zone-a"], &["zone-a"], &["zone-b"], &["zone-b"], &["zone-a", "zone-b"], &["zone-c"]];
const NODE_HINTS: [&[&str]; 6] = [&[], &["node1"], &["node1"], &["node2"], &["node1", "node2"], &["node3"]];
const RANGES: [Range; 6] =
    [Range::Outside, Range::Node1, Range::Fabric, Range::PodsOfNode1, Range::Elsewhere, Range::Everywhere];

impl Port {
    pub const fn protocol(self) -> Protocol {
        match self {
            Self::Tcp | Self::More => Protocol::Tcp,
            Self::Udp => Protocol::Udp,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::More => "more",
        }
    }
}

impl Range {
    /// Returns the range as the API writes it.
    pub const fn of(self, family: Family) -> &'static str {
        match (self, family) {
            (Self::Outside, Family::V4) => "192.0.2.100/32",
            (Self::Outside, Family::V6) => "2001:db8:c0::64/128",
            (Self::Node1, Family::V4) => "192.0.2.11/32",
            (Self::Node1, Family::V6) => "2001:db8:c0::b/128",
            (Self::Fabric, Family::V4) => "192.0.2.0/24",
            (Self::Fabric, Family::V6) => "2001:db8:c0::/64",
            (Self::PodsOfNode1, Family::V4) => "10.244.1.0/24",
            (Self::PodsOfNode1, Family::V6) => "fd00:10:244:1::/64",
            (Self::Elsewhere, Family::V4) => "203.0.113.0/24",
            (Self::Elsewhere, Family::V6) => "2001:db8:ffff::/48",
            (Self::Everywhere, Family::V4) => "0.0.0.0/0",
            (Self::Everywhere, Family::V6) => "::/0",
        }
    }

    pub fn has(self, client: Client) -> bool {
        match (self, client) {
            (Self::Outside | Self::Fabric, Client::Outside)
            | (Self::Node1, Client::Node(1))
            | (Self::Fabric, Client::Node(_))
            | (Self::PodsOfNode1, Client::Pod(1))
            | (Self::Everywhere, _) => true,
            (Self::Outside | Self::Node1 | Self::Fabric | Self::PodsOfNode1 | Self::Elsewhere, _) => false,
        }
    }
}

impl Endpoint {
    /// Returns the node that the endpoint is on.
    pub fn real_node(&self) -> Option<NodeNumber> {
        PODS.iter().find(|pod| pod.name == self.pod).map(|pod| pod.node)
    }

    /// Returns the node that the slice names for the endpoint.
    pub fn node(&self) -> Option<NodeNumber> {
        self.real_node().filter(|_| !self.nowhere)
    }

    fn is_live(&self) -> bool {
        matches!(self.state, State::Ready | State::Unready)
    }
}

impl Spec {
    pub fn slices(&self, family: Family) -> &[Slice] {
        match family {
            Family::V4 => &self.slices[0],
            Family::V6 => &self.slices[1],
        }
    }

    pub fn has_node_ports(&self) -> bool {
        match self.kind {
            Kind::ClusterIp => false,
            Kind::NodePort => true,
            Kind::LoadBalancer { node_ports, .. } => node_ports,
        }
    }

    /// Returns the spec without what kube-proxy leaves undefined. If a pod is in several slices,
    /// they all say the same of it while it runs, and all the same while it ends.
    fn definite(mut self) -> Self {
        self.ports.sort_unstable();
        for slices in &mut self.slices {
            let mut said: Vec<Endpoint> = Vec::new();
            for slice in slices {
                let mut here = Vec::new();
                slice.endpoints.retain(|endpoint| {
                    let is_new = !here.contains(&endpoint.pod);
                    here.push(endpoint.pod);
                    is_new
                });
                for endpoint in &mut slice.endpoints {
                    // A pod that dials itself must be known by its node, which the slices of a real
                    // cluster name.
                    endpoint.nowhere &= !endpoint.pod.starts_with("client");
                    let same =
                        |said: &&Endpoint| said.pod == endpoint.pod && said.is_live() == endpoint.is_live();
                    match said.iter().find(same) {
                        Some(said) => *endpoint = *said,
                        None => said.push(*endpoint),
                    }
                }
            }
        }
        self
    }

    /// Returns true if the service has the destination of the probe.
    fn can_be_asked(&self, probe: &Probe) -> bool {
        let has_port = self.ports.contains(&probe.port);
        match probe.destination {
            Destination::ClusterIp => has_port,
            Destination::UndefinedPort => true,
            Destination::NodePort(_) => has_port && self.has_node_ports(),
            Destination::NodePortOnLoopback => {
                has_port && self.has_node_ports() && matches!(probe.client, Client::Node(_))
            }
            Destination::LoadBalancer(_) => has_port && matches!(self.kind, Kind::LoadBalancer { .. }),
            Destination::ExternalIp(_) => has_port && self.external_ips,
            Destination::NodePortOnBridge => false,
        }
    }
}

impl Service {
    fn definite(mut self) -> Self {
        self.before = self.before.map(Spec::definite);
        self.now = self.now.definite();
        let (now, is_headless) = (&self.now, self.headless);
        self.probes.retain(|probe| now.can_be_asked(probe) && !is_headless);
        self.probes.sort_unstable();
        self.probes.dedup();
        self
    }
}

impl Cluster {
    /// Returns the services with their numbers.
    pub fn services(&self) -> impl Iterator<Item = (usize, &Service)> {
        self.services.iter().enumerate().filter_map(|(number, service)| Some((number, service.as_ref()?)))
    }
}

/// Returns the `number`-th cluster of a seed, as a tree that also gives smaller ones.
pub fn generate(seed: u64, number: u32) -> Result<impl ValueTree<Value = Cluster>, String> {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_be_bytes());
    bytes[8..12].copy_from_slice(&number.to_be_bytes());
    let config = Config { failure_persistence: None, ..Config::default() };
    let random = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    clusters().new_tree(&mut TestRunner::new_with_rng(config, random)).map_err(|reason| reason.to_string())
}

fn clusters() -> impl Strategy<Value = Cluster> {
    let zone = option::weighted(0.85, select(&ZONES));
    // When a cluster is made smaller, whole services are removed first.
    let exists = uniform6(weighted(0.8));
    (exists, uniform6(service()), uniform2(zone)).prop_map(|(exists, services, zones)| {
        let mut exists = exists.into_iter();
        let services = services.map(|service| exists.next().unwrap_or_default().then_some(service));
        Cluster { zones, services }
    })
}

fn service() -> impl Strategy<Value = Service> {
    let before = option::weighted(0.6, (spec(), uniform8(ANY)));
    (before, vec(probe(), 0..=30), weighted(0.04), spec()).prop_map(|(before, probes, headless, now)| {
        let before = before.map(|(other, keeps)| mixed(&now, other, keeps));
        Service { before, probes, headless, now }.definite()
    })
}

/// Returns the other spec, with some parts of this one.
fn mixed(now: &Spec, other: Spec, keeps: [bool; 8]) -> Spec {
    fn part<T>(keeps: bool, now: &T, other: T) -> T
    where
        T: Clone,
    {
        if keeps { now.clone() } else { other }
    }
    let [kind, policies, affinity, ranges, label, ports, slices4, slices6] = keeps;
    let [other4, other6] = other.slices;
    Spec {
        kind: part(kind, &now.kind, other.kind),
        external_ips: part(kind, &now.external_ips, other.external_ips),
        internal_local: part(policies, &now.internal_local, other.internal_local),
        external_local: part(policies, &now.external_local, other.external_local),
        affinity: part(affinity, &now.affinity, other.affinity),
        source_ranges: part(ranges, &now.source_ranges, other.source_ranges),
        label: part(label, &now.label, other.label),
        ports: part(ports, &now.ports, other.ports),
        unnamed_port: part(ports, &now.unnamed_port, other.unnamed_port),
        zone_hints: part(slices4, &now.zone_hints, other.zone_hints),
        node_hints: part(slices6, &now.node_hints, other.node_hints),
        slices: [part(slices4, &now.slices[0], other4), part(slices6, &now.slices[1], other6)],
    }
}

fn spec() -> impl Strategy<Value = Spec> {
    let kind = prop_oneof![
        3 => Just(Kind::ClusterIp),
        3 => Just(Kind::NodePort),
        4 => (weighted(0.7), weighted(0.15))
            .prop_map(|(node_ports, proxied)| Kind::LoadBalancer { node_ports, proxied }),
    ];
    let label = option::weighted(0.08, select(&[Label::ServiceProxyName, Label::Headless]));
    let range = (select(&RANGES), select(&[Family::V4, Family::V6]));
    let ranges = prop_oneof![2 => Just(Vec::new()), 3 => vec(range, 0..=4)];
    let asks = (kind, weighted(0.3), weighted(0.4), weighted(0.4), weighted(0.2), ranges, label);
    let ports = (subsequence(&PORTS, 1..=3), weighted(0.3));
    let slices = (weighted(0.4), weighted(0.2), uniform2(vec(slice(), 0..=3)));
    (asks, ports, slices).prop_map(|(asks, (ports, unnamed_port), (zone_hints, node_hints, slices))| {
        let (kind, external_ips, internal_local, external_local, affinity, source_ranges, label) = asks;
        Spec {
            kind,
            external_ips,
            internal_local,
            external_local,
            affinity,
            source_ranges,
            label,
            ports,
            unnamed_port,
            zone_hints,
            node_hints,
            slices,
        }
    })
}

fn slice() -> impl Strategy<Value = Slice> {
    let port = || prop_oneof![6 => Just(TargetPort::First), 3 => Just(TargetPort::Second), 1 => Just(TargetPort::Absent)];
    (vec(endpoint(), 0..=3), [port(), port(), port()])
        .prop_map(|(endpoints, ports)| Slice { ports, endpoints })
}

fn endpoint() -> impl Strategy<Value = Endpoint> {
    let state = prop_oneof![
        6 => Just(State::Ready),
        2 => Just(State::Terminating),
        1 => Just(State::Unready),
        1 => Just(State::Ended),
    ];
    let hints = (select(&ZONE_HINTS), select(&NODE_HINTS));
    (select(PODS.map(|pod| pod.name).to_vec()), state, weighted(0.2), weighted(0.06), hints).prop_map(
        |(pod, state, bare, nowhere, (zones, nodes))| Endpoint { pod, state, bare, nowhere, zones, nodes },
    )
}

fn probe() -> impl Strategy<Value = Probe> {
    let client = prop_oneof![
        3 => Just(Client::Outside),
        3 => Just(Client::Pod(1)),
        2 => Just(Client::Pod(2)),
        2 => Just(Client::Node(1)),
        1 => Just(Client::Node(2)),
    ];
    let destination = prop_oneof![
        4 => Just(Destination::ClusterIp),
        1 => Just(Destination::UndefinedPort),
        2 => Just(Destination::NodePort(1)),
        2 => Just(Destination::NodePort(2)),
        1 => Just(Destination::NodePortOnLoopback),
        2 => Just(Destination::LoadBalancer(1)),
        2 => Just(Destination::LoadBalancer(2)),
        1 => Just(Destination::ExternalIp(1)),
        1 => Just(Destination::ExternalIp(2)),
    ];
    let family = select(&[Family::V4, Family::V6]);
    (client, destination, select(&PORTS), family).prop_map(|(client, destination, port, family)| Probe {
        client,
        destination,
        port,
        family,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use lab::address::FAMILIES;

    use super::*;
    use crate::{
        random::expected::{Expected, expected},
        setting::Datapath,
    };

    const CLUSTERS: u32 = 500;

    fn cluster(seed: u64, number: u32) -> Cluster {
        generate(seed, number).unwrap().current()
    }

    #[test]
    fn a_cluster_is_a_function_of_seed_and_number() {
        for number in 0..50 {
            assert_eq!(cluster(7, number), cluster(7, number));
        }
        assert_ne!(cluster(7, 0), cluster(7, 1));
        assert_ne!(cluster(7, 0), cluster(8, 0));
    }

    /// Expects each feature in at least one of fifty clusters.
    #[test]
    fn every_feature_is_met() {
        let mut met: BTreeMap<String, u32> = BTreeMap::new();
        for number in 0..CLUSTERS {
            let cluster = cluster(1, number);
            let mut features = features(&cluster);
            features.sort_unstable();
            features.dedup();
            for feature in features {
                *met.entry(feature).or_default() += 1;
            }
        }
        let expected: Vec<String> = EXPECTED.iter().map(|name| (*name).to_owned()).collect();
        let rare: Vec<_> =
            expected.iter().filter(|name| met.get(*name).is_none_or(|met| *met < 10)).collect();
        assert!(rare.is_empty(), "rarely or never: {rare:?} of {met:#?}");
    }

    const EXPECTED: &[&str] = &[
        "zones of both nodes",
        "a node without zone",
        "did not exist before",
        "changed",
        "headless",
        "ClusterIp",
        "NodePort",
        "LoadBalancer { node_ports: true, proxied: false }",
        "LoadBalancer { node_ports: false, proxied: false }",
        "LoadBalancer { node_ports: true, proxied: true }",
        "external IPs",
        "both policies Local",
        "affinity",
        "source ranges of one family",
        "source ranges of both families",
        "ServiceProxyName",
        "Headless",
        "one port",
        "a port without name",
        "TCP and UDP on one number",
        "several numbers for one port",
        "a slice without the port",
        "no slice",
        "hints for zones",
        "hints for nodes",
        "one endpoint in two conditions",
        "conditions left out",
        "no node name",
        "Ready",
        "Unready",
        "Terminating",
        "Ended",
        "answered",
        "answered by several",
        "answered, sticks",
        "answered, as itself",
        "answered, as a node",
        "answered, the client itself",
        "refused",
        "dropped",
        "pod on node 1 to cluster IP",
        "pod on node 2 to cluster IP",
        "node 1 to cluster IP",
        "node 2 to cluster IP",
        "outside to cluster IP",
        "outside to node port of node 1",
        "pod on node 1 to node port of node 2",
        "node 1 to node port of node 1",
        "node 1 to node port of node 2",
        "node 1 to node port on loopback",
        "outside to load balancer by node 1",
        "pod on node 1 to load balancer by node 2",
        "outside to external IP by node 2",
        "outside to another port of the cluster IP",
    ];

    fn features(cluster: &Cluster) -> Vec<String> {
        let mut features = Vec::new();
        let mut note = |is_so: bool, feature: &str| {
            if is_so {
                features.push(feature.to_owned());
            }
        };
        note(cluster.zones.iter().all(Option::is_some), "zones of both nodes");
        note(cluster.zones.contains(&None), "a node without zone");
        for (_, service) in cluster.services() {
            let spec = &service.now;
            let of = |family: Family| spec.source_ranges.iter().any(|(_, of)| *of == family);
            note(service.before.is_none(), "did not exist before");
            note(service.before.as_ref().is_some_and(|before| before != spec), "changed");
            note(service.headless, "headless");
            note(true, &format!("{:?}", spec.kind));
            note(spec.external_ips, "external IPs");
            note(spec.internal_local && spec.external_local, "both policies Local");
            note(spec.affinity, "affinity");
            note(of(Family::V4) != of(Family::V6), "source ranges of one family");
            note(of(Family::V4) && of(Family::V6), "source ranges of both families");
            note(spec.label.is_some(), &spec.label.map(|label| format!("{label:?}")).unwrap_or_default());
            note(spec.ports.len() == 1, "one port");
            note(spec.ports.len() == 1 && spec.unnamed_port, "a port without name");
            note(spec.ports.starts_with(&[Port::Tcp, Port::Udp]), "TCP and UDP on one number");
            for family in FAMILIES {
                note_slices(spec, family, &mut note);
            }
            for probe in &service.probes {
                note(true, &format!("{} to {}", probe.client, probe.destination));
                match expected(cluster, service, probe, Datapath::Nftables) {
                    Some(Expected::Answered { by, sticks }) => {
                        note(true, "answered");
                        note(by.len() > 1, "answered by several");
                        note(sticks, "answered, sticks");
                        note(by.contains_key(&probe.client.agent()), "answered, the client itself");
                        for source in by.values() {
                            note(true, &format!("answered, {source}"));
                        }
                    }
                    Some(Expected::Refused) => note(true, "refused"),
                    Some(Expected::Dropped) => note(true, "dropped"),
                    None => {}
                }
            }
        }
        features
    }

    fn note_slices(spec: &Spec, family: Family, note: &mut impl FnMut(bool, &str)) {
        let slices = spec.slices(family);
        note(slices.is_empty(), "no slice");
        let targets: Vec<TargetPort> = slices.iter().map(|slice| slice.ports[0]).collect();
        let both = [TargetPort::First, TargetPort::Second];
        note(both.iter().all(|target| targets.contains(target)), "several numbers for one port");
        note(targets.contains(&TargetPort::Absent), "a slice without the port");
        let endpoints: Vec<&Endpoint> = slices.iter().flat_map(|slice| &slice.endpoints).collect();
        for endpoint in &endpoints {
            note(spec.zone_hints && !endpoint.zones.is_empty(), "hints for zones");
            note(spec.node_hints && !endpoint.nodes.is_empty(), "hints for nodes");
            note(endpoint.bare && endpoint.state == State::Ready, "conditions left out");
            note(endpoint.nowhere, "no node name");
            note(true, &format!("{:?}", endpoint.state));
            let differs = |other: &&&Endpoint| other.pod == endpoint.pod && other.state != endpoint.state;
            note(endpoints.iter().any(|other| differs(&other)), "one endpoint in two conditions");
        }
    }
}
