//! What deploy/ says is right, and works: chart and manifests are the same, the API server accepts them, rules and
//! dashboard ask for metrics that exist, and pods of the DaemonSets do their work with what the manifests allow them.
//!
//! `cargo test --test deploy [-- [--list] [part of a name]]`

mod chart;
mod cluster;
mod monitoring;
mod objects;
mod pods;
mod profiles;

use std::process::ExitCode;

use anyhow::Result;
use scenario::{Outcome, Scenario};

type Check = fn() -> Result<Outcome>;

const CHECKS: &[(&str, Check)] = &[
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
    let checks = CHECKS.iter().map(|(name, check)| Scenario::new(*name, |()| check()));
    scenario::main(|| Ok(Ok(())), checks)
}
