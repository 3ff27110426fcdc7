//! The changes of the cluster, and what every proxy shows meanwhile.

use std::net::{Ipv4Addr, TcpListener};

use anyhow::{Context, Result, ensure};
use lab::namespace::within;
use nix::unistd::gethostname;
use serde_json::{Value, json};

use crate::{
    Seen,
    cluster::{CHECKED, Cluster, Endpoint, soon},
    network::NODE_ADDRESS,
    page::{self, HEALTH, Keep, PAGES, Page, families, get},
    peer::{Peer, Program},
};

/// Resources that a proxy must be allowed to read.
const RIGHTS: [(&str, &str); 4] = [
    ("", "nodes"),
    ("", "services"),
    ("discovery.k8s.io", "endpointslices"),
    ("networking.k8s.io", "servicecidrs"),
];

/// The proxies, with what was seen of them.
struct Scene<'a> {
    cluster: Cluster,
    peers: Vec<(Peer<'a>, Seen)>,
}

/// Goes through all states with all programs at once. Returns what was seen of each.
pub(crate) fn play(programs: &[Program<'_>]) -> Result<Vec<Seen>> {
    let cluster = Cluster::start()?;
    let peers = (1..)
        .zip(programs)
        .map(|(number, program)| Ok((Peer::new(*program, number, &cluster)?, Seen::new())));
    let peers = peers.collect::<Result<_>>()?;
    let mut scene = Scene { cluster, peers };
    scene.begins()?;
    scene.all_is_well()?;
    scene.load_balancers_ask()?;
    scene.nothing_can_be_written()?;
    scene.the_node_goes_away()?;
    scene.families()?;
    scene.only_some_addresses_have_node_ports()?;
    scene.a_port_is_taken()?;
    Ok(scene.peers.into_iter().map(|(_, seen)| seen).collect())
}

impl Scene<'_> {
    fn each(&mut self, act: impl Fn(&Cluster, &mut Peer<'_>, &mut Seen) -> Result<()>) -> Result<()> {
        self.peers.iter_mut().try_for_each(|(peer, seen)| {
            let mode = peer.mode();
            act(&self.cluster, peer, seen).with_context(|| format!("in mode {mode}"))
        })
    }

    /// Waits until all answer with this status, then records the pages.
    fn health(&mut self, state: &str, status: u16) -> Result<()> {
        self.each(|_, peer, _| peer.until_healthz(status))?;
        self.see(HEALTH, &format!(", {state}"))
    }

    /// Waits until proxy-ctl reports whether everything that was listed is programmed. Nothing in
    /// this script makes a thread stuck, so the liveness probe never fails.
    fn own_readiness(&mut self, status: u16) -> Result<()> {
        self.each(|_, peer, _| if peer.is_own() { peer.until_ready(status) } else { Ok(()) })
    }

    /// Records pages by their names and this state.
    fn see(&mut self, pages: &[Page], state: &str) -> Result<()> {
        self.each(|cluster, peer, seen| {
            for page in pages {
                seen.insert(format!("page {}{state}", page.name), peer.see(page, cluster)?);
            }
            Ok(())
        })
    }

    /// Starts the proxies while the Node is known and nothing else may be listed yet.
    fn begins(&mut self) -> Result<()> {
        self.cluster.grant(&RIGHTS[..1])?;
        self.each(|cluster, peer, _| peer.start(cluster, &json!({})))?;
        self.health("before everything is listed", 200)?;
        self.own_readiness(503)?;
        self.cluster.grant(&RIGHTS)
    }

    fn all_is_well(&mut self) -> Result<()> {
        self.each(|_, peer, _| {
            // Both IP families have been written once by then.
            let line = "kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv4\"} ";
            peer.until("the first sync", |peer| Ok(is_counted(&peer.metrics("/metrics")?, line)))
        })?;
        self.cluster.endpoints_of_web(2, Some(soon()?))?;
        let line = "kubeproxy_network_programming_duration_seconds_count{ip_family=\"IPv4\"} ";
        self.each(|_, peer, _| {
            peer.until("the change is programmed", |peer| Ok(is_counted(&peer.metrics("/metrics")?, line)))
        })?;
        self.health("all is well", 200)?;
        self.own_readiness(200)?;
        self.see(PAGES, "")
    }

    fn load_balancers_ask(&mut self) -> Result<()> {
        use Endpoint::{Elsewhere, Here, Leaving};
        let (name, port) = CHECKED;
        self.cluster.health_checked(name, port)?;
        let states: [(&str, &[Endpoint], usize); 4] = [
            ("two endpoints here", &[Here, Here, Elsewhere], 2),
            ("endpoints elsewhere", &[Elsewhere], 0),
            ("one endpoint here", &[Here, Elsewhere], 1),
            ("one endpoint here that is terminating", &[Leaving, Elsewhere], 0),
        ];
        for (state, endpoints, local) in states {
            self.cluster.endpoints_of_checked(endpoints)?;
            let told = format!("\"localEndpoints\": {local},");
            self.each(|_, peer, _| peer.until(state, |peer| Ok(peer.ask(&CHECK)?.text().contains(&told))))?;
            self.see(&[CHECK], &format!(", {state}"))?;
        }
        self.cluster.endpoints_of_checked(&[Here])?;
        self.each(|_, peer, seen| {
            peer.until("an endpoint", |peer| Ok(peer.ask(&CHECK)?.status == 200))?;
            seen.insert("page healthCheckNodePort, loopback".into(), on_loopback(peer));
            Ok(())
        })?;
        self.see(CHECKS, "")?;
        // A client that asks now would be told about a node to which it must not send.
        self.cluster.not_health_checked(name)?;
        self.each(|_, peer, _| {
            peer.until("the end of the health check", |peer| Ok(peer.ask(&CHECK).is_err()))
        })?;
        self.cluster.health_checked(name, port)?;
        self.each(|_, peer, _| peer.until("an answer again", |peer| Ok(peer.ask(&CHECK).is_ok())))?;
        self.see(&[CHECK], ", policy Local again")
    }

    /// Makes all writes fail: kube-proxy cannot run the tools that write rules, and proxy-ctl
    /// cannot pin its maps.
    fn nothing_can_be_written(&mut self) -> Result<()> {
        self.each(|_, peer, _| peer.break_tools())?;
        self.cluster.endpoints_of_web(50, None)?;
        self.health("a change waits too long", 503)?;
        self.own_readiness(503)?;
        self.see(&[CHECK], ", a change waits too long")?;
        self.cluster.endpoints_of_web(2, None)?;
        self.each(|_, peer, _| peer.restore_tools())?;
        self.health("all is well again", 200)?;
        self.own_readiness(200)
    }

    fn the_node_goes_away(&mut self) -> Result<()> {
        self.cluster.taint(&["node.kubernetes.io/unschedulable"])?;
        self.cluster.taint(&["ToBeDeletedByClusterAutoscaler"])?;
        self.health("to be deleted by the autoscaler", 503)?;
        self.cluster.taint(&[])?;
        self.each(|_, peer, _| peer.until_healthz(200))?;
        self.cluster.begin_to_delete_node()?;
        self.health("being deleted", 503)?;
        self.see(&[CHECK], ", the node being deleted")
    }

    fn families(&mut self) -> Result<()> {
        self.each(|_, peer, seen| {
            for (page, prefix) in [("/metrics", "metric"), ("/metrics/slis", "SLI")] {
                let families = families(&peer.metrics(page)?);
                seen.extend(families.into_iter().map(|(name, family)| (format!("{prefix} {name}"), family)));
            }
            Ok(())
        })
    }

    fn only_some_addresses_have_node_ports(&mut self) -> Result<()> {
        let addresses = json!({"nodePortAddresses": [format!("{NODE_ADDRESS}/32")]});
        self.each(|cluster, peer, _| peer.start(cluster, &addresses))?;
        self.each(|_, peer, seen| {
            peer.until("an answer at the node's address", |peer| Ok(peer.ask(&CHECK)?.status == 200))?;
            seen.insert(
                "page healthCheckNodePort, loopback, with nodePortAddresses".into(),
                on_loopback(peer),
            );
            Ok(())
        })
    }

    /// Lets another program listen on a port that a Service's load balancer is to ask, on one node
    /// after another.
    fn a_port_is_taken(&mut self) -> Result<()> {
        let cluster = &self.cluster;
        for (number, (peer, seen)) in (1..).zip(&mut self.peers) {
            let (name, port) = (format!("taken-{number}"), CHECKED.1 + number);
            let address: Ipv4Addr = NODE_ADDRESS.parse().context("an address")?;
            let _taken = within(&peer.namespace.name, || {
                TcpListener::bind((address, port)).with_context(|| format!("listening on {address}:{port}"))
            })?;
            cluster.health_checked(&name, port)?;
            let is_it = |event: &Value| {
                event["regarding"]["name"] == *name && event["reason"] == "FailedToStartServiceHealthcheck"
            };
            peer.until("the event", |_| Ok(cluster.events()?.iter().any(is_it)))?;
            let events = cluster.events()?;
            let mut event = events.into_iter().find(is_it).context("the event is gone")?;
            let told = event["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            // Times, and numbers from the machine's clock, are left out.
            event["metadata"] = json!({
                "namespace": event["metadata"]["namespace"],
                "name": told.split_once('.').map(|(name, _)| name),
            });
            if let Some(fields) = event.as_object_mut() {
                fields.remove("series");
            }
            let host = gethostname().context("asking for the host's name")?;
            ensure!(
                event["reportingInstance"] == format!("kube-proxy-{}", host.to_string_lossy()),
                "{event}"
            );
            event["reportingInstance"] = "kube-proxy-<host>".into();
            let text = event.to_string().replace(&name, "<service>").replace(&port.to_string(), "<port>");
            let mut event = serde_json::from_str(&text).context("our own JSON")?;
            page::mask(&mut event);
            seen.insert("event healthCheckNodePort that is taken".into(), event);
        }
        Ok(())
    }
}

fn on_loopback(peer: &Peer<'_>) -> Value {
    let there = Page { address: "127.0.0.1", ..CHECK };
    if peer.ask(&there).is_ok() { "answers".into() } else { "refuses".into() }
}

/// Returns true if a line of metrics has another value than 0.
fn is_counted(text: &str, line: &str) -> bool {
    text.lines().any(|found| found.strip_prefix(line).is_some_and(|count| count != "0"))
}

const CHECK: Page = Page { address: NODE_ADDRESS, ..get("healthCheckNodePort", CHECKED.1, "/", Keep::Text) };

const CHECKS: &[Page] = &[
    CHECK,
    Page { name: "healthCheckNodePort, other path", path: "/any?a=b", ..CHECK },
    Page { name: "healthCheckNodePort, HEAD", method: "HEAD", ..CHECK },
    Page { name: "healthCheckNodePort, POST", method: "POST", ..CHECK },
];
