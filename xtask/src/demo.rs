//! Builds and runs the programs that show and measure.

use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Args;

use crate::{
    command::{as_root, built, built_release, cargo, run as execute},
    setup,
};

#[derive(Args)]
pub(crate) struct DemoArguments {
    /// Feed the proxies from a real etcd and kube-apiserver
    #[arg(long)]
    api_server: bool,
    /// Leave the cluster up and print how to look around
    #[arg(long)]
    keep: bool,
    /// Remove clusters that were kept
    #[arg(long)]
    remove: bool,
    /// Seconds that each step is shown
    #[arg(long, default_value_t = 3)]
    seconds: u64,
}

#[derive(Args)]
pub(crate) struct BenchArguments {
    /// Rounds, alternating between direct and through the service
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Services in the second half of the table
    #[arg(long, default_value_t = 10_000)]
    services: u32,
}

fn build(profile: &[&str]) -> Result<()> {
    setup::run_setup()?;
    println!("building proxy-ctl and the lab");
    execute(cargo(&["build", "-p", "proxy-ctl", "-p", "lab", "-p", "behaviour", "--bins"]).args(profile))
}

fn finish(mut command: std::process::Command) -> Result<ExitCode> {
    let status =
        command.status().with_context(|| format!("starting {}", crate::command::describe(&command)))?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

pub(crate) fn demo(arguments: &DemoArguments) -> Result<ExitCode> {
    build(&[])?;
    let mut demo = as_root(built("lab-demo"));
    for (wanted, flag) in
        [(arguments.api_server, "--api-server"), (arguments.keep, "--keep"), (arguments.remove, "--remove")]
    {
        if wanted {
            demo.arg(flag);
        }
    }
    demo.arg(format!("--seconds={}", arguments.seconds));
    finish(demo)
}

pub(crate) fn bench(arguments: &BenchArguments) -> Result<ExitCode> {
    // The agents' own time is part of what is measured.
    build(&["--release"])?;
    let mut bench = as_root(built_release("lab-bench"));
    bench.arg(format!("--rounds={}", arguments.rounds));
    bench.arg(format!("--seconds={}", arguments.seconds));
    bench.arg(format!("--services={}", arguments.services));
    finish(bench)
}
