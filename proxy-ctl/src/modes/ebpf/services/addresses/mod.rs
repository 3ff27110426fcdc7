//! Maps that say which addresses belong to Services: ClusterIPs, addresses of frontends, and the
//! ranges from which ClusterIPs come.

mod cluster_ips;
pub(in crate::modes::ebpf) mod frontend_addresses;
pub(in crate::modes::ebpf) mod service_cidrs;
