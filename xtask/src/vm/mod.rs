//! Runs scenarios on other kernels, which are Debian's. They are booted without KVM, with this
//! machine's files.
//!
//! Kernel packages are unpacked into the cache folder, and none of them is installed. arm64 is
//! emulated.

mod emulated;

use std::{
    env, fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use clap::{Args, ValueEnum};

use crate::{
    cache,
    command::{as_root, find, output, target, workspace},
    cross::Architecture,
    packages::PrivateApt,
    setup::{self, Purpose},
    test::{
        programs::{Choice, TestPrograms},
        suites::{Kind, Suite},
    },
};

#[derive(Args)]
pub(crate) struct Arguments {
    /// The kernel
    #[arg(long, value_enum, default_value = "6.12")]
    kernel: Kernel,
    /// The machine; arm64 is emulated, with cross-built programs
    #[arg(long, value_enum, default_value = "amd64")]
    arch: Architecture,
    /// The mode whose scenarios are run
    #[arg(long, value_enum, default_value = "ebpf")]
    mode: TestedMode,
    /// Run the core scenarios with one protocol of each family, and in mode ipvs nothing else
    #[arg(long)]
    lean: bool,
    /// Run only scenarios whose name contains this
    #[arg(long, default_value = "")]
    filter: String,
    /// Run only the machine for this program: behaviour, differential or switching
    #[arg(long)]
    program: Option<String>,
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

/// Whose scenarios a machine runs.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum TestedMode {
    /// The core scenarios, on both paths
    Ebpf,
    /// All scenarios, also with what most kernels lack: tests of IPVS, ipset and bonds, SCTP in the
    /// other modes, and packets to overlays and VLANs
    Ipvs,
}

/// A run of a program of the package `behaviour`.
struct Run {
    program: &'static str,
    flags: &'static str,
    /// The text that names of scenarios contain, unless a filter is asked for.
    names: &'static str,
}

const fn behaviour(flags: &'static str) -> Run {
    Run { program: "behaviour", flags, names: "" }
}

/// The runs among which the scenarios of mode ipvs are divided. Each scenario is in one of them,
/// because its name says which protocol and IP family it is for.
const IPVS_PARTS: [Run; 3] = [
    behaviour("--proxy ipvs --skip 'UDP IPv' --skip 'TCP IPv6'"),
    behaviour("--proxy ipvs --skip 'UDP IPv' --skip 'TCP IPv4'"),
    behaviour("--proxy ipvs --skip 'TCP IPv'"),
];
/// The scenarios of SCTP, which mode ebpf delegates to another mode.
const SCTP: Run = Run {
    program: "behaviour",
    flags: "--core --proxy nftables --proxy iptables --proxy ebpf --path sockets",
    names: "SCTP",
};
const DIFFERENTIAL: Run =
    Run { program: "differential", flags: "--proxy ipvs --proxy kube-proxy-ipvs --lean", names: "" };
/// The switches from and to mode ipvs in a process that goes on.
const SWITCHING_LIVE: Run = switching("--connections 200 --skip process", "ipvs");
const SWITCHING_ANEW: Run = switching("--connections 200 --skip file", "ipvs");
/// The switches from and to kube-proxy's mode ipvs.
const SWITCHING_KUBE_PROXY: Run = switching(
    "--connections 200 --proxy ebpf --proxy nftables --proxy iptables --proxy ipvs --proxy userspace \
     --proxy kube-proxy-ipvs",
    "kube-proxy/ipvs",
);

/// The scenarios with devices that many kernels lack. Before Linux 6.3 a kernel does not report
/// which frames a second network card takes.
const NETWORKS: Run = Run {
    program: "behaviour",
    flags: "--lean --proxy ebpf --path packets --skip 'second uplink'",
    names: "networks: packets between",
};

/// The scenarios of mode ipvs that every run has time for, because a scenario takes ten times as
/// long in emulation. The same scenarios over UDP and IPv6, and those that start the proxy several
/// times, are part of `--all-kernels`.
const LEAN_IPVS: Run = behaviour(
    "--core --lean --proxy ipvs --skip 'UDP IPv6' --skip 'while the controller is dead' \
     --skip 'while nobody served' --skip 'before anybody served'",
);
/// The scenarios of networks that every run has time for. Kernels that run these tests have vxlan
/// themselves.
const LEAN_NETWORKS: Run = Run {
    flags: "--lean --proxy ebpf --path packets --skip 'second uplink' --skip 'UDP IPv6' --skip vxlan",
    ..NETWORKS
};

const fn switching(flags: &'static str, names: &'static str) -> Run {
    Run { program: "switching", flags, names }
}

impl TestedMode {
    /// Returns what is run, by one machine after the other. No machine has time for all of it.
    fn machines(self, extent: Extent) -> Vec<Vec<Run>> {
        match (self, extent) {
            (Self::Ebpf, Extent::Core) => vec![vec![behaviour("--core --path sockets --path packets")]],
            (Self::Ebpf, Extent::Lean) => {
                vec![vec![behaviour("--core --lean --path sockets --path packets")]]
            }
            (Self::Ipvs, Extent::Core) => {
                let [first, second, third] = IPVS_PARTS;
                let alone =
                    [third, NETWORKS, DIFFERENTIAL, SWITCHING_LIVE, SWITCHING_ANEW, SWITCHING_KUBE_PROXY];
                [vec![first], vec![second, SCTP]].into_iter().chain(alone.map(|run| vec![run])).collect()
            }
            (Self::Ipvs, Extent::Lean) => vec![vec![LEAN_IPVS, LEAN_NETWORKS]],
        }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Extent {
    /// The core scenarios. Mode ipvs has all scenarios, the comparison with kube-proxy, and
    /// switches from and to it.
    Core,
    /// The core scenarios, with one protocol of each IP family. In mode ipvs only its own
    /// scenarios, over TCP and IPv4.
    Lean,
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

/// The machine that has what most kernels lack.
pub(crate) const IPVS: Machine = amd64(Kernel::V6_1, TestedMode::Ipvs);

/// The other machines of `test --all-kernels`.
pub(crate) const OTHERS: [Machine; 5] = [
    amd64(Kernel::V5_10, TestedMode::Ebpf),
    amd64(Kernel::V6_1, TestedMode::Ebpf),
    amd64(Kernel::V6_12, TestedMode::Ebpf),
    amd64(Kernel::Newest, TestedMode::Ebpf),
    Machine { kernel: Kernel::V6_12, arch: Architecture::Arm64, mode: TestedMode::Ebpf },
];

/// The limit in seconds. A machine that hangs says nothing, and one that is emulated is slow.
const LONGEST: u64 = 3600;
/// The factor by which emulation is slower.
const PATIENCE: u32 = 10;
/// The number of the guest's CPUs, each of which is a thread here.
const CPUS: u32 = 2;
/// The kernel's arguments for its clock. Without them the kernel distrusts the emulated TSC and
/// takes the HPET, each read of which is emulated.
const CLOCK: &str = "--append clocksource=tsc --append tsc=reliable";
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

    /// Returns how the names of the kernel's packages begin. From 7.2 on, `linux-image-…` only
    /// depends on two others.
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
    setup::install(&[Purpose::Building, Purpose::Lab, Purpose::Tests], false)?;
    let machine = Machine { kernel: arguments.kernel, arch: arguments.arch, mode: arguments.mode };
    machine.provide()?;
    let extent = if arguments.lean { Extent::Lean } else { Extent::Core };
    let (programs, _lints) = TestPrograms::build()?;
    let mut succeeded = true;
    let commands = machine.commands(extent, &programs, &arguments.filter, arguments.program.as_deref())?;
    ensure!(!commands.is_empty(), "--program: no machine of this mode and extent runs it");
    for mut command in commands {
        succeeded &= command.status().context("starting the virtual machine")?.success();
    }
    Ok(if succeeded { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns the commit that is checked out. `None` if there is none, or if files differ from it.
fn clean_commit() -> Option<String> {
    let git = |arguments: &[&str]| output(Command::new("git").args(arguments).current_dir(workspace())).ok();
    git(&["status", "--porcelain"])?.is_empty().then_some(())?;
    Some(git(&["rev-parse", "HEAD"])?.trim().to_owned())
}

impl Machine {
    /// Returns the file that notes the commit with which all of this machine's scenarios have
    /// passed.
    fn note(self) -> PathBuf {
        target().join("vm/passed").join(self.name())
    }

    /// Returns true if all of its scenarios have passed with the commit that is checked out.
    pub(crate) fn has_passed(self) -> Result<bool> {
        let note = self.note();
        let noted = match fs::read_to_string(&note) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            read => read.with_context(|| format!("reading {}", note.display()))?,
        };
        Ok(clean_commit().is_some_and(|commit| commit == noted))
    }

    pub(crate) fn note_that_it_has_passed(self) -> Result<()> {
        let (note, Some(commit)) = (self.note(), clean_commit()) else { return Ok(()) };
        let write = || {
            fs::create_dir_all(note.parent().unwrap_or(Path::new("/")))?;
            fs::write(&note, commit)
        };
        write().with_context(|| format!("writing {}", note.display()))
    }

    pub(crate) const fn name(self) -> &'static str {
        match (self.arch, self.mode, self.kernel) {
            (Architecture::Amd64, TestedMode::Ebpf, Kernel::V5_10) => "vm 5.10",
            (Architecture::Amd64, TestedMode::Ebpf, Kernel::V6_1) => "vm 6.1",
            (Architecture::Amd64, TestedMode::Ebpf, Kernel::V6_12) => "vm 6.12",
            (Architecture::Amd64, TestedMode::Ebpf, Kernel::Newest) => "vm newest",
            (Architecture::Amd64, TestedMode::Ipvs, _) => "vm ipvs",
            (Architecture::Arm64, ..) => "vm arm64",
        }
    }

    /// Downloads what is missing of the machine. An error usually comes from the network.
    pub(crate) fn provide(self) -> Result<()> {
        match self.arch {
            // The machine runs the programs of the machine around it.
            Architecture::Amd64 if env::consts::ARCH != "x86_64" => {
                bail!("machines of amd64 need one of amd64 around them, this is {}", env::consts::ARCH)
            }
            Architecture::Amd64 => {
                virtme()?;
                image(self.kernel).map(drop)
            }
            Architecture::Arm64 => emulated::provide(self.kernel),
        }
    }

    /// Returns the suite of its scenarios whose names contain `filter`.
    pub(crate) fn suite(self, extent: Extent, programs: &TestPrograms, filter: &str) -> Result<Suite> {
        let commands = self.commands(extent, programs, filter, None)?;
        // Each of the commands ends itself before this limit.
        Ok(Suite { name: self.name(), kind: Kind::Tests, commands, limit: Duration::from_secs(LONGEST + 60) })
    }

    /// Returns commands, each of which runs the scenarios of one machine whose names contain
    /// `filter`, and downloads what is missing. If `program` is given, only machines that run it
    /// are returned.
    fn commands(
        self,
        extent: Extent,
        programs: &TestPrograms,
        filter: &str,
        program: Option<&str>,
    ) -> Result<Vec<Command>> {
        match self.arch {
            Architecture::Amd64 => {
                let machines = self.mode.machines(extent).into_iter().enumerate();
                let of_machine = |(number, runs): (usize, Vec<Run>)| {
                    command(self.kernel, &inside(programs, (self.mode, extent), number == 0, &runs, filter)?)
                };
                let is_asked_for = |(_, runs): &(usize, Vec<Run>)| {
                    program.is_none_or(|program| runs.iter().any(|run| run.program == program))
                };
                machines.filter(is_asked_for).map(of_machine).collect()
            }
            Architecture::Arm64 if self.mode == TestedMode::Ipvs => {
                bail!("mode ipvs is tested on amd64 only")
            }
            Architecture::Arm64 if extent == Extent::Lean || program.is_some() => {
                bail!("--lean and --program are for amd64")
            }
            Architecture::Arm64 => Ok(vec![emulated::command(self.kernel, filter)?]),
        }
    }
}

/// Returns the command of a machine that does `inside` in its shell.
fn command(kernel: Kernel, inside: &str) -> Result<Command> {
    let vng = virtme()?;
    let image = image(kernel)?;
    // The guest's own redirections lose what was written before, so the pipe is on this side.
    let script = format!(
        "set -o pipefail; PATH=\"{}:$PATH\" timeout {LONGEST} {} --run {} --user root --cpus {CPUS} --memory 2G \
         --disable-kvm {CLOCK} -- \"$0\" </dev/null 2>&1 | {{ ended=; while IFS= read -r line; do \
         printf '%s\\n' \"$line\"; if [[ ${{line%$'\\r'}} == '{ENDED}' ]]; then ended=1; fi; done; \
         [[ $ended ]] || {{ echo '{STOPPED}'; exit 1; }}; }}",
        vng.parent().unwrap_or(Path::new("/usr/bin")).display(),
        vng.display(),
        image.display()
    );
    let mut command = as_root("bash");
    command.args(["-c", &script, inside]).stdin(Stdio::null());
    Ok(command)
}

/// The guest's last line, whatever has failed in it.
const ENDED: &str = "guest: ran to its end";
const STOPPED: &str = "the machine stopped while its programs ran: its kernel or the emulator has crashed, or its time was over; \
                       what it did not come to is neither right nor wrong, so run it again";

/// Commands that switch off what only costs time in the guest. udev looks at each device of the
/// lab, and a grace period waits for all CPUs.
const CALM: &str = "udevadm control --exit; echo 1 >/sys/kernel/rcu_expedited";

/// The test that loads all programs, from Linux 5.18 on. Verifiers before 6.3 refuse what later
/// ones accept. These are reads of stack that nobody has written, and frames that are within 512
/// bytes only without being rounded up.
const PROGRAMS_LOAD: &str = "what the programs take of stack and verifier";

/// The test that needs a kernel with bonds.
const BONDS: &str = "the_kernel_runs_the_program_of_a_bond_on_its_ports";

/// The tests that need ifb devices, and the CNI plugin of this machine.
const BANDWIDTH: &str = "bandwidth::";

/// Returns the commands of the guest's shell. It runs all of them, whatever fails.
fn inside(
    programs: &TestPrograms,
    (mode, extent): (TestedMode, Extent),
    is_first: bool,
    runs: &[Run],
    filter: &str,
) -> Result<String> {
    let mut commands = Vec::new();
    if mode == TestedMode::Ipvs {
        commands.push("modprobe -a ip_vs ip_set dummy bonding".to_owned());
    }
    if mode == TestedMode::Ipvs && is_first {
        let unit_tests = programs.executable(Choice::Library("proxy_ctl"))?.display();
        commands.push(format!("{unit_tests} --ignored --show-output ipvs:: ipset:: link:: answers::"));
        let dataplane = programs.executable(Choice::Test("ebpf_dataplane"))?.display();
        commands.push(format!("{dataplane} --show-output {BONDS}"));
    }
    if is_first && (extent == Extent::Core || mode == TestedMode::Ebpf) {
        let packets = programs.executable(Choice::Test("packets"))?.display();
        commands.push(format!("{packets} --show-output '{PROGRAMS_LOAD}'"));
    }
    if is_first && mode == TestedMode::Ebpf {
        let dataplane = programs.executable(Choice::Test("ebpf_dataplane"))?.display();
        commands.push(format!("{dataplane} --show-output {BANDWIDTH}"));
    }
    for Run { program, flags, names } in runs {
        let program = programs.executable(Choice::Bin(program))?.display();
        let filter = if filter.is_empty() { names } else { filter };
        commands.push(format!("LAB_PATIENCE={PATIENCE} {program} {flags} '{filter}'"));
    }
    let commands: String = commands.iter().map(|command| format!("{command} || failed=1; ")).collect();
    // Without br_netfilter, netfilter does not see answers between pods of one bridge. kubeadm asks
    // nodes for it.
    let prepare =
        "mount -t bpf bpf /sys/fs/bpf 2>/dev/null; ip link set lo up; modprobe br_netfilter; uname -r";
    Ok(format!("{prepare}; {CALM}; failed=0; {commands}echo '{ENDED}'; exit $failed"))
}

/// Returns virtme-ng: the one on PATH, or one that is installed into a Python environment of its
/// own.
fn virtme() -> Result<PathBuf> {
    setup::install(&[Purpose::Machines], false)?;
    if let Some(found) = find("vng") {
        return Ok(found);
    }
    let environment = cache::python_environment(VIRTME, "booting kernels with this machine's files")?;
    Ok(environment.join("bin/vng"))
}

/// Returns the kernel's image, unpacked in the cache. Its modules are beside it.
fn image(kernel: Kernel) -> Result<PathBuf> {
    let folder = cache::folder("vm")?.join(kernel.name());
    cache::fill_once(&folder, || download(kernel, "amd64", &folder))?;
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

/// Puts the files where virtme-ng looks for them. Newer packages have the image among the modules,
/// and nothing in `boot` and `lib`.
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

#[cfg(test)]
mod tests {
    use super::IPVS_PARTS;

    #[test]
    fn each_scenario_of_mode_ipvs_is_in_one_part() {
        for variant in ["TCP IPv4", "TCP IPv6", "UDP IPv4", "UDP IPv6"] {
            let skips = |flags: &str| {
                let mut words = flags.split("--skip '").skip(1).filter_map(|rest| rest.split('\'').next());
                words.any(|words| variant.contains(words))
            };
            let parts = IPVS_PARTS.iter().filter(|part| !skips(part.flags)).count();
            assert_eq!(parts, 1, "{variant}");
        }
        assert!(IPVS_PARTS.iter().all(|part| part.names.is_empty() && !part.flags.contains("--core")));
    }
}
