//! Runs the package `image`, which writes container images. It is a package of its own, because its
//! libraries for packing, compressing and describing take longer to build than everything else
//! here.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::{Context as _, Result, bail};
use clap::Args;

use crate::command::{cargo, target};

#[derive(Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Arguments {
    /// The program's arguments; --help lists them, and builds the program first
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    arguments: Vec<OsString>,
}

/// The file that [`for_tests`] writes, below cargo's target folder.
const FOR_TESTS: &str = "image/test.oci.tar";
/// The exit code of the package `image` if this machine cannot build an image, because a tool or
/// the network is missing.
pub const IMPOSSIBLE: u8 = 3;

fn program() -> Command {
    cargo(&["run", "-q", "-p", "image", "--"])
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let status = program().args(&arguments.arguments).status().context("starting cargo")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

pub(crate) enum ForTests {
    Built(PathBuf),
    /// This machine cannot build an image. The text says which tool is missing, or that the network
    /// is.
    Impossible(String),
}

/// Builds an image for the tests, without optimisation. `linked` is a program of this machine that
/// is used instead of a static one, which is built otherwise. An error means that the image cannot
/// be built from these sources.
pub(crate) fn for_tests(linked: Option<&Path>) -> Result<ForTests> {
    let file = target().join(FOR_TESTS);
    let mut command = program();
    command.args(["--for-tests", "--output"]).arg(&file);
    if let Some(program) = linked {
        command.arg("--program").arg(program);
    }
    let output = command.output().context("starting cargo")?;
    let errors = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    match output.status.code() {
        Some(0) => Ok(ForTests::Built(file)),
        Some(code) if code == i32::from(IMPOSSIBLE) => Ok(ForTests::Impossible(errors)),
        _ => bail!("{}\n{errors}", output.status),
    }
}
