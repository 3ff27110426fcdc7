//! Runs every scenario with each proxy, path, protocol and address family. A test is named
//! `ebpf/sockets: <case> (TCP IPv4)`.

use std::process::ExitCode;

use anyhow::{Result, anyhow, bail};
use behaviour::{
    case::{Case, Difference, Variant},
    cases, not_yet, proxy,
    setting::{PathKind, ProxyKind, Setting},
    table, way_back,
    world::World,
};
use clap::{Parser, ValueEnum as _};
use scenario::{Outcome, Scenario, Shared, Skip, Trial};

// clap names a group of arguments after its struct, and the harness has `Arguments`.
#[derive(Parser)]
struct Selection {
    #[command(flatten)]
    harness: scenario::Arguments,
    /// Run only the core scenarios
    #[arg(long)]
    core: bool,
    /// Proxies to test [default: ebpf]
    #[arg(long, value_enum)]
    proxy: Vec<ProxyKind>,
    /// Paths to test [default: all]
    #[arg(long, value_enum)]
    path: Vec<PathKind>,
    /// Run only TCP over IPv4 and UDP over IPv6
    #[arg(long)]
    lean: bool,
    /// Show the last log lines of the proxies with each failure
    #[arg(long)]
    logs: bool,
}

fn main() -> ExitCode {
    let arguments = Selection::parse();
    if let Err(error) = lab::cluster::remove_on_signals() {
        eprintln!("behaviour: {error:#}");
        return ExitCode::FAILURE;
    }
    let proxies = if arguments.proxy.is_empty() { vec![ProxyKind::Ebpf] } else { arguments.proxy };
    let paths = if arguments.path.is_empty() { PathKind::value_variants().to_vec() } else { arguments.path };
    let cases: Vec<&Case> = cases::all().filter(|case| case.core || !arguments.core).collect();
    let variants = table::variants(arguments.lean);
    let settings = Setting::matching(&proxies, &paths);
    let mut all: Vec<Trial> = Vec::new();
    for setting in settings {
        all.extend(trials(setting, &cases, &variants, arguments.logs));
        if !arguments.core && way_back::concerns(setting) {
            all.extend(way_back_trials(setting));
        }
    }
    scenario::run(arguments.harness, all)
}

fn way_back_trials(setting: Setting) -> Vec<Trial> {
    let lab = Shared::new(move || match proxy::missing_for(ProxyKind::KubeProxyNftables)? {
        Some(reason) => Ok(Err(reason)),
        None => way_back::world(setting).map(Ok),
    });
    lab.trials(way_back::SCENARIOS.map(|(name, run)| Scenario::new(format!("{setting}: {name}"), run)))
}

/// Makes the tests of one setting, which has a lab of its own.
fn trials(setting: Setting, cases: &[&'static Case], chosen: &[Variant], logs: bool) -> Vec<Trial> {
    let lab = Shared::new(move || match proxy::missing_for(setting.proxy)? {
        Some(reason) => Ok(Err(reason)),
        None => World::new(setting).map(Ok),
    });
    let variants = |case: &'static Case| {
        let variants = case.variants.list().into_iter().filter(|variant| chosen.contains(variant));
        variants.map(move |variant| (case, variant))
    };
    let concerning = cases.iter().copied().filter(|case| (case.concerns)(&setting));
    lab.trials(concerning.flat_map(variants).map(|(case, variant)| {
        Scenario::new(format!("{setting}: {} ({variant})", case.name), move |world| {
            judge(case, world, variant).map_err(|error| match logs && !error.is::<Skip>() {
                true => anyhow!("{error:#}\n{}", world.logs()),
                false => error,
            })
        })
    }))
}

/// Runs a case. A known difference must be there: the case fails if it passes in spite of it, or
/// fails with another error.
fn judge(case: &Case, world: &mut World, variant: Variant) -> Result<Outcome> {
    world.configure((case.configuration)())?;
    let not_yet = not_yet::reason(&world.setting, case.name).map(|why| Difference { why, says: &[""] });
    let differs = not_yet.or_else(|| (case.differs)(&world.setting, variant));
    match (differs, (case.run)(world, variant)) {
        (None, result) => result.map(|()| Outcome::Passed),
        (Some(difference), Err(error)) if difference.explains(&error) => Ok(Outcome::Passed),
        (Some(Difference { why, .. }), Err(error)) => {
            Err(error.context(format!("this fails otherwise than the difference that is listed: {why}")))
        }
        (Some(Difference { why, .. }), Ok(())) => {
            bail!("this no longer differs, but is listed as a difference: {why}")
        }
    }
}
