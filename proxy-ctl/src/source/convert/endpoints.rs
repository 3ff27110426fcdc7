//! core/v1 Endpoints, where an API server has no EndpointSlices.

use std::sync::Arc;

use super::{InvalidField, InvalidFields, is_foreign, name, slice, triggered};
use crate::{
    model::objects::{Endpoint, EndpointPort, EndpointSlice, IpFamily, ObjectName, ServiceSlices},
    source::schema::core,
};

/// A slice for each subset and family. None: not to be used by this proxy (headless, another proxy's).
pub fn endpoints(object: &core::Endpoints) -> (Option<ServiceSlices>, Vec<InvalidField>) {
    let service = name(&object.metadata);
    let mut invalid = InvalidFields::new(format!("Endpoints {service}"));
    if is_foreign(&object.metadata) {
        return (None, Vec::new());
    }
    let triggered = triggered(&object.metadata);
    let mut slices = Vec::new();
    for (index, subset) in object.subsets.iter().enumerate() {
        let ports = ports(subset, index, &mut invalid);
        let endpoints = addresses(subset, index, &mut invalid);
        for family in IpFamily::ALL {
            let endpoints: Vec<Endpoint> = endpoints
                .iter()
                .filter(|endpoint| IpFamily::of(endpoint.address) == family)
                .cloned()
                .collect();
            if !endpoints.is_empty() {
                slices.push(EndpointSlice {
                    name: slice_name(&service, index, family),
                    service: Arc::clone(&service.name),
                    family,
                    ports: ports.clone(),
                    endpoints,
                    triggered,
                });
            }
        }
    }
    (Some(ServiceSlices { service, slices }), invalid.found)
}

/// No object's name has a slash, so the name belongs to no other slice.
fn slice_name(service: &ObjectName, subset: usize, family: IpFamily) -> ObjectName {
    let family = family.name();
    ObjectName::new(Arc::clone(&service.namespace), format!("{}/{subset}/{family}", service.name))
}

fn ports(subset: &core::EndpointSubset, index: usize, invalid: &mut InvalidFields) -> Vec<EndpointPort> {
    let mut ports: Vec<EndpointPort> = Vec::new();
    for (port_index, port) in subset.ports.iter().enumerate() {
        let field = |name: &str| format!("subsets[{index}].ports[{port_index}]{name}");
        let number = invalid.port(|| field(".port"), port.port);
        let protocol = invalid.protocol(|| field(".protocol"), &port.protocol);
        let (Some(number), Some(protocol)) = (number, protocol) else { continue };
        let port = EndpointPort { name: port.name.as_str().into(), protocol, port: number };
        if ports.contains(&port) {
            invalid.add(field(""), "is the same port a second time");
        } else {
            ports.push(port);
        }
    }
    ports
}

/// Endpoints know neither terminating ones nor hints.
fn addresses(subset: &core::EndpointSubset, index: usize, invalid: &mut InvalidFields) -> Vec<Endpoint> {
    let mut endpoints: Vec<Endpoint> = Vec::new();
    let ready = ("addresses", true, &subset.addresses);
    let not_ready = ("notReadyAddresses", false, &subset.not_ready_addresses);
    for (list, ready, addresses) in [ready, not_ready] {
        for (number, endpoint) in addresses.iter().enumerate() {
            let field = || format!("subsets[{index}].{list}[{number}].ip");
            let Some(address) = invalid.address(field, &endpoint.ip) else { continue };
            if let Some(problem) = slice::unusable(address, IpFamily::of(address)) {
                invalid.add(field(), format_args!("found {:?}, {problem}", endpoint.ip));
                continue;
            }
            let previous = endpoints.last().and_then(|previous| previous.node.as_ref());
            let node = endpoint.node_name.as_deref().map(|node| match previous {
                Some(same) if **same == *node => Arc::clone(same),
                _ => Arc::from(node),
            });
            let serving = ready;
            endpoints.push(Endpoint { address, ready, serving, terminating: false, node, hints: None });
        }
    }
    endpoints
}
