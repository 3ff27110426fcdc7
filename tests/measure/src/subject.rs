//! The proxy that is measured, on node 1.

use std::{
    fs::{self, File},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use behaviour::setting::ProxyKind;
use control_plane::binaries::Program;
use lab::{Agent, Lab, cluster::node_name, wait};
use serde_json::json;

use crate::metrics;

const METRICS_PORT: u16 = 10_249;

pub(crate) struct Subject {
    proxy: ProxyKind,
    program: PathBuf,
    configuration: PathBuf,
    log: PathBuf,
    process: Option<Child>,
    node: Agent,
}

impl Subject {
    pub(crate) fn new(lab: &Lab, proxy: ProxyKind, kubeconfig: &Path) -> Result<Self> {
        let node = node_name(1);
        let program = match proxy.is_kube_proxy() {
            true => Program::KubeProxy.path()?,
            false => lab::program("proxy-ctl")?,
        };
        let mut configuration = json!({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": proxy.datapath().mode(),
            "hostnameOverride": node,
            "clientConnection": {"kubeconfig": kubeconfig},
            "conntrack": {"maxPerCore": 0},
        });
        if proxy == ProxyKind::Ebpf {
            configuration["ebpf"] = json!({"cgroup": lab.netns(&node)?.cgroup, "bpffs": lab.bpffs(1)});
        }
        let file = lab.directory().join("measured.yaml");
        fs::write(&file, configuration.to_string()).with_context(|| format!("writing {}", file.display()))?;
        let log = lab.directory().join("measured.log");
        Ok(Self { proxy, program, configuration: file, log, process: None, node: lab.agent(&node)? })
    }

    pub(crate) fn start(&mut self, lab: &Lab) -> Result<()> {
        let run = (!self.proxy.is_kube_proxy()).then(|| "run".to_owned());
        let arguments =
            Vec::from_iter(run.into_iter().chain([format!("--config={}", self.configuration.display())]));
        self.process = Some(self.spawn(lab, &arguments)?);
        Ok(())
    }

    fn spawn(&self, lab: &Lab, arguments: &[String]) -> Result<Child> {
        let log = File::options().create(true).append(true).open(&self.log).context("opening a log")?;
        let mut command = lab.command(lab.netns(&node_name(1))?, &self.program)?;
        command.args(arguments).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        command.spawn().with_context(|| format!("starting {}", self.program.display()))
    }

    pub(crate) fn kill(&mut self) -> Result<()> {
        if let Some(mut process) = self.process.take() {
            process.kill().context("killing the proxy")?;
            process.wait().context("waiting for the proxy")?;
        }
        Ok(())
    }

    pub(crate) fn peak_resident_bytes(&self) -> Result<f64> {
        metrics::peak(self.process.as_ref().context("the proxy is not running")?.id())
    }

    /// Entries, rules or elements.
    pub(crate) fn written_by_the_first_sync(&self) -> Result<f64> {
        let address = SocketAddr::from(([127, 0, 0, 1], METRICS_PORT));
        wait::until("the first sync", Duration::from_secs(60), || {
            let (_, text) = self.node.http_get(address, "/metrics").map_err(|error| format!("{error:#}"))?;
            let is_over =
                metrics::sum(&text, "proxy_first_sync_duration_seconds").is_some_and(|took| took > 0.0);
            if !is_over {
                return Err("no first sync yet".to_owned());
            }
            Ok(Some(metrics::sum(&text, "proxy_writes_total").unwrap_or(0.0)))
        })
    }

    /// As the program's own flag does it; `false`: not within the limit.
    pub(crate) fn clean_up(&mut self, lab: &Lab, limit: Duration) -> Result<bool> {
        let arguments = match self.proxy.is_kube_proxy() {
            true => vec!["--cleanup".to_owned()],
            false => vec!["cleanup".to_owned(), format!("--bpffs={}", lab.bpffs(1).display())],
        };
        let mut process = self.spawn(lab, &arguments)?;
        let ended =
            wait::until("the clean-up", limit, || process.try_wait().map_err(|error| error.to_string()));
        let Ok(status) = ended else {
            process.kill().context("ending the clean-up")?;
            process.wait().context("waiting for the clean-up")?;
            return Ok(false);
        };
        ensure!(status.success(), "the clean-up failed ({status}): see {}", self.log.display());
        Ok(true)
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            eprintln!("measure: {error:#}");
        }
    }
}
