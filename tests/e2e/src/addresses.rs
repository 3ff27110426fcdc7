//! Addresses of the cluster. They are in network namespaces of the cluster's own, so that clusters
//! do not collide.

/// A node's number, from 1.
pub type NodeNumber = u8;

/// Largest number of nodes that the numbering has room for.
pub const MOST_NODES: NodeNumber = 9;

/// Addresses of the control plane, on the bridge that connects the nodes.
pub const CONTROL_PLANE4: &str = "172.30.0.1";
pub const CONTROL_PLANE6: &str = "fd00:172:30::1";
/// Address of the clients of load balancers, which are outside of the nodes' network. The
/// load-balancer controller names it too.
pub const OUTSIDE: &str = "203.0.113.1";

pub const POD_RANGE4: &str = "10.244.0.0/16";
pub const POD_RANGE6: &str = "fd00:10:244::/48";
pub const SERVICE_RANGES: &str = "10.96.0.0/16,fd00:10:96::/112";
/// Addresses of Service kubernetes, which has the first address of each range.
pub const API_SERVICE4: &str = "10.96.0.1";
pub const API_SERVICE6: &str = "fd00:10:96::1";
/// Address of Service kube-dns.
pub const DNS_SERVICE: &str = "10.96.0.10";

pub fn node4(number: NodeNumber) -> String {
    format!("172.30.0.1{number}")
}

pub fn node6(number: NodeNumber) -> String {
    format!("fd00:172:30::1{number}")
}

pub fn pods4(number: NodeNumber) -> String {
    format!("10.244.{number}.0/24")
}

pub fn pods6(number: NodeNumber) -> String {
    format!("fd00:10:244:{number}::/64")
}

/// Returns the name of a node's Node object, which is its host name too.
pub fn node_name(number: NodeNumber) -> String {
    format!("n{number}")
}

/// Returns the zone of a node. There are three zones, because the tests of traffic distribution
/// need them.
pub fn zone(number: NodeNumber) -> String {
    format!("zone-{}", number.saturating_sub(1) % 3)
}
