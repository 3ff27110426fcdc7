//! Conversion of v1 Services.

use std::net::IpAddr;

use ipnet::IpNet;

use super::{
    ANNOTATION_ALGORITHM, ANNOTATION_FORWARDING, InvalidField, InvalidFields, is_ignored, name, shortened,
};
use crate::{
    config::Keyword,
    kubernetes::schema::core,
    model::objects::{IpFamily, Protocol, Service, ServicePort, TrafficPolicy},
};

/// The API's default of `timeoutSeconds`: three hours.
const DEFAULT_AFFINITY_SECONDS: u32 = 10_800;
/// The longest `timeoutSeconds` that the API allows: one day.
const MAX_AFFINITY_SECONDS: u32 = 86_400;

/// Returns the Service, and its invalid fields. The Service is None if this proxy does not serve
/// it: it is headless, of type ExternalName, of another proxy, or without an address.
pub fn service(service: &core::Service) -> (Option<Service>, Vec<InvalidField>) {
    let name = name(&service.metadata);
    let Some(spec) = &service.spec else { return (None, Vec::new()) };
    let cluster_ip = spec.cluster_ips.first().unwrap_or(&spec.cluster_ip);
    let headless = matches!(cluster_ip.as_str(), "" | "None");
    if headless || is_ignored(&service.metadata) || spec.service_type == "ExternalName" {
        return (None, Vec::new());
    }

    let mut invalid = InvalidFields::new(format!("Service {name}"));
    let cluster_ips = cluster_ips(spec, &mut invalid);
    if cluster_ips.is_empty() {
        return (None, invalid.found);
    }
    let mut external_ips = Vec::new();
    for (index, text) in spec.external_ips.iter().enumerate() {
        external_ips.extend(invalid.address(|| format!("spec.externalIPs[{index}]"), text));
    }
    let (mut load_balancer_ips, proxied_load_balancer_ips) = load_balancer_ips(service, &mut invalid);
    let source_ranges = source_ranges(spec, &mut invalid);
    if source_ranges.is_none() && !load_balancer_ips.is_empty() {
        load_balancer_ips.clear();
        invalid.add(
            "spec.loadBalancerSourceRanges",
            "has no valid range: the load-balancer addresses are not served rather than open to everyone",
        );
    }
    let external_policy = policy(&mut invalid, "spec.externalTrafficPolicy", &spec.external_traffic_policy);
    let health_check_node_port = Some(spec.health_check_node_port).filter(|port| {
        *port != 0 && spec.service_type == "LoadBalancer" && external_policy == TrafficPolicy::Local
    });
    let health_check_node_port =
        health_check_node_port.and_then(|port| invalid.port(|| "spec.healthCheckNodePort".into(), port));

    let service = Service {
        created: service.metadata.creation_timestamp.seconds,
        ports: ports(spec, &mut invalid),
        cluster_ips,
        external_ips,
        load_balancer_ips,
        proxied_load_balancer_ips,
        internal_policy: policy(
            &mut invalid,
            "spec.internalTrafficPolicy",
            spec.internal_traffic_policy.as_deref().unwrap_or_default(),
        ),
        external_policy,
        affinity_seconds: affinity(spec, &mut invalid),
        source_ranges: source_ranges.unwrap_or_default(),
        health_check_node_port,
        algorithm: annotation(service, ANNOTATION_ALGORITHM, &mut invalid),
        forwarding: annotation(service, ANNOTATION_FORWARDING, &mut invalid),
        name,
    };
    (Some(service), invalid.found)
}

/// Returns a cluster IP that clients can dial. For external addresses the model decides which of
/// them clients can dial (`model/addresses.rs`).
fn cluster_ip(invalid: &mut InvalidFields, field: impl Fn() -> String, text: &str) -> Option<IpAddr> {
    let address = invalid.address(&field, text)?;
    if address.is_unspecified() || address.is_multicast() {
        invalid.add(field(), format_args!("found {text:?}, must be the address of one destination"));
        return None;
    }
    Some(address)
}

fn cluster_ips(spec: &core::ServiceSpec, invalid: &mut InvalidFields) -> Vec<IpAddr> {
    let listed: Vec<(String, &str)> = match spec.cluster_ips.as_slice() {
        [] => vec![("spec.clusterIP".into(), spec.cluster_ip.as_str())],
        several => {
            let numbered = several.iter().enumerate();
            numbered.map(|(index, text)| (format!("spec.clusterIPs[{index}]"), text.as_str())).collect()
        }
    };
    let mut addresses: Vec<IpAddr> = Vec::with_capacity(listed.len());
    for (field, text) in listed {
        let Some(address) = cluster_ip(invalid, || field.clone(), text) else { continue };
        let family = IpFamily::of(address);
        if addresses.iter().any(|other| IpFamily::of(*other) == family) {
            invalid.add(field, format_args!("found {text:?}, must be at most one address of each family"));
        } else {
            addresses.push(address);
        }
    }
    addresses
}

/// Returns the addresses with ipMode VIP, and those with ipMode Proxy.
fn load_balancer_ips(service: &core::Service, invalid: &mut InvalidFields) -> (Vec<IpAddr>, Vec<IpAddr>) {
    let (mut virtual_ips, mut proxied) = (Vec::new(), Vec::new());
    for (index, ingress) in service.status.load_balancer.ingress.iter().enumerate() {
        let path = format!("status.loadBalancer.ingress[{index}]");
        let addresses = match ingress.ip_mode.as_deref() {
            None | Some("VIP") => &mut virtual_ips,
            Some("Proxy") => &mut proxied,
            Some(other) => {
                invalid.add(format!("{path}.ipMode"), format_args!("found {other:?}, must be VIP or Proxy"));
                continue;
            }
        };
        if !ingress.ip.is_empty() {
            addresses.extend(invalid.address(|| format!("{path}.ip"), &ingress.ip));
        }
    }
    (virtual_ips, proxied)
}

/// Returns the valid source ranges, or None if there are ranges but none of them is valid.
fn source_ranges(spec: &core::ServiceSpec, invalid: &mut InvalidFields) -> Option<Vec<IpNet>> {
    let listed = &spec.load_balancer_source_ranges;
    let mut ranges = Vec::with_capacity(listed.len());
    for (index, text) in listed.iter().enumerate() {
        ranges.extend(invalid.range(|| format!("spec.loadBalancerSourceRanges[{index}]"), text));
    }
    (listed.is_empty() || !ranges.is_empty()).then_some(ranges)
}

fn ports(spec: &core::ServiceSpec, invalid: &mut InvalidFields) -> Vec<ServicePort> {
    let mut ports: Vec<ServicePort> = Vec::with_capacity(spec.ports.len());
    for (index, port) in spec.ports.iter().enumerate() {
        let path = format!("spec.ports[{index}]");
        let number = invalid.port(|| format!("{path}.port"), port.port);
        let protocol = invalid.protocol(|| format!("{path}.protocol"), &port.protocol);
        let name = port.name.as_str();
        let (Some(number), Some(protocol)) = (number, protocol) else { continue };
        if ports.iter().any(|other| *other.name == *name && other.protocol == protocol) {
            invalid.add(
                format!("{path}.name"),
                format_args!("found {name:?} a second time, must be unique within the Service"),
            );
            continue;
        }
        if ports.iter().any(|other| other.port == number && other.protocol == protocol) {
            invalid.add(
                format!("{path}.port"),
                format_args!("found {number} a second time, must be unique within the Service and protocol"),
            );
            continue;
        }
        let node_port = Some(port.node_port).filter(|number| *number != 0);
        let node_port = node_port.and_then(|number| invalid.port(|| format!("{path}.nodePort"), number));
        let node_port = node_port.filter(|number| {
            let unique = unique_node_port(&ports, *number, protocol);
            if !unique {
                invalid.add(
                    format!("{path}.nodePort"),
                    format_args!("found {number} a second time, must be unique within the protocol"),
                );
            }
            unique
        });
        ports.push(ServicePort { name: name.into(), protocol, port: number, node_port });
    }
    ports
}

fn unique_node_port(ports: &[ServicePort], number: u16, protocol: Protocol) -> bool {
    !ports.iter().any(|other| other.node_port == Some(number) && other.protocol == protocol)
}

fn policy(invalid: &mut InvalidFields, field: &str, found: &str) -> TrafficPolicy {
    match found {
        "" | "Cluster" => TrafficPolicy::Cluster,
        "Local" => TrafficPolicy::Local,
        other => {
            invalid.add(field, format_args!("found {other:?}, must be Cluster or Local; Cluster is assumed"));
            TrafficPolicy::Cluster
        }
    }
}

/// Returns the value of an annotation that overrides a setting of the node for this Service.
fn annotation<T: Keyword>(service: &core::Service, name: &str, invalid: &mut InvalidFields) -> Option<T> {
    let word = service.metadata.annotations.get(name)?;
    let meaning = T::of(word);
    if meaning.is_none() {
        invalid.add(
            format!("metadata.annotations[{name}]"),
            format_args!("found {:?}, must be {}; the node's is used", shortened(word), T::words()),
        );
    }
    meaning
}

fn affinity(spec: &core::ServiceSpec, invalid: &mut InvalidFields) -> Option<u32> {
    match spec.session_affinity.as_str() {
        "" | "None" => return None,
        "ClientIP" => {}
        other => {
            invalid.add(
                "spec.sessionAffinity",
                format_args!("found {other:?}, must be ClientIP or None; None is assumed"),
            );
            return None;
        }
    }
    let client_ip = spec.session_affinity_config.as_ref().and_then(|config| config.client_ip.as_ref());
    let Some(seconds) = client_ip.and_then(|client_ip| client_ip.timeout_seconds) else {
        return Some(DEFAULT_AFFINITY_SECONDS);
    };
    let valid = u32::try_from(seconds).ok().filter(|seconds| (1..=MAX_AFFINITY_SECONDS).contains(seconds));
    if valid.is_none() {
        invalid.add(
            "spec.sessionAffinityConfig.clientIP.timeoutSeconds",
            format_args!(
                "found {seconds}, must be 1 to {MAX_AFFINITY_SECONDS}; {DEFAULT_AFFINITY_SECONDS} is assumed"
            ),
        );
    }
    Some(valid.unwrap_or(DEFAULT_AFFINITY_SECONDS))
}
