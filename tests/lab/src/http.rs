//! One request over HTTP.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, Result};

/// Status and body of `GET http://address/path`. `limit` is for the connection, and for each piece of the answer.
pub fn get(address: SocketAddr, path: &str, limit: Duration) -> Result<(u16, Vec<u8>)> {
    let exchange = || {
        let mut stream = TcpStream::connect_timeout(&address, limit)?;
        stream.set_read_timeout(Some(limit))?;
        write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).map(|_| answer)
    };
    let mut answer = exchange().with_context(|| format!("GET http://{address}{path}"))?;
    let end = answer.windows(4).position(|part| part == b"\r\n\r\n");
    let body = answer.split_off(end.with_context(|| format!("no HTTP answer from {address}"))? + 4);
    let status = String::from_utf8_lossy(&answer).split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.with_context(|| format!("no HTTP status from {address}"))?, body))
}
