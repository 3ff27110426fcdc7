//! The network namespaces whose mounts this process can see. Container runtimes mount those of pods
//! below /run.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use nix::sched::{CloneFlags, setns};

use crate::sys::{CallError, proc::filesystem::unescape};

const OWN: &str = "/proc/thread-self/ns/net";

/// A network namespace, which exists at least as long as this value.
#[derive(Debug)]
pub struct NetworkNamespace(File);

impl NetworkNamespace {
    /// Opens the network namespace of this thread.
    pub fn own() -> io::Result<Self> {
        File::open(OWN).map(Self)
    }

    /// Opens the namespace that is mounted at `path`. Returns `None` if it is gone or another mount
    /// hides it.
    pub fn open(path: &Path, inode: u64) -> io::Result<Option<Self>> {
        match File::open(path) {
            Ok(file) if file.metadata()?.ino() == inode => Ok(Some(Self(file))),
            Ok(_) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns its file, for calls that name a namespace by a descriptor.
    pub fn file(&self) -> &File {
        &self.0
    }

    /// Returns the number that distinguishes it from all other namespaces that exist now.
    pub fn inode(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.ino())
    }

    /// Moves this thread into the namespace, and no other thread of the process. Returns `EPERM`
    /// without CAP_SYS_ADMIN.
    pub fn enter(&self) -> Result<(), CallError> {
        setns(&self.0, CloneFlags::CLONE_NEWNET).map_err(|errno| CallError::new("setns", errno.into()))
    }
}

/// Returns the mount points of all mounted network namespaces, by inode.
pub fn mounted() -> io::Result<BTreeMap<u64, PathBuf>> {
    Ok(fs::read_to_string("/proc/thread-self/mountinfo")?.lines().filter_map(mount).collect())
}

/// Parses the inode of a network namespace and its mount point from a line such as
/// `543 25 0:4 net:[4026532288] /run/netns/a rw shared:3 - nsfs nsfs rw`.
fn mount(line: &str) -> Option<(u64, PathBuf)> {
    let mut words = line.split(' ').skip(3);
    let inode = words.next()?.strip_prefix("net:[")?.strip_suffix(']')?.parse().ok()?;
    Some((inode, unescape(words.next()?).into()))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use nix::{
        mount::{MsFlags, mount as attach},
        sched::unshare,
    };
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::of_a_pod("9 8 0:4 net:[4026532288] /run/netns/cni-1 rw shared:3 - nsfs nsfs rw", Some((4_026_532_288, "/run/netns/cni-1")))]
    #[case::with_a_space(r"9 8 0:4 net:[7] /run/a\040b rw - nsfs nsfs rw", Some((7, "/run/a b")))]
    #[case::of_another_kind("9 8 0:4 mnt:[4026532288] /run/snapd/ns/a rw - nsfs nsfs rw", None)]
    #[case::no_namespace("9 8 0:26 / /run rw,nosuid - tmpfs tmpfs rw", None)]
    #[case::cut_off("9 8 0:4 net:[4026532288]", None)]
    fn mounts(#[case] line: &str, #[case] expected: Option<(u64, &str)>) {
        assert_eq!(mount(line), expected.map(|(inode, point)| (inode, point.into())));
    }

    /// Mounts a new namespace at a new file, and returns to the namespace of the thread.
    fn mount_new(point: &Path) -> u64 {
        let before = NetworkNamespace::own().unwrap();
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        fs::write(point, "").unwrap();
        attach(Some(OWN), point, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        before.enter().unwrap();
        fs::metadata(point).unwrap().ino()
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_a_mounted_namespace_is_entered() {
        let scene = thread::spawn(|| {
            let none = None::<&str>;
            unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET).unwrap();
            attach(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
            attach(none, "/run", Some("tmpfs"), MsFlags::empty(), none).unwrap();
            let (one, hidden) = (mount_new("/run/one".as_ref()), mount_new("/run/hidden".as_ref()));
            attach(Some("/run/one"), "/run/hidden", none, MsFlags::MS_BIND, none).unwrap();
            let mounts = mounted().unwrap();
            let open = |inode| NetworkNamespace::open(&mounts[&inode], inode).unwrap();
            assert!(open(hidden).is_none());
            open(one).unwrap().enter().unwrap();
            assert_eq!(NetworkNamespace::own().unwrap().inode().unwrap(), one);
        });
        scene.join().unwrap();
    }
}
