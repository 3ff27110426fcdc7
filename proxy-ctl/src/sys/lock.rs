//! One writer at a time: an advisory lock on a folder, which the kernel drops with its holder.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::Path,
};

use nix::fcntl::{Flock, FlockArg};

/// Held until dropped.
#[derive(Debug)]
pub struct Lock {
    held: Flock<File>,
}

impl Lock {
    /// Whether what is at `folder` now is what was locked. False: it is another folder of that name, or none.
    pub fn is_of(&self, folder: &Path) -> io::Result<bool> {
        let identity = |of: fs::Metadata| (of.dev(), of.ino());
        match fs::metadata(folder) {
            Ok(found) => Ok(identity(found) == identity(self.held.metadata()?)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
        }
    }
}

/// What came of asking for the lock.
#[derive(Debug)]
pub enum Attempt {
    Held(Lock),
    /// By this process, if the kernel tells.
    Taken(Option<u32>),
}

/// Locks `folder` without waiting.
pub fn try_lock(folder: &Path) -> io::Result<Attempt> {
    let file = File::open(folder)?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(held) => Ok(Attempt::Held(Lock { held })),
        Err((file, nix::errno::Errno::EWOULDBLOCK)) => {
            let inode = file.metadata()?.ino();
            let holder = fs::read_to_string("/proc/locks").ok().and_then(|locks| holder(&locks, inode));
            Ok(Attempt::Taken(holder))
        }
        Err((_, errno)) => Err(errno.into()),
    }
}

/// Process that holds the lock on `folder`, without asking for it; `None`: nobody, or the kernel does not tell.
pub fn holder_of(folder: &Path) -> Option<u32> {
    let inode = fs::metadata(folder).ok()?.ino();
    holder(&fs::read_to_string("/proc/locks").ok()?, inode)
}

/// Process that holds a flock on `inode`, by a line such as
/// `4: FLOCK  ADVISORY  WRITE 812 00:1c:24 0 EOF` of `/proc/locks`.
fn holder(locks: &str, inode: u64) -> Option<u32> {
    locks.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        if words.nth(1) != Some("FLOCK") {
            return None;
        }
        let process = words.nth(2)?.parse().ok()?;
        let found = words.next()?.rsplit(':').next()?.parse::<u64>().ok()?;
        (found == inode).then_some(process)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCKS: &str = "1: POSIX  ADVISORY  WRITE 77 00:1c:24 0 EOF\n\
        2: -> FLOCK  ADVISORY  WRITE 900 00:1c:24 0 EOF\n\
        3: FLOCK  ADVISORY  WRITE 812 00:1c:24 0 EOF\n";

    #[test]
    fn the_holder_of_a_flock_is_named() {
        assert_eq!(holder(LOCKS, 24), Some(812));
    }

    #[test]
    fn another_inode_has_no_holder() {
        assert_eq!(holder(LOCKS, 25), None);
    }

    #[test]
    fn the_second_asks_in_vain_until_the_first_lets_go() {
        let folder = tempfile::tempdir().unwrap();
        let Attempt::Held(first) = try_lock(folder.path()).unwrap() else { panic!("free") };
        let Attempt::Taken(process) = try_lock(folder.path()).unwrap() else { panic!("taken") };
        assert_eq!(process, Some(std::process::id()));
        assert_eq!(holder_of(folder.path()), process);
        assert!(first.is_of(folder.path()).unwrap());
        assert!(!first.is_of(&folder.path().join("nothing")).unwrap());
        drop(first);
        assert_eq!(holder_of(folder.path()), None);
        assert!(matches!(try_lock(folder.path()).unwrap(), Attempt::Held(_)));
    }
}
