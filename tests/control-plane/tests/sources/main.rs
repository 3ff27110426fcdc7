//! The Kubernetes source and the model behind it, against a real API server. One server for all scenarios,
//! one namespace for each.
//!
//! `cargo test --test sources [-- [--list] [part of a name]]`

mod fake;
mod follower;
mod scenarios;
mod world;

use std::process::ExitCode;

use scenario::Scenario;
use world::World;

fn main() -> ExitCode {
    let in_its_namespace = |scenario: Scenario<World>| scenario.after(World::enter);
    scenario::main(World::start, scenarios::all().into_iter().map(in_its_namespace))
}
