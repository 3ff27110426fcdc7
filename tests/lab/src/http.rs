//! Requests over HTTP.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, Result};

pub struct Answer {
    pub status: u16,
    /// Status line and headers.
    pub head: String,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// Returns status and body of `GET http://address/path`, with the limit of [`request`].
pub fn get(address: SocketAddr, path: &str, limit: Duration) -> Result<(u16, Vec<u8>)> {
    request(address, "GET", path, &[], None, limit).map(|answer| (answer.status, answer.body))
}

/// Sends a request of HTTP/1.0, so that nothing is chunked and the answer ends with the connection.
/// `limit` applies to the connection, and to each piece of the answer.
pub fn request(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: Option<&str>,
    limit: Duration,
) -> Result<Answer> {
    let exchange = || {
        let mut stream = TcpStream::connect_timeout(&address, limit)?;
        stream.set_read_timeout(Some(limit))?;
        let mut request = format!("{method} {path} HTTP/1.0\r\nHost: {address}\r\nConnection: close\r\n");
        for (name, value) in headers {
            request.push_str(&format!("{name}: {value}\r\n"));
        }
        if let Some(body) = body {
            request.push_str(&format!("Content-Length: {}\r\n", body.len()));
        }
        write!(stream, "{request}\r\n{}", body.unwrap_or_default())?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).map(|_| answer)
    };
    let mut answer = exchange().with_context(|| format!("{method} http://{address}{path}"))?;
    let end = answer.windows(4).position(|part| part == b"\r\n\r\n");
    let body = answer.split_off(end.with_context(|| format!("no HTTP answer from {address}"))? + 4);
    let head = String::from_utf8_lossy(&answer).into_owned();
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok(Answer { status: status.with_context(|| format!("no HTTP status from {address}"))?, head, body })
}
