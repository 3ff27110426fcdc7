//! The cluster that both proxies see, and how each is started in it.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, bail, ensure};
use control_plane::{ApiServer, Options, PROXY, objects};
use nix::sched::{CloneFlags, unshare};
use proxy_ctl::sys::filesystem;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    Recording,
    page::{HEALTH, METRICS, PAGES, Page, families},
};

const NODE: &str = "node-a";
const BPFFS: &str = "/sys/fs/bpf";
const LIMIT: Duration = Duration::from_secs(90);
const BETWEEN_LOOKS: Duration = Duration::from_millis(50);

pub(crate) struct Stage {
    server: ApiServer,
    folder: TempDir,
}

impl Stage {
    /// Moves this process to a network namespace of its own, in which an API server is started.
    pub(crate) fn set() -> Result<Self> {
        unshare(CloneFlags::CLONE_NEWNET).context("making a network namespace")?;
        run("ip", &["link", "set", "lo", "up"])?;
        run("ip", &["address", "add", "192.0.2.10/32", "dev", "lo"])?;
        let folder = TempDir::with_prefix("surface-").context("making a folder")?;
        // Without a route there is no address that it would choose itself.
        let flags = vec!["--advertise-address=192.0.2.10".to_owned()];
        let options = Options { flags, ..Options::default() };
        let server = ApiServer::start_with(&folder.path().join("control-plane"), options)?;
        let stage = Self { server, folder };
        stage.server.apply(&node(json!([])))?;
        stage.server.apply(&json!({
            "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "default", "name": "web"},
            "spec": {
                "type": "NodePort", "externalTrafficPolicy": "Local", "clusterIP": "10.96.7.7",
                "ports": [{"name": "main", "port": 80, "targetPort": 8080}],
            },
        }))?;
        stage.server.apply(&slice("10.0.0.1", None))?;
        Ok(stage)
    }

    fn folder(&self) -> String {
        self.folder.path().display().to_string()
    }

    /// The same file for both; only the mode and where ours keeps its tables differ.
    fn configuration(&self, mode: &str, more: &Value) -> Result<PathBuf> {
        let mut configuration = json!({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": mode,
            "hostnameOverride": NODE,
            "clientConnection": {"kubeconfig": self.server.kubeconfig(PROXY)},
            "clusterCIDR": "10.0.0.0/8",
            // The machine's own limits stay as they are.
            "conntrack": {"maxPerCore": 0},
            "enableProfiling": true,
            "iptables": {"minSyncPeriod": "1ms", "syncPeriod": "30s"},
            "oomScoreAdj": -998,
        });
        if let (Value::Object(all), Value::Object(more)) = (&mut configuration, more) {
            all.extend(more.clone());
        }
        let file = self.folder.path().join("config.yaml");
        fs::write(&file, configuration.to_string()).with_context(|| format!("writing {}", file.display()))?;
        Ok(file)
    }

    pub(crate) fn kube_proxy(&self, program: &Path) -> Result<Proxy> {
        let file = self.configuration("iptables", &json!({}))?;
        Proxy::start(program, &[], &file, self.folder.path(), None)
    }

    pub(crate) fn proxy_ctl(&self, program: &Path) -> Result<Proxy> {
        filesystem::provide_bpffs(Path::new(BPFFS)).context("mounting a bpffs")?;
        let cgroups = filesystem::cgroup_root().context("looking for cgroup v2")?;
        let own = format!("proxy-ctl-surface-{}", std::process::id());
        let pins = Path::new(BPFFS).join(&own);
        let cgroup = cgroups.context("cgroup v2 is not mounted")?.join(&own);
        let place = Place { program: program.to_owned(), pins: pins.clone(), cgroup: cgroup.clone() };
        fs::create_dir(&pins).with_context(|| format!("creating {}", pins.display()))?;
        fs::create_dir(&cgroup).with_context(|| format!("creating {}", cgroup.display()))?;
        let limits = json!({"services": 100, "slots": 1000, "frontends": 100, "backends": 100});
        let ebpf = json!({"ebpf": {"bpffs": pins, "cgroup": cgroup, "limits": limits}});
        let file = self.configuration("ebpf", &ebpf)?;
        Proxy::start(program, &["run"], &file, self.folder.path(), Some(place))
    }
}

/// What ours leaves on the machine; gone with it.
struct Place {
    program: PathBuf,
    pins: PathBuf,
    cgroup: PathBuf,
}

impl Drop for Place {
    fn drop(&mut self) {
        // What cannot be removed now is in folders of its own.
        let _ = Command::new(&self.program).arg("cleanup").arg("--bpffs").arg(&self.pins).output();
        let _ = fs::remove_dir(&self.pins);
        let _ = fs::remove_dir(&self.cgroup);
    }
}

pub(crate) struct Proxy {
    child: Child,
    log: PathBuf,
    _place: Option<Place>,
}

impl Proxy {
    fn start(
        program: &Path,
        first: &[&str],
        file: &Path,
        folder: &Path,
        place: Option<Place>,
    ) -> Result<Self> {
        let log = folder.join("proxy.log");
        let output = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--"])
            .arg(program)
            .args(first)
            .arg("--config")
            .arg(file)
            .arg("-v=2")
            .stdin(Stdio::null())
            .stdout(output.try_clone().context("duplicating the log")?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        Ok(Self { child, log, _place: place })
    }

    /// Goes through all states of the cluster and writes down what is shown in each.
    pub(crate) fn play(mut self, stage: &Stage) -> Result<Recording> {
        let folder = stage.folder();
        let mut seen = Recording::new();
        self.until_healthz(200)?;
        stage.server.apply(&slice("10.0.0.2", Some(now()?)))?;
        let programmed = |text: &str| {
            let line = "kubeproxy_network_programming_duration_seconds_count{ip_family=\"IPv4\"} ";
            text.lines().any(|found| found.strip_prefix(line).is_some_and(|count| count != "0"))
        };
        self.until("the change is programmed", || Ok(programmed(&metrics("/metrics")?)))?;
        let health = |state: &str, seen: &mut Recording| -> Result<()> {
            for page in HEALTH {
                seen.insert(format!("page {}, {state}", page.name), page.seen(&folder)?);
            }
            Ok(())
        };
        health("all is well", &mut seen)?;
        for page in PAGES {
            seen.insert(format!("page {}", page.name), page.seen(&folder)?);
        }
        let taint = |key: &str| json!([{"key": key, "effect": "NoSchedule"}]);
        stage.server.apply(&node(taint("node.kubernetes.io/unschedulable")))?;
        stage.server.apply(&node(taint("ToBeDeletedByClusterAutoscaler")))?;
        self.until_healthz(503)?;
        health("to be deleted by the autoscaler", &mut seen)?;
        stage.server.apply(&node(json!([])))?;
        self.until_healthz(200)?;
        let kept = node(json!([]));
        let finalizers = |all: Value| json!({"metadata": {"finalizers": all}});
        stage.server.run(async |client| {
            objects::merge(&client, &kept, &finalizers(json!(["example.com/kept"]))).await?;
            objects::delete(&client, &kept).await
        })?;
        self.until_healthz(503)?;
        health("being deleted", &mut seen)?;
        for (page, prefix) in [("/metrics", "metric"), ("/metrics/slis", "SLI")] {
            let families = families(&metrics(page)?);
            seen.extend(families.into_iter().map(|(name, family)| (format!("{prefix} {name}"), family)));
        }
        stage.server.run(async |client| objects::merge(&client, &kept, &finalizers(json!([]))).await)?;
        Ok(seen)
    }

    fn until_healthz(&mut self, status: u16) -> Result<()> {
        let [page, ..] = HEALTH else { bail!("no page") };
        self.until(&format!("/healthz answers {status}"), || Ok(page.ask()?.status == status))
    }

    fn until(&mut self, what: &str, condition: impl Fn() -> Result<bool>) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        while !condition().unwrap_or(false) {
            let ended = self.child.try_wait().context("waiting for the proxy")?;
            if ended.is_some() || Instant::now() > deadline {
                let log = fs::read_to_string(&self.log).unwrap_or_default();
                let lines: Vec<&str> = log.lines().collect();
                let last = lines[lines.len().saturating_sub(25)..].join("\n");
                bail!("not so: {what}; the log ends with\n{last}");
            }
            std::thread::sleep(BETWEEN_LOOKS);
        }
        Ok(())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // Errors mean that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn metrics(path: &'static str) -> Result<String> {
    let page = PAGES.iter().find(|page| page.path == path && page.method == "GET");
    let answer = Page { accept: "", port: METRICS, ..*page.context("no such page")? }.ask()?;
    ensure!(answer.status == 200, "{path} answers {}", answer.status);
    Ok(answer.text())
}

fn node(taints: Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE},
        "spec": {"podCIDR": "10.0.0.0/24", "taints": taints},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.10"}]},
    })
}

fn slice(endpoint: &str, triggered: Option<String>) -> Value {
    let annotations = triggered.map(|time| json!({"endpoints.kubernetes.io/last-change-trigger-time": time}));
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "namespace": "default", "name": "web-1", "annotations": annotations,
            "labels": {"kubernetes.io/service-name": "web"},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [endpoint], "conditions": {"ready": true}, "nodeName": "node-b"}],
        "ports": [{"name": "main", "protocol": "TCP", "port": 8080}],
    })
}

/// RFC 3339.
fn now() -> Result<String> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).context("the clock")?.as_secs();
    let output = Command::new("date")
        .args(["-u", "+%Y-%m-%dT%H:%M:%SZ", "-d", &format!("@{}", seconds + 1)])
        .output()
        .context("starting date")?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let status =
        Command::new(program).args(arguments).status().with_context(|| format!("starting {program}"))?;
    ensure!(status.success(), "{program} {} failed", arguments.join(" "));
    Ok(())
}
