//! The core scenarios on other kernels: Debian's, booted without KVM, with this machine's files.
//!
//! Kernel packages are unpacked into the cache folder; nothing of them is installed. arm64 is emulated.

mod emulated;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
};

use anyhow::{Context as _, Result, anyhow};
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
    #[value(name = "6.12")]
    V6_12,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Machine {
    kernel: Kernel,
    arch: Architecture,
}

/// Those that `test --vm` runs.
pub(crate) const MACHINES: [Machine; 3] = [
    Machine { kernel: Kernel::V5_10, arch: Architecture::Amd64 },
    Machine { kernel: Kernel::V6_12, arch: Architecture::Amd64 },
    Machine { kernel: Kernel::V6_12, arch: Architecture::Arm64 },
];

const VIRTME: &str = "virtme-ng==1.42";
const SUITES: [&str; 3] = ["bullseye-security", "bookworm-security", "sid"];

impl Kernel {
    fn name(self) -> &'static str {
        match self {
            Self::V5_10 => "5.10",
            Self::V6_12 => "6.12",
        }
    }

    /// How the names of its packages begin.
    const fn package(self) -> &'static str {
        match self {
            Self::V5_10 => "linux-image-5.10.0-",
            Self::V6_12 => "linux-image-6.12.",
        }
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    setup::run_setup()?;
    let machine = Machine { kernel: arguments.kernel, arch: arguments.arch };
    let status = machine.command(&arguments.filter)?.status().context("starting the virtual machine")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Machine {
    pub(crate) const fn name(self) -> &'static str {
        match (self.arch, self.kernel) {
            (Architecture::Amd64, Kernel::V5_10) => "vm 5.10",
            (Architecture::Amd64, Kernel::V6_12) => "vm 6.12",
            (Architecture::Arm64, Kernel::V5_10) => "vm arm64 5.10",
            (Architecture::Arm64, Kernel::V6_12) => "vm arm64 6.12",
        }
    }

    /// The core scenarios of both paths.
    pub(crate) fn suite(self) -> Result<Suite> {
        Ok(Suite { name: self.name(), kind: Kind::Tests, command: self.command("")? })
    }

    /// Downloads what is missing; the command runs the core scenarios whose names contain `filter`.
    fn command(self, filter: &str) -> Result<Command> {
        match self.arch {
            Architecture::Amd64 => command(self.kernel, filter),
            Architecture::Arm64 => emulated::command(self.kernel, filter),
        }
    }
}

fn command(kernel: Kernel, filter: &str) -> Result<Command> {
    let vng = virtme()?;
    let image = image(kernel)?;
    let (behaviour, tests) = programs()?;
    // What a kube-proxy in mode ipvs leaves can only be where these modules are.
    let inside = format!(
        "mount -t bpf bpf /sys/fs/bpf 2>/dev/null; ip link set lo up; uname -r; failed=0; \
         modprobe -a ip_vs ip_vs_rr ip_set_hash_ip ip_set_hash_ipport ip_set_list_set dummy; \
         {} --ignored --show-output ipvs:: ipset:: || failed=1; \
         LAB_PATIENCE=10 {} --core --path sockets --path packets '{filter}' || failed=1; exit $failed",
        tests.display(),
        behaviour.display()
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
    apt.unpack(&apt.newest(kernel.package())?, &downloads, folder).map(drop)
}

fn image_in(folder: &Path) -> Option<PathBuf> {
    let boot = fs::read_dir(folder.join("boot")).ok()?;
    boot.filter_map(|found| Some(found.ok()?.path()))
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-")))
}
