//! The source that watches an API server: Services, EndpointSlices and the own Node, and
//! ServiceCIDRs while they are wanted. The source `manifests` uses [`schema`] and [`convert`], too.

pub mod convert;
pub mod failure;
pub mod schema;
mod transport;
mod watch;
mod wire;

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, atomic::AtomicBool},
};

use http::Uri;
use tokio::sync::{mpsc, watch::Receiver};

use self::{
    transport::{connection::ApiConnection, proxy_variables::ignored_proxy},
    watch::{
        context::WatchContext,
        query::Query,
        resource::{EndpointSlices, OwnNode, SERVED_SELECTOR, Services},
        watchers::Watchers,
    },
};
use crate::{config::without_userinfo, model::Update};

pub use transport::kubeconfig::{Config, ConfigError};
pub use transport::requests::Requests;
pub use watch::kind::{ResourceKind, Verb};
pub use watch::state::{ListMethod, SourceState};
pub use watch::watchers::WatcherEnded;

/// A handle for requests other than the watches. It shares their credentials and their rate limit.
#[derive(Clone)]
pub struct Api(Arc<ApiConnection>);

impl Api {
    pub(crate) fn client(&self) -> kube::Client {
        self.0.lasting_client()
    }
}

/// The watchers of all kinds, ready to run.
pub struct Kubernetes {
    server: String,
    server_address: Option<SocketAddr>,
    connection: Arc<ApiConnection>,
    node_name: Arc<str>,
    state: SourceState,
    plain_lists: bool,
    wants_service_cidrs: Receiver<bool>,
}

impl Kubernetes {
    /// Reads and checks the configuration. Nothing is connected and nothing runs yet.
    pub fn new(
        config: Config,
        node_name: impl Into<Arc<str>>,
        state: SourceState,
    ) -> Result<Self, ConfigError> {
        let loaded = config.load()?;
        let server = without_userinfo(&loaded.client.cluster_url.to_string());
        if loaded.is_user_withheld {
            tracing::warn!(
                server,
                "the API server is spoken to without TLS, so it is not told the kubeconfig's user"
            );
        }
        // If the kubeconfig names a proxy, that proxy is dialled instead of the server.
        let dialled = loaded.client.proxy_url.is_none().then_some(&loaded.client.cluster_url);
        let server_address = dialled.and_then(socket_address);
        let variable = |name: &str| std::env::var(name).ok();
        if let Some((name, proxy)) = dialled.and_then(|url| ignored_proxy(url, variable)) {
            tracing::warn!(
                server,
                proxy,
                "the variable {name} is ignored: the API server is dialled directly. If it can only be reached through a \
                 proxy, name that in the kubeconfig, in proxy-url of the cluster"
            );
        }
        let accept = config.accept()?;
        tracing::debug!(
            server,
            contentType = config.content_type.media_type(),
            accept = ?accept,
            qps = config.qps,
            burst = config.burst,
            "how the API server is spoken to"
        );
        let plain_lists = config.plain_lists;
        let connection = Arc::new(ApiConnection::new(config, accept, state.requests.clone()));
        let (_, wants_service_cidrs) = tokio::sync::watch::channel(false);
        let node_name = node_name.into();
        Ok(Self { server, server_address, connection, node_name, state, plain_lists, wants_service_cidrs })
    }

    /// Watches ServiceCIDRs while `wanted` is true. Without this call they are never watched.
    pub fn with_service_cidrs_while(self, wanted: Receiver<bool>) -> Self {
        Self { wants_service_cidrs: wanted, ..self }
    }

    /// Returns the URL of the API server, for messages.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Returns the address and port at which the API server is dialled. None if it has a name, or
    /// if a proxy stands in between.
    pub fn server_address(&self) -> Option<SocketAddr> {
        self.server_address
    }

    /// Returns a handle for requests that write events.
    pub fn api(&self) -> Api {
        Api(Arc::clone(&self.connection))
    }

    /// Watches until the receiver of `updates` is closed or the future is dropped. The first
    /// updates are one `Replace…` of each kind and `Update::Node`, each as soon as its list is
    /// complete. A failing API server is never an error here: it is logged, counted, and tried
    /// again.
    ///
    /// # Errors
    /// A watcher has ended although updates are still received. Its objects would be stale from
    /// then on.
    pub async fn run(self, updates: mpsc::Sender<Update>) -> Result<(), WatcherEnded> {
        let (connection, state) = (self.connection, self.state);
        let plain_lists = Arc::new(AtomicBool::new(self.plain_lists));
        let context = WatchContext { connection, updates: updates.clone(), state, plain_lists };
        let services = Query::<Services>::with_labels(SERVED_SELECTOR);
        let slices = Query::<EndpointSlices>::with_labels(SERVED_SELECTOR);
        let own = Query::<OwnNode>::with_fields(format!("metadata.name={}", self.node_name));

        let mut watchers = Watchers::default();
        watchers.spawn(ResourceKind::Services, context.clone().watch(services));
        watchers.spawn(ResourceKind::Nodes, context.clone().watch(own));
        watchers.spawn(ResourceKind::EndpointSlices, context.clone().watch(slices));
        watchers.spawn(ResourceKind::ServiceCidrs, context.watch_service_cidrs(self.wants_service_cidrs));
        watchers.first_end(&updates).await
    }
}

/// Returns the address and port of a URL; None if its host is a name.
fn socket_address(url: &Uri) -> Option<SocketAddr> {
    let address: IpAddr = url.host()?.trim_matches(['[', ']']).parse().ok()?;
    let default = if url.scheme_str() == Some("http") { 80 } else { 443 };
    Some((address, url.port_u16().unwrap_or(default)).into())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::ipv4("https://10.96.0.1:443", "", Some("10.96.0.1:443"))]
    #[case::ipv6("https://[fd00::1]:6443", "", Some("[fd00::1]:6443"))]
    #[case::default_port("https://10.96.0.1", "", Some("10.96.0.1:443"))]
    #[case::default_port_without_tls("http://10.96.0.1", "", Some("10.96.0.1:80"))]
    #[case::name("https://kubernetes.default.svc", "", None)]
    #[case::behind_a_proxy("https://10.96.0.1", "proxy-url: 'http://192.0.2.1:3128'", None)]
    fn the_address_that_is_dialled(
        #[case] server: &str,
        #[case] proxy: &str,
        #[case] expected: Option<&str>,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kubeconfig");
        let text = format!(
            "{{current-context: c, contexts: [{{name: c, context: {{cluster: c}}}}], \
             clusters: [{{name: c, cluster: {{server: '{server}', {proxy}}}}}]}}"
        );
        fs::write(&path, text).unwrap();
        let config = Config { kubeconfig: Some(path), ..Config::default() };
        let source = Kubernetes::new(config, "node", SourceState::new()).unwrap();
        assert_eq!(source.server_address(), expected.map(|address| address.parse().unwrap()));
    }
}
