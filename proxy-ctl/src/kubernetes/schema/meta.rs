//! Types of apimachinery, from meta/v1 and runtime.

use std::collections::BTreeMap;

use bytes::Bytes;
use jiff::Timestamp;
use serde::{Deserialize, Deserializer, de};

use super::messages;

messages! {
    ObjectMeta {
        (1, string) name: String,
        (3, string) namespace: String,
        (6, string) resource_version: String,
        (8, message, required) creation_timestamp: Time,
        (9, message, optional) deletion_timestamp: Option<Time>,
        (11, btree_map = "string, string") labels: BTreeMap<String, String>,
        (12, btree_map = "string, string") annotations: BTreeMap<String, String>,
    }

    ListMeta {
        (2, string) resource_version: String,
        (3, string) continue_token as "continue": String,
    }

    /// The reason why a request has failed, or why a watch has ended.
    Status {
        (3, string) message: String,
        (4, string) reason: String,
        (5, message, optional) details: Option<StatusDetails>,
        (6, int32) code: i32,
    }

    StatusDetails {
        (5, int32) retry_after_seconds: i32,
    }

    /// An object of any kind, reduced to what names it.
    Named {
        (1, message, required) metadata: NamedMeta,
    }

    NamedMeta {
        (1, string) name: String,
        (3, string) namespace: String,
        (6, string) resource_version: String,
    }

    /// The object of a bookmark, which has only a version and annotations.
    Bookmark {
        (1, message, required) metadata: BookmarkMeta,
    }

    BookmarkMeta {
        (6, string) resource_version: String,
        (12, btree_map = "string, string") annotations: BTreeMap<String, String>,
    }
}

/// A point in time. In JSON it is an RFC 3339 string.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Time {
    /// Seconds since the epoch.
    #[prost(int64, tag = 1)]
    pub seconds: i64,
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
        let text = String::deserialize(value)?;
        let time: Timestamp = text.parse().map_err(de::Error::custom)?;
        Ok(Self { seconds: time.as_second() })
    }
}

/// A list in protobuf. Its items stay encoded, so that one that cannot be read does not hide the
/// others.
#[derive(Clone, PartialEq, prost::Message)]
pub struct List {
    #[prost(message, required, tag = 1)]
    pub metadata: ListMeta,
    #[prost(bytes = "bytes", repeated, tag = 2)]
    pub items: Vec<Bytes>,
}

/// An event of a watch, in protobuf.
#[derive(Clone, PartialEq, prost::Message)]
pub struct WatchEvent {
    #[prost(string, tag = 1)]
    pub event_type: String,
    #[prost(message, required, tag = 2)]
    pub object: RawExtension,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct RawExtension {
    #[prost(bytes = "bytes", tag = 1)]
    pub raw: Bytes,
}

/// The envelope of each object in protobuf. Four magic bytes stand before it.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Unknown {
    #[prost(message, required, tag = 1)]
    pub type_meta: TypeMeta,
    #[prost(bytes = "bytes", tag = 2)]
    pub raw: Bytes,
    #[prost(string, tag = 3)]
    pub content_encoding: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct TypeMeta {
    #[prost(string, tag = 1)]
    pub api_version: String,
    #[prost(string, tag = 2)]
    pub kind: String,
}
