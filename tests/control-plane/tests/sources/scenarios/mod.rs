//! The scenarios by name, each of which says what must hold.

mod access;
mod credentials;
mod lists;
mod node;
mod objects;
mod older;

use scenario::{Scenario, scenarios};

use crate::world::World;

/// Returns the scenarios in their order. Those that change how the server runs come last.
pub(crate) fn all() -> Vec<Scenario<World>> {
    scenarios![
        objects:
            objects_are_created_patched_and_deleted,
            labels_that_exclude_objects_come_and_go,
            a_service_changes_its_type_and_its_status;
        lists:
            what_is_accepted_decides_the_answer;
        node:
            the_node_comes_late_changes_and_is_recreated;
        access:
            the_role_of_kube_proxy_is_enough,
            a_resource_that_may_be_listed_only_is_listed_again,
            revoked_tokens_are_replaced;
        older:
            watches_that_always_fail_are_tried_ever_less,
            everything_is_listed_and_watched_within_the_burst;
        lists:
            a_broken_connection_goes_on_where_it_was,
            a_connection_that_only_seems_alive_is_replaced,
            what_happened_before_a_compaction_is_seen_in_one_replace,
            thousands_of_services;
        credentials:
            new_certificates_in_the_files_are_used;
        lists:
            refused_streaming_lists_become_plain_ones;
    ]
}
