//! Desired service ports for the tests of this mode, and the scripts that write them.

use std::sync::Arc;

use super::{
    base::{Abilities, BaseRules},
    plan::{self, PortDifference, Script},
    rules::{PortRules, PortSettings, port_rules},
    state::State,
};
use crate::model::{
    Model,
    desired::DesiredPort,
    node::{Host, LocalTraffic},
    objects::{EndpointSlice, IpFamily, Protocol, Service, TrafficPolicy},
    test_support::{HERE, ip, local, name, port, remote, service, slice, target},
};

mod changes;
mod kernel;
mod layout;
mod read_back;
mod refusals;

const ABLE: Abilities =
    Abilities { random_fully: true, drop_invalid: true, counts_packets: false, routes_localnet: false };

fn host() -> Host {
    Host {
        node_port_addresses: ["127.0.0.1", "192.168.0.2", "::1", "2001:db8::1"].map(ip).into(),
        node_ports_everywhere: true,
        masquerade_addresses: ["192.168.0.2", "2001:db8::1"].map(ip).into(),
        local_traffic: LocalTraffic::FromCidrs(
            ["10.0.0.0/8", "fd00:10::/64"].map(|cidr| cidr.parse().unwrap()).into(),
        ),
        masquerade_bit: 14,
        ..Host::default()
    }
}

/// Returns a Service with port p80/TCP.
fn named(text: &str, cluster_ip: &str) -> Service {
    service(text, &[cluster_ip]).ports(vec![port("p80", 80)])
}

/// Returns the endpoints of a Service, on port p80 -> 80.
fn endpoints(service: &str, addresses: &[&str]) -> EndpointSlice {
    let service = name(service);
    let of = |address: &&str| match address.strip_prefix("here:") {
        Some(address) => local(address),
        None => remote(address),
    };
    let all = addresses.iter().map(of).collect();
    let text = format!("{}/{}-1", service.namespace, service.name);
    slice(&text, &service.name, all).ports(vec![target("p80", 80)])
}

fn desired(services: Vec<Service>, slices: Vec<EndpointSlice>) -> Vec<Arc<DesiredPort>> {
    let mut model = Model::new(HERE);
    model.replace_services(services);
    model.replace_slices(slices);
    let mut ports = model.take_changes().changed;
    ports.sort_by(|one, other| one.name.cmp(&other.name));
    ports
}

fn settings(family: IpFamily, host: &Host) -> PortSettings {
    PortSettings::new(family, host, ABLE, true)
}

/// Returns the script for tables in which nothing is written yet.
fn first_script(ports: &[Arc<DesiredPort>], family: IpFamily, host: &Host) -> String {
    let mut script = Script::default();
    plan::base(&State::default(), &BaseRules::new(family, host, ABLE), &mut script);
    let settings = settings(family, host);
    let of =
        |port: &Arc<DesiredPort>| PortDifference::between(&PortRules::default(), port_rules(port, &settings));
    let differences: Vec<_> = ports.iter().filter(|port| port.name.family == family).map(of).collect();
    plan::ports(&differences, usize::MAX, &mut script);
    script.text
}

/// Returns Services of several kinds, with their endpoints.
fn several() -> (Vec<Service>, Vec<EndpointSlice>) {
    let restricted = Service {
        source_ranges: vec!["203.0.113.0/25".parse().unwrap(), "192.168.0.0/24".parse().unwrap()],
        health_check_node_port: Some(30000),
        ..named("ns2/svc2", "172.30.0.42").load_balancer_ip("1.2.3.4").external_ip("192.168.99.22")
    };
    let local = restricted.policies(TrafficPolicy::Cluster, TrafficPolicy::Local);
    let local = Service { ports: vec![local.ports[0].clone().node_port(3001)], ..local };
    let sticky = Service {
        affinity_seconds: Some(10800),
        ..named("ns3/svc3", "172.30.0.43")
            .ports(vec![port("p80", 80).protocol(Protocol::Udp).node_port(3003)])
    };
    let services = vec![
        named("ns1/svc1", "172.30.0.41"),
        local,
        sticky,
        named("ns4/svc4", "172.30.0.44").external_ip("192.168.99.33").node_port(3004),
        named("ns5/svc5", "172.30.0.45").policies(TrafficPolicy::Local, TrafficPolicy::Cluster),
        named("ns6/svc6", "fd00:30::46").node_port(3006),
    ];
    let mut of_udp = endpoints("ns3/svc3", &["10.180.0.3", "10.180.0.4"]);
    of_udp.ports[0].protocol = Protocol::Udp;
    let slices = vec![
        endpoints("ns1/svc1", &["10.180.0.1"]),
        endpoints("ns2/svc2", &["here:10.180.0.2", "10.180.2.1"]),
        of_udp,
        endpoints("ns5/svc5", &["10.180.0.5"]),
        endpoints("ns6/svc6", &["here:fd00:10::6"]),
    ];
    (services, slices)
}
