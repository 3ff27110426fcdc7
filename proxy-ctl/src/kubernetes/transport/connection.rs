//! The HTTP client, and its renewal when the files that it was made from have changed.

use std::{
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

use http::{HeaderValue, Response, StatusCode};
use hyper_util::client::legacy::connect::{Connect, proxy::Tunnel};
use jiff::{SignedDuration, Timestamp};
use kube::client::{Body, Client, ConfigExt as _};
use tokio::sync::{Mutex, Notify};
use tower::{
    BoxError, ServiceBuilder,
    filter::{AsyncFilterLayer, FilterLayer},
};

use super::{
    dial::{self, Connections},
    kubeconfig::{Config, Loaded},
    plugin,
    rate_limit::RateLimit,
    requests::{Requests, host},
    secrets::Secrets,
    token_file::TokenFile,
};
use crate::kubernetes::failure::{Failure, FailureReason};

/// The time that a request other than a list or a watch may take.
const ANSWER: Duration = Duration::from_secs(30);
/// The time before the expiry of its credentials at which a plugin is asked again.
const EXPIRES_SOON: SignedDuration = SignedDuration::from_secs(60);

/// The client, its credentials and its rate limit, which all watchers share.
pub(crate) struct ApiConnection {
    config: Config,
    limit: Arc<RateLimit>,
    /// The Accept header of requests for objects.
    pub(crate) accept: HeaderValue,
    requests: Requests,
    /// The current client. It is locked while the files are read and the plugin runs, so that the
    /// plugin runs once for all watchers.
    current: Mutex<Current>,
    /// True if the last answer came over HTTP/2, whose pings prove the connection.
    pub(crate) is_pinged: AtomicBool,
    /// Notified when a watcher succeeds after failures, so that the others end their delays.
    pub(crate) recovered: Notify,
}

#[derive(Default)]
struct Current {
    /// The client that is used now. If it is None, the next caller makes one.
    client: Option<Client>,
    generation: u64,
    fingerprint: u64,
    has_plugin: bool,
    /// The time when the plugin's credentials expire, if the plugin has named one.
    expires: Option<Timestamp>,
    /// The failure of the last attempt to make a client, and its time.
    failure: Option<(Instant, Failure)>,
}

impl Current {
    fn usable(&self) -> Option<(Client, u64)> {
        let expires_soon = self.expires.is_some_and(|at| at.duration_since(Timestamp::now()) < EXPIRES_SOON);
        self.client.clone().filter(|_| !expires_soon).map(|client| (client, self.generation))
    }
}

/// The result of renewing a client that failed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Renewed {
    /// The files are unchanged. Only a plugin may be asked again.
    Same,
    /// The client is replaced by one from other files, which is to be tried at once.
    New,
}

impl ApiConnection {
    pub(crate) fn new(config: Config, accept: HeaderValue, requests: Requests) -> Self {
        let limit = Arc::new(RateLimit::new(config.qps, config.burst));
        let (is_pinged, recovered) = (AtomicBool::new(false), Notify::new());
        Self { config, limit, accept, requests, current: Mutex::default(), is_pinged, recovered }
    }

    /// Returns the client to use now, and its generation for [`Self::renew`]. If there is none,
    /// this reads the files, and runs the credential plugin if the kubeconfig names one.
    pub(crate) async fn client(&self) -> Result<(Client, u64), Failure> {
        let asked = Instant::now();
        let mut current = self.current.lock().await;
        if let Some(client) = current.usable() {
            return Ok(client);
        }
        if let Some((_, failure)) = current.failure.as_ref().filter(|(failed, _)| *failed >= asked) {
            return Err(failure.clone());
        }
        match self.make(current.generation + 1).await {
            Ok((client, made)) => {
                *current = made;
                Ok((client, current.generation))
            }
            Err(failure) => {
                current.failure = Some((Instant::now(), failure.clone()));
                Err(failure)
            }
        }
    }

    async fn make(&self, generation: u64) -> Result<(Client, Current), Failure> {
        let mut loaded = self.load().await?;
        let mut expires = None;
        if let Some(plugin) = &loaded.plugin {
            let user = &mut loaded.client.auth_info;
            expires = plugin::ask(plugin, user, plugin::LIMIT)
                .await
                .map_err(|error| Failure::new(FailureReason::Credentials, error.to_string()))?;
        }
        let (fingerprint, has_plugin) = (loaded.fingerprint, loaded.plugin.is_some());
        let client = connect(loaded, &self.limit, &self.requests)?;
        let kept = Some(client.clone());
        Ok((client, Current { client: kept, generation, fingerprint, has_plugin, expires, failure: None }))
    }

    /// Loads the files on a blocking thread, because reading them may take long.
    async fn load(&self) -> Result<Loaded, Failure> {
        let config = self.config.clone();
        let unreadable = |problem: String| Failure::new(FailureReason::Credentials, problem);
        let loaded = tokio::task::spawn_blocking(move || config.load());
        let loaded = loaded.await.map_err(|error| unreadable(format!("reading credentials: {error}")))?;
        loaded.map_err(|error| unreadable(error.to_string()))
    }

    /// Reads the files again after a client of this generation has failed. If they have changed, or
    /// a plugin's credentials were not accepted, the next client is a new one.
    pub(crate) async fn renew(&self, generation: u64, reason: FailureReason) -> Result<Renewed, Failure> {
        let mut current = self.current.lock().await;
        if current.generation != generation {
            return Ok(Renewed::New);
        }
        let changed = self.load().await?.fingerprint != current.fingerprint;
        if changed || (current.has_plugin && reason == FailureReason::Unauthorized) {
            current.client = None;
        }
        Ok(if changed { Renewed::New } else { Renewed::Same })
    }

    /// Returns a client that outlives its credentials: each request goes through whichever client
    /// is current. A request that fails because of its credentials is not repeated, but the next
    /// one has the new credentials.
    pub(crate) fn lasting_client(self: &Arc<Self>) -> Client {
        let connection = Arc::clone(self);
        let service = tower::service_fn(move |request| {
            let connection = Arc::clone(&connection);
            async move { connection.send(request).await.map_err(BoxError::from) }
        });
        Client::new(service, "default")
    }

    async fn send(&self, request: http::Request<Body>) -> Result<Response<Body>, Failure> {
        let (client, generation) = self.client().await?;
        let answer = tokio::time::timeout(ANSWER, client.send(request)).await;
        let answer =
            answer.map_or_else(|_| Err(Failure::silence(ANSWER)), |sent| sent.map_err(Failure::from));
        let reason = match &answer {
            Err(failure) => Some(failure.reason),
            Ok(response) if response.status() == StatusCode::UNAUTHORIZED => {
                Some(FailureReason::Unauthorized)
            }
            Ok(_) => None,
        };
        if let Some(reason) = reason.filter(|reason| reason.is_about_credentials()) {
            self.renew(generation, reason).await?;
        }
        answer
    }
}

#[cfg(test)]
impl ApiConnection {
    /// Returns a connection whose only client is this one.
    pub(crate) fn with_client(client: Client) -> Self {
        let config = Config { master: Some("http://192.0.2.1".into()), ..Config::default() };
        let connection = Self::new(config, HeaderValue::from_static("*/*"), Requests::default());
        let current = Current { client: Some(client), generation: 1, ..Current::default() };
        Self { current: Mutex::new(current), ..connection }
    }
}

pub(crate) fn connect(
    loaded: Loaded,
    limit: &Arc<RateLimit>,
    requests: &Requests,
) -> Result<Client, kube::Error> {
    let Loaded { client: config, token_file, .. } = loaded;
    match config.proxy_url.clone() {
        None => {
            let connector = dial::with_tls(&config, dial::tcp())?;
            stack(&config, token_file, limit, requests, Connections::new(connector))
        }
        Some(proxy) => {
            let connector = dial::with_tls(&config, Tunnel::new(proxy, dial::tcp()))?;
            stack(&config, token_file, limit, requests, Connections::new(connector))
        }
    }
}

/// Builds kube's own stack without its retries, which would hide failures from us for minutes.
fn stack<C>(
    config: &kube::Config,
    token_file: Option<PathBuf>,
    limit: &Arc<RateLimit>,
    requests: &Requests,
    connections: Connections<C>,
) -> Result<Client, kube::Error>
where
    C: Connect + Clone + Send + Sync + 'static,
{
    let host = host(&config.cluster_url);
    let (limit, waits, requests) = (Arc::clone(limit), requests.clone(), requests.clone());
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
    let connections = Arc::new(connections);
    let service = ServiceBuilder::new()
        .layer(limit)
        .layer(config.base_uri_layer())
        .layer(config.extra_headers_layer()?)
        .option_layer(config.auth_layer()?)
        .option_layer(token)
        .service_fn(move |request: http::Request<Body>| {
            let (requests, http) = (requests.clone(), connections.for_request(request.uri()));
            let secrets = Secrets::of(request.headers());
            async move {
                let answer =
                    requests.measure(request, async move |request| http.request(request).await).await;
                secrets.cover(answer?).await
            }
        });
    Ok(Client::new(service, config.default_namespace.clone()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::*;

    /// Returns a connection with a plugin that appends a line to the file `runs` and then runs the
    /// script.
    fn with_plugin(folder: &TempDir, script: &str) -> ApiConnection {
        let kubeconfig = folder.path().join("kubeconfig");
        let runs = folder.path().join("runs");
        let command = serde_json::json!(["-c", format!("echo >> {}; {script}", runs.display())]);
        let text = format!(
            "{{current-context: c, contexts: [{{name: c, context: {{cluster: c, user: u}}}}], \
             clusters: [{{name: c, cluster: {{server: 'https://192.0.2.1'}}}}], \
             users: [{{name: u, user: {{exec: {{command: /bin/sh, args: {command}}}}}}}]}}"
        );
        fs::write(&kubeconfig, text).unwrap();
        let config = Config { kubeconfig: Some(kubeconfig), ..Config::default() };
        ApiConnection::new(config, HeaderValue::from_static("*/*"), Requests::default())
    }

    fn runs(folder: &TempDir) -> usize {
        fs::read_to_string(folder.path().join("runs")).unwrap().lines().count()
    }

    #[tokio::test]
    async fn a_failing_plugin_runs_once_for_all_who_wait_for_it_and_is_named_to_each() {
        let folder = tempfile::tempdir().unwrap();
        let connection = with_plugin(&folder, "exit 3");
        let (first, second) = tokio::join!(connection.client(), connection.client());
        for failure in [first.err().unwrap(), second.err().unwrap()] {
            assert_eq!(failure.reason, FailureReason::Credentials);
            assert!(failure.message.starts_with("credential plugin /bin/sh: failed"), "{failure}");
        }
        assert_eq!(runs(&folder), 1);
        assert!(connection.client().await.is_err());
        assert_eq!(runs(&folder), 2, "the next attempt is a new one");
    }

    #[tokio::test]
    async fn a_plugin_is_asked_again_when_its_credentials_expire_or_are_not_accepted() {
        let answer = |expires: &str| format!("echo '{{\"status\": {{\"token\": \"t\"{expires}}}}}'");
        let folder = tempfile::tempdir().unwrap();
        let connection = with_plugin(&folder, &answer(""));
        for _ in 0..3 {
            assert_eq!(connection.client().await.ok().unwrap().1, 1);
        }
        assert_eq!(connection.renew(1, FailureReason::Tls).await.unwrap(), Renewed::Same);
        assert_eq!(connection.client().await.ok().unwrap().1, 1);
        assert_eq!(connection.renew(1, FailureReason::Unauthorized).await.unwrap(), Renewed::Same);
        assert_eq!(connection.client().await.ok().unwrap().1, 2);
        assert_eq!(runs(&folder), 2);

        let folder = tempfile::tempdir().unwrap();
        let expired = r#", "expirationTimestamp": "2020-01-01T00:00:00Z""#;
        let connection = with_plugin(&folder, &answer(expired));
        for generation in 1..=2 {
            assert_eq!(connection.client().await.ok().unwrap().1, generation);
        }
    }

    #[tokio::test]
    async fn changed_files_make_a_new_client() {
        let folder = tempfile::tempdir().unwrap();
        let kubeconfig = folder.path().join("kubeconfig");
        let text = "{current-context: c, contexts: [{name: c, context: {cluster: c}}], \
                    clusters: [{name: c, cluster: {server: 'http://192.0.2.1'}}]}";
        fs::write(&kubeconfig, text).unwrap();
        let config = Config { kubeconfig: Some(kubeconfig.clone()), ..Config::default() };
        let connection = ApiConnection::new(config, HeaderValue::from_static("*/*"), Requests::default());
        connection.client().await.ok().unwrap();
        assert_eq!(connection.renew(1, FailureReason::Tls).await.unwrap(), Renewed::Same);
        fs::write(&kubeconfig, text.replace("192.0.2.1", "192.0.2.2")).unwrap();
        assert_eq!(connection.renew(1, FailureReason::Tls).await.unwrap(), Renewed::New);
        assert_eq!(connection.client().await.ok().unwrap().1, 2);
        assert_eq!(
            connection.renew(1, FailureReason::Tls).await.unwrap(),
            Renewed::New,
            "by another watcher"
        );
    }
}
