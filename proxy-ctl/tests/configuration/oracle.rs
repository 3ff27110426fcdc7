//! The answers of the real kube-proxy to each case, live or recorded.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::LazyLock,
};

use control_plane::binaries::Program;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A configuration file and flags.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Case {
    pub(crate) name: String,
    file: Option<String>,
    #[serde(default)]
    raw: bool,
    #[serde(default)]
    flags: Vec<String>,
    pub(crate) differs: Option<Difference>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Difference {
    /// The item of docs/configuration.md that lists the difference.
    pub(crate) item: String,
    #[serde(rename = "why")]
    _why: String,
    pub(crate) ours: Option<Verdict>,
    #[serde(default)]
    pub(crate) paths: Vec<String>,
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verdict {
    Accepted,
    Refused,
}

/// The answer of a program to a case.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Answer {
    /// The document that the program wrote.
    Accepted(Value),
    /// The text that the program printed on stderr.
    Refused(String),
}

impl Answer {
    pub(crate) fn verdict(&self) -> Verdict {
        match self {
            Self::Accepted(_) => Verdict::Accepted,
            Self::Refused(_) => Verdict::Refused,
        }
    }
}

/// Everything that was recorded of one kube-proxy.
#[derive(Debug, PartialEq)]
pub(crate) struct Recording {
    pub(crate) version: String,
    /// The flags, each with the word for its value, which is empty for a switch.
    pub(crate) flags: BTreeMap<String, String>,
    /// The feature gates, each with stage and default, as `feature_gates.txt` has them.
    pub(crate) feature_gates: BTreeMap<String, String>,
    pub(crate) answers: BTreeMap<String, Answer>,
}

/// A [`Recording`] as it is stored. Of each document only what differs from the defaults is stored.
#[derive(Deserialize, Serialize)]
struct StoredRecording {
    version: String,
    flags: BTreeMap<String, String>,
    feature_gates: BTreeMap<String, String>,
    defaults: Value,
    answers: BTreeMap<String, StoredAnswer>,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
enum StoredAnswer {
    /// The values that differ from the defaults, by path.
    Accepted(BTreeMap<String, Value>),
    Refused(String),
}

/// The case whose document holds the defaults.
const DEFAULTS: &str = "no file and no flag";

impl Recording {
    pub(crate) fn to_json(&self) -> String {
        let Answer::Accepted(defaults) = &self.answers[DEFAULTS] else { panic!("no defaults") };
        let stored = |answer: &Answer| match answer {
            Answer::Refused(error) => StoredAnswer::Refused(error.clone()),
            Answer::Accepted(document) => {
                let mut changes = BTreeMap::new();
                difference("", defaults, document, &mut changes);
                StoredAnswer::Accepted(changes)
            }
        };
        let recording = StoredRecording {
            version: self.version.clone(),
            flags: self.flags.clone(),
            feature_gates: self.feature_gates.clone(),
            defaults: defaults.clone(),
            answers: self.answers.iter().map(|(name, answer)| (name.clone(), stored(answer))).collect(),
        };
        serde_json::to_string_pretty(&recording).unwrap() + "\n"
    }

    pub(crate) fn from_json(text: &str) -> Self {
        let StoredRecording { version, flags, feature_gates, defaults, answers } =
            serde_json::from_str(text).unwrap();
        let answer = |stored| match stored {
            StoredAnswer::Refused(error) => Answer::Refused(error),
            StoredAnswer::Accepted(changes) => {
                let mut document = defaults.clone();
                changes.into_iter().for_each(|(path, value)| put(&mut document, &path, value));
                Answer::Accepted(document)
            }
        };
        Self {
            version,
            flags,
            feature_gates,
            answers: answers.into_iter().map(|(name, stored)| (name, answer(stored))).collect(),
        }
    }
}

fn difference(path: &str, before: &Value, now: &Value, changes: &mut BTreeMap<String, Value>) {
    match (before, now) {
        (Value::Object(before), Value::Object(now)) => {
            assert!(before.keys().all(|name| now.contains_key(name)), "{path}: a default field is left out");
            for (name, value) in now {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                difference(&path, before.get(name).unwrap_or(&Value::Null), value, changes);
            }
        }
        (before, now) if before == now => {}
        _ => {
            changes.insert(path.to_owned(), now.clone());
        }
    }
}

fn put(document: &mut Value, path: &str, value: Value) {
    match path.split_once('.') {
        None => document[path] = value,
        Some((section, rest)) => put(&mut document[section], rest, value),
    }
}

const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

/// Runs a program with a case. The folder has a file of the same name for every case, so that
/// messages are always the same.
pub(crate) fn ask(program: &[&Path], case: &Case) -> Answer {
    let folder = tempfile::TempDir::new().unwrap();
    let written = folder.path().join("written.yaml");
    let mut arguments: Vec<OsString> = vec!["--write-config-to".into(), "written.yaml".into()];
    if let Some(body) = &case.file {
        let text = if case.raw { body.clone() } else { format!("{HEAD}{body}\n") };
        fs::write(folder.path().join("config.yaml"), text).unwrap();
        arguments.extend(["--config".into(), "config.yaml".into()]);
    }
    arguments.extend(case.flags.iter().map(OsString::from));
    let output = Command::new(program[0])
        .args(&program[1..])
        .args(&arguments)
        .current_dir(folder.path())
        .output()
        .unwrap();
    answer(&output, &written)
}

fn answer(output: &Output, written: &Path) -> Answer {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() {
        let text = fs::read_to_string(written).unwrap();
        return Answer::Accepted(serde_saphyr::from_str(&text).unwrap());
    }
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(!written.exists(), "{stderr}");
    Answer::Refused(stderr)
}

/// Returns the answer without parts that change from run to run.
fn normalized(answer: Answer) -> Answer {
    let Answer::Refused(stderr) = answer else { return answer };
    let error = match stderr.rsplit_once("err=") {
        Some((_, error)) => error,
        // The help text comes before or after the error.
        None => stderr.lines().find(|line| line.starts_with("Error: ")).unwrap_or(&stderr),
    };
    let words: Vec<_> = error.split_whitespace().collect();
    Answer::Refused(words.join(" ").trim_matches('"').replace("\\\"", "\"").replace("\\\\", "\\"))
}

/// Returns the real kube-proxy, which is found, or built if there is Go.
pub(crate) fn kube_proxy() -> Option<PathBuf> {
    static FOUND: LazyLock<Option<PathBuf>> = LazyLock::new(|| {
        let gates = Program::FeatureGates.absent();
        gates
            .map_or_else(|| Program::KubeProxy.here().unwrap(), Err)
            .inspect_err(|reason| eprintln!("skipped: {reason}"))
            .ok()
    });
    FOUND.clone()
}

pub(crate) fn record(kube_proxy: &Path, cases: &[Case]) -> Recording {
    let output_of = |flag: &str| {
        let output = Command::new(kube_proxy).arg(flag).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let answers = cases.iter().map(|case| (case.name.clone(), normalized(ask(&[kube_proxy], case))));
    Recording {
        version: output_of("--version").trim().to_owned(),
        flags: output_of("--help").lines().filter_map(flag).collect(),
        feature_gates: real_feature_gates(),
        answers: answers.collect(),
    }
}

/// Returns the feature gates that a program prints that is built with the kube-proxy above. The
/// `--help` of kube-proxy leaves out gates that are in no group.
fn real_feature_gates() -> BTreeMap<String, String> {
    let output = Command::new(Program::FeatureGates.path().unwrap()).output().unwrap();
    feature_gates(&String::from_utf8(output.stdout).unwrap())
}

/// Parses lines of `name stage default`.
pub(crate) fn feature_gates(text: &str) -> BTreeMap<String, String> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let gates = lines.map(|line| line.split_once(' ').unwrap());
    gates.map(|(name, rest)| (name.to_owned(), rest.to_owned())).collect()
}

/// Parses a line such as ` --config string The path …` or ` -v, --v Level …`.
fn flag(line: &str) -> Option<(String, String)> {
    let line = line.trim_start();
    let line = line.split_once(", ").filter(|(short, _)| short.len() == 2).map_or(line, |(_, long)| long);
    let usage = line.strip_prefix("--")?;
    let usage = usage.split_once("  ").map_or(usage, |(usage, _)| usage);
    let (name, value) = usage.split_once(' ').unwrap_or((usage, ""));
    Some((name.to_owned(), value.to_owned()))
}

/// Returns the fields or flags that an error of kube-proxy names, by their last word. The list is
/// empty if the error names none.
pub(crate) fn named(error: &str) -> Vec<String> {
    const GO_NAMES: [(&str, &str); 5] = [
        ("interfacename", "bridgeinterface"),
        ("interfaceprefix", "interfacenameprefix"),
        ("proxymode", "mode"),
        ("clustercidrs", "clustercidr"),
        ("hostname-override", "hostnameoverride"),
    ];
    let after = |marker: &str, end: &[char]| -> Vec<&str> {
        let parts = error.split(marker).skip(1);
        parts.map(|part| part.split(end).next().unwrap_or_default()).collect()
    };
    let mut names = after("KubeProxyConfiguration.", &[':', ' ']);
    // The bound of a comparison is no second field.
    if let Some(first) = names
        .first()
        .copied()
        .filter(|_| error.contains("must be greater than or equal to KubeProxyConfiguration"))
    {
        names = vec![first];
    }
    names.extend(after("Go struct field ", &[' ']));
    names.extend(after("initialize logging: ", &[':']));
    names.extend(after("for \"-v, --", &['"']));
    names.extend(after("for \"--", &['"']));
    names.extend(after("unknown flag: --", &[' ']));
    names.extend(after("needs an argument: --", &[' ']));
    for (marker, name) in [
        ("feature gate", "featureGates"),
        ("depends on features", "featureGates"),
        ("no kind", "apiVersion"),
        ("'Kind' is missing", "kind"),
        ("empty hostname-override", "hostnameOverride"),
    ] {
        if error.contains(marker) {
            names = vec![name];
        }
    }
    let last = |name: &str| {
        let name =
            name.split('[').next().unwrap_or_default().rsplit('.').next().unwrap_or_default().to_lowercase();
        GO_NAMES.iter().find(|(go, _)| *go == name).map_or(name.clone(), |(_, ours)| (*ours).to_owned())
    };
    names.into_iter().map(last).filter(|name| !name.is_empty()).collect()
}
