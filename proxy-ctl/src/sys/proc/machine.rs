//! The size of the machine.

use std::{
    fs, io,
    num::NonZero,
    path::{Component, Path, PathBuf},
    thread,
};

/// The processors and the memory of the machine.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Machine {
    /// The number of online processors, including those that this process may not use.
    pub cores: u32,
    /// The size of the memory in bytes.
    pub memory: u64,
    /// The bytes that the control groups of this process may have, if they have a limit.
    pub memory_limit: Option<u64>,
}

impl Machine {
    /// Reads the size of the machine. Fails if /proc is not that of a Linux kernel.
    pub fn read() -> io::Result<Self> {
        let meminfo = fs::read_to_string("/proc/meminfo")?;
        let memory = memory(&meminfo).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "/proc/meminfo has no line MemTotal in kB")
        })?;
        // If the list of online processors cannot be read, only those that this process may use are
        // known.
        let usable = || thread::available_parallelism().map_or(1, NonZero::get);
        let cores = aya::util::online_cpus().map_or_else(|_| usable(), |cores| cores.len());
        let memory_limit = limit_of_own_cgroups().filter(|limit| *limit < memory);
        Ok(Self { cores: u32::try_from(cores).unwrap_or(u32::MAX), memory, memory_limit })
    }
}

fn memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1_024)
}

/// Returns nothing also where the control groups cannot be read: then nobody knows of a limit.
fn limit_of_own_cgroups() -> Option<u64> {
    let cgroups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    least_limit(&cgroups, &mounts, |path| fs::read_to_string(path).ok())
}

/// Returns the smallest memory limit of a process's control groups and of those above them, in
/// bytes. A container sees only its own group, at the root of the mount.
fn least_limit(cgroups: &str, mounts: &str, read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
    let files = cgroups.lines().filter_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let is_v1 = controllers.split(',').any(|controller| controller == "memory");
        let file = match controllers {
            "" => "memory.max",
            _ if is_v1 => "memory.limit_in_bytes",
            _ => return None,
        };
        let (root, point) = mounts.lines().find_map(|line| mount_of_memory(line, is_v1))?;
        let below = Path::new(path).strip_prefix(&root).unwrap_or(Path::new(""));
        let is_inside = below.components().all(|component| matches!(component, Component::Normal(_)));
        let group = if is_inside { point.join(below) } else { point.clone() };
        let groups = group.ancestors().take_while(|group| group.starts_with(&point));
        Some(groups.map(|group| group.join(file)).collect::<Vec<_>>())
    });
    files.flatten().filter_map(|file| read(&file)?.trim().parse().ok()).min()
}

/// Returns root and mount point of a line of `mountinfo`, if the control groups for memory are
/// mounted there: `36 35 98:0 /root /mount/point options fields - type source options`.
fn mount_of_memory(line: &str, is_v1: bool) -> Option<(PathBuf, PathBuf)> {
    let (left, right) = line.split_once(" - ")?;
    let (mut left, mut right) = (left.split(' '), right.split(' '));
    let kind = right.next()?;
    let is_it = match kind {
        "cgroup2" => !is_v1,
        "cgroup" => is_v1 && right.nth(1)?.split(',').any(|option| option == "memory"),
        _ => false,
    };
    let (root, point) = (left.nth(3)?, left.next()?);
    is_it.then(|| (root.into(), point.into()))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::usual("MemTotal:       16303940 kB\nMemFree:         100 kB\n", Some(16_303_940 * 1_024))]
    #[case::without_the_line("MemFree: 100 kB\n", None)]
    #[case::of_another_unit("MemTotal: 100 MB\n", None)]
    #[case::too_large("MemTotal: 18446744073709551615 kB\n", None)]
    fn memory_of_a_machine(#[case] meminfo: &str, #[case] expected: Option<u64>) {
        assert_eq!(memory(meminfo), expected);
    }

    const V2: &str = "30 22 0:26 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n";
    const V1: &str = "\
        30 22 0:26 / /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu,cpuacct\n\
        31 22 0:27 / /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
    const V1_OF_CONTAINER: &str =
        "31 22 0:27 /kubepods/pod7/c1 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";

    #[rstest]
    #[case::of_the_group("0::/kubepods/pod7/c1\n", V2, &[("kubepods/pod7/c1/memory.max", "536870912\n")], Some(1 << 29))]
    #[case::of_a_group_above("0::/kubepods/pod7/c1\n", V2,
        &[("kubepods/pod7/c1/memory.max", "max\n"), ("kubepods/memory.max", "4096\n")], Some(4_096))]
    #[case::the_smallest("0::/pod7/c1\n", V2,
        &[("pod7/c1/memory.max", "8192\n"), ("pod7/memory.max", "4096\n")], Some(4_096))]
    #[case::none("0::/pod7\n", V2, &[("pod7/memory.max", "max\n")], None)]
    #[case::of_a_container("0::/\n", V2, &[("memory.max", "4096\n")], Some(4_096))]
    #[case::of_a_group_beside_the_root("0::/../c2\n", V2, &[("memory.max", "4096\n")], Some(4_096))]
    #[case::of_another_group("0::/pod7\n", V2, &[("pod8/memory.max", "4096\n")], None)]
    #[case::version_1("5:cpu:/a\n4:memory:/pod7\n0::/\n", V1, &[("memory/pod7/memory.limit_in_bytes", "4096\n")], Some(4_096))]
    #[case::version_1_of_a_container("4:memory:/kubepods/pod7/c1\n", V1_OF_CONTAINER,
        &[("memory/memory.limit_in_bytes", "4096\n")], Some(4_096))]
    #[case::nothing_is_mounted("0::/pod7\n4:memory:/pod7\n", "", &[("pod7/memory.max", "4096\n")], None)]
    fn memory_limits(
        #[case] cgroups: &str,
        #[case] mounts: &str,
        #[case] files: &[(&str, &str)],
        #[case] expected: Option<u64>,
    ) {
        let read = |path: &Path| {
            let below = path.strip_prefix("/sys/fs/cgroup").unwrap();
            let found = files.iter().find(|(name, _)| below == Path::new(name));
            found.map(|(_, text)| (*text).to_owned())
        };
        assert_eq!(least_limit(cgroups, mounts, read), expected);
    }

    #[test]
    fn this_machine_has_a_size() {
        let machine = Machine::read().unwrap();
        assert!(machine.cores > 0 && machine.memory > 1 << 20, "{machine:?}");
    }
}
