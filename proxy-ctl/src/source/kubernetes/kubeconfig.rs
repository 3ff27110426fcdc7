//! Where the API server is and who we are to it: a kubeconfig file, or what a pod finds in its service
//! account. Everything is read and checked here, so that what is wrong is named by file and field
//! before anything else happens.

use std::{
    env, fs,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    path::{Path, PathBuf},
};

use http::HeaderValue;
use kube::{
    client::ConfigExt,
    config::{AuthInfo, Cluster, Kubeconfig, KubeconfigError},
};

use super::token_file::read_token;
use crate::{
    config::{Encoding, without_userinfo},
    version,
};

/// What the user said about the API server.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    /// `--kubeconfig` or `clientConnection.kubeconfig`. Without it: the pod's service account. The
    /// variable KUBECONFIG is not consulted, as in kube-proxy.
    pub kubeconfig: Option<PathBuf>,
    /// `--master`: overrides the server's address. Without a kubeconfig it is all that is known.
    pub master: Option<String>,
    /// `clientConnection.qps`: requests per second, watches included, once `burst` is used up. 0: 5, as in
    /// client-go; negative: no limit.
    pub qps: f64,
    /// `clientConnection.burst`: requests at once. 0: 10, as in client-go.
    pub burst: u32,
    /// `clientConnection.contentType`: how bodies are encoded, and what is wanted for an answer.
    pub content_type: Encoding,
    /// `clientConnection.acceptContentTypes`: what is wanted for an answer instead.
    pub accept_content_types: Option<String>,
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
        "{variable} is not set: outside a pod the API server must be named by --kubeconfig or clientConnection.kubeconfig"
    )]
    NotInCluster { variable: &'static str },
    #[error("{variable}={value}: {problem}")]
    InCluster { variable: &'static str, value: String, problem: String },
}

/// Configuration as read from its files at one moment.
#[derive(Clone, Debug)]
pub(super) struct Loaded {
    /// Without the token file: that is read for every request.
    pub(super) client: kube::Config,
    pub(super) token_file: Option<PathBuf>,
    /// Changes when a file that went into `client` has other contents.
    pub(super) fingerprint: u64,
    /// The user's credentials come from a plugin.
    pub(super) has_plugin: bool,
    /// There is a user, who is not told to a server without TLS.
    pub(super) is_user_withheld: bool,
}

const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

impl Config {
    /// The Accept header of requests for objects, as client-go has it.
    pub(super) fn accept(&self) -> Result<HeaderValue, ConfigError> {
        let value = self.accept_content_types.clone().unwrap_or_else(|| self.content_type.preferred());
        HeaderValue::try_from(&value).map_err(|_| ConfigError::Accept { value })
    }

    /// Reads and checks everything; no connection is made and no plugin is run.
    pub(super) fn load(&self) -> Result<Loaded, ConfigError> {
        let master = self.master.as_deref().map(|master| {
            let value = || without_userinfo(master);
            server_url(master).map_err(|problem| ConfigError::Master { value: value(), problem })
        });
        let mut loaded = match (&self.kubeconfig, master.transpose()?) {
            (Some(path), master) => from_kubeconfig(path, master)?,
            (None, Some(master)) => anonymous(master),
            (None, None) => in_cluster(Path::new(SERVICE_ACCOUNT), |variable| env::var(variable).ok())?,
        };
        if let Ok(agent) = HeaderValue::try_from(user_agent()) {
            loaded.client.headers.push((http::header::USER_AGENT, agent));
        }
        Ok(loaded)
    }
}

/// `master`: in the server's place.
fn from_kubeconfig(path: &Path, master: Option<http::Uri>) -> Result<Loaded, ConfigError> {
    let field = |field: String, problem: String| ConfigError::Field { path: path.to_owned(), field, problem };
    let mut fingerprint = DefaultHasher::new();
    hash_file(path, &mut fingerprint)
        .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    let mut kubeconfig = Kubeconfig::read_from(path).map_err(|error| parse_error(path, error))?;

    let context_name = kubeconfig
        .current_context
        .clone()
        .filter(|name| !name.is_empty())
        .ok_or_else(|| field("current-context".into(), "is missing".into()))?;
    let context = kubeconfig
        .contexts
        .iter()
        .find(|context| context.name == context_name)
        .and_then(|context| context.context.clone())
        .ok_or_else(|| field("current-context".into(), format!("no context is named {context_name:?}")))?;

    let cluster = kubeconfig
        .clusters
        .iter_mut()
        .find(|cluster| cluster.name == context.cluster)
        .and_then(|cluster| cluster.cluster.as_mut())
        .ok_or_else(|| {
            let problem = format!("no cluster is named {:?}", context.cluster);
            field(format!("contexts[name={context_name}].context.cluster"), problem)
        })?;
    let cluster_field = |name: &str| format!("clusters[name={}].cluster.{name}", context.cluster);
    let server = match master {
        Some(master) => {
            // It was the other server's.
            cluster.tls_server_name = None;
            master
        }
        None => server_url(cluster.server.as_deref().unwrap_or_default())
            .map_err(|problem| field(cluster_field("server"), problem))?,
    };
    cluster.server = Some(server.to_string());
    let authority = check_cluster(cluster, &mut fingerprint)
        .map_err(|(name, problem)| field(cluster_field(name), problem))?;

    let proxy_url = cluster.proxy_url.clone().filter(|url| !url.is_empty());

    // A context without a user is anonymous; one that names a user who is not there is a mistake.
    let user_name = context.user.clone().unwrap_or_default();
    let user_field = |name: &str| format!("users[name={user_name}].user.{name}");
    let mut token_file = None;
    if !user_name.is_empty() {
        let user = kubeconfig.auth_infos.iter_mut().find(|user| user.name == user_name).ok_or_else(|| {
            let problem = format!("no user is named {user_name:?}");
            field(format!("contexts[name={context_name}].context.user"), problem)
        })?;
        if let Some(user) = &mut user.auth_info {
            for (name, file) in
                [("client-certificate", &user.client_certificate), ("client-key", &user.client_key)]
            {
                if let Some(file) = file {
                    hash_file(Path::new(file), &mut fingerprint)
                        .map_err(|error| field(user_field(name), format!("{file}: {error}")))?;
                }
            }
            let certificate = user.client_certificate.is_some() || user.client_certificate_data.is_some();
            let key = user.client_key.is_some() || user.client_key_data.is_some();
            match (certificate, key) {
                (true, false) => return Err(field(user_field("client-key"), "is missing".into())),
                (false, true) => return Err(field(user_field("client-certificate"), "is missing".into())),
                (true, true) | (false, false) => {}
            }
            // As in client-go, a token in the kubeconfig itself wins over a file.
            if user.token.is_none()
                && let Some(file) = user.token_file.take()
            {
                read_token(Path::new(&file))
                    .map_err(|error| field(user_field("tokenFile"), error.to_string()))?;
                token_file = Some(PathBuf::from(file));
            }
        }
    }

    let mut client = kube::Config::try_from(kubeconfig).map_err(|error| {
        use KubeconfigError::{LoadCertificateAuthority, ParseCertificates, ParseProxyUrl};
        if matches!(error, LoadCertificateAuthority(_) | ParseCertificates(_)) {
            field(cluster_field(authority), error.to_string())
        } else if matches!(error, ParseProxyUrl(_)) {
            field(cluster_field("proxy-url"), error.to_string())
        } else {
            parse_error(path, error)
        }
    })?;
    // Only what the file says: with HTTPS_PROXY meant for others the way to the API server would lead
    // out of the cluster and back.
    client.proxy_url = match proxy_url.map(|url| url.parse::<http::Uri>()).transpose() {
        Ok(url) => url,
        Err(error) => return Err(field(cluster_field("proxy-url"), error.to_string())),
    };
    if let Some(url) = &client.proxy_url
        && url.scheme_str() != Some("http")
    {
        return Err(field(cluster_field("proxy-url"), format!("{url}: only http:// proxies can be used")));
    }
    // As client-go: nobody listens in on credentials, for they are not sent.
    let is_user_withheld = server.scheme_str() == Some("http") && !user_name.is_empty();
    if is_user_withheld {
        client.auth_info = AuthInfo::default();
        token_file = None;
    }
    let has_plugin = client.auth_info.exec.is_some();
    // The plugin is not run for this check.
    let mut checked = client.clone();
    checked.auth_info.exec = None;
    checked.rustls_client_config().map_err(|error| {
        let certificate_authority = error.to_string().contains("root certificate");
        let name =
            if certificate_authority { cluster_field(authority) } else { user_field("client-certificate") };
        field(name, error.to_string())
    })?;
    Ok(Loaded { client, token_file, fingerprint: fingerprint.finish(), has_plugin, is_user_withheld })
}

/// Returns which of the two fields names the certificate authority.
fn check_cluster(
    cluster: &Cluster,
    fingerprint: &mut DefaultHasher,
) -> Result<&'static str, (&'static str, String)> {
    if cluster.certificate_authority_data.is_some() {
        return Ok("certificate-authority-data");
    }
    let name = "certificate-authority";
    if let Some(file) = &cluster.certificate_authority {
        hash_file(Path::new(file), fingerprint).map_err(|error| (name, format!("{file}: {error}")))?;
    }
    Ok(name)
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the rest of them say what is wrong")]
fn parse_error(path: &Path, error: KubeconfigError) -> ConfigError {
    match error {
        KubeconfigError::ReadConfig(source, path) => ConfigError::Read { path, source },
        KubeconfigError::Parse(error) => {
            ConfigError::Parse { path: path.to_owned(), problem: format!("not a kubeconfig: {error}") }
        }
        error => ConfigError::Parse { path: path.to_owned(), problem: error.to_string() },
    }
}

/// An API server that asks nobody who they are, such as one behind `kubectl proxy`.
fn anonymous(server: http::Uri) -> Loaded {
    let mut client = kube::Config::new(server);
    client.proxy_url = None;
    Loaded { client, token_file: None, fingerprint: 0, has_plugin: false, is_user_withheld: false }
}

/// A pod's service account; `directory` holds `ca.crt` and `token`.
fn in_cluster(
    directory: &Path,
    variable: impl Fn(&'static str) -> Option<String>,
) -> Result<Loaded, ConfigError> {
    let get = |name| {
        variable(name).filter(|value| !value.is_empty()).ok_or(ConfigError::NotInCluster { variable: name })
    };
    let host = get("KUBERNETES_SERVICE_HOST")?;
    let port = get("KUBERNETES_SERVICE_PORT")?;
    let authority = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    let url = server_url(&format!("https://{authority}")).map_err(|problem| ConfigError::InCluster {
        variable: "KUBERNETES_SERVICE_HOST",
        value: host,
        problem,
    })?;

    let token_file = directory.join("token");
    read_token(&token_file)
        .map_err(|error| ConfigError::Parse { path: token_file.clone(), problem: error.to_string() })?;
    let certificate_file = directory.join("ca.crt");
    let mut fingerprint = DefaultHasher::new();
    hash_file(&certificate_file, &mut fingerprint)
        .map_err(|source| ConfigError::Read { path: certificate_file.clone(), source })?;
    let cluster = Cluster {
        server: Some(url.to_string()),
        certificate_authority: Some(certificate_file.display().to_string()),
        ..Cluster::default()
    };
    let unusable = |problem: String| ConfigError::Parse { path: certificate_file.clone(), problem };
    let mut client =
        kube::Config::try_from(single_cluster(cluster)).map_err(|error| unusable(error.to_string()))?;
    client.proxy_url = None;
    client.rustls_client_config().map_err(|error| unusable(error.to_string()))?;
    let fingerprint = fingerprint.finish();
    Ok(Loaded {
        client,
        token_file: Some(token_file),
        fingerprint,
        has_plugin: false,
        is_user_withheld: false,
    })
}

fn single_cluster(cluster: Cluster) -> Kubeconfig {
    let name = "in-cluster".to_owned();
    let context = kube::config::Context { cluster: name.clone(), ..Default::default() };
    Kubeconfig {
        clusters: vec![kube::config::NamedCluster {
            name: name.clone(),
            cluster: Some(cluster),
            ..Default::default()
        }],
        contexts: vec![kube::config::NamedContext {
            name: name.clone(),
            context: Some(context),
            ..Default::default()
        }],
        current_context: Some(name),
        ..Kubeconfig::default()
    }
}

/// `host:port` is `http://host:port`. client-go's own rule, to take https where there are TLS settings, does not come to
/// bear with a kubeconfig: they are only read for a server that begins with https.
fn server_url(text: &str) -> Result<http::Uri, String> {
    if text.is_empty() {
        return Err("is missing".into());
    }
    let shown = without_userinfo(text);
    let whole = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
    let url: http::Uri = whole.parse().map_err(|error| format!("{shown:?}: {error}"))?;
    let has_host = url.host().is_some_and(|host| !host.is_empty());
    let is_plain = whole.len() == text.len() || matches!(url.path(), "" | "/");
    match url.scheme_str() {
        Some("https" | "http") if has_host && is_plain => Ok(url),
        _ => {
            Err(format!("{shown:?} must be a host and a port, or a URL that begins with https:// or http://"))
        }
    }
}

/// As API servers log it: first whom we stand in for, then who we are.
fn user_agent() -> String {
    let (platform, own) = (version::platform(), env!("CARGO_PKG_VERSION"));
    format!("kube-proxy/v{} ({platform}) proxy-ctl/{own}", version::KUBE_PROXY)
}

fn hash_file(path: &Path, hasher: &mut DefaultHasher) -> io::Result<()> {
    fs::read(path)?.hash(hasher);
    Ok(())
}

#[cfg(test)]
mod tests;
