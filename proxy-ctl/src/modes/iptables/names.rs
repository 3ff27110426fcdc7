//! The tables, and kube-proxy's names of chains: people and other programs look for them.

use std::net::SocketAddr;

pub(super) use crate::names::PROXY_FIREWALL;
use crate::{model::desired::ServicePortName, modes::netfilter::hash};

pub(super) const SERVICES: &str = "KUBE-SERVICES";
pub(super) const EXTERNAL_SERVICES: &str = "KUBE-EXTERNAL-SERVICES";
pub(super) const NODE_PORTS: &str = "KUBE-NODEPORTS";
pub(super) const FORWARD: &str = "KUBE-FORWARD";
pub(super) const POSTROUTING: &str = "KUBE-POSTROUTING";
pub(super) const MARK_MASQUERADE: &str = "KUBE-MARK-MASQ";
/// A chain that is shared with the kubelet.
pub(super) const FIREWALL: &str = "KUBE-FIREWALL";
pub(super) const CANARY: &str = "KUBE-PROXY-CANARY";

#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) enum Table {
    Mangle,
    Nat,
    Filter,
}

impl Table {
    pub(super) const ALL: [Self; 3] = [Self::Mangle, Self::Nat, Self::Filter];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Mangle => "mangle",
            Self::Nat => "nat",
            Self::Filter => "filter",
        }
    }
}

/// A chain with rules of many service ports.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) enum SharedChain {
    /// Jumps to the chains of service ports by address.
    Services,
    /// Jumps to the chains of service ports by node port.
    NodePorts,
    /// Refuses clients of ClusterIPs without endpoints.
    Refused,
    /// Refuses clients of external addresses and node ports without endpoints.
    RefusedExternal,
    /// Accepts health checks.
    HealthChecks,
    /// Drops clients that source ranges keep out.
    Firewall,
}

impl SharedChain {
    pub(super) const ALL: [Self; 6] = [
        Self::Services,
        Self::NodePorts,
        Self::Refused,
        Self::RefusedExternal,
        Self::HealthChecks,
        Self::Firewall,
    ];

    pub(super) const fn table(self) -> Table {
        match self {
            Self::Services | Self::NodePorts => Table::Nat,
            Self::Refused | Self::RefusedExternal | Self::HealthChecks | Self::Firewall => Table::Filter,
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Services | Self::Refused => SERVICES,
            Self::NodePorts | Self::HealthChecks => NODE_PORTS,
            Self::RefusedExternal => EXTERNAL_SERVICES,
            Self::Firewall => PROXY_FIREWALL,
        }
    }

    pub(super) fn of(table: &str, chain: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.table().name() == table && one.name() == chain)
    }
}

/// The names of one service port's chains.
#[derive(Clone, Debug)]
pub(super) struct PortChains {
    /// `namespace/name:port`, followed by the protocol.
    identity: String,
    suffix: String,
}

impl PortChains {
    pub(super) fn new(name: &ServicePortName) -> Self {
        let identity = format!("{name}{}", name.protocol.name().to_ascii_lowercase());
        let suffix = hash(&[&identity]);
        Self { identity, suffix }
    }

    /// Returns the name of the chain that balances over the endpoints of the whole cluster.
    pub(super) fn cluster(&self) -> String {
        format!("KUBE-SVC-{}", self.suffix)
    }

    /// Returns the name of the chain that balances over the endpoints of this node.
    pub(super) fn local(&self) -> String {
        format!("KUBE-SVL-{}", self.suffix)
    }

    /// Returns the name of the chain for clients of external addresses.
    pub(super) fn external(&self) -> String {
        format!("KUBE-EXT-{}", self.suffix)
    }

    /// Returns the name of the chain for clients of load-balancer addresses of a Service with
    /// source ranges.
    pub(super) fn firewall(&self) -> String {
        format!("KUBE-FW-{}", self.suffix)
    }

    pub(super) fn endpoint(&self, address: SocketAddr) -> String {
        format!("KUBE-SEP-{}", hash(&[&self.identity, &address.to_string()]))
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::model::{objects::IpFamily, test_support::port_name};

    /// The expected names are those of kube-proxy (TestOverallIPTablesRules).
    #[rstest]
    #[case("ns1/svc1", "p80", "XPGD46QRK7WJZT7O", "10.180.0.1:80", "SXIVWICOYRO3J4NJ")]
    #[case("ns2/svc2", "p80", "GNZBNJ2PO5MGZ6GT", "10.180.0.2:80", "RS4RBKLTHTF2IUXJ")]
    fn as_kube_proxy(
        #[case] service: &str,
        #[case] port: &str,
        #[case] suffix: &str,
        #[case] endpoint: &str,
        #[case] endpoint_suffix: &str,
    ) {
        let chains = PortChains::new(&port_name(service, port, IpFamily::Ipv4));
        assert_eq!(chains.cluster(), format!("KUBE-SVC-{suffix}"));
        assert_eq!(chains.endpoint(endpoint.parse().unwrap()), format!("KUBE-SEP-{endpoint_suffix}"));
    }
}
