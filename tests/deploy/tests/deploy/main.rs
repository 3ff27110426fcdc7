//! What deploy/ says is right, and works: chart and manifests are the same, the API server accepts them, rules and
//! dashboard ask for metrics that exist, and pods of the DaemonSets do their work with what the manifests allow them.
//!
//! `cargo test -p deploy --test deploy [-- part of a name]`

mod chart;
mod cluster;
mod monitoring;
mod objects;
mod pods;
mod profiles;

use std::{
    env,
    panic::{AssertUnwindSafe, catch_unwind},
    process::ExitCode,
    time::Instant,
};

use anyhow::{Result, anyhow};

/// How a check ended that did not fail.
enum Outcome {
    Passed,
    /// What this machine lacks.
    Skipped(String),
}

type Check = (&'static str, fn() -> Result<Outcome>);

const CHECKS: &[Check] = &[
    ("versions are those of the workspace", chart::versions_are_those_of_the_workspace),
    ("manifests can be joined", objects::manifests_can_be_joined),
    ("the chart renders the manifests", chart::the_chart_renders_the_manifests),
    ("wrong values of the chart are refused", chart::wrong_values_are_refused),
    ("the chart follows its values", chart::the_chart_follows_its_values),
    ("the dashboard opens without editing", monitoring::the_dashboard_opens_without_editing),
    ("rules are right and fire when they should", monitoring::rules_fire_when_they_should),
    ("the API server accepts everything", objects::the_api_server_accepts_everything),
    ("rules and dashboard name metrics that exist", monitoring::metrics_exist),
    ("kubeadm's DaemonSet is patched and restored", objects::kubeadm_is_patched_and_restored),
    ("the DaemonSet's pod serves", pods::the_manifests_serve),
    (
        "least capabilities serve, with containerd's seccomp profile",
        pods::least_capabilities_serve_in_containerd,
    ),
    ("least capabilities serve, with Docker's seccomp profile", pods::least_capabilities_serve_in_docker),
    ("kubeadm's DaemonSet, patched, serves", pods::kubeadm_patched_serves),
];

fn main() -> ExitCode {
    let filter = env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    let start = Instant::now();
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for (name, check) in CHECKS.iter().filter(|(name, _)| name.contains(&filter)) {
        let start = Instant::now();
        let judged = catch_unwind(AssertUnwindSafe(check)).unwrap_or_else(|_| Err(anyhow!("panicked")));
        let seconds = start.elapsed().as_secs_f32();
        match judged {
            Ok(Outcome::Passed) => {
                passed += 1;
                println!("  passed  {name} ({seconds:.1} s)");
            }
            Ok(Outcome::Skipped(reason)) => {
                skipped += 1;
                println!("  skipped {name}: {reason}");
            }
            Err(error) => {
                failed += 1;
                println!("  FAILED  {name}: {error:#}");
            }
        }
    }
    let seconds = start.elapsed().as_secs_f32();
    println!("deploy: {passed} passed, {failed} failed, {skipped} skipped ({seconds:.1} s)");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
