//! Addresses that clients dial: ClusterIPs, node ports and those of load balancers.

pub(super) mod cluster_ip;
pub(super) mod health_check;
pub(super) mod node_port;
pub(super) mod policy;
pub(super) mod source_ranges;
pub(super) mod unserved;
