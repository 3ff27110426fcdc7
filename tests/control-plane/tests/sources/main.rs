//! The Kubernetes source and the model behind it, against a real API server. All scenarios share
//! one server, and each has its own namespace.
//!
//! `cargo test --test sources [-- [--list] [part of a name]]` runs the scenarios.

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
