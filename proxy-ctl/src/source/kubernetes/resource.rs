//! What is watched, and how it is parsed.

use super::{kept::Kept, kind::ResourceKind, wire::Kind};
use crate::{
    model::objects::{EndpointSlice, Node, Service, ServiceCidr, ServiceSlices},
    source::{
        InvalidField, convert,
        schema::{Object, core, discovery, discovery_v1beta1, networking},
    },
};

/// Objects that are someone else's, or nobody's, to serve. Both labels on both kinds: which of them
/// kube-proxy looks at where has changed between its versions, and each is documented for Services.
pub(super) const SERVED: &str = "!service.kubernetes.io/service-proxy-name,!service.kubernetes.io/headless";

/// A version of a kind of object.
pub(super) trait Watched: Send + 'static {
    type Object: Object + Send;
    type Parsed: Kept;
    const RESOURCE: ResourceKind;
    const KIND: Kind;
    /// A newer API is watched instead as soon as there is one: asked again whenever the connection was lost.
    const STOPGAP: bool = false;

    /// None: not served; what is wrong with it is in the list.
    fn convert(object: &Self::Object) -> (Option<Self::Parsed>, Vec<InvalidField>);

    /// Where all of them are.
    fn path() -> String {
        let (version, plural) = (Self::KIND.api_version, Self::RESOURCE.plural());
        let root = if version.contains('/') { "/apis" } else { "/api" };
        format!("{root}/{version}/{plural}")
    }
}

pub(super) struct Services;

impl Watched for Services {
    type Object = core::Service;
    type Parsed = Service;
    const RESOURCE: ResourceKind = ResourceKind::Services;
    const KIND: Kind = Kind { api_version: "v1", kind: "Service" };

    fn convert(object: &Self::Object) -> (Option<Self::Parsed>, Vec<InvalidField>) {
        convert::service(object)
    }
}

pub(super) struct EndpointSlices;

impl Watched for EndpointSlices {
    type Object = discovery::EndpointSlice;
    type Parsed = EndpointSlice;
    const RESOURCE: ResourceKind = ResourceKind::EndpointSlices;
    const KIND: Kind = Kind { api_version: "discovery.k8s.io/v1", kind: "EndpointSlice" };

    fn convert(object: &Self::Object) -> (Option<Self::Parsed>, Vec<InvalidField>) {
        convert::endpoint_slice(object)
    }
}

/// discovery.k8s.io/v1beta1, where there is no v1.
pub(super) struct EndpointSlicesV1Beta1;

impl Watched for EndpointSlicesV1Beta1 {
    type Object = discovery_v1beta1::EndpointSlice;
    type Parsed = EndpointSlice;
    const RESOURCE: ResourceKind = ResourceKind::EndpointSlices;
    const KIND: Kind = Kind { api_version: "discovery.k8s.io/v1beta1", kind: "EndpointSlice" };
    const STOPGAP: bool = true;
    fn convert(object: &Self::Object) -> (Option<Self::Parsed>, Vec<InvalidField>) {
        convert::endpoint_slice(&object.to_v1())
    }
}

/// core/v1, where there are no slices: one object a Service.
pub(super) struct LegacyEndpoints;

impl Watched for LegacyEndpoints {
    type Object = core::Endpoints;
    type Parsed = ServiceSlices;
    const RESOURCE: ResourceKind = ResourceKind::Endpoints;
    const KIND: Kind = Kind { api_version: "v1", kind: "Endpoints" };
    const STOPGAP: bool = true;
    fn convert(object: &Self::Object) -> (Option<Self::Parsed>, Vec<InvalidField>) {
        convert::endpoints(object)
    }
}

pub(super) struct ServiceCidrs;

impl Watched for ServiceCidrs {
    type Object = networking::ServiceCidr;
    type Parsed = ServiceCidr;
    const RESOURCE: ResourceKind = ResourceKind::ServiceCidrs;
    const KIND: Kind = Kind { api_version: "networking.k8s.io/v1", kind: "ServiceCIDR" };

    fn convert(object: &Self::Object) -> (Option<Self::Parsed>, Vec<InvalidField>) {
        convert::service_cidr(&object.metadata, &object.spec.cidrs)
    }
}

/// networking.k8s.io/v1beta1, where there is no v1.
pub(super) struct ServiceCidrsV1Beta1;

impl Watched for ServiceCidrsV1Beta1 {
    type Object = networking::ServiceCidr;
    type Parsed = ServiceCidr;
    const RESOURCE: ResourceKind = ResourceKind::ServiceCidrs;
    const KIND: Kind = Kind { api_version: "networking.k8s.io/v1beta1", kind: "ServiceCIDR" };
    const STOPGAP: bool = true;
    fn convert(object: &Self::Object) -> (Option<Self::Parsed>, Vec<InvalidField>) {
        convert::service_cidr(&object.metadata, &object.spec.cidrs)
    }
}

pub(super) struct OwnNode;

impl Watched for OwnNode {
    type Object = core::Node;
    type Parsed = Node;
    const RESOURCE: ResourceKind = ResourceKind::Nodes;
    const KIND: Kind = Kind { api_version: "v1", kind: "Node" };

    fn convert(object: &Self::Object) -> (Option<Self::Parsed>, Vec<InvalidField>) {
        let (node, invalid) = convert::node(object);
        (Some(node), invalid)
    }
}
