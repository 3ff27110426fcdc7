//! Runs the table and prints one line for each case that fails or is skipped, and one for each setting.

use std::{process::ExitCode, time::Instant};

use anyhow::{Context as _, Result};
use behaviour::{
    case::{Case, Variant},
    cases,
    proxy::Binaries,
    setting::{PathKind, ProxyKind, Setting},
    world::World,
};
use clap::{Parser, ValueEnum as _};

#[derive(Parser)]
#[command(about = "What every mode must do, shown in a lab of network namespaces")]
struct Arguments {
    /// Only cases whose name contains this
    #[arg(long, default_value = "")]
    filter: String,
    /// Only the small set
    #[arg(long)]
    core: bool,
    /// Print the names of the cases and end
    #[arg(long)]
    list: bool,
    /// Proxies to test [default: ebpf]
    #[arg(long, value_enum)]
    proxy: Vec<ProxyKind>,
    /// Paths to test [default: all]
    #[arg(long, value_enum)]
    path: Vec<PathKind>,
    /// Print every case
    #[arg(long, short)]
    verbose: bool,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("behaviour: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<bool> {
    let cases: Vec<&Case> = cases::all()
        .filter(|case| case.name.contains(&arguments.filter) && (case.core || !arguments.core))
        .collect();
    if arguments.list {
        for case in &cases {
            println!("{}", case.name);
        }
        return Ok(true);
    }
    lab::cluster::remove_on_signals()?;
    let binaries = Binaries::find();
    let proxies = if arguments.proxy.is_empty() { vec![ProxyKind::Ebpf] } else { arguments.proxy.clone() };
    let paths =
        if arguments.path.is_empty() { PathKind::value_variants().to_vec() } else { arguments.path.clone() };
    let mut all_passed = true;
    for setting in Setting::matching(&proxies, &paths) {
        let start = Instant::now();
        let mut count = Count::default();
        match binaries.missing_for(setting.proxy) {
            Some(reason) => {
                count.skipped = cases.iter().map(|case| case.variants.list().len()).sum();
                println!("  skipped [{setting}] every case: {reason}");
            }
            None => count = run_setting(setting, &cases, &binaries, arguments.verbose),
        }
        println!(
            "behaviour[{setting}]: {} passed, {} failed, {} skipped ({:.1} s)",
            count.passed,
            count.failed,
            count.skipped,
            start.elapsed().as_secs_f32()
        );
        all_passed &= count.failed == 0;
    }
    Ok(all_passed)
}

#[derive(Default)]
struct Count {
    passed: usize,
    failed: usize,
    skipped: usize,
}

fn run_setting(setting: Setting, cases: &[&Case], binaries: &Binaries, verbose: bool) -> Count {
    let mut count = Count::default();
    let mut world = match World::new(setting, binaries) {
        Ok(world) => world,
        Err(error) => {
            println!("  FAILED  [{setting}] building the lab: {error:#}");
            count.failed = cases.iter().map(|case| case.variants.list().len()).sum();
            return count;
        }
    };
    for case in cases {
        if let Some(reason) = (case.skip)(&setting) {
            count.skipped += case.variants.list().len();
            println!("  skipped [{setting}] {}: {reason}", case.name);
            continue;
        }
        for variant in case.variants.list() {
            let name = format!("[{setting}] {}, {variant}", case.name);
            let start = Instant::now();
            match judge(case, &mut world, variant) {
                Ok(note) => {
                    count.passed += 1;
                    if verbose {
                        println!("  passed  {name}{note} ({:.2} s)", start.elapsed().as_secs_f32());
                    }
                }
                Err(error) => {
                    count.failed += 1;
                    println!("  FAILED  {name}\n          {error:#}");
                    if verbose {
                        println!("{}", world.logs());
                    }
                }
            }
        }
    }
    count
}

/// A known difference must be there: a case that passes in spite of it is a failure.
fn judge(case: &Case, world: &mut World, variant: Variant) -> Result<String> {
    let difference = (case.differs)(&world.setting, variant);
    let result = (case.run)(world, variant);
    match (difference, result) {
        (None, result) => result.map(|()| String::new()),
        (Some(reason), Err(_)) => Ok(format!(", differs as known: {reason}")),
        (Some(reason), Ok(())) => {
            Err(anyhow::anyhow!("no longer differs")).with_context(|| format!("known difference: {reason}"))
        }
    }
}
