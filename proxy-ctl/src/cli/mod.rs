//! The command line.

mod args;
mod cleanup;
mod effective;
mod probe;
mod program;
mod show;
mod table;
mod tree;
mod views;

use std::{ffi::OsString, io::Write as _, path::PathBuf, process::ExitCode};

use clap::{Parser, error::ErrorKind};

use self::{
    args::{Args, CleanupArgs, Command, OutputArgs},
    program::Program,
};
use crate::{
    config::{CommandLine, Config},
    process::{self, Settings},
};

/// A flag or the configuration is wrong, or the work failed.
const FAILED: u8 = 1;

/// Runs the program; everything that it says about itself goes to stderr.
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
        Command::Cleanup(cleanup) => cleanup::cleanup(&cleanup, &show::bpffs(bpffs), &[]),
        Command::Probe(probe) => probe::probe(probe.flags.flags, bpffs),
        Command::Config(config) => effective::show(config.flags.flags, bpffs),
        Command::Completion(completion) => tree::completion(completion.shell),
        Command::Man(man) => tree::manual(&man.directory),
    })
}

/// `run`, or kube-proxy: does what the flags say.
fn serve(program: Program, flags: Vec<OsString>, bpffs: Option<PathBuf>) -> anyhow::Result<()> {
    let mut line = CommandLine::parse(flags)?;
    give_bpffs(&mut line, bpffs)?;
    if line.is_on("help") {
        return tree::help(program.command());
    }
    if let Some(version) = line.version() {
        return Ok(table::print(&program.version(version))?);
    }
    if let Some(path) = line.text("write-config-to") {
        return effective::write(&line, path.as_ref());
    }
    if line.is_on("cleanup") {
        let Config { ebpf, ipvs, .. } = Settings::new(&line)?.config;
        let everything = CleanupArgs { kube_proxy: true, output: OutputArgs::default() };
        return cleanup::cleanup(&everything, &ebpf.bpffs, &ipvs.exclude_cidrs);
    }
    process::run(line)
}

/// `--bpffs` stood before the command.
fn give_bpffs(line: &mut CommandLine, bpffs: Option<PathBuf>) -> anyhow::Result<()> {
    match bpffs {
        Some(bpffs) if line.text("bpffs").is_none() => {
            Ok(line.give_named("bpffs", &bpffs.to_string_lossy())?)
        }
        Some(_) | None => Ok(()),
    }
}

fn exit(done: anyhow::Result<()>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody is left to tell if stderr is gone.
            let _ = writeln!(std::io::stderr(), "error: {}", told(&error));
            ExitCode::from(FAILED)
        }
    }
}

/// The error and its causes, but those that the text before them already ends on or quotes.
fn told(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |told, cause| {
        if told.is_empty() {
            cause
        } else if told.contains(&cause) {
            told
        } else {
            format!("{told}: {cause}")
        }
    })
}

/// `--help` and `--version` come here too.
fn refuse(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(FAILED)
    }
}
