//! A proxy in a network namespace of its own. The test controls the programs that it starts.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use control_plane::{Process, go};
use lab::{OwnFolders, http::Answer, namespace::within};
use serde_json::{Value, json};

use crate::{
    cluster::{Cluster, NODE},
    network::Namespace,
    page::{HEALTH, LIVE, METRICS, PAGES, Page, READY},
};

/// Modes of kube-proxy.
pub(crate) const MODES: [&str; 2] = ["iptables", "nftables"];
/// Period of syncs. If a change waits for twice as long, a proxy is unhealthy.
const SYNC_PERIOD: &str = "5s";
const LIMIT: Duration = Duration::from_secs(90);
const BETWEEN_LOOKS: Duration = Duration::from_millis(50);
/// Programs with which kube-proxy writes rules.
const TOOLS: [&str; 7] = [
    "iptables",
    "iptables-save",
    "iptables-restore",
    "ip6tables",
    "ip6tables-save",
    "ip6tables-restore",
    "nft",
];

#[derive(Clone, Copy, Debug)]
pub(crate) enum Program<'a> {
    KubeProxy { program: &'a Path, mode: &'static str },
    ProxyCtl { program: &'a Path },
}

impl Program<'_> {
    fn mode(&self) -> &'static str {
        match self {
            Self::KubeProxy { mode, .. } => mode,
            Self::ProxyCtl { .. } => "ebpf",
        }
    }
}

pub(crate) struct Peer<'a> {
    program: Program<'a>,
    folder: PathBuf,
    /// Process of the proxy. It is dropped before what it runs in.
    process: Option<Process>,
    pub(crate) namespace: Namespace,
    own_folders: Option<OwnFolders>,
}

impl<'a> Peer<'a> {
    /// Makes a proxy that is not started. `number` must differ from all others.
    pub(crate) fn new(program: Program<'a>, number: u8, cluster: &Cluster) -> Result<Self> {
        let folder = cluster.folder().join(program.mode());
        fs::create_dir(&folder).with_context(|| format!("creating {}", folder.display()))?;
        let own_folders = match program {
            Program::ProxyCtl { .. } => {
                Some(OwnFolders::create(&format!("proxy-ctl-surface-{}", std::process::id()))?)
            }
            Program::KubeProxy { .. } => None,
        };
        let namespace = Namespace::create(number)?;
        let peer = Self { program, folder, process: None, namespace, own_folders };
        peer.write_tools()?;
        Ok(peer)
    }

    pub(crate) fn mode(&self) -> &'static str {
        self.program.mode()
    }

    /// Writes wrappers for the tools into the first folder of PATH. Each fails while a file says
    /// so.
    fn write_tools(&self) -> Result<()> {
        let folder = self.folder.join("bin");
        fs::create_dir(&folder).with_context(|| format!("creating {}", folder.display()))?;
        for tool in TOOLS {
            // If a tool is not installed, kube-proxy finds that out by itself.
            let Some(real) = go::on_path(tool) else { continue };
            let (file, broken) = (folder.join(tool), self.broken());
            let text = format!(
                "#!/bin/sh\nif [ -e {broken} ]; then echo broken on purpose >&2; exit 1; fi\nexec {real} \"$@\"\n",
                broken = broken.display(),
                real = real.display(),
            );
            fs::write(&file, text).with_context(|| format!("writing {}", file.display()))?;
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).context("making it executable")?;
        }
        Ok(())
    }

    fn broken(&self) -> PathBuf {
        self.folder.join("broken")
    }

    /// Returns the pin of one of proxy-ctl's maps.
    fn pin(&self) -> Option<PathBuf> {
        self.own_folders.as_ref().map(|own| own.pins.join("proxy-ctl/v1/maps/settings"))
    }

    /// Makes writes fail from now on. kube-proxy cannot write any rules. proxy-ctl cannot pin its
    /// maps, because a folder is in the way.
    pub(crate) fn break_tools(&self) -> Result<()> {
        if let Some(pin) = self.pin() {
            fs::remove_file(&pin).with_context(|| format!("removing {}", pin.display()))?;
            fs::create_dir(&pin).with_context(|| format!("creating {}", pin.display()))?;
        }
        fs::write(self.broken(), "").with_context(|| format!("writing {}", self.broken().display()))
    }

    pub(crate) fn restore_tools(&self) -> Result<()> {
        if let Some(pin) = self.pin() {
            fs::remove_dir(&pin).with_context(|| format!("removing {}", pin.display()))?;
        }
        fs::remove_file(self.broken()).with_context(|| format!("removing {}", self.broken().display()))
    }

    /// Starts the proxy, after ending the running one. All proxies get the same configuration. Only
    /// the mode and the folders of proxy-ctl's maps differ.
    pub(crate) fn start(&mut self, cluster: &Cluster, more: &Value) -> Result<()> {
        self.process = None;
        let mode = self.mode();
        let section = json!({"minSyncPeriod": "1ms", "syncPeriod": SYNC_PERIOD});
        let mut configuration = json!({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": mode,
            "hostnameOverride": NODE,
            "clientConnection": {"kubeconfig": cluster.kubeconfig()},
            "clusterCIDR": "10.0.0.0/8",
            // Zero keeps the proxy from changing the limits of the machine.
            "conntrack": {"maxPerCore": 0},
            "enableProfiling": true,
            "iptables": section,
            "nftables": section,
            "oomScoreAdj": -998,
        });
        if let Some(OwnFolders { pins, cgroup, .. }) = &self.own_folders {
            let limits = json!({"services": 100, "slots": 1000, "frontends": 100, "backends": 100});
            configuration["ebpf"] = json!({"bpffs": pins, "cgroup": cgroup, "limits": limits});
        }
        for (field, value) in more.as_object().into_iter().flatten() {
            configuration[field] = value.clone();
        }
        // The file has the same name for all, because the name is shown.
        let file = self.folder.join("config.yaml");
        fs::write(&file, configuration.to_string()).with_context(|| format!("writing {}", file.display()))?;
        let mut command = match self.program {
            Program::KubeProxy { program, .. } => Command::new(program),
            Program::ProxyCtl { program } => {
                let mut command = Command::new(program);
                command.arg("run");
                command
            }
        };
        let path = std::env::var("PATH").unwrap_or_default();
        command.arg("--config").arg(&file).arg("-v=2");
        command.env("PATH", format!("{}:{path}", self.folder.join("bin").display()));
        let log = self.folder.join("log");
        self.process = Some(Process::start(&command, &log, Some(&self.namespace.name))?);
        Ok(())
    }

    /// Sends a request from the node itself.
    pub(crate) fn ask(&self, page: &Page) -> Result<Answer> {
        within(&self.namespace.name, || page.ask())
    }

    /// Returns an answer as it is compared.
    pub(crate) fn see(&self, page: &Page, cluster: &Cluster) -> Result<Value> {
        let own = format!("{}/", self.folder.display());
        let common = format!("{}/", cluster.folder().display());
        Ok(page.seen(&self.ask(page)?, &[&own, &common]))
    }

    pub(crate) fn metrics(&self, path: &'static str) -> Result<String> {
        let page = PAGES.iter().find(|page| page.path == path && page.method == "GET");
        let page = Page { accept: "", port: METRICS, ..*page.context("no such page")? };
        let answer = self.ask(&page)?;
        if answer.status != 200 {
            bail!("{path} answers {}", answer.status);
        }
        Ok(answer.text())
    }

    pub(crate) fn until_healthz(&mut self, status: u16) -> Result<()> {
        let [page, ..] = HEALTH else { bail!("no page") };
        self.until(&format!("/healthz answers {status}"), |peer| Ok(peer.ask(page)?.status == status))
    }

    pub(crate) fn is_own(&self) -> bool {
        self.own_folders.is_some()
    }

    /// Waits until `/readyz` of proxy-ctl answers with this status. The path of the liveness probe
    /// must then answer with 200.
    pub(crate) fn until_ready(&mut self, status: u16) -> Result<()> {
        self.until(&format!("/readyz answers {status}"), |peer| Ok(peer.ask(&READY)?.status == status))?;
        let answer = self.ask(&LIVE)?;
        ensure!(answer.status == 200, "no thread is stuck, and yet: {}", answer.text());
        Ok(())
    }

    /// Waits until the condition returns true. An error counts as not yet.
    pub(crate) fn until(&mut self, what: &str, condition: impl Fn(&Self) -> Result<bool>) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        let mode = self.mode();
        while !condition(self).unwrap_or(false) {
            let process = self.process.as_mut().with_context(|| format!("{mode} does not run"))?;
            process.alive()?;
            if Instant::now() > deadline {
                bail!("not so in mode {mode}: {what}; the log ends with\n{}", process.last_words());
            }
            std::thread::sleep(BETWEEN_LOOKS);
        }
        Ok(())
    }
}
