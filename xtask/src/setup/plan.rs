//! What is done about what is missing: facts in, commands out. Nothing is looked up or run here.

use std::{collections::BTreeSet, fmt};

use super::{BPF_TARGET, NIGHTLY, tools::Tool};

/// Debian's Rust compiler that brings a core library for BPF.
const PACKAGED_COMPILER: &str = "rustc-web";
pub(super) const PACKAGED_CORE: &str = "libstd-rust-web-dev-bpf";
/// The last that links with the LLVM of rustup's compilers; later ones need LLVM's libraries on the machine.
const LINKER_WITH_RUSTUP: &str = "0.10.3";
const LINKER_WITH_PACKAGES: &str = "0.13.0";
const CARGO_DENY: &str = "0.18.9";
const CARGO_FUZZ: &str = "0.13.2";

/// Programs that are looked for besides the tools.
pub(super) const PROGRAMS: [&str; 6] =
    ["rustup", "bpf-linker", "cargo-fmt", "cargo-clippy", "cargo-deny", "cargo-fuzz"];

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Packages {
    Apt,
    Dnf,
    Pacman,
    None,
}

impl Packages {
    fn names(self, tool: &Tool) -> Vec<&'static str> {
        let names = match self {
            Self::Apt => tool.apt,
            Self::Dnf => tool.dnf,
            Self::Pacman => tool.pacman,
            Self::None => "",
        };
        names.split_whitespace().collect()
    }
}

/// How the kernel programs are compiled.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum BpfCompiler {
    /// A rustc outside rustup with a core library for BPF; the major version of its LLVM.
    Packaged { rustc: &'static str, llvm: u32 },
    /// rustup's nightly, which builds core.
    Nightly,
}

impl fmt::Display for BpfCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Packaged { rustc, llvm } => write!(f, "{rustc}, LLVM {llvm}"),
            Self::Nightly => write!(f, "rustup's {NIGHTLY}, rust-src"),
        }
    }
}

/// What the distribution could install.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct BpfOffer {
    pub(super) packaged: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Facts {
    pub(super) packages: Packages,
    /// Arch: there is a list of packages.
    pub(super) pacman_knows_packages: bool,
    /// Of the programs that something is done about.
    pub(super) present: BTreeSet<&'static str>,
    pub(super) compiler: Option<BpfCompiler>,
}

impl Facts {
    fn lacks(&self, program: &str) -> bool {
        !self.present.contains(program)
    }
}

/// A command to run.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Invocation {
    pub(super) as_root: bool,
    pub(super) program: &'static str,
    pub(super) arguments: Vec<String>,
    pub(super) environment: Vec<(String, String)>,
}

impl Invocation {
    fn new(program: &'static str, arguments: &[&str]) -> Self {
        let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        Self { as_root: false, program, arguments, environment: Vec::new() }
    }

    fn with_root(self) -> Self {
        Self { as_root: true, ..self }
    }

    fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }
}

/// Something to install. Without commands it is not known how.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Step {
    /// One line for people: what, and why.
    pub(super) what: String,
    pub(super) commands: Vec<Invocation>,
    /// What follows if it cannot be had; `None`: that is an error.
    pub(super) without: Option<&'static str>,
}

pub(super) fn uses_packages(steps: &[Step]) -> bool {
    let package_managers = ["env", "dnf", "pacman"];
    steps.iter().flat_map(|step| &step.commands).any(|command| package_managers.contains(&command.program))
}

/// Gets the lists of packages, where that is a command of its own.
pub(super) fn refresh(facts: &Facts) -> Option<Step> {
    let command = match facts.packages {
        Packages::Apt => Invocation::new("apt-get", &["update", "-q"]),
        // A newer list beside older packages breaks an Arch machine, so only where there is none at all.
        Packages::Pacman if !facts.pacman_knows_packages => Invocation::new("pacman", &["-Sy"]),
        Packages::Dnf | Packages::Pacman | Packages::None => return None,
    };
    let what = "getting the distribution's lists of packages".to_owned();
    // Old lists may do; if they do not, installing says so.
    Some(Step { what, commands: vec![command.with_root()], without: Some("the lists may be old") })
}

fn install(packages: Packages, names: &[&str]) -> Vec<Invocation> {
    let (program, arguments): (_, &[&str]) = match packages {
        // sudo passes variables on only if its configuration allows it.
        Packages::Apt => (
            "env",
            &["DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-q", "-y", "--no-install-recommends"],
        ),
        Packages::Dnf => ("dnf", &["install", "-y"]),
        Packages::Pacman => ("pacman", &["-S", "--noconfirm", "--needed"]),
        Packages::None => return Vec::new(),
    };
    vec![Invocation::new(program, &[arguments, names].concat()).with_root()]
}

pub(super) fn tools(facts: &Facts, tools: &[Tool]) -> Vec<Step> {
    let missing = tools.iter().filter(|tool| facts.lacks(tool.program));
    let step = |tool: &Tool| {
        let names = facts.packages.names(tool);
        let commands = install(facts.packages, &names);
        let (program, why) = (tool.program, tool.why);
        let what = if commands.is_empty() {
            format!(
                "{program} is missing, for {why}; no package manager is known here, so it is yours to install"
            )
        } else {
            format!("installing {program} for {why}: {}", names.join(" "))
        };
        Step { what, commands, without: tool.optional.then_some("tests that need it will be skipped") }
    };
    missing.map(step).collect()
}

/// A packaged compiler with a core library for BPF if there is one, else rustup's nightly, which builds core.
pub(super) fn bpf_compiler(facts: &Facts, offer: BpfOffer) -> Option<Step> {
    if facts.compiler.is_some() {
        return None;
    }
    let step = |what: String, commands| Some(Step { what, commands, without: None });
    if offer.packaged {
        let what =
            "installing a Rust compiler with a core library for BPF, for the kernel programs".to_owned();
        return step(what, install(facts.packages, &[PACKAGED_COMPILER, PACKAGED_CORE]));
    }
    let what = format!("installing Rust {NIGHTLY} with rust-src by rustup, for the kernel programs");
    let toolchain = ["toolchain", "install", NIGHTLY, "--profile", "minimal", "--component", "rust-src"];
    step(what, vec![Invocation::new("rustup", &toolchain)])
}

/// Its LLVM must be at least the compiler's.
pub(super) fn bpf_linker(facts: &Facts) -> Vec<Step> {
    if !facts.lacks("bpf-linker") {
        return Vec::new();
    }
    match facts.compiler {
        Some(BpfCompiler::Packaged { llvm, .. }) if facts.packages == Packages::Apt => {
            let names = [
                format!("llvm-{llvm}-dev"),
                format!("libpolly-{llvm}-dev"),
                format!("clang-{llvm}"),
                format!("lld-{llvm}"),
            ];
            let feature = format!("llvm-{llvm}");
            let linker = [
                "install",
                "--locked",
                "bpf-linker",
                "--version",
                LINKER_WITH_PACKAGES,
                "--no-default-features",
                "--features",
                &feature,
            ];
            let linker = Invocation::new("cargo", &linker);
            let mut commands = install(facts.packages, &names.each_ref().map(String::as_str));
            commands.push(linker.env("LLVM_PREFIX", &format!("/usr/lib/llvm-{llvm}")));
            let what = format!(
                "installing LLVM {llvm} and building bpf-linker with it (about a minute), for the kernel programs"
            );
            vec![Step { what, commands, without: None }]
        }
        Some(BpfCompiler::Packaged { rustc, llvm }) => {
            let what = format!(
                "bpf-linker for {BPF_TARGET} with LLVM {llvm} is missing, as {rustc} needs it: it is yours to install"
            );
            vec![Step { what, commands: Vec::new(), without: None }]
        }
        Some(BpfCompiler::Nightly) | None => {
            let what =
                "building bpf-linker with the LLVM of rustup's nightly, for the kernel programs".to_owned();
            let run = [
                "run",
                NIGHTLY,
                "cargo",
                "install",
                "--locked",
                "bpf-linker",
                "--version",
                LINKER_WITH_RUSTUP,
            ];
            vec![Step { what, commands: vec![Invocation::new("rustup", &run)], without: None }]
        }
    }
}

/// What looks at the sources.
pub(super) fn checks(facts: &Facts) -> Vec<Step> {
    let without = Some("its check will be skipped");
    let mut steps = Vec::new();
    for (component, program) in [("rustfmt", "cargo-fmt"), ("clippy", "cargo-clippy")] {
        if facts.lacks(program) && !facts.lacks("rustup") {
            let what = format!("installing {component} by rustup, for the tests");
            let commands = vec![Invocation::new("rustup", &["component", "add", component])];
            steps.push(Step { what, commands, without });
        }
    }
    if facts.lacks("cargo-deny") {
        let what =
            "building cargo-deny (about two minutes), for licences and sources of dependencies".to_owned();
        steps.push(Step { what, commands: vec![install_unoptimised("cargo-deny", CARGO_DENY)], without });
    }
    steps
}

pub(super) fn fuzzer(facts: &Facts) -> Option<Step> {
    let what = "building cargo-fuzz (about a minute), for fuzzing".to_owned();
    let commands = vec![install_unoptimised("cargo-fuzz", CARGO_FUZZ)];
    facts.lacks("cargo-fuzz").then_some(Step { what, commands, without: None })
}

/// By cargo. Optimised it is built four times as long, for what takes it a second.
fn install_unoptimised(program: &str, version: &str) -> Invocation {
    let install = Invocation::new("cargo", &["install", "--locked", program, "--version", version]);
    [("OPT_LEVEL", "0"), ("LTO", "off"), ("CODEGEN_UNITS", "16"), ("DEBUG", "0")]
        .iter()
        .fold(install, |command, (name, value)| command.env(&format!("CARGO_PROFILE_RELEASE_{name}"), value))
}

/// The major version in the line `LLVM version: 22.1.0` of `rustc -vV`.
pub(super) fn llvm_of(version: &str) -> Option<u32> {
    let line = version.lines().find_map(|line| line.strip_prefix("LLVM version:"))?;
    line.trim().split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{
        super::tools::{PYTHON, TOOLS},
        *,
    };

    /// A machine with nothing but Rust by rustup.
    fn bare(packages: Packages) -> Facts {
        Facts { packages, pacman_knows_packages: true, present: BTreeSet::from(["rustup"]), compiler: None }
    }

    fn lines(steps: impl IntoIterator<Item = Step>) -> Vec<String> {
        let line = |command: Invocation| {
            let root = command.as_root.then(|| "root:".to_owned());
            let variables = command.environment.iter().map(|(name, value)| format!("{name}={value}"));
            let words: Vec<String> = root
                .into_iter()
                .chain(variables)
                .chain([command.program.to_owned()])
                .chain(command.arguments)
                .collect();
            words.join(" ")
        };
        steps.into_iter().flat_map(|step| step.commands).map(line).collect()
    }

    #[test]
    fn each_distribution_installs_by_its_own_names() {
        let apt = lines(tools(&bare(Packages::Apt), TOOLS));
        let command =
            "root: env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends";
        assert_eq!(apt[0], format!("{command} iproute2"));
        assert_eq!(apt[1], format!("{command} gcc libc6-dev"));
        assert_eq!(apt.len(), TOOLS.len());
        let dnf = lines(tools(&bare(Packages::Dnf), TOOLS));
        assert_eq!(dnf[..2], ["root: dnf install -y iproute", "root: dnf install -y gcc"]);
        let pacman = lines(tools(&bare(Packages::Pacman), TOOLS));
        assert_eq!(pacman[0], "root: pacman -S --noconfirm --needed iproute2");
        assert_eq!(lines(tools(&bare(Packages::Apt), PYTHON)), [format!("{command} python3 python3-venv")]);
    }

    #[test]
    fn what_is_there_is_left_alone() {
        let mut facts = bare(Packages::Apt);
        facts.present.extend(TOOLS.iter().map(|tool| tool.program).chain(PROGRAMS));
        facts.compiler = Some(BpfCompiler::Nightly);
        assert_eq!(tools(&facts, TOOLS), []);
        assert_eq!(bpf_compiler(&facts, BpfOffer { packaged: true }), None);
        assert_eq!((bpf_linker(&facts), checks(&facts)), (Vec::new(), Vec::new()));
        assert_eq!(fuzzer(&facts), None);
    }

    #[test]
    fn lists_of_packages_are_got_where_that_does_not_break_the_machine() {
        assert_eq!(lines(refresh(&bare(Packages::Apt))), ["root: apt-get update -q"]);
        assert_eq!(refresh(&bare(Packages::Dnf)), None);
        assert_eq!(refresh(&bare(Packages::Pacman)), None);
        let fresh = Facts { pacman_knows_packages: false, ..bare(Packages::Pacman) };
        assert_eq!(lines(refresh(&fresh)), ["root: pacman -Sy"]);
    }

    #[test]
    fn the_compiler_is_packaged_where_that_can_be_had_and_rustups_elsewhere() {
        let packaged = bpf_compiler(&bare(Packages::Apt), BpfOffer { packaged: true });
        assert!(lines(packaged)[0].ends_with(" rustc-web libstd-rust-web-dev-bpf"));
        let nightly = "rustup toolchain install nightly-2026-05-15 --profile minimal --component rust-src";
        for packages in [Packages::Apt, Packages::Dnf, Packages::Pacman, Packages::None] {
            let step = bpf_compiler(&bare(packages), BpfOffer { packaged: false });
            assert!(step.as_ref().is_some_and(|step| step.without.is_none()));
            assert_eq!(lines(step), [nightly]);
        }
    }

    #[test]
    fn the_linker_has_the_llvm_of_the_compiler() {
        let compiler = Some(BpfCompiler::Packaged { rustc: "/usr/bin/rustc", llvm: 22 });
        let packaged = lines(bpf_linker(&Facts { compiler, ..bare(Packages::Apt) }));
        assert!(packaged[0].ends_with(" llvm-22-dev libpolly-22-dev clang-22 lld-22"), "{packaged:?}");
        assert_eq!(
            packaged[1],
            "LLVM_PREFIX=/usr/lib/llvm-22 cargo install --locked bpf-linker --version 0.13.0 \
             --no-default-features --features llvm-22"
        );
        let by_rustup =
            lines(bpf_linker(&Facts { compiler: Some(BpfCompiler::Nightly), ..bare(Packages::Dnf) }));
        assert_eq!(
            by_rustup,
            ["rustup run nightly-2026-05-15 cargo install --locked bpf-linker --version 0.10.3"]
        );
    }

    #[test]
    fn what_cannot_be_installed_is_an_error_only_where_it_is_needed() {
        let steps = tools(&bare(Packages::None), TOOLS);
        assert!(!uses_packages(&steps) && steps.iter().all(|step| step.commands.is_empty()));
        for (step, tool) in steps.iter().zip(TOOLS) {
            assert_eq!(step.without.is_some(), tool.optional, "{}", step.what);
        }
        // Without rustup its components are not asked for.
        let no_rustup = Facts { present: BTreeSet::new(), ..bare(Packages::None) };
        let commands = lines(checks(&no_rustup));
        assert_eq!(commands.len(), 1);
        assert!(commands[0].ends_with(" cargo install --locked cargo-deny --version 0.18.9"), "{commands:?}");
    }

    #[test]
    fn the_llvm_of_a_compiler_is_the_major_version_that_it_tells() {
        assert_eq!(llvm_of("rustc 1.96.0\nhost: x86_64\nLLVM version: 22.1.4\n"), Some(22));
        assert_eq!(llvm_of("rustc 1.96.0\n"), None);
    }
}
