//! The life of `proxy-ctl run` against a real API server: how it starts, and what ends it. Each scenario starts the
//! program on a node of its own; the real kube-proxy, where it is installed, says how a scenario ends for it.
//!
//! `cargo test -p control-plane --test life_cycle [-- [--list] [part of a name]]`; needs root and a built proxy-ctl.

mod api_server;
mod node;
mod proxy;
mod scenarios;
mod until;
mod world;

use std::{
    env,
    panic::{AssertUnwindSafe, catch_unwind},
    process::ExitCode,
    time::Instant,
};

use anyhow::{Result, anyhow};
use control_plane::binaries::Program;
use nix::unistd::Uid;

use crate::{scenarios::Scenario, world::World};

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument == "--list") {
        for scenario in scenarios::all() {
            println!("{}: test", scenario.name);
        }
        return ExitCode::SUCCESS;
    }
    let filter = arguments.iter().find(|argument| !argument.starts_with('-'));
    match run(filter.map_or("", String::as_str)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("life cycle: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(filter: &str) -> Result<bool> {
    let start = Instant::now();
    let chosen: Vec<Scenario> =
        scenarios::all().into_iter().filter(|scenario| scenario.name.contains(filter)).collect();
    let (mut passed, mut failed, mut skipped) = (0_usize, 0_usize, 0_usize);
    if let Some(reason) = missing() {
        for scenario in &chosen {
            println!("  skipped {}: {reason}", scenario.name);
        }
        skipped = chosen.len();
    } else if !chosen.is_empty() {
        let mut world = World::start()?;
        for scenario in &chosen {
            let start = Instant::now();
            match judge(scenario, &mut world) {
                Ok(None) => {
                    passed += 1;
                    println!("  passed  {} ({:.1} s)", scenario.name, start.elapsed().as_secs_f32());
                }
                Ok(Some(reason)) => {
                    skipped += 1;
                    println!("  skipped {}: {reason}", scenario.name);
                }
                Err(error) => {
                    failed += 1;
                    println!("  FAILED  {}: {error:#}", scenario.name);
                }
            }
        }
    }
    let seconds = start.elapsed().as_secs_f32();
    println!("life cycle: {passed} passed, {failed} failed, {skipped} skipped ({seconds:.1} s)");
    Ok(failed == 0)
}

/// Why nothing can be tried here, if nothing can.
fn missing() -> Option<String> {
    if !Uid::effective().is_root() {
        return Some("needs root".to_owned());
    }
    if let Err(error) = proxy::program() {
        return Some(error.to_string());
    }
    [Program::Etcd, Program::KubeApiServer]
        .into_iter()
        .find_map(|program| program.path().err().map(|error| format!("{error:#}")))
}

/// A panic is a failure of the scenario, and no reason to leave processes behind. Answers why it was skipped.
fn judge(scenario: &Scenario, world: &mut World) -> Result<Option<String>> {
    catch_unwind(AssertUnwindSafe(|| (scenario.run)(world))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        Err(anyhow!("panicked: {}", text.or_else(|| panic.downcast_ref().copied()).unwrap_or("?")))
    })
}
