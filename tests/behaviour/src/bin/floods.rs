//! Floods of forged packets, and flows that end in all ways: what becomes of the entries of the
//! flow maps, of connections that are established, and of Services that are not flooded.

use std::{
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::Result;
use behaviour::{
    flood::{
        Extent, soak,
        table::{self, FLOODS, Found},
    },
    proxy,
    setting::{PathKind, ProxyKind, Setting},
    world::World,
};
use clap::Parser;
use scenario::{Scenario, Shared};

/// Both paths have the same programs for packets from outside; these are attached by TC.
const SETTING: Setting = Setting::new(ProxyKind::Ebpf, PathKind::Sockets);

#[derive(Parser)]
struct CommandLine {
    #[command(flatten)]
    harness: scenario::Arguments,
    /// Run with the default lifetimes until all entries are free again, on a machine that does
    /// nothing else: about 20 minutes for the floods, and 20 for the soak
    #[arg(long)]
    full: bool,
    /// Seconds of each flood [default: 1; with --full 30]
    #[arg(long)]
    seconds: Option<f64>,
    /// Packets a second of each flood [default: 2000; with --full 10000]
    #[arg(long)]
    packets: Option<u32>,
    /// Seconds of the soak [default: 3; with --full 600]
    #[arg(long)]
    soak_seconds: Option<f64>,
    /// Flows a second of the soak [default: 1000; with --full 5000]
    #[arg(long)]
    flows: Option<u32>,
}

impl CommandLine {
    fn floods(&self) -> Extent {
        let (rate, seconds) = if self.full { (10_000, 30.0) } else { (2_000, 1.0) };
        self.extent(self.packets.unwrap_or(rate), self.seconds.unwrap_or(seconds))
    }

    fn soak(&self) -> Extent {
        let (rate, seconds) = if self.full { (5_000, 600.0) } else { (1_000, 3.0) };
        self.extent(self.flows.unwrap_or(rate), self.soak_seconds.unwrap_or(seconds))
    }

    fn extent(&self, rate: u32, seconds: f64) -> Extent {
        Extent { is_full: self.full, rate, duration: Duration::from_secs_f64(seconds) }
    }
}

fn main() -> ExitCode {
    let arguments = CommandLine::parse();
    if let Err(error) = lab::cluster::remove_on_signals() {
        eprintln!("floods: {error:#}");
        return ExitCode::FAILURE;
    }
    let (floods, soak) = (arguments.floods(), arguments.soak());
    let world = Shared::new(move || match proxy::missing_for(SETTING.proxy)? {
        Some(reason) => Ok(Err(reason)),
        None => {
            World::with_services(SETTING, false, |lab, objects| table::publish(lab, objects, floods)).map(Ok)
        }
    });
    let found: Arc<Mutex<Vec<Found>>> = Arc::default();
    let scenarios = FLOODS.iter().map(|flood| {
        let found = Arc::clone(&found);
        Scenario::new(format!("flood: {}", flood.name), move |world: &mut World| -> Result<()> {
            let row = table::run(world, flood, floods)?;
            found.lock().unwrap_or_else(PoisonError::into_inner).push(row);
            Ok(())
        })
    });
    let soak = Scenario::new("soak: the entries are those of living flows", move |world: &mut World| {
        soak::run(world, soak)
    });
    let ended = scenario::run(arguments.harness, world.trials(scenarios.chain([soak])));
    let found = found.lock().unwrap_or_else(PoisonError::into_inner);
    if !found.is_empty() {
        println!("{}", Found::heading());
        found.iter().for_each(|found| println!("{}", found.row()));
    }
    ended
}
