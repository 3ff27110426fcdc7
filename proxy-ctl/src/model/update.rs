//! The updates that sources send. There are two sources: the API server (`kubernetes`), and a
//! folder of files (`manifests`).
//!
//! A source sends [`Update`]s over one bounded channel, in the order in which it learned of them. A
//! list is sent as one `Replace…`, so that the model can tell what vanished while nobody was
//! looking. An object that stops being served, because a label or its type changed, is sent as a
//! deletion.

use std::sync::Arc;

use super::objects::{EndpointSlice, Node, ObjectName, Service, ServiceCidr};

#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Update {
    /// Every Service that exists, as the answer to a list.
    ReplaceServices(Vec<Service>),
    ApplyService(Service),
    DeleteService(ObjectName),
    /// Every EndpointSlice that exists.
    ReplaceSlices(Vec<EndpointSlice>),
    ApplySlice(EndpointSlice),
    DeleteSlice(ObjectName),
    /// Every ServiceCIDR that exists. Nothing waits for it, because older API servers have no such
    /// resource.
    ReplaceServiceCidrs(Vec<ServiceCidr>),
    ApplyServiceCidr(ServiceCidr),
    DeleteServiceCidr(Arc<str>),
    /// The own Node, or `None` if it does not exist.
    Node(Option<Node>),
}
