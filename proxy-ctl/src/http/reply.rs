//! Answers in the form of Go's HTTP server.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::Full;

pub(super) type Body = Full<Bytes>;
pub(super) type Reply = Response<Body>;

pub(super) const JSON: &str = "application/json";
pub(super) const TEXT: &str = "text/plain; charset=utf-8";
pub(super) const HTML: &str = "text/html; charset=utf-8";

pub(super) fn plain(status: StatusCode, body: impl Into<Bytes>) -> Reply {
    reply(status, TEXT, body)
}

pub(super) fn not_found() -> Reply {
    plain(StatusCode::NOT_FOUND, "404 page not found\n")
}

pub(super) fn reply(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Reply {
    let mut response = open(status, content_type, body);
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// Returns an answer without the header X-Content-Type-Options, so that browsers may guess the
/// type.
pub(super) fn open(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Reply {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}
