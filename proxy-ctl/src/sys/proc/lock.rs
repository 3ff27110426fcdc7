//! An advisory lock on a folder, which admits one writer at a time. The kernel releases it when its
//! holder ends.

use std::{
    fmt,
    fs::{self, File, Metadata},
    io,
    os::unix::fs::MetadataExt,
    path::Path,
};

use nix::{
    fcntl::{Flock, FlockArg},
    sys::stat,
};

/// A lock that is held until it is dropped.
#[derive(Debug)]
pub struct Lock {
    held: Flock<File>,
}

impl Lock {
    /// Returns false if the folder at this path was replaced or removed since it was locked.
    pub fn is_of(&self, folder: &Path) -> io::Result<bool> {
        match fs::metadata(folder) {
            Ok(found) => Ok(FileId::of(&found) == FileId::of(&self.held.metadata()?)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
        }
    }
}

/// The process that holds a lock, for people to read. It is `None` if the kernel does not report
/// it, because the process is in another PID namespace.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Holder(pub Option<u32>);

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(process) => write!(f, "process {process}"),
            None => f.write_str("a process of another PID namespace"),
        }
    }
}

/// The result of an attempt to lock.
#[derive(Debug)]
pub enum Attempt {
    Held(Lock),
    Taken(Holder),
}

/// Locks `folder` without waiting.
pub fn try_lock(folder: &Path) -> io::Result<Attempt> {
    let file = File::open(folder)?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(held) => Ok(Attempt::Held(Lock { held })),
        Err((file, nix::errno::Errno::EWOULDBLOCK)) => {
            let locked = FileId::of(&file.metadata()?);
            let locks = fs::read_to_string("/proc/locks").ok();
            Ok(Attempt::Taken(Holder(locks.and_then(|locks| holder(&locks, locked)))))
        }
        Err((_, errno)) => Err(errno.into()),
    }
}

/// Returns the process that holds the lock on `folder`, without trying to lock it. Returns `None`
/// if there is no such process or it is unknown.
pub fn holder_of(folder: &Path) -> Option<u32> {
    let locked = FileId::of(&fs::metadata(folder).ok()?);
    holder(&fs::read_to_string("/proc/locks").ok()?, locked)
}

/// The identity of a file. Inode numbers are unique only within a file system, and those of a bpffs
/// are small.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct FileId {
    major: u64,
    minor: u64,
    inode: u64,
}

impl FileId {
    fn of(found: &Metadata) -> Self {
        Self { major: stat::major(found.dev()), minor: stat::minor(found.dev()), inode: found.ino() }
    }

    /// Parses `00:1c:24`: the device in hexadecimal numbers, the inode in a decimal one.
    fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split(':');
        let mut device = || u64::from_str_radix(numbers.next()?, 16).ok();
        let (major, minor) = (device()?, device()?);
        Some(Self { major, minor, inode: numbers.next()?.parse().ok()? })
    }
}

/// Returns the process that holds a flock on `file`, from a line of `/proc/locks` such as
/// `4: FLOCK  ADVISORY  WRITE 812 00:1c:24 0 EOF`.
fn holder(locks: &str, file: FileId) -> Option<u32> {
    locks.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        if words.nth(1) != Some("FLOCK") {
            return None;
        }
        let process = words.nth(2)?.parse().ok()?;
        (FileId::parse(words.next()?)? == file).then_some(process)
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const LOCKS: &str = "1: POSIX  ADVISORY  WRITE 77 00:1c:24 0 EOF\n\
        2: -> FLOCK  ADVISORY  WRITE 900 00:1c:24 0 EOF\n\
        4: FLOCK  ADVISORY  WRITE 700 00:1d:24 0 EOF\n\
        3: FLOCK  ADVISORY  WRITE 812 00:1c:24 0 EOF\n";

    #[rstest]
    #[case::locked(0, 0x1c, 24, Some(812))]
    #[case::another_inode(0, 0x1c, 25, None)]
    #[case::the_same_inode_of_another_device(0, 0x1d, 24, Some(700))]
    #[case::the_same_inode_of_a_disk(8, 0x1c, 24, None)]
    fn the_holder_of_a_flock(
        #[case] major: u64,
        #[case] minor: u64,
        #[case] inode: u64,
        #[case] expected: Option<u32>,
    ) {
        assert_eq!(holder(LOCKS, FileId { major, minor, inode }), expected);
    }

    #[test]
    fn the_second_asks_in_vain_until_the_first_lets_go() {
        let folder = tempfile::tempdir().unwrap();
        let Attempt::Held(first) = try_lock(folder.path()).unwrap() else { panic!("free") };
        let Attempt::Taken(by) = try_lock(folder.path()).unwrap() else { panic!("taken") };
        assert_eq!(by, Holder(Some(std::process::id())));
        assert_eq!(Holder(holder_of(folder.path())), by);
        assert!(first.is_of(folder.path()).unwrap());
        assert!(!first.is_of(&folder.path().join("nothing")).unwrap());
        drop(first);
        assert_eq!(holder_of(folder.path()), None);
        assert!(matches!(try_lock(folder.path()).unwrap(), Attempt::Held(_)));
    }
}
