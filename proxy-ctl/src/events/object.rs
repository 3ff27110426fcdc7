//! An Event of events.k8s.io/v1 as it is sent. Field numbers are those of `generated.proto` in Kubernetes' API.

use jiff::Timestamp;
use prost::Message as _;
use serde::{Serialize, Serializer};

use crate::{config::Encoding, source::kubernetes::envelope};

pub(super) const API_VERSION: &str = "events.k8s.io/v1";
pub(super) const KIND: &str = "Event";

#[derive(Clone, PartialEq, prost::Message, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Object {
    #[prost(message, required, tag = 1)]
    pub(super) metadata: Metadata,
    #[prost(message, required, tag = 2)]
    pub(super) event_time: MicroTime,
    #[prost(message, optional, tag = 3)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) series: Option<Series>,
    #[prost(string, tag = 4)]
    pub(super) reporting_controller: String,
    #[prost(string, tag = 5)]
    pub(super) reporting_instance: String,
    #[prost(string, tag = 6)]
    pub(super) action: String,
    #[prost(string, tag = 7)]
    pub(super) reason: String,
    #[prost(message, required, tag = 8)]
    pub(super) regarding: Reference,
    #[prost(string, tag = 10)]
    pub(super) note: String,
    #[prost(string, tag = 11)]
    #[serde(rename = "type")]
    pub(super) event_type: String,
}

#[derive(Clone, PartialEq, prost::Message, Serialize)]
pub(super) struct Metadata {
    #[prost(string, tag = 1)]
    pub(super) name: String,
    #[prost(string, tag = 3)]
    pub(super) namespace: String,
}

#[derive(Clone, PartialEq, prost::Message, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Series {
    #[prost(int32, tag = 1)]
    pub(super) count: i32,
    #[prost(message, required, tag = 2)]
    pub(super) last_observed_time: MicroTime,
}

#[derive(Clone, PartialEq, prost::Message, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Reference {
    #[prost(string, tag = 1)]
    pub(super) kind: String,
    #[prost(string, tag = 2)]
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) namespace: String,
    #[prost(string, tag = 3)]
    pub(super) name: String,
    #[prost(string, tag = 5)]
    pub(super) api_version: String,
}

/// Whole microseconds. JSON has it as RFC 3339 with six digits.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct MicroTime {
    /// Since the epoch.
    #[prost(int64, tag = 1)]
    seconds: i64,
    #[prost(int32, tag = 2)]
    nanoseconds: i32,
}

impl From<Timestamp> for MicroTime {
    fn from(time: Timestamp) -> Self {
        let micros = time.as_microsecond();
        let below = i32::try_from(micros.rem_euclid(1_000_000)).unwrap_or_default();
        Self { seconds: micros.div_euclid(1_000_000), nanoseconds: below * 1000 }
    }
}

impl Serialize for MicroTime {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let time = Timestamp::new(self.seconds, self.nanoseconds).map_err(serde::ser::Error::custom)?;
        serializer.collect_str(&format_args!("{time:.6}"))
    }
}

impl Object {
    pub(super) fn encode(&self, encoding: Encoding) -> Result<Vec<u8>, serde_json::Error> {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Typed<'a> {
            api_version: &'static str,
            kind: &'static str,
            #[serde(flatten)]
            object: &'a Object,
        }
        match encoding {
            Encoding::Protobuf => Ok(envelope(API_VERSION, KIND, self.encode_to_vec())),
            Encoding::Json => {
                serde_json::to_vec(&Typed { api_version: API_VERSION, kind: KIND, object: self })
            }
        }
    }
}
