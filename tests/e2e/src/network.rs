//! Links, addresses and routes.
//!
//! ```text
//!   control plane (bridge br0, 172.30.0.1, fd00:172:30::1)
//!     ├── n1 eth0 172.30.0.11 ── pods 10.244.1.0/24, fd00:10:244:1::/64 (CNI plugin ptp)
//!     ├── n2 eth0 172.30.0.12 ── pods 10.244.2.0/24
//!     └── …
//! ```
//!
//! Nodes route the pods of each other without an overlay, and masquerade what pods send elsewhere.

use std::fmt::Write as _;

use anyhow::Result;
use lab::namespace::{ip, masquerade, sysctl};

use crate::addresses::{self, CONTROL_PLANE4, CONTROL_PLANE6, NodeNumber, OUTSIDE, POD_RANGE4, POD_RANGE6};

/// Returns the network namespace of the control plane.
pub(crate) fn control_plane(cluster: &str) -> String {
    format!("{cluster}-cp")
}

pub(crate) fn node(cluster: &str, number: NodeNumber) -> String {
    format!("{cluster}-{}", addresses::node_name(number))
}

/// Makes the network namespaces and connects them.
pub(crate) fn build(cluster: &str, nodes: NodeNumber) -> Result<()> {
    let fabric = control_plane(cluster);
    add(&fabric)?;
    // Connections to a load balancer are spread over its nodes by addresses and ports. By addresses
    // alone, a Service without session affinity would seem to have it.
    sysctl(
        &fabric,
        &[("net/ipv4/fib_multipath_hash_policy", "1"), ("net/ipv6/fib_multipath_hash_policy", "1")],
    )?;
    ip(
        Some(&fabric),
        &format!(
            "link add br0 type bridge\nlink set br0 up\naddr add {OUTSIDE}/32 dev lo\n\
             addr add {CONTROL_PLANE4}/24 dev br0\naddr add {CONTROL_PLANE6}/64 dev br0 nodad\n"
        ),
    )?;
    for number in 1..=nodes {
        add_node(cluster, number)?;
    }
    for number in 1..=nodes {
        ip(Some(&node(cluster, number)), &routes_to_pods(nodes, Some(number)))?;
    }
    ip(Some(&fabric), &routes_to_pods(nodes, None))
}

fn add(namespace: &str) -> Result<()> {
    ip(None, &format!("netns add {namespace}\n"))?;
    sysctl(namespace, &[("net/ipv6/conf/all/accept_dad", "0"), ("net/ipv6/conf/default/accept_dad", "0")])?;
    ip(Some(namespace), "link set lo up\n")
}

fn add_node(cluster: &str, number: NodeNumber) -> Result<()> {
    let (fabric, own) = (control_plane(cluster), node(cluster, number));
    add(&own)?;
    let (address4, address6) = (addresses::node4(number), addresses::node6(number));
    ip(None, &format!("link add {0} netns {fabric} type veth peer name eth0 netns {own}\n", port(number)))?;
    ip(Some(&fabric), &format!("link set {} master br0 up\n", port(number)))?;
    ip(
        Some(&own),
        &format!(
            "link set eth0 up\naddr add {address4}/24 dev eth0\naddr add {address6}/64 dev eth0 nodad\n\
             route add default via {CONTROL_PLANE4}\nroute add ::/0 via {CONTROL_PLANE6}\n"
        ),
    )?;
    sysctl(
        &own,
        &[
            ("net/ipv4/ip_forward", "1"),
            ("net/ipv6/conf/all/forwarding", "1"),
            ("net/ipv4/conf/all/rp_filter", "0"),
            ("net/ipv4/conf/default/rp_filter", "0"),
        ],
    )?;
    // Pods that dial pods keep their address. Most network plugins, such as kindnet, do the same.
    let rule = |family: &str, pods: &str| {
        format!("{family} saddr {pods} {family} daddr != {pods} oifname eth0 masquerade")
    };
    masquerade(&own, &[rule("ip", POD_RANGE4), rule("ip6", POD_RANGE6)])
}

/// Returns the name of the bridge's end of a node's link.
fn port(number: NodeNumber) -> String {
    format!("port-{}", addresses::node_name(number))
}

/// Returns routes to the pods of all nodes but one.
fn routes_to_pods(nodes: NodeNumber, except: Option<NodeNumber>) -> String {
    let mut script = String::new();
    for number in (1..=nodes).filter(|number| Some(*number) != except) {
        // Writing to a String cannot fail.
        let _ = writeln!(
            script,
            "route add {} via {}\nroute add {} via {}",
            addresses::pods4(number),
            addresses::node4(number),
            addresses::pods6(number),
            addresses::node6(number)
        );
    }
    script
}
