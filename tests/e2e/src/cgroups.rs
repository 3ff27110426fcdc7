//! The cgroup hierarchies of this machine, v1 and v2, and a root of its own in each for a node.

use std::{
    collections::BTreeSet,
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};

/// The folder below which Linux distributions mount them.
pub const ROOT: &str = "/sys/fs/cgroup";
/// The child of a node's root that its own processes are in. With cgroup v2, a cgroup whose
/// children have controllers takes no process.
pub const INIT: &str = "init";

#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Hierarchy {
    pub mount_point: PathBuf,
    /// Options of the mount, which are controllers or a name. With cgroup v2, it is `None`.
    pub v1_options: Option<String>,
}

impl Hierarchy {
    /// Makes the cgroup of a node, with the child that its own processes are in.
    pub fn make_root(&self, cgroup: &Path) -> Result<()> {
        let init = cgroup.join(INIT);
        let folder = self.mount_point.join(&init);
        fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
        if self.mount_point.join("cpuset.cpus").exists() && self.v1_options.is_some() {
            self.copy_cpuset(&init)?;
        }
        // `enter_all` enables controllers in the node's own root. The node's first process joins
        // the root before that.
        cgroup.parent().map_or(Ok(()), |parent| self.enable_controllers(parent))
    }

    /// Makes the cgroup the root of what the calling process sees from now on, in all of these
    /// hierarchies.
    pub fn enter_all(hierarchies: &[Self], cgroup: &Path) -> Result<()> {
        for hierarchy in hierarchies {
            lab::cgroup::join(&hierarchy.mount_point.join(cgroup))?;
        }
        unshare(CloneFlags::CLONE_NEWCGROUP).context("making a namespace of cgroups")?;
        for hierarchy in hierarchies {
            lab::cgroup::join(&hierarchy.mount_point.join(cgroup).join(INIT))?;
            hierarchy.enable_controllers(cgroup)?;
        }
        Ok(())
    }

    /// Mounts the hierarchy below [`ROOT`], where nothing is mounted yet.
    pub fn mount(&self) -> Result<()> {
        let at = Path::new(ROOT).join(self.relative());
        fs::create_dir_all(&at).with_context(|| format!("creating {}", at.display()))?;
        let (kind, options) = match &self.v1_options {
            Some(options) => ("cgroup", Some(options.as_str())),
            None => ("cgroup2", None),
        };
        mount(Some(kind), &at, Some(kind), MsFlags::empty(), options)
            .with_context(|| format!("mounting {kind} on {}", at.display()))
    }

    /// Gives a cpuset, and those on the way to it, the processors of its parent. A new cpuset has
    /// none, so no process could join it.
    fn copy_cpuset(&self, cgroup: &Path) -> Result<()> {
        let mut folder = self.mount_point.clone();
        for part in cgroup.components() {
            let parent = folder.clone();
            folder.push(part);
            for file in ["cpuset.cpus", "cpuset.mems"] {
                let (from, to) = (parent.join(file), folder.join(file));
                let value = fs::read(&from).with_context(|| format!("reading {}", from.display()))?;
                fs::write(&to, value).with_context(|| format!("writing {}", to.display()))?;
            }
        }
        Ok(())
    }

    /// Lets the children of the cgroup, and of those on the way to it, use the controllers of
    /// cgroup v2.
    fn enable_controllers(&self, cgroup: &Path) -> Result<()> {
        if self.v1_options.is_some() {
            return Ok(());
        }
        let mut folder = self.mount_point.clone();
        for part in std::iter::once(None).chain(cgroup.components().map(Some)) {
            folder.extend(part);
            let file = folder.join("cgroup.controllers");
            let controllers =
                fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
            let control = folder.join("cgroup.subtree_control");
            for controller in controllers.split_whitespace() {
                fs::write(&control, format!("+{controller}"))
                    .with_context(|| format!("enabling {controller} in {}", control.display()))?;
            }
        }
        Ok(())
    }

    /// Returns the hierarchy's path below [`ROOT`], which is empty if it is mounted on [`ROOT`]
    /// itself.
    pub fn relative(&self) -> &Path {
        self.mount_point.strip_prefix(ROOT).unwrap_or(Path::new(""))
    }
}

/// Returns the hierarchies that are mounted below [`ROOT`].
pub fn hierarchies() -> Result<Vec<Hierarchy>> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("reading the mounts")?;
    let controllers = match fs::read_to_string("/proc/cgroups") {
        // A kernel without cgroup v1 has no such file.
        Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
        found => found.context("reading the controllers of cgroup v1")?,
    };
    Ok(hierarchies_in(&mounts, &controllers))
}

fn hierarchies_in(mounts: &str, controllers: &str) -> Vec<Hierarchy> {
    let controllers: BTreeSet<&str> = controllers
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    mounts.lines().filter_map(|line| hierarchy(line, &controllers)).collect()
}

fn hierarchy(mount: &str, controllers: &BTreeSet<&str>) -> Option<Hierarchy> {
    let (fields, kind) = mount.split_once(" - ")?;
    let mount_point = PathBuf::from(fields.split(' ').nth(4)?);
    let mut kind = kind.split(' ');
    let v1_options = match kind.next()? {
        "cgroup" => Some(v1_options(kind.nth(1)?, controllers)),
        "cgroup2" => None,
        _ => return None,
    };
    mount_point.starts_with(ROOT).then_some(Hierarchy { mount_point, v1_options })
}

/// Returns what distinguishes a hierarchy from others, from `rw,cpu,cpuacct` or
/// `rw,xattr,name=systemd`.
fn v1_options(all: &str, controllers: &BTreeSet<&str>) -> String {
    let is_name = |option: &str| option.starts_with("name=");
    let named = all.split(',').find(|option| is_name(option)).map(|name| format!("none,{name}"));
    let own = all.split(',').filter(|option| controllers.contains(option));
    named.unwrap_or_else(|| own.collect::<Vec<_>>().join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_are_told_by_their_controllers_or_name() {
        let mounts = "\
            25 24 0:22 / /sys/fs/cgroup rw,relatime shared:2 - tmpfs tmpfs rw,mode=755\n\
            26 25 0:23 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n\
            27 25 0:24 / /sys/fs/cgroup/systemd rw shared:4 - cgroup cgroup rw,xattr,name=systemd\n\
            28 25 0:25 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n\
            29 25 0:26 / /run/other rw,relatime - cgroup2 cgroup2 rw\n";
        let controllers = "#subsys_name\thierarchy\ncpu\t1\ncpuacct\t1\nmemory\t2\n";
        let found = hierarchies_in(mounts, controllers);
        let told: Vec<_> =
            found.iter().map(|one| (one.relative().to_str().unwrap(), one.v1_options.as_deref())).collect();
        assert_eq!(
            told,
            [("cpu,cpuacct", Some("cpu,cpuacct")), ("systemd", Some("none,name=systemd")), ("unified", None)]
        );
        let alone = "26 24 0:23 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n";
        let found = hierarchies_in(alone, "");
        assert_eq!(found[0].relative(), Path::new(""));
        assert_eq!(found[0].v1_options, None);
    }
}
