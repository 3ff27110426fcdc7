//! Packets through the loaded TC programs, by BPF_PROG_TEST_RUN.
//!
//! A case fills the tables, sends packets through programs, and says what comes out and what is counted. Needs root.
//! `cargo test --test packets [-- [--list] [part of a name]]`; with `-- --bench` nanoseconds a packet.

#![expect(clippy::unwrap_used, reason = "a header that cannot be encoded is a broken case")]

mod bench;
mod cases;
mod wire;
mod world;

use std::process::ExitCode;

use anyhow::{Context as _, Result};
use nix::{
    sched::{CloneFlags, unshare},
    unistd::Uid,
};
use scenario::{Scenario, Started};

use cases::Case;
use world::World;

/// The embedded object, or the one that PROXY_EBPF_OBJECT names.
fn object() -> Result<Vec<u8>> {
    match std::env::var_os("PROXY_EBPF_OBJECT") {
        Some(path) => std::fs::read(&path).with_context(|| format!("PROXY_EBPF_OBJECT={}", path.display())),
        None => Ok(proxy_ctl::dataplane::ebpf::OBJECT.to_vec()),
    }
}

/// Without `HOST_PACKETS`, and with it.
type Worlds = [World; 2];

fn start() -> Result<Started<Worlds>> {
    if !Uid::effective().is_root() {
        return Ok(Err("loading BPF programs needs root".to_owned()));
    }
    // Programs ask for routes: here there are none, whatever the machine has.
    unshare(CloneFlags::CLONE_NEWNET).context("making a network namespace")?;
    let object = object()?;
    Ok(Ok([World::load(&object, 0, 1)?, World::load(&object, 1, 1)?]))
}

fn main() -> ExitCode {
    if std::env::args().any(|argument| argument == "--bench") {
        return match object().and_then(|object| bench::run(&object)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error:#}");
                ExitCode::FAILURE
            }
        };
    }
    let cases = cases::all().into_iter().map(|Case { name, host_packets, run }| {
        Scenario::new(name, move |worlds: &mut Worlds| {
            let world = &mut worlds[usize::from(host_packets)];
            world.clear()?;
            run(world)
        })
    });
    scenario::main(start, cases)
}
