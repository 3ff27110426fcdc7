//! Names the folders of our pins, makes them, and locks them.

use std::{
    fs, io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use proxy_common::layout::LAYOUT_VERSION;

use crate::{
    modes::ebpf::Error,
    sys::proc::{
        filesystem,
        lock::{self, Attempt, Lock},
    },
};

/// The name of our folder on the bpffs.
const OURS: &str = "proxy-ctl";
/// The prefix of the names of socket programs' links.
pub(crate) const SOCKET_LINK: &str = "cgroup_";

/// The folder `<bpffs>/proxy-ctl`, and the folders in it.
#[derive(Clone, Debug)]
pub(crate) struct Paths {
    /// The folder `<bpffs>/proxy-ctl`, which holds the lock.
    pub(crate) top: PathBuf,
    /// The folder `v<LAYOUT_VERSION>` in it, which holds the maps.
    pub(crate) root: PathBuf,
}

impl Paths {
    pub(crate) fn new(bpffs: &Path) -> Self {
        let top = bpffs.join(OURS);
        let root = top.join(format!("v{LAYOUT_VERSION}"));
        Self { top, root }
    }

    pub(crate) fn maps(&self) -> PathBuf {
        self.root.join("maps")
    }

    /// Returns the folder of former maps, whose entries may be missing in those in
    /// [`maps`](Self::maps).
    pub(crate) fn before(&self) -> PathBuf {
        self.root.join("before")
    }

    /// Returns the folder of maps that are made larger, or of another size. They replace those in
    /// [`maps`](Self::maps) once they hold the same.
    pub(crate) fn larger(&self) -> PathBuf {
        self.root.join("larger")
    }

    /// Returns the folder of links. It is the same for every layout version, so that a hook never
    /// has programs of two versions.
    pub(crate) fn links(&self) -> PathBuf {
        self.top.join("links")
    }

    /// Returns the folder of clsact filters. It has a folder for each interface with filters of
    /// ours, and is the same for every layout version.
    pub(crate) fn clsact(&self) -> PathBuf {
        self.top.join("clsact")
    }

    /// Mounts the bpffs if necessary, and makes the folders. Refuses folders that somebody else may
    /// have put there.
    pub(crate) fn create(&self, bpffs: &Path) -> Result<(), Error> {
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

    /// Locks the folder `top`, which must exist.
    pub(crate) fn lock(&self) -> Result<Lock, Error> {
        let path = self.top.clone();
        match lock::try_lock(&path) {
            Ok(Attempt::Held(lock)) => Ok(lock),
            Ok(Attempt::Taken(holder)) => Err(Error::Locked { path, holder }),
            Err(source) => Err(Error::Folder { path, source }),
        }
    }
}

pub(crate) fn provide_bpffs(path: &Path) -> Result<(), Error> {
    filesystem::provide_bpffs(path).map_err(|source| Error::NoBpffs { path: path.to_owned(), source })
}

fn trust(path: PathBuf) -> Result<(), Error> {
    filesystem::check_trusted(&path).map_err(|source| Error::Folder { path, source })
}

/// Makes a folder that only root may use, unless it exists.
pub(crate) fn make_folder(path: &Path) -> Result<(), Error> {
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Err(source) if source.kind() != io::ErrorKind::AlreadyExists => {
            Err(Error::Folder { path: path.to_owned(), source })
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Returns true if there is something at this path. Unlike [`Path::exists`], it fails if the caller
/// may not look there.
pub(crate) fn is_there(path: &Path) -> Result<bool, Error> {
    path.try_exists().map_err(|source| Error::Folder { path: path.to_owned(), source })
}

pub(crate) fn remove_folder(path: &Path) -> Result<bool, Error> {
    removed(path, fs::remove_dir(path))
}

/// Returns the names in a folder, sorted. There are none if the folder does not exist.
pub(crate) fn names(folder: &Path) -> Result<Vec<String>, Error> {
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

/// Returns true if something was removed, and false if nothing was there.
pub(crate) fn removed(path: &Path, result: io::Result<()>) -> Result<bool, Error> {
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
