//! Runs Kubernetes's tests by ginkgo, several at once, and reads its report.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    fs::{self, File},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use lab::namespace;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{cluster::Cluster, programs::Program};

const REPORT: &str = "report.json";
pub const LOG: &str = "ginkgo.log";

/// The outcome of a test.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Verdict {
    Passed {
        seconds: u64,
    },
    Failed {
        message: String,
    },
    /// The test itself found that the cluster lacks something.
    Skipped {
        reason: String,
    },
}

/// Verdicts by the names of tests.
pub type Verdicts = BTreeMap<String, Verdict>;

/// Number of tests that run at once, and the time that all of them may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub at_once: u8,
    pub time: Duration,
}

/// Returns the names of all tests of sig-network that the test binary has.
pub fn names() -> Result<BTreeSet<String>> {
    let file = env::temp_dir().join(format!("proxy-ctl-e2e-{}.json", std::process::id()));
    let output = Command::new(Program::Tests.path()?)
        .args(["--ginkgo.dry-run", r"--ginkgo.focus=\[sig-network\]", "--ginkgo.json-report"])
        .arg(&file)
        .stdin(Stdio::null())
        .output()
        .context("starting e2e.test")?;
    ensure!(output.status.success(), "e2e.test: {}", String::from_utf8_lossy(&output.stderr));
    let report = fs::read(&file).with_context(|| format!("reading {}", file.display()))?;
    fs::remove_file(&file).with_context(|| format!("removing {}", file.display()))?;
    let report: Value = serde_json::from_slice(&report).context("reading the report of ginkgo")?;
    Ok(tests(&report).map(name).filter(|name| name.starts_with("[sig-network]")).collect())
}

/// Runs these tests in a cluster. A test without a verdict was not run.
pub fn run(cluster: &Cluster, names: &BTreeSet<String>, limits: Limits) -> Result<Verdicts> {
    let log = cluster.folder().join(LOG);
    let output = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
    // ginkgo has a process namespace of its own, so that what it has started ends with it.
    let mut command = Command::new("setpriv");
    command.args([
        "--pdeathsig",
        "KILL",
        "--",
        "unshare",
        "--pid",
        "--fork",
        "--kill-child=KILL",
        "--mount-proc",
    ]);
    command.arg("--").arg(Program::Ginkgo.path()?).arg("--no-color");
    command.arg(format!("--procs={}", limits.at_once)).arg(format!("--timeout={}s", limits.time.as_secs()));
    command.arg(format!("--json-report={REPORT}")).arg("--output-dir").arg(cluster.folder());
    command.arg(Program::Tests.path()?).arg("--").arg(format!("--ginkgo.focus={}", pattern(names)));
    command.arg("--kubeconfig").arg(cluster.kubeconfig()).arg("--provider=local");
    command.arg("--kubectl-path").arg(Program::Kubectl.path()?);
    command.arg(format!("--num-nodes={}", cluster.nodes().len()));
    command.args(["--disable-log-dump", "--dump-logs-on-failure=false"]);
    command.current_dir(cluster.folder()).stdin(Stdio::null());
    command.stdout(output.try_clone().context("duplicating a log")?).stderr(output);
    let namespace = cluster.namespace();
    namespace::within(&namespace, || command.status().context("starting ginkgo"))?;
    read(&cluster.folder().join(REPORT), names).with_context(|| {
        let text = fs::read_to_string(&log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        format!(
            "ginkgo has left no report; it has printed\n{}",
            lines[lines.len().saturating_sub(20)..].join("\n")
        )
    })
}

/// Returns a regular expression for these names and no others.
fn pattern(names: &BTreeSet<String>) -> String {
    let names: Vec<String> = names.iter().map(|name| regex::escape(name)).collect();
    format!("({})$", names.join("|"))
}

fn read(report: &Path, names: &BTreeSet<String>) -> Result<Verdicts> {
    let text = fs::read(report).with_context(|| format!("reading {}", report.display()))?;
    let report: Value = serde_json::from_slice(&text).context("reading the report of ginkgo")?;
    // The report also has the steps before and after all tests. If one fails, tests are not run.
    let all = report.as_array().into_iter().flatten().flat_map(|suite| suite["SpecReports"].as_array());
    let failed = all.flatten().find(|report| report["LeafNodeType"] != "It" && is_failure(report));
    if let Some(failed) = failed {
        anyhow::bail!("{}: {}", failed["LeafNodeType"], message(failed));
    }
    let verdicts = tests(&report).map(|test| (name(test), verdict(test)));
    Ok(verdicts.filter(|(name, _)| names.contains(name)).collect())
}

fn tests(report: &Value) -> impl Iterator<Item = &Value> {
    let suites = report.as_array().into_iter().flatten();
    let reports = suites.flat_map(|suite| suite["SpecReports"].as_array()).flatten();
    reports.filter(|report| report["LeafNodeType"] == "It")
}

fn name(test: &Value) -> String {
    let containers = test["ContainerHierarchyTexts"].as_array().into_iter().flatten();
    let words = containers.chain([&test["LeafNodeText"]]).filter_map(Value::as_str);
    words.filter(|text| !text.is_empty()).collect::<Vec<_>>().join(" ")
}

fn is_failure(report: &Value) -> bool {
    !matches!(report["State"].as_str(), Some("passed" | "skipped" | "pending"))
}

fn verdict(test: &Value) -> Verdict {
    match test["State"].as_str() {
        Some("passed") => {
            Verdict::Passed { seconds: test["RunTime"].as_u64().unwrap_or_default() / 1_000_000_000 }
        }
        Some("skipped" | "pending") => Verdict::Skipped { reason: message(test) },
        _ => Verdict::Failed { message: message(test) },
    }
}

/// Returns the text with `~` for the home folder of whoever runs the tests. The table of results is
/// the same for everybody.
fn without_home(text: &str) -> String {
    match env::home_dir() {
        Some(home) if home.parent().is_some() => text.replace(&format!("{}/", home.display()), "~/"),
        _ => text.to_owned(),
    }
}

/// Returns what ginkgo reports about a test, with the position in its source if it has failed.
fn message(test: &Value) -> String {
    let failure = &test["Failure"];
    let text = failure["Message"].as_str().unwrap_or("no reason is given");
    let text = without_home(text.strip_prefix("skipped - ").unwrap_or(text).trim());
    match (failure["Location"]["FileName"].as_str(), is_failure(test)) {
        (Some(file), true) => format!("{text}\nat {file}:{}", failure["Location"]["LineNumber"]),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report(own: &Value) -> Value {
        json!([{"SpecReports": [
            own,
            {"LeafNodeType": "It", "ContainerHierarchyTexts": ["[sig-network] Services"],
             "LeafNodeText": "should serve (all)", "State": "passed", "RunTime": 2_500_000_000_u64},
            {"LeafNodeType": "It", "ContainerHierarchyTexts": ["[sig-network] Services"],
             "LeafNodeText": "should fail", "State": "timedout", "Failure": {"Message": "late",
             "Location": {"FileName": "service.go", "LineNumber": 7}}},
            {"LeafNodeType": "It", "ContainerHierarchyTexts": ["[sig-network] Services"],
             "LeafNodeText": "should skip", "State": "skipped",
             "Failure": {"Message": "skipped - needs 6 nodes"}},
            {"LeafNodeType": "It", "ContainerHierarchyTexts": ["[sig-network] Services"],
             "LeafNodeText": "is not asked for", "State": "skipped"},
        ]}])
    }

    fn names() -> BTreeSet<String> {
        ["should serve (all)", "should fail", "should skip"]
            .map(|name| format!("[sig-network] Services {name}"))
            .into()
    }

    #[test]
    fn each_test_that_is_asked_for_has_its_verdict() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(REPORT);
        let before = json!({"LeafNodeType": "SynchronizedBeforeSuite", "State": "passed"});
        fs::write(&file, report(&before).to_string()).unwrap();
        let verdicts = read(&file, &names()).unwrap();
        let of = |name: &str| verdicts[&format!("[sig-network] Services {name}")].clone();
        assert_eq!(of("should serve (all)"), Verdict::Passed { seconds: 2 });
        assert_eq!(of("should fail"), Verdict::Failed { message: "late\nat service.go:7".into() });
        assert_eq!(of("should skip"), Verdict::Skipped { reason: "needs 6 nodes".into() });
        assert_eq!(verdicts.len(), 3);
        let before = json!({"LeafNodeType": "SynchronizedBeforeSuite", "State": "failed",
            "Failure": {"Message": "no nodes"}});
        fs::write(&file, report(&before).to_string()).unwrap();
        assert!(read(&file, &names()).unwrap_err().to_string().contains("no nodes"));
    }

    #[test]
    fn the_pattern_takes_names_and_nothing_longer() {
        let pattern = regex::Regex::new(&pattern(&names())).unwrap();
        assert!(pattern.is_match("Kubernetes e2e suite [sig-network] Services should serve (all)"));
        assert!(!pattern.is_match("Kubernetes e2e suite [sig-network] Services should serve (all) twice"));
    }

    #[test]
    fn the_home_folder_is_not_told() {
        let home = env::home_dir().unwrap();
        let told = without_home(&format!("opening {}: not there", home.join("id_rsa").display()));
        assert_eq!(told, "opening ~/id_rsa: not there");
    }
}
