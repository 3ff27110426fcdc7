//! Runs the core scenarios on arm64, in an emulated machine whose first file system is its only
//! one.
//!
//! The file system has Debian's kernel for arm64 and the few programs that scenarios call, which
//! are unpacked. Our own programs are cross-built as for the image.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, anyhow};

use super::{Kernel, LONGEST};
use crate::{
    cache,
    command::{run as execute, target},
    cross,
    packages::PrivateApt,
    setup::{self, Purpose},
};

const DEBIAN: &str = "arm64";
/// The packages of programs that scenarios call, and of those that bring up the machine.
const PROGRAMS: [&str; 4] = ["busybox-static", "ethtool", "iproute2", "kmod"];
const SUITES: [&str; 2] = ["bookworm", "bookworm-security"];
/// The modules of the kernel. Others that they need are added.
const MODULES: [&str; 8] = [
    // This module is asked for by name, not by symbol, so it is not in modules.dep.
    "crc32c_generic",
    "veth",
    "bridge",
    "br_netfilter",
    "nf_conntrack",
    "dummy",
    "sch_ingress",
    "cls_bpf",
];
/// The programs of this repository.
const OURS: [&str; 3] = ["proxy-ctl", "lab-agent", "behaviour"];
/// Folders that are left out of the file system, because nobody reads them there.
const UNREAD: [&str; 3] = ["usr/share", "var", "usr/lib/aarch64-linux-gnu/gconv"];
/// The guest's last line if it succeeded. It is needed because the guest's exit status does not
/// come out of the machine.
const SUCCEEDED: &str = "guest: succeeded";

/// Downloads what is missing.
pub(super) fn provide(kernel: Kernel) -> Result<()> {
    setup::install(&[Purpose::Machines, Purpose::Emulation], false)?;
    let folder = cache::folder("vm")?;
    kernel_files(kernel, &folder)?;
    userland(&folder)?;
    Ok(())
}

/// Builds the programs and returns a command that runs the machine. The scenarios are those whose
/// names contain `filter`.
pub(super) fn command(kernel: Kernel, filter: &str) -> Result<Command> {
    let folder = cache::folder("vm")?;
    let kernel_files = kernel_files(kernel, &folder)?;
    let userland = userland(&folder)?;
    let programs = cross::programs_for_arm64(&["proxy-ctl", "lab", "behaviour"])?;
    let initial = target().join("vm").join("arm64.cpio");
    pack(&initial, &kernel_files, &userland, &programs, filter)
        .with_context(|| format!("writing {}", initial.display()))?;

    let machine = format!(
        "timeout {LONGEST} qemu-system-aarch64 -machine virt -cpu cortex-a72 -smp 1 -m 3G -nographic -no-reboot \
         -nic none -kernel {} -initrd {} -append 'console=ttyAMA0 quiet panic=-1' </dev/null 2>&1",
        kernel_files.image.display(),
        initial.display()
    );
    let script = format!(
        "status=1; while IFS= read -r line; do line=${{line%$'\\r'}}; printf '%s\\n' \"$line\"; \
         if [[ $line == '{SUCCEEDED}' ]]; then status=0; fi; done < <({machine}); exit $status"
    );
    let mut command = Command::new("bash");
    command.args(["-c", &script]).stdin(Stdio::null());
    Ok(command)
}

struct KernelFiles {
    image: PathBuf,
    /// The folder `…/lib/modules/<version>`.
    modules: PathBuf,
    version: String,
}

fn kernel_files(kernel: Kernel, cache: &Path) -> Result<KernelFiles> {
    let folder = cache.join(format!("{}-{DEBIAN}", kernel.name()));
    cache::fill_once(&folder, || super::download(kernel, DEBIAN, &folder))?;
    let image = super::image_in(&folder).ok_or_else(|| anyhow!("no kernel in {}", folder.display()))?;
    let name = image.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let version = name.trim_start_matches("vmlinuz-").to_owned();
    let modules = ["lib/modules", "usr/lib/modules"].map(|at| folder.join(at).join(&version));
    let modules = modules.into_iter().find(|at| at.is_dir());
    let modules = modules.ok_or_else(|| anyhow!("no modules in {}", folder.display()))?;
    if !modules.join("modules.dep").exists() {
        execute(Command::new("depmod").arg("-b").arg(&folder).arg(&version))?;
    }
    Ok(KernelFiles { image, modules, version })
}

fn userland(cache: &Path) -> Result<PathBuf> {
    let folder = cache.join("userland-arm64");
    cache::fill_once(&folder, || {
        println!("downloading Debian's {} for {DEBIAN}", PROGRAMS.join(", "));
        let apt = PrivateApt::create(&cache.join("apt-userland-arm64"), DEBIAN, &SUITES)?;
        apt.unpack_with_dependencies(&PROGRAMS, &folder)?;
        for unread in UNREAD {
            let unread = folder.join(unread);
            if unread.exists() {
                fs::remove_dir_all(&unread).with_context(|| format!("removing {}", unread.display()))?;
            }
        }
        Ok(())
    })?;
    Ok(folder)
}

/// Puts together the file system below a folder, and packs it into the archive that the kernel
/// unpacks.
fn pack(file: &Path, kernel: &KernelFiles, userland: &Path, programs: &Path, filter: &str) -> Result<()> {
    let root = file.with_extension("root");
    if root.exists() {
        fs::remove_dir_all(&root)?;
    }
    fs::create_dir_all(file.parent().unwrap_or(Path::new("/")))?;
    execute(Command::new("cp").arg("-a").arg(userland).arg(&root))?;
    for folder in ["dev", "proc", "sys", "run", "tmp", "root", "opt"] {
        fs::create_dir_all(root.join(folder))?;
    }
    for program in OURS {
        fs::copy(programs.join(program), root.join("opt").join(program))?;
    }
    copy_modules(kernel, &root)?;
    let init_file = root.join("init");
    fs::write(&init_file, init(filter))?;
    fs::set_permissions(&init_file, fs::Permissions::from_mode(0o755))?;
    let script = "find . | busybox cpio -o -H newc -R 0:0 >\"$0\"";
    execute(Command::new("sh").args(["-c", script]).arg(file).current_dir(&root))
}

/// Copies the chosen modules with those that they need, and the lists by which modprobe finds them.
fn copy_modules(kernel: &KernelFiles, root: &Path) -> Result<()> {
    let to = root.join("lib/modules").join(&kernel.version);
    let dependencies = kernel.modules.join("modules.dep");
    let dependencies =
        fs::read_to_string(&dependencies).with_context(|| format!("reading {}", dependencies.display()))?;
    for file in MODULES.iter().flat_map(|module| with_dependencies(&dependencies, module)) {
        let to = to.join(file);
        fs::create_dir_all(to.parent().unwrap_or(root))?;
        fs::copy(kernel.modules.join(file), to)?;
    }
    for list in fs::read_dir(&kernel.modules)? {
        let list = list?;
        if list.file_type()?.is_file() {
            fs::copy(list.path(), to.join(list.file_name()))?;
        }
    }
    Ok(())
}

/// Returns the files of a module and of those that it needs, by `modules.dep`. The list is empty if
/// the module is built in.
fn with_dependencies<'a>(dependencies: &'a str, module: &str) -> Vec<&'a str> {
    let is_it = |file: &str| {
        let name = file.rsplit('/').next().unwrap_or_default();
        name.strip_prefix(module).is_some_and(|rest| rest.starts_with(".ko"))
    };
    let line = dependencies
        .lines()
        .filter_map(|line| line.split_once(": ").or_else(|| Some((line.strip_suffix(':')?, ""))));
    line.filter(|(file, _)| is_it(file))
        .flat_map(|(file, needed)| std::iter::once(file).chain(needed.split_whitespace()))
        .collect()
}

/// Returns the script of the guest's first and only process. When it has run the scenarios, the
/// machine is switched off.
fn init(filter: &str) -> String {
    let modules = MODULES.join(" ");
    format!(
        "#!/bin/busybox sh\n\
         export PATH=/sbin:/bin:/usr/sbin:/usr/bin HOME=/root\n\
         /bin/busybox mkdir -p /sys/fs/cgroup\n\
         /bin/busybox --install -s /bin 2>/dev/null\n\
         mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs devtmpfs /dev\n\
         exec </dev/console >/dev/console 2>&1\n\
         mount -t cgroup2 cgroup2 /sys/fs/cgroup; mount -t bpf bpf /sys/fs/bpf\n\
         mount -t tmpfs tmpfs /run; mount -t tmpfs tmpfs /tmp\n\
         /sbin/modprobe -a {modules}\n\
         ip link set lo up\n\
         uname -rm\n\
         LAB_PATIENCE=20 /opt/behaviour --core --path sockets --path packets '{filter}' && echo '{SUCCEEDED}'\n\
         poweroff -f\n"
    )
}

#[cfg(test)]
mod tests {
    use super::with_dependencies;

    #[test]
    fn a_module_comes_with_what_it_needs() {
        let list = "kernel/net/veth.ko.xz:\nkernel/net/bridge/bridge.ko.xz: kernel/net/stp.ko.xz kernel/net/llc.ko.xz\n\
                    kernel/net/bridge_x.ko: kernel/y.ko\n";
        assert_eq!(with_dependencies(list, "veth"), ["kernel/net/veth.ko.xz"]);
        assert_eq!(with_dependencies(list, "bridge").len(), 3);
        assert!(with_dependencies(list, "built_in").is_empty());
    }
}
