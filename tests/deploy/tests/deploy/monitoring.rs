//! Rules and dashboard.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{Read as _, Write as _},
    net::TcpStream,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use control_plane::{
    ApiServer, Options, PROXY,
    binaries::{self, Program},
};
use deploy::{files, promql, tools::Tool};
use lab::{Lab, namespace};
use scenario::Outcome;
use serde_json::{Value, json};

const NODE: &str = "node1";
const METRICS: &str = "127.0.0.1:10249";
/// Longest wait for the proxy to have followed the API server.
const PROGRAMMED: Duration = Duration::from_secs(60);
/// Longest wait for a piece of an answer; then it is asked again.
const ANSWER: Duration = Duration::from_secs(5);
/// Prometheus makes this one itself, of each target.
const OF_THE_SCRAPE: &str = "up";

fn dashboard() -> Result<Value> {
    serde_json::from_str(&files::text("chart/files/dashboard.json")?).context("dashboard.json")
}

fn panels(dashboard: &Value) -> impl Iterator<Item = &Value> {
    dashboard["panels"].as_array().into_iter().flatten()
}

fn expressions(dashboard: &Value) -> Vec<String> {
    let targets = panels(dashboard).flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let queries = targets.filter_map(|target| target["expr"].as_str().map(str::to_owned));
    // `label_values(metric, label)`
    let variables = dashboard["templating"]["list"].as_array().into_iter().flatten();
    let variables = variables.filter_map(|variable| {
        let query = variable["query"]["query"].as_str()?.strip_prefix("label_values(")?;
        Some(query.rsplit_once(',')?.0.to_owned())
    });
    queries.chain(variables).collect()
}

/// What Prometheus itself reads, without its operator.
fn rule_file() -> Result<Value> {
    let object = files::objects("chart/files/prometheusrule.yaml")?.pop().context("no rules")?;
    Ok(object["spec"].clone())
}

fn rules() -> Result<Vec<(String, String)>> {
    let rules = rule_file()?;
    let groups = rules["groups"].as_array().context("groups")?;
    let alerts = groups.iter().flat_map(|group| group["rules"].as_array().into_iter().flatten());
    let text = |rule: &Value, field: &str| rule[field].as_str().map(str::to_owned).context(field.to_owned());
    alerts.map(|rule| Ok((text(rule, "alert")?, text(rule, "expr")?))).collect()
}

pub(super) fn the_dashboard_opens_without_editing() -> Result<Outcome> {
    let dashboard = dashboard()?;
    ensure!(dashboard.get("__inputs").is_none(), "Grafana would ask before it opens");
    let variables: Vec<_> = dashboard["templating"]["list"].as_array().into_iter().flatten().collect();
    let names: BTreeSet<_> = variables.iter().filter_map(|variable| variable["name"].as_str()).collect();
    ensure!(
        variables
            .first()
            .is_some_and(|first| first["type"] == "datasource" && first["query"] == "prometheus")
    );
    let (mut ids, mut taken) = (BTreeSet::new(), BTreeMap::new());
    for panel in panels(&dashboard) {
        let title = panel["title"].as_str().context("a panel without title")?;
        ensure!(ids.insert(panel["id"].as_u64().context("id")?), "{title}: another panel has its id");
        let position =
            |name: &str| panel["gridPos"][name].as_u64().with_context(|| format!("{title}: {name}"));
        for x in position("x")?..position("x")? + position("w")? {
            for y in position("y")?..position("y")? + position("h")? {
                ensure!(x < 24, "{title} is wider than the page");
                let other = taken.insert((x, y), title);
                ensure!(other.is_none(), "{title} lies over {other:?}");
            }
        }
        if panel["type"] == "row" {
            continue;
        }
        let targets = panel["targets"].as_array().context("targets")?;
        ensure!(!targets.is_empty(), "{title} asks nothing");
        for source in targets.iter().chain([panel]) {
            ensure!(source["datasource"]["uid"] == "${datasource}", "{title}: {}", source["datasource"]);
        }
    }
    for expression in expressions(&dashboard) {
        for used in expression.split('$').skip(1) {
            let end =
                used.find(|letter: char| !(letter.is_alphanumeric() || letter == '_')).unwrap_or(used.len());
            let name = &used[..end];
            ensure!(names.contains(name) || name == "__rate_interval", "{expression}: there is no ${name}");
        }
    }
    Ok(Outcome::Passed)
}

pub(super) fn rules_fire_when_they_should() -> Result<Outcome> {
    let promtool = match Tool::Promtool.path() {
        Ok(promtool) => promtool,
        Err(error) => return Ok(Outcome::Skipped(format!("{error:#}"))),
    };
    let folder = tempfile::tempdir().context("making a folder")?;
    let run = |arguments: &[&str]| {
        let mut command = Command::new(&promtool);
        let output = command.args(arguments).current_dir(folder.path()).stdin(Stdio::null()).output();
        let output = output.context("starting promtool")?;
        let said = [output.stdout, output.stderr].concat();
        ensure!(
            output.status.success(),
            "promtool {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&said)
        );
        Ok(())
    };
    let tests = include_str!("../../rules.test.yaml");
    for (name, text) in [("rules.yaml", rule_file()?.to_string()), ("rules.test.yaml", tests.to_owned())] {
        fs::write(folder.path().join(name), text).with_context(|| format!("writing {name}"))?;
    }
    run(&["check", "rules", "rules.yaml"])?;
    run(&["test", "rules", "rules.test.yaml"])?;
    for (alert, _) in rules()? {
        ensure!(tests.matches(&alert).count() >= 2, "{alert} is not tested both quiet and firing");
    }
    for expression in expressions(&dashboard()?) {
        let plain = expression.replace("$__rate_interval", "5m");
        run(&["promql", "--experimental", "format", &plain]).with_context(|| expression.clone())?;
    }
    Ok(Outcome::Passed)
}

/// proxy-ctl on a node of a lab, ended with it.
struct Proxy(Child);

impl Drop for Proxy {
    fn drop(&mut self) {
        // An error means that it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn scrape(namespace: &str) -> Result<String> {
    namespace::within(namespace, || {
        let mut stream = TcpStream::connect(METRICS).context("connecting to /metrics")?;
        stream.set_read_timeout(Some(ANSWER)).context("setting a timeout")?;
        write!(stream, "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).context("reading /metrics")?;
        Ok(answer)
    })
}

/// What a proxy says of itself that follows a real API server.
fn exposition() -> Result<Result<String, String>> {
    if !nix::unistd::geteuid().is_root() {
        return Ok(Err("network namespaces need root".to_owned()));
    }
    if let Some(reason) = binaries::provide(&[Program::Etcd, Program::KubeApiServer])? {
        return Ok(Err(reason));
    }
    let lab = Lab::new()?;
    let node = lab.netns(NODE)?;
    let options = Options { namespace: Some(node.namespace.clone()), ..Options::default() };
    let mut server = ApiServer::start_with(&lab.directory().join("api-server"), options)?;
    server.apply(&json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE},
        "status": {"addresses": [{"type": "InternalIP", "address": node.addresses.v4.to_string()}]},
    }))?;
    let config = lab.directory().join("config.json");
    let text = json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": server.kubeconfig(PROXY)},
        "mode": "ebpf",
        "conntrack": {"maxPerCore": 0},
        "ebpf": {"cgroup": node.cgroup, "bpffs": lab.bpffs(1)},
    });
    fs::write(&config, text.to_string()).context("writing the configuration")?;
    let log = lab.directory().join("proxy.log");
    let mut command = lab.command(node, &lab::program("proxy-ctl")?)?;
    command.args(["run", "--hostname-override", NODE]).arg("--config").arg(&config);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log).context("making the log")?);
    let mut proxy = Proxy(command.spawn().context("starting proxy-ctl")?);
    // The first failure makes the metrics that count failures.
    for awaited in ["proxy_sources_listed 1", "proxy_source_errors_total{"] {
        let start = Instant::now();
        loop {
            let answer = scrape(&node.namespace);
            let found = answer.as_ref().is_ok_and(|text| text.lines().any(|line| line.starts_with(awaited)));
            if found {
                break;
            }
            let ended = proxy.0.try_wait().context("waiting for proxy-ctl")?;
            if ended.is_some() || start.elapsed() > PROGRAMMED {
                let log = fs::read_to_string(&log).unwrap_or_default();
                bail!("no {awaited} ({ended:?}): {answer:?}\n{log}");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        server.kill();
    }
    scrape(&node.namespace).map(Ok)
}

pub(super) fn metrics_exist() -> Result<Outcome> {
    let exposition = match exposition()? {
        Ok(exposition) => exposition,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    let declared = promql::declared(&exposition);
    ensure!(declared.contains("proxy_build_info"), "that is no exposition: {exposition}");
    let mut missing = BTreeSet::new();
    for expression in rules()?.into_iter().map(|(_, expression)| expression).chain(expressions(&dashboard()?))
    {
        let asked = promql::metrics(&expression);
        ensure!(!asked.is_empty(), "{expression} asks for nothing");
        missing.extend(asked.into_iter().filter(|name| name != OF_THE_SCRAPE && !declared.contains(name)));
    }
    ensure!(missing.is_empty(), "no such metrics: {missing:?}");
    Ok(Outcome::Passed)
}
