//! As much of the API server's answers as must be understood before the objects in them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::WatchEvent;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::failure::{Failure, Reason};
use crate::model::objects::ObjectName;

/// An event whose object is still text: one that cannot be read must not hide the others.
pub(super) type RawEvent = WatchEvent<Box<RawValue>>;

/// A page of a list, with its objects still text.
#[derive(Deserialize)]
pub(super) struct Page<'a> {
    #[serde(default)]
    pub(super) metadata: PageMeta,
    #[serde(borrow)]
    pub(super) items: Option<Vec<&'a RawValue>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PageMeta {
    pub(super) resource_version: Option<String>,
    #[serde(rename = "continue")]
    pub(super) continue_token: Option<String>,
}

/// What must be known of an object even if the rest of it makes no sense.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Meta {
    #[serde(default)]
    pub(super) namespace: String,
    pub(super) name: String,
    #[serde(default)]
    pub(super) resource_version: String,
}

impl Meta {
    pub(super) fn of(object: &RawValue) -> Result<Self, Failure> {
        #[derive(Deserialize)]
        struct Object {
            metadata: Meta,
        }
        serde_json::from_str::<Object>(object.get())
            .map(|object| object.metadata)
            .map_err(|error| Failure::new(Reason::Malformed, format!("an object without a name: {error}")))
    }

    pub(super) fn take(meta: &mut ObjectMeta) -> Self {
        Self {
            namespace: meta.namespace.take().unwrap_or_default(),
            name: meta.name.take().unwrap_or_default(),
            resource_version: meta.resource_version.take().unwrap_or_default(),
        }
    }

    pub(super) fn name(&self) -> ObjectName {
        ObjectName::new(self.namespace.as_str(), self.name.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watch_events_keep_the_text_of_their_object() {
        let line = r#"{"type":"ADDED","object":{"metadata":{"name":"a","namespace":"b","resourceVersion":"7"},"x":1}}"#;
        let WatchEvent::Added(object) = serde_json::from_str::<RawEvent>(line).unwrap() else {
            panic!("not an addition");
        };
        let meta = Meta::of(&object).unwrap();
        assert_eq!((meta.name().to_string().as_str(), meta.resource_version.as_str()), ("b/a", "7"));
    }

    #[test]
    fn a_page_without_items_or_with_null_is_empty() {
        for text in [
            r#"{"metadata":{"resourceVersion":"3"},"items":null}"#,
            r#"{"metadata":{"resourceVersion":"3"}}"#,
        ] {
            let page: Page<'_> = serde_json::from_str(text).unwrap();
            assert!(page.items.unwrap_or_default().is_empty());
            assert_eq!(page.metadata.resource_version.as_deref(), Some("3"));
        }
    }
}
