//! The life of `proxy-ctl run` against a real API server: how it starts, and what ends it. Each
//! scenario starts the program on a node of its own. The real kube-proxy, if it is installed, shows
//! how a scenario ends for it.
//!
//! `cargo test --test life_cycle [-- [--list] [part of a name]]` runs the scenarios. It needs root
//! and a built proxy-ctl.

mod api_server;
mod former_rules;
mod node;
mod own_service;
mod proxy;
mod rights;
mod scenarios;
mod until;
mod world;

use std::process::ExitCode;

fn main() -> ExitCode {
    scenario::main(world::World::start, scenarios::all())
}
