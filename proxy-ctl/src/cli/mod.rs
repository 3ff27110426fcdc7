//! The command line.

mod args;
mod facts;
mod record;
mod run;
mod settings;
mod show;
mod table;
mod views;

use std::{io::Write as _, process::ExitCode};

use clap::{Parser, error::ErrorKind};

use self::args::{Args, Command};

/// Bad configuration, or the work failed.
const FAILED: u8 = 1;
/// The command line itself is not understood.
const USAGE: u8 = 2;

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
            let _ = writeln!(std::io::stderr(), "error: {error:#}");
            ExitCode::from(FAILED)
        }
    }
}

/// `--help` and `--version` come here too.
fn refuse(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    let kind = error.kind();
    if matches!(kind, ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        ExitCode::SUCCESS
    } else if matches!(kind, ErrorKind::InvalidValue | ErrorKind::ValueValidation) {
        ExitCode::from(FAILED)
    } else {
        ExitCode::from(USAGE)
    }
}
