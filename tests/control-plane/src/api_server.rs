//! Starts, stops and restarts etcd and kube-apiserver.

use std::{
    collections::BTreeMap,
    fs,
    hash::{BuildHasher, Hasher, RandomState},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use kube::{Client, config::Kubeconfig};
use lab::{namespace::on_a_thread, wait};
use serde_json::{Value, json};

use crate::{
    binaries::Program,
    certificates::Certificates,
    objects,
    process::{BETWEEN_LOOKS, Process},
};

const READY_LIMIT: Duration = Duration::from_secs(90);
const ETCD_LIMIT: Duration = Duration::from_secs(30);
/// Largest number of puts in one transaction of etcd, by default.
const MOST_PUTS: usize = 128;

/// Client that the API server knows by a token.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Identity {
    /// Name of the kubeconfig and of the token file.
    pub name: &'static str,
    pub user: &'static str,
    /// Group of the user, or empty for none.
    pub group: &'static str,
}

/// Identity that may do everything.
pub const ADMIN: Identity = Identity { name: "admin", user: "admin", group: "system:masters" };
/// Identity that may do what ClusterRole system:node-proxier grants, like kube-proxy.
pub const PROXY: Identity = Identity { name: "proxy", user: "system:kube-proxy", group: "" };

/// Settings of the API server's start.
#[derive(Clone, Debug)]
pub struct Options {
    /// Address on which it listens. It must be an address of the network namespace.
    pub address: IpAddr,
    /// Name of the network namespace (`ip netns`), whose loopback must be up. `None` stands for
    /// that of the caller.
    pub namespace: Option<String>,
    /// Further flags of kube-apiserver.
    pub flags: Vec<String>,
    /// Value of `--service-cluster-ip-range`.
    pub service_ranges: String,
    /// Identities besides [`ADMIN`] and [`PROXY`]. RBAC grants them nothing.
    pub identities: Vec<Identity>,
    /// Further addresses for which the server's certificate is valid, such as that of Service
    /// kubernetes.
    pub certificate_addresses: Vec<IpAddr>,
    /// True if pods get the token of their service account, which must then exist (admission plugin
    /// ServiceAccount).
    pub service_accounts: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            address: Ipv4Addr::LOCALHOST.into(),
            namespace: None,
            flags: Vec::new(),
            service_ranges: "10.96.0.0/12,fd00:10:96::/112".into(),
            identities: Vec::new(),
            certificate_addresses: Vec::new(),
            service_accounts: false,
        }
    }
}

impl Options {
    fn new_certificates(&self, directory: &Path) -> Result<Certificates> {
        let addresses = [&[self.address], &self.certificate_addresses[..]].concat();
        Certificates::create(&directory.join("pki"), &addresses)
    }
}

/// Running API server with an etcd of its own. When it is dropped, even in a panic, both are
/// killed. If the whole process is killed, the kernel kills them.
pub struct ApiServer {
    directory: PathBuf,
    options: Options,
    certificates: Certificates,
    tokens: BTreeMap<&'static str, String>,
    port: u16,
    etcd_port: u16,
    program: PathBuf,
    server: Option<Process>,
    // etcd stands after the server, so that it is killed last.
    etcd: Process,
}

impl ApiServer {
    /// Starts etcd and kube-apiserver, and waits until requests are served. Their files are in
    /// `directory`, which is created if it does not exist. Returns an error if a program is missing
    /// and cannot be built.
    pub fn start(directory: &Path) -> Result<Self> {
        Self::start_with(directory, Options::default())
    }

    pub fn start_with(directory: &Path, options: Options) -> Result<Self> {
        let etcd_program = Program::Etcd.path()?;
        let program = Program::KubeApiServer.path()?;
        fs::create_dir_all(directory).with_context(|| format!("creating {}", directory.display()))?;
        let directory =
            directory.canonicalize().with_context(|| format!("resolving {}", directory.display()))?;
        let certificates = options.new_certificates(&directory)?;

        let [port, etcd_port, peer_port] = free_ports(options.namespace.as_deref())?;
        let (client_url, peer_url) =
            (format!("http://127.0.0.1:{etcd_port}"), format!("http://127.0.0.1:{peer_port}"));
        let etcd = Process::start(
            Command::new(&etcd_program).args([
                "--name=etcd".into(),
                format!("--data-dir={}", directory.join("etcd").display()),
                format!("--listen-client-urls={client_url}"),
                format!("--advertise-client-urls={client_url}"),
                format!("--listen-peer-urls={peer_url}"),
                format!("--initial-advertise-peer-urls={peer_url}"),
                format!("--initial-cluster=etcd={peer_url}"),
                // The data need not survive a crash of the machine.
                "--unsafe-no-fsync".into(),
                "--quota-backend-bytes=4294967296".into(),
            ]),
            &directory.join("etcd.log"),
            options.namespace.as_deref(),
        )?;

        let tokens = identities(&options).map(|identity| (identity.name, random_token())).collect();
        let mut server =
            Self { directory, options, certificates, tokens, port, etcd_port, program, server: None, etcd };
        server.publish_authority()?;
        for identity in identities(&server.options.clone()) {
            server.publish_token(identity)?;
            let token_file = server.token_file(identity);
            server.write_kubeconfig(identity.name, &format!("tokenFile: {}", token_file.display()))?;
        }
        server.start_again()?;
        Ok(server)
    }

    /// Returns the URL `https://address:port`.
    pub fn url(&self) -> String {
        format!("https://{}", self.socket_address())
    }

    pub fn socket_address(&self) -> SocketAddr {
        SocketAddr::new(self.options.address, self.port)
    }

    /// Returns the folder with the logs `kube-apiserver.log` and `etcd.log`.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns a kubeconfig file that refers to a token file and a CA file beside it.
    pub fn kubeconfig(&self, identity: Identity) -> PathBuf {
        self.directory.join(format!("{}.kubeconfig", identity.name))
    }

    /// Writes a kubeconfig with this token, named after `name`. The token file beside it may be
    /// written again.
    pub fn kubeconfig_with(&self, name: &str, token: &str) -> Result<PathBuf> {
        let token_file = self.directory.join(format!("{name}.token"));
        fs::write(&token_file, token).with_context(|| format!("writing {}", token_file.display()))?;
        self.write_kubeconfig(name, &format!("tokenFile: {}", token_file.display()))
    }

    /// Writes a certificate of the current authority for `user`, and a kubeconfig that refers to
    /// its files, all named after `name`. If it is called again after
    /// [`Self::replace_certificates`], it replaces them.
    pub fn kubeconfig_with_certificate(&self, name: &str, user: &str) -> Result<PathBuf> {
        let (certificate, key) = self.certificates.client(&self.directory, name, user)?;
        let user =
            format!("client-certificate: {}\n    client-key: {}", certificate.display(), key.display());
        self.write_kubeconfig(name, &user)
    }

    /// Writes a kubeconfig, named after `name`, that gets its credentials from this command, an
    /// exec plugin.
    pub fn kubeconfig_with_plugin(&self, name: &str, command: &Path) -> Result<PathBuf> {
        let command = command.display();
        let user = format!(
            "exec:\n      apiVersion: client.authentication.k8s.io/v1\n      command: {command}\n      interactiveMode: Never"
        );
        self.write_kubeconfig(name, &user)
    }

    fn write_kubeconfig(&self, name: &str, user: &str) -> Result<PathBuf> {
        let path = self.directory.join(format!("{name}.kubeconfig"));
        fs::write(&path, self.kubeconfig_of(name, user, &self.authority_file()))
            .with_context(|| format!("writing {}", path.display()))?;
        Ok(path)
    }

    /// Returns the file to which [`Self::kubeconfig`] refers as `tokenFile`.
    pub fn token_file(&self, identity: Identity) -> PathBuf {
        self.directory.join(format!("{}.token", identity.name))
    }

    /// Returns the file with the key that signs tokens of service accounts. kube-controller-manager
    /// needs it.
    pub fn account_key_file(&self) -> &Path {
        &self.certificates.account_key
    }

    /// Returns the file with the CA that signed the API server's certificate.
    pub fn authority_file(&self) -> PathBuf {
        self.directory.join("ca.crt")
    }

    /// Makes a client with the identity [`ADMIN`]. It works in the network namespace of the API
    /// server.
    pub async fn client(&self) -> Result<Client> {
        // This token is valid now, whatever was published for others.
        let token = format!("token: {}", self.tokens[ADMIN.name]);
        let text = self.kubeconfig_of(ADMIN.name, &token, &self.certificates.authority);
        let config = Kubeconfig::from_yaml(&text).context("our own kubeconfig")?;
        let mut config = kube::Config::try_from(config).context("our own kubeconfig")?;
        config.proxy_url = None;
        Client::try_from(config).context("making a client")
    }

    /// Runs `work` with a client as [`ADMIN`], on a thread in the API server's network namespace.
    /// It is for callers that are not asynchronous, or that are in another namespace.
    pub fn run<T: Send>(&self, work: impl AsyncFnOnce(Client) -> Result<T> + Send) -> Result<T> {
        on_a_thread(self.options.namespace.as_deref(), || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .context("starting a runtime")?;
            runtime.block_on(async { work(self.client().await?).await })
        })
    }

    /// Calls [`objects::apply`] for callers that are not asynchronous.
    pub fn apply(&self, object: &Value) -> Result<()> {
        self.run(async |client| objects::apply(&client, object).await)
    }

    /// Calls [`objects::delete`] for callers that are not asynchronous.
    pub fn delete(&self, object: &Value) -> Result<()> {
        self.run(async |client| objects::delete(&client, object).await)
    }

    /// Stops kube-apiserver in good order. etcd goes on.
    pub fn stop(&mut self) -> Result<()> {
        match self.server.take() {
            Some(server) => server.stop().map(drop),
            None => Ok(()),
        }
    }

    /// Kills kube-apiserver, so that connections break without a word. etcd goes on.
    pub fn kill(&mut self) {
        self.server = None;
    }

    /// Starts kube-apiserver at the same address, with the same data, and waits until it serves.
    pub fn start_again(&mut self) -> Result<()> {
        self.kill();
        self.write_tokens()?;
        let log = self.directory.join("kube-apiserver.log");
        let mut command = Command::new(&self.program);
        command.args(self.arguments());
        let server = Process::start(&command, &log, self.options.namespace.as_deref())?;
        self.server = Some(server);
        self.wait_until_ready()
    }

    pub fn restart(&mut self) -> Result<()> {
        self.stop()?;
        self.start_again()
    }

    /// Sets further flags of kube-apiserver, which apply from its next start on.
    pub fn set_flags(&mut self, flags: Vec<String>) {
        self.options.flags = flags;
    }

    /// Makes the API server accept only a new token for `identity` from its next start on.
    /// [`Self::publish_token`] writes it to where the identity's kubeconfig refers.
    pub fn replace_token(&mut self, identity: Identity) {
        self.tokens.insert(identity.name, random_token());
    }

    /// Writes the current token to [`Self::token_file`].
    pub fn publish_token(&self, identity: Identity) -> Result<()> {
        let path = self.token_file(identity);
        let token =
            self.tokens.get(identity.name).context("an identity that this API server does not know")?;
        // The newline is there because an editor would leave one.
        fs::write(&path, format!("{token}\n")).with_context(|| format!("writing {}", path.display()))
    }

    /// Makes the API server use a certificate of another CA from its next start on.
    /// [`Self::publish_authority`] writes that CA to where kubeconfigs refer.
    pub fn replace_certificates(&mut self) -> Result<()> {
        self.certificates = self.options.new_certificates(&self.directory)?;
        Ok(())
    }

    /// Writes the current CA to where kubeconfigs refer.
    pub fn publish_authority(&self) -> Result<()> {
        let path = self.authority_file();
        fs::copy(&self.certificates.authority, &path)
            .with_context(|| format!("writing {}", path.display()))?;
        Ok(())
    }

    /// Makes etcd forget all versions before the newest. kube-apiserver has a cache of its own,
    /// which a restart empties.
    pub fn compact(&self) -> Result<()> {
        let range: Value = self.etcd("/v3/kv/range", r#"{"key":"AA==","limit":1}"#)?;
        let revision = range
            .pointer("/header/revision")
            .and_then(Value::as_str)
            .context("etcd's answer has no header.revision")?
            .to_owned();
        self.etcd("/v3/kv/compaction", &format!(r#"{{"revision":"{revision}","physical":true}}"#))?;
        Ok(())
    }

    /// Puts objects into etcd as kube-apiserver stores them. kube-apiserver itself takes 60 ms for
    /// a Service if there are 20,000, because it counts the addresses in use each time.
    pub fn store(&self, objects: impl Iterator<Item = (String, Value)>) -> Result<()> {
        let put = |(key, object): (String, Value)| {
            let value = serde_json::to_vec(&object)?;
            let put = json!({"key": BASE64_STANDARD.encode(key), "value": BASE64_STANDARD.encode(value)});
            anyhow::Ok(json!({"requestPut": put}))
        };
        let mut objects = objects.map(put).peekable();
        while objects.peek().is_some() {
            let puts = objects.by_ref().take(MOST_PUTS).collect::<Result<Vec<Value>>>()?;
            self.etcd("/v3/kv/txn", &json!({"success": puts}).to_string())?;
        }
        Ok(())
    }

    /// Sends a request to etcd's JSON gateway.
    fn etcd(&self, path: &str, body: &str) -> Result<Value> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.etcd_port));
        let headers = [("Content-Type", "application/json")];
        let answer = on_a_thread(self.options.namespace.as_deref(), || {
            lab::http::request(address, "POST", path, &headers, Some(body), ETCD_LIMIT)
        })?;
        if answer.status != 200 {
            bail!("etcd {path}: {} {}", answer.status, answer.text());
        }
        serde_json::from_slice(&answer.body).with_context(|| format!("etcd {path}: {}", answer.text()))
    }

    fn arguments(&self) -> Vec<String> {
        let Self { options, certificates, directory, .. } = self;
        let account_key = certificates.account_key.display();
        let mut arguments = vec![
            format!("--etcd-servers=http://127.0.0.1:{}", self.etcd_port),
            format!("--bind-address={}", options.address),
            format!("--secure-port={}", self.port),
            format!("--tls-cert-file={}", certificates.server.display()),
            format!("--tls-private-key-file={}", certificates.server_key.display()),
            format!("--cert-dir={}", directory.join("pki").display()),
            format!("--service-cluster-ip-range={}", options.service_ranges),
            "--service-account-issuer=https://kubernetes.default.svc".into(),
            format!("--service-account-key-file={account_key}"),
            format!("--service-account-signing-key-file={account_key}"),
            format!("--client-ca-file={}", certificates.authority.display()),
            format!("--token-auth-file={}", directory.join("tokens.csv").display()),
            "--authorization-mode=RBAC".into(),
            "--anonymous-auth=false".into(),
            "--enable-priority-and-fairness=false".into(),
            "--max-requests-inflight=2000".into(),
            "--max-mutating-requests-inflight=1000".into(),
        ];
        arguments.push(if options.address.is_loopback() {
            // A loopback address cannot be an endpoint of Service kubernetes.
            "--endpoint-reconciler-type=none".into()
        } else {
            format!("--advertise-address={}", options.address)
        });
        if !options.service_accounts {
            arguments.push("--disable-admission-plugins=ServiceAccount".into());
        }
        arguments.extend(options.flags.iter().cloned());
        arguments
    }

    fn write_tokens(&self) -> Result<()> {
        let mut lines = String::new();
        for identity in identities(&self.options) {
            let token = self.tokens.get(identity.name).map_or("", String::as_str);
            lines.push_str(&format!("{token},{},{},\"{}\"\n", identity.user, identity.name, identity.group));
        }
        let path = self.directory.join("tokens.csv");
        fs::write(&path, lines).with_context(|| format!("writing {}", path.display()))
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + READY_LIMIT * wait::patience();
        // The API server watches EndpointSlices itself. It waits for them even if it is told not to
        // serve any.
        let without_slices = self.options.flags.iter().any(|flag| flag.contains("discovery.k8s.io/v1=false"));
        let ready_path = if without_slices { "/readyz?exclude=informer-sync" } else { "/readyz" };
        loop {
            self.etcd.alive()?;
            self.server.as_mut().context("kube-apiserver is stopped")?.alive()?;
            let ready = self.run(async |client| {
                for path in [ready_path, "/api/v1/namespaces/default"] {
                    let request = http::Request::get(path).body(Vec::new())?;
                    client.request_text(request).await?;
                }
                Ok(())
            });
            match ready {
                Ok(()) => return Ok(()),
                Err(error) if Instant::now() > deadline => {
                    let words = self.server.as_ref().map(Process::last_words).unwrap_or_default();
                    return Err(
                        error.context(format!("kube-apiserver is not ready; its log ends with\n{words}"))
                    );
                }
                Err(_) => std::thread::sleep(BETWEEN_LOOKS),
            }
        }
    }

    /// Returns the text of a kubeconfig. `user` has its fields in YAML, four spaces deep.
    fn kubeconfig_of(&self, name: &str, user: &str, authority: &Path) -> String {
        let (server, authority) = (self.url(), authority.display());
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: test\n\
             clusters:\n- name: test\n  cluster:\n    server: {server}\n    certificate-authority: {authority}\n\
             users:\n- name: {name}\n  user:\n    {user}\n\
             contexts:\n- name: test\n  context:\n    cluster: test\n    user: {name}\n"
        )
    }
}

fn identities(options: &Options) -> impl Iterator<Item = Identity> {
    [ADMIN, PROXY].into_iter().chain(options.identities.iter().copied())
}

fn random_token() -> String {
    let random = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", random(), random())
}

/// Ports that nobody listens on in the namespace now.
fn free_ports<const N: usize>(namespace: Option<&str>) -> Result<[u16; N]> {
    on_a_thread(namespace, || {
        // All listeners are held until all ports are found, so that the ports differ.
        let mut listeners = Vec::new();
        let mut ports = [0; N];
        for port in &mut ports {
            let listener =
                TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).context("looking for a free port")?;
            *port = listener.local_addr().context("looking for a free port")?.port();
            listeners.push(listener);
        }
        Ok(ports)
    })
}
