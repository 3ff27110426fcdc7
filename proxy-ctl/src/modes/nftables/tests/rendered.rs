//! Tests of what is rendered. Who reaches whom is tested in the kernel by the scenarios of
//! `tests/behaviour`, each beside the real kube-proxy.

use rstest::rstest;

use super::{
    super::{
        frame::{self, Context},
        names::{PortChain, PortNames},
        objects::{Objects, Rule},
        render::{Allocation, render, room},
        slots::Blocks,
    },
    host, ports,
};
use crate::{
    model::{
        node::{Host, LocalTraffic, PortRange},
        objects::{IpFamily, Service, TrafficPolicy},
        test_support::{ip, remote, service},
    },
    sys::nftables::{Expression, Header, Meta},
};

fn rules_of(chain: &str, host: &Host) -> Vec<Rule> {
    let chains = frame::chains(&Context::new(IpFamily::Ipv4, host));
    chains.into_iter().find(|one| one.name == chain).unwrap().rules
}

/// Renders a Service with one endpoint on another node.
fn rendered(service: Service) -> (PortNames, Objects) {
    let port = ports(service, vec![remote("10.180.1.1")]).remove(0);
    let context = Context::new(port.name.family, &host());
    let (wanted, mut blocks) = (room(&port, &context), Blocks::default());
    let mut allocate = |count| (count > 0).then(|| blocks.allocate(count)).flatten();
    let allocation = Allocation { cluster: allocate(wanted.cluster), local: allocate(wanted.local) };
    (PortNames::new(&port.name), render(&port, &context, allocation))
}

#[rstest]
#[case::bridge(LocalTraffic::FromBridge("cni0".into()), b"cni0\0\0\0\0\0\0\0\0\0\0\0\0")]
#[case::prefix(LocalTraffic::FromInterfacePrefix("cni".into()), b"cni")]
fn pods_are_told_by_their_interface(#[case] local_traffic: LocalTraffic, #[case] name: &[u8]) {
    let conditions =
        Context::new(IpFamily::Ipv4, &Host { local_traffic, ..host() }).conditions_of_pods().concat();
    let [Expression::Meta { key, .. }, Expression::Compare { value, .. }] = &conditions[..] else {
        panic!("{conditions:?}")
    };
    assert_eq!((*key, value.as_slice()), (Meta::InputInterface, name));
}

/// Both masquerading rules use these ports: the one for the fwmark, and the one for connections of
/// an endpoint to itself.
#[rstest]
#[case::any(None, 0)]
#[case::of_the_node(Some(PortRange { first: 32_768, last: 60_999 }), 2)]
fn masqueraded_sources_get_the_ports_of_the_node(
    #[case] masquerade_ports: Option<PortRange>,
    #[case] with_ports: usize,
) {
    let rules = rules_of("masquerading", &Host { masquerade_ports, ..host() });
    let has_ports = |rule: &&Rule| {
        let values = rule.expressions.iter().filter_map(|one| {
            if let Expression::Immediate { value, .. } = one { Some(value.as_slice()) } else { None }
        });
        let has_range = values.eq([32_768_u16, 60_999].map(u16::to_be_bytes));
        has_range && matches!(rule.expressions.last(), Some(Expression::Masquerade { ports: Some(_) }))
    };
    assert_eq!((rules.len(), rules.iter().filter(has_ports).count()), (2, with_ports));
}

#[rstest]
#[case::ports_that_no_service_has(None, false, 1)]
#[case::and_addresses_of_service_cidrs_of_the_family(Some(vec!["172.30.0.0/24", "172.31.0.0/28", "fd00:96::/112"]), false, 3)]
#[case::another_mode_may_serve_them(Some(vec!["172.30.0.0/24"]), true, 0)]
fn what_no_service_has_is_refused(
    #[case] cidrs: Option<Vec<&str>>,
    #[case] shares_addresses: bool,
    #[case] expected: usize,
) {
    let service_cidrs = cidrs.map(|all| all.into_iter().map(|cidr| cidr.parse().unwrap()).collect());
    let host = Host { service_cidrs, shares_addresses, ..host() };
    assert_eq!(rules_of("cluster-ips-check", &host).len(), expected);
}

#[rstest]
#[case::with_the_node("192.168.0.0/24", 3)]
#[case::without_the_node("203.0.113.0/25", 2)]
fn a_node_in_a_source_range_may_use_the_address_as_its_own(#[case] range: &str, #[case] rules: usize) {
    let service = service("default/web", &["172.30.0.41"]).load_balancer_ip("1.2.3.4");
    let (names, objects) = rendered(Service { source_ranges: vec![range.parse().unwrap()], ..service });
    let firewall = &objects.chains[&names.chain(PortChain::Firewall)];
    let asks_for_source =
        |one: &Expression| matches!(one, Expression::Payload { header: Header::Network, offset: 12, .. });
    let of_source = firewall.iter().filter(|rule| rule.expressions.iter().any(asks_for_source)).count();
    assert_eq!((firewall.len(), of_source), (rules, rules - 1));
}

#[test]
fn a_port_without_external_frontends_has_no_external_chain() {
    let has_chain = |service: Service| {
        let (names, objects) = rendered(service);
        objects.chains.contains_key(&names.chain(PortChain::External))
    };
    let web = service("default/web", &["172.30.0.41"]);
    assert!(has_chain(web.clone().node_port(30080)));
    assert!(has_chain(
        web.clone().external_ip("192.168.99.11").policies(TrafficPolicy::Cluster, TrafficPolicy::Local)
    ));
    assert!(!has_chain(web));
}

#[test]
fn rules_of_the_frame_are_about_one_family() {
    let context = Context::new(IpFamily::Ipv4, &host());
    assert!(!context.host.node_port_addresses.contains(&ip("2001:db8::2")));
    assert_eq!(context.conditions_of_pods().len(), 1);
}
