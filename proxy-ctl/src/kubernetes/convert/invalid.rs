//! Fields of objects that cannot be served as they are, and how many there were.

use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

/// A field of an object that cannot be served as it is. The rest of the object is served.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct InvalidField {
    /// The kind and name of the object, such as `Service ns/name`.
    pub object: String,
    /// The path of the field, such as `spec.ports[1].nodePort`.
    pub field: String,
    /// What was found, and what would be right.
    pub problem: String,
}

impl InvalidField {
    /// Returns the plural of the object's kind, which RBAC rules and metrics use.
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

/// A counter of fields that cannot be served as they are. Clones count together.
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
    /// Counts `problems` invalid fields. `resource` is the plural of the kind.
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
