//! Rules and dashboard of the monitoring.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use behaviour::{
    proxy,
    setting::{PathKind, ProxyKind, Setting},
    world::World,
};
use control_plane::binaries::{self, Program};
use deploy::{files, promql, skip, tools::Tool};
use lab::wait;
use scenario::Skip;
use serde_json::{Value, json};

const METRICS: &str = "127.0.0.1:10249";
/// Time in which the proxy must notice that the API server is gone.
const PATIENCE: Duration = Duration::from_secs(60);
/// Metric that Prometheus itself makes for each target.
const OF_THE_SCRAPE: &str = "up";
/// Labels by which rules and dashboard distinguish targets. `namespace` is not among them, because
/// metrics of a Service have the Service's namespace.
const OF_THE_TARGET: [&str; 6] = ["job", "instance", "pod", "container", "endpoint", "node"];

fn dashboard() -> Result<Value> {
    serde_json::from_str(&files::text("chart/files/dashboard.json")?).context("dashboard.json")
}

fn panels(dashboard: &Value) -> impl Iterator<Item = &Value> {
    dashboard["panels"].as_array().into_iter().flatten()
}

fn expressions(dashboard: &Value) -> Vec<String> {
    let targets = panels(dashboard).flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let queries = targets.filter_map(|target| target["expr"].as_str().map(str::to_owned));
    // The query has the form `label_values(metric, label)`.
    let variables = dashboard["templating"]["list"].as_array().into_iter().flatten();
    let variables = variables.filter_map(|variable| {
        let query = variable["query"]["query"].as_str()?.strip_prefix("label_values(")?;
        Some(query.rsplit_once(',')?.0.to_owned())
    });
    queries.chain(variables).collect()
}

/// Returns the rules as Prometheus itself reads them, without its operator.
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

pub(super) fn the_dashboard_opens_without_editing((): &mut ()) -> Result<()> {
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
    Ok(())
}

/// Expects `honorLabels`. Without it, the label namespace of a Service's metrics becomes
/// `exported_namespace`, and the rules would name the namespace of the proxy's pod.
pub(super) fn the_pod_monitor_keeps_the_labels_of_the_metrics((): &mut ()) -> Result<()> {
    let objects = files::objects("monitoring")?;
    let monitor = files::of_kind(&objects, "PodMonitor")?;
    let endpoints = monitor["spec"]["podMetricsEndpoints"].as_array().context("podMetricsEndpoints")?;
    ensure!(!endpoints.is_empty(), "the PodMonitor scrapes nothing");
    for endpoint in endpoints {
        ensure!(endpoint["honorLabels"] == true, "{endpoint}");
    }
    Ok(())
}

pub(super) fn rules_fire_when_they_should((): &mut ()) -> Result<()> {
    let promtool = Tool::Promtool.path().map_err(skip)?;
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
    // promtool reads an expression of the dashboard as it reads one of a rule.
    let as_rule = |expression: String| {
        let plain = expression.replace("$__rate_interval", "5m");
        json!({"record": "dashboard:expression", "expr": plain})
    };
    let rules: Vec<Value> = expressions(&dashboard()?).into_iter().map(as_rule).collect();
    let file = json!({"groups": [{"name": "dashboard", "rules": rules}]});
    fs::write(folder.path().join("dashboard.yaml"), file.to_string()).context("writing dashboard.yaml")?;
    run(&["check", "rules", "--lint=none", "dashboard.yaml"])
}

/// Returns the metrics of a proxy that follows a real API server and then loses it. Its first
/// failure makes the metrics that count failures.
fn exposition() -> Result<String> {
    let missing = match proxy::missing_for(ProxyKind::Ebpf)? {
        None => binaries::provide(&[Program::Etcd, Program::KubeApiServer])?,
        missing => missing,
    };
    if let Some(reason) = missing {
        bail!(Skip(reason));
    }
    let setting = Setting::new(ProxyKind::Ebpf, PathKind::Sockets);
    let mut world = World::with_services(setting, true, |_, _| Ok(()))?;
    world.kill_api_server();
    wait::until("a failure is counted", PATIENCE, || {
        let failures = world.metric(1, "proxy_source_errors_total").map_err(|error| format!("{error:#}"))?;
        Ok(failures.map(drop))
    })
    .with_context(|| world.logs())?;
    let (_, body) = world.agent("node1")?.http_get(METRICS.parse()?, "/metrics")?;
    Ok(body)
}

/// Metric that has a sample only while RBAC denies something, which it does not here. The suite
/// `life cycle` has a world where it does.
const OF_DENIALS: &str = "proxy_source_denied";

pub(super) fn rules_and_dashboard_name_metrics_that_exist((): &mut ()) -> Result<()> {
    let exposition = exposition()?;
    let declared = promql::declared(&exposition);
    ensure!(declared.contains("proxy_build_info"), "that is no exposition: {exposition}");
    // With the PodMonitor's honorLabels, such a label would replace that of the target.
    for label in OF_THE_TARGET {
        let has_label = [format!("{{{label}=\""), format!(",{label}=\"")];
        ensure!(!has_label.iter().any(|text| exposition.contains(text)), "a metric has the label {label}");
    }
    let mut missing = BTreeSet::new();
    for expression in rules()?.into_iter().map(|(_, expression)| expression).chain(expressions(&dashboard()?))
    {
        let asked = promql::metrics(&expression)?;
        ensure!(!asked.is_empty(), "{expression} asks for nothing");
        missing.extend(
            asked
                .into_iter()
                .filter(|name| name != OF_THE_SCRAPE && name != OF_DENIALS && !declared.contains(name)),
        );
    }
    ensure!(missing.is_empty(), "no such metrics: {missing:?}");
    Ok(())
}
