//! Service ports and a host for the tests of this mode.

use std::sync::Arc;

use crate::model::{
    Model,
    desired::DesiredPort,
    node::Host,
    objects::{EndpointSlice, Service, TrafficPolicy},
    test_support::{port, remote, service, slice, target},
};

/// Returns the service port with this `external_policy`. Its endpoints are on another node, each
/// given as `address:port`.
pub(super) fn web(endpoints: &[&str], external_policy: TrafficPolicy) -> Arc<DesiredPort> {
    changed_web(endpoints, |service| service.external_policy = external_policy)
}

pub(super) fn changed_web(endpoints: &[&str], change: impl FnOnce(&mut Service)) -> Arc<DesiredPort> {
    let mut web = service("default/web", &["10.96.0.1"])
        .ports(vec![port("", 80).node_port(30080)])
        .external_ip("198.51.100.1")
        .load_balancer_ip("203.0.113.1");
    change(&mut web);
    desired(web, endpoints)
}

/// Returns the first port of the Service.
pub(super) fn desired(service: Service, endpoints: &[&str]) -> Arc<DesiredPort> {
    let mut model = Model::new("here");
    let protocol = service.ports[0].protocol;
    for (index, endpoint) in endpoints.iter().enumerate() {
        let (address, number) = endpoint.rsplit_once(':').unwrap();
        let mut target = target(&service.ports[0].name, number.parse().unwrap());
        target.protocol = protocol;
        let name = format!("{}-{index}", service.name);
        let slice: EndpointSlice =
            slice(&name, &service.name.name, vec![remote(address)]).ports(vec![target]);
        model.apply_slice(slice);
    }
    model.apply_service(service);
    Arc::clone(&model.take_changes().changed[0])
}

pub(super) fn host() -> Host {
    Host {
        node_port_addresses: ["127.0.0.1", "192.0.2.1"].map(|address| address.parse().unwrap()).into(),
        node_ports_everywhere: true,
        local_traffic: crate::model::node::LocalTraffic::FromCidrs(vec!["10.244.0.0/16".parse().unwrap()]),
        ..Host::default()
    }
}
