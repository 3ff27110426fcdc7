//! What each kind of object is parsed into, and the updates about it: the same for every version of its API.

use std::sync::Arc;

use crate::{
    model::objects::{EndpointSlice, Node, ObjectName, Service, ServiceCidr, ServiceSlices},
    source::Update,
};

/// An object that has been parsed.
pub(super) trait ParsedObject: Clone + PartialEq + Send + Sync + 'static {
    /// There is at most one: what repeats the last one is not sent again. A Node's heartbeats change nothing.
    const SINGLE: bool = false;

    /// The update that is sent where RBAC does not allow the first list; None: the receiver waits until RBAC allows it.
    fn hidden() -> Option<Update> {
        None
    }

    /// As a deletion has it.
    fn name(&self) -> ObjectName;
    fn replace(all: Vec<Self>) -> Update;
    fn apply(self) -> Update;
    fn delete(name: ObjectName) -> Update;
}

impl ParsedObject for Service {
    fn name(&self) -> ObjectName {
        self.name.clone()
    }

    fn replace(all: Vec<Self>) -> Update {
        Update::ReplaceServices(all)
    }

    fn apply(self) -> Update {
        Update::ApplyService(self)
    }

    fn delete(name: ObjectName) -> Update {
        Update::DeleteService(name)
    }
}

impl ParsedObject for EndpointSlice {
    fn name(&self) -> ObjectName {
        self.name.clone()
    }

    fn replace(all: Vec<Self>) -> Update {
        Update::ReplaceSlices(all)
    }

    fn apply(self) -> Update {
        Update::ApplySlice(self)
    }

    fn delete(name: ObjectName) -> Update {
        Update::DeleteSlice(name)
    }
}

impl ParsedObject for ServiceSlices {
    fn name(&self) -> ObjectName {
        self.service.clone()
    }

    fn replace(all: Vec<Self>) -> Update {
        Update::ReplaceSlices(all.into_iter().flat_map(|of| of.slices).collect())
    }

    fn apply(self) -> Update {
        Update::ReplaceServiceSlices(self)
    }

    fn delete(name: ObjectName) -> Update {
        Update::ReplaceServiceSlices(Self { service: name, slices: Vec::new() })
    }
}

impl ParsedObject for ServiceCidr {
    fn name(&self) -> ObjectName {
        ObjectName::new("", Arc::clone(&self.name))
    }

    fn replace(all: Vec<Self>) -> Update {
        Update::ReplaceServiceCidrs(all)
    }

    fn apply(self) -> Update {
        Update::ApplyServiceCidr(self)
    }

    fn delete(name: ObjectName) -> Update {
        Update::DeleteServiceCidr(name.name)
    }
}

/// The own Node: one object or none, by field selector.
impl ParsedObject for Node {
    const SINGLE: bool = true;

    /// Services are served without it, as where there is none.
    fn hidden() -> Option<Update> {
        Some(Update::Node(None))
    }

    fn name(&self) -> ObjectName {
        ObjectName::new("", Arc::clone(&self.name))
    }

    fn replace(mut all: Vec<Self>) -> Update {
        Update::Node(all.pop())
    }

    fn apply(self) -> Update {
        Update::Node(Some(self))
    }

    fn delete(_: ObjectName) -> Update {
        Update::Node(None)
    }
}
