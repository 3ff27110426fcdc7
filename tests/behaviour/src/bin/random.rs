//! Has random clusters served by each proxy, and compares the outcome of their probes with what
//! kube-proxy does. A difference must be explained in docs/differences.md, or it is a failure. A
//! failure shows the smallest cluster that still differs.

use std::{
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context as _, Result, anyhow, bail};
use behaviour::{
    proxy,
    random::{
        cluster::{Cluster, generate},
        observe::{Runner, Seen},
        shrink::smallest,
    },
    selection::{Paths, Selection},
    table::Differences,
};
use clap::Parser;
use proptest::strategy::ValueTree as _;
use scenario::{Scenario, Shared};

#[derive(Parser)]
struct CommandLine {
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    paths: Paths,
    /// The seed from which all clusters come
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The first cluster's number
    #[arg(long, default_value_t = 0)]
    first: u32,
    /// The number of clusters
    #[arg(long, default_value_t = 20)]
    clusters: u32,
    /// The number of clusters that are tried to find a smaller one that differs too
    #[arg(long, default_value_t = 100)]
    tries: usize,
}

/// Lab with one proxy.
struct Run {
    runner: Runner,
    /// Number of clusters that are tried to find a smaller one. This takes minutes, so it is done
    /// only for the first cluster that differs.
    tries: usize,
}

type SharedDifferences = Arc<Mutex<Differences>>;

fn main() -> ExitCode {
    run(CommandLine::parse()).unwrap_or_else(|error| {
        eprintln!("random: {error:#}");
        ExitCode::FAILURE
    })
}

fn run(CommandLine { selection, paths, seed, first, clusters, tries }: CommandLine) -> Result<ExitCode> {
    lab::cluster::remove_on_signals()?;
    let differences = Arc::new(Mutex::new(Differences::read()?));
    let mut trials = Vec::new();
    for setting in selection.settings(&paths) {
        let run = Shared::new(move || match proxy::missing_for(setting.proxy)? {
            Some(reason) => Ok(Err(reason)),
            None => Ok(Ok(Run { runner: Runner::start(setting)?, tries })),
        });
        let numbers = first..first.saturating_add(clusters);
        trials.extend(run.trials(numbers.map(|number| {
            let differences = Arc::clone(&differences);
            Scenario::new(format!("{setting}: cluster {number} of seed {seed}"), move |run: &mut Run| {
                judge(run, seed, number, &differences)
            })
        })));
    }
    Ok(scenario::run(selection.harness, trials))
}

fn judge(
    Run { runner, tries }: &mut Run,
    seed: u64,
    number: u32,
    differences: &SharedDifferences,
) -> Result<()> {
    let mut tree = generate(seed, number).map_err(|reason| anyhow!("making a cluster: {reason}"))?;
    let unexplained = unexplained(runner, &tree.current(), differences)?;
    if unexplained.is_empty() {
        return Ok(());
    }
    let setting = runner.world.setting;
    let differs = |cluster: &Cluster| Ok(!self::unexplained(runner, cluster, differences)?.is_empty());
    let found = smallest(&mut tree, std::mem::take(tries), differs);
    let found = found.context("looking for a smaller cluster that differs")?;
    let again = self::unexplained(runner, &found.case, differences)?;
    bail!(
        "{}\nthe smallest of {} clusters that were tried then:\n{}\n{}\
         again: cargo xtask test --suite random --seed {seed} --first {number} --clusters 1, here with {setting}",
        lines(&unexplained),
        found.tried,
        if again.is_empty() { "it does not differ each time".to_owned() } else { lines(&again) },
        runner.manifests(&found.case)?,
    )
}

fn unexplained(runner: &mut Runner, cluster: &Cluster, differences: &SharedDifferences) -> Result<Vec<Seen>> {
    let setting = runner.world.setting;
    let mut seen = runner.run(cluster)?;
    let mut differences = differences.lock().unwrap_or_else(PoisonError::into_inner);
    seen.retain(|seen| !seen.differences.iter().all(|words| differences.explain(setting, words)));
    Ok(seen)
}

fn lines(seen: &[Seen]) -> String {
    Vec::from_iter(seen.iter().map(Seen::to_string)).join("\n")
}
