//! The cgroup v2 tree: where it is mounted, and the lab's sub-trees in it.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use proxy_ctl::sys::proc::filesystem;

use crate::wait;

/// Returns the folder where the cgroup v2 hierarchy is mounted.
pub fn mount_point() -> Result<PathBuf> {
    let found = filesystem::cgroup_root().context("looking for cgroups")?;
    found.context("no cgroup v2 hierarchy is mounted")
}

/// Moves the calling process into a cgroup.
pub fn join(cgroup: &Path) -> Result<()> {
    fs::write(cgroup.join("cgroup.procs"), "0").with_context(|| format!("joining {}", cgroup.display()))
}

const LIMIT: Duration = Duration::from_secs(60);

/// Ends every process in the cgroup and below, and waits until they are gone.
pub fn end_members(cgroup: &Path) -> Result<()> {
    wait::until(&format!("ending the processes in {}", cgroup.display()), LIMIT, || {
        let members = members(cgroup);
        for member in &members {
            // The process may have ended meanwhile.
            let _ended = kill(*member, Signal::SIGKILL);
        }
        Ok(members.is_empty().then_some(()))
    })
}

/// Removes a cgroup without members, and those below. Does nothing if it does not exist.
pub fn remove(cgroup: &Path) -> Result<()> {
    wait::until(&format!("removing {}", cgroup.display()), LIMIT, || {
        if !cgroup.exists() {
            return Ok(Some(()));
        }
        remove_directories(cgroup).map(Some).map_err(|error| error.to_string())
    })
}

fn below(cgroup: &Path) -> Vec<PathBuf> {
    let Ok(directory) = fs::read_dir(cgroup) else { return Vec::new() };
    directory.filter_map(|found| Some(found.ok()?.path())).filter(|path| path.is_dir()).collect()
}

fn members(cgroup: &Path) -> Vec<Pid> {
    let own = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    let mut members: Vec<Pid> = own.lines().filter_map(|line| line.parse().ok().map(Pid::from_raw)).collect();
    for child in below(cgroup) {
        members.extend(self::members(&child));
    }
    members
}

fn remove_directories(cgroup: &Path) -> std::io::Result<()> {
    for child in below(cgroup) {
        remove_directories(&child)?;
    }
    fs::remove_dir(cgroup)
}
