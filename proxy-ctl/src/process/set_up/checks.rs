//! Finds settings that are valid but do not fit this node, such as those of the wrong address
//! family, or node ports on every address. This module has no side effects. Warnings and fatal
//! findings are the same as kube-proxy's.

use ipnet::IpNet;

use crate::{
    config::{Config, LocalMode, NodePortAddress},
    model::objects::IpFamily,
    node::NodeIps,
};

/// The facts of the node that settings can contradict.
#[derive(Clone, Debug)]
pub(in crate::process) struct NodeFacts {
    pub(in crate::process) ips: NodeIps,
    pub(in crate::process) pod_cidrs: Vec<IpNet>,
    /// True if the kernel has both address families.
    pub(in crate::process) dual_stack: bool,
}

/// The result of a check. The proxy must not start with `fatal` findings.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(in crate::process) struct Findings {
    pub(in crate::process) warnings: Vec<String>,
    pub(in crate::process) fatal: Vec<String>,
}

pub(in crate::process) fn check(config: &Config, node: &NodeFacts) -> Findings {
    let mut findings = Findings::default();
    findings.warnings.extend(node_ports(config, node));
    let wrong = other(node.ips.primary);
    let cluster = format!("{}-{}", node.ips.primary.name(), if node.dual_stack { "primary" } else { "only" });
    let mut add = |fatal: bool, what: &str| {
        let finding = format!("the cluster is {cluster}, but {what} has {} addresses only", wrong.name());
        if fatal { &mut findings.fatal } else { &mut findings.warnings }.push(finding);
    };
    if only(&config.cluster_cidrs, wrong) {
        add(config.detect_local_mode == LocalMode::ClusterCidr && !node.dual_stack, "clusterCIDR");
    }
    if only(&node.pod_cidrs, wrong) {
        add(config.detect_local_mode == LocalMode::NodeCidr, "spec.podCIDRs of the Node");
    }
    if !node.dual_stack {
        if only(&config.ipvs.exclude_cidrs, wrong) {
            add(false, "ipvs.excludeCIDRs");
        }
        let addresses = [
            ("healthzBindAddress", config.healthz_bind_address),
            ("metricsBindAddress", config.metrics_bind_address),
        ];
        for (field, address) in addresses {
            let address = address.map(|address| address.ip());
            if address.is_some_and(|address| !address.is_unspecified() && IpFamily::of(address) == wrong) {
                add(false, field);
            }
        }
    }
    findings
}

/// Returns kube-proxy's error for a detection mode without networks. Mode ebpf does not need
/// networks.
pub(in crate::process) fn nothing_is_local(config: &Config, node: &NodeFacts) -> Option<&'static str> {
    let (networks, nothing) = match config.detect_local_mode {
        LocalMode::ClusterCidr => (
            &config.cluster_cidrs,
            "Detect-local-mode set to ClusterCIDR, but no cluster CIDR specified for primary IP family",
        ),
        LocalMode::NodeCidr => (
            &node.pod_cidrs,
            "Detect-local-mode set to NodeCIDR, but no PodCIDR defined at node for primary IP family",
        ),
        LocalMode::BridgeInterface | LocalMode::InterfaceNamePrefix => return None,
    };
    let has_primary = networks.iter().any(|network| IpFamily::of(network.addr()) == node.ips.primary);
    (!has_primary).then_some(nothing)
}

/// Warns if node ports are served on addresses that `nodePortAddresses` does not name.
fn node_ports(config: &Config, node: &NodeFacts) -> Option<String> {
    let primary = node.ips.primary;
    let wanted = &config.node_port_addresses;
    let covers = |family: IpFamily| {
        wanted.iter().any(|address| match address {
            NodePortAddress::Primary => !node.ips.of(family).is_loopback(),
            NodePortAddress::Localhost | NodePortAddress::All => true,
            NodePortAddress::Network(network) => IpFamily::of(network.addr()) == family,
        })
    };
    let anywhere =
        |family: IpFamily| format!("node ports are served on every local {} address", family.name());
    if wanted.is_empty() {
        return Some(
            "nodePortAddresses is unset: node ports are served on every local address. Consider \
             `nodePortAddresses: [primary]` (--nodeport-addresses primary)"
                .to_owned(),
        );
    }
    let dual_stack =
        [&config.cluster_cidrs, &config.ipvs.exclude_cidrs, &node.pod_cidrs].into_iter().any(|networks| {
            IpFamily::ALL.iter().all(|family| networks.iter().any(|one| IpFamily::of(one.addr()) == *family))
        });
    if !covers(primary) {
        let problem =
            format!("nodePortAddresses has no {} address, the cluster's first family", primary.name());
        return Some(format!("{problem}: {}", anywhere(primary)));
    }
    (dual_stack && !covers(other(primary))).then(|| {
        let problem = format!(
            "the cluster is dual-stack, but nodePortAddresses has no {} address",
            other(primary).name()
        );
        format!("{problem}: {}", anywhere(other(primary)))
    })
}

fn only(networks: &[IpNet], family: IpFamily) -> bool {
    !networks.is_empty() && networks.iter().all(|network| IpFamily::of(network.addr()) == family)
}

fn other(family: IpFamily) -> IpFamily {
    match family {
        IpFamily::Ipv4 => IpFamily::Ipv6,
        IpFamily::Ipv6 => IpFamily::Ipv4,
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, SocketAddr};

    use rstest::rstest;

    use super::*;

    fn networks(all: &[&str]) -> Vec<IpNet> {
        all.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn node(addresses: &[&str], dual_stack: bool) -> NodeFacts {
        let addresses: Vec<IpAddr> = addresses.iter().map(|text| text.parse().unwrap()).collect();
        let ips = NodeIps::detect([0, 0, 0, 0].into(), &addresses);
        NodeFacts { ips, pod_cidrs: Vec::new(), dual_stack }
    }

    const V4: &[&str] = &["192.0.2.1"];
    const V6: &[&str] = &["2001:db8::1"];

    /// Returns a configuration that gives no finding on any node.
    fn quiet() -> Config {
        let any: SocketAddr = "0.0.0.0:10249".parse().unwrap();
        Config {
            node_port_addresses: vec![NodePortAddress::All],
            metrics_bind_address: any.into(),
            ..Config::default()
        }
    }

    #[rstest]
    #[case::fits(&["10.0.0.0/8"], V4, false, LocalMode::ClusterCidr, (0, 0))]
    #[case::dual_stack_fits(&["10.0.0.0/8", "fd00::/8"], V6, false, LocalMode::ClusterCidr, (0, 0))]
    #[case::wrong_family(&["fd00::/8"], V4, false, LocalMode::ClusterCidr, (0, 1))]
    #[case::wrong_family_of_two(&["fd00::/8"], V4, true, LocalMode::ClusterCidr, (1, 0))]
    #[case::wrong_family_that_is_not_used(&["10.0.0.0/8"], V6, false, LocalMode::BridgeInterface, (1, 0))]
    fn cluster_cidrs(
        #[case] cluster: &[&str],
        #[case] addresses: &[&str],
        #[case] dual_stack: bool,
        #[case] detect_local_mode: LocalMode,
        #[case] expected: (usize, usize),
    ) {
        let config = Config { cluster_cidrs: networks(cluster), detect_local_mode, ..quiet() };
        let Findings { warnings, fatal } = check(&config, &node(addresses, dual_stack));
        assert_eq!((warnings.len(), fatal.len()), expected, "{warnings:?} {fatal:?}");
    }

    #[rstest]
    #[case::none(LocalMode::ClusterCidr, &[], Some("ClusterCIDR, but no cluster CIDR specified"))]
    #[case::of_the_other_family(LocalMode::NodeCidr, &["fd00::/64"], Some("NodeCIDR, but no PodCIDR defined"))]
    #[case::of_both(LocalMode::ClusterCidr, &["fd00::/64", "10.0.0.0/8"], None)]
    #[case::not_asked(LocalMode::BridgeInterface, &[], None)]
    fn networks_that_do_not_detect_local_traffic(
        #[case] detect_local_mode: LocalMode,
        #[case] all: &[&str],
        #[case] expected: Option<&str>,
    ) {
        let config = Config { cluster_cidrs: networks(all), detect_local_mode, ..quiet() };
        let facts = NodeFacts { pod_cidrs: networks(all), ..node(V4, true) };
        let found = nothing_is_local(&config, &facts);
        assert_eq!(found.is_some(), expected.is_some(), "{found:?}");
        assert!(found.zip(expected).is_none_or(|(found, text)| found.contains(text)), "{found:?}");
    }

    #[rstest]
    #[case(LocalMode::NodeCidr, (0, 1))]
    #[case(LocalMode::ClusterCidr, (1, 0))]
    fn pod_cidrs(#[case] detect_local_mode: LocalMode, #[case] expected: (usize, usize)) {
        let facts = NodeFacts { pod_cidrs: networks(&["fd00::/64"]), ..node(V4, true) };
        let Findings { warnings, fatal } = check(&Config { detect_local_mode, ..quiet() }, &facts);
        assert_eq!((warnings.len(), fatal.len()), expected, "{warnings:?} {fatal:?}");
    }

    #[test]
    fn addresses_of_servers_matter_where_the_family_is_not_there() {
        let mut config = quiet();
        let wrong: SocketAddr = "[2001:db8::1]:10256".parse().unwrap();
        config.healthz_bind_address = wrong.into();
        assert_eq!(check(&config, &node(V4, true)), Findings::default());
        let findings = check(&config, &node(V4, false));
        assert!(findings.warnings[0].contains("healthzBindAddress has IPv6 addresses only"), "{findings:?}");
        let any: SocketAddr = "[::]:10256".parse().unwrap();
        config.healthz_bind_address = any.into();
        assert_eq!(check(&config, &node(V4, false)), Findings::default());
    }

    #[rstest]
    #[case::unset(&[], &[], V4, Some("nodePortAddresses is unset"))]
    #[case::primary(&["primary"], &[], V4, None)]
    #[case::primary_that_is_not_known(&["primary"], &[], &[], Some("has no IPv4 address"))]
    #[case::a_network(&["192.0.2.0/24"], &[], V4, None)]
    #[case::of_the_other_family(&["fd00::/8"], &[], V4, Some("on every local IPv4 address"))]
    #[case::one_of_two(&["192.0.2.0/24"], &["10.0.0.0/8", "fd00::/8"], V4, Some("on every local IPv6 address"))]
    #[case::both_of_two(&["192.0.2.0/24", "fd00::/8"], &["10.0.0.0/8", "fd00::/8"], V4, None)]
    fn addresses_of_node_ports(
        #[case] wanted: &[&str],
        #[case] cluster: &[&str],
        #[case] addresses: &[&str],
        #[case] expected: Option<&str>,
    ) {
        let wanted = wanted.iter().map(|text| match *text {
            "primary" => NodePortAddress::Primary,
            network => NodePortAddress::Network(network.parse().unwrap()),
        });
        let config = Config {
            node_port_addresses: wanted.collect(),
            cluster_cidrs: networks(cluster),
            ..Config::default()
        };
        let findings = check(&config, &node(addresses, true));
        assert_eq!(findings.warnings.len(), usize::from(expected.is_some()), "{findings:?}");
        assert!(
            findings.warnings.iter().zip(expected).all(|(found, text)| found.contains(text)),
            "{findings:?}"
        );
    }
}
