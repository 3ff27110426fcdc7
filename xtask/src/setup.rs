//! Installs what is missing, by the distribution's packages where it has them, else by rustup and cargo.

use std::process::{Command, ExitCode};

use anyhow::{Result, bail};

use crate::command::{as_root, cargo, find, output, run as execute, workspace};

/// As proxy-ctl's build script asks for.
const NIGHTLY: &str = "nightly-2026-05-15";
const BPF_TARGET: &str = "bpfel-unknown-none";
const LLVM: &str = "22";

/// Programs that distributions package.
struct Tool {
    program: &'static str,
    why: &'static str,
    apt: &'static str,
    dnf: &'static str,
    pacman: &'static str,
    /// Without it a part of the tests is skipped, which then says so.
    optional: bool,
}

const TOOLS: &[Tool] = &[
    Tool {
        program: "ip",
        why: "network namespaces for the lab",
        apt: "iproute2",
        dnf: "iproute",
        pacman: "iproute2",
        optional: false,
    },
    Tool {
        program: "cc",
        why: "linking Rust programs",
        apt: "gcc libc6-dev",
        dnf: "gcc",
        pacman: "gcc",
        optional: false,
    },
    Tool {
        program: "bpftool",
        why: "looking at tables, and tests of how they read",
        apt: "bpftool",
        dnf: "bpftool",
        pacman: "bpf",
        optional: true,
    },
    Tool {
        program: "openssl",
        why: "certificates of the API server in tests",
        apt: "openssl",
        dnf: "openssl",
        pacman: "openssl",
        optional: true,
    },
    Tool {
        program: "etcd",
        why: "the API server in tests",
        apt: "etcd-server",
        dnf: "etcd",
        pacman: "etcd",
        optional: true,
    },
    Tool {
        program: "iptables",
        why: "the real kube-proxy as oracle",
        apt: "iptables",
        dnf: "iptables-nft",
        pacman: "iptables-nft",
        optional: true,
    },
    Tool {
        program: "nft",
        why: "the real kube-proxy as oracle",
        apt: "nftables",
        dnf: "nftables",
        pacman: "nftables",
        optional: true,
    },
    Tool {
        program: "conntrack",
        why: "the real kube-proxy as oracle",
        apt: "conntrack",
        dnf: "conntrack-tools",
        pacman: "conntrack-tools",
        optional: true,
    },
];

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Packages {
    Apt,
    Dnf,
    Pacman,
    None,
}

impl Packages {
    fn of_this_machine() -> Self {
        [("apt-get", Self::Apt), ("dnf", Self::Dnf), ("pacman", Self::Pacman)]
            .into_iter()
            .find(|(program, _)| find(program).is_some())
            .map_or(Self::None, |(_, packages)| packages)
    }

    fn names(self, tool: &Tool) -> Vec<&'static str> {
        let names = match self {
            Self::Apt => tool.apt,
            Self::Dnf => tool.dnf,
            Self::Pacman => tool.pacman,
            Self::None => "",
        };
        names.split_whitespace().collect()
    }

    fn refresh(self) -> Result<()> {
        match self {
            Self::Apt => execute(as_root("apt-get").args(["update", "-q"])),
            Self::Dnf | Self::Pacman | Self::None => Ok(()),
        }
    }

    fn install(self, names: &[&str]) -> Result<()> {
        let mut command = match self {
            Self::Apt => {
                let mut command = as_root("env");
                command.args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-q", "-y"]);
                command.arg("--no-install-recommends");
                command
            }
            Self::Dnf => {
                let mut command = as_root("dnf");
                command.args(["install", "-y"]);
                command
            }
            Self::Pacman => {
                let mut command = as_root("pacman");
                command.args(["-S", "--noconfirm", "--needed"]);
                command
            }
            Self::None => bail!("no package manager is known here; install {}", names.join(" ")),
        };
        execute(command.args(names))
    }

    /// Whether the distribution has the package at all.
    fn has(self, name: &str) -> bool {
        self == Self::Apt
            && output(Command::new("apt-cache").args(["show", "--no-all-versions", name]))
                .is_ok_and(|text| !text.is_empty())
    }
}

pub(crate) fn run_setup() -> Result<()> {
    let mut setup = Setup { packages: Packages::of_this_machine(), refreshed: false };
    for tool in TOOLS.iter().filter(|tool| find(tool.program).is_none()) {
        setup.install_tool(tool)?;
    }
    setup.bpf_compiler()?;
    setup.bpf_linker()?;
    setup.rust_component("rustfmt", "cargo-fmt")?;
    setup.rust_component("clippy", "cargo-clippy")?;
    setup.cargo_deny();
    Ok(())
}

pub(crate) fn run(check: bool) -> Result<ExitCode> {
    if !check {
        run_setup()?;
    }
    Ok(if print_state() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What virtual machines need besides.
pub(crate) fn install_for_vm() -> Result<()> {
    let packages = Packages::of_this_machine();
    let (names, program) =
        (["qemu-system-x86", "busybox-static", "kmod", "udev", "python3-venv"], "qemu-system-x86_64");
    if find(program).is_some() && find("busybox").is_some() {
        return Ok(());
    }
    println!("installing {} for virtual machines with other kernels", names.join(" "));
    packages.refresh()?;
    packages.install(&names)
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
    for tool in TOOLS {
        let found = find(tool.program).map(|path| path.display().to_string());
        line(tool.program, found, tool.why, tool.optional);
    }
    line("BPF compiler", bpf_compiler(), "compiling the kernel programs", false);
    for (program, why, optional) in [
        ("bpf-linker", "linking the kernel programs", false),
        ("cargo-fmt", "tests: format", true),
        ("cargo-clippy", "tests: lints", true),
        ("cargo-deny", "tests: licences and sources of dependencies", true),
    ] {
        line(program, find(program).map(|path| path.display().to_string()), why, optional);
    }
    complete
}

/// How the kernel programs can be compiled here.
fn bpf_compiler() -> Option<String> {
    packaged_compiler().or_else(|| {
        let sysroot = output(Command::new("rustup").args(["run", NIGHTLY, "rustc", "--print", "sysroot"]));
        let source = std::path::PathBuf::from(sysroot.ok()?.trim()).join("lib/rustlib/src/rust/library/core");
        source.is_dir().then(|| format!("rustup's {NIGHTLY}, rust-src"))
    })
}

fn packaged_compiler() -> Option<String> {
    ["/usr/bin/rustc", "/usr/local/bin/rustc"].into_iter().find_map(|rustc| {
        let sysroot = output(Command::new(rustc).args(["--print", "sysroot"]).env_remove("RUSTUP_TOOLCHAIN"));
        let target = std::path::PathBuf::from(sysroot.ok()?.trim()).join("lib/rustlib").join(BPF_TARGET);
        target.is_dir().then(|| rustc.to_owned())
    })
}

struct Setup {
    packages: Packages,
    refreshed: bool,
}

impl Setup {
    fn refresh(&mut self) -> Result<()> {
        if !self.refreshed {
            self.packages.refresh()?;
            self.refreshed = true;
        }
        Ok(())
    }

    fn install_tool(&mut self, tool: &Tool) -> Result<()> {
        let names = self.packages.names(tool);
        println!("installing {} for {}: {}", tool.program, tool.why, names.join(" "));
        let installed = self.refresh().and_then(|()| self.packages.install(&names));
        match installed {
            Err(error) if tool.optional => {
                println!("  not possible ({error:#}); tests that need it will be skipped");
                Ok(())
            }
            result => result,
        }
    }

    /// A packaged rustc with a core library for BPF if there is one, else rustup's nightly, which builds core.
    fn bpf_compiler(&mut self) -> Result<()> {
        if bpf_compiler().is_some() {
            return Ok(());
        }
        if self.packages == Packages::Apt {
            self.refresh()?;
        }
        if self.packages.has("libstd-rust-web-dev-bpf") {
            println!("installing a Rust compiler with a core library for BPF, for the kernel programs");
            return self.packages.install(&["rustc-web", "libstd-rust-web-dev-bpf"]);
        }
        println!("installing Rust {NIGHTLY} with rust-src by rustup, for the kernel programs");
        execute(Command::new("rustup").args(["toolchain", "install", NIGHTLY, "--profile", "minimal"]))?;
        execute(Command::new("rustup").args(["component", "add", "rust-src", "--toolchain", NIGHTLY]))
    }

    fn bpf_linker(&mut self) -> Result<()> {
        if find("bpf-linker").is_some() {
            return Ok(());
        }
        if packaged_compiler().is_some() {
            let llvm = format!("llvm-{LLVM}");
            let (development, polly) = (format!("{llvm}-dev"), format!("libpolly-{LLVM}-dev"));
            println!(
                "installing {llvm} and building bpf-linker with it (about a minute), for the kernel programs"
            );
            self.refresh()?;
            let (clang, lld) = (format!("clang-{LLVM}"), format!("lld-{LLVM}"));
            self.packages.install(&[&development, &polly, &clang, &lld])?;
            return execute(
                cargo(&["install", "--locked", "bpf-linker", "--version", "0.13.0"])
                    .args(["--no-default-features", "--features", &llvm])
                    .env("LLVM_PREFIX", format!("/usr/lib/{llvm}")),
            );
        }
        println!("building bpf-linker with the LLVM of rustup's nightly, for the kernel programs");
        execute(
            cargo(&["install", "--locked", "bpf-linker", "--version", "0.13.0"])
                .env("RUSTUP_TOOLCHAIN", NIGHTLY),
        )
    }

    fn rust_component(&mut self, component: &str, program: &str) -> Result<()> {
        if find(program).is_some() || find("rustup").is_none() {
            return Ok(());
        }
        println!("installing {component} by rustup, for the tests");
        let added =
            execute(Command::new("rustup").args(["component", "add", component]).current_dir(workspace()));
        if let Err(error) = added {
            println!("  not possible ({error:#}); its check will be skipped");
        }
        Ok(())
    }

    fn cargo_deny(&mut self) {
        if find("cargo-deny").is_some() {
            return;
        }
        println!("building cargo-deny (about three minutes), for licences and sources of dependencies");
        let built = execute(&mut cargo(&["install", "--locked", "cargo-deny", "--version", "0.18.9"]));
        if let Err(error) = built {
            println!("  not possible ({error:#}); its checks will be skipped");
        }
    }
}
