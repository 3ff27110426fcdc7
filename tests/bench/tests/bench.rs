//! Runs the benchmark at its shortest, and checks that every cell has a figure. A machine that is
//! busy with tests cannot check the values.

use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use behaviour::{proxy::missing_for, setting::ProxyKind};
use bench::{
    arguments::Arguments,
    plots, render,
    results::{Outcome, Results},
    run,
};
use clap::Parser as _;
use scenario::{Started, scenarios};
use tempfile::TempDir;

struct World {
    folder: TempDir,
    arguments: Arguments,
    results: Results,
}

fn main() -> ExitCode {
    scenario::main(start, scenarios![every_cell_has_a_figure, results_are_shown_and_drawn])
}

fn start() -> Result<Started<World>> {
    // The benchmark also needs the API server.
    if let Some(reason) = missing_for(ProxyKind::KubeProxyNftables)? {
        return Ok(Err(reason));
    }
    let folder = tempfile::tempdir().context("making a folder")?;
    let words = ["bench", "--lean", "--seconds", "0.3", "--changes", "4", "--services", "20"];
    let arguments = Arguments::try_parse_from(words)?;
    let results = run::run(&arguments, folder.path().to_owned())?;
    Ok(Ok(World { folder, arguments, results }))
}

fn every_cell_has_a_figure(world: &mut World) -> Result<()> {
    let planned: Vec<String> = run::planned(&world.arguments)
        .iter()
        .flat_map(|(_, _, cells)| cells)
        .map(ToString::to_string)
        .collect();
    let read = Results::read(world.folder.path())?;
    let names: Vec<String> = read.cells.iter().map(|cell| cell.name.to_string()).collect();
    ensure!(names == planned, "planned {planned:?}, found {names:?}");
    let without = read.cells.iter().filter(|cell| !matches!(cell.outcome, Outcome::Figures(_)));
    let without: Vec<String> = without.map(|cell| format!("{}: {:?}", cell.name, cell.outcome)).collect();
    ensure!(without.is_empty(), "{}", without.join("\n"));
    Ok(())
}

fn results_are_shown_and_drawn(world: &mut World) -> Result<()> {
    let text = render::text(&world.results);
    for contender in world.arguments.contenders() {
        ensure!(text.contains(contender.name), "{contender} is not shown:\n{text}");
    }
    let drawn = plots::draw(&world.results, world.folder.path())?;
    // The plot of processor time is left out if the machine is busy with other work.
    ensure!(drawn.len() >= 6, "{drawn:?}");
    Ok(())
}
