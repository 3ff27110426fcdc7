//! Waits for the fields of the own Node that must be known before the start, and for the changes
//! that end the process, so that a new process is set up for them. Timeouts and reactions are
//! kube-proxy's.

use std::{fmt, net::IpAddr, time::Duration};

use ipnet::IpNet;
use tokio::{sync::watch, time::timeout};

use crate::{
    model::objects::Node,
    node::{OwnNode, host_addresses},
};

/// Timeouts of the wait for a complete Node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// The time after which the proxy starts without addresses.
    addresses: Duration,
    /// The time after which the proxy ends because pod CIDRs are missing.
    pod_cidrs: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { addresses: Duration::from_secs(30), pod_cidrs: Duration::from_secs(300) }
    }
}

#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum Error {
    #[error("timeout waiting for node {node:?} to exist")]
    NoNode { node: String },
    #[error("timeout waiting for PodCIDR allocation on node {node:?}, which detectLocalMode NodeCIDR needs")]
    NoPodCidr { node: String },
}

/// Waits for the first list, however long the API server takes, and then with `patience` for what
/// is missing. `needs_pod_cidrs` is true if `detectLocalMode` is NodeCIDR.
pub(super) async fn wait_for(
    name: &str,
    own_node: &mut watch::Receiver<OwnNode>,
    needs_pod_cidrs: bool,
    patience: Patience,
) -> Result<Option<Node>, Error> {
    wait_until(own_node, OwnNode::is_listed).await;
    let has_addresses = |node: &OwnNode| !node.addresses().is_empty();
    if !has_addresses(&own_node.borrow()) {
        tracing::info!(node = name, at_most = ?patience.addresses, "waiting for the Node and its addresses");
        let _ = timeout(patience.addresses, wait_until(own_node, has_addresses)).await;
    }
    let has_pod_cidrs = |node: &OwnNode| node.node().is_some_and(|node| !node.pod_cidrs.is_empty());
    if needs_pod_cidrs && !has_pod_cidrs(&own_node.borrow()) {
        tracing::info!(node = name, at_most = ?patience.pod_cidrs, "waiting for the Node's pod CIDRs");
        let _ = timeout(patience.pod_cidrs, wait_until(own_node, has_pod_cidrs)).await;
    }
    let node = own_node.borrow_and_update().node().cloned();
    match &node {
        None if needs_pod_cidrs => return Err(Error::NoNode { node: name.to_owned() }),
        Some(node) if needs_pod_cidrs && node.pod_cidrs.is_empty() => {
            return Err(Error::NoPodCidr { node: name.to_owned() });
        }
        None => tracing::error!(node = name, "Timed out waiting for node to exist"),
        Some(node) if node.addresses.is_empty() => {
            tracing::error!(node = %node.name, "Timed out waiting for node to be assigned IPs");
        }
        Some(node) => {
            let addresses = host_addresses(&node.addresses);
            tracing::info!(node = %node.name, ?addresses, "the Node's addresses are known");
        }
    }
    Ok(node)
}

/// Waits until the Node is `enough`. It never completes after the source has ended, because then
/// the process is about to end.
async fn wait_until(own_node: &mut watch::Receiver<OwnNode>, enough: impl Fn(&OwnNode) -> bool) {
    if own_node.wait_for(enough).await.is_err() {
        std::future::pending().await
    }
}

/// A change of the Node that this proxy was not set up for.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum Change {
    #[error(
        "NodeIPs changed for the node: they were {}, now they are {}; the proxy must be restarted",
        list(before),
        list(now)
    )]
    Addresses { before: Vec<IpAddr>, now: Vec<IpAddr> },
    #[error(
        "PodCIDRs changed for the node: they were {}, now they are {}; the proxy must be restarted",
        list(before),
        list(now)
    )]
    PodCidrs { before: Vec<IpNet>, now: Vec<IpNet> },
    #[error("Node is being deleted; the proxy must be restarted")]
    Deleted,
}

fn list<T: fmt::Display>(all: &[T]) -> String {
    if all.is_empty() {
        return "none".to_owned();
    }
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Completes with the first change that needs a new process. `before` is the Node by which this
/// proxy was set up. A change that is undone between two updates may be missed, and needs no new
/// process.
pub(super) async fn changed(
    own_node: &mut watch::Receiver<OwnNode>,
    before: Option<Node>,
    needs_pod_cidrs: bool,
) -> Change {
    let mut exists = before.is_some();
    let before = before.unwrap_or_default();
    loop {
        if own_node.changed().await.is_err() {
            std::future::pending().await
        }
        match own_node.borrow_and_update().node() {
            None if exists => return Change::Deleted,
            None => {}
            Some(now) => {
                exists = true;
                if let Some(change) = difference(&before, now, needs_pod_cidrs) {
                    return change;
                }
            }
        }
    }
}

fn difference(before: &Node, now: &Node, needs_pod_cidrs: bool) -> Option<Change> {
    if needs_pod_cidrs && before.pod_cidrs != now.pod_cidrs {
        return Some(Change::PodCidrs { before: before.pod_cidrs.clone(), now: now.pod_cidrs.clone() });
    }
    let (before, now) = (host_addresses(&before.addresses), host_addresses(&now.addresses));
    (before != now).then_some(Change::Addresses { before, now })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn node(addresses: &[&str], pod_cidrs: &[&str]) -> Option<Node> {
        Some(Node {
            name: "a".into(),
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
            pod_cidrs: pod_cidrs.iter().map(|text| text.parse().unwrap()).collect(),
            ..Node::default()
        })
    }

    fn listed(node: &Option<Node>) -> OwnNode {
        node.clone().map_or(OwnNode::Absent, OwnNode::Present)
    }

    /// Lists these Nodes one after the other, as a source that does not end.
    async fn list_each(own_node: &watch::Sender<OwnNode>, nodes: &[Option<Node>]) {
        for node in nodes {
            own_node.send_replace(listed(node));
            tokio::task::yield_now().await;
        }
    }

    /// Short timeouts, for tests in which nothing more comes. The clock of these tests is paused.
    /// It moves on only when every task waits, so a test that gets no CPU for a while meets no
    /// timeout.
    const SHORT: Patience =
        Patience { addresses: Duration::from_millis(20), pod_cidrs: Duration::from_millis(20) };

    #[rstest]
    #[case::late(&[None, node(&[], &[]), node(&["192.0.2.1"], &[])], false, Ok(node(&["192.0.2.1"], &[])))]
    #[case::without_addresses(&[node(&[], &[])], false, Ok(node(&[], &[])))]
    #[case::pod_cidrs_are_not_asked_for(&[node(&["192.0.2.1"], &["10.1.0.0/24"])], false, Ok(node(&["192.0.2.1"], &["10.1.0.0/24"])))]
    #[case::pod_cidrs_come_late(
        &[None, node(&["192.0.2.1"], &[]), node(&["192.0.2.1"], &["10.1.0.0/24"])],
        true,
        Ok(node(&["192.0.2.1"], &["10.1.0.0/24"])),
    )]
    #[case::pod_cidrs_never_come(&[node(&["192.0.2.1"], &[])], true, Err(Error::NoPodCidr { node: "a".into() }))]
    #[case::pod_cidrs_of_no_node(&[None], true, Err(Error::NoNode { node: "a".into() }))]
    #[case::pod_cidrs_suffice_without_addresses(&[node(&[], &["10.1.0.0/24"])], true, Ok(node(&[], &["10.1.0.0/24"])))]
    #[tokio::test(start_paused = true)]
    async fn what_is_waited_for(
        #[case] first: &[Option<Node>],
        #[case] needs_pod_cidrs: bool,
        #[case] expected: Result<Option<Node>, Error>,
    ) {
        let own_node = watch::Sender::default();
        let mut receiver = own_node.subscribe();
        let waited = wait_for("a", &mut receiver, needs_pod_cidrs, SHORT);
        let (found, ()) = tokio::join!(biased; waited, list_each(&own_node, first));
        assert_eq!(found, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_list_is_waited_for_without_a_limit() {
        let own_node = watch::Sender::default();
        let mut receiver = own_node.subscribe();
        let waited = wait_for("a", &mut receiver, true, SHORT);
        tokio::pin!(waited);
        let much_longer = (SHORT.addresses + SHORT.pod_cidrs) * 3;
        assert!(timeout(much_longer, &mut waited).await.is_err());
        own_node.send_replace(listed(&node(&["192.0.2.1"], &["10.1.0.0/24"])));
        assert!(waited.await.unwrap().is_some());
    }

    fn addresses(before: &[&str], now: &[&str]) -> Option<Change> {
        let parse = |all: &[&str]| all.iter().map(|text| text.parse().unwrap()).collect();
        Some(Change::Addresses { before: parse(before), now: parse(now) })
    }

    #[rstest]
    #[case::nothing(node(&["192.0.2.1"], &[]), &[node(&["192.0.2.1"], &[])], false, None)]
    #[case::a_second_family(
        node(&["192.0.2.1"], &[]),
        &[node(&["192.0.2.1", "2001:db8::1"], &[])],
        false,
        addresses(&["192.0.2.1"], &["192.0.2.1", "2001:db8::1"]),
    )]
    #[case::no_address_any_more(node(&["192.0.2.1"], &[]), &[node(&[], &[])], false, addresses(&["192.0.2.1"], &[]))]
    #[case::it_comes_without_addresses(None, &[None, node(&[], &[])], false, None)]
    #[case::it_comes_without_addresses_and_goes(None, &[node(&[], &[]), None], false, Some(Change::Deleted))]
    #[case::pod_cidrs_that_do_not_matter(
        node(&["192.0.2.1"], &["10.1.0.0/24"]), &[node(&["192.0.2.1"], &["10.2.0.0/24"])], false, None
    )]
    #[case::pod_cidrs(
        node(&["192.0.2.1"], &["10.1.0.0/24"]),
        &[node(&["192.0.2.1"], &["10.2.0.0/24"])],
        true,
        Some(Change::PodCidrs {
            before: vec!["10.1.0.0/24".parse().unwrap()],
            now: vec!["10.2.0.0/24".parse().unwrap()],
        }),
    )]
    #[tokio::test(start_paused = true)]
    async fn what_ends_the_process(
        #[case] before: Option<Node>,
        #[case] later: &[Option<Node>],
        #[case] needs_pod_cidrs: bool,
        #[case] expected: Option<Change>,
    ) {
        let own_node = watch::Sender::default();
        let mut receiver = own_node.subscribe();
        let change = timeout(Duration::from_millis(20), changed(&mut receiver, before, needs_pod_cidrs));
        let (change, ()) = tokio::join!(biased; change, list_each(&own_node, later));
        assert_eq!(change.ok(), expected);
    }

    /// The Node is deleted and back before the first check.
    #[tokio::test(start_paused = true)]
    async fn a_node_that_is_deleted_and_back_as_it_was_needs_no_new_process() {
        let before = node(&["192.0.2.1"], &[]);
        let own_node = watch::Sender::new(listed(&before));
        let mut receiver = own_node.subscribe();
        own_node.send_replace(OwnNode::Absent);
        own_node.send_replace(listed(&before));
        let change = timeout(Duration::from_millis(20), changed(&mut receiver, before, false));
        assert!(change.await.is_err());
    }
}
