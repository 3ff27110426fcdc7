//! The core scenarios on other kernels: Debian's, booted without KVM, with this machine's files.
//!
//! Kernel packages are unpacked into the cache folder; nothing of them is installed.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::{Args, ValueEnum};

use crate::{
    cache,
    command::{as_root, built, cargo, find, output, run as execute},
    setup,
    suites::{Kind, Suite},
};

#[derive(Args)]
pub(crate) struct Arguments {
    /// Which kernel
    #[arg(long, value_enum)]
    kernel: Kernel,
    /// Only scenarios whose name contains this
    #[arg(long, default_value = "")]
    filter: String,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Kernel {
    #[value(name = "5.10")]
    V5_10,
    #[value(name = "6.1")]
    V6_1,
    #[value(name = "6.12")]
    V6_12,
    Newest,
}

/// Those that `test --vm` runs.
pub(crate) const KERNELS: [Kernel; 2] = [Kernel::V5_10, Kernel::V6_12];

const VIRTME: &str = "virtme-ng==1.42";
const SOURCES: &str = "\
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian-security bullseye-security main
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian-security bookworm-security main
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian sid main
";

impl Kernel {
    fn name(self) -> &'static str {
        match self {
            Self::V5_10 => "5.10",
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
            Self::Newest => "newest",
        }
    }

    fn suite_name(self) -> &'static str {
        match self {
            Self::V5_10 => "vm 5.10",
            Self::V6_1 => "vm 6.1",
            Self::V6_12 => "vm 6.12",
            Self::Newest => "vm newest",
        }
    }

    /// How the names of its packages begin: the image, and what else belongs to it.
    fn packages(self) -> &'static [&'static str] {
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
    execute(&mut cargo(&["build", "-q", "-p", "proxy-ctl", "-p", "lab", "-p", "behaviour", "--bins"]))?;
    let status =
        command(arguments.kernel, &arguments.filter)?.status().context("starting the virtual machine")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The core scenarios of both paths on a kernel.
pub(crate) fn suite(kernel: Kernel) -> Result<Suite> {
    Ok(Suite { name: kernel.suite_name(), kind: Kind::Tests, command: command(kernel, "")? })
}

fn command(kernel: Kernel, filter: &str) -> Result<Command> {
    let vng = virtme()?;
    let image = image(kernel)?;
    let behaviour = built("behaviour");
    let inside = format!(
        "mount -t bpf bpf /sys/fs/bpf 2>/dev/null; ip link set lo up; uname -r; \
         LAB_PATIENCE=10 {} --core --path sockets --path packets --filter '{filter}'",
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
    if let Some(image) = image_in(&folder) {
        return Ok(image);
    }
    println!("downloading Debian's newest package of kernel {}", kernel.name());
    let apt = PrivateApt::create(&cache::folder("vm")?.join("apt"))?;
    let downloads = cache::folder("vm")?.join("packages");
    fs::create_dir_all(&downloads)?;
    for prefix in kernel.packages() {
        let package = apt.newest(prefix)?;
        execute(apt.command("apt-get").args(["-q", "download", &package]).current_dir(&downloads))?;
        let file = fs::read_dir(&downloads)?
            .filter_map(|found| Some(found.ok()?.path()))
            .find(|path| {
                path.file_name()
                    .is_some_and(|name| name.to_string_lossy().starts_with(&format!("{package}_")))
            })
            .ok_or_else(|| anyhow!("{package} was not downloaded"))?;
        execute(Command::new("dpkg").arg("-x").args([&file, &folder]))?;
    }
    image_in(&folder).ok_or_else(|| anyhow!("no kernel image in {}", folder.display()))
}

fn image_in(folder: &Path) -> Option<PathBuf> {
    let boot = fs::read_dir(folder.join("boot")).ok()?;
    boot.filter_map(|found| Some(found.ok()?.path()))
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-")))
}

/// apt with sources of our own, which leaves the machine's alone.
struct PrivateApt {
    configuration: PathBuf,
}

impl PrivateApt {
    fn create(folder: &Path) -> Result<Self> {
        if find("apt-get").is_none() {
            bail!("kernels come from Debian packages, and there is no apt-get here");
        }
        for part in ["state/lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(folder.join(part))?;
        }
        fs::write(folder.join("sources.list"), SOURCES)?;
        fs::write(folder.join("status"), "")?;
        let configuration = folder.join("apt.conf");
        let at = folder.display();
        fs::write(
            &configuration,
            format!(
                "Dir::Etc::SourceList \"{at}/sources.list\";\nDir::Etc::SourceParts \"/dev/null\";\n\
                 Dir::State \"{at}/state\";\nDir::State::status \"{at}/status\";\nDir::Cache \"{at}/cache\";\n\
                 APT::Sandbox::User \"root\";\nAPT::Architecture \"amd64\";\n"
            ),
        )?;
        let apt = Self { configuration };
        execute(apt.command("apt-get").args(["-q", "update"]))?;
        Ok(apt)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.arg("-c").arg(&self.configuration);
        command
    }

    /// The newest package `<prefix>…-amd64`, by the numbers in its name.
    fn newest(&self, prefix: &str) -> Result<String> {
        let names = output(self.command("apt-cache").args(["pkgnames", prefix]))?;
        names
            .lines()
            .filter(|name| is_plain(name.strip_prefix(prefix).unwrap_or_default()))
            .max_by_key(|name| numbers(name))
            .map(str::to_owned)
            .ok_or_else(|| {
                anyhow!("no package {prefix}…-amd64; the names change, see SOURCES in xtask/src/vm.rs")
            })
    }
}

/// The usual flavour: cloud and real-time kernels do not boot here, release candidates have no plain number.
fn is_plain(rest: &str) -> bool {
    rest.strip_suffix("-amd64").is_some_and(|version| {
        !["cloud", "rt", "dbg", "unsigned", "rc"].iter().any(|flavour| version.contains(flavour))
    })
}

fn numbers(name: &str) -> Vec<u64> {
    name.split(|letter: char| !letter.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::{is_plain, numbers};

    #[test]
    fn newer_is_by_number_and_flavours_are_left_out() {
        assert!(numbers("linux-image-5.10.0-9-amd64") < numbers("linux-image-5.10.0-32-amd64"));
        assert!(is_plain("32-amd64"));
        assert!(!is_plain("32-cloud-amd64"));
        assert!(!is_plain("32-amd64-dbg"));
    }
}
