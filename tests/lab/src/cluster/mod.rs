//! Builds the cluster, runs processes in it, and removes every trace of it.

mod card;
pub mod network;
mod removal;
mod topology;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
};

use anyhow::{Context as _, Result, anyhow, bail};
use nix::mount::{MsFlags, mount};
use proxy_ctl::sys::net::device;

use crate::{
    address::{self, Addresses, Family, NodeNumber},
    agent::client::Agent,
    cgroup, namespace,
};
use card::Card;
use network::Network;
pub use removal::{remove_abandoned, remove_kept, remove_on_signals};

/// Port of the servers that answer with their names.
pub const SERVER_PORT: u16 = 8_080;

/// Network namespace of the lab: a node, a pod, the client outside, or the fabric.
#[derive(Clone, Debug)]
pub struct Netns {
    pub name: String,
    /// Name of the network namespace.
    pub namespace: String,
    pub cgroup: PathBuf,
    pub addresses: Addresses,
    /// Node that it is, or that it runs on.
    pub node: Option<NodeNumber>,
}

impl Netns {
    /// Runs lines of `ip`'s own language in the network namespace.
    pub fn ip(&self, script: &str) -> Result<()> {
        namespace::ip(Some(&self.namespace), script)
    }

    fn is_pod(&self) -> bool {
        self.node.is_some_and(|node| self.name != node_name(node))
    }
}

/// Where the processes of a pod are, as seen by the hooks that the proxy attaches to the node's
/// cgroup.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PodProcesses {
    /// The processes are below the node's cgroup, where a container runtime puts them.
    InNodeCgroup,
    /// The processes are elsewhere, like those of a virtual machine.
    Elsewhere,
}

/// Returns true if the kernel reports which programs a device has (Linux 6.6). Mode ebpf asks this
/// before XDP sends frames to pods.
pub fn pods_can_take_frames() -> bool {
    device::facts(LOOPBACK, "lo").programs.is_some()
}

const LOOPBACK: u32 = 1;

/// Returns true if the kernel reports what drivers do with frames of XDP that have come by other
/// devices (Linux 6.3). Before, veths are not known to take them.
pub fn drivers_tell_what_they_take() -> bool {
    device::facts(LOOPBACK, "lo").xdp.is_some()
}

/// Running cluster. All of it is removed when this is dropped.
pub struct Lab {
    directory: removal::LabDirectory,
    cgroup: PathBuf,
    netns: BTreeMap<String, Netns>,
    pods: [u8; 2],
    networks: BTreeSet<Network>,
    /// Cards of the nodes and the clients outside. Without any, their devices are simple veths.
    cards: Vec<Card>,
}

pub const FABRIC: &str = "fabric";
pub const OUTSIDE: &str = "outside";
/// Name of a client that is on the second network only.
pub const SECOND_OUTSIDE: &str = "outside-2";
pub const NODES: [NodeNumber; 2] = [1, 2];

pub fn node_name(number: NodeNumber) -> String {
    format!("node{number}")
}

impl Lab {
    /// Makes two nodes and a client outside, without pods. Removes what earlier labs that crashed
    /// have left.
    pub fn new() -> Result<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        if !nix::unistd::geteuid().is_root() {
            bail!("network namespaces need root");
        }
        remove_abandoned()?;
        let name = format!("px{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let cgroup = cgroup::mount_point()?.join(&name);
        let directory = removal::LabDirectory::create(&name)?;
        let mut lab = Self {
            directory,
            cgroup,
            netns: BTreeMap::new(),
            pods: [0; 2],
            networks: BTreeSet::new(),
            cards: Vec::new(),
        };
        lab.add_netns(FABRIC, address::gateway(), None)?;
        topology::build_fabric(lab.fabric()?)?;
        for number in NODES {
            let name = node_name(number);
            lab.add_netns(&name, address::node(number), Some(number))?;
            topology::connect(lab.fabric()?, lab.netns(&name)?)?;
            topology::build_node(lab.netns(&name)?, number)?;
            mount_bpf(&lab.bpffs(number))?;
        }
        lab.add_netns(OUTSIDE, address::outside(), None)?;
        topology::connect(lab.fabric()?, lab.netns(OUTSIDE)?)?;
        topology::route_services(lab.netns(OUTSIDE)?)?;
        Ok(lab)
    }

    /// Makes XDP programs run on the nodes' devices as on network cards, and makes pods take frames
    /// that such programs send to them.
    pub fn equip_with_cards(&mut self) -> Result<()> {
        self.let_pods_take_frames(true)?;
        for name in NODES.map(node_name).into_iter().chain([OUTSIDE.to_owned()]) {
            self.cards.push(Card::make(self.fabric()?, &name, self.netns(&name)?, "eth0")?);
        }
        Ok(())
    }

    /// Makes the devices of nodes simple veths again.
    pub fn take_cards_out(&mut self) -> Result<()> {
        self.cards.drain(..).try_for_each(Card::take_out)
    }

    /// Leaves the other ends of cards to programs of the caller.
    pub fn free_ends_of_cards(&mut self) {
        self.cards.iter_mut().for_each(Card::free_other_end);
    }

    /// Makes pods take frames that XDP programs send to them, or not.
    pub fn let_pods_take_frames(&self, take: bool) -> Result<()> {
        let mut pods = self.netns.values().filter(|netns| netns.is_pod());
        pods.try_for_each(|pod| card::let_take_frames(pod, take))
    }

    /// Returns the prefix of the names of everything that belongs to this lab.
    pub fn name(&self) -> &str {
        self.directory.name()
    }

    /// Returns a folder that is removed with the lab.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Returns the path of the node's own BPF file system.
    pub fn bpffs(&self, node: NodeNumber) -> PathBuf {
        self.directory().join(format!("bpf{node}"))
    }

    fn fabric(&self) -> Result<&Netns> {
        self.netns(FABRIC)
    }

    /// Returns a node (`node1`, `node2`), a pod by its name, [`OUTSIDE`] or [`FABRIC`].
    pub fn netns(&self, name: &str) -> Result<&Netns> {
        self.netns.get(name).ok_or_else(|| anyhow!("the lab has no {name}"))
    }

    fn add_netns(&mut self, name: &str, addresses: Addresses, node: Option<NodeNumber>) -> Result<()> {
        let cgroup = self.cgroup.join(name);
        self.add_netns_in(name, cgroup, addresses, node)
    }

    fn add_netns_in(
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
        let netns = Netns { name: name.to_owned(), namespace, cgroup, addresses, node };
        self.netns.insert(name.to_owned(), netns);
        Ok(())
    }

    /// Starts a pod's network: a routed veth on node 1, a bridge port on node 2.
    pub fn add_pod(&mut self, node: NodeNumber, name: &str, processes: PodProcesses) -> Result<&Netns> {
        let node_netns = self.netns(&node_name(node))?.clone();
        let count =
            self.pods.get_mut(usize::from(node).wrapping_sub(1)).ok_or_else(|| anyhow!("no node {node}"))?;
        *count += 1;
        let addresses = address::pod(node, *count + 1);
        let cgroup = match processes {
            PodProcesses::InNodeCgroup => node_netns.cgroup.join(name),
            PodProcesses::Elsewhere => self.cgroup.join("elsewhere").join(name),
        };
        self.add_netns_in(name, cgroup, addresses, Some(node))?;
        let pod = self.netns(name)?;
        topology::connect_pod(&node_netns, pod)?;
        if !self.cards.is_empty() {
            card::let_take_frames(pod, true)?;
        }
        Ok(pod)
    }

    /// Makes the nodes reach each other's pods of this network by it. It has one such pod on node
    /// 2, and the second network also has a client. Returns true if the network was not there
    /// before.
    pub fn add_network(&mut self, network: Network) -> Result<bool> {
        if self.networks.contains(&network) {
            return Ok(false);
        }
        if network == Network::SecondUplink {
            self.add_netns(SECOND_OUTSIDE, address::second_outside(), None)?;
            network::build_second_fabric(self.fabric()?, self.netns(SECOND_OUTSIDE)?)?;
        }
        if network == Network::VlanInVlan {
            let name = node_name(1);
            card::leave_tags(self.fabric()?, &name, self.netns(&name)?, "eth0")?;
        }
        for number in NODES {
            network::connect(network, self.fabric()?, self.netns(&node_name(number))?, number)?;
        }
        if network == Network::VlanInVlan {
            network::join_vlan_in_vlan(self.netns(OUTSIDE)?, self.netns(&node_name(1))?)?;
        }
        if network == Network::SecondUplink && !self.cards.is_empty() {
            let ends = NODES.map(|number| (node_name(number), network.device()));
            for (name, device) in ends.into_iter().chain([(SECOND_OUTSIDE.to_owned(), "eth0")]) {
                let netns = self.netns(&name)?;
                self.cards.push(Card::make(self.fabric()?, &network::port(netns, device), netns, device)?);
            }
        }
        let node = node_name(2);
        let cgroup = self.cgroup.join(&node).join(network.pod());
        self.add_netns_in(network.pod(), cgroup, network.pod_addresses(), Some(2))?;
        topology::connect_routed(self.netns(&node)?, self.netns(network.pod())?)?;
        self.networks.insert(network);
        Ok(true)
    }

    /// Returns how many fragments of its own packets a network namespace has made so far.
    pub fn fragments_created(&self, name: &str, family: Family) -> Result<u64> {
        namespace::within(&self.netns(name)?.namespace, || match family {
            Family::V4 => {
                // The table has two lines that begin with the protocol: names, then numbers.
                let table = fs::read_to_string("/proc/thread-self/net/snmp")?;
                let mut lines = table.lines().filter_map(|line| line.strip_prefix("Ip: "));
                let (names, numbers) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
                let mut columns = names.split_whitespace().zip(numbers.split_whitespace());
                let found = columns.find(|(name, _)| *name == "FragCreates");
                Ok(found.context("no FragCreates in net/snmp")?.1.parse()?)
            }
            Family::V6 => {
                let table = fs::read_to_string("/proc/thread-self/net/snmp6")?;
                let found = table.lines().find_map(|line| line.strip_prefix("Ip6FragCreates"));
                Ok(found.context("no Ip6FragCreates in net/snmp6")?.trim().parse()?)
            }
        })
    }

    /// Returns a command that will run in a network namespace of the lab and in its cgroup.
    pub fn command(&self, netns: &Netns, program: &Path) -> Result<Command> {
        let mut command = self.enter(netns)?;
        command.arg("--").arg(program);
        Ok(command)
    }

    fn enter(&self, netns: &Netns) -> Result<Command> {
        let mut command = Command::new(crate::program("lab-agent")?);
        command.arg("--netns").arg(namespace::path(&netns.namespace)).arg("--cgroup").arg(&netns.cgroup);
        // The terminal's Ctrl-C then reaches only the lab, which ends its processes.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        Ok(command)
    }

    /// Starts an agent in a network namespace.
    pub fn agent(&self, name: &str) -> Result<Agent> {
        let netns = self.netns(name)?;
        Agent::start(&netns.name, self.enter(netns)?)
    }

    /// Starts an agent that serves on the addresses of a network namespace, under its name.
    pub fn server(&self, name: &str) -> Result<Agent> {
        let agent = self.agent(name)?;
        let addresses = self.netns(name)?.addresses;
        agent.serve(&addresses.with_port(SERVER_PORT))?;
        Ok(agent)
    }

    /// Starts a server that lives as long as the lab, even after this process has ended.
    pub fn lasting_server(&self, name: &str) -> Result<()> {
        let netns = self.netns(name)?;
        let mut command = self.enter(netns)?;
        command.args(["--serve", &netns.name]);
        for address in netns.addresses.with_port(SERVER_PORT) {
            command.arg(format!("--address={address}"));
        }
        // A program that reads this process's output must not wait for the end of these servers.
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().with_context(|| format!("serving in {}", netns.name)).map(drop)
    }

    /// Leaves everything up when this is dropped. The next lab of another process will not remove
    /// it either.
    pub fn keep(&mut self) {
        self.directory.keep();
    }
}

fn mount_bpf(target: &Path) -> Result<()> {
    fs::create_dir_all(target).with_context(|| format!("creating {}", target.display()))?;
    mount(Some("bpf"), target, Some("bpf"), MsFlags::empty(), None::<&str>)
        .with_context(|| format!("mounting a BPF file system on {}", target.display()))
}
