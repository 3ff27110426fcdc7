//! Kubernetes objects with as much of them as this proxy uses. Each is read from JSON, YAML and Kubernetes' protobuf
//! encoding alike; what is not named here is skipped unread.
//!
//! Field numbers and types are those of the `generated.proto` files of Kubernetes' API, whose names the modules below
//! have. As there, only what is `optional` here can be told from its default.

pub mod core;
pub mod discovery;
pub mod lenient;
pub mod meta;
pub mod networking;

use serde::{Deserialize, Deserializer};

/// Messages: `(field number, type in protobuf) name: type`, with `as "name"` where JSON's is not the name in camel case.
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
            #[prost(prost_path = "crate::source::schema::lenient")]
            #[serde(default, rename_all = "camelCase")]
            pub struct $message {
                $(
                    $(#[$field_attribute])*
                    #[prost($($kind)+, tag = $tag)]
                    #[serde($(rename = $json,)? deserialize_with = "crate::source::schema::or_default")]
                    pub $field: $type,
                )+
            }
        )+
    };
}
use messages;

/// Null is as good as nothing, as in Go.
fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(value: D) -> Result<T, D::Error> {
    Option::<T>::deserialize(value).map(Option::unwrap_or_default)
}

/// An object with metadata.
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
