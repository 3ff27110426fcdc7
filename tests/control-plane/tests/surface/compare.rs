//! Differences between what two proxies have shown, and their explanations.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value};

use crate::Seen;

/// Differences in a few words, such as `page configz body.mode` or `metric go_threads missing`,
/// with what each proxy shows.
pub(crate) type Found = BTreeMap<String, String>;

pub(crate) fn all(theirs: &Seen, ours: &Seen) -> Found {
    let mut differences = Found::new();
    let names: BTreeSet<&String> = theirs.keys().chain(ours.keys()).collect();
    for name in names {
        match (theirs.get(name), ours.get(name)) {
            (Some(_), None) => drop(differences.insert(format!("{name} missing"), String::new())),
            (None, Some(_)) => drop(differences.insert(format!("{name} additional"), String::new())),
            (theirs, ours) => collect(name, " ", theirs, ours, &mut differences),
        }
    }
    differences
}

fn collect(path: &str, joint: &str, theirs: Option<&Value>, ours: Option<&Value>, differences: &mut Found) {
    let empty = Map::new();
    let fields = |value: Option<&Value>| match value {
        Some(Value::Object(fields)) => Some(fields.clone()),
        None => Some(empty.clone()),
        Some(_) => None,
    };
    let objects = matches!(theirs, Some(Value::Object(_))) || matches!(ours, Some(Value::Object(_)));
    match (fields(theirs), fields(ours)) {
        (Some(theirs), Some(ours)) if objects => {
            let names: BTreeSet<&String> = theirs.keys().chain(ours.keys()).collect();
            for name in names {
                let path = format!("{path}{joint}{name}");
                collect(&path, ".", theirs.get(name), ours.get(name), differences);
            }
        }
        _ if theirs != ours => {
            let told = |value: Option<&Value>| value.map_or("nothing".into(), ToString::to_string);
            let shows = format!(": theirs {}, ours {}", told(theirs), told(ours));
            differences.insert(path.to_owned(), shows);
        }
        _ => {}
    }
}

/// Differences that have a reason: the rows of tables in a Markdown file. `*` stands for any text.
/// Rows below a heading that ends with `mode …` are about that mode of kube-proxy only.
pub(crate) struct Differences(Vec<String>);

impl Differences {
    pub(crate) fn read(path: &Path, mode: &str) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        let mut patterns = Vec::new();
        let mut counts = true;
        for line in text.lines() {
            if line.starts_with('#') {
                counts = line.rsplit_once("mode ").is_none_or(|(_, of)| of == mode);
            }
            if !counts || !line.starts_with("| `") {
                continue;
            }
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            let [pattern, reason] = cells.as_slice() else { bail!("{line} must have two cells") };
            ensure!(reason.len() > 10, "{pattern} has no reason in {}", path.display());
            patterns.extend(pattern.split("<br>").map(|one| one.trim().trim_matches('`').to_owned()));
        }
        Ok(Self(patterns))
    }

    /// Returns an error that names differences without an explanation, and explanations without a
    /// difference.
    pub(crate) fn judge(&self, found: &Found) -> Result<()> {
        let unexplained: Vec<String> = found
            .iter()
            .filter(|(difference, _)| !self.0.iter().any(|pattern| matches(pattern, difference)))
            .map(|(difference, shows)| format!("{difference}{shows}"))
            .collect();
        let met = |pattern: &String| found.keys().any(|difference| matches(pattern, difference));
        let stale: Vec<&String> = self.0.iter().filter(|pattern| !met(pattern)).collect();
        ensure!(
            unexplained.is_empty() && stale.is_empty(),
            "differences without an explanation: {unexplained:#?}; explanations without a difference: {stale:#?}"
        );
        Ok(())
    }
}

fn matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((first, rest)) => text.strip_prefix(first).is_some_and(|text| {
            (0..=text.len()).any(|at| text.is_char_boundary(at) && matches(rest, &text[at..]))
        }),
    }
}
