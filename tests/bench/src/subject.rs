//! The proxy that is measured, on one node.

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, ChildStderr, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use behaviour::setting::{PathKind, ProxyKind};
use control_plane::binaries::Program;
use lab::{Agent, Lab, cluster::node_name, namespace, wait};
use serde_json::{Value, json};

use crate::{
    cluster::{Cluster, NODE, pod_ranges},
    metrics,
};

const METRICS_PORT: u16 = 10_249;

pub(crate) struct Subject {
    proxy: ProxyKind,
    program: PathBuf,
    configuration: PathBuf,
    log: PathBuf,
    process: Option<Child>,
    /// Running `proxy-ctl monitor`, and its standard error, which must stay open.
    monitor: Option<(Child, BufReader<ChildStderr>)>,
    node: Agent,
}

pub(crate) struct FirstSync {
    /// Milliseconds from everything listed to everything programmed.
    pub(crate) millis: f64,
    /// Number of entries, rules or elements that were written.
    pub(crate) writes: f64,
}

impl Subject {
    /// Writes the proxy's configuration. `path` and `xdp` are settings of mode ebpf.
    pub(crate) fn new(cluster: &Cluster, proxy: ProxyKind, path: PathKind, xdp: bool) -> Result<Self> {
        let lab = &cluster.lab;
        let program = match proxy.is_kube_proxy() {
            true => Program::KubeProxy.path()?,
            false => lab::program("proxy-ctl")?,
        };
        let file = lab.directory().join("measured.yaml");
        let configuration = configuration(cluster, proxy, path, xdp)?;
        fs::write(&file, configuration.to_string()).with_context(|| format!("writing {}", file.display()))?;
        let log = lab.directory().join("measured.log");
        let node = lab.agent(&node_name(NODE))?;
        Ok(Self { proxy, program, configuration: file, log, process: None, monitor: None, node })
    }

    pub(crate) fn start(&mut self, lab: &Lab) -> Result<()> {
        let run = (!self.proxy.is_kube_proxy()).then(|| "run".to_owned());
        let arguments =
            Vec::from_iter(run.into_iter().chain([format!("--config={}", self.configuration.display())]));
        self.process = Some(self.spawn(lab, &arguments)?);
        Ok(())
    }

    /// Starts `proxy-ctl monitor`, which ends with the proxy. Returns when it watches.
    pub(crate) fn start_monitor(&mut self, lab: &Lab) -> Result<()> {
        let mut command = command(lab, &self.program, &self.log, &["monitor".to_owned(), bpffs(lab)])?;
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut process = command.spawn().context("starting proxy-ctl monitor")?;
        let mut told = BufReader::new(process.stderr.take().context("no stderr")?);
        let mut first = String::new();
        told.read_line(&mut first).context("reading what monitor tells")?;
        self.monitor = Some((process, told));
        ensure!(first.starts_with("watching"), "monitor says {first:?}");
        Ok(())
    }

    fn spawn(&self, lab: &Lab, arguments: &[String]) -> Result<Child> {
        let mut command = command(lab, &self.program, &self.log, arguments)?;
        command.spawn().with_context(|| format!("starting {}", self.program.display()))
    }

    pub(crate) fn kill(&mut self) -> Result<()> {
        let monitor = self.monitor.take().map(|(process, _)| process);
        for process in [monitor, self.process.take()] {
            let Some(mut process) = process else { continue };
            process.kill().context("killing the proxy")?;
            process.wait().context("waiting for the proxy")?;
        }
        Ok(())
    }

    pub(crate) fn process(&self) -> Result<u32> {
        Ok(self.process.as_ref().context("the proxy is not running")?.id())
    }

    pub(crate) fn peak_resident_bytes(&self) -> Result<f64> {
        metrics::peak(self.process()?)
    }

    fn metrics(&self) -> Result<String> {
        let (_, text) = self.node.http_get(SocketAddr::from(([127, 0, 0, 1], METRICS_PORT)), "/metrics")?;
        Ok(text)
    }

    /// Returns the number of entries, rules or elements that were written, or `None` if the proxy
    /// does not count them.
    pub(crate) fn written(&self) -> Result<Option<f64>> {
        Ok(metrics::sum(&self.metrics()?, "proxy_writes_total"))
    }

    /// Returns the kernel memory of the proxy's BPF maps.
    pub(crate) fn map_bytes(&self) -> Result<f64> {
        metrics::sum(&self.metrics()?, "proxy_map_bytes").context("no metric proxy_map_bytes")
    }

    /// Returns the first packets that the flood limit has dropped, or `None` if the proxy has no
    /// such limit.
    pub(crate) fn dropped_by_flood_limit(&self) -> Result<Option<f64>> {
        let dropped = "proxy_reasons_total{reason=\"connections_limited\",verdict=\"drop\"}";
        Ok(metrics::sum(&self.metrics()?, dropped))
    }

    /// Waits until proxy-ctl has programmed everything once, and returns its figures.
    pub(crate) fn first_sync(&self) -> Result<FirstSync> {
        wait::until("the first sync", Duration::from_secs(60), || {
            let text = self.metrics().map_err(|error| format!("{error:#}"))?;
            let seconds = metrics::sum(&text, "proxy_first_sync_duration_seconds").unwrap_or(0.0);
            if seconds == 0.0 {
                return Err("no first sync yet".to_owned());
            }
            let writes = metrics::sum(&text, "proxy_writes_total").unwrap_or(0.0);
            Ok(Some(FirstSync { millis: seconds * 1e3, writes }))
        })
    }

    /// Runs the proxy's own cleanup.
    pub(crate) fn clean_up(&mut self, lab: &Lab, limit: Duration) -> Result<()> {
        let arguments = match self.proxy.is_kube_proxy() {
            true => vec!["--cleanup".to_owned()],
            false => vec!["cleanup".to_owned(), bpffs(lab)],
        };
        let mut process = self.spawn(lab, &arguments)?;
        let ended =
            wait::until("the clean-up", limit, || process.try_wait().map_err(|error| error.to_string()));
        let status = ended.or_else(|error| {
            process.kill().context("ending the clean-up")?;
            process.wait().context("waiting for the clean-up")?;
            Err(error)
        })?;
        ensure!(status.success(), "the clean-up failed ({status}): {}", self.last_words());
        Ok(())
    }

    /// Returns why the proxy has ended, if it has.
    pub(crate) fn has_ended(&mut self) -> Option<String> {
        let status = self.process.as_mut()?.try_wait().ok()??;
        Some(format!("the proxy has ended ({status}): {}", self.last_words()))
    }

    /// Returns the last lines of the proxy's log, which is removed with the lab.
    pub(crate) fn last_words(&self) -> String {
        const LINES: usize = 3;
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines.get(lines.len().saturating_sub(LINES)..).unwrap_or_default().join(" | ")
    }
}

fn bpffs(lab: &Lab) -> String {
    format!("--bpffs={}", lab.bpffs(NODE).display())
}

fn command(lab: &Lab, program: &Path, log: &Path, arguments: &[String]) -> Result<Command> {
    let log = File::options().create(true).append(true).open(log).context("opening a log")?;
    let mut command = lab.command(lab.netns(&node_name(NODE))?, program)?;
    command.args(arguments).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    Ok(command)
}

/// Removes whatever proxies have left on the node, so that the next one is measured alone.
pub(crate) fn sweep(lab: &Lab) -> Result<()> {
    let node = lab.netns(&node_name(NODE))?;
    for (program, table) in
        ["iptables", "ip6tables"].iter().flat_map(|p| ["nat", "filter", "mangle"].map(|t| (*p, t)))
    {
        for flag in ["-F", "-X"] {
            // This fails if there is nothing to remove, and if the kernel has no such table.
            let _removed = namespace::run(&node.namespace, program, &["-w", "-t", table, flag]);
        }
    }
    let mut command = lab.command(node, &lab::program("proxy-ctl")?)?;
    let output = command.args(["cleanup", &bpffs(lab)]).stdin(Stdio::null()).output();
    let output = output.context("starting proxy-ctl cleanup")?;
    ensure!(output.status.success(), "proxy-ctl cleanup: {}", String::from_utf8_lossy(&output.stderr));
    // The ruleset is flushed last, because the other commands may make empty tables.
    namespace::nft(&node.namespace, "flush ruleset").map(drop)
}

/// Returns a configuration in which both proxies do what they do by default, apart from what a lab
/// needs.
fn configuration(cluster: &Cluster, proxy: ProxyKind, path: PathKind, xdp: bool) -> Result<Value> {
    let node = node_name(NODE);
    let mut configuration = json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": proxy.datapath().mode(),
        "hostnameOverride": node,
        "clientConnection": {"kubeconfig": cluster.kubeconfig()},
        "clusterCIDR": pod_ranges(),
        "conntrack": {"maxPerCore": 0},
    });
    if !proxy.is_kube_proxy() {
        configuration["ebpf"] = json!({
            "cgroup": cluster.lab.netns(&node)?.cgroup,
            "bpffs": cluster.lab.bpffs(NODE),
            "socketLoadBalancing": if path == PathKind::Sockets { "all" } else { "host" },
            "xdp": if xdp { "native" } else { "off" },
        });
    }
    Ok(configuration)
}

impl Drop for Subject {
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            eprintln!("bench: {error:#}");
        }
    }
}
