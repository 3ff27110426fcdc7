//! Runs the table of behaviours with each proxy, and prints scenarios × proxies. A difference from
//! the table must be explained in docs/differences.md, or it is a failure.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context as _, Result, bail, ensure};
use behaviour::{
    case::Variant,
    not_yet, proxy,
    selection::{Paths, Selection},
    setting::{ProxyKind, Setting, SourceKind},
    table::{self, Configuration, Differences, Observed, Row, RowNumber, SCENARIOS, Scenario},
    world::World,
};
use clap::Parser;
use scenario::{Outcome, Scenario as Test, Shared, Trial};

// clap names a group of arguments after its struct, and the harness already has one named
// `Arguments`.
#[derive(Parser)]
struct CommandLine {
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    paths: Paths,
    /// The source address that endpoints see in mode ebpf [default: preserve]
    #[arg(long, value_enum)]
    source: Vec<SourceKind>,
}

/// Results for the table that is printed, and the explanations that were needed.
struct Comparison {
    differences: Differences,
    /// Text of each cell, by number of the scenario, number of the row, and setting.
    cells: BTreeMap<(usize, usize, String), String>,
    /// Number of rows that were judged for each setting.
    judged: Vec<(Setting, usize)>,
    /// Scenarios and rows that have failed, and that are listed as not supported by mode ebpf yet.
    not_yet: BTreeSet<String>,
}

type SharedComparison = Arc<Mutex<Comparison>>;

/// Lab with one proxy, and what was found in it so far.
struct Run {
    world: World,
    variants: Vec<Variant>,
    dialled: BTreeSet<Configuration>,
    found: BTreeMap<RowNumber, Observed>,
}

fn main() -> ExitCode {
    run(CommandLine::parse()).unwrap_or_else(|error| {
        eprintln!("differential: {error:#}");
        ExitCode::FAILURE
    })
}

fn run(CommandLine { selection, paths, source: sources }: CommandLine) -> Result<ExitCode> {
    lab::cluster::remove_on_signals()?;
    let sources = if sources.is_empty() { vec![SourceKind::Preserve] } else { sources };
    let settings = Setting::with_sources(&selection.settings(&paths), &sources);
    let comparison = Arc::new(Mutex::new(Comparison {
        differences: Differences::read_of_table()?,
        cells: BTreeMap::new(),
        judged: Vec::new(),
        not_yet: BTreeSet::new(),
    }));
    let variants = table::variants(selection.lean);
    let mut trials: Vec<Trial> = Vec::new();
    for setting in &settings {
        trials.extend(trials_of(*setting, &variants, &comparison));
    }
    trials.push(explanations(&comparison));
    let is_listing = selection.harness.list;
    let result = scenario::run(selection.harness, trials);
    if !is_listing {
        print(&settings, &comparison);
    }
    Ok(result)
}

fn rows() -> impl Iterator<Item = (usize, usize, &'static Scenario, &'static Row)> {
    SCENARIOS.iter().enumerate().flat_map(|(number, scenario)| {
        scenario.rows.iter().enumerate().map(move |(row_number, row)| (number, row_number, scenario, row))
    })
}

/// Makes the tests of one setting, which has a lab of its own.
fn trials_of(setting: Setting, variants: &[Variant], comparison: &SharedComparison) -> Vec<Trial> {
    let variants = variants.to_vec();
    let run = Shared::new(move || match proxy::missing_for(setting.proxy)? {
        Some(reason) => Ok(Err(reason)),
        None => {
            let world = World::with_services(setting, setting.proxy.is_kube_proxy(), |_, _| Ok(()))?;
            Ok(Ok(Run { world, variants, dialled: BTreeSet::new(), found: BTreeMap::new() }))
        }
    });
    run.trials(rows().map(|(number, row_number, scenario, row)| {
        let comparison = Arc::clone(comparison);
        Test::new(format!("{setting}: {}: {row}", scenario.name), move |run: &mut Run| {
            judge(run, number, row_number, scenario, row, &comparison)
        })
    }))
}

impl Run {
    /// Returns what was found for a row. The first row of a configuration has all rows of it
    /// dialled.
    fn found(&mut self, at: RowNumber, configuration: Configuration) -> Result<&Observed> {
        if self.dialled.insert(configuration) {
            table::publish(&mut self.world, configuration)?;
            self.found.extend(table::observe(&self.world, configuration, &self.variants)?);
        }
        self.found.get(&at).context("the row was not dialled")
    }
}

fn judge(
    run: &mut Run,
    number: usize,
    row_number: usize,
    scenario: &'static Scenario,
    row: &Row,
    comparison: &SharedComparison,
) -> Result<Outcome> {
    let setting = run.world.setting;
    let expected = row.expected(setting.datapath());
    let (variant, found) = run.found((number, row_number), scenario.configuration)?.clone();
    let mut comparison = comparison.lock().unwrap_or_else(PoisonError::into_inner);
    let is_as_expected = expected.is(&found);
    let difference = format!("{}: {row}: {}", scenario.name, expected.difference(&found));
    let name = format!("{}: {row}", scenario.name);
    let not_yet = not_yet::reason(&setting, scenario.name).or_else(|| not_yet::reason(&setting, &name));
    let is_explained =
        !is_as_expected && not_yet.is_none() && comparison.differences.explain(setting, &difference);
    let cell = match (is_as_expected, not_yet, is_explained) {
        (true, ..) => "=".to_owned(),
        (false, Some(_), _) => format!("{found} (not yet)"),
        (false, None, true) => format!("{found} (explained)"),
        (false, None, false) => format!("**{found}**"),
    };
    comparison.cells.insert((number, row_number, setting.to_string()), cell);
    match comparison.judged.iter_mut().find(|(judged, _)| *judged == setting) {
        Some((_, count)) => *count += 1,
        None => comparison.judged.push((setting, 1)),
    }
    if not_yet.is_some() && !is_as_expected {
        comparison.not_yet.extend([scenario.name.to_owned(), name]);
    }
    ensure!(is_as_expected || is_explained || not_yet.is_some(), "{variant}: {difference}");
    Ok(Outcome::Passed)
}

/// Makes the test that fails if an explanation explains nothing.
fn explanations(comparison: &SharedComparison) -> Trial {
    let comparison = Arc::clone(comparison);
    let nothing = Shared::new(|| Ok(Ok(())));
    let name = "what is explained differs, and what cannot be done yet fails";
    let test = Test::new(name, move |(): &mut ()| {
        let comparison = comparison.lock().unwrap_or_else(PoisonError::into_inner);
        let all = rows().count();
        let whole = comparison.judged.iter().filter(|(_, count)| *count >= all);
        let whole: Vec<Setting> = whole.map(|(setting, _)| *setting).collect();
        if whole.is_empty() {
            return Ok(Outcome::Skipped("no proxy met every scenario".to_owned()));
        }
        let stale = comparison.differences.stale(&whole);
        ensure!(stale.is_empty(), "docs/differences.md explains what does not differ: {stale:#?}");
        let is_ebpf = |setting: &&Setting| setting.proxy == ProxyKind::Ebpf;
        if let Some(setting) = whole.iter().find(is_ebpf) {
            for (.., scenario, row) in rows() {
                for name in [scenario.name.to_owned(), format!("{}: {row}", scenario.name)] {
                    if let Some(reason) = not_yet::reason(setting, &name)
                        && !comparison.not_yet.contains(&name)
                    {
                        bail!(
                            "mode ebpf does what the list of what it cannot do yet names: {name}: {reason}"
                        );
                    }
                }
            }
        }
        Ok(Outcome::Passed)
    });
    let mut trials = nothing.trials([test]);
    // The list has exactly one element.
    trials.remove(0)
}

/// Prints the table. `cargo xtask test` shows lines that begin with `| `.
fn print(settings: &[Setting], comparison: &SharedComparison) {
    let comparison = comparison.lock().unwrap_or_else(PoisonError::into_inner);
    let met = |setting: &&Setting| comparison.judged.iter().any(|(judged, _)| judged == *setting);
    let settings: Vec<String> = settings.iter().filter(met).map(Setting::to_string).collect();
    if settings.is_empty() {
        return;
    }
    println!("| scenario | connection | expected | {} |", settings.join(" | "));
    println!("|---|---|---{}|", "|---".repeat(settings.len()));
    for (number, row_number, scenario, row) in rows() {
        let cell = |setting: &String| {
            let found = comparison.cells.get(&(number, row_number, setting.clone()));
            found.map_or("", String::as_str)
        };
        let cells: Vec<&str> = settings.iter().map(cell).collect();
        if cells.iter().any(|cell| !cell.is_empty()) {
            println!("| {} | {row} | {} | {} |", scenario.name, row.expected, cells.join(" | "));
        }
    }
}
