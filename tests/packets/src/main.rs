//! Packets through the loaded TC programs, by BPF_PROG_TEST_RUN.
//!
//! A case fills the tables, sends packets through programs, and says what comes out and what is counted. Needs root.
//! An argument runs only the cases whose name contains it.

#![expect(clippy::unwrap_used, reason = "a header that cannot be encoded is a broken case")]

mod bench;
mod cases;
mod wire;
mod world;

use std::process::ExitCode;

use anyhow::{Context as _, Result};
use nix::sched::{CloneFlags, unshare};

use world::World;

/// The embedded object, or the one that PROXY_EBPF_OBJECT names.
fn object() -> Result<Vec<u8>> {
    match std::env::var_os("PROXY_EBPF_OBJECT") {
        Some(path) => std::fs::read(&path).with_context(|| format!("PROXY_EBPF_OBJECT={}", path.display())),
        None => Ok(proxy_ctl::dataplane::ebpf::OBJECT.to_vec()),
    }
}

fn run(filter: &str) -> Result<bool> {
    // Programs ask for routes: here there are none, whatever the machine has.
    unshare(CloneFlags::CLONE_NEWNET).context("a network namespace of its own")?;
    let object = object()?;
    let mut worlds = [World::load(&object, 0)?, World::load(&object, 1)?];
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for case in cases::all() {
        if !case.name.contains(filter) {
            skipped += 1;
            continue;
        }
        let world = &mut worlds[usize::from(case.host_packets)];
        match world.clear().and_then(|()| (case.run)(world)) {
            Ok(()) => {
                passed += 1;
                println!("ok      {}", case.name);
            }
            Err(error) => {
                failed += 1;
                println!("FAILED  {}: {error:#}", case.name);
            }
        }
    }
    println!("packets: {passed} passed, {failed} failed, {skipped} skipped");
    Ok(failed == 0)
}

fn main() -> ExitCode {
    if std::env::args().any(|argument| argument == "--bench") {
        return match object().and_then(|object| bench::run(&mut World::load(&object, 0)?)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error:#}");
                ExitCode::FAILURE
            }
        };
    }
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    match run(&filter) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
