//! Compares flags and configuration files with the real kube-proxy: which are accepted, which field
//! an error names, and what `--write-config-to` writes. The tests need no root.
//!
//! The answers of kube-proxy are recorded in `recorded.json`:
//!
//!     cargo test -p proxy-ctl --test configuration -- --ignored record
//!
//! The recording is compared with the real kube-proxy too, where it is found or can be built (Go).
#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod oracle;

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use oracle::{Answer, Case, Recording, Verdict};
use proxy_ctl::config::{FIELDS, FLAGS, Group, REMOVED, ValueKind, documentation};
use serde_json::Value;

const CORPUS: &str = include_str!("corpus.yaml");
const FEATURE_GATES: &str = include_str!("../../src/config/feature_gates.txt");

fn corpus() -> Vec<Case> {
    let cases: Vec<Case> = serde_saphyr::from_str(CORPUS).unwrap();
    let names: BTreeSet<_> = cases.iter().map(|case| &case.name).collect();
    assert_eq!(names.len(), cases.len(), "two cases have one name");
    cases
}

fn here(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn recording() -> Recording {
    Recording::from_json(&fs::read_to_string(here("tests/configuration/recorded.json")).unwrap())
}

fn ours(case: &Case) -> Answer {
    oracle::ask(&[Path::new(env!("CARGO_BIN_EXE_proxy-ctl")), Path::new("run")], case)
}

/// Returns our document without fields that kube-proxy does not have.
fn comparable(document: &Value, theirs: &Value) -> Value {
    let mut document = document.clone();
    let object = document.as_object_mut().unwrap();
    object.remove("ebpf");
    // If no mode is given, ours is chosen on the node, and kube-proxy chooses at once.
    if object["mode"] == "" && theirs["mode"] == "iptables" {
        object.insert("mode".to_owned(), "iptables".into());
    }
    document
}

/// Lists the paths of the values in which two documents differ.
fn differences(path: &str, one: &Value, other: &Value, found: &mut Vec<String>) {
    match (one, other) {
        (Value::Object(one), Value::Object(other)) => {
            let names: BTreeSet<_> = one.keys().chain(other.keys()).collect();
            for name in names {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                let value = |object: &serde_json::Map<_, _>| object.get(name).cloned().unwrap_or_default();
                differences(&path, &value(one), &value(other), found);
            }
        }
        (one, other) if one == other => {}
        (Value::Number(one), Value::Number(other)) if one.as_f64() == other.as_f64() => {}
        _ => found.push(path.to_owned()),
    }
}

/// Returns an error if two answers differ in a way that is not listed.
fn compare(case: &Case, ours: &Answer, theirs: &Answer) -> Result<(), String> {
    let listed = case.differs.as_ref();
    let expected = listed.and_then(|differs| differs.ours);
    if expected == Some(theirs.verdict()) {
        return Err("is listed as different, but the answers are the same".to_owned());
    }
    if ours.verdict() != expected.unwrap_or(theirs.verdict()) {
        return Err(format!("ours: {ours:?}, kube-proxy: {theirs:?}"));
    }
    match (ours, theirs) {
        (Answer::Accepted(ours), Answer::Accepted(theirs)) => {
            let mut found = Vec::new();
            differences("", &comparable(ours, theirs), theirs, &mut found);
            let listed = listed.map(|differs| differs.paths.clone()).unwrap_or_default();
            if found == listed { Ok(()) } else { Err(format!("{found:?} differ, listed are {listed:?}")) }
        }
        (Answer::Refused(ours), Answer::Refused(theirs)) => {
            let lower = ours.to_lowercase();
            let words: BTreeSet<_> = lower.split(|c: char| !c.is_ascii_alphanumeric() && c != '-').collect();
            let missing = |name: &String| {
                !words.contains(name.as_str()) && !words.contains(format!("--{name}").as_str())
            };
            let missing: Vec<_> = oracle::named(theirs).into_iter().filter(missing).collect();
            if missing.is_empty() {
                Ok(())
            } else {
                Err(format!("{missing:?} not named in {ours:?}, kube-proxy: {theirs:?}"))
            }
        }
        (Answer::Accepted(_), Answer::Refused(_)) | (Answer::Refused(_), Answer::Accepted(_)) => Ok(()),
    }
}

#[test]
fn corpus_is_accepted_as_by_kube_proxy() {
    let recording = recording();
    let cases = corpus();
    assert!(cases.len() >= 60, "{} cases", cases.len());
    let wrong: Vec<String> = cases
        .iter()
        .filter_map(|case| {
            let theirs = recording.answers.get(&case.name).expect("record the new case");
            let problem = compare(case, &ours(case), theirs).err()?;
            Some(format!("{}: {problem}", case.name))
        })
        .collect();
    assert!(wrong.is_empty(), "{} of {} cases:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

#[test]
fn every_field_that_an_error_of_kube_proxy_names_is_recognized() {
    let unnamed =
        ["time: ", "json parse error", "invalid duration ", "quantit", "yaml:", "arguments", "shorthand"];
    for (name, answer) in recording().answers {
        if let Answer::Refused(error) = answer {
            let by_name = !oracle::named(&error).is_empty();
            assert!(by_name || unnamed.iter().any(|marker| error.contains(marker)), "{name}: {error}");
        }
    }
}

/// Returns what a program writes that is given this file.
fn written_again(program: &mut Command, document: &Value, case: &Case) -> Value {
    let folder = tempfile::TempDir::new().unwrap();
    let (first, second) = (folder.path().join("first.yaml"), folder.path().join("second.yaml"));
    fs::write(&first, serde_saphyr::to_string(document).unwrap()).unwrap();
    let output = program.arg("--config").arg(first).arg("--write-config-to").arg(&second).output().unwrap();
    assert!(output.status.success(), "{}: {}", case.name, String::from_utf8_lossy(&output.stderr));
    serde_saphyr::from_str(&fs::read_to_string(&second).unwrap()).unwrap()
}

#[test]
fn written_files_are_read_back_as_the_same() {
    for case in corpus() {
        // A value of zero means the default in a file.
        let zero = case.name.starts_with("zero ");
        let Answer::Accepted(document) = ours(&case) else { continue };
        let again = written_again(Command::new(env!("CARGO_BIN_EXE_proxy-ctl")).arg("run"), &document, &case);
        assert_eq!(again == document, !zero, "{}: {again}", case.name);
    }
}

#[test]
fn we_have_every_flag_of_kube_proxy() {
    let recorded = recording().flags;
    for (name, value) in &recorded {
        let flag = FLAGS.iter().find(|flag| flag.name == name);
        let flag = flag.unwrap_or_else(|| panic!("--{name} is missing"));
        let switch = value.is_empty() || value.starts_with("version");
        assert_eq!(flag.value.placeholder().is_none(), switch, "--{name} {value}");
        let duration = value == "duration";
        assert_eq!(flag.value == ValueKind::Duration, duration, "--{name} {value}");
    }
    for flag in FLAGS.iter().filter(|flag| !matches!(flag.group, Group::Own | Group::Legacy)) {
        assert!(recorded.contains_key(flag.name), "kube-proxy has no --{}", flag.name);
    }
    for (name, _) in REMOVED {
        assert!(!recorded.contains_key(*name), "kube-proxy has --{name}");
    }
}

#[test]
fn we_have_every_field_that_kube_proxy_writes() {
    fn leaves(path: &str, value: &Value, found: &mut BTreeSet<String>) {
        let section = value.as_object().filter(|object| !object.is_empty() && path != "featureGates");
        let Some(section) = section else {
            found.insert(path.to_owned());
            return;
        };
        for (name, value) in section {
            let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            leaves(&path, value, found);
        }
    }
    let mut written = BTreeSet::new();
    for answer in recording().answers.values() {
        if let Answer::Accepted(document) = answer {
            leaves("", document, &mut written);
        }
    }
    let own: BTreeSet<_> = FIELDS.iter().map(|field| field.path.to_owned()).collect();
    let kind = BTreeSet::from(["apiVersion".to_owned(), "kind".to_owned()]);
    let missing: Vec<_> = written.difference(&own).filter(|path| !kind.contains(*path)).collect();
    assert!(missing.is_empty(), "{missing:?}");
    let invented: Vec<_> = own.difference(&written).filter(|path| !path.starts_with("ebpf.")).collect();
    assert_eq!(invented, ["udpIdleTimeout"], "kube-proxy has had it up to 1.25");
}

#[test]
fn documentation_is_complete_and_current() {
    let text = documentation::markdown();
    for field in FIELDS {
        assert!(text.contains(&format!("| `{}` |", field.path)), "{}", field.path);
        assert!(!field.help.is_empty(), "{}", field.path);
    }
    for flag in FLAGS {
        assert!(text.contains(&format!("`--{}", flag.name)), "{}", flag.name);
        assert!(!flag.description().is_empty(), "{}", flag.name);
    }
    let written = fs::read_to_string(here("../docs/configuration.md")).unwrap_or_default();
    assert!(written == text, "docs/configuration.md is out of date: run the command at its end");
}

#[test]
#[ignore = "writes docs/configuration.md"]
fn write_documentation() {
    let path = here("../docs/configuration.md");
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, documentation::markdown()).unwrap();
}

#[test]
#[ignore = "asks the real kube-proxy and writes recorded.json"]
fn record() {
    let kube_proxy = oracle::kube_proxy().expect("there is no kube-proxy");
    let recording = oracle::record(&kube_proxy, &corpus());
    fs::write(here("tests/configuration/recorded.json"), recording.to_json()).unwrap();
}

#[test]
fn recording_matches_the_real_kube_proxy() {
    let Some(kube_proxy) = oracle::kube_proxy() else { return };
    let (now, then) = (oracle::record(&kube_proxy, &corpus()), recording());
    assert_eq!(now.version, then.version);
    assert_eq!(now.flags, then.flags);
    assert_eq!(now.feature_gates, then.feature_gates);
    for (name, answer) in &now.answers {
        assert_eq!(Some(answer), then.answers.get(name), "{name}");
    }
    assert_eq!(now.answers.len(), then.answers.len(), "a case is recorded that is gone");
}

#[test]
fn real_kube_proxy_accepts_what_we_write() {
    let Some(kube_proxy) = oracle::kube_proxy() else { return };
    for case in corpus() {
        let (Answer::Accepted(theirs), Answer::Accepted(ours)) =
            (oracle::ask(&[&kube_proxy], &case), ours(&case))
        else {
            continue;
        };
        let again = written_again(&mut Command::new(&kube_proxy), &ours, &case);
        let mut found = Vec::new();
        differences("", &again, &comparable(&ours, &theirs), &mut found);
        // kube-proxy loses this field of every file.
        found.retain(|path| !path.ends_with("splitStream"));
        assert_eq!(found.is_empty(), !case.name.starts_with("zero "), "{}: {found:?}", case.name);
    }
}

#[test]
fn our_feature_gates_are_those_of_kube_proxy_with_their_stages_and_defaults() {
    let (ours, later) = FEATURE_GATES.split_once("# Of 1.37.").unwrap();
    let theirs = recording().feature_gates;
    assert!(theirs.len() > 200, "{} gates", theirs.len());
    assert_eq!(oracle::feature_gates(ours), theirs);
    for gate in oracle::feature_gates(later.trim()).keys() {
        assert!(!theirs.contains_key(gate), "kube-proxy has {gate}");
    }
}

#[test]
fn listed_differences_exist_and_are_documented() {
    let listed = corpus().into_iter().filter(|case| case.differs.is_some());
    let documented: BTreeSet<_> = documentation::DIFFERENCES.iter().map(|(item, _)| *item).collect();
    let mut shown = BTreeSet::new();
    let recording = recording();
    for case in listed {
        let theirs = recording.answers[&case.name].verdict();
        let differs = case.differs.unwrap();
        assert_ne!(differs.ours, Some(theirs), "{}", case.name);
        assert_eq!(differs.ours.is_some(), differs.paths.is_empty(), "{}", case.name);
        assert!(differs.paths.is_empty() || theirs == Verdict::Accepted, "{}", case.name);
        assert!(documented.contains(differs.item.as_str()), "{}: {} is no item", case.name, differs.item);
        shown.insert(differs.item);
    }
    let without_case: Vec<_> = documented.iter().filter(|item| !shown.contains(**item)).collect();
    assert!(without_case.is_empty(), "{without_case:?}");
}
