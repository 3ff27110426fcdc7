//! What must hold, by name.

mod access;
mod credentials;
mod harness;
mod lists;
mod node;
mod objects;
mod older;
mod outage;

use scenario::{Scenario, scenarios};

use crate::world::World;

/// In this order: those that change how the server runs come last.
pub(crate) fn all() -> Vec<Scenario<World>> {
    scenarios![
        objects:
            objects_are_created_patched_and_deleted,
            slices_split_and_merge,
            a_slice_moves_to_another_service,
            another_proxys_label_comes_and_goes,
            headless_services_are_not_served,
            external_name_and_back,
            a_change_arrives_at_once;
        lists:
            both_encodings_say_the_same,
            what_is_accepted_decides_the_answer;
        harness:
            an_api_server_lives_in_a_network_namespace;
        node:
            the_node_comes_late_changes_and_is_recreated,
            what_is_no_text_is_served_all_the_same;
        access:
            the_role_of_kube_proxy_is_enough,
            what_rbac_denies_comes_once_granted,
            a_resource_that_may_be_listed_only_is_listed_again,
            revoked_tokens_are_replaced;
        older:
            slices_of_v1beta1_are_watched,
            watches_that_always_fail_are_tried_ever_less,
            everything_is_listed_and_watched_within_the_burst,
            without_slices_endpoints_are_watched;
        outage:
            an_api_server_that_is_away_for_a_minute;
        lists:
            a_broken_connection_goes_on_where_it_was,
            what_happened_before_a_compaction_is_seen_in_one_replace,
            ten_thousand_services;
        credentials:
            a_new_token_in_the_file_is_used,
            new_certificates_in_the_files_are_used;
        lists:
            refused_streaming_lists_become_plain_ones;
    ]
}
