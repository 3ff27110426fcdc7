//! The program behind `cargo xtask bench`.

use std::{fs, path::Path, process::ExitCode};

use anyhow::{Context as _, Result};
use bench::{arguments::Arguments, plots, render, results::Results, run};
use clap::Parser as _;

fn main() -> ExitCode {
    match main_of(&Arguments::parse()) {
        Ok(status) => status,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn main_of(arguments: &Arguments) -> Result<ExitCode> {
    if arguments.list {
        let planned = run::planned(arguments);
        planned.iter().flat_map(|(_, _, cells)| cells).for_each(|cell| println!("{cell}"));
        return Ok(ExitCode::SUCCESS);
    }
    let default = if arguments.lean { "target/benchmarks" } else { "docs/benchmarks" };
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let output = arguments.output.clone().unwrap_or_else(|| workspace.join(default));
    let results = if arguments.render {
        Results::read(&output)?
    } else {
        lab::cluster::remove_on_signals()?;
        run::run(arguments, output.clone())?
    };
    let tables = render::text(&results);
    print!("{tables}");
    let file = output.join(render::FILE);
    fs::write(&file, tables).with_context(|| format!("writing {}", file.display()))?;
    for plot in plots::draw(&results, &output)? {
        eprintln!("drawn: {}", plot.display());
    }
    let failed = results.failures().count();
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
