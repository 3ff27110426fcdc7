//! `probe`: what this node can do, and the mode that `run` would choose.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    path::{Path, PathBuf},
};

use anyhow::bail;
use serde_json::{Map, Value, json};

use super::{
    add_global_bpffs,
    table::{print, print_json, table},
    tree,
    views::FormerView,
};
use crate::{
    config::{CommandLine, Effective, RequestedMode},
    dataplane, leftovers,
    mode::{self, ChosenMode, Probe, Refusal, Requirement},
    node,
};

pub(super) fn probe(flags: Vec<OsString>, bpffs: Option<PathBuf>) -> anyhow::Result<()> {
    let mut line = CommandLine::parse_with(&tree::OUTPUT, flags)?;
    add_global_bpffs(&mut line, bpffs);
    if line.is_on("help") {
        return tree::help(tree::subcommand("probe"));
    }
    let Effective { config, warnings, .. } = Effective::load(line.text("config").map(Path::new), &line)?;
    for warning in warnings {
        eprintln!("warning: {warning}");
    }
    let probes = dataplane::probe(&config, &node::facts::gather());
    let choice = mode::choose(config.mode, config.ebpf.mode_fallback, &probes);
    let former = FormerView::new(&leftovers::find(&config.ipvs.exclude_cidrs), Vec::new());
    match line.text("output") {
        None | Some("table") => print(&in_words(&probes, config.mode, &choice, &former))?,
        Some("json") => print_json(&as_json(&probes, config.mode, &choice, &former))?,
        Some(other) => bail!("--output must be table or json, found {other:?}"),
    }
    choice?;
    Ok(())
}

/// What several modes need is found once.
fn facts(probes: &[Probe]) -> impl Iterator<Item = &Requirement> {
    let mut keys = BTreeSet::new();
    probes
        .iter()
        .flat_map(|probe| &probe.requirements)
        .filter(move |requirement| keys.insert(requirement.key))
}

/// A requirement's `found`, for people.
fn text(found: &Value) -> String {
    match found {
        Value::Bool(found) => if *found { "yes" } else { "no" }.to_owned(),
        Value::String(found) => found.clone(),
        Value::Array(found) if !found.is_empty() => found.iter().map(text).collect::<Vec<_>>().join(" "),
        Value::Object(found) => {
            let parts = found.iter().map(|(name, state)| format!("{name} {}", text(state)));
            parts.collect::<Vec<_>>().join(", ")
        }
        Value::Null | Value::Array(_) => "none".to_owned(),
        Value::Number(_) => found.to_string(),
    }
}

fn requested(mode: RequestedMode) -> Option<String> {
    (mode != RequestedMode::Automatic).then(|| mode.to_string())
}

fn in_words(
    probes: &[Probe],
    mode: RequestedMode,
    choice: &Result<ChosenMode, Refusal>,
    former: &FormerView,
) -> String {
    let none = || "none".to_owned();
    let found = facts(probes).map(|one| [one.name.to_owned(), text(&one.found)]);
    let rows = [
        ["another kube-proxy".to_owned(), former.text().unwrap_or_else(none)],
        ["mode asked for".to_owned(), requested(mode).unwrap_or_else(none)],
    ];
    let chosen = match choice {
        Ok(choice) => {
            let mode = [["mode".to_owned(), choice.mode.name().to_owned()]];
            let why = choice.reasons.iter().map(|reason| ["because".to_owned(), reason.clone()]);
            mode.into_iter().chain(why).collect()
        }
        Err(refusal) => vec![["mode".to_owned(), format!("none: {refusal}")]],
    };
    let modes = probes.iter().map(|probe| {
        let missing: Vec<_> = probe.obstacles().collect();
        let can_run = if probe.can_run() { "yes" } else { "no" };
        [probe.mode.name().to_owned(), can_run.to_owned(), missing.join("; ")]
    });
    let facts = table(["FACT", "FOUND"], found.chain(rows).chain(chosen));
    format!("{}\n{facts}", table(["MODE", "CAN RUN", "MISSING"], modes))
}

fn as_json(
    probes: &[Probe],
    mode: RequestedMode,
    choice: &Result<ChosenMode, Refusal>,
    former: &FormerView,
) -> Value {
    let chosen = choice.as_ref().ok().map(
        |choice| json!({"mode": choice.mode.name(), "reasons": choice.reasons, "fallback": choice.fallback}),
    );
    let facts: Map<_, _> = facts(probes).map(|one| (one.key.to_owned(), one.found.clone())).collect();
    let modes = probes.iter().map(|probe| {
        let needs: Vec<_> = probe.requirements.iter().map(|one| one.key).collect();
        let missing: Vec<_> = probe.obstacles().collect();
        json!({
            "mode": probe.mode.name(),
            "canRun": probe.can_run(),
            "needs": needs,
            "missing": missing,
            "remarks": probe.remarks,
        })
    });
    json!({
        "facts": facts,
        "modes": modes.collect::<Vec<_>>(),
        "requested": requested(mode),
        "choice": chosen,
        "refusal": choice.as_ref().err().map(ToString::to_string),
        "formerKubeProxy": former,
    })
}
