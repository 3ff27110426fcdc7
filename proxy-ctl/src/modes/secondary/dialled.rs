//! The frontends that clients have dialled in the secondary mode.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use rustc_hash::FxHashSet;

use crate::model::desired::{DesiredPort, Frontend, FrontendKind};

/// The frontends that clients of Services dial. Connections to anything else, such as the ports
/// that a container engine publishes, depend on the rules of others.
#[derive(Clone, Debug, Default)]
pub(crate) struct DialledFrontends {
    pub(super) addresses: FxHashSet<SocketAddr>,
    pub(super) node_ports: FxHashSet<u16>,
    pub(super) node_addresses: BTreeSet<IpAddr>,
}

impl DialledFrontends {
    /// Adds a frontend. `address` is `None` for a node port.
    pub(super) fn add(&mut self, address: Option<IpAddr>, port: u16) {
        match address {
            Some(address) => drop(self.addresses.insert(SocketAddr::new(address, port))),
            None => drop(self.node_ports.insert(port)),
        }
    }

    pub(super) fn add_all(&mut self, port: &DesiredPort) {
        for Frontend { kind, address, port, .. } in &port.frontends {
            self.add((*kind != FrontendKind::NodePort).then_some(*address), *port);
        }
    }

    pub(crate) fn has(&self, dialled: SocketAddr) -> bool {
        self.addresses.contains(&dialled)
            || self.node_ports.contains(&dialled.port()) && self.node_addresses.contains(&dialled.ip())
    }
}
