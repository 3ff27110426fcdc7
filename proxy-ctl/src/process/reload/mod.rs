//! Follows the configuration file while the process runs.

mod config_changes;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::anyhow;
use serde_json::Value;
use tokio::{sync::watch, time::timeout};

use self::config_changes::ConfigChanges;
use super::{
    event, mode_choice,
    set_up::{self, kernel::Kernel},
    settings::Settings,
};
use crate::{
    config::{CommandLine, Config},
    events::Recorder,
    http::report::{Metrics, ModeChoice},
    log, modes,
    path_watch::PathWatch,
};

/// The time in which a removed file may come back, because some editors remove a file before they
/// write it anew.
const REPLACEMENT: Duration = Duration::from_secs(1);

pub(super) struct Reload {
    line: CommandLine,
    choices: watch::Sender<ModeChoice>,
    configs: watch::Sender<Arc<Config>>,
    document: watch::Sender<Value>,
    events: Recorder,
    metrics: Arc<Metrics>,
    kernel: Kernel,
    /// The last valid configuration of the file, even if not all of it is in force.
    seen: Value,
    /// The error of the file as it is now.
    problem: Option<String>,
}

impl Reload {
    /// Creates the follower. `document` holds the same configuration as `configs`.
    pub(super) fn new(
        line: CommandLine,
        choices: watch::Sender<ModeChoice>,
        configs: watch::Sender<Arc<Config>>,
        document: watch::Sender<Value>,
        events: Recorder,
        metrics: Arc<Metrics>,
    ) -> Self {
        let seen = document.borrow().clone();
        Self {
            line,
            choices,
            configs,
            document,
            events,
            metrics,
            kernel: Kernel::default(),
            seen,
            problem: None,
        }
    }

    /// Follows the file, and ends with a change that needs a new process.
    pub(super) async fn follow(mut self) -> anyhow::Error {
        let followed = self.line.text("config").filter(|_| self.line.follows_config());
        let Some(path) = followed.map(PathBuf::from) else {
            return std::future::pending().await;
        };
        // The file is watched before it is compared, so that nothing that has happened since the
        // start is missed.
        let mut watch = PathWatch::new(&path);
        loop {
            if let Some(end) = self.compare() {
                return end;
            }
            changed(&mut watch, &path).await;
        }
    }

    fn compare(&mut self) -> Option<anyhow::Error> {
        let config = match Settings::new(&self.line) {
            Ok(settings) => settings.config,
            Err(error) => {
                self.refuse(&error);
                return None;
            }
        };
        if self.problem.take().is_some() {
            tracing::info!("the configuration file is valid again");
        }
        let document = config.to_document();
        if document == self.seen {
            return None;
        }
        self.seen = document;
        let unused = modes::unused_fields(self.choices.borrow().modes.active, &config);
        let changes = ConfigChanges::between(&self.document.borrow(), &self.seen, &unused);
        if !changes.restart.is_empty() {
            return Some(anyhow!(
                "content of the proxy server's configuration file was updated: {} changed, which takes a new process",
                changes.restart.join(", ")
            ));
        }
        if !changes.live.is_empty() {
            self.take_over(config, &changes.live);
        }
        None
    }

    /// Takes over what has changed. A field that cannot be taken over keeps its former value until
    /// the file changes again.
    fn take_over(&self, mut new: Config, fields: &[String]) {
        let former = Arc::clone(&self.configs.borrow());
        tracing::info!(changed = fields.join(", "), "the configuration file has changed; it is applied");
        let changes = |name: &str| fields.iter().any(|field| field.starts_with(name));
        if changes("logging.verbosity") && !log::set_verbosity(new.logging.verbosity) {
            tracing::warn!("the log level of this process cannot be changed");
            new.logging.verbosity = former.logging.verbosity;
        }
        if (changes("conntrack") || changes("oomScoreAdj"))
            && let Err(error) = set_up::prepare(&new, &self.kernel, &self.events)
        {
            tracing::error!(
                %error,
                "the section conntrack of the changed configuration could not be applied: the former one stays \
                 in force until the file changes again"
            );
            new.conntrack = former.conntrack;
        }
        if changes("mode") {
            match mode_choice::choose(&new) {
                Ok(choice) => drop(self.choices.send_replace(choice)),
                Err(error) => {
                    tracing::error!(%error, "the changed mode could not be applied: the former one stays active");
                    self.events.record(event::invalid_configuration(&error.to_string()));
                    new.mode = former.mode;
                }
            }
        }
        self.document.send_replace(new.to_document());
        self.configs.send_replace(Arc::new(new));
    }

    /// Reports an invalid file. kube-proxy would end here, and not start again.
    fn refuse(&mut self, error: &anyhow::Error) {
        let problem = format!("{error:#}");
        if self.problem.as_ref() == Some(&problem) {
            return;
        }
        tracing::error!(
            problem,
            "the changed configuration file is not valid; the former configuration stays in force"
        );
        self.metrics.own.refused_configurations.inc();
        self.events.record(event::invalid_configuration(&problem));
        self.problem = Some(problem);
    }
}

/// Completes when the file may have changed.
async fn changed(watch: &mut PathWatch, path: &Path) {
    watch.changed().await;
    let is_back = async {
        while !path.exists() {
            watch.changed().await;
        }
    };
    // A file that stays away is reported as such.
    let _ = timeout(REPLACEMENT, is_back).await;
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rstest::rstest;
    use tempfile::TempDir;
    use tokio::time::sleep;

    use super::*;
    use crate::{
        kubernetes::convert::invalid::InvalidObjects,
        model::mode::{ChosenMode, Mode, RequestedMode},
        modes::Modes,
    };

    /// A proxy whose configuration file has `oomScoreAdj` and `conntrack`, and the kernel's file of
    /// the connection limit.
    struct Scene {
        folder: TempDir,
        reload: Reload,
    }

    const LIMIT: &str = "root/proc/sys/net/netfilter/nf_conntrack_max";

    impl Scene {
        fn new() -> Self {
            Self::with_flags(&[])
        }

        fn with_flags(flags: &[&str]) -> Self {
            let folder = tempfile::tempdir().unwrap();
            write(&folder, "oomScoreAdj: 0\nconntrack: {maxPerCore: 0}\n");
            let flag = format!("--config={}", folder.path().join("config.yaml").display());
            let flags = flags.iter().map(|&flag| flag.into());
            let line = CommandLine::parse(flags.chain([flag.into()])).unwrap();
            let config = Arc::new(Settings::new(&line).unwrap().config);
            let reload = Reload {
                kernel: Kernel::below(folder.path().join("root")),
                ..Reload::new(
                    line,
                    watch::Sender::new(ModeChoice {
                        chosen: ChosenMode {
                            requested: RequestedMode::Ebpf,
                            mode: Mode::Ebpf,
                            reasons: Vec::new(),
                            fallback: None,
                        },
                        modes: Modes { active: Mode::Ebpf, secondary: None },
                    }),
                    watch::Sender::new(Arc::clone(&config)),
                    watch::Sender::new(config.to_document()),
                    Recorder::silent(),
                    Arc::new(Metrics::new(None, InvalidObjects::default(), |_| {})),
                )
            };
            Self { folder, reload }
        }

        fn change(&mut self, text: &str) {
            write(&self.folder, text);
            assert!(self.reload.compare().is_none());
        }

        fn max_per_core(&self) -> u32 {
            let in_force = self.reload.configs.borrow().conntrack.max_per_core;
            assert_eq!(self.reload.document.borrow()["conntrack"]["maxPerCore"], in_force);
            in_force
        }
    }

    fn write(folder: &TempDir, text: &str) {
        let head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
        fs::write(folder.path().join("config.yaml"), format!("{head}hostnameOverride: a\n{text}")).unwrap();
    }

    #[test]
    fn a_limit_that_cannot_be_written_keeps_its_former_value_until_the_file_changes_again() {
        let mut scene = Scene::new();
        let limit = scene.folder.path().join(LIMIT);
        // No number can be read from a folder, and none written to it.
        fs::create_dir_all(&limit).unwrap();
        let changed = "conntrack: {maxPerCore: 1000}\niptables: {syncPeriod: 7s}\n";
        scene.change(&format!("oomScoreAdj: 0\n{changed}"));
        assert_eq!(scene.max_per_core(), 0);
        assert_eq!(scene.reload.document.borrow()["iptables"]["syncPeriod"], "7s");

        fs::remove_dir(&limit).unwrap();
        fs::write(&limit, "5\n").unwrap();
        scene.change(&format!("oomScoreAdj: 0\n{changed}"));
        assert_eq!((scene.max_per_core(), fs::read_to_string(&limit).unwrap().as_str()), (0, "5\n"));
        scene.change(&format!("oomScoreAdj: 1\n{changed}"));
        assert_eq!(scene.max_per_core(), 1000);
        assert_ne!(fs::read_to_string(&limit).unwrap(), "5\n");
    }

    #[rstest]
    #[case::by_default(&[], true)]
    #[case::asked_for(&["--follow-config"], true)]
    #[case::switched_off(&["--follow-config=false"], false)]
    #[tokio::test]
    async fn a_changed_file_is_taken_over_unless_it_is_not_to_be_followed(
        #[case] flags: &[&str],
        #[case] expected: bool,
    ) {
        let scene = Scene::with_flags(flags);
        let document = scene.reload.document.clone();
        write(&scene.folder, "oomScoreAdj: 0\nconntrack: {maxPerCore: 0}\niptables: {syncPeriod: 7s}\n");
        tokio::select! {
            biased;
            end = scene.reload.follow() => panic!("{end}"),
            () = std::future::ready(()) => {}
        }
        assert_eq!(document.borrow()["iptables"]["syncPeriod"] == "7s", expected);
    }

    #[tokio::test]
    async fn an_editor_that_removes_the_old_file_first() {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("config");
        fs::write(&config, "one").unwrap();
        let mut watch = PathWatch::new(&config);
        fs::rename(&config, folder.path().join("config~")).unwrap();
        let written = async {
            sleep(Duration::from_millis(20)).await;
            fs::write(&config, "two").unwrap();
        };
        let noticed = async {
            changed(&mut watch, &config).await;
            config.exists()
        };
        let ((), is_replaced) = tokio::join!(biased; written, noticed);
        assert!(is_replaced, "the file was reported while it was gone");
    }
}
