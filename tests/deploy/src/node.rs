//! Files of a node, below a folder. They are what `hostPath` volumes refer to.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail, ensure};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};

const NOTHING: Option<&str> = None;

/// Root folder with what a node's root has. Everything that is mounted there is unmounted when this
/// is dropped.
pub struct NodeFiles {
    root: PathBuf,
    /// Mount points in the order of mounting.
    mounted: Vec<PathBuf>,
}

impl NodeFiles {
    /// Makes the folder. `cgroup` is the folder that this node sees as the root of the cgroups. No
    /// bpffs is mounted yet.
    pub fn create(root: &Path, cgroup: &Path) -> Result<Self> {
        for folder in ["sys/fs/bpf", "sys/fs/cgroup", "run", "lib/modules"] {
            let folder = root.join(folder);
            fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
        }
        let mut files = Self { root: root.to_owned(), mounted: Vec::new() };
        // Mounts are shared, as systemd makes them, so that later mounts are those of the
        // containers too.
        files.bind(root, root)?;
        mount(NOTHING, root, NOTHING, MsFlags::MS_SHARED, NOTHING).context("sharing a mount")?;
        files.bind(cgroup, &root.join("sys/fs/cgroup"))?;
        Ok(files)
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the path where the bpffs belongs.
    pub fn bpffs(&self) -> PathBuf {
        self.root.join("sys/fs/bpf")
    }

    /// Returns true if something has mounted a bpffs.
    pub fn has_bpffs(&self) -> Result<bool> {
        let found = statfs(&self.bpffs()).context("looking at a file system")?;
        Ok(found.filesystem_type() == BPF_FS_MAGIC)
    }

    /// Returns the path of a volume of type hostPath.
    pub fn host_path(&self, path: &str, kind: &str) -> Result<PathBuf> {
        let path = self.root.join(path.trim_start_matches('/'));
        match kind {
            "" => {}
            "Directory" => ensure!(path.is_dir(), "{} is no folder", path.display()),
            "DirectoryOrCreate" => {
                fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
            }
            "FileOrCreate" => {
                File::options()
                    .create(true)
                    .append(true)
                    .open(&path)
                    .with_context(|| format!("making {}", path.display()))?;
            }
            other => bail!("hostPath of type {other}"),
        }
        Ok(path)
    }

    /// Mounts a file system in memory, which is a volume.
    pub(crate) fn mount_memory(&mut self, at: &Path) -> Result<()> {
        mount(Some("tmpfs"), at, Some("tmpfs"), MsFlags::empty(), NOTHING)
            .with_context(|| format!("mounting memory on {}", at.display()))?;
        self.mounted.push(at.to_owned());
        Ok(())
    }

    fn bind(&mut self, source: &Path, at: &Path) -> Result<()> {
        mount(Some(source), at, NOTHING, MsFlags::MS_BIND, NOTHING)
            .with_context(|| format!("mounting {} on {}", source.display(), at.display()))?;
        self.mounted.push(at.to_owned());
        Ok(())
    }
}

impl Drop for NodeFiles {
    fn drop(&mut self) {
        // An error means that nothing is mounted there any more.
        let _ = umount2(&self.bpffs(), MntFlags::MNT_DETACH);
        for at in self.mounted.iter().rev() {
            let _ = umount2(at, MntFlags::MNT_DETACH);
        }
    }
}
