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

use std::{env, process::ExitCode};

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if let [flag, encoding, kubeconfig] = arguments.as_slice()
        && flag == measure::FLAG
    {
        return match measure::list_once(encoding, kubeconfig) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("sources: {error:#}");
                ExitCode::FAILURE
            }
        };
    }
    control_plane::scenarios::main("sources", scenarios::all())
}
