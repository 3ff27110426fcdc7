//! A request and its answer, without what differs from run to run.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::Duration,
};

use anyhow::{Context, Result};
use lab::http::{self, Answer};
use serde_json::{Map, Value, json};

pub(crate) const HEALTHZ: u16 = 10256;
pub(crate) const METRICS: u16 = 10249;

/// Part of an answer's body that is kept.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Keep {
    Text,
    /// The text is kept to the letter, apart from times in quotes.
    TextWithTimes,
    Json,
    /// Only status and headers are kept.
    Nothing,
}

/// Request with a name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Page {
    pub(crate) name: &'static str,
    pub(crate) address: &'static str,
    pub(crate) port: u16,
    pub(crate) method: &'static str,
    pub(crate) path: &'static str,
    pub(crate) accept: &'static str,
    pub(crate) body: &'static str,
    pub(crate) keep: Keep,
}

pub(crate) const fn get(name: &'static str, port: u16, path: &'static str, keep: Keep) -> Page {
    Page { name, address: "127.0.0.1", port, method: "GET", path, accept: "", body: "", keep }
}

const fn accepting(name: &'static str, path: &'static str, accept: &'static str, keep: Keep) -> Page {
    Page { accept, ..get(name, METRICS, path, keep) }
}

const fn with(
    name: &'static str,
    port: u16,
    method: &'static str,
    path: &'static str,
    body: &'static str,
) -> Page {
    Page { method, body, ..get(name, port, path, Keep::Text) }
}

/// Pages that load balancers and kubelets ask for, in each state of the Node.
pub(crate) const HEALTH: &[Page] = &[
    get("healthz", HEALTHZ, "/healthz", Keep::TextWithTimes),
    get("livez", HEALTHZ, "/livez", Keep::TextWithTimes),
];

/// Pages that the probes of proxy-ctl's manifests ask for.
pub(crate) const READY: Page = get("readyz", HEALTHZ, "/readyz", Keep::Text);
pub(crate) const LIVE: Page = get("livez, threads", HEALTHZ, "/livez/threads", Keep::Text);

pub(crate) const PAGES: &[Page] = &[
    Page { keep: Keep::TextWithTimes, ..with("healthz, POST", HEALTHZ, "POST", "/healthz", "") },
    with("healthz, HEAD", HEALTHZ, "HEAD", "/healthz", ""),
    get("healthz server, other path", HEALTHZ, "/metrics", Keep::Text),
    get("healthz server, root", HEALTHZ, "/", Keep::Text),
    get("root", METRICS, "/", Keep::Text),
    get("other path", METRICS, "/nothing", Keep::Text),
    get("livez of the metrics server", METRICS, "/livez", Keep::Text),
    get("proxyMode", METRICS, "/proxyMode", Keep::Text),
    with("proxyMode, POST", METRICS, "POST", "/proxyMode", ""),
    with("proxyMode, HEAD", METRICS, "HEAD", "/proxyMode", ""),
    with("metrics of SLIs, DELETE", METRICS, "DELETE", "/metrics/slis", ""),
    get("healthz of the metrics server", METRICS, "/healthz", Keep::Text),
    get("healthz of the metrics server, ping", METRICS, "/healthz/ping", Keep::Text),
    get("healthz of the metrics server, verbose", METRICS, "/healthz?verbose", Keep::Text),
    get(
        "healthz of the metrics server, exclude",
        METRICS,
        "/healthz?verbose&exclude=ping&exclude=x",
        Keep::Text,
    ),
    with("healthz of the metrics server, POST", METRICS, "POST", "/healthz", ""),
    get("configz", METRICS, "/configz", Keep::Json),
    with("configz, HEAD", METRICS, "HEAD", "/configz", ""),
    get("metrics", METRICS, "/metrics", Keep::Nothing),
    accepting(
        "metrics, OpenMetrics",
        "/metrics",
        "application/openmetrics-text;version=1.0.0",
        Keep::Nothing,
    ),
    with("metrics, HEAD", METRICS, "HEAD", "/metrics", ""),
    get("metrics of SLIs", METRICS, "/metrics/slis", Keep::Nothing),
    get("flagz", METRICS, "/flagz", Keep::Nothing),
    accepting("flagz, any", "/flagz", "*/*", Keep::Nothing),
    accepting("flagz, JSON", "/flagz", "application/json;v=v1beta1;g=config.k8s.io;as=Flagz", Keep::Json),
    accepting(
        "flagz, old JSON",
        "/flagz",
        "application/json;v=v1alpha1;g=config.k8s.io;as=Flagz",
        Keep::Json,
    ),
    accepting("flagz, YAML", "/flagz", "application/yaml;v=v1beta1;g=config.k8s.io;as=Flagz", Keep::Nothing),
    accepting("flagz, plain JSON", "/flagz", "application/json", Keep::Json),
    get("statusz", METRICS, "/statusz", Keep::Nothing),
    accepting(
        "statusz, JSON",
        "/statusz",
        "application/json;v=v1beta1;g=config.k8s.io;as=Statusz",
        Keep::Json,
    ),
    accepting(
        "statusz, old JSON",
        "/statusz",
        "application/json;v=v1alpha1;g=config.k8s.io;as=Statusz",
        Keep::Json,
    ),
    accepting(
        "statusz, wrong kind",
        "/statusz",
        "application/json;v=v1beta1;g=config.k8s.io;as=Flagz",
        Keep::Json,
    ),
    get("pprof, no slash", METRICS, "/debug/pprof", Keep::Text),
    get("pprof", METRICS, "/debug/pprof/", Keep::Nothing),
    get("pprof, profile", METRICS, "/debug/pprof/profile?seconds=1", Keep::Nothing),
    get("flags", METRICS, "/debug/flags", Keep::Text),
    get("flags, slash", METRICS, "/debug/flags/", Keep::Text),
    get("flags, v", METRICS, "/debug/flags/v", Keep::Text),
    with("flags, v, PUT 3", METRICS, "PUT", "/debug/flags/v", "3"),
    with("flags, v, PUT x", METRICS, "PUT", "/debug/flags/v", "x"),
    with("flags, v, PUT -1", METRICS, "PUT", "/debug/flags/v", "-1"),
    with("flags, v, PUT nothing", METRICS, "PUT", "/debug/flags/v", ""),
    get("debug, other", METRICS, "/debug/nothing", Keep::Text),
];

/// Headers that are compared.
const HEADERS: [&str; 7] = [
    "content-type",
    "x-content-type-options",
    "location",
    "warning",
    "content-disposition",
    "allow",
    "x-load-balancing-endpoint-weight",
];

const LIMIT: Duration = Duration::from_secs(30);

impl Page {
    pub(crate) fn ask(&self) -> Result<Answer> {
        let Self { name, address, port, method, path, accept, body, .. } = self;
        let address = SocketAddr::new(address.parse().context("an address")?, *port);
        let accept = (!accept.is_empty()).then_some(("Accept", *accept));
        let body = matches!(*method, "PUT" | "POST").then_some(*body);
        http::request(address, method, path, accept.as_slice(), body, LIMIT)
            .with_context(|| format!("asking for {name}"))
    }

    /// Returns the answer as it is compared. A path in one of `folders` is called `<folder>/…`.
    pub(crate) fn seen(&self, answer: &Answer, folders: &[&str]) -> Value {
        let mut seen = Map::new();
        seen.insert("status".into(), answer.status.into());
        for line in answer.head.lines().skip(1) {
            if let Some((name, value)) = line.split_once(':')
                && HEADERS.contains(&name.to_lowercase().as_str())
            {
                seen.insert(name.to_lowercase(), value.trim().into());
            }
        }
        let text = folders.iter().fold(answer.text(), |text, folder| text.replace(folder, "<folder>/"));
        match self.keep {
            Keep::Nothing => {}
            Keep::Text => drop(seen.insert("body".into(), text.into())),
            Keep::TextWithTimes => {
                let parts = text.split('"').map(|part| if is_time(part) { "<time>" } else { part });
                seen.insert("body".into(), parts.collect::<Vec<_>>().join("\"").into());
            }
            Keep::Json => {
                let mut body = serde_json::from_str(&text).unwrap_or_else(|_| Value::from(text));
                mask(&mut body);
                seen.insert("body".into(), body);
            }
        }
        seen.into()
    }
}

/// Replaces times and versions.
pub(crate) fn mask(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                match name.as_str() {
                    "uptimeSeconds" => *field = json!("<seconds>"),
                    "goVersion" | "binaryVersion" => *field = json!("<version>"),
                    _ => mask(field),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(mask),
        Value::String(text) if is_time(text) => *value = json!("<time>"),
        Value::String(_) | Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn is_time(text: &str) -> bool {
    let shape: String = text.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    shape.starts_with("0000-00-00T00:00:00") && shape.ends_with('Z')
}

/// Returns type, keys of labels and bounds of buckets of each metric family, from the text format.
/// A metric family without samples is left out.
pub(crate) fn families(text: &str) -> BTreeMap<String, Value> {
    let mut kinds: BTreeMap<&str, &str> = BTreeMap::new();
    let mut labels: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    let mut bounds: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for line in text.lines() {
        if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            kinds.insert(name, kind);
        } else if !line.starts_with('#') && !line.is_empty() {
            let end = line.find(['{', ' ']).unwrap_or(line.len());
            let sample = &line[..end];
            let parts =
                ["_bucket", "_sum", "_count"].into_iter().filter_map(|part| sample.strip_suffix(part));
            let histogram =
                parts.into_iter().find(|name| matches!(kinds.get(name), Some(&"histogram" | &"summary")));
            let Some((family, _)) = kinds.get_key_value(histogram.unwrap_or(sample)) else { continue };
            if let Some((_, rest)) = line.split_once("le=\"") {
                bounds.entry(family).or_default().extend(rest.split('"').next().map(str::to_owned));
            }
            let keys = labels.entry(family).or_default();
            keys.extend(label_keys(&line[end..]).into_iter().filter(|key| key != "le" && key != "quantile"));
        }
    }
    labels
        .into_iter()
        .map(|(name, labels)| {
            let mut family = json!({"type": kinds.get(name), "labels": labels});
            if let (Some(bounds), Some(fields)) = (bounds.get(name), family.as_object_mut()) {
                fields.insert("bounds".into(), json!(bounds));
            }
            (name.to_owned(), family)
        })
        .collect()
}

/// Returns the keys of labels, such as those of `{a="…",b="…"} 1`.
fn label_keys(rest: &str) -> Vec<String> {
    let mut keys = Vec::new();
    let (mut key, mut quoted, mut escaped) = (String::new(), false, false);
    for char in rest.chars() {
        match char {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            _ if quoted => {}
            '}' => break,
            '{' | ',' => key.clear(),
            '=' => keys.push(std::mem::take(&mut key)),
            other => key.push(other),
        }
    }
    keys
}
