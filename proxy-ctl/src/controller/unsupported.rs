//! What Services ask for that no mode can do yet, and what is served instead.
//!
//! The rule is to fail closed: an address that must be open to some clients only is not served at all.

use std::sync::Arc;

use super::Ports;
use crate::model::{
    desired::{Changes, DesiredPort, FrontendKind, ServicePortName},
    objects::Protocol,
};

/// A field of a Service that is not honoured.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Unsupported {
    SessionAffinity,
    SourceRanges,
    Sctp,
}

impl Unsupported {
    pub(super) const ALL: [Self; 3] = [Self::SessionAffinity, Self::SourceRanges, Self::Sctp];

    pub(super) fn of(port: &DesiredPort) -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|feature| feature.is_asked_by(port))
    }

    fn is_asked_by(self, port: &DesiredPort) -> bool {
        match self {
            Self::SessionAffinity => port.affinity_seconds.is_some(),
            Self::SourceRanges => {
                !port.source_ranges.is_empty() && port.frontends.iter().any(is_load_balancer)
            }
            Self::Sctp => port.name.protocol == Protocol::Sctp,
        }
    }

    pub(super) fn field(self) -> &'static str {
        match self {
            Self::SessionAffinity => "spec.sessionAffinity",
            Self::SourceRanges => "spec.loadBalancerSourceRanges",
            Self::Sctp => "spec.ports[].protocol",
        }
    }

    pub(super) fn consequence(self) -> &'static str {
        match self {
            Self::SessionAffinity => "not built yet: each connection may reach another endpoint",
            Self::SourceRanges => {
                "not built yet: the load-balancer addresses are not served, so that nobody else gets in"
            }
            Self::Sctp => "SCTP is not built yet: the port is not served",
        }
    }
}

fn is_load_balancer(frontend: &crate::model::desired::Frontend) -> bool {
    frontend.kind == FrontendKind::LoadBalancer
}

fn is_served(name: &ServicePortName) -> bool {
    name.protocol != Protocol::Sctp
}

/// The port as it can be served; mostly the port itself.
fn servable(port: Arc<DesiredPort>) -> Arc<DesiredPort> {
    if !Unsupported::SourceRanges.is_asked_by(&port) {
        return port;
    }
    let mut closed = DesiredPort::clone(&port);
    closed.frontends.retain(|frontend| !is_load_balancer(frontend));
    Arc::new(closed)
}

pub(super) fn leave_out(ports: Ports) -> Ports {
    ports.into_iter().filter(|port| is_served(&port.name)).map(servable).collect()
}

pub(super) fn leave_out_of_changes(changes: Changes) -> Changes {
    let Changes { changed, mut removed } = changes;
    removed.retain(is_served);
    Changes { changed: leave_out(changed), removed }
}
