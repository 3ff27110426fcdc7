//! The pages `/flagz` and `/statusz`. They are plain text, or JSON or YAML if the `Accept` header
//! names their kind.

use std::collections::BTreeMap;

use http::{HeaderMap, HeaderValue, StatusCode, header};
use jiff::Timestamp;
use serde::Serialize;
use serde_json::json;

use crate::http::{
    reply::{JSON, Reply, TEXT, open},
    report::{kubernetes, process},
};

/// The name of the component on these pages, which is kube-proxy's.
const NAME: &str = "kube-proxy";
const WARNING: &str = "Warning: This endpoint is not meant to be machine parseable, has no formatting \
    compatibility guarantees and is for debugging purposes only.";
const GROUP: &str = "config.k8s.io";

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Format {
    Text,
    /// JSON in this version of the API group.
    Json(&'static str),
    Yaml(&'static str),
}

/// Returns the first format in the `Accept` header that can be served. `None` if there is none.
fn wanted(accept: &str, kind: &str) -> Option<Format> {
    if accept.trim().is_empty() {
        return Some(Format::Text);
    }
    accept.split(',').find_map(|choice| {
        let mut parts = choice.split(';').map(str::trim);
        let media = parts.next().unwrap_or_default();
        let parameters: BTreeMap<&str, &str> = parts.filter_map(|part| part.split_once('=')).collect();
        let version = ["v1beta1", "v1alpha1"].into_iter().find(|version| {
            parameters.get("v") == Some(version)
                && parameters.get("g") == Some(&GROUP)
                && parameters.get("as") == Some(&kind)
        });
        match (media, version) {
            ("application/json", Some(version)) => Some(Format::Json(version)),
            ("application/yaml", Some(version)) => Some(Format::Yaml(version)),
            ("text/plain" | "text/*" | "*/*", _) => Some(Format::Text),
            _ => None,
        }
    })
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ZPage<T> {
    kind: &'static str,
    api_version: String,
    metadata: serde_json::Value,
    #[serde(flatten)]
    content: T,
}

#[derive(Serialize)]
struct Flags<'a> {
    flags: &'a BTreeMap<String, String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct StatuszPage<'a> {
    start_time: String,
    uptime_seconds: i64,
    go_version: &'static str,
    binary_version: String,
    emulation_version: String,
    paths: &'a [&'static str],
}

pub(super) fn flags(headers: &HeaderMap, flags: &BTreeMap<String, String>) -> Reply {
    let lines = || flags.iter().map(|(flag, value)| format!("{flag}={value}\n")).collect::<String>();
    page(headers, "Flagz", || format!("\n{NAME} flagz\n{WARNING}\n{}", lines()), Flags { flags })
}

pub(super) fn status(headers: &HeaderMap, paths: &[&'static str]) -> Reply {
    let now = Timestamp::now();
    let started = process::started().and_then(|seconds| Timestamp::from_second(seconds as i64).ok());
    let started = started.unwrap_or(now);
    let up = now.as_second() - started.as_second();
    let version = kubernetes::version();
    let text = || {
        let paths = paths.join(" ");
        let (hours, minutes, seconds) = (up / 3600, up / 60 % 60, up % 60);
        format!(
            "\n{NAME} statusz\n{WARNING}\n\nStarted: {}\nUp: {hours} hr {minutes:02} min {seconds:02} sec\n\
             Go version: none, this is Rust\nBinary version: {version}\n\nPaths: {paths}\n",
            started.strftime("%a %b %e %H:%M:%S UTC %Y"),
        )
    };
    let content = StatuszPage {
        start_time: started.to_string(),
        uptime_seconds: up,
        go_version: "",
        binary_version: version.clone(),
        emulation_version: kubernetes::EMULATED.to_owned(),
        paths,
    };
    page(headers, "Statusz", text, content)
}

fn page(
    headers: &HeaderMap,
    kind: &'static str,
    text: impl FnOnce() -> String,
    content: impl Serialize,
) -> Reply {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let format = wanted(accept, kind);
    let version = match format {
        Some(Format::Json(version) | Format::Yaml(version)) => version,
        Some(Format::Text) => return open(StatusCode::OK, TEXT, text()),
        None => return not_acceptable(),
    };
    let api_version = format!("{GROUP}/{version}");
    let document = ZPage { kind, api_version, metadata: json!({"name": NAME}), content };
    let (media, written) = if format == Some(Format::Yaml(version)) {
        ("application/yaml", serde_saphyr::to_string(&document).map_err(|error| error.to_string()))
    } else {
        (JSON, serde_json::to_string(&document).map(|text| text + "\n").map_err(|error| error.to_string()))
    };
    let mut reply = match written {
        Ok(text) => open(StatusCode::OK, media, text),
        Err(error) => return open(StatusCode::INTERNAL_SERVER_ERROR, TEXT, error),
    };
    let media = format!("{media};g={GROUP};v={version};as={kind}");
    if let Ok(media) = HeaderValue::try_from(media) {
        reply.headers_mut().insert(header::CONTENT_TYPE, media);
    }
    if version == "v1alpha1" {
        let page = kind.to_lowercase();
        let warning = format!(
            "299 - \"This version of the {page} endpoint is deprecated. Please use a newer version.\""
        );
        if let Ok(warning) = HeaderValue::try_from(warning) {
            reply.headers_mut().insert(header::WARNING, warning);
        }
    }
    reply
}

fn not_acceptable() -> Reply {
    let message =
        "only the following media types are accepted: application/json, application/yaml, text/plain";
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": "NotAcceptable", "code": 406,
    });
    open(StatusCode::NOT_ACCEPTABLE, JSON, format!("{status}\n"))
}
