//! Binding of the servers' addresses.

use std::{
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use nix::sys::socket::{setsockopt, sockopt::Ipv6V6Only};
use tokio::net::{TcpListener, TcpSocket};
use tokio_util::sync::CancellationToken;

/// The pause between two attempts to bind an address.
const RETRY: Duration = Duration::from_secs(5);
/// The limit of connections that wait to be accepted. The kernel's `net.core.somaxconn` is as high
/// by default since Linux 5.4. During a flood of 12,000 connections a second, 4,000 of them wait
/// after a third of a second without CPU for this process.
const BACKLOG: u32 = 4096;

#[derive(Debug, thiserror::Error)]
#[error("{purpose}: cannot listen on {address}: {source}")]
pub struct BindError {
    pub purpose: &'static str,
    pub address: SocketAddr,
    pub source: io::Error,
}

/// Binds an address. After a failure it retries unless `hard_fail` is set. Returns `None` if `stop`
/// was cancelled before an attempt succeeded.
pub(super) async fn listen(
    purpose: &'static str,
    address: SocketAddr,
    hard_fail: bool,
    stop: &CancellationToken,
) -> Result<Option<TcpListener>, BindError> {
    loop {
        match bind(address) {
            Ok(listener) => {
                let address = listener.local_addr().unwrap_or(address);
                tracing::info!(%address, "{purpose}: listening");
                return Ok(Some(listener));
            }
            Err(source) if hard_fail => return Err(BindError { purpose, address, source }),
            Err(error) => {
                tracing::warn!(%address, %error, "{purpose}: cannot listen, next attempt in 5 s");
                tokio::select! {
                    () = tokio::time::sleep(RETRY) => {}
                    () = stop.cancelled() => return Ok(None),
                }
            }
        }
    }
}

/// Binds an address. The unspecified address of either family means both families, as in
/// kube-proxy: load balancers probe `0.0.0.0:10256` over IPv6 too.
pub(super) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    if address.ip().is_unspecified() {
        match bind_both(address.port()) {
            // The kernel was started without IPv6.
            Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) && address.is_ipv4() => {}
            bound => return bound,
        }
    }
    let socket = match address.ip() {
        IpAddr::V4(_) => TcpSocket::new_v4(),
        IpAddr::V6(_) => TcpSocket::new_v6(),
    }?;
    finish(socket, address)
}

fn bind_both(port: u16) -> io::Result<TcpListener> {
    let socket = TcpSocket::new_v6()?;
    setsockopt(&socket, Ipv6V6Only, &false)?;
    finish(socket, (Ipv6Addr::UNSPECIFIED, port).into())
}

fn finish(socket: TcpSocket, address: SocketAddr) -> io::Result<TcpListener> {
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}
