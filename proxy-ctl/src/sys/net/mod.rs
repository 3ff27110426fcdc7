//! The network stack: netlink, interfaces, sockets, connection tracking, IPVS and ipset, and
//! network namespaces.

pub mod conntrack;
pub mod device;
pub mod generic_netlink;
pub mod ipset;
pub mod ipvs;
pub mod link;
pub mod namespace;
pub mod namespace_lock;
pub mod netlink;
pub mod network_namespaces;
pub mod packet_counters;
pub mod rtnetlink;
pub mod socket_diag;
pub mod tc;
pub mod veth;
