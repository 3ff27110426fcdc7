//! Scenarios of `run`: the proxy removes rules, and connections live on.

use std::{
    env, fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    sync::LazyLock,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use control_plane::objects;
use scenario::{Outcome, Skip};
use serde_json::{Value, json};

use super::{
    CLUSTER_IP, ENDPOINT, PORT,
    cleanup::{clean_up, clean_up_as_kube_proxy, clean_up_fails_where_something_stays},
    former::{OldProxy, RuleApi, run, with_each},
    is_as, with_service,
};
use crate::{
    node::Node,
    proxy::{Proxy, answers, metric},
    scenarios::PROGRAMMED,
    until::until,
    world::World,
};

/// Metric of the number of pieces that kube-proxy has left.
const FORMER_RULES: &str = "proxy_former_rules";
/// Chain in which proxy-ctl accepts health checks that a former kube-proxy accepted before.
const HEALTH_CHECKS: &str = "PROXY-CTL-HEALTH-CHECKS";
const REMOVED: &str = "removed rules of another kube-proxy";

/// Connection through the cluster IP to an endpoint that listens here.
struct Connection {
    client: TcpStream,
    server: TcpStream,
}

impl Connection {
    /// Opens the connection, whose destination netfilter translates.
    fn open() -> Result<Self> {
        run("ip", &["address", "replace", &format!("{ENDPOINT}/32"), "dev", "lo"])?;
        run("ip", &["route", "replace", "10.96.0.0/12", "dev", "lo"])?;
        let listener = TcpListener::bind((ENDPOINT, PORT))?;
        let address: SocketAddr = format!("{CLUSTER_IP}:{PORT}").parse()?;
        let client =
            TcpStream::connect_timeout(&address, Duration::from_secs(10)).context("the cluster IP")?;
        let (server, _) = listener.accept()?;
        ensure!(client.peer_addr()? == address, "it was translated when it was opened, not packet by packet");
        for stream in [&client, &server] {
            stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        }
        Ok(Self { client, server })
    }

    /// Expects the connection to work in both directions.
    fn works(&self) -> Result<()> {
        for (mut from, mut to) in [(&self.client, &self.server), (&self.server, &self.client)] {
            from.write_all(b"ping")?;
            let mut answer = [0; 4];
            to.read_exact(&mut answer).context("the other end hears nothing")?;
        }
        Ok(())
    }
}

pub(crate) fn run_removes_them_and_connections_live_on(world: &mut World) -> Result<Outcome> {
    let own = with_service(world, "taken-over", 42)?;
    with_each(&own, &[RuleApi::Nft("iptables"), RuleApi::Nft("nftables")], |former| {
        let tables = former.tables;
        former.add_rules_of_others()?;
        former.leave_rules(&own)?;
        former.clean_up()?;
        let expected = tables.dump()?;

        former.leave_rules(&own)?;
        let connection = Connection::open().context("with kube-proxy's rules")?;
        connection.works()?;
        let mut proxy = own.start(&json!({}))?;
        proxy.says(REMOVED)?;
        let (holders, others) = without_holders(&tables.dump()?);
        is_as(&expected, &without_health_checks(&others))?;
        is_as(&HOLDERS, &holders)?;
        connection.works().context("after kube-proxy's rules were removed")?;
        let log = proxy.log();
        ensure!(log.find(PROGRAMMED) < log.find(REMOVED), "they were removed before all was served:\n{log}");
        proxy.runs()
    })
}

/// Returns a dump of [`RuleApi::dump`] without the chain by which proxy-ctl goes on accepting
/// health checks.
fn without_health_checks(dump: &str) -> String {
    dump.split_inclusive('\n').filter(|line| !line.contains(HEALTH_CHECKS)).collect()
}

/// Makes a Service for which load balancers ask this node at `port`.
fn checked_service(name: &str, port: u16) -> Value {
    let mut service = objects::service("default", name, PORT);
    service["spec"]["type"] = json!("LoadBalancer");
    service["spec"]["externalTrafficPolicy"] = json!("Local");
    service["spec"]["healthCheckNodePort"] = json!(port);
    service
}

/// Expects health checks to stay accepted although INPUT drops what no rule before accepts.
/// kube-proxy's modes iptables and ipvs have rules that accept health checks.
pub(crate) fn health_checks_stay_accepted(world: &mut World) -> Result<Outcome> {
    const FIRST: u16 = 31_977;
    const LATER: u16 = 31_978;
    let own = with_service(world, "checked", 54)?;
    let (first, later) = (checked_service("first", FIRST), checked_service("later", LATER));
    world.apply(&first)?;
    let is_answered =
        |port| TcpStream::connect_timeout(&([127, 0, 0, 1], port).into(), Duration::from_millis(500)).is_ok();
    let outcome =
        with_each(&own, &[RuleApi::Nft("iptables"), RuleApi::Legacy, RuleApi::Nft("nftables")], |former| {
            let iptables = |arguments: &str| {
                let program = format!("iptables-{}", former.tables.variant());
                run(&program, &arguments.split(' ').collect::<Vec<_>>())
            };
            let dropping = format!("-A INPUT -p tcp -m multiport --dports {FIRST},{LATER} -j DROP");
            iptables(&dropping)?;
            let accepts = former.tables.mode() == "iptables";
            let kube_proxy = former.start(&own)?;
            ensure!(is_answered(FIRST) == accepts, "kube-proxy's rules are others than expected");
            drop(kube_proxy);

            let proxy = own.start(&json!({}))?;
            proxy.says(REMOVED)?;
            ensure!(is_answered(FIRST) == accepts, "after the takeover: {}", iptables("-S")?);
            ensure!(iptables("-S")?.contains(HEALTH_CHECKS) == accepts, "{}", iptables("-S")?);
            if accepts {
                world.apply(&later)?;
                let state = || proxy.log();
                until("a new port", || Ok(is_answered(LATER).then_some(())), state)?;
                drop(proxy);
                let again = own.run(&json!({}))?;
                world.delete(&later)?;
                let accepts_no_more = || {
                    let rules = iptables(&format!("-S {HEALTH_CHECKS}"))?;
                    Ok((!rules.contains(&LATER.to_string())).then_some(()))
                };
                until("a port that is gone", accepts_no_more, || again.log())?;
                ensure!(is_answered(FIRST), "after another start: {}", iptables("-S")?);
            }
            clean_up()?;
            ensure!(iptables("-S INPUT")?.contains(&dropping), "a rule of others is gone");
            ensure!(!iptables("-S")?.contains(HEALTH_CHECKS), "{}", iptables("-S")?);
            Ok(())
        });
    world.delete(&first)?;
    outcome
}

/// Splits a dump of [`RuleApi::dump`] into what is left of kube-proxy's table of mode nftables, and
/// the rest.
fn without_holders(dump: &str) -> (String, String) {
    let is_of_holder = |line: &&str| line.contains(" kube-proxy { ");
    let (holders, others): (Vec<&str>, Vec<&str>) = dump.split_inclusive('\n').partition(is_of_holder);
    (holders.concat(), others.concat())
}

static HOLDERS: LazyLock<String> = LazyLock::new(|| {
    let lines = |family: &str| {
        let table = format!("table {family} kube-proxy {{");
        [
            table.as_str(),
            "chain nat-postrouting {",
            "type nat hook postrouting priority srcnat; policy accept;",
            "ct direction original comment \"keeps connections translated\"",
        ]
        .map(|line| format!("{table} {line}\n"))
        .concat()
    };
    lines("ip") + &lines("ip6")
});

/// Connects as a process that proxy-ctl serves at its socket.
fn connect_within(own: &Node) -> Result<()> {
    let connect = "echo $$ > \"$0/cgroup.procs\" && exec 3<> \"/dev/tcp/$1/$2\"";
    let (cgroup, port) = (own.cgroup().display().to_string(), PORT.to_string());
    run("timeout", &["10", "bash", "-c", connect, &cgroup, CLUSTER_IP, &port]).map(drop)
}

/// Expects connections to live on where no other program has a rule that keeps the kernel
/// translating.
pub(crate) fn connections_that_it_leaves_live_on_where_nobody_else_translates(
    world: &mut World,
) -> Result<Outcome> {
    let own = with_service(world, "translated", 50)?;
    let in_nftables = RuleApi::Nft("nftables");
    // iptables-legacy leaves things that stay as long as the network namespace.
    with_each(&own, &[RuleApi::Nft("iptables"), in_nftables, RuleApi::Legacy], |former| {
        let tables = former.tables;
        former.leave_rules(&own)?;
        let connection = Connection::open().context("with kube-proxy's rules")?;
        connection.works()?;
        let proxy = own.start(&json!({"iptables": {"syncPeriod": "1s"}}))?;
        proxy.says(REMOVED)?;
        proxy.says("the kernel translates established connections while it is there")?;
        connection.works().context("without kube-proxy's rules")?;
        ensure!(!tables.dump()?.contains("KUBE-S"), "kube-proxy's rules are still there");
        is_as(&HOLDERS, &without_holders(&in_nftables.dump()?).0)?;
        let _listener = TcpListener::bind((ENDPOINT, PORT))?;
        let address: SocketAddr = format!("{CLUSTER_IP}:{PORT}").parse()?;
        let others = TcpStream::connect_timeout(&address, Duration::from_millis(300));
        ensure!(others.is_err(), "another program still serves");
        connect_within(&own).context("a new connection")?;
        own.until_metric(&proxy, FORMER_RULES, |count| count == 0.0)?;
        drop(proxy);

        let again = own.run(&json!({"iptables": {"syncPeriod": "1s"}}))?;
        own.until_metric(&again, "proxy_resyncs_total", |count| count > 1.0)?;
        ensure!(!again.log().contains("another kube-proxy"), "once more:\n{}", again.log());
        connection.works().context("after another start")?;
        drop(again);

        let said = clean_up()?;
        let (holders, _) = without_holders(&in_nftables.dump()?);
        is_as("", &holders).with_context(|| said.to_string())?;
        ensure!(said["kept"] == json!([]) && said["removed"] != json!([]), "{said}");
        Ok(())
    })
}

pub(crate) fn what_forwarded_connections_need_stays_where_others_are_dropped(
    world: &mut World,
) -> Result<()> {
    let own = with_service(world, "dropping", 46)?;
    let former = OldProxy::new(&own, RuleApi::Nft("iptables"))?.map_err(Skip)?;
    let rules_of = |chain: &str| run("iptables-nft", &["-S", chain]);
    let jump = "-A FORWARD -m comment --comment \"kubernetes forwarding rules\" -j KUBE-FORWARD\n";
    for refusing in ["-P FORWARD DROP", "-A FORWARD -j REJECT --reject-with icmp-host-prohibited"] {
        former.reset()?;
        run("iptables-nft", &refusing.split(' ').collect::<Vec<_>>())?;
        let theirs = rules_of("FORWARD")?;
        former.leave_rules(&own)?;
        let accepting = rules_of("KUBE-FORWARD")?;
        ensure!(accepting.contains("RELATED,ESTABLISHED"), "{accepting}");
        let proxy = own.start(&json!({}))?;
        proxy.says(REMOVED)?;
        proxy.says("not changed: FORWARD drops or rejects packets")?;
        is_as(&accepting, &rules_of("KUBE-FORWARD")?)?;
        let policy = theirs.lines().next().unwrap_or_default();
        is_as(
            &theirs.replacen(&format!("{policy}\n"), &format!("{policy}\n{jump}"), 1),
            &rules_of("FORWARD")?,
        )?;
        drop(proxy);
        let said = clean_up_as_kube_proxy()?;
        is_as(&theirs, &rules_of("FORWARD")?).context(said)?;
        ensure!(rules_of("KUBE-FORWARD").is_err(), "it is still there");
        let said = clean_up_as_kube_proxy()?;
        ensure!(said.starts_with("Nothing of proxy-ctl"), "{said}");
    }
    Ok(())
}

pub(crate) fn run_leaves_them_where_it_is_told_to(world: &mut World) -> Result<()> {
    let own = with_service(world, "side-by-side", 43)?;
    let tables = RuleApi::Nft("nftables");
    let former = OldProxy::new(&own, tables)?.map_err(Skip)?;
    former.leave_rules(&own)?;
    let left = tables.dump()?;
    let mut configuration: Value = serde_json::from_str(&own.configuration(&json!({})))?;
    configuration["ebpf"]["removeKubeProxyRules"] = json!(false);
    fs::write(own.config_file(), configuration.to_string())?;
    let proxy = own.start_with(&own.config_file(), &[])?;
    proxy.says("rules of another kube-proxy are on this node and stay")?;
    is_as(&left, &tables.dump()?)?;
    ensure!(!proxy.log().contains(REMOVED));
    Ok(())
}

/// Delegates SCTP to mode nftables, whose table replaces the former kube-proxy's.
pub(crate) fn what_is_delegated_holds_no_removal_back(world: &mut World) -> Result<()> {
    let own = with_service(world, "delegated", 53)?;
    let mut sctp = objects::service("default", "associations", PORT);
    sctp["spec"]["ports"][0]["protocol"] = json!("SCTP");
    world.apply(&sctp)?;
    let tables = RuleApi::Nft("nftables");
    let former = OldProxy::new(&own, tables)?.map_err(Skip)?;
    former.leave_rules(&own)?;
    ensure!(tables.dump()?.contains(CLUSTER_IP), "the former kube-proxy has left nothing");
    let proxy = own.start(&json!({"iptables": {"syncPeriod": "1s"}}))?;
    proxy.says("serves what the active mode cannot")?;
    let unserved_fields = || {
        let status = own.status()?;
        let of = |name: &str| {
            let all = status["unservedFields"].as_array()?;
            all.iter().find(|one| one["name"] == *name)?["effect"].as_str().map(str::to_owned)
        };
        Ok((of("associations").as_deref() == Some("delegated")).then_some(()))
    };
    until("what status says is not served as asked", unserved_fields, || proxy.log())?;
    own.until_metric(&proxy, "proxy_former_rule_blockers", |count| count == 0.0)?;
    own.until_metric(&proxy, FORMER_RULES, |count| count == 0.0)?;
    let secondary = tables.dump()?;
    ensure!(!secondary.contains(CLUSTER_IP) && secondary.contains("sctp"), "{secondary}");

    world.delete(&sctp)?;
    proxy.says("the active mode serves everything")?;
    ensure!(!tables.dump()?.contains("sctp"), "it is still there");
    Ok(())
}

pub(crate) fn a_kube_proxy_that_still_runs_is_named_and_not_fought(world: &mut World) -> Result<()> {
    let (own, other) = (with_service(world, "contested", 44)?, with_service(world, "contesting", 45)?);
    let tables = RuleApi::Nft("nftables");
    let former = OldProxy::new(&other, tables)?.map_err(Skip)?;
    former.leave_rules(&other)?;
    let proxy = own.start(&json!({"iptables": {"syncPeriod": "1s"}}))?;
    proxy.says(REMOVED)?;
    answers(&own.healthz(), "/healthz", 200)?;
    own.until_metric(&proxy, FORMER_RULES, |count| count == 0.0)?;

    let _running = former.start(&other)?;
    proxy.says("another kube-proxy runs on this node")?;
    world.event(own.name, "KubeProxyRulesReturned")?;
    ensure!(metric(&own.metrics(), FORMER_RULES)? > 0.0, "{FORMER_RULES} does not tell of them");
    ensure!(tables.dump()?.contains(CLUSTER_IP), "they were removed again");
    Ok(())
}

/// Starts proxy-ctl with this PATH. It looks for rules every second.
fn start_with_path(own: &Node, path: &str) -> Result<Proxy> {
    own.write_configuration(&json!({"iptables": {"syncPeriod": "1s"}}))?;
    let (program, file) =
        (lab::program("proxy-ctl")?.display().to_string(), own.config_file().display().to_string());
    Proxy::start(Path::new("env"), &[&format!("PATH={path}"), &program, "run", "--config", &file])
}

/// Expects a table that comes back not to be fought. Meanwhile legacy rules cannot be removed
/// without their tools, which is tried again and again.
pub(crate) fn what_comes_back_while_something_else_cannot_be_removed_is_not_fought(
    world: &mut World,
) -> Result<()> {
    let own = with_service(world, "half-removed", 47)?;
    let _clean = OldProxy::new(&own, RuleApi::Legacy)?.map_err(Skip)?;
    let ruleset = || run("nft", &["list", "ruleset"]);
    let serving = "chain services";
    for table in ["nat", "mangle"] {
        run("iptables-legacy", &["-t", table, "-N", "KUBE-PROXY-CANARY"])?;
    }
    run("nft", &["add table ip kube-proxy; add chain ip kube-proxy services"])?;
    let proxy = start_with_path(&own, "/nowhere")?;
    proxy.says(REMOVED)?;
    proxy.says("iptables-legacy-save and -restore, are not on PATH")?;
    let left = |count| own.until_metric(&proxy, FORMER_RULES, |left| left == count);
    left(2.0)?;
    ensure!(!ruleset()?.contains(serving), "it was not removed");

    run("nft", &["add chain ip kube-proxy services"])?;
    proxy.says("another kube-proxy runs on this node")?;
    let before = metric(&own.metrics(), "proxy_former_rule_errors_total")?;
    own.until_metric(&proxy, "proxy_former_rule_errors_total", |count| count >= before + 2.0)?;
    ensure!(ruleset()?.contains(serving), "it was removed again");
    left(3.0)?;

    // Another program removes this chain.
    run("iptables-legacy", &["-t", "mangle", "-X", "KUBE-PROXY-CANARY"])?;
    left(2.0)?;
    ensure!(proxy.log().matches("are not on PATH").count() == 1, "{}", proxy.log());
    Ok(())
}

/// Expects each table of iptables-legacy to be replaced on its own.
pub(crate) fn a_legacy_table_that_cannot_be_written_keeps_no_other(world: &mut World) -> Result<()> {
    let own = with_service(world, "one-refused", 52)?;
    let _clean = OldProxy::new(&own, RuleApi::Legacy)?.map_err(Skip)?;
    clean_up_fails_where_something_stays()?;
    for table in ["nat", "mangle", "filter"] {
        run("iptables-legacy", &["-t", table, "-N", "KUBE-PROXY-CANARY"])?;
    }
    let folder = own.config_file().with_file_name("refusing");
    fs::create_dir_all(&folder)?;
    let (refuses, restore) = (folder.join("refuses"), folder.join("iptables-legacy-restore"));
    fs::write(&refuses, "")?;
    let script = format!(
        "#!/bin/sh\ninput=$(cat)\ncase $input in *'*mangle'*) \
         if [ -e {} ]; then echo 'no such luck' >&2; exit 1; fi;; esac\n\
         echo \"$input\" | xtables-legacy-multi iptables-legacy-restore \"$@\"\n",
        refuses.display()
    );
    fs::write(&restore, script)?;
    fs::set_permissions(&restore, fs::Permissions::from_mode(0o755))?;
    let path = format!("{}:{}", folder.display(), env::var("PATH").unwrap_or_default());
    let proxy = start_with_path(&own, &path)?;
    proxy.says("iptables-legacy-restore: exit status: 1: no such luck")?;
    let left = |count| own.until_metric(&proxy, FORMER_RULES, |left| left == count);
    left(1.0)?;
    let tables = || RuleApi::Legacy.dump();
    let canaries = |dump: &str| dump.lines().filter(|line| line.contains("KUBE-PROXY-CANARY")).count();
    ensure!(canaries(&tables()?) == 1 && tables()?.contains("*mangle :KUBE-PROXY-CANARY"), "{}", tables()?);

    fs::remove_file(&refuses)?;
    left(0.0)?;
    ensure!(canaries(&tables()?) == 0, "{}", tables()?);
    Ok(())
}
