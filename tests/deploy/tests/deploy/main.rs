//! Checks that what deploy/ says is right, and works. Chart and manifests are the same, and the API
//! server accepts them. Rules and dashboard ask for metrics that exist. Pods of the DaemonSets do
//! their work with what the manifests allow them.
//!
//! `cargo test --test deploy [-- [--list] [part of a name]]` runs the scenarios.

mod chart;
mod cluster;
mod documents;
mod helm;
mod monitoring;
mod objects;
mod pods;

use std::process::ExitCode;

use scenario::scenarios;

fn main() -> ExitCode {
    scenario::main(
        || Ok(Ok(())),
        scenarios![
            chart: versions_are_those_of_the_workspace;
            objects: manifests_can_be_joined;
            chart: the_chart_renders_the_manifests, a_changed_configuration_is_a_rolling_update, an_uninstallation_waits_for_clean_nodes, wrong_values_are_refused,
                the_nodes_modules_are_mounted_where_they_are_wanted,
                the_chart_follows_its_values, the_oldest_kubernetes_knows_every_field;
            monitoring: the_dashboard_opens_without_editing, the_pod_monitor_keeps_the_labels_of_the_metrics,
                rules_fire_when_they_should;
            objects: the_api_server_accepts_everything;
            monitoring: rules_and_dashboard_name_metrics_that_exist;
            objects: kubeadm_is_patched_and_restored;
            helm: helm_uninstall_waits_for_clean_nodes_and_leaves_nothing;
            documents: crates_that_the_binary_names_are_told;
            pods: the_manifests_serve, least_capabilities_serve_in_containerd, least_capabilities_serve_in_docker,
                kubeadm_patched_serves, the_chart_waits_until_all_nodes_are_clean;
        ],
    )
}
