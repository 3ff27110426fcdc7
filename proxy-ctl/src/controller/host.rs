//! Computes the [`Host`] that the dataplane gets from the node's network, the configuration and the
//! cluster. This module has no side effects.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;

use crate::{
    config::{Config, LocalMode},
    model::{
        mode::RequestedMode,
        node::{Host, LocalTraffic, NodeNetwork, PortRange},
        objects::Node,
    },
    node::NodeIps,
};

pub(super) fn host(
    network: &NodeNetwork,
    config: &Config,
    node: Option<&Node>,
    service_cidrs: Option<Vec<IpNet>>,
    masquerade_ports: Option<PortRange>,
) -> Host {
    let mut node_port_addresses = node_port_addresses(network, config, node);
    let serves_loopback = config.serves_node_ports_on_loopback();
    node_port_addresses.retain(|address| !address.is_loopback() || serves_loopback && address.is_ipv4());
    let pod_cidrs = node.map(|node| node.pod_cidrs.clone()).unwrap_or_default();
    let selected = network.interfaces.iter().filter(|one| config.ebpf.interfaces.select(&one.name));
    Host {
        addresses: network.addresses.clone(),
        own_cluster_ips: BTreeSet::new(),
        node_port_addresses,
        node_ports_everywhere: config.serves_node_ports_everywhere(),
        masquerade_addresses: network.masquerade_addresses.clone(),
        interfaces: selected.cloned().collect(),
        limits_bandwidth: network.limits_bandwidth,
        local_traffic: match config.detect_local_mode {
            LocalMode::ClusterCidr => LocalTraffic::FromCidrs(config.cluster_cidrs.clone()),
            LocalMode::NodeCidr => LocalTraffic::FromCidrs(pod_cidrs.clone()),
            LocalMode::BridgeInterface => LocalTraffic::FromBridge(config.bridge_interface.clone()),
            LocalMode::InterfaceNamePrefix => {
                LocalTraffic::FromInterfacePrefix(config.interface_name_prefix.clone())
            }
        },
        cluster_cidrs: config.cluster_cidrs.clone(),
        pod_cidrs,
        service_cidrs,
        masquerade_all: config.masquerade_all,
        masquerade_bit: match config.mode {
            RequestedMode::Nftables => config.nftables.masquerade_bit,
            RequestedMode::Automatic
            | RequestedMode::Ebpf
            | RequestedMode::Iptables
            | RequestedMode::Ipvs
            | RequestedMode::Userspace => config.iptables.masquerade_bit,
        },
        masquerade_ports,
        new_connections_per_core: config.ebpf.new_connections_per_core,
        flow_lifetimes: config.flow_lifetimes(),
        algorithm: config.ebpf.algorithm,
        forwarding: config.ebpf.forwarding(),
        encapsulation: config.ebpf.encapsulation,
        shares_addresses: false,
    }
}

/// Returns the addresses of the node that `nodePortAddresses` selects.
pub(super) fn node_port_addresses(
    network: &NodeNetwork,
    config: &Config,
    node: Option<&Node>,
) -> BTreeSet<IpAddr> {
    let addresses = node.map(|node| node.addresses.as_slice()).unwrap_or_default();
    let primary = NodeIps::detect(config.bind_address, addresses).known();
    let serves = |address: &&IpAddr| config.serves_node_ports_on(**address, &primary);
    network.addresses.iter().filter(serves).copied().collect()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::model::{
        node::Encapsulation,
        objects::{Algorithm, Forwarding, NodeForwarding},
    };

    fn cidrs(all: &[&str]) -> Vec<IpNet> {
        all.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[rstest]
    #[case::cluster_cidr(LocalMode::ClusterCidr, LocalTraffic::FromCidrs(cidrs(&["10.244.0.0/16"])))]
    #[case::node_cidr(LocalMode::NodeCidr, LocalTraffic::FromCidrs(cidrs(&["10.244.3.0/24"])))]
    #[case::bridge(LocalMode::BridgeInterface, LocalTraffic::FromBridge("cni0".into()))]
    #[case::prefix(LocalMode::InterfaceNamePrefix, LocalTraffic::FromInterfacePrefix("veth".into()))]
    fn the_host_says_what_traffic_is_local(#[case] mode: LocalMode, #[case] expected: LocalTraffic) {
        let mut config = Config {
            detect_local_mode: mode,
            bridge_interface: "cni0".into(),
            interface_name_prefix: "veth".into(),
            cluster_cidrs: cidrs(&["10.244.0.0/16"]),
            ..Config::default()
        };
        config.conntrack.udp_timeout = std::time::Duration::from_secs(7);
        config.ebpf.algorithm = Algorithm::Maglev;
        config.ebpf.forwarding = Forwarding::Hybrid;
        config.ebpf.encapsulation = Encapsulation::Geneve;
        config.ebpf.new_connections_per_core = 7_000;
        let node = Node { pod_cidrs: cidrs(&["10.244.3.0/24"]), ..Node::default() };
        let service_cidrs = Some(cidrs(&["10.96.0.0/12"]));
        let host = host(&NodeNetwork::default(), &config, Some(&node), service_cidrs.clone(), None);
        assert_eq!(host.local_traffic, expected);
        assert_eq!((host.flow_lifetimes, host.algorithm), (config.flow_lifetimes(), Algorithm::Maglev));
        let forwarding = NodeForwarding { by_default: Forwarding::Hybrid, allows_more: false };
        assert_eq!((host.forwarding, host.encapsulation), (forwarding, Encapsulation::Geneve));
        assert_eq!(host.new_connections_per_core, 7_000);
        assert_eq!((host.cluster_cidrs, host.pod_cidrs), (config.cluster_cidrs, node.pod_cidrs));
        assert_eq!(host.service_cidrs, service_cidrs);
    }
}
