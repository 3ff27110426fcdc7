//! What load balancers ask for on `healthCheckNodePort`s.

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

/// What `healthCheckNodePort`s answer, as of the last write.
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
    /// Where to listen, and for which Service. Of two Services with one port, which the API server does not allow, the
    /// first by name has it.
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

    /// The node ports that are asked, of all Services.
    pub fn ports(&self) -> BTreeSet<u16> {
        self.services.values().map(|check| check.port).collect()
    }

    /// Ready endpoints of the Service on this node.
    pub fn local_ready(&self, service: &ObjectName) -> usize {
        self.services.get(service).map_or(0, |check| check.local_ready)
    }
}
