//! The HTTP client, and its renewal when the files that it was made from have changed.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use hyper_util::{
    client::legacy::{
        Client as HttpClient,
        connect::{HttpConnector, proxy::Tunnel},
    },
    rt::TokioExecutor,
};
use kube::client::{Body, Client, ConfigExt};
use tokio::sync::Notify;
use tower::{BoxError, ServiceBuilder, filter::FilterLayer};

use super::kubeconfig::{Config, ConfigError, Loaded};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A dead peer is noticed after idle time + probes × interval: 30 s, as long as kube-proxy's HTTP/2 pings take.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 3;

/// What all watchers share: one client, one set of credentials.
pub(super) struct Connection {
    config: Config,
    current: Mutex<Current>,
    /// Told when a watcher that had failed gets through again: the others need not sit out their delays.
    pub(super) recovered: Notify,
}

struct Current {
    client: Client,
    generation: u64,
    fingerprint: u64,
}

impl Connection {
    /// Must be called within a tokio runtime.
    pub(super) fn new(config: Config, loaded: Loaded) -> Result<Self, kube::Error> {
        let fingerprint = loaded.fingerprint;
        let current = Current { client: connect(loaded)?, generation: 0, fingerprint };
        Ok(Self { config, current: Mutex::new(current), recovered: Notify::new() })
    }

    /// The client to use now, and its generation for [`Self::renew`].
    pub(super) fn client(&self) -> (Client, u64) {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        (current.client.clone(), current.generation)
    }

    /// To be called when a client of this generation has failed. Reads the files again, and if they have
    /// changed makes a new client. True if there is one that the caller has not used yet.
    pub(super) fn renew(&self, generation: u64) -> Result<bool, ConfigError> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.generation != generation {
            return Ok(true);
        }
        let loaded = self.config.load()?;
        let fingerprint = loaded.fingerprint;
        if fingerprint == current.fingerprint {
            return Ok(false);
        }
        let path = self.config.kubeconfig.clone().unwrap_or_default();
        let client =
            connect(loaded).map_err(|error| ConfigError::Parse { path, problem: error.to_string() })?;
        *current = Current { client, generation: generation + 1, fingerprint };
        Ok(true)
    }
}

fn connect(loaded: Loaded) -> Result<Client, kube::Error> {
    let Loaded { client: config, token_file, .. } = loaded;
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
    tcp.set_keepalive(Some(KEEPALIVE_IDLE));
    tcp.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    tcp.set_keepalive_retries(Some(KEEPALIVE_PROBES));

    match config.proxy_url.clone() {
        None => {
            let tls = config.rustls_https_connector_with_connector(tcp)?;
            stack(&config, token_file, HttpClient::builder(TokioExecutor::new()).build(tls))
        }
        Some(proxy) => {
            let tls = config.rustls_https_connector_with_connector(Tunnel::new(proxy, tcp))?;
            stack(&config, token_file, HttpClient::builder(TokioExecutor::new()).build(tls))
        }
    }
}

/// kube's own stack less its retries: they hide failures from us, for minutes.
fn stack<C>(
    config: &kube::Config,
    token_file: Option<PathBuf>,
    http: HttpClient<C, Body>,
) -> Result<Client, kube::Error>
where
    C: hyper_util::client::legacy::connect::Connect + Clone + Send + Sync + 'static,
{
    let token = token_file.map(|path| {
        FilterLayer::new(move |mut request: http::Request<Body>| -> Result<_, BoxError> {
            let token = read_token(&path)?;
            request.headers_mut().insert(http::header::AUTHORIZATION, token);
            Ok(request)
        })
    });
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .layer(config.extra_headers_layer()?)
        .option_layer(config.auth_layer()?)
        .option_layer(token)
        .map_err(BoxError::from)
        .service(http);
    Ok(Client::new(service, config.default_namespace.clone()))
}

#[derive(Debug, thiserror::Error)]
pub(super) enum TokenFileError {
    #[error("token file {path}: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("token file {path}: is empty")]
    Empty { path: PathBuf },
    #[error("token file {path}: holds characters that no token has")]
    Invalid { path: PathBuf },
}

/// The bearer token that `path` holds now. Requests are rare, so it is read for each: a token is used from
/// the moment it is there. White space around it is not part of it.
pub(super) fn read_token(path: &Path) -> Result<http::HeaderValue, TokenFileError> {
    let text =
        fs::read_to_string(path).map_err(|source| TokenFileError::Read { path: path.to_owned(), source })?;
    let token = text.trim();
    if token.is_empty() {
        return Err(TokenFileError::Empty { path: path.to_owned() });
    }
    let mut header = http::HeaderValue::try_from(format!("Bearer {token}"))
        .map_err(|_| TokenFileError::Invalid { path: path.to_owned() })?;
    header.set_sensitive(true);
    Ok(header)
}
