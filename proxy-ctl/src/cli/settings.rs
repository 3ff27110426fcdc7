//! File, flags and environment into what `run` does. Nothing of the node is touched here.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, bail};

use super::args::RunArgs;
use crate::{
    config::{Config, Loaded, RequestedMode},
    source::kubernetes::{self, ConfigError, Kubernetes, SourceState},
};

/// What the user wants, complete.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) config: Config,
    pub(super) node_name: Arc<str>,
    pub(super) manifests: Option<PathBuf>,
    pub(super) warnings: Vec<String>,
}

impl Settings {
    /// What the file says wins over --kubeconfig and --proxy-mode, as with kube-proxy; the other flags win.
    pub(super) fn new(args: RunArgs, bpffs: Option<PathBuf>) -> anyhow::Result<Self> {
        let Loaded { mut config, mut warnings } = match &args.config {
            Some(path) => Config::load(path)?,
            None => Loaded { config: Config::default(), warnings: Vec::new() },
        };
        if let Some(flag) = args.kubeconfig {
            match &config.client_connection.kubeconfig {
                Some(file) if *file != flag => warnings.push(format!(
                    "--kubeconfig {} is ignored: clientConnection.kubeconfig of the file is {}",
                    flag.display(),
                    file.display()
                )),
                Some(_) => {}
                None => config.client_connection.kubeconfig = Some(flag),
            }
        }
        if let Some(flag) = args.proxy_mode {
            let file = config.mode;
            if file == RequestedMode::Automatic {
                config.mode = flag;
            } else if file != flag {
                warnings.push(format!("--proxy-mode {flag} is ignored: mode of the file is {file}"));
            }
        }
        if let Some(bpffs) = bpffs {
            config.ebpf.bpffs = bpffs;
        }
        if let Some(v) = args.v {
            config.logging.verbosity = v;
        }
        if let Some(manifests) = &args.manifests {
            check_folder(manifests)?;
            if let Some(unused) = &config.client_connection.kubeconfig {
                warnings.push(format!(
                    "clientConnection.kubeconfig {} is ignored: --manifests takes the API server's place",
                    unused.display()
                ));
            }
        }
        warnings.extend(without_effect(&config));
        let node_name = node_name(args.hostname_override, config.hostname_override.as_deref())?;
        Ok(Self { config, node_name, manifests: args.manifests, warnings })
    }

    /// The API server's watchers, ready to run; all that can be wrong with their configuration is an error here.
    pub(super) fn kubernetes(&self, state: SourceState) -> anyhow::Result<Kubernetes> {
        let connection = &self.config.client_connection;
        let config = kubernetes::Config {
            kubeconfig: connection.kubeconfig.clone(),
            qps: connection.qps,
            burst: connection.burst,
            content_type: connection.content_type.clone(),
            ..kubernetes::Config::default()
        };
        Kubernetes::new(config, Arc::clone(&self.node_name), state).map_err(|error| {
            let ConfigError::NotInCluster { variable } = error else { return error.into() };
            anyhow::anyhow!(
                "there is nowhere to get Services from: give --kubeconfig FILE (or clientConnection.kubeconfig in \
                 the file of --config), or --manifests DIR, or run in a pod with a service account ({variable} is \
                 not set)"
            )
        })
    }
}

fn check_folder(folder: &Path) -> anyhow::Result<()> {
    std::fs::read_dir(folder)
        .map(drop)
        .with_context(|| format!("--manifests {} must be a folder that can be read", folder.display()))
}

fn node_name(flag: Option<String>, file: Option<&str>) -> anyhow::Result<Arc<str>> {
    let given = flag.map(|name| name.trim().to_lowercase());
    if given.as_deref() == Some("") {
        bail!("--hostname-override must be the name of a Node, found nothing");
    }
    let name = match given.or_else(|| file.map(str::to_owned)) {
        Some(name) => name,
        None => nix::unistd::gethostname()
            .context("asking for the host's name")?
            .to_string_lossy()
            .trim()
            .to_lowercase(),
    };
    if name.is_empty() {
        bail!("the host has no name: --hostname-override must be the name of its Node");
    }
    Ok(name.into())
}

/// Settings that ask kube-proxy for something that mode ebpf does not do.
fn without_effect(config: &Config) -> Vec<String> {
    let masquerade_all = config.iptables.masquerade_all || config.nftables.masquerade_all;
    let gates = config.feature_gates.iter().map(|(gate, _)| gate.as_str());
    let unused: Vec<String> = masquerade_all
        .then(|| "masqueradeAll".to_owned())
        .into_iter()
        .chain(config.enable_profiling.then(|| "enableProfiling".to_owned()))
        .chain(gates.map(|gate| format!("featureGates.{gate}")))
        .collect();
    unused.into_iter().map(|field| format!("{field} has no effect in mode ebpf")).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn file(body: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
        write!(file, "{head}{body}").unwrap();
        file
    }

    fn settings(body: &str, args: RunArgs) -> Settings {
        let file = file(body);
        Settings::new(RunArgs { config: Some(file.path().to_owned()), ..args }, None).unwrap()
    }

    #[test]
    fn the_file_wins_over_mode_and_kubeconfig_with_a_warning() {
        let args = RunArgs {
            proxy_mode: Some(RequestedMode::Ebpf),
            kubeconfig: Some("/flag".into()),
            ..RunArgs::default()
        };
        let settings = settings("mode: iptables\nclientConnection: {kubeconfig: /file}\n", args);
        assert_eq!(settings.config.mode, RequestedMode::Iptables);
        assert_eq!(settings.config.client_connection.kubeconfig.as_deref(), Some(Path::new("/file")));
        assert_eq!(settings.warnings.len(), 2, "{:?}", settings.warnings);
    }

    #[test]
    fn flags_fill_in_what_the_file_leaves_open() {
        let args = RunArgs {
            proxy_mode: Some(RequestedMode::Ebpf),
            kubeconfig: Some("/flag".into()),
            v: Some(4),
            ..RunArgs::default()
        };
        let settings = settings("logging: {verbosity: 2}\n", args);
        assert_eq!(settings.config.mode, RequestedMode::Ebpf);
        assert_eq!(settings.config.client_connection.kubeconfig.as_deref(), Some(Path::new("/flag")));
        assert_eq!(settings.config.logging.verbosity, 4);
        assert_eq!(settings.warnings, [""; 0]);
    }

    #[test]
    fn the_hostname_flag_wins_over_the_file() {
        let body = "hostnameOverride: from-file\n";
        let flag = RunArgs { hostname_override: Some(" Flag.Example ".into()), ..RunArgs::default() };
        assert_eq!(&*settings(body, flag).node_name, "flag.example");
        assert_eq!(&*settings(body, RunArgs::default()).node_name, "from-file");
        assert!(!settings("", RunArgs::default()).node_name.is_empty());
    }

    #[test]
    fn manifests_win_over_the_kubeconfig_of_the_file_with_a_warning() {
        let folder = tempfile::TempDir::new().unwrap();
        let args = RunArgs { manifests: Some(folder.path().to_owned()), ..RunArgs::default() };
        let settings = settings("clientConnection: {kubeconfig: /file}\n", args);
        assert_eq!(settings.warnings.len(), 1, "{:?}", settings.warnings);
        assert!(settings.warnings[0].starts_with("clientConnection.kubeconfig /file is ignored"));
    }

    #[test]
    fn what_has_no_effect_is_said() {
        let settings = settings("iptables: {masqueradeAll: true}\n", RunArgs::default());
        assert_eq!(settings.warnings, ["masqueradeAll has no effect in mode ebpf"]);
    }
}
