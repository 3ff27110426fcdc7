//! The types that objects are parsed into, and the updates that carry them.

use std::sync::Arc;

use crate::model::{
    NameInterner, Update,
    objects::{EndpointSlice, Node, ObjectName, Service, ServiceCidr},
};

/// A parsed object of a kind that is watched.
pub(crate) trait ParsedObject: Clone + PartialEq + Send + Sync + 'static {
    /// True if there is at most one object of this kind. An object that equals the last one is then
    /// not sent again: the heartbeats of a Node change nothing.
    const SINGLE: bool = false;

    /// The update that is sent if RBAC does not allow the first list. None: the receiver waits
    /// until RBAC allows it.
    const HIDDEN: Option<Update> = None;
    const REPLACE: fn(Vec<Self>) -> Update;
    const APPLY: fn(Self) -> Update;
    const DELETE: fn(ObjectName) -> Update;

    /// Returns the name that the deletion of this object carries.
    fn name(&self) -> ObjectName;

    /// Shares equal strings with other objects, for kinds that have many objects.
    fn intern(&mut self, _names: &mut NameInterner) {}
}

impl ParsedObject for Service {
    const REPLACE: fn(Vec<Self>) -> Update = Update::ReplaceServices;
    const APPLY: fn(Self) -> Update = Update::ApplyService;
    const DELETE: fn(ObjectName) -> Update = Update::DeleteService;

    fn name(&self) -> ObjectName {
        self.name.clone()
    }

    fn intern(&mut self, names: &mut NameInterner) {
        names.intern_shared_of_service(self);
    }
}

impl ParsedObject for EndpointSlice {
    const REPLACE: fn(Vec<Self>) -> Update = Update::ReplaceSlices;
    const APPLY: fn(Self) -> Update = Update::ApplySlice;
    const DELETE: fn(ObjectName) -> Update = Update::DeleteSlice;

    fn name(&self) -> ObjectName {
        self.name.clone()
    }

    fn intern(&mut self, names: &mut NameInterner) {
        names.intern_shared_of_slice(self);
    }
}

impl ParsedObject for ServiceCidr {
    const REPLACE: fn(Vec<Self>) -> Update = Update::ReplaceServiceCidrs;
    const APPLY: fn(Self) -> Update = Update::ApplyServiceCidr;
    const DELETE: fn(ObjectName) -> Update = |name| Update::DeleteServiceCidr(name.name);

    fn name(&self) -> ObjectName {
        ObjectName::new("", Arc::clone(&self.name))
    }
}

/// The own Node: the field selector leaves one object or none. Without it Services are served all
/// the same.
impl ParsedObject for Node {
    const SINGLE: bool = true;
    const HIDDEN: Option<Update> = Some(Update::Node(None));
    const REPLACE: fn(Vec<Self>) -> Update = |mut all| Update::Node(all.pop());
    const APPLY: fn(Self) -> Update = |node| Update::Node(Some(node));
    const DELETE: fn(ObjectName) -> Update = |_| Update::Node(None);

    fn name(&self) -> ObjectName {
        ObjectName::new("", Arc::clone(&self.name))
    }
}
