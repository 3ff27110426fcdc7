//! The answers to load balancers on `healthCheckNodePort`s.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use crate::model::objects::{HealthCheck, ObjectName};

/// The addresses of this node on which health check ports listen.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum HealthCheckAddresses {
    /// Every address of both families.
    All,
    Only(BTreeSet<IpAddr>),
}

/// The health checks of Services, as of the last write.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct HealthChecks {
    pub addresses: HealthCheckAddresses,
    pub services: BTreeMap<ObjectName, HealthCheck>,
}

impl Default for HealthChecks {
    fn default() -> Self {
        Self { addresses: HealthCheckAddresses::All, services: BTreeMap::new() }
    }
}

impl HealthChecks {
    /// Returns the sockets to listen on, each with its Service. If two Services have one port, the
    /// first by name gets it. The API server does not allow that case.
    pub fn sockets(&self) -> BTreeMap<SocketAddr, ObjectName> {
        let addresses: Vec<IpAddr> = match &self.addresses {
            HealthCheckAddresses::All => vec![Ipv4Addr::UNSPECIFIED.into()],
            HealthCheckAddresses::Only(addresses) => addresses.iter().copied().collect(),
        };
        let mut sockets = BTreeMap::new();
        for check in self.services.values() {
            for address in &addresses {
                let socket = SocketAddr::new(*address, check.port);
                sockets.entry(socket).or_insert_with(|| check.service.clone());
            }
        }
        sockets
    }

    /// Returns the health check ports of all Services.
    pub fn ports(&self) -> BTreeSet<u16> {
        self.services.values().map(|check| check.port).collect()
    }

    /// Returns the number of ready endpoints of the Service on this node.
    pub fn local_ready(&self, service: &ObjectName) -> usize {
        self.services.get(service).map_or(0, |check| check.local_ready)
    }
}
