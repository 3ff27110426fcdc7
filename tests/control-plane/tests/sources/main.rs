//! The Kubernetes source and the model behind it, against a real API server. One server for all scenarios,
//! one namespace for each.
//!
//! `cargo test -p control-plane --test sources [-- [--list] [part of a name]]`

mod fake;
mod follower;
mod measure;
mod relay;
mod scenarios;
mod world;

use std::{
    env,
    panic::{AssertUnwindSafe, catch_unwind},
    process::ExitCode,
    time::Instant,
};

use anyhow::{Result, anyhow};
use control_plane::binaries::Program;

use crate::{scenarios::Scenario, world::World};

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let outcome = match arguments.as_slice() {
        [flag, kubeconfig] if flag == measure::FLAG => measure::list_once(kubeconfig).map(|()| true),
        [flag, ..] if flag == "--list" => {
            for scenario in scenarios::all() {
                println!("{}: test", scenario.name);
            }
            Ok(true)
        }
        arguments => {
            let filter = arguments.iter().find(|argument| !argument.starts_with('-'));
            run(filter.map_or("", String::as_str))
        }
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("control-plane: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(filter: &str) -> Result<bool> {
    let start = Instant::now();
    let chosen: Vec<Scenario> =
        scenarios::all().into_iter().filter(|scenario| scenario.name.contains(filter)).collect();
    let (mut passed, mut failed, mut skipped) = (0_usize, 0_usize, 0_usize);
    let missing = [Program::Etcd, Program::KubeApiServer]
        .into_iter()
        .find_map(|program| program.path().err().map(|error| format!("{error:#}")));
    if let Some(reason) = missing {
        for scenario in &chosen {
            println!("  skipped {}: {reason}", scenario.name);
        }
        skipped = chosen.len();
    } else if !chosen.is_empty() {
        // What goes wrong here is meant to go wrong: only for those who ask with RUST_LOG.
        if let Ok(filter) = tracing_subscriber::EnvFilter::try_from_default_env() {
            tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
        }
        let mut world = World::start()?;
        for scenario in &chosen {
            let start = Instant::now();
            match judge(scenario, &mut world) {
                Ok(()) => {
                    passed += 1;
                    println!("  passed  {} ({:.1} s)", scenario.name, start.elapsed().as_secs_f32());
                }
                Err(error) => {
                    failed += 1;
                    println!("  FAILED  {}: {error:#}", scenario.name);
                }
            }
        }
        for note in world.notes() {
            println!("  measured {note}");
        }
    }
    let seconds = start.elapsed().as_secs_f32();
    println!("control-plane: {passed} passed, {failed} failed, {skipped} skipped ({seconds:.1} s)");
    Ok(failed == 0)
}

/// A panic is a failure of the scenario, and no reason to leave a server behind.
fn judge(scenario: &Scenario, world: &mut World) -> Result<()> {
    world.enter(scenario.name)?;
    catch_unwind(AssertUnwindSafe(|| (scenario.run)(world))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        Err(anyhow!("panicked: {}", text.or_else(|| panic.downcast_ref().copied()).unwrap_or("?")))
    })
}
