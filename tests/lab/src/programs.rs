//! Programs of this workspace.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use proxy_ctl::sys::proc::filesystem;

use crate::cgroup;

/// Returns the file of `proxy-ctl` or `lab-agent`. It is the one that `PROXY_CTL` or `LAB_AGENT`
/// names. Otherwise it is the one that cargo has built beside the running program or, for a test,
/// one folder above it.
pub fn program(name: &str) -> Result<PathBuf> {
    if let Some(path) = env::var_os(name.to_uppercase().replace('-', "_")) {
        return Ok(path.into());
    }
    let own = env::current_exe().context("finding the running program")?;
    let found = own.ancestors().skip(1).take(2).map(|folder| folder.join(name)).find(|file| file.exists());
    found.with_context(|| format!("no {name} beside {}: cargo build --bin {name} builds it", own.display()))
}

/// Folders in which a proxy leaves things on this machine. They are removed when this is dropped.
pub struct OwnFolders {
    pub pins: PathBuf,
    pub cgroup: PathBuf,
}

impl OwnFolders {
    /// Makes the folders. `name` must differ from all others.
    pub fn create(name: &str) -> Result<Self> {
        const BPFFS: &str = "/sys/fs/bpf";
        filesystem::provide_bpffs(Path::new(BPFFS)).context("mounting a bpffs")?;
        let folders = Self { pins: Path::new(BPFFS).join(name), cgroup: cgroup::mount_point()?.join(name) };
        for folder in [&folders.pins, &folders.cgroup] {
            fs::create_dir(folder).with_context(|| format!("creating {}", folder.display()))?;
        }
        Ok(folders)
    }
}

impl Drop for OwnFolders {
    fn drop(&mut self) {
        // These folders may stay if they cannot be removed now, because nothing else uses them.
        if let Ok(program) = program("proxy-ctl") {
            let _ = Command::new(program).args(["cleanup", "--bpffs"]).arg(&self.pins).output();
        }
        let _ = fs::remove_dir(&self.pins);
        let _ = fs::remove_dir(&self.cgroup);
    }
}
