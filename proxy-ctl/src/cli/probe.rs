//! `probe`: what this node can do, and the mode that `run` would choose.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

use anyhow::bail;
use serde_json::json;

use super::{
    add_global_bpffs,
    table::{print, print_json, table},
    tree,
    views::FormerView,
};
use crate::{
    config::{CommandLine, Effective, RequestedMode},
    leftovers,
    mode::{self, BpfFilesystem, Cgroup2, ChosenMode, HostFacts, Refusal, Request},
    node::facts,
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
    facts::check(&config.ebpf)?;
    let found = facts::gather(&config.ebpf);
    let request = Request { mode: config.mode, socket_load_balancing: config.ebpf.socket_load_balancing };
    let choice = mode::choose(request, &found);
    let former = FormerView::new(&leftovers::find(&config.ipvs.exclude_cidrs), Vec::new());
    match line.text("output") {
        None | Some("table") => print(&in_words(&found, config.mode, &choice, &former))?,
        Some("json") => print_json(&as_json(&found, config.mode, &choice, &former))?,
        Some(other) => bail!("--output must be table or json, found {other:?}"),
    }
    choice?;
    Ok(())
}

fn bpffs_state(bpffs: BpfFilesystem) -> &'static str {
    match bpffs {
        BpfFilesystem::Mounted => "mounted",
        BpfFilesystem::Mountable => "mountable",
        BpfFilesystem::Missing => "missing",
    }
}

fn held(facts: &HostFacts) -> Vec<&'static str> {
    let all = [
        (facts.capabilities.sys_admin, "CAP_SYS_ADMIN"),
        (facts.capabilities.bpf, "CAP_BPF"),
        (facts.capabilities.perfmon, "CAP_PERFMON"),
        (facts.capabilities.net_admin, "CAP_NET_ADMIN"),
    ];
    all.into_iter().filter(|(held, _)| *held).map(|(_, name)| name).collect()
}

/// What a client of a service without endpoints gets from `connect`.
fn refuses_with(facts: &HostFacts) -> &'static str {
    if facts.set_retval { "ECONNREFUSED" } else { "EPERM" }
}

fn cgroup2(facts: &HostFacts) -> Option<String> {
    match &facts.cgroup2 {
        Cgroup2::Mounted(folder) => Some(folder.display().to_string()),
        Cgroup2::Mountable => Some("mountable".to_owned()),
        Cgroup2::Missing => None,
    }
}

fn requested(mode: RequestedMode) -> Option<String> {
    (mode != RequestedMode::Automatic).then(|| mode.to_string())
}

fn in_words(
    facts: &HostFacts,
    mode: RequestedMode,
    choice: &Result<ChosenMode, Refusal>,
    former: &FormerView,
) -> String {
    let yes = |yes: bool| if yes { "yes" } else { "no" }.to_owned();
    let none = || "none".to_owned();
    let capabilities = held(facts).join(" ");
    let rows = [
        ["kernel".to_owned(), facts.kernel_release.clone()],
        ["BTF".to_owned(), yes(facts.btf)],
        ["cgroup v2".to_owned(), cgroup2(facts).unwrap_or_else(none)],
        ["bpffs".to_owned(), bpffs_state(facts.bpffs).to_owned()],
        ["capabilities".to_owned(), if capabilities.is_empty() { none() } else { capabilities }],
        ["packet programs by".to_owned(), facts.packet_hook.name().to_owned()],
        ["no endpoint".to_owned(), refuses_with(facts).to_owned()],
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
    table(["FACT", "FOUND"], rows.into_iter().chain(chosen))
}

fn as_json(
    facts: &HostFacts,
    mode: RequestedMode,
    choice: &Result<ChosenMode, Refusal>,
    former: &FormerView,
) -> serde_json::Value {
    let chosen =
        choice.as_ref().ok().map(|choice| json!({"mode": choice.mode.name(), "reasons": choice.reasons}));
    json!({
        "facts": {
            "kernel": facts.kernel_release,
            "btf": facts.btf,
            "cgroup2": cgroup2(facts),
            "bpffs": bpffs_state(facts.bpffs),
            "capabilities": held(facts),
            "packetHook": facts.packet_hook.name(),
            "refusesWith": refuses_with(facts),
        },
        "requested": requested(mode),
        "choice": chosen,
        "refusal": choice.as_ref().err().map(ToString::to_string),
        "formerKubeProxy": former,
    })
}
