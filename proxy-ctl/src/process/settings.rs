//! Reads what `run` is to do from file, flags and environment. Nothing of the node is touched here.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, bail};

use crate::{
    config::{
        ALLOW_SERVICE_EXTERNAL_IPS, CommandLine, Config, Effective, FIELDS, Field, WATCH_LIST_CLIENT,
        is_gone_gate,
    },
    kubernetes::{self, ConfigError, Kubernetes, SourceState},
    model::mode::Mode,
};

/// Everything that the user has asked for.
#[derive(Debug)]
pub struct Settings {
    pub config: Config,
    pub node_name: Arc<str>,
    /// The value of `--master`.
    pub master: Option<String>,
    pub manifests: Option<PathBuf>,
    /// True if the process only does what needs all privileges, and exits.
    pub init_only: bool,
    pub warnings: Vec<String>,
}

impl Settings {
    /// Reads the file of `--config`. A later call may find another content.
    pub fn new(line: &CommandLine) -> anyhow::Result<Self> {
        let Effective { config, warnings, .. } = Effective::load(line.text("config").map(Path::new), line)?;
        let mut settings = Self {
            node_name: node_name(&config)?,
            config,
            master: line.text("master").map(str::to_owned),
            manifests: line.text("manifests").map(PathBuf::from),
            init_only: line.is_on("init-only"),
            warnings,
        };
        settings.check_manifests(line)?;
        Ok(settings)
    }

    /// Checks the folder of manifests, which is the source instead of the API server.
    fn check_manifests(&mut self, line: &CommandLine) -> anyhow::Result<()> {
        let Some(manifests) = &self.manifests else { return Ok(()) };
        if let Some(flag) = ["kubeconfig", "master"].into_iter().find(|flag| line.text(flag).is_some()) {
            bail!("--manifests and --{flag} cannot be used together: both say where Services come from");
        }
        check_folder(manifests)?;
        if let Some(unused) = &self.config.client_connection.kubeconfig {
            self.warnings.push(format!(
                "clientConnection.kubeconfig {} is ignored: --manifests replaces the API server",
                unused.display()
            ));
        }
        Ok(())
    }

    /// Returns the API server's watchers, ready to run. Everything that can be wrong with their
    /// configuration is an error here.
    pub fn kubernetes(&self, state: SourceState) -> anyhow::Result<Kubernetes> {
        Kubernetes::new(self.source(), Arc::clone(&self.node_name), state).map_err(|error| {
            let ConfigError::NotInCluster = error else { return error.into() };
            anyhow::anyhow!(
                "there is nowhere to get Services from: give --kubeconfig FILE (or clientConnection.kubeconfig in \
                 the file of --config), or --manifests DIR, or run in a pod with a service account \
                 (KUBERNETES_SERVICE_HOST or KUBERNETES_SERVICE_PORT is not set)"
            )
        })
    }

    fn source(&self) -> kubernetes::Config {
        let connection = &self.config.client_connection;
        kubernetes::Config {
            kubeconfig: connection.kubeconfig.clone(),
            master: self.master.clone(),
            qps: connection.qps,
            burst: connection.burst,
            content_type: connection.content_type,
            accept_content_types: connection.accept_content_types.clone(),
            plain_lists: !self.config.has_gate(WATCH_LIST_CLIENT),
        }
    }
}

fn check_folder(folder: &Path) -> anyhow::Result<()> {
    std::fs::read_dir(folder)
        .map(drop)
        .with_context(|| format!("--manifests {} must be a folder that can be read", folder.display()))
}

fn node_name(config: &Config) -> anyhow::Result<Arc<str>> {
    if let Some(name) = config.node_name() {
        return Ok(name.into());
    }
    if config.hostname_override.is_some() {
        bail!("hostnameOverride must be the name of a Node, found nothing but spaces");
    }
    let name = nix::unistd::gethostname()
        .context("asking for the host's name")?
        .to_string_lossy()
        .trim()
        .to_lowercase();
    if name.is_empty() {
        bail!("the host has no name: --hostname-override must be the name of its Node");
    }
    Ok(name.into())
}

/// Returns a warning for each setting that asks for something that this mode does not do. Nothing
/// in it depends on the fields of `unused`.
pub(super) fn without_effect(config: &Config, mode: Mode, unused: &[&str]) -> Vec<String> {
    // The gates that are used, and the groups that they are part of.
    const USED: [&str; 8] = [
        ALLOW_SERVICE_EXTERNAL_IPS,
        WATCH_LIST_CLIENT,
        "AllAlpha",
        "AllBeta",
        "ComponentFlagz",
        "ComponentStatusz",
        "LoggingAlphaOptions",
        "LoggingBetaOptions",
    ];
    let gates =
        config.feature_gates.iter().map(|(gate, _)| gate.as_str()).filter(|gate| !USED.contains(gate));
    // A warning about gates that are gone was given already.
    let gates = gates.filter(|gate| !is_gone_gate(gate)).map(|gate| format!("featureGates.{gate}"));
    let defaults = Config::default();
    let asks_for_something = |field: &&Field| {
        let value = field.value(config);
        // A value of zero asks for what is done in any case.
        is_within(field.path, unused) && value != field.value(&defaults) && value != "0s"
    };
    let meant = FIELDS.iter().filter(|field| field.is_meant_for(config.mode));
    let fields = meant.filter(asks_for_something).map(|field| field.path.to_owned());
    fields.chain(gates).map(|field| format!("{field} has no effect in mode {mode}")).collect()
}

/// Returns true if a field is one of `names`, or in a section that is.
pub(super) fn is_within(field: &str, names: &[&str]) -> bool {
    names
        .iter()
        .any(|name| field.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
}

#[cfg(test)]
mod tests {
    use std::{ffi::OsString, io::Write as _};

    use rstest::rstest;

    use super::*;

    fn file(body: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
        write!(file, "{head}{body}").unwrap();
        file
    }

    fn settings(body: &str, flags: &[&str]) -> Settings {
        let file = file(body);
        let config = format!("--config={}", file.path().display());
        let flags = flags.iter().copied().chain([config.as_str()]).map(OsString::from);
        Settings::new(&CommandLine::parse(flags).unwrap()).unwrap()
    }

    #[test]
    fn the_hostname_flag_wins_over_the_file() {
        let body = "hostnameOverride: ' From-File '\n";
        assert_eq!(&*settings(body, &["--hostname-override= Flag.Example "]).node_name, "flag.example");
        assert_eq!(&*settings(body, &[]).node_name, "from-file");
        assert!(!settings("", &[]).node_name.is_empty());
    }

    #[test]
    fn manifests_win_over_the_kubeconfig_of_the_file_with_a_warning() {
        let folder = tempfile::TempDir::new().unwrap();
        let flag = format!("--manifests={}", folder.path().display());
        let settings = settings("clientConnection: {kubeconfig: /file}\n", &[&flag]);
        assert_eq!(settings.warnings.len(), 1, "{:?}", settings.warnings);
        assert!(settings.warnings[0].starts_with("clientConnection.kubeconfig /file is ignored"));
    }

    const UNUSED: [&str; 3] = ["iptables.masqueradeAll", "iptables.minSyncPeriod", "ipvs"];

    #[rstest]
    #[case::nothing_asked("", &[])]
    #[case::a_switch("iptables: {masqueradeAll: true}", &["iptables.masqueradeAll"])]
    #[case::used("iptables: {masqueradeBit: 15}", &[])]
    #[case::default_period("iptables: {minSyncPeriod: 1s}", &[])]
    #[case::zero_asks_for_what_is_done("iptables: {minSyncPeriod: 0s}", &[])]
    #[case::a_period("iptables: {minSyncPeriod: 5s}", &["iptables.minSyncPeriod"])]
    #[case::of_a_mode_that_is_not_asked_for("ipvs: {scheduler: lc}", &[])]
    #[case::of_the_mode_that_is_asked_for("mode: ipvs\nipvs: {scheduler: lc}", &["ipvs.scheduler"])]
    #[case::gate("featureGates: {CSIVolumeHealth: true}", &["featureGates.CSIVolumeHealth"])]
    #[case::gates_in_effect("featureGates: {AllowServiceExternalIPs: false, WatchListClient: false}", &[])]
    fn what_has_no_effect_is_said(#[case] body: &str, #[case] fields: &[&str]) {
        let settings = settings(body, &[]);
        assert_eq!(settings.warnings, [""; 0]);
        let said: Vec<_> =
            fields.iter().map(|field| format!("{field} has no effect in mode userspace")).collect();
        assert_eq!(without_effect(&settings.config, Mode::Userspace, &UNUSED), said);
    }

    #[test]
    fn without_the_gate_of_streamed_lists_lists_are_plain() {
        assert!(settings("featureGates: {WatchListClient: false}\n", &[]).source().plain_lists);
    }

    #[test]
    fn the_file_is_read_again_under_the_same_flags() {
        let mut file = file("logging: {verbosity: 1}\n");
        let flags = [format!("--config={}", file.path().display()), "--hostname-override=a".to_owned()];
        let line = CommandLine::parse(flags.map(OsString::from)).unwrap();
        let first = Settings::new(&line).unwrap().config;
        assert_eq!(Settings::new(&line).unwrap().config, first);
        writeln!(file, "oomScoreAdj: 5").unwrap();
        assert_eq!(Settings::new(&line).unwrap().config, Config { oom_score_adj: 5, ..first });
        writeln!(file, "mode: fast").unwrap();
        assert!(Settings::new(&line).unwrap_err().to_string().contains("mode must be"));
    }
}
