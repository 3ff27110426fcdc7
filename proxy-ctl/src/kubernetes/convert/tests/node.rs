use serde_json::{Value, json};

use super::{super::*, ips, merged, read};

fn node_with(changes: Value) -> (Node, Vec<InvalidField>) {
    let object = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "here"}});
    let object = read::<core::Node>(merged(object, changes));
    node(&object)
}

#[test]
fn every_field_of_a_node() {
    let (node, invalid) = node_with(json!({
        "metadata": {
            "labels": {"topology.kubernetes.io/zone": "z1"}, "deletionTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {
            "podCIDR": "10.0.0.0/24", "podCIDRs": ["10.0.0.0/24", "fd00:10::/64"],
            "taints": [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}],
        },
        "status": {"addresses": [
            {"type": "Hostname", "address": "here"},
            {"type": "ExternalIP", "address": "198.51.100.1"},
            {"type": "InternalIP", "address": "192.168.0.2"},
            {"type": "InternalIP", "address": "2001:db8::1"},
        ]},
    }));
    assert_eq!(invalid, []);
    assert_eq!(
        node,
        Node {
            name: "here".into(),
            zone: Some("z1".into()),
            addresses: ips(&["192.168.0.2", "2001:db8::1", "198.51.100.1"]),
            pod_cidrs: vec!["10.0.0.0/24".parse().unwrap(), "fd00:10::/64".parse().unwrap()],
            being_deleted: true,
            taints: vec!["ToBeDeletedByClusterAutoscaler".into()],
        }
    );
}

#[test]
fn what_a_node_leaves_out_is_empty() {
    let (node, invalid) = node_with(json!({"metadata": {"labels": {"topology.kubernetes.io/zone": ""}}}));
    assert_eq!(invalid, []);
    assert_eq!(node, Node { name: "here".into(), ..Node::default() });
}

#[test]
fn invalid_parts_of_a_node_are_left_out() {
    let (node, invalid) = node_with(json!({
        "spec": {"podCIDR": "10.0.0.0"},
        "status": {"addresses": [
            {"type": "InternalIP", "address": "here.example"}, {"type": "InternalIP", "address": "192.168.0.2"},
        ]},
    }));
    let fields: Vec<_> = invalid.iter().map(|field| (field.object.as_str(), field.field.as_str())).collect();
    assert_eq!(fields, [("Node here", "status.addresses[0].address"), ("Node here", "spec.podCIDR")]);
    assert_eq!(node.addresses, ips(&["192.168.0.2"]));
    assert!(node.pod_cidrs.is_empty());
}
