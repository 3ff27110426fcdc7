//! Builds and runs the demonstrations and the benchmarks.

use std::{
    ffi::OsString,
    process::{Command, ExitCode},
};

use anyhow::{Context as _, Result};
use clap::Args;

use crate::{
    command::{as_root, cargo, describe, is_root, run as execute, target},
    progress::{self, Step},
    setup::{self, Purpose},
};

/// The cost of the first build, measured on a machine with two cores, from a clean clone.
const DEMO_BUILD: &str = "about 3 minutes on 2 cores the first time, and 2 GB in the folder target";

#[derive(Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Arguments {
    /// The program's arguments; --help lists them, and builds the program first
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    arguments: Vec<OsString>,
}

/// A program that is built and run.
struct Program {
    name: &'static str,
    /// The packages that are built.
    packages: &'static [&'static str],
    /// The programs of these packages that are built.
    programs: &'static [&'static str],
    /// Further flags of the call of cargo.
    flags: &'static [&'static str],
    purposes: &'static [Purpose],
}

const DEMO: Program = Program {
    name: "lab-demo",
    packages: &["proxy-ctl", "lab", "behaviour"],
    programs: &["proxy-ctl", "lab-agent", "lab-demo"],
    // The demonstration needs no jemalloc: its two small nodes do not show how much memory a proxy
    // takes.
    flags: &["--no-default-features"],
    purposes: &[Purpose::Building, Purpose::Lab],
};
const DEMO_WITH_API_SERVER: &[Purpose] = &[Purpose::Building, Purpose::Lab, Purpose::Tests];
const BENCH: Program = Program {
    name: "bench",
    packages: &["proxy-ctl", "lab", "bench"],
    programs: &["proxy-ctl", "lab-agent", "bench"],
    flags: &[],
    purposes: DEMO_WITH_API_SERVER,
};

impl Arguments {
    fn have(&self, flags: &[&str]) -> bool {
        self.arguments.iter().any(|argument| flags.iter().any(|flag| argument == flag))
    }

    /// Returns true if nothing is started.
    fn only_tell(&self) -> bool {
        self.have(&["--help", "-h", "--list", "--render"])
    }

    /// Installs what is missing, builds, and runs the program with our arguments.
    fn run(
        &self,
        program: &Program,
        profile: &[&str],
        purposes: &[Purpose],
        before: &str,
    ) -> Result<ExitCode> {
        let mut build = cargo(&["build"]);
        build.args(program.packages.iter().flat_map(|package| ["-p", package]));
        build.args(program.programs.iter().flat_map(|program| ["--bin", program])).args(profile);
        build.args(program.flags);
        if self.only_tell() {
            execute(build.arg("-q"))?;
        } else {
            let mut steps = setup::steps(purposes)?;
            eprint!("{before}");
            for step in &steps {
                eprintln!("  first    {}", step.what);
            }
            steps.push(Step::new("building", [build]));
            progress::run(steps, self.have(&["--verbose"]))?;
        }
        let folder = if profile.is_empty() { "debug" } else { "release" };
        let mut command: Command = as_root(target().join(folder).join(program.name));
        command.args(&self.arguments);
        let status = command.status().with_context(|| format!("starting {}", describe(&command)))?;
        Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

pub(crate) fn demo(arguments: &Arguments) -> Result<ExitCode> {
    let purposes = if arguments.have(&["--api-server"]) { DEMO_WITH_API_SERVER } else { DEMO.purposes };
    let root = if is_root() { "" } else { "  root     sudo asks for it: network namespaces need it\n" };
    let before = format!(
        "proxy-ctl on two nodes that are network namespaces of this machine\n  builds   {DEMO_BUILD}\n{root}"
    );
    arguments.run(&DEMO, &[], purposes, &before)
}

pub(crate) fn bench(arguments: &Arguments) -> Result<ExitCode> {
    // The agents' own time is part of what is measured. It does not matter if the program is only
    // tried.
    let profile: &[&str] =
        if arguments.have(&["--lean"]) || arguments.only_tell() { &[] } else { &["--release"] };
    arguments.run(&BENCH, profile, BENCH.purposes, "")
}
