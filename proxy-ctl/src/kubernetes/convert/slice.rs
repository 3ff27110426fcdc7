//! Conversion of discovery.k8s.io/v1 EndpointSlices.

use std::{net::IpAddr, sync::Arc};

use super::{
    InvalidField, InvalidFields, LABEL_SERVICE, is_ignored, label, name, triggered, weights::Weights,
};
use crate::{
    kubernetes::schema::discovery,
    model::objects::{Endpoint, EndpointPort, EndpointSlice, Hints, IpFamily},
};

/// Returns the slice, and its invalid fields. The slice is None if this proxy does not use it: it
/// is headless, belongs to another proxy or to no Service, or holds host names.
pub fn endpoint_slice(slice: &discovery::EndpointSlice) -> (Option<EndpointSlice>, Vec<InvalidField>) {
    let name = name(&slice.metadata);
    let mut invalid = InvalidFields::new(format!("EndpointSlice {name}"));
    if is_ignored(&slice.metadata) {
        return (None, Vec::new());
    }
    let family = match slice.address_type.as_str() {
        "IPv4" => IpFamily::Ipv4,
        "IPv6" => IpFamily::Ipv6,
        "FQDN" => return (None, Vec::new()),
        other => {
            invalid.add("addressType", format_args!("found {other:?}, must be IPv4, IPv6 or FQDN"));
            return (None, invalid.found);
        }
    };
    let Some(service) = label(&slice.metadata, LABEL_SERVICE).filter(|service| !service.is_empty()) else {
        invalid.add(
            format!("metadata.labels[{LABEL_SERVICE}]"),
            "is missing, must be the name of the slice's Service",
        );
        return (None, invalid.found);
    };
    let slice = EndpointSlice {
        service: service.into(),
        family,
        ports: ports(slice, &mut invalid),
        endpoints: endpoints(slice, family, &mut invalid),
        triggered: triggered(&slice.metadata),
        name,
    };
    (Some(slice), invalid.found)
}

fn ports(slice: &discovery::EndpointSlice, invalid: &mut InvalidFields) -> Vec<EndpointPort> {
    let mut ports: Vec<EndpointPort> = Vec::with_capacity(slice.ports.len());
    for (index, port) in slice.ports.iter().enumerate() {
        let field = || format!("ports[{index}].port");
        let Some(number) = port.port else {
            invalid.add(field(), "is missing, must be 1 to 65535");
            continue;
        };
        let number = invalid.port(field, number);
        let protocol = invalid
            .protocol(|| format!("ports[{index}].protocol"), port.protocol.as_deref().unwrap_or_default());
        let name = port.name.as_deref().unwrap_or_default();
        let (Some(port_number), Some(protocol)) = (number, protocol) else { continue };
        let port = EndpointPort { name: name.into(), protocol, port: port_number };
        if ports.contains(&port) {
            invalid.add(format!("ports[{index}]"), "is the same port a second time");
        } else {
            ports.push(port);
        }
    }
    ports
}

fn endpoints(
    slice: &discovery::EndpointSlice,
    family: IpFamily,
    invalid: &mut InvalidFields,
) -> Vec<Endpoint> {
    let weights = Weights::of(slice, invalid);
    let mut endpoints: Vec<Endpoint> = Vec::with_capacity(slice.endpoints.len());
    for (index, endpoint) in slice.endpoints.iter().enumerate() {
        // The API gives a meaning to the first address only.
        let field = || format!("endpoints[{index}].addresses[0]");
        let Some(text) = endpoint.addresses.first() else {
            invalid.add(field(), "is missing, must be an address");
            continue;
        };
        let Some(address) = invalid.address(field, text) else { continue };
        if let Some(problem) = unusable(address, family) {
            invalid.add(field(), format_args!("found {text:?}, {problem}"));
            continue;
        }
        let conditions = &endpoint.conditions;
        let previous = endpoints.last();
        let node = endpoint.node_name.as_deref();
        let hints = endpoint.hints.as_ref().map(hints).filter(|hints| *hints != Hints::default());
        endpoints.push(Endpoint {
            address,
            ready: conditions.ready.unwrap_or(true),
            serving: conditions.serving.unwrap_or(true),
            terminating: conditions.terminating.unwrap_or(false),
            weight: weights.of_address(address),
            node: node.map(|node| match previous.and_then(|previous| previous.node.as_ref()) {
                Some(same) if **same == *node => Arc::clone(same),
                _ => Arc::from(node),
            }),
            hints: hints.map(|hints| match previous.and_then(|previous| previous.hints.as_ref()) {
                Some(same) if **same == hints => Arc::clone(same),
                _ => Arc::new(hints),
            }),
        });
    }
    endpoints
}

/// Returns why an endpoint in a slice of this family cannot have this address, or None if it can.
fn unusable(address: IpAddr, family: IpFamily) -> Option<&'static str> {
    if IpFamily::of(address) != family {
        Some(match family {
            IpFamily::Ipv4 => "must be an IPv4 address: addressType is IPv4",
            IpFamily::Ipv6 => "must be an IPv6 address: addressType is IPv6",
        })
    } else if address.is_unspecified() || address.is_multicast() {
        Some("must be the address of one host")
    } else {
        None
    }
}

fn hints(hints: &discovery::EndpointHints) -> Hints {
    Hints {
        zones: hints.for_zones.iter().map(|zone| zone.name.as_str().into()).collect(),
        nodes: hints.for_nodes.iter().map(|node| node.name.as_str().into()).collect(),
    }
}
