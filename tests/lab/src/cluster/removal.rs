//! Removal of a lab: when it is dropped, on a signal, and after a lab that crashed.

use std::{
    fs::{self, File},
    io::ErrorKind,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow};
use nix::{
    errno::Errno,
    fcntl::Flock,
    mount::{MntFlags, umount2},
};

use crate::{
    cgroup,
    claims::{Claims, lock},
    namespace, wait,
};

const LIMIT: Duration = Duration::from_secs(60);

/// Folder with one folder for each lab. The lock in it says whether the lab is alive.
const LABS: &str = "/run/proxy-ctl-lab";
/// File that is locked while a lab is made or removed.
const GUARD: &str = "/run/proxy-ctl-lab.lock";
const KEPT: &str = "kept";

/// Folder where a proxy writes what `proxy-ctl status` reads, in a file that is named after the
/// path of its bpffs.
const RECORDS: &str = "/run/proxy-ctl";

/// Labs of this process that are up and will be removed.
static RUNNING: Claims = Claims::new("lab", GUARD, remove);

pub(super) struct LabDirectory {
    name: String,
    path: PathBuf,
    kept: bool,
    _lock: Flock<File>,
}

impl LabDirectory {
    pub(super) fn create(name: &str) -> Result<Self> {
        let path = Path::new(LABS).join(name);
        let lock = {
            let _guard = RUNNING.guard()?;
            fs::create_dir_all(&path).with_context(|| format!("creating {}", path.display()))?;
            lock(&path).ok_or_else(|| anyhow!("{} is locked by another lab", path.display()))?
        };
        RUNNING.add(name);
        Ok(Self { name: name.to_owned(), path, kept: false, _lock: lock })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn keep(&mut self) {
        self.kept = fs::write(self.path.join(KEPT), "").is_ok();
        RUNNING.forget(&self.name);
    }
}

impl Drop for LabDirectory {
    fn drop(&mut self) {
        if !self.kept {
            RUNNING.end(&self.name);
        }
    }
}

/// Ends the lab's processes and removes its namespaces, mounts, cgroups and files.
pub(super) fn remove(name: &str) -> Result<()> {
    let directory = Path::new(LABS).join(name);
    let cgroup = cgroup::mount_point()?.join(name);
    cgroup::end_members(&cgroup)?;
    // Pinned links end with the file system, so the cgroups are then free of programs.
    unmount_below(&directory)?;
    for namespace in namespace::with_prefix(&format!("{name}-")) {
        namespace::ip(None, &format!("netns del {namespace}\n"))?;
    }
    cgroup::remove(&cgroup)?;
    remove_records(&directory)?;
    // A process that is ending may still write.
    wait::until(&format!("removing {}", directory.display()), LIMIT, || {
        match fs::remove_dir_all(&directory) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error.to_string()),
            Ok(()) | Err(_) => Ok(Some(())),
        }
    })
}

/// Removes what a lab's proxies have left in [`RECORDS`].
fn remove_records(directory: &Path) -> Result<()> {
    let prefix = format!("{}-", dashed(directory));
    remove_records_if(|name| name.starts_with(&prefix))
}

/// Returns a path as it stands in the name of a record.
fn dashed(path: &Path) -> String {
    path.to_string_lossy().trim_matches('/').replace('/', "-")
}

fn remove_records_if(goes: impl Fn(&str) -> bool) -> Result<()> {
    let records = match fs::read_dir(RECORDS) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        found => found.with_context(|| format!("reading {RECORDS}"))?,
    };
    for record in records {
        let record = record.with_context(|| format!("reading {RECORDS}"))?;
        if goes(&record.file_name().to_string_lossy()) {
            fs::remove_file(record.path())
                .with_context(|| format!("removing {}", record.path().display()))?;
        }
    }
    Ok(())
}

fn remove_if_empty(folder: &Path) -> Result<()> {
    match fs::remove_dir(folder) {
        Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty) => {
            Err(error).with_context(|| format!("removing {}", folder.display()))
        }
        // Another lab, or a proxy of this machine, still has files there.
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Unmounts what is mounted below a folder, the latest first. Only the folder's own files are then
/// removed, and none of what was mounted.
fn unmount_below(directory: &Path) -> Result<()> {
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo").context("reading the mounts")?;
    for mounted in mounts.lines().rev().filter_map(|mount| mount.split(' ').nth(4)).map(Path::new) {
        if !mounted.starts_with(directory) {
            continue;
        }
        match umount2(mounted, MntFlags::MNT_DETACH) {
            // It was unmounted with the one below it.
            Ok(()) | Err(Errno::EINVAL) => {}
            Err(error) => return Err(error).with_context(|| format!("unmounting {}", mounted.display())),
        }
    }
    Ok(())
}

/// Removes labs whose process is gone. Labs that were kept stay.
pub fn remove_abandoned() -> Result<()> {
    let _guard = RUNNING.guard()?;
    for name in labs() {
        let directory = Path::new(LABS).join(&name);
        if directory.join(KEPT).exists() {
            continue;
        }
        let Some(_abandoned) = lock(&directory) else { continue };
        remove(&name).with_context(|| format!("removing what is left of lab {name}"))?;
    }
    Ok(())
}

/// Removes the labs that were kept, and returns their names.
pub fn remove_kept() -> Result<Vec<String>> {
    let _guard = RUNNING.guard()?;
    let kept: Vec<String> =
        labs().into_iter().filter(|name| Path::new(LABS).join(name).join(KEPT).exists()).collect();
    for name in &kept {
        remove(name).with_context(|| format!("removing lab {name}"))?;
    }
    // Labs that are made meanwhile could lose their folder. So only the user's own command does
    // this.
    if labs().is_empty() {
        // Labs that no longer exist may have left records.
        let prefix = format!("{}-", dashed(Path::new(LABS)));
        remove_records_if(|name| name.starts_with(&prefix))?;
    }
    [LABS, RECORDS].iter().try_for_each(|folder| remove_if_empty(Path::new(folder)))?;
    if labs().is_empty() {
        fs::remove_file(GUARD).with_context(|| format!("removing {GUARD}"))?;
    }
    Ok(kept)
}

fn labs() -> Vec<String> {
    let Ok(found) = fs::read_dir(LABS) else { return Vec::new() };
    found.filter_map(|lab| lab.ok()?.file_name().into_string().ok()).collect()
}

/// Makes SIGINT, SIGTERM and SIGHUP remove the labs of this process before it ends. It must be
/// called from `main` before any other thread exists, because threads inherit the signals that are
/// blocked.
pub fn remove_on_signals() -> Result<()> {
    RUNNING.end_on_signals()
}
