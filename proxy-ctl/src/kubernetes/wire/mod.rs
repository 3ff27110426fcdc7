//! The envelopes of the API server's answers: lists, events and errors.

pub(super) mod answer;
mod frames;

use bytes::Bytes;
use prost::Message as _;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::failure::{Failure, FailureReason};
use crate::{
    config::Encoding,
    kubernetes::schema::{
        ApiObject,
        meta::{Bookmark, List, ListMeta, Named, NamedMeta, ObjectMeta, Status, Unknown, WatchEvent},
    },
    model::objects::ObjectName,
};

/// The annotation of the bookmark that ends a streaming list.
const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";
/// The magic bytes at the beginning of every message in protobuf.
const MAGIC: &[u8] = b"k8s\0";

/// An API version and a kind. In protobuf only the envelope states them, and the message does not.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct ApiType {
    pub(super) api_version: &'static str,
    pub(super) kind: &'static str,
}

/// An object that is still encoded, so that one that cannot be read does not hide the others.
#[derive(Clone, Debug)]
pub(super) struct Raw {
    encoding: Encoding,
    bytes: Bytes,
}

impl Raw {
    /// Decodes the object. The error is a text for messages.
    pub(super) fn object<T: ApiObject>(&self) -> Result<T, String> {
        match self.encoding {
            Encoding::Json => serde_json::from_slice(&self.bytes).map_err(|error| error.to_string()),
            Encoding::Protobuf => T::decode(self.bytes.clone()).map_err(|error| error.to_string()),
        }
    }

    /// Decodes the object's name and version. This works even if the rest of the object cannot be
    /// read.
    pub(super) fn meta(&self) -> Result<Meta, Failure> {
        let named = match self.encoding {
            Encoding::Json => serde_json::from_slice(&self.bytes).map_err(|error| error.to_string()),
            Encoding::Protobuf => Named::decode(self.bytes.clone()).map_err(|error| error.to_string()),
        };
        match named {
            Ok(Named { metadata: NamedMeta { name, namespace, resource_version } }) if !name.is_empty() => {
                Ok(Meta { namespace, name, resource_version })
            }
            Ok(_) => Err(malformed("an object without a name")),
            Err(error) => Err(malformed(format!("an object without a name: {error}"))),
        }
    }
}

/// The identity of an object, and its version.
#[derive(Debug)]
pub(super) struct Meta {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) resource_version: String,
}

impl Meta {
    pub(super) fn take(metadata: ObjectMeta) -> Self {
        let ObjectMeta { namespace, name, resource_version, .. } = metadata;
        Self { namespace, name, resource_version }
    }

    pub(super) fn name(&self) -> ObjectName {
        ObjectName::new(self.namespace.as_str(), self.name.as_str())
    }
}

/// A page of a list.
#[derive(Debug)]
pub(super) struct Page {
    pub(super) items: Vec<Raw>,
    pub(super) resource_version: String,
    /// The token for the next page. It is empty if there are no more pages.
    pub(super) continue_token: String,
}

impl Page {
    pub(super) fn read(encoding: Encoding, body: &Bytes, of: ApiType) -> Result<Self, Failure> {
        #[derive(Deserialize)]
        struct JsonList<'a> {
            #[serde(default)]
            metadata: ListMeta,
            #[serde(borrow)]
            items: Option<Vec<&'a RawValue>>,
        }
        let (ListMeta { resource_version, continue_token }, items) = match encoding {
            Encoding::Json => {
                let list: JsonList<'_> = serde_json::from_slice(body).map_err(not_a("list"))?;
                let items = list.items.unwrap_or_default();
                (list.metadata, items.into_iter().map(|item| body.slice_ref(item.get().as_bytes())).collect())
            }
            Encoding::Protobuf => {
                let list = unwrap(body, of, "List")?;
                let list = List::decode(list).map_err(not_a("list"))?;
                (list.metadata, list.items)
            }
        };
        let items = items.into_iter().map(|bytes| Raw { encoding, bytes }).collect();
        Ok(Self { items, resource_version, continue_token })
    }
}

/// An event of a watch.
#[derive(Debug)]
pub(super) enum Event {
    Added(Raw),
    Modified(Raw),
    Deleted(Raw),
    Bookmark {
        resource_version: String,
        /// True if every object that existed when a streaming list was asked for has been sent.
        ends_list: bool,
    },
    Error(Failure),
}

impl Event {
    /// Decodes an event from `frame`, which holds one complete event.
    pub(super) fn read(encoding: Encoding, frame: &Bytes, of: ApiType) -> Result<Self, Failure> {
        #[derive(Deserialize)]
        struct JsonEvent<'a> {
            #[serde(rename = "type")]
            event_type: String,
            #[serde(borrow)]
            object: &'a RawValue,
        }
        let (event_type, object) = match encoding {
            Encoding::Json => {
                let event: JsonEvent<'_> = serde_json::from_slice(frame).map_err(not_a("watch event"))?;
                (event.event_type, frame.slice_ref(event.object.get().as_bytes()))
            }
            Encoding::Protobuf => {
                let event = WatchEvent::decode(frame.clone()).map_err(not_a("watch event"))?;
                (event.event_type, event.object.raw)
            }
        };
        let raw = || {
            let bytes = match encoding {
                Encoding::Json => object.clone(),
                Encoding::Protobuf => unwrap(&object, of, "")?,
            };
            Ok::<_, Failure>(Raw { encoding, bytes })
        };
        match event_type.as_str() {
            "ADDED" => Ok(Self::Added(raw()?)),
            "MODIFIED" => Ok(Self::Modified(raw()?)),
            "DELETED" => Ok(Self::Deleted(raw()?)),
            "BOOKMARK" => {
                let Raw { bytes, .. } = raw()?;
                let Bookmark { metadata } = match encoding {
                    Encoding::Json => serde_json::from_slice(&bytes).map_err(not_a("bookmark"))?,
                    Encoding::Protobuf => Bookmark::decode(bytes).map_err(not_a("bookmark"))?,
                };
                let ends_list = metadata.annotations.contains_key(INITIAL_EVENTS_END);
                Ok(Self::Bookmark { resource_version: metadata.resource_version, ends_list })
            }
            "ERROR" => Ok(Self::Error(Failure::from(&status(encoding, &object)?))),
            other => Err(malformed(format!("a watch event of unknown type {other:?}"))),
        }
    }
}

/// Decodes a Status: the body of an error, or the last event of a watch.
pub(super) fn status(encoding: Encoding, body: &Bytes) -> Result<Status, Failure> {
    const STATUS: ApiType = ApiType { api_version: "v1", kind: "Status" };
    match encoding {
        Encoding::Json => serde_json::from_slice(body).map_err(not_a("Status")),
        Encoding::Protobuf => Status::decode(unwrap(body, STATUS, "")?).map_err(not_a("Status")),
    }
}

/// Returns the message within the envelope. It must be of kind `of`, with `suffix` behind the kind.
fn unwrap(envelope: &Bytes, of: ApiType, suffix: &str) -> Result<Bytes, Failure> {
    if !envelope.starts_with(MAGIC) {
        let found = envelope.get(..MAGIC.len()).unwrap_or(envelope);
        return Err(malformed(format!(
            "not a message of Kubernetes: it begins with {:?}",
            found.escape_ascii().to_string()
        )));
    }
    let unknown = Unknown::decode(envelope.slice(MAGIC.len()..)).map_err(not_a("message of Kubernetes"))?;
    if !unknown.content_encoding.is_empty() {
        return Err(malformed(format!("a message with content encoding {:?}", unknown.content_encoding)));
    }
    let (ApiType { api_version, kind }, found) = (of, unknown.type_meta);
    if found.api_version != api_version || found.kind.strip_suffix(suffix) != Some(kind) {
        return Err(malformed(format!(
            "found {:?} of {:?} where {kind}{suffix} of {api_version} was asked for",
            found.kind, found.api_version
        )));
    }
    Ok(unknown.raw)
}

fn malformed(problem: impl Into<String>) -> Failure {
    Failure::new(FailureReason::Malformed, problem)
}

fn not_a<E: std::fmt::Display>(what: &str) -> impl FnOnce(E) -> Failure {
    move |error| malformed(format!("not a {what}: {error}"))
}

#[cfg(test)]
mod tests;
