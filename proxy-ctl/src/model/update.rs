//! The messages by which a source reports to the model.

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
