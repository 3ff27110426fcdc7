//! Builds the cluster, runs processes in it, and removes every trace of it.

mod removal;
mod topology;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
};

use anyhow::{Context as _, Result, anyhow, bail};
use nix::mount::{MsFlags, mount};

use crate::{
    address::{self, Addresses, NodeNumber},
    agent::client::Agent,
    cgroup, namespace,
};
pub use removal::{remove_kept, remove_leftovers, remove_on_signals};

/// Port of the servers that tell who they are.
pub const SERVER_PORT: u16 = 8_080;
/// Port of the servers that return a byte.
pub const BYTE_PORT: u16 = 9_090;

/// Somewhere in the lab that processes run: a node, a pod, the client outside, the fabric.
#[derive(Clone, Debug)]
pub struct Place {
    pub name: String,
    /// Name of its network namespace.
    pub namespace: String,
    pub cgroup: PathBuf,
    pub addresses: Addresses,
    /// The node it runs on or is.
    pub node: Option<NodeNumber>,
}

/// Where the processes of a pod are, as seen by the hooks on the node's cgroup.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PodProcesses {
    /// Below the node's cgroup, as a container runtime puts them.
    InNodeCgroup,
    /// Elsewhere, as those of a virtual machine are.
    Elsewhere,
}

/// A running cluster. Everything of it is removed when this is dropped.
pub struct Lab {
    directory: removal::LabDirectory,
    cgroup: PathBuf,
    places: BTreeMap<String, Place>,
    pods: [u8; 2],
}

pub const FABRIC: &str = "fabric";
pub const OUTSIDE: &str = "outside";
pub const NODES: [NodeNumber; 2] = [1, 2];

pub fn node_name(number: NodeNumber) -> String {
    format!("node{number}")
}

impl Lab {
    /// Two nodes and a client outside, no pods yet. Removes what earlier labs that crashed have left.
    pub fn new() -> Result<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        if !nix::unistd::geteuid().is_root() {
            bail!("network namespaces need root");
        }
        remove_leftovers()?;
        let name = format!("px{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let cgroup = cgroup::mount_point()?.join(&name);
        let directory = removal::LabDirectory::create(&name)?;
        let mut lab = Self { directory, cgroup, places: BTreeMap::new(), pods: [0; 2] };
        lab.add_place(FABRIC, address::gateway(), None)?;
        topology::build_fabric(lab.fabric()?)?;
        for number in NODES {
            let name = node_name(number);
            lab.add_place(&name, address::node(number), Some(number))?;
            topology::connect(lab.fabric()?, lab.place(&name)?)?;
            topology::build_node(lab.place(&name)?, number)?;
            mount_bpf(&lab.bpffs(number))?;
        }
        lab.add_place(OUTSIDE, address::outside(), None)?;
        topology::connect(lab.fabric()?, lab.place(OUTSIDE)?)?;
        Ok(lab)
    }

    /// Prefix of everything that belongs to this lab.
    pub fn name(&self) -> &str {
        self.directory.name()
    }

    /// A folder that is removed with the lab.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The node's own BPF file system.
    pub fn bpffs(&self, node: NodeNumber) -> PathBuf {
        self.directory().join(format!("bpf{node}"))
    }

    fn fabric(&self) -> Result<&Place> {
        self.place(FABRIC)
    }

    /// A node (`node1`, `node2`), a pod by its name, [`OUTSIDE`] or [`FABRIC`].
    pub fn place(&self, name: &str) -> Result<&Place> {
        self.places.get(name).ok_or_else(|| anyhow!("the lab has no {name}"))
    }

    pub fn places(&self) -> impl Iterator<Item = &Place> {
        self.places.values()
    }

    fn add_place(&mut self, name: &str, addresses: Addresses, node: Option<NodeNumber>) -> Result<()> {
        let cgroup = self.cgroup.join(name);
        self.add_place_in(name, cgroup, addresses, node)
    }

    fn add_place_in(
        &mut self,
        name: &str,
        cgroup: PathBuf,
        addresses: Addresses,
        node: Option<NodeNumber>,
    ) -> Result<()> {
        fs::create_dir_all(&cgroup).with_context(|| format!("creating {}", cgroup.display()))?;
        let namespace = format!("{}-{name}", self.name());
        namespace::ip(None, &format!("netns add {namespace}\n"))?;
        topology::prepare(&namespace)?;
        let place = Place { name: name.to_owned(), namespace, cgroup, addresses, node };
        self.places.insert(name.to_owned(), place);
        Ok(())
    }

    /// Starts a pod's network: a routed veth on node 1, a bridge port on node 2.
    pub fn add_pod(&mut self, node: NodeNumber, name: &str, processes: PodProcesses) -> Result<&Place> {
        let node_place = self.place(&node_name(node))?.clone();
        let count =
            self.pods.get_mut(usize::from(node).wrapping_sub(1)).ok_or_else(|| anyhow!("no node {node}"))?;
        *count += 1;
        let addresses = address::pod(node, *count + 1);
        let cgroup = match processes {
            PodProcesses::InNodeCgroup => node_place.cgroup.join(name),
            PodProcesses::Elsewhere => self.cgroup.join("elsewhere").join(name),
        };
        self.add_place_in(name, cgroup, addresses, Some(node))?;
        let pod = self.place(name)?;
        topology::connect_pod(&node_place, pod)?;
        Ok(pod)
    }

    /// A command that will run in a place: in its network namespace and its cgroup.
    pub fn command(&self, place: &Place, program: &Path) -> Result<Command> {
        let mut command = self.enter(place)?;
        command.arg("--").arg(program);
        Ok(command)
    }

    fn enter(&self, place: &Place) -> Result<Command> {
        let mut command = Command::new(crate::program("lab-agent")?);
        command.arg("--netns").arg(namespace::path(&place.namespace)).arg("--cgroup").arg(&place.cgroup);
        // The terminal's Ctrl-C goes to the lab only, which then ends its processes.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        Ok(command)
    }

    /// Starts an agent in a place.
    pub fn agent(&self, place: &str) -> Result<Agent> {
        let place = self.place(place)?;
        Agent::start(&place.name, self.enter(place)?)
    }

    /// Starts an agent that serves on the place's addresses under the place's name.
    pub fn server(&self, place: &str) -> Result<Agent> {
        let agent = self.agent(place)?;
        let addresses = self.place(place)?.addresses;
        agent.serve(&addresses.with_port(SERVER_PORT))?;
        agent.serve_bytes(&addresses.with_port(BYTE_PORT))?;
        Ok(agent)
    }

    /// Starts a server that lives as long as the lab, also when this process has ended.
    pub fn lasting_server(&self, place: &str) -> Result<()> {
        let place = self.place(place)?;
        let mut command = self.enter(place)?;
        command.args(["--serve", &place.name]);
        for address in place.addresses.with_port(SERVER_PORT) {
            command.arg(format!("--address={address}"));
        }
        command.stdin(Stdio::null()).spawn().with_context(|| format!("serving in {}", place.name)).map(drop)
    }

    /// Leaves everything up when this is dropped; the next lab of another process will not remove it either.
    pub fn keep(&mut self) {
        self.directory.keep();
    }
}

fn mount_bpf(target: &Path) -> Result<()> {
    fs::create_dir_all(target).with_context(|| format!("creating {}", target.display()))?;
    mount(Some("bpf"), target, Some("bpf"), MsFlags::empty(), None::<&str>)
        .with_context(|| format!("mounting a BPF file system on {}", target.display()))
}
