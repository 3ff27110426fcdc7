//! Scenarios of `cleanup`: it removes rules, and keeps those that others use.

use std::{
    collections::BTreeSet,
    env,
    ffi::OsStr,
    os::unix::process::CommandExt as _,
    process::{Command, Output, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use scenario::{Outcome, Skip};
use serde_json::{Value, json};

use super::{
    former::{OldProxy, RuleApi, run, with_each},
    is_as, with_service,
};
use crate::{node::Node, world::World};

/// Folder for pins in which proxy-ctl has left nothing.
const NO_PINS: &str = "/sys/fs/bpf/proxy-ctl-life-nothing";

/// Runs proxy-ctl as `kube-proxy --cleanup`. `path` is where it finds programs.
pub(super) fn try_clean_up_as_kube_proxy(path: &OsStr) -> Result<Output> {
    let mut command = Command::new(lab::program("proxy-ctl")?);
    command.arg0("kube-proxy").args(["--cleanup", "--hostname-override=a", "--bpffs", NO_PINS]);
    command.env("PATH", path).stdin(Stdio::null()).output().context("starting proxy-ctl")
}

/// Runs proxy-ctl as `kube-proxy --cleanup`, and returns its output.
pub(super) fn clean_up_as_kube_proxy() -> Result<String> {
    let output = try_clean_up_as_kube_proxy(&env::var_os("PATH").unwrap_or_default())?;
    ensure!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs `proxy-ctl cleanup --kube-proxy`, and returns what it reports about kube-proxy.
pub(super) fn clean_up() -> Result<Value> {
    let program = lab::program("proxy-ctl")?.display().to_string();
    let text = run(&program, &["cleanup", "--kube-proxy", "--output", "json", "--bpffs", NO_PINS])?;
    let said: Value = serde_json::from_str(&text)?;
    ensure!(said["problems"] == json!([]), "{said}");
    Ok(said["kubeProxy"].clone())
}

pub(crate) fn clean_up_leaves_what_kube_proxys_leaves(world: &mut World) -> Result<Outcome> {
    let own = with_service(world, "left", 40)?;
    with_each(&own, &[RuleApi::Nft("iptables"), RuleApi::Nft("nftables"), RuleApi::Legacy], |former| {
        let tables = former.tables;
        former.add_rules_of_others()?;
        former.leave_rules(&own)?;
        let programmed = tables.dump()?;
        former.clean_up()?;
        let expected = tables.dump()?;
        ensure!(expected != programmed && expected.contains("MINE"), "nothing to compare: {expected}");

        former.reset()?;
        former.add_rules_of_others()?;
        former.leave_rules(&own)?;
        // kube-proxy goes through its Services in any order.
        let lines = |dump: &str| dump.lines().map(str::to_owned).collect::<BTreeSet<_>>();
        ensure!(lines(&programmed) == lines(&tables.dump()?), "kube-proxy does not program the same twice");
        let said = clean_up()?;
        is_as(&expected, &tables.dump()?).with_context(|| said.to_string())?;
        ensure!(said["kept"] == json!([]), "{said}");
        let again = clean_up()?;
        ensure!(again == json!({"removed": [], "kept": []}), "once more: {again}");
        Ok(())
    })
}

pub(crate) fn what_others_use_of_kube_proxy_stays_and_is_named(world: &mut World) -> Result<()> {
    let own = with_service(world, "used", 41)?;
    let former = OldProxy::new(&own, RuleApi::Nft("iptables"))?.map_err(Skip)?;
    former.add_rules_of_others()?;
    former.leave_rules(&own)?;
    for rule in ["-A MINE -s 10.9.0.0/16 -j KUBE-MARK-MASQ", "-A MINE -s 10.9.0.0/16 -j KUBE-NODEPORTS"] {
        let arguments: Vec<&str> = ["-t", "nat"].into_iter().chain(rule.split(' ')).collect();
        run("iptables-nft", &arguments)?;
    }
    // A map is not searched for jumps.
    run("nft", &["add rule ip filter KUBE-ROUTER-FORWARD tcp dport vmap { 7 : jump KUBE-FORWARD }"])?;
    let rules_of = |chain: &str| run("iptables-nft", &["-t", "nat", "-S", chain]);
    let (mine, masquerading) =
        (rules_of("MINE")?, (rules_of("KUBE-MARK-MASQ")?, rules_of("KUBE-POSTROUTING")?));

    let said = clean_up()?;
    is_as(&mine, &rules_of("MINE")?)?;
    ensure!(masquerading == (rules_of("KUBE-MARK-MASQ")?, rules_of("KUBE-POSTROUTING")?), "{said}");
    ensure!(rules_of("POSTROUTING")?.contains("-j KUBE-POSTROUTING"), "packets are not masqueraded any more");
    is_as("-N KUBE-NODEPORTS\n", &rules_of("KUBE-NODEPORTS")?)?;
    let kept: Vec<&str> =
        said["kept"].as_array().into_iter().flatten().filter_map(|kept| kept["name"].as_str()).collect();
    let expected = ["KUBE-FORWARD", "KUBE-MARK-MASQ", "KUBE-NODEPORTS", "KUBE-POSTROUTING"];
    ensure!(kept == expected, "{said}");
    let forward = run("nft", &["list", "chain", "ip", "filter", "KUBE-FORWARD"])?;
    ensure!(!forward.contains("accept"), "{forward}");
    let ruleset = run("nft", &["list", "ruleset"])?;
    ensure!(!ruleset.contains("KUBE-SERVICES {") && !ruleset.contains("KUBE-SVC-"), "{ruleset}");
    Ok(())
}

pub(crate) fn who_masquerades_by_a_map_still_does(world: &mut World) -> Result<()> {
    let own = with_service(world, "mapped", 48)?;
    let former = OldProxy::new(&own, RuleApi::Nft("iptables"))?.map_err(Skip)?;
    former.leave_rules(&own)?;
    run("nft", &["add chain ip nat HOSTPORT"])?;
    run("nft", &["add rule ip nat HOSTPORT tcp dport vmap { 8080 : jump KUBE-MARK-MASQ }"])?;
    let masquerading = || {
        let chains = ["KUBE-MARK-MASQ", "KUBE-POSTROUTING", "POSTROUTING"];
        let rules = chains.map(|chain| run("nft", &["-s", "list", "chain", "ip", "nat", chain]));
        rules.into_iter().collect::<Result<String>>()
    };
    let expected = masquerading()?;
    ensure!(expected.contains("jump KUBE-POSTROUTING") && expected.contains("masquerade"), "{expected}");
    let said = clean_up()?;
    is_as(&expected, &masquerading()?).context(said)?;
    let ruleset = run("nft", &["list", "ruleset"])?;
    ensure!(!ruleset.contains("KUBE-SERVICES {"), "{ruleset}");
    Ok(())
}

pub(crate) fn a_chain_that_only_others_lead_to_is_emptied(world: &mut World) -> Result<Outcome> {
    let own = Node::new(world, "emptied", 49)?;
    with_each(&own, &[RuleApi::Nft("iptables"), RuleApi::Legacy], |former| {
        let tables = former.tables;
        let iptables = |arguments: &str| {
            let program = format!("iptables-{}", tables.variant());
            run(&program, &["-t", "nat"].into_iter().chain(arguments.split(' ')).collect::<Vec<_>>())
        };
        iptables("-N KUBE-SERVICES")?;
        iptables("-A KUBE-SERVICES -d 10.96.0.9/32 -p tcp --dport 80 -j DNAT --to-destination 10.0.0.9:80")?;
        iptables("-A PREROUTING -j KUBE-SERVICES")?;
        for _ in 0..2 {
            let said = clean_up()?;
            is_as("-N KUBE-SERVICES\n", &iptables("-S KUBE-SERVICES")?)?;
            ensure!(said["kept"][0]["name"] == "KUBE-SERVICES", "{said}");
        }
        Ok(())
    })
}

/// Expects a cleanup without the tools of iptables-legacy to fail with kube-proxy's words.
pub(super) fn clean_up_fails_where_something_stays() -> Result<()> {
    let canary = |action: &str| run("iptables-legacy", &["-t", "mangle", action, "KUBE-PROXY-CANARY"]);
    canary("-N")?;
    run("nft", &["add table ip kube-proxy; add chain ip kube-proxy services"])?;
    for also_of_nftables in [true, false] {
        let output = try_clean_up_as_kube_proxy(OsStr::new("/nowhere"))?;
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        ensure!(output.status.code() == Some(1), "{}: {out}{err}", output.status);
        ensure!(err.contains("encountered an error while tearing down rules"), "{err}");
        ensure!(err.contains("iptables-legacy-save and -restore, are not on PATH"), "{err}");
        ensure!(out.contains("nftables ip kube-proxy") == also_of_nftables, "{out}");
        let ruleset = run("nft", &["list", "ruleset"])?;
        ensure!(!ruleset.contains("table ip kube-proxy"), "{ruleset}");
        canary("-S").context("it was removed, and said not to be")?;
    }
    let said = clean_up_as_kube_proxy()?;
    ensure!(canary("-S").is_err(), "{said}");
    Ok(())
}
