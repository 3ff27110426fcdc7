//! Serves TCP. Connections are accepted, connected to an endpoint that answers, and carried until
//! both sides have ended.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use socket2::{SockRef, TcpKeepalive};
use tokio::{
    net::{TcpListener, TcpStream},
    time,
};
use tokio_util::sync::CancellationToken;

use super::{
    both_ways::copy_both_ways,
    shared::{Permit, Portal, count},
};

/// The time that each attempt waits for an endpoint.
pub(super) const DIAL_TIMEOUTS: [Duration; 4] =
    [Duration::from_millis(250), Duration::from_millis(500), Duration::from_secs(1), Duration::from_secs(2)];

/// The pause after a failure of accept(2) that is not of one client. Waiting clients stay in the
/// queue, and another try at once would fail too.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The interval of keepalive, which finds a peer that is gone without a word.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// Accepts connections until it is stopped. Accepted connections go on by themselves.
pub(super) async fn serve(listener: TcpListener, portal: Portal, stop: CancellationToken) {
    let accept = async {
        loop {
            match listener.accept().await {
                Ok((client, address)) => {
                    let permit = portal.shared.descriptors.for_connection().await;
                    tokio::spawn(carry(client, address.ip(), portal.clone(), permit));
                }
                Err(error) if is_of_the_client(&error) => {}
                Err(error) => {
                    tracing::warn!(%error, listener = ?listener.local_addr().ok(), "accepting failed");
                    time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    };
    tokio::select! {
        () = stop.cancelled() => {}
        () = accept => {}
    }
}

/// Returns true for errors of the new connection, which accept(2) passes on.
fn is_of_the_client(error: &io::Error) -> bool {
    let of_process = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM, libc::EINVAL, libc::EBADF];
    !error.raw_os_error().is_some_and(|errno| of_process.contains(&errno))
}

async fn carry(mut client: TcpStream, address: IpAddr, portal: Portal, _permit: Option<Permit>) {
    let Some(mut endpoint) = dial(address, &portal).await else {
        reset(&client);
        return;
    };
    count(&portal.shared.counters.connections);
    for stream in [&client, &endpoint] {
        if let Err(error) = tune(stream) {
            tracing::debug!(%error, "a connection is slower, or its end is found later");
        }
    }
    if copy_both_ways(&mut client, &mut endpoint).await.is_err() {
        reset(&client);
        reset(&endpoint);
    }
}

fn tune(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE);
    SockRef::from(stream).set_tcp_keepalive(&keepalive)
}

/// Makes the peer get RST instead of FIN, because it has not got everything.
fn reset(stream: &TcpStream) {
    if let Err(error) = SockRef::from(stream).set_linger(Some(Duration::ZERO)) {
        tracing::debug!(%error, "a connection ends in order where it should be reset");
    }
}

/// Dials an endpoint. `None`: no endpoint is for this client, or none answered.
async fn dial(client: IpAddr, portal: &Portal) -> Option<TcpStream> {
    let mut tried: Vec<SocketAddr> = Vec::new();
    for timeout in DIAL_TIMEOUTS {
        let endpoint = portal.choose(client, &tried).ok()?;
        let timed_out = |_| Err(io::ErrorKind::TimedOut.into());
        match time::timeout(timeout, TcpStream::connect(endpoint)).await.unwrap_or_else(timed_out) {
            Ok(stream) => return Some(stream),
            Err(error) => portal.failed(endpoint, &error),
        }
        tried.push(endpoint);
    }
    None
}
