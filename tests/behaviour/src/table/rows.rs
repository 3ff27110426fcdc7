//! The rows. The endpoint `web-1` is on node 1, and `web-2` and `web-3` are on node 2.

use lab::{address::Family, objects::State};

use super::{
    Asks, Client,
    Client::{Node, Outside, Pod},
    Configuration,
    Configuration::{
        Bridge, MasqueradeAll, NoDetector, NoLocalhostNodePorts, NodeCidr, NodePortsEverywhere,
        NodePortsOnBridge, NodePortsOnPrimary, Plain, Prefix,
    },
    Destination,
    Destination::{
        ClusterIp, ExternalIp, LoadBalancer, NodePort, NodePortOnBridge, NodePortOnLoopback, UndefinedPort,
    },
    EndpointRow, Expected,
    Expected::{Dropped, Refused},
    Row, Scenario, Source,
};
use crate::setting::Datapath;

const CLUSTER: Asks = Asks {
    internal_local: false,
    external_local: false,
    affinity: false,
    source_ranges: &[],
    proxied: false,
};
const EXTERNAL_LOCAL: Asks = Asks { external_local: true, ..CLUSTER };
const INTERNAL_LOCAL: Asks = Asks { internal_local: true, ..CLUSTER };
const BOTH_LOCAL: Asks = Asks { internal_local: true, external_local: true, ..CLUSTER };

const fn endpoint(pod: &'static str, state: State) -> EndpointRow {
    EndpointRow { pod, state, zones: &[], nodes: &[] }
}

const fn ready(pod: &'static str) -> EndpointRow {
    endpoint(pod, State::Ready)
}

const fn terminating(pod: &'static str) -> EndpointRow {
    endpoint(pod, State::Terminating)
}

const fn zoned(pod: &'static str, zones: &'static [&'static str]) -> EndpointRow {
    EndpointRow { zones, ..ready(pod) }
}

const fn noded(pod: &'static str, nodes: &'static [&'static str]) -> EndpointRow {
    EndpointRow { nodes, ..ready(pod) }
}

/// One endpoint on each node.
const TWO: &[EndpointRow] = &[ready("web-1"), ready("web-2")];

const W1: &[&str] = &["web-1"];
const W2: &[&str] = &["web-2"];
const W12: &[&str] = &["web-1", "web-2"];

const fn kept(by: &'static [&'static str]) -> Expected {
    Expected::Answered(by, Source::Client)
}

const fn masqueraded(by: &'static [&'static str]) -> Expected {
    Expected::Answered(by, Source::Node)
}

const fn row(client: Client, destination: Destination, expected: Expected) -> Row {
    Row { client, destination, family: None, expected, elsewhere: &[] }
}

impl Row {
    const fn of(mut self, family: Family) -> Self {
        self.family = Some(family);
        self
    }

    const fn elsewhere(mut self, elsewhere: &'static [(Datapath, Expected)]) -> Self {
        self.elsewhere = elsewhere;
        self
    }
}

const fn plain(
    name: &'static str,
    asks: Asks,
    endpoints: &'static [EndpointRow],
    rows: &'static [Row],
) -> Scenario {
    scenario(name, Plain, asks, endpoints, rows)
}

const fn scenario(
    name: &'static str,
    configuration: Configuration,
    asks: Asks,
    endpoints: &'static [EndpointRow],
    rows: &'static [Row],
) -> Scenario {
    Scenario { name, configuration, asks, endpoints, rows }
}

const ZONE_1: &[&str] = &["zone-of-node1"];
const ZONE_2: &[&str] = &["zone-of-node2"];

/// Range of the client outside, in both families.
const OUTSIDE_RANGES: &[&str] = &["192.0.2.100/32", "2001:db8:c0::64/128"];

/// The scenarios. Those of one configuration stand together.
pub const SCENARIOS: &[Scenario] = &[
    plain(
        "both policies Cluster",
        CLUSTER,
        TWO,
        &[
            row(Pod(1), ClusterIp, kept(W12)),
            row(Pod(2), ClusterIp, kept(W12)),
            row(Node(1), ClusterIp, masqueraded(W12)),
            row(Outside, ClusterIp, masqueraded(W12)),
            row(Pod(1), NodePort(1), masqueraded(W12)),
            row(Pod(2), NodePort(2), masqueraded(W12)),
            row(Node(1), NodePort(1), masqueraded(W12)),
            row(Outside, NodePort(1), masqueraded(W12)),
            row(Outside, NodePort(2), masqueraded(W12)),
            row(Pod(1), LoadBalancer(1), masqueraded(W12)),
            row(Node(1), LoadBalancer(1), masqueraded(W12)),
            row(Outside, LoadBalancer(1), masqueraded(W12)),
            row(Outside, LoadBalancer(2), masqueraded(W12)),
            row(Pod(1), ExternalIp(1), masqueraded(W12)),
            row(Node(1), ExternalIp(1), masqueraded(W12)),
            row(Outside, ExternalIp(1), masqueraded(W12)),
            row(Outside, ExternalIp(2), masqueraded(W12)),
            row(Node(1), NodePortOnLoopback, Refused)
                .of(Family::V4)
                .elsewhere(&[(Datapath::Iptables, masqueraded(W12))]),
            row(Node(1), NodePortOnLoopback, Refused).of(Family::V6),
            // Mode iptables does not treat the address as its own, so the packet is forwarded.
            row(Pod(1), UndefinedPort, Refused)
                .elsewhere(&[(Datapath::Iptables, Dropped), (Datapath::Userspace, Dropped)]),
            row(Node(1), UndefinedPort, Refused)
                .elsewhere(&[(Datapath::Iptables, Dropped), (Datapath::Userspace, Dropped)]),
        ],
    ),
    plain(
        "external policy Local",
        EXTERNAL_LOCAL,
        TWO,
        &[
            row(Pod(1), ClusterIp, kept(W12)),
            row(Node(1), ClusterIp, masqueraded(W12)),
            row(Outside, ClusterIp, masqueraded(W12)),
            row(Pod(1), NodePort(1), kept(W12)),
            row(Node(1), NodePort(1), masqueraded(W12)),
            row(Outside, NodePort(1), kept(W1)),
            row(Outside, NodePort(2), kept(W2)),
            row(Pod(1), LoadBalancer(1), kept(W12)),
            row(Node(1), LoadBalancer(1), masqueraded(W12)),
            row(Outside, LoadBalancer(1), kept(W1)),
            row(Outside, LoadBalancer(2), kept(W2)),
            row(Pod(1), ExternalIp(1), kept(W12)),
            row(Outside, ExternalIp(1), kept(W1)),
        ],
    ),
    plain(
        "internal policy Local",
        INTERNAL_LOCAL,
        TWO,
        &[
            row(Pod(1), ClusterIp, kept(W1)),
            row(Pod(2), ClusterIp, kept(W2)),
            row(Node(1), ClusterIp, masqueraded(W1)),
            row(Outside, ClusterIp, masqueraded(W1)),
            row(Pod(1), NodePort(1), masqueraded(W12)),
            row(Node(1), NodePort(1), masqueraded(W12)),
            row(Outside, NodePort(1), masqueraded(W12)),
            row(Outside, LoadBalancer(1), masqueraded(W12)),
            row(Outside, ExternalIp(1), masqueraded(W12)),
        ],
    ),
    plain(
        "both policies Local",
        BOTH_LOCAL,
        TWO,
        &[
            row(Pod(1), ClusterIp, kept(W1)),
            row(Node(1), ClusterIp, masqueraded(W1)),
            row(Pod(1), NodePort(1), kept(W12)),
            row(Node(1), NodePort(1), masqueraded(W12)),
            row(Outside, NodePort(1), kept(W1)),
            row(Outside, LoadBalancer(2), kept(W2)),
        ],
    ),
    plain(
        "the client is the only endpoint",
        CLUSTER,
        &[ready("client-1")],
        &[
            row(Pod(1), ClusterIp, masqueraded(&["client-1"])),
            row(Pod(1), NodePort(1), masqueraded(&["client-1"])),
            row(Pod(1), LoadBalancer(1), masqueraded(&["client-1"])),
        ],
    ),
    plain(
        "no endpoints",
        CLUSTER,
        &[],
        &[
            row(Pod(1), ClusterIp, Refused),
            row(Pod(2), ClusterIp, Refused),
            row(Node(1), ClusterIp, Refused),
            row(Outside, ClusterIp, Refused),
            row(Pod(1), NodePort(1), Refused),
            row(Node(1), NodePort(1), Refused),
            row(Outside, NodePort(1), Refused),
            row(Pod(1), LoadBalancer(1), Refused),
            row(Outside, LoadBalancer(1), Refused),
            row(Outside, ExternalIp(1), Refused),
        ],
    ),
    plain(
        "no endpoints, both policies Local",
        BOTH_LOCAL,
        &[],
        &[
            row(Pod(1), ClusterIp, Refused),
            row(Outside, NodePort(1), Refused),
            row(Outside, LoadBalancer(1), Refused),
        ],
    ),
    plain(
        "no endpoint that is ready or serves",
        CLUSTER,
        &[endpoint("web-1", State::Unready), endpoint("web-2", State::Ended)],
        &[row(Pod(1), ClusterIp, Refused), row(Outside, NodePort(1), Refused)],
    ),
    plain(
        "an endpoint that is not ready",
        CLUSTER,
        &[endpoint("web-1", State::Unready), ready("web-2"), endpoint("web-3", State::Ended)],
        &[row(Pod(1), ClusterIp, kept(W2)), row(Outside, NodePort(1), masqueraded(W2))],
    ),
    plain(
        "a terminating endpoint beside a ready one",
        CLUSTER,
        &[terminating("web-1"), ready("web-2")],
        &[
            row(Pod(1), ClusterIp, kept(W2)),
            row(Node(1), ClusterIp, masqueraded(W2)),
            row(Outside, NodePort(1), masqueraded(W2)),
        ],
    ),
    plain(
        "terminating endpoints only",
        CLUSTER,
        &[terminating("web-1"), terminating("web-2")],
        &[
            row(Pod(1), ClusterIp, kept(W12)),
            row(Node(1), ClusterIp, masqueraded(W12)),
            row(Outside, NodePort(1), masqueraded(W12)),
        ],
    ),
    plain(
        "external policy Local, the local endpoint terminates",
        EXTERNAL_LOCAL,
        &[terminating("web-1"), ready("web-2")],
        &[
            row(Pod(1), ClusterIp, kept(W2)),
            row(Outside, NodePort(1), kept(W1)),
            row(Outside, LoadBalancer(1), kept(W1)),
            row(Outside, NodePort(2), kept(W2)),
        ],
    ),
    plain(
        "external policy Local, endpoints elsewhere",
        EXTERNAL_LOCAL,
        &[ready("web-2")],
        &[
            row(Pod(1), ClusterIp, kept(W2)),
            row(Pod(1), NodePort(1), kept(W2)),
            row(Node(1), NodePort(1), masqueraded(W2)),
            row(Outside, NodePort(1), Dropped),
            row(Outside, LoadBalancer(1), Dropped),
            row(Outside, ExternalIp(1), Dropped),
            row(Outside, NodePort(2), kept(W2)),
        ],
    ),
    plain(
        "external policy Local, a terminating endpoint elsewhere",
        EXTERNAL_LOCAL,
        &[terminating("web-2")],
        &[
            row(Pod(1), ClusterIp, kept(W2)),
            row(Outside, NodePort(1), Dropped),
            row(Outside, NodePort(2), kept(W2)),
        ],
    ),
    plain(
        "internal policy Local, endpoints elsewhere",
        INTERNAL_LOCAL,
        &[ready("web-2")],
        &[
            row(Pod(1), ClusterIp, Dropped),
            row(Node(1), ClusterIp, Dropped),
            row(Pod(2), ClusterIp, kept(W2)),
            row(Outside, NodePort(1), masqueraded(W2)),
        ],
    ),
    plain(
        "internal policy Local, the local endpoint terminates",
        INTERNAL_LOCAL,
        &[terminating("web-1"), ready("web-2")],
        &[
            row(Pod(1), ClusterIp, kept(W1)),
            row(Pod(2), ClusterIp, kept(W2)),
            row(Outside, NodePort(1), masqueraded(W2)),
        ],
    ),
    plain(
        "both policies Local, endpoints elsewhere",
        BOTH_LOCAL,
        &[ready("web-2")],
        &[
            row(Pod(1), ClusterIp, Dropped),
            row(Outside, NodePort(1), Dropped),
            row(Pod(1), NodePort(1), kept(W2)),
        ],
    ),
    plain(
        "hints for each zone",
        CLUSTER,
        &[zoned("web-1", ZONE_1), zoned("web-2", ZONE_2)],
        &[
            row(Pod(1), ClusterIp, kept(W1)),
            row(Pod(2), ClusterIp, kept(W2)),
            row(Outside, NodePort(1), masqueraded(W1)),
        ],
    ),
    plain(
        "hints, but one endpoint without",
        CLUSTER,
        &[zoned("web-1", ZONE_1), ready("web-2")],
        &[row(Pod(1), ClusterIp, kept(W12))],
    ),
    plain(
        "hints for other zones only",
        CLUSTER,
        &[zoned("web-1", ZONE_1), zoned("web-2", ZONE_1)],
        &[row(Pod(1), ClusterIp, kept(W12)), row(Pod(2), ClusterIp, kept(W12))],
    ),
    plain(
        "hints for several zones",
        CLUSTER,
        &[zoned("web-1", &["zone-of-node1", "zone-of-node2"]), zoned("web-2", ZONE_2)],
        &[row(Pod(1), ClusterIp, kept(W1)), row(Pod(2), ClusterIp, kept(W12))],
    ),
    plain(
        "hints for each node",
        CLUSTER,
        &[noded("web-1", &["node1"]), noded("web-2", &["node2"])],
        &[row(Pod(1), ClusterIp, kept(W1)), row(Pod(2), ClusterIp, kept(W2))],
    ),
    plain(
        "hints against external policy Local",
        EXTERNAL_LOCAL,
        &[zoned("web-1", ZONE_2), zoned("web-2", ZONE_1)],
        &[row(Pod(1), ClusterIp, kept(W2)), row(Outside, NodePort(1), kept(W1))],
    ),
    plain(
        "source ranges with the client",
        Asks { source_ranges: OUTSIDE_RANGES, ..CLUSTER },
        TWO,
        &[
            row(Outside, LoadBalancer(1), masqueraded(W12)),
            row(Outside, LoadBalancer(2), masqueraded(W12)),
            row(Pod(1), LoadBalancer(1), Dropped),
            row(Node(1), LoadBalancer(1), Dropped),
            row(Pod(1), ClusterIp, kept(W12)),
            row(Outside, NodePort(1), masqueraded(W12)),
            row(Outside, ExternalIp(1), masqueraded(W12)),
            row(Pod(1), ExternalIp(1), masqueraded(W12)),
        ],
    ),
    plain(
        "source ranges with the client, external policy Local",
        Asks { source_ranges: OUTSIDE_RANGES, ..EXTERNAL_LOCAL },
        TWO,
        &[row(Outside, LoadBalancer(1), kept(W1)), row(Pod(1), LoadBalancer(1), Dropped)],
    ),
    plain(
        "source ranges without the client",
        Asks { source_ranges: &["203.0.113.0/24", "2001:db8:ffff::/48"], ..CLUSTER },
        TWO,
        &[
            row(Outside, LoadBalancer(1), Dropped),
            row(Outside, NodePort(1), masqueraded(W12)),
            row(Outside, ExternalIp(1), masqueraded(W12)),
        ],
    ),
    plain(
        "source ranges with node 1",
        Asks { source_ranges: &["192.0.2.11/32", "2001:db8:c0::b/128"], ..CLUSTER },
        TWO,
        &[
            row(Node(1), LoadBalancer(1), masqueraded(W12)),
            row(Node(2), LoadBalancer(2), Dropped),
            row(Pod(1), LoadBalancer(1), Dropped),
            row(Outside, LoadBalancer(1), Dropped),
        ],
    ),
    plain(
        "source ranges with the pods of node 1",
        Asks { source_ranges: &["10.244.1.0/24", "fd00:10:244:1::/64"], ..CLUSTER },
        TWO,
        &[row(Pod(1), LoadBalancer(1), masqueraded(W12)), row(Pod(2), LoadBalancer(2), Dropped)],
    ),
    plain(
        "source ranges of IPv6 only",
        Asks { source_ranges: &["2001:db8:ffff::/48"], ..CLUSTER },
        TWO,
        &[
            row(Outside, LoadBalancer(1), masqueraded(W12)).of(Family::V4),
            row(Outside, LoadBalancer(1), Dropped).of(Family::V6),
        ],
    ),
    plain(
        "ipMode Proxy",
        Asks { proxied: true, ..CLUSTER },
        TWO,
        &[
            row(Pod(1), LoadBalancer(1), Dropped),
            row(Outside, LoadBalancer(1), Dropped),
            row(Outside, NodePort(1), masqueraded(W12)),
        ],
    ),
    plain(
        "affinity",
        Asks { affinity: true, ..CLUSTER },
        TWO,
        &[
            row(Pod(1), ClusterIp, Expected::Sticks(W12, Source::Client)),
            row(Node(1), ClusterIp, Expected::Sticks(W12, Source::Node)),
            row(Outside, NodePort(1), Expected::Sticks(W12, Source::Node)),
            row(Outside, LoadBalancer(1), Expected::Sticks(W12, Source::Node)),
        ],
    ),
    plain(
        "affinity, external policy Local",
        Asks { affinity: true, ..EXTERNAL_LOCAL },
        &[ready("web-1"), ready("web-2"), ready("web-3")],
        &[
            row(Outside, NodePort(2), Expected::Sticks(&["web-2", "web-3"], Source::Client)),
            row(Pod(1), NodePort(1), Expected::Sticks(&["web-1", "web-2", "web-3"], Source::Client)),
        ],
    ),
    scenario(
        "masqueradeAll",
        MasqueradeAll,
        CLUSTER,
        TWO,
        &[
            row(Pod(1), ClusterIp, masqueraded(W12)),
            row(Pod(2), ClusterIp, masqueraded(W12)),
            row(Node(1), ClusterIp, masqueraded(W12)),
            row(Outside, ClusterIp, masqueraded(W12)),
        ],
    ),
    scenario(
        "masqueradeAll, external policy Local",
        MasqueradeAll,
        EXTERNAL_LOCAL,
        TWO,
        &[
            row(Pod(1), ClusterIp, masqueraded(W12)),
            row(Pod(1), NodePort(1), kept(W12)),
            row(Outside, NodePort(1), kept(W1)),
        ],
    ),
    scenario(
        "pods are not known",
        NoDetector,
        CLUSTER,
        &[ready("web-1")],
        &[
            row(Pod(1), ClusterIp, kept(W1)),
            row(Node(1), ClusterIp, masqueraded(W1)),
            row(Outside, ClusterIp, kept(W1)),
            row(Outside, NodePort(1), masqueraded(W1)),
        ],
    ),
    scenario(
        "pods are not known, external policy Local",
        NoDetector,
        EXTERNAL_LOCAL,
        TWO,
        &[
            row(Pod(1), NodePort(1), kept(W1)),
            row(Node(1), NodePort(1), masqueraded(W12)),
            row(Outside, NodePort(1), kept(W1)),
        ],
    ),
    scenario(
        "pods are known by a bridge",
        Bridge,
        CLUSTER,
        TWO,
        &[
            row(Pod(1), ClusterIp, masqueraded(W12)),
            row(Pod(2), ClusterIp, kept(W12)),
            row(Outside, ClusterIp, masqueraded(W12)),
        ],
    ),
    scenario(
        "pods are known by a bridge, external policy Local",
        Bridge,
        EXTERNAL_LOCAL,
        TWO,
        &[row(Pod(1), NodePort(1), kept(W1)), row(Pod(2), NodePort(2), kept(W12))],
    ),
    scenario(
        "pods are known by a prefix",
        Prefix,
        CLUSTER,
        TWO,
        &[row(Pod(1), ClusterIp, kept(W12)), row(Pod(2), ClusterIp, masqueraded(W12))],
    ),
    scenario(
        "pods are known by the node's range",
        NodeCidr,
        CLUSTER,
        TWO,
        &[
            row(Pod(1), ClusterIp, kept(W12)),
            row(Pod(2), ClusterIp, kept(W12)),
            row(Outside, ClusterIp, masqueraded(W12)),
        ],
    ),
    scenario(
        "node ports on primary addresses",
        NodePortsOnPrimary,
        CLUSTER,
        TWO,
        &[
            row(Outside, NodePort(2), masqueraded(W12)),
            row(Node(2), NodePort(2), masqueraded(W12)),
            row(Pod(2), NodePortOnBridge, Refused),
        ],
    ),
    scenario(
        "node ports everywhere",
        NodePortsEverywhere,
        CLUSTER,
        TWO,
        &[
            row(Outside, NodePort(2), masqueraded(W12)),
            row(Pod(2), NodePortOnBridge, masqueraded(W12)),
            row(Node(2), NodePortOnBridge, masqueraded(W12)),
        ],
    ),
    scenario(
        "node ports on the pods' networks",
        NodePortsOnBridge,
        CLUSTER,
        TWO,
        &[
            row(Pod(2), NodePortOnBridge, masqueraded(W12)),
            row(Outside, NodePort(2), Refused),
            row(Node(2), NodePort(2), Refused),
            row(Node(1), NodePortOnLoopback, Refused),
        ],
    ),
    scenario(
        "no node ports on loopback",
        NoLocalhostNodePorts,
        CLUSTER,
        TWO,
        &[row(Node(1), NodePortOnLoopback, Refused), row(Node(1), NodePort(1), masqueraded(W12))],
    ),
];
