//! What is watched, and how it is parsed.

use k8s_openapi::api::{
    core::v1::{Endpoints as KubeEndpoints, Node as KubeNode, Service as KubeService},
    discovery::v1::EndpointSlice as KubeEndpointSlice,
    networking::{v1::ServiceCIDR as KubeServiceCidr, v1beta1::ServiceCIDR as KubeServiceCidrV1Beta1},
};
use serde::de::DeserializeOwned;

use super::{kept::Kept, legacy, state::ResourceKind};
use crate::{
    model::objects::{EndpointSlice, Node, Service, ServiceCidr, ServiceSlices},
    source::{Oddity, convert},
};

/// Objects that are someone else's, or nobody's, to serve. Both labels on both kinds: which of them
/// kube-proxy looks at where has changed between its versions, and each is documented for Services.
pub(super) const SERVED: &str = "!service.kubernetes.io/service-proxy-name,!service.kubernetes.io/headless";

/// A version of a kind of object.
pub(super) trait Watched: Send + 'static {
    type Object: kube::Resource<DynamicType = ()> + DeserializeOwned + Send;
    type Parsed: Kept;
    const KIND: ResourceKind;
    /// A newer API is watched instead as soon as there is one: asked again whenever the connection was lost.
    const STOPGAP: bool = false;
    /// As errors name it.
    const NAME: &'static str;

    /// None: not served; what is wrong with it is in the list.
    fn convert(object: &Self::Object) -> (Option<Self::Parsed>, Vec<Oddity>);
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
}

/// discovery.k8s.io/v1beta1, where there is no v1.
pub(super) struct EndpointSlicesV1Beta1;

impl Watched for EndpointSlicesV1Beta1 {
    type Object = legacy::EndpointSlice;
    type Parsed = EndpointSlice;
    const KIND: ResourceKind = ResourceKind::EndpointSlices;
    const STOPGAP: bool = true;
    const NAME: &'static str = "EndpointSlice";

    fn convert(object: &legacy::EndpointSlice) -> (Option<EndpointSlice>, Vec<Oddity>) {
        convert::endpoint_slice(&object.to_v1())
    }
}

/// core/v1, where there are no slices: one object a Service.
pub(super) struct LegacyEndpoints;

impl Watched for LegacyEndpoints {
    type Object = KubeEndpoints;
    type Parsed = ServiceSlices;
    const KIND: ResourceKind = ResourceKind::Endpoints;
    const STOPGAP: bool = true;
    const NAME: &'static str = "Endpoints";

    fn convert(object: &KubeEndpoints) -> (Option<ServiceSlices>, Vec<Oddity>) {
        convert::endpoints(object)
    }
}

pub(super) struct ServiceCidrs;

impl Watched for ServiceCidrs {
    type Object = KubeServiceCidr;
    type Parsed = ServiceCidr;
    const KIND: ResourceKind = ResourceKind::ServiceCidrs;
    const NAME: &'static str = "ServiceCIDR";

    fn convert(object: &KubeServiceCidr) -> (Option<ServiceCidr>, Vec<Oddity>) {
        let ranges = object.spec.as_ref().and_then(|spec| spec.cidrs.as_deref());
        convert::service_cidr(&object.metadata, ranges.unwrap_or_default())
    }
}

/// networking.k8s.io/v1beta1, where there is no v1.
pub(super) struct ServiceCidrsV1Beta1;

impl Watched for ServiceCidrsV1Beta1 {
    type Object = KubeServiceCidrV1Beta1;
    type Parsed = ServiceCidr;
    const KIND: ResourceKind = ResourceKind::ServiceCidrs;
    const STOPGAP: bool = true;
    const NAME: &'static str = "ServiceCIDR";

    fn convert(object: &KubeServiceCidrV1Beta1) -> (Option<ServiceCidr>, Vec<Oddity>) {
        let ranges = object.spec.as_ref().and_then(|spec| spec.cidrs.as_deref());
        convert::service_cidr(&object.metadata, ranges.unwrap_or_default())
    }
}

pub(super) struct OwnNode;

impl Watched for OwnNode {
    type Object = KubeNode;
    type Parsed = Node;
    const KIND: ResourceKind = ResourceKind::Nodes;
    const NAME: &'static str = "Node";

    fn convert(object: &KubeNode) -> (Option<Node>, Vec<Oddity>) {
        let (node, oddities) = convert::node(object);
        (Some(node), oddities)
    }
}
