//! The kinds and API versions that are watched, and how their objects are parsed.

use super::{kind::ResourceKind, parsed::ParsedObject, wire::ApiType};
use crate::{
    model::objects::{EndpointSlice, Node, Service, ServiceCidr, ServiceSlices},
    source::{
        InvalidField, convert,
        schema::{ApiObject, core, discovery, discovery_v1beta1, networking},
    },
};

/// Leaves out objects that another proxy serves, or none. Both labels on both kinds: which of them
/// kube-proxy looks at where has changed between its versions, and each is documented for Services.
pub(super) const SERVED_SELECTOR: &str =
    "!service.kubernetes.io/service-proxy-name,!service.kubernetes.io/headless";

/// How a version of a kind stands to the others that API servers have or had.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Version {
    /// There are no others.
    Only,
    Newest,
    /// The newest is watched instead as soon as there is one: asked again whenever the connection was lost.
    Stopgap,
}

impl Version {
    pub(super) fn is_stopgap(self) -> bool {
        self == Self::Stopgap
    }

    pub(super) fn has_others(self) -> bool {
        self != Self::Only
    }
}

/// None: the object is not served. The second value has its invalid fields.
type Conversion<W> = fn(&<W as Watched>::Object) -> (Option<<W as Watched>::Parsed>, Vec<InvalidField>);

/// A version of a kind of object.
pub(super) trait Watched: Sized + Send + 'static {
    type Object: ApiObject + Send;
    type Parsed: ParsedObject;
    const RESOURCE: ResourceKind;
    const KIND: ApiType;
    const VERSION: Version = Version::Only;
    const CONVERT: Conversion<Self>;

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
    const KIND: ApiType = ApiType { api_version: "v1", kind: "Service" };
    const CONVERT: Conversion<Self> = convert::service;
}

pub(super) struct EndpointSlices;

impl Watched for EndpointSlices {
    type Object = discovery::EndpointSlice;
    type Parsed = EndpointSlice;
    const RESOURCE: ResourceKind = ResourceKind::EndpointSlices;
    const KIND: ApiType = ApiType { api_version: "discovery.k8s.io/v1", kind: "EndpointSlice" };
    const VERSION: Version = Version::Newest;
    const CONVERT: Conversion<Self> = convert::endpoint_slice;
}

/// discovery.k8s.io/v1beta1, where there is no v1.
pub(super) struct EndpointSlicesV1Beta1;

impl Watched for EndpointSlicesV1Beta1 {
    type Object = discovery_v1beta1::EndpointSlice;
    type Parsed = EndpointSlice;
    const RESOURCE: ResourceKind = ResourceKind::EndpointSlices;
    const KIND: ApiType = ApiType { api_version: "discovery.k8s.io/v1beta1", kind: "EndpointSlice" };
    const VERSION: Version = Version::Stopgap;
    const CONVERT: Conversion<Self> = |object| convert::endpoint_slice(&object.to_v1());
}

/// core/v1, where there are no slices: one object a Service.
pub(super) struct LegacyEndpoints;

impl Watched for LegacyEndpoints {
    type Object = core::Endpoints;
    type Parsed = ServiceSlices;
    const RESOURCE: ResourceKind = ResourceKind::Endpoints;
    const KIND: ApiType = ApiType { api_version: "v1", kind: "Endpoints" };
    const VERSION: Version = Version::Stopgap;
    const CONVERT: Conversion<Self> = convert::endpoints;
}

pub(super) struct ServiceCidrs;

impl Watched for ServiceCidrs {
    type Object = networking::ServiceCidr;
    type Parsed = ServiceCidr;
    const RESOURCE: ResourceKind = ResourceKind::ServiceCidrs;
    const KIND: ApiType = ApiType { api_version: "networking.k8s.io/v1", kind: "ServiceCIDR" };
    const VERSION: Version = Version::Newest;
    const CONVERT: Conversion<Self> = |object| convert::service_cidr(&object.metadata, &object.spec.cidrs);
}

pub(super) struct OwnNode;

impl Watched for OwnNode {
    type Object = core::Node;
    type Parsed = Node;
    const RESOURCE: ResourceKind = ResourceKind::Nodes;
    const KIND: ApiType = ApiType { api_version: "v1", kind: "Node" };
    const CONVERT: Conversion<Self> = |object| {
        let (node, invalid) = convert::node(object);
        (Some(node), invalid)
    };
}
