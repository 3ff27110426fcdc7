//! Where Services, EndpointSlices, ServiceCIDRs and the Node come from.
//!
//! A source sends [`Update`]s over one bounded channel, in the order in which it learned them. What it lists is
//! sent as one `Replace…`, so that the model can tell what vanished while it was not looking. An object
//! that stops being served (label, type) is sent as a deletion.

pub mod convert;
pub mod kubernetes;
pub mod manifests;
pub mod schema;

use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

pub use crate::model::Update;

/// A field of an object that cannot be served as it is; the rest of the object is served.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct InvalidField {
    /// `Service ns/name`, `EndpointSlice ns/name`, …
    pub object: String,
    /// Path of the field, such as `spec.ports[1].nodePort`.
    pub field: String,
    /// What was found and what would be right.
    pub problem: String,
}

impl InvalidField {
    /// What kind of object it is about, by the plural that RBAC rules and metrics use.
    pub fn resource(&self) -> &'static str {
        let kind = self.object.split(' ').next().unwrap_or_default();
        match kind {
            "Service" => "services",
            "EndpointSlice" => "endpointslices",
            "Node" => "nodes",
            _ => "manifests",
        }
    }
}

/// Counts fields of objects that cannot be served as they are; clones count together.
#[derive(Clone, Debug)]
pub struct InvalidObjects(Family<[(&'static str, &'static str); 1], Counter>);

impl Default for InvalidObjects {
    fn default() -> Self {
        let counts = Family::<[(&'static str, &'static str); 1], Counter>::default();
        for resource in ["services", "endpointslices", "nodes"] {
            drop(counts.get_or_create(&[("resource", resource)]));
        }
        Self(counts)
    }
}

impl InvalidObjects {
    /// `resource`: by its plural.
    pub fn found(&self, resource: &'static str, problems: usize) {
        let problems = u64::try_from(problems).unwrap_or(u64::MAX);
        self.0.get_or_create(&[("resource", resource)]).inc_by(problems);
    }

    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "invalid_objects",
            "Fields of objects that cannot be served as they are",
            self.0.clone(),
        );
    }
}
