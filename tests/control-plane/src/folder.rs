//! Folders for one process each, in the temporary directory. What a process that was killed has left there is
//! removed by the next one.

use std::{
    env,
    fs::{self, File},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result};
use nix::fcntl::{Flock, FlockArg};

const PREFIX: &str = "control-plane-";
/// Held by the owner for as long as it lives: the kernel lets go of it however the owner ends.
const LOCK: &str = "owner.lock";
/// A folder without a lock may be about to get one.
const YOUNG: Duration = Duration::from_secs(60);

/// Removed when dropped.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    _lock: Flock<File>,
}

impl Folder {
    /// Makes a new one in the temporary directory, and removes those whose owner is gone.
    pub fn create() -> Result<Self> {
        let parent = env::temp_dir();
        remove_abandoned(&parent);
        Self::create_in(&parent)
    }

    fn create_in(parent: &Path) -> Result<Self> {
        let process = std::process::id();
        let numbered = (0_u32..).map(|number| parent.join(format!("{PREFIX}{process}-{number}")));
        let mut path = PathBuf::new();
        for candidate in numbered {
            match fs::create_dir(&candidate) {
                Ok(()) => {
                    path = candidate;
                    break;
                }
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    return Err(error).with_context(|| format!("creating {}", candidate.display()));
                }
            }
        }
        let lock = path.join(LOCK);
        let file = File::create(&lock).with_context(|| format!("creating {}", lock.display()))?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock)
            .map_err(|(_, error)| error)
            .with_context(|| format!("locking {}", lock.display()))?;
        Ok(Self { path, _lock: lock })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // The next one will try again.
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn remove_abandoned(parent: &Path) {
    let Ok(found) = fs::read_dir(parent) else { return };
    for found in found.flatten() {
        let ours = found.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
        if ours && is_abandoned(&found.path()) {
            // Someone else's, or someone was faster: not ours to care for.
            let _ = fs::remove_dir_all(found.path());
        }
    }
}

fn is_abandoned(folder: &Path) -> bool {
    if let Ok(lock) = File::open(folder.join(LOCK)) {
        return Flock::lock(lock, FlockArg::LockExclusiveNonblock).is_ok();
    }
    let changed = fs::metadata(folder).and_then(|metadata| metadata.modified());
    changed.is_ok_and(|changed| SystemTime::now().duration_since(changed).is_ok_and(|age| age > YOUNG))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_holds_is_removed_and_nothing_else() {
        let parent = tempfile::tempdir().unwrap();
        let held = Folder::create_in(parent.path()).unwrap();
        let left = parent.path().join(format!("{PREFIX}1-0"));
        let young = parent.path().join(format!("{PREFIX}2-0"));
        let other = parent.path().join("other");
        for folder in [&left, &young, &other] {
            fs::create_dir(folder).unwrap();
        }
        // A lock file that a process which was killed has left.
        fs::write(left.join(LOCK), "").unwrap();
        remove_abandoned(parent.path());
        assert!(!left.exists(), "its owner is gone");
        assert!(held.path().exists() && young.exists() && other.exists());
        let path = held.path().to_owned();
        drop(held);
        assert!(!path.exists());
    }

    #[test]
    fn each_has_its_own() {
        let parent = tempfile::tempdir().unwrap();
        let [one, two] = [(); 2].map(|()| Folder::create_in(parent.path()).unwrap());
        assert_ne!(one.path(), two.path());
    }
}
