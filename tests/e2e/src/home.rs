//! The namespaces, the cgroups and the folder of a cluster, all named after the process that made
//! it.
//!
//! They are removed when the value is dropped, or on a signal. If the process was killed, they are
//! removed before the next cluster is made. The nodes' processes never outlive the process, because
//! the kernel ends them with it.

use std::{
    fs::{self, File},
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
};

use anyhow::{Context as _, Result, ensure};
use lab::{
    cgroup,
    claims::{Claims, lock},
    namespace,
};
use nix::fcntl::Flock;

use crate::cgroups::hierarchies;

/// Folder with one folder for each cluster. It is on a disk, because the images of a node take 300
/// MB.
const CLUSTERS: &str = "/var/tmp/proxy-ctl-e2e";
/// File that is locked while a cluster is made or removed.
const GUARD: &str = "/run/proxy-ctl-e2e.lock";

/// Names of clusters of this process.
static RUNNING: Claims = Claims::new("cluster", GUARD, remove);

/// Name and folder of a cluster. Everything that carries the name is removed when this is dropped.
pub struct Home {
    name: String,
    folder: PathBuf,
    _lock: Flock<File>,
}

impl Home {
    /// Removes what clusters of ended processes have left, and makes a folder for a new one.
    pub fn create() -> Result<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let guard = RUNNING.guard()?;
        remove_abandoned()?;
        let name = format!("pxe{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let folder = Path::new(CLUSTERS).join(&name);
        fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
        let lock = lock(&folder).with_context(|| format!("{} is locked", folder.display()))?;
        // A signal takes the claims before the guard. The folder's own lock protects it now.
        drop(guard);
        RUNNING.add(&name);
        Ok(Self { name, folder, _lock: lock })
    }

    /// Returns the name with which the names of namespaces and cgroups begin.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Makes a folder below the cluster's own.
    pub fn subfolder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.folder.join(name);
        fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
        Ok(folder)
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        RUNNING.end(&self.name);
    }
}

/// Makes SIGINT, SIGTERM and SIGHUP remove the clusters of this process before it ends. It must be
/// called before any other thread exists, because threads inherit the signals that are blocked.
pub fn remove_on_signals() -> Result<()> {
    RUNNING.end_on_signals()
}

fn remove_abandoned() -> Result<()> {
    let clusters = match fs::read_dir(CLUSTERS) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        found => found.with_context(|| format!("reading {CLUSTERS}"))?,
    };
    for cluster in clusters {
        let cluster = cluster.with_context(|| format!("reading {CLUSTERS}"))?;
        let Some(_abandoned) = lock(&cluster.path()) else { continue };
        let name = cluster.file_name().to_string_lossy().into_owned();
        remove(&name).with_context(|| format!("removing what cluster {name} has left"))?;
    }
    Ok(())
}

/// Ends the processes of a cluster, and removes everything that carries its name.
fn remove(name: &str) -> Result<()> {
    ensure!(name.starts_with("pxe"), "{name} is not the name of a cluster");
    let hierarchies = hierarchies()?;
    // Each process of a node is in a cgroup of each hierarchy.
    for hierarchy in &hierarchies {
        cgroup::end_members(&hierarchy.mount_point.join(name))?;
    }
    for namespace in namespace::with_prefix(&format!("{name}-")) {
        namespace::ip(None, &format!("netns del {namespace}\n"))?;
    }
    for hierarchy in &hierarchies {
        cgroup::remove(&hierarchy.mount_point.join(name))?;
    }
    let folder = Path::new(CLUSTERS).join(name);
    fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
    match fs::remove_dir(CLUSTERS) {
        Err(error) if error.kind() != ErrorKind::DirectoryNotEmpty => {
            Err(error).with_context(|| format!("removing {CLUSTERS}"))
        }
        // The folder has another cluster in it.
        Ok(()) | Err(_) => Ok(()),
    }
}
