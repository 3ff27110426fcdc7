//! A node: namespaces of its own, with containerd and kubelet in them.

pub(crate) mod files;
mod init;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result};
use control_plane::Process;
use lab::{cgroup, wait};

use crate::{
    addresses::{self, NodeNumber},
    cgroups::{self, hierarchies},
    home::Home,
    network,
    programs::Program,
};

pub use files::NETWORK_PLUGINS;
use init::Plan;
pub use init::run;

/// File in a node's folder with the number that this machine gives to the node's first process.
const FIRST_PROCESS: &str = "pid";
const START_LIMIT: Duration = Duration::from_secs(30);

/// Running node. Its processes end when this is dropped.
pub struct Node {
    pub number: NodeNumber,
    /// Name of its network namespace.
    pub namespace: String,
    folder: PathBuf,
    cgroup: PathBuf,
    first_process: String,
    process: Process,
}

impl Node {
    /// Starts containerd and kubelet. Does not wait for them.
    pub(crate) fn start(home: &Home, number: NodeNumber, kubeconfig: &Path, images: &Path) -> Result<Self> {
        let name = addresses::node_name(number);
        let folder = home.subfolder(&name)?;
        files::write(&folder, number)?;
        let cgroup = Path::new(home.name()).join(&name);
        for hierarchy in hierarchies()? {
            hierarchy.make_root(&cgroup)?;
        }
        let plan = Plan {
            folder: folder.clone(),
            cgroup: cgroup.clone(),
            addresses: [addresses::node4(number), addresses::node6(number)],
            kubelet: Program::Kubelet.path()?,
            kubeconfig: kubeconfig.to_owned(),
            images: images.to_owned(),
            name,
        };
        let file = folder.join("plan.json");
        fs::write(&file, serde_json::to_vec(&plan)?)
            .with_context(|| format!("writing {}", file.display()))?;
        let namespace = network::node(home.name(), number);
        let mut command = Command::new("unshare");
        command.args(["--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child=KILL", "--"]);
        // The same program is the first process of each node.
        command.arg(env::current_exe().context("finding the running program")?).arg("--node").arg(&file);
        let mut process = Process::start(&command, &folder.join("node.log"), Some(&namespace))?;
        let first_process = wait::until("the first process of a node", START_LIMIT, || {
            process.alive().map_err(|error| format!("{error:#}"))?;
            let written = fs::read_to_string(folder.join(FIRST_PROCESS)).unwrap_or_default();
            Ok(written.strip_suffix('\n').map(str::to_owned))
        })?;
        Ok(Self { number, namespace, folder, cgroup, first_process, process })
    }

    /// Returns an error with the node's last output if the node has ended.
    pub fn alive(&mut self) -> Result<()> {
        self.process.alive()
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns a command that will run in all namespaces and in the cgroup of the node. It ends
    /// with the process that starts it.
    pub fn command(&self, program: &Path) -> Result<Command> {
        let cgroup = cgroup::mount_point()?.join(&self.cgroup).join(cgroups::INIT);
        let mut command = Command::new(lab::program("lab-agent")?);
        command.arg("--cgroup").arg(cgroup).args(["--", "nsenter", "--target", &self.first_process]);
        command.args(["--mount", "--net", "--uts", "--ipc", "--pid", "--cgroup", "--"]);
        command.args(["setpriv", "--pdeathsig", "KILL", "--"]).arg(program);
        Ok(command)
    }
}
