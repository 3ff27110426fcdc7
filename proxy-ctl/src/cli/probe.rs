//! The command `probe`, which shows what this node can do, and the mode that `run` would choose.

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
    xdp::{self, XdpView},
};
use crate::{
    cleanup,
    config::{CommandLine, Config, Effective, Keyword as _, Xdp},
    model::mode::{self, ChosenMode, Probe, Refusal, RequestedMode, Requirement},
    modes, node,
    process::record::Record,
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
    let probes = modes::probe(&config, &node::facts::gather());
    let choice = mode::choose(config.mode, config.ebpf.mode_fallback, &probes);
    let uplinks = Uplinks::of(&config);
    let former = FormerView::new(&cleanup::find(&config.ipvs.exclude_cidrs), Vec::new());
    match line.text("output") {
        None | Some("table") => print(&in_words(&probes, config.mode, &choice, &former, &uplinks))?,
        Some("json") => print_json(&as_json(&probes, config.mode, &choice, &former, &uplinks))?,
        Some(other) => bail!("--output must be table or json, found {other:?}"),
    }
    match choice?.fallback {
        Some(fallback) => bail!(fallback),
        None => Ok(()),
    }
}

/// The state of XDP on the uplinks, which mode ebpf can use.
struct Uplinks {
    /// The value of `ebpf.xdp`. If it is `off`, the other fields describe the state with `auto`.
    configured: Xdp,
    xdp: Vec<XdpView>,
}

impl Uplinks {
    fn of(config: &Config) -> Self {
        let configured = config.ebpf.xdp;
        // A caller without permission to list interfaces is shown none.
        let mut network = node::network(config).unwrap_or_default();
        network.interfaces.retain(|interface| config.ebpf.interfaces.select(&interface.name));
        let tried = if configured == Xdp::Off { Xdp::Auto } else { configured };
        // A caller without permission to read the record is shown what would be attached.
        let record = Record::read(&config.ebpf.bpffs).ok().flatten();
        Self { configured, xdp: xdp::of_uplinks(tried, &network, record.as_ref()) }
    }

    /// Returns the table of uplinks, or an empty text if there are none.
    fn text(&self) -> String {
        if self.xdp.is_empty() {
            return String::new();
        }
        let column = if self.configured == Xdp::Off { "XDP, IF ebpf.xdp WERE auto" } else { "XDP" };
        format!("\n{}", xdp::text(column, &self.xdp))
    }
}

/// Returns the requirements of all modes. One that several modes have is returned once.
fn facts(probes: &[Probe]) -> impl Iterator<Item = &Requirement> {
    let mut keys = BTreeSet::new();
    probes
        .iter()
        .flat_map(|probe| &probe.requirements)
        .filter(move |requirement| keys.insert(requirement.key))
}

/// Returns the `found` of a requirement as a text.
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
    uplinks: &Uplinks,
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
    format!("{}\n{facts}{}", table(["MODE", "CAN RUN", "MISSING"], modes), uplinks.text())
}

fn as_json(
    probes: &[Probe],
    mode: RequestedMode,
    choice: &Result<ChosenMode, Refusal>,
    former: &FormerView,
    uplinks: &Uplinks,
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
        "xdp": {"requested": uplinks.configured.word(), "uplinks": uplinks.xdp},
    })
}
