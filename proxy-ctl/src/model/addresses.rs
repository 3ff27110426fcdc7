//! External addresses that no Service may take: another Service's ClusterIP, and addresses that
//! each machine understands as its own.

use std::net::IpAddr;

use rustc_hash::FxHashMap;

use super::objects::{ObjectName, Service};

/// The Services that have an address, on whatever ports.
#[derive(Debug, Default)]
pub(super) struct Addresses {
    cluster_ips: Holders,
    external: Holders,
}

#[derive(Debug, Default)]
struct Holders(FxHashMap<IpAddr, Vec<ObjectName>>);

impl Holders {
    fn add(&mut self, address: IpAddr, service: &ObjectName) {
        let holders = self.0.entry(address).or_default();
        if !holders.contains(service) {
            holders.reserve_exact(1);
            holders.push(service.clone());
        }
    }

    fn remove(&mut self, address: IpAddr, service: &ObjectName) {
        let Some(holders) = self.0.get_mut(&address) else { return };
        holders.retain(|holder| holder != service);
        if holders.is_empty() {
            self.0.remove(&address);
        }
    }

    fn of(&self, address: IpAddr) -> &[ObjectName] {
        self.0.get(&address).map(Vec::as_slice).unwrap_or_default()
    }
}

impl Addresses {
    /// Adds a Service's addresses, and returns the Services whose external addresses are concerned.
    pub(super) fn add(&mut self, service: &Service) -> Vec<ObjectName> {
        for address in external(service) {
            self.external.add(address, &service.name);
        }
        for address in &service.cluster_ips {
            self.cluster_ips.add(*address, &service.name);
        }
        self.concerned(service)
    }

    /// Removes a Service's addresses, and returns the Services whose external addresses are
    /// concerned.
    pub(super) fn remove(&mut self, service: &Service) -> Vec<ObjectName> {
        for address in external(service) {
            self.external.remove(address, &service.name);
        }
        for address in &service.cluster_ips {
            self.cluster_ips.remove(*address, &service.name);
        }
        self.concerned(service)
    }

    fn concerned(&self, service: &Service) -> Vec<ObjectName> {
        service.cluster_ips.iter().flat_map(|address| self.external.of(*address)).cloned().collect()
    }

    /// Returns another Service that has this address as its ClusterIP.
    pub(super) fn cluster_ip_of_other(&self, address: IpAddr, service: &ObjectName) -> Option<&ObjectName> {
        self.cluster_ips.of(address).iter().find(|holder| *holder != service)
    }
}

pub(super) fn external(service: &Service) -> impl Iterator<Item = IpAddr> {
    service.external_ips.iter().chain(&service.load_balancer_ips).copied()
}

/// Returns true if a client that connects to this address means its own machine, its own link, or
/// many. Socket load balancing would send it to the Service.
pub(super) fn is_special(address: IpAddr) -> bool {
    address.is_unspecified()
        || address.is_loopback()
        || address.is_multicast()
        || match address {
            IpAddr::V4(address) => address.is_link_local() || address.is_broadcast(),
            IpAddr::V6(address) => address.is_unicast_link_local(),
        }
}
