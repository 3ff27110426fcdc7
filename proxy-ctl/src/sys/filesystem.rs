//! The bpffs and the root of cgroup v2.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use nix::{
    mount::{MsFlags, mount},
    sys::statfs::{BPF_FS_MAGIC, CGROUP2_SUPER_MAGIC, statfs},
};

/// Whether `path` exists and lies on a bpffs.
pub fn is_bpffs(path: &Path) -> io::Result<bool> {
    Ok(statfs(path)?.filesystem_type() == BPF_FS_MAGIC)
}

/// Whether `path` is a folder of cgroup v2.
pub fn is_cgroup2(path: &Path) -> io::Result<bool> {
    Ok(statfs(path)?.filesystem_type() == CGROUP2_SUPER_MAGIC && path.is_dir())
}

/// Mounts a bpffs at `path` unless one is there already or `path` lies inside one; makes the folder.
pub fn provide_bpffs(path: &Path) -> io::Result<()> {
    if !path.exists() {
        fs::create_dir_all(path)?;
    }
    if !is_bpffs(path)? {
        mount(Some("bpf"), path, Some("bpf"), MsFlags::empty(), None::<&str>)?;
    }
    Ok(())
}

/// Where the root of cgroup v2 is mounted.
pub fn cgroup_root() -> io::Result<Option<PathBuf>> {
    Ok(cgroup_root_in(&fs::read_to_string("/proc/self/mountinfo")?))
}

/// The cgroup v2 folder that this process is in.
pub fn own_cgroup() -> io::Result<Option<PathBuf>> {
    let cgroups = fs::read_to_string("/proc/self/cgroup")?;
    Ok(cgroup_root()?.zip(cgroup_path(&cgroups)).map(|(root, path)| root.join(path)))
}

/// Path below the root, by the line of cgroup v2: `0::/system.slice/kubelet.service`.
fn cgroup_path(cgroups: &str) -> Option<&str> {
    cgroups.lines().find_map(|line| line.strip_prefix("0::/"))
}

/// `mountinfo` lines: `36 35 98:0 /root /mount/point options fields - type source options`. A mount of the hierarchy's
/// root is better than a bind mount of a cgroup below it. In a cgroup namespace `/` is only that namespace's root, and
/// what lies above it is `/..`: a container that is shown the node's cgroups has both.
fn cgroup_root_in(mountinfo: &str) -> Option<PathBuf> {
    let mut best: Option<(usize, PathBuf)> = None;
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        if right.split(' ').next() != Some("cgroup2") {
            continue;
        }
        let mut words = left.split(' ').skip(3);
        let (Some(root), Some(point)) = (words.next(), words.next()) else { continue };
        let height = height(root);
        if best.as_ref().is_none_or(|(best, _)| height > *best) {
            best = Some((height, PathBuf::from(unescape(point))));
        }
    }
    best.map(|(_, point)| point)
}

/// 0 for a cgroup below the root of our cgroup namespace, 1 for that root, and 1 more for each cgroup above it.
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

/// Spaces and the like are written in octal: `\040`.
fn unescape(word: &str) -> String {
    ["\\040", "\\011", "\\012", "\\134"]
        .iter()
        .zip([" ", "\t", "\n", "\\"])
        .fold(word.to_owned(), |word, (escape, character)| word.replace(escape, character))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_of_the_hierarchy_is_preferred() {
        let mounts = "30 22 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n\
            40 22 0:27 /pods /mnt/pods rw shared:4 - cgroup2 none rw\n\
            31 30 0:27 / /sys/fs/cgroup/unified rw shared:4 - cgroup2 none rw\n";
        assert_eq!(cgroup_root_in(mounts), Some("/sys/fs/cgroup/unified".into()));
    }

    #[test]
    fn a_mount_below_the_root_is_better_than_none() {
        let mounts = "40 22 0:27 /pods /mnt/a\\040b rw - cgroup2 none rw\n";
        assert_eq!(cgroup_root_in(mounts), Some("/mnt/a b".into()));
    }

    #[test]
    fn in_a_container_the_nodes_cgroups_are_better_than_its_own() {
        let mounts = "30 22 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n\
            31 22 0:26 /../../.. /host/cgroup ro - cgroup2 cgroup rw\n\
            32 22 0:26 /.. /pod ro - cgroup2 cgroup rw\n\
            33 22 0:26 /../other /sibling ro - cgroup2 cgroup rw\n";
        assert_eq!(cgroup_root_in(mounts), Some("/host/cgroup".into()));
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
        assert_eq!(cgroup_root_in("30 22 0:26 / /sys/fs/cgroup ro - cgroup cgroup ro\n"), None);
    }
}
