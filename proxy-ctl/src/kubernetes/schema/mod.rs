//! Kubernetes objects, reduced to the fields that this proxy uses. Each is read from JSON, YAML and
//! Kubernetes' protobuf encoding alike. Fields that are not named here are skipped unread.
//!
//! Field numbers and types are those of the `generated.proto` files of Kubernetes' API. The modules
//! below have the names of its API groups. As in these files, only an `optional` field can be told
//! apart from its default.

pub mod core;
pub mod discovery;
pub mod lenient;
pub mod meta;
pub mod networking;

use serde::{Deserialize, Deserializer};

/// Defines messages. Each field is `(field number, type in protobuf) name: type`. `as "name"` is
/// added if the name in JSON is not the field's name in camel case.
macro_rules! messages {
    ($(
        $(#[$attribute:meta])*
        $message:ident {
            $($(#[$field_attribute:meta])* ($tag:tt, $($kind:tt)+) $field:ident $(as $json:literal)?: $type:ty,)+
        }
    )+) => {
        $(
            $(#[$attribute])*
            #[derive(Clone, PartialEq, prost::Message, serde::Deserialize)]
            #[prost(prost_path = "crate::kubernetes::schema::lenient")]
            #[serde(default, rename_all = "camelCase")]
            pub struct $message {
                $(
                    $(#[$field_attribute])*
                    #[prost($($kind)+, tag = $tag)]
                    #[serde($(rename = $json,)? deserialize_with = "crate::kubernetes::schema::or_default")]
                    pub $field: $type,
                )+
            }
        )+
    };
}
use messages;

/// Reads a field, and takes null for the default, as Go does.
fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(value: D) -> Result<T, D::Error> {
    Option::<T>::deserialize(value).map(Option::unwrap_or_default)
}

/// A Kubernetes object that has metadata.
pub trait ApiObject:
    Default + PartialEq + std::fmt::Debug + prost::Message + serde::de::DeserializeOwned
{
    fn into_metadata(self) -> meta::ObjectMeta;
}

macro_rules! objects {
    ($($object:ty),+) => {
        $(impl ApiObject for $object {
            fn into_metadata(self) -> meta::ObjectMeta {
                self.metadata
            }
        })+
    };
}

objects!(core::Service, core::Node, discovery::EndpointSlice, networking::ServiceCidr);
