//! The bpffs and the mounts of cgroup v2.

use std::{
    cmp::Reverse,
    fs, io,
    os::{fd::AsRawFd as _, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{OFlag, open},
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::{
        stat::Mode,
        statfs::{BPF_FS_MAGIC, CGROUP2_SUPER_MAGIC, statfs},
    },
};

/// Our own mount point. On a node with the old hierarchies, those occupy /sys/fs/cgroup.
const OWN_CGROUP_MOUNT: &str = "/run/proxy-ctl/cgroup";
/// `PROC_CGROUP_INIT_INO` of the kernel.
const INITIAL_CGROUP_NAMESPACE: &str = "cgroup:[4026531835]";

/// Returns true if `path` lies on a bpffs. Fails if it does not exist.
pub fn is_bpffs(path: &Path) -> io::Result<bool> {
    Ok(statfs(path)?.filesystem_type() == BPF_FS_MAGIC)
}

/// Returns true if `path` is a folder of cgroup v2.
pub fn is_cgroup2(path: &Path) -> io::Result<bool> {
    Ok(statfs(path)?.filesystem_type() == CGROUP2_SUPER_MAGIC && path.is_dir())
}

/// Makes the folder `path`, and mounts a bpffs on it unless it lies on one already.
pub fn provide_bpffs(path: &Path) -> io::Result<()> {
    if !path.exists() {
        fs::create_dir_all(path)?;
    }
    if !is_bpffs(path)? {
        // Without the option `mode`, every user may make folders in it.
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        mount(Some("bpf"), path, Some("bpf"), flags, Some("mode=0700"))?;
    }
    Ok(())
}

/// The reason why the objects that are pinned in a folder may belong to another user.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
pub enum Untrusted {
    #[error("is no folder; remove it, or name another folder in ebpf.bpffs")]
    NoFolder,
    #[error(
        "belongs to user {0}, not to root, and so may what is pinned in it; remove it (`rm -r`), or name another folder in \
         ebpf.bpffs"
    )]
    Owner(u32),
    #[error(
        "may be written by others than root (mode {0:04o}); `chmod go-w` it once you know that all in it is root's"
    )]
    Mode(u32),
}

/// Fails if users other than root may pin objects in a folder or replace it. A folder with the
/// sticky bit is accepted: others may make files in it, but cannot touch those of root. A bpffs
/// that was mounted without options has that bit.
pub fn check_trusted(path: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(path)?;
    match distrust(found.is_dir(), found.uid(), found.mode() & 0o7777) {
        Some(problem) => Err(io::Error::other(problem)),
        None => Ok(()),
    }
}

fn distrust(is_folder: bool, owner: u32, mode: u32) -> Option<Untrusted> {
    const STICKY: u32 = 0o1000;
    const OTHERS_WRITE: u32 = 0o022;
    if !is_folder {
        return Some(Untrusted::NoFolder);
    }
    if owner != 0 {
        return Some(Untrusted::Owner(owner));
    }
    (mode & OTHERS_WRITE != 0 && mode & STICKY == 0).then_some(Untrusted::Mode(mode))
}

/// Returns the mount point of the cgroup v2 hierarchy that is closest to its root, of those that
/// this process can see. A mount that is hidden by another one does not count.
pub fn cgroup_root() -> io::Result<Option<PathBuf>> {
    // These are the mounts of the calling thread. `self` would give those of the main thread.
    let mounts = cgroup_mounts(&fs::read_to_string("/proc/thread-self/mountinfo")?);
    Ok(mounts.into_iter().find(CgroupMount::is_reachable).map(|mount| mount.point))
}

/// Returns true if [`provide_cgroup2`] would mount the whole hierarchy. Inside a cgroup namespace,
/// it would mount only that namespace's part.
pub fn can_mount_cgroup2() -> bool {
    let supported = fs::read_to_string("/proc/filesystems");
    let namespace = fs::read_link("/proc/thread-self/ns/cgroup");
    supported.is_ok_and(|names| names.lines().any(|name| name.ends_with("\tcgroup2")))
        && namespace.is_ok_and(|namespace| namespace.as_os_str() == INITIAL_CGROUP_NAMESPACE)
}

/// Returns the mount point of the hierarchy, and mounts it on [`OWN_CGROUP_MOUNT`] if it is mounted
/// nowhere. Returns `None` if it cannot be mounted.
pub fn provide_cgroup2() -> io::Result<Option<PathBuf>> {
    if let Some(root) = cgroup_root()? {
        return Ok(Some(root));
    }
    if !can_mount_cgroup2() {
        return Ok(None);
    }
    fs::create_dir_all(OWN_CGROUP_MOUNT)?;
    mount(Some("none"), OWN_CGROUP_MOUNT, Some("cgroup2"), MsFlags::empty(), None::<&str>)?;
    Ok(Some(OWN_CGROUP_MOUNT.into()))
}

/// Unmounts what [`provide_cgroup2`] has mounted. Programs stay attached.
pub fn remove_own_cgroup2() -> io::Result<()> {
    match umount2(OWN_CGROUP_MOUNT, MntFlags::MNT_DETACH) {
        Ok(()) => fs::remove_dir(OWN_CGROUP_MOUNT),
        Err(Errno::EINVAL | Errno::ENOENT | Errno::EPERM) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Returns the cgroup v2 folder that this process is in.
pub fn own_cgroup() -> io::Result<Option<PathBuf>> {
    let cgroups = fs::read_to_string("/proc/self/cgroup")?;
    Ok(provide_cgroup2()?.zip(cgroup_path(&cgroups)).map(|(root, path)| root.join(path)))
}

/// Returns the path below the root, from the line of cgroup v2: `0::/system.slice/kubelet.service`.
fn cgroup_path(cgroups: &str) -> Option<&str> {
    cgroups.lines().find_map(|line| line.strip_prefix("0::/"))
}

/// A line of `mountinfo` about cgroup v2.
#[derive(Debug, Eq, PartialEq)]
struct CgroupMount {
    id: u64,
    height: usize,
    point: PathBuf,
}

impl CgroupMount {
    /// Parses `36 35 98:0 /root /mount/point options fields - type source options`.
    fn parse(line: &str) -> Option<Self> {
        let (left, right) = line.split_once(" - ")?;
        if right.split(' ').next() != Some("cgroup2") {
            return None;
        }
        let mut words = left.split(' ');
        let id = words.next()?.parse().ok()?;
        let (root, point) = (words.nth(2)?, words.next()?);
        Some(Self { id, height: height(root), point: unescape(point).into() })
    }

    fn is_reachable(&self) -> bool {
        mount_id(&self.point).is_ok_and(|found| found == Some(self.id))
    }
}

/// Returns the id of the mount that `path` leads to.
fn mount_id(path: &Path) -> io::Result<Option<u64>> {
    let folder = open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
    let info = fs::read_to_string(format!("/proc/thread-self/fdinfo/{}", folder.as_raw_fd()))?;
    Ok(info.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok()))
}

/// Returns the mounts of cgroup v2, best first. A mount of the hierarchy's root is better than a
/// bind mount of a cgroup below it.
///
/// In a cgroup namespace, `/` is only that namespace's root, and what lies above it is `/..`. A
/// container that is given the node's cgroups has both.
fn cgroup_mounts(mountinfo: &str) -> Vec<CgroupMount> {
    let mut mounts: Vec<_> = mountinfo.lines().filter_map(CgroupMount::parse).collect();
    mounts.sort_by_key(|mount| Reverse(mount.height));
    mounts
}

/// Returns 0 for a cgroup below the root of our cgroup namespace, 1 for that root, and 1 more for
/// each cgroup above it.
fn height(root: &str) -> usize {
    let mut above = 0;
    for part in root.split('/').filter(|part| !part.is_empty()) {
        if part != ".." {
            return 0;
        }
        above += 1;
    }
    1 + above
}

/// Replaces the octal escapes of /proc, such as `\040` for a space.
pub(crate) fn unescape(word: &str) -> String {
    ["\\040", "\\011", "\\012", "\\134"]
        .iter()
        .zip([" ", "\t", "\n", "\\"])
        .fold(word.to_owned(), |word, (escape, character)| word.replace(escape, character))
}

#[cfg(test)]
mod tests {
    use nix::sched::{CloneFlags, unshare};

    use super::*;

    fn best(mountinfo: &str) -> Option<PathBuf> {
        cgroup_mounts(mountinfo).into_iter().next().map(|mount| mount.point)
    }

    #[test]
    fn the_root_of_the_hierarchy_is_preferred() {
        let mounts = "30 22 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n\
            40 22 0:27 /pods /mnt/pods rw shared:4 - cgroup2 none rw\n\
            31 30 0:27 / /sys/fs/cgroup/unified rw shared:4 - cgroup2 none rw\n";
        assert_eq!(best(mounts), Some("/sys/fs/cgroup/unified".into()));
    }

    #[test]
    fn a_mount_below_the_root_is_better_than_none() {
        let mounts = "40 22 0:27 /pods /mnt/a\\040b rw - cgroup2 none rw\n";
        assert_eq!(best(mounts), Some("/mnt/a b".into()));
    }

    #[test]
    fn in_a_container_the_nodes_cgroups_are_better_than_its_own() {
        let mounts = "30 22 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n\
            31 22 0:26 /../../.. /host/cgroup ro - cgroup2 cgroup rw\n\
            32 22 0:26 /.. /pod ro - cgroup2 cgroup rw\n\
            33 22 0:26 /../other /sibling ro - cgroup2 cgroup rw\n";
        assert_eq!(best(mounts), Some("/host/cgroup".into()));
    }

    #[test]
    fn the_own_cgroup_is_that_of_version_2() {
        assert_eq!(
            cgroup_path("5:cpu:/a\n0::/system.slice/kubelet.service\n"),
            Some("system.slice/kubelet.service")
        );
        assert_eq!(cgroup_path("0::/\n"), Some(""));
        assert_eq!(cgroup_path("5:cpu:/a\n"), None);
    }

    #[test]
    fn without_cgroup2_there_is_none() {
        assert_eq!(best("30 22 0:26 / /sys/fs/cgroup ro - cgroup cgroup ro\n"), None);
    }

    /// Runs `scene` in a thread that has mounts of its own and no cgroup v2, like a program that is
    /// run by `ip netns exec`. The mounts go with the thread.
    fn without_cgroup2<T: Send + 'static>(scene: impl FnOnce() -> T + Send + 'static) -> T {
        let thread = std::thread::spawn(|| {
            let none = None::<&str>;
            unshare(CloneFlags::CLONE_NEWNS).unwrap();
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
            mount(none, "/run", Some("tmpfs"), MsFlags::empty(), none).unwrap();
            while let Some(root) = cgroup_root().unwrap() {
                umount2(&root, MntFlags::MNT_DETACH).unwrap();
            }
            scene()
        });
        thread.join().unwrap()
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_the_hierarchy_is_mounted_where_it_is_not() {
        without_cgroup2(|| {
            assert!(can_mount_cgroup2());
            let own = Some(PathBuf::from(OWN_CGROUP_MOUNT));
            assert_eq!(provide_cgroup2().unwrap(), own);
            assert_eq!(cgroup_root().unwrap(), own);
            assert_eq!(provide_cgroup2().unwrap(), own, "a second time");
            assert!(own_cgroup().unwrap().unwrap().join("cgroup.procs").exists());
            remove_own_cgroup2().unwrap();
            assert!(cgroup_root().unwrap().is_none() && !Path::new(OWN_CGROUP_MOUNT).exists());
            remove_own_cgroup2().unwrap();
        });
    }

    #[rstest::rstest]
    #[case::ours(true, 0, 0o755, None)]
    #[case::mounted_without_options(true, 0, 0o1777, None)]
    #[case::a_file(false, 0, 0o700, Some(Untrusted::NoFolder))]
    #[case::of_somebody_else(true, 1000, 0o700, Some(Untrusted::Owner(1000)))]
    #[case::for_all(true, 0, 0o757, Some(Untrusted::Mode(0o757)))]
    #[case::for_the_group(true, 0, 0o770, Some(Untrusted::Mode(0o770)))]
    fn folders_that_others_can_pin_in_are_not_trusted(
        #[case] is_folder: bool,
        #[case] owner: u32,
        #[case] mode: u32,
        #[case] problem: Option<Untrusted>,
    ) {
        assert_eq!(distrust(is_folder, owner, mode), problem);
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_a_new_bpffs_is_for_root_alone() {
        without_cgroup2(|| {
            let path = Path::new("/run/bpf");
            provide_bpffs(path).unwrap();
            // The kernel adds the sticky bit.
            assert_eq!(fs::metadata(path).unwrap().mode() & 0o777, 0o700);
            let mounts = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
            let line = mounts.lines().find(|line| line.contains(" /run/bpf ")).unwrap();
            assert!(["nosuid", "nodev", "noexec"].iter().all(|flag| line.contains(flag)), "{line}");
            check_trusted(path).unwrap();
            std::os::unix::fs::chown(path, Some(1000), None).unwrap();
            assert!(check_trusted(path).unwrap_err().to_string().starts_with("belongs to user 1000"));
        });
    }

    #[test]
    #[ignore = "needs root"]
    fn as_root_a_hidden_mount_is_passed_over() {
        without_cgroup2(|| {
            let none = None::<&str>;
            let old = Path::new("/run/old");
            let unified = old.join("unified");
            fs::create_dir(old).unwrap();
            mount(none, old, Some("tmpfs"), MsFlags::empty(), none).unwrap();
            fs::create_dir(&unified).unwrap();
            mount(none, &unified, Some("cgroup2"), MsFlags::empty(), none).unwrap();
            assert_eq!(cgroup_root().unwrap().as_ref(), Some(&unified));
            mount(none, old, Some("cgroup2"), MsFlags::empty(), none).unwrap();
            assert_eq!(cgroup_root().unwrap().as_deref(), Some(old));
            mount(none, old, Some("tmpfs"), MsFlags::empty(), none).unwrap();
            assert_eq!(cgroup_root().unwrap(), None);
        });
    }
}
