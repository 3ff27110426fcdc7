//! Where Services, EndpointSlices and the Node come from.
//!
//! A source sends [`Update`]s over one bounded channel, in the order in which it learned them. What it lists is
//! sent as one `Replace…`, so that the model can tell what vanished while it was not looking. An object
//! that stops being served (label, type) is sent as a deletion.

pub mod kubernetes;

use crate::model::objects::{EndpointSlice, Node, ObjectName, Service};

#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Update {
    /// Every Service there is: the answer to a list.
    ReplaceServices(Vec<Service>),
    ApplyService(Service),
    DeleteService(ObjectName),
    /// Every EndpointSlice there is.
    ReplaceSlices(Vec<EndpointSlice>),
    ApplySlice(EndpointSlice),
    DeleteSlice(ObjectName),
    /// The own Node, or that there is none.
    Node(Option<Node>),
}

/// Something odd about one object; the rest of it is served.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Oddity {
    /// `Service ns/name`, `EndpointSlice ns/name`, …
    pub object: String,
    /// Path of the field, such as `spec.ports[1].nodePort`.
    pub field: String,
    /// What was found and what would be right.
    pub problem: String,
}
