//! The kinds that are watched, and how their objects are parsed.

use super::{kind::ResourceKind, parsed::ParsedObject};
use crate::{
    kubernetes::{
        convert::{self, invalid::InvalidField},
        schema::{ApiObject, core, discovery, networking},
        wire::ApiType,
    },
    model::objects::{EndpointSlice, Node, Service, ServiceCidr},
};

/// The selector that leaves out objects that another proxy serves, or no proxy. It has both labels
/// for both kinds. Which label kube-proxy checks on which kind has changed between its versions,
/// and each is documented for Services.
pub(crate) const SERVED_SELECTOR: &str =
    "!service.kubernetes.io/service-proxy-name,!service.kubernetes.io/headless";

/// A function that parses an object. The first value is None if the object is not served. The
/// second value has its invalid fields.
type Conversion<W> = fn(&<W as Watched>::Object) -> (Option<<W as Watched>::Parsed>, Vec<InvalidField>);

/// A kind of object that is watched.
pub(crate) trait Watched: Sized + Send + 'static {
    type Object: ApiObject + Send;
    type Parsed: ParsedObject;
    const RESOURCE: ResourceKind;
    const KIND: ApiType;
    /// True if some API servers do not have this kind.
    const MAY_BE_ABSENT: bool = false;
    const CONVERT: Conversion<Self>;

    /// Returns the path of the list of all objects.
    fn path() -> String {
        let (version, plural) = (Self::KIND.api_version, Self::RESOURCE.plural());
        let root = if version.contains('/') { "/apis" } else { "/api" };
        format!("{root}/{version}/{plural}")
    }
}

pub(crate) struct Services;

impl Watched for Services {
    type Object = core::Service;
    type Parsed = Service;
    const RESOURCE: ResourceKind = ResourceKind::Services;
    const KIND: ApiType = ApiType { api_version: "v1", kind: "Service" };
    const CONVERT: Conversion<Self> = convert::service;
}

pub(crate) struct EndpointSlices;

impl Watched for EndpointSlices {
    type Object = discovery::EndpointSlice;
    type Parsed = EndpointSlice;
    const RESOURCE: ResourceKind = ResourceKind::EndpointSlices;
    const KIND: ApiType = ApiType { api_version: "discovery.k8s.io/v1", kind: "EndpointSlice" };
    const CONVERT: Conversion<Self> = convert::endpoint_slice;
}

pub(crate) struct ServiceCidrs;

impl Watched for ServiceCidrs {
    type Object = networking::ServiceCidr;
    type Parsed = ServiceCidr;
    const RESOURCE: ResourceKind = ResourceKind::ServiceCidrs;
    const KIND: ApiType = ApiType { api_version: "networking.k8s.io/v1", kind: "ServiceCIDR" };
    const MAY_BE_ABSENT: bool = true;
    const CONVERT: Conversion<Self> = |object| convert::service_cidr(&object.metadata, &object.spec.cidrs);
}

pub(crate) struct OwnNode;

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
