//! Conversion of Kubernetes objects to model objects. Both sources use it.
//!
//! Objects that kube-proxy skips silently are skipped silently. An invalid field, such as an
//! address that does not parse or a port out of range, is left out with an [`InvalidField`]. The
//! rest of the object is served.

mod address;
pub mod invalid;
mod service;
mod slice;
mod weights;

use std::{fmt, num::NonZeroI64, sync::Arc};

use jiff::Timestamp;

use self::invalid::InvalidField;
use super::schema::{core, meta::ObjectMeta};
use crate::model::objects::{Node, ObjectName, Protocol, ServiceCidr};

pub use service::service;
pub use slice::endpoint_slice;

/// The label of objects that belong to another proxy, whatever its value.
const LABEL_PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
/// The label of headless objects, which no proxy serves.
const LABEL_HEADLESS: &str = "service.kubernetes.io/headless";
const LABEL_SERVICE: &str = "kubernetes.io/service-name";
const LABEL_ZONE: &str = "topology.kubernetes.io/zone";
/// The annotation with the time of the change that caused a slice, in RFC 3339. The controllers
/// that make slices write it.
const ANNOTATION_TRIGGER_TIME: &str = "endpoints.kubernetes.io/last-change-trigger-time";
/// The annotation of a Service that overrides `ebpf.algorithm`, with the same words.
const ANNOTATION_ALGORITHM: &str = "proxy-ctl.dev/algorithm";
/// The annotation of a Service that overrides `ebpf.forwarding`, with the same words.
const ANNOTATION_FORWARDING: &str = "proxy-ctl.dev/forwarding";
/// The annotation of an EndpointSlice that lists the weights of its endpoints.
const ANNOTATION_WEIGHTS: &str = "proxy-ctl.dev/weights";

/// Returns the beginning of a text, for messages: an annotation can have 256 KiB.
fn shortened(text: &str) -> String {
    text.chars().take(64).collect()
}

/// Returns the name of an object. An object without a namespace is in `default`.
pub fn name(metadata: &ObjectMeta) -> ObjectName {
    let namespace = Some(metadata.namespace.as_str()).filter(|namespace| !namespace.is_empty());
    ObjectName::new(namespace.unwrap_or("default"), metadata.name.as_str())
}

/// Returns the parts of this proxy's own Node that matter to it, and its invalid fields.
pub fn node(node: &core::Node) -> (Node, Vec<InvalidField>) {
    let name = node.metadata.name.as_str();
    let mut invalid = InvalidFields::new(format!("Node {name}"));
    let listed = || node.status.addresses.iter().enumerate();
    let mut addresses = Vec::new();
    for kind in ["InternalIP", "ExternalIP"] {
        for (index, address) in listed().filter(|(_, address)| address.address_type == kind) {
            let field = || format!("status.addresses[{index}].address");
            addresses.extend(invalid.address(field, &address.address));
        }
    }
    let mut pod_cidrs = Vec::new();
    match node.spec.pod_cidrs.as_slice() {
        [] => {
            let range = Some(node.spec.pod_cidr.as_str()).filter(|range| !range.is_empty());
            pod_cidrs.extend(range.and_then(|range| invalid.range(|| "spec.podCIDR".into(), range)));
        }
        ranges => {
            for (index, range) in ranges.iter().enumerate() {
                pod_cidrs.extend(invalid.range(|| format!("spec.podCIDRs[{index}]"), range));
            }
        }
    }
    let taints = node.spec.taints.iter();
    let zone = label(&node.metadata, LABEL_ZONE).filter(|zone| !zone.is_empty());
    let node = Node {
        name: name.into(),
        zone: zone.map(Arc::from),
        addresses,
        pod_cidrs,
        being_deleted: node.metadata.deletion_timestamp.is_some(),
        taints: taints.map(|taint| taint.key.as_str().into()).collect(),
    };
    (node, invalid.found)
}

/// Returns a ServiceCIDR without the ranges that do not parse, and its invalid fields. A
/// ServiceCIDR is always served, so the first value is never None.
pub fn service_cidr(metadata: &ObjectMeta, ranges: &[String]) -> (Option<ServiceCidr>, Vec<InvalidField>) {
    let name = metadata.name.as_str();
    let mut invalid = InvalidFields::new(format!("ServiceCIDR {name}"));
    let ranges = ranges.iter().enumerate();
    let ranges =
        ranges.filter_map(|(index, range)| invalid.range(|| format!("spec.cidrs[{index}]"), range)).collect();
    (Some(ServiceCidr { name: name.into(), ranges }), invalid.found)
}

/// Returns when the change was made that caused this object, in nanoseconds since the epoch. Only a
/// metric uses it, so a text that is no time is not reported as invalid.
fn triggered(metadata: &ObjectMeta) -> Option<NonZeroI64> {
    let text = metadata.annotations.get(ANNOTATION_TRIGGER_TIME)?;
    let time: Timestamp = text.parse().ok()?;
    i64::try_from(time.as_nanosecond()).ok().and_then(NonZeroI64::new)
}

fn label<'a>(metadata: &'a ObjectMeta, label: &str) -> Option<&'a str> {
    metadata.labels.get(label).map(String::as_str)
}

/// Returns true if the object belongs to another proxy or is headless, so that this proxy leaves it
/// alone.
fn is_ignored(metadata: &ObjectMeta) -> bool {
    label(metadata, LABEL_PROXY_NAME).is_some() || label(metadata, LABEL_HEADLESS).is_some()
}

/// Collector of the invalid fields of one object.
struct InvalidFields {
    object: String,
    found: Vec<InvalidField>,
}

impl InvalidFields {
    fn new(object: String) -> Self {
        Self { object, found: Vec::new() }
    }

    fn add(&mut self, field: impl Into<String>, problem: impl fmt::Display) {
        self.found.push(InvalidField {
            object: self.object.clone(),
            field: field.into(),
            problem: problem.to_string(),
        });
    }

    fn address(&mut self, field: impl FnOnce() -> String, text: &str) -> Option<std::net::IpAddr> {
        let address = address::parse(text);
        if address.is_none() {
            self.add(field(), format_args!("found {text:?}, must be an IPv4 or IPv6 address"));
        }
        address
    }

    fn range(&mut self, field: impl FnOnce() -> String, text: &str) -> Option<ipnet::IpNet> {
        let range = address::parse_range(text);
        if range.is_none() {
            self.add(field(), format_args!("found {text:?}, must be an address range such as 192.0.2.0/24"));
        }
        range
    }

    fn port(&mut self, field: impl FnOnce() -> String, number: i32) -> Option<u16> {
        let port = u16::try_from(number).ok().filter(|port| *port != 0);
        if port.is_none() {
            self.add(field(), format_args!("found {number}, must be 1 to 65535"));
        }
        port
    }

    fn protocol(&mut self, field: impl FnOnce() -> String, name: &str) -> Option<Protocol> {
        match name {
            "" | "TCP" => Some(Protocol::Tcp),
            "UDP" => Some(Protocol::Udp),
            "SCTP" => Some(Protocol::Sctp),
            other => {
                self.add(field(), format_args!("found {other:?}, must be TCP, UDP or SCTP"));
                None
            }
        }
    }
}

#[cfg(test)]
mod tests;
