//! Links, addresses and routes.
//!
//! ```text
//!   outside ────┐ fabric (bridge, 192.0.2.0/24, 2001:db8:c0::/64)
//!               ├───────────────┐
//!   node1 ──────┘               └────── node2
//!    │ caliN: routed veths               └ cni0 (bridge) ── vethN
//!   pods 10.244.1.N, fd00:10:244:1::N   pods 10.244.2.N, fd00:10:244:2::N
//! ```

use anyhow::{Result, bail};

use super::{NODES, Netns};
use crate::{
    address::{self, Addresses, NodeNumber},
    namespace::{ip, sysctl},
};

/// Ethernet and IP addresses by which routed pods know their node.
const HOST_MAC: &str = "ee:ee:ee:ee:ee:ee";
const HOST_LINK4: &str = "169.254.1.1";
const HOST_LINK6: &str = "fe80::1";

/// Address that bridges get. An address of their own would change with their ports, and other hosts
/// would still know the old one.
const BRIDGE_MAC: &str = "ee:ee:ee:ee:ee:01";

/// Sets what every namespace needs: loopback, IPv6 addresses that are usable at once, and no routes
/// by ICMP redirects. A node that does not serve an address yet sends redirects, and a client would
/// follow one for minutes.
pub(super) fn prepare(namespace: &str) -> Result<()> {
    sysctl(
        namespace,
        &[
            ("net/ipv6/conf/all/disable_ipv6", "0"),
            ("net/ipv6/conf/default/disable_ipv6", "0"),
            ("net/ipv6/conf/all/accept_dad", "0"),
            ("net/ipv6/conf/default/accept_dad", "0"),
            ("net/ipv6/conf/default/dad_transmits", "0"),
            ("net/ipv6/conf/default/router_solicitations", "0"),
            ("net/ipv4/conf/all/accept_redirects", "0"),
            ("net/ipv4/conf/default/accept_redirects", "0"),
            ("net/ipv6/conf/all/accept_redirects", "0"),
            ("net/ipv6/conf/default/accept_redirects", "0"),
        ],
    )?;
    ip(Some(namespace), "link set lo up\n")
}

fn forward(namespace: &str) -> Result<()> {
    sysctl(
        namespace,
        &[
            ("net/ipv4/ip_forward", "1"),
            ("net/ipv6/conf/all/forwarding", "1"),
            ("net/ipv6/conf/default/forwarding", "1"),
            // Each client that is refused must get an ICMP error, however many were refused just
            // before.
            ("net/ipv4/icmp_ratelimit", "0"),
            ("net/ipv6/icmp/ratelimit", "0"),
        ],
    )
}

/// Builds the bridge between all hosts, and the gateway, which has no way to elsewhere.
pub(super) fn build_fabric(fabric: &Netns) -> Result<()> {
    forward(&fabric.namespace)?;
    // Netfilter must not see packets of this bridge.
    sysctl(
        &fabric.namespace,
        &[("?net/bridge/bridge-nf-call-iptables", "0"), ("?net/bridge/bridge-nf-call-ip6tables", "0")],
    )?;
    let own = fabric.addresses;
    fabric.ip(&format!(
        "link add br0 address {BRIDGE_MAC} type bridge mcast_snooping 0\nlink set br0 up\n\
         addr add {}/24 dev br0\naddr add {}/64 dev br0 nodad\n\
         route add unreachable default\nroute add unreachable ::/0 metric 1\n",
        own.v4, own.v6
    ))
}

/// Plugs a node or the client outside into the fabric as `eth0`.
pub(super) fn connect(fabric: &Netns, netns: &Netns) -> Result<()> {
    let port = &netns.name;
    pair(fabric, port, netns)?;
    fabric.ip(&format!("link set {port} master br0 up\n"))?;
    set_up(netns, address::gateway())
}

/// Makes a veth pair: `name` in the first namespace and `eth0` in the other.
fn pair(netns: &Netns, name: &str, other: &Netns) -> Result<()> {
    let (here, there) = (&netns.namespace, &other.namespace);
    ip(None, &format!("link add {name} netns {here} type veth peer name eth0 netns {there}\n"))
}

/// Sets up `eth0` with its addresses and default routes.
fn set_up(netns: &Netns, gateway: Addresses) -> Result<()> {
    let own = netns.addresses;
    netns.ip(&format!(
        "link set eth0 up\naddr add {}/24 dev eth0\naddr add {}/64 dev eth0 nodad\n\
         route add default via {}\nroute add ::/0 via {}\n",
        own.v4, own.v6, gateway.v4, gateway.v6
    ))
}

/// Makes the client outside send cluster IPs to node 1, and each external address to its node.
pub(super) fn route_services(outside: &Netns) -> Result<()> {
    let first = address::node(1);
    let mut script = format!(
        "route add {} via {}\nroute add {} via {}\n",
        address::SERVICE_RANGE4,
        first.v4,
        address::SERVICE_RANGE6,
        first.v6
    );
    for node in NODES {
        let (via, external) = (address::node(node), address::external(node, 0));
        script.push_str(&format!(
            "route add {}/24 via {}\nroute add {}/64 via {}\n",
            external.v4, via.v4, external.v6, via.v6
        ));
    }
    outside.ip(&script)
}

/// Sets up forwarding, routes to the other node's pods, and on node 2 the pods' bridge.
pub(super) fn build_node(node: &Netns, number: NodeNumber) -> Result<()> {
    forward(&node.namespace)?;
    // kubeadm asks for this: packets between pods of a bridge pass netfilter.
    sysctl(
        &node.namespace,
        &[("?net/bridge/bridge-nf-call-iptables", "1"), ("?net/bridge/bridge-nf-call-ip6tables", "1")],
    )?;
    let mut script = String::new();
    for other in NODES.into_iter().filter(|other| *other != number) {
        let via = address::node(other);
        script.push_str(&format!(
            "route add 10.244.{other}.0/24 via {}\nroute add fd00:10:244:{other}::/64 via {}\n",
            via.v4, via.v6
        ));
    }
    if number == 2 {
        let gateway = address::pod(number, 1);
        script.push_str(&format!(
            "link add cni0 address {BRIDGE_MAC} type bridge\nlink set cni0 up\n\
             addr add {}/24 dev cni0\naddr add {}/64 dev cni0 nodad\n",
            gateway.v4, gateway.v6
        ));
    }
    node.ip(&script)
}

pub(super) fn connect_pod(node: &Netns, pod: &Netns) -> Result<()> {
    match pod.node {
        Some(1) => connect_routed(node, pod),
        Some(2) => connect_bridged(node, pod),
        other => bail!("no way to connect a pod of node {other:?}"),
    }
}

fn interface(prefix: &str, pod: &Netns) -> String {
    format!("{prefix}{}", pod.addresses.v4.octets()[3])
}

pub(super) fn connect_routed(node: &Netns, pod: &Netns) -> Result<()> {
    let host_side = interface("cali", pod);
    let own = pod.addresses;
    pair(node, &host_side, pod)?;
    node.ip(&format!(
        "link set {host_side} address {HOST_MAC} addrgenmode none up\n\
         addr add {HOST_LINK6}/64 dev {host_side} nodad\n\
         route add {}/32 dev {host_side}\nroute add {}/128 dev {host_side}\n",
        own.v4, own.v6
    ))?;
    pod.ip(&format!(
        "link set eth0 up\naddr add {}/32 dev eth0\naddr add {}/128 dev eth0 nodad\n\
         neigh add {HOST_LINK4} lladdr {HOST_MAC} dev eth0 nud permanent\n\
         route add {HOST_LINK4} dev eth0 scope link\nroute add default via {HOST_LINK4}\n\
         route add ::/0 via {HOST_LINK6} dev eth0\n",
        own.v4, own.v6
    ))
}

fn connect_bridged(node: &Netns, pod: &Netns) -> Result<()> {
    let host_side = interface("veth", pod);
    pair(node, &host_side, pod)?;
    // The bridge CNI plugin sets hairpin for pods that dial their own service.
    node.ip(&format!(
        "link set {host_side} master cni0 up\nlink set {host_side} type bridge_slave hairpin on\n"
    ))?;
    set_up(pod, address::pod(2, 1))
}
