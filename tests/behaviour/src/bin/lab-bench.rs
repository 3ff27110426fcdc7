//! New connections through a service compared with direct ones, or those that `proxy-ctl monitor` watches with those that it does
//! not, in the same run.

use std::{
    net::SocketAddr,
    process::{ExitCode, Stdio},
};

use anyhow::{Result, ensure};
use behaviour::{
    setting::{PathKind, ProxyKind, Setting},
    watch::Monitor,
    world::World,
};
use clap::Parser;
use lab::{
    Lab, Objects, Protocol,
    address::{Addresses, Family, NodeNumber, cluster_ip},
    agent::protocol::{Bench, Rate},
    cluster::BYTE_PORT,
    objects::{Endpoint, Service},
};

#[derive(Parser)]
#[command(
    about = "Connections through a service compared with direct ones, or while `proxy-ctl monitor` runs with while it does not"
)]
struct Arguments {
    /// Rounds, alternating between what is compared
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Services in the second half of the table
    #[arg(long, default_value_t = 10_000)]
    services: u16,
    /// Only this path
    #[arg(long, value_enum)]
    path: Option<PathKind>,
    /// Connections at once
    #[arg(long, default_value_t = 4)]
    clients: u32,
    /// Compare the service while `proxy-ctl monitor --sample N` runs with the same service while it does not
    #[arg(long, value_name = "N")]
    monitor: Option<u32>,
}

/// What connections are made to.
#[derive(Clone, Copy)]
enum Contender {
    Direct,
    Service,
    /// The service, while `proxy-ctl monitor` shows one of so many events.
    Monitored(u32),
}

impl Contender {
    const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Service => "service",
            Self::Monitored(_) => "monitored",
        }
    }
}

impl Arguments {
    /// The baseline, and what is compared with it.
    fn contenders(&self) -> [Contender; 2] {
        match self.monitor {
            None => [Contender::Direct, Contender::Service],
            Some(sample) => [Contender::Service, Contender::Monitored(sample)],
        }
    }
}

const CLIENT: &str = "client-1";
/// The client's and the server's.
const NODE: NodeNumber = 1;
const SERVER: &str = "web-1";
const PORT: u16 = 80;
/// Of the service that is measured; the others follow it.
const INDEX: u16 = 300;

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    lab::cluster::remove_on_signals()?;
    let [baseline, compared] = arguments.contenders().map(Contender::name);
    println!(
        "connect, one byte there and back, close; {} at once; medians of {} rounds of {} s, {baseline} and",
        arguments.clients, arguments.rounds, arguments.seconds
    );
    println!("{compared} in turn; ratio: {compared} / {baseline}, median of the rounds' own ratios\n");
    println!(
        "{:<9} {:<9} {:>9} | {:>10} {:>11} {:>6} | {:>10} {:>12}",
        "path",
        "protocol",
        "services",
        format!("{baseline}/s"),
        format!("{compared}/s"),
        "ratio",
        format!("{baseline} us"),
        format!("{compared} us")
    );
    for path in [PathKind::Sockets, PathKind::Packets] {
        if arguments.path.is_some_and(|only| only != path) {
            continue;
        }
        for services in [1, arguments.services] {
            let setting = Setting::new(ProxyKind::Ebpf, path);
            let world = World::with_services(setting, false, |lab, objects| publish(lab, objects, services))?;
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                measure(arguments, &world, protocol, services)?;
            }
        }
    }
    Ok(())
}

fn publish(lab: &Lab, objects: &mut Objects, services: u16) -> Result<()> {
    let server = lab.netns(SERVER)?.addresses;
    let service = Service::new("measured", cluster_ip(INDEX), PORT, BYTE_PORT, None);
    objects.set_service(&service, &[Endpoint::ready(server, 1)]);
    for other in 1..services {
        let [high, low] = other.to_be_bytes();
        let nobody = Addresses {
            v4: [10, 245, high, low].into(),
            v6: [0xfd00, 0x10, 0x245, 0, 0, 0, 0, other].into(),
        };
        let service =
            Service::new(&format!("other-{other}"), cluster_ip(INDEX + other), PORT, BYTE_PORT, None);
        objects.set_service(&service, &[Endpoint::ready(nobody, 2)]);
    }
    Ok(())
}

fn measure(arguments: &Arguments, world: &World, protocol: Protocol, services: u16) -> Result<()> {
    let server = world.addresses(SERVER)?.of(Family::V4);
    let direct = SocketAddr::new(server, BYTE_PORT);
    let service = SocketAddr::new(cluster_ip(INDEX).of(Family::V4), PORT);
    let bench = |contender: Contender| -> Result<Rate> {
        let target = if let Contender::Direct = contender { direct } else { service };
        let bench = Bench { target, protocol, clients: arguments.clients, seconds: arguments.seconds };
        let monitor = match contender {
            Contender::Monitored(sample) => {
                let sample = sample.to_string();
                Some(Monitor::begin(world, NODE, &["--sample", &sample], Stdio::null())?)
            }
            Contender::Direct | Contender::Service => None,
        };
        let rate = world.agent(CLIENT)?.bench(&bench)?;
        if let Some(complaints) = monitor.map(Monitor::end).transpose()? {
            print!("{complaints}");
        }
        ensure!(
            rate.failed == 0,
            "{} requests to {target} failed\n{}",
            rate.failed,
            world.tool(NODE, &["status"])?
        );
        Ok(rate)
    };
    let [baseline, compared] = arguments.contenders();
    // What is only slow the first time is not measured.
    for contender in [baseline, compared] {
        bench(contender)?;
    }
    let (mut baselines, mut others) = (Vec::new(), Vec::new());
    for round in 0..arguments.rounds {
        // Whoever comes first in a round changes, so that a drift of the machine hits both.
        if round % 2 == 0 {
            baselines.push(bench(baseline)?);
            others.push(bench(compared)?);
        } else {
            others.push(bench(compared)?);
            baselines.push(bench(baseline)?);
        }
    }
    let ratios =
        baselines.iter().zip(&others).map(|(baseline, other)| other.per_second / baseline.per_second);
    let path = world.setting.path.to_string();
    println!(
        "{path:<9} {protocol:<9} {services:>9} | {:>10.0} {:>11.0} {:>6.3} | {:>10.0} {:>12.0}",
        median(baselines.iter().map(|rate| rate.per_second)),
        median(others.iter().map(|rate| rate.per_second)),
        median(ratios),
        median(baselines.iter().map(|rate| rate.p50_micros)),
        median(others.iter().map(|rate| rate.p50_micros)),
    );
    Ok(())
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
