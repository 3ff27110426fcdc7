//! Installs what is missing, by the distribution's packages where it has them, else by rustup and cargo.
//!
//! [`plan`] decides, from facts alone; this file looks and runs.

mod plan;
mod tools;

use std::{
    collections::BTreeSet,
    io::{self, IsTerminal as _},
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::{Result, anyhow};

use self::{
    plan::{BpfCompiler, BpfOffer, Facts, Invocation, Packages, Step},
    tools::{CONTAINERS, EMULATION, FUZZING, PYTHON, TOOLS, Tool, VIRTUAL_MACHINES},
};
use crate::command::{as_root, cargo, find, output, run as execute, workspace};

/// As proxy-ctl's build script asks for.
const NIGHTLY: &str = "nightly-2026-05-15";
const BPF_TARGET: &str = "bpfel-unknown-none";

/// Everything that building and testing needs.
pub(crate) fn run_setup() -> Result<()> {
    let facts = facts();
    let mut steps = plan::tools(&facts, TOOLS);
    if facts.compiler.is_none() {
        // Whether a package is there is known after the lists of packages are.
        take(plan::refresh(&facts))?;
        let offer = BpfOffer { packaged: has_packaged_compiler(facts.packages) };
        steps.extend(plan::bpf_compiler(&facts, offer));
    } else if plan::uses_packages(&steps) {
        take(plan::refresh(&facts))?;
    }
    take(steps)?;
    // Which LLVM the linker must have is known by the compiler, and cargo by then has what it needs.
    let facts = self::facts();
    let linker = plan::bpf_linker(&facts);
    if plan::uses_packages(&linker) {
        take(plan::refresh(&facts))?;
    }
    take(linker.into_iter().chain(plan::checks(&facts)))
}

pub(crate) fn run(check: bool) -> Result<ExitCode> {
    if !check {
        run_setup()?;
    }
    Ok(if print_state() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What virtual machines need besides.
pub(crate) fn install_for_vm() -> Result<()> {
    install(VIRTUAL_MACHINES)
}

/// What emulating another architecture needs besides.
pub(crate) fn install_for_emulation() -> Result<()> {
    install(EMULATION)
}

/// What running an image needs besides.
pub(crate) fn install_for_containers() -> Result<()> {
    install(CONTAINERS)
}

/// What fuzzing needs besides.
pub(crate) fn install_for_fuzzing() -> Result<()> {
    install(FUZZING)?;
    take(plan::fuzzer(&facts()))
}

/// What installing a Python package needs.
pub(crate) fn install_python() -> Result<()> {
    install(PYTHON)
}

fn install(tools: &[Tool]) -> Result<()> {
    let facts = facts();
    let steps = plan::tools(&facts, tools);
    if plan::uses_packages(&steps) {
        take(plan::refresh(&facts))?;
    }
    take(steps)
}

fn take(steps: impl IntoIterator<Item = Step>) -> Result<()> {
    for step in steps {
        println!("{}", step.what);
        let mut done = step.commands.iter().try_for_each(|invocation| execute(&mut command(invocation)));
        if step.commands.is_empty() {
            done = Err(anyhow!("not known how to install it here"));
        }
        match (done, step.without) {
            (Err(error), Some(without)) => println!("  not possible ({error:#}); {without}"),
            (done, _) => done?,
        }
    }
    Ok(())
}

fn command(invocation: &Invocation) -> Command {
    let mut command = match invocation {
        Invocation { program: "cargo", .. } => cargo(&[]),
        Invocation { as_root: true, program, .. } => as_root(program),
        Invocation { program, .. } => Command::new(program),
    };
    command.args(&invocation.arguments).current_dir(workspace());
    command.envs(invocation.environment.iter().map(|(name, value)| (name, value)));
    if !io::stderr().is_terminal() {
        // Nobody watches the hundreds of crates that cargo names.
        command.env("CARGO_TERM_QUIET", "true");
    }
    command
}

fn facts() -> Facts {
    let programs =
        TOOLS.iter().chain(VIRTUAL_MACHINES).chain(EMULATION).chain(CONTAINERS).chain(FUZZING).chain(PYTHON);
    let programs = programs.map(|tool| tool.program).chain(plan::PROGRAMS);
    let mut present: BTreeSet<_> = programs.filter(|program| find(program).is_some()).collect();
    // Debian has a part of Python in a package of its own.
    if output(Command::new("python3").args(["-c", "import venv, ensurepip"])).is_err() {
        present.remove("python3");
    }
    Facts {
        packages: packages(),
        pacman_knows_packages: Path::new("/var/lib/pacman/sync/core.db").exists(),
        present,
        compiler: bpf_compiler(),
    }
}

fn packages() -> Packages {
    [("apt-get", Packages::Apt), ("dnf", Packages::Dnf), ("pacman", Packages::Pacman)]
        .into_iter()
        .find(|(program, _)| find(program).is_some())
        .map_or(Packages::None, |(_, packages)| packages)
}

/// Whether the distribution has a compiler for BPF at all.
fn has_packaged_compiler(packages: Packages) -> bool {
    packages == Packages::Apt
        && output(Command::new("apt-cache").args(["show", "--no-all-versions", plan::PACKAGED_CORE]))
            .is_ok_and(|text| !text.is_empty())
}

/// How the kernel programs can be compiled here, in the order of proxy-ctl's build script.
fn bpf_compiler() -> Option<BpfCompiler> {
    packaged_compiler().or_else(|| nightly_has_source().then_some(BpfCompiler::Nightly))
}

fn packaged_compiler() -> Option<BpfCompiler> {
    ["/usr/bin/rustc", "/usr/local/bin/rustc"].into_iter().find_map(|rustc| {
        let ask = |argument: &[&str]| {
            output(Command::new(rustc).args(argument).env_remove("RUSTUP_TOOLCHAIN")).ok()
        };
        let sysroot = PathBuf::from(ask(&["--print", "sysroot"])?.trim());
        let target = sysroot.join("lib/rustlib").join(BPF_TARGET);
        let llvm = plan::llvm_of(&ask(&["-vV"])?)?;
        target.is_dir().then_some(BpfCompiler::Packaged { rustc, llvm })
    })
}

fn nightly_has_source() -> bool {
    let sysroot = output(Command::new("rustup").args(["run", NIGHTLY, "rustc", "--print", "sysroot"]));
    sysroot.is_ok_and(|sysroot| Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library/core").is_dir())
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
    let compiler = bpf_compiler().map(|compiler| compiler.to_string());
    line("BPF compiler", compiler, "compiling the kernel programs", false);
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
