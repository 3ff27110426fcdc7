//! The names of a service port's chains and sets. They are those of kube-proxy in this mode.

use crate::{model::desired::ServicePortName, modes::netfilter::hash};

/// The longest name without its prefix. The kernel takes 255 bytes, and prefixes need 9. Names that
/// are equal up to this length differ in their hash.
const LONGEST: usize = 200;
/// The number of characters of the hash in a name.
const OF_HASH: usize = 8;

/// A chain that belongs to one service port.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum PortChain {
    /// Chooses among the endpoints for cluster-wide traffic.
    Service,
    /// Chooses among the endpoints for clients that get local ones only.
    Local,
    /// Sends clients of node ports, external IPs and load-balancer addresses to one of the chains
    /// above.
    External,
    /// Drops clients of load-balancer addresses that are not in a source range.
    Firewall,
}

impl PortChain {
    const fn prefix(self) -> &'static str {
        match self {
            Self::Service => "service",
            Self::Local => "local",
            Self::External => "external",
            Self::Firewall => "firewall",
        }
    }
}

/// The common end of the names of everything that belongs to a service port.
#[derive(Clone, Debug)]
pub(super) struct PortNames(String);

impl PortNames {
    pub(super) fn new(name: &ServicePortName) -> Self {
        let ServicePortName { service, port, protocol, .. } = name;
        let protocol = protocol.name().to_ascii_lowercase();
        let whole = format!("{}/{}/{protocol}/{port}", service.namespace, service.name);
        let hash: String = hash(&[&whole]).chars().take(OF_HASH).collect();
        Self(format!("{hash}-{whole}").chars().take(LONGEST).collect())
    }

    pub(super) fn chain(&self, chain: PortChain) -> String {
        format!("{}-{}", chain.prefix(), self.0)
    }

    /// Returns the name of the set of clients and the endpoints to which they were sent.
    pub(super) fn affinity(&self) -> String {
        format!("affinity-{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::model::{objects::IpFamily, test_support::port_name};

    // These names were listed on nodes of kube-proxy 1.37.
    #[rstest]
    #[case("default/kubernetes", "https", "service-2QRHZV4L-default/kubernetes/tcp/https")]
    #[case("kproxy-lab/backend-api", "http", "service-YVSKLJHA-kproxy-lab/backend-api/tcp/http")]
    fn chains_are_named_as_kube_proxy_names_them(
        #[case] service: &str,
        #[case] port: &str,
        #[case] chain: &str,
    ) {
        let names = PortNames::new(&port_name(service, port, IpFamily::Ipv4));
        assert_eq!(names.chain(PortChain::Service), chain);
    }
}
