//! Installs what is missing: by apt what Debian packages, the rest by rustup and cargo.

use std::{
    fmt,
    io::{self, IsTerminal as _},
    path::PathBuf,
    process::{Command, ExitCode},
    sync::Once,
};

use anyhow::{Result, bail};

use crate::{
    command::{as_root, cargo, find, output, run as execute, workspace},
    test_programs::clippy,
    toolchain::{NIGHTLY, nightly_has_source, prebuilt_compiler},
};

/// Debian's core library for BPF, and the compiler that it is for.
const PACKAGED_CORE: &str = "libstd-rust-web-dev-bpf";
const PACKAGED_COMPILER: &str = "rustc-web libstd-rust-web-dev-bpf";
/// The last that links with the LLVM of rustup's compilers; later ones need LLVM's libraries on the machine.
const LINKER_WITH_RUSTUP: &str = "0.10.3";
const LINKER_WITH_PACKAGES: &str = "0.13.0";
const CARGO_DENY: &str = "0.18.9";
const CARGO_FUZZ: &str = "0.13.2";

/// A program that Debian packages.
struct Tool {
    program: &'static str,
    packages: &'static str,
    why: &'static str,
    /// Without it a part of the tests is skipped, which then says so.
    optional: bool,
}

const fn needed(program: &'static str, packages: &'static str, why: &'static str) -> Tool {
    Tool { program, packages, why, optional: false }
}

const fn optional(program: &'static str, packages: &'static str, why: &'static str) -> Tool {
    Tool { optional: true, ..needed(program, packages, why) }
}

/// What building and testing needs.
const TOOLS: &[Tool] = &[
    needed("ip", "iproute2", "network namespaces for the lab"),
    needed("cc", "gcc libc6-dev", "linking Rust programs"),
    needed("make", "make", "building the memory allocator"),
    needed("ethtool", "ethtool", "network cards of the lab that run XDP programs"),
    needed("wg", "wireguard-tools", "a network between the nodes of the lab"),
    optional("setpriv", "util-linux", "the API server in tests ends with them"),
    optional("bpftool", "bpftool", "looking at tables, and tests of how they read"),
    optional("openssl", "openssl", "certificates of the API server in tests"),
    optional("etcd", "etcd-server", "the API server in tests"),
    optional("iptables", "iptables", "the real kube-proxy as oracle"),
    optional("nft", "nftables", "the real kube-proxy as oracle"),
    optional("conntrack", "conntrack", "the real kube-proxy as oracle"),
    optional("ipset", "ipset", "comparing what is left on a node"),
    optional("ipvsadm", "ipvsadm", "comparing what is left on a node"),
];

/// Everything that building and testing needs.
pub(crate) fn run_setup() -> Result<()> {
    install(TOOLS)?;
    install_bpf_compiler()?;
    install_bpf_linker()?;
    install_checks()
}

pub(crate) fn run(check: bool) -> Result<ExitCode> {
    if !check {
        run_setup()?;
    }
    Ok(if print_state() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What virtual machines with other kernels need besides.
pub(crate) fn install_for_vm() -> Result<()> {
    const WHY: &str = "virtual machines with other kernels";
    install(&[
        needed("qemu-system-x86_64", "qemu-system-x86", WHY),
        needed("busybox", "busybox-static", WHY),
        needed("depmod", "kmod", WHY),
        needed("udevadm", "udev", WHY),
        needed("ipset", "ipset", "kube-proxy's mode ipvs, in a virtual machine"),
        needed("ipvsadm", "ipvsadm", "comparing virtual servers, in a virtual machine"),
    ])
}

/// What emulating another architecture needs besides.
pub(crate) fn install_for_emulation() -> Result<()> {
    install(&[needed("qemu-system-aarch64", "qemu-system-arm", "arm64, emulated")])
}

/// What running an image needs besides.
pub(crate) fn install_for_containers() -> Result<()> {
    install(&[needed("runc", "runc", "running the image with what the manifests allow it")])
}

/// What fuzzing needs besides.
pub(crate) fn install_for_fuzzing() -> Result<()> {
    install(&[needed("c++", "g++", "compiling libFuzzer")])?;
    if find("cargo-fuzz").is_some() {
        return Ok(());
    }
    let what = "building cargo-fuzz (about a minute), for fuzzing";
    step(what, None, || execute(&mut unoptimised("cargo-fuzz", CARGO_FUZZ)))
}

/// What installing a Python package needs.
pub(crate) fn install_python() -> Result<()> {
    // Debian has a part of Python in a package of its own.
    if output(Command::new("python3").args(["-c", "import venv, ensurepip"])).is_ok() {
        return Ok(());
    }
    let what = "installing python3 for programs that come as Python packages";
    step(what, None, || install_packages("python3 python3-venv"))
}

fn install(tools: &[Tool]) -> Result<()> {
    for Tool { program, packages, why, optional } in tools.iter().filter(|tool| find(tool.program).is_none())
    {
        let without = optional.then_some("tests that need it will be skipped");
        step(&format!("installing {program} for {why}"), without, || install_packages(packages))?;
    }
    Ok(())
}

/// `without`: what follows if it cannot be done; `None`: that is an error.
fn step(what: &str, without: Option<&str>, work: impl FnOnce() -> Result<()>) -> Result<()> {
    println!("{what}");
    match (work(), without) {
        (Err(error), Some(without)) => println!("  not possible ({error:#}); {without}"),
        (done, _) => done?,
    }
    Ok(())
}

fn install_packages(names: &str) -> Result<()> {
    if find("apt-get").is_none() {
        bail!("there is no apt-get here, so it is yours to install; Debian's packages are {names}");
    }
    get_lists();
    // sudo passes variables on only if its configuration allows it.
    let install =
        ["DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-q", "-y", "--no-install-recommends"];
    execute(as_root("env").args(install).args(names.split(' ')))
}

/// Debian's lists of packages, once.
fn get_lists() {
    static LISTS: Once = Once::new();
    LISTS.call_once(|| {
        // Old lists may do; if they do not, installing says so.
        if let Err(error) = execute(as_root("apt-get").args(["update", "-q"])) {
            println!("  the lists of packages may be old ({error:#})");
        }
    });
}

/// A packaged compiler with a core library for BPF if there is one, else rustup's nightly, which builds core.
fn install_bpf_compiler() -> Result<()> {
    if bpf_compiler().is_some() {
        return Ok(());
    }
    if find("apt-get").is_some() {
        get_lists();
        let mut ask = Command::new("apt-cache");
        if output(ask.args(["show", "--no-all-versions", PACKAGED_CORE])).is_ok_and(|text| !text.is_empty()) {
            let what = "installing a Rust compiler with a core library for BPF, for the kernel programs";
            return step(what, None, || install_packages(PACKAGED_COMPILER));
        }
    }
    let what = format!("installing Rust {NIGHTLY} with rust-src by rustup, for the kernel programs");
    let toolchain = ["toolchain", "install", NIGHTLY, "--profile", "minimal", "--component", "rust-src"];
    step(&what, None, || execute(Command::new("rustup").args(toolchain).current_dir(workspace())))
}

/// Its LLVM must be at least the compiler's.
fn install_bpf_linker() -> Result<()> {
    if find("bpf-linker").is_some() {
        return Ok(());
    }
    if let Some(BpfCompiler::Packaged { llvm, .. }) = bpf_compiler() {
        let what = format!("building bpf-linker with LLVM {llvm} (about a minute), for the kernel programs");
        return step(&what, None, || {
            install_packages(&format!("llvm-{llvm}-dev libpolly-{llvm}-dev clang-{llvm} lld-{llvm}"))?;
            let mut linker = cargo_install("bpf-linker", LINKER_WITH_PACKAGES);
            linker.args(["--no-default-features", "--features", &format!("llvm-{llvm}")]);
            execute(linker.env("LLVM_PREFIX", format!("/usr/lib/llvm-{llvm}")))
        });
    }
    let install = ["cargo", "install", "--locked", "bpf-linker", "--version", LINKER_WITH_RUSTUP];
    step("building bpf-linker with the LLVM of rustup's nightly, for the kernel programs", None, || {
        execute(quiet(Command::new("rustup").args(["run", NIGHTLY]).args(install).current_dir(workspace())))
    })
}

/// What looks at the sources.
fn install_checks() -> Result<()> {
    let without = Some("its check will be skipped");
    for (component, is_there) in [("rustfmt", find("cargo-fmt").is_some()), ("clippy", clippy().is_some())] {
        if !is_there && find("rustup").is_some() {
            step(&format!("installing {component} by rustup, for the tests"), without, || {
                execute(Command::new("rustup").args(["component", "add", component]).current_dir(workspace()))
            })?;
        }
    }
    if find("cargo-deny").is_none() {
        let what = "building cargo-deny (about two minutes), for licences and sources of dependencies";
        step(what, without, || execute(&mut unoptimised("cargo-deny", CARGO_DENY)))?;
    }
    Ok(())
}

fn cargo_install(program: &str, version: &str) -> Command {
    let mut install = cargo(&["install", "--locked", program, "--version", version]);
    quiet(&mut install);
    install
}

/// Optimised it is built four times as long, for what takes it a second.
fn unoptimised(program: &str, version: &str) -> Command {
    let mut install = cargo_install(program, version);
    for (name, value) in [("OPT_LEVEL", "0"), ("LTO", "off"), ("CODEGEN_UNITS", "16"), ("DEBUG", "0")] {
        install.env(format!("CARGO_PROFILE_RELEASE_{name}"), value);
    }
    install
}

/// Where nobody watches the hundreds of crates that cargo names.
fn quiet(command: &mut Command) -> &mut Command {
    if io::stderr().is_terminal() { command } else { command.env("CARGO_TERM_QUIET", "true") }
}

/// How the kernel programs are compiled.
enum BpfCompiler {
    /// A rustc outside rustup with a core library for BPF; the major version of its LLVM.
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

/// How the kernel programs can be compiled here, in the order of proxy-ctl's build script.
fn bpf_compiler() -> Option<BpfCompiler> {
    packaged_compiler().or_else(|| nightly_has_source().then_some(BpfCompiler::Nightly))
}

fn packaged_compiler() -> Option<BpfCompiler> {
    let rustc = prebuilt_compiler()?;
    let version = output(Command::new(&rustc).arg("-vV").env_remove("RUSTUP_TOOLCHAIN")).ok()?;
    Some(BpfCompiler::Packaged { llvm: llvm_of(&version)?, rustc })
}

/// The major version in the line `LLVM version: 22.1.0` of `rustc -vV`.
fn llvm_of(version: &str) -> Option<u32> {
    let line = version.lines().find_map(|line| line.strip_prefix("LLVM version:"))?;
    line.trim().split('.').next()?.parse().ok()
}

/// Prints what is there; true if nothing is missing that is needed.
fn print_state() -> bool {
    let mut complete = true;
    let mut line = |name: &str, found: Option<String>, why: &str, optional: bool| {
        let state = match (&found, optional) {
            (Some(at), _) => at.clone(),
            (None, true) => "missing (optional)".to_owned(),
            (None, false) => "MISSING".to_owned(),
        };
        complete &= found.is_some() || optional;
        println!("  {name:<14} {state:<44} {why}");
    };
    let at = |program: &str| find(program).map(|path| path.display().to_string());
    for tool in TOOLS {
        line(tool.program, at(tool.program), tool.why, tool.optional);
    }
    let compiler = bpf_compiler().map(|compiler| compiler.to_string());
    line("BPF compiler", compiler, "compiling the kernel programs", false);
    for (program, why, optional) in [
        ("bpf-linker", "linking the kernel programs", false),
        ("cargo-fmt", "tests: format", true),
        ("clippy-driver", "tests: lints", true),
        ("cargo-deny", "tests: licences and sources of dependencies", true),
    ] {
        line(program, at(program), why, optional);
    }
    complete
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_installed_is_an_error_only_where_it_is_needed() {
        assert!(step("needed", None, || bail!("no network")).is_err());
        assert!(step("optional", Some("its check will be skipped"), || bail!("no network")).is_ok());
    }

    #[test]
    fn the_llvm_of_a_compiler_is_the_major_version_that_it_tells() {
        assert_eq!(llvm_of("rustc 1.96.0\nhost: x86_64\nLLVM version: 22.1.4\n"), Some(22));
        assert_eq!(llvm_of("rustc 1.96.0\n"), None);
    }
}
