//! What the controller tells over HTTP: health on `healthzBindAddress`, metrics on `metricsBindAddress`, with
//! the paths, names and bodies of kube-proxy.

mod exposition;
mod health;
mod http;
mod metrics;
mod process;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use ::http::{Method, Response, StatusCode, header};
use bytes::Bytes;
pub use health::{Health, Moment, Report, SharedHealth};
use http_body_util::Full;
pub use metrics::{Metrics, Pending, UsageSource};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

type Body = Full<Bytes>;

/// Pause between two attempts to bind an address.
const BIND_RETRY: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
#[error("{purpose}: cannot listen on {address}: {source}")]
pub struct BindError {
    pub purpose: &'static str,
    pub address: SocketAddr,
    pub source: std::io::Error,
}

/// Answers `/healthz` and `/livez` until told to stop.
pub async fn healthz(
    address: SocketAddr,
    hard_fail: bool,
    health: Arc<SharedHealth>,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
) -> Result<(), BindError> {
    let Some(listener) = listen("healthz", address, hard_fail, &stop).await? else { return Ok(()) };
    http::serve(
        listener,
        move |request| {
            let response = health_response(request.uri().path(), &health, &metrics);
            async move { response }
        },
        stop,
    )
    .await;
    Ok(())
}

/// Answers `/metrics`, `/proxyMode` and `/healthz` until told to stop.
pub async fn metrics(
    address: SocketAddr,
    hard_fail: bool,
    mode: &'static str,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
) -> Result<(), BindError> {
    let Some(listener) = listen("metrics", address, hard_fail, &stop).await? else { return Ok(()) };
    let answer = move |request: ::http::Request<hyper::body::Incoming>| {
        let metrics = Arc::clone(&metrics);
        async move { metrics_response(&request, mode, &metrics).await }
    };
    http::serve(listener, answer, stop).await;
    Ok(())
}

/// Binds, again and again unless `hard_fail`. `None`: told to stop before it worked.
async fn listen(
    purpose: &'static str,
    address: SocketAddr,
    hard_fail: bool,
    stop: &CancellationToken,
) -> Result<Option<TcpListener>, BindError> {
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => {
                let address = listener.local_addr().unwrap_or(address);
                tracing::info!(%address, "{purpose}: listening");
                return Ok(Some(listener));
            }
            Err(source) if hard_fail => return Err(BindError { purpose, address, source }),
            Err(error) => {
                tracing::warn!(%address, %error, "{purpose}: cannot listen, next attempt in 5 s");
                tokio::select! {
                    () = tokio::time::sleep(BIND_RETRY) => {}
                    () = stop.cancelled() => return Ok(None),
                }
            }
        }
    }
}

fn health_response(path: &str, health: &SharedHealth, metrics: &Metrics) -> Response<Body> {
    let report = match path {
        "/healthz" | "/livez" => health.report(),
        _ => return not_found(),
    };
    let ready = path == "/healthz";
    let well = report.healthy && (!ready || report.node_eligible);
    let status = if well { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let family = if ready { &metrics.healthz } else { &metrics.livez };
    family.get_or_create(&[("code", status.as_u16().to_string())]).inc();
    let body = report.body(ready, well);
    respond(status, "application/json", body)
}

async fn metrics_response<B>(
    request: &::http::Request<B>,
    mode: &'static str,
    metrics: &Metrics,
) -> Response<Body> {
    match (request.uri().path(), request.method()) {
        ("/metrics", &Method::GET | &Method::HEAD) => {
            metrics.refresh().await;
            let accept = request.headers().get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
            let format = exposition::Format::wanted(accept.unwrap_or_default());
            match metrics.encode() {
                Ok(text) => respond(StatusCode::OK, format.content_type(), format.write(text)),
                Err(error) => plain(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
            }
        }
        ("/proxyMode", _) => plain(StatusCode::OK, mode),
        ("/healthz" | "/healthz/ping", _) => plain(StatusCode::OK, "ok"),
        ("/metrics", _) => plain(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD\n"),
        _ => not_found(),
    }
}

fn plain(status: StatusCode, body: impl Into<Bytes>) -> Response<Body> {
    respond(status, "text/plain; charset=utf-8", body)
}

fn not_found() -> Response<Body> {
    plain(StatusCode::NOT_FOUND, "404 page not found\n")
}

fn respond(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static(content_type));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, header::HeaderValue::from_static("nosniff"));
    response
}

#[cfg(test)]
mod tests;
