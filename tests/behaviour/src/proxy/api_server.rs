//! A real etcd and kube-apiserver in the lab's fabric.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail};
use http::Request;
use kube::{Client, Config};
use lab::{
    Lab, Objects,
    address::{SERVICE_RANGE4, SERVICE_RANGE6, gateway},
    cluster::FABRIC,
    namespace,
    objects::{Key, NAMESPACE},
    wait,
};
use serde_json::{Value, json};

const TOKEN: &str = "lab";
const PORT: u16 = 6_443;
const STARTS_WITHIN: Duration = Duration::from_secs(60);

/// Its processes end with the lab.
pub struct ApiServer {
    kubeconfig: PathBuf,
    published: Objects,
}

impl ApiServer {
    /// Starts both and waits until the API server is ready.
    pub fn start(lab: &Lab, kube_apiserver: &Path) -> Result<Self> {
        let folder = lab.directory().join("control-plane");
        fs::create_dir(&folder).with_context(|| format!("creating {}", folder.display()))?;
        let file = |name: &str| folder.join(name).display().to_string();
        let etcd = |port: u16| format!("http://127.0.0.1:{port}");
        run(
            lab,
            &folder,
            "etcd",
            &[
                "--unsafe-no-fsync".into(),
                format!("--data-dir={}", file("etcd")),
                format!("--listen-client-urls={}", etcd(2379)),
                format!("--advertise-client-urls={}", etcd(2379)),
                format!("--listen-peer-urls={}", etcd(2380)),
                format!("--initial-advertise-peer-urls={}", etcd(2380)),
                format!("--initial-cluster=default={}", etcd(2380)),
            ],
        )?;
        let key = file("service-account.key");
        let made = Command::new("openssl")
            .args(["genrsa", "-out", &key, "2048"])
            .stderr(Stdio::null())
            .status()
            .context("starting openssl")?;
        if !made.success() {
            bail!("openssl genrsa: {made}");
        }
        fs::write(file("tokens.csv"), format!("{TOKEN},lab,lab,system:masters\n"))?;
        let program = kube_apiserver.display().to_string();
        run(
            lab,
            &folder,
            &program,
            &[
                format!("--etcd-servers={}", etcd(2379)),
                format!("--bind-address={}", gateway().v4),
                format!("--advertise-address={}", gateway().v4),
                format!("--secure-port={PORT}"),
                format!("--cert-dir={}", file("certificates")),
                format!("--service-cluster-ip-range={SERVICE_RANGE4},{SERVICE_RANGE6}"),
                "--service-account-issuer=https://lab".into(),
                format!("--service-account-key-file={key}"),
                format!("--service-account-signing-key-file={key}"),
                format!("--token-auth-file={}", file("tokens.csv")),
                "--authorization-mode=RBAC".into(),
                "--disable-admission-plugins=ServiceAccount".into(),
                "--enable-priority-and-fairness=false".into(),
                "--max-requests-inflight=2000".into(),
                "--max-mutating-requests-inflight=1000".into(),
            ],
        )?;
        let kubeconfig = folder.join("kubeconfig");
        fs::write(&kubeconfig, configuration().to_string())?;
        let server = Self { kubeconfig, published: Objects::default() };
        wait::until("the API server is ready", STARTS_WITHIN, || {
            server.ask(lab, &[get("/readyz")]).map(Some).map_err(|error| format!("{error:#}"))
        })
        .with_context(|| log_tail(&folder, kube_apiserver))?;
        Ok(server)
    }

    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Writes what differs from what was published before; the sentinel last.
    pub fn publish(&mut self, lab: &Lab, objects: &Objects) -> Result<()> {
        let mut requests = Vec::new();
        for (key, _) in self.published.iter().filter(|(key, _)| objects.get(key).is_none()) {
            requests.push(Request::delete(path(key)).body(Vec::new())?);
        }
        let mut changed: Vec<(&Key, &Value)> =
            objects.iter().filter(|(key, object)| self.published.get(key) != Some(object)).collect();
        changed.sort_by_key(|(key, _)| key.1.starts_with("sentinel"));
        for (key, object) in changed {
            let mut object = object.clone();
            // Not applied: the schema takes a node's addresses of one type for duplicates.
            let status = object.as_object_mut().and_then(|object| object.remove("status"));
            requests.push(apply(&path(key), &object)?);
            if let Some(status) = status {
                requests.push(merge(&format!("{}/status", path(key)), &json!({"status": status}))?);
            }
        }
        self.ask(lab, &requests)?;
        self.published = objects.clone();
        Ok(())
    }

    /// Sends requests one after another.
    fn ask(&self, lab: &Lab, requests: &[Request<Vec<u8>>]) -> Result<()> {
        namespace::within(&lab.place(FABRIC)?.namespace, || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let client = client()?;
                for request in requests {
                    let what = format!("{} {}", request.method(), request.uri());
                    client.request_text(request.clone()).await.with_context(|| what)?;
                }
                Ok(())
            })
        })
    }
}

fn get(path: &str) -> Request<Vec<u8>> {
    let mut request = Request::new(Vec::new());
    if let Ok(uri) = path.parse() {
        *request.uri_mut() = uri;
    }
    request
}

fn apply(path: &str, object: &Value) -> Result<Request<Vec<u8>>> {
    patch(&format!("{path}?fieldManager=lab&force=true"), "application/apply-patch+yaml", object)
}

fn merge(path: &str, part: &Value) -> Result<Request<Vec<u8>>> {
    patch(path, "application/merge-patch+json", part)
}

fn patch(path: &str, kind: &str, object: &Value) -> Result<Request<Vec<u8>>> {
    Request::patch(path)
        .header("Content-Type", kind)
        .body(serde_json::to_vec(object)?)
        .map_err(|error| anyhow!("{path}: {error}"))
}

fn path((kind, name): &Key) -> String {
    match *kind {
        "Node" => format!("/api/v1/nodes/{name}"),
        "EndpointSlice" => format!("/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices/{name}"),
        _ => format!("/api/v1/namespaces/{NAMESPACE}/services/{name}"),
    }
}

fn url() -> String {
    format!("https://{}:{PORT}", gateway().v4)
}

fn client() -> Result<Client> {
    let mut config = Config::new(url().parse()?);
    config.accept_invalid_certs = true;
    config.auth_info.token = Some(TOKEN.to_owned().into());
    Ok(Client::try_from(config)?)
}

fn configuration() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "lab",
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "lab"}}],
        "clusters": [{"name": "lab", "cluster": {"server": url(), "insecure-skip-tls-verify": true}}],
        "users": [{"name": "lab", "user": {"token": TOKEN}}],
    })
}

fn log_of(folder: &Path, program: &Path) -> PathBuf {
    folder.join(program.file_name().unwrap_or_default()).with_extension("log")
}

fn log_tail(folder: &Path, program: &Path) -> String {
    let log = fs::read_to_string(log_of(folder, program)).unwrap_or_default();
    let lines: Vec<&str> = log.lines().collect();
    lines.get(lines.len().saturating_sub(10)..).unwrap_or_default().join("\n")
}

fn run(lab: &Lab, folder: &Path, program: &str, arguments: &[String]) -> Result<()> {
    let program = Path::new(program);
    let log = File::create(log_of(folder, program)).context("creating a log")?;
    lab.command(lab.place(FABRIC)?, program)?
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("starting {}", program.display()))?;
    Ok(())
}
