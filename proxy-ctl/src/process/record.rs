//! The record that a running proxy writes for `status`. It has the mode, its reasons, and the state
//! of its sources, which the kernel's maps do not hold. It is in /run, so that it does not outlive
//! a reboot. The record of an ordinary user is in the user's own folder there.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use ipnet::IpNet;
use nix::unistd::Uid;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    config::{Config, Keyword as _},
    controller::Coverage,
    http::report::{ModeChoice, ModeInForce},
    kubernetes::{ResourceKind, SourceState},
    model::{
        node::{NodeNetwork, Role},
        objects::ObjectName,
    },
    modes::{Effect, HookProblems},
    sys::proc::process::stat,
};

const FOLDER: &str = "proxy-ctl";
const PERIOD: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Record {
    pub pid: u32,
    /// The clock ticks from boot to the start of the process. A later process with the same number
    /// has another value.
    pub began: u64,
    pub node: String,
    pub mode: String,
    /// The secondary mode, which serves what `mode` cannot.
    #[serde(alias = "beside")]
    pub secondary: Option<String>,
    pub reasons: Vec<String>,
    /// The reason why this mode was chosen instead of the one that was asked for, if it was.
    pub fallback: Option<String>,
    pub sources: Vec<SourceRecord>,
    /// The networks of `ipvs.excludeCIDRs`, whose virtual servers are not kube-proxy's.
    #[serde(rename = "excludeCIDRs")]
    pub exclude_cidrs: Vec<String>,
    /// The value of `ebpf.xdp`.
    pub xdp: String,
    /// The interfaces that packet programs are attached to.
    pub interfaces: Vec<InterfaceRecord>,
    /// Service ports for which the rules of another kube-proxy stay, each with the reason.
    pub removal_blockers: Vec<String>,
    /// The fields that are not served as asked, by service port.
    #[serde(alias = "unsupported")]
    pub unserved_fields: Vec<UnservedFieldRecord>,
    /// The fields that this node has reported by events.
    pub told: Vec<UnservedFieldRecord>,
}

/// The error for a record of a running proxy that is there and cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("the controller's record {}: {source}", path.display())]
pub struct UnreadableRecord {
    path: PathBuf,
    source: io::Error,
}

/// A field of a Service that is not served as asked for one of its ports.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct UnservedFieldRecord {
    pub namespace: String,
    pub name: String,
    /// Empty if the Service has one unnamed port.
    pub port: String,
    pub protocol: String,
    pub family: String,
    /// The name that Kubernetes gives the field, such as `spec.sessionAffinity`.
    pub field: String,
    /// One of `servedDifferently`, `delegated`, `leftToNode`, `partlyServed` and `notServed`.
    pub effect: String,
    /// A description for people of what happens instead.
    pub instead: String,
}

impl UnservedFieldRecord {
    pub(super) fn all(coverage: &Coverage) -> Vec<Self> {
        let all = coverage.exceptions();
        all.map(|(name, one)| Self {
            namespace: name.service.namespace.to_string(),
            name: name.service.name.to_string(),
            port: name.port.to_string(),
            protocol: name.protocol.name().to_owned(),
            family: name.family.name().to_owned(),
            field: one.field.to_owned(),
            effect: one.effect.name().to_owned(),
            instead: one.instead.to_string(),
        })
        .collect()
    }

    pub(super) fn service(&self) -> ObjectName {
        ObjectName::new(self.namespace.as_str(), self.name.as_str())
    }

    /// Returns true if the field is delegated, so that it is served as it asks.
    pub(crate) fn is_delegated(&self) -> bool {
        // Former versions have the second name.
        self.effect == Effect::Delegated.name() || self.effect == "handedOver"
    }

    /// Returns true if the node itself serves it.
    pub(super) fn is_left_to_node(&self) -> bool {
        self.effect == Effect::LeftToNode.name()
    }

    pub(super) fn leaves_unserved(&self) -> bool {
        !self.is_delegated() && !self.is_left_to_node() && self.effect != Effect::ServedDifferently.name()
    }
}

#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct InterfaceRecord {
    pub index: u32,
    pub name: String,
    /// Either `workload` or `uplink`.
    pub role: String,
    /// The reason for the role.
    pub reason: String,
    /// The reason why the interface has no XDP program, if one was to be attached.
    pub without_xdp: Option<String>,
    /// The reason why the interface has no packet programs, if they were to be attached.
    pub unattached: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SourceRecord {
    pub name: String,
    pub connected: bool,
    pub objects: i64,
    /// The reason why the source is not connected.
    pub problem: Option<String>,
}

impl Record {
    /// Returns the path of the record below `run`, the [`runtime_folder`]. Each bpffs has a
    /// controller of its own.
    fn path(run: &Path, bpffs: &Path) -> PathBuf {
        let name = bpffs.to_string_lossy().trim_matches('/').replace('/', "-");
        run.join(FOLDER).join(format!("{name}.json"))
    }

    /// Returns the own user's record, or else root's. A file that the caller may not read is an
    /// error. A file of another form, as another version may have left it, is no record.
    pub fn read(bpffs: &Path) -> Result<Option<Self>, UnreadableRecord> {
        for run in [runtime_folder(), PathBuf::from(RUN)] {
            let record = Self::read_file(Self::path(&run, bpffs))?;
            if record.is_some() {
                return Ok(record);
            }
        }
        Ok(None)
    }

    fn read_file(path: PathBuf) -> Result<Option<Self>, UnreadableRecord> {
        use io::ErrorKind::{IsADirectory, NotADirectory, NotFound};
        match fs::read(&path) {
            Ok(text) => Ok(serde_json::from_slice(&text).ok()),
            Err(error) if matches!(error.kind(), NotFound | NotADirectory | IsADirectory) => Ok(None),
            Err(source) => Err(UnreadableRecord { path, source }),
        }
    }

    /// Writes the record. A reader finds the old or the new text, never half of it.
    pub fn write(&self, bpffs: &Path) -> io::Result<()> {
        let run = runtime_folder();
        let path = Self::path(&run, bpffs);
        fs::create_dir_all(run.join(FOLDER))?;
        let draft = path.with_extension(format!("{}.new", self.pid));
        fs::write(&draft, serde_json::to_vec(self)?)?;
        fs::rename(draft, path)
    }

    /// Returns the record with the mode in force. While the mode that is asked for cannot take
    /// over, the former one is active, and the reasons say so.
    pub(super) fn in_mode(mut self, choice: &ModeChoice, in_force: &ModeInForce) -> Self {
        self.mode = in_force.modes.active.name().to_owned();
        self.secondary = in_force.modes.secondary.map(|mode| mode.name().to_owned());
        if choice.modes == in_force.modes {
            self.reasons.clone_from(&choice.chosen.reasons);
            self.fallback.clone_from(&choice.chosen.fallback);
        }
        if let Some((wanted, problem)) = &in_force.refused {
            self.reasons = vec![format!("mode {wanted} was asked for and cannot take over: {problem}")];
        }
        self
    }

    pub fn remove(bpffs: &Path) {
        // A record that cannot be removed names a process that has ended, which readers check.
        let _ = fs::remove_file(Self::path(&runtime_folder(), bpffs));
    }

    /// Returns [`Self::exclude_cidrs`] as networks.
    pub fn keeps(&self) -> Vec<IpNet> {
        self.exclude_cidrs.iter().filter_map(|network| network.parse().ok()).collect()
    }

    /// Returns true if the process that wrote the record is still there.
    pub fn is_alive(&self) -> bool {
        began(self.pid).is_some_and(|began| began == self.began)
    }
}

const RUN: &str = "/run";

/// Returns the folder in which the running process keeps its [`Record`]. For root it is /run. For
/// another user it is the user's runtime folder, which systemd and others make, and which is
/// removed when the user logs out.
fn runtime_folder() -> PathBuf {
    let user = Uid::effective();
    if user.is_root() {
        return PathBuf::from(RUN);
    }
    let named = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty());
    named.map_or_else(|| PathBuf::from(format!("{RUN}/user/{user}")), PathBuf::from)
}

/// Returns the start of a process in clock ticks since boot.
pub fn began(pid: u32) -> Option<u64> {
    stat(pid)?(22)
}

/// The parts of the record that change while the process runs.
pub(super) struct RecordInputs {
    /// `None` if the source is a folder of manifests, which reports no state.
    pub(super) source_state: Option<SourceState>,
    pub(super) choices: watch::Receiver<ModeChoice>,
    pub(super) mode: watch::Receiver<ModeInForce>,
    pub(super) networks: watch::Receiver<Option<NodeNetwork>>,
    pub(super) configs: watch::Receiver<Arc<Config>>,
    pub(super) removal_blockers: watch::Receiver<Vec<String>>,
    pub(super) coverage: watch::Receiver<Coverage>,
    pub(super) hook_problems: watch::Receiver<HookProblems>,
    pub(super) told: watch::Receiver<Vec<UnservedFieldRecord>>,
}

/// Writes the record again whenever it has changed, once it was `written` first.
pub(super) async fn keep(mut record: Record, mut inputs: RecordInputs, written: CancellationToken) {
    written.cancelled().await;
    let mut last: Option<Record> = None;
    loop {
        let config = Arc::clone(&inputs.configs.borrow());
        record = record.in_mode(&inputs.choices.borrow(), &inputs.mode.borrow());
        record.sources = inputs.sources();
        config.ebpf.xdp.word().clone_into(&mut record.xdp);
        record.interfaces = inputs.interfaces(&config);
        record.removal_blockers.clone_from(&inputs.removal_blockers.borrow());
        if inputs.coverage.has_changed().unwrap_or(false) {
            record.unserved_fields = UnservedFieldRecord::all(&inputs.coverage.borrow_and_update());
        }
        record.told.clone_from(&inputs.told.borrow());
        if last.as_ref() != Some(&record) {
            match record.write(&config.ebpf.bpffs) {
                Ok(()) => last = Some(record.clone()),
                Err(error) => {
                    tracing::debug!(%error, "the record that `proxy-ctl status` reads is not up to date")
                }
            }
        }
        tokio::time::sleep(PERIOD).await;
    }
}

impl RecordInputs {
    fn sources(&self) -> Vec<SourceRecord> {
        let source = |state: &SourceState, kind: ResourceKind| SourceRecord {
            name: kind.plural().to_owned(),
            connected: state.connected(kind),
            objects: state.objects(kind),
            problem: state.problem(kind),
        };
        let Some(state) = &self.source_state else { return Vec::new() };
        state.kinds().into_iter().map(|kind| source(state, kind)).collect()
    }

    fn interfaces(&self, config: &Config) -> Vec<InterfaceRecord> {
        let (networks, problems) = (self.networks.borrow(), self.hook_problems.borrow());
        let interfaces = networks.iter().flat_map(|network| &network.interfaces);
        interfaces
            .filter(|interface| config.ebpf.interfaces.select(&interface.name))
            .map(|interface| InterfaceRecord {
                index: interface.index,
                name: interface.name.clone(),
                role: match interface.role {
                    Role::Workload => "workload",
                    Role::Uplink => "uplink",
                }
                .to_owned(),
                reason: interface.reason.to_string(),
                without_xdp: problems.without_xdp.get(&interface.index).cloned(),
                unattached: problems.unattached.get(&interface.index).cloned(),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[test]
    fn a_process_is_told_from_a_later_one_with_its_number() {
        let pid = std::process::id();
        let record = Record { pid, began: began(pid).unwrap(), ..Record::default() };
        assert!(record.is_alive());
        assert!(!Record { began: record.began + 1, ..record }.is_alive());
    }

    #[test]
    fn what_is_written_is_read_and_an_older_one_too() {
        let keeps: Vec<IpNet> = vec!["203.0.113.0/24".parse().unwrap(), "fd00::/8".parse().unwrap()];
        let exclude_cidrs = keeps.iter().map(IpNet::to_string).collect();
        let record = Record { pid: 7, exclude_cidrs, ..Record::default() };
        assert_eq!(record.keeps(), keeps);
        let text = serde_json::to_string(&record).unwrap();
        assert!(text.contains(r#""excludeCIDRs":["203.0.113.0/24","fd00::/8"]"#), "{text}");
        assert_eq!(serde_json::from_str::<Record>(&text).unwrap(), record);
        let older: Record = serde_json::from_str(r#"{"pid": 7, "mode": "ebpf"}"#).unwrap();
        assert_eq!((older.pid, older.keeps()), (7, Vec::new()));
    }

    #[rstest]
    #[case::absent("nosuch/record.json")]
    #[case::below_a_file("text/record.json")]
    #[case::folder("folder")]
    #[case::other_text("text")]
    #[case::not_utf8("bytes")]
    fn what_is_no_record_is_passed_over(#[case] name: &str) {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("folder")).unwrap();
        fs::write(folder.path().join("text"), "no record").unwrap();
        fs::write(folder.path().join("bytes"), b"{\"mode\": \"\xff\"}").unwrap();
        assert_eq!(Record::read_file(folder.path().join(name)).unwrap(), None);
    }

    #[test]
    fn each_bpffs_has_its_own() {
        let path = |run: &str| Record::path(Path::new(run), Path::new("/sys/fs/bpf"));
        assert_eq!(path("/run"), Path::new("/run/proxy-ctl/sys-fs-bpf.json"));
        assert_eq!(path("/run/user/1000"), Path::new("/run/user/1000/proxy-ctl/sys-fs-bpf.json"));
    }
}
