//! The library of `cargo xtask`, which does everything that is done with this repository, each by
//! one command.
//!
//! This package has few dependencies, because each command begins with building it.

pub mod cache;
pub mod command;
pub mod cross;
mod demo;
mod fuzz;
pub mod image;
pub mod packages;
mod progress;
pub mod setup;
mod test;
#[path = "../../proxy-ebpf/object/src/toolchain.rs"]
#[expect(unreachable_pub, reason = "the package kernel-object has this file too, and makes it public")]
mod toolchain;
mod vm;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::setup::Purpose;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "Sets up, shows, tests and measures proxy-ctl"
)]
struct Arguments {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install what is missing to build and test on this machine
    Setup {
        /// Only print what is installed and what is missing
        #[arg(long)]
        check: bool,
        /// Show everything that the called programs print
        #[arg(long)]
        verbose: bool,
    },
    /// Run all suites of tests that this machine can run
    Test(test::Arguments),
    /// Show how proxy-ctl serves a small cluster in network namespaces
    Demo(demo::Arguments),
    /// Measure proxy-ctl, the real kube-proxy and no proxy; --lean makes a short run
    Bench(demo::Arguments),
    /// Try packets of random bytes, and write those that fail to proxy-common/fuzz/artifacts
    Fuzz(fuzz::Arguments),
    /// Compile the kernel programs, and write the object that the repository contains
    Object,
    /// Write a container image, without a container engine
    Image(image::Arguments),
    /// Run the core scenarios on another kernel, in a virtual machine
    Vm(vm::Arguments),
}

/// Writes `proxy-ebpf/object`.
fn object() -> Result<ExitCode> {
    setup::install(&[Purpose::Building, Purpose::KernelPrograms], false)?;
    command::run(&mut command::cargo(&["run", "-q", "-p", "kernel-object"]))?;
    Ok(ExitCode::SUCCESS)
}

/// Does what the command line asks for.
pub fn main() -> ExitCode {
    let result: Result<ExitCode> = match Arguments::parse().command {
        Task::Setup { check, verbose } => setup::run(check, verbose),
        Task::Test(arguments) => test::run(&arguments),
        Task::Demo(arguments) => demo::demo(&arguments),
        Task::Bench(arguments) => demo::bench(&arguments),
        Task::Fuzz(arguments) => fuzz::run(&arguments),
        Task::Object => object(),
        Task::Image(arguments) => image::run(&arguments),
        Task::Vm(arguments) => vm::run(&arguments),
    };
    result.unwrap_or_else(|error| {
        eprintln!("xtask: {error:#}");
        ExitCode::FAILURE
    })
}
