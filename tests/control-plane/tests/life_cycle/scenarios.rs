//! The scenarios by name, each of which says what must hold.

use std::{fs, net::TcpListener};

use anyhow::{Context, Result, ensure};
use control_plane::binaries::Program;
use nix::sys::signal::Signal;
use scenario::{Scenario, Skip, scenarios};
use serde_json::json;

use crate::{
    api_server::an_api_server_that_is_away_changes_nothing,
    former_rules::{
        a_chain_that_only_others_lead_to_is_emptied, a_kube_proxy_that_still_runs_is_named_and_not_fought,
        a_legacy_table_that_cannot_be_written_keeps_no_other, clean_up_leaves_what_kube_proxys_leaves,
        connections_that_it_leaves_live_on_where_nobody_else_translates, health_checks_stay_accepted,
        run_leaves_them_where_it_is_told_to, run_removes_them_and_connections_live_on,
        what_comes_back_while_something_else_cannot_be_removed_is_not_fought,
        what_forwarded_connections_need_stays_where_others_are_dropped,
        what_is_delegated_holds_no_removal_back, what_others_use_of_kube_proxy_stays_and_is_named,
        who_masquerades_by_a_map_still_does,
    },
    node::{Node, nothing_is_programmed},
    own_service::an_api_server_behind_its_service_is_dialled_again_without_endpoints,
    proxy::{Proxy, answers, get, metric},
    rights::{
        what_rbac_denies_is_named_and_comes_once_granted, without_the_right_to_read_nodes_services_work,
    },
    until::until,
    world::{World, node},
};

/// Returns the scenarios in their order.
pub(crate) fn all() -> Vec<Scenario<World>> {
    scenarios![
        a_late_node_is_waited_for,
        a_node_that_does_not_come_is_started_without,
        another_node_address_ends_it,
        a_deleted_node_ends_it_and_is_waited_for_again,
        pod_cidrs_are_waited_for,
        other_pod_cidrs_end_it,
        pod_cidrs_of_another_family_end_it,
        a_swapped_config_map_is_taken_over_or_ends_it,
        an_invalid_configuration_file_changes_nothing,
        sigterm_leaves_everything_in_place,
        an_address_that_is_taken_ends_it_with_an_event,
        init_only_sets_the_kernel_up_and_ends,
        an_api_server_that_is_away_changes_nothing,
        an_api_server_behind_its_service_is_dialled_again_without_endpoints,
        what_rbac_denies_is_named_and_comes_once_granted,
        without_the_right_to_read_nodes_services_work,
        kube_proxy_ends_alike,
        kernel_parameters_are_those_of_kube_proxy,
        kube_proxy_writes_the_same_event,
        connections_that_it_leaves_live_on_where_nobody_else_translates,
        clean_up_leaves_what_kube_proxys_leaves,
        what_others_use_of_kube_proxy_stays_and_is_named,
        who_masquerades_by_a_map_still_does,
        a_chain_that_only_others_lead_to_is_emptied,
        run_removes_them_and_connections_live_on,
        health_checks_stay_accepted,
        what_forwarded_connections_need_stays_where_others_are_dropped,
        run_leaves_them_where_it_is_told_to,
        what_is_delegated_holds_no_removal_back,
        a_kube_proxy_that_still_runs_is_named_and_not_fought,
        what_comes_back_while_something_else_cannot_be_removed_is_not_fought,
        a_legacy_table_that_cannot_be_written_keeps_no_other,
    ]
}

pub(crate) const ADDRESS: &[&str] = &["192.0.2.1"];
pub(crate) const PROGRAMMED: &str = "everything listed is programmed";

fn a_late_node_is_waited_for(world: &mut World) -> Result<()> {
    let own = Node::new(world, "late", 1)?;
    let mut proxy = own.start(&json!({}))?;
    proxy.says("waiting for the Node and its addresses")?;
    answers(&own.healthz(), "/livez", 200)?;
    answers(&own.healthz(), "/healthz", 503)?;
    ensure!(own.services()? == json!([]), "something is programmed before the Node is known");

    world.apply(&node(own.name, ADDRESS, &[]))?;
    proxy.says(PROGRAMMED)?;
    answers(&own.healthz(), "/healthz", 200)?;
    own.serves()?;
    let starting = world.event(own.name, "Starting")?;
    ensure!(starting["action"] == "StartKubeProxy" && starting["type"] == "Normal", "{starting}");
    ensure!(starting["reportingController"] == "kube-proxy", "{starting}");
    proxy.runs()
}

/// Runs for half a minute, because proxy-ctl waits that long for the Node. No other scenario takes
/// as long as what it tests.
fn a_node_that_does_not_come_is_started_without(world: &mut World) -> Result<()> {
    let (own, real) = (Node::new(world, "never", 2)?, Node::new(world, "real-never", 23)?);
    let mut proxy = own.start(&json!({}))?;
    let kube_proxy = real.start_kube_proxy_if_here(&json!({"mode": "nftables"}))?;
    proxy.says("waiting for the Node and its addresses")?;
    proxy.says("Timed out waiting for node to exist")?;
    proxy.says("Can't determine this node's IP, assuming loopback")?;
    proxy.says(PROGRAMMED)?;
    answers(&own.healthz(), "/healthz", 503)?;
    answers(&own.healthz(), "/livez", 200)?;
    if kube_proxy.is_ok() {
        answers(&real.healthz(), "/livez", 200)?;
        answers(&real.healthz(), "/healthz", 503)?;
    }

    // The Node comes after all. The proxy was not set up for it.
    world.apply(&node(own.name, ADDRESS, &[]))?;
    proxy.ends()?.is(1, "NodeIPs changed for the node: they were none, now they are 192.0.2.1")?;
    own.serves()?;
    kube_proxy.map_err(Skip)?;
    Ok(())
}

fn another_node_address_ends_it(world: &mut World) -> Result<()> {
    let own = Node::known(world, "moved", 3)?;
    let mut proxy = own.run(&json!({}))?;
    // A second address of the same family changes nothing.
    world.apply(&node(own.name, &["192.0.2.1", "192.0.2.7"], &[]))?;
    world.apply(&node(own.name, &["192.0.2.2"], &[]))?;
    let end = proxy.ends()?;
    end.is(1, "NodeIPs changed for the node: they were 192.0.2.1, now they are 192.0.2.2")?;
    own.serves()?;

    let proxy = own.run(&json!({}))?;
    ensure!(proxy.log().contains("192.0.2.2"), "{}", proxy.log());
    Ok(())
}

fn a_deleted_node_ends_it_and_is_waited_for_again(world: &mut World) -> Result<()> {
    let own = Node::known(world, "deleted", 4)?;
    let mut proxy = own.run(&json!({}))?;
    world.delete(&node(own.name, &[], &[]))?;
    proxy.ends()?.is(1, "Node is being deleted")?;
    own.serves()?;

    let proxy = own.start(&json!({}))?;
    proxy.says("waiting for the Node and its addresses")?;
    answers(&own.healthz(), "/healthz", 503)?;
    own.serves()?;
    world.apply(&node(own.name, ADDRESS, &[]))?;
    proxy.says(PROGRAMMED)?;
    answers(&own.healthz(), "/healthz", 200)?;
    ensure!(metric(&own.metrics(), "proxy_writes_total")? == 0.0, "a start without changes writes nothing");
    Ok(())
}

fn pod_cidrs_are_waited_for(world: &mut World) -> Result<()> {
    let own = Node::known(world, "without-cidr", 5)?;
    let mut proxy = own.start(&json!({"detectLocalMode": "NodeCIDR"}))?;
    proxy.says("waiting for the Node's pod CIDRs")?;
    ensure!(own.services()? == json!([]), "something is programmed before the pod CIDRs are known");
    world.apply(&node(own.name, ADDRESS, &["10.1.0.0/24"]))?;
    proxy.says(PROGRAMMED)?;
    proxy.runs()
}

/// Expects other pod CIDRs to end the proxy. The API server does not let a Node's pod CIDRs change.
/// So the Node is deleted and made anew while the proxy is stopped.
fn other_pod_cidrs_end_it(world: &mut World) -> Result<()> {
    let own = Node::new(world, "other-cidr", 6)?;
    world.apply(&node(own.name, ADDRESS, &["10.1.0.0/24"]))?;
    let mut proxy = own.run(&json!({"detectLocalMode": "NodeCIDR"}))?;
    proxy.send(Signal::SIGSTOP)?;
    world.server.kill();
    world.server.start_again()?;
    world.delete(&node(own.name, &[], &[]))?;
    world.apply(&node(own.name, ADDRESS, &["10.2.0.0/24"]))?;
    world.server.compact()?;
    world.server.restart()?;
    proxy.send(Signal::SIGCONT)?;
    proxy.ends()?.is(1, "PodCIDRs changed for the node: they were 10.1.0.0/24, now they are 10.2.0.0/24")?;
    Ok(())
}

fn pod_cidrs_of_another_family_end_it(world: &mut World) -> Result<()> {
    let own = Node::new(world, "other-family", 53)?;
    world.apply(&node(own.name, ADDRESS, &["2001:db8:1::/64"]))?;
    let mut proxy = own.start(&json!({"detectLocalMode": "NodeCIDR"}))?;
    proxy.ends()?.is(1, "configuration is incorrect: the cluster is IPv4-primary, but spec.podCIDRs")?;
    nothing_is_programmed(&own)
}

fn a_swapped_config_map_is_taken_over_or_ends_it(world: &mut World) -> Result<()> {
    let own = Node::known(world, "config-map", 7)?;
    let file = own.swap_config_map(&own.configuration(&json!({})))?;
    let mut proxy = own.start_with(&file, &[])?;
    proxy.says(PROGRAMMED)?;
    ensure!(!proxy.log().contains("what is programmed was compared"), "debug lines without -v 4");

    own.swap_config_map(&own.configuration(&json!({
        "logging": {"verbosity": 4},
        "iptables": {"syncPeriod": "1s"},
        "conntrack": {"maxPerCore": 0, "tcpCloseWaitTimeout": "30m"},
    })))?;
    proxy.says("it is applied")?;
    for field in ["conntrack.tcpCloseWaitTimeout", "iptables.syncPeriod", "logging.verbosity"] {
        ensure!(proxy.log().contains(field), "{field} is not named:\n{}", proxy.log());
    }
    proxy.says("everything compared and written")?;
    let resyncs = metric(&own.metrics(), "proxy_resyncs_total")?;
    own.until_metric(&proxy, "proxy_resyncs_total", |count| count > resyncs)?;
    if world.without_conntrack.is_none() {
        let is_in_force = || Ok((sysctl("nf_conntrack_tcp_timeout_close_wait")? == "1800").then_some(()));
        until("the timeout to be in force", is_in_force, || proxy.log())?;
    }
    let (_, shown) = get(&own.metrics(), "/configz")?.context("nobody listens")?;
    ensure!(shown.contains(r#""verbosity":4"#), "/configz shows what was: {shown}");
    proxy.runs()?;

    own.swap_config_map(
        &own.configuration(&json!({"clusterCIDR": "10.0.0.0/8", "bindAddressHardFail": true})),
    )?;
    let end = proxy.ends()?;
    end.is(1, "content of the proxy server's configuration file was updated")?;
    ensure!(
        end.log.contains("bindAddressHardFail, clusterCIDR changed"),
        "the fields are not named:\n{}",
        end.log
    );
    own.serves()?;
    let proxy = own.start_with(&file, &[])?;
    proxy.says(PROGRAMMED)?;
    let missing = world.without_conntrack.as_ref();
    missing.map_or(Ok(()), |reason| Err(Skip(format!("all but the timeout: {reason}")).into()))
}

fn an_invalid_configuration_file_changes_nothing(world: &mut World) -> Result<()> {
    let own = Node::known(world, "invalid", 8)?;
    let mut proxy = own.run(&json!({}))?;
    own.write_configuration(&json!({"oomScoreAdj": 2000}))?;
    proxy.says("the former configuration stays in force")?;
    ensure!(proxy.log().contains("oomScoreAdj"), "the field is not named:\n{}", proxy.log());
    own.until_metric(&proxy, "proxy_refused_configurations_total", |count| count == 1.0)?;
    let event = world.event(own.name, "InvalidConfiguration")?;
    ensure!(event["type"] == "Warning" && event["note"].to_string().contains("oomScoreAdj"), "{event}");
    own.write_configuration(&json!({}))?;
    proxy.says("the configuration file is valid again")?;
    proxy.runs()
}

fn sigterm_leaves_everything_in_place(world: &mut World) -> Result<()> {
    let own = Node::known(world, "terminated", 9)?;
    // A lower value needs CAP_SYS_RESOURCE.
    let mut proxy = own.run(&json!({"oomScoreAdj": 321}))?;
    ensure!(proxy.oom_score()? == "321", "oomScoreAdj is {}", proxy.oom_score()?);
    let before = own.services()?;
    proxy.send(Signal::SIGTERM)?;
    proxy.ends()?.is(0, "what is programmed goes on working")?;
    own.serves()?;
    ensure!(own.services()? == before, "{before}");
    Ok(())
}

fn an_address_that_is_taken_ends_it_with_an_event(world: &mut World) -> Result<()> {
    for (name, number, reason) in [
        ("healthz-taken", 10, "FailedToStartProxierHealthcheck"),
        ("metrics-taken", 11, "FailedToStartMetricServer"),
    ] {
        let own = Node::known(world, name, number)?;
        let address = if number == 10 { own.healthz() } else { own.metrics() };
        let _taken = TcpListener::bind(&address).with_context(|| format!("listening on {address}"))?;
        let mut proxy = own.start(&json!({"bindAddressHardFail": true}))?;
        proxy.ends()?.is(1, "cannot listen on")?;
        let event = world.event(own.name, reason)?;
        ensure!(event["type"] == "Warning" && event["action"] == "StartKubeProxy", "{event}");
    }
    Ok(())
}

fn init_only_sets_the_kernel_up_and_ends(world: &mut World) -> Result<()> {
    let own = Node::new(world, "init", 12)?;
    let conntrack =
        json!({"conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "2h", "udpTimeout": "25s"}});
    own.write_configuration(&conntrack)?;
    // There is no such Node, and `--init-only` does not ask for it.
    let mut proxy = own.start_with(&own.config_file(), &["--init-only"])?;
    proxy.ends()?.is(0, "System initialized and --init-only specified")?;
    ensure!(!own.has_pins(), "something is programmed");
    if let Some(reason) = &world.without_conntrack {
        return Err(Skip(format!("all but the timeouts: {reason}")).into());
    }
    ensure!(sysctl("nf_conntrack_tcp_timeout_established")? == "7200", "conntrack.tcpEstablishedTimeout");
    ensure!(sysctl("nf_conntrack_udp_timeout")? == "25", "conntrack.udpTimeout");
    Ok(())
}

/// Expects the real kube-proxy to end in the same way, where it can be asked cheaply.
fn kube_proxy_ends_alike(world: &mut World) -> Result<()> {
    let program = Program::KubeProxy.here()?.map_err(Skip)?;
    let own = Node::known(world, "real", 14)?;
    let start = |more| own.start_kube_proxy(&program, &more);
    let mode = "nftables";

    let mut proxy = start(json!({"mode": mode}))?;
    answers(&own.healthz(), "/healthz", 200)?;
    own.write_configuration(&json!({"mode": mode, "clusterCIDR": "10.0.0.0/8"}))?;
    proxy.ends()?.is(1, "content of the proxy server's configuration file was updated")?;

    let mut proxy = start(json!({"mode": mode}))?;
    answers(&own.healthz(), "/healthz", 200)?;
    proxy.send(Signal::SIGTERM)?;
    ensure!(
        proxy.ends()?.is_by(Signal::SIGTERM),
        "kube-proxy has learned to end in good order: do as it does"
    );

    let _taken = TcpListener::bind(own.healthz())?;
    let mut proxy = start(json!({"mode": mode, "bindAddressHardFail": true}))?;
    proxy.ends()?.is(1, "address already in use")?;
    Ok(())
}

/// Compares the events field by field, apart from the Node's name and the time.
fn kube_proxy_writes_the_same_event(world: &mut World) -> Result<()> {
    let program = Program::KubeProxy.here()?.map_err(Skip)?;
    let told = |own: &Node| -> Result<serde_json::Value> {
        let mut event = world.event(own.name, "Starting")?;
        let name = event["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let number = name.strip_prefix(&format!("{}.", own.name)).unwrap_or_default();
        ensure!(number.len() == 16 && u64::from_str_radix(number, 16).is_ok(), "its name is {name:?}");
        let time = event["eventTime"].as_str().unwrap_or_default().to_owned();
        ensure!(time.len() == "2026-01-01T00:00:00.000000Z".len(), "its time is {time:?}");
        ensure!(event["regarding"]["name"] == own.name, "it regards {}", event["regarding"]);
        event["metadata"] = json!({"namespace": event["metadata"]["namespace"]});
        event["eventTime"] = json!(null);
        event["regarding"]["name"] = json!(null);
        Ok(event)
    };
    let (ours, theirs) = (Node::known(world, "told-by-us", 15)?, Node::known(world, "told-by-them", 16)?);
    let _ours = ours.start(&json!({}))?;
    let _theirs = theirs.start_kube_proxy(&program, &json!({"mode": "nftables"}))?;
    let (ours, theirs) = (told(&ours)?, told(&theirs)?);
    ensure!(ours == theirs, "we tell {ours}, kube-proxy tells {theirs}");
    Ok(())
}

fn kernel_parameters_are_those_of_kube_proxy(world: &mut World) -> Result<()> {
    let real = Program::KubeProxy.here()?.map_err(Skip)?;
    world.without_conntrack.clone().map_or(Ok(()), |reason| Err(Skip(reason)))?;
    let own = Node::known(world, "parameters", 15)?;
    let sections = [
        json!({"maxPerCore": 0}),
        json!({
            "maxPerCore": 0, "tcpEstablishedTimeout": "2h0m0.9s", "tcpCloseWaitTimeout": "90s", "udpTimeout": "25s",
            "udpStreamTimeout": "50s", "tcpBeLiberal": true,
        }),
        json!({
            "maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s", "udpTimeout": "0s",
            "udpStreamTimeout": "0s", "tcpBeLiberal": false,
        }),
    ];
    for conntrack in sections {
        let mut found = Vec::new();
        for (program, mode) in [(&real, "nftables"), (&lab::program("proxy-ctl")?, "ebpf")] {
            for parameter in PARAMETERS {
                fs::write(path(parameter), if parameter.ends_with("liberal") { "0" } else { "77" })?;
            }
            own.write_configuration(&json!({"mode": mode, "conntrack": conntrack}))?;
            let config = own.config_file().display().to_string();
            let arguments: &[&str] = if mode == "ebpf" { &["run"] } else { &[] };
            let arguments = [arguments, &["--config", &config, "--init-only"]].concat();
            Proxy::start(program, &arguments)?
                .ends()?
                .is(0, "System initialized and --init-only specified")?;
            found.push(PARAMETERS.iter().map(|name| Ok((*name, sysctl(name)?))).collect::<Result<Vec<_>>>()?);
        }
        ensure!(found[0] == found[1], "{conntrack}: kube-proxy {:?}, proxy-ctl {:?}", found[0], found[1]);
    }
    Ok(())
}

/// Parameters that each network namespace has.
const PARAMETERS: [&str; 5] = [
    "nf_conntrack_tcp_timeout_established",
    "nf_conntrack_tcp_timeout_close_wait",
    "nf_conntrack_udp_timeout",
    "nf_conntrack_udp_timeout_stream",
    "nf_conntrack_tcp_be_liberal",
];

fn path(parameter: &str) -> String {
    format!("/proc/sys/net/netfilter/{parameter}")
}

/// Returns a parameter of the scenarios' network namespace.
fn sysctl(name: &str) -> Result<String> {
    let path = path(name);
    Ok(fs::read_to_string(&path).with_context(|| format!("reading {path}"))?.trim().to_owned())
}
