//! The own Node at the start and afterwards: what must be known of it before this proxy is set up, and which of its
//! changes end the process, so that it is set up anew. Limits and consequences are kube-proxy's.

use std::{fmt, net::IpAddr, time::Duration};

use ipnet::IpNet;
use tokio::{
    sync::mpsc,
    time::{Instant, timeout_at},
};

use crate::{model::objects::Node, node::host_addresses};

/// The own Node as the source tells it, from its first list on; `None`: there is none.
pub type Nodes = mpsc::UnboundedReceiver<Option<Node>>;

/// How long a Node is waited for that is not complete.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Then the proxy starts without addresses.
    pub addresses: Duration,
    /// Then the proxy ends.
    pub pod_cidrs: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { addresses: Duration::from_secs(30), pod_cidrs: Duration::from_secs(300) }
    }
}

#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Error {
    #[error("timeout waiting for node {node:?} to exist")]
    NoNode { node: String },
    #[error("timeout waiting for PodCIDR allocation on node {node:?}, which detectLocalMode NodeCIDR needs")]
    NoPodCidr { node: String },
}

/// Waits for the first list, however long the API server takes, then with `patience` for what is missing.
/// `needs_pod_cidrs`: local traffic is told by the Node's pod CIDRs.
pub async fn settle(
    name: &str,
    nodes: &mut Nodes,
    needs_pod_cidrs: bool,
    patience: Patience,
) -> Result<Option<Node>, Error> {
    let mut node = next(nodes).await;
    let has_addresses = |node: &Node| !node.addresses.is_empty();
    if !node.as_ref().is_some_and(has_addresses) {
        tracing::info!(node = name, at_most = ?patience.addresses, "waiting for the Node and its addresses");
        wait_until(nodes, &mut node, patience.addresses, has_addresses).await;
    }
    let has_pod_cidrs = |node: &Node| !node.pod_cidrs.is_empty();
    if needs_pod_cidrs && !node.as_ref().is_some_and(has_pod_cidrs) {
        tracing::info!(node = name, at_most = ?patience.pod_cidrs, "waiting for the Node's pod CIDRs");
        wait_until(nodes, &mut node, patience.pod_cidrs, has_pod_cidrs).await;
        match &node {
            None => return Err(Error::NoNode { node: name.to_owned() }),
            Some(node) if !has_pod_cidrs(node) => {
                return Err(Error::NoPodCidr { node: name.to_owned() });
            }
            Some(_) => {}
        }
    }
    match &node {
        None => tracing::error!(node = name, "Timed out waiting for node to exist"),
        Some(node) if !has_addresses(node) => {
            tracing::error!(node = %node.name, "Timed out waiting for node to be assigned IPs");
        }
        Some(node) => {
            let addresses = host_addresses(&node.addresses);
            tracing::info!(node = %node.name, ?addresses, "the Node's addresses are known");
        }
    }
    Ok(node)
}

/// Never completes once nobody tells of Nodes any more: then the process is about to end.
async fn next(nodes: &mut Nodes) -> Option<Node> {
    match nodes.recv().await {
        Some(node) => node,
        None => std::future::pending().await,
    }
}

async fn wait_until(
    nodes: &mut Nodes,
    node: &mut Option<Node>,
    limit: Duration,
    enough: impl Fn(&Node) -> bool,
) {
    let deadline = Instant::now() + limit;
    while !node.as_ref().is_some_and(&enough) {
        match timeout_at(deadline, next(nodes)).await {
            Ok(told) => *node = told,
            Err(_) => return,
        }
    }
}

/// A change of the Node that this proxy was not set up for.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Change {
    #[error(
        "NodeIPs changed for the node: they were {}, now they are {}; the proxy must be started anew",
        list(before),
        list(now)
    )]
    Addresses { before: Vec<IpAddr>, now: Vec<IpAddr> },
    #[error(
        "PodCIDRs changed for the node: they were {}, now they are {}; the proxy must be started anew",
        list(before),
        list(now)
    )]
    PodCidrs { before: Vec<IpNet>, now: Vec<IpNet> },
    #[error("Node is being deleted; the proxy must be started anew")]
    Deleted,
}

fn list<T: fmt::Display>(all: &[T]) -> String {
    if all.is_empty() {
        return "none".to_owned();
    }
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Completes with the first change that matters. `before`: the Node by which this proxy was set up.
pub async fn changed(nodes: &mut Nodes, before: Option<Node>, needs_pod_cidrs: bool) -> Change {
    let mut exists = before.is_some();
    let before = before.unwrap_or_default();
    loop {
        let now = next(nodes).await;
        match (&now, exists) {
            (None, true) => return Change::Deleted,
            (None, false) => {}
            (Some(now), _) => {
                if let Some(change) = difference(&before, now, needs_pod_cidrs) {
                    return change;
                }
            }
        }
        exists = now.is_some();
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

    /// The source has told these, and goes on running.
    fn told(told: &[Option<Node>]) -> (mpsc::UnboundedSender<Option<Node>>, Nodes) {
        let (teller, nodes) = mpsc::unbounded_channel();
        for node in told {
            teller.send(node.clone()).unwrap();
        }
        (teller, nodes)
    }

    /// Nothing more comes, so that nothing is waited for in vain for long.
    const SHORT: Patience =
        Patience { addresses: Duration::from_millis(20), pod_cidrs: Duration::from_millis(20) };

    #[rstest]
    #[case::complete_at_once(&[node(&["192.0.2.1"], &[])], false, Ok(node(&["192.0.2.1"], &[])))]
    #[case::late(&[None, node(&[], &[]), node(&["192.0.2.1"], &[])], false, Ok(node(&["192.0.2.1"], &[])))]
    #[case::never(&[None], false, Ok(None))]
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
    #[tokio::test]
    async fn what_is_waited_for(
        #[case] first: &[Option<Node>],
        #[case] needs_pod_cidrs: bool,
        #[case] expected: Result<Option<Node>, Error>,
    ) {
        let (_teller, mut nodes) = told(first);
        assert_eq!(settle("a", &mut nodes, needs_pod_cidrs, SHORT).await, expected);
    }

    #[tokio::test]
    async fn the_first_list_is_waited_for_without_a_limit() {
        let (teller, mut nodes) = told(&[]);
        let settled = settle("a", &mut nodes, true, SHORT);
        tokio::pin!(settled);
        let much_longer = (SHORT.addresses + SHORT.pod_cidrs) * 3;
        assert!(tokio::time::timeout(much_longer, &mut settled).await.is_err());
        teller.send(node(&["192.0.2.1"], &["10.1.0.0/24"])).unwrap();
        assert!(settled.await.unwrap().is_some());
    }

    fn addresses(before: &[&str], now: &[&str]) -> Option<Change> {
        let parse = |all: &[&str]| all.iter().map(|text| text.parse().unwrap()).collect();
        Some(Change::Addresses { before: parse(before), now: parse(now) })
    }

    #[rstest]
    #[case::nothing(node(&["192.0.2.1"], &[]), &[node(&["192.0.2.1"], &[])], false, None)]
    #[case::another_address(
        node(&["192.0.2.1"], &[]), &[node(&["192.0.2.2"], &[])], false, addresses(&["192.0.2.1"], &["192.0.2.2"])
    )]
    #[case::a_second_family(
        node(&["192.0.2.1"], &[]),
        &[node(&["192.0.2.1", "2001:db8::1"], &[])],
        false,
        addresses(&["192.0.2.1"], &["192.0.2.1", "2001:db8::1"]),
    )]
    #[case::a_second_address_of_a_family(
        node(&["192.0.2.1"], &[]), &[node(&["192.0.2.1", "192.0.2.2"], &[])], false, None
    )]
    #[case::no_address_any_more(node(&["192.0.2.1"], &[]), &[node(&[], &[])], false, addresses(&["192.0.2.1"], &[]))]
    #[case::it_comes_after_all(None, &[node(&["192.0.2.1"], &[])], false, addresses(&[], &["192.0.2.1"]))]
    #[case::it_comes_without_addresses(None, &[None, node(&[], &[])], false, None)]
    #[case::it_comes_without_addresses_and_goes(None, &[node(&[], &[]), None], false, Some(Change::Deleted))]
    #[case::it_goes(node(&["192.0.2.1"], &[]), &[None, node(&["192.0.2.1"], &[])], false, Some(Change::Deleted))]
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
    #[tokio::test]
    async fn what_ends_the_process(
        #[case] before: Option<Node>,
        #[case] later: &[Option<Node>],
        #[case] needs_pod_cidrs: bool,
        #[case] expected: Option<Change>,
    ) {
        let (_teller, mut nodes) = told(later);
        let change = changed(&mut nodes, before, needs_pod_cidrs);
        let change = tokio::time::timeout(Duration::from_millis(20), change).await.ok();
        assert_eq!(change, expected);
    }
}
