//! What is watched, and how it becomes updates.

use k8s_openapi::api::{
    core::v1::{Node as KubeNode, Service as KubeService},
    discovery::v1::EndpointSlice as KubeEndpointSlice,
};
use serde::de::DeserializeOwned;

use super::state::ResourceKind;
use crate::{
    model::objects::{EndpointSlice, Node, ObjectName, Service},
    source::{Oddity, Update, convert},
};

/// Objects that are someone else's, or nobody's, to serve. Both labels on both kinds: which of them
/// kube-proxy looks at where has changed between its versions, and each is documented for Services.
pub(super) const SERVED: &str = "!service.kubernetes.io/service-proxy-name,!service.kubernetes.io/headless";

/// A kind of object with its way into the model.
pub(super) trait Watched: Send + 'static {
    type Object: kube::Resource<DynamicType = ()> + DeserializeOwned + Send;
    type Parsed: Clone + PartialEq + Send + Sync;
    const KIND: ResourceKind;
    /// There is at most one: what repeats the last one is not sent again. A Node's heartbeats change nothing.
    const SINGLE: bool = false;
    /// As errors name it.
    const NAME: &'static str;

    /// None: not served; what is wrong with it is in the list.
    fn convert(object: &Self::Object) -> (Option<Self::Parsed>, Vec<Oddity>);
    fn replace(all: Vec<Self::Parsed>) -> Update;
    fn apply(one: Self::Parsed) -> Update;
    fn delete(name: ObjectName) -> Update;
}

pub(super) struct Services;

impl Watched for Services {
    type Object = KubeService;
    type Parsed = Service;
    const KIND: ResourceKind = ResourceKind::Services;
    const NAME: &'static str = "Service";

    fn convert(object: &KubeService) -> (Option<Service>, Vec<Oddity>) {
        convert::service(object)
    }

    fn replace(all: Vec<Service>) -> Update {
        Update::ReplaceServices(all)
    }

    fn apply(one: Service) -> Update {
        Update::ApplyService(one)
    }

    fn delete(name: ObjectName) -> Update {
        Update::DeleteService(name)
    }
}

pub(super) struct EndpointSlices;

impl Watched for EndpointSlices {
    type Object = KubeEndpointSlice;
    type Parsed = EndpointSlice;
    const KIND: ResourceKind = ResourceKind::EndpointSlices;
    const NAME: &'static str = "EndpointSlice";

    fn convert(object: &KubeEndpointSlice) -> (Option<EndpointSlice>, Vec<Oddity>) {
        convert::endpoint_slice(object)
    }

    fn replace(all: Vec<EndpointSlice>) -> Update {
        Update::ReplaceSlices(all)
    }

    fn apply(one: EndpointSlice) -> Update {
        Update::ApplySlice(one)
    }

    fn delete(name: ObjectName) -> Update {
        Update::DeleteSlice(name)
    }
}

/// The own Node: one object or none, by field selector.
pub(super) struct OwnNode;

impl Watched for OwnNode {
    type Object = KubeNode;
    type Parsed = Node;
    const KIND: ResourceKind = ResourceKind::Nodes;
    const SINGLE: bool = true;
    const NAME: &'static str = "Node";

    fn convert(object: &KubeNode) -> (Option<Node>, Vec<Oddity>) {
        let (node, oddities) = convert::node(object);
        (Some(node), oddities)
    }

    fn replace(mut all: Vec<Node>) -> Update {
        Update::Node(all.pop())
    }

    fn apply(one: Node) -> Update {
        Update::Node(Some(one))
    }

    fn delete(_: ObjectName) -> Update {
        Update::Node(None)
    }
}
