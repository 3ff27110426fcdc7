//! Decides if a changed configuration changes nothing, can be taken over by the running proxy, or
//! needs a new process. This module has no side effects.

use serde_json::Value;

use crate::{config::LEFT_OUT_ELSEWHERE, process::settings::is_within};

/// The fields, and sections with everything in them, that the running process takes over.
const LIVE: [&str; 18] = [
    "conntrack",
    "ebpf.algorithm",
    "ebpf.allowForwardingAnnotation",
    "ebpf.encapsulation",
    "ebpf.flowLifetimes",
    "ebpf.forwarding",
    "ebpf.interfaces",
    "ebpf.newConnectionsPerCore",
    "iptables.minSyncPeriod",
    "iptables.syncPeriod",
    "ipvs.minSyncPeriod",
    "ipvs.syncPeriod",
    "logging.verbosity",
    "mode",
    "nftables.minSyncPeriod",
    "nftables.syncPeriod",
    "nodePortAddresses",
    "oomScoreAdj",
];

/// The names of the fields that are different, such as `logging.verbosity`.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct ConfigChanges {
    pub(super) live: Vec<String>,
    /// The fields that need a new process.
    pub(super) restart: Vec<String>,
}

impl ConfigChanges {
    /// Compares two documents of `kubeproxy.config.k8s.io/v1alpha1` that hold every field. Nothing
    /// depends on the fields of `unused`.
    pub(super) fn between(old: &Value, new: &Value, unused: &[&str]) -> Self {
        let mut names = Vec::new();
        differences("", old, new, &mut names);
        names.retain(|name| !is_within(name, unused));
        if names.iter().any(|name| name == "mode") {
            // The mode that these fields are for is opened with them, or ends.
            names.retain(|name| !is_within(name, &LEFT_OUT_ELSEWHERE));
        }
        let (live, restart) = names.into_iter().partition(|name| is_within(name, &LIVE));
        Self { live, restart }
    }
}

/// Lists the paths of all fields that differ. A list is one value.
fn differences(path: &str, old: &Value, new: &Value, names: &mut Vec<String>) {
    match (old, new) {
        (Value::Object(before), Value::Object(now)) => {
            let added = now.keys().filter(|name| !before.contains_key(*name));
            for name in before.keys().chain(added) {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                let value =
                    |object: &serde_json::Map<String, Value>| object.get(name).cloned().unwrap_or_default();
                differences(&path, &value(before), &value(now), names);
            }
        }
        (old, new) if old == new => {}
        _ => names.push(path.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_that_are_taken_over_are_documented() {
        let page = include_str!("../../../../docs/life-cycle.md");
        let listed: Vec<_> =
            page.lines().filter_map(|line| line.strip_prefix("- `")?.split('`').next()).collect();
        assert_eq!(listed, LIVE);
    }

    #[rstest]
    #[case::nothing(json!({"mode": "ebpf"}), json!({"mode": "ebpf"}), &[], &[])]
    #[case::verbosity(
        json!({"logging": {"verbosity": 0, "format": "text"}}),
        json!({"logging": {"verbosity": 4, "format": "text"}}),
        &["logging.verbosity"],
        &[],
    )]
    #[case::format(
        json!({"logging": {"verbosity": 0, "format": "text"}}),
        json!({"logging": {"verbosity": 0, "format": "json"}}),
        &[],
        &["logging.format"],
    )]
    #[case::both(
        json!({"iptables": {"syncPeriod": "30s", "masqueradeBit": 14}}),
        json!({"iptables": {"syncPeriod": "10s", "masqueradeBit": 15}}),
        &["iptables.syncPeriod"],
        &["iptables.masqueradeBit"],
    )]
    #[case::a_mode_with_the_period_of_another_section(
        json!({"mode": "iptables", "nftables": {"minSyncPeriod": "1s"}}),
        json!({"mode": "nftables", "nftables": {"minSyncPeriod": "5s"}}),
        &["mode", "nftables.minSyncPeriod"],
        &[],
    )]
    #[case::a_mode_with_a_field_that_only_it_has(
        json!({"mode": "userspace", "udpIdleTimeout": "250ms"}),
        json!({"mode": "nftables"}),
        &["mode"],
        &[],
    )]
    #[case::to_a_mode_with_a_field_that_only_it_has(
        json!({"mode": "ebpf"}),
        json!({"mode": "userspace", "udpIdleTimeout": "30s"}),
        &["mode"],
        &[],
    )]
    #[case::a_field_of_the_active_mode(
        json!({"mode": "userspace", "udpIdleTimeout": "250ms"}),
        json!({"mode": "userspace", "udpIdleTimeout": "30s"}),
        &[],
        &["udpIdleTimeout"],
    )]
    #[case::what_is_not_used(
        json!({"iptables": {"minSyncPeriod": "1s"}, "ipvs": {"scheduler": "rr"}}),
        json!({"iptables": {"minSyncPeriod": "5s"}, "ipvs": {"scheduler": "lc"}}),
        &[],
        &[],
    )]
    #[case::a_whole_section(
        json!({"conntrack": {"min": 1, "tcpBeLiberal": false}}),
        json!({"conntrack": {"min": 2, "tcpBeLiberal": true}}),
        &["conntrack.min", "conntrack.tcpBeLiberal"],
        &[],
    )]
    #[case::a_list(json!({"nodePortAddresses": null}), json!({"nodePortAddresses": ["primary"]}), &["nodePortAddresses"], &[])]
    #[case::an_added_field(json!({}), json!({"clusterCIDR": "10.0.0.0/8"}), &[], &["clusterCIDR"])]
    #[case::a_removed_field(json!({"featureGates": {"A": true}}), json!({"featureGates": {}}), &[], &["featureGates.A"])]
    #[case::a_name_with_the_same_beginning(json!({"conntrackers": 1}), json!({"conntrackers": 2}), &[], &["conntrackers"])]
    fn changed_fields(
        #[case] old: Value,
        #[case] new: Value,
        #[case] live: &[&str],
        #[case] restart: &[&str],
    ) {
        let changes = ConfigChanges::between(&old, &new, &["iptables.minSyncPeriod", "ipvs"]);
        assert_eq!(changes.live, live);
        assert_eq!(changes.restart, restart);
    }
}
