//! Connections to the API server: how one is made, how a dead one is noticed, and how a node moves
//! to another server.
//!
//! HTTP/2 is used wherever the server offers it, as client-go does. All watches share one
//! connection, and a ping proves it as far as HTTP/2 goes. A load balancer that passes bytes on
//! answers TCP keepalive itself, but no pings. One that ends HTTP/2 itself answers pings too. A
//! loss behind it shows by missing bookmarks only.
//!
//! Over HTTP/1.1 a connection cannot be proven while a watch occupies it. The server is therefore
//! asked to end each watch soon.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use http::Uri;
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{
        Builder, Client as HttpClient,
        connect::{Connect, HttpConnector},
    },
    rt::{TokioExecutor, TokioTimer},
};
use kube::client::{Body, ConfigExt as _, RustlsTlsError};
use rustls::pki_types::ServerName;

use super::requests::is_watch;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The idle time of TCP keepalive. TCP notices a dead peer after 30 s: idle time + probes ×
/// interval.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 3;
/// The time after which a connection is given up if sent data is not acknowledged. Keepalive does
/// not cover this case, because TCP sends no probes meanwhile.
const UNACKNOWLEDGED: Duration = Duration::from_secs(30);
/// The silence after which an HTTP/2 connection is pinged. It is given up if the answer does not
/// come within [`PING_ANSWER`]: 40 s in all, where client-go takes 45 s.
const PING_AFTER: Duration = Duration::from_secs(25);
const PING_ANSWER: Duration = Duration::from_secs(15);
/// The number of bytes of an answer that an HTTP/1.1 connection holds at most before they are
/// parsed.
const READ_BUFFER: usize = 64 << 10;
/// The probability that a watch begins with a new connection. A node has about 50 watches an hour,
/// so it comes to a server that was started later within an hour or two. An API server without
/// `--goaway-chance`, which is the default, never asks its clients to move.
const RECONNECT_CHANCE: f64 = 0.02;

pub(crate) fn tcp() -> HttpConnector {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
    tcp.set_keepalive(Some(KEEPALIVE_IDLE));
    tcp.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    tcp.set_keepalive_retries(Some(KEEPALIVE_PROBES));
    tcp.set_tcp_user_timeout(Some(UNACKNOWLEDGED));
    tcp
}

/// Returns a connector that offers HTTP/2 and HTTP/1.1 to a server with TLS. kube's own connector
/// offers HTTP/1.1 only.
pub(super) fn with_tls<H>(config: &kube::Config, tcp: H) -> Result<HttpsConnector<H>, kube::Error> {
    let mut builder =
        HttpsConnectorBuilder::new().with_tls_config(config.rustls_client_config()?).https_or_http();
    if let Some(name) = &config.tls_server_name {
        let name = ServerName::try_from(name.clone())
            .map_err(|error| kube::Error::RustlsTls(RustlsTlsError::InvalidServerName(error)))?;
        builder = builder.with_server_name_resolver(FixedServerNameResolver::new(name));
    }
    Ok(builder.enable_all_versions().wrap_connector(tcp))
}

/// The connections that the requests of one client share.
pub(crate) struct Connections<C> {
    connector: C,
    reconnect_chance: f64,
    current: Mutex<HttpClient<C, Body>>,
}

impl<C: Connect + Clone + Send + Sync + 'static> Connections<C> {
    pub(crate) fn new(connector: C) -> Self {
        let current = Mutex::new(http(connector.clone()));
        Self { connector, reconnect_chance: RECONNECT_CHANCE, current }
    }

    /// Returns the connections to send a request for this URI over. Now and then a watch gets new
    /// ones. Answers that still come over the old ones are not disturbed. The old connections are
    /// closed after the last of those answers.
    pub(super) fn for_request(&self, uri: &Uri) -> HttpClient<C, Body> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if is_watch(uri) && fastrand::f64() < self.reconnect_chance {
            *current = http(self.connector.clone());
        }
        current.clone()
    }
}

fn http<C: Connect + Clone>(connector: C) -> HttpClient<C, Body> {
    builder().build(connector)
}

fn builder() -> Builder {
    let mut builder = HttpClient::builder(TokioExecutor::new());
    builder.timer(TokioTimer::new());
    builder.http1_max_buf_size(READ_BUFFER);
    builder.http2_keep_alive_interval(PING_AFTER).http2_keep_alive_timeout(PING_ANSWER);
    builder
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        pin::Pin,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
        task::{Context, Poll},
    };

    use bytes::Bytes;
    use http::{Request, Response};
    use http_body_util::BodyExt as _;
    use hyper::{
        body::{Frame, Incoming},
        server::conn::http2,
        service::service_fn,
    };
    use hyper_util::rt::TokioIo;
    use rstest::rstest;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional, duplex},
        net::TcpListener,
        sync::oneshot,
        time::Instant,
    };

    use super::*;

    /// Starts a server that answers each request of a connection and counts the connections.
    async fn server() -> (u16, Arc<AtomicUsize>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let connections = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&connections);
        tokio::spawn(async move {
            while let Ok((mut connection, _)) = listener.accept().await {
                counted.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(async move {
                    let mut request = [0; 4096];
                    while connection.read(&mut request).await.is_ok_and(|bytes| bytes > 0) {
                        let _client_may_be_gone =
                            connection.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
                    }
                });
            }
        });
        (port, connections)
    }

    #[rstest]
    #[case::watches_that_always_move("watch=true", 1.0, 4)]
    #[case::watches_that_never_move("watch=true", 0.0, 1)]
    #[case::other_requests_do_not_move("resourceVersion=0", 1.0, 1)]
    #[tokio::test]
    async fn watches_move_to_new_connections_with_the_probability(
        #[case] query: &str,
        #[case] reconnect_chance: f64,
        #[case] expected: usize,
    ) {
        let (port, made) = server().await;
        let connections = Connections { reconnect_chance, ..Connections::new(tcp()) };
        for _ in 0..4 {
            let uri: Uri = format!("http://127.0.0.1:{port}/api/v1/services?{query}").parse().unwrap();
            let request = Request::get(&uri).body(Body::empty()).unwrap();
            let answer = connections.for_request(&uri).request(request).await.unwrap();
            assert_eq!(&answer.into_body().collect().await.unwrap().to_bytes()[..], b"ok");
        }
        assert_eq!(made.load(Ordering::SeqCst), expected);
    }

    /// The body of a watch in which nothing happens.
    struct Quiet;

    impl hyper::body::Body for Quiet {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Pending
        }
    }

    /// Starts a server of watches over HTTP/2, behind a load balancer. Once it is told to, the load
    /// balancer passes nothing on any more, while its side of the connection stays open.
    async fn behind_a_load_balancer() -> (u16, oneshot::Sender<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (freeze, frozen) = oneshot::channel();
        tokio::spawn(async move {
            let (mut client, _) = listener.accept().await.unwrap();
            let (mut inside, server) = duplex(1 << 16);
            tokio::spawn(async move {
                let watch =
                    service_fn(|_: Request<Incoming>| async { Ok::<_, Infallible>(Response::new(Quiet)) });
                http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(server), watch).await
            });
            tokio::select! {
                passed = copy_bidirectional(&mut client, &mut inside) => panic!("{passed:?}"),
                _ = frozen => {}
            }
            std::future::pending::<()>().await;
        });
        (port, freeze)
    }

    #[tokio::test]
    async fn a_connection_that_nobody_answers_is_given_up_after_40_seconds_of_silence() {
        let (port, freeze) = behind_a_load_balancer().await;
        let client: HttpClient<_, Body> = builder().http2_only(true).build(tcp());
        let request = Request::get(format!("http://127.0.0.1:{port}/")).body(Body::empty()).unwrap();
        let answer = client.request(request).await.unwrap();
        freeze.send(()).unwrap();
        // The clock moves on only when everything waits.
        tokio::time::pause();
        let began = Instant::now();
        let end = answer.into_body().frame().await;
        assert!(end.is_some_and(|frame| frame.is_err()));
        // The silence began with the last bytes, which came before the clock stopped.
        let elapsed = began.elapsed().as_secs();
        assert!((30..=40).contains(&elapsed), "after {elapsed} s");
    }
}
