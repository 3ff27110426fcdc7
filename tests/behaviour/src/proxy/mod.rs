//! The proxies under test: a process on each node, and the source of their objects.

pub mod api_server;
mod kube_proxy;
mod proxy_ctl;

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use lab::{Lab, Objects, address::NodeNumber, cluster::node_name};

use nix::{
    sys::signal::{self, Signal},
    unistd::{Pid, Uid},
};
use serde_json::Value;

use crate::setting::{ProxyKind, Setting};
use api_server::ApiServer;
use control_plane::binaries::{self, Program};

/// Ports on which every proxy serves health and metrics, kube-proxy too. They are open on the
/// node's addresses and on its loopback address.
pub const HEALTH: u16 = 10_256;
pub const METRICS: u16 = 10_249;

/// Returns why this proxy cannot be tested here, if it cannot. Builds the real programs if they are
/// missing.
pub fn missing_for(proxy: ProxyKind) -> Result<Option<String>> {
    if !Uid::effective().is_root() {
        return Ok(Some("network namespaces need root".to_owned()));
    }
    match proxy {
        ProxyKind::Ipvs | ProxyKind::KubeProxyIpvs if !kernel_has("ip_vs", "/proc/net/ip_vs") => {
            Ok(Some("ip_vs (CONFIG_IP_VS) is not loaded, and modprobe does not find it".to_owned()))
        }
        ProxyKind::KubeProxyIpvs if !is_installed("ipset") => {
            Ok(Some("kube-proxy's mode ipvs calls ipset, which is not installed".to_owned()))
        }
        ProxyKind::Ebpf
        | ProxyKind::Nftables
        | ProxyKind::Iptables
        | ProxyKind::Ipvs
        | ProxyKind::Userspace => Ok(lab::program("proxy-ctl").err().map(|error| error.to_string())),
        ProxyKind::KubeProxyIptables | ProxyKind::KubeProxyNftables | ProxyKind::KubeProxyIpvs => {
            binaries::provide(&[Program::Etcd, Program::KubeApiServer, Program::KubeProxy])
        }
    }
}

/// Returns true if the kernel has the module, loading it if necessary. The module shows this file.
pub(crate) fn kernel_has(module: &str, file: &str) -> bool {
    let is_loaded = || Path::new(file).exists();
    // modprobe fails if the module is built in or does not exist. It may also be missing.
    is_loaded() || {
        let _status = Command::new("modprobe").arg(module).stderr(Stdio::null()).status();
        is_loaded()
    }
}

fn is_installed(program: &str) -> bool {
    Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// Source of the proxies' objects.
pub enum Feed {
    /// Folder of manifests.
    Manifests(PathBuf),
    ApiServer(Box<ApiServer>),
}

impl Feed {
    pub fn api_server(lab: &Lab) -> Result<Self> {
        Ok(Self::ApiServer(Box::new(ApiServer::start(lab)?)))
    }

    pub fn manifests(lab: &Lab) -> Result<Self> {
        let folder = lab.directory().join("manifests");
        fs::create_dir(&folder).with_context(|| format!("creating {}", folder.display()))?;
        Ok(Self::Manifests(folder))
    }

    pub fn publish(&mut self, objects: &Objects) -> Result<()> {
        match self {
            Self::Manifests(folder) => objects.write_to(folder),
            Self::ApiServer(server) => server.publish(objects),
        }
    }
}

/// Proxy of a node. It ends with the lab.
pub struct Proxy {
    pub node: NodeNumber,
    program: PathBuf,
    arguments: Vec<String>,
    configuration: PathBuf,
    log: PathBuf,
    process: Option<Child>,
    /// True once the proxy was seen in the mode of its configuration, since its last start.
    pub(crate) seen_active: bool,
}

const LOG_LINES: usize = 25;

impl Proxy {
    /// Writes the proxy's configuration: what every lab needs, and `fields` merged over that.
    pub fn new(lab: &Lab, setting: Setting, fields: &Value, feed: &Feed, node: NodeNumber) -> Result<Self> {
        let name = node_name(node);
        let (program, mut arguments, configuration) = match setting.proxy.is_kube_proxy() {
            true => (Program::KubeProxy.path()?, kube_proxy::arguments(), format!("{name}-kube-proxy.yaml")),
            false => (lab::program("proxy-ctl")?, proxy_ctl::arguments(feed), format!("{name}.yaml")),
        };
        let configuration = lab.directory().join(configuration);
        arguments.push(format!("--config={}", configuration.display()));
        let log = lab.directory().join(format!("proxy-{name}.log"));
        let mut proxy =
            Self { node, program, arguments, configuration, log, process: None, seen_active: false };
        proxy.configure(lab, setting, fields, feed)?;
        Ok(proxy)
    }

    /// Writes the proxy's configuration anew by one rename. A running process may follow the file.
    pub fn configure(&mut self, lab: &Lab, setting: Setting, fields: &Value, feed: &Feed) -> Result<()> {
        self.seen_active = false;
        let mut configuration = match setting.proxy.is_kube_proxy() {
            true => kube_proxy::configuration(setting, feed, self.node)?,
            false => proxy_ctl::configuration(lab, setting, feed, self.node)?,
        };
        merge(&mut configuration, fields);
        let (file, next) = (&self.configuration, self.configuration.with_extension("next"));
        fs::write(&next, configuration.to_string()).with_context(|| format!("writing {}", next.display()))?;
        fs::rename(&next, file).with_context(|| format!("writing {}", file.display()))
    }

    /// Starts the process, which appends to an earlier log.
    pub fn start(&mut self, lab: &Lab) -> Result<()> {
        self.seen_active = false;
        let netns = lab.netns(&node_name(self.node))?;
        let log = File::options().create(true).append(true).open(&self.log).context("opening a log")?;
        let mut command = lab.command(netns, &self.program)?;
        command.args(&self.arguments).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.process = Some(command.spawn().with_context(|| format!("starting {}", self.program.display()))?);
        Ok(())
    }

    /// Ends the process as a crash would, with SIGKILL.
    pub fn kill(&mut self) -> Result<()> {
        if let Some(mut process) = self.process.take() {
            process.kill().context("killing a proxy")?;
            process.wait().context("waiting for a killed proxy")?;
        }
        Ok(())
    }

    /// Asks the process to end (SIGTERM), and waits until it has.
    pub fn terminate(&mut self) -> Result<()> {
        if let Some(mut process) = self.process.take() {
            let id = i32::try_from(process.id()).context("the process has an impossible id")?;
            signal::kill(Pid::from_raw(id), Signal::SIGTERM).context("ending a proxy")?;
            process.wait().context("waiting for a proxy that ends")?;
        }
        Ok(())
    }

    /// Returns the status with which the process ended, if it was started and has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.process.as_mut()?.try_wait().ok()?
    }

    /// Returns another command of the same proxy-ctl in the node's network namespace, for example
    /// `services`.
    pub fn tool_command(&self, lab: &Lab, arguments: &[&str]) -> Result<Command> {
        let mut command = lab.command(lab.netns(&node_name(self.node))?, &self.program)?;
        command.args(arguments).arg("--bpffs").arg(lab.bpffs(self.node));
        Ok(command)
    }

    /// Runs such a command, and returns its output.
    pub fn tool(&self, lab: &Lab, arguments: &[&str]) -> Result<String> {
        let output = self.tool_command(lab, arguments)?.output();
        let output = output.with_context(|| format!("running {arguments:?}"))?;
        let (text, complaint) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        ensure!(output.status.success(), "{arguments:?}: {}\n{complaint}", output.status);
        Ok(text.into_owned())
    }

    pub fn log_tail(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let first = lines.len().saturating_sub(LOG_LINES);
        format!("log of node{}:\n  {}", self.node, lines.get(first..).unwrap_or_default().join("\n  "))
    }
}

/// Applies a JSON merge patch (RFC 7396).
fn merge(document: &mut Value, patch: &Value) {
    let Value::Object(fields) = patch else {
        *document = patch.clone();
        return;
    };
    for (name, value) in fields {
        if value.is_null() {
            if let Some(document) = document.as_object_mut() {
                document.remove(name);
            }
        } else {
            merge(&mut document[name], value);
        }
    }
}
