//! Runs the targets of `proxy-common/fuzz`, which take any bytes as packets, until one breaks a
//! property.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::{
    command::{cargo, output, run as execute, target},
    setup::{self, Purpose},
};

const FOLDER: [&str; 2] = ["--fuzz-dir", "proxy-common/fuzz"];

#[derive(Args)]
pub(crate) struct Arguments {
    /// The time for which each target runs
    #[arg(long, default_value_t = 600)]
    seconds: u32,
    /// Run only targets whose name contains this
    #[arg(default_value = "")]
    target: String,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    setup::install(&[Purpose::Building, Purpose::Fuzzing], false)?;
    let targets = output(cargo(&["fuzz", "list"]).args(FOLDER))?;
    for name in targets.lines().filter(|name| name.contains(&arguments.target)) {
        println!("{name}, for {} s", arguments.seconds);
        let mut command = cargo(&["fuzz", "run"]);
        // Sanitizers are not stable, but every compiler has them.
        command.args(FOLDER).arg("--target-dir").arg(target().join("fuzz")).env("RUSTC_BOOTSTRAP", "1");
        // Longer packets have no other headers.
        command.args([name, "--", "-max_len=256", "-print_final_stats=1"]);
        execute(command.arg(format!("-max_total_time={}", arguments.seconds)))?;
    }
    Ok(ExitCode::SUCCESS)
}
