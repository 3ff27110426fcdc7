//! The proxies under test: a process on each node, and what feeds it with objects.

pub mod api_server;
mod kube_proxy;
mod proxy_ctl;

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
};

use anyhow::{Context as _, Result, anyhow};
use lab::{Lab, Objects, address::NodeNumber, cluster::node_name};

use crate::setting::{ProxyKind, Setting};
use api_server::ApiServer;

/// Where the programs are.
#[derive(Clone, Debug, Default)]
pub struct Binaries {
    pub proxy_ctl: Option<PathBuf>,
    /// Folder with kube-apiserver and kube-proxy.
    pub kube: Option<PathBuf>,
}

impl Binaries {
    /// `PROXY_CTL`, or proxy-ctl beside the running binary; `KUBEBUILDER_ASSETS`.
    pub fn find() -> Self {
        let beside = std::env::current_exe().ok().map(|own| own.with_file_name("proxy-ctl"));
        let proxy_ctl =
            std::env::var_os("PROXY_CTL").map(PathBuf::from).or(beside).filter(|path| path.exists());
        Self { proxy_ctl, kube: std::env::var_os("KUBEBUILDER_ASSETS").map(PathBuf::from) }
    }

    fn proxy_ctl(&self) -> Result<&Path> {
        self.proxy_ctl.as_deref().ok_or_else(|| anyhow!("no proxy-ctl: cargo build -p proxy-ctl builds it"))
    }

    fn kube(&self, program: &str) -> Result<PathBuf> {
        let folder = self.kube.as_deref().ok_or_else(|| anyhow!("KUBEBUILDER_ASSETS is not set"))?;
        let path = folder.join(program);
        if path.exists() { Ok(path) } else { Err(anyhow!("{} does not exist", path.display())) }
    }

    /// Why this proxy cannot be tested here, if it cannot.
    pub fn missing_for(&self, proxy: ProxyKind) -> Option<String> {
        let found = match proxy {
            ProxyKind::Ebpf => self.proxy_ctl().map(drop),
            ProxyKind::KubeProxyIptables | ProxyKind::KubeProxyNftables => {
                self.kube("kube-proxy").and(self.kube("kube-apiserver")).map(drop)
            }
        };
        found.err().map(|error| error.to_string())
    }
}

/// Where the proxies read objects from.
pub enum Feed {
    /// A folder of manifests.
    Manifests(PathBuf),
    ApiServer(ApiServer),
}

impl Feed {
    pub fn start(lab: &Lab, proxy: ProxyKind, binaries: &Binaries) -> Result<Self> {
        match proxy {
            ProxyKind::Ebpf => Self::manifests(lab),
            ProxyKind::KubeProxyIptables | ProxyKind::KubeProxyNftables => {
                Ok(Self::ApiServer(ApiServer::start(lab, &binaries.kube("kube-apiserver")?)?))
            }
        }
    }

    pub fn manifests(lab: &Lab) -> Result<Self> {
        let folder = lab.directory().join("manifests");
        fs::create_dir(&folder).with_context(|| format!("creating {}", folder.display()))?;
        Ok(Self::Manifests(folder))
    }

    pub fn publish(&mut self, lab: &Lab, objects: &Objects) -> Result<()> {
        match self {
            Self::Manifests(folder) => objects.write_to(folder),
            Self::ApiServer(server) => server.publish(lab, objects),
        }
    }
}

/// A node's proxy. It ends with the lab.
pub struct Proxy {
    pub node: NodeNumber,
    program: PathBuf,
    arguments: Vec<String>,
    log: PathBuf,
    process: Option<Child>,
}

const LOG_LINES: usize = 25;

impl Proxy {
    pub fn new(
        lab: &Lab,
        setting: Setting,
        binaries: &Binaries,
        feed: &Feed,
        node: NodeNumber,
    ) -> Result<Self> {
        let (program, arguments) = match setting.proxy {
            ProxyKind::Ebpf => {
                (binaries.proxy_ctl()?.to_owned(), proxy_ctl::arguments(lab, setting.path, feed, node)?)
            }
            ProxyKind::KubeProxyIptables => {
                (binaries.kube("kube-proxy")?, kube_proxy::arguments(lab, "iptables", feed, node)?)
            }
            ProxyKind::KubeProxyNftables => {
                (binaries.kube("kube-proxy")?, kube_proxy::arguments(lab, "nftables", feed, node)?)
            }
        };
        let log = lab.directory().join(format!("proxy-{}.log", node_name(node)));
        Ok(Self { node, program, arguments, log, process: None })
    }

    /// Starts the process; a former log is continued.
    pub fn start(&mut self, lab: &Lab) -> Result<()> {
        let place = lab.place(&node_name(self.node))?;
        let log = File::options().create(true).append(true).open(&self.log).context("opening a log")?;
        let mut command = lab.command(place, &self.program)?;
        command.args(&self.arguments).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.process = Some(command.spawn().with_context(|| format!("starting {}", self.program.display()))?);
        Ok(())
    }

    /// Ends it as a crash would, with SIGKILL.
    pub fn kill(&mut self) -> Result<()> {
        if let Some(mut process) = self.process.take() {
            process.kill().context("killing a proxy")?;
            process.wait().context("waiting for a killed proxy")?;
        }
        Ok(())
    }

    /// The status it ended with, if it was started and is no longer there.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.process.as_mut()?.try_wait().ok()?
    }

    pub fn process_id(&self) -> Option<u32> {
        Some(self.process.as_ref()?.id())
    }

    /// Another command of the same program in the node's place, e.g. `services`.
    pub fn tool(&self, lab: &Lab, arguments: &[&str]) -> Result<Command> {
        let mut command = lab.command(lab.place(&node_name(self.node))?, &self.program)?;
        command.args(arguments);
        Ok(command)
    }

    pub fn log_tail(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let first = lines.len().saturating_sub(LOG_LINES);
        format!("log of node{}:\n  {}", self.node, lines.get(first..).unwrap_or_default().join("\n  "))
    }
}
