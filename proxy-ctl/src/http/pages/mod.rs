//! The pages of the metrics server.

mod debug;
mod slis;
mod zpages;

use std::{collections::BTreeMap, fmt};

use http::{HeaderMap, Method, Request, StatusCode, header};
use hyper::body::Body;
use serde_json::{Value, json};
use tokio::sync::watch;
use tower::BoxError;

use super::{
    connections::Peer,
    exposition,
    reply::{JSON, Reply, TEXT, not_found, open, plain, reply},
};
use crate::http::report::{Metrics, ModeInForce};

pub(super) use slis::Slis;

/// The state that the pages other than metrics show.
pub struct Pages {
    /// The mode in use, for `/proxyMode`.
    pub mode: watch::Receiver<ModeInForce>,
    /// The configuration in force as a KubeProxyConfiguration, for `/configz`.
    pub configuration: watch::Receiver<Value>,
    /// Every flag with its value, for `/flagz`. `None` if the page is switched off.
    pub flags: Option<BTreeMap<String, String>>,
    /// True if `/statusz` is served.
    pub status: bool,
    /// True if the log level is served below `/debug/flags`, to clients on loopback.
    pub profiling: bool,
}

/// The answer at the paths where kube-proxy serves profiles.
const NO_PROFILES: &str =
    "proxy-ctl takes no profiles: use perf on the node, as in perf record -g -p $(pidof proxy-ctl)\n";

/// The paths that are served with every configuration, as `/statusz` lists them.
const PATHS: [&str; 4] = ["/configz", "/healthz", "/metrics", "/proxyMode"];

impl Pages {
    pub(super) async fn answer<B>(&self, request: Request<B>, metrics: &Metrics, slis: &Slis) -> Reply
    where
        B: Body<Error: Into<BoxError>>,
    {
        let (head, body) = request.into_parts();
        match head.uri.path() {
            "/metrics" => {
                metrics.refresh().await;
                exposed(&head.headers, metrics.encode())
            }
            "/metrics/slis" if head.method == Method::DELETE => {
                slis.reset();
                open(StatusCode::OK, TEXT, "metrics reset\n")
            }
            "/metrics/slis" => exposed(&head.headers, slis.encode()),
            "/proxyMode" => plain(StatusCode::OK, self.mode.borrow().modes.active.name()),
            "/configz" => {
                let all = json!({"kubeproxy.config.k8s.io": *self.configuration.borrow()});
                reply(StatusCode::OK, JSON, all.to_string())
            }
            "/healthz" => {
                slis.answered();
                plain(StatusCode::OK, healthy(head.uri.query().unwrap_or_default()))
            }
            "/healthz/ping" => open(StatusCode::OK, TEXT, "ok"),
            "/flagz" => match &self.flags {
                Some(flags) => zpages::flags(&head.headers, flags),
                None => not_found(),
            },
            "/statusz" if self.status => zpages::status(&head.headers, &self.paths()),
            "/debug/pprof" => plain(StatusCode::NOT_FOUND, NO_PROFILES),
            path if path.starts_with("/debug/pprof/") => plain(StatusCode::NOT_FOUND, NO_PROFILES),
            path if self.profiling && path.starts_with("/debug") && !Peer::is_loopback(&head.extensions) => {
                plain(
                    StatusCode::FORBIDDEN,
                    "Answered on the node's loopback only, as by kubectl port-forward\n",
                )
            }
            path if self.profiling => debug::answer(path, &head.method, body).await,
            _ => not_found(),
        }
    }

    fn paths(&self) -> Vec<&'static str> {
        let mut paths = PATHS.to_vec();
        if self.flags.is_some() {
            paths.push("/flagz");
        }
        paths.sort_unstable();
        paths
    }
}

/// Answers with metrics in the format that the client accepts. `text` is in OpenMetrics.
fn exposed(headers: &HeaderMap, text: Result<String, fmt::Error>) -> Reply {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let format = exposition::Format::wanted(accept.unwrap_or_default());
    match text {
        Ok(text) => open(StatusCode::OK, format.content_type(), format.write(text)),
        Err(error) => plain(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}

/// Returns the body of the metrics server's own health. Its only check is that the server answers.
fn healthy(query: &str) -> String {
    let parameters = || query.split('&').map(|part| part.split_once('=').unwrap_or((part, "")));
    if !parameters().any(|(name, _)| name == "verbose") {
        return "ok".to_owned();
    }
    let excluded: Vec<&str> =
        parameters().filter(|(name, _)| *name == "exclude").map(|(_, check)| check).collect();
    let ping = if excluded.contains(&"ping") { "[+]ping excluded: ok" } else { "[+]ping ok" };
    let unknown: Vec<String> =
        excluded.iter().filter(|check| **check != "ping").map(|check| format!("{check:?}")).collect();
    let warning = if unknown.is_empty() {
        String::new()
    } else {
        format!("warn: some health checks cannot be excluded: no matches for {}\n", unknown.join(", "))
    };
    format!("{ping}\n{warning}healthz check passed\n")
}
