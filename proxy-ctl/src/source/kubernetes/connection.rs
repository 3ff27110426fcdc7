//! The HTTP client, and its renewal when the files that it was made from have changed.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::HeaderValue;
use hyper_util::{
    client::legacy::{
        Client as HttpClient,
        connect::{HttpConnector, proxy::Tunnel},
    },
    rt::TokioExecutor,
};
use kube::client::{Body, Client, ConfigExt};
use tokio::sync::Notify;
use tower::{
    BoxError, ServiceBuilder,
    filter::{AsyncFilterLayer, FilterLayer},
};

use super::{
    answer::Answer,
    failure::{Failure, FailureReason},
    kubeconfig::{Config, ConfigError, Loaded},
    rate_limit::RateLimit,
    requests::{Requests, host},
    token_file::TokenFile,
};
use crate::config::Encoding;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A dead peer is noticed after idle time + probes × interval: 30 s, as long as kube-proxy's HTTP/2 pings take.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 3;
/// Keepalive probes are not sent while something sent is not acknowledged: that is given up after this time.
const UNACKNOWLEDGED: Duration = Duration::from_secs(30);
/// For the answer to a request that is neither a list nor a watch.
const ANSWER: Duration = Duration::from_secs(30);

/// What all watchers share: one client, one set of credentials, one rate.
pub(super) struct Connection {
    config: Config,
    limit: Arc<RateLimit>,
    /// Of requests for objects.
    pub(super) accept: HeaderValue,
    requests: Requests,
    current: Mutex<Current>,
    /// Told when a watcher that had failed gets through again: the others need not sit out their delays.
    pub(super) recovered: Notify,
}

#[derive(Default)]
struct Current {
    /// None until it is first asked for.
    client: Option<Client>,
    generation: u64,
    fingerprint: u64,
    has_plugin: bool,
}

/// What has become of a client that failed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Renewed {
    /// It is as good as any.
    Same,
    /// There is another one, made from other files: try it at once.
    New,
    /// The credential plugin was asked again. Nobody knows whether its answer is better.
    Asked,
}

impl Connection {
    pub(super) fn new(config: Config, accept: HeaderValue, requests: Requests) -> Self {
        let limit = Arc::new(RateLimit::new(config.qps, config.burst));
        let current = Mutex::default();
        Self { config, limit, accept, requests, current, recovered: Notify::new() }
    }

    /// The client to use now, and its generation for [`Self::renew`]. Reads files, and runs the credential plugin
    /// if the kubeconfig names one, when it is first called.
    pub(super) async fn client(self: &Arc<Self>) -> Result<(Client, u64), Failure> {
        if let Some(client) = self.ready() {
            return Ok(client);
        }
        let connection = Arc::clone(self);
        let made = tokio::task::spawn_blocking(move || {
            let mut current = connection.lock();
            match &current.client {
                Some(client) => Ok((client.clone(), current.generation)),
                None => connection.make(&mut current),
            }
        });
        made.await.unwrap_or_else(|error| {
            Err(Failure::new(FailureReason::Credentials, format!("making a client: {error}")))
        })
    }

    /// Of the bodies that are sent.
    pub(super) fn encoding(&self) -> Encoding {
        self.config.content_type
    }

    fn ready(&self) -> Option<(Client, u64)> {
        // Whoever holds it longer runs a plugin: that is no place to wait for on this thread.
        let current = self.current.try_lock().ok()?;
        current.client.clone().map(|client| (client, current.generation))
    }

    /// To be called when a client of this generation has failed. Reads the files again, and if they have
    /// changed makes a new client; also if they have not, where a plugin's credentials were not accepted.
    pub(super) async fn renew(
        self: &Arc<Self>,
        generation: u64,
        reason: FailureReason,
    ) -> Result<Renewed, Failure> {
        let connection = Arc::clone(self);
        let renewed = tokio::task::spawn_blocking(move || {
            let mut current = connection.lock();
            if current.generation != generation {
                return Ok(Renewed::New);
            }
            let fingerprint = connection.config.load().map_err(unreadable)?.fingerprint;
            let changed = fingerprint != current.fingerprint;
            let ask = current.has_plugin && reason == FailureReason::Unauthorized;
            if !changed && !ask {
                return Ok(Renewed::Same);
            }
            connection.make(&mut current)?;
            Ok(if changed { Renewed::New } else { Renewed::Asked })
        });
        // Reading files may take its time, but the other watchers must not wait for it. It is cancelled at the end
        // of the process only.
        renewed.await.unwrap_or(Ok(Renewed::Same))
    }

    fn make(&self, current: &mut Current) -> Result<(Client, u64), Failure> {
        let loaded = self.config.load().map_err(unreadable)?;
        let (fingerprint, has_plugin) = (loaded.fingerprint, loaded.has_plugin);
        let client = connect(loaded, &self.limit, &self.requests)?;
        let generation = current.generation + 1;
        *current = Current { client: Some(client.clone()), generation, fingerprint, has_plugin };
        Ok((client, generation))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends one request and returns its answer's body. Credentials that have changed are used at once.
    pub(super) async fn ask(
        self: &Arc<Self>,
        request: impl Fn() -> Result<http::Request<Vec<u8>>, http::Error>,
    ) -> Result<Bytes, Failure> {
        loop {
            let (client, generation) = self.client().await?;
            let request =
                request().map_err(|error| Failure::new(FailureReason::Malformed, error.to_string()))?;
            let answer =
                async { Answer::new(client.send(request.map(Body::from)).await?).await?.whole().await };
            let failure = match tokio::time::timeout(ANSWER, answer).await {
                Ok(Ok(body)) => return Ok(body),
                Ok(Err(failure)) => failure,
                Err(_) => Failure::silence(ANSWER),
            };
            if !failure.reason.is_about_credentials()
                || self.renew(generation, failure.reason).await? != Renewed::New
            {
                return Err(failure);
            }
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "as map_err wants it")]
fn unreadable(error: ConfigError) -> Failure {
    Failure::new(FailureReason::Credentials, error.to_string())
}

fn connect(loaded: Loaded, limit: &Arc<RateLimit>, requests: &Requests) -> Result<Client, kube::Error> {
    let Loaded { client: config, token_file, .. } = loaded;
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
    tcp.set_keepalive(Some(KEEPALIVE_IDLE));
    tcp.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    tcp.set_keepalive_retries(Some(KEEPALIVE_PROBES));
    tcp.set_tcp_user_timeout(Some(UNACKNOWLEDGED));

    match config.proxy_url.clone() {
        None => {
            let tls = config.rustls_https_connector_with_connector(tcp)?;
            stack(&config, token_file, limit, requests, HttpClient::builder(TokioExecutor::new()).build(tls))
        }
        Some(proxy) => {
            let tls = config.rustls_https_connector_with_connector(Tunnel::new(proxy, tcp))?;
            stack(&config, token_file, limit, requests, HttpClient::builder(TokioExecutor::new()).build(tls))
        }
    }
}

/// kube's own stack less its retries: they hide failures from us, for minutes.
fn stack<C>(
    config: &kube::Config,
    token_file: Option<PathBuf>,
    limit: &Arc<RateLimit>,
    requests: &Requests,
    http: HttpClient<C, Body>,
) -> Result<Client, kube::Error>
where
    C: hyper_util::client::legacy::connect::Connect + Clone + Send + Sync + 'static,
{
    let host = host(&config.cluster_url);
    let (limit, waits) = (Arc::clone(limit), requests.clone());
    let limit = AsyncFilterLayer::new(move |request: http::Request<Body>| {
        let (limit, waits, host) = (Arc::clone(&limit), waits.clone(), host.clone());
        async move {
            let began = Instant::now();
            limit.wait().await;
            waits.waited(request.method(), host, began.elapsed());
            Ok::<_, BoxError>(request)
        }
    });
    let token = token_file.map(|path| {
        let token = TokenFile::new(path);
        FilterLayer::new(move |mut request: http::Request<Body>| -> Result<_, BoxError> {
            let token = token.read()?;
            request.headers_mut().insert(http::header::AUTHORIZATION, token);
            Ok(request)
        })
    });
    let service = ServiceBuilder::new()
        .layer(limit)
        .layer(config.base_uri_layer())
        .layer(config.extra_headers_layer()?)
        .option_layer(config.auth_layer()?)
        .option_layer(token)
        .map_err(BoxError::from)
        .service(requests.measure(http));
    Ok(Client::new(service, config.default_namespace.clone()))
}
