//! Enters a network namespace of the lab, then serves requests, or becomes the given command.

use std::{net::SocketAddr, os::unix::process::CommandExt as _, path::PathBuf, process::Command};

use anyhow::{Context as _, Result};
use clap::Parser;
use nix::sys::signal::SigSet;

#[derive(Parser)]
struct Arguments {
    /// Network namespace to enter
    #[arg(long)]
    netns: Option<PathBuf>,
    /// cgroup to join
    #[arg(long)]
    cgroup: Option<PathBuf>,
    /// Serve under this name until killed, instead of reading requests
    #[arg(long, requires = "address")]
    serve: Option<String>,
    /// Addresses at which to serve
    #[arg(long)]
    address: Vec<SocketAddr>,
    /// Command to become; without it, requests are read from standard input
    #[arg(last = true)]
    command: Vec<String>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    // The lab blocks the signals that end it, and children inherit that.
    SigSet::empty().thread_set_mask().context("unblocking signals")?;
    if let Some(cgroup) = &arguments.cgroup {
        lab::cgroup::join(cgroup)?;
    }
    if let Some(netns) = &arguments.netns {
        lab::namespace::enter(netns)?;
    }
    if let Some(name) = &arguments.serve {
        lab::agent::serve::describe(name, &arguments.address).context("serving")?;
        loop {
            std::thread::park();
        }
    }
    match arguments.command.split_first() {
        None => lab::agent::session::run(),
        Some((program, rest)) => {
            let error = Command::new(program).args(rest).exec();
            Err(error).with_context(|| format!("starting {program}"))
        }
    }
}
