//! Where Services, EndpointSlices and the Node come from.
//!
//! A source sends [`Update`]s over one bounded channel, in the order in which it learned them. What it lists is
//! sent as one `Replace…`, so that the model can tell what vanished while it was not looking. An object
//! that stops being served (label, type) is sent as a deletion.

pub mod convert;
pub mod kubernetes;
pub mod manifests;

pub use crate::model::Update;

/// Something odd about one object; the rest of it is served.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Oddity {
    /// `Service ns/name`, `EndpointSlice ns/name`, …
    pub object: String,
    /// Path of the field, such as `spec.ports[1].nodePort`.
    pub field: String,
    /// What was found and what would be right.
    pub problem: String,
}
