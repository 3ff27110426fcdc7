//! The command line.

mod args;
mod facts;
mod life;
mod record;
mod recorder;
mod run;
mod settings;
mod show;
mod table;
mod views;

use std::{io::Write as _, process::ExitCode};

use clap::{Parser, error::ErrorKind};

use self::args::{Args, Command};

/// A flag or the configuration is wrong, or the work failed.
const FAILED: u8 = 1;

/// Runs the program; everything that it says about itself goes to stderr.
pub fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => return refuse(&error),
    };
    let done = match args.command {
        Command::Run(run) => run::run(run, args.bpffs),
        Command::Status(status) => show::status(&status, &show::bpffs(args.bpffs)),
        Command::Services(services) => show::services(&services, &show::bpffs(args.bpffs)),
        Command::Backends(backends) => show::backends(&backends, &show::bpffs(args.bpffs)),
        Command::Cleanup(cleanup) => show::cleanup(&cleanup, &show::bpffs(args.bpffs)),
    };
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
