//! A cluster whose Services a proxy serves.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, ensure};
use control_plane::{ADMIN, PROXY, Process};

use crate::{
    addresses::{self, MOST_NODES, NodeNumber},
    control_plane::{ControlPlane, FOLDER},
    home::Home,
    image, network,
    node::Node,
    proxy::{self, Setting},
};

/// Running cluster. All of it is removed when this is dropped.
pub struct Cluster {
    proxies: Vec<Process>,
    nodes: Vec<Node>,
    control_plane: ControlPlane,
    home: Home,
}

impl Cluster {
    /// Starts the control plane, the nodes and their proxies, and waits until all are ready.
    pub fn start(setting: Setting, nodes: NodeNumber) -> Result<Self> {
        ensure!((1..=MOST_NODES).contains(&nodes), "a cluster has 1 to {MOST_NODES} nodes");
        ensure!(nix::unistd::geteuid().is_root(), "namespaces need root");
        let images = image::provide()?;
        let home = Home::create()?;
        network::build(home.name(), nodes)?;
        let mut control_plane = ControlPlane::start(&home)?;
        control_plane.publish(nodes)?;
        let kubeconfig = control_plane.server.kubeconfig(ADMIN);
        let start = |number| Node::start(&home, number, &kubeconfig, &images);
        let mut own = (1..=nodes).map(start).collect::<Result<Vec<_>>>()?;
        control_plane.wait_for_nodes(nodes, || own.iter_mut().try_for_each(Node::alive))?;
        let kubeconfig = control_plane.server.kubeconfig(PROXY);
        let mut proxies =
            own.iter().map(|node| proxy::start(setting, node, &kubeconfig)).collect::<Result<Vec<_>>>()?;
        for (node, process) in own.iter().zip(&mut proxies) {
            proxy::wait_until_ready(setting, node, process)?;
        }
        Ok(Self { proxies, nodes: own, control_plane, home })
    }

    /// Returns an error if a part of the cluster that should run has ended.
    pub fn alive(&mut self) -> Result<()> {
        self.control_plane.alive()?;
        self.nodes.iter_mut().try_for_each(Node::alive)?;
        self.proxies.iter_mut().try_for_each(Process::alive)
    }

    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Returns the folder of all files of the cluster, which is removed with it.
    pub fn folder(&self) -> &Path {
        self.home.folder()
    }

    /// Copies what the cluster's programs have written to a folder that stays. Replaces what is
    /// there.
    pub fn keep_logs(&self, to: &Path) -> Result<()> {
        if to.exists() {
            fs::remove_dir_all(to).with_context(|| format!("removing {}", to.display()))?;
        }
        fs::create_dir_all(to).with_context(|| format!("creating {}", to.display()))?;
        copy_logs(self.folder(), to, "")?;
        copy_logs(&self.folder().join(FOLDER), to, "")?;
        for node in &self.nodes {
            copy_logs(node.folder(), to, &format!("{}-", addresses::node_name(node.number)))?;
        }
        eprintln!("logs of the cluster are in {}", to.display());
        Ok(())
    }

    /// Returns the network namespace in which tests run.
    pub fn namespace(&self) -> String {
        network::control_plane(self.home.name())
    }

    /// Returns a kubeconfig of an identity that may do everything.
    pub fn kubeconfig(&self) -> std::path::PathBuf {
        self.control_plane.server.kubeconfig(ADMIN)
    }
}

/// Copies the files of a folder that end in .log, with a prefix to their names.
fn copy_logs(from: &Path, to: &Path, prefix: &str) -> Result<()> {
    for found in fs::read_dir(from).with_context(|| format!("reading {}", from.display()))? {
        let path = found.with_context(|| format!("reading {}", from.display()))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_file() && name.ends_with(".log") {
            let copy = to.join(format!("{prefix}{name}"));
            fs::copy(&path, &copy).with_context(|| format!("writing {}", copy.display()))?;
        }
    }
    Ok(())
}
