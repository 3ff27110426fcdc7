//! The environment in which one proxy runs: its configuration, pins and cgroup. They are removed
//! when this is dropped.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use anyhow::{Context, Result, ensure};
use control_plane::binaries::Program;
use lab::OwnFolders;
use serde_json::{Value, json};

use crate::{
    proxy::{Proxy, metric},
    scenarios::{ADDRESS, PROGRAMMED},
    until::until,
    world::{World, node},
};

pub(crate) struct Node {
    pub(crate) name: &'static str,
    folder: PathBuf,
    own: OwnFolders,
    kubeconfig: String,
    /// First of the ports on which servers listen at 127.0.0.1.
    first_port: u16,
}

impl Node {
    /// Makes a node. `number` must differ from all others.
    pub(crate) fn new(world: &World, name: &'static str, number: u16) -> Result<Self> {
        let folder = world.directory.path().join(name);
        fs::create_dir(&folder).with_context(|| format!("creating {}", folder.display()))?;
        let own = OwnFolders::create(&format!("proxy-ctl-life-{}-{name}", std::process::id()))?;
        Ok(Self { name, folder, own, kubeconfig: world.kubeconfig(), first_port: 20_000 + number * 10 })
    }

    /// Makes a node whose object the API server has.
    pub(crate) fn known(world: &World, name: &'static str, number: u16) -> Result<Self> {
        world.apply(&node(name, ADDRESS, &[]))?;
        Self::new(world, name, number)
    }

    pub(crate) fn cgroup(&self) -> &Path {
        &self.own.cgroup
    }

    pub(crate) fn healthz(&self) -> String {
        format!("127.0.0.1:{}", self.first_port)
    }

    pub(crate) fn metrics(&self) -> String {
        format!("127.0.0.1:{}", self.first_port + 1)
    }

    /// Returns the configuration that every proxy of this node gets. Fields of `more` win.
    pub(crate) fn configuration(&self, more: &Value) -> String {
        let mut configuration = json!({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "hostnameOverride": self.name,
            "clientConnection": {"kubeconfig": self.kubeconfig},
            "healthzBindAddress": self.healthz(),
            "metricsBindAddress": self.metrics(),
            // The machine's own limit stays as it is. It cannot be set from another network
            // namespace.
            "conntrack": {"maxPerCore": 0},
            "ebpf": {
                "bpffs": self.own.pins,
                "cgroup": self.own.cgroup,
                "limits": {"services": 100, "slots": 1000, "frontends": 100, "backends": 100},
            },
        });
        for (field, value) in more.as_object().into_iter().flatten() {
            configuration[field] = value.clone();
        }
        configuration.to_string()
    }

    /// Returns the file into which the configuration is written, as by an operator with an editor.
    pub(crate) fn config_file(&self) -> PathBuf {
        self.folder.join("config.conf")
    }

    /// Replaces the file as `kubectl apply` of a ConfigMap does, with `..data` and all.
    pub(crate) fn swap_config_map(&self, configuration: &str) -> Result<PathBuf> {
        let volume = self.folder.join("volume");
        fs::create_dir_all(&volume)?;
        let current = fs::read_link(volume.join("..data")).ok();
        let number =
            current.as_ref().and_then(|link| link.to_str()?.trim_start_matches('.').parse::<u32>().ok());
        let next = format!("..{}", number.unwrap_or(0) + 1);
        fs::create_dir(volume.join(&next))?;
        fs::write(volume.join(&next).join("config.conf"), configuration)?;
        std::os::unix::fs::symlink(&next, volume.join("..data_tmp"))?;
        fs::rename(volume.join("..data_tmp"), volume.join("..data"))?;
        let file = volume.join("config.conf");
        match current {
            Some(before) => fs::remove_dir_all(volume.join(before))?,
            None => std::os::unix::fs::symlink("..data/config.conf", &file)?,
        }
        Ok(file)
    }

    /// Starts proxy-ctl with this configuration in its file.
    pub(crate) fn start(&self, more: &Value) -> Result<Proxy> {
        self.write_configuration(more)?;
        self.start_with(&self.config_file(), &[])
    }

    /// Starts proxy-ctl as [`Node::start`] does, in the cgroup whose sockets it serves.
    pub(crate) fn start_among_clients(&self, more: &Value) -> Result<Proxy> {
        const ENTER: &str = "echo 0 > \"$1/cgroup.procs\" && shift && exec \"$@\"";
        self.write_configuration(more)?;
        let (cgroup, program) = (self.own.cgroup.display(), lab::program("proxy-ctl")?);
        let config = self.config_file();
        let words = [cgroup.to_string(), program.display().to_string(), config.display().to_string()];
        let [cgroup, program, config] = words.each_ref().map(String::as_str);
        Proxy::start(Path::new("sh"), &["-c", ENTER, "sh", cgroup, program, "run", "--config", config])
    }

    /// Starts proxy-ctl as [`Node::start`] does, and waits until everything is programmed.
    pub(crate) fn run(&self, more: &Value) -> Result<Proxy> {
        let proxy = self.start(more)?;
        proxy.says(PROGRAMMED)?;
        Ok(proxy)
    }

    pub(crate) fn write_configuration(&self, more: &Value) -> Result<()> {
        fs::write(self.config_file(), self.configuration(more)).context("writing the configuration")
    }

    pub(crate) fn start_with(&self, config: &Path, flags: &[&str]) -> Result<Proxy> {
        let config = config.display().to_string();
        let mut arguments = vec!["run", "--config", &config];
        arguments.extend(flags);
        Proxy::start(&lab::program("proxy-ctl")?, &arguments)
    }

    /// Starts the real kube-proxy with this configuration in its file.
    pub(crate) fn start_kube_proxy(&self, program: &Path, more: &Value) -> Result<Proxy> {
        self.write_configuration(more)?;
        Proxy::start(program, &["--config", &self.config_file().display().to_string()])
    }

    /// Does what [`Node::start_kube_proxy`] does if there is a kube-proxy. Otherwise returns why
    /// not.
    pub(crate) fn start_kube_proxy_if_here(&self, more: &Value) -> Result<Result<Proxy, String>> {
        Program::KubeProxy
            .here()?
            .map(|program| self.start_kube_proxy(&program, more))
            .map_or_else(|reason| Ok(Err(reason)), |started| started.map(Ok))
    }

    /// Waits until this metric is as it should be.
    pub(crate) fn until_metric(
        &self,
        proxy: &Proxy,
        name: &str,
        is_right: impl Fn(f64) -> bool,
    ) -> Result<()> {
        let told = || Ok(is_right(metric(&self.metrics(), name)?).then_some(()));
        until(name, told, || proxy.log())
    }

    fn command(&self, name: &str) -> Result<Output> {
        let mut command = Command::new(lab::program("proxy-ctl")?);
        command.args([name, "--output", "json", "--bpffs"]).arg(&self.own.pins);
        command.output().context("starting proxy-ctl")
    }

    /// Returns what is programmed, whether or not a proxy runs.
    pub(crate) fn services(&self) -> Result<Value> {
        self.show("services")
    }

    pub(crate) fn status(&self) -> Result<Value> {
        self.show("status")
    }

    fn show(&self, command: &str) -> Result<Value> {
        let output = self.command(command)?;
        serde_json::from_slice(&output.stdout).with_context(|| format!("{output:?}"))
    }

    /// Expects Service `web` of the world to lead to its endpoint.
    pub(crate) fn serves(&self) -> Result<()> {
        let services = self.services()?;
        let web = services.as_array().into_iter().flatten().find(|service| service["name"] == "web");
        ensure!(
            web.is_some_and(|web| web["endpoints"][0]["address"] == "10.0.0.1"),
            "what was programmed is gone: {services}"
        );
        Ok(())
    }

    pub(crate) fn has_pins(&self) -> bool {
        fs::read_dir(&self.own.pins).is_ok_and(|mut pins| pins.next().is_some())
    }
}

/// Expects the maps to be there and empty.
pub(crate) fn nothing_is_programmed(own: &Node) -> Result<()> {
    let services = until("the maps", || Ok(own.services().ok()), String::new)?;
    ensure!(services == json!([]), "programmed before all was listed: {services}");
    Ok(())
}
