//! What a source tells the model.

use std::sync::Arc;

use super::objects::{EndpointSlice, Node, ObjectName, Service, ServiceCidr};

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
    /// Every ServiceCIDR there is. Nobody waits for it: older API servers have none.
    ReplaceServiceCidrs(Vec<ServiceCidr>),
    ApplyServiceCidr(ServiceCidr),
    DeleteServiceCidr(Arc<str>),
    /// The own Node, or that there is none.
    Node(Option<Node>),
}
