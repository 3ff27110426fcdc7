//! The first process of a node. It mounts what is the node's own, and starts containerd and
//! kubelet.

use std::{
    ffi::OsString,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use lab::wait;
use nix::{
    mount::{MsFlags, mount},
    sys::{
        signal::SigSet,
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{Pid, sethostname},
};
use serde::{Deserialize, Serialize};

use super::files;
use crate::cgroups::{self, Hierarchy};

const NOTHING: Option<&str> = None;
const CONTAINERD_LIMIT: Duration = Duration::from_secs(60);

/// Folders of the node that replace the machine's.
const OWN_FOLDERS: [(&str, &str); 2] = [("lib", "/var/lib"), ("log", "/var/log")];

/// Parameters that a kubelet sets for the whole kernel. It finds them with the values that it
/// wants, in files of the node.
const KERNEL_PARAMETERS: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

/// Description of a node, which the node's first process reads from a file.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Plan {
    pub(crate) name: String,
    /// Folder of the node, with the files that [`files::write`] has made.
    pub(crate) folder: PathBuf,
    /// Path of the node's cgroup below the root of each hierarchy.
    pub(crate) cgroup: PathBuf,
    pub(crate) addresses: [String; 2],
    pub(crate) kubelet: PathBuf,
    pub(crate) kubeconfig: PathBuf,
    /// Archive with all images.
    pub(crate) images: PathBuf,
}

/// Runs the node that the file describes, in namespaces that exist already, until containerd or
/// kubelet ends.
pub fn run(plan: &Path) -> Result<()> {
    let text = fs::read(plan).with_context(|| format!("reading {}", plan.display()))?;
    let plan: Plan = serde_json::from_slice(&text).context("reading the plan of a node")?;
    // The process that made the node blocks the signals that end it, and children inherit that.
    SigSet::empty().thread_set_mask().context("unblocking signals")?;
    plan.tell_process()?;
    let hierarchies = cgroups::hierarchies()?;
    Hierarchy::enter_all(&hierarchies, &plan.cgroup)?;
    sethostname(&plan.name).context("setting the host's name")?;
    plan.mount(&hierarchies)?;
    let containerd = plan.start_containerd()?;
    plan.load_images()?;
    let kubelet = plan.start_kubelet()?;
    let program = first_end(&[("containerd", &containerd), ("kubelet", &kubelet)])?;
    bail!("{program} of node {} has ended", plan.name)
}

impl Plan {
    /// Writes the number that this process has for the machine. In the node's own namespace it is
    /// 1.
    fn tell_process(&self) -> Result<()> {
        let number = fs::read_link("/proc/self").context("reading the number of this process")?;
        let file = self.folder.join(super::FIRST_PROCESS);
        fs::write(&file, format!("{}\n", number.display()))
            .with_context(|| format!("writing {}", file.display()))
    }

    fn mount(&self, hierarchies: &[Hierarchy]) -> Result<()> {
        for (_, hidden) in OWN_FOLDERS {
            for needed in [&self.folder, &self.kubelet, &self.kubeconfig, &self.images] {
                ensure!(!needed.starts_with(hidden), "a node does not see {}", needed.display());
            }
        }
        mount(NOTHING, "/", NOTHING, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NOTHING)
            .context("keeping mounts to the node")?;
        mount_new("proc", Path::new("/proc"))?;
        mount_new("sysfs", Path::new("/sys"))?;
        // If cgroup v2 is the only hierarchy, it is mounted on the folder itself.
        if !hierarchies.iter().any(|hierarchy| hierarchy.relative() == Path::new("")) {
            mount_new("tmpfs", Path::new(cgroups::ROOT))?;
        }
        for hierarchy in hierarchies {
            hierarchy.mount()?;
        }
        mount_new("bpf", Path::new("/sys/fs/bpf"))?;
        mount_new("tmpfs", Path::new("/run"))?;
        for folder in ["/run/netns", "/run/lock"] {
            fs::create_dir_all(folder).with_context(|| format!("creating {folder}"))?;
        }
        for (own, at) in OWN_FOLDERS {
            let own = self.folder.join(own);
            fs::create_dir_all(&own).with_context(|| format!("creating {}", own.display()))?;
            bind(&own, Path::new(at))?;
        }
        mount(NOTHING, "/", NOTHING, MsFlags::MS_REC | MsFlags::MS_SHARED, NOTHING)
            .context("sharing mounts with containers")?;
        self.hide_kernel_parameters()
    }

    fn hide_kernel_parameters(&self) -> Result<()> {
        for (name, value) in KERNEL_PARAMETERS {
            let file = self.folder.join(name.replace('/', "."));
            fs::write(&file, format!("{value}\n")).with_context(|| format!("writing {}", file.display()))?;
            bind(&file, &Path::new("/proc/sys").join(name))?;
        }
        Ok(())
    }

    fn start_containerd(&self) -> Result<Child> {
        let containerd = self.start(
            Path::new("containerd"),
            &["--config".into(), self.folder.join(files::CONTAINERD).into()],
        )?;
        wait::until("containerd", CONTAINERD_LIMIT, || match ctr(&["version".into()]) {
            Ok(()) => Ok(Some(())),
            Err(error) => Err(format!("{error:#}")),
        })?;
        Ok(containerd)
    }

    fn load_images(&self) -> Result<()> {
        ctr(&["--namespace".into(), "k8s.io".into(), "images".into(), "import".into(), (&self.images).into()])
    }

    fn start_kubelet(&self) -> Result<Child> {
        let flag = |name: &str, value: &Path| -> OsString {
            let mut flag = OsString::from(format!("--{name}="));
            flag.push(value);
            flag
        };
        self.start(
            &self.kubelet,
            &[
                flag("config", &self.folder.join(files::KUBELET)),
                flag("kubeconfig", &self.kubeconfig),
                format!("--hostname-override={}", self.name).into(),
                format!("--node-ip={}", self.addresses.join(",")).into(),
                "--root-dir=/var/lib/kubelet".into(),
                "--v=2".into(),
            ],
        )
    }

    /// Starts a program whose output goes to a file of its name.
    fn start(&self, program: &Path, arguments: &[OsString]) -> Result<Child> {
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        let log = self.folder.join(format!("{name}.log"));
        let log = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
        Command::new(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("duplicating a log")?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("starting {name}"))
    }
}

/// Calls containerd's own client.
fn ctr(arguments: &[OsString]) -> Result<()> {
    let output = Command::new("ctr").args(arguments).stdin(Stdio::null()).output().context("starting ctr")?;
    ensure!(output.status.success(), "ctr: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

fn mount_new(kind: &str, at: &Path) -> Result<()> {
    mount(Some(kind), at, Some(kind), MsFlags::empty(), NOTHING)
        .with_context(|| format!("mounting {kind} on {}", at.display()))
}

fn bind(from: &Path, at: &Path) -> Result<()> {
    mount(Some(from), at, NOTHING, MsFlags::MS_BIND, NOTHING)
        .with_context(|| format!("mounting {} on {}", from.display(), at.display()))
}

/// Waits for all processes that lose their parent, as a first process must. Ends when one of these
/// processes ends.
fn first_end(children: &[(&'static str, &Child)]) -> Result<&'static str> {
    loop {
        let status = waitpid(None::<Pid>, Some(WaitPidFlag::empty())).context("waiting for processes")?;
        let (WaitStatus::Exited(ended, _) | WaitStatus::Signaled(ended, ..)) = status else { continue };
        let ended = u32::try_from(ended.as_raw()).map_err(|_| anyhow!("a process of id {ended}"))?;
        if let Some((name, _)) = children.iter().find(|(_, child)| child.id() == ended) {
            return Ok(name);
        }
    }
}
