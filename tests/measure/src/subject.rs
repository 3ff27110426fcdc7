//! The proxy that is measured, on node 1.

use std::{
    fs::{self, File},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result};
use control_plane::binaries::Program;
use lab::{Agent, Lab, cluster::node_name, wait};
use serde_json::json;

use crate::{
    Proxy,
    metrics::{self, Metrics},
};

const METRICS_PORT: u16 = 10_249;

pub(crate) struct Subject {
    program: PathBuf,
    configuration: PathBuf,
    log: PathBuf,
    process: Option<Child>,
    node: Agent,
}

impl Subject {
    pub(crate) fn new(
        lab: &Lab,
        proxy: Proxy,
        proxy_ctl: Option<PathBuf>,
        kubeconfig: &Path,
    ) -> Result<Self> {
        let node = node_name(1);
        let program = match proxy.is_kube_proxy() {
            true => Program::KubeProxy.path()?,
            false => proxy_ctl.map_or_else(|| lab::program("proxy-ctl"), Ok)?,
        };
        let mut configuration = json!({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": proxy.mode(),
            "hostnameOverride": node,
            "clientConnection": {"kubeconfig": kubeconfig},
            "conntrack": {"maxPerCore": 0},
        });
        if proxy == Proxy::Ebpf {
            configuration["ebpf"] = json!({"cgroup": lab.netns(&node)?.cgroup, "bpffs": lab.bpffs(1)});
        }
        let file = lab.directory().join("measured.yaml");
        fs::write(&file, configuration.to_string()).with_context(|| format!("writing {}", file.display()))?;
        let log = lab.directory().join("measured.log");
        Ok(Self { program, configuration: file, log, process: None, node: lab.agent(&node)? })
    }

    pub(crate) fn start(&mut self, lab: &Lab) -> Result<()> {
        let log = File::options().create(true).append(true).open(&self.log).context("opening a log")?;
        let mut command = lab.command(lab.netns(&node_name(1))?, &self.program)?;
        if self.program.ends_with("proxy-ctl") {
            command.arg("run");
        }
        command.arg(format!("--config={}", self.configuration.display()));
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.process = Some(command.spawn().with_context(|| format!("starting {}", self.program.display()))?);
        Ok(())
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

    /// Once the first sync is over.
    pub(crate) fn metrics(&self) -> Result<Metrics> {
        let process = self.process.as_ref().context("the proxy is not running")?.id();
        let address = SocketAddr::from(([127, 0, 0, 1], METRICS_PORT));
        wait::until("the first sync", Duration::from_secs(60), || {
            let (_, text) = self.node.http_get(address, "/metrics").map_err(|error| format!("{error:#}"))?;
            Metrics::new(&text, process).map(Some).map_err(|error| format!("{error:#}"))
        })
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            eprintln!("measure: {error:#}");
        }
    }
}
