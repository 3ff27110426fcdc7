//! Tests of what is rendered, and of the tables in the kernel.

mod kernel;
mod rendered;

use std::sync::Arc;

use crate::model::{
    Model,
    desired::DesiredPort,
    node::{Host, LocalTraffic},
    objects::{Endpoint, Service},
    test_support::{HERE, ip, slice},
};

/// A node that knows its pods, with one address of each family for node ports.
fn host() -> Host {
    Host {
        node_port_addresses: [ip("192.168.0.2"), ip("2001:db8::2"), ip("127.0.0.1")].into(),
        masquerade_addresses: vec![ip("192.168.0.2"), ip("2001:db8::2")],
        local_traffic: LocalTraffic::FromCidrs(vec![
            "10.0.0.0/8".parse().unwrap(),
            "fd00:10::/64".parse().unwrap(),
        ]),
        masquerade_bit: 14,
        service_cidrs: Some(["172.30.0.0/24", "fd00:10:96::/112"].map(|cidr| cidr.parse().unwrap()).into()),
        ..Host::default()
    }
}

/// Returns the service ports of one Service, in the families of its ClusterIPs.
fn ports(service: Service, endpoints: Vec<Endpoint>) -> Vec<Arc<DesiredPort>> {
    let mut model = Model::new(HERE);
    let (name, namespace) = (service.name.name.to_string(), service.name.namespace.to_string());
    model.apply_service(service);
    for v6 in [false, true] {
        let of_family: Vec<_> =
            endpoints.iter().filter(|endpoint| endpoint.address.is_ipv6() == v6).cloned().collect();
        if !of_family.is_empty() {
            model.apply_slice(slice(&format!("{namespace}/{name}-{v6}"), &name, of_family));
        }
    }
    model.take_changes().changed
}
