//! Rules that the real kube-proxy leaves, and their removal. Its own `--cleanup` shows what must be
//! left then.

use std::{
    collections::BTreeSet,
    env,
    ffi::OsStr,
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::{
        fs::{PermissionsExt as _, symlink},
        process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::LazyLock,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use control_plane::{binaries::Program, objects};
use nix::sys::signal::Signal;
use scenario::{Outcome, Skip};
use serde_json::{Value, json};

use crate::{
    node::Node,
    proxy::{Proxy, answers, metric},
    scenarios::PROGRAMMED,
    until::until,
    world::World,
};

const CLUSTER_IP: &str = "10.96.77.77";
const ENDPOINT: &str = "10.0.0.77";
const PORT: u16 = 8077;
/// Metric of the number of pieces that kube-proxy has left.
const FORMER_RULES: &str = "proxy_former_rules";
/// Chain in which proxy-ctl accepts health checks that a former kube-proxy accepted before.
const HEALTH_CHECKS: &str = "PROXY-CTL-HEALTH-CHECKS";
const REMOVED: &str = "removed rules of another kube-proxy";

/// Rules of other programs, in tables of their own and in those that kube-proxy uses too.
const FOREIGN_TABLE: &str = "table inet mine { chain input { type filter hook input priority 5; \
                             tcp dport 9 counter drop comment \"KUBE-SERVICES\"; }; }";
const FOREIGN_RULES: [&str; 6] = [
    "-t nat -N MINE",
    "-t nat -A PREROUTING -m comment --comment mine -j MINE",
    "-t nat -A MINE -p tcp --dport 81 -j REDIRECT --to-ports 82",
    "-t filter -N KUBE-ROUTER-FORWARD",
    "-t filter -A FORWARD -j KUBE-ROUTER-FORWARD",
    "-t mangle -N KUBE-KUBELET-CANARY",
];

/// Kernel interface that has kube-proxy's rules.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum RuleApi {
    /// Rules of mode nftables, or of mode iptables with iptables-nft.
    Nft(&'static str),
    /// Rules of mode iptables with iptables-legacy.
    Legacy,
}

impl RuleApi {
    fn mode(self) -> &'static str {
        match self {
            Self::Nft(mode) => mode,
            Self::Legacy => "iptables",
        }
    }

    fn variant(self) -> &'static str {
        match self {
            Self::Nft(_) => "nft",
            Self::Legacy => "legacy",
        }
    }

    /// Returns all rules, sorted by the names of their chains, because kube-proxy makes chains in
    /// any order. Counters are left out, because they differ from one run to the next.
    fn dump(self) -> Result<String> {
        let text = match self {
            Self::Nft(_) => run("nft", &["list", "ruleset"])?,
            Self::Legacy => {
                run("iptables-legacy-save", &[])?
                    + &run("ip6tables-legacy-save", &[])?.replace("\n*", "\n*IPv6 ")
            }
        };
        let (mut table, mut chain, mut lines) = (String::new(), String::new(), Vec::new());
        for line in text.lines().map(|line| without_counts(line.trim())) {
            if line.starts_with("table ") || line.starts_with('*') {
                (table, chain) = (line.clone(), String::new());
            } else if line.starts_with("chain ") || line.starts_with(':') {
                chain = line.trim_start_matches(':').to_owned();
            } else if let Some((of, _)) = line.strip_prefix("-A ").and_then(|rule| rule.split_once(' ')) {
                chain = of.to_owned();
            }
            if !line.is_empty() && !line.starts_with('#') && line != "}" && line != "COMMIT" {
                lines.push((table.clone(), chain.clone(), line));
            }
        }
        lines.sort_by(|a, b| (&a.0, &a.1).cmp(&(&b.0, &b.1)));
        Ok(lines.into_iter().map(|(table, _, line)| format!("{table} {line}\n")).collect())
    }

    /// Returns true if the rules of both families are there, with everything that kube-proxy makes
    /// at its start.
    fn are_complete(self, dump: &str, own: &Node) -> bool {
        let synced = |family: &str| {
            let name = format!("kubeproxy_sync_proxy_rules_last_timestamp_seconds{{ip_family=\"{family}\"}}");
            metric(&own.metrics(), &name).is_ok_and(|time| time > 0.0)
        };
        let canaries = dump.lines().filter(|line| line.contains("KUBE-PROXY-CANARY")).count();
        dump.contains(CLUSTER_IP)
            && dump.contains(ENDPOINT)
            && (self.mode() != "iptables" || canaries == 6)
            && ["IPv4", "IPv6"].into_iter().all(synced)
    }
}

/// Returns the line with zero for `packets 5 bytes 300`, and without counts like `[5:300]`.
fn without_counts(line: &str) -> String {
    let mut words: Vec<&str> = line.split(' ').collect();
    for at in 1..words.len() {
        if matches!(words[at - 1], "packets" | "bytes") {
            words[at] = "0";
        }
    }
    let line = words.join(" ");
    match line.split_once(" [") {
        Some((chain, _)) if line.starts_with(':') => chain.to_owned(),
        _ => line,
    }
}

fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("starting {program}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {arguments:?}: {}: {said}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Real kube-proxy with one kind of iptables. Its rules are removed when this is dropped.
struct OldProxy {
    program: PathBuf,
    tables: RuleApi,
    /// PATH that begins with a folder of links to iptables and its like, by the names that
    /// kube-proxy calls.
    path: String,
}

impl OldProxy {
    /// Finds the programs. The inner error is the reason why kube-proxy cannot be tried here.
    fn new(own: &Node, tables: RuleApi) -> Result<Result<Self, String>> {
        let program = match Program::KubeProxy.path() {
            Ok(program) => program,
            Err(error) => return Ok(Err(format!("{error:#}"))),
        };
        let multi = format!("xtables-{}-multi", tables.variant());
        let found = env::split_paths(&env::var_os("PATH").unwrap_or_default())
            .map(|folder| folder.join(&multi))
            .find(|path| path.exists());
        let Some(multi) = found else {
            return Ok(Err(format!("{multi} is not installed")));
        };
        let folder = own.config_file().with_file_name(format!("iptables-{}", tables.variant()));
        fs::create_dir_all(&folder)?;
        for name in ["iptables", "ip6tables"] {
            for command in ["", "-save", "-restore"] {
                let link = folder.join(format!("{name}{command}"));
                if !link.exists() {
                    symlink(&multi, link)?;
                }
            }
        }
        let path = format!("PATH={}:{}", folder.display(), env::var("PATH").unwrap_or_default());
        let former = Self { program, tables, path };
        former.reset()?;
        Ok(Ok(former))
    }

    fn reset(&self) -> Result<()> {
        run("nft", &["flush", "ruleset"])?;
        if self.tables == RuleApi::Legacy {
            for program in ["iptables-legacy", "ip6tables-legacy"] {
                for table in ["nat", "filter", "mangle"] {
                    run(program, &["-t", table, "-F"])?;
                    run(program, &["-t", table, "-X"])?;
                }
            }
        }
        Ok(())
    }

    fn lay_foreign_rules(&self) -> Result<()> {
        run("nft", &[FOREIGN_TABLE])?;
        for family in ["iptables", "ip6tables"] {
            for rule in FOREIGN_RULES {
                let arguments: Vec<&str> = rule.split(' ').collect();
                run(&format!("{family}-{}", self.tables.variant()), &arguments)?;
            }
        }
        Ok(())
    }

    fn start(&self, own: &Node) -> Result<Proxy> {
        own.write_configuration(&json!({"mode": self.tables.mode()}))?;
        let (program, file) = (self.program.display().to_string(), own.config_file().display().to_string());
        let proxy = Proxy::start(Path::new("env"), &[&self.path, &program, "--config", &file])?;
        let complete = || Ok(self.tables.are_complete(&self.tables.dump()?, own).then_some(()));
        let state = || format!("{}\n{}", proxy.log(), self.tables.dump().unwrap_or_default());
        until("kube-proxy's rules", complete, state)?;
        Ok(proxy)
    }

    /// Lets kube-proxy program everything and end.
    fn leave_rules(&self, own: &Node) -> Result<()> {
        let mut proxy = self.start(own)?;
        proxy.send(Signal::SIGTERM)?;
        proxy.ends()?;
        Ok(())
    }

    fn clean_up(&self) -> Result<()> {
        run("env", &[&self.path, &self.program.display().to_string(), "--cleanup"]).map(drop)
    }
}

impl Drop for OldProxy {
    fn drop(&mut self) {
        // The next scenario resets them too.
        let _ = self.reset();
    }
}

/// Plays a scene with kube-proxy's rules of each kind. The outcome names the kinds that could not
/// be tried.
fn with_each(
    own: &Node,
    kinds: &[RuleApi],
    mut scene: impl FnMut(&OldProxy) -> Result<()>,
) -> Result<Outcome> {
    let mut skipped = Vec::new();
    for tables in kinds {
        match OldProxy::new(own, *tables)? {
            Ok(former) => scene(&former).with_context(|| format!("{tables:?}"))?,
            Err(reason) => skipped.push(format!("{tables:?}: {reason}")),
        }
    }
    Ok(if skipped.is_empty() { Outcome::Passed } else { Outcome::Skipped(skipped.join("; ")) })
}

/// Folder for pins in which proxy-ctl has left nothing.
const NO_PINS: &str = "/sys/fs/bpf/proxy-ctl-life-nothing";

/// Runs proxy-ctl as `kube-proxy --cleanup`. `path` is where it finds programs.
fn try_clean_up_as_kube_proxy(path: &OsStr) -> Result<Output> {
    let mut command = Command::new(lab::program("proxy-ctl")?);
    command.arg0("kube-proxy").args(["--cleanup", "--hostname-override=a", "--bpffs", NO_PINS]);
    command.env("PATH", path).stdin(Stdio::null()).output().context("starting proxy-ctl")
}

/// Runs proxy-ctl as `kube-proxy --cleanup`, and returns its output.
fn clean_up_as_kube_proxy() -> Result<String> {
    let output = try_clean_up_as_kube_proxy(&env::var_os("PATH").unwrap_or_default())?;
    ensure!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs `proxy-ctl cleanup --kube-proxy`, and returns what it reports about kube-proxy.
fn clean_up() -> Result<Value> {
    let program = lab::program("proxy-ctl")?.display().to_string();
    let text = run(&program, &["cleanup", "--kube-proxy", "--output", "json", "--bpffs", NO_PINS])?;
    let said: Value = serde_json::from_str(&text)?;
    ensure!(said["problems"] == json!([]), "{said}");
    Ok(said["kubeProxy"].clone())
}

/// Makes a Node, and a Service with a known address, a node port and an endpoint on this machine.
fn with_service(world: &World, node: &'static str, number: u16) -> Result<Node> {
    let own = Node::known(world, node, number)?;
    let mut service = objects::service("default", "leftovers", PORT);
    service["spec"]["clusterIP"] = json!(CLUSTER_IP);
    service["spec"]["type"] = json!("NodePort");
    world.apply(&service)?;
    let slice = objects::endpoint_slice("default", "leftovers-1", "leftovers", &[ENDPOINT.parse()?], PORT);
    world.apply(&slice)?;
    Ok(own)
}

fn is_as(expected: &str, found: &str) -> Result<()> {
    ensure!(expected == found, "expected\n{expected}\nfound\n{found}");
    Ok(())
}

pub(crate) fn clean_up_leaves_what_kube_proxys_leaves(world: &mut World) -> Result<Outcome> {
    let own = with_service(world, "left", 40)?;
    with_each(&own, &[RuleApi::Nft("iptables"), RuleApi::Nft("nftables"), RuleApi::Legacy], |former| {
        let tables = former.tables;
        former.lay_foreign_rules()?;
        former.leave_rules(&own)?;
        let programmed = tables.dump()?;
        former.clean_up()?;
        let expected = tables.dump()?;
        ensure!(expected != programmed && expected.contains("MINE"), "nothing to compare: {expected}");

        former.reset()?;
        former.lay_foreign_rules()?;
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
    former.lay_foreign_rules()?;
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
        former.lay_foreign_rules()?;
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
        let foreign = rules_of("FORWARD")?;
        former.leave_rules(&own)?;
        let accepting = rules_of("KUBE-FORWARD")?;
        ensure!(accepting.contains("RELATED,ESTABLISHED"), "{accepting}");
        let proxy = own.start(&json!({}))?;
        proxy.says(REMOVED)?;
        proxy.says("not changed: FORWARD drops or rejects packets")?;
        is_as(&accepting, &rules_of("KUBE-FORWARD")?)?;
        let policy = foreign.lines().next().unwrap_or_default();
        is_as(
            &foreign.replacen(&format!("{policy}\n"), &format!("{policy}\n{jump}"), 1),
            &rules_of("FORWARD")?,
        )?;
        drop(proxy);
        let said = clean_up_as_kube_proxy()?;
        is_as(&foreign, &rules_of("FORWARD")?).context(said)?;
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
pub(crate) fn what_is_handed_over_holds_no_removal_back(world: &mut World) -> Result<()> {
    let own = with_service(world, "handed-over", 53)?;
    let mut sctp = objects::service("default", "associations", PORT);
    sctp["spec"]["ports"][0]["protocol"] = json!("SCTP");
    world.apply(&sctp)?;
    let tables = RuleApi::Nft("nftables");
    let former = OldProxy::new(&own, tables)?.map_err(Skip)?;
    former.leave_rules(&own)?;
    ensure!(tables.dump()?.contains(CLUSTER_IP), "the former kube-proxy has left nothing");
    let proxy = own.start(&json!({"iptables": {"syncPeriod": "1s"}}))?;
    proxy.says("serves what the active mode cannot")?;
    let unsupported = || {
        let status = own.status()?;
        let of = |name: &str| {
            let all = status["unsupported"].as_array()?;
            all.iter().find(|one| one["name"] == *name)?["effect"].as_str().map(str::to_owned)
        };
        Ok((of("associations").as_deref() == Some("handedOver")).then_some(()))
    };
    until("what status says is not served as asked", unsupported, || proxy.log())?;
    own.until_metric(&proxy, "proxy_former_rule_blockers", |count| count == 0.0)?;
    own.until_metric(&proxy, FORMER_RULES, |count| count == 0.0)?;
    let beside = tables.dump()?;
    ensure!(!beside.contains(CLUSTER_IP) && beside.contains("sctp"), "{beside}");

    world.delete(&sctp)?;
    proxy.says("the active mode serves everything")?;
    ensure!(!tables.dump()?.contains("sctp"), "it is still there");
    Ok(())
}

pub(crate) fn a_kube_proxy_that_is_still_at_work_is_named_and_not_fought(world: &mut World) -> Result<()> {
    let (own, other) = (with_service(world, "contested", 44)?, with_service(world, "contesting", 45)?);
    let tables = RuleApi::Nft("nftables");
    let former = OldProxy::new(&other, tables)?.map_err(Skip)?;
    former.leave_rules(&other)?;
    let proxy = own.start(&json!({"iptables": {"syncPeriod": "1s"}}))?;
    proxy.says(REMOVED)?;
    answers(&own.healthz(), "/healthz", 200)?;
    own.until_metric(&proxy, FORMER_RULES, |count| count == 0.0)?;

    let _at_work = former.start(&other)?;
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

/// Expects a cleanup without the tools of iptables-legacy to fail with kube-proxy's words.
fn clean_up_fails_where_something_stays() -> Result<()> {
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
