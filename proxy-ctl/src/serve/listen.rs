//! Binding the addresses of the servers.

use std::{
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use nix::sys::socket::{setsockopt, sockopt::Ipv6V6Only};
use tokio::net::{TcpListener, TcpSocket};
use tokio_util::sync::CancellationToken;

/// Pause between two attempts to bind an address.
const RETRY: Duration = Duration::from_secs(5);
/// Limit of the connections that wait to be accepted; the kernel's `net.core.somaxconn` is as high by default (5.4). Each third of
/// a second in which this process gets no CPU lets 4,000 wait under a flood of 12,000 a second.
const BACKLOG: u32 = 4096;

#[derive(Debug, thiserror::Error)]
#[error("{purpose}: cannot listen on {address}: {source}")]
pub struct BindError {
    pub purpose: &'static str,
    pub address: SocketAddr,
    pub source: io::Error,
}

/// Binds; retries unless `hard_fail`. `None`: `stop` was cancelled before an attempt succeeded.
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

/// The unspecified address of either family means both, as to kube-proxy: load balancers probe `0.0.0.0:10256` over
/// IPv6 too.
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
