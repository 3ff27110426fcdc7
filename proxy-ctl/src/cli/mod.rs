//! The command line: it parses the arguments and runs the command that they name.

mod args;
mod cleanup;
mod effective;
mod flows;
mod monitor;
mod probe;
mod program;
mod rollout;
mod service_filter;
mod show;
mod table;
mod tree;
mod views;
mod xdp;

use std::{ffi::OsString, io::Write as _, path::PathBuf, process::ExitCode};

use clap::{Parser, error::ErrorKind};

use self::{
    args::{Args, CleanupArgs, Command, OutputArgs},
    program::Program,
};
use crate::{
    config::{CommandLine, Config},
    kubernetes::failure::with_causes,
    process::{self, Settings},
};

/// The exit code if a flag or the configuration is invalid, or the work failed.
const FAILED: u8 = 1;

/// Runs the program. Errors and warnings go to stderr.
pub fn main() -> ExitCode {
    let mut arguments = std::env::args_os();
    let program = Program::of(arguments.next().as_deref());
    if program == Program::KubeProxy {
        return exit(serve(program, arguments.collect(), None));
    }
    let Args { bpffs, command } = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => return refuse(&error),
    };
    exit(match command {
        Command::Run(run) => serve(program, run.flags.flags, bpffs),
        Command::Status(status) => show::status(&status, &show::bpffs(bpffs)),
        Command::Services(services) => show::services(&services, &show::bpffs(bpffs)),
        Command::Backends(backends) => show::backends(&backends, &show::bpffs(bpffs)),
        Command::Flows(flows) => flows::flows(&flows, &show::bpffs(bpffs)),
        Command::Monitor(monitor) => monitor::monitor(&monitor, &show::bpffs(bpffs)),
        Command::Cleanup(cleanup) => {
            let bpffs = show::bpffs(bpffs);
            cleanup::of_record(&cleanup, &bpffs)
        }
        Command::RolloutStatus(rollout) => rollout::wait(&rollout),
        Command::Probe(probe) => probe::probe(probe.flags.flags, bpffs),
        Command::Config(config) => effective::show(config.flags.flags, bpffs),
        Command::Completion(completion) => tree::completion(completion.shell),
        Command::Man(man) => tree::manual(&man.directory),
    })
}

/// Does what the flags of `run` or of kube-proxy say.
fn serve(program: Program, flags: Vec<OsString>, bpffs: Option<PathBuf>) -> anyhow::Result<()> {
    let mut line = CommandLine::parse(flags)?;
    add_global_bpffs(&mut line, bpffs);
    if line.is_on("help") {
        return tree::help(program.command());
    }
    if let Some(format) = line.version() {
        return Ok(table::print(&program.version(format))?);
    }
    if let Some(path) = line.text("write-config-to") {
        return effective::write(&line, path.as_ref());
    }
    if line.is_on("cleanup") {
        let Config { ebpf, ipvs, .. } = Settings::new(&line)?.config;
        let everything = CleanupArgs { kube_proxy: true, stay: false, output: OutputArgs::default() };
        return cleanup::cleanup(&everything, &ebpf.bpffs, &ipvs.exclude_cidrs);
    }
    process::run(line)
}

/// Adds `--bpffs` if it was given before the command, unless it is also given after it.
fn add_global_bpffs(line: &mut CommandLine, bpffs: Option<PathBuf>) {
    if let Some(bpffs) = bpffs.filter(|_| line.text("bpffs").is_none()) {
        line.give_text("bpffs", &bpffs.to_string_lossy());
    }
}

fn exit(done: anyhow::Result<()>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Without stderr there is nowhere to report.
            let _ = writeln!(std::io::stderr(), "error: {}", with_causes(error.as_ref()));
            ExitCode::from(FAILED)
        }
    }
}

/// Prints clap's error and returns the exit code. `--help` and `--version` are such errors too.
fn refuse(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(FAILED)
    }
}
