//! The API server's address and the credentials for it, from a kubeconfig file or a pod's service
//! account.
//!
//! All files are read and checked here, so that an error names file and field before anything is
//! started.

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    path::{Path, PathBuf},
};

use http::{HeaderValue, Uri};
use kube::{
    client::{ConfigExt, RustlsTlsError},
    config::{AuthInfo, ExecConfig, InClusterError, Kubeconfig, KubeconfigError, LoadDataError},
};
use secrecy::ExposeSecret as _;

use super::token_file::{bearer, read_token};
use crate::{
    config::{Encoding, without_userinfo},
    version,
};

const NO_PEM: &str = "is not in the form of PEM";

/// The settings for the API server.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    /// The path from `--kubeconfig` or `clientConnection.kubeconfig`. None stands for the pod's
    /// service account. The variable KUBECONFIG is not consulted, as in kube-proxy.
    pub kubeconfig: Option<PathBuf>,
    /// The value of `--master`, which overrides the server's address. Without a kubeconfig it is
    /// the only setting.
    pub master: Option<String>,
    /// The value of `clientConnection.qps`: requests per second, watches included, once `burst` is
    /// used up. 0 stands for 5, as in client-go. A negative value means no limit.
    pub qps: f64,
    /// The value of `clientConnection.burst`: requests at once. 0 stands for 10, as in client-go.
    pub burst: u32,
    /// The value of `clientConnection.contentType`: the encoding of bodies, and the encoding that
    /// answers are requested in.
    pub content_type: Encoding,
    /// The value of `clientConnection.acceptContentTypes`: the encodings that answers are requested
    /// in instead.
    pub accept_content_types: Option<String>,
    /// True if no streaming list is to be asked for, because the feature gate WatchListClient is
    /// off.
    pub plain_lists: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("clientConnection.acceptContentTypes: {value:?} is no value of an HTTP header")]
    Accept { value: String },
    #[error("kubeconfig {path}: cannot be read: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("kubeconfig {path}: {problem}")]
    Parse { path: PathBuf, problem: String },
    #[error("kubeconfig {path}: {field}: {problem}")]
    Field { path: PathBuf, field: String, problem: String },
    #[error("--master={value}: {problem}; a URL such as https://10.0.0.1:6443 is needed")]
    Master { value: String, problem: String },
    #[error(
        "KUBERNETES_SERVICE_HOST or KUBERNETES_SERVICE_PORT is not set: outside a pod the API server must be named by \
         --kubeconfig or clientConnection.kubeconfig"
    )]
    NotInCluster,
    #[error("the pod's service account in /var/run/secrets/kubernetes.io/serviceaccount: {problem}")]
    InCluster { problem: String },
}

/// The configuration as read from its files at one moment. It must not be logged, because it holds
/// credentials.
#[derive(Clone)]
pub(crate) struct Loaded {
    /// The client's configuration without the token file and the plugin.
    pub(crate) client: kube::Config,
    /// The file of the bearer token, which is read for every request.
    pub(crate) token_file: Option<PathBuf>,
    /// The plugin that is still to be asked for the credentials of `client`.
    pub(crate) plugin: Option<ExecConfig>,
    /// A hash of the files that went into `client`. It changes when one of them has other contents.
    pub(super) fingerprint: u64,
    /// True if there is a user whose credentials are withheld, because the server is without TLS.
    pub(crate) is_user_withheld: bool,
}

impl Config {
    /// Returns the Accept header of requests for objects, as client-go sends it.
    pub(crate) fn accept(&self) -> Result<HeaderValue, ConfigError> {
        let value = self.accept_content_types.clone().unwrap_or_else(|| self.content_type.preferred());
        HeaderValue::try_from(&value).map_err(|_| ConfigError::Accept { value })
    }

    /// Reads and checks everything. No connection is made and no plugin is run.
    pub(crate) fn load(&self) -> Result<Loaded, ConfigError> {
        let master = self.master.as_deref().map(|master| {
            let value = || without_userinfo(master);
            server_url(master).map_err(|problem| ConfigError::Master { value: value(), problem })
        });
        let mut loaded = match (&self.kubeconfig, master.transpose()?) {
            (Some(path), master) => from_kubeconfig(path, master)?,
            // `--master` alone is for an API server without authentication, such as one behind
            // `kubectl proxy`.
            (None, Some(master)) => Loaded::new(kube::Config::new(master)),
            (None, None) => in_cluster()?,
        };
        if let Ok(agent) = HeaderValue::try_from(user_agent()) {
            loaded.client.headers.push((http::header::USER_AGENT, agent));
        }
        Ok(loaded)
    }
}

impl Loaded {
    /// Removes from `client` what this program does itself instead of kube. As in client-go, a
    /// token wins over a token file, and a token file wins over a plugin.
    fn new(mut client: kube::Config) -> Self {
        let user = &mut client.auth_info;
        let (token_file, plugin) = (user.token_file.take(), user.exec.take());
        let token_file = token_file.filter(|_| user.token.is_none()).map(PathBuf::from);
        let plugin = plugin.filter(|_| user.token.is_none() && token_file.is_none());
        Self { client, token_file, plugin, fingerprint: 0, is_user_withheld: false }
    }

    /// Removes the credentials, which are not sent without TLS. client-go does the same.
    fn without_user(self) -> Self {
        let mut anonymous = Self { token_file: None, plugin: None, is_user_withheld: true, ..self };
        anonymous.client.auth_info = AuthInfo::default();
        anonymous
    }
}

/// The names in the current context of a kubeconfig. They are kept because kube's errors do not
/// always include them.
struct ContextNames {
    context: String,
    cluster: String,
    user: String,
}

impl ContextNames {
    fn of(kubeconfig: &Kubeconfig) -> Self {
        let context = kubeconfig.current_context.clone().unwrap_or_default();
        let named = kubeconfig.contexts.iter().find(|named| named.name == context);
        let named = named.and_then(|named| named.context.clone()).unwrap_or_default();
        Self { context, cluster: named.cluster, user: named.user.unwrap_or_default() }
    }

    fn in_context(&self, field: &str) -> String {
        format!("contexts[name={}].context.{field}", self.context)
    }

    fn in_cluster(&self, field: &str) -> String {
        format!("clusters[name={}].cluster.{field}", self.cluster)
    }

    fn in_user(&self, field: &str) -> String {
        format!("users[name={}].user.{field}", self.user)
    }

    /// Returns the field that an error is about, or None if it is about the whole file.
    #[expect(clippy::wildcard_enum_match_arm, reason = "the rest is about the whole file")]
    fn field(&self, error: &KubeconfigError) -> Option<String> {
        Some(match error {
            KubeconfigError::CurrentContextNotSet | KubeconfigError::LoadContext(_) => {
                "current-context".into()
            }
            KubeconfigError::LoadClusterOfContext(_) => self.in_context("cluster"),
            KubeconfigError::MissingClusterUrl | KubeconfigError::ParseClusterUrl(_) => {
                self.in_cluster("server")
            }
            KubeconfigError::ParseProxyUrl(_) => self.in_cluster("proxy-url"),
            KubeconfigError::LoadCertificateAuthority(_) | KubeconfigError::ParseCertificates(_) => {
                self.in_cluster("certificate-authority")
            }
            KubeconfigError::LoadClientCertificate(_) => self.in_user("client-certificate"),
            KubeconfigError::LoadClientKey(_) => self.in_user("client-key"),
            _ => return None,
        })
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "the rest is about certificate and key")]
    fn field_of_tls(&self, error: &kube::Error) -> String {
        match error {
            kube::Error::InferKubeconfig(error) => self.field(error).unwrap_or_else(|| "users".into()),
            kube::Error::RustlsTls(RustlsTlsError::AddRootCertificate(_)) => {
                self.in_cluster("certificate-authority")
            }
            _ => self.in_user("client-certificate"),
        }
    }
}

/// Loads a kubeconfig. `master` replaces the server's address.
fn from_kubeconfig(path: &Path, master: Option<Uri>) -> Result<Loaded, ConfigError> {
    let wrong = |field: String, problem: String| ConfigError::Field { path: path.to_owned(), field, problem };
    let mut kubeconfig = Kubeconfig::read_from(path).map_err(|error| unusable(path, error))?;
    let names = ContextNames::of(&kubeconfig);
    let cluster = kubeconfig.clusters.iter_mut().find(|named| named.name == names.cluster);
    let mut proxy = None;
    if let Some(cluster) = cluster.and_then(|named| named.cluster.as_mut()) {
        let server = match master {
            Some(master) => {
                // The TLS server name belongs to the replaced server.
                cluster.tls_server_name = None;
                master
            }
            None => server_url(cluster.server.as_deref().unwrap_or_default())
                .map_err(|problem| wrong(names.in_cluster("server"), problem))?,
        };
        cluster.server = Some(server.to_string());
        proxy = cluster.proxy_url.clone().filter(|url| !url.is_empty());
    }
    // kube treats an unknown user as no user.
    if !names.user.is_empty() && !kubeconfig.auth_infos.iter().any(|named| named.name == names.user) {
        return Err(wrong(names.in_context("user"), format!("no user is named {:?}", names.user)));
    }
    let mut client = kube::Config::try_from(kubeconfig).map_err(|error| match names.field(&error) {
        Some(field) => wrong(field, without_data(&error)),
        None => unusable(path, error),
    })?;
    // Only a proxy that the file names is used. HTTPS_PROXY may be meant for other programs, and
    // with it the way to the API server would lead out of the cluster and back.
    client.proxy_url = client.proxy_url.filter(|_| proxy.is_some());
    if let Some(url) = &client.proxy_url
        && url.scheme_str() != Some("http")
    {
        let url = without_userinfo(&url.to_string());
        return Err(wrong(names.in_cluster("proxy-url"), format!("{url}: only http:// proxies can be used")));
    }
    let mut loaded = Loaded::new(client);
    if loaded.client.cluster_url.scheme_str() == Some("http") && !names.user.is_empty() {
        loaded = loaded.without_user();
    }
    if let Some(file) = &loaded.token_file {
        read_token(file).map_err(|error| wrong(names.in_user("tokenFile"), error.to_string()))?;
    }
    if let Some(token) = &loaded.client.auth_info.token
        && let Err(error) = bearer(token.expose_secret())
    {
        return Err(wrong(names.in_user("token"), error.to_string()));
    }
    let tls = loaded.client.rustls_client_config();
    tls.map_err(|error| {
        let problem = if let kube::Error::InferKubeconfig(error) = &error {
            without_data(error)
        } else if let kube::Error::RustlsTls(RustlsTlsError::InvalidIdentityPem(_)) = &error {
            NO_PEM.to_owned()
        } else {
            error.to_string()
        };
        wrong(names.field_of_tls(&error), problem)
    })?;
    loaded.fingerprint = fingerprint(path, &loaded.client)
        .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    Ok(loaded)
}

/// Returns a hash of the contents of all files that went into `client`.
fn fingerprint(kubeconfig: &Path, client: &kube::Config) -> io::Result<u64> {
    let user = &client.auth_info;
    let mut hasher = DefaultHasher::new();
    fs::read(kubeconfig)?.hash(&mut hasher);
    client.root_cert.hash(&mut hasher);
    for file in [&user.client_certificate, &user.client_key].into_iter().flatten() {
        fs::read(file)?.hash(&mut hasher);
    }
    Ok(hasher.finish())
}

/// Returns the message of an error without secrets: the error of a decoder quotes its input.
#[expect(clippy::wildcard_enum_match_arm, reason = "the rest of them says what is wrong")]
fn without_data(error: &KubeconfigError) -> String {
    match error {
        KubeconfigError::LoadClientKey(LoadDataError::DecodeBase64(_))
        | KubeconfigError::LoadClientCertificate(LoadDataError::DecodeBase64(_)) => {
            "must be base64".to_owned()
        }
        KubeconfigError::ParseCertificates(_) => NO_PEM.to_owned(),
        error => error.to_string(),
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the rest of them says what is wrong")]
fn unusable(path: &Path, error: KubeconfigError) -> ConfigError {
    let problem = match error {
        KubeconfigError::ReadConfig(source, path) => return ConfigError::Read { path, source },
        // The parser's error quotes the file, which holds secrets.
        KubeconfigError::Parse(error) => match error.location() {
            Some(location) => format!(
                "not a kubeconfig: what is in line {}, column {} cannot be read, or was not expected there",
                location.line(),
                location.column()
            ),
            None => "not a kubeconfig".to_owned(),
        },
        error => error.to_string(),
    };
    ConfigError::Parse { path: path.to_owned(), problem }
}

/// Loads the pod's service account.
#[expect(clippy::wildcard_enum_match_arm, reason = "the rest of them says what is wrong")]
fn in_cluster() -> Result<Loaded, ConfigError> {
    let problem = |problem: String| ConfigError::InCluster { problem };
    let client = kube::Config::incluster_env().map_err(|error| match error {
        InClusterError::ReadEnvironmentVariable(_) => ConfigError::NotInCluster,
        error => problem(error.to_string()),
    })?;
    client.rustls_client_config().map_err(|error| problem(error.to_string()))?;
    let loaded = Loaded::new(client);
    if let Some(file) = &loaded.token_file {
        read_token(file).map_err(|error| problem(error.to_string()))?;
    }
    Ok(loaded)
}

/// Parses the URL of a server. `host:port` stands for `http://host:port`, which kube does not know.
/// client-go takes https if there are TLS settings, but that never applies to a kubeconfig: it
/// reads TLS settings only for a server that begins with https.
fn server_url(text: &str) -> Result<Uri, String> {
    if text.is_empty() {
        return Err("is missing".into());
    }
    let shown = without_userinfo(text);
    let whole = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
    let url: Uri = whole.parse().map_err(|error| format!("{shown:?}: {error}"))?;
    let has_host = url.host().is_some_and(|host| !host.is_empty());
    let is_plain = whole.len() == text.len() || matches!(url.path(), "" | "/");
    match url.scheme_str() {
        Some("https" | "http") if has_host && is_plain => Ok(url),
        _ => {
            Err(format!("{shown:?} must be a host and a port, or a URL that begins with https:// or http://"))
        }
    }
}

/// Returns kube-proxy's User-Agent, followed by our own name.
fn user_agent() -> String {
    let (platform, own) = (version::platform(), env!("CARGO_PKG_VERSION"));
    format!("kube-proxy/v{} ({platform}) proxy-ctl/{own}", version::KUBE_PROXY)
}

#[cfg(test)]
mod tests;
