//! Chooses one address of each family from the Node's addresses, in kube-proxy's order. This module
//! has no side effects.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::model::objects::IpFamily;

/// Returns the first of a Node's addresses, and the first of the other family. The addresses must
/// be in order of preference.
pub fn host_addresses(addresses: &[IpAddr]) -> Vec<IpAddr> {
    let first = addresses.first();
    let other = first.and_then(|first| addresses.iter().find(|address| address.is_ipv4() != first.is_ipv4()));
    first.into_iter().chain(other).copied().collect()
}

/// One address of each family. A family without a known address has the loopback address.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct NodeIps {
    /// The family that is used in a cluster with only one family.
    pub primary: IpFamily,
    pub ipv4: Ipv4Addr,
    pub ipv6: Ipv6Addr,
}

impl NodeIps {
    /// Detects the addresses. A `bind_address` of the configuration takes precedence over the
    /// Node's addresses, unless it is unspecified.
    pub fn detect(bind_address: IpAddr, addresses: &[IpAddr]) -> Self {
        let mut detected =
            Self { primary: IpFamily::Ipv4, ipv4: Ipv4Addr::LOCALHOST, ipv6: Ipv6Addr::LOCALHOST };
        let hosts = host_addresses(addresses);
        for address in
            hosts.iter().rev().copied().chain(Some(bind_address).filter(|one| !one.is_unspecified()))
        {
            detected.primary = IpFamily::of(address);
            match address {
                IpAddr::V4(address) => detected.ipv4 = address,
                IpAddr::V6(address) => detected.ipv6 = address,
            }
        }
        detected
    }

    pub fn of(&self, family: IpFamily) -> IpAddr {
        match family {
            IpFamily::Ipv4 => self.ipv4.into(),
            IpFamily::Ipv6 => self.ipv6.into(),
        }
    }

    /// Returns true if the primary address is not known, so that the loopback address stands for
    /// it.
    pub fn is_assumed(&self) -> bool {
        self.of(self.primary).is_loopback()
    }

    /// Returns the addresses that are known.
    pub fn known(&self) -> Vec<IpAddr> {
        IpFamily::ALL
            .map(|family| self.of(family))
            .into_iter()
            .filter(|address| !address.is_loopback())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[rstest]
    #[case::nothing_known("0.0.0.0", &[], IpFamily::Ipv4, "127.0.0.1", "::1")]
    #[case::one("0.0.0.0", &["192.0.2.1"], IpFamily::Ipv4, "192.0.2.1", "::1")]
    #[case::dual_stack("0.0.0.0", &["192.0.2.1", "2001:db8::1"], IpFamily::Ipv4, "192.0.2.1", "2001:db8::1")]
    #[case::v6_first("0.0.0.0", &["2001:db8::1", "192.0.2.1"], IpFamily::Ipv6, "192.0.2.1", "2001:db8::1")]
    #[case::only_the_first_of_a_family("::", &["192.0.2.1", "192.0.2.2"], IpFamily::Ipv4, "192.0.2.1", "::1")]
    #[case::bind_address_wins("192.0.2.9", &["192.0.2.1", "2001:db8::1"], IpFamily::Ipv4, "192.0.2.9", "2001:db8::1")]
    #[case::bind_address_sets_the_family(
        "2001:db8::9", &["192.0.2.1", "2001:db8::1"], IpFamily::Ipv6, "192.0.2.1", "2001:db8::9"
    )]
    fn detection(
        #[case] bind_address: &str,
        #[case] addresses: &[&str],
        #[case] primary: IpFamily,
        #[case] ipv4: &str,
        #[case] ipv6: &str,
    ) {
        let addresses: Vec<_> = addresses.iter().map(|text| address(text)).collect();
        let detected = NodeIps::detect(address(bind_address), &addresses);
        let expected = NodeIps { primary, ipv4: ipv4.parse().unwrap(), ipv6: ipv6.parse().unwrap() };
        assert_eq!(detected, expected);
    }

    #[test]
    fn loopback_is_only_assumed() {
        let unknown = NodeIps::detect(address("0.0.0.0"), &[]);
        assert!(unknown.is_assumed() && unknown.known().is_empty());
        let known = NodeIps::detect(address("0.0.0.0"), &[address("2001:db8::1")]);
        assert!(!known.is_assumed());
        assert_eq!(known.known(), [address("2001:db8::1")]);
    }
}
