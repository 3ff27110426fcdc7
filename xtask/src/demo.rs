//! Builds and runs the programs that show and measure. Their arguments are theirs alone, and passed on.

use std::{ffi::OsString, process::ExitCode};

use anyhow::{Context as _, Result};
use clap::Args;

use crate::{
    command::{as_root, cargo, describe, run as execute, target},
    setup,
};

#[derive(Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Arguments {
    /// See --help, which is built first
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    arguments: Vec<OsString>,
}

impl Arguments {
    fn have(&self, flags: &[&str]) -> bool {
        self.arguments.iter().any(|argument| flags.iter().any(|flag| argument == flag))
    }

    /// Nothing is started.
    fn only_tell(&self) -> bool {
        self.have(&["--help", "-h", "--list", "--render"])
    }

    /// Builds what `program` of `package` needs, and runs it.
    fn run(&self, package: &str, program: &str, profile: &[&str]) -> Result<ExitCode> {
        let mut build = cargo(&["build", "-p", package, "--bins"]);
        if self.only_tell() {
            build.arg("-q");
        } else {
            setup::run_setup()?;
            eprintln!("building proxy-ctl and the lab");
            build.args(["-p", "proxy-ctl", "-p", "lab"]);
        }
        execute(build.args(profile))?;
        let folder = if profile.is_empty() { "debug" } else { "release" };
        let mut command = as_root(target().join(folder).join(program));
        command.args(&self.arguments);
        let status = command.status().with_context(|| format!("starting {}", describe(&command)))?;
        Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

pub(crate) fn demo(arguments: &Arguments) -> Result<ExitCode> {
    arguments.run("behaviour", "lab-demo", &[])
}

pub(crate) fn bench(arguments: &Arguments) -> Result<ExitCode> {
    // The agents' own time is part of what is measured; not of what is only tried.
    let profile: &[&str] =
        if arguments.have(&["--lean"]) || arguments.only_tell() { &[] } else { &["--release"] };
    arguments.run("bench", "bench", profile)
}
