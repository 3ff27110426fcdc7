//! The core scenarios on other kernels: Debian's, booted without KVM, with this machine's files.
//!
//! Kernel packages are unpacked into the cache folder; nothing of them is installed. arm64 is emulated.

mod emulated;

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::{Args, ValueEnum};

use crate::{
    cache,
    command::{as_root, cargo, find, output},
    packages::PrivateApt,
    setup,
    suites::{Kind, Suite},
};

#[derive(Args)]
pub(crate) struct Arguments {
    /// Which kernel
    #[arg(long, value_enum, default_value = "6.12")]
    kernel: Kernel,
    /// Which machine; arm64 is emulated, with cross-built programs
    #[arg(long, value_enum, default_value = "amd64")]
    arch: Architecture,
    /// Whose scenarios
    #[arg(long, value_enum, default_value = "ebpf")]
    mode: TestedMode,
    /// Only scenarios whose name contains this
    #[arg(long, default_value = "")]
    filter: String,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Architecture {
    Amd64,
    Arm64,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Kernel {
    #[value(name = "5.10")]
    V5_10,
    #[value(name = "6.1")]
    V6_1,
    #[value(name = "6.12")]
    V6_12,
    /// Debian's newest, of its suite sid
    Newest,
}

/// Whose core scenarios a machine runs.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum TestedMode {
    Ebpf,
    /// With the tests of IPVS and ipset, which kernels without them skip.
    Ipvs,
}

impl TestedMode {
    /// Flags of the behaviour scenarios.
    const fn flags(self) -> &'static str {
        match self {
            Self::Ebpf => "--path sockets --path packets",
            Self::Ipvs => "--proxy ipvs",
        }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Extent {
    /// The core scenarios
    Core,
    /// with one protocol of each family.
    Lean,
}

impl Extent {
    /// Flags of the behaviour scenarios.
    const fn flags(self) -> &'static str {
        match self {
            Self::Core => "--core",
            Self::Lean => "--core --lean",
        }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Machine {
    kernel: Kernel,
    arch: Architecture,
    mode: TestedMode,
}

const fn amd64(kernel: Kernel, mode: TestedMode) -> Machine {
    Machine { kernel, arch: Architecture::Amd64, mode }
}

/// The one that every run of the tests has: for what the kernels of most machines that test lack.
pub(crate) const IPVS: Machine = amd64(Kernel::V6_1, TestedMode::Ipvs);

/// Those that only `test --all-kernels` runs.
pub(crate) const OTHERS: [Machine; 5] = [
    amd64(Kernel::V5_10, TestedMode::Ebpf),
    amd64(Kernel::V6_1, TestedMode::Ebpf),
    amd64(Kernel::V6_12, TestedMode::Ebpf),
    amd64(Kernel::Newest, TestedMode::Ebpf),
    Machine { kernel: Kernel::V6_12, arch: Architecture::Arm64, mode: TestedMode::Ebpf },
];

const VIRTME: &str = "virtme-ng==1.42";
const SUITES: [&str; 3] = ["bullseye-security", "bookworm-security", "sid"];

impl Kernel {
    fn name(self) -> &'static str {
        match self {
            Self::V5_10 => "5.10",
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
            Self::Newest => "newest",
        }
    }

    /// How the names of its packages begin. From 7.2 on, `linux-image-…` only depends on two others.
    const fn packages(self) -> &'static [&'static str] {
        match self {
            Self::V5_10 => &["linux-image-5.10.0-"],
            Self::V6_1 => &["linux-image-6.1.0-"],
            Self::V6_12 => &["linux-image-6.12."],
            Self::Newest => &["linux-binary-", "linux-modules-"],
        }
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    setup::run_setup()?;
    let machine = Machine { kernel: arguments.kernel, arch: arguments.arch, mode: arguments.mode };
    machine.provide()?;
    let status =
        machine.command(Extent::Core, &arguments.filter)?.status().context("starting the virtual machine")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Machine {
    pub(crate) fn name(self) -> &'static str {
        match (self.arch, self.mode, self.kernel) {
            (Architecture::Amd64, TestedMode::Ebpf, Kernel::V5_10) => "vm 5.10",
            (Architecture::Amd64, TestedMode::Ebpf, Kernel::V6_1) => "vm 6.1",
            (Architecture::Amd64, TestedMode::Ebpf, Kernel::V6_12) => "vm 6.12",
            (Architecture::Amd64, TestedMode::Ebpf, Kernel::Newest) => "vm newest",
            (Architecture::Amd64, TestedMode::Ipvs, _) => "vm ipvs",
            (Architecture::Arm64, ..) => "vm arm64",
        }
    }

    /// Downloads what is missing of the machine; an error is mostly one of the network.
    pub(crate) fn provide(self) -> Result<()> {
        match self.arch {
            Architecture::Amd64 => {
                virtme()?;
                image(self.kernel).map(drop)
            }
            Architecture::Arm64 => Ok(()),
        }
    }

    /// The core scenarios: of mode ebpf those of both paths, of mode ipvs with one protocol of each family.
    pub(crate) fn suite(self) -> Result<Suite> {
        Ok(Suite { name: self.name(), kind: Kind::Tests, commands: vec![self.command(self.extent(), "")?] })
    }

    /// Every run of the tests waits for the machine of mode ipvs.
    const fn extent(self) -> Extent {
        match self.mode {
            TestedMode::Ebpf => Extent::Core,
            TestedMode::Ipvs => Extent::Lean,
        }
    }

    /// Downloads what is missing; the command runs the core scenarios whose names contain `filter`.
    fn command(self, extent: Extent, filter: &str) -> Result<Command> {
        match self.arch {
            Architecture::Amd64 => command(self.kernel, self.mode, extent, filter),
            Architecture::Arm64 if self.mode == TestedMode::Ipvs => {
                bail!("mode ipvs is tested on amd64 only")
            }
            Architecture::Arm64 => emulated::command(self.kernel, filter),
        }
    }
}

fn command(kernel: Kernel, mode: TestedMode, extent: Extent, filter: &str) -> Result<Command> {
    let vng = virtme()?;
    let image = image(kernel)?;
    let (behaviour, tests) = programs()?;
    let own_tests = match mode {
        TestedMode::Ebpf => String::new(),
        TestedMode::Ipvs => format!(
            "modprobe -a ip_vs ip_set dummy; {} --ignored --show-output ipvs:: ipset:: link:: || failed=1;",
            tests.display()
        ),
    };
    let inside = format!(
        "mount -t bpf bpf /sys/fs/bpf 2>/dev/null; ip link set lo up; uname -r; failed=0; {own_tests} \
         LAB_PATIENCE=10 {} {} {} '{filter}' || failed=1; exit $failed",
        behaviour.display(),
        extent.flags(),
        mode.flags()
    );
    // The guest's own redirections lose what was written before, so the pipe is on this side.
    let script = format!(
        "set -o pipefail; PATH=\"{}:$PATH\" {} --run {} --user root --cpus 1 --memory 2G --disable-kvm \
         -- \"$0\" </dev/null 2>&1 | cat",
        vng.parent().unwrap_or(Path::new("/usr/bin")).display(),
        vng.display(),
        image.display()
    );
    let mut command = as_root("bash");
    command.args(["-c", &script, &inside]).stdin(Stdio::null());
    Ok(command)
}

/// Builds what runs inside, and answers where the behaviour scenarios and proxy-ctl's own tests are.
fn programs() -> Result<(PathBuf, PathBuf)> {
    // Tests of proxy-ctl and lab, so that cargo also builds proxy-ctl and lab-agent.
    let choice = ["--lib", "--bin", "behaviour", "--test", "cli", "--test", "cluster"];
    let mut build = cargo(&["test", "-q", "--no-run", "--message-format", "json"]);
    let told = output(build.args(choice))?;
    let built: Vec<serde_json::Value> =
        told.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let program = |target: &str| {
        let is_it = |message: &&serde_json::Value| {
            message["target"]["name"] == target && message["profile"]["test"] == true
        };
        let found = built.iter().filter(is_it).find_map(|message| message["executable"].as_str());
        found
            .map(PathBuf::from)
            .with_context(|| format!("cargo does not tell where the tests of {target} are"))
    };
    Ok((program("behaviour")?, program("proxy_ctl")?))
}

/// virtme-ng: from PATH, or installed into a Python environment of its own.
fn virtme() -> Result<PathBuf> {
    setup::install_for_vm()?;
    if let Some(found) = find("vng") {
        return Ok(found);
    }
    let environment = cache::python_environment(VIRTME, "booting kernels with this machine's files")?;
    Ok(environment.join("bin/vng"))
}

/// The kernel's image, unpacked in the cache; its modules lie beside it.
fn image(kernel: Kernel) -> Result<PathBuf> {
    let folder = cache::folder("vm")?.join(kernel.name());
    if image_in(&folder).is_none() {
        download(kernel, "amd64", &folder)?;
    }
    image_in(&folder).ok_or_else(|| anyhow!("no kernel image in {}", folder.display()))
}

/// Unpacks Debian's newest packages of a kernel.
fn download(kernel: Kernel, architecture: &'static str, folder: &Path) -> Result<()> {
    println!("downloading Debian's newest package of kernel {} for {architecture}", kernel.name());
    let apt =
        PrivateApt::create(&cache::folder("vm")?.join(format!("apt-{architecture}")), architecture, &SUITES)?;
    let downloads = cache::folder("vm")?.join("packages");
    for prefix in kernel.packages() {
        apt.unpack(&apt.newest(prefix)?, &downloads, folder)?;
    }
    lay_out(folder)
}

/// As virtme-ng looks for it: newer packages have the image among the modules, and nothing in `boot` and `lib`.
fn lay_out(folder: &Path) -> Result<()> {
    if image_in(folder).is_some() {
        return Ok(());
    }
    let modules = fs::read_dir(folder.join("usr/lib/modules"))?.next();
    let modules = modules.with_context(|| format!("no modules in {}", folder.display()))??;
    let name = format!("vmlinuz-{}", modules.file_name().display());
    fs::create_dir_all(folder.join("boot"))?;
    fs::copy(modules.path().join("vmlinuz"), folder.join("boot").join(name))?;
    symlink("usr/lib", folder.join("lib"))?;
    Ok(())
}

fn image_in(folder: &Path) -> Option<PathBuf> {
    let boot = fs::read_dir(folder.join("boot")).ok()?;
    boot.filter_map(|found| Some(found.ok()?.path()))
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-")))
}
