//! Where our pins are, the lock on them, and their folders.

use std::{
    fs, io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use proxy_common::layout::LAYOUT_VERSION;

use super::Error;
use crate::sys::{
    filesystem,
    lock::{self, Attempt, Lock},
};

/// The folder of ours on the bpffs.
const OURS: &str = "proxy-ctl";
/// What the names of the socket programs' links begin with.
pub(super) const SOCKET_LINK: &str = "cgroup_";

/// `<bpffs>/proxy-ctl` and what is in it.
#[derive(Clone, Debug)]
pub(super) struct Paths {
    /// `<bpffs>/proxy-ctl`: holds the lock.
    pub(super) top: PathBuf,
    /// `v<LAYOUT_VERSION>` in it: holds the tables.
    pub(super) root: PathBuf,
}

impl Paths {
    pub(super) fn new(bpffs: &Path) -> Self {
        let top = bpffs.join(OURS);
        let root = top.join(format!("v{LAYOUT_VERSION}"));
        Self { top, root }
    }

    pub(super) fn maps(&self) -> PathBuf {
        self.root.join("maps")
    }

    /// Maps of the former size of tables whose entries are on their way into those of [`maps`](Self::maps).
    pub(super) fn before(&self) -> PathBuf {
        self.root.join("before")
    }

    /// Maps that are larger than those of [`maps`](Self::maps), and take their places once they hold the same.
    pub(super) fn larger(&self) -> PathBuf {
        self.root.join("larger")
    }

    /// Of every layout version, so that a hook never has programs of two.
    pub(super) fn links(&self) -> PathBuf {
        self.top.join("links")
    }

    /// A folder for each interface that has filters of ours on a clsact qdisc, of every layout version.
    pub(super) fn clsact(&self) -> PathBuf {
        self.top.join("clsact")
    }

    /// Mounts the bpffs if necessary, and makes the folders. Refuses any that somebody else may have put there.
    pub(super) fn create(&self, bpffs: &Path) -> Result<(), Error> {
        provide_bpffs(bpffs)?;
        let bpffs =
            fs::canonicalize(bpffs).map_err(|source| Error::Folder { path: bpffs.to_owned(), source })?;
        trust(bpffs)?;
        let folders = [self.maps(), self.before(), self.larger(), self.links(), self.clsact()];
        for path in [self.top.clone(), self.root.clone()].into_iter().chain(folders) {
            make_folder(&path)?;
            trust(path)?;
        }
        Ok(())
    }

    /// Locks `top`, which must exist.
    pub(super) fn lock(&self) -> Result<Lock, Error> {
        let path = self.top.clone();
        match lock::try_lock(&path) {
            Ok(Attempt::Held(lock)) => Ok(lock),
            Ok(Attempt::Taken(holder)) => Err(Error::Locked { path, holder }),
            Err(source) => Err(Error::Folder { path, source }),
        }
    }
}

pub(super) fn provide_bpffs(path: &Path) -> Result<(), Error> {
    filesystem::provide_bpffs(path).map_err(|source| Error::NoBpffs { path: path.to_owned(), source })
}

fn trust(path: PathBuf) -> Result<(), Error> {
    filesystem::check_trusted(&path).map_err(|source| Error::Folder { path, source })
}

/// For root alone.
pub(super) fn make_folder(path: &Path) -> Result<(), Error> {
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Err(source) if source.kind() != io::ErrorKind::AlreadyExists => {
            Err(Error::Folder { path: path.to_owned(), source })
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Returns whether there is something at this path. Unlike [`Path::exists`], it fails where the caller may not look.
pub(super) fn is_there(path: &Path) -> Result<bool, Error> {
    path.try_exists().map_err(|source| Error::Folder { path: path.to_owned(), source })
}

pub(super) fn remove_folder(path: &Path) -> Result<bool, Error> {
    removed(path, fs::remove_dir(path))
}

/// Names in a folder, sorted; none if there is no folder.
pub(super) fn names(folder: &Path) -> Result<Vec<String>, Error> {
    let failed = |source| Error::Folder { path: folder.to_owned(), source };
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(failed(e)),
    };
    let mut names = entries
        .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()))
        .collect::<io::Result<Vec<_>>>()
        .map_err(failed)?;
    names.sort_unstable();
    Ok(names)
}

/// False: it was not there.
pub(super) fn removed(path: &Path, result: io::Result<()>) -> Result<bool, Error> {
    match result {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(source) => Err(Error::Folder { path: path.to_owned(), source }),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, chown};

    use super::*;

    #[test]
    #[ignore = "needs root: makes folders on a bpffs"]
    fn as_root_folders_of_others_are_refused_by_name() {
        let bpffs = Path::new("/sys/fs/bpf").join(format!("proxy-ctl-trust-{}", std::process::id()));
        filesystem::provide_bpffs(Path::new("/sys/fs/bpf")).unwrap();
        fs::create_dir(&bpffs).unwrap();
        let paths = Paths::new(&bpffs);
        let refusal = || paths.create(&bpffs).err().map(|error| error.to_string());
        assert_eq!(refusal(), None);
        assert_eq!(fs::metadata(&paths.top).unwrap().permissions().mode() & 0o7777, 0o700);

        for folder in [bpffs.clone(), paths.top.clone(), paths.maps(), paths.links()] {
            chown(&folder, Some(1000), None).unwrap();
            let expected = format!("{}: belongs to user 1000, not to root", folder.display());
            assert!(refusal().unwrap().starts_with(&expected), "{:?}", refusal());
            chown(&folder, Some(0), None).unwrap();
            fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
            let expected = format!("{}: may be written by others than root (mode 0777)", folder.display());
            assert!(refusal().unwrap().starts_with(&expected), "{:?}", refusal());
            fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
        }
        assert_eq!(refusal(), None);
        fs::remove_dir_all(&bpffs).unwrap();
    }
}
