//! The sets of ipset that this mode's rules match, with kube-proxy's names.

use crate::{
    model::objects::{IpFamily, Protocol},
    sys::net::ipset::SetKind,
};

/// The most characters that a name has in ipset.
const LONGEST_NAME: usize = 31;

/// The purpose of a set. Clients of a virtual socket that is in no set are not masqueraded.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) enum SetRole {
    /// Endpoints of this node as destination, with their own address as source.
    Hairpin,
    ClusterIp,
    ExternalIp,
    /// External IPs of Services with external traffic policy Local. `Local` means the same in the
    /// names of other roles.
    ExternalIpLocal,
    /// Load-balancer addresses of Services with either policy.
    LoadBalancer,
    LoadBalancerLocal,
    /// Load-balancer addresses with source ranges.
    LoadBalancerRestricted,
    /// Load-balancer addresses with source ranges that clients may reach with the address itself as
    /// their source.
    LoadBalancerFromItself,
    LoadBalancerSources,
    NodePort(Protocol),
    NodePortLocal(Protocol),
    HealthCheckPort,
    /// All addresses of the device.
    DeviceAddresses,
}

impl SetRole {
    pub(super) const ALL: [Self; 17] = [
        Self::Hairpin,
        Self::ClusterIp,
        Self::ExternalIp,
        Self::ExternalIpLocal,
        Self::LoadBalancer,
        Self::LoadBalancerLocal,
        Self::LoadBalancerRestricted,
        Self::LoadBalancerFromItself,
        Self::LoadBalancerSources,
        Self::NodePort(Protocol::Tcp),
        Self::NodePort(Protocol::Udp),
        Self::NodePort(Protocol::Sctp),
        Self::NodePortLocal(Protocol::Tcp),
        Self::NodePortLocal(Protocol::Udp),
        Self::NodePortLocal(Protocol::Sctp),
        Self::HealthCheckPort,
        Self::DeviceAddresses,
    ];

    /// The sets of addresses that clients dial, without those of node ports.
    pub(super) const FRONTENDS: [Self; 4] =
        [Self::LoadBalancer, Self::ClusterIp, Self::ExternalIp, Self::ExternalIpLocal];

    const fn ipv4_name(self) -> &'static str {
        match self {
            Self::Hairpin => "KUBE-LOOP-BACK",
            Self::ClusterIp => "KUBE-CLUSTER-IP",
            Self::ExternalIp => "KUBE-EXTERNAL-IP",
            Self::ExternalIpLocal => "KUBE-EXTERNAL-IP-LOCAL",
            Self::LoadBalancer => "KUBE-LOAD-BALANCER",
            Self::LoadBalancerLocal => "KUBE-LOAD-BALANCER-LOCAL",
            Self::LoadBalancerRestricted => "KUBE-LOAD-BALANCER-FW",
            Self::LoadBalancerFromItself => "KUBE-LOAD-BALANCER-SOURCE-IP",
            Self::LoadBalancerSources => "KUBE-LOAD-BALANCER-SOURCE-CIDR",
            Self::NodePort(Protocol::Tcp) => "KUBE-NODE-PORT-TCP",
            Self::NodePort(Protocol::Udp) => "KUBE-NODE-PORT-UDP",
            Self::NodePort(Protocol::Sctp) => "KUBE-NODE-PORT-SCTP-HASH",
            Self::NodePortLocal(Protocol::Tcp) => "KUBE-NODE-PORT-LOCAL-TCP",
            Self::NodePortLocal(Protocol::Udp) => "KUBE-NODE-PORT-LOCAL-UDP",
            Self::NodePortLocal(Protocol::Sctp) => "KUBE-NODE-PORT-LOCAL-SCTP-HASH",
            Self::HealthCheckPort => "KUBE-HEALTH-CHECK-NODE-PORT",
            Self::DeviceAddresses => "KUBE-IPVS-IPS",
        }
    }

    pub(super) const fn kind(self) -> SetKind {
        match self {
            Self::Hairpin | Self::LoadBalancerFromItself => SetKind::SocketsAndAddresses,
            Self::LoadBalancerSources => SetKind::SocketsAndNetworks,
            Self::ClusterIp
            | Self::ExternalIp
            | Self::ExternalIpLocal
            | Self::LoadBalancer
            | Self::LoadBalancerLocal
            | Self::LoadBalancerRestricted
            // bitmap:port is for TCP and UDP only.
            | Self::NodePort(Protocol::Sctp)
            | Self::NodePortLocal(Protocol::Sctp) => SetKind::Sockets,
            Self::NodePort(_) | Self::NodePortLocal(_) | Self::HealthCheckPort => SetKind::Ports,
            Self::DeviceAddresses => SetKind::Addresses,
        }
    }
}

/// One set of the kernel.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) struct Set {
    pub(super) role: SetRole,
    pub(super) family: IpFamily,
}

impl Set {
    pub(super) fn all(family: IpFamily) -> impl Iterator<Item = Self> {
        SetRole::ALL.into_iter().map(move |role| Self { role, family })
    }

    pub(super) fn name(self) -> String {
        let name = self.role.ipv4_name();
        match self.family {
            IpFamily::Ipv4 => name.to_owned(),
            IpFamily::Ipv6 => {
                let mut name = name.replacen("KUBE-", "KUBE-6-", 1);
                name.truncate(LONGEST_NAME);
                name
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::names;

    #[test]
    fn every_set_is_one_that_is_removed_and_has_a_name_of_its_own() {
        let names: BTreeSet<String> =
            [IpFamily::Ipv4, IpFamily::Ipv6].into_iter().flat_map(Set::all).map(Set::name).collect();
        assert_eq!(names.len(), 2 * SetRole::ALL.len());
        assert!(names.iter().all(|name| names::is_ip_set(name) && name.len() <= LONGEST_NAME), "{names:?}");
    }
}
